"""A chat with images on a small random vision model of mlx-vlm."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from random_model import write_model

pytest.importorskip("mlx_vlm")

import mlx.core as mx  # noqa: E402
from vision_models import WORDS, data_url, picture, write_vision_model  # noqa: E402

from mlxkv.chat.pictures import PictureSession  # noqa: E402
from mlxkv.errors import UserError  # noqa: E402
from mlxkv.models import load  # noqa: E402
from mlxkv.models.generate import new_cache, stream  # noqa: E402
from mlxkv.models.vision.images import MOST_IMAGES  # noqa: E402

PLACE = 260  # the token that stands for a part of an image
# transformers checks numbers of the config that are not in ours.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def plain(folder):
    return load(str(folder), "fp16", host="mlx-vlm")


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder), "int4", host="mlx-vlm")


def ask(session: PictureSession, prompt: str, **kwargs) -> str:
    return "".join(session.ask(prompt, **kwargs))


def shown(loaded, *turns: tuple[str, int], count: int = 12) -> PictureSession:
    """A session after turns of (text, images)."""
    session, seed = PictureSession(loaded, max_tokens=count), 0
    for text, images in turns:
        for _ in range(images):
            session.show(data_url(picture(seed=seed)))
            seed += 1
        ask(session, text)
    return session


def test_the_reply_is_that_of_mlx_vlm(loaded):
    """By its own loop over its own caches, with the same prompt."""
    from mlx_vlm.generate.ar import generate_step

    from mlxkv.models.vision.images import decode

    session = shown(loaded, ("what is this?", 1))
    written = session.tokens[-session.stats.generated_tokens :]
    message = loaded.vision.message("user", "what is this?", 1)
    text = loaded.tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )
    tokens, inputs = loaded.vision.tokens(text, [decode(picture(), "")])
    assert session.tokens[: len(tokens)] == tokens and tokens.count(PLACE) == 4
    inner, pixels = loaded.model.inner, inputs.pop("pixel_values")
    ids = mx.array([tokens])
    steps = generate_step(
        ids, inner, pixels, mx.ones_like(ids), max_tokens=12, temperature=0, **inputs
    )
    assert [token for token, _ in steps][: len(written)] == written


def test_text_equals_full_precision_while_nothing_is_sealed(plain, loaded):
    turns = [("what is this?", 1), ("and now?", 0), ("these two?", 2)]
    one, other = (shown(each, *turns) for each in (plain, loaded))
    assert one.tokens == other.tokens and one.messages[1::2] == other.messages[1::2]
    assert other.tokens.count(PLACE) == 12


def test_the_image_matters(loaded):
    replies = set()
    for seed in range(4):
        session = PictureSession(loaded, max_tokens=12)
        session.show(data_url(picture(seed=seed)))
        replies.add(ask(session, "what is this?"))
    assert len(replies) > 1


def test_a_text_goes_on_from_the_cache(loaded):
    session = shown(loaded, ("what is this?", 1))
    held = len(session.tokens)
    ask(session, "and now?")
    assert session.stats.read_tokens < held < len(session.tokens)
    reply = session.tokens[-session.stats.generated_tokens :]
    prompt = session.tokens[: -len(reply)]
    text = session._pieces([session.messages[0]])
    _, inputs = loaded.vision.tokens("".join(text), session._images(session.messages))
    embeddings = loaded.model.embed(prompt, inputs)  # all of it read at once, with its image
    assert loaded.model.reading.shift.item() == -2  # four places of an image of 2 x 2
    pieces = stream(loaded, prompt, new_cache(loaded), max_tokens=12, embeddings=embeddings)
    assert [piece.token for piece in pieces][: len(reply)] == reply


def test_a_conversation_without_images_is_as_ever(loaded, folder):
    """The same text as by mlx-lm's code of a text model: positions of an earlier image have no effect."""
    expected = shown(loaded, ("hello", 0), ("and now?", 0)).tokens
    shown(loaded, ("what is this?", 1))
    assert shown(loaded, ("hello", 0), ("and now?", 0)).tokens == expected


def test_a_failure_keeps_the_images(loaded):
    session = PictureSession(loaded, max_tokens=4)
    session.show(data_url(picture()))
    with pytest.raises(UserError, match="empty prompt"):
        ask(session, " ")
    with pytest.raises(UserError, match="special tokens"):
        ask(session, f"look {WORDS[2]}")
    assert len(session.pending) == 1
    ask(session, "look")
    assert session.pending == [] and len(session.messages[0]["images"]) == 1
    session.show(data_url(picture()))
    session.reset()
    assert session.pending == [] and session.messages == []


def test_limits(loaded, tmp_path):
    session = PictureSession(loaded, max_tokens=4)
    for _ in range(MOST_IMAGES):
        session.show(data_url(picture()))
    with pytest.raises(UserError, match=f"takes {MOST_IMAGES} images"):
        session.show(data_url(picture()))
    ask(session, "look")
    with pytest.raises(UserError, match="cannot be saved"):
        session.save(str(tmp_path / "a"))


def test_the_command(folder, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    command = [sys.executable, "-m", "mlxkv", "chat", "--model", str(folder), "--json", "-q"]
    command += ["--image", str(tmp_path / "a.png"), "--max-tokens", "8", "what is this?"]
    done = subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["generated_tokens"] == 8 and data["prompt_tokens"] > 20
    assert data["layers"][0]["compressed"]


def test_a_model_that_mlx_vlm_cannot_load(tmp_path):
    folder = write_model(tmp_path / "odd", model_type="llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2_vl"}))
    with pytest.raises(UserError, match="mlx-vlm cannot load this model"):
        load(str(folder), "int4", host="mlx-vlm")
    with pytest.raises(UserError, match="no such host.*choose from mlx-lm, mlx-vlm"):
        load(str(folder), "int4", host="mlx")
