"""`python -m cuda_track.bench --model-shape NAME`: time a whole model of random weights that decodes behind a
long context, on caches of every kind beside a static one in full precision.

For a batch of 1 and for the largest that fits:

    prefill  seconds of the whole context, in chunks, the second time (batch 1; larger ones get random
             keys and values)
    loop     ms per token of a Python loop that feeds each token to the next call, as a user of
             transformers does; mostly launches where the batch is small
    step     ms per token of a CUDA graph, with windows half full; sealing a page is timed apart and
             its share of a token added
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_track import cli
from cuda_track.cache.choose import store
from cuda_track.models.handing import handed
from cuda_track.models.layers import CompressedCache, CompressedLayer
from cuda_track.models.shaped import SHAPES, ModelShape, build, new_cache
from mlxkv.errors import UserError
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.names import parse_kv

STATIC = "bf16"
CHUNK = 8192  # tokens of prefill at once
FILL = 1 << 27  # values drawn at a time for larger batches
SPARE = 4 << 30  # bytes that a step needs beside weights and cache
REPLAYS = 20
MARGIN = 256  # tokens behind the context
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
# For estimates alone: bytes and operations per second that an H200 reaches.
BYTES, FLOPS, LAUNCHES, START = 2.5e12, 3.5e14, 0.035, 15.0


@dataclass(frozen=True)
class ModelRow:
    """A line of the table. *_ms: per token of each row of the batch. *_gigabytes: of the cache, and the most
    that was allocated. backend: torch's, of the baseline."""

    model: str
    kv: str
    context: int
    batch: int
    prefill_s: float
    loop_ms: float
    step_ms: float
    seal_ms: float
    tokens_per_s: float
    cache_gigabytes: float
    peak_gigabytes: float
    estimated_s: float
    took_s: float
    backend: str = ""


def config_of(kv: str) -> CacheConfig:
    return parse_kv("fp16" if kv == STATIC else kv)


def row_bytes(shape: ModelShape, config: CacheConfig, context: int) -> float:
    """Bytes of the cache of one row of a batch."""
    bits = config.bits_per_value(shape.dims, shape.dims)
    a_token = 2 * shape.layers * shape.kv_heads * shape.dims / 8  # per bit
    window = config.window if config.compresses else 0
    return a_token * (bits * (context + MARGIN) + 16 * window)


def estimate(
    shape: ModelShape, config: CacheConfig, context: int, batch: int, tokens: int
) -> float:
    """Estimate the seconds of a case on an H200."""
    read = (2 * shape.weights + batch * row_bytes(shape, config, context)) / BYTES
    attention = 2 * shape.layers * shape.heads * shape.dims * context**2
    first = 2 * (2 * shape.weights * context + attention) / FLOPS  # one of two compiles
    if batch > 1:
        first = 8 * batch * row_bytes(shape, parse_kv("fp16"), context) / BYTES
    return START + first + tokens * max(read, LAUNCHES) + (REPLAYS + 8) * read


def _synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def step(model, ids: torch.Tensor, cache: CompressedCache) -> torch.Tensor:
    """Feed ids [B, L]. Returns the most likely next tokens, [B, 1]."""
    logits = model(ids, logits_to_keep=1, **handed(cache)).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def prefill(model, cache: CompressedCache, context: int, vocabulary: int) -> float:
    """Read a random prompt. Returns the seconds to its first token."""
    ids = torch.randint(vocabulary, (1, context), device=model.device)
    start = _synchronised(model.device)
    for i in range(0, context, CHUNK):
        step(model, ids[:, i : i + CHUNK], cache)
    return _synchronised(model.device) - start


def fill(cache: CompressedCache, shape: ModelShape, context: int, batch: int, like) -> None:
    """Fill every layer with the same random keys and values."""
    size = shape.kv_heads * shape.dims
    chunk = max(1024, min(context, FILL // (batch * size)))
    pair = [
        torch.randn(
            (batch, shape.kv_heads, chunk, shape.dims), dtype=like.dtype, device=like.device
        )
        for _ in "kv"
    ]
    for layer in cache.layers:
        for start in range(0, context, chunk):
            layer.update(*(x[:, :, : min(chunk, context - start)] for x in pair))


def looped(model, cache: CompressedCache, ids: torch.Tensor, tokens: int) -> float:
    """ms of a token."""
    ids = step(model, ids, cache)
    start = _synchronised(model.device)
    for _ in range(tokens):
        ids = step(model, ids, cache)
    return (_synchronised(model.device) - start) * 1e3 / tokens


def replayed(model, cache: CompressedCache, ids: torch.Tensor) -> float:
    """Time one step as a graph, in ms: every replay writes the same token and reads the whole cache."""
    for layer in cache.layers:
        if isinstance(layer, CompressedLayer):
            _half_full(layer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(model, ids, cache)
            _crop(cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, ids, cache)
    _crop(cache)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:])


def _crop(cache: CompressedCache) -> None:
    """Drop the last token."""
    for layer in cache.layers:
        layer.crop(-1)


def _half_full(layer: CompressedLayer) -> None:
    """Leave room for half a page in the live window."""
    cache = layer.cache
    page = cache.config.page
    if cache.left < page // 2:
        cache.trim(page // 2 - cache.left)


def sealed(cache: CompressedCache, like: torch.Tensor) -> float:
    """Time the sealing of a page of every layer with its host work, in ms per token. like: a row of keys."""
    caches = [layer.cache for layer in cache.layers if isinstance(layer, CompressedLayer)]
    if not caches:
        return 0.0
    page, times = caches[0].config.page, []
    pair = (torch.randn_like(like.expand(-1, -1, page, -1)),) * 2
    dims = like.shape[3], like.shape[3]
    made = [store(one.config, dims, like.device, one.layer_maps) for one in caches]
    for _ in range(4):
        start = _synchronised(like.device)
        for one in made:
            one.append(pair, 1)
            one.truncate(0)
        times.append(_synchronised(like.device) - start)
    return median(times[1:]) * 1e3 / page


def _fastest(measure: Callable[[], float], choose: bool) -> tuple[float, str]:
    """Measure by the faster of torch's backends, if `choose`. Returns (result, its name)."""
    if not choose:
        return measure(), ""
    found = []
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                found.append((measure(), backend.name.lower()))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            cli.note(f"{backend.name}: {str(error).splitlines()[0]}")
    if not found:
        raise UserError("[bench] no backend of torch took this shape; choose another model shape")
    return min(found)


@torch.no_grad()
def run(
    model, name: str, shape: ModelShape, kv: str, context: int, batch: int, tokens: int
) -> ModelRow:
    """Measure one case. Raises torch.OutOfMemoryError if the batch does not fit."""
    config, cuda = config_of(kv), model.device.type == "cuda"
    expected = estimate(shape, config, context, batch, tokens)
    cli.note(f"{name} {kv} context {context} batch {batch}: about {expected:.0f} s")
    began = time.perf_counter()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    cache, first = new_cache(model, shape, config, context + MARGIN), 0.0
    if batch == 1:
        # Compiles kernels.
        prefill(model, cache, min(context, 2 * CHUNK), shape.vocabulary)
        cache = new_cache(model, shape, config, context + MARGIN)
        first = prefill(model, cache, context, shape.vocabulary)
    else:
        fill(cache, shape, context, batch, model.lm_head.weight)
    ids = torch.randint(shape.vocabulary, (batch, 1), device=model.device)
    choose = cuda and not config.compresses
    loop, backend = _fastest(lambda: looped(model, cache, ids, tokens), choose)
    took = loop
    if cuda:
        took, backend = _fastest(lambda: replayed(model, cache, ids), choose)
    weight = model.lm_head.weight
    seal = sealed(cache, weight.new_empty(batch, shape.kv_heads, 1, shape.dims))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return ModelRow(
        model=name,
        kv=kv,
        context=context,
        batch=batch,
        prefill_s=first,
        loop_ms=loop,
        step_ms=took,
        seal_ms=seal,
        tokens_per_s=batch * 1e3 / (took + seal),
        cache_gigabytes=cache.nbytes / 1e9,
        peak_gigabytes=peak / 1e9,
        estimated_s=expected,
        took_s=time.perf_counter() - began,
        backend=backend,
    )


def largest(shape: ModelShape, config: CacheConfig, context: int, free: int, most: int) -> int:
    """Rows of the largest batch whose caches fit in `free` bytes."""
    return max(1, min(most, int((free - SPARE) / row_bytes(shape, config, context))))


def rows(
    name: str,
    context: int,
    kinds: list[str],
    dtype: torch.dtype,
    tokens: int = 64,
    most: int = 256,
    device: str = "cuda",
) -> Iterator[ModelRow]:
    """Measure each kind of cache for a batch of 1 and the largest that fits. tokens: of the loop."""
    shape = SHAPES[name]
    model = build(shape, context + MARGIN, dtype, device)
    for kv in kinds:
        yield run(model, name, shape, kv, context, 1, tokens)
        batch = most
        if model.device.type == "cuda":
            batch = largest(shape, config_of(kv), context, torch.cuda.mem_get_info()[0], most)
        while batch > 1:
            try:
                yield run(model, name, shape, kv, context, batch, tokens)
                break
            except torch.OutOfMemoryError:
                cli.note(f"{kv}: a batch of {batch} does not fit")
            torch.cuda.empty_cache()  # not in the handler, whose frames hold tensors
            batch = batch * 9 // 10


def plan(name: str, context: int, kinds: list[str], tokens: int = 64, free: float = 130e9) -> str:
    """Say what `rows` would take on a GPU with `free` bytes beside the weights."""
    shape, lines = SHAPES[name], [f"{'kv':<24} {'batch':>6} {'cache GB':>9} {'about s':>8}"]
    for kv in kinds:
        config = config_of(kv)
        for batch in (1, largest(shape, config, context, int(free), 256)):
            size = batch * row_bytes(shape, config, context) / 1e9
            seconds = estimate(shape, config, context, batch, tokens)
            lines.append(f"{kv:<24} {batch:>6} {size:9.1f} {seconds:8.0f}")
    return "\n".join(lines)


def table(found: list[ModelRow]) -> str:
    lines = [
        f"{'model':<10} {'kv':<22} {'context':>8} {'batch':>6} {'prefill s':>9} {'loop ms':>8} "
        f"{'step ms':>8} {'seal ms':>8} {'tokens/s':>9} {'cache GB':>9} {'peak GB':>8}"
    ]
    for r in found:
        lines.append(
            f"{r.model:<10} {r.kv:<22} {r.context:>8} {r.batch:>6} {r.prefill_s:9.2f} "
            f"{r.loop_ms:8.2f} {r.step_ms:8.2f} {r.seal_ms:8.3f} {r.tokens_per_s:9.1f} "
            f"{r.cache_gigabytes:9.2f} {r.peak_gigabytes:8.1f}  {r.backend}"
        )
    return "\n".join(lines)


def count(text: str) -> int:
    """Parse a number of tokens: "100k" is 102400. Raises UserError."""
    try:
        value = int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UserError(f"[--context] a number of tokens, or thousands; got {text!r}; choose 100k")
    return value
