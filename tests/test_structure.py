"""Which package imports which, lowest layer first. (JAX's non-public names: test_jax_names.py.)"""

import ast
import importlib
import re
from pathlib import Path

import pytest

from fnet._moved import MOVED

PACKAGE = Path(__file__).parent.parent / "fnet"
IMPORTS = {
    "_util": "",
    "_jax": "",
    "jaxpr": "_jax",
    "axes": "_jax jaxpr",
    "layers": "_jax _util jaxpr",
    "hardware": "_jax _util",
    "cost": "_util hardware jaxpr",
    "native": "_jax _util hardware jaxpr",
    "transforms": "_jax _util axes hardware jaxpr native",
    "parallel": "_jax _util axes cost hardware jaxpr layers transforms",
    "compress": "_jax _util axes cost hardware jaxpr native transforms",
    "models": "_util compress jaxpr layers transforms",
    "export": "_jax _util jaxpr layers",
    "introspect": "_jax _util axes cost export hardware jaxpr layers parallel transforms",
    "serve": "_util compress export introspect jaxpr layers models transforms",
    "training": "_jax _util cost hardware introspect jaxpr layers parallel transforms",
    "search": "_jax _util cost jaxpr parallel training transforms",
    "federated": "_jax search training transforms",
    "report": "_util training",
    "cli": "_util export hardware introspect models parallel report search serve training",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    """Yields the modules that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("package", IMPORTS)
def test_a_package_imports_what_the_table_says_and_nothing_else(package):
    used = {
        name.split(".")[1]
        for path in (PACKAGE / package).rglob("*.py")
        for name in imported(path)
        if name.startswith("fnet.")
    }
    assert used - {package, "_moved"} == set(IMPORTS[package].split())


def test_the_table_lists_every_package_after_those_that_it_imports():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(IMPORTS)
    order = list(IMPORTS)
    for package, used in IMPORTS.items():
        assert all(order.index(other) < order.index(package) for other in used.split()), package


def test_no_file_imports_a_file_that_imports_it():
    """Files, without the `__init__` of packages, whose imports form a circle."""
    name = lambda path: ".".join(("fnet", *path.relative_to(PACKAGE).with_suffix("").parts))
    files = {name(path): path for path in FILES if path.name != "__init__.py"}
    graph = {file: set(imported(path)) & set(files) - {file} for file, path in files.items()}
    while leaves := [file for file, used in graph.items() if not used & set(graph)]:
        for file in leaves:
            del graph[file]
    while unused := set(graph) - set().union(*graph.values()):
        for file in unused:
            del graph[file]
    assert not graph, f"these files import each other: {sorted(graph)}"


def test_moved_names_are_found_under_their_old_names_alone():
    for old, new in MOVED.items():
        package, name = old.rsplit(".", 1)
        module = importlib.import_module(f"fnet.{package}")
        assert getattr(module, name) is _found(new)
        assert name not in module.__all__
    for old in ("export.serve", "search.federated"):  # modules
        alias = importlib.import_module(f"fnet.{old}")
        assert alias.__name__ == f"fnet.{old}" and not hasattr(alias, "__file__")
    with pytest.raises(ImportError, match="cannot import name 'rooflines'"):
        exec("from fnet.hardware import rooflines")


def _found(path):
    package, _, name = f"fnet.{path}".rpartition(".")
    try:
        return getattr(importlib.import_module(package), name)
    except AttributeError:
        return importlib.import_module(f"fnet.{path}")


@pytest.mark.exhaustive
def test_parameters_of_equations_are_read_by_key_in_jaxpr_alone():
    """`eqn.params["name"]`, `eqn.params.get("name")` and `"name" in eqn.params`, under any name of
    the equation. The stable form writes all parameters, and refuses those that it does not know."""
    keyed = re.compile(
        r"\b(eqn|equation|op\.eqn|source|sink|\w*\.eqns\[[^\]]*\])\.params(\[|\.get\(|\.keys|\.items)|"
        r"\bin (eqn|equation)\.params\b"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in FILES
        if path.parent.name not in ("_jax", "jaxpr") and path.name != "_stable.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if keyed.search(line)
    ]
    assert not found, f"read these through fnet.jaxpr: {found}"


@pytest.mark.exhaustive
def test_nothing_imports_the_experiments():
    assert not [
        path for path in FILES for name in imported(path) if name.split(".")[0] == "experiments"
    ]


def test_programs_are_traced_by_one_function():
    """`_jax.make_jaxpr` traces to the primitives that fnet's rules know."""
    found = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.make_jaxpr"
    ]
    assert found == ["_jax/_hijax.py"]


def test_one_module_finds_the_nearest_name():
    """ "Did you mean": the bounds and the words of these messages are in one place."""
    users = {str(path.relative_to(PACKAGE)) for path in FILES if "difflib" in imported(path)}
    assert users == {"_util/_nearest.py"}


_WRITERS = {
    "os": {"replace", "rename", "renames", "link", "symlink", "fsync", "fdatasync", "sync"},
    "shutil": {"move"},
    "tempfile": {"mkstemp", "mktemp", "NamedTemporaryFile"},
}


def replacements(path):
    """Yields the calls in a file that rename files, sync them or give them temporary names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            known = _WRITERS.get(node.module, set())
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in known)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        if owner in _WRITERS:
            if name in _WRITERS[owner]:
                yield f"{owner}.{name}"
        elif name in ("rename", "replace") and len(node.args) == 1 and not node.keywords:
            yield f".{name}"  # a str has two arguments here, a dataclass keywords


def test_files_are_replaced_and_synced_in_one_module():
    """Files are written whole or not at all, and only fnet/_util/_files.py knows how."""
    found = {str(path.relative_to(PACKAGE)): set(replacements(path)) for path in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {
        "_util/_files.py": {"os.replace", "os.fsync", "os.link"},
        # Folders: a checkpoint is complete when its folder has its number, and `tidy` completes or
        # takes back what a killed process has begun.
        "training/checkpoints/_folder.py": {"os.rename"},
        "layers/_interop_nnx.py": {".replace"},  # of a flax.nnx.Variable, not of a path
    }


def test_one_module_writes_the_head_of_html_pages():
    """Escaping, the policy that keeps a page from the network, and the title are in one place; other
    files hold the bodies."""
    files = [path for kind in ("*.py", "*.html", "*.js") for path in PACKAGE.rglob(kind)]
    words = re.compile(r"<!doctype|<html|<head>|<body|Content-Security-Policy\" content", re.I)
    writers = [str(path.relative_to(PACKAGE)) for path in files if words.search(path.read_text())]
    assert writers == ["_util/_page.py"]
