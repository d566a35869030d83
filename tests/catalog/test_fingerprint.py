"""Fingerprints: every tensor counts, wherever it lies: files name the model by them."""

# ruff: noqa: F401, F811 (the fixtures `saved` and `folder` are imported)
import json
import shutil

import numpy as np
from random_models import WEIGHTS, folder, saved
from safetensors.numpy import load_file, save_file
from small_models import SOURCE, TINY

from mlxkv.catalog.folder import INDEX, PIECE, PIECES, _pieces, check_folder, fingerprint
from mlxkv.formats.calibration import artifact


def of(path) -> str:
    return fingerprint(check_folder(path))


def test_every_tensor_counts(folder):
    first, weights = of(folder), load_file(folder / WEIGHTS)
    seen = {first}
    for name, array in weights.items():
        # One bit in the middle of a tensor of 4 KiB or less: all of it is read.
        changed = array.copy()
        changed.reshape(-1).view(np.uint8)[changed.nbytes // 2] ^= 1
        save_file({**weights, name: changed}, folder / WEIGHTS, {"format": "mlx"})
        seen.add(of(folder))
    assert len(seen) == len(weights) + 1


def test_configuration_names_types_and_shapes_count(folder):
    """Of the same bytes of tensors."""
    seen, weights = {of(folder)}, load_file(folder / WEIGHTS)
    name, array = next((n, x) for n, x in sorted(weights.items()) if x.ndim == 2)
    for changed in (
        {f"{name}_": array},
        {name: array.view(np.int16 if array.itemsize == 2 else np.int32)},
        {name: array.reshape(-1, 2)},
    ):
        rest = {n: x for n, x in weights.items() if n != name}
        save_file(rest | changed, folder / WEIGHTS, {"format": "mlx"})
        seen.add(of(folder))
    save_file(weights, folder / WEIGHTS, {"format": "mlx"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 12345.0}))
    seen.add(of(folder))
    assert len(seen) == 5


def test_a_large_tensor_that_differs_in_a_share_of_its_bytes(tmp_path, saved):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / WEIGHTS)
    weights["large"] = np.zeros(1 << 21, np.uint8)
    save_file(weights, tmp_path / WEIGHTS)
    first = of(tmp_path)
    weights["large"][1 << 20 : (1 << 20) + (1 << 18)] = 1  # an eighth of it, in the middle
    save_file(weights, tmp_path / WEIGHTS)
    assert first != of(tmp_path)


def test_copies_links_and_shards_are_the_same_model(folder, tmp_path_factory):
    first = of(folder)
    hub = tmp_path_factory.mktemp(
        "hub"
    )  # a snapshot of links into blobs, as the hub's cache has it
    (hub / "blobs").mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, hub / "blobs" / str(i))
        (hub / file.name).symlink_to(f"blobs/{i}")
    assert of(hub) == first
    weights = sorted(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    table = {}
    for i in range(2):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        save_file(dict(weights[i::2]), folder / name, {"format": "mlx"})
        table |= dict.fromkeys(dict(weights[i::2]), name)
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))
    assert of(folder) == first


def test_the_tokenizer_counts_whole(folder):
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    words = data["model"]["vocab"]
    words |= {f"word{i}": 1000 + i for i in range(20_000)}
    seen = set()
    for last in (5_000, 5_001):
        words["middle"] = 1000 + last
        words["word5000"], words["word5001"] = 6000, 6001
        file.write_text(json.dumps(data))
        seen.add(of(folder))
    assert len(seen) == 2


def test_files_name_a_model(tmp_path, monkeypatch):
    here = of(SOURCE)
    monkeypatch.setattr(artifact.console, "cache_dir", lambda: tmp_path)
    assert artifact.find(here, None) is None
    artifact.write_calibration(artifact.kept_path(here), artifact.read_calibration(TINY))
    assert artifact.find(here, None).path.stem == here


def test_pieces_are_spread_and_bounded():
    assert _pieces(10, 20, 16) == [(10, 10)]
    assert _pieces(0, 1 << 30, 1) == [((1 << 29) - PIECE // 2, PIECE)]
    spread = _pieces(100, 100 + (1 << 20), 16)
    assert spread[0] == (100, PIECE) and sum(spread[-1]) == 100 + (1 << 20)
    gaps = np.diff([start for start, _ in spread])
    assert len(spread) == 16 and gaps.min() >= PIECE and gaps.max() - gaps.min() <= 1
    assert PIECES * PIECE == 64 << 20
