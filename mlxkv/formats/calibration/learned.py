"""Describe how a transform was learned, for the command line and the header of a calibration file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from mlxkv.errors import UserError
from mlxkv.formats.quantizers import Affine

ROTATIONS = ("rotation", "householder")
VARIANTS = ("scale", *ROTATIONS, *(f"{name}+scale" for name in ROTATIONS))
BASES = ("srft", "none")
BITS = (2, 3, 4)  # as in the presets; at 8 there is nothing to gain
STEPS = 300  # of Adam; 200 to 300 in the paper


@dataclass(frozen=True)
class Learned:
    """Settings of learned maps (SRFT paper, section 5): stored = x @ base @ R diag(scale).

    variant: which of R and scale are learned, and how R is parametrised.
    base: the transform before them, "srft" (sign-randomised) or "none".
    bits, group: the codes whose squared error was minimised.
    steps: steps of Adam.
    rows: keys (values) per kv head that were learned from.
    """

    variant: str = "scale"
    base: str = "srft"
    bits: int = 4
    group: int = 64
    steps: int = STEPS
    rows: int = 0

    @property
    def rotation(self) -> str:
        """Parametrisation of R: "rotation", "householder", or "" for a scale alone."""
        name = self.variant.removesuffix("+scale")
        return name if name in ROTATIONS else ""

    @property
    def scaled(self) -> bool:
        return self.variant.endswith("scale")

    @property
    def quantizer(self) -> Affine:
        """The quantizer whose error was minimised."""
        return Affine(self.bits, self.group)

    @property
    def label(self) -> str:
        base = "" if self.base == "none" else f"{self.base} + "
        return f"{base}learned {self.variant}"

    def check(self) -> None:
        """Raise UserError on unknown settings."""
        for option, value, choices in (
            ("--learn", self.variant, VARIANTS),
            ("--base", self.base, BASES),
            ("--bits", self.bits, BITS),
        ):
            if value not in choices:
                names = ", ".join(map(str, choices))
                raise UserError(f"[{option}] unknown; got {value!r}; choose from {names}")
        if self.steps < 1:
            raise UserError(f"[--steps] must be at least 1; got {self.steps}; choose 200 or more")
        _ = self.quantizer  # raises on a group that is too small

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def of(data: dict | None) -> Learned | None:
        """Read what `as_dict` returns. Raises ValueError on anything else."""
        if data is None:
            return None
        kinds = {field.name: type(field.default) for field in fields(Learned)}
        if {name: type(x) for name, x in data.items()} != kinds:
            raise ValueError("learned")
        learned = Learned(**data)
        try:
            learned.check()
        except UserError:
            raise ValueError("learned") from None
        return learned
