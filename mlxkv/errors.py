"""The two kinds of error that a command reports in one line."""


class UserError(ValueError):
    """An error that the user can fix: `[where] what; got X; choose from ...`. Exit code 2."""


class MachineError(RuntimeError):
    """An error of the machine (disk full, NaN in the logits, ...). Exit code 1."""
