"""Record every text that a Mac would build, by the product's own paths and a factory that only listens.

Nothing is evaluated: MLX is lazy, and the factory gives zeros.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import mlx.core as mx

from metal.signature import Kernel, kernel
from mlxkv.cache import selftest
from mlxkv.cache.attention import attend
from mlxkv.cache.backends import PortableBackend, TileBackend
from mlxkv.cache.stores import Records
from mlxkv.cache.view import Parts, View
from mlxkv.codec.maps import sample
from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import MixedBits
from mlxkv.formats.records import record_layout
from mlxkv.metal import launch, sources, tiles, whiten

DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BODIES = ("portable", "tiles")
KV_HEADS = 2
GROUPS = (1, 2, 3, 4)  # query heads of a kv head, so query rows of one new token
DRAFT = 5  # new tokens of a speculative step
# (dims, rank) of bases that follow the text, for each head dim: half and three quarters of it
SHARES = (0.5, 0.75)
# Mixed bits are no preset, and have widths once they are calibrated; texts are the same for all.
MIXED_BITS = "fill"
MIXED_CONFIG = CacheConfig(
    Side(MixedBits(2.0, (1,)), "fill-centred"), Side(MixedBits(2.0, (1,)), "fill")
)


@dataclass(frozen=True)
class Use:
    """Who needs a text. preset: "" for what belongs to none. step: of a chat."""

    preset: str
    dims: int
    dtype: str
    body: str
    step: str


@dataclass
class Text:
    """A text, who needs it, and threads of a threadgroup at most."""

    kernel: Kernel
    uses: dict[Use, None] = field(default_factory=dict)
    threads: int = 0

    @property
    def name(self) -> str:
        """Of its body: quantize, attend and so on."""
        return self.kernel.name.removeprefix("mlxkv_").rsplit("_", 1)[0]

    @property
    def level(self) -> int:
        """The oldest Metal that has to read it: tiles need macOS 15."""
        return 320 if all(use.body == "tiles" for use in self.uses) else 310


class Recorder:
    """A factory with the signature of `mx.fast.metal_kernel`, whose kernels give zeros."""

    tiles = True

    def __init__(self):
        self.texts: dict[object, Text] = {}
        self.use: Use | None = None
        self._same: dict[str, str] = {}  # one copy of each long string

    def __call__(self, name, input_names, output_names, source, header="", **options):
        assert not options, options
        source, header = (self._same.setdefault(x, x) for x in (source, header))

        def call(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=(), **other):
            assert not template and not other, (template, other)
            # Names belong to the sources: MLX keeps what it compiled by name.
            made = kernel(name, input_names, output_names, source, header, inputs, output_dtypes)
            text = self.texts.setdefault(made, Text(made))
            text.uses[self.use] = None
            text.threads = max(text.threads, threadgroup[0] * threadgroup[1] * threadgroup[2])
            return [mx.zeros(*x) for x in zip(output_shapes, output_dtypes, strict=True)]

        return call


@contextmanager
def reading_once() -> Iterator[None]:
    """The files of the texts read once, not for each kernel; what was built is not kept."""
    with mock.patch.object(sources, "read_source", cache(sources.read_source)):
        yield
    for kept in (launch.build, tiles._kernel, tiles._plan):
        kept.cache_clear()


def why_not(config: CacheConfig, dims: int) -> str | None:
    """Why no kernel reads pages of this format, or None: as `quantized.why_not` asks, but for the test
    of the kernels."""
    for i, side in enumerate((config.keys, config.values)):
        stored = side.dims(dims)
        if reason := side.quantizer.why_no_record(stored, config.page, i == 0):
            return reason
        if side.quantizer.layout(stored, config.page, i == 0).saves_nothing(dims):
            return f"{stored} float16 dims would take the room of {dims}"
    return config.why_not(dims, dims)


@cache
def _sampled(dims: int, fitted: tuple):
    return sample(KV_HEADS, (dims, dims), fitted)


def config_of(preset: str, dims: int) -> CacheConfig:
    """Return the config of a preset, or of FILL for heads of `dims`."""
    return (
        selftest.representative_config(MIXED_CONFIG, dims)
        if preset == MIXED_BITS
        else PRESETS[preset]
    )


def record(
    preset: str,
    dims: int,
    dtype: str,
    make: Recorder,
    groups: Sequence[int] = (4,),
    config: CacheConfig | None = None,
) -> None:
    """All texts of a preset: pages quantized by one and by many, decoded for a prefill, read by decode
    attention with one new token and with several, over one run of pages or two, with and without
    attention sinks."""
    config, kind = config or config_of(preset, dims), DTYPES[dtype]
    if why_not(config, dims):
        return
    layout = record_layout(config, *config.dims(dims, dims))
    layer_maps = _sampled(dims, config.fitted) if config.calibrated else None
    for body in BODIES:
        tiled = body == "tiles"
        if tiled and tiles.why_not(layout, dims, kind, make):
            continue

        def step(name, body=body):
            make.use = Use(preset, dims, dtype, body, name)

        many = max(4, 1024 // config.page)
        pair = (mx.zeros((1, KV_HEADS, many * config.page, dims), kind),) * 2
        window = tuple(x[:, :, :5] for x in pair)
        store = Records(
            config, (dims, dims), (TileBackend if tiled else PortableBackend)(make), layer_maps
        )
        step("quantize")
        store.append(pair, 1)
        step("prefill quantize")
        store.append(pair, many - 1, config.page)
        pages = store.read(0, store.count)
        runs = {"": pages}
        if config.is_online:
            step("follow")
            store.transported(store.codecs) if layout.quantized_by_kernel else None
            runs[" of two runs"] = Parts((store.read(0, 1), store.read(1, store.count)))
        if not tiled:
            q = mx.zeros((1, KV_HEADS * groups[0], 16, dims), kind)
            for sink in (None, window):
                usual = (sink is None) == (config.sink == 0)
                step("dequantize" if usual else "dequantize, with other windows")
                attend(q, View(window, sink, pages), 1.0, "causal")
            step("decode")
            for run in runs.values():
                for side in range(2):
                    run.decode(side, kind)
            step("read by plain ops")
            pages.scorer()(mx.zeros((1, KV_HEADS, 4, dims)))
        for each in groups:
            logits = mx.zeros((KV_HEADS * each,))
            for name, run in runs.items():
                for new in (1, DRAFT) if each == groups[0] else (1,):
                    q = mx.zeros((1, KV_HEADS * each, new, dims), kind)
                    for sinks in (None, logits):
                        step(f"attend {new}{name}{' with sinks' if sinks is not None else ''}")
                        attend(q, View(window, window, run), 1.0, None, sinks)


def record_others(make: Recorder) -> None:
    """What belongs to no preset: bases that follow the text."""
    for dims in DIMS:
        for share in SHARES:
            rank = int(share * dims)
            if 4 * (rank * (rank + 1) // 2 + 2 * (rank + 31)) > whiten.SHARED_BYTES:
                continue
            make.use = Use("", dims, "float32", "portable", "whiten")
            near = mx.zeros((KV_HEADS, dims, rank))
            whiten.whiten(near, make)
            whiten.whiten(near, make, whiten.RIDGE)


def families() -> dict[str, tuple[str, ...]]:
    """Presets that share formats, and so most texts, by the first of them."""
    found: dict[object, list[str]] = {}
    for name, config in PRESETS.items():
        if config.compresses:
            key = (config.keys.quantizer, config.values.quantizer, config.page)
            found.setdefault(key, []).append(name)
    return {names[0]: tuple(names) for names in found.values()} | {MIXED_BITS: (MIXED_BITS,)}


def dump(
    presets: Iterable[str] | None = None,
    dims: Iterable[int] = DIMS,
    dtypes: Iterable[str] = tuple(DTYPES),
    others: bool = True,
) -> list[Text]:
    """Every text of these presets, all by default."""
    make, dims, dtypes = Recorder(), tuple(dims), tuple(dtypes)
    with reading_once():
        for preset in PRESETS if presets is None else presets:
            for dim in dims:
                for dtype in dtypes:
                    record(preset, dim, dtype, make, groups(dim, dtype))
        if others:
            record_others(make)
    return list(make.texts.values())


def groups(dims: int, dtype: str) -> tuple[int, ...]:
    """Query heads of a kv head that are recorded: all of `GROUPS` in bfloat16 at 64, 128 and 256 dims."""
    return (4, 1, 2, 3) if dtype == "bfloat16" and dims in (64, 128, 256) else (4,)
