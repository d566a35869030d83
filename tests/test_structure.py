"""The shape of the code is tested: who may import whom, how long a file may be, that the README's tree is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlxkv"
FILES = sorted(PACKAGE.rglob("*.py"))
TRACK = sorted((ROOT / "cuda_track").rglob("*.py"))
# What the torch track reads of mlxkv: formats, files and texts. None of it knows a framework.
SHARED = {
    *(
        "config",
        "presets",
        "formats",
        "formats_codebook",
        "formats_lowrank",
        "formats_tile",
        "errors",
        "bounds",
        "shapes",
    ),
    *("artifact", "balance", "rotation", "subspace", "levels", "corpus"),
    *("models.folder", "models.aliases", "models.plant", "metal.sources"),
}
# Its own files, beside kernels/.
OWN = {
    *(
        "stores.py",
        "bench.py",
        "bench_model.py",
        "eval.py",
        "models/shaped.py",
        "models/parallel.py",
    ),
    *("golden/kernels.py", "golden/parity.py", "golden/__main__.py"),
    *("mps/__init__.py", "mps/source.py", "mps/attend.py", "mps/store.py"),
}
FRAMEWORKS = {"mlx", "mlx_lm", "torch", "triton", "transformers"}

# A file may import from its own row and from the rows below it, never from above.
LAYERS = [
    {"cli", "__main__"},
    {"serve"},
    {"chat", "chat_ui", "listing", "fit", "doctor", "eval", "bench", "calibrating", "publishing"}
    | {"learning", "checks", "machines"},
    {"session", "prompt_cache", "locate", "golden"},
    {"generate"},
    {"clips"},
    {"learn"},
    {"learnable"},
    {"models", "calibrate"},
    {"batch", "ragged", "adaptive", "salience", "segments", "cache", "attention", "sealed"}
    | {"selftest"},
    {"codec", "pages", "pool", "tiles", "exchange", "balancing", "channels", "oja"},
    {"kernels", "whitening"},
    {"gpu"},
    {"headers"},
    {"packing", "quantizers", "calibrated", "transform", "encoding", "records", "trust"},
    {"metal"},
    {"artifact"},
    {"subspace"},
    {"balance"},
    {"config", "console", "shapes", "corpus", "rotation", "reference_balanced", "learned"}
    | {"naming", "presets", "bounds"},
    {"reference_oscar", "reference_codebook", "reference_polar_tree", "reference_learned"},
    {"reference_dual_scale", "reference_polar", "reference_oja"},
    {"reference", "formats", "formats_codebook", "formats_tile", "formats_lowrank"} | {"levels"},
    {"errors", "faults", "versions", ""},
]
RANK = {name: len(LAYERS) - row for row, names in enumerate(LAYERS) for name in names}
# `models` is the only code that touches the insides of mlx-lm; these use its public functions.
MAY_IMPORT_MLX_LM = {"models", "generate", "session", "prompt_cache", "bench", "serve"}
# lm-evaluation-harness reaches a model through mlx-lm's own adapter.
MAY_IMPORT_MLX_LM_FILES = {"mlxkv/eval/harness.py"}
# Plants outliers in weights of either framework: training uses it on torch, loading on MLX.
MAY_IMPORT_TORCH = {"mlxkv/models/plant.py"}
NO_FRAMEWORK = {
    *("faults", "versions"),
    *("", "config", "errors", "console", "shapes", "reference", "fit", "locate", "listing"),
    *("cli", "__main__", "corpus", "artifact", "balance", "rotation", "learned"),
    *("formats", "formats_codebook", "formats_tile", "formats_lowrank", "levels", "naming"),
    *("presets", "bounds"),
    *("reference_oscar", "reference_codebook", "reference_polar_tree", "reference_balanced"),
    *("reference_dual_scale", "reference_polar", "reference_learned", "reference_oja", "subspace"),
}


def unit(path: Path) -> str:
    """The part of the package a file belongs to: `models/load.py` -> models, `__init__.py` -> ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Dotted names of all imported modules (those under `if TYPE_CHECKING` do not count)."""
    found = set()
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        nodes.extend(ast.iter_child_nodes(node))
    return found


def own(path: Path) -> set[str]:
    """Parts of this package that a file imports."""
    parts = {name.split(".")[1] for name in imports(path) if re.match(r"mlxkv\.\w", name)}
    return {part for part in parts if part in RANK}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_arrows_point_down(path):
    name = unit(path)
    assert name in RANK, f"{name} has no row in LAYERS of this test"
    wrong = {other for other in own(path) if RANK[other] > RANK[name]}
    assert not wrong, f"{ids(path)} imports {wrong} from above"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_frameworks_stay_where_they_belong(path):
    used = {name.split(".")[0] for name in imports(path)} & FRAMEWORKS
    if ids(path) not in MAY_IMPORT_TORCH:
        assert not used & {"torch", "triton"}, "torch belongs in cuda_track"
    if unit(path) not in MAY_IMPORT_MLX_LM and ids(path) not in MAY_IMPORT_MLX_LM_FILES:
        assert "mlx_lm" not in used
    if unit(path) in NO_FRAMEWORK:
        assert not used


def test_the_spec_stands_alone():
    """The spec's files read NumPy, the standard library and each other; only tests read them."""
    spec = {path.stem for path in PACKAGE.glob("reference*.py")}
    allowed = {"numpy", "__future__", "mlxkv"} | sys.stdlib_module_names
    for name in spec:
        path = PACKAGE / f"{name}.py"
        assert {name.split(".")[0] for name in imports(path)} <= allowed
        assert own(path) <= spec
    readers = [ids(path) for path in FILES if unit(path) not in spec and own(path) & spec]
    assert readers == []


@pytest.mark.parametrize("path", TRACK, ids=ids)
def test_the_torch_track_stands_alone(path):
    """It shares formats and files with mlxkv, no code that computes on tensors."""
    names = imports(path)
    frameworks = {name.split(".")[0] for name in names} & FRAMEWORKS
    folder = path.relative_to(ROOT).parts[1]
    assert not frameworks & {"mlx", "mlx_lm"}
    assert "transformers" not in frameworks or folder == "models"
    assert "triton" not in frameworks or folder == "kernels"
    shared = {name.removeprefix("mlxkv.") for name in modules(names)}
    assert shared <= SHARED, f"{ids(path)} imports {shared - SHARED}"


def modules(names: set[str]) -> set[str]:
    """Those of `names` that are modules of mlxkv."""
    dotted = {name for name in names if name.startswith("mlxkv.")}
    return {
        name
        for name in dotted
        if (ROOT / (name.replace(".", "/") + ".py")).exists()
        or ((ROOT / name.replace(".", "/")).is_dir() and name != "mlxkv.models")
    }


def test_the_torch_track_has_the_same_names():
    """Same file names, and in quantizers the same public functions."""
    ours = {path.relative_to(ROOT / "cuda_track") for path in TRACK}
    own = {path for path in ours if not (PACKAGE / path).exists() and path.parts[0] != "kernels"}
    assert {str(path) for path in own} <= OWN
    for path in sorted((ROOT / "cuda_track" / "quantizers").glob("*.py")):
        there, here = public(PACKAGE / "quantizers" / path.name), public(path)
        assert here - {"half", "bias_of"} <= there
        assert path.stem == "__init__" or {"encode", "decode", "scores", "mix"} <= here


def public(path: Path) -> set[str]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    lists = [n.value for n in body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"]
    names |= {name for one in lists for name in ast.literal_eval(one)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    "statement",
    [
        "import mlxkv",
        "import mlxkv.cli",
        "import mlxkv.config",
        "import mlxkv.fit",
        "import mlxkv.models",
        "from mlxkv.cli import main; main(['--help'])",
        "from mlxkv.cli import main; main(['presets'])",
        "from mlxkv.cli import main; main(['models', '--json'])",
        "from mlxkv.cli import main; main(['chat', '--help'])",
        "from mlxkv.cli import main; main(['calibrate', '--help'])",
        "from mlxkv.cli import main; main(['bench', 'kernels', '--help'])",
        "from mlxkv.cli import main; main(['eval', '--help'])",
        "from mlxkv.cli import main; main(['serve', '--help'])",
    ],
)
def test_imports_without_frameworks(statement):
    code = f"import sys; {statement}; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not loaded & (FRAMEWORKS | {"numpy", "matplotlib"})


def test_help_is_quick():
    """Under 0.3 s on a quiet machine; the bound here leaves room for a busy one."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "mlxkv", "--help"]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert time.perf_counter() - start < 3


def code_files() -> list[Path]:
    folders = ("mlxkv", "cuda_track", "tests", "training")
    suffixes = {".py", ".metal", ".h"}
    return [f for d in folders for f in sorted((ROOT / d).rglob("*")) if f.suffix in suffixes]


@pytest.mark.parametrize("path", code_files(), ids=ids)
def test_files_have_one_subject(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 700


def test_half_of_the_files_are_short():
    lengths = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert lengths[len(lengths) // 2] <= 150


def readme_tree() -> list[str]:
    """Paths named in the README's tree; folders end in a slash."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("## Tree", 1)[1].split("```", 2)[1]
    paths, folders = [], []
    for line in block.splitlines():
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split("#")[0].strip()
        assert "#" in line and line.split("#", 1)[1].strip(), f"no comment: {line}"
        folders = [*folders[:depth], name.rstrip("/")]
        paths.append("/".join(folders) + ("/" if name.endswith("/") else ""))
    return paths


def test_the_readme_tree_is_true():
    named = readme_tree()
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing, f"the tree names what is not there: {missing}"
    there = {
        ids(path)
        for path in [*FILES, *TRACK]
        if path.name != "__init__.py" or path.stat().st_size > 200
    }
    forgotten = sorted(there - set(named))
    assert not forgotten, f"the tree does not name {forgotten}"


def test_no_relative_links_are_dead():
    for page in ROOT.glob("*.md"):
        for target in re.findall(
            r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"
