"""Errors sent to clients: a status, one line, and OpenAI's error types."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

from mlxkv import errors
from mlxkv.errors import MachineError

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}  # of others: invalid_request_error


@dataclass(eq=False)
class Refused(Exception):
    """A request that gets an error instead of a reply.

    message: made one printable line, as templates and clients may put any characters into it. status: HTTP status.
    code: a short name for programs. retry: seconds to wait before asking again.
    details: more fields of the error.
    """

    status: int
    message: str
    code: str | None = None
    retry: int | None = None
    details: dict = field(default_factory=dict)

    def __post_init__(self):
        line = " ".join(self.message.split())
        self.message = "".join(x if x.isprintable() else "\ufffd" for x in line)
        super().__init__(self.message)

    def __reduce__(self) -> tuple:
        return Refused, (self.status, self.message, self.code, self.retry, self.details)

    def body(self) -> dict:
        """Return the JSON document that OpenAI's clients expect."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "code": self.code, "param": None}
        return {"error": error | self.details}


class Postponed(Exception):
    """Raised for a schema that must be compiled in another process."""


class OtherModel(Exception):
    """Raised for a request to another model, `name`."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


NOTHING = object()


def bad(path: str, reason: str, got: object = NOTHING) -> Refused:
    """Return the error for an invalid field. got: the value to show."""
    if got is not NOTHING:
        shown = json.dumps(got, default=str)
        reason += f"; got {shown if len(shown) <= 80 else shown[:77] + '...'}"
    return Refused(400, f"[{path}] {reason}"[:300], "invalid_value")


def ending() -> Refused:
    """Return the error for replies that a shutdown cuts off."""
    return Refused(503, "[serve] is ending", "ending")


def fault(error: Exception) -> Refused:
    """Log a failure of mlxkv, mlx-lm or the machine, and return the client's error."""
    logging.warning(f"a request failed: {type(error).__name__}: {error}")
    said = str(error) if isinstance(error, MachineError) else errors.reason(error)
    return Refused(500, f"[serve] {type(error).__name__}: {said}"[:400], "generation_failed")
