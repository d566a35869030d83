"""`metal_kernel(...)` with the call form of `mx.fast.metal_kernel`, run on a CPU."""

import functools
import mmap
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulator import build, dtypes, wrapper
from emulator.fault import EmulatorFault, parse

PAGE = max(mmap.ALLOCATIONGRANULARITY, mmap.PAGESIZE)
Triple = tuple[int, int, int]
METAL_MEMORY = 32 << 10


@dataclass(frozen=True)
class Buffer:
    """One argument of the kernel: `data` for what goes in, `dtype` and `shape` for what comes out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray | None
    mode: str  # input, output, filled
    target: np.ndarray | None = None  # a writable input: the caller's own array

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * dtypes.storage(self.dtype).itemsize


@dataclass(frozen=True)
class Kernel:
    """A body with its names; call it like a kernel of MLX."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    checks: bool = True
    writable: tuple[str, ...] = ()
    timeout: float = 300.0
    threadgroup_memory: int = METAL_MEMORY

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Triple,
        threadgroup: Triple,
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[np.ndarray]:
        checks = self.checks and build.can_check()
        check_sizes(self, inputs, output_shapes, output_dtypes)
        check_grid(grid, threadgroup)
        arrays = [np.asanyarray(x) for x in inputs]
        buffers = list(self._inputs(arrays))
        made = zip(self.output_names, output_shapes, output_dtypes, strict=True)
        outputs = [
            Buffer(name, dtypes.type_name(dtype), tuple(map(int, shape)), None, "output")
            for name, shape, dtype in made
        ]
        text = self.text(arrays, [b.dtype for b in outputs], template)
        library = build.library(text, checks)
        job = [f"checks {int(checks)}", f"threadgroup_memory {self.threadgroup_memory}"]
        job += ["grid {} {} {}".format(*grid), "threads {} {} {}".format(*threadgroup)]
        return run(library, job, [*buffers, *outputs], self.timeout)

    def text(
        self, arrays: Sequence[np.ndarray], output_types: Sequence[str], template: Any = ()
    ) -> str:
        """The C++ text for arguments of these types."""
        inputs = [
            (name, dtypes.array_type(x), x.size, x.ndim)
            for name, x in zip(self.input_names, arrays, strict=True)
        ]
        outputs = list(zip(self.output_names, output_types, strict=True))
        return wrapper.write_source(
            self.name, self.source, self.header, inputs, outputs, template, self.writable
        )

    def _inputs(self, arrays: Sequence[np.ndarray]) -> Any:
        """The inputs, each followed by the shape, strides and ndim that the source asks for."""
        for name, x in zip(self.input_names, arrays, strict=True):
            own = name in self.writable
            mode = "filled" if own else "input"
            yield Buffer(name, dtypes.array_type(x), x.shape, x, mode, x if own else None)
            strides = [int(np.prod(x.shape[i + 1 :], dtype=np.int64)) for i in range(x.ndim)]
            info = {
                "shape": np.array(x.shape, np.int32),
                "strides": np.array(strides, np.int64),
                "ndim": np.array([x.ndim], np.int32),
            }
            for part in wrapper.info_in(self.source, name):
                data = info[part]
                yield Buffer(f"{name}_{part}", data.dtype.name, data.shape, data, "input")


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    *,
    checks: bool = True,
    writable: Sequence[str] = (),
    timeout: float = 300.0,
    threadgroup_memory: int = METAL_MEMORY,
) -> Kernel:
    """A kernel for the emulator. Beyond the arguments of MLX:

    checks: watch memory (Linux x86-64 with g++), else run in two orders of the threads and compare.
    writable: inputs that the kernel changes in place (a counter), as NumPy arrays.
    threadgroup_memory: bytes that a threadgroup may have; CUDA has more than Metal.
    """
    names = name, tuple(input_names), tuple(output_names)
    return Kernel(*names, source, header, checks, tuple(writable), timeout, threadgroup_memory)


def tile_header(lane_map: str) -> str:
    """Header with the tile product: `simdgroup` as on Metal, `mma` with the lane map of CUDA."""
    path = Path(__file__).parents[3] / "mlxkv" / "metal" / "text" / "tile" / "tile_metal.h"
    metal = path.read_text(encoding="utf-8")
    if lane_map == "simdgroup":
        return metal
    mma = (Path(__file__).parent / "tile" / "mma.h").read_text(encoding="utf-8")
    map_, halves, product, records = (
        metal.index(x)
        for x in ("inline uint tile_row", "inline uint kv_halves", "// C, 16 x 8", "// The records")
    )
    return metal[:map_] + metal[halves:product] + mma + metal[records:]


def check_sizes(kernel: Kernel, inputs: Any, shapes: Any, types: Any) -> None:
    for what, got, names in (
        ("inputs", inputs, kernel.input_names),
        ("output_shapes", shapes, kernel.output_names),
        ("output_dtypes", types, kernel.output_names),
    ):
        if len(got) != len(names):
            sizes = f"size {len(names)} but got size {len(got)}"
            raise ValueError(f"[metal_kernel] Expected `{what}` to have {sizes}.")


def check_grid(grid: Triple, threadgroup: Triple) -> None:
    """Metal shrinks groups at the edge and CUDA rounds up, so neither may happen."""
    threads = int(np.prod(threadgroup))
    if any(g <= 0 or t <= 0 or g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise ValueError(f"[emulator] grid {grid} is no multiple of threadgroup {threadgroup}.")
    if threads % 32 or threads > 1024:
        raise ValueError(f"[emulator] {threads} threads in a group; a multiple of 32 up to 1024.")


@functools.cache
def scratch() -> Path:
    """Where arguments travel: in memory on Linux."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def run(library: Path, job: list[str], buffers: list[Buffer], timeout: float) -> list[np.ndarray]:
    """Runs the job in a process of its own and returns the outputs."""
    offsets, end = [], 0
    for buffer in buffers:
        # Each ends at the end of a page where alignment to 16 bytes lets it.
        size = -(-max(buffer.nbytes, 1) // PAGE) * PAGE
        offsets.append(end + (size - buffer.nbytes) // 16 * 16)
        end += size
    with tempfile.NamedTemporaryFile(prefix="mlxkv-", dir=scratch()) as file:
        file.truncate(end)
        with mmap.mmap(file.fileno(), end) as memory:
            lines = [*job, f"data {file.name}", f"library {library}"]
            for b, offset in zip(buffers, offsets, strict=True):
                if b.data is not None:
                    place(memory, offset, b.data)
                item = dtypes.storage(b.dtype).itemsize
                lines.append(f"buffer {b.name} {b.nbytes} {offset} {b.mode} {item}")
            play(library, "\n".join(lines) + "\n", timeout)
            return collect(memory, buffers, offsets)


def place(memory: mmap.mmap, offset: int, data: np.ndarray) -> None:
    """Copies the bytes straight into the file: arguments may be large."""
    if data.nbytes:
        flat = np.ascontiguousarray(data).view(np.ndarray).reshape(-1).view(np.uint8)
        np.frombuffer(memory, np.uint8, data.nbytes, offset)[...] = flat


def play(library: Path, job: str, timeout: float) -> None:
    try:
        done = subprocess.run(
            [build.runner()], input=job.encode(), capture_output=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise EmulatorFault("timeout", f"no end after {timeout} s") from None
    report = done.stdout.decode()
    fault = parse(report, library)
    if fault:
        raise fault
    if not report.startswith("ok"):
        detail = done.stderr.decode()[-2000:]
        raise EmulatorFault("crash", f"the emulator ended with {done.returncode}. {detail}")


def collect(memory: mmap.mmap, buffers: list[Buffer], offsets: list[int]) -> list[np.ndarray]:
    """Copies of the outputs; inputs that the kernel may write are changed in place."""
    outputs = []
    for b, offset in zip(buffers, offsets, strict=True):
        if b.mode == "input":
            continue
        dtype = dtypes.storage(b.dtype)
        value = np.frombuffer(memory, dtype, b.nbytes // dtype.itemsize, offset if b.nbytes else 0)
        value = value.reshape(b.shape).copy()
        if b.target is not None:
            b.target[...] = value
            continue
        outputs.append(value.view(dtypes.bfloat16) if b.dtype == "bfloat16" else value)
    return outputs
