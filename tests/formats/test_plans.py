"""Plans: files of all kinds are read, and every fault is one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxkv.errors import UserError
from mlxkv.formats.names import canonical, parse_kv, parse_preset, with_keep
from mlxkv.formats.plans.plan import Plan, read_config
from mlxkv.formats.presets import PRESETS


@pytest.fixture
def plan(tmp_path):
    """Writes a plan file; returns what `--kv` takes."""

    def write(data, name: str = "plan.json") -> str:
        text = data if isinstance(data, str) else json.dumps(data)
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def presets(found: Plan, count: int) -> list[str]:
    assert [found.at(i) for i in range(count)] == [PRESETS[found.name_at(i)] for i in range(count)]
    return [found.name_at(i) for i in range(count)]


def test_layers_are_named_by_number_by_range_and_by_list(plan):
    found = parse_kv(
        plan(
            {"version": 1, "default": "int4", "layers": {"0": "fp16", "2-3": "int2", "5,7": "int8"}}
        )
    )
    want = ["fp16", "int4", "int2", "int2", "int4", "int8", "int4", "int8", "int4"]
    assert presets(found, 9) == want
    assert found.label == "plan.json" and found.last == 7


def test_a_list_names_every_layer(plan):
    names = ["fp16", "int4", "int2", "int4"]
    found = parse_kv(plan(names))
    assert presets(found, 4) == names
    found.check(4)
    for count in (3, 5):
        with pytest.raises(UserError, match="another number of layers; got 4"):
            found.check(count)


def test_without_a_default_other_layers_stay_exact(plan):
    assert presets(parse_kv(plan({"layers": {"1": "int4"}})), 3) == ["fp16", "int4", "fp16"]


def test_the_file_of_mlx_optiq(plan):
    """As mlx-optiq 0.7.7 writes it: layers that are not there stay exact, groups are not taken over."""
    entries = [
        {"layer_idx": 1, "bits": 8, "group_size": 64},
        {"layer_idx": 2, "bits": 4, "group_size": 64},
        {"layer_idx": 3, "bits": 0, "group_size": 64},
        {"layer_idx": 4, "bits": 2},
    ]
    found = parse_kv(plan(entries, "kv_config.json"))
    assert presets(found, 6) == ["fp16", "int8", "int4", "fp16", "int2", "fp16"]
    with pytest.raises(UserError, match="no layer|does not have; got 4"):
        found.check(4)


WRONG = {
    "{": "is not valid JSON",
    "3": "neither an object nor a list",
    "[]": "is a list of 0 layers",
    "{}": "names no layers",
    '["int4", 3]': "no preset; got '3'",
    '{"default": "int5"}': "unknown preset; got 'int5'; did you mean int",
    '{"default": "other.json"}': "no preset; got 'other.json'",
    '{"version": 2, "default": "int4"}': "has version 2",
    '{"version": true, "default": "int4"}': "has version True",
    '{"default": "int4", "layer": {}}': "unknown entry; got 'layer'",
    '{"default": "int4", "layers": []}': "names no layers",
    '{"default": "int4", "layers": {"x": "int2"}}': "names no layer; got 'x'",
    '{"default": "int4", "layers": {"-1": "int2"}}': "names no layer; got '-1'",
    '{"default": "int4", "layers": {"3-1": "int2"}}': "cannot be; got '3-1'",
    '{"default": "int4", "layers": {"0-99999": "int2"}}': "cannot be; got '0-99999'",
    '{"default": "int4", "layers": {"0-3": "int2", "2": "int3"}}': "names a layer twice; got 2",
    '[{"layer_idx": 0, "bits": 6}]': "no preset of this width; got 6 bits",
    '[{"layer_idx": 0, "bits": true}]': "no preset of this width; got True",
    '[{"bits": 4}]': "an entry without a layer",
    '[{"layer_idx": 0, "bits": 4}, 7]': "an entry without a layer; got 7",
    '[{"layer_idx": 0, "bits": 4}, {"layer_idx": 0, "bits": 8}]': "twice; got 0",
}


@pytest.mark.parametrize("text", WRONG)
def test_faults_are_one_line(plan, text):
    with pytest.raises(UserError, match=WRONG[text]) as caught:
        parse_kv(plan(text))
    said = str(caught.value)
    assert said.startswith("[--kv] plan.json") and "\n" not in said and len(said) < 500


def test_a_file_that_is_not_there_or_too_large_is_refused(plan, tmp_path):
    with pytest.raises(UserError, match="no such plan"):
        parse_kv(str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="large|bytes"):
        parse_kv(plan('{"default": "int4", "note": "' + "x" * (1 << 20) + '"}'))
    with pytest.raises(UserError, match="no such calibration"):
        parse_kv(str(tmp_path / "none.safetensors"))
    with pytest.raises(UserError, match="folder"):
        (tmp_path / "folder.json").mkdir()
        parse_kv(str(tmp_path / "folder.json"))


def test_a_calibration_of_today_without_a_plan_says_so():
    with pytest.raises(UserError, match="carries no plan"):
        parse_kv("tests/data/calibration.safetensors")


def test_names_of_plans_are_left_as_they_are(plan):
    assert canonical(" Plans/My.JSON ") == "Plans/My.JSON"
    with pytest.raises(UserError, match="--keep. is for presets"):
        with_keep("int4,plan.json", 0.5)
    with pytest.raises(UserError, match="choose a preset here"):
        parse_preset(plan(["int4"]))


def test_a_plan_answers_for_all_of_its_layers(plan):
    found = parse_kv(plan({"default": "int4", "layers": {"0": "fp16", "1": "int2"}}))
    assert found.compresses and found.calibrated and found.balanced
    assert not (found.listens or found.low or found.learned)
    assert (found.page, found.window) == (128, PRESETS["int2"].window)
    assert parse_kv(plan({"layers": {"0": "int4+keep0.5"}})).listens
    assert not parse_kv(plan({"default": "fp16"})).compresses
    # No layer has the most frequent preset of the list but those of the list.
    assert len(parse_kv(plan(["int4", "int2"])).configs) == 2


def test_a_plan_comes_back_from_the_header_of_a_saved_file(plan):
    found = parse_kv(plan({"default": "int4", "layers": {"0": "fp16", "3": "oja-0.75"}}))
    again = read_config(json.loads(json.dumps(found.as_dict())))
    assert again == found and presets(again, 2) == ["fp16", "int4"]
    assert again != parse_kv(plan({"default": "int4", "layers": {"0": "fp16"}}))
    assert read_config(json.loads(json.dumps(PRESETS["int2"].as_dict()))) == PRESETS["int2"]
    for broken in ({"presets": {}}, {**found.as_dict(), "layers": {"x": {}}}, {"presets": 3}):
        with pytest.raises(UserError):
            read_config(broken)


def test_a_change_reaches_every_layer(plan):
    found = parse_kv(plan({"default": "int4", "layers": {"0": "int2"}}))
    wide = found.each(lambda one: replace(one, sink=0))
    assert {wide.at(i).sink for i in range(3)} == {0} and wide.at(0).page == 128


def test_what_is_written_is_read_again(plan):
    found = parse_kv(plan({"default": "int4", "layers": {"0-2": "fp16", "4": "int2", "6": "fp16"}}))
    assert found.spec["layers"] == {"0-2,6": "fp16", "4": "int2"}
    assert parse_kv(plan(found.spec)) == found
