"""The trained model of tests/data in transformers and in MLX: the same codes, the same text, the same files."""

import shutil
import sys
from importlib.metadata import version
from types import SimpleNamespace

import crafted_files
import mlx.core as mx
import numpy as np
import pytest
import torch
from small_models import SOURCE, TINY

import mlxkv
from cuda_track import generate as generation
from cuda_track.calibrate import calibrate
from cuda_track.generate import generate
from cuda_track.models import attach_model, prompt_cache
from cuda_track.models.layers import CompressedLayer
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import Share, cache_of, handed, share_of
from mlxkv import console
from mlxkv.catalog.reports import summarise
from mlxkv.chat.session import Session
from mlxkv.corpora import corpus
from mlxkv.errors import UserError
from mlxkv.formats.session import PackedFile
from mlxkv.generate import generation as mlx_generate
from mlxkv.generate import prompt_cache as mlx_prompt_cache

torch.set_num_threads(1)  # small products: threads of a busy machine only wait for each other


@pytest.fixture(scope="module")
def tokens():
    text = "\n\n".join(corpus.interleaved("evaluation"))
    made = load(TINY).tokenizer(text)["input_ids"]
    return made[:450]


@pytest.fixture(scope="module")
def pair():
    """The same model with the same preset on both sides, in float32."""
    kv = "balanced-int3"
    return load(TINY, kv, "float32"), mlxkv.load(TINY, kv, dtype="float32")


@pytest.mark.skipif(version("mlx-lm") < "0.32", reason="the files of mlx-lm 0.32")
def test_files_that_somebody_changed_are_refused_in_one_line(pair, tokens, tmp_path):
    """Of this track and of the other."""
    ours, theirs = pair
    path, bad = tmp_path / "torch.safetensors", tmp_path / "bad.safetensors"
    cache, other = attach_model.new_cache(ours.model), mlx_generate.new_cache(theirs)
    with torch.no_grad():
        ours.model(torch.tensor([tokens]), **handed(cache))
    prompt_cache.save(path, prompt_cache.Saved(cache, tokens), ours)
    assert path.stat().st_mode & 0o777 == 0o600
    mx.eval(theirs.model(mx.array([tokens]), cache=other))
    saved = mlx_prompt_cache.Saved(other, tokens, [], "")
    for file in (path, mlx_prompt_cache.save(str(tmp_path / "mlx"), saved, theirs)):
        for name, data in crafted_files.cases(file.read_bytes(), every=32):
            bad.write_bytes(data)
            with pytest.raises(UserError) as caught:
                prompt_cache.load(bad, ours)
                pytest.fail(f"{name} was used")
            said = str(caught.value)
            assert str(bad) in said and said.isprintable(), (name, said)


@pytest.mark.skipif(version("mlx-lm") < "0.32", reason="the files of mlx-lm 0.32")
def test_a_pack_is_read_on_the_other_side(pair, tmp_path):
    """What MLX read once goes on in transformers as in MLX."""
    ours, theirs = pair
    text = "\n\n".join(corpus.interleaved("evaluation"))
    chat, path = Session(theirs, text[:1500], raw=True), tmp_path / "facts.kvpack"
    assert chat.read()
    chat.pack(path, [PackedFile("facts.md", "0" * 64, 1500)], "tiny")
    saved = prompt_cache.load(path, ours)
    assert saved.tokens == chat.tokens and saved.messages == chat.messages
    assert saved.files == [PackedFile("facts.md", "0" * 64, 1500)] and saved.asked == "tiny"
    rest = ours.tokenizer(text[1500:1600], add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        found = ours.model(torch.tensor([rest]), **handed(saved.cache)).logits.numpy()
    right = np.array(theirs.model(mx.array([rest]), cache=chat.cache))
    assert np.sqrt(((found - right) ** 2).mean() / (right**2).mean()) < 1e-2


def test_left_padded_batches_say_what_single_prompts_say(pair, tokens):
    ours, _ = pair
    prompts = [tokens[:230], tokens[100:310]]
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    out = ours.model.generate(ids, attention_mask=mask, **options)[:, most:].tolist()
    # Pages begin elsewhere in a padded row, so compressed text may differ; the unpadded row may not.
    single = ours.model.generate(ids[:1], attention_mask=mask[:1], **options)[0, most:].tolist()
    assert out[0] == single
    attach_model.detach(ours.model)
    plain = ours.model.generate(ids, attention_mask=mask, **options)[:, most:].tolist()
    attach_model.attach(ours.model, ours.kv_name)
    agree = np.mean([np.mean(np.array(a) == b) for a, b in zip(out, plain, strict=True)])
    assert agree > 0.5


def test_generate_makes_its_own_cache_and_detach_undoes(tokens):
    made = load(TINY, "int4", "float32")
    before = made.model.config._attn_implementation
    ids = torch.tensor([tokens[:300]])
    out = made.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, return_dict_in_generate=True
    )
    kinds = [type(layer) is CompressedLayer for layer in cache_of(out).layers]
    assert kinds == [False, True] * 4
    assert cache_of(out).layers[1].cache.state["pages"]
    assert generate(made, tokens[:300], 2).tokens == out.sequences[0, 300:].tolist()
    lines = summarise(made.layers)
    assert lines[0] == "layers 0, 2, 4, 6 (sliding window 512): full precision, small by nature"
    assert lines[1].endswith("int4, 4.5 bits per value, torch ops (no Triton kernels on cpu)")
    with pytest.raises(UserError, match="paged cache of its own"):
        made.model.generate_batch([tokens[:8]], max_new_tokens=1)
    attach_model.detach(made.model)
    assert made.model.config._attn_implementation != before
    assert not {"generate", "init_continuous_batching"} & set(vars(made.model))


def test_a_preset_without_its_calibration_is_refused(tokens):
    made = load(TINY, "fp16", "float32")
    made.model._mlxkv_fingerprint = "0" * 16
    made.model.config._name_or_path = ""
    with pytest.raises(UserError, match="needs a calibration"):
        attach_model.attach(made.model, "oscar-int2")


def test_a_model_in_several_processes_is_told_what_it_cannot(tmp_path):
    made = load(TINY, "fp16", "float32")
    made.model._tp_size = 2
    made.model._device_mesh = SimpleNamespace(ndim=1, get_local_rank=lambda: 1)
    assert share_of(made.model) == Share(1, 2)
    with pytest.raises(UserError, match="1 kv heads cannot be shared by 2"):
        attach_model.attach(made.model, "int4")
    for call in (lambda: prompt_cache.load(tmp_path, made), lambda: calibrate(made, range(600))):
        with pytest.raises(UserError, match="in one process only; got a model spread over 2"):
            call()


def test_mistakes_are_one_line(subtests, monkeypatch, capsys):
    for options, text in [
        (["--kv", "int5", "--prompt", "a"], "unknown preset"),
        (["--model", "no-such-model", "--prompt", "a"], "no such model"),
        (["--model", "qwen3-4b", "--prompt", "a"], "a name for MLX weights"),
        (["--dtype", "int4", "--prompt", "a"], "unknown dtype"),
        (["--prompt", "a"], "[--model] is needed"),
    ]:
        with subtests.test(options=options, text=text):
            monkeypatch.setattr(sys, "argv", ["generate", *options])
            with pytest.raises(SystemExit) as found:
                console.run_tool(generation.main)
            assert found.value.code == 2
            line = capsys.readouterr().err.strip()
            assert text in line and "\n" not in line


def test_a_model_is_loaded_as_asked(tmp_path):
    """In the dtype that was named, with its fingerprint; templates of others run with bounds."""
    made = load(TINY, "int4", "bfloat16", "cpu")
    assert made.model.dtype == torch.bfloat16 and load(TINY).model.dtype == torch.float32
    assert made.fingerprint == mlxkv.load(TINY).fingerprint and made.kv_name == "int4"
    assert not made.model.training and any(r.compressed for r in made.layers)
    folder = shutil.copytree(TINY, tmp_path / "endless")
    long = "{% for i in range(60000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(long)
    with pytest.raises(UserError, match="chat template"):
        load(str(folder))


def test_a_sampled_reply_is_sampled(tokens, monkeypatch):
    made, asked = load(TINY, "int4", "float32"), {}
    own = made.model.generate
    monkeypatch.setitem(
        vars(made.model), "generate", lambda *a, **k: [asked.update(k), own(*a, **k)][1]
    )
    reply = generate(made, tokens[:30], 3, temp=0.7)
    assert asked["do_sample"] and asked["temperature"] == 0.7
    assert len(reply.tokens) == 3 and reply.prompt_tokens == 30 and reply.cache_bytes > 0
    assert reply.text == made.tokenizer.decode(reply.tokens, skip_special_tokens=True)


def test_weights_that_mlx_has_quantized_are_refused_in_one_line():
    with pytest.raises(UserError, match="cannot read weights that MLX has quantized; got .*tiny"):
        load(str(SOURCE), "fp16")
