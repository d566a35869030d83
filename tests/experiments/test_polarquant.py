"""PolarQuant's and TurboQuant's experiment: what it makes of keys and values against the law."""

import numpy as np
import torch
from small_models import TINY

from experiments.papers import polarquant, runner
from mlxkv.corpora.corpus import passages
from mlxkv.eval.rows import read
from mlxkv.spec import affine as affine_spec
from mlxkv.spec import codebook as codebook_spec
from mlxkv.spec import polar as polar_spec
from mlxkv.spec import polar_tree as tree_spec

DIMS, TOKENS = 64, 256


def tensor(seed, *shape):
    """Rows whose channels differ in size."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * np.exp(draw.standard_normal(shape[-1]))
    return x.astype(np.float32).astype(np.float64)


def calibrated():
    """Return a subject that has calibration rows of two layers, and no model."""
    made, nothing = object.__new__(runner.Subject), torch.zeros(0)
    rows = (torch.from_numpy(tensor(seed, 2, 300, DIMS)).float() for seed in range(4))
    made.layers = {i: runner.Layer(i, next(rows), next(rows), nothing, nothing) for i in range(2)}
    return made


SUBJECT = calibrated()
X = tensor(9, 2, TOKENS, DIMS)
SIDES = {"keys": 0, "values": 1}


def made(name, side):
    layer = SUBJECT.layers[0]
    store = polarquant.variants(SUBJECT)[name]().store
    pair = (torch.from_numpy(X).float(),) * 2
    return store(layer, *pair)[SIDES[side]].numpy()


def in_pages(x, page, of):
    """Return of() of each page of a head [T, D]."""
    return np.concatenate([of(x[i : i + page]) for i in range(0, len(x), page)])


def turned(x, rotation, of):
    turn = {"random": codebook_spec.random_rotation, "hadamard": affine_spec.hadamard}
    matrix = turn[rotation](x.shape[-1], 0) if rotation in turn else np.eye(x.shape[-1])
    return of(x @ matrix) @ matrix.T


def polar(radius, angle):
    return lambda x: in_pages(
        x, 128, lambda part: polar_spec.decode(polar_spec.encode(part, radius, angle), angle)
    )


def unwrapped(radius, angle):
    def of(part):
        a, b = np.split(part, 2, -1)
        mean = np.arctan2(b.mean(0), a.mean(0))
        rho, phi = polar_spec.to_polar(part)
        phi = (phi - mean) % (2 * np.pi) + np.pi
        phi = np.where(phi >= 2 * np.pi, phi - 2 * np.pi, phi)  # the mean at pi
        y = np.concatenate([rho * np.cos(phi), rho * np.sin(phi)], -1)
        rho, phi = polar_spec.to_polar(
            polar_spec.decode(polar_spec.encode(y, radius, angle), angle)
        )
        phi = phi + mean - np.pi
        return np.concatenate([rho * np.cos(phi), rho * np.sin(phi)], -1)

    return lambda x: in_pages(x, 128, of)


def codebook(bits):
    def of(x):
        levels = codebook_spec.sphere_levels(x.shape[-1], bits)
        codes, scale = codebook_spec.codebook_encode(x, levels)
        return codebook_spec.codebook_decode(codes, scale, levels)

    return of


def qjl(bits):
    def of(x):
        first = codebook(bits - 1)(x)
        by = codebook_spec.gaussian((DIMS, DIMS), polarquant.PROJECTIONS)
        return first + codebook_spec.qjl_decode(*codebook_spec.qjl_encode(x - first, by), by)

    return of


def tree(books=None, fit=False):
    def of(x):
        own = books or [tree_spec.angle_codebook(level) for level in range(1, 5)]
        if fit:
            radii, angles = tree_spec.to_polar(x)
            own = [
                affine_spec.half(tree_spec.fit_codebook(a.ravel(), np.ones(a.size, bool), b, 8))
                for a, b in zip(angles, own, strict=True)
            ]
        return tree_spec.tree_decode(*tree_spec.tree_encode(x, own), own)

    return of


def channels(bits):
    def of(x):
        args = affine_spec.affine_encode(x, bits, 128, axis="channel")
        return affine_spec.affine_decode(*args, 128, axis="channel")

    return of


def outliers(bits, share):
    energy = (SUBJECT.layers[0].keys.double().numpy() ** 2).sum(1)

    def of(x, head):
        chosen = np.zeros(DIMS, bool)
        chosen[np.argsort(-energy[head], kind="stable")[: int(DIMS * share)]] = True
        return codebook_spec.split_decode(x, chosen, bits, 0)

    return of


LAWS = {
    "wu-r4t4/fp16": ("none", polar(4, 4)),
    "wu-r2t4/fp16": ("none", polar(2, 4)),
    "wu-r4t3/fp16": ("none", polar(4, 3)),
    "wu-r3t2/fp16": ("none", polar(3, 2)),
    "wu-r3t3+unwrapped/fp16": ("none", unwrapped(3, 3)),
    "channel-3+g128/fp16": ("none", channels(3)),
    "turbo-3": ("random", codebook(3)),
    "turbo-2+qjl": ("random", qjl(2)),
    "turbo-4+qjl": ("random", qjl(4)),
    "han": ("random", tree()),
    "han+plain": ("none", tree()),
    "han+hadamard": ("hadamard", tree()),
    "han+online": ("random", tree(fit=True)),
    "han+plain+online": ("none", tree(fit=True)),
    "turbo-2.5": (None, outliers(2, 1 / 4)),
    "turbo-3.5+half": (None, outliers(3, 1 / 2)),
}


def test_keys_are_those_of_the_spec(subtests):
    for name, (rotation, of) in LAWS.items():
        with subtests.test(name=name):
            got = made(name, "keys")
            for head in range(2):
                if rotation is None:
                    expected = of(X[head], head)
                else:
                    expected = turned(X[head], rotation, of)
                # A tie in float32 moves a code, and through a rotation a whole row.
                off = np.abs(got[head] - expected).max(-1) > 2e-3 * np.abs(X[head]).max()
                assert off.mean() < 0.02, off.mean()
                change = np.linalg.norm(expected - X[head]) / np.linalg.norm(X[head])
                assert 0.02 < change < 1, change


def test_a_seam_costs_pairs_that_point_to_it():
    """A pair that lies about angle 0 has a range of a whole circle, and a small one elsewhere."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 128, DIMS)) * 0.1 + np.repeat([8.0, 0.0], DIMS // 2)
    rows, sides = torch.from_numpy(x).float(), polarquant.forms(SUBJECT)
    errors = {
        name: float((sides[name][0][0](SUBJECT.layers[0], "keys", rows) - rows).norm())
        for name in ("wu-r4t4/fp16", "wu-r4t4+unwrapped/fp16")
    }
    assert errors["wu-r4t4/fp16"] > 30 * errors["wu-r4t4+unwrapped/fp16"] > 0


def test_values_are_exact_or_coded():
    np.testing.assert_array_equal(made("wu-r4t4/fp16", "values"), X.astype(np.float32))
    np.testing.assert_array_equal(made("han", "values"), made("han", "keys"))
    first = made("turbo-3+qjl/turbo-3", "values")
    np.testing.assert_array_equal(first, made("turbo-3", "values"))
    assert np.abs(first - made("turbo-3+qjl/turbo-3", "keys")).max() > 0.1


def test_offline_codebooks_fit_the_calibration_text():
    """They are k-means' of the rows of all layers and sides, so a little better there than those of Gaussians."""
    for rotation, name in (("none", "han+plain"), ("random", "han")):
        found = polarquant.offline(SUBJECT, rotation).codebooks
        rows = [getattr(layer, side) for layer in SUBJECT.layers.values() for side in SIDES]
        rows = torch.cat(rows).double().numpy().reshape(-1, DIMS)
        matrix = codebook_spec.random_rotation(DIMS, 0) if rotation == "random" else np.eye(DIMS)
        angles = tree_spec.to_polar(rows @ matrix)[1]
        for level, (own, book) in enumerate(zip(angles, found, strict=True), 1):
            start = tree_spec.angle_codebook(level)
            law = tree_spec.fit_codebook(own.ravel(), np.ones(own.size, bool), start, 8)
            np.testing.assert_allclose(book, law, atol=2e-3)
        assert np.abs(made(f"{name}+offline", "keys") - made(name, "keys")).max() > 1e-3


def test_corrected_products_have_no_bias():
    """QJL: the mean over projections of what is added is what the first stage leaves (TurboQuant, section 3.2)."""
    rest, sums = tensor(3, 8, DIMS), np.zeros((8, DIMS))
    for seed in range(400):
        by = codebook_spec.gaussian((DIMS, DIMS), seed)
        sums += codebook_spec.qjl_decode(*codebook_spec.qjl_encode(rest, by), by)
    assert np.linalg.norm(sums / 400 - rest) < 0.1 * np.linalg.norm(rest)


def test_bits_count_norms_and_ranges():
    made = {name: v().bits_of(128) for name, v in polarquant.variants(SUBJECT).items()}
    assert made["wu-r4t4/fp16"] == (4.25 + 16) / 2 and made["wu-r2t4/fp16"] == (3.25 + 16) / 2
    assert made["han"] == 3.875 and made["turbo-2"] == 2.125 and made["turbo-3+qjl"] == 3.25
    assert made["turbo-2.5"] == 2.5 and made["turbo-2.5+half"] == 2.75
    assert made["channel-4+g128"] == 4.25


def test_pairs_are_of_variants():
    names = polarquant.variants(SUBJECT)
    assert {name for pair in polarquant.PAIRS for name in pair} <= set(names)
    assert (names["wu-r4t4/fp16@paper"]().sink, names["wu-r4t4/fp16@paper"]().recent) == (0, 0)


def test_the_command_prints_ratios(tmp_path, capsys):
    for name in ("prose", "records"):
        (tmp_path / f"{name}.txt").write_text(passages("evaluation")["prose"])
    text = "--variants han,turbo-4 --contexts 300 --decode 8 --tokens 600 --texts-at-most 1"
    folders = ["--texts", str(tmp_path), "--out", str(tmp_path)]
    polarquant.main([TINY, *text.split(), *folders])
    out = capsys.readouterr().out
    rows = {row["preset"]: row for row in read([tmp_path / "tiny.jsonl"])}
    ratio = rows["han"]["kl"] / rows["turbo-4"]["kl"]
    assert ratio > 1 and f"| 300 | han / turbo-4 | 3.88 / 4.12 | {ratio:.3g} | " in out
