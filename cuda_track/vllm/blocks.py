"""The blocks of one layer: what is written to them and how they are attended to."""

# vLLM is an optional dependency, and has no wheel for most of the machines that check types.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track.kernels import launch
from cuda_track.kernels.pool import PoolPages
from cuda_track.vllm.settings import PAGE, RECENT, SINK, LayerCodecs
from mlxkv.errors import UserError

SUFFIX = ".exact"  # of the names of layers' windows in vLLM


@dataclass(frozen=True)
class Requests:
    """A batch, in blocks of one kind. Row b has the new tokens starts[b] .. starts[b + 1] - 1 of the batch.

    lengths: tokens of each request with the new ones, int32 [B]. starts: int32 [B + 1]. table: blocks, int32
    [B, most]. slots: block times tokens of a block, plus place, of each new token, int64 [N]. tokens: N. longest: new
    tokens of a request at most.
    """

    lengths: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    tokens: int
    longest: int


def pages_read(before: int) -> int:
    """Return before which page a step after `before` tokens reads codes: others have tokens among the last RECENT."""
    return max(0, (before + 1 - RECENT) // PAGE)


def tokens_that_fit(blocks: int, exact_tokens: int, length: int) -> int:
    """Return how many tokens `blocks` of a pool hold in sequences of `length` tokens, windows included."""
    window = -(-(RECENT + PAGE) // exact_tokens) + 1 + SINK // exact_tokens
    return blocks // (-(-length // PAGE) + min(window, -(-length // exact_tokens))) * length


@dataclass(frozen=True)
class Prefill:
    """A request whose context is decoded for flash attention. row: of the batch. first, last: of its tokens in the
    batch. before: tokens of its context."""

    row: int
    first: int
    last: int
    before: int


@dataclass(frozen=True)
class Run:
    """Neighbours that flash attention takes at once: without a context, or one with a context. total: keys of the last.
    starts, of_keys: where queries and keys of each begin, int32 on the device. pages: how many are read as codes, int32
    [1]."""

    requests: tuple[Prefill, ...]
    total: int
    starts: torch.Tensor
    of_keys: torch.Tensor
    pages: torch.Tensor

    @property
    def tokens(self) -> slice:
        """Of the batch."""
        return slice(self.requests[0].first, self.requests[-1].last)

    @property
    def longest(self) -> int:
        return max(one.last - one.first for one in self.requests)


def runs_of(prefills: list[Prefill], device: torch.device) -> list[Run]:
    """Return the runs of a batch; their numbers travel to the device together."""
    groups: list[list[Prefill]] = []
    for one in prefills:
        last = groups[-1][-1] if groups else None
        if last is None or one.before or last.before or last.last != one.first:
            groups.append([])
        groups[-1].append(one)
    numbers: list[int] = []
    for group in groups:
        starts = [one.first - group[0].first for one in group] + [group[-1].last - group[0].first]
        total = group[-1].before + starts[-1]
        of_keys = [0, total] if group[0].before else starts
        numbers += [*starts, *of_keys, last_page(group[0].before) - SINK // PAGE]
    moved, out = torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True), []
    for group in groups:
        count = len(group) + 1
        starts, of_keys, pages, moved = moved.split([count, count, 1, len(moved) - 2 * count - 1])
        total = group[-1].before + group[-1].last - group[0].first
        out.append(Run(tuple(group), total, starts, of_keys, pages))
    return out


def last_page(before: int) -> int:
    """Return before which page, of those behind the sink, a step after `before` tokens reads codes."""
    return max(pages_read(before), SINK // PAGE)


class Blocks:
    """pool: uint8 [blocks, G, 1, bytes of a record]. exact: [blocks, G, tokens, 2 D], keys then values."""

    def __init__(
        self, codecs: LayerCodecs, pool: torch.Tensor, exact: torch.Tensor, heads: int, dims: int
    ):
        self.codecs, self.pool, self.exact = codecs.codecs, pool, exact
        self.mean = None if codecs.mean is None else codecs.mean.to(pool.device)
        self.heads, self.dims, self.page_tokens = heads, dims, exact.shape[2]
        record = codecs.record
        if not pool.is_contiguous():  # kernels count records from the first
            raise UserError(
                f"[vllm] blocks of codes do not follow each other; got strides {pool.stride()} of {tuple(pool.shape)}; "
                "choose vLLM's own --kv-cache-dtype here"
            )
        flat = pool.view(pool.shape[0], heads, record.size)
        self.layouts, self.sides = record.layouts, record.views(flat)
        self.by_kernels = pool.device.type == "cuda" or launch.interpreted()
        if pool.device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Compile what the first request with a context would wait for: block 0 is decoded, which holds nothing."""
        table = torch.zeros(1, 2, dtype=torch.int32, device=self.pool.device)
        pages = PoolPages(self.codecs, self.layouts, self.sides, table[:, 1:], table[0, 1:], PAGE)
        for side, code in enumerate(self.codecs):
            self._decoded(pages, side, code.dims, self.exact.dtype)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, codes: Requests, near: Requests
    ) -> None:
        """Write new tokens [N, G, D] exactly, and the pages that they fill as codes. Pages that refused drafts had
        filled are encoded again."""
        if self.by_kernels:
            from cuda_track.vllm import kernels

            return kernels.write(self, key, value, codes, near)
        slots = near.slots[: near.tokens]
        there = slots >= 0
        block, place = slots[there] // self.page_tokens, slots[there] % self.page_tokens
        pair = torch.cat([self._centred(key[: near.tokens]), value[: near.tokens]], -1)
        self.exact[block, :, place] = pair[there].to(self.exact.dtype)
        starts = codes.starts.tolist()
        for row, length in enumerate(codes.lengths.tolist()):
            before = length - (starts[row + 1] - starts[row])
            for page in range(max(before, SINK) // PAGE, length // PAGE):
                x = self._exact(near.table[row], torch.arange(page * PAGE, page * PAGE + PAGE))
                for code, at, side, part in zip(
                    self.codecs, self.layouts, self.sides, x.chunk(2, -1), strict=True
                ):
                    stored = at.arrange(code.encode(part[None].float()))
                    for name, y in stored.items():
                        side[name][int(codes.table[row, page])] = y[0, 0]

    def _centred(self, key: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            return key
        return (key.float() - self.mean.squeeze(1)).to(key.dtype)

    def _exact(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return exact tokens of a request, [G, T, 2 D]."""
        block = table[tokens // self.page_tokens].long()
        return self.exact[block, :, tokens % self.page_tokens].transpose(0, 1)

    def context(self, codes: Requests, near: Requests, run: Run) -> torch.Tensor:
        """Return all tokens of a request as those after its context see them: [2, G, T, D]."""
        one, dtype, device = run.requests[0], self.exact.dtype, self.exact.device
        out = torch.empty(2, self.heads, run.total, self.dims, dtype=dtype, device=device)
        last = last_page(one.before) * PAGE
        if self.by_kernels:
            from cuda_track.vllm import kernels

            kernels.gather(self, near.table[one.row], min(SINK, run.total), last, out)
        else:
            for start, stop in ((0, min(SINK, run.total)), (last, run.total)):
                x = self._exact(near.table[one.row], torch.arange(start, max(start, stop)))
                out[:, :, start : max(start, stop)] = x.unflatten(-1, (2, -1)).movedim(2, 0)
        if last > SINK:
            table = codes.table[one.row : one.row + 1, SINK // PAGE : last // PAGE]
            pages = PoolPages(self.codecs, self.layouts, self.sides, table, run.pages, last - SINK)
            for side, code in enumerate(self.codecs):
                out[side, :, SINK:last] = self._decoded(pages, side, code.dims, dtype)
        return out

    def _decoded(self, pages: PoolPages, side: int, dims: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one side of pages in the model's domain, [G, T, D]."""
        code = self.codecs[side]
        if not self.by_kernels:
            return code.decode(pages.stored[side], dtype)[0]
        stored = torch.empty(
            1, self.heads, pages.tokens, dims, dtype=dtype, device=self.pool.device
        )
        launch.dequantize(pages, side, stored, 0)
        return (stored if code.transform is None else code.transform.restore(stored, dtype))[0]

    def decode(self, q: torch.Tensor, out: torch.Tensor, meta, near, scale: float) -> None:
        """Attend with the new tokens of the first `meta.decodes` requests, q and out [N, H, D]."""
        from cuda_track.vllm import kernels

        rows, new = meta.decodes, meta.new
        if meta.ragged is None:
            q, to = q[: rows * new], out[: rows * new]
            kernels.attend(self, q, to, rows, new, meta.requests, near.requests, scale)
            return
        padded = q.new_zeros(rows * new, *q.shape[1:])
        padded[meta.ragged] = q[: len(meta.ragged)]
        result = torch.empty_like(padded)
        kernels.attend(self, padded, result, rows, new, meta.requests, near.requests, scale)
        out[: len(meta.ragged)] = result[meta.ragged]

    def prefill(
        self, q, key, value, out, run: Run, codes: Requests, near: Requests, scale: float
    ) -> None:
        """Attend with the new tokens of a run, q, key, value and out [N, H or G, D] of the whole batch."""
        at = run.tokens
        if run.requests[0].before:
            key, value = self.context(codes, near, run).transpose(1, 2)
        else:
            key, value = key[at], value[at]
        causal(q[at], key, value, out[at], run, scale)


def causal(q, key, value, out, run: Run, scale: float) -> None:
    """Attend causally with queries [N, H, D] of a run, whose tokens are the last of its keys [T, G, D]."""
    if q.device.type == "cuda":
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

        flash_attn_varlen_func(
            q=q,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=run.starts,
            cu_seqlens_k=run.of_keys,
            max_seqlen_q=run.longest,
            max_seqlen_k=max(run.longest, run.total if run.requests[0].before else 0),
            softmax_scale=scale,
            causal=True,
            fa_version=get_flash_attn_version(),
        )
        return
    starts, of_keys = run.starts.tolist(), run.of_keys.tolist()
    for first, last, start, stop in zip(starts, starts[1:], of_keys, of_keys[1:], strict=False):
        sides = q[first:last], key[start:stop], value[start:stop]
        queries, keys, values = (x.transpose(0, 1)[None].float() for x in sides)
        new, total = last - first, stop - start
        seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        y = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[first:last] = y[0].transpose(0, 1).to(out.dtype)
