"""What one `mlxkv bench` measures, checked before anything heavy is done. No framework here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxkv import console
from mlxkv.config import parse_kv
from mlxkv.errors import UserError

BASELINE = "fp16"
MLX_LM = {"mlx-lm-kv8": 8, "mlx-lm-kv4": 4}  # mlx-lm's own quantized cache: name -> kv_bits
MLX_LM_GROUP = 64
DTYPES = ("float32", "float16", "bfloat16")
BITS = (2, 3, 4, 6, 8)
SHORTEST = 16  # tokens of context
# A CPU is slow, and shows ratios at best: (contexts, tokens, rounds).
DEFAULTS, DEFAULTS_CPU = ("4k,16k", 128, 2), ("1k", 32, 1)


@dataclass(frozen=True)
class Plan:
    """contexts, tokens, rounds: None where the machine's backend decides (`filled`). presets: those
    asked for, BASELINE left out. cooldown, timeout: seconds, per worker. share: a file, "" for the
    default name, or None."""

    model: str
    presets: tuple[str, ...]
    contexts: tuple[int, ...] | None = None
    tokens: int | None = None
    rounds: int | None = None
    cooldown: float = 0.0
    timeout: float = 3600.0
    dtype: str | None = None
    bits: int | None = None
    mlx_lm: bool = True
    share: str | None = None

    @property
    def arms(self) -> list[str]:
        """Everything that is timed, the baseline first."""
        return [BASELINE, *self.presets, *(MLX_LM if self.mlx_lm else ())]

    @property
    def subject(self) -> dict:
        """What a worker has to know of the model."""
        return {"model": self.model, "dtype": self.dtype, "bits": self.bits}

    def filled(self, backend: str) -> Plan:
        """The same with the defaults of `backend` for what was not said."""
        from dataclasses import replace

        contexts, tokens, rounds = DEFAULTS_CPU if backend == "cpu" else DEFAULTS
        return replace(
            self,
            contexts=self.contexts or parse_contexts(contexts),
            tokens=self.tokens or tokens,
            rounds=self.rounds or rounds,
        )


def parse_contexts(text: str) -> tuple[int, ...]:
    """'1k,4k' -> (1024, 4096), in this order, each once."""
    lengths = dict.fromkeys(console.parse_tokens(name, "--contexts") for name in text.split(","))
    if min(lengths) < SHORTEST:
        raise UserError(
            f"[--contexts] too short to time; got {min(lengths)}; choose at least {SHORTEST}"
        )
    return tuple(lengths)


def make(kv: str, contexts: str | None, **options) -> Plan:
    """A Plan from the options of the command. Raises UserError for whatever is wrong with them."""
    presets = dict.fromkeys(name.strip() for name in kv.split(","))
    for name in presets:
        parse_kv(name)
    presets.pop(BASELINE, None)
    plan = Plan(
        presets=tuple(presets), contexts=parse_contexts(contexts) if contexts else None, **options
    )
    for name, number in (("--tokens", plan.tokens), ("--rounds", plan.rounds)):
        if number is not None and number < 1:
            raise UserError(f"[{name}] must be at least 1; got {number}; choose a larger one")
    if not 0 <= plan.cooldown <= 3600:
        raise UserError(f"[--cooldown] got {plan.cooldown:g}; choose 0 to 3600 seconds")
    if not 0 < plan.timeout <= 1e6:
        raise UserError(f"[--timeout] got {plan.timeout:g}; choose more than 0 seconds")
    for name, value, choices in (("--dtype", plan.dtype, DTYPES), ("--bits", plan.bits, BITS)):
        if value is not None and value not in choices:
            texts = ", ".join(str(choice) for choice in choices)
            raise UserError(f"[{name}] unknown value; got {value}; choose from {texts}")
    if plan.share:
        file = Path(plan.share).expanduser()
        if file.is_dir() or not file.absolute().parent.is_dir():
            raise UserError(
                f"[--share] no file can be written there; got {plan.share}; choose a file in a "
                "folder that exists"
            )
    return plan
