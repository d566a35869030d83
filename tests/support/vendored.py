"""Fetches the page's libraries anew and compares them: `python tests/support/vendored.py` (needs npm, the
network). `vendored.json` names each package's version and the hash under which npm publishes it."""

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "mlxkv" / "serve" / "http" / "page" / "vendor"


def integrity(data: bytes) -> str:
    """The hash of a file as npm and browsers write it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


def recorded() -> list[dict]:
    return json.loads((FOLDER / "vendored.json").read_text(encoding="utf-8"))


def main() -> None:
    """Exits with a line if a published package or one of its files is not what is recorded here."""
    for package in recorded():
        name = f"{package['name']}@{package['version']}"
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)
            (archive,) = Path(folder).glob("*.tgz")
            if integrity(archive.read_bytes()) != package["integrity"]:
                sys.exit(f"{name}: the published archive has another hash")
            with tarfile.open(archive) as files:
                for ours, one in package["files"].items():
                    data = files.extractfile(f"package/{one['from']}").read()
                    if data != (FOLDER / ours).read_bytes():
                        sys.exit(f"{name}: {ours} is not {one['from']} of the package")
        print(f"{name}: as published")


if __name__ == "__main__":
    main()
