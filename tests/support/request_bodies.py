"""JSON bodies of requests that may be anything, and a check of them without a server."""

from dataclasses import asdict

from hypothesis import strategies as st

from mlxkv.serve.http import request

VOCABULARY = 260
MODEL_INFO = request.ModelInfo("m", "int4", longest=100, max_tokens=512, vocabulary=VOCABULARY)
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
FIELDS = (
    *request.NUMBERS,
    *request.ONLY,
    *("model", "stream", "stream_options", "stop", "logprobs", "top_logprobs", "logit_bias"),
    *("prompt", "messages", "tools", "chat_template_kwargs", "user", "response_format"),
)
GOOD = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3).flatmap(
    lambda some: st.sampled_from([some, GOOD | some, some | GOOD])
)


def check(body: dict, chat: bool) -> dict:
    """The fields of the request in a body. Raises Refused."""
    return asdict(request.check_request(body, chat, MODEL_INFO))
