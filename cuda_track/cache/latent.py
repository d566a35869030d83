"""`LatentKVCache`: the compressed cache of a layer with multi-head latent attention (MLA), and attention over it.

transformers hands a cache the latents [B, 1, L, R] in place of keys, and the rotary keys [B, 1, L, N], which all heads
share, in place of values. A latent is key and value at once, so one record of it is stored; rotary keys stay exact, or
those in pages take 8 bits (`CacheConfig.rotary`). One new token, or a few, meet the latents as they are, with absorbed
queries (DeepSeek-V2, arXiv 2405.04434, section 2.1.2); for many the model's code makes keys and values of every head.
Spec: `mlxkv.spec.affine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from cuda_track.cache import attention
from cuda_track.cache.compressed import CompressedKVCache
from cuda_track.cache.stores import Codes, codecs_of
from cuda_track.cache.view import CodePages, Pair, View
from cuda_track.codec.codec import both
from mlxkv.formats.records import NAMES

Expand = Callable[[torch.Tensor, torch.Tensor], Pair]


@dataclass(frozen=True)
class Heads:
    """What the heads of a layer make of a latent.

    keys: [H, D, R], values: [H, Dv, R], maps from latents to keys without their rotary part and to values. expand: the
    model's own code, (latents, rotary keys) -> keys and values of every head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    expand: Expand

    def to(self, dtype: torch.dtype) -> Heads:
        return replace(self, keys=self.keys.to(dtype), values=self.values.to(dtype))


@dataclass(frozen=True)
class LatentView(View):
    """A view whose keys are latents and whose values are rotary keys. heads: of the layer that attends."""

    heads: Heads | None = None

    @property
    def latents(self) -> View:
        """The view whose keys and values are the latents, of one kv head."""
        sink, pages = self.sink and (self.sink[0], self.sink[0]), None
        if self.pages is not None:
            (run,) = self.pages.parts
            code, stored = run.codecs[0], run.stored[0]
            pages = CodePages((code, code), (stored, stored), run.tokens)
        return View((self.recent[0], self.recent[0]), sink, pages)

    @property
    def attending(self) -> Heads:
        """The heads of the layer that attends; without them the view came past `models.latent`."""
        assert self.heads is not None
        return self.heads

    def to(self, dtype: torch.dtype) -> LatentView:
        """Return the same in another type; of a view without pages."""
        recent = both(lambda x: x.to(dtype), self.recent)
        return replace(self, recent=recent, heads=self.attending.to(dtype))

    def rotary(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rotary keys of all tokens, [B, 1, T, N]."""
        parts = self.parts(1, dtype)
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


class LatentKVCache(CompressedKVCache):
    """As CompressedKVCache, for a `config` of `CacheConfig.of_latents`: keys are latents, values rotary keys."""

    def _view(self, recent: Pair) -> LatentView:
        return LatentView(recent, self.sink, self._pages())

    def _new_store(self, recent: Pair) -> Codes:
        dims = both(lambda x: x.shape[3], recent)
        return Codes(self.config, codecs_of(self.config, dims, self.layer_maps, recent[0].device))

    @property
    def state(self) -> dict:
        """As mlxkv saves it: exact rotary keys of the tokens in pages stand beside the pages."""
        tree = super().state
        if "pages" not in tree or self.config.rotary < 16:
            return tree
        keys, values = (tree["pages"][name] for name in NAMES)
        return tree | {"pages": {NAMES[0]: keys}, "rotary": values["values"]}

    def _restore(self, header: dict, tree: dict) -> None:
        if header["pages"] and self.config.rotary == 16:
            held = {NAMES[0]: tree["pages"][NAMES[0]], NAMES[1]: {"values": tree["rotary"]}}
            tree = tree | {"pages": held}
        super()._restore(header, tree)


def attend(
    queries: torch.Tensor, view: LatentView, scale: float, mask: attention.Mask = None
) -> torch.Tensor:
    """Attend with queries: [B, H, L, D + N], with their rotary part behind -> [B, H, L, Dv]. mask: as in
    `attention.attend`.

    A few new tokens multiply with codes; many decode the latents of this layer.
    """
    if queries.shape[2] > attention.DECODE_TOKENS:
        return attention.attend(queries, expanded(view, queries.dtype), scale, mask)
    heads = view.attending
    plain, rotary_queries = queries.split(
        [heads.keys.shape[1], queries.shape[3] - heads.keys.shape[1]], 3
    )
    added = (rotary_queries.float() @ view.rotary(torch.float32).mT) * scale
    added = attention.masked(added, mask)
    out = attention.decode_codes(plain @ heads.keys, view.latents, scale, added)
    return out @ heads.values.mT


def expanded(view: LatentView, dtype: torch.dtype) -> View:
    """Return the keys and values of every head."""
    return View(view.attending.expand(*view.whole(dtype)))
