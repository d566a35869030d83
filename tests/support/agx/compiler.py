"""Compile texts for an M1 or M2 by Mesa's compiler (`make agx`), and count what they take.

What is approximated: the register allocator is Mesa's, not Apple's; a simdgroup matrix is two floats a lane and two
multiply-adds, as Mesa has no instruction for it; no preamble of MLX's. docs/internals/apple.md: how far to trust it.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from metal.parse import EXTENSIONS, translate
from metal.parse import HERE as METAL
from metal.signature import ATTRIBUTES, Kernel

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("MLXKV_AGX") or Path.home() / ".cache" / "mlxkv-agx")
CLANG = FOLDER / "clang" / "usr"
TOOL = FOLDER / "compile"
TIMEOUT = 600
FLAGS = [  # names tell which function is the kernel
    *("-target", "spir64", "-Wno-everything", "-fno-discard-value-names")
]
FRONT = [  # vectors of 16 would be refused later
    *("-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-O2", "-S"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-disable-vector-combine"),
    *("-Xclang", f"-cl-ext={EXTENSIONS},+cl_khr_subgroups"),
]
BACK = ["-x", "ir", "-Xclang", "-disable-llvm-passes", "-c"]
# What a text names, by OpenCL's words.
SOURCES = {
    "thread_index_in_simdgroup": "metal::metal_lane()",
    "thread_index_in_threadgroup": "uint(::get_local_id(0))",
    "simdgroup_index_in_threadgroup": "uint(::get_sub_group_id())",
    "simdgroups_per_threadgroup": "{threads} / 32u",
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "threads_per_threadgroup": "(uint3)({threads}u, 1u, 1u)",
    "thread_position_in_threadgroup": "(uint3)(uint(::get_local_id(0)), 0u, 0u)",
    "threadgroup_position_in_grid": "(uint3)({group})",
    "thread_position_in_grid": "(uint3)({place})",
    "threadgroups_per_grid": "(uint3)(groups_x, groups_y, groups_z)",
    "threads_per_grid": "(uint3)(groups_x * {threads}u, groups_y, groups_z)",
}
GROUP = ", ".join(f"uint(::get_group_id({i}))" for i in range(3))
PLACE = ", ".join(f"uint(::get_global_id({i}))" for i in range(3))
# Names of MLX's preamble. And functions of a text are all put into the kernel: Apple's compiler does so too.
BEFORE = "typedef bfloat bfloat16_t;\ntypedef half float16_t;\n"
BEFORE += "#undef inline\n#define inline inline __attribute__((always_inline))\n"
# Starts of the names of instructions that move registers to memory and back, and that take no cycles.
SPILL = ("stack_load", "stack_store")
CONTROL = ("if_", "else_", "while_", "pop_exec", "push_exec", "jmp", "break", "begin_cf", "wait")
CONTROL += ("logical_end", "stop", "threadgroup_barrier", "memory_barrier", "stack_adjust")


# Kinds of instructions, and starts of their names. A copy between registers is a form of other instructions.
KINDS = ("multiply-add", "integer", "memory", "shuffle", "copy", "other")
KIND_OF = {
    **dict.fromkeys(("ffma", "hfma"), "multiply-add"),
    **dict.fromkeys(("iadd", "imad", "and", "or", "xor", "bitop", "bfi", "bfeil"), "integer"),
    **dict.fromkeys(("extr", "asr", "icmpsel", "icmp", "bitrev", "popcount"), "integer"),
    **dict.fromkeys(("device_load", "device_store", "local_load", "local_store"), "memory"),
    **dict.fromkeys(("uniform_store", "atomic", "local_atomic"), "memory"),
    **dict.fromkeys(("shuffle", "shuffle_xor", "quad_shuffle", "ballot"), "shuffle"),
    **dict.fromkeys(("icmp_ballot", "fcmp_ballot"), "shuffle"),
    **dict.fromkeys(("stack_load", "stack_store"), "copy"),
}
Cycles = tuple[int, ...]  # issue cycles, by KINDS


@dataclass(frozen=True)
class Loop:
    """A loop, but for loops inside it: instructions, issue cycles, and how many instructions spill."""

    instructions: int
    kinds: Cycles
    spills: int

    @property
    def cycles(self) -> int:
        """Issue cycles of all kinds."""
        return sum(self.kinds)


@dataclass(frozen=True)
class Nest:
    """A loop with loops inside it: cycles of its own, of these those of what comes before the last loop inside and is
    not done in every turn; `and` instructions of all, which unpack codes."""

    kinds: Cycles
    first: Cycles
    unpacks: int
    inner: tuple["Nest", ...]

    @property
    def cycles(self) -> int:
        """Issue cycles of its own, of all kinds."""
        return sum(self.kinds)


@dataclass(frozen=True)
class Takes:
    """What a kernel takes. registers: 32-bit ones of a thread, of 128. spills, fills: instructions. scratch: bytes of a
    thread. shared: bytes of a threadgroup. code: bytes. nest: bytes of the largest loop with those inside it. cycles:
    issue cycles of the whole text, as Mesa counts them. threads: of a threadgroup, at most. outside: cycles of what is
    in no loop."""

    registers: int
    spills: int
    fills: int
    scratch: int
    shared: int
    code: int
    nest: int
    instructions: int
    cycles: int
    threads: int
    outside: Cycles
    loops: tuple[Loop, ...]
    nests: tuple[Nest, ...]


class CompileError(Exception):
    """A step refused the text; its first error."""


def why_not() -> str | None:
    """Why nothing is compiled here, or None."""
    return None if TOOL.exists() else "Mesa's compiler is not built here: make agx"


def source(kernel: Kernel, threads: int) -> str:
    """The text as C++ for OpenCL, for threadgroups of `threads`."""
    values = {"threads": threads, "group": GROUP, "place": PLACE}
    given = "".join(
        f"const {ATTRIBUTES[name]} {name} = {SOURCES[name].format(**values)};\n"
        for name in kernel.attributes
    )
    buffers = ",\n".join(re.sub(r" \[\[.*\]\]", "", x) for x in kernel.buffers)
    library = [METAL / "words.h", HERE / "library.h", METAL / "vectors.h"]
    before = "#define METAL_LEVEL 320\n" + "\n".join(x.read_text() for x in library) + BEFORE
    head = f"__kernel __attribute__((reqd_work_group_size({threads}, 1, 1))) void"
    counts = "uint groups_x, uint groups_y, uint groups_z"
    return (
        f"{before}{translate(kernel.header)}{head} {kernel.function()}(\n{buffers}, {counts}) {{\n"
        f"{given}{kernel.source}\n}}\n"
    )


def takes(kernel: Kernel, threads: int) -> Takes:
    """Compile a kernel and count. What was counted once is kept beside the compiler."""
    text = source(kernel, threads)
    digest = hashlib.sha256(_tools() + text.encode()).hexdigest()[:24]
    kept = FOLDER / "kept" / f"{digest}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        made = json.dumps(asdict(_counted(_compiled(text))))
        kept.write_text(made)
    made = json.loads(kept.read_text())
    loops = tuple(Loop(**x | {"kinds": tuple(x["kinds"])}) for x in made["loops"])
    nests = map(_nest_of, made["nests"])
    outside = tuple(made["outside"])
    return Takes(**made | {"outside": outside, "loops": loops, "nests": tuple(nests)})


def _nest_of(made: dict) -> Nest:
    kinds, first = tuple(made["kinds"]), tuple(made["first"])
    return Nest(kinds, first, made["unpacks"], tuple(map(_nest_of, made["inner"])))


@cache
def _tools() -> bytes:
    return TOOL.read_bytes() + Path(__file__).read_bytes()


def _compiled(text: str) -> str:
    """What the compiler prints: its last form of the code, and numbers."""
    clang = [CLANG / "lib/llvm-15/bin/clang", "-emit-llvm", *FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        text_, ir, code, spirv = (Path(folder) / x for x in ("k.clcpp", "k.ll", "k.bc", "k.spv"))
        text_.write_text(text, encoding="utf-8")
        _run([*clang, *FRONT, "-o", ir, text_])
        ir.write_text(_plain(ir.read_text()))
        _run([*clang, *BACK, "-o", code, ir])
        _run([CLANG / "bin/llvm-spirv-15", "--spirv-max-version=1.4", "-o", spirv, code])
        return _run([TOOL, spirv])


def _plain(ir: str) -> str:
    """Without what SPIR-V 1.4 has no word for."""

    def same(match: re.Match) -> str:
        kind, value = match[1], match[2].rstrip(",")
        if kind in ("float", "half"):
            return f"= fadd {kind} {value}, -0.0"
        zero = "zeroinitializer" if kind[0] == "<" else "false" if kind == "i1" else "0"
        return f"= or {kind} {value}, {zero}"

    ir = re.sub(r"= freeze (i\d+|<\d+ x i\d+>|float|half) (\S+)", same, ir)
    # A choice by the low bits of a number, of a width that SPIR-V lacks.
    ir = re.sub(
        r"= trunc i32 (\S+) to i([2-7])\b", lambda m: f"= and i32 {m[1]}, {2 ** int(m[2]) - 1}", ir
    )
    ir = re.sub(r"switch i[2-7] ", "switch i32 ", ir)
    ir = re.sub(
        r"^( +)i([2-7]) (-?\d+), label",
        lambda m: f"{m[1]}i32 {int(m[3]) % 2 ** int(m[2])}, label",
        ir,
        flags=re.M,
    )
    return re.sub(r", !llvm.loop !\d+", "", ir)


def _run(command: list) -> str:
    libraries = f"{CLANG}/lib/x86_64-linux-gnu:{CLANG}/lib/llvm-15/lib"
    switches = {"LD_LIBRARY_PATH": libraries, "AGX_MESA_DEBUG": "shaders,shaderdb,internal"}
    environment = {**os.environ, **switches}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if "error" in x] or [done.stderr[-1500:]]
        raise CompileError(f"{Path(command[0]).name}: {done.returncode}: {errors[0]}")
    return done.stdout + done.stderr


def _counted(printed: str) -> Takes:
    numbers = dict(re.findall(r"(\w+)=(\d+)", re.search(r"^TAKES.*", printed, re.M)[0]))
    stats = re.findall(r"^SHADER-DB: .*", printed, re.M)[-1]
    spills, fills = map(int, re.search(r"(\d+):(\d+) spills", stats).groups())
    code, instructions = int(numbers["code"]), int(re.search(r"(\d+) inst", stats)[1])
    blocks = _blocks(printed)
    spans, own = _spans(blocks), list(blocks.values())
    nests = [sum(x[1] for x in own[a : b + 1]) for a, b in spans]
    outside = [x for i, x in enumerate(own) if not any(a <= i <= b for a, b in spans)]
    return Takes(
        registers=-(-int(numbers["registers"]) // 2),
        spills=spills,
        fills=fills,
        scratch=4 * int(numbers["scratch"]),
        shared=int(numbers["shared"]),
        code=code,
        nest=max(nests, default=0) * code // instructions,
        instructions=instructions,
        cycles=int(re.search(r"(\d+) alu", stats)[1]),
        threads=int(numbers["threads"]),
        outside=_issued(outside),
        loops=tuple(_loops(blocks)),
        nests=tuple(_nests(blocks)),
    )


# successors, instructions, those that spill, cycles of the first unit by kinds, of the second, unpacking
Block = tuple[list[str], int, int, Cycles, int, int]
# Issue cycles that are not 1, by the starts of names: Mesa's agx_performance.c; of 64-bit sums what
# philipturner/metal-benchmarks measured. Those of a second unit, which runs beside the first, are apart.
SLOW = {"shuffle": 2, "shuffle_xor": 2, "quad_shuffle": 2, "icmp_ballot": 2, "fcmp_ballot": 2}
BESIDE = {"imad": 4, "bfi": 4, "bfeil": 4, "extr": 4, "asr": 4, "floor": 4, "exp2": 4, "log2": 4}
MOVE = re.compile(r"= bitop \S+, #0, #a|= xor r")  # a copy, or a third of an exchange
BESIDE |= {"rcp": 6, "rsqrt": 8, "sin_pt_1": 4, "sin_pt_2": 4}


def _blocks(printed: str) -> dict[str, Block]:
    """The blocks of the kernel's last form, in their order. A short preamble is printed like a kernel."""
    forms: list[dict[str, Block]] = []
    for name, body, after in re.findall(r"^(block\d+) \{\n(.*?)^\}([^\n]*)", printed, re.M | re.S):
        if not forms or name in forms[-1]:
            forms.append({})
        successors = re.findall(r"block\d+", after.split(" from")[0])
        lines = body.splitlines()
        spills = sum(_name(line).startswith(SPILL) for line in lines)
        kinds = dict.fromkeys(KINDS, 0)
        for line in lines:
            kinds[_kind(line)] += _cycles(line)
        beside = sum(map(_beside, lines))
        unpacks = sum(_name(line) == "and" for line in lines)
        forms[-1][name] = successors, len(lines), spills, tuple(kinds.values()), beside, unpacks
    most = max(map(len, forms))
    return [x for x in forms if len(x) == most][-1]


def _name(line: str) -> str:
    return line.rpartition(" = ")[2].split()[0]


def _cycles(line: str) -> int:
    name = _name(line)
    if name.startswith(CONTROL):
        return 0
    return 4 if name.startswith("iadd") and ":" in line.rpartition(" = ")[0] else SLOW.get(name, 1)


def _kind(line: str) -> str:
    return "copy" if MOVE.search(line) else KIND_OF.get(_name(line), "other")


def _beside(line: str) -> int:
    return BESIDE.get(_name(line), 0)


def _issued(blocks: Iterable[Block], together: bool = False) -> Cycles:
    """Issue cycles by kinds of the blocks, one after the other, or `together`: what the second unit takes longer, of
    integers mostly, is added to theirs."""
    kinds, late = [0] * len(KINDS), 0
    for block in blocks:
        kinds = [x + y for x, y in zip(kinds, block[3], strict=True)]
        late += block[4] - sum(block[3]) if together else max(0, block[4] - sum(block[3]))
    kinds[KINDS.index("integer")] += max(0, late)
    return tuple(kinds)


def _spans(blocks: dict[str, Block]) -> list[tuple[int, int]]:
    """Numbers of the first and the last block of every loop, in the order of their ends."""
    order = list(blocks)
    pairs = [(order.index(x), i) for i, name in enumerate(order) for x in blocks[name][0]]
    return [(first, last) for first, last in pairs if first <= last]


def _loops(blocks: dict[str, Block]) -> list[Loop]:
    """Every loop, in the order of their ends."""
    order, spans, out = list(blocks), _spans(blocks), []
    for first, last in spans:
        within = [x for x in spans if first <= x[0] and x[1] <= last and x != (first, last)]
        mine = [i for i in range(first, last + 1) if not any(a <= i <= b for a, b in within)]
        own = [blocks[order[i]] for i in mine]
        count, spills = (sum(block[at] for block in own) for at in (1, 2))
        out.append(Loop(count, _issued(own, together=True), spills))
    return out


def _nests(blocks: dict[str, Block]) -> list[Nest]:
    """Loops that are in no other, with those inside them, in their order."""
    order = list(blocks)

    def made(spans: list[tuple[int, int]]) -> list[Nest]:
        out = []
        for first, last in sorted(spans):
            if any(a <= first and last <= b and (a, b) != (first, last) for a, b in spans):
                continue
            within = [x for x in spans if first <= x[0] and x[1] <= last and x != (first, last)]
            mine = [i for i in range(first, last + 1) if not any(a <= i <= b for a, b in within)]
            inner = made(within)
            top = [
                x
                for x in within
                if not any(a <= x[0] and x[1] <= b and (a, b) != x for a, b in within)
            ]
            until = max(top)[0] - 1 if len(top) > 1 else first
            own = {i: blocks[order[i]] for i in mine}
            before = _issued(block for i, block in own.items() if first < i < until)
            unpacks = sum(block[5] for block in own.values()) + sum(x.unpacks for x in inner)
            out.append(Nest(_issued(own.values()), before, unpacks, tuple(inner)))
        return out

    return made(sorted(set(_spans(blocks))))
