"""Measure what a quantizer of keys and values costs a model, for the commands of this folder.

A text's context is read once in full precision. Of each variant, every layer that grows then gets the variant's keys
and values between the exact windows, and the tokens that follow are read in one forward pass: themselves exact, causal.
Variants are rows of one batch. Results are lines of OUT/MODEL.jsonl, appended as they come; the same command goes on
where it was stopped.

Letters: `B` variants, `H` query heads, `G` kv heads, `T` tokens, `D` head dim.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cuda_track.calibrate import TOKENS, calibrate
from cuda_track.codec import maps
from cuda_track.codec.codec import Codec, both
from cuda_track.models.attach_model import attach
from cuda_track.models.layers import held, plain_layers, replaceable
from cuda_track.models.loader import DTYPES, Loaded, load
from cuda_track.models.taps import observing
from cuda_track.models.transformers_compat import handed
from experiments.evidence.texts import TEXTS, Texts
from experiments.options import Parser, at_least, words
from mlxkv import console
from mlxkv.catalog.shapes import context_limit
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.rows import Row, Rows, read
from mlxkv.formats.calibration import artifact, layers
from mlxkv.formats.calibration.artifact import SIDES, Calibration
from mlxkv.formats.calibration.sums import WINDOW, windows
from mlxkv.formats.names import parse_kv
from mlxkv.machine import versions

SEED = 0  # of random signs and matrices
MOMENTS = ("queries", "outputs")  # second moments; keys and values are kept row by row


@dataclass(frozen=True, eq=False)
class Layer:
    """What the calibration text says of one layer, float32 on the model's device.

    keys, values: all rows, [G, T, D], keys after RoPE. queries: second moment [G, D, D] of the queries of a kv head's
    group, after RoPE (OSCAR, eq. 1). outputs: of its heads' softmax-weighted sums of values, V^T S^T S V / T (eq. 2).
    """

    index: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor
    cache: dict = field(
        default_factory=dict
    )  # what variants derive from the above, by their own names

    def once(self, name: object, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `make` makes, made at the first call of this name."""
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]


Pair = tuple[torch.Tensor, torch.Tensor]
Store = Callable[[Layer, torch.Tensor, torch.Tensor], Pair]
Bits = float | Callable[[int], float]


@dataclass(frozen=True)
class Variant:
    """A quantizer: what it makes of keys and values [G, T, D] float32 of a layer, reconstructed.

    bits: stored bits a value, or those of a head dim. sink, recent: first and last exact tokens. page: tokens come in
    whole pages of so many, older ones first; the rest is exact.
    """

    store: Store
    bits: Bits
    sink: int = 64
    recent: int = 64
    page: int = 64

    def stored(self, context: int) -> slice:
        """Return which tokens of a context are stored: those between the windows, in whole pages."""
        pages = max(0, context - self.sink - self.recent) // self.page
        return slice(self.sink, self.sink + pages * self.page)

    def bits_of(self, dims: int) -> float:
        return self.bits(dims) if callable(self.bits) else self.bits


class Subject:
    """One model, its moments, and the rows that were measured of it.

    out: folder of rows, moments and the calibration. tokens: of the calibration text.
    """

    def __init__(self, loaded: Loaded, name: str, out: Path, tokens: int = TOKENS):
        self.loaded, self.name, self.out, self.budget = loaded, name, out, tokens
        self.model = loaded.model
        limit = context_limit(self.model.config.to_dict())
        self.positions = limit or 1 << 30
        self.growing = [i for i, x in enumerate(plain_layers(self.model)) if replaceable(x)]

    def _file(self, what: str) -> Path:
        mark = (self.loaded.fingerprint or "unknown")[:12]
        return self.out / f"{what}-{self.name}-{mark}-{self.budget}.safetensors"

    def _calibration_text(self) -> sources.Text:
        return sources.calibration_tokens(self.loaded, self.budget)

    @cached_property
    def calibration(self) -> Calibration:
        """Return what `mlxkv calibrate` measures, for presets."""
        file = self._file("calibration")
        if not file.exists():
            text, window = self._calibration_text(), min(WINDOW, self.positions)
            start = sources.start_of(self.loaded)
            made = calibrate(self.loaded, text.tokens, text.name, window, start)
            artifact.write_calibration(file, made)
        return artifact.read_calibration(file)

    @cached_property
    def layers(self) -> dict[int, Layer]:
        """Return the moments of the layers that grow."""
        file = self._file("moments")
        if not file.exists():
            save_file(self._moments(), file)
        found = load_file(file)

        def tensor(index: int, name: str) -> torch.Tensor:
            return found[f"{index}.{name}"].to(self.model.device).float()

        names = (*SIDES, *MOMENTS)
        out = {}
        for i in self.growing:
            keys, values, queries, outputs = (tensor(i, name) for name in names)
            out[i] = Layer(i, keys, values, queries, outputs)
        return out

    def _moments(self) -> dict[str, torch.Tensor]:
        rows: dict[str, list[torch.Tensor]] = {}
        sums: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def observe(call) -> None:
            if call.layer not in self.growing:
                return
            for side, x in zip(SIDES, (call.keys, call.values), strict=True):
                rows.setdefault(f"{call.layer}.{side}", []).append(x[0].cpu())
            for name, x in zip(MOMENTS, (call.queries, call.out), strict=True):
                key, heads = f"{call.layer}.{name}", call.keys.shape[1]
                x = x[0].double().reshape(heads, -1, x.shape[-1])
                sums[key] = sums.get(key, 0) + (x.mT @ x).cpu()
                counts[key] = counts.get(key, 0) + x.shape[1]

        start = sources.start_of(self.loaded)
        with observing(self.model, observe), torch.no_grad():
            text = self._calibration_text().tokens
            for part in windows(text, min(WINDOW, self.positions)):
                ids = [*start, *part]
                ids = torch.tensor([ids], device=self.model.device)
                self.model(ids, use_cache=False, logits_to_keep=1)
        out = {key: torch.cat(parts, 1) for key, parts in rows.items()}
        return out | {key: (x / counts[key]).float() for key, x in sums.items()}

    def preset(self, name: str) -> Variant:
        """Return a preset of the product, by the codecs of cuda_track, first and last 64 tokens exact; NAME@paper has
        the preset's own windows. Raises UserError for one that reads queries."""
        name, _, ends = name.partition("@")
        if ends not in ("", "paper"):
            raise UserError(f"[--variants] unknown windows; got @{ends}; choose @paper or none")
        config = parse_kv(name)
        if config.needs_queries:
            choices = "a preset whose basis and tokens are fixed, such as int4"
            raise UserError(f"[--variants] {name} follows the text; got it here; choose {choices}")
        of_layer = {str(i): config for i in self.growing}
        made = {}
        if config.calibrated:
            of_layer = layers.fitted(of_layer, self.calibration)
            for i, fitted in of_layer.items():
                made[i] = maps.of(self.calibration, fitted.fitted, [i])[i].to(self.model.device)

        def store(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> Pair:
            key = str(layer.index)
            fitted, own = of_layer[key], made.get(key)
            mean = 0.0 if own is None or own.mean is None else own.mean[:, 0, None]
            out = []
            for side, x, off in zip(SIDES, (keys, values), (mean, 0.0), strict=True):
                form = getattr(fitted, side)
                transform = getattr(own, side) if form.calibrated else None
                codec = Codec(form, x.shape[-1], fitted.page, transform, x.device)
                out.append(codec.decode(codec.encode((x - off)[None]), torch.float32)[0] + off)
            return out[0], out[1]

        def bits(dims: int) -> float:
            return float(np.mean([x.bits_per_value(dims, dims) for x in of_layer.values()]))

        exact_tokens = (config.sink, config.recent) if ends else (64, 64)
        return Variant(store, bits, *exact_tokens, page=config.page)

    @torch.no_grad()
    def prefill(self, tokens: Sequence[int]) -> DynamicCache:
        """Read a context in full precision."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([list(tokens)], device=self.model.device)
        self.model(ids, logits_to_keep=1, **handed(cache))
        return cache

    def reconstruct(self, exact: DynamicCache, variant: Variant) -> dict[int, Pair]:
        """Return each growing layer's keys and values [G, T, D] as a variant stores them, in the model's dtype."""
        out = {}
        for i in self.growing:
            pair = both(torch.clone, pair_of(exact, i))
            part = variant.stored(pair[0].shape[1])
            if part.stop > part.start:
                made = variant.store(self.layers[i], *(x[:, part].float() for x in pair))
                for x, new in zip(pair, made, strict=True):
                    x[:, part] = new.to(x.dtype)
            out[i] = pair
        return out

    @torch.no_grad()
    def go_on(
        self, exact: DynamicCache, stored: Sequence[dict[int, Pair]], rest: Sequence[int]
    ) -> torch.Tensor:
        """Read `rest` behind each of the caches `stored`: logits [B, T, vocabulary]."""
        cache = DynamicCache(config=self.model.config)
        for i, layer in enumerate(exact.layers):
            if i in self.growing:
                keys, values = (torch.stack([x[i][side] for x in stored]) for side in range(2))
                cache.update(keys, values, i)
            else:  # it slides: DynamicCache has no other layers of attention
                cache.layers[i] = own = copy.deepcopy(layer)
                assert isinstance(own, DynamicLayer)
                own.batch_repeat_interleave(len(stored))
        ids = torch.tensor([list(rest)], device=self.model.device).expand(len(stored), -1)
        return self.model(ids, **handed(cache)).logits

    def measure(
        self,
        variants: Mapping[str, Variant],
        tokens: Sequence[int],
        context: int,
        batch: int,
        keep: Callable[[str, dict], None],
    ) -> None:
        """Measure variants on one text, and hand each one's numbers to `keep` as they come.

        tokens: the context, those that are read behind it, and one more. The numbers: means over read tokens of
        KL(exact || variant) in nats, of next tokens that are the same, and of negative log likelihoods, in nats.
        """
        exact = self.prefill(tokens[:context])
        rest, truth = tokens[context:-1], torch.tensor(tokens[context + 1 :])[:, None]
        whole = {i: pair_of(exact, i) for i in self.growing}
        base = self.go_on(exact, [whole], rest)[0].double().log_softmax(-1)
        truth = truth.to(base.device)
        dims = float(np.mean([pair[0].shape[-1] for pair in whole.values()]))
        names = list(variants)
        for begin in range(0, len(names), batch):
            some = names[begin : begin + batch]
            stored = [self.reconstruct(exact, variants[name]) for name in some]
            logits = self.go_on(exact, stored, rest)
            for name, own in zip(some, logits, strict=True):
                own = own.double().log_softmax(-1)  # float32 would leave 1e-8
                kl = (base.exp() * (base - own)).sum(-1)
                numbers = {
                    "kl": kl.mean(),
                    "kl_p99": kl.quantile(0.99),
                    "top1": (own.argmax(-1) == base.argmax(-1)).float().mean(),
                    "nll": -own.gather(-1, truth).mean(),
                    "nll_base": -base.gather(-1, truth).mean(),
                    "bits": variants[name].bits_of(int(dims)),
                }
                keep(name, {key: float(x) for key, x in numbers.items()})


def pair_of(cache: DynamicCache, layer: int) -> Pair:
    """Return keys and values [G, T, D] of a layer in a cache of one sequence."""
    own = cache.layers[layer]
    assert isinstance(own, DynamicLayer)
    return both(lambda x: x[0], held(own))


def side_by_side(keys: Callable, values: Callable) -> Store:
    """Return the store of two functions (layer, side, x [G, T, D]) -> x reconstructed, of keys and of values."""
    return lambda layer, k, v: (keys(layer, SIDES[0], k), values(layer, SIDES[1], v))


def exact(layer: Layer, side: str, x: torch.Tensor) -> torch.Tensor:
    """Keep a side in full precision."""
    return x


# -- The command.

VariantsOf = Callable[[Subject], Mapping[str, Callable[[], Variant]]]


def parser(paper: str, doc: str | None) -> Parser:
    out = Parser(f"papers.{paper}", doc)
    add = out.add_argument
    add("models", nargs="+", help="folders, GGUF files or names of the hub")
    add("--variants", type=words, help="names by commas; default: all. Presets have their names")
    add("--contexts", type=words, default=("4k",), help="tokens, by commas")
    add("--decode", type=int, default=256, help="tokens behind each context")
    add("--texts-at-most", type=int, default=len(TEXTS))
    add("--texts", type=Path, help="folder of texts; default: OUT/texts, made there")
    add("--tokens", type=int, default=TOKENS, help="of the calibration text")
    add("--batch", type=int, default=8, help="variants in one forward pass")
    add("--out", type=Path, default=Path(f"runs/papers/{paper}"), help="folder of results")
    add("--dtype", default="float32", choices=tuple(DTYPES))
    add("--device", help="of torch")
    add("--over", help="a variant: print ratios of KL over it")
    return out


def run(paper: str, args, variants_of: VariantsOf, then: Callable | None = None) -> None:
    """Measure the variants of a paper on each model, print a table. then: (subject, texts of tokens by name, args,
    rows) measures more of a context. Raises UserError."""
    contexts = [console.parse_tokens(text, "--contexts") for text in args.contexts]
    at_least("--decode", args.decode, 8)
    at_least("--batch", args.batch, 1)
    at_least("--texts-at-most", args.texts_at_most, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = Texts(args.texts or args.out / "texts")
    texts.make()
    for model in args.models:
        loaded = load(model, "fp16", args.dtype, args.device)
        attach(loaded.model, "fp16")
        name = Path(model).name.removesuffix(".gguf")
        subject = Subject(loaded, name, args.out, args.tokens)
        rows = Rows(args.out / f"{name}.jsonl")
        makers = variants_of(subject)
        chosen = args.variants or tuple(makers)
        made = {v: makers[v]() if v in makers else subject.preset(v) for v in chosen}
        for context in contexts:
            if context + args.decode > subject.positions:
                console.note(f"{name} has {subject.positions} positions: {context} left out")
                continue
            for text, tokens in texts_of(subject, texts, context + args.decode + 1, args):
                _measure(subject, paper, made, context, text, tokens, args, rows)
                if then is not None:
                    then(subject, made, context, text, tokens, rows)
        print(table(read([rows.file]), name, args.over))


def texts_of(subject: Subject, texts: Texts, count: int, args) -> Iterator[tuple[str, list[int]]]:
    for text in texts.names[: args.texts_at_most]:
        tokens = texts.tokens(subject.loaded, text, count)
        if tokens is None:
            console.note(f"{subject.name}: {text} is too short for {count} tokens, left out")
        else:
            yield text, tokens


def _measure(subject, paper, made, context, text, tokens, args, rows: Rows) -> None:
    identities, missing = {}, {}
    state = state_of(subject, tokens, args.dtype)
    for name, variant in made.items():
        ends = f"{variant.sink},{variant.recent}"
        identities[name] = identity(subject, paper, name, ends, text, context)
        if rows.get(identities[name], state) is None:
            missing[name] = variant
    about = {"dtype": args.dtype, "decode": args.decode, "seed": SEED, "versions": versions()}
    if missing:
        console.note(f"{subject.name} {context} {text}: {len(missing)} variants")
        subject.measure(
            missing,
            tokens,
            context,
            args.batch,
            lambda name, numbers: rows.add(identities[name], state, numbers | about),
        )


def identity(subject: Subject, task: str, preset: str, ends: str, text: str, context: int) -> Row:
    return {
        "task": task, "split": "test", "model": subject.name, "preset": preset, "windows": ends,
        "text": text, "context": context,
    }  # fmt: skip


def state_of(subject: Subject, tokens: Sequence[int], dtype: str) -> str:
    """Return a digest of what numbers depend on beside their identity."""
    asks = [subject.loaded.fingerprint, list(tokens), dtype, SEED, subject.budget]
    return sha256(json.dumps(asks).encode()).hexdigest()[:16]


def table(rows: Sequence[Row], model: str, over: str | None = None) -> str:
    """Return a table in Markdown: a line for each context and variant, means over texts with 95 % intervals.

    over: a variant; adds mean KL divided by its mean KL on the same texts.
    """
    cells: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in rows:
        if "kl" in row and row["model"] == model:
            key = row["context"], row["preset"], row["windows"]
            cells.setdefault(key, {})[row["text"]] = row
    head = ["context", "variant", "windows", "bits", "KL", "same next token", "more NLL"]
    lines = [head + [f"KL over {over}"] * bool(over)]
    for (context, name, ends), by_text in sorted(cells.items(), key=lambda x: (x[0][0], x[0][1])):
        found = list(by_text.values())
        kl = intervals.mean([row["kl"] for row in found])
        more = intervals.share([row["nll"] - row["nll_base"] for row in found])
        line = [str(context), name, ends, f"{found[0]['bits']:.3g}", _text(kl)]
        line += [f"{np.mean([row['top1'] for row in found]):.1%}", _text(more)]
        if over:
            base = {}
            for (at, other, _), others in cells.items():
                base |= others if (at, other) == (context, over) else {}
            both = [text for text in by_text if text in base]
            pair = ([x[text]["kl"] for text in both] for x in (by_text, base))
            line.append(_text(intervals.ratio(*pair)) if both else "-")
        lines.append(line)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(x: intervals.Interval) -> str:
    limits = f" [{x.limits[0]:.3g}, {x.limits[1]:.3g}]" if x.known else ""
    return f"{x.value:.3g}{limits}"
