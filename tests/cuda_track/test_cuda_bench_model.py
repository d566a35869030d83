"""The benchmark of whole models, on a small shape and a CPU."""

import sys

import pytest
import torch

from cuda_track import bench, bench_model, cli
from cuda_track.models import shaped
from cuda_track.models.handing import cache_of, handed
from mlxkv.errors import UserError

torch.set_num_threads(1)
SMALL = shaped.ModelShape("qwen3", 2, 64, 128, 4, 2, 64, 100, True)


def test_rows_of_a_small_model(monkeypatch):
    monkeypatch.setitem(shaped.SHAPES, "small", SMALL)
    monkeypatch.setattr(bench_model, "CHUNK", 1024)
    rows = list(
        bench_model.rows("small", 2400, ["bf16", "int4", "int2"], torch.float32, 2, 2, "cpu")
    )
    assert [(r.kv, r.batch) for r in rows] == [
        (k, b) for k in ("bf16", "int4", "int2") for b in (1, 2)
    ]
    assert all(r.tokens_per_s > 0 and r.loop_ms > 0 for r in rows)
    assert all(
        (r.seal_ms > 0) == (r.kv != "bf16") and (r.prefill_s > 0) == (r.batch == 1) for r in rows
    )
    sizes = [r.cache_gigabytes for r in rows[::2]]
    assert sizes[0] > sizes[1] > sizes[2]
    assert len(bench_model.table(rows).splitlines()) == 7


@torch.no_grad()
def test_a_static_layer_is_a_cache():
    torch.manual_seed(0)
    model = shaped.build(SMALL, 64, torch.float32, "cpu")
    ids, out = torch.randint(100, (2, 24)), []
    static = shaped.new_cache(model, SMALL, bench_model.config_of("bf16"), 64)
    for cache in (static, None):
        for part in ids.split((16, 7, 1), 1):
            made = model(part, use_cache=True, **handed(cache))
            cache = cache_of(made)
        out.append(made.logits)
    assert torch.allclose(*out, atol=1e-5)
    bench_model._crop(static)
    assert torch.allclose(model(ids[:, -1:], **handed(static)).logits, out[0], atol=1e-5)


def test_matrices_of_the_published_shapes():
    billions = {name: shape.weights / 1e9 for name, shape in shaped.SHAPES.items()}
    assert 3.9 < billions["qwen3-4b"] < 4.1
    assert 7.5 < billions["qwen3-8b"] < 7.7  # without the table of embeddings


def test_a_plan_and_mistakes(monkeypatch, capsys):
    options = ["bench", "--model-shape", "qwen3-4b", "--plan", "--context", "32k"]
    monkeypatch.setattr(sys, "argv", options)
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "kv",
        *("bf16",) * 2,
        *("int4",) * 2,
        *("int2",) * 2,
    ]
    for wrong, text in (
        (["--context", "none"], "choose 100k"),
        (["--kv", "int5"], "unknown preset"),
    ):
        monkeypatch.setattr(sys, "argv", [*options, *wrong])
        with pytest.raises(SystemExit):
            cli.run(bench.main)
        assert text in capsys.readouterr().err
    with pytest.raises(UserError):
        bench_model.count("0k")
