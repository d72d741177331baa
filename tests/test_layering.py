"""Who may import whom, by `ast`: data flows down, one package never reaches below itself.

`MAY_IMPORT` lists what there is: a new package or module of `dsv4c` is added to it.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsv4c"

_GROUND = {"errors", "step_abi", "version", "wording"}
_CHOICES = {"target", "recipe", "routing_trace"}
# Stages in the order of the flow; each may import those before it.
_STAGES = ("checkpoint", "graph", "passes", "plan", "kernels", "engine")
# Beside the compiler: one module per command that is more than a call.
_COMMANDS = {
    *(
        "benchmark",
        "chat",
        "compiler",
        "doctor",
        "generation",
        "goldens",
        "inspection",
        "kernel_section",
        "perplexity",
        "planning",
        "text",
        "topology_view",
        "verification",
        "weight_report",
    ),
}
_ALL_BELOW_CLI = {*_GROUND, *_CHOICES, "cubin_cache", "jit_caches", *_STAGES, "runtime", "export", *_COMMANDS}

MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(_GROUND, _GROUND),
    **dict.fromkeys(_CHOICES, _GROUND | _CHOICES),
    "cubin_cache": {"errors"},
    # It knows dsv4c's own cache by its layout, as every other.
    "jit_caches": {"errors", "wording", "jit_caches"},
    **{stage: {*_GROUND, *_CHOICES, *_STAGES[: index + 1]} for index, stage in enumerate(_STAGES)},
    "kernels": {*_GROUND, *_CHOICES, "cubin_cache", *_STAGES[: _STAGES.index("kernels") + 1]},
    # It loads on a device without torch and without the compiler.
    "runtime": {*_GROUND, "engine", "runtime"},
    "export": {*_GROUND, *_CHOICES, "checkpoint", "graph", "passes", "kernels", "export"},
    **dict.fromkeys(_COMMANDS, _ALL_BELOW_CLI),
    "cli": _ALL_BELOW_CLI | {"cli"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Packages that may be absent: imported in a function, each in one module.
OPTIONAL = {"jinja2", "matplotlib", "triton", "tensorrt"}
# Sources of kernels, which only their compiler imports: Triton is their language.
TRITON_KERNELS = PACKAGE / "kernels/triton"
# Modules that load torch, which takes seconds: a command imports them when it runs, so that `--help` does not wait.
LOADED_BY_COMMANDS = {
    "dsv4c.compiler",
    "dsv4c.checkpoint.checkpoint",
    "dsv4c.inspection",
    "dsv4c.planning.model_plan",
    "dsv4c.planning.source",
}
# What the serving side may import besides the standard library.
SERVING_PACKAGES = {"dsv4c", "numpy"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """`dsv4c.graph.ops` -> `graph`."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom))


def imported_modules(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names; `from dsv4c import errors` is the module dsv4c.errors."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    names = [f"{base}.{alias.name}" for alias in statement.names]
    return [name if path_of(name) else base for name in names]


def path_of(module: str) -> Path | None:
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


def defined_names(path: Path) -> set[str]:
    """What a module defines itself, not what it imports."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_list_names_what_exists() -> None:
    assert {part_of(name_of(path)) for path in MODULES} == MAY_IMPORT.keys()
    assert [module for module in sorted(LOADED_BY_COMMANDS) if path_of(module) is None] == []


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_follow_the_flow(path: Path) -> None:
    part = part_of(name_of(path))
    assert part in MAY_IMPORT, f"{part} is new: add it to MAY_IMPORT"
    for statement in imports(tree(path)):
        for module in imported_modules(statement):
            if module.startswith("dsv4c."):
                assert part_of(module) in MAY_IMPORT[part], f"{label(path)}:{statement.lineno} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_are_absolute_and_from_the_defining_module(path: Path) -> None:
    for statement in imports(tree(path)):
        if isinstance(statement, ast.Import):
            continue
        where = f"{label(path)}:{statement.lineno}"
        assert statement.level == 0, f"{where}: relative import"
        source = path_of(statement.module or "")
        if source is None or statement.module == "dsv4c.runtime":
            continue
        for alias in statement.names:
            is_module = path_of(f"{statement.module}.{alias.name}") is not None
            assert is_module or alias.name in defined_names(source), f"{where}: {alias.name} is defined elsewhere"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_packages_export_nothing(path: Path) -> None:
    """`dsv4c.runtime` is the one public API."""
    if path.name == "__init__.py" and path.parent != PACKAGE / "runtime":
        assert not list(imports(tree(path)))


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_are_at_the_top(path: Path) -> None:
    allowed = LOADED_BY_COMMANDS if part_of(name_of(path)) == "cli" else set()
    functions = (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in functions:
        for statement in imports(function):
            for module in imported_modules(statement):
                fine = module.split(".")[0] in OPTIONAL or module in allowed
                assert fine, f"{label(path)}:{statement.lineno} imports {module} in a function"


def test_optional_packages_are_imported_in_one_module_each() -> None:
    users: dict[str, set[str]] = {}
    for path in MODULES:
        if path.parent == TRITON_KERNELS:
            continue
        for statement in imports(tree(path)):
            for module in imported_modules(statement):
                users.setdefault(module.split(".")[0], set()).add(label(path))
    assert {name: sorted(users[name]) for name in OPTIONAL & users.keys() if len(users[name]) > 1} == {}


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_serving_side_needs_the_standard_library(path: Path) -> None:
    """The runtime takes numpy; the format and its reader nothing at all."""
    name = name_of(path)
    if part_of(name) == "runtime":
        packages, dsv4c_modules = SERVING_PACKAGES, None
    elif name in {"dsv4c.engine.format", "dsv4c.engine.reader", "dsv4c.errors", "dsv4c.step_abi"}:
        packages, dsv4c_modules = {"dsv4c"}, {"dsv4c.errors", "dsv4c.step_abi", "dsv4c.engine.format"}
    else:
        return
    for statement in imports(tree(path)):
        for module in imported_modules(statement):
            top = module.split(".")[0]
            assert top in packages or top in sys.stdlib_module_names, f"{name} imports {module}"
            if dsv4c_modules is not None and top == "dsv4c":
                assert module in dsv4c_modules, f"{name} imports {module}"
