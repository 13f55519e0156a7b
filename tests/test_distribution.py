"""The name under which fnet is distributed, and what pages and messages tell a user to install.

Whoever publishes a name on an index owns it: PyPI's `fnet` is another project. So no line installs
a distribution of ours by name before CHANGELOG lists it as published.
"""

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path

import pytest

import fnet
from fnet import export, search, serve
from fnet.models import pretrained

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
EXTRAS = PROJECT["optional-dependencies"]
SOURCES = sorted((ROOT / "fnet").rglob("*.py"))
FOLDERS = ("docs", "notebooks", "fnet", "experiments", "benchmarks", "findings", "tests", ".ci")
KINDS = (".md", ".rst", ".py", ".ipynb", ".txt", ".toml", ".sh", ".html", ".yml", ".yaml")

# Commands that install what follows them. `pip` may be a module, a magic of IPython or uv's.
INSTALLER = re.compile(
    r"""\b(?: (?:pip[\d.]*|pipx|conda|mamba|micromamba|easy_install)\s+(?:-\S+\s+)*
              (?:install|download|wheel|inject|run)
          |   (?:poetry|pdm|rye|pixi|pipenv|hatch|uv)\s+(?:-\S+\s+)*(?:add|install)
          |   uv\s+tool\s+(?:install|run)
          |   uvx|easy_install
        )\s+""",
    re.VERBOSE,
)
OURS = r"fnet(?:[-_.]+[A-Za-z0-9]+)*"
EXTRA = rf"\[(?:{'|'.join(map(re.escape, EXTRAS))})(?:\+[^\]]*)?\]"
ELSEWHERE = [  # {what a line looks like that names one of our distributions outside such a command}
    rf"(?<![\w./-])({OURS}){EXTRA}",
    rf"^[ \t>-]*({OURS})(?:\[[^\]]*\])?\s*(?:[=~!<>]=|[<>])\s*\d",
    rf"^[ \t>]*(?:-\s+)?({NAME.replace('-', '[-_.]+')})(?:\[[^\]]*\])?\s*$",
    rf"(?:dependencies|requires?)\w*\s*=\s*\[[^\]]*?(?<![\w./-])({OURS})(?![\w/-])",
    rf"--(?:with|from)[\s=]({OURS})(?![\w/.-])",
    rf"pypi\.org/(?:project|simple|p)/({OURS})",
]


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(words):
    """Yields the distributions in the arguments of an installer, without files and URLs."""
    words = re.split(r"[`;&|#)]|\.\s", words, maxsplit=1)[0].split()
    path = False  # whether the word is the value of an option that takes a path
    for index, word in enumerate(words):
        if path or word.startswith("-"):
            path = not path and word in ("-e", "--editable", "-r", "-c", "--target", "-t")
            continue
        direct = "@" in word or words[index + 1 : index + 2] == ["@"]
        name = re.match(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?(?=$|[=~!<>])", word)
        if name and not direct and not word.endswith((".whl", ".tar.gz", ".py", ".txt")):
            yield name[1].rstrip(".-")


def ours(text):
    """Returns the distributions of ours that a text installs by name."""
    if "fnet" not in text.lower():
        return set()
    plain = re.sub(r"\\+[nt]", "\n", text)  # in strings of notebooks and of programs
    plain = re.sub(r"\\\s*\n", " ", plain)
    extras = lambda match: re.sub(r"[\s,]+", "+", match[0]).replace("[+", "[").replace("+]", "]")
    plain = re.sub(r"(?<=\w)\[[\w\s,-]+\]", extras, plain)
    plain = re.sub(r"\\?[\"'“”,]|\\$", " ", plain, flags=re.MULTILINE)
    found = []
    for command in INSTALLER.finditer(plain):
        line = plain[command.end() :].split("\n", 1)[0]
        found += installed(line)
        found += list(installed(" ".join(plain[command.end() :].split())))[:1]  # in wrapped prose
    for pattern in ELSEWHERE:
        found += re.findall(pattern, plain, re.MULTILINE | re.DOTALL)
    return {name for name in map(normalized, found) if re.fullmatch("fnet(-.+)?", name)}


def strings(source):
    """Yields the strings of a program as they are at run time, with {} for what it computes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def published():
    """Returns the distributions that CHANGELOG lists as published."""
    listed = re.search(r"Published on PyPI: (.*?)\.\s", (ROOT / "CHANGELOG.md").read_text())[1]
    names = {normalized(name) for name in re.findall(r"`([\w.-]+)`", listed)}
    assert bool(names) != (listed == "none"), listed
    return names - {"fnet"}  # which belongs to another project


@functools.cache
def pages():
    return list(_pages())


def _pages():
    """Yields (path, text) of all that a user may read, and of the messages of programs."""
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")]
    for folder in FOLDERS:
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS)
    for path in files:
        if {"_build", "generated", "__pycache__"} & set(path.parts) or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        yield path.relative_to(ROOT), text
        if path.suffix == ".py" and "install" in text:
            yield path.relative_to(ROOT), "\n".join(strings(text))


def test_the_citation_and_the_changelog_name_the_version():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert cited == fnet.__version__
    assert f"\n## {cited}, " in (ROOT / "CHANGELOG.md").read_text()


def test_no_line_installs_a_distribution_by_name_that_is_not_published():
    allowed = published()
    found = {(str(path), name) for path, text in pages() for name in ours(text) - allowed}
    assert not found, f"install these from the repository or from a wheel: {sorted(found)}"


@pytest.mark.parametrize(
    "line",
    [
        "pip install fnet",
        "pip install 'fnet[onnx]'",
        'pip install "fnet[onnx, serve]>=0.1"',
        "pip install -U --quiet fnet",
        "pip install numpy jax fnet-jax",
        "pip3.12 install fnet_jax",
        "python -m pip install --upgrade FNET.jax==0.2",
        "pip install -r requirements.txt fnet",
        "pip install -c constraints/py3.12.txt 'fnet-jax[search]'",
        "pip install fnet-kernels",
        "Needs `pip install\n  'fnet[hub]'`, which downloads.",
        "pip install \\\n    fnet-jax",
        """x = "plots need matplotlib: pip install "\n    "'fnet[experiments]'" """,
        '    "    %pip install -q fnet\\n",',
        '    "!pip install \\"fnet-jax[tpu]\\"\\n",',
        'run([sys.executable, "-m", "pip", "install", "fnet-jax"])',
        "uv pip install fnet-jax",
        "uv add 'fnet-jax[onnx]'",
        "uv tool install fnet",
        "uvx fnet-jax chips",
        "uv run --with fnet-jax fnet chips",
        "uvx --from=fnet-jax fnet",
        "pipx run fnet",
        "poetry add fnet-jax",
        "conda install -c conda-forge fnet",
        "needs the packages of fnet[serve].",
        "the extra (fnet-jax[tpu-plan])",
        "fnet>=0.1",
        "fnet-jax[onnx] == 0.2.0",
        "jax\nfnet-jax\nnumpy",
        "dependencies:\n  - fnet-jax\n",
        'dependencies = ["jax", "fnet>=0.1"]',
        'install_requires=[\n    "fnet",\n]',
        "https://pypi.org/project/fnet-jax/",
    ],
)
def test_a_line_that_installs_by_name_is_found(line):
    assert ours(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install -e .",
        "pip install -e '.[onnx]'",
        "pip install './fnet[tpu]'",
        "pip install -e fnet",
        "pip install dist/fnet_jax-0.1.0-py3-none-any.whl",
        "pip install 'dist/fnet_jax-0.1.0-py3-none-any.whl[onnx]'",
        "pip install 'fnet-jax @ file:///tmp/fnet_jax-0.1.0.tar.gz'",
        "pip install onnx onnxruntime",
        "pip uninstall fnet",
        "To install obstore, use `pip install obstore`. fnet then reads stores.",
        "uv run fnet chips",
        "fnet serve digits.fnet",
        "from fnet import layers as nn",
        "values = fnet[index]",
        "if fnet > other: ...",
        "The distribution is called fnet-jax, the import fnet.",
        'forms = ("fnet", "fnet-tuned")',
    ],
)
def test_a_line_that_does_not_is_not_found(line):
    assert not ours(line)


def test_the_name_stands_in_pyproject_alone():
    """Programs do not know the name of their distribution, so a new one needs no other change."""
    spelled = re.compile(rf"(?<!\w){NAME.replace('-', '[-_]')}(?!\w)")
    named = re.compile(r"metadata\.\w+\(\s*[\"']fnet")
    found = [
        str(path)
        for path, text in pages()
        if path.suffix in (".py", ".ipynb", ".sh") or path.name == "Makefile"
        if spelled.search(text) or named.search(text)
    ]
    assert not found
    assert NAME != "fnet" and PROJECT["scripts"] == {"fnet": "fnet.cli:main"}


def test_the_version_and_the_classifiers_are_those_of_the_code_and_of_the_constraints():
    assert PROJECT["version"] == fnet.__version__
    pinned = {path.stem[2:] for path in (ROOT / "constraints").glob("py3.*.txt")}
    listed = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if " Python :: 3." in line}
    assert listed == pinned
    oldest = min(pinned, key=lambda version: int(version.split(".")[1]))
    assert PROJECT["requires-python"] == f">={oldest}"


def pins(path):
    """Returns {distribution: version} of a file in constraints."""
    lines = [line.split("#")[0].split(";")[0].strip() for line in path.read_text().splitlines()]
    return {normalized(name): version for name, version in (x.split("==") for x in lines if x)}


def test_what_runs_in_the_tests_is_pinned_for_every_python():
    """Optuna, Grain, datasets and LiteRT, without which some tests skip."""
    optional = "optuna", "grain", "datasets", "onnxruntime", "chex"
    assert set(optional) <= {name_of(line) for line in EXTRAS["dev"]}
    files = sorted((ROOT / "constraints").glob("py3.*.txt"))
    assert all(set(optional) <= pins(path).keys() for path in files)
    assert all(pins(path)["optuna"] >= "5" for path in files)
    tested = pins(ROOT / "constraints" / "litert.txt")
    for line in EXTRAS["litert"]:
        name, version = line.split("==")
        assert tested[name].startswith(version.removesuffix("*"))


def test_chex_is_for_tests_alone():
    """It alone keeps pip from installing litert-converter."""
    naming = [name for name, extra in EXTRAS.items() if "chex" in map(name_of, extra)]
    assert naming == ["dev"] and "chex" not in map(name_of, PROJECT["dependencies"])
    imported = [
        str(path)
        for path, tree in programs("chex")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "chex" in ast.unparse(node)
    ]
    assert not imported


def programs(*words):
    """Yields (path, tree) of the files of fnet that contain one of the words."""
    for path in SOURCES:
        text = path.read_text()
        if any(word in text for word in words):
            yield path.relative_to(ROOT), ast.parse(text)


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0]


def test_messages_name_packages_of_the_extras_with_their_fixed_versions():
    requirements = [
        *PROJECT["dependencies"],
        *(line for extra in EXTRAS.values() for line in extra),
    ]
    declared = {name_of(line): line for line in requirements}
    named = [
        argument.value
        for _, tree in programs("_missing.message")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_missing.message"
        for argument in node.args[1:]
        if isinstance(argument, ast.Constant)
    ]
    assert len(named) > 15
    for requirement in named:
        wanted = declared[name_of(requirement)]
        assert requirement in ((wanted,) if "==" in wanted else (wanted, name_of(wanted)))


def double(folder):
    program = export.program(lambda params, x: 2 * x, {}, x=export.spec("b"))
    program.save(folder / "double.fnet")
    return program


@pytest.mark.parametrize(
    "module, call, expected",
    [
        (
            "onnx",
            lambda folder: double(folder).onnx(folder / "f.onnx"),
            r"^ONNX needs the packages onnx and onnxruntime \(.*onnx.*\): pip install onnx onnxruntime$",
        ),
        (
            "onnxruntime",
            lambda folder: pytest.importorskip("onnx") and double(folder).onnx(folder / "f.onnx"),
            r"^the check of an ONNX model needs the package onnxruntime \(.*\): pip install onnxruntime, "
            r"or write the model with check=False$",
        ),
        (
            "starlette.applications",
            lambda folder: serve.application([]),
            r"^fnet.serve needs the packages starlette and uvicorn \(.*starlette.*\): pip install "
            r"starlette uvicorn$",
        ),
        (
            "uvicorn",
            lambda folder: (
                pytest.importorskip("starlette")
                and double(folder)
                and serve.run([str(folder / "double.fnet")])
            ),
            r"^fnet.serve needs the packages starlette and uvicorn \(.*uvicorn.*\): pip install "
            r"starlette uvicorn$",
        ),
        (
            "gguf",
            lambda folder: pretrained.load_gguf(__file__),
            r"^pretrained.load_gguf needs the package gguf \(.*\): pip install gguf$",
        ),
        (
            "optuna",
            lambda folder: search.Bayesian(search.Space(x=search.Uniform(-1, 1))),
            r"^Bayesian optimization needs the package optuna, which is not installed: pip install optuna$",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_missing_package_is_named(module, call, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=expected):
        call(tmp_path)


def written_by_hand(tree):
    """Yields the lines that write a command that installs, or that answer an import which failed,
    without `_missing.message`."""
    manuals = set()
    for node in ast.walk(tree):  # an enclosing node comes before what it contains
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            manuals.add(getattr(first, "value", None))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in manuals and INSTALLER.search(node.value + " "):
                yield node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            raised = "".join(ast.unparse(each) for each in node.body if isinstance(each, ast.Raise))
            failed = {"ImportError", "ModuleNotFoundError"} & set(
                re.findall(r"\w+", ast.unparse(node.type))
            )
            if failed and "Error(" in raised and "_missing.message" not in raised:
                yield node.lineno


def test_one_function_writes_the_messages_about_missing_packages():
    words = "install", "ImportError", "ModuleNotFoundError"
    found = [path.name for path, tree in programs(*words) for _ in written_by_hand(tree)]
    assert found == ["_plan.py"]  # which imports a module of the user's


@pytest.mark.parametrize(
    "program",
    [
        "f('plots need matplotlib: pip install matplotlib')",
        "WHY = f'{name}: pip install {package}'",
        "try:\n    import onnx\nexcept ImportError:\n    raise ImportError('no onnx') from None",
        "try:\n    import onnx\nexcept (OSError, ImportError):\n    raise ValueError('no onnx')",
    ],
)
def test_a_message_written_by_hand_is_found(program):
    assert list(written_by_hand(ast.parse(program)))
