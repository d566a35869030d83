"""Images that somebody names or sends: files and data URLs, within limits; nothing is fetched."""

from __future__ import annotations

import struct
import zlib

import pytest
from vision_models import data_url, picture

from mlxkv.errors import UserError
from mlxkv.models.vision import images
from mlxkv.models.vision.images import decode, read_source, read_url


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif", "bmp"])
def test_a_file_and_a_data_url(tmp_path, kind):
    data = picture(30, 20, kind=kind.upper())
    path = tmp_path / f"a picture.{kind}"
    path.write_bytes(data)
    for source in (str(path), data_url(data, kind), data_url(data, kind).replace("data:", "DATA:")):
        image = read_source(source, "--image")
        assert image.size == (30, 20) and image.mode == "RGB"


def test_a_camera_held_upright(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert read_source(str(tmp_path / "a.jpg"), "--image").size == (20, 30)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "https://x/a", "file:///etc/passwd", "FTP://x"]
)
def test_nothing_is_fetched(url):
    with pytest.raises(
        UserError, match=r"^\[--image\] images are not fetched; got '.*data:image/png"
    ):
        read_source(url, "--image")
    with pytest.raises(UserError, match="images are not fetched"):
        read_url(url, "image_url")


def header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IEND"
    chunks = [
        struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one))
        for one in (body, end)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("size", [(8000, 8000), (30_000, 2), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(
        UserError, match=r"too large; got \d+ x \d+; at most|no image that can be read"
    ):
        decode(header(*size), "image_url")


def test_large_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MOST_BYTES", 1000)
    data = picture(100, 100)
    (tmp_path / "a.png").write_bytes(data)
    for source in (str(tmp_path / "a.png"), data_url(data)):
        with pytest.raises(UserError, match="the image file is too large"):
            read_source(source, "--image")


@pytest.mark.parametrize(
    "source, said",
    [
        ("data:text/html;base64,AAAA", "no data URL of an image"),
        ("data:image/png,AAAA", "no data URL of an image"),
        ("data:image/png;base64,@@@", "holds no base64"),
        ("data:image/png;base64,AAAA", "no image that can be read"),
        ("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "no image that can be read"),
        ("/no/such/file.png", "no such image file"),
        ("/", "no such image file"),
    ],
)
def test_one_line_for_what_is_wrong(source, said):
    with pytest.raises(UserError, match=said) as error:
        read_source(source, "--image")
    assert "\n" not in str(error.value) and str(error.value).startswith("[--image] ")


def test_a_file_that_was_cut_off():
    with pytest.raises(UserError, match="no image that can be read"):
        decode(picture(100, 100)[:500], "image_url")
