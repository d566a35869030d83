"""The libraries of the page are those that were published, and are in what is installed."""

import base64
import re
import subprocess
from pathlib import Path

import pytest
import vendored

from mlxkv.serve.http.app import PAGE as FOLDER

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("package", vendored.recorded(), ids=lambda one: one["name"])
def test_a_library_is_what_was_published(package):
    """`python tests/support/vendored.py` compares the records with npm's."""
    for name, one in package["files"].items():
        data = (vendored.FOLDER / name).read_bytes()
        assert vendored.integrity(data) == one["integrity"], name
    assert len(base64.b64decode(package["integrity"].removeprefix("sha512-"))) == 64
    script, licence = (
        next(n for n in package["files"] if n.endswith(end)) for end in ("js", "LICENSE")
    )
    head = (vendored.FOLDER / script).read_text(encoding="utf-8")[:300]
    assert package["version"] in head or not head.startswith("/*")  # some files have no banner
    assert package["licence"].split()[0].split("-")[0] in (vendored.FOLDER / licence).read_text()


def test_every_file_is_recorded():
    recorded = {name for one in vendored.recorded() for name in one["files"]}
    kept = {p.relative_to(vendored.FOLDER).as_posix() for p in vendored.FOLDER.rglob("*.*")}
    assert kept == recorded | {"vendored.json"}


def test_modules_import_what_is_served():
    for path in FOLDER.glob("*.js"):
        for target in re.findall(r'from "\./([^"]+)"', path.read_text(encoding="utf-8")):
            assert (FOLDER / target).is_file(), (path.name, target)


def test_nothing_of_the_page_is_left_out_of_a_wheel():
    """hatchling takes what git does not ignore of the packages that pyproject.toml names."""
    if not (ROOT / ".git").exists():
        pytest.skip("not in a clone")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'packages = ["mlxkv", "cuda_track"]' in project
    paths = [str(path) for path in FOLDER.rglob("*") if path.is_file()]
    asked = ["git", "check-ignore", "--no-index", *paths]
    assert subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout == ""
