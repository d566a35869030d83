"""SmolLM2 for tests, downloaded once a machine by `mlxkv models get` into a folder that all runs share."""

import fcntl
import os
from pathlib import Path

from mlxkv.errors import MachineError, UserError

FOLDER = Path(os.environ.get("MLXKV_TEST_MODELS") or Path.home() / ".cache" / "mlxkv-tests")


def fetch(name: str = "smollm2") -> tuple[Path | None, str]:
    """The folder that holds the model, or None and the reason why a test of it is skipped."""
    from mlxkv.doctor.getting import get

    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = FOLDER / f"{name}.failed"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a run
        parent = str(os.getppid())  # of the workers of one run, which ask the index once
        if failed.exists() and failed.read_text().split("\n")[0] == parent:
            return None, failed.read_text().split("\n")[1]
        before, os.environ["MLXKV_MODELS"] = os.environ.get("MLXKV_MODELS"), str(FOLDER)
        try:
            get(name)
        except (UserError, MachineError) as error:
            failed.write_text(f"{parent}\n{error}")
            return None, str(error)
        finally:
            os.environ.pop("MLXKV_MODELS")
            if before is not None:
                os.environ["MLXKV_MODELS"] = before
    return FOLDER, ""
