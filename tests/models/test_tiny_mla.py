"""The small model with latents that training/ can train: shape, training, export, gates and its experiment.

All of it on random weights: nothing here has been trained.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_models import TINY

torch = pytest.importorskip("torch", reason="torch is not installed")
mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
mlx_utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

ROOT = Path(__file__).parents[2]
TOKENIZER = Path(TINY)
NAME = "tiny-mla"


@pytest.fixture(scope="module")
def code():
    """The modules of training/, found as its README says."""
    sys.path.insert(0, str(ROOT / "training"))
    import configs
    import evaluate
    import export
    import gates
    import mla
    import model

    yield Namespace(
        configs=configs, evaluate=evaluate, export=export, gates=gates, mla=mla, model=model
    )
    sys.path.remove(str(ROOT / "training"))


@pytest.fixture(scope="module")
def hub(code, tmp_path_factory) -> Path:
    """A folder of the model with random weights, norms included."""
    torch.manual_seed(0)
    model = code.model.Model(code.configs.CONFIGS[NAME])
    for name, p in model.named_parameters():
        p.data += 0.1 * torch.randn_like(p) if "norm" in name else 0.03 * torch.randn_like(p)
    out = tmp_path_factory.mktemp("mla") / "hub"
    code.export.write(model, TOKENIZER, out)
    return out


def test_the_shape_is_small_and_has_latents_that_the_kernel_takes(code, hub):
    config = code.configs.CONFIGS[NAME]
    assert code.configs.Config.from_hub(json.loads((hub / "config.json").read_text())) == (
        replace(config, offsets=False, kv_heads=config.heads)
    )
    assert config.rank == 128 and config.rope == 32 and config.context == 8192
    assert 6e6 < code.model.Model(config).describe()["parameters"] < 9e6
    assert (hub / "model.safetensors").stat().st_size <= 16_000_000  # as the package's models
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (hub / file).stat().st_size > 50


def test_logits_are_those_of_transformers_and_of_mlx_lm(code, hub):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ids = torch.randint(5, 3072, (1, 700), generator=torch.Generator().manual_seed(1))
    ours = code.export.read(hub)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    model, _ = mlx_utils.load(str(hub))
    model.set_dtype(mx.float32)
    with torch.no_grad():
        expected = ours.logits(ours(ids))
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-4)
    got = np.array(model(mx.array(ids.numpy())))
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-3)


def test_reading_a_past_is_reading_at_once(code, hub):
    model, ids = code.export.read(hub), torch.arange(5, 105)[None]
    whole, past = code.evaluate.forward(model, ids)
    first, half = code.evaluate.forward(model, ids[:, :60])
    rest, joined = code.evaluate.forward(model, ids[:, 60:], half)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=0, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), whole, rtol=0, atol=1e-4)
    latents, turned = past[0]
    assert latents.shape == (1, 1, 100, 128) and turned.shape == (1, 1, 100, 32)
    torch.testing.assert_close(joined[0][0], latents)


def test_rounded_latents_leave_rotary_keys_alone(code, hub):
    model, ids = code.export.read(hub), torch.arange(5, 405)[None]
    exact, _ = code.evaluate.forward(model, ids)
    eight, four = (
        code.evaluate.forward(model, ids, None, code.evaluate.Scheme(str(bits), bits=bits))[0]
        for bits in (8, 4)
    )
    torch.testing.assert_close(eight[:, :128], exact[:, :128])  # no page is sealed yet
    off = [(x - exact).norm().item() for x in (eight, four)]
    assert 0 < off[0] < off[1]


def run(command: list[str], **more) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "training")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, cwd=ROOT, **more
    )


def test_training_takes_a_step_on_a_cpu(tmp_path):
    out = tmp_path / "run"
    done = run(
        ["training/train.py", NAME, "--minutes", "0.05", "--tokenizer", str(TOKENIZER), "--out",
         str(out), "--workers", "1", "--batch", "512"]
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = (out / "log.csv").read_text().splitlines()
    assert len(rows) >= 2 and float(rows[1].split(",")[-1]) > 0
    config = json.loads((out / "hub" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3" and config["kv_lora_rank"] == 128


def test_what_cannot_be_compiled_is_trained_as_it_is(code, monkeypatch, capsys):
    from contextlib import nullcontext

    import train

    def broken(*given, **more):
        def call(*given, **more):
            raise RuntimeError("no C compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    model = code.model.Model(code.configs.CONFIGS[NAME])
    asked = model, train.weighted_loss, 512, "cpu", nullcontext()
    assert train.compiled(*asked) is train.weighted_loss
    assert "no C compiler" in capsys.readouterr().err
    ids, embedding = torch.arange(5, 70)[None], model.model.embed_tokens.weight
    loss, *_ = train.weighted_loss(model(ids[:, :-1]), embedding, ids, torch.ones(1, 65))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gates_read_it(code, hub):
    report = code.gates.run(hub, 2, ["single-1K"], False)
    assert report["cells"]["single-1K"]["questions"] >= 2
    assert set(report["gates"].values()) == {False}  # random weights know nothing


def test_the_experiment_measures_presets_on_it(hub, tmp_path, monkeypatch):
    from experiments import latent_kl

    monkeypatch.setattr(latent_kl, "CALIBRATED", 1024)
    asked = ["--model", str(hub), "--out", str(tmp_path), "--context", "512", "--decode", "8"]
    asked += ["--samples", "6", "--questions", "6", "--kinds", "single", "--dtype", "float32"]
    latent_kl.main([*asked, "--kv", "int8,balanced-int3"])
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (tmp_path / "table.md").read_text().splitlines()
    ]
    named = {row[0]: row for row in rows[2:]}
    assert list(named) == ["fp16", "int8", "balanced-int3"]
    kl = {name: float(row[3].split()[0]) for name, row in named.items()}
    assert kl["fp16"] == 0 < kl["int8"] < kl["balanced-int3"]
    assert "[" in named["int8"][3]  # an interval over texts
    assert float(named["int8"][1]) == 10.0 and float(named["balanced-int3"][1]) == 5.8
    assert (tmp_path / "report.html").exists()


def test_the_experiment_refuses_models_without_latents(tmp_path):
    from experiments import latent_kl
    from mlxkv.errors import UserError

    with pytest.raises(UserError, match="no latents"):
        latent_kl.main(
            ["--model", TINY, "--out", str(tmp_path), "--kv", "int8", "--context", "600"]
        )


def test_bytes_are_those_of_the_page(capsys):
    from experiments import latent_bytes

    latent_bytes.main(["--tokens", "600", "--kv", "int4,int4+rope16"])
    said = capsys.readouterr().out.split("\n")
    page = (ROOT / "docs" / "results" / "latents.md").read_text()
    for preset in ("int4 ", "int4+rope16 "):
        row = next(line.split() for line in said if f" {preset}" in line)
        size, share = row[-4], row[-3]
        assert f"| {size} | {share.lstrip('0')} |" in page
