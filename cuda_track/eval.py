"""`python -m cuda_track.eval --model NAME --kv NAME,NAME`: measure how far a compressed cache moves a model.

After a prefill the rest of a text is fed token by token, and each prediction is compared with that of the
full-precision cache by its KL divergence. Keys are those of `mlxkv eval`.
"""

from __future__ import annotations

import json

import torch

from cuda_track import cli
from cuda_track.models.attach_model import attach, new_cache
from cuda_track.models.loader import Loaded, load
from cuda_track.models.transformers_compat import handed
from mlxkv import console
from mlxkv.corpora import sources
from mlxkv.errors import UserError
from mlxkv.formats.names import parse_kv

CHUNK = 512  # tokens of the prefill at once


@torch.no_grad()
def predictions(loaded: Loaded, tokens: list[int], decoded: int) -> torch.Tensor:
    """Return log probabilities [decoded, vocabulary] of the last tokens, behind a prefill of the others."""
    model, start = loaded.model, len(tokens) - decoded
    ids, cache, out = torch.tensor([tokens], device=model.device), new_cache(loaded.model), []
    for i in range(0, start, CHUNK):
        part = ids[:, i : min(i + CHUNK, start)]
        logits = model(part, logits_to_keep=1, **handed(cache)).logits
    for i in range(start, len(tokens)):
        out.append(logits[0, -1].float().log_softmax(-1).cpu())
        logits = model(ids[:, i : i + 1], **handed(cache)).logits
    return torch.stack(out)


def compared(predicted: torch.Tensor, exact: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Compare log probabilities [N, V]; truth: the tokens that followed, [N]."""
    divergence = (exact.exp() * (exact - predicted)).sum(-1)
    return {
        "ppl": float((-predicted.gather(-1, truth[:, None])).mean().exp()),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "top1": float((predicted.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def evaluate(loaded: Loaded, presets: list[str], tokens: list[int], decoded: int, calibration=None):
    """Return the result of `compared` for each preset."""
    attach(loaded.model, "fp16")
    exact, out = predictions(loaded, tokens, decoded), {}
    truth = torch.tensor(tokens[-decoded:])
    for name in presets:
        reports = attach(loaded.model, name, calibration)
        bits = [r.bits_per_value for r in reports if r.compressed]
        measured = compared(predictions(loaded, tokens, decoded), exact, truth)
        out[name] = {"bits_per_value": sum(bits) / len(bits) if bits else 16.0, **measured}
    return out


def main() -> None:
    parser = cli.parser(__doc__, kv="int8,int4,fill-4,fill-3,fill-2.25", reads=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prefill")
    parser.add_argument("--decode", type=int, default=128, help="tokens that are decoded")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if options.context < 1 or options.decode < 1:
        raise UserError(
            f"[eval] --context and --decode are 1 or more; got {options.context} and {options.decode}"
        )
    presets = options.kv.split(",")
    for name in presets:
        parse_kv(name)
    loaded = load(options.model, "fp16", options.dtype, options.device)
    tokens = sources.evaluation_tokens(
        loaded, options.context + options.decode, options.text
    ).tokens
    measured = evaluate(loaded, presets, tokens, options.decode, options.calibration)
    if options.json:
        print(json.dumps({"model": loaded.name, "context": options.context, "presets": measured}))
        return
    print(f"{loaded.name}, {options.decode} tokens behind {options.context}")
    for name, row in measured.items():
        print(f"{name:<18} " + "  ".join(f"{key} {value:.5g}" for key, value in row.items()))


if __name__ == "__main__":
    console.run_tool(main)
