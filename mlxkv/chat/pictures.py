"""A conversation with images: each is part of the message that follows it."""

from __future__ import annotations

from mlxkv.chat.session import Session
from mlxkv.errors import MachineError, UserError
from mlxkv.faults import reason
from mlxkv.models.vision.images import MOST_IMAGES, read_source


class PictureSession(Session):
    """One chat on a model that mlx-vlm has loaded.

    A message with images has the whole conversation read again, with all of its images; behind it, texts go on
    from the cache. pending: images of the next message.
    """

    def reset(self) -> None:
        self.pending: list = []
        super().reset()

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self.loaded.model.forget()
        self._inputs: dict | None = None  # of the images of a prompt that is to be read whole

    def show(self, source: str, where: str = "/image") -> tuple[int, int]:
        """Add an image, by its path or a data URL, to the next message. Returns its width and height."""
        image = read_source(source, where)
        self.add(image, where)
        return image.size

    def add(self, image, where: str) -> None:
        """Add an image that has been read to the next message. where: what named it."""
        if len(self._images(self.messages)) + len(self.pending) >= MOST_IMAGES:
            raise UserError(
                f"[{where}] a conversation takes {MOST_IMAGES} images; got one more; /reset begins another"
            )
        self.pending.append(image)

    def ask(self, prompt: str, progress=None, stop=None):
        yield from super().ask(prompt, progress, stop)
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.pending = []  # they are in the conversation now

    def _message(self, prompt: str) -> dict:
        message = super()._message(prompt)
        return message | {"images": list(self.pending)} if self.pending else message

    @staticmethod
    def _images(messages: list[dict]) -> list:
        return [image for message in messages for image in message.get("images", ())]

    def _pieces(self, messages: list[dict]) -> list[str]:
        shaped = []
        for message in messages:
            images = message.get("images", ())
            if images:
                message = self.loaded.vision.message("user", message["content"], len(images))
            shaped.append(message)
        return super()._pieces(shaped)

    def _render(self, messages: list[dict]) -> tuple[str, list[int]]:
        images, self._inputs = self._images(messages), None
        pieces = self._pieces(messages)
        text = "".join(pieces)
        follows = self.text and text.startswith(self.text) and "images" not in messages[-1]
        if not images or follows:
            return super()._render(messages)
        if len(pieces) > 1:
            raise UserError(
                "[chat] a text with words that are special tokens of the model cannot stand beside an image; "
                "leave them out"
            )
        tokens, inputs = self.loaded.vision.tokens(text, images)
        self._forget_cache()
        self._inputs = inputs
        return text, tokens

    def _more(self, tokens: list[int]) -> dict:
        if self._inputs is None:
            return {}
        return {"embeddings": self.loaded.model.embed(tokens, self._inputs)}

    def _instead(self, error: RuntimeError) -> str:
        """Raises: a reply is not continued in the middle, since images would have to be read again for it."""
        if isinstance(error, MachineError) or not self._images(self.messages):
            return super()._instead(error)
        raise MachineError(f"[generate] {reason(error)}; ask again") from error

    def save(self, name: str):
        if self._images(self.messages):
            raise UserError(
                "[/save] a session with images cannot be saved; got one; /reset begins another"
            )
        return super().save(name)
