"""The options of `mlxkv serve`: names, defaults, help texts and checks. Imports nothing heavy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from mlxkv.catalog.aliases import DEFAULT, complete_model
from mlxkv.catalog.option_checks import check_weights, dtype_name, fitting_sizes, template_arguments
from mlxkv.console import parse_size, user_path
from mlxkv.errors import UserError
from mlxkv.formats.names import requested
from mlxkv.options import (
    PORT,
    AdapterPath,
    Calibration,
    Context,
    Dtype,
    Kv,
    Memory,
    Strict,
    Weights,
)

OVERFLOWS = ("refuse", "drop")
LOG_LEVELS = ("error", "warning", "info", "debug")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """The command line, in the order of `--help`. Sizes are texts such as 8GB. Raises UserError for
    values out of range."""

    model: Annotated[
        list[str] | None,
        Option(
            "--model",
            "-m",
            help="An alias (mlxkv models), a hub name, a folder or a GGUF file; repeatable: others are loaded on "
            f"first use. Default: {DEFAULT}.",
            autocompletion=complete_model,
            rich_help_panel="Model",
        ),
    ] = None
    kv: Kv = "int4"
    memory: Memory = None
    context: Context = None
    pack: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=FILE",
            help="A pack of mlxkv read; chats that name the model NAME begin after it. Repeatable.",
            rich_help_panel="Model",
        ),
    ] = None
    kv_memory: Annotated[
        str | None,
        Option(
            help="Memory limit for each model's caches, per process: 8GB. Default: half of the free memory.",
            rich_help_panel="Cache",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        Option(help="Folder for sessions that do not fit in memory.", rich_help_panel="Cache"),
    ] = None
    kv_disk_size: Annotated[
        str, Option(help="Size limit of that folder, per model and preset.")
    ] = "16GB"
    host: Annotated[
        str,
        Option(help="Address; needs --api-key unless it is loopback.", rich_help_panel="Server"),
    ] = "127.0.0.1"
    port: Annotated[int, Option(help="Port; 0 picks a free one.", rich_help_panel="Server")] = PORT
    api_key: Annotated[
        list[str] | None,
        Option(
            help="Key that clients must send; repeatable: one for each user, the operator's first. "
            "Or set MLXKV_API_KEY, one key a line, which process lists do not show.",
            rich_help_panel="Server",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        Option(help="Web origin that may call the API; repeatable.", rich_help_panel="Server"),
    ] = None
    overflow: Annotated[
        str,
        Option(help="If a chat is longer than the context: refuse, or drop its oldest turns."),
    ] = "refuse"
    max_tokens: Annotated[
        int,
        Option(help="Longest reply, unless the request names a length.", rich_help_panel="Server"),
    ] = 4096
    max_requests: Annotated[int, Option(help="Requests in progress at once.")] = 64
    timeout: Annotated[
        float, Option(help="Time limit of a request, in seconds.", rich_help_panel="Server")
    ] = 600
    batch: Annotated[int, Option(help="Replies decoded at once.")] = 32
    log_level: Annotated[
        str,
        Option(help="error, warning, info (a line for each reply) or debug (for each request)."),
    ] = "info"
    wired_limit: Annotated[
        bool,
        Option(
            "--wired-limit",
            help="Let MLX wire GPU memory. Off because macOS reportedly panics if it is set under load.",
        ),
    ] = False
    reuse: Annotated[bool, Option(help="Keep finished conversations for reuse.")] = True
    think: Annotated[
        bool | None,
        Option(help="Turn thinking on or off (enable_thinking).", rich_help_panel="Model"),
    ] = None
    chat_template_args: Annotated[
        str | None, Option(help="JSON for the chat template; requests may change it.")
    ] = None
    kv_strict: Strict = False
    adapter_path: AdapterPath = None
    dtype: Dtype = None
    weights: Weights = None
    calibration: Calibration = None

    def __post_init__(self):
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"[--port] must be from 0 to 65535; got {self.port}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"[--timeout] must be above 0, in seconds; got {self.timeout}")
        for name in ("max_tokens", "max_requests", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"[--{name.replace('_', '-')}] must be at least 1; got {value}")
        for name, choices in (("overflow", OVERFLOWS), ("log_level", LOG_LEVELS)):
            if (value := getattr(self, name)) not in choices:
                flag, known = name.replace("_", "-"), ", ".join(choices)
                raise UserError(f"[--{flag}] unknown; got {value[:40]!r}; choose from {known}")
        for key in self.api_keys:
            if not (key and key.isascii() and key.isprintable() and key == key.strip()):
                raise UserError(
                    "[--api-key] must be of printable ASCII characters, no space at its ends, which every client can "
                    "send; got another; choose one"
                )
        if not self.local and not self.api_keys:
            raise UserError(
                f"[--host] other machines may reach {self.host}; got no --api-key; "
                "set one, or choose --host 127.0.0.1"
            )
        for flag, value in (("calibration", self.calibration), ("adapter-path", self.adapter_path)):
            if value is not None and len(self.models) > 1:
                raise UserError(
                    f"[--{flag}] is for one model; got {len(self.models)}: {', '.join(self.models)}; "
                    "leave it out, or serve each by itself"
                )
        requested(self.kv)
        _ = self.packs  # raises for a line that names none
        fitting_sizes(self.kv, self.memory, self.context)
        dtype_name(self.dtype)
        check_weights(self.weights)
        _ = self.template  # raises for invalid JSON
        _ = self.memory_bytes, self.disk_bytes  # raise for invalid sizes

    @property
    def local(self) -> bool:
        """Return whether only this machine can connect."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def models(self) -> tuple[str, ...]:
        """Return the models named on the command line, the default first."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model or (DEFAULT,))

    @property
    def packs(self) -> dict[str, str]:
        """Return the files of packs by name. Raises UserError."""
        given = (self.pack,) if isinstance(self.pack, str) else tuple(self.pack or ())
        out = {}
        for text in given:
            name, _, file = text.partition("=")
            if not name.strip() or not file or name in out:
                raise UserError(
                    f"[--pack] a name, once, and its file; got {text[:80]!r}; write manual=manual.kvpack"
                )
            out[name.strip()] = file
        return out

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Return the API keys, the operator's first."""
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(self.allow_origin or ())

    @property
    def template(self) -> dict:
        """Return the extra arguments of the chat template."""
        return template_arguments(self.chat_template_args, self.think)

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.kv_memory, "--kv-memory", "g") if self.kv_memory else None

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.kv_disk_size, "--kv-disk-size", "g")

    @property
    def disk_folder(self) -> Path | None:
        return user_path(self.kv_disk, "--kv-disk") if self.kv_disk else None
