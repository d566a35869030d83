"""`--kv 99%`: the fewest bits that keep a share of the next tokens of a model, measured once and kept."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache

import mlxkv
from mlxkv.cache.compressed import CompressedKVCache
from mlxkv.catalog.sizes import need
from mlxkv.cli import main
from mlxkv.corpora.sources import calibration_text
from mlxkv.errors import UserError
from mlxkv.formats import agreement as kept
from mlxkv.formats.agreement import DIAL, PLAIN, TEXTS, Choice, Measured
from mlxkv.formats.names import bound_of, parse_kv
from mlxkv.generate import reading
from mlxkv.loading import agreement, plans, quality_check, weights
from mlxkv.loading.load import load
from mlxkv.serve import engine
from mlxkv.serve.options import ServeOptions
from mlxkv.serve.run import check_further


@pytest.fixture(autouse=True)
def short(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(agreement, "CONTEXT", 192)
    monkeypatch.setattr(agreement, "NEXT", 64)
    monkeypatch.setattr(agreement, "LONGER", (256,))
    return tmp_path / "calibration"


@pytest.mark.parametrize(
    ("text", "bound"),
    [("99%", 0.99), (" 97.5 % ", 0.975), ("auto", 0.99), ("4", None), ("fill-3", None), (4, None)],
)
def test_a_share_is_told_from_bits(text, bound):
    assert bound_of(text) == bound


@pytest.mark.parametrize("text", ["100%", "20%", "0.99%"])
def test_a_share_that_no_cache_is_chosen_for_is_refused(text):
    with pytest.raises(UserError, match=r"^\[--kv\] no such share .* choose 50% to 99.9%, or fp16"):
        bound_of(text)


def test_what_has_no_model_to_measure_refuses_a_share():
    with pytest.raises(UserError, match=r"^\[--kv\] a share of next tokens is asked of a model"):
        parse_kv("99%")


def counts(mean: float, differ: float, *shape: int) -> list[list[int]]:
    """Draw next tokens that are the same of 1,000, of texts in which `mean` are expected to change, or more or less by
    the factor of a gamma law with this standard deviation."""
    k = 1 / differ**2
    law = np.random.default_rng(0)
    return (1000 - law.poisson(mean * law.gamma(k, 1 / k, shape))).tolist()


@pytest.mark.parametrize(("mean", "differ"), [(2, 0.3), (8, 0.3), (20, 0.3), (20, 0.4)])
def test_one_text_in_twenty_may_be_below(mean, differ):
    """Against simulation. Without a least spread, 7 to 8 of 100 would be below: few changes look alike by chance."""
    below, times = 0, 20_000
    for *six, seventh in counts(mean, differ, times, TEXTS + 1):
        below += seventh / 1000 < Measured("int4", 1024, 1000, tuple(six)).low()
    assert 0.035 < below / times < 0.06


def test_a_spread_of_texts_needs_a_higher_mean():
    alike, apart = (Measured("int4", 1024, 1000, same) for same in ((985,) * 6, (977, 993) * 3))
    assert alike.mean == apart.mean and alike.low() >= 0.97 > apart.low()
    two = Measured("int4", 8192, 1000, (977, 993))
    assert two.low(alike) > two.low(apart)
    assert apart.low(alike) == apart.low(), "six texts have a spread of their own"


def test_texts_that_are_alike_by_chance_spread_as_counts_do():
    """Gemma's at 5.5 bits: 15 of 3,072 next tokens. By hand: 2.5 + 2.015 sqrt(2.5 + .75^2) sqrt(7/6) = 6.31 of 512."""
    found = Measured("fill-5.5", 1024, 512, (509, 509, 510, 509, 510, 510))
    assert found.low() == pytest.approx(1 - 6.309 / 512, abs=1e-5)


def test_no_change_is_no_proof_of_none():
    """By hand: one of 3,072 next tokens may change: 1/6 + 2.015 sqrt(1/6 + .05^2) sqrt(7/6) = 1.06 of 512."""
    found = Measured("int8", 1024, 512, (512,) * 6)
    assert found.low() == pytest.approx(1 - 1.0619 / 512, abs=1e-5) and found.mean == 1


def test_a_choice_is_for_a_calibration_and_a_dtype(model_folder, monkeypatch, short):
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    assert load(str(model_folder), "90%", dtype="float32").kv_name == "int4"
    faked(monkeypatch, {"int4": 0.8, "int8": 0.99})
    assert load(str(model_folder), "90%", dtype="float32").kv_name == "int4"
    assert load(str(model_folder), "90%", dtype="float16").kv_name == "int8"
    found = Measured("int4", 192, 64, (64,) * TEXTS)
    choice = Choice(0.9, "int4", found, None, "", "2026-11-29", (found,))
    kept.keep("mark", choice, "a calibration", "x")
    assert kept.cost_of("mark", "a calibration", "int8") == found
    assert kept.cost_of("mark", None, "int8") is None


def test_few_long_texts_have_the_spread_of_the_short_ones(model_folder, monkeypatch):
    near, far = agreement.Readings(None, 1024, 1000), agreement.Readings(None, 8192, 1000)
    near._found["int4"] = Measured("int4", 1024, 1000, (940, 980) * 3)
    far._found["int4"] = two = Measured("int4", 8192, 1000, (980, 980))
    low = agreement._low(near, far, lambda _: None, "int4")
    assert low == two.low(near._found["int4"]) < 0.93
    far._found["int8"] = six = Measured("int8", 8192, 1000, (980,) * 6)
    assert agreement._low(near, far, lambda _: None, "int8") == six.low() > 0.96


def test_fewer_texts_need_a_wider_margin():
    """As above, of the mean of two texts at a longer context, with the spread of six short ones."""
    below, times = 0, 20_000
    for *six, first, second, third in counts(20, 0.45, times, TEXTS + 3):
        longer = Measured("int4", 8192, 1000, (first, second))
        below += third / 1000 < longer.low(Measured("int4", 1024, 1000, tuple(six)))
    assert 0.03 < below / times < 0.06


def searched(keeps: Callable[[str], float], bound: float, start: float) -> tuple[int, int]:
    """What is found, and how many presets were asked, none twice."""
    asked = []

    def low(preset: str) -> float:
        asked.append(preset)
        return keeps(preset)

    at = agreement._first(DIAL, low, bound, start)
    assert len(asked) == len(set(asked))
    return at, len(asked)


@pytest.mark.parametrize("start", [2, 4.5, 9])
@pytest.mark.parametrize(("above", "below"), [(1.0, 0.5), (0.9901, 0.9899)])
@pytest.mark.parametrize("place", range(len(DIAL) + 1))
def test_the_first_preset_that_holds_is_found_from_anywhere(place, above, below, start):
    """Where changes follow no law: it holds, or nearly everything changes; or all presets are alike."""
    at, asked = searched(lambda name: above if DIAL.index(name) >= place else below, 0.99, start)
    assert at == place and asked <= 8


def test_where_changes_halve_as_they_do_three_or_four_presets_are_tried():
    def tried(just: float, halving: float) -> int:
        """just: bits that just keep the bound."""

        def keeps(preset: str) -> float:
            return 1 - 0.01 * 2 ** ((just - agreement.bits_of(preset)) / halving)

        found, asked = searched(keeps, 0.99, agreement.USUAL[0] + agreement._more(0.98, 0.99))
        assert keeps(DIAL[found]) >= 0.99 and (found == 0 or keeps(DIAL[found - 1]) < 0.99)
        return asked

    counts = [tried(*x) for x in product((2.4, 3.1, 4.6, 5.8, 6.9, 7.4), (1, 1.3, 2))]
    assert sum(counts) / len(counts) < 3.3 and max(counts) <= 4


def faked(monkeypatch, shares: dict[str, float], later: dict[str, float] | None = None):
    """Let presets keep these shares of every text, at a short and at a longer context."""

    def measured(self, preset, count=None):
        of = shares if self.context == 192 or later is None else later
        same = tuple(round(1e26 * of[preset]) for _ in range(len(self._texts)))
        self._found[preset] = Measured(preset, self.context, 10**26, same)
        return self._found[preset]

    monkeypatch.setattr(agreement.Readings, "measured", measured)
    monkeypatch.setattr(kept, "DIFFER", 0)


def test_the_fewest_bits_that_hold_at_both_contexts(model_folder, monkeypatch, short):
    monkeypatch.setattr(agreement, "dial_of", lambda loaded, calibration: (DIAL, ""))
    shares = {name: 0.95 + 0.003 * i for i, name in enumerate(DIAL)}
    later = {name: share - 0.007 for name, share in shares.items()}
    faked(monkeypatch, shares)
    loaded = load(str(model_folder), "fp16")
    assert agreement.choose(loaded, "97%").preset == DIAL[7]
    faked(monkeypatch, shares, later)
    choice = agreement.choose(loaded, "98%")
    assert choice.preset == DIAL[13]  # DIAL[10] at the short context
    assert (choice.short.context, choice.long.context) == (192, 256)
    assert choice.line.startswith("98%: fill-6, same next token 98.9 % [19 texts of 20: 98.9")
    assert "98.2 at 256" in choice.line


def test_float32_is_whole_before_the_first_product(model_folder, monkeypatch):
    """On CUDA MLX would multiply it in TF32, and reads the variable once."""
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    seen, build = [], weights.build

    def building(*args, **options):
        seen.append(os.environ.get("MLX_ENABLE_TF32"))
        return build(*args, **options)

    monkeypatch.setattr(weights, "build", building)
    load(str(model_folder), "int4")
    load(str(model_folder), "97%")
    monkeypatch.delenv("MLX_ENABLE_TF32")
    mlxkv.eval(str(model_folder), ["97%"], context=512)
    assert seen == [None, "0", "0"]


def test_a_choice_by_another_rule_is_made_anew(monkeypatch, short):
    found = Measured("int4", 192, 64, (64,) * TEXTS)
    kept.keep("mark", Choice(0.9, "int4", found, None, "", "2026-11-29", (found,)), None, "x")
    assert kept.find("mark", 0.9, None) is not None
    monkeypatch.setattr(kept, "MADE_BY", "0.2.0 1")
    assert kept.find("mark", 0.9, None) is None and kept.cost_of("mark", None, "int8") is None


def test_weights_are_back_where_float32_is_broken_off(model_folder, monkeypatch):
    model = load(str(model_folder), "fp16", dtype="float16").model
    before = dict(tree_flatten(model.parameters()))
    change = model.set_dtype

    def broken_off(dtype):
        change(dtype)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "set_dtype", lambda _, dtype: broken_off(dtype))
    with pytest.raises(KeyboardInterrupt), weights.in_float32(model):
        pytest.fail("begun")
    after = dict(tree_flatten(model.parameters()))
    assert all(after[name] is x for name, x in before.items())


def test_six_long_texts_that_spread_need_more_bits(model_folder, monkeypatch):
    """As Gemma's did at 16K: the short texts are alike, the long ones are not."""
    monkeypatch.setattr(agreement, "dial_of", lambda loaded, calibration: (DIAL, ""))

    def measured(self, preset, count=None):
        same = 990_000 + 500 * DIAL.index(preset)
        apart = 0 if self.context == 192 else 100_000 / (1 + DIAL.index(preset))
        texts = tuple(round(same + apart * (-1) ** i) for i in range(len(self._texts)))
        self._found[preset] = Measured(preset, self.context, 1_000_000, texts)
        return self._found[preset]

    monkeypatch.setattr(agreement.Readings, "measured", measured)
    choice = agreement.choose(load(str(model_folder), "fp16"), "97%")
    assert len(choice.long.same) == TEXTS and choice.long.low() >= 0.97
    below = DIAL.index(choice.preset) - 1
    assert below > 3, "the short texts alone would have had the first"
    apart = 100_000 / (1 + below)
    same = tuple(round(990_000 + 500 * below + apart * (-1) ** i) for i in range(TEXTS))
    assert Measured("", 256, 1_000_000, same).low() < 0.97


def test_a_context_without_memory_gives_way_to_a_shorter_one(model_folder, monkeypatch):
    """As on a GPU that others filled: minutes of measuring were lost."""
    faked(monkeypatch, {"int4": 0.99, "int8": 0.999}, {"int4": 0.98, "int8": 0.99})
    monkeypatch.setattr(agreement, "LONGER", (320, 256))
    read, what = (
        agreement.Readings.read,
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
    )

    def reading(self, texts, count):
        if self.context == 320:
            raise RuntimeError(what)
        read(self, texts, count)

    monkeypatch.setattr(agreement.Readings, "read", reading)
    choice = agreement.choose(load(str(model_folder), "fp16"), "98.5%")
    assert choice.long.context == 256 and choice.preset == "int8"
    monkeypatch.setattr(agreement, "LONGER", (320,))
    assert agreement.choose(load(str(model_folder), "fp16"), "98%").long is None
    what = "kernel failed"
    with pytest.raises(RuntimeError, match="kernel failed"):
        agreement.choose(load(str(model_folder), "fp16"), "97.5%")


def test_the_reason_is_of_the_context_that_failed(model_folder, monkeypatch):
    faked(monkeypatch, {"int4": 0.99, "int8": 0.999}, {"int4": 0.9, "int8": 0.9899})
    assert load(str(model_folder), "99%").chosen == "99%: fp16 (int8 keeps 98.9 % at 256)"


def test_eight_bit_weights_are_another_question(model_folder, monkeypatch):
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    assert load(str(model_folder), "90%").kv_name == "int4"
    faked(monkeypatch, {"int4": 0.8, "int8": 0.99})
    assert load(str(model_folder), "90%", weights=8).kv_name == "int8"
    assert load(str(model_folder), "90%").kv_name == "int4"


def test_what_cannot_be_measured_is_told_first(model_folder, monkeypatch):
    monkeypatch.setattr(agreement, "choose", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"^\[fold\] .* got 99%; choose a number of bits"):
        load(str(model_folder), "99%", fold=True)
    monkeypatch.setattr("mlxkv.loading.attach.left_out", lambda reports: reports[:1])
    with pytest.raises(UserError, match=r"^\[--kv-strict\] layers 0 of .* got int4"):
        load(str(model_folder), "99%", strict=True)


def test_a_model_without_compressed_layers_is_not_measured(model_folder, monkeypatch):
    loaded = load(str(model_folder), "fp16")
    monkeypatch.setattr(agreement, "attach", lambda *_, **__: loaded.layers)
    monkeypatch.setattr(agreement, "Readings", lambda *_: pytest.fail("measured"))
    assert agreement.choose(loaded, "99%").line == "99%: fp16 (no layer is compressed)"


def test_too_little_text_is_said(model_folder, monkeypatch):
    loaded = load(str(model_folder), "fp16")
    monkeypatch.setattr(agreement.sources, "docstrings", lambda package: [])
    assert len(agreement.texts_of(loaded, 256, TEXTS)) == TEXTS - 1, "one is documentation alone"
    assert len(agreement.texts_of(loaded, 50_000, TEXTS)) == 2, "source code and records"
    with pytest.raises(UserError, match=r"^\[--kv\] .* 6 texts of 256 tokens; got 5, as numpy"):
        agreement.choose(loaded, "99%")


def test_texts_are_of_six_kinds_that_no_calibration_reads(model_folder):
    loaded = load(str(model_folder), "fp16")
    texts = [loaded.tokenizer.decode(text[-400:]) for text in agreement.texts_of(loaded, 1536, 6)]
    used = calibration_text()
    for text, word in zip(
        texts, ("", "।", '{"entity": "', "Q: ", "self.", "probability"), strict=True
    ):
        assert word in text and text[-60:] not in used
    assert len(set(texts)) == TEXTS
    longer = [loaded.tokenizer.decode(text) for text in agreement.texts_of(loaded, 40_000, 6)]
    assert all(a[5000:5300] not in b for a, b in permutations(longer, 2))


def test_why_bits_were_chosen_is_said_before_a_calibration(
    model_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("mlxkv.console.cache_dir", lambda: tmp_path)
    monkeypatch.setattr("mlxkv.calibration.measure.TOKENS", 600)
    size = need(plans.read_plan(str(model_folder)), parse_kv(DIAL[0]), 1024).total
    load(str(model_folder), "auto", memory=round(size / 0.75) + 2, context=1024)
    said = capsys.readouterr().err
    assert re.search(
        r"auto: fill-\S+ is the most that fits into \S+ MiB with 1,024 tokens: no calibration of",
        said,
    )


def test_the_most_bits_that_fit(model_folder, monkeypatch, capsys):
    plan, tokens = plans.read_plan(str(model_folder)), 1024
    size = {x: need(plan, parse_kv(x), tokens).total for x in ("fp16", "int8", DIAL[0])}
    name = str(model_folder)
    for preset, memory in (("fp16", size["fp16"]), ("int8", size["fp16"] - 1)):
        kv, line = plans.fitting(
            name, "auto", round(memory / 0.75) + 2 * (preset == "fp16"), tokens
        )
        assert kv == preset and line.startswith(f"auto: {preset} is the most that fits into ")
    with pytest.raises(
        UserError, match=r"^\[--memory\] .* 1,024 tokens do not fit; .* fill-2.25 needs"
    ):
        plans.fitting(name, "97%", int(size[DIAL[0]] / 0.75) - 8, tokens)
    with pytest.raises(
        UserError, match=r"^\[--context\] longer than the model's context; got 1000000"
    ):
        load(name, "auto", context=10**6)
    monkeypatch.setattr(agreement, "choose", lambda *_: pytest.fail("measured"))
    loaded = load(name, "auto", memory="16GB", context="256")
    assert loaded.kv_name == "fp16" and loaded.chosen.endswith("into 16.00 GiB with 256 tokens")
    options = ["chat", "-m", name, "-p", "a", "--max-tokens", "2", "--memory", "16GB"]
    assert main([*options, "--kv", "99%"]) == 0
    assert (
        "99%: fp16 is the most that fits into 16.00 GiB with 2,048 tokens"
        in capsys.readouterr().err
    )
    assert main(options) == 2
    assert (
        "[--memory] is for --kv auto, the most bits that fit; got 16GB and --kv int4"
        in capsys.readouterr().err
    )
    with pytest.raises(UserError, match=r"^\[--context\] .* got 8k and --kv 4; add --kv auto"):
        ServeOptions(model=name, kv="4", context="8k")
    with pytest.raises(UserError, match=r"^\[--context\]"):
        ServeOptions(model=name, kv="auto", context="frog")
    for sizes in ({"memory": 0}, {"context": -5}):
        with pytest.raises(UserError, match="must be at least 1; got"):
            load(name, "auto", **sizes)
    monkeypatch.setattr(plans, "machine_memory", lambda: round(size["fp16"] / 0.75) - 8)
    assert plans.fitting(name, "auto", None, tokens)[0] == "int8"
    ranks = type("Group", (), {"size": lambda self: 2})()
    with pytest.raises(UserError, match=r"^\[--kv\] a share is measured in one process"):
        load(name, "auto", group=ranks, memory="16GB")


def test_a_server_takes_the_most_bits_that_fit(model_folder, monkeypatch):
    seen = {}

    def loading(*args, **options):
        seen.update(options)
        raise UserError("read")

    monkeypatch.setattr(engine, "load", loading)
    options = ServeOptions(model=str(model_folder), kv="auto", memory="16GB", context="1k")
    with pytest.raises(UserError, match="read"):
        engine.Engine._load(SimpleNamespace(options=options, ranks=SimpleNamespace(group=None)))
    assert seen["memory"] == "16GB" and seen["context"] == "1k"
    two = replace(options, model=[str(model_folder), str(model_folder)], context="1m")
    with pytest.raises(UserError, match=r"^\[--context\] longer than the model's context"):
        check_further(two)


def test_members_of_a_list_of_caches_are_stored_compressed(model_folder, monkeypatch):
    loaded, tokens = load(str(model_folder), "fp16"), list(range(3, 323))
    exact = [CacheList(cache, KVCache()) for cache in reading.prefill(loaded, tokens)]
    agreement.attach(loaded.model, "int4")
    caches = [CacheList(cache, KVCache()) for cache in reading.new_cache(loaded)]
    monkeypatch.setattr(reading, "new_cache", lambda _: caches)
    for cache in reading.stored(loaded, tokens, exact):
        ours, _ = cache.caches
        assert isinstance(ours, CompressedKVCache) and ours.offset == len(tokens)


def test_where_none_holds_it_is_full_precision_with_the_reason(model_folder, monkeypatch):
    faked(monkeypatch, {"int4": 0.9, "int8": 0.98})
    loaded = load(str(model_folder), "99%")
    assert loaded.kv_name == "fp16" and not loaded.kv.compresses
    assert loaded.notes[-1] == "99%: fp16 (int8 keeps 98 %)"


def test_a_model_is_loaded_with_its_choice_measured_once(model_folder, monkeypatch, short, capsys):
    loaded = load(str(model_folder), "60%")
    assert loaded.kv == parse_kv("int4") and loaded.layers[0].compressed  # a random model
    assert loaded.report()[-1].startswith("60%: int4, same next token ")
    assert "mlxkv calibrate" in loaded.chosen and str(model_folder) not in loaded.chosen
    (file,) = short.glob("*.agreement.json")
    assert loaded.fingerprint in file.name
    (entry,) = json.loads(file.read_text())
    assert {found["preset"] for found in entry["tried"]} <= {"int4", "int8"}
    assert entry["preset"] == "int4" and len(entry["short"]["same"]) == TEXTS and entry["date"]
    monkeypatch.setattr(agreement, "_chosen", lambda *_: pytest.fail("measured again"))
    assert load(str(model_folder), "60%").kv_name == "int4"
    file.write_text("[{}, 3, {")
    monkeypatch.undo()
    assert kept.find(loaded.fingerprint, 0.6, None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"preset": "int5"},
        {"preset": ["int4"]},
        {"short": {"preset": "int4", "context": 192, "tokens": 64, "same": [64]}},
        {"short": {"preset": "int4", "context": 192, "tokens": 0, "same": [0] * TEXTS}},
        {"short": {"preset": "int4", "context": 192, "tokens": 64, "same": [65] * TEXTS}},
        {"long": 3},
        {"tried": None},
        {"version": "0"},
    ],
)
def test_a_kept_choice_that_is_damaged_is_none(short, change):
    found = Measured("int4", 192, 64, (64,) * TEXTS)
    path = kept.keep(
        "mark", Choice(0.9, "int4", found, None, "", "2026-11-29", (found,)), None, "x"
    )
    assert kept.find("mark", 0.9, None).short == kept.cost_of("mark", None, "int8") == found
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry | change]))
    assert kept.find("mark", 0.9, None) is None


def test_what_is_measured_is_what_the_cache_changes(model_folder):
    """The share of a preset against one computed in one pass over the model without mlxkv's reading."""
    loaded = load(str(model_folder), "fp16")
    texts = agreement.texts_of(loaded, 384, TEXTS)
    assert len({tuple(text) for text in texts}) == TEXTS and {len(text) for text in texts} == {384}
    readings = agreement.Readings(loaded, 320, 64)
    count = []
    readings.read(texts, count.append)
    assert sum(count) == TEXTS * 384
    assert readings.measured("fp16", count.append).same == (64,) * TEXTS
    assert sum(count) == TEXTS * (384 + 64)
    for likeliest, whole in zip(readings._likeliest, texts, strict=True):
        logits = loaded.model(mx.array([whole]))[0, 320:]
        assert mx.array_equal(mx.argmax(logits, axis=-1), likeliest)
    rough = readings.measured("naive-int2")
    assert readings.measured("int8").mean > rough.mean
    # Text by text, as they are read at once; the last one alone, by its own cache.
    exact = reading.prefill(loaded, texts[-1][:320])
    agreement.attach(loaded.model, "naive-int2")
    cache, same = reading.stored(loaded, texts[-1][:320], exact), 0
    for start, logits in enumerate(reading.follow(loaded, cache, texts[-1][320:], 32)):
        part = readings._likeliest[-1][32 * start : 32 * start + 32]
        same += int((mx.argmax(logits, axis=-1) == part).sum())
    assert rough.same[-1] == same < 64


def test_16_bits_change_no_share(model_folder, monkeypatch):
    """What a model in bfloat16 is measured by is what it gives in float32, and it is left as it was."""
    loaded = load(str(model_folder), "fp16", dtype="bfloat16")
    before = {name: mx.array(x) for name, x in tree_flatten(loaded.model.parameters())}
    seen, measured = [], agreement.Readings.measured

    def watched(self, *args):
        seen.append({x.dtype for _, x in tree_flatten(loaded.model.parameters())})
        return measured(self, *args)

    monkeypatch.setattr(agreement.Readings, "measured", watched)
    choice = agreement.choose(loaded, "90%")
    assert seen and all(kinds == {mx.float32} for kinds in seen)
    after = dict(tree_flatten(loaded.model.parameters()))
    assert after.keys() == before.keys()
    assert all(
        x.dtype == after[name].dtype and mx.array_equal(x, after[name])
        for name, x in before.items()
    )
    monkeypatch.setattr(kept, "find", lambda *_: None)
    for name, x in before.items():
        before[name] = x.astype(mx.float32)
    plain = load(str(model_folder), "fp16", dtype="float32")
    plain.model.load_weights(list(before.items()))
    assert agreement.choose(plain, "90%").short == choice.short
    monkeypatch.setattr("mlxkv.loading.weights.array_memory", lambda: 1 << 20)
    seen.clear()
    agreement.choose(loaded, "90%")
    assert seen and all(mx.float32 not in kinds for kinds in seen)


def test_the_longest_context_is_what_a_minute_and_the_memory_allow(model_folder, monkeypatch):
    loaded = load(str(model_folder), "fp16")
    loaded.context = 8192 + 64
    monkeypatch.setattr(agreement, "LONGER", (16384, 8192, 4096, 128))
    monkeypatch.setattr(agreement, "array_memory", lambda: 1 << 40)
    readings = agreement.Readings(loaded, 192, 64)
    readings.read(agreement.texts_of(loaded, 256, 2), lambda _: None)
    size = sum(cache.nbytes for cache in readings._exact) / 2 / 192  # bytes a token
    for seconds, found in (
        (1e-6, (8192, TEXTS)),  # 16,384 is more than the model has; 64 tokens follow
        (20 / 8192 / 1.5, (8192, 3)),  # 20 s a text
        (31 / 8192 / 1.5, (4096, 4)),
        (1e3, None),  # 128 is no longer one
    ):
        readings.seconds = seconds
        assert next(readings.longer(), None) == found
    readings.seconds = 1e-6
    for texts, found in ((2, (8192, 2)), (1.9, (4096, 3)), (0.9, None)):
        memory = int(texts * size * 8192 * agreement.SHARE) + 1
        monkeypatch.setattr(agreement, "array_memory", lambda memory=memory: memory)
        assert next(readings.longer(), None) == found


def test_the_whole_context_of_a_model_is_measured(model_folder, monkeypatch):
    """Half of it was, where its context is a power of two."""
    loaded = load(str(model_folder), "fp16")
    monkeypatch.setattr(agreement, "LONGER", (512, 256))
    readings = agreement.Readings(loaded, 192, 64)
    readings.read(agreement.texts_of(loaded, 256, 2), lambda _: None)
    for context, found in ((4096, [512, 256]), (512, [448, 256]), (320, [256]), (250, [])):
        loaded.context = context
        assert [x for x, _ in readings.longer()] == found


def test_a_calibrated_model_has_the_dial(model_folder, monkeypatch):
    from mlxkv.calibration.measure import calibrate
    from mlxkv.formats.calibration.artifact import kept_path, write_calibration

    loaded = load(str(model_folder), "fp16")
    tokens = [i % 97 + 3 for i in range(512)]
    made = calibrate(loaded.model, tokens, window=128, positions=512)
    path = kept_path(loaded.fingerprint)
    path.parent.mkdir(parents=True)
    write_calibration(path, made)
    assert agreement.dial_of(loaded, agreement.find_calibration(loaded.model)) == (DIAL, "")
    assert agreement.dial_of(loaded, None)[0] == PLAIN
    faked(monkeypatch, {name: 0.99 if name != DIAL[0] else 0.8 for name in DIAL})
    loaded = load(str(model_folder), "95%")
    assert loaded.kv_name == DIAL[1]
    monkeypatch.setattr(quality_check, "divergence", lambda _: pytest.fail("measured twice"))
    quality_check.warn(loaded)
    choice = kept.find(loaded.fingerprint, 0.95, agreement.find_calibration(loaded.model).digest)
    assert choice is not None and choice.preset == DIAL[1]
    assert kept.find(loaded.fingerprint, 0.95, None) is None  # chosen for that calibration


def test_fit_speaks_of_shares(model_folder, monkeypatch, capsys):
    args = ["fit", "--model", str(model_folder), "--kv", "90%"]
    assert main(args) == 2
    assert "90% is chosen when a model is read, and was not yet" in capsys.readouterr().err
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    load(str(model_folder), "90%")
    capsys.readouterr()
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "90%: int4, same next token 95 %" in out and "\n int4 " in out and "fp16" not in out
    assert main([*args, "--memory", "16GB", "--context", "256", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["preset"] for row in data["presets"]] == ["fp16"]  # the most that fits
    assert data["chosen"] == ["90% with --memory and --context: fp16 is the most that fits"]
    load(str(model_folder), "97%")  # tries int8, too
    plan = plans.read_plan(str(model_folder))
    for name, known in (("int8", "99 %"), ("fill-6", "at least 95 %")):
        usable = need(plan, parse_kv(name), 8192).total
        line = f"{name} is the most that fits; it keeps {known} of next tokens at 192"
        assert plans.most(str(model_folder), plan, 8192, usable) == (name, line)
    assert plans.most(str(model_folder), plan, 8192, 0)[1].startswith("nothing fits, fill-2.25 is")
    assert main(["fit", "--kv", "auto"]) == 2
    assert "a share of next tokens is of one model" in capsys.readouterr().err


def test_eval_and_python_speak_of_shares(model_folder, monkeypatch, capsys):
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    rows = mlxkv.eval(str(model_folder), ["97%"], context=512)
    assert [row["preset"] for row in rows] == ["fp16", "97%"] and "chosen" not in rows[0]
    assert rows[1]["chosen"].startswith("97%: int8, same next token 99 %")
    assert rows[1]["bits_per_value"] == pytest.approx(
        parse_kv("int8").bits_per_value(64, 64), rel=0.1
    )


def test_chat_and_serve_take_a_share(model_folder, monkeypatch, capsys):
    faked(monkeypatch, {"int4": 0.95, "int8": 0.99})
    assert (
        main(["chat", "-m", str(model_folder), "--kv", "97%", "-p", "a", "--max-tokens", "2"]) == 0
    )
    said = capsys.readouterr().err
    assert "97%: int8, same next token 99 %" in said
    assert ServeOptions(model=str(model_folder), kv="97%").kv == "97%"
    with pytest.raises(UserError, match="no such share"):
        ServeOptions(model=str(model_folder), kv="12%")
    assert main(["run", "--kv", "97%", "--", "python", "-c", ""]) == 2
    assert "a share of next tokens is asked of a model" in capsys.readouterr().err
