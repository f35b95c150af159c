"""What a reader relies on: imports run one way, and one module knows the versions of JAX."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tracegrad"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room imports from lower floors, and from neighbours as long as no circle comes of it.
FLOORS = [
    {"_jax"},
    {"ir"},
    {"lowering"},
    {"variables"},
    {"tracing"},
    {"rewriting", "planning"},
    {"differentiation"},
    {"tape"},
    {"annotations", "saving", "insight"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

each_module = pytest.mark.parametrize(
    "module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE))
)


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(module: Path) -> set[str]:
    """Every dotted name that a file imports: ``a.b`` for ``from a import b`` too."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = node.module if node.level == 0 else f"relative import, line {node.lineno}"
            found |= {f"{package}.{alias.name}" for alias in node.names}
    return found


def imported_rooms(module: Path) -> set[str]:
    ours = {name for name in imported_names(module) if name.startswith("tracegrad.")}
    return {name.split(".")[1] for name in ours} - {room_of(module)}


@each_module
def test_a_room_imports_from_no_higher_floor(module: Path):
    if room_of(module) != "__init__":
        floor = FLOOR[room_of(module)]
        assert {room for room in imported_rooms(module) if FLOOR[room] > floor} == set()


def test_rooms_do_not_import_in_a_circle():
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        rooms.setdefault(room_of(module), set()).update(imported_rooms(module))
    assert "_jax" in set(TopologicalSorter(rooms).static_order())  # a circle raises CycleError


@each_module
def test_imports_are_absolute_and_not_private_to_jax(module: Path):
    for name in imported_names(module):
        assert not name.startswith(("relative import", "jax._src", "jaxlib._")), name


@each_module
def test_only_one_module_knows_the_versions_of_jax(module: Path):
    if module != PACKAGE / "_jax" / "compat.py":
        nodes = ast.walk(ast.parse(module.read_text()))
        names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert not names & {"jax.__version__", "jax.__version_info__", "_jax.VERSION"}
        assert module.parent.name == "_jax" or not any(
            name.endswith("compat.VERSION") for name in imported_names(module)
        )


@each_module
def test_the_package_differentiates_by_jaxs_own_functions(module: Path):
    """Those in `jax` go by the rules in force; see `tracegrad.differentiation.jax_derivatives`."""
    nodes = ast.walk(ast.parse(module.read_text()))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    replaced = ("grad", "value_and_grad", "vjp", "linearize", "jacrev", "jacfwd", "hessian")
    assert not names & {f"jax.{name}" for name in replaced}
