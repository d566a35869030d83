"""Models that LM Studio and ollama keep on this machine, and files that are no models."""

import json
from pathlib import Path

import pytest
from gguf_files import tensors, write_gguf

from mlxkv.catalog import installed
from mlxkv.catalog.aliases import is_model, resolve
from mlxkv.catalog.folder import check_folder
from mlxkv.doctor.listing import models, why_not_run
from mlxkv.errors import UserError

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def file(tmp_path):
    """A GGUF file of random weights."""
    path = tmp_path / "made" / "tiny-Q4_0.gguf"
    path.parent.mkdir()
    write_gguf(path, "qwen2", tensors("qwen2", ["Q4_0"]))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path / "home"


def placed(file: Path, folder: Path, name: str = "m.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(file)
    return folder / name


def pulled(file: Path, home: Path, name: str, tag: str, media: str = installed.MODEL) -> None:
    """What ollama writes for a model."""
    root = home / ".ollama" / "models"
    manifest = root / "manifests" / "registry.ollama.ai" / name / tag
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64}]
    layers.append({"mediaType": media, "digest": DIGEST, "size": 1})
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    placed(file, root / "blobs", DIGEST.replace(":", "-"))


def test_a_folder_with_one_gguf_file_is_that_file(file, tmp_path):
    placed(file, tmp_path / "owner" / "name", "mmproj-x.gguf")
    made = placed(file, tmp_path / "owner" / "name")
    assert resolve(str(made.parent)).folder == made
    assert check_folder(resolve(str(made.parent)).folder).is_gguf


def test_a_folder_that_could_mean_several_models_lists_them(file, tmp_path):
    placed(file, tmp_path / "x", "a-Q4_K_M.gguf")
    placed(file, tmp_path / "x", "a-Q8_0.gguf")
    with pytest.raises(UserError, match=r"several models.*a-Q4_K_M.gguf, a-Q8_0.gguf; choose one"):
        resolve(str(tmp_path / "x"))
    placed(file, tmp_path / "up" / "owner" / "one")
    placed(file, tmp_path / "up" / "owner" / "two")
    with pytest.raises(UserError, match=r"folders of models.*owner/one, owner/two; choose one"):
        resolve(str(tmp_path / "up"))


def test_parts_of_one_model_say_how_to_join_them(file, tmp_path):
    for i in (1, 2):
        placed(file, tmp_path / "x", f"a-0000{i}-of-00002.gguf")
    with pytest.raises(UserError, match="several files is not read.*gguf-split --merge"):
        resolve(str(tmp_path / "x"))


def test_lm_studio_by_its_name(file, home):
    made = placed(file, home / ".lmstudio" / "models" / "owner" / "some-GGUF")
    assert resolve("owner/some-GGUF").folder == made
    assert resolve("owner/another").repo == "owner/another"  # of the hub
    assert is_model("owner/some-GGUF") and not is_model("owner/another")


@pytest.mark.parametrize("shown", ["library/qwen3", "someone/qwen3"])
def test_ollama_by_the_name_that_it_shows(shown, file, home):
    pulled(file, home, shown, "4b")
    name = shown.removeprefix("library/") + ":4b"
    blob = home / ".ollama" / "models" / "blobs" / DIGEST.replace(":", "-")
    for asked in (name, f"ollama/{name}"):
        assert resolve(asked).folder == blob
    assert [one.name for one in installed.installed()] == [f"ollama/{name}"]
    with pytest.raises(
        UserError, match=f"no such model here; got ollama/none; choose from ollama/{name}"
    ):
        resolve("ollama/none")


def test_latest_needs_no_tag_and_the_folder_may_be_another(file, tmp_path, home, monkeypatch):
    pulled(file, tmp_path / "other", "library/llama3.2", "latest")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other" / ".ollama" / "models"))
    assert resolve("ollama/llama3.2").folder.name == DIGEST.replace(":", "-")


@pytest.mark.parametrize("name", ["../../etc:passwd", "a/../b:c", "x:../y", "ollama/..", "a:b:c"])
def test_names_that_leave_ollamas_folder_are_no_models(name, home):
    assert installed.of_ollama(name) is None


def test_damaged_manifests(file, home):
    pulled(file, home, "library/a", "1b", media="application/else")
    with pytest.raises(
        UserError, match="list of this model's files is damaged; got a:1b; run ollama pull a:1b"
    ):
        resolve("a:1b")
    assert installed.installed() == []
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/a/1b"
    manifest.write_text(
        json.dumps({"layers": [{"mediaType": installed.MODEL, "digest": "sha256:../../x"}]})
    )
    with pytest.raises(UserError, match="is damaged"):
        resolve("a:1b")


WRONG = {
    b"": "is empty; fetch it again",
    b"version https://git-lfs.github.com/spec\noid sha256:00\nsize 807694464\n": "LFS pointer.*807,694,464 bytes",
    b"<!DOCTYPE html><html>": "is a web page",
    b"PK\x03\x04....": "is a zip archive; unpack it",
    b"\0" * 64: "does not begin as GGUF files do",
}


@pytest.mark.parametrize("head", WRONG)
def test_what_is_saved_as_a_model_by_mistake_says_what_it_is(head, tmp_path):
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(UserError, match=WRONG[head]):
        resolve(str(tmp_path / "x.gguf"))
    with pytest.raises(UserError, match=r"no such file; got .*none\.gguf"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_file_cut_short_says_what_it_should_have(file, tmp_path):
    whole = file.stat().st_size
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[: whole * 2 // 3])
    with pytest.raises(
        UserError, match=f"its header promises {whole} bytes, it has {whole * 2 // 3}"
    ):
        check_folder(tmp_path / "cut.gguf")


def test_models_says_what_other_programs_have_and_what_does_not_run(file, home, tmp_path, capsys):
    placed(file, home / ".lmstudio" / "models" / "owner" / "some-GGUF")
    write_gguf(tmp_path / "phi.gguf", "qwen2", tensors("qwen2", ["Q4_0"]))
    data = (tmp_path / "phi.gguf").read_bytes().replace(b"qwen2", b"phi_2")
    (tmp_path / "phi.gguf").write_bytes(data)
    pulled(tmp_path / "phi.gguf", home, "library/phi", "2b")
    assert why_not_run(file) is None
    models(as_json=True)
    others = {x["model"]: x for x in json.loads(capsys.readouterr().out)["others"]}
    assert others["owner/some-GGUF"]["bytes"] == file.stat().st_size
    assert others["owner/some-GGUF"]["why_not"] is None
    assert others["ollama/phi:2b"]["why_not"] == "GGUF files of phi_2 are not read"
    models(as_json=False)
    shown = capsys.readouterr().out
    assert "owner/some-GGUF\n             of LM Studio\n" in shown
    assert "of ollama; does not run: GGUF files of phi_2 are not read\n" in shown


def test_models_of_the_hub_and_folders_say_whether_mlx_lm_has_their_family(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, kind in (("a--talks", "mistral"), ("b--hears", "whisper"), ("c--part", "llama")):
        made = tmp_path / f"models--{name}" / "snapshots" / "1"
        made.mkdir(parents=True)
        (made.parents[1] / "refs").mkdir()
        (made.parents[1] / "refs" / "main").write_text("1")
        (made / "config.json").write_text(json.dumps({"model_type": kind}))
        if name != "c--part":
            (made / "model.safetensors").write_bytes(b"x")
    models(as_json=True)
    found = {x["model"]: x["why_not"] for x in json.loads(capsys.readouterr().out)["cached"]}
    assert found == {
        "a/talks": None,
        "b/hears": "mlx-lm has no whisper",
        "c/part": "no whole model is there",
    }
    models(as_json=False)
    shown = capsys.readouterr().out
    assert (
        "b/hears\n             of the hub's cache; does not run: mlx-lm has no whisper\n" in shown
    )
    assert max(map(len, shown.splitlines())) <= 80
