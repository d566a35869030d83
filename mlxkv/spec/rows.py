"""The driver of the golden table: cases, keys, comparisons and bounds, for any backend.

A backend subclasses `Table` and hands in its functions (`mlxkv.doctor.golden`, `cuda_track.golden.table`).
Codes have to be equal, except where the spec's own value lies at a rounding boundary: there one step is
allowed and counted. Floats are compared by rms(x - spec) / rms(spec). No framework is imported here.

Letters: `B` batch, `H` query heads, `G` kv heads, `T` tokens, `D` head dim, `P` pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from mlxkv.formats import levels, matrices
from mlxkv.formats.calibration import balance, layers, mixed_bits, subspace
from mlxkv.formats.config import BALANCED, CALIBRATED, PCA, SCALED, SHARED, CacheConfig, Side
from mlxkv.formats.layout import TREE_BITS
from mlxkv.formats.lowrank import LowRank
from mlxkv.formats.quantizers import Affine, Codebook, Half, PolarTree, Quantizer
from mlxkv.formats.records import NAMES
from mlxkv.spec.bounds import (
    BOUNDS,
    FITTED_BOUND,
    LEVELS_BOUND,
    OJA_BOUNDS,
    PRODUCT_BOUND,
    Arrays,
    Row,
    by_dims,
    close,
    compare_codes,
    keys,
    mask_at,
    method_cases,
    mixed_bits_moments,
    mixed_bits_sample,
    read_golden,
    rms,
    steps_off,
    under,
)
from mlxkv.spec.cases import METHODS, OJA_PAGE, OJA_RATES, OJA_WINDOW, PAGE_SIDES, SCALED_SIDES

Tensor = Any  # of the backend
Stored = dict[str, Tensor]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Attention:
    """One call of attention over given pages.

    q: [B, H, L, D]. sides, stored, transforms: of keys and values; transforms: (down, up) of calibrated sides.
    page: tokens of a page. pages: how many. recent, sink: (keys, values) [B, G, T, D].
    """

    q: Tensor
    sides: tuple[Side, Side]
    stored: tuple[Stored, Stored]
    page: int
    pages: int
    recent: tuple[Tensor, Tensor]
    sink: tuple[Tensor, Tensor] | None = None
    mask: Tensor | str | None = None
    sink_logits: Tensor | None = None
    transforms: tuple[Any, Any] | None = None
    softcap: float | None = None

    @property
    def dims(self) -> int:
        return self.q.shape[-1]

    @property
    def scale(self) -> float:
        return self.dims**-0.5


class Table:
    """The golden table as one backend computes it. Each `*_rows` reads one golden set.

    attention, following, runs, salience, polar_tree, moments: the backend's modules of these names. Transform,
    LayerMaps, View: its classes. float32: its type of these numbers.
    """

    attention: ModuleType
    following: ModuleType
    runs: ModuleType
    salience: ModuleType
    polar_tree: ModuleType
    moments: ModuleType
    Transform: type
    LayerMaps: type
    View: type
    float32: Any

    # -- what a backend hands in

    tensor: Callable[[np.ndarray], Tensor]  # in its own type; words as the backend holds them
    array: Callable[[Tensor], np.ndarray]
    pack: Callable[[np.ndarray, int], Tensor]  # of codes and bits
    unpack: Callable[[Tensor, int, int], np.ndarray]  # of words, bits and dims
    transform: Callable[[str, int, int], Any]  # of a name, dims and a seed
    codec: Callable[..., Any]  # of a side, dims, the tokens of a page and, where given, a transform
    subtract_mean: Callable[[Tensor, Tensor], Tensor]  # keys [B, G, L, D] without their mean [G, D]
    attend: Callable[[Attention], Tensor]
    causal: Callable[[Tensor, Tensor, Tensor], Tensor]  # attention in full precision over q, k, v
    stores: Callable[[CacheConfig, int], Callable]  # of a config and dims: maps -> an empty store

    def indices(self, x: np.ndarray) -> Tensor:
        return self.tensor(x)

    def words(self, words: Tensor) -> np.ndarray:
        """Packed codes as files hold them, uint32."""
        return self.array(words)

    def floats(self, x: np.ndarray) -> Tensor:
        return self.tensor(x.astype(np.float32))

    # -- the table

    @property
    def tables(self) -> dict[str, Callable[[], Rows]]:
        """Return the function that computes the rows of each golden set."""
        return {
            "transform": self.transform_rows,
            "packing": self.packing_rows,
            "affine": self.affine_rows,
            "clip": self.clip_rows,
            "encode": self.encode_rows,
            "attention": self.attention_rows,
            "softcap": self.softcap_rows,
            "oscar": self.oscar_rows,
            "balanced": self.balanced_rows,
            "scaled": self.scaled_rows,
            "centred": self.centred_rows,
            "codebook": self.codebook_rows,
            "polar_tree": self.polar_tree_rows,
            **{name: partial(self.method_rows, name) for name in METHODS},
            "latent": self.latent_rows,
            "oja": self.oja_rows,
        }

    def by_set(self) -> Iterator[tuple[str, Row]]:
        """Yield every row with its golden set."""
        for name, table in self.tables.items():
            for row in table():
                yield name, row

    def transform_rows(self) -> Rows:
        tensors, _ = read_golden("transforms")
        for key in keys(tensors, ".x"):
            name, dims = key.split(".")
            transform = self.transform(name, int(dims), 1)
            y = transform.store(self.floats(tensors[f"{key}.x"])[None, None])
            spec, restored = tensors[f"{key}.y"], self.array(transform.restore(y))[0, 0]
            error = max(rms(self.array(y)[0, 0], spec), rms(restored, tensors[f"{key}.x"]))
            yield Row("transforms", key, spec.size, rms=error, bound=BOUNDS["transforms"])

    def packing_rows(self) -> Rows:
        tensors, _ = read_golden("packing")
        for key in keys(tensors):
            dims, bits = map(int, key.split("."))
            codes, words = tensors[f"{key}.codes"], tensors[f"{key}.words"]
            packed = self.words(self.pack(codes, bits))
            unpacked = self.unpack(self.tensor(words), bits, dims)
            wrong = int((packed != words).sum() + (unpacked != codes).sum())
            yield Row("packing", key, codes.size, wrong=wrong)

    def affine_rows(self) -> Rows:
        tensors, _ = read_golden("affine")
        for key in keys(tensors):
            dims, bits, kind, axis, group = key.split(".")
            quantizer = Affine(
                int(bits), int(group), kind == "sym", "channel" if axis == "channel" else "token"
            )
            code, stored = self._encoded(Side(quantizer), tensors, int(dims))
            yield self._codes("encode", key, tensors, stored, quantizer.bits, int(dims))
            golden = self._stored(tensors, f"{key}.", quantizer.bits)
            yield self._decoded(key, code, golden, tensors[f"{key}.decoded"])

    def clip_rows(self) -> Rows:
        tensors, _ = read_golden("clip")
        for key in keys(tensors):
            dims, bits, kind, group, share = key.split(".")
            quantizer = Affine(int(bits), int(group), kind == "sym", clip=int(share) / 100)
            _, stored = self._encoded(Side(quantizer), tensors, int(dims))
            row = self._codes("clip", key, tensors, stored, quantizer.bits, int(dims))
            # Codes alone say little about the limit: scales and biases to a float16 step.
            numbers = (name for name in stored if name != "codes")
            off = sum(self._off(stored[n], tensors[f"{key}.{n}"]) for n in numbers)
            yield replace(row, wrong=row.wrong + off)

    def encode_rows(self) -> Rows:
        tensors, header = read_golden("encode")
        for key, side, dims in encode_cases(tensors, header):
            quantizer = side.quantizer
            assert isinstance(quantizer, Affine)
            _, stored = self._encoded(side, tensors, dims)
            yield self._codes("seal", key, tensors, stored, quantizer.bits, dims)

    def latent_rows(self) -> Rows:  # read as keys and as values, beside rotary scores
        tensors, header = read_golden("latent")
        for key, side, dims in encode_cases(tensors, header):
            quantizer = side.quantizer
            assert isinstance(quantizer, Affine)
            case = under(tensors, key) | {"x": tensors[f"x.{dims}"]}
            (_, encoded), bits = self._encoded(side, tensors, dims), quantizer.bits
            yield self._codes("latent", key, tensors, encoded, bits, dims)
            yield self._page_alone(
                key, dims, case, (side,) * 2, (self._stored(case, "", bits),) * 2
            )

    def attention_rows(self) -> Rows:
        for case, call, spec in self.attention_cases():
            yield self._attention(case, self.attend(call), spec)

    def softcap_rows(self) -> Rows:
        """Attention whose scores are capped."""
        for case, call, spec in self.attention_cases("softcap"):
            yield self._attention(f"softcap.{case}", self.attend(call), spec)

    def attention_cases(
        self, table: str = "attention"
    ) -> Iterator[tuple[str, Attention, np.ndarray]]:
        """Yield (case, inputs, the spec's output)."""
        tensors, header = read_golden(table)
        for case, info in json.loads(header.get("cases", "{}")).items():
            golden = under(tensors, case)
            sides, stored = [], []
            for letter, name in (("k", "keys"), ("v", "values")):
                side = info[name]
                quantizer = Affine(side["bits"], side["group"], side["symmetric"], side["axis"])
                sides.append(Side(quantizer, side["transform"]))
                stored.append(self._stored(golden, f"{letter}.", side["bits"]))
            recent, sink = (
                tuple(self.floats(golden[f"{letter}.{part}"]) for letter in "kv")
                for part in ("live", "sink")
            )
            mask = "causal" if info["mask"] == "causal" else None
            if info["mask"] in ("window", "additive"):
                mask = self.tensor(golden["mask"])
            call = Attention(
                q=self.floats(golden["q"]),
                sides=tuple(sides),
                stored=tuple(stored),
                page=info["page"],
                pages=golden["k.codes"].shape[2] // info["page"],
                recent=recent,
                sink=sink if sink[0].shape[2] else None,
                mask=mask,
                sink_logits=self.floats(golden["sinks"]) if "sinks" in golden else None,
                softcap=info.get("softcap"),
            )
            yield case, call, golden["out"]

    def oscar_rows(self) -> Rows:
        """Moments of a calibration, and pages behind the spec's rotations, of a kv head and of a layer."""
        for dims, golden in by_dims("oscar"):
            q, k, v = self._inputs(golden)
            transforms = {}
            for letter, rows in (("k", q), ("v", self.causal(q, k, v))):
                yield self._moments(f"{dims}.{letter}", rows, golden[f"{letter}.sigma"])
                r = golden[f"{letter}.r"]
                transforms[letter] = r, r.swapaxes(-1, -2)
            yield from self._page_rows("oscar", CALIBRATED, dims, golden, transforms)
        for dims, golden in by_dims("oscar_released"):
            yield self._moments(f"released.{dims}.k", self._inputs(golden)[0], golden["k.sigma"])
            transforms = {x: (golden[f"{x}.r"], golden[f"{x}.r"].swapaxes(-1, -2)) for x in "kv"}
            yield from self._page_rows("released", SHARED, dims, golden, transforms)

    def balanced_rows(self) -> Rows:
        """Moments of a calibration, and pages behind the spec's balanced transforms."""
        for dims, golden in by_dims("balanced"):
            q, k, v = self._inputs(golden)
            pairs = {}
            for letter, rows in (("k", k), ("v", v)):
                case = f"balanced.{dims}.{letter}"
                yield self._moments(case, rows, golden[f"{letter}.noise"])
                if letter == "k":
                    yield self._moments(f"{case}.reads", q, golden["k.reads"])
                pairs[letter] = golden[f"{letter}.down"], golden[f"{letter}.up"]
            yield from self._page_rows("balanced", BALANCED, dims, golden, pairs)

    def scaled_rows(self) -> Rows:
        """Peaks of a calibration, pages behind SRFT and a scale per channel, and one scale for a whole page."""
        for dims, golden in by_dims("scaled"):
            _, *inputs = self._inputs(golden)
            pairs = {}
            for letter, x in zip("kv", inputs, strict=True):
                spec, peaks = golden[f"{letter}.peaks"], self.array(self.moments.peaks(x))
                yield close("peaks", f"scaled.{dims}.{letter}", peaks, spec, BOUNDS["transforms"])
                pairs[letter] = golden[f"{letter}.down"], golden[f"{letter}.up"]
            yield from self._page_rows("scaled", SCALED, dims, golden, pairs, SCALED_SIDES)
            quantizer, expected = Affine(4, 0, symmetric=True, shared=True), under(golden, "tensor")
            page = expected["codes"].shape[2]
            stored = self.codec(Side(quantizer, "srft"), dims, page).encode(inputs[0][:, :, :page])
            codes = self.unpack(stored["codes"], quantizer.bits, dims)
            row = compare_codes(
                "seal", f"tensor.{dims}", codes, expected["codes"], expected["near"]
            )
            yield replace(row, wrong=row.wrong + self._off(stored["scale"], expected["scale"]))

    def centred_rows(self) -> Rows:
        """Keys without their mean, pages behind the maps of what is left, and attention over such keys, exact."""
        for dims, golden in by_dims("centred"):
            full, mean = self.tensor(golden["k.came"]), self.floats(golden["k.mean"])
            keys, spec, case = self.subtract_mean(full, mean), golden["k.x"], f"centred.{dims}"
            wrong = steps_off(self.array(keys).astype(np.float64), spec.astype(np.float64))
            yield Row("centred", case, spec.size, wrong=wrong)
            pairs = {x: (golden[f"{x}.down"], golden[f"{x}.up"]) for x in "kv"}
            yield from self._page_rows("centred", BALANCED, dims, golden, pairs)
            q, k, v = self._inputs(golden)
            exact, scale = golden["exact"], dims**-0.5
            out = self.attention.attend(
                q[:, :, -exact.shape[2] :], self.View((k, v)), scale, "causal"
            )
            yield self._attention(f"{case}.exact", out, exact)  # of the keys as they came

    def _page_rows(
        self, table: str, kind: str, dims: int, golden: Arrays, pairs: dict, quantizers=PAGE_SIDES
    ) -> Rows:
        """Codes of a page behind pairs [G, D, D], and attention over the spec's own."""
        q, k, v = self._inputs(golden)
        page = golden["k.codes"].shape[2]
        sides, transforms, stored = [], [], []
        for letter, x in (("k", k), ("v", v)):
            quantizer, case = quantizers[letter], f"{table}.{dims}.{letter}"
            side = Side(quantizer, kind)
            transform = self.Transform(*map(self.floats, pairs[letter]))
            encoded = self.codec(side, dims, page, transform).encode(x[:, :, :page])
            codes = self.unpack(encoded["codes"], quantizer.bits, dims)
            ties = golden[f"{letter}.near"]
            yield compare_codes("seal", case, codes, golden[f"{letter}.codes"], ties)
            sides.append(side)
            transforms.append(transform)
            stored.append(self._stored(golden, f"{letter}.", quantizer.bits))
        call = Attention(
            q=q[:, :, -golden["out"].shape[2] :],
            sides=tuple(sides),
            stored=tuple(stored),
            page=page,
            pages=1,
            recent=tuple(x[:, :, page:] for x in (k, v)),
            mask="causal",
            transforms=tuple(transforms),
        )
        yield self._attention(f"{table}.{dims}", self.attend(call), golden["out"])

    def codebook_rows(self) -> Rows:
        """Rotations, codes and scales of every width; a page alone."""
        for dims, golden in by_dims("codebook"):
            x, page = self.floats(golden["x"]), golden["x"].shape[2]
            rotation, spec = (
                self.array(self.transform("random", dims, 0).down)[:3],
                golden["rotation"],
            )
            yield Row("rotations", f"random.{dims}", spec.size, rms=rms(rotation, spec), bound=1e-6)
            for bits in (1, 2, 3, 4):
                key, expected = f"{dims}.{bits}", under(golden, str(bits))
                stored = self.codec(Side(Codebook(bits), "random"), dims, page).encode(x)
                codes = self.unpack(stored["codes"], bits, dims)
                row = compare_codes("codebook", key, codes, expected["codes"], expected["near"])
                yield replace(row, wrong=row.wrong + self._off(stored["scale"], expected["scale"]))
            two = under(golden, "2")
            words = {"codes": self.pack(two["codes"], 2), "scale": self.tensor(two["scale"])}
            side = Side(Codebook(2), "random")
            yield self._page_alone(f"codebook.{dims}", dims, golden, (side, side), (words, words))

    def polar_tree_rows(self) -> Rows:
        """Codes and radii; codebooks fitted to a page."""
        for dims, golden in by_dims("polar_tree"):
            side, x, page = Side(PolarTree(), "random"), golden["x"], golden["x"].shape[2]
            code = self.codec(side, dims, page)
            stored = code.encode(self.floats(x))
            for level, level_codes in enumerate(self.polar_tree.codes_of(stored, dims, page), 1):
                spec, ties = golden[f"codes.{level}"], golden[f"near.{level}"]
                level_codes = self.array(level_codes).reshape(spec.shape)
                yield compare_codes("polar-tree", f"{dims}.{level}", level_codes, spec, ties)
            spec = golden["radii"]
            wrong = self._off(stored["radii"], spec)
            yield Row("polar-tree", f"{dims}.radii", spec.size, wrong=wrong)
            codes = [self.tensor(golden[f"codes.{i}"]) for i in range(1, 5)]
            of_spec = self.polar_tree.stored_of(codes, self.tensor(spec))
            yield self._decoded(f"polar-tree.{dims}", code, of_spec, golden["decoded"])
            both = (side, side), (of_spec, of_spec)
            yield self._page_alone(f"polar-tree.{dims}", dims, golden, *both)
        tensors, _ = read_golden("polar_tree")
        for level, book in enumerate(self.polar_tree.fit(self.floats(tensors["online.x"])), 1):
            spec = tensors[f"online.book.{level}"]
            yield close("levels", f"online.{level}", np.array(book), spec, FITTED_BOUND)

    def method_rows(self, name: str) -> Rows:
        """Codes and numbers of a method of `cases.METHODS`, and what the spec's codes stand for."""
        cases = METHODS[name]
        for key, dims, case in method_cases(name):
            quantizer, label = cases.quantizers[key], f"{name}.{key}"
            page = case["x"].shape[2]
            stored = self.codec(Side(quantizer), dims, page).encode(self.floats(case["x"]))
            pair = self.words(stored["codes"]), case["codes"]
            ours, right = (cases.codes(quantizer, words, dims) for words in pair)
            for part, codes in ours.items():
                row = f"{label}.{part}" if part else label
                ties = mask_at(case[f"near_{part}" if part else "near"], codes.size)
                yield compare_codes("encode", row, codes, right[part], ties)
            for number in sorted(quantizer.tensors - {"codes"}):
                off = self._off(stored[number], case[number])
                yield Row("encode", f"{label}.{number}", case[number].size, wrong=off)
            yield from self._read_rows(quantizer, label, dims, case)

    def _read_rows(self, quantizer: Quantizer, key: str, dims: int, case: Arrays) -> Rows:
        """Values of the spec's codes, and products with them."""
        code = self.codec(Side(quantizer), dims, case["x"].shape[2])
        stored = {name: self.tensor(case[name]) for name in quantizer.tensors}
        q, p = (self.floats(case[name]) for name in ("q", "p"))
        yield self._decoded(key, code, stored, case["decoded"])
        for table, product in (("scores", code.scores(q, stored)), ("mix", code.mix(p, stored))):
            yield close(table, key, self.array(product), case[table], PRODUCT_BOUND)

    def oja_rows(self) -> Rows:
        """Compare bases of low rank that follow the text, and the tokens selected to update them or to be kept."""
        for dims, golden in by_dims("oja"):
            yield from self._oja_rows(dims, golden)

    def _oja_rows(self, dims: int, golden: Arrays) -> Rows:
        q, k, v = (self.floats(golden[name]) for name in "qkv")
        moment, u = golden["moment"].astype(np.float64), golden["u"]

        def row(table: str, name: str, values, bound: str) -> Row:
            spec = golden[name]
            values = values if isinstance(values, np.ndarray) else self.array(values)
            return close(table, f"{dims}.{name}", values, spec, OJA_BOUNDS[bound])

        def equal(name: str, values: np.ndarray) -> Row:
            wrong = int((values != golden[name]).sum())
            return Row("salience", f"{dims}.{name}", golden[name].size, wrong=wrong)

        basis = subspace.basis(moment, u.shape[-1])
        signs = np.sign((basis * u).sum(-2, keepdims=True))  # of an eigenvector it is free
        yield row("subspace", "u", basis * signs, "basis")
        yield equal("ranks", subspace.ranks(moment, 0.95))
        weights = self.salience.importance(q[:, :, -OJA_WINDOW:], self.View((k, v)), dims**-0.5)
        batch = self.indices(golden["salient"])
        yield equal("salient", self.array(self.salience.salient(weights, batch.shape[1])))
        votes = self.salience.votes(weights)
        yield equal("kept", self.array(self.salience.kept(votes, golden["kept"].shape[-1])))
        x, start = self.salience.taken(k, batch), self.floats(u)[None]
        update = self.following.update
        yield row("oja", "raw", update(start, x, OJA_RATES["pre"], raw=True)[0], "update")
        for name, rate in OJA_RATES.items():
            yield row("oja", name, update(start, x, rate)[0], "update")
        rows = self.array(x[0]).astype(np.float64)
        of_batch = np.einsum("gtd,gte->gde", rows, rows)
        yield row("subspace", "residual", subspace.residual(of_batch, u), "float16")
        yield row("subspace", "overlap", subspace.overlap(u, golden["one"]), "basis")

        old, new = (self.following.transform_of(self.floats(golden[n])[None]) for n in ("u", "one"))
        side = Side(Half(), PCA, low=LowRank(rank=u.shape[-1], follows=True))
        config = CacheConfig(side, side, sink=0, recent=0, page=OJA_PAGE)
        start, following_maps = (self.LayerMaps(x, x) for x in (old, new))
        store = self.runs.Segments(
            self.stores(config, dims), start, start, config.page, config.keys.low
        )
        store.append((k, v), 1)
        store.rebase(following_maps)
        store.append((k, v), 1, OJA_PAGE)
        moved = self.runs.transported(store.runs[0], store.runs[1].codecs)
        yield row("oja", "moved", moved[NAMES[0]]["values"][0], "float16")
        recent = tuple(x[:, :, 2 * OJA_PAGE :] for x in (k, v))
        last = q[:, :, -golden["out"].shape[2] :]
        view = self.View(recent, None, store.read(0, 2))
        out = self.attention.attend(last, view, dims**-0.5, "causal")
        yield row("attention", "out", out, "attention")

    # -- comparisons

    def _encoded(self, side: Side, tensors: Arrays, dims: int) -> tuple[Any, Stored]:
        """(codec, the page `x` of these dims encoded)."""
        x = tensors[f"x.{dims}"]
        code = self.codec(side, dims, x.shape[2])
        return code, code.encode(self.floats(x))

    def _codes(self, table: str, key: str, tensors: Arrays, stored, bits: int, dims: int) -> Row:
        codes = self.unpack(stored["codes"], bits, dims)
        return compare_codes(table, key, codes, tensors[f"{key}.codes"], tensors[f"{key}.near"])

    def _decoded(self, key: str, code, stored: Stored, spec: np.ndarray) -> Row:
        """spec: values of evenly spaced tokens."""
        values = self.array(code.decode_stored(stored, self.float32))
        values = values[:, :, :: values.shape[2] // spec.shape[2]]
        return close("decode", key, values, spec, BOUNDS["decode"])

    def _attention(self, case: str, out: Tensor, spec: np.ndarray) -> Row:
        return close("attention", case, self.array(out), spec, BOUNDS["attention"])

    def _page_alone(self, case: str, dims: int, golden: Arrays, sides, stored) -> Row:
        """Compare attention over a single page of given codes."""
        nothing = self.floats(np.zeros((1, 1, 0, dims)))
        call = Attention(
            q=self.floats(golden["q"]),
            sides=sides,
            stored=stored,
            page=golden["x"].shape[2],
            pages=1,
            recent=(nothing, nothing),
            mask=self.tensor(golden["mask"]) if "mask" in golden else None,
        )
        return self._attention(case, self.attend(call), golden["out"])

    def _stored(self, golden: Arrays, prefix: str, bits: int) -> Stored:
        """Return the spec's codes, scales and biases as the backend holds them."""
        numbers = (name for name in ("scale", "bias") if f"{prefix}{name}" in golden)
        stored = {name: self.tensor(golden[f"{prefix}{name}"]) for name in numbers}
        return {"codes": self.pack(golden[f"{prefix}codes"], bits), **stored}

    def _inputs(self, golden: Arrays) -> list[Tensor]:
        return [self.floats(golden[name]) for name in ("q", "k.x", "v.x")]

    def _moments(self, case: str, rows: Tensor, spec: np.ndarray) -> Row:
        kv_heads, dims = spec.shape[:2]
        rows = self.moments.grouped(rows, kv_heads)
        products, _ = self.moments.products(rows, self.floats(np.zeros((kv_heads, dims))))
        moment = self.array(products) / rows.shape[1]
        return close("moments", case, moment, spec, BOUNDS["moments"])

    def _off(self, values: Tensor, spec: np.ndarray) -> int:
        return steps_off(self.array(values), spec)


# NumPy code shared by all backends: checked once, by `mlxkv doctor`.


def shared_rows() -> Rows:
    """Rotations, balanced transforms, mixed bits, scales per channel and codebooks that are computed."""
    for dims, golden in by_dims("oscar"):
        for letter in "kv":
            sigma, r = golden[f"{letter}.sigma"], golden[f"{letter}.r"]
            error = rms(matrices.compose(matrices.eigenbasis(sigma.astype(np.float64))[1]), r)
            name = f"{dims}.{letter}"
            yield Row("rotations", name, r.size, rms=error, bound=BOUNDS["transforms"])
    for dims, golden in by_dims("oscar_released"):
        for letter in "kv":
            sigma, r = golden[f"{letter}.sigma"].astype(np.float64), golden[f"{letter}.r"]
            error = rms(matrices.compose(layers.shared_vectors(*matrices.eigenbasis(sigma)[:2])), r)
            name = f"released.{dims}.{letter}"
            yield Row("rotations", name, r.size, rms=error, bound=BOUNDS["transforms"])
    for dims, golden in by_dims("balanced"):
        for letter in "kv":
            moments = (golden[f"{letter}.{n}"].astype(np.float64) for n in ("noise", "reads"))
            down = balance.balance(*moments)[0]
            pair = golden[f"{letter}.down"], golden[f"{letter}.up"]
            error = max(map(rms, balance.mixed(down), pair))
            name = f"balanced.{dims}.{letter}"
            yield Row("balances", name, down.size, rms=error, bound=BOUNDS["transforms"])
    for dims, golden in by_dims("centred"):
        noise, mean, reads = (
            golden[f"k.{n}"].astype(np.float64) for n in ("noise", "mean", "reads")
        )
        down = balance.balance(balance.about_mean(noise, mean), reads)[0]
        pair = golden["k.down"], golden["k.up"]
        error, name = max(map(rms, balance.mixed(down), pair)), f"centred.{dims}.k"
        yield Row("balances", name, down.size, rms=error, bound=BOUNDS["transforms"])
    yield from fill_map_rows()
    for dims, golden in by_dims("scaled"):
        for letter in "kv":
            maps = layers.scaled(layers.channel_scale(golden[f"{letter}.peaks"]))
            pair = golden[f"{letter}.down"], golden[f"{letter}.up"]
            error, name = max(map(rms, maps, pair)), f"scaled.{dims}.{letter}"
            yield Row("scales", name, maps[0].size, rms=error, bound=BOUNDS["transforms"])
    for dims, golden in by_dims("codebook"):
        for bits in (1, 2, 3, 4):
            spec = golden[f"{bits}.levels"]
            yield close("levels", f"{dims}.{bits}", levels.sphere(dims, bits), spec, LEVELS_BOUND)
    tensors, _ = read_golden("polar_tree")
    for level, bits in enumerate(TREE_BITS, 1):
        spec = tensors[f"book.{level}"]
        yield close("levels", f"polar-tree.{level}", levels.angles(level, bits), spec, LEVELS_BOUND)


def fill_map_rows() -> Rows:
    """Yield the bits that directions are given, and their maps: NumPy code that all backends share."""
    tensors, _ = read_golden("fill_maps")
    for name in sorted({key.split(".")[0] for key in tensors}):
        tensors_of_case = under(tensors, name)
        dims, layers, rate = tensors_of_case["asked"]
        sides = []
        for side in range(2 * int(layers)):
            moments = mixed_bits_moments(int(dims), 100 * int(name) + side)
            sides.append(balance.balance(*moments)[:2])
        kinds = ("keys", "values") * int(layers)
        sides_by_kind = [(kind, sigma) for kind, (_, sigma) in zip(kinds, sides, strict=True)]
        for side, widths in enumerate(mixed_bits.allot(sides_by_kind, float(rate))):
            case, right = (
                f"fill.{name}.{side}",
                tuple(int(b) for b in tensors_of_case[f"{side}.widths"]),
            )
            yield Row("widths", case, len(right), wrong=int(widths != right))
            sample = tensors_of_case[f"{side}.some"]
            down, sigma = sides[side]
            error = rms(mixed_bits_sample(*mixed_bits.pair(down, sigma, right)), sample)
            yield Row("balances", case, sample.size, rms=error, bound=BOUNDS["transforms"])


def encode_cases(tensors: Arrays, header: dict[str, str]) -> Iterator[tuple[str, Side, int]]:
    """(key, side, head dim) of the set "encode"."""
    sides = json.loads(header["sides"])
    for key in keys(tensors):
        name, dims = key.split(".")
        kind, *numbers = sides[name]
        bits, group, symmetric, axis, clip = numbers
        yield key, Side(Affine(bits, group, symmetric, axis, clip), kind), int(dims)
