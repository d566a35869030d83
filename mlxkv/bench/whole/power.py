"""The source of a machine's power and its power mode: both decide how fast it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

UNKNOWN = "unknown"
SUPPLIES = Path("/sys/class/power_supply")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def power() -> dict[str, str]:
    """{"source", "mode"}. source: "ac", "battery" or "unknown". mode: "low power", "normal", "high power"
    or "unknown" on macOS, the governor of the clock on Linux."""
    if sys.platform == "darwin":
        batteries, settings = _output("pmset", "-g", "batt"), _output("pmset", "-g")
        return {"source": mac_source(batteries), "mode": mac_mode(settings)}
    return {"source": linux_source(SUPPLIES), "mode": _read(GOVERNOR) or UNKNOWN}


def mac_source(text: str) -> str:
    """Read the source from `pmset -g batt`: Now drawing from 'AC Power'."""
    match = re.search(r"drawing from '(AC|Battery|UPS) Power'", text)
    return {"AC": "ac", "Battery": "battery"}.get(match[1], UNKNOWN) if match else UNKNOWN


def mac_mode(text: str) -> str:
    """Read the mode from `pmset -g`, one setting a line: lowpowermode 1, or on machines that also have a
    high power mode, powermode 1 or 2."""
    found = dict(re.findall(r"^\s*(lowpowermode|powermode)\s+(\d+)", text, re.MULTILINE))
    if not found:
        return UNKNOWN
    if "1" in found.values():
        return "low power"
    return "high power" if found.get("powermode") == "2" else "normal"


def linux_source(folder: Path) -> str:
    """Read the source from /sys/class/power_supply: a supply that is online, or a battery that discharges."""
    kinds = {}
    for supply in sorted(folder.glob("*")):
        kinds.setdefault(_read(supply / "type"), []).append(supply)
    mains = [s for kind in ("Mains", "USB") for s in kinds.get(kind, [])]
    if any(_read(supply / "online") == "1" for supply in mains):
        return "ac"
    if any(_read(supply / "status") == "Discharging" for supply in kinds.get("Battery", [])):
        return "battery"
    return UNKNOWN


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
