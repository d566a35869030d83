"""Draw the pictures of a report, as SVG text. Needs matplotlib when a picture is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlxkv import plots
from mlxkv.eval.arms import BASELINE

STAGES = {
    "keys": "stored keys, relative error",
    "values": "stored values, relative error",
    "scores_kl": "attention scores, KL (nats)",
    "attention": "attention output, relative error",
    "hidden": "hidden state, relative error",
}
SMALLEST = 1e-7  # the least value on logarithmic axes
MAPS = 6  # in a row
LINES = ("-", "--", ":")  # colours repeat after ten lines

Picture = tuple[str, str, str]  # title, caption, SVG


def all_of(data: dict) -> list[Picture]:
    """Return every picture for which `data` (of `report.assemble`) has numbers."""
    makers = (bits, positions, maps, stages, subspaces)
    with plots.pyplot() as plt:
        return [picture for make in makers for picture in make(plt, data)]


def _compressed(rows: dict) -> dict:
    return {name: row for name, row in rows.items() if name != BASELINE}


def method(name: str) -> str:
    """Return a preset's name without its bits: int4 -> int, oscar-int2+g64 -> oscar+g64. A name
    of another form is returned as it is."""
    found = re.fullmatch(r"(?:(.+)-)?int\d(\+[^/]+)?", name)
    return f"{found[1] or 'int'}{found[2] or ''}" if found else name


def _scatter(axis, rows: dict, key: str, label: str, methods: list[str] | None = None) -> None:
    """Plot bits per value against one number of each preset, on a logarithmic axis. A line joins
    the widths of a method. methods: in the order of their colours, if several axes share them."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, row in rows.items():
        point = (row["bits_per_value"], max(row[key], SMALLEST))
        curves.setdefault(method(name), []).append(point)
    for name, points in curves.items():
        index = (methods or list(curves)).index(name)
        axis.plot(
            *zip(*sorted(points), strict=True),
            marker="os^vDP*X"[index % 8],
            color=f"C{index % 10}",
            linewidth=1,
            alpha=0.85,
            label=name,
            zorder=3,
        )
    for name, row in rows.items() if key == "kl_mean" else ():
        if limits := row.get("kl_interval"):
            index = (methods or list(curves)).index(method(name))
            ends = [max(x, SMALLEST) for x in limits]
            axis.vlines(row["bits_per_value"], *ends, color=f"C{index % 10}", linewidth=1)
    axis.set_yscale("log")
    axis.set_xlabel("bits per value in pages")
    axis.set_ylabel(label)


def bits(plt, data: dict) -> Iterator[Picture]:
    """Draw bits per value against KL, mean and 99 %."""
    for context, rows in data["rows"].items():
        rows = _compressed(rows)
        if not rows or any("kl_mean" not in row for row in rows.values()):
            continue
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True)
        _scatter(axes[0], rows, "kl_mean", "mean KL (nats)")
        _scatter(axes[1], rows, "kl_p99", "99 % KL (nats)")
        axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        caption = (
            f"{data['model']}, decoded after {context} tokens. Lower left is better. Upright lines: 95 % "
            "intervals over texts."
        )
        yield f"Bits against KL divergence, {context} tokens", caption, plots.svg(figure)


def panels(reports: list[dict], context: int) -> str:
    """Draw bits per value against mean KL, one panel per report; return SVG text."""
    with plots.pyplot() as plt:
        figure, _ = plt.subplots(1, len(reports), figsize=(3.6 * len(reports), 3.6), sharey=True)
        rows = [_compressed(data["rows"][str(context)]) for data in reports]
        methods = list(dict.fromkeys(method(name) for by_name in rows for name in by_name))
        handles: dict[str, object] = {}
        for axis, data, by_name in zip(figure.axes, reports, rows, strict=True):
            _scatter(axis, by_name, "kl_mean", "", methods)
            axis.set_title(f"{data['model']}, {context} tokens")
            shown = axis.get_legend_handles_labels()
            handles |= dict(zip(shown[1], shown[0], strict=True))
        figure.axes[0].set_ylabel("mean KL (nats)")
        names = [name for name in methods if name in handles]
        where = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
        axis.legend([handles[name] for name in names], names, **where)
        return plots.svg(figure)


def positions(plt, data: dict) -> Iterator[Picture]:
    """Draw KL along the text."""
    for context in data["contexts"]:
        part = _compressed(data["parts"].get(f"divergence-{context}", {}))
        if not part:
            continue
        figure, axis = plt.subplots(figsize=(9, 3.6))
        for index, (name, result) in enumerate(part.items()):
            where = result["position"]
            means = [max(x, SMALLEST) for x in where["mean"]]
            axis.plot(where["position"], means, LINES[index // 10 % 3], label=name)
        axis.axvline(context, color="black", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.set_xlabel("position (dotted: from here on decoded one by one)")
        axis.set_ylabel("KL (nats)")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        chunk = next(iter(part.values()))["chunk"]
        caption = (
            f"Mean of runs of tokens. A chunk of {chunk} tokens reads its own tokens exactly, so that the "
            "first chunk costs nothing."
        )
        yield f"KL divergence by position, {context} tokens", caption, plots.svg(figure)


def maps(plt, data: dict) -> Iterator[Picture]:
    """Draw retrieval by context and depth, a map per kind and preset."""
    found: dict[str, dict[int, dict]] = {}
    for part in data["parts"].values():
        first = next(iter(part.values()), {})
        if "depths" in first:
            found.setdefault(first["kind"], {})[first["context"]] = part
    for kind, by_context in found.items():
        contexts = sorted(by_context)
        names = list(by_context[contexts[0]])
        columns = min(MAPS, len(names))
        lines = -(-len(names) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(12, 2.4 * lines), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(names) :]:
            axis.axis("off")
        for axis, name in zip(axes.flat, names, strict=False):
            cells = [
                [
                    d["right"] / d["asked"] if d["asked"] else float("nan")
                    for d in by_context[context][name]["depths"]
                ]
                for context in contexts
            ]
            turned = [list(column) for column in zip(*cells, strict=True)]
            axis.imshow(turned, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
            for y, line in enumerate(turned):
                for x, value in enumerate(line):
                    text = "-" if value != value else f"{100 * value:.0f}"
                    axis.text(x, y, text, ha="center", va="center", fontsize=8)
            depths = [d["depth"] for d in by_context[contexts[0]][name]["depths"]]
            axis.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths])
            axis.set_xticks(range(len(contexts)), [f"{c}" for c in contexts])
            axis.set_title(name, fontsize=10)
            axis.grid(False)
        caption = "Share of right values in percent, by context (tokens) and depth of the fact."
        yield f"Retrieval, {kind}", caption, plots.svg(figure)


def stages(plt, data: dict) -> Iterator[Picture]:
    """Draw the error at each stage of the computation, by layer."""
    contexts = [
        name.removeprefix("stages-") for name in data["parts"] if name.startswith("stages-")
    ]
    for context in contexts:
        part = _compressed(data["parts"][f"stages-{context}"])
        if not part:
            continue
        figure, axes = plt.subplots(1, len(STAGES), figsize=(3.4 * len(STAGES), 3.2))
        for axis, (key, label) in zip(axes, STAGES.items(), strict=True):
            for index, (name, result) in enumerate(part.items()):
                seen = [layer for layer in result["layers"] if layer[key] is not None]
                axis.plot(
                    [layer["index"] for layer in seen],
                    [max(layer[key], SMALLEST) for layer in seen],
                    LINES[index // 10 % 3],
                    marker=".",
                    label=name,
                )
            axis.set_yscale("log")
            axis.set_title(label, fontsize=9)
            axis.set_xlabel("layer")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        figure.tight_layout()
        caption = (
            "Keys to attention output: each layer by itself, on what this run handed to it. Hidden "
            "state: against the full-precision run, so it adds up over the layers."
        )
        yield f"Stages by layer, {context} tokens", caption, plots.svg(figure)


def subspaces(plt, data: dict) -> Iterator[Picture]:
    """Draw residual energy along a text that changes its kind, and overlap with the best basis of
    its second half."""
    for part_name, part in data["parts"].items():
        found = {name: result for name, result in part.items() if result.get("layers")}
        if not part_name.startswith("subspace-") or not found:
            continue
        figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
        for column, side in enumerate(("keys", "values")):
            for index, (name, result) in enumerate(found.items()):
                layers = [layer[side] for layer in result["layers"] if side in layer]
                if not layers:
                    continue
                keys = ("adapted", "oracle", "overlap")
                means = {
                    key: [sum(x) / len(layers) for x in zip(*(r[key] for r in layers), strict=True)]
                    for key in keys
                }
                ends, style = result["positions"], {"color": f"C{index % 10}", "marker": "."}
                axes[column].plot(ends, means["adapted"], label=name, **style)
                axes[column].plot(ends, means["oracle"], "k:", linewidth=0.8)
                axes[column + 2].plot(ends, means["overlap"], label=name, **style)
            axes[column].set_yscale("log")
            axes[column].set_title(f"{side}: residual energy (dotted: oracle)", fontsize=9)
            axes[column + 2].set_title(f"{side}: overlap with the oracle", fontsize=9)
        for axis in axes:
            axis.axvline(result["shift"], color="black", linewidth=0.8, linestyle="--")
            axis.set_xlabel("tokens read")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
        caption = (
            "Means over layers and kv heads. Each chunk is judged by the basis as it was before. Dashed: "
            "from here on the text is program code; the oracle is fitted to that half."
        )
        yield f"Subspaces, {result['tokens']} tokens", caption, plots.svg(figure)
