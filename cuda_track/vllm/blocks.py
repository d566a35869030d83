"""The blocks of one layer: what is written to them and how they are attended to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from cuda_track.kernels import launch
from cuda_track.kernels.pool import PoolPages
from cuda_track.vllm.settings import PAGE, RECENT, SINK, LayerCodecs


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


def together(prefills: list) -> Iterator[list]:
    """Yield runs of neighbours that flash attention takes at once: those without a context; each other one alone."""
    run: list = []
    for one in prefills:
        if run and (one.before or run[-1].before or run[-1].last != one.first):
            yield run
            run = []
        run.append(one)
    if run:
        yield run


class Blocks:
    """pool: uint8 [blocks, G, 1, bytes of a record]. exact: [blocks, G, tokens, 2 D], keys then values."""

    def __init__(
        self, codecs: LayerCodecs, pool: torch.Tensor, exact: torch.Tensor, heads: int, dims: int
    ):
        self.codecs, self.pool, self.exact = codecs.codecs, pool, exact
        self.mean = None if codecs.mean is None else codecs.mean.to(pool.device)
        self.heads, self.dims, self.page_tokens = heads, dims, exact.shape[2]
        record = codecs.record
        flat = pool.view(pool.shape[0], heads, record.size)
        self.layouts, self.sides = record.layouts, record.views(flat)
        self.by_kernels = pool.device.type == "cuda" or launch.interpreted()
        if pool.device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Compile what the first request with a context would wait for: block 0 is decoded, which holds nothing."""
        table, count = (
            torch.full(x, y, dtype=torch.int32, device=self.pool.device)
            for x, y in (((1, 1), 0), ((1,), 1))
        )
        pages = PoolPages(self.codecs, self.layouts, self.sides, table, count, PAGE)
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

    def context(
        self, codes: Requests, near: Requests, row: int, before: int, total: int
    ) -> torch.Tensor:
        """Return all `total` tokens of a request as those after the first `before` see them: [2, G, T, D]."""
        dtype, device = self.exact.dtype, self.exact.device
        out = torch.empty(2, self.heads, total, self.dims, dtype=dtype, device=device)
        sink, last = min(SINK, total), max(pages_read(before), SINK // PAGE) * PAGE
        for start, stop in ((0, sink), (last, total)):
            if start < stop:
                x = self._exact(near.table[row], torch.arange(start, stop, device=device))
                out[:, :, start:stop] = x.unflatten(-1, (2, -1)).movedim(2, 0)
        if last > SINK:
            table = codes.table[row : row + 1, SINK // PAGE : last // PAGE].contiguous()
            count = torch.full((1,), table.shape[1], dtype=torch.int32, device=device)
            pages = PoolPages(self.codecs, self.layouts, self.sides, table, count, last - SINK)
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
        self, q, key, value, out, run: list, codes: Requests, near: Requests, scale: float
    ) -> None:
        """Attend with the new tokens of a run of requests without a context, or of one with a context."""
        first, last = run[0].first, run[-1].last
        if not run[0].before:
            starts = [one.first - first for one in run] + [last - first]
            causal(
                q[first:last], key[first:last], value[first:last], out[first:last], starts, scale
            )
            return
        one = run[0]
        total = one.before + last - first
        k, v = self.context(codes, near, one.row, one.before, total).transpose(1, 2)
        causal(q[first:last], k, v, out[first:last], [0, last - first], scale)


def causal(q, key, value, out, starts: list[int], scale: float) -> None:
    """Attend causally with queries [N, H, D] of requests that start at `starts`; keys [T, G, D] are as many, or those
    of one request whose last tokens the queries are."""
    if q.device.type != "cuda":
        for first, last in zip(starts, starts[1:], strict=False):
            own = slice(first, last) if len(key) == len(q) else slice(None)
            x = (y.transpose(0, 1)[None].float() for y in (q[first:last], key[own], value[own]))
            queries, keys, values = x
            seen = torch.ones(last - first, keys.shape[2], dtype=torch.bool).tril(
                keys.shape[2] - (last - first)
            )
            y = scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            )
            out[first:last] = y[0].transpose(0, 1).to(out.dtype)
        return
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    of_queries = torch.tensor(starts, dtype=torch.int32, device=q.device)
    of_keys = of_queries if len(key) == len(q) else of_queries.new_tensor([0, len(key)])
    flash_attn_varlen_func(
        q=q,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=of_queries,
        cu_seqlens_k=of_keys,
        max_seqlen_q=longest,
        max_seqlen_k=longest if len(key) == len(q) else len(key),
        softmax_scale=scale,
        causal=True,
        fa_version=get_flash_attn_version(),
    )
