"""A server for a vision model of mlx-vlm: images in messages, as data URLs within limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from small_models import TINY

pytest.importorskip("mlx_vlm")

from serving import get, post, refused, serving  # noqa: E402
from vision_models import WORDS, data_url, picture, write_vision_model  # noqa: E402

from mlxkv.chat.pictures import PictureSession  # noqa: E402
from mlxkv.models import load  # noqa: E402
from mlxkv.models.vision import images  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, vision=True) as server:
        yield server


def part(seed: int = 0, **size) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed=seed, **size))}}


def asked(text: str, *parts: dict, **more) -> dict:
    content = [{"type": "text", "text": text}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 10, **more}


def reply(server, **body) -> str:
    return post(server, CHAT, **body)["choices"][0]["message"]["content"]


def test_the_reply_is_that_of_chat(server, folder):
    loaded = load(str(folder), "int4", host="mlx-vlm")
    for seeds in ((0,), (1, 2)):
        session = PictureSession(loaded, max_tokens=10)
        for seed in seeds:
            session.show(data_url(picture(seed=seed)))
        expected = "".join(session.ask("what is this?"))
        body = asked("what is this?", *map(part, seeds))
        assert reply(server, **body).strip() == expected.strip()


def test_no_cache_of_another_image_is_used(server):
    """Their tokens are the same."""
    one, other = (reply(server, **asked("what is this?", part(seed))) for seed in (0, 5))
    assert reply(server, **asked("what is this?", part(0))) == one
    assert reply(server, **asked("what is this?", part(5))) == other
    found = post(server, CHAT, **asked("what is this?", part(5)))
    assert found["kv"]["cached_tokens"] == 0 and found["kv"]["tokens"] > 20


def test_texts_beside_images_get_what_they_get_alone(server):
    texts = [f"tell me of {n} things" * (1 + n) for n in range(4)]
    alone = [reply(server, **asked(text)) for text in texts]
    shown = reply(server, **asked("what is this?", part(3)))
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(reply, server, **asked(text)) for text in texts]
        picture_wait = pool.submit(reply, server, **asked("what is this?", part(3)))
        assert [one.result() for one in waits] == alone
        assert picture_wait.result() == shown


def test_an_earlier_image_goes_on(server):
    first = asked("what is this?", part(0))
    said = reply(server, **first)
    messages = [*first["messages"], {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": "and now?"})
    assert isinstance(reply(server, messages=messages, max_tokens=5), str)


@pytest.mark.parametrize(
    "parts, said",
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}], "not fetched"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "not fetched"),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "no image that",
        ),
        ([{"type": "image_url", "image_url": {}}], "an image has a url"),
        ([{"type": "image_url"}], "an image has a url"),
        ([{"type": "input_audio", "input_audio": {}}], "only parts of type text"),
        ([part(n, width=4, height=4) for n in range(images.MOST_IMAGES + 1)], "takes 8 images"),
        ([{"type": "text", "text": WORDS[2]}, part()], "special tokens"),
    ],
)
def test_one_line_for_what_is_refused(server, parts, said):
    error = refused(server, 400, CHAT, **asked("look", *parts))
    assert said in error["message"] and "\n" not in error["message"]
    assert get(server, "/health")["status"] == "ok"


def test_pixels_of_a_request_are_limited(server, monkeypatch):
    monkeypatch.setattr("mlxkv.serve.http.pictures.MOST_PIXELS", 5000)
    error = refused(server, 400, CHAT, **asked("look", part(0), part(1)))
    assert "at most 5,000 pixels; got 6272" in error["message"]
    assert reply(server, **asked("look", part(0)))


def test_who_may_hold_images(server):
    body = asked("look", part())
    body["messages"][0]["role"] = "system"
    assert "only messages of the user" in refused(server, 400, CHAT, **body)["message"]
    body = asked("look")
    body["messages"][0]["images"] = 3  # of a client that means something else
    assert isinstance(reply(server, **body), str)
    body = asked("look", part(), continue_final_message=True)
    body["messages"].append({"role": "assistant", "content": "It is"})
    assert "no images" in refused(server, 400, CHAT, **body)["message"]


def test_a_server_of_text_takes_none(tiny_server):
    error = refused(tiny_server, 400, CHAT, **asked("look", part()))
    assert "only parts of type text are taken" in error["message"]


@pytest.fixture(scope="module")
def tiny_server():
    with serving(TINY) as server:
        yield server
