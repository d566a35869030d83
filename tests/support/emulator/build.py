"""Compiles the core once and each kernel once, into a cache keyed by the text of everything used."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from emulator.fault import EmulatorFault

CPP = Path(__file__).parent / "cpp"
LINUX_X86 = platform.system() == "Linux" and platform.machine() == "x86_64"
KEEP = 1000  # libraries in the cache
SHARED = threading.Lock()  # a thread compiles what tests share meanwhile: they wait for it

COMMON = ["-std=c++20", "-fno-strict-aliasing", "-ffp-contract=off", "-fsigned-char"]
# No inlining of loads into narrower ones: a uint4 load must be seen whole.
WHOLE_LOADS = ["-fno-tree-sra", "-fno-tree-forwprop", "-fno-tree-fre"]
WATCHED = [
    *("-g1", "-fsanitize=thread,undefined,float-cast-overflow", "-fno-sanitize=vptr,object-size"),
    # An address that wraps around is out of bounds; its check alone takes a third of the compile time.
    *("-fno-sanitize=pointer-overflow", "-fno-sanitize-recover=all"),
    *("--param", "tsan-instrument-func-entry-exit=0", *WHOLE_LOADS),
    # The way to a simd operation is told by its return addresses: frames stay, code is not doubled.
    *("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-thread-jumps"),
    # Kernels run for milliseconds and compile for a second: leave out the passes that take long.
    *("-fno-tree-loop-optimize", "-fno-ivopts", "-fno-tree-loop-im", "-fno-move-loop-invariants"),
    *("-fno-if-conversion", "-fno-if-conversion2", "-fno-tree-dominator-opts", "-fno-tree-ch"),
    *("-fno-tree-sink", "-fno-tree-dse", "-fno-dse", "-fno-forward-propagate"),
    *("-fno-cprop-registers", "-fno-shrink-wrap", "-fno-reorder-blocks", "-fira-region=one"),
]
# A local variable without a value holds garbage, not a lucky zero.
GARBAGE = ["-ftrivial-auto-var-init=pattern", "-Werror=uninitialized"]


@functools.cache
def compiler() -> str | None:
    """g++ on Linux, clang++ on a Mac; EMULATOR_CXX overrides."""
    names = ["g++"] if LINUX_X86 else ["clang++", "g++"]
    return os.environ.get("EMULATOR_CXX") or next(filter(shutil.which, names), None)


@functools.cache
def can_check() -> bool:
    """The checked build needs g++'s instrumentation on Linux x86-64; elsewhere: the plain one."""
    return LINUX_X86 and "clang" not in Path(compiler() or "clang").name


def why_not() -> str | None:
    """The reason the emulator cannot run on this machine."""
    if compiler() is None:
        return "no C++ compiler (g++ or clang++) on this machine"
    return None


@functools.cache
def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "mlxkv-emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"mlxkv-emulator-{os.getuid()}"
        folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _base() -> str:
    """Stamp of the compiler and of every file of the emulator that a build reads."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True)
    parts = [version.stdout, *_flags(False), *_flags(True)]
    parts += [path.read_text() for path in sorted(CPP.glob("*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _flags(checks: bool) -> list[str]:
    """The flags of a kernel."""
    # The core supplies the functions of the sanitizers: no runtime of theirs is linked.
    own = ["-Og", *WATCHED, "-nodefaultlibs"] if checks else ["-O2"]
    return [*COMMON, *_half_flags(), "-fPIC", "-shared", *GARBAGE, *own]


@functools.cache
def _half_flags() -> list[str]:
    """Conversions to half in hardware where the processor has them: many times faster."""
    try:
        has = " f16c" in Path("/proc/cpuinfo").read_text()
    except OSError:
        has = False
    return ["-mf16c"] if has else []


def compile_to(command: list[str], output: Path) -> None:
    """Runs the compiler into a name of its own, then renames: two processes may build at once."""
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise EmulatorFault("compile", done.stderr.replace(str(CPP) + os.sep, "")[:8000])
    partial.replace(output)


def _prune(folder: Path) -> None:
    """The oldest libraries go when there are too many."""
    libraries = sorted(folder.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
    for path in libraries[: max(0, len(libraries) - KEEP)]:
        path.unlink(missing_ok=True)


@functools.cache
def runner() -> Path:
    """The core: a program that loads one kernel and runs it."""
    path = cache_dir() / f"core-{_base()[:20]}"
    with SHARED:
        if path.exists():
            return path
        _prune(cache_dir())
        whole = path.with_name(f"{path.name}.{os.getpid()}.cpp")  # headers are read once
        whole.write_text("".join(f'#include "{x.name}"\n' for x in sorted(CPP.glob("*.cpp"))))
        system = ["-rdynamic", "-ldl"]
        if platform.system() == "Darwin":
            system = ["-D_XOPEN_SOURCE=700", "-D_DARWIN_C_SOURCE", "-Wno-deprecated-declarations"]
        flags = [*COMMON, *_half_flags(), f"-I{CPP}", "-O2", "-fno-omit-frame-pointer"]
        try:
            compile_to([compiler(), *flags, str(whole), *system], path)
        finally:
            whole.unlink(missing_ok=True)
    return path


@functools.cache
def headers(checks: bool) -> list[Path]:
    """The folders of metal.h: precompiled, and the text, which is read where a compiler takes only that."""
    folder = cache_dir() / f"headers-{_base()[:20]}-{int(checks)}"
    header = folder / "metal.h.gch"
    command = [compiler(), *_flags(checks), "-x", "c++-header", str(CPP / "metal.h")]
    with SHARED:
        if can_check() and not header.exists():
            folder.mkdir(exist_ok=True)
            compile_to(command, header)
    return [folder, CPP]


def library(text: str, checks: bool) -> Path:
    """The shared library of one kernel, compiled from its whole C++ text if it is not there yet."""
    key = hashlib.sha256(f"{_base()}{checks}{text}".encode()).hexdigest()[:24]
    path = cache_dir() / f"kernel-{key}.so"
    if path.exists():
        return path
    source = path.with_name(f"{path.stem}.{os.getpid()}.cpp")
    source.write_text(text, encoding="utf-8")
    flags = [*_flags(checks), *(f"-I{folder}" for folder in headers(checks))]
    undefined = (
        ["-lm", "-lc", "-lgcc"]
        if platform.system() == "Linux"
        else ["-undefined", "dynamic_lookup"]
    )
    try:
        compile_to([compiler(), *flags, str(source), *undefined], path)
    finally:
        source.unlink(missing_ok=True)
    return path
