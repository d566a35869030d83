"""SRFT int4 (arXiv 2605.05699), claim by claim; abs-max codes of 4 bits wherever nothing else is said.

    python -m experiments.papers.srft MODEL.. --contexts 4k
    python -m experiments.papers.encode                     the time of encode, with lambda and without; its CPU pathway

    none, hadamard, srft    table 1: SRFT = SRHT, both far ahead of neither; one scale a token; ..+seed1, ..+seed2
                            other signs; ..-int3, ..-int8 other widths
    srft+tensor, +g64, +g32, +g16       scales for a call, or for so many values (4.1, 5.6)
    srft+lambda, +lambda+g32, .., none+lambda+g32       lambda = 1 / max of each channel (5.6, 7.1), from the
                            calibration text; ..+lambda-prefix from the first 256 tokens, ..+lambda-own from what is
                            coded (7.3). On Qwen2.5-1.5B: +7975 to +638.6 perplexity
    srft+learned-.., none+learned-..    tables 3 and 4: scale, rotation (Cayley), householder (k = D/2), with a scale
                            in front of one abs-max scale a token: "without SRFT lower error, worse perplexity"
    before:NAME             keys before RoPE, as the paper's hook has them (3.3), turned back behind it

Three columns of cost: KL behind `context` tokens, with first and last 64 exact; perplexity there; and the paper's own
measure, `hook`: perplexity of texts of 512 tokens whose k_proj and v_proj are coded in every layer, no token exact
(4.1). Beside them `error` of the codes on calibration rows, seen and held out (5.1), keys after RoPE. `probe`: excess
kurtosis (3.1) and the entropy of the largest channel (5.6), of the outputs of k_proj and v_proj.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import rotate_half

from cuda_track.codec import transform
from cuda_track.codec.codec import Codec
from cuda_track.codec.transform import Transform
from experiments.papers import hook, runner
from experiments.papers.hook import TRANSFORMS, Key
from experiments.papers.learned import train
from experiments.papers.ratios import cells, markdown, more_perplexity, ratios, text
from experiments.papers.runner import Subject, Variant
from mlxkv import console
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.eval import intervals
from mlxkv.eval.rows import Row, Rows, read
from mlxkv.formats.calibration.artifact import SIDES
from mlxkv.formats.calibration.learned import STEPS, Learned
from mlxkv.formats.calibration.sums import WINDOW, windows
from mlxkv.formats.config import Side
from mlxkv.formats.quantizers import Affine

PAPER = "srft"
TENSOR = -1  # a group: one scale for all that is coded in a call
LENGTH = 512  # tokens of a text of the hook
PREFIX = 256  # tokens that a prefix's lambda is taken of
ROWS = 4096  # calibration rows that a map is learned from
HELD = 8  # one in so many calibration rows, the last, is held out


@dataclass(frozen=True)
class Recipe:
    """A transform and codes. group: values a scale, 0 all of a token, or TENSOR. scale: "", or where lambda comes
    from: "calibration", "prefix", "own". learned: of `Learned.VARIANTS`, or "". before: keys before RoPE."""

    transform: str = "srft"
    group: int = 0
    bits: int = 4
    seed: int = runner.SEED
    scale: str = ""
    learned: str = ""
    before: bool = False

    @property
    def quantizer(self) -> Affine:
        shared = self.group == TENSOR
        return Affine(self.bits, max(self.group, 0), symmetric=True, shared=shared)

    def bits_per_value(self, dims: int) -> float:
        return self.quantizer.bits_per_value(dims, 1) - 16 / dims * (self.group == TENSOR)


def recipes() -> dict[str, Recipe]:
    """Return what is measured, by name."""
    out = {name: Recipe(name) for name in TRANSFORMS}
    for name in ("hadamard", "srft"):
        out |= {f"{name}+seed{seed}": Recipe(name, seed=seed) for seed in (1, 2)}
        out |= {f"{name}-int{bits}": Recipe(name, bits=bits) for bits in (3, 8)}
    groups = {"": 0, "+g64": 64, "+g32": 32, "+g16": 16}
    out["srft+tensor"] = Recipe(group=TENSOR)
    out |= {f"srft{label}": Recipe(group=group) for label, group in groups.items()}
    for label, group in groups.items():
        out[f"srft+lambda{label}"] = Recipe(group=group, scale="calibration")
    out["none+g32"] = Recipe("none", 32)
    out["none+lambda+g32"] = Recipe("none", 32, scale="calibration")
    for source in ("prefix", "own"):
        out[f"srft+lambda-{source}+g32"] = Recipe(group=32, scale=source)
    for name in ("scale", "rotation", "rotation+scale", "householder", "householder+scale"):
        out[f"srft+learned-{name}"] = Recipe(learned=name)
    for name in ("scale", "rotation+scale", "householder+scale"):
        out[f"none+learned-{name}"] = Recipe("none", learned=name)
    for name in ("none", "hadamard", "srft", "srft+g32", "srft+lambda+g32"):
        out[f"before:{name}"] = replace(out[name], before=True)
    return out


RECIPES = recipes()


class Site:
    """Where keys and values are coded. rows: calibration rows [G, T, D] by layer and side, asked for when needed."""

    def __init__(self, rows: Callable[[], Mapping[Key, torch.Tensor]]):
        self._rows = rows
        self._learned = cache(self._learn)

    @cached_property
    def rows(self) -> Mapping[Key, torch.Tensor]:
        return self._rows()

    def base(self, recipe: Recipe, x: torch.Tensor) -> torch.Tensor:
        """Return the transform without what is made from data, [D, D]."""
        made = transform.make(recipe.transform, x.shape[-1], recipe.seed, x.device)
        return torch.eye(x.shape[-1], device=x.device) if made is None else made.down

    def pair(self, recipe: Recipe, key: Key, x: torch.Tensor) -> Transform:
        """Return the transform of a layer and side, for what is coded, x [B, G, T, D]."""
        if recipe.learned:
            return self._learned(recipe)[key]
        down = self.base(recipe, x)
        if not recipe.scale:
            return Transform(down, down.mT)
        of = {"own": x, "prefix": x[:, :, :PREFIX]}
        of = of[recipe.scale] if recipe.scale in of else self.rows[key][None]
        peak = (of @ down).abs().amax((0, 1, 2))
        by = 1 / peak.where(peak > 0, 1.0)
        return Transform(down * by, down.mT / by[:, None])

    def code(self, recipe: Recipe, key: Key, x: torch.Tensor) -> torch.Tensor:
        """Return what the codes make of x [B, G, T, D] float32."""
        side, pair = Side(recipe.quantizer), self.pair(recipe, key, x)
        codec = Codec(side, x.shape[-1], x.shape[2], pair, x.device)
        return codec.decode(codec.encode(x), torch.float32)

    def errors(self, recipe: Recipe) -> tuple[float, float]:
        """Return |x^ - x|^2 / |x|^2 of rows that were learned from, and of others: means over layers and sides."""
        parts = []
        for key, x in self.rows.items():
            off = (self.code(recipe, key, x[None])[0] - x).square().sum((0, 2))
            energy, split = x.square().sum((0, 2)), _split(x)
            parts.append(
                [off[s].sum() / energy[s].sum() for s in (slice(split), slice(split, None))]
            )
        seen, held = torch.tensor(parts).mean(0).tolist()
        return seen, held

    def _learn(self, recipe: Recipe) -> dict[Key, Transform]:
        """Learn the maps of all layers and sides at once."""
        draw = torch.Generator().manual_seed(0)
        parts = []
        for x in self.rows.values():
            seen = x[:, : _split(x)].flatten(0, 1)
            parts.append(seen[torch.randint(len(seen), (ROWS,), generator=draw).to(x.device)])
        x = torch.stack(parts)
        learned = Learned(recipe.learned, steps=STEPS)
        made = zip(*train(x, self.base(recipe, x), learned, recipe.bits), strict=True)
        return {key: Transform(*pair) for key, pair in zip(self.rows, made, strict=True)}


def _split(x: torch.Tensor) -> int:
    return x.shape[1] - x.shape[1] // HELD


# -- Before RoPE.


def turned(subject: Subject, keys: torch.Tensor, positions: torch.Tensor, by: int) -> torch.Tensor:
    """Turn keys [.., T, D] of layers that grow by their positions [T], as the model does (by 1), or back (by -1).

    Raises UserError for a model that does not turn whole heads.
    """
    rotary = getattr(subject.model.base_model, "rotary_emb", None)
    kind = "full_attention"  # where layers that slide turn otherwise
    more = (kind,) if hasattr(rotary, f"{kind}_inv_freq") else ()
    cos, sin = (positions,) * 2 if rotary is None else rotary(keys, positions[None], *more)
    if cos.shape[-1] != keys.shape[-1]:
        raise UserError(
            "[--variants] before: is for rotary positions of whole heads; "
            f"got {subject.name}; leave those variants out"
        )
    cos, sin = cos[0], by * sin[0]
    return (keys * cos + rotate_half(keys) * sin) / (cos.square() + sin.square())


def rows_after(subject: Subject) -> dict[Key, torch.Tensor]:
    """Return calibration rows of the layers that grow, keys after RoPE."""
    return {(i, side): getattr(x, side) for i, x in subject.layers.items() for side in SIDES}


def rows_before(subject: Subject) -> dict[Key, torch.Tensor]:
    """Return the same with keys before RoPE."""
    count = len(sources.calibration_tokens(subject.loaded, subject.budget).tokens)
    start = len(sources.start_of(subject.loaded))
    sizes = [len(part) + start for part in windows(range(count), min(WINDOW, subject.positions))]
    positions = torch.cat([torch.arange(size) for size in sizes]).to(subject.model.device)
    out = rows_after(subject)
    return out | {k: turned(subject, x, positions, -1) for k, x in out.items() if k[1] == SIDES[0]}


def variant(subject: Subject, sites: Mapping[bool, Site], recipe: Recipe) -> Variant:
    """Return a recipe as the runner measures it. sites: before RoPE (True) and after it."""
    site, sink = sites[recipe.before], Variant.sink

    def code(layer: runner.Layer, side: str, x: torch.Tensor) -> torch.Tensor:
        back = recipe.before and side == SIDES[0]
        positions = torch.arange(sink, sink + x.shape[1], device=x.device)
        x = turned(subject, x, positions, -1) if back else x
        x = site.code(recipe, (layer.index, side), x[None])[0]
        return turned(subject, x, positions, 1) if back else x

    return Variant(runner.side_by_side(code, code), recipe.bits_per_value)


# -- What is measured beside the runner's rows.


class More:
    """What is measured of a model beside the runner's rows: the hook, errors of codes, probes."""

    def __init__(self, dtype: str):
        self.dtype = dtype
        self.sites: dict[Subject, tuple[Site, Site, Site]] = {}

    def of(self, subject: Subject) -> tuple[Site, Site, Site]:
        """Return the sites of a model: after RoPE, before it, and the hook's."""
        if subject not in self.sites:
            rows = (rows_after, rows_before, hook.calibration_rows)
            after, before, hooked = (Site(partial(of, subject)) for of in rows)
            self.sites[subject] = after, before, hooked
        return self.sites[subject]

    def variants(self, subject: Subject) -> dict[str, Callable[[], Variant]]:
        after, before, _ = self.of(subject)
        sites = {False: after, True: before}
        return {name: partial(variant, subject, sites, r) for name, r in RECIPES.items()}

    def __call__(self, subject, made, context, name, tokens, rows: Rows) -> None:
        """Measure a text behind the hook; once a model, errors and probes."""
        after, _, site = self.of(subject)
        chosen = {v: RECIPES[v] for v in made if v in RECIPES and not RECIPES[v].before}
        size = min(LENGTH, len(tokens) - 1)
        ids = hook.pieces(tokens, size, len(sources.start_of(subject.loaded)))
        batch = torch.tensor(ids, device=subject.model.device)

        def keep(task: str, label: str, text: str, asked, make: Callable[[], dict]) -> None:
            row = runner.identity(subject, f"{PAPER}.{task}", label, "0,0", text, size)
            state = runner.state_of(subject, asked, self.dtype)
            if rows.get(row, state) is None:
                rows.add(row, state, make())

        @cache
        def base() -> float:
            return hook.likelihood(subject, batch, lambda key, x: None)

        def hooked(recipe: Recipe) -> dict:
            _ = site.rows  # made now: not while the hook reads the model
            nll = hook.likelihood(subject, batch, lambda key, x: site.code(recipe, key, x))
            return {"nll": nll, "nll_base": base()}

        def error(recipe: Recipe) -> dict:
            return dict(zip(("seen", "held"), after.errors(recipe), strict=True))

        def probed(key: Key) -> dict:
            x, out = site.rows[key], {}
            for how in TRANSFORMS:
                stored = x @ site.base(Recipe(how), x)
                out |= {f"{number} {how}": n for number, n in hook.probe(stored).items()}
            return out

        for label, recipe in chosen.items():
            keep("hook", label, name, sum(ids, []), partial(hooked, recipe))
            keep("error", label, "calibration", [], partial(error, recipe))
        for i in range(subject.model.config.num_hidden_layers):
            for side in SIDES:
                keep("probe", side, f"layer {i}", [], partial(probed, (i, side)))


# -- Tables.

PAIRS = (
    ("srft", "hadamard"),
    ("none", "srft"),
    ("none+g32", "srft+g32"),
    ("srft+tensor", "srft"),
    ("srft+g32", "srft"),
    ("srft+g16", "srft+g32"),
    ("srft+lambda", "srft"),
    ("srft+lambda+g32", "srft+g32"),
    ("srft+lambda+g32", "none+lambda+g32"),
    ("srft+lambda-own+g32", "srft+lambda+g32"),
    ("srft+lambda-prefix+g32", "srft+lambda+g32"),
    ("srft+learned-scale", "srft"),
    ("srft+learned-rotation+scale", "srft"),
    ("srft+learned-householder+scale", "srft"),
    ("none+learned-rotation+scale", "srft+learned-rotation+scale"),
    ("none+learned-householder+scale", "srft+learned-householder+scale"),
    ("before:srft", "srft"),
    ("before:srft+lambda+g32", "srft+lambda+g32"),
)


def costs(rows: Sequence[Row], model: str) -> str:
    """Return a table: of each context and recipe the error of its codes, less than that of random SRFT by a share,
    KL and perplexity there, and perplexity behind the hook."""
    hooked, errors = (
        {name: list(texts.values()) for (_, name), texts in cells(rows, task, model).items()}
        for task in (f"{PAPER}.hook", f"{PAPER}.error")
    )
    head = ["context", "variant", "bits", "error seen", "less", "error held out", "less", "KL"]
    lines = [head + ["more perplexity", "hook: more perplexity"]]
    for (context, name), by_text in sorted(cells(rows, PAPER, model).items()):
        texts = list(by_text.values())
        line = [str(context), name, f"{texts[0]['bits']:.3g}"]
        for part in ("seen", "held"):
            own, base = (errors.get(x, [{}])[0].get(part) for x in (name, "srft"))
            line.append("-" if own is None else f"{own:.3g}")
            line.append("-" if own is None or not base else f"{1 - own / base:.1%}")
        line += [
            text(intervals.mean([row["kl"] for row in texts])),
            f"{more_perplexity(texts):+.3g}",
        ]
        line.append(f"{more_perplexity(hooked[name]):+.3g}" if name in hooked else "-")
        lines.append(line)
    return markdown(lines)


def main(arguments: list[str] | None = None) -> None:
    args = runner.parser(PAPER, __doc__).parse_args(arguments)
    more = More(args.dtype)
    runner.run(PAPER, args, more.variants, more)
    for model in args.models:
        name = Path(model).name.removesuffix(".gguf")
        rows = read([args.out / f"{name}.jsonl"])
        print("\n" + costs(rows, name))
        print("\n" + ratios(rows, PAPER, name, PAIRS))
        print("\n" + hook.probes(rows, f"{PAPER}.probe", name))


if __name__ == "__main__":
    console.run_tool(main)
