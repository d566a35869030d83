"""`mlxkv launch`: find or start a server, and run a coding agent on it. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from typer import Argument, Context, Exit, Option

from mlxkv import untrusted
from mlxkv.catalog.aliases import complete_model, resolve
from mlxkv.catalog.hub import config_of
from mlxkv.catalog.shapes import context_limit
from mlxkv.console import note, on, say_whole, working
from mlxkv.errors import MachineError, UserError
from mlxkv.formats.names import complete_kv
from mlxkv.options import KEY, PARENT, PORT

USUAL = f"http://127.0.0.1:{PORT}"
LONGEST = 1 << 15  # tokens at most, in a dry run without a server to ask
LEAST = 32_000  # tokens that the prompts, tools and files of these programs need
MOST_OUTPUT = 8192  # longest reply in tokens; memory is reserved for it
ANSWER_SECONDS = 5.0
END_SECONDS = 30.0  # the server saves its sessions meanwhile


@dataclass(frozen=True)
class Endpoint:
    """The server for a program. longest: tokens of a sequence, its reply included. tools: whether the model's chat
    template has them."""

    url: str
    key: str
    model: str
    longest: int
    tools: bool = True

    @property
    def output(self) -> int:
        """Return the longest reply in tokens: a quarter of what fits, to leave room for the conversation."""
        return max(1, min(MOST_OUTPUT, self.longest // 4))


# -- the programs: each function returns the environment and the arguments with which one finds its model


def claude(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    """Configure Claude Code (code.claude.com/docs/en/env-vars and .../llm-gateway)."""
    model = endpoint.model
    env = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        "ANTHROPIC_MODEL": model,
        **{f"ANTHROPIC_DEFAULT_{name}_MODEL": model for name in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.output),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(endpoint.longest),
        # Its other services are Anthropic's.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A first line that differs in each request would defeat the prompt cache.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return env, []


def opencode(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    """Configure OpenCode (opencode.ai/docs/config and .../providers)."""
    limit = {"context": endpoint.longest, "output": endpoint.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxkv",
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": {endpoint.model: {"name": endpoint.model, "limit": limit, "tool_call": True}},
    }
    name = f"mlxkv/{endpoint.model}"
    config = {"provider": {"mlxkv": provider}, "model": name, "small_model": name}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY: endpoint.key}, []


def codex(endpoint: Endpoint) -> tuple[dict[str, str], list[str]]:
    """Configure Codex (developers.openai.com/codex/config-advanced). Values are TOML."""
    provider = "model_providers.mlxkv"
    settings = {
        "model": endpoint.model,
        "model_provider": "mlxkv",
        f"{provider}.name": "mlxkv",
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.env_key": KEY,
        f"{provider}.wire_api": "responses",
        "model_context_window": endpoint.longest,
        "web_search": "disabled",  # a tool hosted by OpenAI
    }
    pairs = [
        ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
        for name, value in settings.items()
    ]
    return {KEY: endpoint.key}, [word for pair in pairs for word in pair]


@dataclass(frozen=True)
class Tool:
    """A program, its npm package, and its configuration. unset: variables that would point it to another server."""

    program: str
    package: str
    start: Callable[[Endpoint], tuple[dict[str, str], list[str]]]
    unset: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        return f"npm install -g {self.package}"


# A key takes precedence over the token.
ELSEWHERE = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
TOOLS = {
    "claude": Tool("claude", "@anthropic-ai/claude-code", claude, ELSEWHERE),
    "opencode": Tool("opencode", "opencode-ai", opencode),
    "codex": Tool("codex", "@openai/codex", codex),
}


# -- the command


def launch(
    ctx: Context,
    tool: Annotated[str, Argument(help=f"{', '.join(TOOLS)}; what follows -- is for it.")],
    url: Annotated[
        str | None,
        Option(
            help=f"A running server. Default: the one at port {PORT}, or a new one.",
            rich_help_panel="Server",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        Option(help="Key of that server. Or set MLXKV_API_KEY.", rich_help_panel="Server"),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help="Start a server with this model: an alias, a hub name, a folder or a GGUF file.",
            autocompletion=complete_model,
            rich_help_panel="Model",
        ),
    ] = None,
    kv: Annotated[
        str | None,
        Option(
            help="Cache preset of that server. Default: int4.",
            autocompletion=complete_kv,
            rich_help_panel="Cache",
        ),
    ] = None,
    serve: Annotated[
        str,
        Option(help='More options of mlxkv serve: "--kv-memory 8GB".', rich_help_panel="Server"),
    ] = "",
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run", help="Only print what would be set and started.", rich_help_panel="Server"
        ),
    ] = False,
) -> None:
    """Start a coding agent (claude, opencode, codex) on a model of this machine: its environment is set, and
    a server runs as long as it does. mlxkv launch claude -m qwen3-4b -- --continue"""
    if tool not in TOOLS:
        raise UserError(f"[launch] no such program; got {tool!r}; choose from {', '.join(TOOLS)}")
    try:
        more = shlex.split(serve)
    except ValueError as error:
        raise UserError(f"[--serve] {error}; got {serve[:60]!r}; close its quotes") from None
    options = [*(("--model", model) if model else ()), *(("--kv", kv) if kv else ()), *more]
    if url is not None and options:
        raise UserError("[--url] its server has a model already; got --model, --kv or --serve, too")
    if options and not model:
        raise UserError(
            "[--model] needed to start a server; got --kv or --serve alone; see mlxkv models"
        )
    if model:
        resolve(model)
    raise Exit(_run(TOOLS[tool], url, api_key, options, list(ctx.args), dry_run))


def _run(
    tool: Tool, url: str | None, key: str | None, options: list[str], args: list[str], dry: bool
) -> int:
    """Start a program and return its exit code. options: those of the server to start. Raises UserError and
    MachineError."""
    program = shutil.which(tool.program)
    if program is None and not dry:
        raise MachineError(f"[launch] {tool.program} is not installed; {tool.install}")
    if options and dry:
        path = Path(model := options[options.index("--model") + 1]).expanduser()
        name = path.resolve().name if path.exists() else model
        longest = min(LONGEST, context_limit(config_of(model)) or LONGEST)
        say_whole(shlex.join(["mlxkv", "serve", *options, "--port", str(PORT)]))
        return _start(tool, program, Endpoint(USUAL, "", _sound(name), longest), args, dry)
    if options:
        with started(options) as endpoint:
            note(f"{endpoint.model} at {endpoint.url}, {endpoint.longest} tokens")
            return _start(tool, program, endpoint, args, dry)
    if url is not None and not _is_url(url):
        raise UserError(
            f"[--url] must begin with http:// or https://, and a host; got {url[:80]!r}"
        )
    key = key or next(iter(os.environ.get(KEY, "").splitlines()), "")
    where = (url or USUAL).rstrip("/").removesuffix("/v1")
    endpoint = ask(where, key)
    if endpoint is None and url is not None:
        raise MachineError(f"[--url] no server of mlxkv answers at {where}")
    if endpoint is None:
        raise UserError(
            f"[--model] needed to start a server; got none, and none answers at {where}; choose from "
            "mlxkv models, such as qwen3-4b"
        )
    return _start(tool, program, endpoint, args, dry)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid IPv6 address or port
        return False


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args):
        """Refuse redirects: they would send the key to another host."""
        return None


def ask(url: str, key: str) -> Endpoint | None:
    """Return the server at a URL, None if mlxkv does not answer there. Raises UserError for a wrong key, and for a
    model name that programs would misread."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Without a proxy, which may not reach this address.
        with build_opener(ProxyHandler({}), _NoRedirects).open(
            Request(f"{url}/v1/kv", headers=headers), timeout=ANSWER_SECONDS
        ) as response:
            about = untrusted.parse(response.read(1 << 20))
        name = _sound(about["model"])
        longest = untrusted.whole(about["longest_tokens"], "longest_tokens")
        return Endpoint(url, key, name, longest, about.get("tool_calls") is not False)
    except UserError:
        raise
    except HTTPError as error:
        if error.code in (401, 429):
            raise UserError(
                f"[--api-key] the server at {url} refuses this key; got "
                f"{'one' if key else 'none'}; set --api-key or {KEY}"
            ) from None
        return None
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _sound(model: str) -> str:
    """Return a model's name. Raises UserError if OpenCode would substitute a variable or a file in it ({env:HOME}), or
    if it is not printable."""
    if not model.isprintable() or re.search(r"\{(env|file):", model):
        raise UserError(
            f"[--model] its name would mean something else to the program; got {ascii(model)[:80]}; rename its folder"
        )
    return model


@contextmanager
def started(options: list[str]) -> Iterator[Endpoint]:
    """Run a server on a free port, with a new key, for the duration of the block. Raises MachineError.

    Its output goes to a file: it would overwrite a program that draws on the terminal."""
    key = secrets.token_urlsafe(24)
    with TemporaryFile() as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlxkv", "serve", "--port", "0", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {KEY: key, PARENT: str(os.getpid())},
            start_new_session=True,  # Ctrl-C is for the program, not for its server
        )
        try:
            with working("starting mlxkv serve"):
                endpoint = _wait(server, log, key)
            yield endpoint
        finally:
            note("ending the server")
            server.terminate()  # as by Ctrl-C: it saves its sessions
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen, log: IO[bytes], key: str) -> Endpoint:
    """Wait until a server answers. Raises MachineError if it ends before that."""
    while True:
        ended = server.poll() is not None
        # `pread`, because the server shares this file's position.
        lines = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        for line in lines:
            if line.startswith("chat: ") and (endpoint := ask(line.split()[1].rstrip("/"), key)):
                return endpoint
        if ended:
            reason = lines[-1] if lines else "no output"
            raise MachineError(f"[launch] the server did not start: {reason}")
        time.sleep(0.1)


def _start(tool: Tool, program: str | None, endpoint: Endpoint, args: list[str], dry: bool) -> int:
    if endpoint.longest < LEAST:
        note(
            f"  {tool.program} needs {LEAST:,} tokens or more; {endpoint.model} has room for {endpoint.longest:,} here"
        )
    if not endpoint.tools:
        note(f"  {tool.program} calls tools; the chat template of {endpoint.model} has none")
    # A dry run shows no key. Programs do not start without one, which a server without keys ignores.
    key = ("..." if dry else endpoint.key) if endpoint.key else "mlxkv"
    settings, first = tool.start(replace(endpoint, key=key))
    if dry:
        for name in tool.unset:
            say_whole(f"unset {name}")
        for name, value in settings.items():
            say_whole(f"export {name}={shlex.quote(value)}")
        say_whole(shlex.join([tool.program, *first, *args]))
        if program is None:
            note(f"{tool.program} is not installed; {tool.install}")
        return 0
    assert program is not None  # `launch` raises before
    env = {name: value for name, value in os.environ.items() if name not in tool.unset}
    before = on(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
    try:
        child = subprocess.Popen(
            [program, *first, *args],
            env=env | settings,
            # Ignored signals stay so in a child.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for number in (signal.SIGTERM, signal.SIGHUP):  # forwarded; this process ends after it
            on(number, lambda number, frame: child.send_signal(number))
        code = child.wait()
        return 128 - code if code < 0 else code
    except OSError as error:
        raise MachineError(f"[launch] {tool.program} does not start: {error.strerror}") from None
    finally:
        signal.signal(signal.SIGINT, before)
        for number in (signal.SIGTERM, signal.SIGHUP):
            on(number, signal.SIG_DFL)
