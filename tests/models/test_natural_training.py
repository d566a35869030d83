"""Training on real text (training/natural): prepare, train, resume, export, pack, and what is observed."""

import json
import lzma
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

ROOT = Path(__file__).parents[2]
NAMES = ("natural-qwen", "natural-gemma")
VOCAB = 1024


@pytest.fixture(scope="module")
def code():
    """The modules of training/, found as its README says."""
    sys.path.insert(0, str(ROOT / "training"))
    import export
    import model
    import tokenizer
    from natural import attention, check, data, observe, pack, prepare, shapes, train

    yield Namespace(
        export=export, model=model, tokenizer=tokenizer, attention=attention, check=check,
        data=data, observe=observe, pack=pack, prepare=prepare, shapes=shapes, train=train,
    )  # fmt: skip
    sys.path.remove(str(ROOT / "training"))


def small(code, name: str):
    config = code.shapes.SHAPES[name]
    sizes = {"layers": 3, "width": 128, "ff": 128, "heads": 2, "kv_heads": 1, "window": 64}
    return replace(config, vocab=VOCAB, **sizes, head_dim=64)


@pytest.fixture(scope="module")
def source(code, tmp_path_factory) -> Path:
    """A folder as the corpus has it: train.xz, tokenizer/, held/selection/."""
    folder = tmp_path_factory.mktemp("natural")
    pages = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
    texts = [*pages, "naïve — “déjà vu” <eos>\n" * 40]
    (folder / "train.xz").write_bytes(lzma.compress("\0".join(texts).encode()))
    some = [*pages[:8], *islice(code.tokenizer.corpus(400_000), 40)]
    trained = code.tokenizer.train(some, VOCAB)
    (folder / "tokenizer").mkdir()
    trained.save(str(folder / "tokenizer" / "tokenizer.json"))
    held = folder / "held" / "selection"
    held.mkdir(parents=True)
    longest = sorted(pages, key=len)[-3:]
    for n, text in enumerate(longest):
        (held / f"pages-{n}.txt").write_text(text)
    code.prepare.prepare(folder, folder / "data", workers=1)
    return folder


def test_every_token_is_read_once_an_epoch(code, source):
    real = code.data.RealText.open(source / "data")
    tokenizer = code.data.Tokenizer.from_file(str(source / "data/tokenizer/tokenizer.json"))
    texts = code.prepare.read_documents(source)
    for n in (0, len(texts) - 1):
        ids = real.tokens[real.starts[n] : real.starts[n + 1]]
        assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == texts[n]
    assert not (real.tokens < len(code.tokenizer.SPECIALS)).any()  # "<eos>" in a text is only text
    length, seen = 48, np.zeros(VOCAB, np.int64)
    tokens = len(real.tokens)
    for share in range(2):
        mine = sum(int(b - a) for a, b in parts_of(real, length, share))
        for ids, weights in real.rows("train-1", share, 2, length):
            assert len(ids) == len(weights) == length + 1 and ids[0] == code.data.BOS
            np.testing.assert_array_equal(weights, ids != code.data.BOS)
            fresh = ids[ids != code.data.BOS]
            seen += np.bincount(fresh[:mine], minlength=VOCAB)
            mine -= len(fresh)
            if mine <= 0:
                break
    assert seen.sum() == tokens
    np.testing.assert_array_equal(seen, np.bincount(real.tokens, minlength=VOCAB))


def parts_of(real, length: int, share: int) -> np.ndarray:
    parts, order = real.parts(length), Random(f"train-1-order-{length}")
    return parts[np.random.default_rng(order.getrandbits(64)).permutation(len(parts))[share::2]]


def test_facts_hide_in_real_text_and_leave_it_whole(code, source):
    from mlxkv.texts.worlds.documents import ANSWER, retrieval_document

    real = code.data.RealText.open(source / "data")
    tokenizer = code.data.Tokenizer.from_file(str(source / "data/tokenizer/tokenizer.json"))
    given: list[str] = []

    def filler(rng: Random, tokens: int) -> list[str]:
        given[:] = real.pieces(tokenizer, rng, tokens)
        return list(given)

    pieces = retrieval_document(Random("train-hidden"), 1500, [], filler)
    text = "".join(piece for piece, _ in pieces)
    assert sum(piece in text for piece in given) > 0.9 * len(given)
    assert len(tokenizer.encode("".join(given)).ids) > 700  # of real text, in pieces of any length
    answers = [piece for piece, weight in pieces if weight == ANSWER]
    assert answers and 700 < len(tokenizer.encode(text).ids) < 3000


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_are_sliding_attention(code, groups):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 96, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 96, 8, dtype=torch.float64)
    for length in (16, 32, 96):
        q1, k1, v1 = (x[:, :, :length] for x in (q, k, v))
        got = code.attention.blocks(q1, k1, v1, window=16)
        at = torch.arange(length)
        ago = at[:, None] - at
        scores = q1 @ k1.repeat_interleave(4 // groups, dim=1).mT / 8**0.5
        weights = scores.masked_fill((ago < 0) | (ago >= 16), -torch.inf).softmax(-1)
        torch.testing.assert_close(got, weights @ v1.repeat_interleave(4 // groups, dim=1))


def arguments(code, source: Path, name: str, out: Path, *more: str):
    args = code.train.parse(
        [name, "--data", str(source / "data"), "--held", str(source), "--out", str(out),
         "--batch", "512", "--workers", "1", "--log-every", "1", "--observe-tokens", "128",
         "--minutes", "5", *more]
    )  # fmt: skip
    args.schedule = ((0.0, {128: 1.0}), (0.6, {256: 1.0}))
    return args


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_train_resume_export_and_load(code, source, name, tmp_path, monkeypatch):
    monkeypatch.setitem(code.shapes.SHAPES, name, small(code, name))
    code.train.train(arguments(code, source, name, tmp_path, "--steps", "3"))
    first = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    code.train.train(arguments(code, source, name, tmp_path, "--steps", "5", "--resume"))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=False)
    assert (first["step"], saved["step"]) == (3, 5)
    assert saved["tokens"] == 5 * 512 and saved["seconds"] > first["seconds"]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2", "3", "4", "5"]
    seen = [json.loads(line) for line in (tmp_path / "observe.jsonl").read_text().splitlines()]
    assert [line["step"] for line in seen] == [0, 3, 5]
    assert json.loads((tmp_path / "done").read_text())["step"] == 5
    ours = code.export.read(tmp_path / "hub")
    ids = np.random.default_rng(0).integers(5, VOCAB, (1, 200))
    with torch.no_grad():
        want = ours.logits(ours(torch.from_numpy(ids))).numpy()
    assert np.abs(want - logits(tmp_path / "hub", ids)).max() < 1e-4
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hub", dtype=torch.float32
    )
    if ours.config.gemma:  # transformers rounds this factor only if the weights are bfloat16
        theirs.model.embed_tokens.embed_scale.fill_(ours.scale)
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.from_numpy(ids)).logits.numpy(), want, atol=1e-4)


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    model, _ = mlx_utils.load(str(folder))
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(ids)))


@pytest.mark.parametrize("name", NAMES)
def test_parts_join_to_a_model_of_8_bits(code, source, name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = code.model.Model(small(code, name))
    code.export.write(model, source / "data" / "tokenizer", tmp_path / "hub")
    monkeypatch.setattr(code.pack, "PART", 100_000)
    parts = code.pack.pack(tmp_path / "hub", tmp_path / "packed", name)
    assert len(parts) > 3 and all(part.stat().st_size <= 100_000 for part in parts)
    code.pack.join(parts[::-1], tmp_path / "joined")
    ids = np.random.default_rng(0).integers(5, VOCAB, (1, 100))
    exact, got = logits(tmp_path / "hub", ids), logits(tmp_path / "joined", ids)
    assert 0 < np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) < 0.03


def test_codes_are_within_half_a_step(code):
    torch.manual_seed(0)
    w = torch.randn(6, 256) * torch.logspace(-6, 3, 6)[:, None]
    w[0, :64], w[1, :64], w[2, :64] = 0, 0.7, -3.0
    words, scale, bias = code.pack.quantize(w)
    stored = (mx.array(t.float().numpy()) for t in (scale, bias))
    back = np.array(mx.dequantize(mx.array(words.numpy()), *stored, group_size=64, bits=8))
    error = (torch.from_numpy(back) - w).abs().unflatten(-1, (-1, 64))
    assert (error <= 0.5001 * scale.float()[..., None]).all()
    assert (error[:3, 0] <= w[:3, 0].abs().max() / 256 + 1e-9).all()


def test_a_gradient_that_is_not_finite_changes_nothing(code):
    args = Namespace(seed=1, parts=1, batch=64, muon_lr=0.02, adam_lr=1e-3)
    trainer = code.train.Trainer(small(code, "natural-qwen"), args)
    ids = torch.randint(5, VOCAB, (2, 33))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    weights = torch.ones_like(ids, dtype=torch.uint8)
    trainer.backward(ids, weights)
    next(trainer.model.parameters()).grad[0, 0] = float("nan")
    trainer.update(1.0)
    assert trainer.skipped == 1
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)
    trainer.backward(ids, weights)
    trainer.update(1.0)
    changed = [name for name, p in trainer.model.named_parameters() if (p != before[name]).any()]
    assert len(changed) == len(before)


def test_parts_of_a_step_add_up_to_its_gradient(code):
    args = Namespace(seed=1, parts=1, batch=64, muon_lr=0.02, adam_lr=1e-3)
    trainer = code.train.Trainer(small(code, "natural-gemma"), args)
    ids = torch.randint(5, VOCAB, (4, 65))
    weights = (ids % 5).to(torch.uint8)
    grads = []
    for parts in (1, 3):
        trainer.parts = parts
        seen = trainer.backward(ids, weights)
        assert seen[1].sum() == (weights[:, 1:] > 0).sum()
        grads.append([p.grad.clone() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_sinks_and_channels_are_seen(code):
    torch.manual_seed(0)
    q, k = torch.zeros(2, 2, 96, 8), torch.zeros(2, 1, 96, 8)
    q[:, 1, :, 0], k[:, :, 0, 0] = 8**0.5, 20.0  # the second head looks at the first token only
    even = float(np.mean([1 / (i + 1) for i in range(48, 96)]))
    assert code.observe.sinks(q, k, None) == pytest.approx([even, 1.0], rel=1e-4)
    x = torch.randn(2, 1, 500, 16)
    flat = code.observe.channels(x)
    x[..., 3] += 12.0
    x[:, :, 0] *= 5
    planted = code.observe.channels(x)
    assert flat["channel_ratio"] < 2 < 3 < planted["channel_ratio"]
    assert abs(flat["kurtosis"]) < 0.3 < 5 < planted["kurtosis"]
    assert planted["offset_max"] == pytest.approx(12, rel=0.1) and planted["offset_median"] < 0.2
    assert planted["first_norm"] == pytest.approx(5, rel=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_an_observation_sees_the_model_that_is_trained(code, source, name):
    """The loss of an observation is the model's own, and a table has a row per layer."""
    torch.manual_seed(0)
    model = code.model.Model(small(code, name))
    tokenizer = code.data.Tokenizer.from_file(str(source / "data/tokenizer/tokenizer.json"))
    texts = code.observe.fixed_ids(source, tokenizer, 160)
    line = code.observe.observe(model, texts, tokenizer)
    for text, ids in texts.items():
        ids = torch.tensor([ids])
        with torch.no_grad():
            logits = model.logits(model(ids[:, :-1]))[0]
        want = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
        assert line["loss"][text] == pytest.approx(want, rel=1e-3)
    rows = code.observe.flat(line)
    assert [row["layer"] for row in rows] == [0, 1, 2]
    assert rows[0]["window"] == (64 if name == "natural-gemma" else "")


def test_operations_are_those_of_the_matrices_and_of_attention(code):
    config = code.shapes.SHAPES["natural-gemma"]
    weights = sum(p.numel() for p in code.model.Model(config).parameters() if p.dim() == 2)
    length, visible = 2048, 0
    for layer in range(config.layers):
        window = config.window if config.local(layer) else length
        visible += sum(min(i + 1, window) for i in range(length)) / length
    want = 6 * weights + 12 * config.heads * config.head_dim * visible
    assert code.shapes.operations(config, length) == pytest.approx(want, rel=1e-3)


@pytest.mark.slow
def test_the_check_asks_needles_and_reads_held_out_text(code, source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        code.check, "TOKENS", 1024
    )  # of a text; an untrained model says no more in 8,192
    torch.manual_seed(0)
    model = code.model.Model(small(code, "natural-gemma"))
    code.export.write(model, source / "data" / "tokenizer", tmp_path)
    report = code.check.check(tmp_path, source, questions=16, lengths=(1,))
    assert report["cells"]["single-1K"]["questions"] == 16
    assert 0 <= report["cells"]["in-text-1K"]["values"] < 0.2
    assert set(report["loss"]) == {"pages", "worlds"}
    assert all(5 < loss < 9 for loss in report["loss"].values())  # untrained: ln 1024 = 6.9
