"""The options of `mlxkv serve`: names, defaults, help texts and checks. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import inspect
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Option

from mlxkv.console import parse_size, user_path
from mlxkv.errors import UserError
from mlxkv.formats.names import complete_kv, parse_kv
from mlxkv.models.catalog.aliases import DEFAULT, complete_model
from mlxkv.models.catalog.asked import (
    check_weights,
    dtype_name,
    template_arguments,
)

OVERFLOWS = ("refuse", "drop")
LOG_LEVELS = ("error", "warning", "info", "debug")
PARENT = "MLXKV_PARENT"  # the variable with the process with which a server ends, however that ends
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field that is an option. names: where they are not that of the field."""
    return dataclasses.field(default=default, metadata={"names": names, "help": help, **more})


@dataclass(frozen=True)
class ServeOptions:
    """The command line, in the order of `--help`. Sizes are texts such as 8GB. Raises UserError for
    values out of range."""

    model: list[str] | None = option(
        None,
        "An alias (mlxkv models), a hub name, a folder or a GGUF file; repeatable: others are loaded on first use. "
        f"Default: {DEFAULT}.",
        *("--model", "-m"),
        autocompletion=complete_model,
    )
    kv: str = option(
        "int4",
        "Cache preset (mlxkv presets), or KEYS/VALUES: int8/int4.",
        autocompletion=complete_kv,
    )
    kv_memory: str | None = option(
        None,
        "Most memory for the caches of each model, in each process: 8GB. Default: half of the free memory.",
    )
    kv_disk: str | None = option(None, "Folder for sessions that memory has no room for.")
    kv_disk_size: str = option("16GB", "Most space there, for each model and preset.")
    host: str = option("127.0.0.1", "Address; needs --api-key unless it is loopback.")
    port: int = option(8080, "Port; 0 takes a free one.")
    api_key: list[str] | None = option(
        None,
        "Key that clients must send; repeatable: one for each user, the operator's first. "
        "Or set MLXKV_API_KEY, a key a line: process lists do not show it.",
    )
    allow_origin: list[str] | None = option(None, "Origin of a web page that may ask; repeatable.")
    overflow: str = option(
        "refuse", "A chat that is longer than the context: refuse, or drop its oldest turns."
    )
    max_tokens: int = option(512, "Longest reply, unless the request names a length.")
    max_requests: int = option(64, "Requests in progress at once.")
    timeout: float = option(600, "Seconds for one request.")
    batch: int = option(32, "Replies decoded at once.")
    log_level: str = option(
        "info", "error, warning, info (a line for each reply) or debug (for each request)."
    )
    wired_limit: bool = option(
        False,
        "Let MLX wire GPU memory. Off: macOS was reported to panic when that is set under load.",
        "--wired-limit",
    )
    reuse: bool = option(True, "Keep finished conversations for reuse.", "--reuse/--no-reuse")
    think: bool | None = option(
        None, "Have thinking models think, or not: enable_thinking.", "--think/--no-think"
    )
    chat_template_args: str | None = option(
        None, "JSON for the chat template; requests may change it."
    )
    kv_strict: bool = option(
        False, "Refuse a model with layers that stay uncompressed.", "--kv-strict"
    )
    dtype: str | None = option(None, "float32, float16 or bfloat16. Default: as stored.")
    weights: int | None = option(None, "8 rounds weights of 16 bits to 8. Default: as stored.")
    calibration: str | None = option(None, "For calibrated presets: a file. Default: the model's.")

    def __post_init__(self):
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"[--port] must be from 0 to 65535; got {self.port}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"[--timeout] must be above 0, in seconds; got {self.timeout:g}")
        for name in ("max_tokens", "max_requests", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"[--{name.replace('_', '-')}] must be at least 1; got {value}")
        for name, choices in (("overflow", OVERFLOWS), ("log_level", LOG_LEVELS)):
            if (value := getattr(self, name)) not in choices:
                flag, known = name.replace("_", "-"), ", ".join(choices)
                raise UserError(f"[--{flag}] unknown; got {value[:40]!r}; choose from {known}")
        if not all(key.isascii() and key.strip() for key in self.api_keys):
            raise UserError("[--api-key] must be ASCII and not empty; got something else")
        if not all(key == key.strip() and key.isprintable() for key in self.api_keys):
            raise UserError(
                "[--api-key] begins or ends with a space, or has a line break or control character, "
                "which no client can send; got one that does; choose another"
            )
        if not self.local and not self.api_keys:
            raise UserError(
                f"[--host] other machines may reach {self.host}; got no --api-key; "
                "set one, or choose --host 127.0.0.1"
            )
        if self.calibration is not None and len(self.models) > 1:
            raise UserError(
                f"[--calibration] is for one model; got {len(self.models)}: {', '.join(self.models)}; "
                "leave it out, or serve each by itself"
            )
        parse_kv(self.kv)
        dtype_name(self.dtype)
        check_weights(self.weights)
        _ = self.template  # raises where it is no JSON
        _ = self.memory_bytes, self.disk_bytes  # raise where a text is no size

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
    def models(self) -> tuple[str, ...]:
        """The models as they were asked for, the default one first."""
        return (self.model,) if isinstance(self.model, str) else tuple(self.model or (DEFAULT,))

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
    def memory_bytes(self) -> int | None:
        return parse_size(self.kv_memory, "--kv-memory", "g") if self.kv_memory else None

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.kv_disk_size, "--kv-disk-size", "g")

    @property
    def disk_folder(self) -> Path | None:
        return user_path(self.kv_disk, "--kv-disk") if self.kv_disk else None


def signature() -> inspect.Signature:
    """The options as arguments of a command, as typer reads them."""
    hints = get_type_hints(ServeOptions)
    parameters = []
    for field in dataclasses.fields(ServeOptions):
        more = dict(field.metadata)
        names = more.pop("names") or (f"--{field.name.replace('_', '-')}",)
        annotation = Annotated[hints[field.name], Option(*names, **more)]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(
            inspect.Parameter(field.name, kind, default=field.default, annotation=annotation)
        )
    return inspect.Signature(parameters)
