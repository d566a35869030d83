"""What `mlxkv serve` was asked for, checked before anything heavy is loaded."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from mlxkv.console import parse_size
from mlxkv.errors import UserError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Options:
    """The command line. Sizes are texts such as 8GB."""

    model: str = "tiny"
    kv: str = "int4"
    host: str = "127.0.0.1"
    port: int = 8080
    kv_memory: str | None = None
    kv_disk: str | None = None
    kv_disk_size: str = "16GB"
    api_key: str | None = None
    max_tokens: int = 512
    max_body: str = "8MB"
    timeout: float = 600
    max_requests: int = 64
    batch: int = 32
    prefill_batch: int = 8
    prefill_step: int | None = None
    reuse: bool = True
    origins: tuple[str, ...] = ()
    kv_strict: bool = False
    dtype: str | None = None
    calibration: str | None = None
    fold: bool = False

    def __post_init__(self):
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"[--port] must be from 0 to 65535; got {self.port}")
        if not 0 < self.timeout < float("inf"):
            raise UserError(f"[--timeout] must be above 0, in seconds; got {self.timeout:g}")
        for name in ("max_tokens", "max_requests", "batch", "prefill_batch"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise UserError(f"[{option}] must be at least 1; got {getattr(self, name)}")
        if self.prefill_step is not None and self.prefill_step < 1:
            raise UserError(f"[--prefill-step] must be at least 1; got {self.prefill_step}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise UserError("[--api-key] must be ASCII and not empty; got something else")
        if not self.local and self.api_key is None:
            raise UserError(
                f"[--host] other machines may reach {self.host}; got no --api-key; "
                "set one, or choose --host 127.0.0.1"
            )
        _ = self.body_bytes, self.memory_bytes, self.disk_bytes  # refuse what is no size

    @property
    def local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, "--max-body")

    @property
    def memory_bytes(self) -> int | None:
        return parse_size(self.kv_memory, "--kv-memory") if self.kv_memory else None

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.kv_disk_size, "--kv-disk-size")

    @property
    def disk_folder(self) -> Path | None:
        return Path(self.kv_disk).expanduser() if self.kv_disk else None
