"""Measure what outliers a model has grown: sinks, massive activations, channels of keys and values.

    python -m natural.observe HUB_FOLDER DATA_FOLDER     # one JSON line
    python -m natural.observe table RUN_FOLDER/observe.jsonl > observe.csv

Training writes a line every two minutes, of the same held-out texts. By layer, over all texts:

sink          share of attention that a head gives to the first token, mean over queries from token 64
              on; in sliding layers, over the queries that still see it (up to the window)
hidden        largest |x| of the residual stream after the layer, its median, and where it is
keys, values  over tokens from the second on, after RoPE: channel_ratio is the largest channel's
              max |x| over the median channel's; kurtosis the excess kurtosis of all entries; offset
              |mean| / std of a channel, the largest and the median; first_norm the first token's
              norm over the median norm. Mean over heads, but the largest head's offset
query_key     rms of queries over rms of keys, and the largest and least such ratio of a channel
"""

import csv
import json
import sys
import time
from pathlib import Path

import export
import torch
import torch.nn.functional as F
from model import Model, rotary
from tokenizer import BOS
from tokenizers import Tokenizer
from torch import Tensor

from natural.data import held_texts

TEXTS, TOKENS, SKIP = 8, 2048, 64


def fixed_ids(folder: Path, tokenizer: Tokenizer, tokens: int = TOKENS) -> dict[str, list[int]]:
    """Return name -> ids of the first of the selection texts, at most two of a kind, that are long enough."""
    out: dict[str, list[int]] = {}
    kinds: dict[str, int] = {}
    for name, text in held_texts(folder, "selection").items():
        kind = kind_of(name)
        ids = [BOS, *tokenizer.encode(text[: 8 * tokens], add_special_tokens=False).ids][:tokens]
        if kinds.get(kind, 0) < 2 and len(ids) == tokens and len(out) < TEXTS:
            kinds[kind] = kinds.get(kind, 0) + 1
            out[name] = ids
    if not out:
        raise ValueError(f"[observe] no selection text of {tokens} tokens; got {folder}")
    return out


def kind_of(name: str) -> str:
    """Return the kind of a held-out text: its name up to the number."""
    return name.rstrip("0123456789").rstrip("-_") or name


def _round(value: Tensor | float) -> float:
    return float(f"{float(value):.5g}")


def channels(x: Tensor) -> dict[str, float]:
    """Describe keys or values x [B, G, L, D]; the first token apart."""
    rest = x[:, :, 1:].float()
    top = rest.abs().amax(dim=(0, 2))  # [G, D]
    mean, std = rest.mean(dim=(0, 2)), rest.std(dim=(0, 2))
    offset = mean.abs() / std.clamp(min=1e-9)
    flat = rest.transpose(0, 1).flatten(1)  # [G, B * L * D]
    z = (flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True).clamp(min=1e-9)
    norms = x.float().norm(dim=-1)
    first = norms[:, :, 0] / norms[:, :, 1:].median(dim=2).values
    return {
        "channel_ratio": _round((top.amax(1) / top.median(1).values).mean()),
        "kurtosis": _round(((z**4).mean(1) - 3).mean()),
        "offset_max": _round(offset.max()),
        "offset_median": _round(offset.median()),
        "first_norm": _round(first.mean()),
    }


def sinks(q: Tensor, k: Tensor, window: int | None) -> list[float]:
    """Return the mean share of attention on the first token, by head; q [B, H, L, D], k [B, G, L, D]."""
    first = min(SKIP, q.shape[2] // 2)
    last = q.shape[2] if window is None else min(q.shape[2], window)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)[:, :, :last].float()
    at = torch.arange(last, device=q.device)
    shares = torch.zeros(q.shape[1], device=q.device)
    for one_q, one_k in zip(q[:, :, first:last].float(), k, strict=True):  # a text at a time
        scores = one_q @ one_k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(at > at[first:, None], -torch.inf)
        shares += scores.softmax(-1)[..., 0].mean(-1)
    return [_round(share) for share in shares / len(q)]


def massive(x: Tensor, ids: Tensor, tokenizer: Tokenizer) -> dict:
    """Describe the largest entries of the residual stream x [B, L, width]."""
    size = x.float().abs()
    median = size.flatten()[:: max(1, size.numel() // 1_000_000)].median()
    by_token = size.amax(-1)  # [B, L]
    place = int(by_token.argmax())
    row, at = divmod(place, x.shape[1])
    return {
        "max": _round(size.max()),
        "median": _round(median),
        "ratio": _round(size.max() / median),
        "ratio_without_first": _round(by_token[:, 1:].max() / median),
        "position": at,
        "token": tokenizer.id_to_token(int(ids[row, at])),
        "channel": int(size[row, at].argmax()),
        "tokens_over_100_medians": _round((by_token > 100 * median).float().mean()),
    }


@torch.no_grad()
def observe(model: Model, texts: dict[str, list[int]], tokenizer: Tokenizer) -> dict:
    """Return what the module's docstring lists, by layer, and the loss on each text."""
    start = time.monotonic()
    c, device = model.config, next(model.parameters()).device
    ids = torch.tensor(list(texts.values()), device=device)
    x, layers = model.embed(ids), []
    for n, block in enumerate(model.model.layers):
        attention = block.self_attn
        rope = rotary(ids.shape[1], c.head_dim, attention.theta, str(device))
        q, k, v = attention.project(block.input_layernorm(x), rope)
        out = plain(q, k, v, attention.window)
        x = block.add(x, attention.o_proj(out.transpose(1, 2).flatten(2)))
        rms_q, rms_k = (y.float().pow(2).mean(dim=(0, 2)).sqrt() for y in (q, k))
        ratio = rms_q.view(c.kv_heads, -1, c.head_dim).pow(2).mean(1).sqrt() / rms_k.clamp(min=1e-9)
        layers.append(
            {
                "layer": n,
                "window": attention.window,
                "sink": sinks(q, k, attention.window),
                "hidden": massive(x, ids, tokenizer),
                "keys": channels(k),
                "values": channels(v),
                "query_key": {
                    "rms": _round(rms_q.pow(2).mean().sqrt() / rms_k.pow(2).mean().sqrt()),
                    "largest": _round(ratio.max()),
                    "least": _round(ratio.min()),
                },
            }
        )
    hidden, loss = model.model.norm(x), {}
    for name, row, h in zip(texts, ids, hidden, strict=True):
        loss[name] = _round(F.cross_entropy(model.logits(h[:-1]).float(), row[1:]))
    return {"loss": loss, "layers": layers, "seconds_observing": round(time.monotonic() - start, 2)}


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attend by SDPA, a window as a mask, a text at a time; q [B, H, L, D], k and v [B, G, L, D]."""
    mask = None
    if window is not None and q.shape[2] > window:
        at = torch.arange(q.shape[2], device=q.device)
        ago = at[:, None] - at
        mask = (ago >= 0) & (ago < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outs = [
        F.scaled_dot_product_attention(*one, attn_mask=mask, is_causal=mask is None)
        for one in zip(*(x.split(1) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(outs)


def flat(line: dict) -> list[dict]:
    """Return a row per layer of an observation, with the nested names joined by dots."""
    rows = []
    for layer in line["layers"]:
        row = {key: line[key] for key in ("step", "tokens", "progress") if key in line}
        row |= {"layer": layer["layer"], "window": layer["window"] or ""}
        heads = layer["sink"]
        row |= {"sink_mean": _round(sum(heads) / len(heads)), "sink_max": max(heads)}
        for group in ("hidden", "keys", "values", "query_key"):
            row |= {f"{group}.{key}": value for key, value in layer[group].items()}
        rows.append(row)
    return rows


def table(file: Path) -> None:
    """Print the lines of a file as CSV, a row per layer and observation."""
    rows = [row for line in file.read_text().splitlines() for row in flat(json.loads(line))]
    writer = csv.DictWriter(sys.stdout, rows[0])
    writer.writeheader()
    writer.writerows(rows)


def main(first: str, second: str) -> None:
    if first == "table":
        table(Path(second))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = Tokenizer.from_file(str(Path(first) / "tokenizer.json"))
    model = export.read(Path(first), device)
    print(json.dumps(observe(model, fixed_ids(Path(second), tokenizer), tokenizer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
