"""The arrows of the house: `spec -> rlt_fsm -> engine | verification`, never back, never sideways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlt_fsm", "engine", "verification")
FORBIDDEN = {
    "rlt_fsm": {"engine", "verification", "benchmarks", "tests", "torch", "nixl", "z3", "cvc5", "numpy", "scipy"},
    "engine": {"verification", "benchmarks", "tests", "z3", "cvc5", "yaml", "pydot", "transitions"},
    "verification": {"engine", "benchmarks", "tests", "torch", "nixl", "yaml", "pydot", "transitions"},
}
# Each of these is known to one module, or to one folder: whoever replaces it has one place to look at.
HOMES = {
    "yaml": ("rlt_fsm/load_yaml.py",),
    "pydot": ("rlt_fsm/render.py",),
    "transitions": ("rlt_fsm/interop.py",),
    "nixl": ("engine/pd/nixl.py",),
    "z3": ("verification/smt/",),
    "cvc5": ("verification/smt/reading.py",),
}
# Nothing in these modules may know a device, a network, a clock or chance.
PURE = (
    "rlt_fsm/errors.py",
    "rlt_fsm/expr.py",
    "rlt_fsm/model.py",
    "rlt_fsm/check.py",
    "rlt_fsm/ground.py",
    "engine/pd/coordinator.py",
    "engine/pd/messages.py",
    "engine/schedule/scheduler.py",
    "engine/cache/pages.py",
)
IMPURE = {"torch", "nixl", "random", "secrets", "socket", "threading", "multiprocessing", "subprocess", "asyncio"}


def modules() -> list[Path]:
    """Every module of the three packages."""
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever it stands; also of `import_module("x")` and `__import__("x")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its direction"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield node.lineno, first.value


def imports_of(path: Path) -> list[tuple[int, str]]:
    """What one file imports."""
    return list(imported(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def top(name: str) -> str:
    """The package of a module; every build of nixl is nixl."""
    first = name.split(".")[0]
    return "nixl" if first.startswith("nixl") else first


def test_there_are_modules() -> None:
    """Goal: the tests below look at something. Method: each package has files."""
    found = {path.relative_to(ROOT).parts[0] for path in modules()}

    assert found == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arrows_do_not_turn_round(package: str) -> None:
    """Goal: no package knows one that is built on it, or beside it. Method: every import of its syntax trees."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in modules()
        if path.relative_to(ROOT).parts[0] == package
        for line, name in imports_of(path)
        if top(name) in FORBIDDEN[package]
    ]

    assert wrong == []


@pytest.mark.parametrize("library", HOMES)
def test_a_library_has_one_home(library: str) -> None:
    """Goal: a library can be replaced in one place. Method: who imports it, against where it belongs."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in modules()
        for line, name in imports_of(path)
        if top(name) == library and not path.relative_to(ROOT).as_posix().startswith(HOMES[library])
    ]

    assert wrong == []


def test_the_pure_parts_touch_no_world() -> None:
    """Goal: the cores can be run by a simulator and a checker alike. Method: their imports."""
    wrong = [
        f"{name}:{line}: imports {module}"
        for name in PURE
        if (ROOT / name).exists()
        for line, module in imports_of(ROOT / name)
        if top(module) in IMPURE
    ]

    assert wrong == []


def test_packages_re_export_nothing() -> None:
    """Goal: a name is imported from where it is defined. Method: `__init__.py` holds a docstring and no import."""
    wrong = [str(path.relative_to(ROOT)) for path in modules() if path.name == "__init__.py" and imports_of(path)]

    assert wrong == []


def test_an_import_is_found_wherever_it_hides() -> None:
    """Goal: the walker above sees what it must. Method: imports at the top, in a function, by name."""
    text = "import a.b\ndef f():\n    from c import d\n    import importlib\n    importlib.import_module('e.f')\n"

    assert [name for _, name in imported(ast.parse(text))] == ["a.b", "c", "c.d", "importlib", "e.f"]
