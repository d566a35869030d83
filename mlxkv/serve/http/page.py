"""The files of the chat page: HTML, CSS and native modules, as they are; there is no build step."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("page")
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
}
# What is served, and nothing else of the folder: path of the URL -> path in the folder.
PAGE = {"/": "index.html"} | {
    f"/page/{name}": name
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in KINDS and (name := path.relative_to(FOLDER).as_posix()) != "index.html"
}
# A model's text is never script: no inline code, no markup from text but through DOMPurify's policy,
# nothing fetched from elsewhere (an image in a reply would tell its server what was said).
POLICY = (
    "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}


def read(path: str) -> tuple[bytes, str]:
    """The file at a path of `PAGE`, and its type."""
    file = FOLDER / PAGE[path]
    return file.read_bytes(), KINDS[file.suffix]
