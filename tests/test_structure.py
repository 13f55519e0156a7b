"""Which package may import which, lowest layer first. (JAX's non-public names: test_jax_names.py.)"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fnet"
MAY_IMPORT = {
    "_jax": set(),
    "jaxpr": {"_jax"},
    "layers": {"_jax", "jaxpr"},
    "hardware": {"_jax", "jaxpr"},
    "transforms": {"_jax", "jaxpr", "hardware"},
    "models": {"_jax", "jaxpr", "layers", "transforms", "compress"},
    "parallel": {"_jax", "jaxpr", "hardware", "transforms"},
    "introspect": {"_jax", "jaxpr", "layers", "hardware", "transforms", "parallel"},
    "compress": {"_jax", "jaxpr", "layers", "hardware", "transforms"},
    "training": {
        "_jax",
        "jaxpr",
        "layers",
        "hardware",
        "transforms",
        "models",
        "parallel",
        "introspect",
    },
    "export": {"_jax", "jaxpr", "layers", "hardware", "transforms", "models"},
    "search": {
        "_jax",
        "jaxpr",
        "layers",
        "hardware",
        "transforms",
        "models",
        "parallel",
        "introspect",
        "training",
        "report",
    },
    "report": {
        "_jax",
        "jaxpr",
        "layers",
        "hardware",
        "transforms",
        "models",
        "parallel",
        "introspect",
        "training",
    },
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_lower_layers(package):
    allowed = {package, *MAY_IMPORT[package]}
    for path in (PACKAGE / package).rglob("*.py"):
        used = {name.split(".")[1] for name in imported(path) if name.startswith("fnet.")}
        assert used <= allowed, f"{path.relative_to(PACKAGE)} imports {sorted(used - allowed)}"


def test_every_package_is_listed():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)


@pytest.mark.exhaustive
def test_parameters_of_equations_are_read_by_key_in_jaxpr_alone():
    """`eqn.params["name"]`, `eqn.params.get("name")` and `"name" in eqn.params`, under any name of
    the equation."""
    keyed = re.compile(
        r"\b(eqn|equation|op\.eqn|source|sink|\w*\.eqns\[[^\]]*\])\.params(\[|\.get\(|\.keys|\.items)|"
        r"\bin (eqn|equation)\.params\b"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in FILES
        if path.parent.name not in ("_jax", "jaxpr")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if keyed.search(line)
    ]
    assert not found, f"read these through fnet.jaxpr: {found}"


@pytest.mark.exhaustive
def test_nothing_imports_the_experiments():
    assert not [
        path for path in FILES for name in imported(path) if name.split(".")[0] == "experiments"
    ]
