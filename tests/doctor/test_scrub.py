"""Texts for an issue without names and paths."""

import platform
import time

from experiments.evidence.pretrained import public_name
from mlxkv.doctor.share import clean


def test_paths_with_spaces_and_names_in_capitals(subtests, monkeypatch, tmp_path):
    for text, shared in [
        ("/Volumes/Acme Corp/data: error", "PATH"),
        ("in '/Users/John Smith/proj/foo.h' and '/opt/key'", "in 'PATH"),
        ("/Users/john/Library/My Secret Folder/x.metal:3:1: error", "PATH:3:1: error"),
        ("/users/john/x y.metal:3\n/HOME/Jo Li/z\nrest 1/2", "PATH:3\nPATH\nrest 1/2"),
        ("-I/Users/Jo Li/include", "-IPATH"),
        ("file:///Users/Jo Li/z: no", "file:PATH"),
        ("~/My Secret Folder/x.metal:3: error", "PATH:3: error"),
        ("(../My Secret Folder/x.metal:3)", "(PATH:3)"),
        ("@HOME@/My Secret Folder/x.metal:3: error", "PATH:3: error"),
        ("ADA.Lovelace at Analytical and ANALYTICAL.LOCAL", "USER at HOST and HOST"),
        ("couldn't build 'x' at 4/8 of 2 / 3 GB/s", "couldn't build 'x' at 4/8 of 2 / 3 GB/s"),
    ]:
        with subtests.test(text=text, shared=shared):
            home = str(tmp_path / "Ada Love")
            monkeypatch.setenv("HOME", home)
            monkeypatch.setenv("LOGNAME", "ada.lovelace")
            monkeypatch.setattr(platform, "node", lambda: "analytical.local")
            assert clean(text.replace("@HOME@", home)) == shared
            monkeypatch.setenv("HOME", "/home/ada")
            if "@HOME@" not in text:
                assert clean(text) == shared


def test_long_texts_are_cleaned_in_time():
    begun = time.process_time()  # of this process alone: others may be busy
    for part in ("/a", "/Users", "'/", "x", "/Users/a ", "~/", "\u201c/", "'/x'y", "'/x "):
        clean(part * 20_000)
    assert time.process_time() - begun < 5


def test_public_names_of_models(subtests):
    for name, public in [
        ("smollm2", "smollm2"),
        ("mlx-community/Qwen3-4B-4bit", "mlx-community/Qwen3-4B-4bit"),
        ("/Users/ada/models/gone", "gone"),
        ("~/models/gone", "gone"),
        ("../gone", "gone"),
    ]:
        with subtests.test(name=name, public=public):
            assert public_name(name) == public


def test_a_relative_folder_is_reduced_too(tmp_path, monkeypatch):
    (tmp_path / "private" / "model-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("private/model-1") == "model-1"
