"""JSON bodies of requests that may be anything, and a check of them without a server."""

from dataclasses import asdict

from hypothesis import strategies as st

from mlxkv.serve.apis import openai
from mlxkv.serve.request import ModelInfo, Request

VOCABULARY = 260
MODEL_INFO = ModelInfo("m", "int4", longest=100, max_tokens=512, vocabulary=VOCABULARY)
KEYS = (
    *("role", "content", "type", "text", "function", "name", "arguments", "tool_calls"),
    *("include_usage", "tool_call_id", "chat_template"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["user", "text", "function", "{}", "1", "m"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = sorted({*openai.Chat.model_fields, *openai.TextCompletion.model_fields})
GOOD = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).flatmap(
    lambda some: st.sampled_from([some, GOOD | some, some | GOOD])
)


def read(body: dict, chat: bool) -> Request:
    return (openai.read_chat if chat else openai.read_text)(body, MODEL_INFO)


def check(body: dict, chat: bool) -> dict:
    """The fields of the request in a body. Raises Refused."""
    return asdict(read(body, chat))
