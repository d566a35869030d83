"""The same texts as torch builds them on a Mac's GPU: with a signature of their own and no preamble of MLX's.

For presets without a calibration, at 64 and 128 dims, in all three dtypes: decode attention with one and
more new tokens, with and without attention sinks.
"""

from __future__ import annotations

import pytest
import torch
from metal import parse

from cuda_track.cache import choose
from cuda_track.cache.attention import attend
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.mps import source
from mlxkv.formats.presets import PRESETS

pytestmark = pytest.mark.skipif(parse.why_not() is not None, reason=str(parse.why_not()))
LEVEL = 310  # torch asks for the newest that the machine has; macOS 14 has 3.1


class Listener:
    """Notes every text; its kernels do nothing."""

    def __init__(self):
        self.texts: dict[str, None] = {}

    def __call__(self, text: str):
        self.texts[text] = None
        return self

    def __getattr__(self, name: str):
        return lambda *tensors, threads, group_size: None


def units(found) -> list[parse.Unit]:
    """The texts for the parser, each with a name of its own."""
    out = []
    for i, text in enumerate(found):
        header, rest = text.split("kernel void ", 1)
        name = rest.split("(", 1)[0]
        tail = f"kernel void {rest}".replace(f"void {name}(", f"void {name}_{i}(", 1)
        out.append(parse.Unit(f"{name}_{i}", header, tail, mlx=False))
    return out


def listen(preset: str, dims: int, dtype: torch.dtype, listener: Listener) -> None:
    config = PRESETS[preset]
    with source.using(listener), choose.using(choose.METAL):
        if config.calibrated or choose.why_not(config, (dims, dims), torch.device("cpu")):
            return
        cache = CompressedKVCache(config)
        tokens = config.window + 2 * config.page + 5
        cache.update_and_fetch(*(torch.zeros(1, 2, tokens, dims, dtype=dtype) for _ in "kv"))
        for heads, new in ((8, 1), (8, 2), (2, 1)):
            for sinks in (None, torch.zeros(heads)):
                q = torch.zeros(1, heads, new, dims, dtype=dtype)
                attend(q, cache.view(), 1.0, "causal", sinks)


def test_every_text_of_torch_is_read(subtests):
    for dims, dtype in ((64, torch.float32), (128, torch.float16), (64, torch.bfloat16)):
        with subtests.test(dims=dims, dtype=dtype):
            listener = Listener()
            for preset in PRESETS:
                listen(preset, dims, dtype, listener)
            found = units(listener.texts)
            assert len(found) > 30
            names = {x.name.rsplit("_", 1)[0] for x in found}
            assert names == {"mlxkv_attend", "mlxkv_merge"}
            wrong: dict[str, int] = {}
            for name, those in parse.parse(found, LEVEL).items():
                for breach in those:
                    line = f"{name.rsplit('_', 1)[0]}: {breach}"
                    wrong[line] = wrong.get(line, 0) + 1
            assert not wrong, "\n".join(f"{line} ({count} texts)" for line, count in wrong.items())
