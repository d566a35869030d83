"""HumanEval: the sandbox, where continuations end, batches of one length, whole runs on the tiny model, the table."""

import gzip
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small_models import TINY

from cuda_track.models.attach_model import attach
from cuda_track.models.layers import CompressedLayer
from cuda_track.models.loader import load
from cuda_track.models.transformers_compat import handed
from experiments.evidence.texts import READ, Texts
from experiments.papers import humaneval
from experiments.papers.sandbox import passes
from mlxkv.corpora.corpus import passages
from mlxkv.errors import MachineError, UserError
from mlxkv.eval import rows
from mlxkv.eval.intervals import newcombe, wilson

torch.set_num_threads(1)
# The completion is part of a text, so its tests judge what stands before it.
PROMPT, TEST = (
    'def f():\n    return {}\n\n\nnote = r"""{}',
    '"""\n\ndef check(f):\n    assert f() == 1\n',
)
PROBLEMS = [
    {"task_id": f"HumanEval/{i}", "prompt": PROMPT.format(said, note), "test": TEST, "entry_point": "f"}
    for i, (said, note) in enumerate([(1, "Once"), (2, "Once upon a time" * 3), (1, "Once more, ")])
]  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with problems and texts, as a run leaves it."""
    out = tmp_path_factory.mktemp("humaneval")
    lines = "\n".join(map(json.dumps, PROBLEMS))
    (out / humaneval.PROBLEMS).write_bytes(gzip.compress(lines.encode()))
    (out / "texts").mkdir()
    text = passages("evaluation")["code"]
    for name in READ:
        (out / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def tiny():
    return load(TINY, "fp16", "float32")


def run(out, *more):
    humaneval.main([TINY, "--out", str(out), "--tokens", "20", "--contexts", "300,0", *more])
    return out / "tiny.jsonl", rows.read([out / "tiny.jsonl"])


def test_a_context_alone_is_coded_by_a_variant(subject, monkeypatch):
    monkeypatch.setattr(humaneval, "Subject", lambda *about: subject)
    args = SimpleNamespace(name="tiny", out=subject.out, dtype="float32", calibration=None)
    windows, bits, read = humaneval.reader(args, subject.loaded, "context:oscar+64x0")
    assert (windows, bits) == ("64,0", 2 + 32 / 128)  # two numbers of a head
    tokens = [i % 200 + 20 for i in range(300)]
    cache, exact = read(tokens), subject.prefill(tokens)
    assert cache.get_seq_length() == 300
    for i in subject.growing:
        for name in ("keys", "values"):
            gap = getattr(cache.layers[i], name) - getattr(exact.layers[i], name)
            moved = gap[0].abs().amax((0, 2)) > 1e-3
            assert moved[64:256].all() and not moved[:64].any() and not moved[256:].any()
    with pytest.raises(UserError, match="no such variant; got pscar"):
        humaneval.reader(args, subject.loaded, "context:pscar")
    args.dtype = None
    with pytest.raises(UserError, match="calibrated in float32 alone"):
        humaneval.reader(args, subject.loaded, "context:oscar-int2@paper")
    for words in ("context:oscar --contexts 1000", "context:oscar --contexts 4k,0"):
        with pytest.raises(UserError, match="codes a context"):
            humaneval.main([TINY, "--kv", *words.split()])


def test_programs_pass_if_they_end_well(subtests, tmp_path):
    hurt = tmp_path / "hurt"
    caught = "try:\n    {}\nexcept BaseException:\n    pass"
    expected = {
        "assert 1 + 1 == 2": True,
        "import collections, hashlib, math, re, statistics\nprint(math.pi)": True,
        "print('x' * 10_000_000)": True,
        "raise SystemExit": False,
        "assert False": False,
        "def f(:": False,
        "import os; os._exit(0)": False,
        "while True: pass": False,
        "while True: print('x' * 1000)": False,
        "from time import sleep\n" + caught.format("sleep(60)"): False,
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()": False,
        "x = []\nwhile True: x.append(bytearray(1 << 24))": False,
        "x = bytearray(1 << 40)": False,
        caught.format(f"open({str(hurt)!r}, 'w')"): False,
        "import os\n" + caught.format(f"os.open({str(hurt)!r}, os.O_CREAT | os.O_WRONLY)"): False,
        "import os\n" + caught.format(f"os.mkdir({str(hurt)!r})"): False,
        "import os\n" + caught.format("os.fork()"): False,
        "import os\n" + caught.format("os.kill(os.getppid(), 0)"): False,
        "import subprocess\n" + caught.format("subprocess.run(['true'])"): False,
        "import socket\n" + caught.format("socket.socket()"): False,
        "import shutil\n" + caught.format(f"shutil.rmtree({str(tmp_path)!r})"): False,
    }
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(partial(passes, seconds=2, memory=1 << 28), expected)
        for (source, passed), got in zip(expected.items(), found, strict=True):
            with subtests.test(source=source):
                assert got is passed
    assert time.perf_counter() - start < 20 and tmp_path.exists() and not hurt.exists()
    assert passes("import numpy as np\nassert np.ones(3).sum() == 3")


def test_continuations_end_at_the_first_stop(subtests):
    for text, ends, expected in [
        ("  return 1\n\ndef g():", set(), ("  return 1\n", 12, True)),
        ("  x\n\n\nprint(f())\n#", set(), ("  x\n\n", 6, True)),
        ("  if x:\n    y", set(), ("  if x:\n    y", 13, False)),
        ("  y~\ndef", {ord("~")}, ("  y", 3, True)),
        ("\nclass", set(), ("", 1, True)),
        ("", set(), ("", 0, False)),
    ]:
        with subtests.test(text=text):
            tokens = [ord(letter) for letter in text]
            assert humaneval.cut(tokens, lambda x: "".join(map(chr, x)), ends) == expected


def test_prompts_behind_a_context_have_one_length(tiny, out):
    texts, encode = Texts(out / "texts"), tiny.tokenizer.encode
    library, nearest = (texts.encoded(tiny, x) for x in (humaneval.LIBRARY, humaneval.NEAREST))
    prompts = [encode(x["prompt"], add_special_tokens=False) for x in PROBLEMS]
    assert humaneval.arranged(tiny, PROBLEMS, texts, 0) == ([], prompts)
    shared, filled = humaneval.arranged(tiny, PROBLEMS, texts, 300)
    assert shared == library[-300:]
    longest = max(map(len, prompts))
    lacking = [longest - len(prompt) for prompt in prompts]
    assert sorted(lacking)[1] > 0
    expected = [nearest[len(nearest) - n :] + p for n, p in zip(lacking, prompts, strict=True)]
    assert filled == expected
    with pytest.raises(UserError, match=r"\[--contexts\] there are \d+ tokens; got 999999;"):
        humaneval.arranged(tiny, PROBLEMS, texts, 999999)

    class TakesBos:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": self.encode(text, add_special_tokens)}

        def encode(self, text, add_special_tokens=True):
            return [1] * add_special_tokens + [7] * len(text)

    taking = SimpleNamespace(tokenizer=TakesBos(), fingerprint=tiny.fingerprint)
    for context, known in (300, [1, *library[-299:]]), (0, [1]):
        shared, filled = humaneval.arranged(taking, PROBLEMS, texts, context)
        assert shared == known and all(1 not in tokens[-9:] for tokens in filled)


def test_copies_fill_shorter_prompts_up():
    long, short = list(range(200, 400)), [7, 8, 9, 10, 11]
    rows_, seen = humaneval.filled([long, short, long[:150], [5]])
    assert rows_[:2] == [long, [7, 8, 9, *[9] * 195, 10, 11]]
    assert seen[:2] == [[1] * 200, [1, 1, 1, *[0] * 195, 1, 1]]
    assert rows_[2:] == [[*range(200, 264), *[263] * 50, *range(264, 350)], [5] * 200]


@torch.no_grad()
def test_copies_store_what_the_token_before_them_stores(tiny):
    attach(tiny.model, "fp16")
    prompts = [[*range(40, 90)], [*range(30, 50)]]
    ids, seen = (torch.tensor(x) for x in humaneval.filled(prompts))
    cache = humaneval.read(tiny, [])
    at = seen.cumsum(1) - 1
    tiny.model(ids, attention_mask=seen, position_ids=at, **handed(cache))
    for layer in cache.layers:
        for x in (layer.keys[1], layer.values[1]):
            assert torch.allclose(x[:, 10:40], x[:, 9:10].expand(-1, 30, -1), atol=1e-4)
            assert not torch.allclose(x[:, 8], x[:, 9], atol=1e-2)


def test_batches_continue_as_single_prompts_do(subtests, tiny, out):
    """Whatever their length without a context, behind codes with one, with rows that end at different steps."""
    for kv, context in ("fp16", 0), ("int4", 300):
        with subtests.test(kv=kv, context=context):
            attach(tiny.model, kv)
            shared, prompts = humaneval.arranged(tiny, PROBLEMS, Texts(out / "texts"), context)
            assert len({*map(len, prompts)}) == (1 if context else 3)
            cache = humaneval.read(tiny, shared)
            layers = [x.cache for x in cache.layers if isinstance(x, CompressedLayer)]
            assert (kv == "fp16") == (layers == []) and all(x.store.count for x in layers)
            whole = humaneval.generate(tiny, cache, prompts, 24, lambda _: False)
            assert cache.get_seq_length() == context and {*map(len, whole)} == {24}
            for prompt, tokens in zip(prompts, whole, strict=True):
                alone = humaneval.generate(tiny, cache, [prompt], 24, lambda _: False)
                assert alone == [tokens] and whole.count(tokens) == 1
            first = whole[1][:16]  # the second row ends when it is first looked at
            ended = humaneval.generate(tiny, cache, prompts, 24, lambda x, first=first: x == first)
            assert ended == [whole[0], first, whole[2]]


def test_a_run_goes_on_where_it_was_stopped(out, capsys):
    file, found = run(out, "--kv", "fp16,int4")
    places = {(row["preset"], row["context"], row["text"]) for row in found}
    assert len(found) == len(places) == 12
    passed = {row["text"]: row["passed"] for row in found}
    assert passed == {"HumanEval/0": True, "HumanEval/1": False, "HumanEval/2": True}
    assert all(row["passed"] == passed[row["text"]] for row in found)
    assert {row["bits_per_value"] for row in found} == {16.0, 4.5}
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:8]) + lines[8][:40])  # stopped while it wrote
    capsys.readouterr()
    _, after = run(out, "--kv", "fp16,int4")
    assert after == found
    assert capsys.readouterr().err.splitlines() == [
        "int4 behind 300: 1 tasks more", "int4 behind 0: 3 tasks more",
    ]  # fmt: skip


def row(preset, bits, task, passed, context=4096):
    return {
        "task": "humaneval", "split": "test", "model": "m", "preset": preset, "windows": "64,64",
        "text": f"HumanEval/{task}", "context": context, "state": "s", "passed": passed, "tokens": 10 * task,
        "stopped": task > 0, "bits_per_value": bits, "completion": "",
    }  # fmt: skip


def test_the_table_compares_the_same_tasks(tmp_path, capsys):
    found = [row("fp16", 16.0, i, i < 6) for i in range(8)]
    found += [row("int2", 2.5, i, i < 1) for i in range(7)]
    found += [row("int4", 4.5, i, i < 6, 0) for i in range(4)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, found)))
    humaneval.main(["m", "--table", "--out", str(tmp_path)])
    _, _, *lines = capsys.readouterr().out.splitlines()
    shares = [humaneval._percent(wilson(*x)) for x in ((6, 8), (1, 7), (4, 4))]
    less = humaneval._percent(newcombe(1, 5, 0, 1))
    assert lines == [
        f"| 0 | `int4` | 4.50 | 4 | {shares[2]} |  |  | 15 | 75 |",
        f"| 4096 | `fp16` | 16.00 | 8 | {shares[0]} |  |  | 35 | 88 |",
        f"| 4096 | `int2` | 2.50 | 7 | {shares[1]} | {less} | 0.062 | 30 | 86 |",
    ]
    assert shares[0] == "75.0 [40.9, 92.9]"


def test_mcnemars_p_is_exact():
    assert [humaneval.mcnemar(*x) for x in ((0, 0), (5, 0), (1, 5), (3, 3))] == [
        1.0, 2 / 32, 2 * 7 / 64, 1.0,
    ]  # fmt: skip


def test_processes_share_the_presets(out, monkeypatch, capfd):
    given = ["m", "--out", str(out), "--jobs", "2"]
    monkeypatch.setattr(humaneval.sys, "executable", shutil.which("echo"))
    humaneval.main([*given, "--kv", "fp16,int4,naive-int4"])
    command = (
        f"-m experiments.papers.humaneval {' '.join(given)} --kv fp16,int4,naive-int4 --jobs 1"
    )
    said = {f"{command} --kv fp16,naive-int4", f"{command} --kv int4"}
    assert set(capfd.readouterr().out.splitlines()) == said  # later options win
    humaneval.main([*given, "--kv", "fill-3"])
    file = out / "calibration-m.safetensors"
    made = f"-m cuda_track.calibrate --model m -o {file} --dtype float32"
    assert capfd.readouterr().out.splitlines()[0] == made
    monkeypatch.setattr(humaneval.sys, "executable", shutil.which("false"))
    with pytest.raises(MachineError, match=r"^\[humaneval\] 2 processes failed;"):
        humaneval.main([*given, "--kv", "fp16,int4,naive-int4"])
    with pytest.raises(MachineError, match=r"^\[humaneval\] no calibration;"):
        humaneval.main([*given, "--kv", "fill-3"])


def test_slips_are_one_line(subtests, tmp_path):
    for options, message in [
        (["--kv", "int5"], r"\[--kv\] unknown preset; got 'int5'"),
        (["--contexts", "x"], r"\[--contexts\] not a number of tokens"),
        (["--batch", "0"], r"\[--batch\] must be at least 1; got 0"),
    ]:
        with subtests.test(options=options):
            with pytest.raises(UserError, match=message):
                humaneval.main(["m", "--out", str(tmp_path), *options])
    for data in b"no gzip", gzip.compress(b"no json"), gzip.compress(b"{}")[:12]:
        (tmp_path / humaneval.PROBLEMS).write_bytes(data)
        with subtests.test(data=data):
            with pytest.raises(UserError, match=r"\[humaneval\] no problems; got .*; remove it"):
                humaneval.problems(tmp_path)
