"""The options of `mlxkv serve`: names, defaults, help texts and checks. Imports nothing heavy."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from mlxkv.console import parse_size, user_path
from mlxkv.errors import UserError
from mlxkv.formats.names import complete_kv, parse_kv
from mlxkv.models.catalog.aliases import DEFAULT, complete_model
from mlxkv.models.catalog.asked import (
    check_fold,
    check_weights,
    dtype_name,
    template_arguments,
)

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """The command line, in the order of `--help`. Sizes are texts such as 8GB. Raises UserError for
    values out of range."""

    model: Annotated[
        str,
        Option(
            "--model",
            "-m",
            help="An alias (mlxkv models), a hub name, a folder or a GGUF file.",
            autocompletion=complete_model,
        ),
    ] = DEFAULT
    kv: Annotated[
        str,
        Option(
            "--kv",
            help="Cache preset (mlxkv presets), or KEYS/VALUES: int8/int4.",
            autocompletion=complete_kv,
        ),
    ] = "int4"
    kv_memory: Annotated[
        str | None,
        Option(
            "--kv-memory",
            help="Most memory for all caches, in each process: 8GB. Default: half of the free memory.",
        ),
    ] = None
    kv_disk: Annotated[
        str | None, Option("--kv-disk", help="Folder for sessions that memory has no room for.")
    ] = None
    kv_disk_size: Annotated[
        str, Option("--kv-disk-size", help="Most space there, for each model and preset.")
    ] = "16GB"
    host: Annotated[
        str, Option("--host", help="Address; needs --api-key unless it is loopback.")
    ] = "127.0.0.1"
    port: Annotated[int, Option("--port", help="Port; 0 takes a free one.")] = 8080
    api_key: Annotated[
        list[str] | None,
        Option(
            "--api-key",
            help="Key that clients must send; repeatable: one for each user, the operator's first. "
            "Or set MLXKV_API_KEY, a key a line: process lists do not show it.",
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        Option("--allow-origin", help="Origin of a web page that may ask; repeatable."),
    ] = None
    max_tokens: Annotated[
        int, Option("--max-tokens", help="Longest reply, unless the request names a length.")
    ] = 512
    max_body: Annotated[str, Option("--max-body", help="Largest request.")] = "8MB"
    max_requests: Annotated[int, Option("--max-requests", help="Requests in progress at once.")] = (
        64
    )
    timeout: Annotated[float, Option("--timeout", help="Seconds for one request.")] = 600
    batch: Annotated[int, Option("--batch", help="Replies decoded at once.")] = 32
    prefill_batch: Annotated[int, Option("--prefill-batch", help="Prompts read at once.")] = 8
    prefill_step: Annotated[
        int | None, Option("--prefill-step", help="Tokens of a prompt read at once.")
    ] = None
    wired_limit: Annotated[
        bool,
        Option(
            "--wired-limit",
            help="Let MLX wire GPU memory. Off: macOS was reported to panic when that is set under load.",
        ),
    ] = False
    reuse: Annotated[
        bool, Option("--reuse/--no-reuse", help="Keep finished conversations for reuse.")
    ] = True
    think: Annotated[
        bool | None,
        Option("--think/--no-think", help="Have thinking models think, or not: enable_thinking."),
    ] = None
    chat_template_args: Annotated[
        str | None,
        Option("--chat-template-args", help="JSON for the chat template; requests may change it."),
    ] = None
    kv_strict: Annotated[
        bool, Option("--kv-strict", help="Refuse a model with layers that stay uncompressed.")
    ] = False
    dtype: Annotated[
        str | None, Option("--dtype", help="float32, float16 or bfloat16. Default: as stored.")
    ] = None
    weights: Annotated[
        int | None,
        Option("--weights", help="8 rounds weights of 16 bits to 8. Default: as stored."),
    ] = None
    calibration: Annotated[
        str | None,
        Option(
            "--calibration",
            help="For calibrated presets: a file, or owner/name on the hub. Default: the model's.",
        ),
    ] = None
    fold: Annotated[
        bool, Option("--fold", help="Turn values by the weights, for calibrated presets.")
    ] = False

    def __post_init__(self):
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"[--port] must be from 0 to 65535; got {self.port}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"[--timeout] must be above 0, in seconds; got {self.timeout:g}")
        for name in ("max_tokens", "max_requests", "batch", "prefill_batch", "prefill_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"[--{name.replace('_', '-')}] must be at least 1; got {value}")
        if not all(key.isascii() and key.strip() for key in self.api_keys):
            raise UserError("[--api-key] must be ASCII and not empty; got something else")
        if not all(_sendable(key) for key in self.api_keys):
            raise UserError(
                "[--api-key] begins or ends with a space, or has a line break or control character, "
                "which no client can send; got one that does; choose another"
            )
        if not self.local and not self.api_keys:
            raise UserError(
                f"[--host] other machines may reach {self.host}; got no --api-key; "
                "set one, or choose --host 127.0.0.1"
            )
        check_fold(parse_kv(self.kv), self.fold)
        dtype_name(self.dtype)
        check_weights(self.weights)
        _ = self.template  # raises where it is no JSON
        _ = self.body_bytes, self.memory_bytes, self.disk_bytes  # raise where a text is no size

    @property
    def local(self) -> bool:
        """Return whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys, the operator's first."""
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key or ())

    @property
    def origins(self) -> tuple[str, ...]:
        return tuple(self.allow_origin or ())

    @property
    def template(self) -> dict:
        """Return what chat templates are given besides messages."""
        return template_arguments(self.chat_template_args, self.think)

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, "--max-body")

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.kv_memory, "--kv-memory", "g") if self.kv_memory else None

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.kv_disk_size, "--kv-disk-size", "g")

    @property
    def disk_folder(self) -> Path | None:
        return user_path(self.kv_disk, "--kv-disk") if self.kv_disk else None


def _sendable(key: str) -> bool:
    """Return whether a header of HTTP can carry a key as it is."""
    return key == key.strip() and key.isprintable()
