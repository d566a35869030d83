"""What a broken kernel raises."""

import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent / "cpp"


class EmulatorFault(Exception):
    """A fault of a kernel: `kind`, the threads of the threadgroup that took part, and where."""

    def __init__(
        self,
        kind: str,
        message: str,
        threads: tuple[int, ...] = (),
        group: int = 0,
        where: str = "",
        other: str = "",
    ) -> None:
        text = f"[{kind}] {message}"
        if where:
            text += f"\n  at {where}"
        if other:
            text += f"\n  the other access: {other}"
        if threads:
            shown = ", ".join(map(str, threads[:8])) + (", ..." if len(threads) > 8 else "")
            text += f"\n  threads {shown} of threadgroup {group}"
        super().__init__(text)
        self.kind, self.message = kind, message
        self.threads, self.group = threads, group
        self.where, self.other = where, other

    @property
    def line(self) -> int | None:
        """Line of the body (or of the header, see `where`) that is to blame."""
        found = re.search(r":(\d+)", self.where)
        return int(found[1]) if found else None


def _place(library: Path, offset: str) -> str:
    """Source line of a program counter: the innermost frame that is not the emulator's own."""
    command = ["addr2line", "-i", "-e", str(library), f"0x{offset}"]
    try:
        frames = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return ""
    frames = [re.sub(r" \(.*", "", frame) for frame in frames]
    known = [frame for frame in frames if not frame.startswith("?")]
    outer = [frame for frame in known if not frame.startswith(str(HERE) + os.sep)]
    return Path((outer or known)[0]).name if known else ""


def parse(report: str, library: Path) -> EmulatorFault | None:
    """The fault in what the core printed, or None after a good run."""
    fields = dict(line.split("\t", 1) for line in report.splitlines() if "\t" in line)
    if "fault" not in fields:
        return None
    where = ""
    if "at" in fields:
        line, column, file = fields["at"].split("\t")
        where = f"{Path(file).name}:{line}:{column}"
        if Path(file).parent == HERE:
            where = ""
    if not where and "pc" in fields:
        where = _place(library, fields["pc"])
    other = _place(library, fields["other"]) if "other" in fields else ""
    threads = tuple(int(t) for t in fields.get("threads", "").split(",") if t)
    return EmulatorFault(
        fields["fault"], fields.get("message", ""), threads, int(fields["group"]), where, other
    )
