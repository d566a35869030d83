"""How long a test waits for another process: until it ends, on a machine that is busy too."""

PATIENCE = 600  # seconds; only a process that hangs takes them
