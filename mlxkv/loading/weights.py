"""Build a model by mlx-lm, read its weights, or one process' share of them, and choose their type."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from mlxkv import blas
from mlxkv.catalog.folder import Folder
from mlxkv.catalog.shapes import text_config
from mlxkv.errors import UserError, brief, cut
from mlxkv.loading import gguf_weights as gguf
from mlxkv.loading.outline import NotBuilt, classes_of
from mlxkv.patching.mark import own_make_cache
from mlxkv.patching.record import PROMPT, record
from mlxkv.patching.trees import flat

AT_ONCE = 64 << 20  # bytes of weights that are read before progress is told
DECODED = 1 << 30  # bytes of matrices in float32


def build(
    folder: Folder,
    dtype: str | None = None,
    bits: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[nn.Module, dict]:
    """Return the model, its weights not evaluated yet, and the configuration as mlx-lm completes it.

    dtype: what `set_dtype` is asked for, so that a GGUF file is decoded to it. bits: of the codes that matrices are
    rounded to where they come in none. progress: of a GGUF file, which is read at once. Raises UserError.
    """
    from mlx_lm.utils import load_model

    kind = cut(folder.config["model_type"])
    try:
        model_class, args_class = classes_of(folder.config)
    except NotBuilt as error:
        raise UserError(
            f"[load] {error}; got model_type {kind!r} in {folder.path}; choose a model that mlx-lm supports, or a "
            "newer mlx-lm"
        ) from None
    try:
        if not folder.is_gguf:
            # Of mlx-lm itself: `mlxkv run` gives what a program loads other caches.
            model, config = unwrap(load_model)(folder.path, lazy=True)
            if bits is not None:
                nn.quantize(model, class_predicate=lambda _, module: _rounded(module, bits))
            return model, config
        computed = getattr(mx, dtype or _usual(folder.config["dtype"]))
        arrays, modules = gguf.read_weights(folder, computed, bits, progress)
        model = model_class(args_class.from_dict(folder.config))
        arrays = model.sanitize(arrays)
        nn.quantize(model, class_predicate=lambda path, _: modules.get(path, False))
        model.load_weights(list(arrays.items()))
        model.eval()
        return model, dict(folder.config)
    except Exception as error:  # mlx-lm raises anything when files are wrong
        raise UserError(
            f"[load] configuration and weights do not fit together ({type(error).__name__}: "
            f"{brief(error)}); got a {kind} in {folder.path}; fetch the model again"
        ) from error


def _rounded(module: nn.Module, bits: int) -> bool | dict[str, int]:
    """Return how a module is rounded to codes, if it holds a matrix whose rows take whole groups."""
    if not hasattr(module, "to_quantized"):
        return False
    groups = (n for n in (64, 32) if module["weight"].shape[-1] % n == 0)
    return next(({"group_size": n, "bits": bits} for n in groups), False)


def read_model(model: nn.Module, progress: Callable[[int, int], None] | None) -> None:
    """Evaluate the weights, in chunks if progress is shown."""
    weights = [x for _, x in flat(model.parameters())]
    if progress is None:
        mx.eval(weights)
        return
    total, count, batch = sum(x.nbytes for x in weights), 0, []
    progress(0, total)
    for x in weights:
        batch.append(x)
        if sum(array.nbytes for array in batch) >= AT_ONCE or x is weights[-1]:
            mx.eval(batch)
            count += sum(array.nbytes for array in batch)
            progress(count, total)
            batch = []


def try_out(model: nn.Module, folder: Folder) -> None:
    """Raise UserError for a model whose code fails on two tokens and on a third. Nothing is computed: MLX
    is lazy."""
    try:
        error = record(model, own_make_cache(model)(), (PROMPT, 1)).error
    except Exception as fault:  # of the code that makes caches
        error = fault
    if error is not None:
        raise UserError(
            f"[load] config.json describes a model that cannot run ({type(error).__name__}: "
            f"{brief(error)}); got a {cut(folder.config['model_type'])} in {folder.path}; fetch the "
            "model again"
        ) from error


def _usual(stored: str) -> str:
    """Return the type to compute in where nobody asks for one."""
    return "float32" if mx.default_device() == mx.Device(mx.cpu) else stored


def set_dtype(model: nn.Module, dtype: str | None) -> list[str]:
    """Convert the weights if asked, or if 16 bits are slow here. Returns notes for the user."""
    have = str(dtype_of(model)).split(".")[-1]
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
        return []
    if _usual(have) == have:
        return []
    model.set_dtype(mx.float32)
    return [f"no GPU: {have} weights run as float32, which is faster here (--dtype overrides)"]


def fit_cpu(model: nn.Module) -> None:
    """Prepare a model for products on a CPU. Codes are decoded up to DECODED bytes, which is faster than to decode them
    in every product. The reference BLAS of MLX's wheel for Linux adds up columns several times faster than rows: for
    it matrices stay [out, in], but lie in memory by columns."""
    from mlx_lm.utils import dequantize_model

    sizes = (m.weight.size * 32 // m.bits * 4 for m in model.modules() if hasattr(m, "bits"))
    if 0 < sum(sizes) <= DECODED:
        dequantize_model(model)
        model.set_dtype(mx.float32)
    if blas.in_front:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and "scales" not in module:
            module.weight = mx.contiguous(module.weight.T).T
            mx.eval(module.weight)  # one by one: the matrix by rows is let go


def dtype_of(model: nn.Module) -> mx.Dtype:
    """Return the floating type of most arrays; quantised weights count by their scales."""
    kinds = [x.dtype for _, x in flat(model.parameters()) if mx.issubdtype(x.dtype, mx.floating)]
    return max(set(kinds), key=kinds.count, default=mx.float32)


def check_shares(model: nn.Module, folder: Folder, size: int) -> None:
    """Raise UserError for a model that cannot be spread over `size` processes."""
    kind, text = cut(folder.config["model_type"]), text_config(folder.config)
    if not hasattr(model, "shard"):
        raise UserError(
            f"[load] mlx-lm cannot spread this kind of model over processes; got a {kind} for {size} "
            "processes; choose a llama, qwen2, qwen3 or another that has `shard`, or one process"
        )
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or size
    if heads % size:
        raise UserError(
            f"[load] kv heads cannot be shared evenly; got {heads} of them in {folder.path} for {size} "
            "processes; choose a number that divides them"
        )


def take_share(model: nn.Module, folder: Folder, group: mx.distributed.Group) -> None:
    """Keep this process's share of the weights, and read them. Raises UserError."""
    try:
        model.shard(group)  # pyright: ignore[reportOptionalCall]  # mlx: attributes are None
    except ValueError as error:  # widths that do not divide, or groups of quantised weights
        raise UserError(
            f"[load] weights cannot be shared evenly ({brief(error)}); got {folder.path} for "
            f"{group.size()} processes; choose another number of them"
        ) from None
    without_gradients(model)
    mx.eval(model.parameters())


class _Single:
    """A group of one process, for layers that sum nothing but gradients."""

    def size(self) -> int:
        return 1


def without_gradients(model: nn.Module) -> None:
    """Let layers that MLX spread over processes leave out what only their gradients need: a Python function
    for each of them in each step, five a layer of a llama, of 20 us on the host each."""
    for module in model.modules():
        if isinstance(module, (AllToShardedLinear, QuantizedAllToShardedLinear)):
            module.group = _Single()  # pyright: ignore[reportAttributeAccessIssue]  # its size is read
