"""Try the language model of every family of mlx-vlm on compressed caches: `python -m experiments.families.vlm`.

Each is built small, with random weights: which layers are compressed, whether the text is that of mlx-vlm's own
caches while nothing is sealed, how far int4 is behind it. The exit code is 1 if one has a fault.
"""

from __future__ import annotations

import traceback
import warnings
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from experiments.families.found import NEW, PROMPT, Family, Survey, line
from experiments.families.vlm_building import VOCABULARY, NotBuilt, build, families
from mlxkv import console
from mlxkv.eval.tasks.divergence import divergence
from mlxkv.formats.names import parse_kv
from mlxkv.models import attach, detach
from mlxkv.models.hooks.mark import own_make_cache

INT4 = parse_kv("int4")  # whose window holds all of them
SEALED = replace(
    INT4, sink=4, recent=16, page=16
)  # pages are sealed while reading and while writing
NEAR = 1e-4  # of the norm of the logits, while nothing is sealed
KL = 0.1  # mean over the tokens, in nats: more is a fault
HEAD = """# Families of mlx-vlm

Which families of mlx-vlm run on compressed caches.

The language model of every family in mlx-vlm that can be built small, with random weights in float32:
{prompt} tokens read and {new} written greedily, on mlx-vlm's own caches and on compressed ones. *Equal*: while
nothing is sealed (int4 as it is, whose window holds {all} tokens) the tokens are those of the plain caches and the
logits within {near:g} of their norm. *KL*: with windows so small that 4 pages of 16 tokens are sealed, the mean
divergence of int4's predictions from the plain ones, in nats, over the same text; more than {kl:g} would be a
fault. Random weights say that the right numbers arrive, not how good 4 bits are.

"""


def logits_of(model: nn.Module, caches: list, tokens: mx.array) -> mx.array:
    """[T, vocabulary] float32 of the last token of `tokens` [1, T]."""
    out = model(tokens, cache=caches)
    out = getattr(out, "logits", out)[:, -1].astype(mx.float32)
    mx.eval(out)
    return out


def written(model: nn.Module, text: list[int] | None = None) -> tuple[list[int], mx.array]:
    """The tokens that a model writes behind the prompt, and their logits [NEW, vocabulary]. text: what to write
    instead of the likeliest tokens."""
    prompt = mx.random.randint(0, VOCABULARY, (1, PROMPT), key=mx.random.key(1))
    caches, tokens, rows = own_make_cache(model)(), [], []
    if "make_cache" in vars(model):  # attached
        caches = model.make_cache()
    step = prompt
    for i in range(NEW):
        rows.append(logits_of(model, caches, step))
        tokens.append(text[i] if text is not None else mx.argmax(rows[-1], axis=-1).item())
        step = mx.array([tokens[-1:]])
    return tokens, mx.concatenate(rows)


def compared(name: str, model: nn.Module) -> Family:
    """What one family does."""
    try:
        tokens, plain = written(model)
        if not mx.isfinite(plain).all().item():
            raise ValueError("NaN or infinity in the logits")
    except Exception as error:  # without a cache of ours in it
        reason = f"with its own caches it fails on these values: {line(error)}"
        return Family(name, skipped=reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attach, where nothing is compressed: the table says so
        layers = tuple(attach(model, INT4))
        result = Family(name, layers=layers)
        again, ours = written(model, None)
        off = (mx.linalg.norm(ours - plain) / mx.linalg.norm(plain)).item()
        if again != tokens or not off <= NEAR:
            return replace(result, fault=f"other text before anything is sealed ({off:.1e})")
        if result.compressed:
            attach(model, SEALED)
            result = replace(result, kl=divergence(plain, written(model, tokens)[1]).mean().item())
            if not result.kl <= KL:
                result = replace(result, fault=f"KL {result.kl:.2g}")
        detach(model)
    if written(model)[0] != tokens:
        return replace(result, fault="other text after detach")
    return result


def family(name: str) -> Family:
    """Build and compare one; whatever is raised is a fault."""
    try:
        return compared(name, build(name))
    except NotBuilt as error:
        return Family(name, skipped=str(error))
    except Exception as error:
        console.note(traceback.format_exc())
        return Family(name, fault=line(error))


SURVEY = Survey(
    name="families.vlm",
    head=HEAD.format(prompt=PROMPT, new=NEW, near=NEAR, kl=KL, all=INT4.room(False)),
    plain="run as they are, with a reason",
    skipped="were not compared.",
    column="KL",
    cell=lambda family: "-" if family.kl is None else f"{family.kl:.1e}",
)


def main(arguments: list[str] | None = None) -> None:
    SURVEY.run(__doc__, arguments, families(), family)


if __name__ == "__main__":
    console.run_tool(main)
