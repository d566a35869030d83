"""Calibrations on the hub: what is sent, what it may say, and how it is fetched. No network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.errors as hub_errors
import numpy as np
import pytest
from model_folders import response
from random_models import random_model

from mlxkv.calibrate import publish
from mlxkv.cli import main
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.calibration import artifact
from mlxkv.models import attach, detach, load
from mlxkv.models.calibration import measure
from mlxkv.models.calibration.fitting import FILE, given

REPO = "somebody/some-calibration"
TEXT = np.random.default_rng(0).integers(0, 64, 700).tolist()


@pytest.fixture(scope="module")
def made():
    return measure.calibrate(random_model("llama"), TEXT[:512], text="stories")


class Api:
    """Stands for HfApi: repositories are folders."""

    def __init__(self, root: Path):
        self.root, self.private, self.messages = root, {}, []

    def create_repo(self, repo, private, exist_ok):
        assert exist_ok
        self.private.setdefault(repo, bool(private))
        (self.root / repo).mkdir(parents=True, exist_ok=True)
        return f"https://huggingface.co/{repo}"

    def repo_info(self, repo):
        return SimpleNamespace(private=self.private[repo])

    def upload_file(self, path_or_fileobj, path_in_repo, repo_id, commit_message):
        data = path_or_fileobj
        data = data if isinstance(data, bytes) else Path(data).read_bytes()
        (self.root / repo_id / path_in_repo).write_bytes(data)
        self.messages.append(commit_message)

    def file_exists(self, repo, name):
        return (self.root / repo / name).exists()

    def hf_hub_download(self, repo, name):
        return str(self.root / repo / name)


@pytest.fixture
def api(tmp_path, monkeypatch):
    made = Api(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_something")
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path / "cache")
    return made


def test_the_command_publishes_and_fetches(api, model_folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "secret place" / "a.txt"
    text.parent.mkdir()
    text.write_text("Some words about nothing in particular. " * 40)
    args = ["calibrate", "--model", str(model_folder), "--text", str(text), "--push-to-hub", REPO]
    assert main([*args, "--private"]) == 0
    said = capsys.readouterr().err
    assert f"published in https://huggingface.co/{REPO}: {FILE}, " in said
    assert (
        f"model {model_folder.name}, 1600 tokens of a.txt" in said and "README.md: written" in said
    )
    there = api.root / REPO
    assert sorted(x.name for x in there.iterdir()) == ["README.md", FILE]
    assert api.private == {REPO: True}
    for file in there.iterdir():  # nothing says where things lie on this machine
        raw = file.read_bytes()
        assert b"secret place" not in raw and str(tmp_path).encode() not in raw
        assert str(model_folder.parent).encode() not in raw
    kept = artifact.read(artifact.kept_path(load(str(model_folder)).fingerprint))
    assert artifact.read(there).digest == kept.digest

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", api.hf_hub_download)
    chat = ["chat", "--model", str(model_folder), "--kv", "oscar-int2", "--calibration", REPO]
    assert main([*chat, "--prompt", "hi", "--max-tokens", "2"]) == 0
    assert "oscar-int2, " in capsys.readouterr().err


def test_the_card(made):
    card = publish.card(dataclasses.replace(made, model="qwen3-4b", text="a|b.txt"), REPO)
    assert "base_model: mlx-community/Qwen3-4B-4bit" in card
    for words in (made.digest, "512 tokens of a\\|b.txt", f"--calibration {REPO}", "attention"):
        assert words in card
    assert "base_model" not in publish.card(dataclasses.replace(made, model="mine"), REPO)
    assert "--kv fill-2.25 " in card
    layers = {
        name: dataclasses.replace(layer, keys=dataclasses.replace(layer.keys, mean=None))
        for name, layer in made.layers.items()
    }
    assert "--kv oscar-int2 " in publish.card(dataclasses.replace(made, layers=layers), REPO)


def test_names_without_folders(made, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    said = dataclasses.replace(made, model=str(mine), text=f"{tmp_path}/a.txt, b.txt")
    public = publish.public(said)
    assert (public.model, public.text) == ("mine", "a.txt, b.txt")
    assert public.digest == made.digest
    kept = dataclasses.replace(made, model="owner/name", text="corpus calibration + pydoc 3.11")
    assert publish.public(kept).header() == kept.header()


def test_our_card_is_written_again_and_others_stay(api, made, tmp_path, capsys):
    for _ in range(2):
        publish.publish(made, tmp_path, REPO, False)
        assert "README.md: written" in capsys.readouterr().err
    card = api.root / REPO / "README.md"
    card.write_text("# My model")
    publish.publish(made, tmp_path, REPO, False)
    assert "not ours, left as it is" in capsys.readouterr().err
    assert card.read_text() == "# My model"


def test_private_never_goes_to_a_public_repository(api, made, tmp_path):
    publish.publish(made, tmp_path, REPO, False)
    (api.root / REPO / FILE).unlink()
    with pytest.raises(UserError, match=r"\[--private\] this repository is public; got somebody"):
        publish.publish(made, tmp_path, REPO, True)
    assert not (api.root / REPO / FILE).exists()


def test_mistakes_cost_no_calibration(monkeypatch, capsys):
    monkeypatch.setattr("mlxkv.calibrate.run.load", lambda *a, **k: pytest.fail("loaded a model"))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    for args, message in (
        (["--push-to-hub", REPO], "[--push-to-hub] the hub needs a token that may write; got none"),
        (["--push-to-hub", "no owner"], "[--push-to-hub] not a name on the hub; got 'no owner'"),
        (["--private"], "[--private] nothing is published"),
    ):
        assert main(["calibrate", *args]) == 2
        said = capsys.readouterr().err
        assert said.startswith(message) and said.count("\n") == 1


@pytest.mark.parametrize(
    "error, kind, expected",
    [
        (hub_errors.OfflineModeIsEnabled("offline"), UserError, "the hub cannot be reached; got"),
        (hub_errors.HfHubHTTPError("403 no", response=response()), UserError, "refused (403 no)"),
        (
            hub_errors.RepositoryNotFoundError("404", response=response()),
            UserError,
            "your token may not write there",
        ),
        (OSError(28, "No space left"), MachineError, "the disk is full"),
        (ConnectionResetError("reset"), UserError, "uploading failed (reset)"),
    ],
)
def test_faults_of_an_upload(api, made, monkeypatch, error, kind, expected):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(api, "upload_file", fail, raising=False)
    with pytest.raises(kind) as caught:
        publish.publish(made, Path("kept.safetensors"), REPO, False)
    text = str(caught.value)
    assert text.startswith("[--push-to-hub] ") and expected in text and "\n" not in text
    assert REPO in text and (kind is MachineError or "kept.safetensors" in text)


def hub_folder(root: Path, repo: str) -> Path:
    """The one snapshot of `repo` in a cache folder of the hub."""
    name = "models--" + repo.replace("/", "--")
    commit = "0" * 40
    (root / name / "refs").mkdir(parents=True)
    (root / name / "refs" / "main").write_text(commit)
    folder = root / name / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def test_what_the_hub_cache_holds_needs_no_network(made, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    artifact.write(hub_folder(tmp_path, REPO) / FILE, made)
    assert given(f" {REPO}").digest == made.digest and given(made) is made
    model = random_model("llama")
    assert all(report.compressed for report in attach(model, "oscar-int2", calibration=REPO))
    detach(model)
    with pytest.raises(UserError, match=r"\[calibration\] the hub cannot be reached and this cal"):
        given("nobody/nothing")


def test_faults_of_a_fetch(monkeypatch, tmp_path):
    def fail(repo, name):
        raise hub_errors.EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError, match=rf"\[calibration\] {REPO} on the hub has no {FILE}"):
        given(REPO)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"folder/a.safetensors is not there"):
        given("folder/a.safetensors")  # a path, not a repository


def test_a_folder_on_this_machine_wins(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a: pytest.fail("went to the hub")
    )
    artifact.write(tmp_path / REPO / FILE, made)
    assert given(REPO).digest == made.digest
