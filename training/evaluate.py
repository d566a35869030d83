"""Read a long prompt once and ask many questions about it, with an exact or a fake-quantised cache."""

from dataclasses import dataclass

import torch
from model import Model, rotary
from tokenizer import BOS, END, EOS
from tokenizers import Tokenizer
from torch import Tensor

from mlxkv.texts.worlds import Needle

SINK, PAGE, RECENT = 64, 64, 64
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Scheme:
    """Round keys and values as min-max or abs-max codes per token, in groups of channels."""

    name: str
    bits: int = 16
    group: int = 128
    hadamard: bool = False
    symmetric: bool = False

    def round(self, x: Tensor) -> Tensor:
        """Return x [..., D] as the cache would decode it."""
        if self.bits >= 16:
            return x
        h = hadamard(x.shape[-1], x.device) if self.hadamard else None
        y = x @ h if self.hadamard else x
        y = y.unflatten(-1, (-1, self.group))
        if self.symmetric:
            top = 2 ** (self.bits - 1) - 1
            scale = (y.abs().amax(-1, keepdim=True) / top).clamp(min=1e-8)
            y = (y / scale).round().clamp(-top, top) * scale
        else:
            low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
            scale = ((high - low) / (2**self.bits - 1)).clamp(min=1e-8)
            y = ((y - low) / scale).round() * scale + low
        y = y.flatten(-2)
        return y @ h.T if self.hadamard else y


EXACT = Scheme("exact")


def hadamard(n: int, device: torch.device) -> Tensor:
    """Return the orthonormal Hadamard matrix [n, n], n a power of two, in Sylvester's order."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def attend(q: Tensor, exact: Pair, rounded: Pair | None, start: int, window: int | None) -> Tensor:
    """Attend causally from q [B, H, L, D], at positions from `start` on, to keys and values [B, G, T, D].

    Where there are `rounded` ones, those outside the sink whose page ends RECENT tokens before the query take their
    place, as in a cache with sealed pages, also while the prompt is being read.
    """
    B, H, L, D = q.shape
    (k, v), (k_hat, v_hat) = exact, rounded or exact
    G, T = k.shape[1:3]
    at = torch.arange(T, device=q.device)
    page_end = torch.where(at < SINK, T + RECENT, SINK + ((at - SINK) // PAGE + 1) * PAGE)
    outs = []
    for chunk in q.view(B, G, H // G, L, D).split(1024, dim=3):
        n = chunk.shape[3]
        now = torch.arange(start, start + n, device=q.device)[:, None]
        start += n
        flat = chunk.flatten(2, 3)  # [B, G, R * n, D]
        scores = flat @ k.mT
        if rounded:
            sealed = (page_end + RECENT <= now).repeat(H // G, 1)
            scores = torch.where(sealed, flat @ k_hat.mT, scores)
        visible = at <= now
        if window is not None:
            visible &= now - at < window
        scores = scores * D**-0.5
        weights = scores.masked_fill(~visible.repeat(H // G, 1), -torch.inf).softmax(-1)
        out = weights @ v
        if rounded:
            out = out + (weights * sealed) @ (v_hat - v)
        outs.append(out.unflatten(2, (H // G, n)))
    return torch.cat(outs, dim=3).flatten(1, 2)  # [B, H, L, D]


Past = list[Pair]


@torch.no_grad()
def forward(
    model: Model, ids: Tensor, past: Past | None = None, scheme: Scheme = EXACT
) -> tuple[Tensor, Past]:
    """Return hidden states of ids [B, L] after a past, keys and values [1, G, T, D] of each layer or its latents
    and rotary keys, and the new past. Rotary keys are never rounded."""
    x, c = model.embed(ids), model.config
    start = past[0][0].shape[2] if past else 0
    new: Past = []
    for n, block in enumerate(model.model.layers):
        attention = block.self_attn
        cos, sin = rotary(start + ids.shape[1], c.turned, attention.theta, str(ids.device))
        q, *cached = attention.project(block.input_layernorm(x), (cos[start:], sin[start:]))
        if past:
            cached = [
                torch.cat([old.expand(len(ids), -1, -1, -1), fresh], dim=2)
                for old, fresh in zip(past[n], cached, strict=True)
            ]
        new.append(tuple(cached))
        rounded = None
        if scheme.bits < 16 and attention.window is None:
            first, second = cached
            rounded = attention.expand(
                scheme.round(first), second if c.latent else scheme.round(second)
            )
        out = attend(q, attention.expand(*cached), rounded, start, attention.window)
        x = block.add(x, attention.o_proj(out.transpose(1, 2).flatten(2)))
    return model.model.norm(x), new


class Asker:
    """Encode chats as the template does, and score answers on their value tokens."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def measure(self, text: str) -> int:
        """Return the length in tokens."""
        return len(self.ids(text))

    def read(self, text: str, scheme: Scheme) -> Past:
        """Return the past after the beginning of a user's turn: the text and an empty line."""
        ids = [BOS, *self.ids(f"<start_of_turn>user\n{text}\n\n")]
        return forward(self.model, torch.tensor([ids], device=self.device), None, scheme)[1]

    def score(self, past: Past, needles: tuple[Needle, ...], scheme: Scheme) -> list[list[bool]]:
        """Return for each value of each needle whether all its tokens are the likeliest."""
        rows, spans = [], []
        for needle in needles:
            asked = self.ids(f"{needle.question}<end_of_turn>\n<start_of_turn>model\n")
            answer = self.tokenizer.encode(needle.answer, add_special_tokens=False)
            rows.append(asked + answer.ids)
            spans.append(value_tokens(needle, answer.offsets, len(asked)))
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        hidden, _ = forward(self.model, ids, past, scheme)
        guess = self.model.logits(hidden).argmax(-1)[:, :-1]
        right = (guess == ids[:, 1:]).tolist()
        return [
            [all(row[i - 1] for i in span) for span in needle_spans]
            for row, needle_spans in zip(right, spans, strict=True)
        ]

    def reply(self, messages: list[dict[str, str]], limit: int = 80) -> str:
        """Return the greedy answer to a chat."""
        text = "<bos>"
        for message in messages:
            role = {"user": "user", "assistant": "model"}[message["role"]]
            text += f"<start_of_turn>{role}\n{message['content'].strip()}<end_of_turn>\n"
        ids, past, out = self.ids(text + "<start_of_turn>model\n"), None, []
        while len(out) < limit:
            hidden, past = forward(self.model, torch.tensor([ids], device=self.device), past)
            ids = [int(self.model.logits(hidden[:, -1]).argmax())]
            if ids[0] in (END, EOS):
                break
            out += ids
        return self.tokenizer.decode(out)

    def loss(self, texts: list[str], scheme: Scheme) -> float:
        """Return the mean loss per token on the texts, each read alone."""
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([[BOS, *self.ids(text)][:8192]], device=self.device)
            hidden, _ = forward(self.model, ids, None, scheme)
            logits = self.model.logits(hidden)[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        return total / count


def value_tokens(needle: Needle, offsets: list[tuple[int, int]], first: int) -> list[list[int]]:
    """Return the token indices of each value of the needle; the answer begins at `first`."""
    spans, cursor = [], 0
    for value in needle.values:
        begin = needle.answer.index(value, cursor)
        cursor = begin + len(value)
        spans.append([first + i for i, (a, b) in enumerate(offsets) if b > begin and a < cursor])
    return spans
