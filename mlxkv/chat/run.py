"""Run `mlxkv chat`: load the model, then answer once or talk in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

import mlx.core as mx

from mlxkv.chat.options import ChatOptions
from mlxkv.chat.session import Session
from mlxkv.codec import encoding
from mlxkv.console import note, print_json, say
from mlxkv.errors import UserError
from mlxkv.formats.names import with_keep
from mlxkv.models import load, warm_up
from mlxkv.models.generate import backend, sampler_for


def run(options: ChatOptions) -> None:
    """Answer once with --prompt or piped text, else talk in the terminal."""
    kv, prompt = with_keep(options.kv, options.keep), options.prompt
    if prompt is None and sys.stdin is None:  # closed, as in a job without a terminal
        prompt = ""
    elif prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().removesuffix("\n")
    if prompt is not None:  # an argument that is not UTF-8 arrives with surrogates in it
        prompt = prompt.encode("utf-8", "replace").decode("utf-8")
    # Refuse what can be refused before a model is loaded.
    if prompt is not None and not prompt.strip():
        raise UserError("[chat] empty prompt; pass --prompt TEXT or pipe some text in")
    if prompt is None and options.json:
        raise UserError("[--json] needs a prompt: pass --prompt TEXT or pipe some text in")
    if options.max_tokens < 1:
        raise UserError(f"[--max-tokens] must be at least 1; got {options.max_tokens}")
    if not 0 <= options.seed < 2**64:
        raise UserError(f"[--seed] must be 0 or more, below 2^64; got {options.seed}")
    sampler = sampler_for(options.temp, options.top_p)
    encoding.check(options.encode)
    _talk(options, kv, prompt, sampler)


def _talk(options: ChatOptions, kv: str, prompt: str | None, sampler: Callable) -> None:
    mx.random.seed(options.seed)
    mx.reset_peak_memory()
    loaded = load(
        options.model,
        kv,
        strict=options.kv_strict,
        dtype=options.dtype,
        calibration=options.calibration,
        fold=options.fold,
        encode=options.encode,
    )
    session = Session(loaded, options.system, options.raw, sampler, options.max_tokens)
    note(f"{loaded.name} · --kv {loaded.kv_name} · {backend()}")
    loaded.tell()
    warm_up(loaded)
    if options.load is not None:
        session.load(options.load)
        note(f"  goes on from {options.load}: {len(session.tokens)} tokens")
    if prompt is None:
        from mlxkv.chat.terminal import interactive

        interactive(session)
    elif options.json:
        one_shot(session, prompt, show=False)
        print_json(report(session))
    else:
        one_shot(session, prompt, show=True)
        note(stats_line(session))


def one_shot(session: Session, prompt: str, show: bool) -> None:
    """Answer once and, if `show`, stream the reply to stdout."""
    from mlxkv.chat.terminal import prefill_bar

    with prefill_bar() as progress:
        pieces = session.ask(prompt, progress)
        first = next(pieces, "")
    if show:
        say(first, end="")
    for piece in pieces:
        if show:
            say(piece, end="")
    if show:
        say("")
    session.loaded.tell_steps()


def report(session: Session) -> dict:
    """The document of `mlxkv chat --json` for the last reply."""
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
        **usage.figures,
        "peak_bytes": mx.get_peak_memory(),
        "text": session.messages[-1]["content"] if session.messages else "",
        "steps": loaded.steps,
        "layers": [asdict(layer) for layer in loaded.layers],
    }


def stats_line(session: Session) -> str:
    """The last reply and the cache in one line."""
    stats = session.stats
    return (
        f"[{stats.prompt_tokens} + {stats.generated_tokens} tokens · "
        f"{stats.tokens_per_second:.1f} tokens/s · {session.usage().line()}]"
    )
