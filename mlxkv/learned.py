"""What a learned transform is: the words of the command line, and what a calibration file says of it.

No framework is imported here: `mlxkv.artifact` reads it on every machine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from mlxkv.config import Affine
from mlxkv.errors import UserError

ROTATIONS = ("rotation", "householder")
VARIANTS = ("scale", *ROTATIONS, *(f"{name}+scale" for name in ROTATIONS))
BASES = ("srft", "none")
BITS = (2, 3, 4)  # of the presets; at 8 there is nothing to gain
STEPS = 300  # of Adam; the paper takes 200 to 300


@dataclass(frozen=True)
class Learned:
    """How the maps of a file were learned (SRFT paper, section 5): stored = x @ base @ R diag(scale).

    variant: which of R and the scale there are, and what R is a product of. base: what stands before
    them, sign-randomised SRFT or nothing. bits, group: the codes whose error was least squares'.
    steps: of Adam. rows: keys (values) of each kv head that were learned from.
    """

    variant: str = "scale"
    base: str = "srft"
    bits: int = 4
    group: int = 64
    steps: int = STEPS
    rows: int = 0

    @property
    def rotation(self) -> str:
        """ "rotation", "householder" or "" where a scale is all there is."""
        name = self.variant.removesuffix("+scale")
        return name if name in ROTATIONS else ""

    @property
    def scaled(self) -> bool:
        return self.variant.endswith("scale")

    @property
    def spec(self) -> Affine:
        """The codes."""
        return Affine(self.bits, self.group)

    @property
    def label(self) -> str:
        base = "" if self.base == "none" else f"{self.base} + "
        return f"{base}learned {self.variant}"

    def check(self) -> None:
        """Raises UserError."""
        for option, got, choices in (
            ("--learn", self.variant, VARIANTS),
            ("--base", self.base, BASES),
            ("--bits", self.bits, BITS),
        ):
            if got not in choices:
                names = ", ".join(map(str, choices))
                raise UserError(f"[{option}] unknown; got {got!r}; choose from {names}")
        if self.steps < 1:
            raise UserError(f"[--steps] must be at least 1; got {self.steps}; choose 200 or more")
        _ = self.spec  # a group that is too small

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def of(data: dict | None) -> Learned | None:
        """The inverse of `as_dict`. Raises ValueError for anything else."""
        if data is None:
            return None
        kinds = {field.name: type(field.default) for field in fields(Learned)}
        if {name: type(x) for name, x in data.items()} != kinds:
            raise ValueError("learned")
        made = Learned(**data)
        try:
            made.check()
        except UserError:
            raise ValueError("learned") from None
        return made
