"""What one run of `mlxkv bench` measures: its options, checked. No framework."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxkv.bench.options import (
    BASELINE,
    MLX_LM,
    check_counts,
    check_weights,
    parse_contexts,
    parse_presets,
)
from mlxkv.errors import UserError

SHORTEST = 16  # tokens of context
# (contexts, tokens, rounds). A CPU is slow, and shows ratios at best.
DEFAULTS, DEFAULTS_CPU = ("4k,16k", 128, 2), ("1k", 32, 1)


@dataclass(frozen=True)
class BenchPlan:
    """Options of `mlxkv bench`.

    presets: without BASELINE. contexts, tokens, rounds: None for the defaults of the backend
    (`filled`). cooldown, timeout: seconds, per worker.
    """

    model: str
    presets: tuple[str, ...]
    contexts: tuple[int, ...] | None
    tokens: int | None
    rounds: int | None
    cooldown: float
    timeout: float
    dtype: str | None
    bits: int | None
    mlx_lm: bool

    @property
    def arms(self) -> list[str]:
        """All that is timed, the baseline first."""
        return [BASELINE, *self.presets, *(MLX_LM if self.mlx_lm else ())]

    @property
    def subject(self) -> dict:
        """The model's part of a worker's request."""
        return {"model": self.model, "dtype": self.dtype, "bits": self.bits}

    def filled(self, backend: str) -> BenchPlan:
        """The plan with the defaults of `backend` in place of None."""
        contexts, tokens, rounds = DEFAULTS_CPU if backend == "cpu" else DEFAULTS
        return replace(
            self,
            contexts=self.contexts or parse_contexts(contexts, SHORTEST),
            tokens=self.tokens or tokens,
            rounds=self.rounds or rounds,
        )


def make(*, kv: str, contexts: str | None, **options) -> BenchPlan:
    """A plan from the options of the command. kv, contexts: by commas. Raises UserError."""
    plan = BenchPlan(
        presets=tuple(name for name in parse_presets(kv) if name != BASELINE),
        contexts=parse_contexts(contexts, SHORTEST) if contexts else None,
        **options,
    )
    check_counts(tokens=plan.tokens, rounds=plan.rounds)
    check_weights(plan.dtype, plan.bits)
    if not 0 <= plan.cooldown <= 3600:
        raise UserError(f"[--cooldown] got {plan.cooldown:g}; choose 0 to 3600 seconds")
    if not 0 < plan.timeout <= 1e6:
        raise UserError(f"[--timeout] got {plan.timeout:g}; choose more than 0 seconds")
    return plan
