"""`mlxkv chat`: loads the model, then one shot or the interactive loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx

from mlxkv import encoding
from mlxkv.console import human_bytes, note, print_json
from mlxkv.errors import UserError
from mlxkv.generate import backend, sampler_for
from mlxkv.models import load
from mlxkv.session import Session


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    model: str = "tiny"
    kv: str = "int4"
    prompt: str | None = None
    system: str | None = None
    max_tokens: int = 512
    temp: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    kv_strict: bool = False
    raw: bool = False
    load: str | None = None
    dtype: str | None = None
    json: bool = False
    calibration: str | None = None
    fold: bool = False
    encode: str = encoding.KERNEL


def run(options: Options) -> None:
    """One shot with --prompt or piped text, else the terminal loop."""
    prompt = options.prompt
    if prompt is None and sys.stdin is None:  # closed, as in a job without a terminal
        prompt = ""
    elif prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is not None:  # an argument that is not UTF-8 arrives with surrogates in it
        prompt = prompt.encode("utf-8", "replace").decode("utf-8")
    # What can be refused is refused before a model is loaded.
    if prompt is not None and not prompt.strip():
        raise UserError("[chat] empty prompt; pass --prompt TEXT or pipe some text in")
    if prompt is None and options.json:
        raise UserError("[--json] needs a prompt: pass --prompt TEXT or pipe some text in")
    if options.max_tokens < 1:
        raise UserError(f"[--max-tokens] must be at least 1; got {options.max_tokens}")
    if not 0 <= options.seed < 2**64:
        raise UserError(f"[--seed] must be 0 or more, below 2^64; got {options.seed}")
    sampler = sampler_for(options.temp, options.top_p)
    with encoding.using(options.encode):
        _talk(options, prompt, sampler)


def _talk(options: Options, prompt: str | None, sampler: Callable) -> None:
    mx.random.seed(options.seed)
    mx.reset_peak_memory()
    loaded = load(
        *(options.model, options.kv, options.kv_strict, options.dtype, options.calibration),
        fold=options.fold,
    )
    session = Session(loaded, options.system, options.raw, sampler, options.max_tokens)
    note(f"{loaded.name} · --kv {loaded.kv_name} · {backend()}")
    loaded.tell()
    if options.load is not None:
        session.load(options.load)
        note(f"  goes on from {options.load}: {len(session.tokens)} tokens")
    if prompt is None:
        from mlxkv.chat_ui import interactive

        interactive(session)
    elif options.json:
        one_shot(session, prompt, show=False)
        print_json(report(session))
    else:
        one_shot(session, prompt, show=True)
        note(stats_line(session))


def one_shot(session: Session, prompt: str, show: bool) -> None:
    """Answers once; the reply streams to stdout."""
    from mlxkv.chat_ui import prefill_bar

    with prefill_bar() as progress:
        pieces = session.ask(prompt, progress)
        first = next(pieces, "")
    if show:
        print(first, end="", flush=True)
    for piece in pieces:
        if show:
            print(piece, end="", flush=True)
    if show:
        print(flush=True)


def report(session: Session) -> dict:
    """The last reply as the JSON document of `mlxkv chat --json`."""
    loaded, stats, usage = session.loaded, session.stats, session.usage()
    return {
        "model": loaded.name,
        "kv": loaded.kv_name,
        "backend": backend(),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefill_seconds": round(stats.prefill_seconds, 4),
        "decode_seconds": round(stats.decode_seconds, 4),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "kv_bytes": usage.kv_bytes,
        "kv_bytes_fp16": usage.kv_bytes_fp16,
        "bits_per_value": round(usage.bits_per_value, 3),
        "peak_bytes": mx.get_peak_memory(),
        "text": session.messages[-1]["content"] if session.messages else "",
        "layers": [asdict(layer) for layer in loaded.layers],
    }


def stats_line(session: Session) -> str:
    """The last reply and the cache in one line."""
    stats, usage = session.stats, session.usage()
    cache = f"cache {human_bytes(usage.kv_bytes)}"
    if session.all_exact:
        cache += f", exact up to {session.loaded.kv.window} tokens, compressed from there on"
    else:
        cache += f", 16 bits would be {human_bytes(usage.kv_bytes_fp16)}"
    return (
        f"[{stats.prompt_tokens} + {stats.generated_tokens} tokens · "
        f"{stats.tokens_per_second:.1f} tokens/s · {cache}]"
    )
