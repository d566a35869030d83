"""What a request is refused with: a status, one clear line, and OpenAI's names for the kind."""

from __future__ import annotations

import logging

from mlxkv import faults
from mlxkv.errors import MachineError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Refused(Exception):
    """A request that gets no reply. code: a short name for programs. retry: seconds after which it
    may be asked again. details: numbers, beside the message."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        retry: int | None = None,
        details: dict | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.retry, self.details = retry, details or {}

    def __reduce__(self):
        return Refused, (self.status, self.message, self.code, self.retry, self.details)

    def body(self) -> dict:
        """As OpenAI's clients read it."""
        kind = KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "code": self.code, "param": None}
        return {"error": error | self.details}


def fault(error: Exception) -> Refused:
    """What a failure of ours, of mlx-lm's or of the machine's is to a client."""
    logging.warning(f"a request failed: {type(error).__name__}: {error}")
    said = str(error) if isinstance(error, MachineError) else faults.reason(error)
    return Refused(500, f"[serve] {type(error).__name__}: {said}"[:400], "generation_failed")
