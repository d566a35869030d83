"""Attention on the GPU: try what is there, forward and backward, and take the fastest that is right."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from configs import Config
from model import Model, attend, window_mask
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

SMALL = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
}
FULL = ("flash", "cudnn", "cudnn-repeat")
SLIDING = ("flex", "flex-small", "blocks")
Attend = Callable[[Tensor, Tensor, Tensor, object], Tensor]


def repeated(q: Tensor, k: Tensor, v: Tensor, mask=None) -> Tensor:
    """Attend causally with keys and values repeated for each query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def pair_mask(window: int, heads: int, device: torch.device) -> Tensor:
    """Return which of the keys of the block before and of the own one a query sees [heads * w, 2 w]."""
    at = torch.arange(2 * window, device=device)
    ago = at[window:, None] - at
    return ((ago >= 0) & (ago < window)).repeat(heads, 1)


def blocks(q: Tensor, k: Tensor, v: Tensor, mask=None, *, window: int) -> Tensor:
    """Attend to the last `window` tokens by blocks of that length, each to itself and the one before.

    q: [B, H, L, D], k and v: [B, G, L, D]; L a multiple of `window`. Query heads of one key head
    become queries of one block, so nothing is repeated.
    """
    (B, H, L, D), G = q.shape, k.shape[1]
    n, R = L // window, H // G
    first = F.scaled_dot_product_attention(
        *(x[:, :, :window] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    if n == 1:
        return first

    def pairs(x: Tensor) -> Tensor:
        own = x.unflatten(2, (n, window))
        both = torch.cat([own[:, :, :-1], own[:, :, 1:]], dim=3)  # [B, G, n - 1, 2 w, D]
        return both.transpose(1, 2).flatten(0, 1)

    rest = q[:, :, window:].unflatten(2, (n - 1, window)).unflatten(1, (G, R))
    rest = rest.permute(0, 3, 1, 2, 4, 5).reshape(B * (n - 1), G, R * window, D)
    seen = pair_mask(window, R, q.device)
    out = F.scaled_dot_product_attention(rest, pairs(k), pairs(v), attn_mask=seen)
    out = out.view(B, n - 1, G, R, window, D).permute(0, 2, 3, 1, 4, 5).reshape(B, H, L - window, D)
    return torch.cat([first, out], dim=2)


def full(name: str) -> Attend:
    """Return causal attention, and switch torch to the kernels that it needs."""
    cudnn = name.startswith("cudnn")
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_flash_sdp(not cudnn)
    return repeated if name == "cudnn-repeat" else attend


def sliding(name: str, window: int) -> Attend:
    """Return sliding attention; rows no longer than the window have no mask and are causal."""
    if name == "blocks":
        some: Attend = partial(blocks, window=window)
    elif name == "flex-small":
        some = lambda q, k, v, mask: flex_attention(  # noqa: E731
            q, k, v, block_mask=mask, enable_gqa=True, kernel_options=SMALL
        )
    else:
        some = attend
    return lambda q, k, v, mask: attend(q, k, v, None) if mask is None else some(q, k, v, mask)


def _run(fn: Attend, q: Tensor, k: Tensor, v: Tensor, mask, back: Tensor) -> list[Tensor]:
    for x in (q, k, v):
        x.grad = None
    out = fn(q, k, v, mask)
    out.backward(back)
    return [out.detach(), q.grad, k.grad, v.grad]


def _inputs(config: Config, length: int, rows: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    make = torch.Generator("cuda").manual_seed(seed)
    heads = (config.heads, config.kv_heads, config.kv_heads, config.heads)
    return [
        torch.randn(rows, h, length, config.head_dim, generator=make, device="cuda", dtype=dtype)
        for h in heads
    ]


def measure(config: Config, fn: Attend, window: int | None) -> tuple[float, float]:
    """Return milliseconds of forward and backward over 16,384 tokens in rows of 8192, and the largest error.

    The error is relative to float32 plain operations, on rows of 1024, of output and gradients.
    """
    device = "cuda"
    torch._dynamo.reset()
    if window is not None:  # SDPA's own kernels are the same compiled or not
        fn = torch.compile(fn, dynamic=False)
    *qkv, back = _inputs(config, 1024, 1, torch.float32, 1)
    for x in qkv:
        x.requires_grad_()
    at = torch.arange(1024, device=device)
    ago = at[:, None] - at
    seen = (ago >= 0) & (ago < (window or 1024))

    def plain(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v

    want = _run(plain, *qkv, None, back)
    small = [x.detach().bfloat16().requires_grad_() for x in qkv]
    mask = None if window is None else window_mask(1024, window, device)
    got = _run(fn, *small, mask, back.bfloat16())
    error = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
    *qkv, back = _inputs(config, 8192, 2, torch.bfloat16, 2)
    for x in qkv:
        x.requires_grad_()
    mask = None if window is None else window_mask(8192, window, device)
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        _run(fn, *qkv, mask, back)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times[1:])[2], error


def best(config: Config, names: tuple[str, ...], make: Callable[[str], Attend], window=None) -> str:
    """Return the name of the fastest way that works and is right; prints what it saw."""
    times: dict[str, float] = {}
    for name in names:
        try:
            ms, error = measure(config, make(name), window)
        except Exception as problem:  # any failure of a kernel only means that another is taken
            print(f"attention {name:14} fails: {type(problem).__name__}: {str(problem)[:160]!r}")
            continue
        print(f"attention {name:14} {ms:8.2f} ms, error {error:.4f}", flush=True)
        if error < 0.03:  # NaN is not
            times[name] = ms
    return min(times, key=times.__getitem__, default=names[-1])


def choose(model: Model, wish: str, sliding_wish: str) -> dict[str, str]:
    """Give each layer the attention asked for, or with "auto" the fastest; returns what was chosen."""
    config = model.config
    windowed = any(config.local(layer) for layer in range(config.layers))
    if wish == "auto":
        wish = best(config, FULL, full)
    chosen = {"full": wish}
    whole = full(wish)
    if windowed:
        if sliding_wish == "auto":
            sliding_wish = best(config, SLIDING, lambda n: sliding(n, config.window), config.window)
        chosen["sliding"] = sliding_wish
    part = sliding(sliding_wish, config.window) if windowed else None
    for block in model.model.layers:
        block.self_attn.attend = part if block.self_attn.window is not None else whole
    torch._dynamo.reset()
    return chosen
