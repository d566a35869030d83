"""axe-core, which finds faults of accessibility in a page. It is not part of this repository:

npm install --no-save axe-core      # in the clone, or name its axe.min.js in MLXKV_AXE
"""

import json
import os
from pathlib import Path

PLACE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"


def where() -> Path | None:
    """The file of axe-core; None if there is none."""
    path = Path(os.environ.get("MLXKV_AXE") or PLACE)
    return path if path.is_file() else None


def violations(page) -> list[str]:
    """Every rule that a page breaks, with the elements that break it."""
    page.call("Runtime.evaluate", expression=where().read_text(encoding="utf-8"))
    found = page.js(
        "axe.run(document, {resultTypes: ['violations', 'incomplete']}).then(r => JSON.stringify("
        "{passes: r.passes.length, violations: r.violations.map(v => "
        "`${v.id}: ${v.nodes.map(n => n.target.join(' ')).join(' | ')}`)}))"
    )
    found = json.loads(found)
    assert found["passes"] > 20, found  # it has looked
    return found["violations"]
