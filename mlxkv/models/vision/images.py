"""Read images that somebody names or sends: files and data URLs, within limits. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from mlxkv.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 20 << 20  # of one file
MOST_PIXELS = 40_000_000  # of one image, before it is decoded
MOST_SIDE = 20_000
MOST_IMAGES = 8  # in one conversation
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
DATA = re.compile(r"data:image/([a-z0-9.+-]+);base64,", re.IGNORECASE)


def read_source(source: str, where: str) -> Image:
    """The image of a path or of a data URL. where: the option or field that named it, for messages."""
    if source[:5].lower() == "data:":
        return read_url(source, where)
    if re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE):
        raise fetched(source, where)
    path = Path(source).expanduser()
    try:
        if not path.is_file():
            raise UserError(
                f"[{where}] no such image file; got {source[:200]!r}; name a file that is there"
            )
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"[{where}] the image cannot be read ({error.strerror}); got {source[:200]!r}; name another file"
        ) from None
    return decode(data, where)


def read_url(url: str, where: str) -> Image:
    """The image of a data URL."""
    found = DATA.match(url)
    if found is None:
        if url[:5].lower() != "data:":
            raise fetched(url, where)
        raise UserError(
            f"[{where}] no data URL of an image; got {url[:40]!r}; write data:image/png;base64,..."
        )
    text = url[found.end() :]
    if len(text) > (MOST_BYTES * 4) // 3 + 8:
        raise _large(where)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UserError(
            f"[{where}] the data URL holds no base64; got {text[:40]!r}; encode the file again"
        ) from None
    return decode(data, where)


def fetched(url: str, where: str) -> UserError:
    """The refusal of an image that would have to be fetched."""
    return UserError(
        f"[{where}] images are not fetched; got {url[:80]!r}; send the image itself, as "
        "data:image/png;base64,..."
    )


def decode(data: bytes, where: str) -> Image:
    """An RGB image of the bytes of a file, turned as its camera says. Raises UserError."""
    from PIL import Image, ImageOps

    if len(data) > MOST_BYTES:
        raise _large(where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own limit is larger than ours
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS or max(image.size) > MOST_SIDE:
                raise UserError(
                    f"[{where}] the image is too large; got {image.width} x {image.height}; at most "
                    f"{MOST_PIXELS:,} pixels and {MOST_SIDE:,} a side"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except UserError:
        raise
    except Exception as error:  # Pillow raises anything for files that are wrong
        raise UserError(
            f"[{where}] no image that can be read ({type(error).__name__}); got {len(data):,} bytes; choose a "
            f"file in one of {', '.join(FORMATS)}"
        ) from None


def _large(where: str) -> UserError:
    return UserError(
        f"[{where}] the image file is too large; got more than {MOST_BYTES >> 20} MB; make it smaller"
    )
