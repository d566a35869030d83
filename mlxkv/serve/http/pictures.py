"""Images in the messages of a request: data URLs, within limits. Nothing is fetched."""

from __future__ import annotations

from typing import Any

from mlxkv.errors import UserError
from mlxkv.models.vision.images import MOST_IMAGES, MOST_PIXELS, read_url
from mlxkv.serve.refusals import Refused

KIND = "image_url"


def taken_out(body: dict) -> tuple[dict, list, list[int]]:
    """The body of a chat without its images; these, decoded, in their order; and how many each message had.
    Raises Refused for an image that is refused."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body, [], []
    images: list = []
    out, counts = [], []
    for i, message in enumerate(messages):
        before = len(images)
        out.append(_without(f"messages.{i}", message, images))
        counts.append(len(images) - before)
    return body | {"messages": out}, images, counts


def _without(where: str, message: Any, images: list) -> Any:
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    rest = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != KIND:
            rest.append(part)
        elif message.get("role") != "user":
            raise _bad(f"{where}.content", "only messages of the user hold images", "role")
        else:
            images.append(_image(f"{where}.content", part, images))
    return message | {"content": rest}


def _image(where: str, part: dict, before: list):
    if len(before) >= MOST_IMAGES:
        raise _bad(where, f"a request takes {MOST_IMAGES} images", "one more")
    url = part.get(KIND)
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise _bad(where, "an image has a url", type(url).__name__)
    try:
        image = read_url(url, where)
    except UserError as error:
        raise Refused(400, str(error), "invalid_value") from None
    pixels = sum(one.width * one.height for one in (*before, image))
    if pixels > MOST_PIXELS:
        raise _bad(where, f"the images of a request have at most {MOST_PIXELS:,} pixels", pixels)
    return image


def _bad(where: str, what: str, got: object) -> Refused:
    return Refused(400, f"[{where}] {what}; got {got}", "invalid_value")
