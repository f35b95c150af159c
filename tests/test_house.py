"""What a reader relies on: imports run one way, and one module knows the versions of JAX."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

HERE = Path(__file__).parents[1]
PACKAGE = HERE / "tracegrad"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Each room imports from those before it.
ROOMS = [
    "_version",
    "_jax",
    "ir",
    "variables",
    "tracing",
    "rewriting",
    "differentiation",
    "tape",
    "annotations",
    "saving",
    "planning",
    "insight",
    "__init__",
    "__main__",
]


def of_each_module(claim: Callable[[Path], None]) -> Callable[[], None]:
    """One test of a claim about every file, which names the files that break it: as tests of their
    own, a thousand, they would be most of the time."""

    def test() -> None:
        broken = {}
        for module in MODULES:
            try:
                claim(module)
            except AssertionError as error:
                broken[str(module.relative_to(PACKAGE))] = str(error)
        assert broken == {}

    test.__name__, test.__doc__ = claim.__name__, claim.__doc__
    return test


def name_of(module: Path) -> str:
    """``tracegrad.ir.graph``; a room's ``__init__`` has the name of the room."""
    parts = module.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {name_of(module): module for module in MODULES}
TREES = {module: ast.parse(module.read_text()) for module in MODULES}


def room_of(name: str) -> str:
    """``ir``, of ``tracegrad.ir.graph.Graph``; that of ``tracegrad`` itself is ``__init__``."""
    return [*name.split("."), "__init__"][1]


def statements(
    node: ast.AST, *, running: bool, in_function: bool = False
) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement below a node, and whether it stands in a function. `running`: not those that
    only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if running and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child, in_function
        inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from statements(child, running=running, in_function=inside)


def imported_names(module: Path, *, running: bool = False) -> Iterator[tuple[str, bool]]:
    """Every dotted name that a file imports (``a.b`` for ``from a import b``), and whether a
    function does it."""
    for node, in_function in statements(TREES[module], running=running):
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = node.module if node.level == 0 else f"relative import, line {node.lineno}"
            yield from ((f"{package}.{alias.name}", in_function) for alias in node.names)


def own_names(module: Path) -> set[str]:
    """Those of this package."""
    names = {name for name, _ in imported_names(module)}
    return {name for name in names if name.split(".")[0] == "tracegrad"}


@of_each_module
def test_a_room_imports_from_those_before_it(module: Path):
    floor = ROOMS.index(room_of(name_of(module)))
    assert {name for name in own_names(module) if ROOMS.index(room_of(name)) > floor} == set()


def test_files_do_not_import_in_a_circle():
    """A name from a room's ``__init__`` is an import of that file, and it one of all it imports."""
    imported = {}
    for module in MODULES:
        names = [name for name, _ in imported_names(module, running=True)]
        paths = {FILES.get(name) or FILES.get(name.rpartition(".")[0]) for name in names}
        imported[module] = paths - {None, module}
    assert len(set(TopologicalSorter(imported).static_order())) == len(MODULES)


@of_each_module
def test_what_is_private_to_a_room_is_used_in_it_alone(module: Path):
    """`_jax` is a name of all: it is the package that is private, not what it offers."""
    room = room_of(name_of(module))
    others = {name for name in own_names(module) if room_of(name) not in (room, "_version")}
    parts = [(name, part) for name in others for part in name.split(".")[1:]]
    assert [name for name, part in parts if part.startswith("_") and part != "_jax"] == []
    modules = {name.rpartition(".")[2] for name in others if name in FILES}
    attributes = [
        ast.unparse(node)
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and node.attr.startswith("_")
    ]
    assert attributes == []


@of_each_module
def test_no_function_imports_from_this_package_to_dodge_a_circle(module: Path):
    hidden = [name for name, in_function in imported_names(module) if in_function]
    assert [name for name in hidden if name.split(".")[0] == "tracegrad"] == []


@of_each_module
def test_a_module_assigns_to_no_other_when_it_is_imported(module: Path):
    others = {name.rpartition(".")[2] for name in own_names(module)}
    assigned = [node for node in TREES[module].body if isinstance(node, ast.Assign)]
    changed = set()
    for target in (target for node in assigned for target in node.targets):
        owner = target
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if owner is not target and isinstance(owner, ast.Name) and owner.id in others:
            changed.add(owner.id)
    assert changed == set()


@of_each_module
def test_imports_are_absolute_and_not_private_to_jax(module: Path):
    for name, _ in imported_names(module):
        assert not name.startswith(("relative import", "jax._src", "jaxlib._")), name


@of_each_module
def test_only_one_module_knows_the_versions_of_jax(module: Path):
    if module != PACKAGE / "_jax" / "compat.py":
        names = {ast.unparse(n) for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute)}
        assert not names & {"jax.__version__", "jax.__version_info__", "_jax.VERSION"}
        assert module.parent.name == "_jax" or not any(
            name.endswith("compat.VERSION") for name in own_names(module)
        )


def test_the_map_shows_the_rooms_in_the_order_of_imports():
    text = (HERE / "CONTRIBUTING.md").read_text()
    shown = re.findall(r"^\d+\. `(\w+)/`", text, flags=re.MULTILINE)
    assert shown == [room for room in ROOMS if (PACKAGE / room).is_dir()]
