"""The part of `mlxkv chat` that needs a framework: load the model, then answer once or talk."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxkv.chat.options import ChatOptions
from mlxkv.chat.session import Session
from mlxkv.console import note, print_json, say, working
from mlxkv.generate.generation import backend
from mlxkv.loading import quality_check
from mlxkv.loading.load import load
from mlxkv.loading.warmup import warm_up


def talk(options: ChatOptions, prompt: str | None) -> None:
    """Answer `prompt`, or talk in the terminal where there is none."""
    mx.random.seed(options.seed)
    mx.reset_peak_memory()
    with working(f"reading {options.model.strip()}") as progress:
        loaded = load(
            options.model,
            options.cache,
            strict=options.kv_strict,
            dtype=options.dtype,
            calibration=options.calibration,
            progress=progress,
            weights=options.weights,
        )
    # As the model's makers recommend, but for what was asked for.
    asked = {"temperature": options.temp, "top_p": options.top_p}
    asked = {name: value for name, value in asked.items() if value is not None}
    sampler, processors = replace(loaded.sampling, **asked).drawing()
    session = Session(
        loaded,
        options.system,
        options.raw,
        sampler,
        options.max_tokens,
        options.template,
        processors,
    )
    loaded.print_report(backend(), options.quiet)
    quality_check.warn(loaded)
    warm_up(loaded)
    if options.load is not None:
        session.load(options.load)
        if not options.quiet:
            note(f"  continues {options.load}: {len(session.tokens)} tokens")
    if prompt is None:
        from mlxkv.chat.terminal import interactive

        interactive(session)
    elif options.json:
        one_shot(session, prompt, show=False)
        print_json(report(session))
    else:
        one_shot(session, prompt, show=True)
        if not options.quiet:
            note(stats_line(session))


def one_shot(session: Session, prompt: str, show: bool) -> None:
    """Answer once and, if `show`, stream the reply to stdout."""
    from mlxkv.chat.terminal import stream_reply

    stream_reply(session, prompt, show=show)
    if show:
        say("")
    if (cut := session.cut_off) is not None:
        note(f"[{cut}]")
    session.loaded.tell_steps()


def report(session: Session) -> dict:
    """Return the document of `mlxkv chat --json` for the last reply."""
    loaded, stats, usage = session.loaded, session.stats, session.usage()
    return {
        "model": loaded.name,
        "kv": loaded.kv_name,
        "backend": backend(),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "finish_reason": stats.finish_reason,
        "prefill_seconds": round(stats.prefill_seconds, 4),
        "decode_seconds": round(stats.decode_seconds, 4),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        **usage.figures,
        "peak_bytes": mx.get_peak_memory(),
        **said(session),
        "steps": loaded.steps,
        "layers": [layer.as_dict() for layer in loaded.layers],
    }


def said(session: Session) -> dict:
    """Return the fields of `--json` about the text of the last reply: `reasoning` only where the model thought."""
    last = session.messages[-1] if session.messages else {"content": ""}
    if "reasoning_content" not in last:
        return {"text": last["content"]}
    return {"reasoning": last["reasoning_content"].strip(), "text": last["content"].lstrip("\n")}


def stats_line(session: Session) -> str:
    """Return the last reply and the cache in one line."""
    stats = session.stats
    return (
        f"[{stats.prompt_tokens} + {stats.generated_tokens} tokens · "
        f"{stats.tokens_per_second:.1f} tokens/s · {memory_line(session)}]"
    )


def memory_line(session: Session) -> str:
    """Return what the cache takes and 16 bits would take, now and for the whole context of the model."""
    usage, line = session.usage(), session.usage().line()
    if not usage.window or usage.tokens >= session.limit:
        return line
    ahead = session.projected(session.limit)
    return f"{line}; at {ahead.tokens:,} tokens {ahead.saving()}"
