"""Files that somebody else wrote: what is no regular file, too large, too deep or not finite is refused."""

import json
import os
import socket
import struct
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxkv import untrusted
from mlxkv.untrusted import Unsound


def packed(head, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file of any header."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_sound_json(subtests):
    for text, expected in [
        ('{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ("1e30", 1e30),
        ("1000000000000000019884624838656", 1000000000000000019884624838656),  # of real tokenizers
        ("[" * 64 + "]" * 64, None),
        ("{}", {}),
    ]:
        with subtests.test(text=text, expected=expected):
            found = untrusted.parse(text)
            assert expected is None or found == expected
            assert untrusted.parse(text.encode()) == found


def test_unsound_json(subtests):
    for text, what in [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        (b"\xff\xfe{", "not UTF-8"),
        ("NaN", "NaN"),
        ('{"a": Infinity}', "Infinity"),
        ("[1e999]", "beyond all bounds"),
        ("[-1e999]", "beyond all bounds"),
        ("9" * 5000, "too many digits"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ("[" * 100_000, "nested deeper than 64"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested deeper than 64"),
        ("[" * 5_000_000, "nested deeper than 64"),
    ]:
        with subtests.test(text=text, what=what):
            with pytest.raises(Unsound, match=what):
                untrusted.parse(text)


def test_infinity_by_name_only_where_it_is_asked_for():
    assert untrusted.parse('{"limit": [0.0, Infinity]}', infinity=True)["limit"][1] == float("inf")
    for text in ("1e999", "NaN"):
        with pytest.raises(Unsound):
            untrusted.parse(text, infinity=True)


def test_a_deep_text_in_a_thread():
    found = []

    def run():
        try:
            untrusted.parse("[" * 1_000_000)
        except Unsound as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["is nested deeper than 64"]


def odd_files(folder) -> dict:
    """What may stand in place of a file."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "to pipe").symlink_to(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(os.path.relpath(folder / "socket"))
    return {
        "folder": "is a folder, not a file",
        "pipe": "is a named pipe, not a file",
        "to pipe": "is a named pipe, not a file",
        "loop": "Too many levels",
        "device": "is a device, not a file",
        "socket": "is a socket, not a file",
        "a" * 300: "name too long",
        "a\0b": "no name that a file can have",
    }


def test_only_regular_files_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    start = time.process_time()  # reading /dev/zero would take it
    for name, what in odd_files(tmp_path).items():
        for read in (lambda path: untrusted.read_tensors(path, 10), untrusted.safetensors):
            with pytest.raises(Unsound, match=f"(?i){what}"):
                read(tmp_path / name)
    assert time.process_time() - start < 2
    with pytest.raises(FileNotFoundError):
        untrusted.read_tensors(tmp_path / "none", 10)


def test_links_are_followed_where_that_is_asked_for(tmp_path):
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("file")
    assert untrusted.read_json(tmp_path / "link", 2) == {}
    with pytest.raises(Unsound, match="is a link"):
        untrusted.read_json(tmp_path / "link", 2, follow=False)
    (tmp_path / "dangling").symlink_to("none")
    with pytest.raises(FileNotFoundError):
        untrusted.read_tensors(tmp_path / "dangling", 2)


def test_bytes_are_bounded(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert untrusted.read_tensors(tmp_path / "file", 5) == b"12345"
    with pytest.raises(Unsound, match="larger than 4 bytes"):
        untrusted.read_tensors(tmp_path / "file", 4)


def test_whole_numbers(subtests):
    for value in [True, 1.0, "3", None, -1, 11, 1 << 70, [3]]:
        with subtests.test(value=value):
            assert untrusted.whole(3, "layers", 0, 10) == 3
            with pytest.raises(Unsound, match="has no layers from 0 to 10; got "):
                untrusted.whole(value, "layers", 0, 10)


def test_headers_of_safetensors(tmp_path):
    file = tmp_path / "x.safetensors"
    arrays = {"a": np.ones((3, 5), np.float16), "b": np.ones((0,)), "c": np.ones((), np.uint8)}
    save_file(arrays, file, {"format": "mlx"})
    found = untrusted.safetensors(file)
    assert found.metadata == {"format": "mlx"}
    assert {name: one.shape for name, one in found.tensors.items()} == {
        "a": (3, 5),
        "b": (0,),
        "c": (),
    }
    assert found.tensors["a"].dtype == "F16" and found.size == file.stat().st_size
    data = file.read_bytes()
    for name, array in arrays.items():
        first, last = found.tensors[name].span
        assert data[first:last] == array.tobytes()


def test_unsound_safetensors(subtests, tmp_path):
    for data, what in [
        (b"", "no room for its header in 0 bytes"),
        (b"\xff" * 100, "no room for its header"),
        (packed({}, length=1 << 62), "no room for its header"),
        (packed(b"{{{{"), "header that is not valid JSON"),
        (packed([]), "header that is not valid"),
        (packed(b"[" * 200_000), "nested deeper"),
        (packed({"a": entry()}), "promises"),
        (packed({"a": entry()}, b"1234"), "promises"),
        (packed({"a": entry()}, b"123456789"), "promises"),
        (packed({"a": entry(shape=[3])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(shape=[-1, -2])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(shape=[True, 2])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(shape=[1 << 40, 1 << 40])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(shape=[1] * 99999)}, b"12345678"), "do not fit together"),
        (packed({"a": entry(dtype="\x1b[31m")}, b"12345678"), "do not fit together"),
        (packed({"a": entry(offsets=["0", "8"])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(offsets=[8, 0])}, b"12345678"), "do not fit together"),
        (packed({"a": entry(offsets=[0, 8, 9])}, b"12345678"), "do not fit together"),
        (packed({"a": 3}), "do not fit together"),
        (packed({"a": entry(), "b": entry()}, b"12345678"), "overlap"),
        (packed({"a": entry(offsets=[8, 16])}, b"1234567812345678"), "overlap"),
        (packed({"__metadata__": [1]}), "no texts by name"),
        (packed({"__metadata__": {"a": 1}}), "no texts by name"),
        (packed({"__metadata__": {"a": "b"}, "c": entry(offsets=[0, 1e999])}), "Infinity"),
    ]:
        with subtests.test(data=data, what=what):
            file = tmp_path / "x.safetensors"
            file.write_bytes(data)
            with pytest.raises(Unsound, match=what):
                untrusted.safetensors(file)


def test_headers_are_bounded(tmp_path):
    file = tmp_path / "x.safetensors"
    with file.open("wb") as out:  # a sparse file that promises a header of a gigabyte
        out.write(struct.pack("<Q", 1 << 30))
        out.truncate(2 << 30)
    with pytest.raises(Unsound, match="header larger than"):
        untrusted.safetensors(file)
