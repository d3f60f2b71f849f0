"""Imports point upward only; packages say what they export; files stay short; importing tpoverlap costs nothing."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tpoverlap"

# Top to bottom. A layer may import itself and what its row names, nothing else of tpoverlap.
_TOP = {"errors", "tokens", "pieces", "fused_form", "config", "native"}
_CORE = _TOP | {"tuning", "memory", "comm", "gemm", "overlap", "dispatch"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "tokens": {"errors"},
    "pieces": {"tokens"},
    "fused_form": set(),
    "native": set(),
    "config": {"errors", "tokens"},
    "tuning": _TOP,  # arithmetic about time: measuring is the tools' business
    "memory": _TOP,
    "comm": _TOP | {"memory"},
    "gemm": _TOP,  # meets memory only through tensors and flags that overlap hands it
    "overlap": _TOP | {"memory", "comm", "gemm"},
    "dispatch": _TOP | {"tuning", "overlap"},
    "manager": _CORE,
    "nn": _CORE | {"manager"},
    "te": _CORE | {"manager", "nn"},
    "integrations": _CORE | {"manager", "nn", "te"},
}
# The manager's layer is several modules of the package's top level: names, communicators, shape, reports.
PART_OF = dict.fromkeys(
    (
        "active_shape",
        "communicator",
        "default_manager",
        "explanation",
        "memory_report",
        "method_tables",
        "name_table",
        "operation_cache",
        "plan",
        "settings",
        "setup",
        "statistics",
    ),
    "manager",
)
LIBRARY = set(ALLOWED)
ALLOWED |= {
    "testing": LIBRARY,
    "tools": LIBRARY | {"testing", "__init__"},  # users of the public names like anybody else
    "__init__": LIBRARY,
    "__main__": {"tools"},
}
READS_ENVIRONMENT = ("memory/cuda", "tuning/cache", "native/library", "testing/", "tools/")
MAX_LINES, MEDIAN_LINES = 500, 150


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _layer(path: Path) -> str:
    module = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return PART_OF.get(module, module)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name below tpoverlap) of every import of tpoverlap, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "tpoverlap":
                names = [f"tpoverlap.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "tpoverlap":
                yield node.lineno, "__init__"
            elif name.startswith("tpoverlap."):
                yield node.lineno, name.removeprefix("tpoverlap.")


def _imported_layers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The same by layer. A name that is no module (``from tpoverlap import TokenPartition``) comes from __init__."""
    for line, name in _imported_modules(tree):
        module = name.split(".")[0]
        is_module = (PACKAGE / module).is_dir() or (PACKAGE / f"{module}.py").is_file()
        yield line, PART_OF.get(module, module) if is_module else "__init__"


def test_there_is_something_to_check() -> None:
    assert {"errors.py", "tokens.py"} <= {_name(path) for path in _files()}


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_imports_point_upward(path: Path) -> None:
    layer = _layer(path)
    assert layer in ALLOWED, f"{layer} is in no layer: add it to ALLOWED or PART_OF and to docs/architecture.md"
    wrong = [
        f"{_name(path)}:{line} imports {imported}"
        for line, imported in _imported_layers(_tree(path))
        if imported != layer and imported not in ALLOWED[layer]
    ]
    assert not wrong, f"{layer} may import only {sorted(ALLOWED[layer])}: {wrong}"


def test_the_table_has_no_cycle() -> None:
    """Else `upward` means nothing: every row names earlier rows only (testing, tools and __init__ come last)."""
    seen: set[str] = set()
    for layer in LIBRARY:
        assert layer not in ALLOWED[layer]
    for layer, allowed in ALLOWED.items():
        assert allowed - {"__init__"} <= seen, f"{layer} names later rows: {sorted(allowed - seen)}"
        seen.add(layer)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tpoverlap.comm.epochs", ["comm"]),
        ("def f():\n    from tpoverlap.memory import base", ["memory"]),
        ("from tpoverlap import te, memory", ["te", "memory"]),
        ("from tpoverlap import NoSuchModule", ["__init__"]),
        ("import tpoverlap as tpo", ["__init__"]),
        ("import torch, tpoverlapping", []),
    ],
)
def test_the_import_finder(source: str, expected: list[str]) -> None:
    found = [name.split(".")[0] for _, name in _imported_modules(ast.parse(source))]
    assert [name if name != "NoSuchModule" else "__init__" for name in found] == expected


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_imports_are_absolute(path: Path) -> None:
    lines = [node.lineno for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom) and node.level]
    assert not lines, f"relative imports in lines {lines}"


def test_every_folder_is_a_package() -> None:
    missing = sorted({_name(path.parent) for path in _files() if not (path.parent / "__init__.py").is_file()})
    assert not missing, f"no __init__.py in {missing}"


@pytest.mark.parametrize("path", [path for path in _files() if path.name == "__init__.py"], ids=_name)
def test_all_matches_what_is_defined(path: Path) -> None:
    exported: list[str] | None = None
    defined: set[str] = set()
    lazy = False
    for node in _tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tpoverlap":
            defined |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
            lazy = lazy or node.name == "__getattr__"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if "__all__" in names and node.value is not None:
                exported = ast.literal_eval(node.value)
            defined |= names
    public = {name for name in defined if not name.startswith("_")}
    if exported is None:
        assert not public, f"defines {sorted(public)} and has no __all__"
        return
    assert len(exported) == len(set(exported)), "a name twice in __all__"
    assert public <= set(exported), f"not in __all__: {sorted(public - set(exported))}"
    assert lazy or set(exported) <= defined | {"__version__"}, f"not defined: {sorted(set(exported) - defined)}"


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_only_some_files_read_the_environment(path: Path) -> None:
    if _name(path).startswith(READS_ENVIRONMENT):
        return
    lines = [
        node.lineno
        for node in ast.walk(_tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (isinstance(node, ast.ImportFrom) and {a.name for a in node.names} & {"environ", "getenv"})
    ]
    assert not lines, f"environment variables are read in lines {lines}; take an argument instead"


def test_files_are_short() -> None:
    lines = {_name(path): len(path.read_text().splitlines()) for path in _files()}
    too_long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not too_long, f"more than {MAX_LINES} lines: {too_long}"
    median = statistics.median(lines.values())
    assert median < MEDIAN_LINES, f"the median file has {median} lines"


IMPORT_PROBE = """
import sys, time
import torch, torch.distributed
before, start = set(sys.modules), time.process_time()
import tpoverlap
seconds = time.process_time() - start
import tpoverlap.te
added = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = added & {"triton", "matplotlib", "yaml", "ruamel", "omegaconf", "rich", "click", "psutil", "multiprocessing"}
assert not heavy, f"import tpoverlap imports {sorted(heavy)}"
assert not torch.cuda.is_initialized(), "import tpoverlap initialises CUDA"
assert not torch.distributed.is_initialized(), "import tpoverlap makes a process group"
assert seconds < 1.0, f"import tpoverlap took {seconds:.2f} s of processor time on top of torch"
assert "tpoverlap.tools" not in sys.modules, "import tpoverlap imports its tools"
missing = [name for name in getattr(tpoverlap, "__all__", ()) if not hasattr(tpoverlap, name)]
assert not missing, f"in __all__ but not there: {missing}"
"""


def test_import_is_cheap() -> None:
    probe = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert probe.returncode == 0, probe.stderr
