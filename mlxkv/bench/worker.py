"""One task of `mlxkv bench` in a fresh process: `python -m mlxkv.bench.worker REQUEST`.

REQUEST is JSON: {"task": "about" | "gate" | "run" | "copy", "model", "dtype", "bits", ...}. The last line of
stdout is the answer, one JSON document; a failure is {"error": text} with "user": true where the
user can mend it.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from mlxkv.errors import MachineError, UserError

WARM_TOKENS, WARM_TOKENS_CPU = 2048 + 256, 320  # builds kernels; on a CPU there are none
LONGEST = 300


def about(request: dict) -> dict:
    """The machine, its copy bandwidth, and the model: {"machine", "versions", "model"}."""
    import platform

    from mlxkv import doctor
    from mlxkv.bench.power import power
    from mlxkv.bench.reading import weight_bytes
    from mlxkv.bench.timing import copy_bandwidth, short, where

    machine = where() | {"power": power(), "copy_gb_s": copy_bandwidth() / 1e9}
    if macos := platform.mac_ver()[0]:
        machine["macos"] = macos
    it = _subject(request)
    model = {"name": request["model"], "weights": it.weights, "dtype": short(it.dtype)}
    model |= {"bits": request["bits"], "weight_bytes": weight_bytes(it.model, it.config)}
    return {"machine": machine, "versions": doctor.versions(), "model": model}


def gate(request: dict) -> dict:
    """Is request["preset"] right here: the answer of `gate.check`."""
    from mlxkv.bench.gate import check

    return check(_subject(request), request["preset"])


def run(request: dict) -> dict:
    """One measurement of request["preset"] at request["context"]: the answer of `decode.measure`."""
    from mlxkv.bench.decode import decoded_by, measure
    from mlxkv.metal.launch import backend

    it, preset, context = _subject(request), request["preset"], request["context"]
    warm = WARM_TOKENS_CPU if backend() == "cpu" else WARM_TOKENS
    measure(it, preset, min(context, warm), "prefill", 1)
    answer = measure(it, preset, context, "prefill", request["tokens"])
    return answer | {"by": decoded_by(it, preset)}


def copy(request: dict) -> dict:
    """The copy bandwidth once more: {"copy_gb_s"}."""
    from mlxkv.bench.timing import copy_bandwidth

    return {"copy_gb_s": copy_bandwidth() / 1e9}


TASKS = {"about": about, "gate": gate, "run": run, "copy": copy}


def _subject(request: dict):
    from mlxkv.bench.models import DTYPES, subject
    from mlxkv.bench.timing import default_dtype

    dtype = DTYPES.get(request["dtype"])
    return subject(request["model"], dtype, default_dtype(), request["bits"])


def _watch() -> None:
    """Ends this process when the one that started it, which holds the other end, is gone."""
    os.read(0, 1)
    os._exit(3)


def main(text: str) -> dict:
    """The answer to a request."""
    try:
        request = json.loads(text)
        if request.get("watched"):
            threading.Thread(target=_watch, daemon=True).start()
        return TASKS[request["task"]](request)
    except UserError as error:
        return {"error": str(error), "user": True}
    except MachineError as error:
        return {"error": str(error)}
    except Exception as error:  # mlx-lm and MLX raise anything at all
        line = (str(error).strip().splitlines() or [""])[0]
        return {"error": f"{type(error).__name__}: {line}"[:LONGEST].rstrip(": ")}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
