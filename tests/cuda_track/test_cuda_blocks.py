"""vLLM's blocks without vLLM: kernels in Triton's interpreter, and plain ops, against attention over dense tokens."""

import itertools
import mmap
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from calibration_inputs import basis

pytest.importorskip(
    "cuda_track.kernels.interpreter"
)  # which says how kernels are built; no Triton on a Mac

from triton.runtime import interpreter

from cuda_track.cache.stores import codecs_of
from cuda_track.codec import transform
from cuda_track.codec.codec import Codec
from cuda_track.kernels import launch, layout, record
from cuda_track.kernels.record import ALIGN, Record
from cuda_track.vllm import settings
from cuda_track.vllm.blocks import Blocks, Prefill, Requests, pages_read, runs_of
from cuda_track.vllm.settings import CALIBRATION, KV, PAGE, RECENT, SINK, Heads, LayerCodecs
from mlxkv.catalog import folder
from mlxkv.errors import UserError
from mlxkv.formats import agreement
from mlxkv.formats.calibration import artifact, mixed_bits
from mlxkv.formats.calibration.artifact import Calibration, Layer
from mlxkv.formats.config import Side
from mlxkv.formats.names import parse_kv
from mlxkv.formats.quantizers import MixedBits
from mlxkv.spec.bounds import rms

torch.set_num_threads(1)
# By the type of exact tokens: weights of values are float16 in kernels, and outputs are rounded.
BOUNDS = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 5e-3}
WIDTHS = {
    64: ((4, 3, 2, 2), (4, 2, 1)),  # the values in half a tile more
    128: ((8, 4, 4, 3, 3, 2, 2), (4, 3, 3, 2, 2, 1, 1, 1)),
}
NARROW = ((4, 2), (2,))  # the values in half a tile alone, of a layer of Qwen2.5-Coder-0.5B
WINDOW = RECENT + PAGE  # of vLLM's sliding window
NO_RESERVE = 0x4000  # of Linux's mmap, which Python does not name: no memory until it is touched
NEVER = 0  # vLLM's null block, that tables name where there is none
EDGES = (63, 64, 65, 127, 128, 129, 191, 192, 193)


def layer(kind: str, dims: int, heads: int) -> LayerCodecs:
    """Codecs of a layer: a preset without its calibration, or mixed bits with maps of each head and a mean."""
    if kind not in ("mixed", "narrow"):
        config = parse_kv(kind)
        sides = (Side(x.quantizer) if x.calibrated else x for x in (config.keys, config.values))
        keys, values = (Codec(side, dims, PAGE) for side in sides)
        codecs = keys, values
        return LayerCodecs(codecs, Record(layout.layouts(codecs)))
    rng, made = np.random.default_rng(dims), []
    for widths in WIDTHS[dims] if kind == "mixed" else NARROW:
        down = np.linalg.qr(rng.standard_normal((heads, dims, dims)))[0]
        down *= rng.uniform(0.5, 2, (heads, 1, dims))
        stored = slice(16 * len(widths))
        one = transform.of(down[:, :, stored], np.linalg.inv(down)[:, stored])
        made.append(Codec(Side(MixedBits(2.0, widths), "fill"), dims, PAGE, one))
    codecs = made[0], made[1]
    mean = torch.tensor(rng.standard_normal((heads, 1, dims))).float()
    return LayerCodecs(codecs, Record(layout.layouts(codecs)), mean)


class Engine:
    """What vLLM does for one layer: tables of blocks, of which those that left the window are taken away, and steps.
    Its tokens are written twice, by kernels and by plain ops. `seen` has those of each row, keys without their mean."""

    def __init__(self, kind, dims, kv_heads, rows, dtype=torch.float32, pages=6):
        torch.manual_seed(dims + rows)
        self.codecs, self.dims, self.kv_heads, self.dtype = (
            layer(kind, dims, kv_heads),
            dims,
            kv_heads,
            dtype,
        )
        size = self.codecs.record.size
        self.place = min(16, 1 << (size // (2 * dims * dtype.itemsize)).bit_length() - 1)
        per_row = pages * PAGE // self.place
        self.table = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
        self.near = (torch.randperm(rows * per_row) + 1).view(rows, per_row).int()
        shape = (rows * per_row + 1, kv_heads, self.place, 2 * dims)
        pools = torch.randint(256, (rows * pages + 1, kv_heads, 1, size)).to(torch.uint8)
        self.held = []
        for by_kernels in (True, False):
            # What was never written is no number: whoever reads it is found.
            exact = torch.full(shape, torch.nan, dtype=dtype)
            one = Blocks(self.codecs, pools.clone(), exact, kv_heads, dims)
            one.by_kernels = by_kernels
            self.held.append(one)
        self.seen = [torch.zeros(kv_heads, 0, 2 * dims) for _ in range(rows)]

    def requests(self, before, after, padding=0):
        """(of codes, of exact tokens) of a step; `padding` tokens behind it have no slot."""
        starts = [0, *itertools.accumulate(b - a for a, b in zip(before, after, strict=True))]
        codes, near = [], []
        for row, (first, last) in enumerate(zip(before, after, strict=True)):
            for t in range(first, last):
                codes.append(int(self.table[row, t // PAGE]) * PAGE + t % PAGE)
                near.append(int(self.near[row, t // self.place]) * self.place + t % self.place)
        longest = max(b - a for a, b in zip(before, after, strict=True))
        lengths, begin = (torch.tensor(x, dtype=torch.int32) for x in (after, starts))
        return tuple(
            Requests(
                lengths,
                begin,
                table,
                torch.tensor(slots + [-1] * padding),
                len(slots) + padding,
                longest,
            )
            for table, slots in ((self.table, codes), (self.near, near))
        )

    def step(self, after, before=None, padding=0):
        """Write new tokens up to lengths `after`, behind the first `before`. Returns (before, codes, near, key,
        value)."""
        before = [x.shape[1] for x in self.seen] if before is None else before
        for row, known in enumerate(before):  # as vLLM frees blocks before a step
            gone = max(0, known + 1 - WINDOW) // self.place
            self.near[row, SINK // self.place : gone] = NEVER
        codes, near = self.requests(before, after, padding)
        shape = (near.tokens, self.kv_heads, self.dims)
        key, value = (torch.randn(shape).to(self.dtype) for _ in range(2))
        for one in self.held:
            one.write(key, value, codes, near)
        kept, mean = key, self.codecs.mean
        if mean is not None:
            kept = (key.float() - mean.squeeze(1)).to(self.dtype)
        pair = torch.cat([kept, value], -1).transpose(0, 1)
        for row, known in enumerate(before):
            new = pair[:, int(codes.starts[row]) : int(codes.starts[row + 1])]
            self.seen[row] = torch.cat([self.seen[row][:, :known].to(self.dtype), new], 1)
        return before, codes, near, key, value

    def read(self, row: int, before: int) -> list[torch.Tensor]:
        """Keys and values [G, T, D] that tokens behind the first `before` see, by the codecs alone."""
        out = []
        for code, x in zip(self.codecs.codecs, self.seen[row].chunk(2, -1), strict=True):
            x = x.clone()
            for page in range(SINK // PAGE, pages_read(before)):
                at = slice(page * PAGE, page * PAGE + PAGE)
                x[:, at] = code.decode(code.encode(x[None, :, at].float()), self.dtype)[0]
            out.append(x.double())
        return out

    def right(self, q: torch.Tensor, row: int, before: int) -> torch.Tensor:
        """Exact attention with the new tokens of a row, q [L, H, D]."""
        keys, values = self.read(row, before)
        queries = q.double().unflatten(1, (self.kv_heads, -1))
        scores = torch.einsum("lghd,gtd->lght", queries, keys) * self.dims**-0.5
        past = torch.arange(keys.shape[1]) > before + torch.arange(len(q))[:, None]
        scores = scores.masked_fill(past[:, None, None], -torch.inf)
        return torch.einsum("lght,gtd->lghd", scores.softmax(-1), values).flatten(1, 2)

    def fill(self, after):
        """Take the first tokens by plain ops alone, which are faster than an interpreter."""
        kernels, plain = self.held
        self.held = [plain]
        self.step(after)
        self.held = [kernels, plain]
        kernels.pool.copy_(plain.pool)
        kernels.exact.copy_(plain.exact)

    def check_bytes(self):
        """Both ways wrote the same records, and the null block was not touched."""
        kernels, plain = self.held
        assert torch.equal(kernels.pool, plain.pool)
        torch.testing.assert_close(kernels.exact, plain.exact, rtol=0, atol=0, equal_nan=True)
        assert kernels.exact[NEVER].isnan().all()

    def check_decode(self, heads, made, new=1):
        """Kernels attend as exact attention does, for rows with `new` tokens at most."""
        before, codes, near, _, _ = made
        lengths, starts = codes.lengths.tolist(), codes.starts.tolist()
        rows = range(len(before))
        at = [row * new + i for row in rows for i in range(lengths[row] - before[row])]
        # A graph's rows without tokens are the last ones, and their outputs are not read.
        ragged = (
            None
            if at == list(range(len(at))) and codes.tokens >= len(before) * new
            else torch.tensor(at)
        )
        q = torch.randn(codes.tokens, heads, self.dims).to(self.dtype)
        out = torch.full_like(q, torch.nan)
        meta = SimpleNamespace(decodes=len(before), new=new, ragged=ragged, requests=codes)
        self.held[0].decode(q, out, meta, SimpleNamespace(requests=near), self.dims**-0.5)
        for row in rows:
            own = slice(starts[row], starts[row + 1])
            if own.start < own.stop:
                right = self.right(q[own], row, before[row])
                error = rms(out[own].double().numpy(), right.numpy())
                assert error < BOUNDS[self.dtype], (lengths[row], error)
        if ragged is None:
            assert not out.isnan().any()

    def check_prefill(self, heads, made, rows=None):
        """Both ways attend to decoded contexts as exact attention does."""
        before, codes, near, key, value = made
        q = torch.randn(codes.tokens, heads, self.dims).to(self.dtype)
        starts = codes.starts.tolist()
        for row in range(len(before)) if rows is None else rows:
            own = slice(starts[row], starts[row + 1])
            (run,) = runs_of([Prefill(row, own.start, own.stop, before[row])], torch.device("cpu"))
            right = self.right(q[own], row, before[row])
            for one in self.held:
                out = torch.full_like(q, torch.nan)
                one.prefill(q, key, value, out, run, codes, near, self.dims**-0.5)
                error = rms(out[own].double().numpy(), right.numpy())
                assert error < max(1e-5, BOUNDS[self.dtype] * (self.dtype != torch.float32)), (
                    before[row],
                    error,
                )
                context = one.context(codes, near, run)
                for found, x in zip(context, self.read(row, before[row]), strict=True):
                    torch.testing.assert_close(found.double(), x, rtol=2**-7, atol=1e-5)


# kind, dims, kv heads, heads, new tokens, dtype
CASES = {
    "int4": ("int4", 64, 2, 4, 1, torch.float32),
    "int3 drafts": ("int3", 64, 1, 3, 3, torch.float32),
    "mixed": ("mixed", 64, 2, 6, 1, torch.float32),
    "mixed drafts": ("mixed", 64, 1, 3, 3, torch.float16),
    "int4 128 bfloat16": ("int4", 128, 1, 5, 1, torch.bfloat16),
    "mixed 128": ("mixed", 128, 1, 4, 3, torch.float16),
}


@pytest.mark.parametrize("case", CASES)
def test_every_length_around_a_page_is_read_as_it_should_be(case):
    """Lengths before the step lie on both sides of every boundary; one row has no tokens, as in a CUDA graph."""
    kind, dims, kv_heads, heads, new, dtype = CASES[case]
    lengths = [*EDGES, 1, 300] if dims == 64 else [65, 128, 191, 192, 1, 260]
    engine = Engine(kind, dims, kv_heads, len(lengths) + 1, dtype)
    engine.fill([*(n - 1 for n in lengths), 0])
    # Some rows bring fewer drafts.
    after = [n - 1 + max(1, new - i % 2) for i, n in enumerate(lengths)]
    made = engine.step([*after, 0])
    engine.check_bytes()
    engine.check_decode(heads, made, new)


@pytest.mark.parametrize("kind", ["int4", "mixed"])
def test_chunks_of_a_prefill_fill_pages_from_anywhere(kind):
    engine = Engine(kind, 64, 1, 2)
    for after in ([30, 100], [63, 128], [192, 129], [193, 340], [260, 341]):
        made = engine.step(after)
        engine.check_bytes()
        engine.check_prefill(2, made)
    engine.check_decode(2, engine.step([261, 342]))


def test_a_page_that_refused_drafts_filled_is_filled_again():
    engine = Engine("int4", 64, 1, 2)
    engine.fill([126, 190])
    engine.step([130, 194])  # 4 drafts each fill a page
    drafted = engine.held[0].pool.clone()
    engine.check_decode(2, engine.step([131, 195], before=[127, 191]), new=4)  # one was right
    assert not torch.equal(engine.held[0].pool, drafted)
    engine.check_bytes()
    engine.check_prefill(2, engine.step([260, 330], before=[128, 192]))  # none was
    engine.check_decode(2, engine.step([262, 332]), new=2)  # reads these pages as codes
    engine.check_bytes()


def test_padding_of_a_graph_writes_nothing():
    engine = Engine("int4", 64, 1, 4)
    engine.fill([70, 200, 0, 0])
    made = engine.step([71, 201, 0, 0], padding=2)
    engine.check_bytes()
    engine.check_decode(2, made)


@pytest.mark.parametrize("kind", ["int3", "mixed"])
def test_long_rows_are_split_beside_short_ones(kind, monkeypatch):
    """Splits are as many as the widest table needs; a row uses those that its own length needs."""
    monkeypatch.setattr(launch, "LONGEST", PAGE)
    monkeypatch.setattr(launch, "slots_of", lambda *sizes: (12, 3))
    engine = Engine(kind, 64, 1, 3, pages=8)
    engine.fill([450, 130, 330])
    engine.check_decode(2, engine.step([451, 131, 331]))


@pytest.mark.parametrize("heads", [1, 8, 24, 128, 512, 2048])
@pytest.mark.parametrize("pages", [1, 3, 64, 128, 700, 2048])
def test_waves_of_programs_are_full(heads, pages, monkeypatch):
    """No program sums more than LONGEST tokens, and there are as few waves as allow that."""
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    slots, windows = launch.slots_of(heads, torch.device("cpu"), 8)
    parts, around = launch.splits(pages, PAGE, heads, torch.device("cpu"), 8)
    waves = -(-(parts + around) * heads // slots)
    assert around == windows and -(-pages // parts) * PAGE <= launch.LONGEST + PAGE
    if parts < pages:
        assert (parts + 1 + around) * heads > waves * slots  # full
        fewer = (waves - 1) * slots // heads - around
        assert fewer < 1 or -(-pages * PAGE // fewer) > launch.LONGEST


def test_rows_of_256_dims_avoid_four_warps():
    """By which values came out wrong on an H200."""
    for bits in (2, 3, 4, 8):
        assert {launch.launch(256, bits, rows).warps for rows in (16, 32, 64, 128)} == {8}
    for name in ("int4", "turbo-int4", "polar"):
        config = parse_kv(name)
        codecs = codecs_of(config, (256, 256), None, torch.device("cpu"))
        for rows in (8, 16, 128):
            assert launch.launch_for(layout.layouts(codecs), 256, rows).warps != 4


def test_many_rows_of_queries_share_programs():
    engine = Engine("int4", 64, 1, 3)
    engine.fill([200, 70, 10])
    made = engine.step([204, 74, 14])
    assert launch.Shape(3, 1, 4 * 32, 4, 64, torch.device("cpu")).many
    engine.check_decode(32, made, new=4)


def test_pointers_reach_the_end_of_a_large_pool(monkeypatch):
    """More bytes than 32 bits count words, of which only a few pages are ever touched."""
    # The interpreter copies what a kernel wrote back to the device, which here is the same memory.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    engine = Engine("int3", 64, 2, 1, torch.float16)
    engine.fill([190])
    small, size = engine.held[0], 2 * engine.codecs.record.size
    count, pages = (9 << 30) // size, len(small.pool)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, count * size, flags=flags)
    pool = torch.frombuffer(memory, dtype=torch.uint8).view(count, *small.pool.shape[1:])
    pool[-pages:] = small.pool
    engine.held = [Blocks(engine.codecs, pool, small.exact, 2, 64)]
    engine.table += count - pages
    engine.step([330])
    engine.check_decode(4, engine.step([331]))


def test_pages_are_read_behind_the_recent_tokens_and_the_first_page():
    assert [pages_read(n) for n in (0, 63, 126, 127, 190, 191)] == [0, 0, 0, 1, 1, 2]
    for before in range(700):  # what is not read as codes is in the window, as vLLM keeps it
        first = max(SINK, pages_read(before) * PAGE)
        assert before < SINK or before + 1 - first >= min(RECENT, before + 1 - SINK)
        assert first >= before + 1 - WINDOW


def test_only_neighbours_without_a_context_are_attended_to_together():
    def made(*spans):
        prefills = [Prefill(i, *span) for i, span in enumerate(spans)]
        return runs_of(prefills, torch.device("cpu"))

    def firsts(*spans):
        return [[x.first for x in run.requests] for run in made(*spans)]

    assert firsts((0, 5, 0), (5, 9, 0)) == [[0, 5]]
    assert firsts((0, 5, 0), (5, 9, 3), (9, 11, 0), (11, 12, 0)) == [[0], [5], [9, 11]]
    assert firsts((0, 5, 0), (6, 9, 0)) == [[0], [6]]
    assert made() == []
    together, alone = made((2, 5, 0), (5, 9, 0), (9, 19, 300))
    assert together.starts.tolist() == together.of_keys.tolist() == [0, 3, 7]
    assert (together.tokens, together.longest) == (slice(2, 9), 4)
    assert alone.starts.tolist() == [0, 10] and alone.of_keys.tolist() == [0, 310]
    assert alone.pages.tolist() == [pages_read(300) - SINK // PAGE] and alone.total == 310


@pytest.mark.parametrize("kind", ["int4", "int3", "mixed", "narrow"])
def test_tensors_of_a_record_are_aligned_and_do_not_overlap(kind):
    made = Record(layer(kind, 64, 1).record.layouts)
    padded = Record(made.layouts, made.size + 3 * ALIGN)
    assert padded.size == made.size + 3 * ALIGN and made.size % ALIGN == 0
    assert not any(f.start % ALIGN for f in made.fields)
    pool = padded.empty(3, 2)
    for side in padded.views(pool):
        assert record.stride(side) * record.WORD == padded.size
        for x in side.values():
            assert not x.any()  # no other tensor was written here
            x.fill_(1)
    assert not pool[..., made.size :].any()


def test_blocks_with_room_behind_them_are_refused():
    """As vLLM pads them where another group has larger ones."""
    codecs = layer("int4", 64, 1)
    pool = torch.zeros(3, 1, 1, codecs.record.size + ALIGN, dtype=torch.uint8)
    with pytest.raises(UserError, match="blocks of codes do not follow each other; got strides"):
        Blocks(codecs, pool[..., : codecs.record.size], torch.zeros(3, 1, 8, 128), 1, 64)


# -- what is asked for


@pytest.fixture
def calibration(tmp_path):
    """A calibration of two layers."""
    layers = {str(i): Layer(2, basis(2, 64, i), basis(2, 64, 9 + i, keys=False)) for i in range(2)}
    path = tmp_path / "some.safetensors"
    made = Calibration("f" * 16, "some", "llama", 9, "t", "d", layers, 4096)
    artifact.write_calibration(path, made)
    return path


REFUSED = {
    "int8": ({KV: "int8"}, "8.5 bits a value, no fewer bytes than --kv-cache-dtype fp8; got int8"),
    "int2": ({KV: "int2"}, "its pages have 128 tokens; got int2"),
    "fp16": ({KV: "fp16"}, "no blocks for this cache: .*; got fp16"),
    "unknown": ({KV: "int5"}, "unknown preset; got 'int5'"),
    "nothing": ({}, re.escape("--additional-config names no cache; got {}")),
    "no mapping": (None, re.escape("--additional-config names no cache; got {}")),
    "a boolean": ({KV: True}, "--additional-config names no cache"),
    "no calibration": ({KV: "int3"}, "int3 needs a calibration of this model; got none"),
    "a share of no choice": ({KV: "99%"}, "99% is chosen by MLX, once a model: .*; got no choice"),
    "no file": ({KV: "int3", CALIBRATION: "/nowhere"}, "nowhere"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_blocks_is_refused_in_one_line(case):
    additional, reason = REFUSED[case]
    with pytest.raises(UserError, match=reason) as caught:
        settings.plan(additional, "some/model")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("[")


def test_what_needs_no_calibration_needs_no_tokenizer_beside_the_weights(tmp_path):
    """vLLM may have it elsewhere (--tokenizer), or read none."""
    assert settings.plan({KV: "int4"}, str(tmp_path)).config.keys == parse_kv("int4").keys


def test_a_share_is_what_mlxkv_chose_for_the_model(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    mark = folder.fingerprint(folder.check_folder(model_folder))
    choice = agreement.Choice(0.98, "int4", None, None, "", "2026-11-29")
    agreement.keep(mark, choice, None, "mlx.core.bfloat16")
    plan = settings.plan({KV: "98%"}, str(model_folder))
    assert plan.config.keys == parse_kv("int4").keys


def test_a_calibration_of_another_model_is_refused(calibration):
    plan = settings.plan({KV: "fill-2.25", CALIBRATION: str(calibration)}, "some/model")
    for heads, index, reason in (
        (Heads(4, 64), 0, "is of another shape in layer 0"),
        (Heads(2, 64), 2, "has no rotation for layer 2"),
    ):
        with pytest.raises(UserError, match=reason):
            plan.codecs(index, heads, torch.device("cpu"))


def test_records_of_layers_with_other_bits_have_one_size(calibration, monkeypatch):
    allotted = iter([[(3, 2, 2, 1), (2, 2, 2, 2)], [(4, 4, 2, 2), (4, 2, 1, 1)]])
    monkeypatch.setattr(mixed_bits, "allot", lambda *asked: next(allotted))
    plan = settings.plan({KV: "fill-3", CALIBRATION: str(calibration)}, "other/model")
    heads, cpu = Heads(2, 64), torch.device("cpu")
    made = [plan.codecs(i, heads, cpu) for i in range(2)]
    own = [Record(x.record.layouts).size for x in made]
    assert {x.record.size for x in made} == {plan.record(heads).size} == {max(own)}
    assert len(set(own)) == 2


def test_a_process_of_tensor_parallelism_has_the_maps_of_its_heads(calibration):
    plan = settings.plan({KV: "fill-2.25", CALIBRATION: str(calibration)}, "some/model")
    whole = plan.codecs(0, Heads(2, 64), torch.device("cpu"))
    for rank in range(2):
        part = plan.codecs(0, Heads(1, 64, rank, 2), torch.device("cpu"))
        assert part.record.size == whole.record.size
        assert part.mean is not None and whole.mean is not None
        assert torch.equal(part.mean[0], whole.mean[rank])
        x = torch.randn(1, 2, PAGE, 64)
        for code, all_heads in zip(part.codecs, whole.codecs, strict=True):
            found, right = code.encode(x[:, rank : rank + 1]), all_heads.encode(x)
            for name, y in found.items():
                assert torch.equal(y, right[name][:, rank : rank + 1])


def test_a_block_holds_a_power_of_two_of_exact_tokens_or_says_that_it_holds_none():
    assert [settings.exact_tokens(n, 128, 2) for n in (512, 1535, 6656, 9216, 1 << 20)] == [
        *(1, 2, 8, 16, 16)
    ]
    with pytest.raises(UserError, match=r"a block of 511 bytes holds no exact token; got 2 bytes"):
        settings.exact_tokens(511, 128, 2)
