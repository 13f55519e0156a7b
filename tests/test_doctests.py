"""The examples in fnet's docstrings run, and say what they show."""

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fnet

# docs/api/index.md states these imports.
IMPORTED = {
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "optax": optax,
    "fnet": fnet,
    "nn": fnet.layers,
    "ft": fnet.transforms,
    "tr": fnet.training,
    "hw": fnet.hardware,
    "cost": fnet.cost,
    "models": fnet.models,
    "parallel": fnet.parallel,
    "compress": fnet.compress,
    "export": fnet.export,
    "federated": fnet.federated,
    "serve": fnet.serve,
    "introspect": fnet.introspect,
    "report": fnet.report,
    "search": fnet.search,
}
NEEDS = {
    "fnet.export._web.web": ("onnx", "onnxruntime"),
    "fnet.hardware._history.plot": ("matplotlib",),
    "fnet.models.evaluation._lm_eval.lm_eval_model": ("lm_eval",),
    "fnet.models.tokenizers._tokenizers.HuggingFaceTokenizer": ("tokenizers",),
    "fnet.models.tokenizers._wordpiece.WordPiece": ("tokenizers",),
    "fnet.models.weights._gguf.load_gguf": ("gguf",),
    "fnet.serve._application.application": ("starlette", "uvicorn"),
    "fnet.serve._run.run": ("starlette", "uvicorn"),
}


SLOW = (
    "MixtureOfExperts",
    "hyperband",
    "Encoded",
    "CLIPVision",
    "check_devices",
)  # each compiles for seconds


def modules():
    for info in pkgutil.walk_packages(fnet.__path__, "fnet."):
        if not info.name.endswith("__main__"):
            yield info.name


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for name in modules():
        module = importlib.import_module(name)
        names = {**vars(fnet.layers), **vars(fnet.transforms), **vars(module), **IMPORTED}
        found += [test for test in finder.find(module, name, globs=names) if test.examples]
    return found


EXAMPLES = examples()


def case(test):
    slow = test.name.rsplit(".", 1)[-1] in SLOW
    return pytest.param(test, id=test.name, marks=[pytest.mark.exhaustive] if slow else [])


@pytest.mark.quick_cases(240)
@pytest.mark.parametrize("test", [case(test) for test in EXAMPLES])
def test_docstring(test):
    for package in NEEDS.get(test.name, ()):
        pytest.importorskip(package)
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=report.append).failed == 0, "".join(report)


def test_layers_and_transforms_have_examples():
    names = {test.name for test in EXAMPLES}
    assert {
        "fnet.layers._linear.Dense",
        "fnet.layers._conv.Conv",
        "fnet.layers._compose.Sequential",
        "fnet.transforms._derivatives.hvp",
    } <= names


@pytest.mark.parametrize("package", [fnet.layers, fnet.transforms])
def test_every_public_name_is_documented(package):
    assert len(set(package.__all__)) == len(package.__all__)
    assert not [
        name for name in package.__all__ if not (getattr(package, name).__doc__ or "").strip()
    ]


def test_every_public_method_is_documented():
    methods = [
        (name, attribute)
        for name in fnet.layers.__all__
        if isinstance(getattr(fnet.layers, name), type)
        for attribute, value in vars(getattr(fnet.layers, name)).items()
        if inspect.isfunction(value)
        and not attribute.startswith("_")
        and not attribute.endswith("_init")
    ]
    assert ("Layer", "init") in methods
    assert ("Embed", "attend") in methods
    undocumented = [
        f"{name}.{attribute}"
        for name, attribute in methods
        if attribute not in ("forward", "make")
        and not vars(getattr(fnet.layers, name))[attribute].__doc__
    ]
    assert not undocumented


def test_public_names_have_examples(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs")
    from _sphinx import names

    assert sum(map(len, names.by_package().values())) > 200
    assert not names.without_example()
