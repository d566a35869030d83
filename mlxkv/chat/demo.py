"""`mlxkv demo`: one model reads a long text into two caches side by side, full precision and a compressed one,
and answers a question about a fact in it from each, and from a file of the compressed one. Shows the memory of both as
they grow."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mlxkv.console import human_bytes, human_time, note, print_json, say, say_whole, working
from mlxkv.corpora import corpus
from mlxkv.errors import UserError
from mlxkv.formats.names import canonical
from mlxkv.formats.session import PACK, Saved
from mlxkv.generate import prompt_cache
from mlxkv.generate.generation import new_cache, stream
from mlxkv.generate.usage import projected, usage
from mlxkv.loading.load import load
from mlxkv.metal.launch import device_type
from mlxkv.patching.trees import own_caches

FACT = "The secret ingredient of my grandmother's soup is saffron."
QUESTION = "What is the secret ingredient of my grandmother's soup?"
ANSWER, DEPTH = "saffron", 0.5  # the right answer; the share of the text before the fact
CHUNK = 128  # tokens read into one cache, then into the other
SECONDS = 30.0  # approximate reading time
LEAST, MOST = 2176, 7680  # bounds of the text's length in tokens
LONGEST = 32  # tokens of an answer


def run_demo(model: str, kv: str, as_json: bool) -> None:
    """Load a model, read for half a minute, or longer for LEAST tokens, ask, and show both answers and the memory."""
    with working(f"reading {model}") as progress:
        loaded = load(model, kv, progress=progress)
    plain, packed = partial(own_caches, loaded.model), partial(new_cache, loaded)
    if not loaded.tokenizer.has_chat_template:
        raise UserError(f"[demo] needs a model that chats; got {model}; choose another")
    if not any(layer.compressed for layer in loaded.layers):
        raise UserError(f"[demo] nothing is compressed; got {model} with --kv {kv}; choose others")
    with working("trying how fast this machine reads"):
        count, rate = _fitting(loaded, (plain(), packed()))
    tokens, depth = make_text(loaded, min(count, (loaded.context or MOST) - 2 * LONGEST))
    name = canonical(kv)
    if not as_json:
        say(
            f"{loaded.name} on {device_type()} reads one text of {len(tokens):,} tokens into two "
            f"caches: fp16 and --kv {name}; about {human_time(len(tokens) / rate)} here"
        )
    caches, rows = {"fp16": plain(), name: packed()}, []
    chart = Chart(("fp16", name), len(tokens), quiet=as_json)
    begun = time.perf_counter()
    with chart:
        for count in read_text(loaded, tokens[:-1], list(caches.values())):
            row = count, *(usage(cache).kv_bytes for cache in caches.values())
            rows.append(row)
            chart.add(*row)
    seconds = time.perf_counter() - begun
    compact = usage(caches[name])  # of what the chart shows
    size, waited, kept = _from_file(loaded, tokens, caches[name])
    answers = {kind: _answer(loaded, tokens[-1:], cache) for kind, cache in caches.items()}
    right = {kind: ANSWER in answer.lower() for kind, answer in answers.items()}
    if as_json:
        data = {
            "model": loaded.name,
            "kv": name,
            "backend": device_type(),
            "seconds": round(seconds, 2),
        }
        data |= {"tokens": compact.tokens, "question": QUESTION, "fact": FACT}
        steps = [
            dict(zip(("tokens", "kv_bytes_fp16", "kv_bytes"), row, strict=True)) for row in rows
        ]
        pack = {"bytes": size, "seconds": round(waited, 2), "answer": kept}
        print_json(data | {"answers": answers, "right": right, "rows": steps, "pack": pack})
        return
    say(f"\n{depth:.0%} into the text: {FACT}")
    say(f"question: {QUESTION}")
    for kind, answer in answers.items():
        say(f"  {kind:<6} {'right' if right[kind] else 'WRONG'}: {answer}")
    say(f"cache: {compact.saving()}" + (f" ({compact.note})" if compact.note else ""))
    if (limit := loaded.context or 0) > compact.tokens:
        say(f"at this model's full {limit:,} tokens: {projected(caches[name], limit).saving()}")
    say(
        "a longer text saves more: the first and last tokens stay exact, the others take "
        f"{max(layer.bits_per_value for layer in loaded.layers if layer.compressed):g} bits"
    )
    same = "the same answer" if kept == answers[name] else f"another answer: {kept}"
    say(
        f"the compressed cache, saved to a file of {human_bytes(size)} and loaded again: {same}, first word after "
        f"{waited:.1f} s"
    )
    say_whole(
        f"for a text of yours: mlxkv read FILE -m {model} --kv {name}, then mlxkv chat --with FILE.kvpack"
    )
    note(
        f"[read twice in {seconds:.0f} s; what fits here: mlxkv fit -m llama-3.1-8b; "
        "a larger model: mlxkv chat -m qwen3-4b]"
    )


def story() -> str:
    """Return the essays, stories and talks that come with mlxkv, some 7,000 tokens."""
    parts = [corpus.passages(split) for split in reversed(corpus.SPLITS)]
    return "\n\n".join(part[kind] for kind in ("prose", "dialogue") for part in parts)


def make_text(loaded, length: int) -> tuple[list[int], float]:
    """Return the tokens of a prompt of about `length` tokens, prose that contains `FACT` and then the question, and the
    share of the prose before the fact."""
    encode, sentences, count = loaded.tokenizer.encode, [], 2 * LONGEST
    for sentence in cycle(re.split(r"(?<=[.!?])\s+", story())):
        count += len(encode(sentence, add_special_tokens=False)) + 1
        if count > length and sentences:
            break
        sentences.append(sentence)
    at = int(DEPTH * len(sentences))
    beginning = " ".join(sentences[:at])
    prose = " ".join([beginning, FACT, *sentences[at:]])
    messages = [{"role": "user", "content": f"{prose}\n\n{QUESTION}"}]
    tokens = loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    return list(tokens), len(beginning) / len(prose)


def read_text(loaded, tokens: list[int], sides: list[list]) -> Iterator[int]:
    """Read `tokens` into each of the caches, a chunk at a time. Yields the number of tokens read."""
    # Streams of a CPU are threads: two cores read at once.
    streams = [mx.new_stream(mx.cpu) for _ in sides] if device_type() == "cpu" else []
    for start in range(0, len(tokens), CHUNK):
        part = mx.array(tokens[start : start + CHUNK])[None]
        mx.eval(part)
        states = []
        for caches, cache_stream in zip_longest(sides, streams):
            with nullcontext() if cache_stream is None else mx.stream(cache_stream):
                loaded.model(part, cache=caches)
                states.append([cache.state for cache in caches])
                mx.async_eval(states[-1])
        mx.eval(states)
        yield min(start + CHUNK, len(tokens))


def _fitting(loaded, sides: tuple[list, list]) -> tuple[int, float]:
    """Return how many tokens to read, in whole chunks, by what this machine reads into both caches in about `SECONDS`,
    and how many it reads in a second."""
    list(read_text(loaded, [0] * CHUNK, list(sides)))  # builds kernels
    begun = time.perf_counter()
    list(read_text(loaded, [0] * CHUNK, list(sides)))
    rate = CHUNK / (time.perf_counter() - begun)
    return int(min(MOST, max(LEAST, SECONDS * rate))) // CHUNK * CHUNK, rate


def _from_file(loaded, tokens: list[int], cache: list) -> tuple[int, float, str]:
    """Save a cache that has read all tokens but the last as packs are saved, and answer from the file. Returns its
    bytes, the seconds until the first word of the answer, and the answer."""
    with TemporaryDirectory() as place:
        path = Path(place) / f"demo{PACK}"
        size = prompt_cache.write(path, Saved(cache, tokens[:-1]), loaded, "demo").stat().st_size
        begun = time.perf_counter()
        read = prompt_cache.read_session(path, loaded).cache
        pieces = stream(loaded, tokens[-1:], read, max_tokens=LONGEST)
        first = next(pieces).text
        waited = time.perf_counter() - begun
        return size, waited, (first + "".join(piece.text for piece in pieces)).strip()


def _answer(loaded, last: list[int], caches: list) -> str:
    """Return the likeliest answer after the last token of the prompt."""
    pieces = stream(loaded, last, caches, max_tokens=LONGEST)
    return "".join(piece.text for piece in pieces).strip()


# -- a live chart of the memory of two caches in a terminal; plain lines elsewhere

HEIGHT, WIDTH = 10, 64  # cells of the chart
LABEL = 10  # cells left of it
LINES = 4  # plain lines in all


class Chart:
    """Bytes of two caches over their tokens, as areas: the second in front of the first. names: of the caches. total:
    tokens at the end."""

    def __init__(self, names: tuple[str, str], total: int, quiet: bool = False):
        self.names, self.total, self.quiet = names, total, quiet
        self.points: list[tuple[int, int, int]] = []
        self._live: Live | None = None

    def __enter__(self) -> Chart:
        if not self.quiet and sys.stdout.isatty():
            self._live = Live(self.drawing(), console=Console(highlight=False), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, tokens: int, first: int, second: int) -> None:
        """Record the bytes of both caches with this many tokens; not where the second is larger, as it may be before
        it compresses anything."""
        if second > first:
            return
        last_tokens = self.points[-1][0] if self.points else 0
        self.points.append((tokens, first, second))
        if self._live is not None:
            self._live.update(self.drawing(), refresh=True)
        elif not self.quiet and tokens * LINES // self.total > last_tokens * LINES // self.total:
            say(f"  {self.line()}")

    def line(self) -> str:
        """Return the last point: '1,024 tokens: fp16 2.5 MiB, int4 1.1 MiB'."""
        tokens, first, second = self.points[-1] if self.points else (0, 0, 0)
        first_name, second_name = self.names
        return f"{tokens:,} tokens: {first_name} {human_bytes(first)}, {second_name} {human_bytes(second)}"

    def drawing(self) -> Group:
        """Return the current chart."""
        largest = max((first for _, first, _ in self.points), default=1)
        done = self.points[-1][0] if self.points else 0
        # The axis is as long as the text, and as high as the whole text in the first cache.
        high = max(1, int(largest * self.total / max(done, 1)))
        columns = self._columns(high)
        rows = []
        for row in range(HEIGHT, 0, -1):
            label = human_bytes(high) if row == HEIGHT else ""
            line = Text(f"{label:>{LABEL}} ", "dim")
            for first, second in columns:
                inside = second >= row - 0.5
                line.append("█" if inside else "░" if first >= row - 0.5 else " ", _style(inside))
            rows.append(line)
        end = f"{self.total:,} tokens"
        rows.append(Text(f"{'':>{LABEL}} 0{end:>{WIDTH - 1}}", "dim"))
        key = Text(f"{'':>{LABEL}} ")
        for sign, name, which in (("░", self.names[0], False), ("█", self.names[1], True)):
            key.append(f"{sign} {name}   ", _style(which))
        return Group(*rows, key.append(self.line()))

    def _columns(self, high: int) -> list[tuple[float, float]]:
        """Return the heights of both caches in cells, for each column reached so far."""
        out, at = [], 0
        for column in range(WIDTH):
            tokens = (column + 1) * self.total / WIDTH
            while at < len(self.points) and self.points[at][0] < tokens:
                at += 1
            if at == len(self.points):
                break
            _, first, second = self.points[at]
            out.append((HEIGHT * first / high, HEIGHT * second / high))
        return out


def _style(inside: bool) -> str:
    return "green" if inside else "red"
