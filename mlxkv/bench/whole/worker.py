"""One task of `mlxkv bench` in a fresh process: `python -m mlxkv.bench.whole.worker REQUEST`.

REQUEST is JSON: {"task": "about" | "gate" | "run" | "copy", "model", "dtype", "bits", ...}. The last line of
stdout is the answer, one JSON document; a failure is {"error": text}, with "user": true if it is a UserError.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from mlxkv.errors import MachineError, UserError
from mlxkv.versions import versions

WARM_TOKENS, WARM_TOKENS_CPU = 2048 + 256, 320  # enough to build all kernels; a CPU has none
LONGEST = 300


def about(request: dict) -> dict:
    """The machine, its copy bandwidth, and the model: {"machine", "versions", "model"}."""
    import platform

    from mlxkv.bench.subject import machine_in_use, short
    from mlxkv.bench.whole.power import power
    from mlxkv.bench.whole.reading import weight_bytes
    from mlxkv.metal.timing import copy_bandwidth

    machine = machine_in_use() | {"power": power(), "copy_gb_s": copy_bandwidth() / 1e9}
    if macos := platform.mac_ver()[0]:
        machine["macos"] = macos
    it = _subject(request)
    model = {"name": request["model"], "weights": it.weights, "dtype": short(it.dtype)}
    model |= {"bits": request["bits"], "weight_bytes": weight_bytes(it.model, it.config)}
    return {"machine": machine, "versions": versions(), "model": model}


def gate(request: dict) -> dict:
    """Check request["preset"]: `gate.check`."""
    from mlxkv.bench.whole.gate import check

    return check(_subject(request), request["preset"])


def run(request: dict) -> dict:
    """Measure request["preset"] at request["context"], after a short run that builds the kernels:
    `decode.measure` and {"by"}."""
    from mlxkv.bench.whole.decode import measure
    from mlxkv.metal.launch import backend

    it, preset, context = _subject(request), request["preset"], request["context"]
    warm = WARM_TOKENS_CPU if backend() == "cpu" else WARM_TOKENS
    measure(it, preset, min(context, warm), "prefill", 1)
    answer = measure(it, preset, context, "prefill", request["tokens"])
    return answer | {"by": it.decoded_by(preset)}


def copy(request: dict) -> dict:
    """Measure the copy bandwidth again: {"copy_gb_s"}."""
    from mlxkv.metal.timing import copy_bandwidth

    return {"copy_gb_s": copy_bandwidth() / 1e9}


TASKS = {"about": about, "gate": gate, "run": run, "copy": copy}


def _subject(request: dict):
    from mlxkv.bench.subject import load_subject

    return load_subject(request["model"], request["dtype"], request["bits"])


def _watch() -> None:
    """End this process when stdin closes: the process that started it is gone."""
    os.read(0, 1)
    os._exit(3)


def main(text: str) -> dict:
    """Answer a request, JSON text."""
    try:
        request = json.loads(text)
        if request.get("watched"):
            threading.Thread(target=_watch, daemon=True).start()
        return TASKS[request["task"]](request)
    except UserError as error:
        return {"error": str(error), "user": True}
    except MachineError as error:
        return {"error": str(error)}
    except Exception as error:  # mlx-lm and MLX raise exceptions of any type
        line = (str(error).strip().splitlines() or [""])[0]
        return {"error": f"{type(error).__name__}: {line}"[:LONGEST].rstrip(": ")}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
