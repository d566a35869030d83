# ruff: noqa: E501 - lines of pages
"""Write docs/reference/ from the code: `python -m experiments.pages.reference`, or `make reference`.

commands.md: every command and option, from the typer app. presets.md: every preset, from the formats.
families.md: which models are compressed and which are refused, from the tables of `mlxkv/patching`. python.md: the
public names of `mlxkv`, from their docstrings. A test compares the pages with what this writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import typer.main

import mlxkv
from experiments.options import Parser
from mlxkv import console
from mlxkv.cache import selftest
from mlxkv.cache.choose import KernelRequest
from mlxkv.catalog.aliases import CONFIGS, HUB
from mlxkv.cli import app, is_option, value_of
from mlxkv.console import one_line
from mlxkv.doctor.listing import HEAD_DIM, LISTED, MEASURED, by_paper, stored
from mlxkv.eval import call
from mlxkv.formats.config import CacheConfig
from mlxkv.formats.presets import COMPARED
from mlxkv.loading.plans import plan_of
from mlxkv.patching.probe import LATENTS, REFUSED, REFUSED_BEFORE_0_32

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
WRITTEN = "Written from the code by `make reference`; a test compares them."
# The papers of `mlxkv presets --all`, by the first word of their titles.
ARXIV = {
    "QuaRot": "2404.00456",
    "SRFT": "2605.05699",
    "OSCAR": "2605.17757",
    "TurboQuant": "2504.19874",
    "PolarQuant (Han": "2502.02617",
    "KIVI": "2402.02750",
    "PolarQuant (Wu": "2502.00527",
    "OjaKV": "2509.21623",
    "SnapKV": "2404.14469",
}
COMMANDS = f"""# Commands and options

Every command and option. `mlxkv COMMAND --help` shows the usual ones, `--help-all` all of them. {WRITTEN}

Sizes take units (`8GB`, `512MiB`); tokens take `k` and `m` (`32k`). Errors are one line, `[where] what is wrong; got X; choose from ...`,
with exit code 2 for a mistake in what was typed and 1 for a fault of the machine. `--json` makes the last line of stdout one JSON document."""
PRESETS = f"""# Presets

Every preset, beyond the [four lines](../guide/presets.md) of the guide. {WRITTEN}

**Bits** are per stored value of a page at head dim 128, scales included, without the tokens that stay exact (the first 64 and at least the last 64, unless the row says otherwise).
**Needs**: `mlxkv calibrate` is one pass over 8,900 tokens; `chat` and `serve` make it on first use and keep it.
**Decodes by**: kernels that read codes on a GPU, or plain MLX operations everywhere. See [results](../results/pretrained.md) for quality, [kernels](../internals/kernels.md) for speed.

A pair takes its keys from one preset and its values from another (`int8/int4`). `fill-2.25`, or any number of bits a value: [how the cache works](../README.md#how-the-cache-works). `+keep0.5` drops half of a prompt's tokens. Other windows, groups and ranks are [written in Python](../guide/python.md#other-caches)."""
FAMILIES = f"""# Model families

Which model families are compressed, and which are not. {WRITTEN}

`mlxkv` compresses every layer whose cache in mlx-lm is a plain `KVCache` and whose code only hands cached keys and values to attention. It tries this when it loads a model (two tokens, then one), so a family that is not named here either works or is refused with the reason. `--kv-strict` makes any layer left out an error.
Sliding-window layers keep mlx-lm's small rotating cache, and states (Mamba, linear attention) have a fixed size; mlxkv leaves both alone. [We tried every model file of mlx-lm, and families of mlx-vlm and transformers](../results/families.md).

## Aliases

Of these we have run `smollm2` alone, from a GGUF file ([results](../results/pretrained.md)). Layers come from the models' published shapes; `make test` runs the same classes with random weights.
"""
PYTHON = f"""# Python API

The public names of `mlxkv`, with their types; the [guide](../guide/python.md) shows them in use. {WRITTEN}

Everything else in the package is internal: it may change with any version. Letters in shapes: `B` sequences, `G` kv heads, `T` tokens, `D` head dim."""
LATENT = """
## Latents (MLA)

Multi-head latent attention caches one vector a token in place of keys and values. mlxkv compresses it in {}, and in families that use their code, as tested with random weights and one small trained model ([how](../internals/mla.md)).

## Refused

By the name of their file in `mlx_lm/models`, before the first token.
"""
FACTORY = re.compile(r"<factory>|<[^<>]+>")  # defaults that have no text
KINDS = {
    "full": "{} compressed",
    "sliding": "{} exact (the last {} tokens)",
    "latent": "{} of latents, compressed",
    "state": "{} of fixed size",
}


def main(arguments: list[str] | None = None) -> None:
    Parser("pages.reference", __doc__).parse_args(arguments)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        console.note(f"docs/reference/{name}: written")


def pages() -> dict[str, str]:
    """Return the pages by name."""
    made = {"commands.md": commands(), "presets.md": presets(), "families.md": families()}
    made["python.md"] = python()
    return {name: "\n".join(lines) + "\n" for name, lines in made.items()}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [
        f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines
    ]


def commands() -> list[str]:
    lines = [COMMANDS]
    for name, command in walk(typer.main.get_command(app), "mlxkv"):
        if name == "mlxkv":
            lines += ["", " · ".join(f"[{sub}](#mlxkv-{sub})" for sub in command.commands), ""]
            lines += _options(command)
            continue
        lines += ["", f"## {name}", "", one_line(command.help or "")]
        words = [f"[{param.name.upper()}]" for param in command.params if not is_option(param)]
        more = " [COMMAND]" if getattr(command, "commands", None) else ""
        lines += ["", f"    {' '.join([name, '[OPTIONS]', *words])}{more}", ""]
        lines += _options(command)
    return lines


def walk(command, name: str):
    """Each command with its full name, groups before what they hold."""
    yield name, command
    for key, sub in getattr(command, "commands", {}).items():
        if not sub.hidden:
            yield from walk(sub, f"{name} {key}")


def _options(command) -> list[str]:
    shown = [param for param in command.params if param.name != "help"]
    return table(["option", "what it does", "default"], map(_option, shown))


def _option(param) -> tuple[str, str, str]:
    flag = getattr(param, "is_flag", False)
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    if not is_option(param):
        names = f"`{param.name.upper()}`"
    elif not flag:
        names += f" {param.metavar or value_of(param)}"
    default = param.default
    said = isinstance(default, (str, int, float)) and not (flag and default is False)
    shown = ("on" if default else "off") if isinstance(default, bool) else default
    again = " Repeatable." if getattr(param, "multiple", False) else ""
    text = one_line(getattr(param, "help", "") or "")
    return names, text if "repeat" in text else text + again, f"`{shown}`" if said else ""


def presets() -> list[str]:
    lines = [PRESETS]
    for title, methods in by_paper():
        paper = next((number for word, number in ARXIV.items() if title.startswith(word)), None)
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        if paper:
            lines += [f"Paper: [arXiv {paper}](https://arxiv.org/abs/{paper}).", ""]
        head = ["`--kv`", "bits", "stores", "needs", "decodes by", "what for"]
        lines += table(head, map(_method, methods))
    return lines


def _method(alike: list[dict]) -> tuple[str, ...]:
    """Return the row of presets that differ in their bits alone."""
    name = alike[0]["name"]
    stores, kv = stored(alike), LISTED[name]
    if kv.compresses and (kv.sink, kv.recent, kv.page) != (64, 64, 64):
        stores += f"; first {kv.sink} and last {kv.recent} exact, pages of {kv.page}"
    names = ", ".join(f"`{row['name']}`" for row in alike)
    bits = ", ".join(f"{row['bits_per_value']:.2f}" for row in alike)
    uses = dict.fromkeys(_use(row["name"], kv).partition(";")[0] for row in alike)
    return names, bits, stores, _needs(kv), _body(kv), "; ".join(uses)


def _needs(kv: CacheConfig) -> str:
    if "learned" in kv.fitted:
        return "`mlxkv calibrate --learn`"
    return "`mlxkv calibrate`" if kv.calibrated else "nothing"


def _body(kv: CacheConfig) -> str:
    if not kv.compresses:
        return "mlx-lm's own"
    asked = selftest.representative_config(kv, HEAD_DIM)  # mixed bits: allotted to random ones
    lacks = KernelRequest(asked, (HEAD_DIM, HEAD_DIM), mx.bfloat16).unsupported
    return "plain operations" if lacks else "kernels"


def _use(name: str, kv: CacheConfig) -> str:
    if name in MEASURED:
        return MEASURED[name].use
    if not kv.compresses:
        return "the baseline"
    return "comparison: slower than full precision on a GPU" if name in COMPARED else "comparison"


def python() -> list[str]:
    lines = [PYTHON]
    for name in mlxkv.__all__:
        thing = call.eval if name == "eval" else getattr(mlxkv, name)
        lines += [
            "",
            f"## {name}",
            "",
            "```python",
            *signature(thing),
            "```",
            "",
            *described(thing),
        ]
        for method in methods_of(thing) if thing is mlxkv.Loaded else ():
            lines.append(f"- `.{method}`: {inspect.getdoc(getattr(thing, method))}")
    return lines


def signature(thing) -> list[str]:
    """Return a function's name and parameters with their types, one a line where they are long."""
    kind = "class" if isinstance(thing, type) else "def"
    if isinstance(thing, type) and issubclass(thing, Exception):
        return [f"{kind} {thing.__name__}({thing.__base__.__name__})"]
    found = inspect.signature(thing)
    parameters = [_parameter(x) for x in found.parameters.values()]
    returned = "" if kind == "class" else f" -> {found.return_annotation}"
    line = f"{kind} {thing.__name__}({', '.join(parameters)}){returned}"
    if len(line) <= 100:
        return [line]
    return [f"{kind} {thing.__name__}(", *(f"    {x}," for x in parameters), f"){returned}"]


def _parameter(x: inspect.Parameter) -> str:
    default = "" if x.default is x.empty else f" = {FACTORY.sub('...', repr(x.default))}"
    return f"{x.name}: {x.annotation}{default}"


def described(thing) -> list[str]:
    """Return the docstring, with what it says of each parameter as an item of a list."""
    is_error = isinstance(thing, type) and issubclass(thing, Exception)
    names = "-" if is_error else "|".join(inspect.signature(thing).parameters)
    item = re.compile(rf"(?:^|(?<=[.;])[ \n]+)((?:{names})(?:, (?:{names}))*): ", re.MULTILINE)
    lines = []
    for paragraph in inspect.getdoc(thing).split("\n\n"):
        text = item.sub(r"\n- *\1*: ", paragraph).strip("\n")
        lines += [*re.sub(r"\n +", "\n  ", text).splitlines(), ""]
    return lines[:-1]


def methods_of(thing: type) -> list[str]:
    """Public methods and properties with a docstring, in the order of the class."""
    return [
        name
        for name, x in vars(thing).items()
        if not name.startswith("_")
        and (inspect.isfunction(x) or isinstance(x, property))
        and inspect.getdoc(x)
    ]


def families() -> list[str]:
    lines = [FAMILIES]
    lines += table(
        ["`--model`", "on the hub", "layers"],
        [(f"`{name}`", f"`{repo}`", _layers(name)) for name, repo in HUB.items()],
    )
    lines.append(LATENT.format(", ".join(f"`{name}`" for name in sorted(LATENTS))))
    early = {name: f"{why} (mlx-lm before 0.32 alone)" for name, why in REFUSED_BEFORE_0_32.items()}
    rows = sorted((REFUSED | early).items())
    return lines + table(["family", "why"], [(f"`{name}`", why) for name, why in rows])


def _layers(name: str) -> str:
    if name not in CONFIGS:
        return ""
    counts: dict[tuple[str, int], int] = {}
    for layer in plan_of(CONFIGS[name]).layers:
        counts[layer.kind, layer.window] = counts.get((layer.kind, layer.window), 0) + 1
    return ", ".join(
        KINDS.get(kind, f"{{}} {kind}").format(n, window) for (kind, window), n in counts.items()
    )


if __name__ == "__main__":
    console.run_tool(main)
