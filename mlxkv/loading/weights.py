"""Build a model with mlx-lm, read its weights, or one process's share of them, and choose their dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, QuantizedAllToShardedLinear

from mlxkv import startup
from mlxkv.catalog.folder import Folder
from mlxkv.catalog.shapes import text_config
from mlxkv.errors import UserError, brief, cut
from mlxkv.loading import gguf_weights as gguf
from mlxkv.loading.outline import NotBuilt, classes_of
from mlxkv.metal.gpu import array_memory
from mlxkv.patching.record import PROMPT, record
from mlxkv.patching.trees import flat, own_caches

AT_ONCE = 64 << 20  # bytes of weights read between two progress calls
DECODED = 1 << 30  # most bytes of matrices decoded to float32
SHARE = 4  # one in so many bytes of memory may be weights in float32 beside those in 16 bits


def build(
    folder: Folder,
    dtype: str | None = None,
    bits: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[nn.Module, dict]:
    """Return the model, with its weights not evaluated yet, and the configuration as completed by mlx-lm.

    dtype: as for `set_dtype`; a GGUF file is decoded to it. bits: code width to which unquantised matrices are
    rounded. progress: for a GGUF file, which is read immediately. Raises UserError.
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
            # mlx-lm's own function: `mlxkv run` wraps it to attach caches to a program's models.
            model, config = unwrap(load_model)(folder.path, lazy=True)
            if bits is not None:
                nn.quantize(model, class_predicate=lambda _, module: _rounded(module, bits))
            if folder.adapter is not None:
                _adapt(model, folder.adapter)
            return model, config
        computed = getattr(mx, dtype or _usual(folder.config["dtype"]))
        arrays, modules = gguf.read_weights(folder, computed, bits, progress)
        model = model_class(args_class.from_dict(folder.config))
        arrays = model.sanitize(arrays)
        nn.quantize(model, class_predicate=lambda path, _: modules.get(path, False))
        model.load_weights(list(arrays.items()))
        model.eval()
        return model, dict(folder.config)
    except UserError:
        raise
    except Exception as error:  # mlx-lm may raise any error for damaged files
        raise UserError(
            f"[load] configuration and weights do not fit together ({type(error).__name__}: "
            f"{brief(error)}); got a {kind} in {folder.path}; fetch the model again"
        ) from error


def _adapt(model: nn.Module, adapter: Path) -> None:
    """Put mlx-lm's adapter beside the weights, as its `load(adapter_path=)` does. Raises UserError."""
    from mlx_lm.utils import load_adapters

    try:
        load_adapters(model, str(adapter))
        model.eval()  # without dropout
    except Exception as error:  # of any kind, for an adapter of another model
        raise UserError(
            f"[--adapter-path] the adapter does not fit the model ({type(error).__name__}: {brief(error)}); got "
            f"{adapter}; choose the model that it was made with"
        ) from error


def _rounded(module: nn.Module, bits: int) -> bool | dict[str, int]:
    """Return the quantisation of a module, if it holds a matrix whose rows are whole groups."""
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
    """Raise UserError if the model's code fails on a prompt of two tokens or on a third. Computes nothing: MLX is
    lazy."""
    try:
        error = record(model, own_caches(model), (PROMPT, 1)).error
    except Exception as fault:  # from the code that makes caches
        error = fault
    if error is not None:
        raise UserError(
            f"[load] config.json describes a model that cannot run ({type(error).__name__}: "
            f"{brief(error)}); got a {cut(folder.config['model_type'])} in {folder.path}; fetch the "
            "model again"
        ) from error


def _usual(stored: str) -> str:
    """Return the default dtype to compute in."""
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


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 in this block, where memory allows: 16 bits change next tokens by themselves. The weights are
    then what they were."""
    before = model.parameters()
    arrays = [x for _, x in flat(before) if mx.issubdtype(x.dtype, mx.floating)]
    if sum(2 * x.nbytes for x in arrays if x.dtype != mx.float32) * SHARE > array_memory():
        yield
        return
    try:
        model.set_dtype(mx.float32)
        yield
    finally:
        model.update(before)


def fit_cpu(model: nn.Module) -> None:
    """Prepare a model for matrix products on a CPU. Codes are decoded, up to DECODED bytes, which is faster than
    decoding them in every product. The reference BLAS in MLX's Linux wheel sums columns several times faster than
    rows: for it matrices stay [out, in] but are stored column-major."""
    from mlx_lm.utils import dequantize_model

    sizes = (m.weight.size * 32 // m.bits * 4 for m in model.modules() if hasattr(m, "bits"))
    if 0 < sum(sizes) <= DECODED:
        dequantize_model(model)
        model.set_dtype(mx.float32)
    if startup.has_openblas:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and "scales" not in module:
            module.weight = mx.contiguous(module.weight.T).T
            mx.eval(module.weight)  # one by one, so that each row-major matrix is freed


def dtype_of(model: nn.Module) -> mx.Dtype:
    """Return the most common floating dtype of the weights; quantised ones count by their scales."""
    kinds = [x.dtype for _, x in flat(model.parameters()) if mx.issubdtype(x.dtype, mx.floating)]
    return max(set(kinds), key=kinds.count, default=mx.float32)


def check_shares(model: nn.Module, folder: Folder, size: int) -> None:
    """Raise UserError if the model cannot be sharded over `size` processes."""
    kind, text = cut(folder.config["model_type"]), text_config(folder.config)
    if folder.adapter is not None:
        raise UserError(
            f"[--adapter-path] adapters are for one process; got {size}; make one model of both with mlx_lm.fuse"
        )
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
    except ValueError as error:  # indivisible widths or quantisation groups
        raise UserError(
            f"[load] weights cannot be shared evenly ({brief(error)}); got {folder.path} for "
            f"{group.size()} processes; choose another number of them"
        ) from None
    without_gradients(model)
    mx.eval(model.parameters())


class _Single:
    """A group of one process, for layers that sum only gradients."""

    def size(self) -> int:
        return 1


def without_gradients(model: nn.Module) -> None:
    """Stop sharded layers from doing work that only gradients need: a Python function per linear map and step, 20 us
    on the host each, five in a layer of a llama."""
    for module in model.modules():
        if isinstance(module, (AllToShardedLinear, QuantizedAllToShardedLinear)):
            module.group = _Single()  # pyright: ignore[reportAttributeAccessIssue]  # its size is read
