"""The two kinds of failure that a command reports in one line."""


class UserError(ValueError):
    """Something the user can mend: `[where] what; got X; choose from ...`. Exit code 2."""


class MachineError(RuntimeError):
    """Something the machine did (disk full, NaN in the logits, ...). Exit code 1."""
