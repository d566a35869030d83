"""Studies of pages and codes: attention of arms against the model's own, coders against the cache's, rows."""

import json

import mlx.core as mx
import numpy as np
import pytest
from small_models import TINY

from experiments.frontier import codes, every, nested, pages, ranking, reading, study
from experiments.frontier.arms import Arm, attend
from experiments.frontier.coding import KEYS, VALUES, Codes, Maps, coded, even, learned, uneven
from experiments.frontier.corpus import Held
from experiments.frontier.engine import Memory, prefill, read_on
from experiments.frontier.filled import Filled, tree
from experiments.frontier.home import Home, calibrated
from experiments.frontier.published import Preset
from experiments.frontier.study import EXACT
from mlxkv.codec.codec import Codec
from mlxkv.codec.transform import Transform
from mlxkv.formats.lowrank import ERRORS
from mlxkv.formats.names import parse_kv
from mlxkv.models import load

DIMS, TOKENS = 128, 256


def normal(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.fixture(scope="module")
def maps() -> Maps:
    """Of two heads: far from orthogonal."""
    pairs = []
    for seed in (1, 2):
        down = np.eye(DIMS) + 0.05 * np.array(normal(2, DIMS, DIMS, seed=seed))
        pairs.append(tuple(mx.array(x.astype(np.float32)) for x in (down, np.linalg.inv(down))))
    levels = mx.array([-1.0, -0.4, 0.4, 1.0])
    return Maps(*pairs, {KEYS: levels, VALUES: levels})


@pytest.fixture(scope="module")
def memory() -> Memory:
    """A prompt of four pages of 64 tokens between windows, of which the second says something else."""
    keys, values = (
        normal(1, 2, TOKENS + 128, DIMS, seed=3),
        normal(1, 2, TOKENS + 128, DIMS, seed=4),
    )
    keys[:, :, 128:192] = keys[:, :, 128:192] + 3 * normal(1, 2, 1, DIMS, seed=5)
    found = Memory(0)
    found.update_and_fetch(keys, values)
    found.prompt, found.queries = found.state, normal(1, 4, 64, DIMS, seed=6)
    return found


def attended(memory: Memory, maps: Maps, arm: Arm, count=3) -> mx.array:
    """Attention of `count` new tokens."""
    one = memory.fork(None)
    mask = one.make_mask(count)
    new = normal(1, 2, count, DIMS, seed=7), normal(1, 2, count, DIMS, seed=8)
    queries = normal(1, 4, count, DIMS, seed=9)
    return attend(arm, Home({0: maps}))(one, queries, *one.update_and_fetch(*new), mask, DIMS**-0.5)


def apart(x, y) -> float:
    return float(mx.linalg.norm(x - y) / mx.linalg.norm(y))


@pytest.mark.parametrize("preset", ("int2", "int4"))
def test_pages_are_coded_as_the_preset_codes_them(maps, preset):
    x, config = normal(1, 2, TOKENS, DIMS, seed=10), parse_kv(preset)
    how = Codes(2) if preset == "int2" else Codes(4, plain=True)
    for name in (KEYS, VALUES):
        side = getattr(config, name)
        own = Transform(*getattr(maps, name)) if side.transform == "balanced" else None
        codec = Codec(side, DIMS, config.page, own=own) if own else Codec(side, DIMS, config.page)
        expected = codec.decode(codec.encode(x), mx.float32)
        # Headers of 16 bits, which the study leaves out, move a few numbers to the next level.
        assert apart(coded(x, name, how, maps)[0], expected) < 0.06


def test_even_levels_uneven_ones_and_the_base():
    x = mx.array([0.0, 0.2, 0.45, 0.9, 1.0])
    low, high = mx.array(0.0), mx.array(1.0)
    assert np.allclose(even(x, low, high, 2), [0, 1 / 3, 1 / 3, 1, 1])
    assert np.allclose(even(x, low, high, 4, base=True) * 15, [1.5, 1.5, 5.5, 13.5, 13.5])
    levels = mx.array([-1.0, -0.5, 0.5, 1.0])
    assert np.allclose(uneven(x, low, high, levels), [0, 0.25, 0.25, 1, 1])


def test_searched_steps_and_learned_levels_lower_the_error(maps):
    x = normal(2, 4096, DIMS, seed=11)
    found = learned(x, KEYS, maps.keys[0])
    fitted = Maps(maps.keys, maps.values, {KEYS: found, VALUES: found})
    tries = (Codes(), Codes(searched=True), Codes(searched=True, levels=True))
    errors = [apart(coded(x[None], KEYS, how, fitted)[0], x[None]) for how in tries]
    assert errors[0] > 1.1 * errors[1] > errors[2]


def test_all_pages_are_plain_attention(memory, maps):
    new = normal(1, 2, 3, DIMS, seed=7), normal(1, 2, 3, DIMS, seed=8)
    keys, values = (mx.concatenate([x, y], 2) for x, y in zip(memory.state, new, strict=True))
    mask = memory.make_mask(3)
    queries = normal(1, 4, 3, DIMS, seed=9)
    own = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIMS**-0.5, mask=mask)
    ranks = (Arm("all", None, rank, 1.0) for rank in ("mean", "turned", "both", "most", "quarter"))
    for arm in (EXACT, *ranks, Arm("all", None, "boxes", 1.0, 64, "cross")):
        assert apart(attended(memory, maps, arm), own) < 1e-5


def test_the_oracle_loses_least_and_the_rest_stands_for_pages(memory, maps):
    exact = attended(memory, maps, EXACT)
    lost = {
        (rank, rest): apart(attended(memory, maps, Arm("x", None, rank, 0.5, 64, rest)), exact)
        for rank, rest in (("oracle", "drop"), ("oracle", "mean"), ("oracle", "cross"))
    }
    assert lost["oracle", "cross"] < lost["oracle", "mean"] < lost["oracle", "drop"]


def test_nested_codes_lie_between_their_base_and_the_whole(memory, maps):
    exact = attended(memory, maps, EXACT)
    base = apart(attended(memory, maps, Arm("base", Codes(4, base=True))), exact)
    some = apart(attended(memory, maps, Arm("some", Codes(4), "base", 0.5, 64, "base")), exact)
    whole = apart(attended(memory, maps, Arm("whole", Codes(4))), exact)
    all_read = attended(memory, maps, Arm("all", Codes(4), "base", 1.0, 64, "base"))
    assert whole < some < base
    assert apart(all_read, exact) == pytest.approx(whole, rel=1e-3)


def test_summaries_estimate_the_mass(memory):
    shape, asked = (1, 2, 2, 3), 0.05 * normal(1, 2, 6, DIMS, seed=12)
    scores = (asked @ memory.pages(0).swapaxes(-1, -2)).reshape(*shape, -1)

    def of(rank):
        return ranking.estimates(rank, 64, memory, asked, scores, shape)

    oracle = of("oracle")
    errors = {r: float(mx.abs(of(r) - oracle).mean()) for r in ("mean", "diagonal", "full")}
    assert errors["full"] < errors["diagonal"] < errors["mean"]
    assert float(mx.abs(of("low rank") - of("full")).mean()) < float(
        mx.abs(of("diagonal") - of("full")).mean()
    )
    assert np.allclose(of("quarter"), (of("mean") + of("diagonal")) / 2, atol=1e-5)
    plain = memory.fork(None)
    plain.memo = {"maps": [mx.broadcast_to(mx.eye(DIMS), (2, DIMS, DIMS))] * 2}  # it turns nothing
    turned = ranking.estimates("turned", 64, plain, asked, scores, shape)
    assert np.allclose(turned, of("diagonal"), atol=1e-5)
    most = scores.reshape(*shape, -1, 64).max(-1)
    assert bool((of("boxes") >= most - 1e-4).all())


def test_a_page_that_one_head_needs_outranks_one_that_two_need_a_little(memory, monkeypatch):
    """By its largest share, not by the sum over heads that share keys."""
    held = mx.log(mx.array([[0.5, 0.3, 0.1], [0.001, 0.3, 0.1]])).reshape(1, 1, 2, 1, 3)
    monkeypatch.setattr(ranking, "estimates", lambda *_: held - np.log(64))
    beside = mx.log(mx.array([0.1, 0.599])).reshape(1, 1, 2, 1, 1)
    for rank, first in (("diagonal", 1), ("most", 0)):
        read = ranking.taken(rank, 1 / 3, 64, memory, None, None, beside, (1, 1, 2, 1))
        assert np.array(read[0, 0, 0, 0, ::64]).tolist() == [i == first for i in range(3)]


def test_the_worst_tokens_stay_exact(memory, maps):
    found = memory.fork(None)
    found.memo = {}
    attend(Arm("x", Codes(exact=2)), Home({0: maps}))(
        found, normal(1, 4, 1, DIMS), *found.state, found.make_mask(1)[:, :-1], DIMS**-0.5
    )
    keys = next(iter(found.memo.values()))[0]
    same = (mx.abs(keys - found.pages(0)).max(-1) == 0).reshape(2, -1, 128).sum(-1)
    assert (np.array(same) == 2).all()


@pytest.fixture(scope="module")
def loaded():
    return load(TINY, "fp16")  # with sliding windows of 512


@pytest.fixture(scope="module")
def home(loaded) -> Home:
    return calibrated(loaded, Held(None).calibration(loaded, 2048), 2048)


@pytest.fixture(scope="module")
def pages_of(loaded, home) -> tuple[int, mx.array, mx.array]:
    """A layer, and keys and values of two pages that the model made itself."""
    tokens = np.random.default_rng(1).integers(10, 900, 384).tolist()
    layer = next(iter(home.layers))
    one = prefill(loaded, [tokens])[layer]
    return layer, one.pages(0), one.pages(1)


def test_bits_by_direction_are_coded_as_the_preset_codes_them(home, pages_of):
    layer, *exact = pages_of
    ours = home.coder(Filled(2.25), layer).coded(*exact)
    preset = home.coder(Preset("fill-2.25"), layer).coded(*exact)
    for x, expected, whole in zip(ours, preset, exact, strict=False):
        assert apart(x, expected) < 0.02 < apart(expected, whole)
    assert home.bits(Filled(2.25)) == home.bits(Preset("fill-2.25"))


def test_a_searched_scale_lowers_the_weighted_error(home, pages_of):
    layer, keys, values = pages_of
    plain, better = (home.coder(x, layer) for x in (Filled(2.25), Filled(2.25, searched=True)))

    def error(coder) -> float:
        one = coder.sides[1]
        missed = (values - coder.coded(keys, values)[1]) @ one.down
        return float((mx.square(missed) * one.weights).sum())

    assert error(better) < error(plain)


def test_a_tree_of_cells_loses_little_at_both_ends():
    z = np.array(normal(200_000, seed=20), np.float64)
    edges, whole, base = tree(2, 2)
    code = np.searchsorted(edges, z)
    assert len(set(base)) == 4 and len(set(whole)) == 16
    assert ((z - base[code]) ** 2).mean() < 1.05 * ERRORS[2]
    assert ((z - whole[code]) ** 2).mean() < 1.05 * ERRORS[4]  # that of evenly spaced levels
    assert (whole[code] ** 2).mean() == pytest.approx(1, abs=0.02)


def test_refinements_go_where_errors_cost_most_and_keep_to_their_bits(home):
    base, whole = Filled(1.6, 2.9, base=True), Filled(1.6, 2.9)
    assert home.bits(base) == home.bits(Filled(1.6))
    assert home.bits(whole) == pytest.approx(2.9, abs=0.02)
    for layer in home.layers:
        for side in home.coder(whole, layer).sides:
            width = [b + k for b, k, _ in side.runs]
            assert width == sorted(width, reverse=True) and max(side.more) <= 2


def test_nested_directions_lie_between_their_base_and_the_whole(home, pages_of):
    layer, *exact = pages_of
    lost = [
        [apart(x, y) for x, y in zip(home.coder(how, layer).coded(*exact), exact, strict=False)]
        for how in (Filled(1.6, 2.9, base=True), Filled(1.6, 2.9), Filled(4.5))
    ]
    assert all(a > 1.3 * b > 1.3 * c for a, b, c in zip(*lost, strict=True))


def test_scores_get_back_the_mass_of_directions_without_bits(home, pages_of):
    layer, keys, values = pages_of
    coder = home.coder(Filled(1.0), layer)
    one, scales = coder.sides[0], coder.coded(keys, values)[2]
    queries = 0.02 * normal(1, 1, 64, keys.shape[-1], seed=21)
    assert one.left is not None
    given = one.shift(queries, scales, Filled(1.0, lost=9.0))
    own = mx.square(queries @ one.left.swapaxes(-1, -2)) * one.left_sigma[:, None]
    assert float(mx.abs(given[..., 0] - own.sum(-1) / 2).max()) < 1e-5
    assert float(one.shift(queries, scales, Filled(1.0, correct=0.1)).max()) <= 0
    assert float(one.shift(queries, scales, Filled(1.0, correct=0.1)).min()) >= -0.1


def test_published_methods_are_coded_by_their_own_codecs(home, pages_of):
    layer, *exact = pages_of
    for name, least, most in (
        ("int2", 0.1, 0.6),
        ("kivi-int4", 0.01, 0.1),
        ("kitty-int2", 0.1, 0.7),
    ):
        for x, y in zip(home.coder(Preset(name), layer).coded(*exact), exact, strict=False):
            assert least < apart(x, y) < most, name


def test_a_model_reads_on_as_through_its_own_cache(loaded):
    tokens = np.random.default_rng(0).integers(10, 900, 620).tolist()
    prompt = prefill(loaded, [tokens[:600]])
    assert {m.window for m in prompt} == {None, 512}
    logs = read_on(loaded, prompt, [tokens[600:]], attend(EXACT, Home({})))
    own = loaded.model(mx.array([tokens]))[:, 600:].astype(mx.float32)
    own = own - mx.logsumexp(own, axis=-1, keepdims=True)
    assert float((mx.exp(own) * (own - logs)).sum(-1).mean()) < 1e-5
    assert prompt[0].offset == 600


def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch, loaded, maps):
    monkeypatch.setattr(study, "load", lambda *_, **__: loaded)
    one = Maps(*([x[:1] for x in pair] for pair in (maps.keys, maps.values)), maps.levels)
    monkeypatch.setattr(study, "calibrated", lambda *_: Home(dict.fromkeys(range(8), one)))
    asked = f"--models {TINY} --out {tmp_path} --contexts 384 --decode 4 --count 2 --documents 0".split()
    some = [Arm("int2", Codes()), Arm("half", None, "mean", 0.5)]
    study.run("frontier.pages", "", some[:1], asked, pages.need)
    study.run("frontier.pages", "", some, asked, pages.need)
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    kl = [(row["preset"], row["text"]) for row in found if row["task"] == "kl"]
    assert sorted(kl) == [(a, f"stories-{i}") for a in ("half", "int2") for i in (1, 2)]
    need = [row["need"] for row in found if row["task"] == pages.NEED]
    assert len(need) == 2 * 2 * 4  # texts, sizes of pages, layers
    assert all(0 <= x <= 1 for one in need for shares in one.values() for x in shares)


def test_the_product_reads_a_share_token_by_token(tmp_path, monkeypatch, loaded):
    monkeypatch.setattr(reading, "load", lambda *_, **__: loaded)
    asked = f"--models {TINY} --out {tmp_path} --context 640 --decode 3 --count 2".split()
    asked += ["--together", "1", "--kv"]
    reading.main([*asked, "naive-int8"])
    reading.main([*asked, "naive-int8,naive-int8+read0.3"])
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(found) == 4  # what was there is not measured again
    by = {name: [r for r in found if r["preset"] == name] for name in {r["preset"] for r in found}}
    whole, part = by["naive-int8"], by["naive-int8+read0.3"]
    assert {row["bits_per_value"] for row in whole} == {8.5}
    assert {row["bits_per_value"] for row in part} == {0.3 * 8.5 + 65 / 256}
    assert max(row["kl"] for row in whole) < min(row["kl"] for row in part) < 1


def test_arms_of_a_pattern_run_alone(tmp_path, monkeypatch, loaded, maps):
    monkeypatch.setattr(study, "load", lambda *_, **__: loaded)
    one = Maps(*([x[:1] for x in pair] for pair in (maps.keys, maps.values)), maps.levels)
    monkeypatch.setattr(study, "calibrated", lambda *_: Home(dict.fromkeys(range(8), one)))
    asked = f"--models {TINY} --out {tmp_path} --contexts 384 --decode 2 --count 1 --documents 0"
    some = [Arm("int2", Codes()), Arm("half", None, "mean", 0.5)]
    study.run("frontier.pages", "", some, [*asked.split(), "--only", "ha.*"])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["preset"] for row in rows} == {"half"}


def test_arms_have_names_of_their_own_and_cost_what_they_read(home):
    for arms in (pages.arms(), codes.arms(), nested.arms(), every.arms()):
        assert len({arm.name for arm in arms}) == len(arms)
        known = {arm.name for arm in every.arms()}
        assert all(set(arm.against) <= known for arm in arms)
    read = {arm.name: arm.bits(home, 12800) for arm in every.arms()}
    assert read["int2"] == 2.25 and read["int4"] == 4.5 and read["fill-2.25"] == 2.25
    assert read["pages diagonal 0.5"] == 16 / 2 + 0.25
    assert read["pages boxes 0.25"] == 16 / 4 + 0.25
    assert read["nested base 0.25"] == 2.75 and read["nested oracle 0.5"] == 3.25
    for name, bits in read.items():
        if name.startswith("2.25: ") or name.startswith("fill exact"):
            assert bits == pytest.approx(2.25, abs=0.05), name
