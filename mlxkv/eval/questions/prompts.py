"""Make prompts about a text: by the chat template, or as `Question: ... Answer:` without one."""

from __future__ import annotations

from os.path import commonprefix

from mlxkv.errors import UserError

_STARTS = ("What", "0", '{"')


def has_template(loaded) -> bool:
    return bool(loaded.tokenizer.has_chat_template)


def encode(loaded, text: str) -> list[int]:
    """Encode without special tokens."""
    return list(loaded.tokenizer.encode(text, add_special_tokens=False))


def ask(loaded, text: str, question: str) -> list[int]:
    """Return a prompt, up to the start of the answer: the text and a question, in one turn of the user.

    Thinking is switched off. Raises UserError if the model's chat template refuses the turn.
    """
    if not has_template(loaded):
        return list(loaded.tokenizer.encode(f"{text}\n\nQuestion: {question}\nAnswer:"))
    try:
        return list(
            loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{text}\n\n{question}"}],
                add_generation_prompt=True,
                return_dict=False,
                enable_thinking=False,
            )
        )
    except Exception as error:  # jinja's errors and whatever a template raises itself
        raise UserError(f"[eval] the model's chat template refuses a question: {error}") from None


def answer(loaded, text: str) -> str:
    """Return an answer as it follows a prompt."""
    return text if has_template(loaded) else f" {text}"


def prefix(loaded, text: str) -> list[int]:
    """Return the tokens with which every prompt about the text starts."""
    return commonprefix([ask(loaded, text, start) for start in _STARTS])


def split(prompt: list[int], prefix: list[int]) -> tuple[list[int], list[int]]:
    """Split a prompt into (prefix, rest). The prefix is shorter than `prefix` if the tokenizer joins
    its end with the question."""
    shared = min(len(commonprefix([prompt, prefix])), len(prompt) - 1)
    return prompt[:shared], prompt[shared:]
