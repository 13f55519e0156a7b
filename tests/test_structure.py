"""Who may import whom, ground floor first. (JAX's non-public names: test_jax_names.py.)"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fnet"
MAY_IMPORT = {
    "layers": set(), "hardware": set(), "transforms": {"hardware"}, "models": {"layers"},
    "parallel": {"hardware", "transforms"},
    "training": {"layers", "hardware", "transforms", "models", "parallel"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_the_floors_below(room):
    allowed = {room, "_jax", *MAY_IMPORT[room]}
    for path in (PACKAGE / room).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("fnet.")}
        assert rooms <= allowed, f"{path.relative_to(PACKAGE)} imports {sorted(rooms - allowed)}"


def test_every_room_is_listed():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)


def test_nothing_imports_the_experiments():
    assert not [path for path in FILES for name in imported(path) if name.split(".")[0] == "experiments"]
