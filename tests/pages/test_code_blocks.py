"""The code blocks of README.md and docs/guide run. One with `<!-- not run: why -->` on the line above it needs
what is not here (a Mac, a model of the hub, a network, a minute): its commands and options must exist, its
Python must compile, and what it imports must be there. Output that is shown must be what is printed."""

import ast
import importlib
import os
import re
import shlex
from importlib.util import find_spec

import pytest
import repo_pages
import typer.main
from gguf_files import tensors, write_gguf

from experiments.pages import outputs
from mlxkv.catalog.aliases import FOLDER, PACKAGES
from mlxkv.cli import app

ROOT = repo_pages.ROOT
BLOCKS = [block for page in outputs.pages() for block in repo_pages.blocks(page)]
CODE = [block for block in BLOCKS if block.language in ("bash", "python")]
# Not installed here: what a page only imports, where its block is not run.
COMMAND = typer.main.get_command(app)
ELSEWHERE = {"openai", "transformers", "torch"}
TIMES = re.compile(r"\d[\d.,]* ?(?:s\b|ms\b|tokens/s)")


def test_every_block_says_its_language():
    """```text is output, ```json and ```ini are files."""
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text", "json", "ini"), block.name
    assert any(not block.mark for block in CODE)


def test_commands_and_options_exist(subtests):
    """And a chat in a block that runs has a limit: a small model may fill its context, on one machine or another."""
    for block in CODE:
        if block.language == "bash":
            with subtests.test(block=block.name):
                for words in commands(block.text):
                    check(words)
                    chats = words[:2] == ["mlxkv", "chat"]
                    assert block.mark or not chats or "--max-tokens" in words, words


def test_python_compiles_and_its_names_exist(subtests):
    for block in CODE:
        if block.language == "python":
            with subtests.test(block=block.name):
                for node in ast.walk(ast.parse(block.text, block.name)):
                    if isinstance(node, ast.ImportFrom) and available(node.module):
                        module = importlib.import_module(node.module)
                        for alias in node.names:
                            whole = f"{node.module}.{alias.name}"
                            assert hasattr(module, alias.name) or find_spec(whole), whole
                    if isinstance(node, ast.Import):
                        assert all(available(alias.name) for alias in node.names)


def test_commands_in_lines_exist(subtests):
    for page in outputs.pages():
        with subtests.test(page=page):
            text = repo_pages.FENCE.sub("", page.read_text(encoding="utf-8"))
            for line in re.findall(r"`(mlxkv [^`]+)`", text):
                for words in commands(" ".join(line.split())):
                    check(words)


def available(module: str) -> bool:
    top = module.partition(".")[0]
    return find_spec(top) is not None or top not in ELSEWHERE


@pytest.fixture(scope="module")
def embedded_model(tmp_path_factory):
    """The folder of a random model that has SmolLM2's name and size, but two layers: what commands print of a cache or
    a calibration does not depend on the weights, and a block takes a fifth of the time."""
    package, folder = PACKAGES["smollm2"], tmp_path_factory.mktemp("models")
    write_gguf(folder / package.file, "llama", tensors("llama", ["Q4_1"]))
    os.truncate(folder / package.file, package.size)
    return folder


@pytest.mark.parametrize("page", outputs.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, embedded_model, monkeypatch):
    """In one folder a page, one after the other, so that a block may read what one above it has written."""
    monkeypatch.setenv(FOLDER, str(embedded_model))
    blocks = repo_pages.blocks(page)
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        if block.language not in ("bash", "python") or block.mark:
            continue
        if block.language == "python":
            (tmp_path / "block.py").write_text(block.text)
            said = outputs.output("python block.py", tmp_path)
        else:
            said = outputs.output(block.text, tmp_path)
        if after is not None and after.language == "text":
            assert steady(said) == steady(after.text), f"{block.name}: make pictures takes it anew"


def steady(text: str) -> str:
    return TIMES.sub("TIME", text).strip()


def commands(text: str):
    """The words of each command that we can judge: mlxkv, python -m, make; pipes and chains taken apart."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                yield from judged(words)
                words = []
            else:
                words.append(word)


def judged(words: list[str]):
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "--" in words and words[0] != "mlxkv":  # mlx.launch --hostfile HOSTS -- mlxkv serve
        words = words[words.index("--") + 1 :]
    if words and words[0].removeprefix(".venv/bin/") in ("mlxkv", "make", "python"):
        yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def check(words: list[str]) -> None:
    if words[0] == "make":
        rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        targets = " ".join(rules).split()
        assert all(word in targets for word in words[1:] if "=" not in word), words
    elif words[0] == "python":
        if words[1:2] == ["-m"]:
            assert find_spec(words[2]) is not None, words
    else:
        command = COMMAND
        rest = words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        known = {"-h", "--help"}
        for param in command.params:
            known |= {*param.opts, *param.secondary_opts}
        own = rest[: rest.index("--")] if "--" in rest else rest
        for word in own:
            if word.startswith("-") and not re.fullmatch(r"-[\d.]*", word):
                assert word.partition("=")[0] in known, (words, word)
        assert own or not getattr(command, "commands", {}) or command.name in ("bench", "models"), (
            words
        )
        if words[1:] and words[1] not in ("-V", "--version", "-h", "--help"):
            assert words[1] in COMMAND.commands, words


def test_what_does_not_exist_is_found(subtests):
    for line in [
        "mlxkv chat --modle tiny",
        "cat x | mlxkv chatt",
        "make chatt",
        "python -m experiments.nothing",
        "mlxkv",
    ]:
        with subtests.test(line=line):
            with pytest.raises((AssertionError, ModuleNotFoundError)):
                for words in commands(line):
                    check(words)
