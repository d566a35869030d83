"""Every method once: what it stores and who reads it. Tests of all backends take their cases from here.

A method without kernels needs no row: its golden cases (`mlxkv.spec.cases`) make one. The float64 law is
`stored_spec.stored`.
"""

from dataclasses import dataclass

from mlxkv.formats.config import CacheConfig, Side
from mlxkv.formats.presets import PRESETS
from mlxkv.formats.quantizers import METHODS as QUANTIZERS
from mlxkv.formats.quantizers import Affine, Codebook, MixedBits, Polar, PolarTree, Quantizer
from mlxkv.spec import cases


def transform_at(transform: str, dims: int) -> str:
    """The transform `transform`, or SRFT where `dims` have no Hadamard matrix."""
    return "srft" if transform == "hadamard" and dims & (dims - 1) else transform


@dataclass(frozen=True)
class Method:
    """A pair of formats.

    transform: transform of both sides. dims: head dim of its kernels. kernels: whether records hold it.
    tiles, triton: whether the tile kernels and Triton read it.
    """

    keys: Quantizer
    values: Quantizer
    page: int = 64
    transform: str = "none"
    dims: int = 80
    kernels: bool = True
    tiles: bool = True
    triton: bool = False

    def config(self, dims: int) -> CacheConfig:
        """The config of a cache, for heads of `dims`."""
        sides = (Side(one, transform_at(self.transform, dims)) for one in (self.keys, self.values))
        return CacheConfig(*sides, sink=4, recent=16, page=self.page)


OWN_BOOKS = ((0.3, *(0.5 + 0.4 * i for i in range(15))),) + ((0.2, 0.6, 0.9, 1.3),) * 3
METHODS = {
    "affine": Method(Affine(4, 64), Affine(3, 64), 32, "srft", triton=True),
    "clipped": Method(
        Affine(2, 0, clip=0.92),
        Affine(2, 32, clip=0.92),
        transform="hadamard",
        dims=64,
        triton=True,
    ),
    "kivi": Method(Affine(2, 32, axis="channel"), Affine(2, 32), triton=True),
    "symmetric": Method(Affine(3, 32, True, axis="channel"), Affine(3, 32, True), 32, triton=True),
    "shared": Method(
        Affine(4, 0, True, shared=True),
        Affine(3, 0, True, shared=True),
        32,
        "srft",
        64,
    ),
    "groups of 16": Method(
        *(Affine(4, 16, True), Affine(4, 16)),
        transform="srft",
        kernels=False,
        tiles=False,
        triton=True,
    ),
    "channels of both": Method(
        Affine(3, 16, True, axis="channel"), Affine(4, 32, True, axis="channel"), 32, tiles=False
    ),
    "turbo": Method(Codebook(4), Codebook(2), transform="random"),
    "turbo-int3": Method(Codebook(3), Affine(4, 32), transform="hadamard"),
    "tree": Method(PolarTree(), PolarTree(), transform="random"),
    "tree of its own": Method(PolarTree(OWN_BOOKS), PolarTree()),
    "online": Method(
        *(PolarTree(online=True), PolarTree(online=True)),
        transform="random",
    ),
    "fill": Method(
        *(
            MixedBits(2.9, (4, 3, 2, 1)),
            MixedBits(2.9, (3, 3, 2, 1)),
        ),  # the second: an odd number of half words
        dims=64,
    ),
    "polar": Method(Polar(4, 4), Affine(4, 64), dims=128),
    "polar-tree": Method(Polar(2, 2), PolarTree(), dims=128),
}


WITHOUT_RECORDS = {
    kind for kind in QUANTIZERS.values() if not kind.exact and kind.layout is Quantizer.layout
}
for _name, _cases in cases.METHODS.items():
    _spec = next(iter(_cases.quantizers.values()))
    if type(_spec) in WITHOUT_RECORDS:
        METHODS[_name] = Method(_spec, _spec, kernels=False, tiles=False)


def names(**wanted: bool) -> list[str]:
    """Methods whose fields are as asked for: `names(tiles=True)`."""
    return [n for n, m in METHODS.items() if all(getattr(m, k) == v for k, v in wanted.items())]


READ = names(kernels=True)
# Presets that no kernel reads: groups of records are whole blocks of 32 dims; some methods have no records.
NO_KERNELS = {"srft-int4+g16", "fp16+keep0.5"} | {
    name for name, preset in PRESETS.items() if type(preset.keys.quantizer) in WITHOUT_RECORDS
}
