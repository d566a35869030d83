"""What a KV cache costs and gives inside vLLM, on one GPU: speed of steps, room for tokens, and next tokens of a model.

    python -m experiments.engine speed CACHE [--cases 16x16384,64x8192,1x4096] -o ROWS
    python -m experiments.engine quality CACHE --model FOLDER [--calibration FILE] -o ROWS
    python -m experiments.engine alone CACHE --model FOLDER [--calibration FILE] -o ROWS
    python -m experiments.engine load CACHE --model FOLDER -o ROWS
    python -m experiments.engine table -o ROWS      # for docs/results/engine.md

CACHE: one of vLLM's --kv-cache-dtype (auto first: the others are compared with it), or a cache of mlxkv's (int4, int3,
fill-3 ...). One process takes one cache and adds JSON lines to ROWS; run all of a table on one machine. Speed: Llama
3.1 8B's shape with random weights, CUDA graphs for decodes, prefix caching; tokens a second are those while all
requests of a batch run, after a prefix hit, the better of two times. Quality: 12 files of Python's library, 4,096
tokens of context, the next 128, one a request behind a prefix hit, against vLLM's own cache in the model's type; KL
over the 20 likeliest tokens, and the rest as one. Alone: the same in transformers. Load: 200 requests of a shared and
an own text through a cache that holds few of them, 32 of them cancelled, against the same requests one by one: how many
tokens are the same up to the first other one, and by how many nats that one was less likely. Each of those is also
asked again in three ways: behind its own prefix (what codes of the prompt change), behind a half of it, and as a
request that was preempted halfway and reads all it had again at once (what boundaries of reading change). KL of
each token up to the first other one says whether a text was off before it parted.
"""

# vLLM is an optional dependency.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import math
import os
import random
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm import LLM

OWN = ("auto", "fp8", "int4_per_token_head", "int8_per_token_head", "turboquant_4bit_nc")  # vLLM's
SCALED = "+scales"  # fp8 with scales of the first tokens that vLLM reads, in place of 1
SHAPE = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    **{"dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
}
GRAPHS = [1, 2, 4, 8, 16, 32, 64]
CONTEXT, CHUNK, LIKELIEST, NEW, STEPS = 4096, 2048, 20, 64, 200
BESIDE_OTHERS = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}  # on a GPU


def shape_folder(to: Path) -> Path:
    """Write a folder with SHAPE and, in place of weights, one number; and a random calibration beside it."""
    from safetensors.numpy import save_file

    from mlxkv.catalog import folder
    from mlxkv.formats import matrices
    from mlxkv.formats.calibration import artifact
    from mlxkv.formats.calibration.artifact import Basis, Calibration, Layer
    from mlxkv.formats.calibration.balance import Balance

    to.mkdir(exist_ok=True)
    (to / "config.json").write_text(json.dumps(SHAPE))
    (to / "tokenizer.json").write_text("{}")
    save_file({"none": np.zeros(1, np.float32)}, to / "model.safetensors", {"format": "pt"})
    heads, dims = 8, 128
    fall = np.broadcast_to(np.exp(-np.arange(dims) / 24), (heads, dims)).astype(np.float32)
    vectors = matrices.random_basis(heads, dims, 0).astype(np.float32)
    ones, balance = np.ones((heads, dims), np.float32), Balance(vectors, fall)
    keys, values = (
        Basis(fall[:, ::-1].copy(), vectors, balance, ones, mean=mean) for mean in (0 * ones, None)
    )
    layers = {str(i): Layer(heads, keys, values) for i in range(SHAPE["num_hidden_layers"])}
    mark = folder.fingerprint(folder.check_folder(to))
    made = Calibration(mark, "random", "llama", 1, "none", "none", layers, 131072)
    artifact.write_calibration(to / "calibration.safetensors", made)
    return to


def engine(options: Namespace, model: str, **more) -> LLM:
    """Start vLLM with a cache."""
    from vllm import LLM

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    name, scales = options.cache.removesuffix(SCALED), options.cache.endswith(SCALED)
    if name in OWN:
        more |= {"kv_cache_dtype": name, **({"calculate_kv_scales": True} if scales else {})}
    else:
        asked = {"mlxkv": options.cache}
        if options.calibration:
            asked["mlxkv_calibration"] = str(options.calibration)
        more |= {"attention_backend": "CUSTOM", "additional_config": asked}
    return LLM(model, **more)


def speed(options: Namespace) -> None:
    from vllm import SamplingParams

    to = shape_folder(Path("shape"))
    options.calibration = to / "calibration.safetensors"
    start = time.time()
    llm = engine(
        options, str(to), load_format="dummy", skip_tokenizer_init=True, max_model_len=17000,
        gpu_memory_utilization=options.memory, enable_prefix_caching=True, dtype="bfloat16", max_num_seqs=64,
        max_num_batched_tokens=8192, disable_log_stats=True, tensor_parallel_size=options.gpus,
        compilation_config={
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS
        },
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    row = {"cache": options.cache, "gpus": options.gpus, "start_s": round(time.time() - start, 1)}
    write(options, row | {"tokens": room(options, cache, 16384), "max_model_len": 17000})

    def read(prompts: list, count: int) -> tuple[float, list[tuple[float, list[int]]]]:
        """Return the seconds that it takes, and after each step (seconds, tokens of each request)."""
        params = SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0, detokenize=False
        )
        start, tokens, steps = time.time(), [0] * len(prompts), []
        for i, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(i), prompt, params)
        while llm.llm_engine.has_unfinished_requests():
            for out in llm.llm_engine.step():
                tokens[int(out.request_id.split("-")[0])] = len(out.outputs[0].token_ids)
            steps.append((time.time() - start, list(tokens)))
        return steps[-1][0], steps

    warm = [{"prompt_token_ids": [5 + i % 97 for i in range(n, n + 9000)]} for n in range(2)]
    for count in (1, 8):
        read(warm, count)
    for batch, context in (map(int, case.split("x")) for case in options.cases.split(",")):
        some = random.Random(batch * context)
        prompts = [
            {"prompt_token_ids": [some.randrange(10, 120000) for _ in range(context)]}
            for _ in range(batch)
        ]
        first, hit = read(prompts, 1)[0], min(read(prompts, 1)[0] for _ in range(2))
        rates = [rate(read(prompts, STEPS)[1]) for _ in range(2)]
        write(options, {
            "cache": options.cache, "gpus": options.gpus, "batch": batch, "context": context,
            "prefill_s": round(first, 2), "hit_s": round(hit, 2),
            "step_ms": round(1e3 * batch / max(rates), 3), "tokens_s": round(max(rates), 1),
            "other_tokens_s": round(min(rates), 1),
        })  # fmt: skip


def rate(steps: list[tuple[float, list[int]]]) -> float:
    """Return the tokens a second while all requests run: from their 9th token on, until the first one is done."""
    most = max(max(tokens) for _, tokens in steps)
    all_run = [(t, sum(n)) for t, n in steps if min(n) > 8 and max(n) < most]
    (start, before), (end, after) = all_run[0], all_run[-1]
    return (after - before) / (end - start)


def room(options: Namespace, cache, length: int) -> int:
    """Return how many tokens fit in sequences of `length`."""
    if options.cache.removesuffix(SCALED) in OWN:
        return cache.num_gpu_blocks // -(-length // cache.block_size) * length
    from cuda_track.vllm import settings
    from cuda_track.vllm.blocks import tokens_that_fit

    asked = {"mlxkv": options.cache, "mlxkv_calibration": options.calibration}
    heads = settings.Heads(SHAPE["num_key_value_heads"], SHAPE["head_dim"])
    record = settings.plan(asked, "shape").record(heads).size
    exact = settings.exact_tokens(record, heads.dims, 2)
    return tokens_that_fit(cache.num_gpu_blocks, exact, length)


def table(path: Path) -> str:
    """Return the table of rows that `speed` wrote (caches as columns), `quality` and `alone`, or `load`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if any("same_of" in row for row in rows):
        return quality_table(rows)
    if any("preemptions" in row for row in rows):
        return load_table(rows)
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    room = {row["cache"]: row["tokens"] for row in rows if "tokens" in row}
    found = {(r["cache"], r["batch"], r["context"]): r for r in rows if "batch" in r}

    def line(name: str, cell) -> str:
        return f"| {name} | {' | '.join(cell(cache) for cache in caches)} |"

    def of(number: float, exact: float) -> str:
        return "" if number == exact else f" ({number / exact:.2f})"

    out = [line("", lambda c: "bf16" if c == "auto" else c), "|---" * (len(caches) + 1) + "|"]
    fits = lambda c: f"{room[c]:,}{of(room[c], room['auto'])}"  # noqa: E731
    out.append(
        line("tokens that fit in sequences of 16,384, exact ones included (over bf16)", fits)
    )
    for batch, context in dict.fromkeys((b, n) for _, b, n in found):

        def cell(name: str, form: str, over: str = "", only: bool = False, at=(batch, context)):
            def shown(cache: str) -> str:
                value = found.get((cache, *at), {}).get(name)
                if value is None:
                    return "not measured"
                exact = found[(over, *at)][name] if over else value
                return f"{value / exact:.2f}" if only else f"{value:{form}}{of(value, exact)}"

            return shown

        name = f"{batch} x {context:,}"
        out += [
            line(f"{name}: tokens a second (over bf16)", cell("tokens_s", ".0f", "auto")),
            *(
                [line(f"{name}: over fp8", cell("tokens_s", "", "fp8", only=True))]
                if "fp8" in caches
                else []
            ),
            line(f"{name}: ms a step", cell("step_ms", ".2f")),
            line(f"{name}: prefill, s (over bf16)", cell("prefill_s", ".2f", "auto")),
            line(f"{name}: first tokens after a prefix hit, s", cell("hit_s", ".2f")),
        ]
    return "\n".join(out)


def quality_table(rows: list[dict]) -> str:
    """Return the table of rows of next tokens; intervals of 95 %, over texts."""
    from mlxkv.eval import intervals

    out = ["| cache | model | same next token, % | KL | likelihood lost, nats |", "|---" * 5 + "|"]
    for row in rows:
        of_each = row["tokens"] / row["texts"]
        same = intervals.share([100 * n / of_each for n in row["same_of"]])
        kl = "not finite"
        if all(map(math.isfinite, row["kl_of"])):
            of_texts = intervals.mean(row["kl_of"])
            kl = f"{of_texts.value:.4f} [{of_texts.low:.4f}, {of_texts.high:.4f}]"
        name = row["cache"] + (", cuda_track alone" if row["engine"] == "alone" else "")
        shares = f"{same.value:.1f} [{same.low:.1f}, {same.high:.1f}]"
        out.append(f"| {name} | {row['model']} | {shares} | {kl} | {row['nll_lost']:.4f} |")
    return "\n".join(out)


def load_table(rows: list[dict]) -> str:
    """Return the table of rows of `load`: texts beside those that the engine writes alone, then what one request alone
    makes of the same boundaries of reading."""
    head = "cache | blocks | drafts | preemptions | same texts | same tokens, % | KL | widest gap, nats"
    ways = ("behind_", "half_", "resumed_")
    head += "".join(f" | {way.rstrip('_')}: KL, gap" for way in ways)
    out = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for row in rows:
        cells = [row["cache"], f"{row['blocks']:,}", row["drafts"], row["preemptions"]]
        cells += [f"{row['same_texts']} of {row['compared']}", f"{row['same_tokens']:.1f}"]
        cells += [f"{row['kl']:.4f}", f"{row['widest_gap']:g}"]
        cells += [f"{row[f'{way}kl']:.4f}, {row[f'{way}widest_gap']:g}" for way in ways]
        out.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(out)


def quality(options: Namespace) -> None:
    from vllm import SamplingParams

    prompts = prompts_of(options)
    llm = engine(
        options, str(options.model), max_model_len=CONTEXT + 512, enforce_eager=True,
        enable_prefix_caching=True, max_logprobs=LIKELIEST, dtype=options.dtype, max_num_seqs=16,
        max_num_batched_tokens=CHUNK, **BESIDE_OTHERS,
    )  # fmt: skip
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=LIKELIEST, detokenize=False)
    texts = [[] for _ in prompts]
    for at in range(
        CONTEXT, CONTEXT + options.next
    ):  # behind a prefix hit: what is older than a page is read as codes
        given = [{"prompt_token_ids": prompt[:at]} for prompt in prompts]
        outs = llm.generate(given, params, use_tqdm=False)
        for prompt, text, out in zip(prompts, texts, outs, strict=True):
            found = out.outputs[0].logprobs[0].items()
            text.append((prompt[at], {int(t): x.logprob for t, x in found}))
    store = Path(options.output).with_suffix(f".{options.model.name}.json")
    if options.cache == "auto":
        store.write_text(json.dumps(texts))
    exact = [
        [(t, {int(k): v for k, v in row.items()}) for t, row in text]
        for text in json.loads(store.read_text())
    ]
    write(options, compared(options, exact, texts) | {"engine": "vllm"})


def alone(options: Namespace) -> None:
    """Measure quality without vLLM: transformers and cuda_track, a batch, in chunks as vLLM's."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from cuda_track.models.attach_model import attach, new_cache
    from cuda_track.models.transformers_compat import handed
    from cuda_track.vllm.settings import RECENT, SINK
    from mlxkv.formats.names import parse_kv

    dtype, device = getattr(torch, options.dtype), "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map=device)
    model.eval()
    ids = torch.tensor(prompts_of(options), device=device)

    @torch.no_grad()
    def read(given: dict) -> list:
        for start in range(0, CONTEXT, CHUNK):
            chunk = ids[:, start : min(start + CHUNK, CONTEXT)]
            out = model(chunk, use_cache=True, logits_to_keep=1, **given)
        texts = [[] for _ in ids]
        for at in range(CONTEXT, CONTEXT + options.next):
            found = out.logits[:, -1].float().log_softmax(-1).topk(LIKELIEST)
            for text, tokens, values, token in zip(texts, *found[::-1], ids[:, at], strict=True):
                text.append((int(token), dict(zip(tokens.tolist(), values.tolist(), strict=True))))
            out = model(ids[:, at : at + 1], use_cache=True, **given)
        return texts

    exact = read({"past_key_values": DynamicCache()})
    attach(model, replace(parse_kv(options.cache), sink=SINK, recent=RECENT), options.calibration)
    write(options, compared(options, exact, read(handed(new_cache(model)))) | {"engine": "alone"})


def prompts_of(options: Namespace) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer, length = AutoTokenizer.from_pretrained(options.model), CONTEXT + options.next
    prompts = [tokenizer(f.read_text(errors="ignore")).input_ids[:length] for f in sources()]
    return [p for p in prompts if len(p) == length][: options.texts]


def compared(options: Namespace, exact: list, texts: list) -> dict:
    """Compare log probabilities of the likeliest tokens: of each text a list of (token that came, {token: value})."""
    same, divergences, lost, gap = [], [], [], 0.0
    for text, stored in zip(exact, texts, strict=True):
        pairs = [(p, q) for (_, p), (_, q) in zip(text, stored, strict=True)]
        same.append(sum(likeliest(p) == likeliest(q) for p, q in pairs))
        divergences.append(sum(divergence(p, q) for p, q in pairs) / len(pairs))
        gap = max(gap, *(max(p.values()) - p.get(likeliest(q), -math.inf) for p, q in pairs))
        for (target, p), (_, q) in zip(text, stored, strict=True):
            if target in p and target in q:
                lost.append(p[target] - q[target])
    count = sum(map(len, texts))
    return {
        "cache": options.cache, "model": options.model.name, "dtype": options.dtype, "texts": len(texts),
        "tokens": count, "same_next": round(100 * sum(same) / count, 2),
        "kl": round(float(np.mean(divergences)), 5), "nll_lost": round(float(np.mean(lost)), 4),
        "widest_gap": round(gap, 3), "same_of": same, "kl_of": [round(x, 6) for x in divergences],
    }  # fmt: skip


def sources() -> list[Path]:
    """Return files of Python's library, each of 4K tokens at least."""
    folder = Path(os.__file__).parent
    return [f for f in sorted(folder.glob("*.py")) if f.stat().st_size > 40000]


def likeliest(logprobs: dict[int, float]) -> int:
    return max(logprobs, key=lambda token: logprobs[token])


def divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """Return KL of the tokens that both name, and of all others as one."""
    both = [k for k in p if k in q]
    of_p, of_q = (1 - sum(math.exp(x[k]) for k in both) for x in (p, q))
    total = sum(math.exp(p[k]) * (p[k] - q[k]) for k in both)
    return total + (of_p * math.log(of_p / max(of_q, 1e-9)) if of_p > 1e-6 else 0.0)


def load(options: Namespace) -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer, some = AutoTokenizer.from_pretrained(options.model), random.Random(0)
    texts = [tokenizer(f.read_text(errors="ignore")).input_ids for f in sources()]
    shared, others = max(texts, key=len), sorted(texts, key=len)[:-1]
    prompts = []
    for _ in range(options.requests):
        own, both = (
            some.choice(others),
            some.randrange(options.length // 4, 3 * options.length // 4),
        )
        start = some.randrange(max(1, len(own) - options.length // 4))
        prompts.append(shared[:both] + own[start : start + options.length // 4])
    params = SamplingParams(
        max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False, logprobs=LIKELIEST
    )
    more: dict = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    if options.drafts:
        more["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": options.drafts,
            "prompt_lookup_min": 2, "prompt_lookup_max": 4,
        }  # fmt: skip
    preempted = watched()
    llm = engine(
        options, str(options.model), max_model_len=options.length + NEW, dtype=options.dtype,
        max_num_seqs=64, enable_prefix_caching=True, num_gpu_blocks_override=options.blocks,
        max_num_batched_tokens=CHUNK, tensor_parallel_size=options.gpus, disable_log_stats=False,
        max_logprobs=LIKELIEST, **BESIDE_OTHERS, **more,
    )  # fmt: skip
    start, found, cancelled = time.time(), {}, range(options.requests * 2 // 10, options.requests)
    cancelled = [str(i) for i in cancelled[: options.requests * 32 // 200]]
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for step in range(1 << 20):
        if step == options.requests // 3:
            llm.llm_engine.abort_request(cancelled)
        if not llm.llm_engine.has_unfinished_requests():
            break
        for out in llm.llm_engine.step():
            if out.finished and out.outputs[0].finish_reason != "abort":
                found[int(out.request_id.split("-")[0])] = out.outputs[0]
    took, alone, pairs = time.time() - start, {}, {}
    behind, half, resumed, preempted = {}, {}, {}, list(preempted)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}

    def ask(prompt: list[int], count: int = NEW):
        """Return what the engine writes alone, as vLLM gives it."""
        asked = params.clone()
        asked.max_tokens = count
        return llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0].outputs[0]

    for i, prompt in enumerate(prompts[: options.alone]):
        llm.reset_prefix_cache()
        out = ask(prompt)
        alone[i], behind[i] = list(out.token_ids), parted(ask(prompt), out)
        llm.reset_prefix_cache()
        ask(prompt[: len(prompt) // 2], 1)
        half[i] = parted(ask(prompt), out)
        llm.reset_prefix_cache()
        had = alone[i][: NEW // 2]
        resumed[i] = parted(ask(prompt + had, NEW - len(had)), out, len(had))
        if i in found:
            pairs[i] = parted(found[i], out)
    write(options, {
        "cache": options.cache, "model": Path(options.model).name, "gpus": options.gpus,
        "drafts": options.drafts, "blocks": options.blocks, "requests": len(prompts), "cancelled": len(cancelled),
        "finished": len(found), "s": round(took, 1), "tokens_s": round(NEW * len(found) / took, 1),
        "preemptions": metrics.get("vllm:num_preemptions"), "hits": metrics.get("vllm:prefix_cache_hits"),
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "used_after": metrics.get("vllm:kv_cache_usage_perc"),
        "preempted": sorted({int(x.split("-")[0]) for x in preempted}), "compared": len(pairs),
        **told(pairs, ""), **told(behind, "behind_"),
        **told(half, "half_"), **told(resumed, "resumed_"),
    })  # fmt: skip
    Path(f"{options.output}.{options.cache}.{options.gpus}.json").write_text(json.dumps(alone))


def watched() -> list[str]:
    """Return a list that gets the name of each request that vLLM preempts from now on, in this process."""
    from vllm.v1.core.sched.scheduler import Scheduler

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    names, preempt = [], Scheduler._preempt_request

    def preempting(self, request, *more, **named):
        names.append(request.request_id)
        return preempt(self, request, *more, **named)

    Scheduler._preempt_request = preempting
    return names


class Parted(NamedTuple):
    """Where a text leaves the one that the engine writes alone: after `same` tokens, by `gap` nats that the token it
    took was less likely (little at a tie). kl: of both distributions at each token that has the same text before it."""

    same: int
    gap: float
    kl: list[float]


def parted(out, alone, start: int = 0) -> Parted:
    """Compare a reply with the one that was written alone. start: tokens of the latter that the former was given."""
    kl = []
    for n, (token, q) in enumerate(zip(out.token_ids, out.logprobs, strict=True), start):
        p, q = ({int(t): x.logprob for t, x in row.items()} for row in (alone.logprobs[n], q))
        kl.append(divergence(p, q))
        if token != (other := alone.token_ids[n]):
            return Parted(n, p[other] - p.get(token, -math.inf), kl)
    return Parted(NEW, 0.0, kl)


def told(pairs: dict[int, Parted], of: str) -> dict:
    """Return what a row says of texts by request: where each leaves the other one, by how many nats, and KL there and
    before."""
    places, gaps = [x.same for x in pairs.values()], [x.gap for x in pairs.values()]
    kl = [value for x in pairs.values() for value in x.kl]
    parts = {i: x for i, x in pairs.items() if x.same < NEW}
    return {
        f"{of}same_texts": places.count(NEW), f"{of}widest_gap": round(max(gaps, default=0.0), 3),
        f"{of}same_tokens": round(100 * sum(places) / (NEW * max(len(places), 1)), 2),
        f"{of}kl": round(sum(kl) / max(len(kl), 1), 5), f"{of}kl_most": round(max(kl, default=0.0), 4),
        f"{of}others": [
            (i, x.same, round(x.gap, 3), round(x.kl[-1], 4), round(sum(x.kl[:-1]) / max(len(x.kl) - 1, 1), 5))
            for i, x in parts.items()
        ],
        f"{of}kl_of": {i: round(sum(x.kl) / len(x.kl), 5) for i, x in pairs.items()},
    }  # fmt: skip


def write(options: Namespace, row: dict) -> None:
    line = json.dumps(row)
    print(line, flush=True)
    with Path(options.output).open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("speed", "quality", "alone", "load", "table"))
    parser.add_argument("cache", nargs="?")
    parser.add_argument("--cases", default="16x16384,64x8192,1x4096")
    parser.add_argument("--memory", type=float, default=0.9, help="share of a GPU's, for speed")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--texts", type=int, default=12, help="of Python's library, for quality")
    parser.add_argument("--next", type=int, default=128, help="tokens of each that are compared")
    parser.add_argument("--dtype", default="bfloat16", help="of the model, for quality")
    parser.add_argument(
        "--requests", type=int, default=200, help="of load; 32 of 200 are cancelled"
    )
    parser.add_argument("--length", type=int, default=8000, help="tokens of the longest, for load")
    parser.add_argument("--drafts", type=int, default=0, help="n-gram drafts of a step, for load")
    parser.add_argument(
        "--gpus", type=int, default=1, help="that share a model, for speed and load"
    )
    parser.add_argument("--blocks", type=int, help="of the cache, for load")
    parser.add_argument("--alone", type=int, default=40, help="requests that load repeats alone")
    parser.add_argument("-o", "--output", default="engine.jsonl")
    options = parser.parse_args()
    if options.what == "table":
        return print(table(Path(options.output)))
    {"speed": speed, "quality": quality, "alone": alone, "load": load}[options.what](options)


if __name__ == "__main__":
    main()
