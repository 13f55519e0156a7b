"""The Python blocks of README and the pages run, from the top of each page to its end.

A block whose first line is ```python no-run is shown only: it needs files or packages that the
tests do not have.
"""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))
from _sphinx import docstrings, tasks  # noqa: E402 (part of the documentation, not of fnet)
from _sphinx import names as public_names  # noqa: E402

# These pages have tests of their own, which also compare what they print.
ELSEWHERE = {"docs/hardware.md", "docs/precision.md", "docs/training.md"}
PAGES = [
    "README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "docs").rglob("*.md")
        if "_build" not in path.parts and "```python\n" in path.read_text()
    ),
]
NEEDS = {
    "docs/getting_started/first_network.md": "sklearn",
    "docs/how_to/own_data.md": "PIL",
    "docs/how_to/serve.md": "uvicorn",
}
PACKAGES = {"pytorch": "torch", "keras": "keras", "equinox": "equinox", "haiku": "haiku"}
SLOW = (
    "docs/getting_started/",
    "docs/how_to/",  # their parts have quick tests elsewhere
    *(
        f"docs/{page}.md"
        for page in (
            "compress",
            "interop",
            "introspection",
            "layers",
            "models",
            "parallel",
            "search",
            "ten_minutes",
            "transforms",
        )
    ),
)


@pytest.fixture
def as_a_user(quickly, tmp_path, monkeypatch):
    """JAX's defaults, in an empty folder. Optax's Adam needs the standard promotion."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def marked(name, slow):
    return pytest.param(name, marks=pytest.mark.exhaustive) if slow else name


@pytest.mark.parametrize(
    "page", [marked(page, page.startswith(SLOW)) for page in PAGES if page not in ELSEWHERE]
)
def test_a_page_runs(page, as_a_user):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "library", ["fnet", *(marked(library, True) for library in tasks.LIBRARIES)]
)
@pytest.mark.filterwarnings("ignore")
def test_the_twenty_tasks_run(library, as_a_user, monkeypatch):
    if library in PACKAGES:
        pytest.importorskip(PACKAGES[library])
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert list(tasks.read(library)) == list(tasks.read("fnet")) and len(tasks.read("fnet")) == 21
    source = (tasks.FOLDER / f"{library}_tasks.py").read_text()
    exec(compile(source, f"{library}_tasks.py", "exec"), {"__name__": f"{library}_tasks"})


@pytest.mark.parametrize("library", tasks.LIBRARIES)
def test_the_pages_show_the_code_of_the_tasks(library):
    page = (tasks.FOLDER / f"{library}.md").read_text()
    assert tasks.written(page) == page, "run: python docs/_sphinx/tasks.py"
    for code in (*tasks.read(library).values(), *tasks.read("fnet").values()):
        assert f"```python no-run\n{code}\n```" in page


def test_the_site_shows_the_tasks_in_columns():
    source = [(tasks.FOLDER / "equinox.md").read_text()]
    tasks.insert(None, None, source)
    assert source[0].count("::::{grid} ") == 21 and "<!--" not in source[0]
    assert source[0].startswith("# Coming from Equinox") and "python no-run" not in source[0]


def test_the_commands_on_the_pages_name_files_that_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text() for path in pages if "_build" not in path.parts]
    texts = [re.sub(r"https?://[^\s)>]+", "", text) for text in texts]
    files = re.compile(r"\b(?:tests|experiments|notebooks|benchmarks|docs)/[\w/.]+\w")
    named = {name for text in texts for name in files.findall(text)}
    assert len(named) > 50
    ignored = {"docs/_build/html"}
    assert not [name for name in sorted(named - ignored) if not (ROOT / name).exists()]
    modules = {
        name
        for text in texts
        for name in re.findall(r"python -m (benchmarks\.\w+|tests\.\w+)", text)
    }
    assert not [name for name in sorted(modules) if importlib.util.find_spec(name) is None]


def test_relative_links_have_targets():
    missing = []
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text):
            if "_build" not in path.parts and not (path.parent / link).exists():
                missing.append(f"{path.relative_to(ROOT)}: {link}")
    assert not missing


def test_docstrings_become_restructured_text():
    lines = [
        "A layer:",
        "",
        "    y = Dense(3)(params, x)",
        "",
        "Args:",
        "    x: [*batch, in].",
        "    **options: other",
    ]
    assert docstrings.convert(lines) == [
        "A layer:",
        "",
        ".. code-block:: python",
        "",
        "    y = Dense(3)(params, x)",
        "",
        "Args:",
        r"    x: [\*batch, in].",
        r"    \*\*options: other",
    ]
    assert docstrings.convert([">>> f(2)", "*2*", "", "a `*` b"]) == [
        ">>> f(2)",
        "*2*",
        "",
        "a `*` b",
    ]


def test_every_public_name_is_in_the_reference():
    listed = {}
    for page in (ROOT / "docs" / "api").glob("*.rst"):
        text = page.read_text()
        names = re.findall(r"^(?:   |\.\. py:data:: )([\w.]+)$", text, re.MULTILINE)
        assert len(names) == len(set(names)), page.name
        listed[re.search(r"automodule:: (\S+)", text)[1]] = {
            name for name in names if "." not in name
        }
    assert listed == {
        f"fnet.{package}": set(public) for package, public in public_names.by_package().items()
    }
