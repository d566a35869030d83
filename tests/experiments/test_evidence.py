"""Evidence on many texts: shares, resuming, failing presets, merging, pages and the choice of settings."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_models import QWEN

from experiments.evidence import command, corpus, natural, page, rows, selection, table, work
from experiments.evidence.command import ROWS
from experiments.evidence.measure import KL, RETRIEVAL, Asked, Subject
from experiments.evidence.selection import CANDIDATES, LIMITS, TRIES, width
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import parse_kv

HARD = {"prose-1": 1.0, "code-1": 9.0, "prose-2": 2.0, "code-2": 4.0, "logs-1": 0.5, "logs-2": 3.0}
WORSE = {"fp16": 0.0, "int2": 1e-4, "kivi-int2": 1.05e-4, "naive-int2": 8e-4}


@pytest.fixture
def held(tmp_path):
    for split in (corpus.CALIBRATION, *corpus.SPLITS, corpus.HAYSTACK):
        (tmp_path / "held" / split).mkdir(parents=True)
        for name in HARD:
            (tmp_path / "held" / split / f"{name}.txt").write_text(f"{split} {name}.\n" * 40)
    return corpus.Held(tmp_path / "held")


@pytest.fixture
def asked(held, tmp_path):
    (tmp_path / "out").mkdir()
    return Asked(held, tmp_path / "out", decode=64, questions=2)


class Fake:
    """In place of `Subject`: numbers that are known, and a preset that fails."""

    seen: list = []
    of_now = "1"
    together = 1

    def __init__(self, asked, model, presets):
        self.presets, self.fails, self.slips = presets, {"turbo-int2"}, {("int2", "code-1")}

    def arms(self, windows):
        return self

    @contextmanager
    def attached(self, preset):
        if preset in self.fails:
            raise UserError(f"[attach] {preset} does not fit")
        yield self

    def read_base(self, unit):
        pass

    def of(self, unit):
        return self.of_now

    def state(self, unit):
        return f"{unit.text} of {self.of_now}"

    def measure(self, units, loaded):
        return [self.measured(unit) for unit in units]

    def measured(self, unit):
        Fake.seen.append(unit)
        if unit.task == KL and (unit.preset, unit.text) in self.slips:
            raise MachineError("[evidence] NaN")
        bits = {"bits_per_value": 2.25, "bits_with_windows": 2.5}
        if unit.task == RETRIEVAL:
            right = {kind: [[True], [unit.preset != "naive-int2"]] for kind in corpus.QUESTIONS}
            return bits | {"right": right}
        kl = WORSE[unit.preset] * HARD[unit.text]
        return bits | {"kl": kl, "top1": 0.9, "nll": 1.0}


def planned(asked, presets=("fp16", "int2", "kivi-int2", "naive-int2"), documents=2):
    names = {"one": list(presets), "folder/two": list(presets)}
    return names, work.units(asked, names, ["64,64"], [corpus.TEST], [512], documents, 1024)


def run(asked, names, units, file, **more):
    Fake.seen = []
    return work.run(asked, units, names, file, subject=Fake, **more)


def test_shares_cover_every_unit_once_and_keep_presets_together(asked):
    _, units = planned(asked)
    assert len(units) == 2 * 4 * (len(HARD) + 2)
    for of in (1, 3, 8, 200):
        shares = [work.share(asked, units, i + 1, of) for i in range(of)]
        assert [unit for share in shares for unit in share] == units
    eight = [work.share(asked, units, i + 1, 8) for i in range(8)]
    assert all(len({(u.model, u.preset) for u in share}) == 1 for share in eight)
    with pytest.raises(UserError, match=r"\[--shares\] not a share; got '3/2'"):
        work.parse_share("3/2")


def test_a_run_goes_on_where_it_was_stopped(asked, monkeypatch):
    names, units = planned(asked)
    file = asked.out / ROWS
    first = run(asked, names, units[:10], file)
    assert first == (9, 1, 0)  # one text of int2 fails
    assert run(asked, names, units, file) == (len(units) - 9 - 2, 2, 0)
    assert units[0] not in Fake.seen
    assert run(asked, names, units, file) == (0, 2, 0)  # only what failed is tried again
    monkeypatch.setattr(Fake, "of_now", "2")  # such as other weights: nothing counts
    assert run(asked, names, units[:16], file) == (15, 1, 0)
    whole = rows.read([file])
    again = {rows.key(row) for row in whole if row.get("state", "").endswith(" of 2")}
    assert len(again) == 15 and all("when" in row for row in whole if "error" not in row)
    left = {rows.key(row) for row in rows.current(whole) if "error" not in row}
    assert (
        again <= left < {rows.key(row) for row in whole}
    )  # others' rows of those texts do not count


def test_a_text_that_fails_in_a_batch_fails_alone(asked, monkeypatch):
    """Neighbouring texts are read together, documents one by one; after an error each text is tried alone."""
    names, units = planned(asked)
    monkeypatch.setattr(Fake, "together", 3)
    whole = []
    monkeypatch.setattr(
        Fake,
        "measure",
        lambda self, *args, real=Fake.measure: (whole.append(args[0]), real(self, *args))[1],
    )
    assert run(asked, names, units, asked.out / ROWS) == (len(units) - 2, 2, 0)
    # six texts are two batches, one of which fails and is tried again
    assert {len(some) for some in whole} == {1, 3}
    assert all(len({(u.preset, u.task, u.context) for u in some}) == 1 for some in whole)
    assert all(len(some) == 1 for some in whole if some[0].task == RETRIEVAL)
    rows_ = {
        (r["model"], r["preset"], r["split"], r["text"]): r for r in rows.read([asked.out / ROWS])
    }
    assert len(rows_) == len(units)
    assert [key for key, row in rows_.items() if "error" in row] == [
        ("one", "int2", "test", "code-1"),
        ("two", "int2", "test", "code-1"),
    ]


def test_a_lost_gpu_ends_a_run_at_once(asked, monkeypatch):
    """All that comes later in this process would fail, and be written down as an error of other presets."""
    names, units = planned(asked)

    def measured(self, unit, real=Fake.measured):
        if (unit.preset, unit.text) == ("kivi-int2", "prose-2"):
            raise RuntimeError("cudaMallocManaged failed: an illegal memory access was encountered")
        return real(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr(Fake, "measured", measured)
        with pytest.raises(MachineError, match="the GPU failed and this process lost it"):
            run(asked, names, units, asked.out / ROWS)
    kept = rows.read([asked.out / ROWS])
    assert kept and not [row for row in kept if "illegal" in row.get("error", "")]
    measured_now, failed, left = run(asked, names, units, asked.out / ROWS)
    found = sum("error" not in row for row in kept)
    assert (measured_now, failed, left) == (len(units) - 2 - found, 2, 0)


def test_a_process_that_ends_with_an_error_is_started_again(asked, monkeypatch):
    codes = {0: [1, -6, 0], 1: [0], 2: [1] * 9, 3: [2]}
    begun = []

    def start(args, given, name, which):
        begun.append(which)
        code = codes[which].pop(0)
        return SimpleNamespace(poll=lambda: code, terminate=None)

    monkeypatch.setattr(command, "_start", start)
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)
    with pytest.raises(MachineError, match="2 of 4 processes ended with an error"):
        command._side_by_side(SimpleNamespace(processes=4), [], "natural")
    assert [begun.count(which) for which in range(4)] == [3, 1, 1 + command.RESTARTS, 1]


def test_the_time_ends_a_run_between_two_texts(asked):
    names, units = planned(asked)
    assert run(asked, names, units, asked.out / ROWS, seconds=-1.0) == (0, 0, len(units))
    assert Fake.seen == []


def test_a_preset_that_fails_does_not_stop_the_others(asked):
    names, units = planned(asked, ("fp16", "turbo-int2", "kivi-int2"))
    file = asked.out / ROWS
    measured, failed, left = run(asked, names, units, file)
    assert (failed, left) == (2 * (len(HARD) + 2), 0) and measured == 2 * failed
    wrong = [row for row in rows.read([file]) if "error" in row]
    assert {row["preset"] for row in wrong} == {"turbo-int2"}
    assert wrong[0]["error"] == "UserError: [attach] turbo-int2 does not fit"
    lines = page.markdown(table.blocks(rows.read([file]), corpus.TEST), "int2")
    assert any(line.startswith("- `turbo-int2`: 6 of 6 texts missing: UserError") for line in lines)


def test_files_of_several_hosts_merge(asked):
    names, units = planned(asked)
    files = [asked.out / f"{i}.jsonl" for i in range(3)]
    for i, file in enumerate(files):
        run(asked, names, work.share(asked, units, i + 1, 3), file)
    merged = rows.read(files)
    assert len(merged) == len(units)
    assert {rows.key(row) for row in merged} == {rows.key(unit.identity) for unit in units}


def test_lines_that_were_cut_off_cost_only_themselves(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = dict.fromkeys(rows.IDENTITY, "x") | {"kl": 1.0}
    rows.append(file, row)
    with file.open("a") as out:
        out.write('{"task": "kl", "spl')
    rows.append(file, row | {"text": "y"})
    rows.append(file, row | {"error": "later"})  # a result stays before an error
    assert [(r["text"], r.get("error")) for r in rows.read([file])] == [("x", None), ("y", None)]


def test_rows_of_an_earlier_model_or_text_do_not_count():
    def row(preset, state, when, **more):
        where = dict.fromkeys(rows.IDENTITY, "x") | {"preset": preset}
        return where | {"state": state, "when": when} | more

    kept = [row("a", "new", 3), row("b", "new", 2), row("d", "?", 0, error="E")]
    assert rows.current([*kept, row("c", "old", 1)]) == kept
    assert rows.current([row("a", "old", 1)]) == [row("a", "old", 1)]


def test_tables_say_what_is_told_apart(asked, tmp_path):
    names, units = planned(asked)
    file = asked.out / ROWS
    work.run(asked, units, names, file, subject=Whole)
    found = rows.read([file])
    (one, two) = table.blocks(found, corpus.TEST)
    assert (one.model, two.model) == ("one", "two")
    assert one.letters(["int2", "kivi-int2", "naive-int2"]) == {
        "int2": "a",
        "kivi-int2": "b",  # five percent on every text: pairs tell it
        "naive-int2": "c",
    }
    assert one.ratio("naive-int2", "int2").value == pytest.approx(8)
    assert one.lower("int2", "naive-int2") == 6
    assert one.kinds() == {
        "code": ["code-1", "code-2"],
        "logs": ["logs-1", "logs-2"],
        "prose": ["prose-1", "prose-2"],
    }
    page.main([str(file), "--out", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "`naive-int2` | 2.25 | 2.50 | 0.0026 [" in text
    assert "**8.00 [8.00, 8.00]**" in text and "| 4/8 [" in text and "| 8/8 [68, 100] % ~ |" in text
    assert (tmp_path / "page.svg").read_text().count("<svg") == 1
    assert len((tmp_path / "page.jsonl").read_text().splitlines()) == len(units)
    side = tmp_path / "side.md"
    side.write_text("# Side by side\n\nKept.\n\n<!-- figures -->\nOf last year.\n")
    page.main([str(file), "--out", str(side), "--across"])
    text = side.read_text()
    assert "Kept." in text and "last year" not in text
    assert "| preset | bits | one | two |" in text and "**8.00 [8.00, 8.00]**" in text
    with pytest.raises(UserError, match="no KL of these texts"):
        page.main([str(file), "--out", str(side), "--across", "--models", "three"])


class Whole(Fake):
    """Without failures."""

    def __init__(self, *args):
        super().__init__(*args)
        self.fails, self.slips = set(), set()


def test_every_method_has_as_many_tries_within_its_bits():
    for method, names in CANDIDATES.items():
        assert len({parse_kv(name) for name in names}) == TRIES, (
            method
        )  # not the same under other names
        for name in names:
            config = parse_kv(name)
            assert config.sink + config.recent == selection.EXACT, name
            assert config.bits_per_value(128, 128) <= LIMITS[width(method)], name
            assert config.why_not(128, 128) is None and config.why_not(256, 256) is None, name


def test_the_least_mean_on_selection_texts_is_chosen(tmp_path):
    tries = CANDIDATES["int2"]

    def row(preset, text, kl, split=corpus.SELECTION):
        where = {"task": KL, "split": split, "model": "m", "windows": "64,64", "context": 512}
        return (
            where
            | {"preset": preset, "text": text}
            | ({"error": "E"} if kl is None else {"kl": kl})
        )

    found = [row(name, text, 2.0) for name in (*tries[:3], *tries[5:]) for text in ("a", "b")]
    found += [row(tries[3], "a", 0.1), row(tries[3], "b", None)]
    found += [row(tries[4], "a", 1.0), row(tries[4], "b", 2.0)]
    found += [row(tries[0], text, 0.0, corpus.TEST) for text in ("a", "b")]
    chosen = selection.chosen(found, ["int2", "kivi-int2"])
    assert list(chosen["m"]) == ["int2"]
    assert chosen["m"]["int2"]["preset"] == tries[4] and chosen["m"]["int2"]["kl"] == 1.5
    assert chosen["m"]["int2"]["failed"] == [tries[3]]
    assert (
        selection.chosen([one for one in found if one["preset"] != tries[6]], ["int2"])["m"] == {}
    )
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps(chosen))
    assert selection.chosen_names(file, "m") == [tries[4]]
    assert selection.chosen_names(file, "other") == []
    file.write_text("[]")
    with pytest.raises(UserError, match=r"\[--chosen\] not a file of evidence.selection"):
        selection.chosen_names(file, "m")


def test_names_take_other_numbers():
    config = parse_kv("kivi-int2+g64+page128+vclip.96+sink4+recent124")
    assert (config.keys.quantizer.group, config.values.quantizer.group) == (64, 64)
    assert (config.page, config.sink, config.recent) == (128, 4, 124)
    assert config.values.quantizer.clip == 0.96 and config.keys.quantizer.clip == 1.0
    one = parse_kv("oscar-int2+kclip.98")
    assert one.keys.own_clip and one.keys.quantizer.clip == 0.98
    assert one.values == parse_kv("oscar-int2").values
    assert parse_kv("oscar-int2+clip92").keys.quantizer.clip == 0.92  # a preset of that name
    for wrong in ("turbo-int2+g32", "kivi-int2+kclip.9", "int2+kpage64", "int2+sink4.5"):
        with pytest.raises(UserError, match="no such setting"):
            parse_kv(wrong)
    with pytest.raises(UserError, match="unknown preset"):
        parse_kv("nothing+g32")


def test_texts_are_dealt_by_kind_and_missing_ones_are_named(held, tmp_path):
    assert held.names(corpus.TEST)[:3] == ["code-1", "logs-1", "prose-1"]
    assert held.document_name(1) == "logs-1" and held.document_name(7) == "logs-1+1"
    assert corpus.kind("logs-1+1") == "logs" and corpus.kind("man-pages-12") == "man-pages"
    with pytest.raises(UserError, match=r"\[--texts\] no texts"):
        corpus.Held(tmp_path).names(corpus.TEST)


class Characters:
    """A tokenizer with a token a character."""

    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())


def test_haystacks_are_the_texts_with_facts_between_their_sentences(held):
    loaded = SimpleNamespace(tokenizer=Characters())
    for file in held.files[corpus.HAYSTACK]:
        file.write_text("It rains. Nobody goes out.\n    a line of code\n" * 300)
    document = held.document(loaded, 0, 9000, 2)
    assert 7000 < len(document.text) <= 9000
    for question in document.questions:
        for key, value in zip(question.keys, question.values, strict=True):
            assert any(key in line and value in line for line in document.text.splitlines())
    rest = document.text
    assert "    a line of code\n" in rest and "It rains. " in rest
    assert held.document(loaded, 0, 9000, 2) == document
    assert held.document(loaded, 1, 9000, 2).text != document.text
    for file in held.files[corpus.HAYSTACK]:
        file.write_text("Too short.\n")
    with pytest.raises(UserError, match="around the facts is too short"):
        held.document(loaded, 0, 9000, 2)


@pytest.mark.slow
def test_a_model_is_measured_calibrated_and_resumed(held, tmp_path, monkeypatch):
    for split in (corpus.CALIBRATION, *corpus.SPLITS, corpus.HAYSTACK):
        for name in HARD:
            words = " ".join(f"The {name} of {i} is {i * i % 97} in {split}." for i in range(400))
            (held.folder / split / f"{name}.txt").write_text(words)
    given = ["--models", QWEN, "--texts", str(held.folder), "--out", str(tmp_path / "o")]
    given += ["--context", "512", "--decode", "16", "--documents", "1", "--document", "1k"]
    given += ["--questions", "1", "--kv", "oscar-int2"]
    natural.main(given)
    file = tmp_path / "o" / ROWS
    found = rows.read([file])
    assert len(found) == 2 * (len(HARD) + 1) and not any("error" in row for row in found)
    by_name = {p: [r["kl"] for r in found if r["preset"] == p and "kl" in r] for p in WORSE}
    assert by_name["fp16"] == [0.0] * len(HARD)
    assert all(r["kl"] > 0 for r in found if r["preset"] == "oscar-int2" and "kl" in r)
    assert len(list(Path(tmp_path / "o").glob("calibration-tiny-qwen-*.safetensors"))) == 1
    before = file.read_text()
    natural.main(given)
    assert file.read_text() == before
    monkeypatch.setattr(Subject, "together", len(HARD))  # as on a GPU, in a batch
    file.unlink()
    natural.main([*given, "--documents", "0"])
    again = {(r["preset"], r["text"]): r for r in rows.read([file])}
    for row in (r for r in found if "kl" in r):
        other = again[row["preset"], row["text"]]
        assert other["kl"] == pytest.approx(row["kl"], rel=0.05, abs=1e-6)
        assert other["kv_bytes"] == pytest.approx(row["kv_bytes"], rel=0.02)
