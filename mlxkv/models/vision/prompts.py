"""Prompts with images: messages as a family's chat template wants them, text and images to tokens and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

# What is no input of a model, of what processors return.
NOT_ARRAYS = ("input_ids", "attention_mask")


class Processor:
    """mlx-vlm's processor of a model. kind: its model_type."""

    def __init__(self, path: Path, kind: str, image_token: int | None):
        from mlx_vlm.utils import load_image_processor, load_processor

        self.kind, self._image_token = kind, image_token
        self._own = load_processor(path, add_detokenizer=False)
        images = load_image_processor(path)
        if images is not None:
            self._own.image_processor = images

    @property
    def template(self) -> str | None:
        """The chat template, where it came with the processor and not with the tokenizer."""
        found = getattr(self._own, "chat_template", None)
        return found if isinstance(found, str) else None

    def message(self, role: str, text: str, images: int) -> dict:
        """A message with places for images, as this family's template wants it. Raises UserError."""
        from mlx_vlm.prompt_utils import get_message_json

        try:
            found = get_message_json(self.kind, text, role, num_images=images)
        except ValueError as error:
            raise UserError(f"[chat] {self.kind} takes no such message: {error}") from None
        if not isinstance(found, dict):
            raise UserError(
                f"[chat] prompts of {self.kind} are no chats; got an image; leave it out"
            )
        return found

    def tokens(self, text: str, images: Sequence[Image]) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a rendered chat, with as many in place of each image as it takes, and the arrays of the
        images. Raises UserError where text and images do not fit together."""
        from mlx_vlm.utils import prepare_inputs, should_add_special_tokens

        try:
            found = prepare_inputs(
                self._own,
                images=list(images),
                prompts=[text],
                image_token_index=self._image_token,
                add_special_tokens=should_add_special_tokens(self.kind, self._own),
            )
        except Exception as error:  # a processor of somebody else's, on somebody else's image
            said = " ".join(str(error).split())[:120]
            raise UserError(
                f"[chat] the model's processor refuses this ({type(error).__name__}: {said}); got "
                f"{len(images)} images; try another image"
            ) from None
        tokens = found["input_ids"].tolist()
        more = {
            name: one for name, one in found.items() if name not in NOT_ARRAYS and one is not None
        }
        if len(tokens) != 1:
            raise UserError(
                f"[chat] the model's processor made {len(tokens)} prompts of one; use another model"
            )
        return tokens[0], more
