"""What are exact sink tokens worth? KL and same next tokens of teacher-forced decoding behind a long context.

A text is read in full precision once. Each format and window then takes its keys and values over (`compressed_from`),
as an engine does that prefills in one chunk; `--chunk N` reads the text through the compressed cache instead, N tokens
at a time. The tokens that follow are fed in chunks of 8, which read codes. One JSON line per text, format and window.
"""

import argparse
import json
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DynamicCache

from cuda_track.calibrate import calibrate
from cuda_track.models.attach_model import attach, compressed_from, detach, new_cache
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import handed
from mlxkv.corpora import sources
from mlxkv.formats.names import parse_kv

WINDOWS = [(64, 64), (16, 64), (4, 124), (0, 64), (0, 0)]
KEY = (
    "model",
    "text",
    "context",
    "format",
    "sink",
    "recent",
    "chunk",
)  # of a row, which is made once
STEP = 8  # tokens of a decoded chunk: attention reads the codes of up to 8


def read(model, ids, cache, chunk):
    """Feed a context; return the logits of its last token."""
    for part in ids.split(chunk, 1):
        logits = model(part, logits_to_keep=1, **handed(cache)).logits
    return logits


def decoded(model, logits, ids, cache):
    """Return log probabilities [N, V] of tokens ids [1, N]; logits: of the token before."""
    out = [logits[:, -1:]]
    for part in ids[:, :-1].split(STEP, 1):
        out.append(model(part, **handed(cache)).logits)
    return torch.cat(out, 1)[0].float().log_softmax(-1)


def texts(loaded, files, count):
    for file in files:
        tokens = sources.start_of(loaded)
        text = file.read_text(encoding="utf-8")[: count * 8]
        tokens += loaded.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) >= count:
            yield file.name, torch.tensor([tokens[:count]])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--calibrate", type=int, default=4096, help="tokens")
    parser.add_argument("--formats", default="int4,fill-3,int3")
    parser.add_argument(
        "--chunk", type=int, default=0, help="of a prefill that reads codes; 0: one exact prefill"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--out", type=Path, default=Path("windows.jsonl"))
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    loaded = load(options.model, "fp16", "float32", "cpu")
    model, formats, calibration = loaded.model, options.formats.split(","), None
    if any(parse_kv(name).calibrated for name in formats):
        began, text = time.time(), sources.calibration_tokens(loaded, options.calibrate)
        with torch.enable_grad():
            calibration = calibrate(loaded, text.tokens, text.name, start=sources.start_of(loaded))
        print(
            f"calibrated: {text.name}, {len(text.tokens)} tokens, {time.time() - began:.0f} s",
            flush=True,
        )
    rows = map(json.loads, options.out.read_text().splitlines() if options.out.exists() else ())
    done = {tuple(row[part] for part in KEY) for row in rows}
    for name, ids in texts(loaded, options.files, options.context + options.decode):
        began = time.time()
        context, following = ids[:, : options.context], ids[:, options.context :]
        detach(model)
        full = DynamicCache(config=model.config)
        last = read(model, context, full, 2048)
        exact = decoded(model, last, following, deepcopy(full))
        print(
            f"{name}: exact {time.time() - began:.0f} s, starts {ids[0, :3].tolist()}", flush=True
        )
        for kv in formats:
            for sink, recent in WINDOWS:
                key = (options.label, name, options.context, kv, sink, recent, options.chunk)
                if key in done:
                    continue
                began = time.time()
                config = replace(parse_kv(kv), sink=sink, recent=recent, page=64)
                reports = attach(model, config, calibration)
                bits = [r.bits_per_value for r in reports if r.compressed]
                if options.chunk:
                    cache = new_cache(model)
                    logits = read(model, context, cache, options.chunk)
                else:
                    cache, logits = compressed_from(model, full), last
                found = decoded(model, logits, following, cache)
                divergence = (exact.exp() * (exact - found)).sum(-1)
                same = (exact.argmax(-1) == found.argmax(-1)).float()
                if not options.chunk:  # the first token is predicted by the exact prefill
                    divergence, same = divergence[1:], same[1:]
                row = {
                    "model": options.label,
                    "text": name,
                    "context": options.context,
                    "format": kv,
                }
                row |= {"sink": sink, "recent": recent, "chunk": options.chunk, "tokens": len(same)}
                row |= {"kl": divergence.mean().item(), "same": same.mean().item()}
                row |= {"kl_median": divergence.median().item(), "kl_most": divergence.max().item()}
                row |= {"bits": sum(bits) / len(bits), "layers": len(bits)}
                row["seconds"] = round(time.time() - began, 1)
                with options.out.open("a") as out:
                    print(json.dumps(row), file=out, flush=True)
                print(
                    kv,
                    sink,
                    recent,
                    f"{row['kl']:.5f} {row['same']:.3f} {row['seconds']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
