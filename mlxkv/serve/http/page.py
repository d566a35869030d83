"""The files of the chat page: HTML, CSS and native modules, as they are; there is no build step."""

from __future__ import annotations

from importlib.resources import files

MODULES = [
    "api",
    "chats",
    "dom",
    "files",
    "gauge",
    "main",
    "markdown",
    "settings",
    "sidebar",
    "store",
    "talk",
    "turns",
]
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "mjs": "text/javascript"}
VENDORED = ("vendor/marked.esm.js", "vendor/purify.es.mjs")
# What is served, and nothing else of the folder: path of the URL -> path in the folder.
PAGE = {
    "/": "index.html",
    **{
        f"/page/{name}": name
        for name in ("style.css", *(f"{one}.js" for one in MODULES), *VENDORED)
    },
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
    name = PAGE[path]
    data = files("mlxkv.serve.http").joinpath("page").joinpath(*name.split("/")).read_bytes()
    return data, KINDS[name.rpartition(".")[2]]
