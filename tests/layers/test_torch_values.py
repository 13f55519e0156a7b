"""Every layer with a twin in PyTorch, against PyTorch's numbers: outputs, state and gradients.

The numbers stand in tests/reference/torch_<family>.npz; tests/reference/README.md says how they
were made.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers as nn

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"

# A fixture that is lost, or a case dropped from the table, fails here.
LEAST = {
    "linear": {"Dense": 6},
    "conv": {"Conv": 22, "DepthwiseConv": 4},
    "conv_transpose": {"ConvTranspose": 17},
    "embed": {"Embed": 3, "tied": 1},
    "norm": {"LayerNorm": 6, "RMSNorm": 5, "GroupNorm": 7},
    "batch_norm": {"BatchNorm": 10},
    "pool": {"MaxPool": 11, "AvgPool": 14, "GlobalAvgPool": 3},
    "attention": {"Attention": 25, "Rotary": 3},
    "recurrent": {"RNN": 12, "LSTM": 11, "GRU": 11},
}

# PyTorch has no such layer, or nothing to compute with numbers of its own.
WITHOUT_TWIN = {
    "Dropout",
    "Flatten",
    "Maxout",
    "MixtureOfExperts",
    "Parallel",
    "Remat",
    "Residual",
    "Sequential",
    "Stack",
}


@nn.layer
def tied(scope, tokens, *, vocab_size, features):
    """A language model of nothing but its table."""
    embed, at = nn.Embed(vocab_size, features), scope["embed"]
    return embed.attend(at, jnp.tanh(embed(at, tokens)))


@functools.cache
def fixture(family):
    """{case: {"config": ..., "params/kernel": array, ...}}"""
    cases = {}
    with np.load(REFERENCE / f"torch_{family}.npz") as arrays:
        for path, array in arrays.items():
            case, name = path.split("/", 1)
            cases.setdefault(case, {})[name] = json.loads(str(array)) if name == "config" else array
    return cases


def case_ids():
    """Every third case is quick: the families vary one option after another."""
    return [
        pytest.param(family, case, id=case, marks=[pytest.mark.exhaustive] if i % 3 else [])
        for family in LEAST
        for i, case in enumerate(fixture(family))
    ]


def part(case, kind):
    return {
        name.removeprefix(f"{kind}/"): array
        for name, array in case.items()
        if name.startswith(f"{kind}/")
    }


def nested(flat):
    """{"query/kernel": a} as {"query": {"kernel": a}}."""
    tree = {}
    for path, leaf in flat.items():
        *above, name = path.split("/")
        node = tree
        for step in above:
            node = node.setdefault(step, {})
        node[name] = leaf
    return tree


def options_of(config):
    tuples = lambda value: tuple(map(tuples, value)) if isinstance(value, list) else value
    options = {name: tuples(value) for name, value in config["options"].items()}
    if "rotary" in options:
        options["rotary"] = nn.Rotary(**options["rotary"])
    if "activation" in options:
        options["activation"] = getattr(jax.nn, options["activation"])
    return options


def build(config):
    options = options_of(config)
    if config["layer"] == "tied":
        return tied(**options)
    return getattr(nn, config["layer"])(**options)


def run(config, params, inputs):
    """The layer's outputs by the names that the fixture gives them."""
    layer, call = build(config), config["call"]
    params = nested(params)
    x, *others = inputs.items()
    if config["layer"] == "tied":
        params = {"embed": params}
    if config["layer"] == "Rotary":  # a function, no layer
        return {"y": layer(x[1], **dict(others))}
    if call.get("steps"):
        state, ys = (
            {name: jnp.asarray(value, jnp.float32) for name, value in call["state"].items()},
            [],
        )
        for step in x[1]:
            y, state = layer(params, step, state=state, train=call["train"])
            ys.append(y)
        return {"y": jnp.stack(ys)} | {f"state/{name}": value for name, value in state.items()}
    if call.get("method") == "scan":
        return scan(layer, params, **inputs)
    function = getattr(layer, call["method"]) if "method" in call else layer
    return {"y": function(params, x[1], **dict(others))}


def scan(layer, params, x, lengths=None, **carry):
    """A recurrent layer's outputs and the leaves of its carry, by name."""
    ways = (
        ("backward/", "forward/") if layer.bidirectional else ("",)
    )  # in the order of the carry's leaves
    kinds = ("hidden", "cell") if isinstance(layer, nn.LSTM) else ("hidden",)
    names = [f"carry/{way}{kind}" for way in ways for kind in kinds]
    begin = (
        jax.tree.structure(layer.zero_carry(1)).unflatten([carry[name] for name in names])
        if carry
        else None
    )
    y, after = layer.scan(params, x, begin, lengths=lengths)
    return {"y": y} | dict(zip(names, jax.tree.leaves(after)))


def relative(got, want):
    """max|got - want| / max|want|"""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        got.shape,
        got.dtype,
        want.shape,
        want.dtype,
    )
    return np.max(np.abs(got - want)) / np.max(np.abs(want))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("family", "name"), case_ids())
def test_layer_equals_torch(family, name):
    equals_torch(family, name, jax.jit)


def equals_torch(family, name, compiled):
    """Compares outputs and gradients. `compiled` is `jax.jit`, or another such transform."""
    case = fixture(family)[name]
    config, cotangents = case["config"], part(case, "cotangents")
    leaves = {
        f"{kind}/{name}": array
        for kind in ("params", "inputs")
        for name, array in part(case, kind).items()
    }
    varied = {name: array for name, array in leaves.items() if array.dtype == np.float32}

    @compiled
    def forward_and_backward(varied, cotangents):
        def forward(varied):
            outputs = run(config, part(leaves | varied, "params"), part(leaves | varied, "inputs"))
            moved = {name: outputs[name] for name in cotangents}
            return moved, outputs

        _, pull, outputs = jax.vjp(forward, varied, has_aux=True)
        return outputs, pull(cotangents)[0]

    outputs, gradients = forward_and_backward(varied, cotangents)

    want_outputs = {
        name: y for name, y in part(case, "outputs").items() if not name.startswith("torch/")
    }
    assert outputs.keys() == want_outputs.keys()
    wrong = {
        name: error
        for name, y in want_outputs.items()
        if not (error := relative(outputs[name], y)) <= 1e-5
    }
    want_gradients = part(case, "gradients")
    assert gradients.keys() == want_gradients.keys()
    largest = max(np.max(np.abs(gradient)) for gradient in want_gradients.values())
    for leaf, gradient in want_gradients.items():
        if (
            leaf in config["zero"]
        ):  # zero in exact arithmetic: held to the other gradients' rounding
            error = np.max(np.abs(gradients[leaf])) / largest
        else:
            error = relative(gradients[leaf], gradient)
        if not error <= 1e-5:
            wrong[f"gradient of {leaf}"] = error
    assert not wrong, {name: float(error) for name, error in wrong.items()}


@pytest.mark.parametrize("family", LEAST)
def test_fixture_holds_params_the_layer_would_make(family):
    """No leaf is missing, superfluous or of another shape, so that no parameter goes unchecked."""
    for case in fixture(family).values():
        config, inputs = case["config"], part(case, "inputs")
        if config["call"].get("steps"):
            inputs["x"] = inputs["x"][0]
        if config["call"].get("method") == "attend" or config["layer"] == "Rotary":
            continue
        x, *others = inputs.items()
        others = {name: array for name, array in others if not name.startswith("carry/")}
        spec = build(config).spec(x[1], **others)
        params = nested(part(case, "params"))
        params = {"embed": params} if config["layer"] == "tied" else params
        assert jax.tree.map(lambda leaf: leaf.shape, spec.params) == jax.tree.map(np.shape, params)


@pytest.mark.parametrize("family", LEAST)
def test_no_case_is_missing(family):
    layers = [case["config"]["layer"] for case in fixture(family).values()]
    for layer, least in LEAST[family].items():
        assert layers.count(layer) >= least, (
            f"torch_{family}.npz has {layers.count(layer)} cases of {layer}"
        )


def test_every_layer_has_cases_or_no_twin():
    public = (getattr(nn, name) for name in nn.__all__)
    layers = {
        value.__name__
        for value in public
        if isinstance(value, type) and issubclass(value, nn.Layer) and value is not nn.Layer
    }
    with_twin = {layer for least in LEAST.values() for layer in least}
    assert layers - WITHOUT_TWIN <= with_twin


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_has_torchs_statistics(rate):
    """PyTorch's Dropout is a distribution: each entry is 0 with probability rate, else x / (1 -
    rate)."""
    x = np.arange(1, 20001, dtype=np.float32).reshape(100, 200)
    y = np.asarray(nn.Dropout(rate)({}, x, train=True, key=jax.random.key(0)))
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / (1 - rate), rtol=1e-6)
    deviation = (rate * (1 - rate) / x.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 4 * deviation
    for axis in 0, 1:  # no row and no column is special
        share, count = kept.mean(axis), x.shape[axis]
        assert abs(share - (1 - rate)).max() < 5 * (rate * (1 - rate) / count) ** 0.5
    np.testing.assert_array_equal(nn.Dropout(rate)({}, x), x)
