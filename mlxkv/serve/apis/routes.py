"""Which API a path belongs to, and how it says that something went wrong."""

from __future__ import annotations

from collections.abc import Callable

from mlxkv.serve.apis import anthropic, responses
from mlxkv.serve.apis.anthropic_reply import error_body as anthropic_error
from mlxkv.serve.apis.speaker import Speaker
from mlxkv.serve.http.request import Served
from mlxkv.serve.refusals import Refused

REPLIES: dict[str, Callable[[bytes, Served], Speaker]] = {
    "/v1/messages": anthropic.read,
    "/v1/responses": responses.read,
    "/responses": responses.read,
}
COUNT = "/v1/messages/count_tokens"
POSTS = (*REPLIES, COUNT)


def error_body(path: str, refused: Refused, anthropics: bool = False) -> dict:
    """The document of an error, as clients of this path read it. anthropics: they are Anthropic's."""
    if path.startswith("/v1/messages") or anthropics:
        return anthropic_error(refused)
    return refused.body()
