"""Names, methods and habits of other libraries: each error shows fnet's form in one line. And what
help() shows."""

import dataclasses
import inspect
import pydoc
import re
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest

from fnet import layers as nn
from fnet import models, training, transforms
from fnet.layers import _hints

X = jnp.ones((2, 4))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Linear", "fnet.layers has no 'Linear'; use nn.Dense(features)"),
        (
            "Conv2d",
            "fnet.layers has no 'Conv2d'; use nn.Conv(features, kernel_size), with inputs [batch, "
            "*space, channels]",
        ),
        ("ReLU", "fnet.layers has no 'ReLU'; use the function jax.nn.relu"),
        (
            "Module",
            "fnet.layers has no 'Module'; use a subclass of nn.Layer, or a function with @nn.layer",
        ),
        ("Embedding", "fnet.layers has no 'Embedding'; use nn.Embed(vocab_size, features)"),
        ("Dens", "module 'fnet.layers' has no attribute 'Dens'; did you mean 'Dense'?"),
        ("xyz", "module 'fnet.layers' has no attribute 'xyz'"),
    ],
)
def test_names_of_other_libraries(name, text):
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}$"):
        getattr(nn, name)
    assert not hasattr(nn, name)


def test_the_forms_in_the_hints_exist():
    for hint in {**_hints._NAMES, **_hints._METHODS}.values():
        for path in re.findall(r"\b((?:nn|jax|optax|tr|ft|models)(?:\.\w+)+)", hint):
            value = {
                "nn": nn,
                "jax": jax,
                "optax": optax,
                "tr": training,
                "ft": transforms,
                "models": models,
            }[path.split(".")[0]]
            for part in path.split(".")[1:]:
                value = getattr(value, part)
    assert not set(_hints._NAMES) & set(nn.__all__)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "parameters",
            "; the parameters are the dict params of params, state = model.init(key, x)",
        ),
        ("eval", "; a call is inference unless it has train=True: model(params, x)"),
        (
            "backward",
            "; jax.value_and_grad(loss)(params, batch) returns the gradients, and Optax updates "
            "the parameters",
        ),
        ("xyz", ""),
    ],
)
def test_methods_of_other_libraries(name, text):
    with pytest.raises(
        AttributeError,
        match="^" + re.escape(f"'Dense' object has no attribute {name!r}{text}") + "$",
    ):
        getattr(nn.Dense(3), name)


def test_assignment_in_init():
    class Net(nn.Layer):
        def __init__(self):
            self.fc = nn.Dense(10)

    with pytest.raises(dataclasses.FrozenInstanceError) as caught:
        Net()
    assert str(caught.value) == (
        "cannot assign Net.fc: a layer is immutable; declare options as fields of the class, and "
        "create layers in forward, e.g. nn.Dense(10)(scope['fc'], x)"
    )
    with pytest.raises(
        dataclasses.FrozenInstanceError, match=r"use dataclasses\.replace\(layer, features=\.\.\.\)"
    ):
        nn.Dense(3).features = 4
    with pytest.raises(
        dataclasses.FrozenInstanceError, match="cannot delete 'features': Dense is immutable"
    ):
        del nn.Dense(3).features


def test_tensors_of_other_libraries(monkeypatch):
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    layer = nn.Dense(3)
    params, _ = layer.init(jax.random.key(0), X)
    with pytest.raises(TypeError) as caught:
        layer(params, torch.Tensor())
    assert str(caught.value) == (
        "Dense: expected NumPy or JAX arrays, got a torch tensor; convert it, e.g. "
        "jnp.asarray(x.detach().cpu().numpy())"
    )


def test_count_parameters():
    model = nn.Sequential(nn.Dense(5), nn.Stack(nn.Dense(5), 3))
    spec = model.spec(X)
    assert nn.count_parameters(spec.params) == 4 * 5 + 5 + 3 * (5 * 5 + 5)
    assert nn.count_parameters(model.init(jax.random.key(0), X)[0]) == nn.count_parameters(
        spec.params
    )
    assert nn.count_parameters({}) == 0 and spec.params["0"]["kernel"].size == 20


def test_layers_compare_by_class_and_fields():
    assert nn.Dense(3) == nn.Dense(3) != nn.Dense(4) and hash(nn.Dense(3)) == hash(nn.Dense(3))
    assert nn.LayerNorm() != nn.RMSNorm() and nn.Dense(3) != 3


def test_help_shows_the_fields_first_and_no_generated_methods():
    text = pydoc.plain(pydoc.render_doc(nn.Dense))
    assert text.index("features: length of the output") < text.index("Methods")
    own = text[text.index("Methods defined here") : text.index("inherited from")]
    assert "cross_entropy" in own and not re.search(r"__(eq|hash|setattr|delattr)__\(", own)


def test_help_of_fit_groups_its_parameters():
    """Every parameter is in one group of the overview, which precedes the details."""
    doc = inspect.getdoc(training.fit)
    overview = doc[doc.index("The arguments, by purpose:") : doc.index("Args:")]
    names = re.findall(r"^ {4}\S.*?  +(.*)$", overview, re.MULTILINE)
    assert sorted(", ".join(names).split(", ")) == sorted(
        inspect.signature(training.fit).parameters
    )
    details = re.findall(
        r"^  (\w+): ", doc[doc.index("Args:") : doc.index("Returns:")], re.MULTILINE
    )
    assert sorted(details) == sorted(inspect.signature(training.fit).parameters)
