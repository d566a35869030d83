"""Texts for an issue without names and paths."""

import platform
import time

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
