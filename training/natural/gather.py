"""Read the sources: Debian packages (downloaded, unpacked, never installed) and git repositories.

A source's name is the package's, the repository's "owner/name", or "owner/name/folder" for a
repository whose top folders count as sources of their own.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import tomllib

KINDS = ("prose", "manual", "code", "dialogue")
SPLITS = ("calibration", "selection", "test", "haystack")
CHROME = ("*/colophon.xhtml", "*/imprint.xhtml", "*/titlepage.xhtml", "*/uncopyright.xhtml")
CHROME += ("*/halftitlepage*.xhtml", "*/loi.xhtml", "*/toc.xhtml", "*LICENSE*", "*/README.md")


@dataclass
class Source:
    """A named origin of documents; `files` are paths that its reader understands."""

    name: str
    kind: str
    licence: str
    place: Path
    files: list = field(default_factory=list)  # of (path, blob id or None)
    split: str = "train"
    after: str = ""  # a document begins behind this phrase, where it has it


def order(path: str) -> bytes:
    """Return a sort key that is random but the same on every machine."""
    return hashlib.blake2b(path.encode("utf-8", "replace"), digest_size=8).digest()


def wanted(path: str, entry: dict) -> bool:
    """Say whether the entry's patterns take the path."""
    out = (*entry.get("exclude", ()), *CHROME)
    return any(fnmatchcase(path, p) for p in entry["include"]) and not any(
        fnmatchcase(path, p) for p in out
    )


def _git(folder: Path, *args: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True).stdout


def repository(name: str, mirror: Path | None, cache: Path) -> Path:
    """Return the local copy of a repository: one below `mirror`, or a shallow clone in `cache`."""
    owner, short = name.split("/")
    for base in (mirror,) if mirror else ():
        for shape in (f"{owner}+{short}", f"{owner}/{short}", f"{owner}/{short}.git", short):
            for folder in (base / shape / "repo", base / shape):
                if (folder / "HEAD").exists() or (folder / ".git").exists():
                    return folder
    folder = cache / "git" / f"{owner}+{short}"
    if not folder.exists():
        url = f"https://github.com/{name}"
        subprocess.run(["git", "clone", "-q", "--bare", "--depth=1", url, folder], check=True)
    return folder


def package(name: str, cache: Path) -> Path:
    """Return the folder with the unpacked package, downloaded if it is not there."""
    folder = cache / "unpacked" / name
    if not folder.exists():
        debs = cache / "debs"
        debs.mkdir(parents=True, exist_ok=True)
        if not list(debs.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", name], cwd=debs, check=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg", "-x", next(debs.glob(f"{name}_*.deb")), folder], check=True)
    return folder


def _git_sources(entry: dict, place: Path) -> Iterator[Source]:
    by_name: dict[str, Source] = {}
    every = ("--batch-all-objects", "--unordered", "--batch-check=%(objectname)")
    here = set(_git(place, "cat-file", *every).split())
    for row in _git(place, "ls-tree", "-r", "-z", "HEAD").split(b"\x00"):
        meta, _, path = row.decode("utf-8", "replace").partition("\t")
        if not meta.startswith("100") or not wanted(path, entry):
            continue
        if meta.split()[2].encode() not in here:  # a partial copy: git would ask the network for it
            continue
        folder = path.split("/")[0] if entry.get("group") else ""
        name = f"{entry['name']}/{folder}".rstrip("/")
        kind = entry.get("kinds", {}).get(folder, entry["kind"])
        source = by_name.setdefault(name, Source(name, kind, entry["licence"], place))
        source.after = entry.get("after", "")
        source.files.append((path, meta.split()[2]))
    yield from by_name.values()


def sources(file: Path, mirror: Path | None, cache: Path) -> list[Source]:
    """Return every source of the list that can be had here, with its split; print those missing."""
    table = tomllib.loads(file.read_text("utf-8"))
    found: list[Source] = []
    for entry in table.get("git", ()):
        try:
            found += _git_sources(entry, repository(entry["name"], mirror, cache))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"missing: {entry['name']} ({error})")
    for entry in table.get("deb", ()):
        try:
            place = package(entry["name"], cache)
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            print(f"missing: {entry['name']} ({error})")
            continue
        paths = (str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
        files = [(p, None) for p in paths if not (place / p).is_symlink() and wanted(p, entry)]
        found.append(Source(entry["name"], entry["kind"], entry["licence"], place, files))
    held = {
        name: split
        for split, kinds in table.get("held", {}).items()
        for names in kinds.values()
        for name in names
    }
    left_out = set(table.get("left_out", {}).get("sources", ()))
    for source in found:
        source.split = held.get(source.name, "train")
        source.files.sort(key=lambda file: order(file[0]))
    missing = set(held) - {source.name for source in found}
    if missing:
        raise SystemExit(f"[corpus] held sources are not there; got none of {sorted(missing)}")
    return [source for source in found if source.files and source.name not in left_out]


def read(source: Source) -> Iterator[tuple[str, bytes]]:
    """Yield (path, bytes) of the source's files in its order."""
    if not source.files or source.files[0][1] is None:
        for path, _ in source.files:
            yield path, (source.place / path).read_bytes()
        return
    command = ["git", "-C", str(source.place), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as git:
        try:
            for path, blob in source.files:
                git.stdin.write(blob.encode() + b"\n")
                git.stdin.flush()
                size = int(git.stdout.readline().split()[2])
                yield path, git.stdout.read(size)
                git.stdout.read(1)
        finally:
            git.stdin.close()
            git.stdout.close()
            git.terminate()
