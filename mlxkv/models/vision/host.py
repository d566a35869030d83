"""`VisionModel`: a model of mlx-vlm behind the interface of mlx-lm's, tokens and caches in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.errors import UserError

NAMES = ("mlx-lm", "mlx-vlm")


def check_host(host: str | None) -> None:
    """Raise UserError for an unknown name of a library that loads models, or for mlx-vlm where it is missing."""
    if host is not None and host not in NAMES:
        raise UserError(
            f"[load] no such host of models; got {host!r}; choose from {', '.join(NAMES)}"
        )
    if host == "mlx-vlm" and find_spec("mlx_vlm") is None:
        raise UserError(
            '[load] images need mlx-vlm, which is not installed; got Python without it; pip install "mlxkv[vlm]"'
        )


class Reading:
    """What a prompt with images gives a model besides its embeddings.

    given: arguments of the language model, for the whole prompt. shift: [1, 1], by how much positions of later
    tokens differ from their number, in families whose images take positions in two dimensions; or None.
    """

    def __init__(self):
        self.given: dict[str, Any] = {}
        self.shift: mx.array | None = None


class VisionModel(nn.Module):
    """inner: of mlx-vlm. reading: of the one sequence whose prompt has images."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.reading = Reading()

    @property
    def _language(self) -> nn.Module:
        return self.inner.language_model

    @property
    def layers(self) -> list:
        return self._language.layers

    @property
    def model_type(self) -> str:
        return str(getattr(self.inner.config, "model_type", ""))

    def make_cache(self) -> list:
        """mlx-vlm's own caches; `attach` puts compressed ones in their places."""
        from mlx_vlm.models.cache import make_prompt_cache

        return make_prompt_cache(self._language)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """inputs: [B, T] -> logits [B, T, vocabulary]. input_embeddings: [1, T, hidden] of a part of the prompt
        that `embed` has read."""
        language, more = self._language, {}
        if input_embeddings is not None:
            more = {**self.reading.given, "inputs_embeds": input_embeddings}
            if inputs.shape[1] > 1:
                more["n_to_process"] = inputs.shape[1]
        elif hasattr(language, "_rope_deltas"):
            # Else positions would be those of the last prompt that the model has read, whoever's it was.
            language._position_ids = None
            shift = self.reading.shift
            batch = inputs.shape[0]
            if shift is None or batch != shift.shape[0]:
                shift = mx.zeros((batch, 1), mx.int32)
            more["rope_deltas"] = shift
        out = language(inputs, cache=cache, **more)
        return out if isinstance(out, mx.array) else out.logits

    def embed(self, tokens: Sequence[int], inputs: dict[str, Any]) -> mx.array:
        """Embeddings [T, hidden] of a prompt with images, to be read from its first token on. inputs: what the
        processor makes of the images."""
        inputs, ids = dict(inputs), mx.array([list(tokens)])
        pixels = inputs.pop("pixel_values", None)
        mask = inputs.pop("attention_mask", None)
        found = self.inner.get_input_embeddings(
            ids, pixels, mask=mx.ones_like(ids) if mask is None else mask, **inputs
        )
        given = {name: one for name, one in found.to_dict().items() if one is not None}
        embeddings = given.pop("inputs_embeds")
        mx.eval(embeddings, [one for one in given.values() if isinstance(one, mx.array)])
        self.reading.given, self.reading.shift = inputs | given, given.get("rope_deltas")
        return embeddings[0]

    def embed_inputs(self, tokens: mx.array, pixel_values: list[dict[str, Any]]) -> mx.array:
        """`embed`, as mlx-lm's server asks for it. tokens: [T]. pixel_values: one: of all images."""
        (inputs,) = pixel_values
        return self.embed(tokens.tolist(), inputs)

    def forget(self) -> None:
        """The sequence with images is over."""
        self.reading = Reading()


def load_inner(path: Path) -> nn.Module:
    """The model of a folder, its weights not evaluated yet. Raises what mlx-vlm raises."""
    from mlx_vlm.utils import load_model

    inner = load_model(path, lazy=True)
    if not isinstance(getattr(inner, "language_model", None), nn.Module):
        raise ValueError("it has no language model")
    return inner
