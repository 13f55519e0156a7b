"""Layers and models on meshes with explicit axes (those of `jax.make_mesh`): the results are those
of one device."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo
from conformance import call, prepared
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import CASES

from fnet import layers as nn
from fnet import models

MESHES = {
    "data": jax.make_mesh((8,), ("data",)),
    "data_model": jax.make_mesh((4, 2), ("data", "model")),
}
KEY = jax.random.key(7)


def value_and_gradient(f, params, state, *x):
    """(loss, outputs, gradients of the parameters and of the floating-point inputs) of f(params,
    state, *x)."""
    moving = [i for i, array in enumerate(x) if jnp.issubdtype(array.dtype, jnp.floating)]

    def loss(params, *floats):
        arrays = [floats[moving.index(i)] if i in moving else array for i, array in enumerate(x)]
        results = f(params, state, *arrays)
        y = [leaf for leaf in jax.tree.leaves(results) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        return sum(
            (jnp.sin(leaf) @ jnp.cos(jnp.arange(leaf.shape[-1], dtype=leaf.dtype))).sum()
            for leaf in y
        ), results

    floats = [x[i] for i in moving]
    return jax.value_and_grad(loss, range(1 + len(floats)), has_aux=True)(params, *floats)


def check(f, mesh, params, state, *x, place=lambda path, array: P(), tolerance=2e-5):
    """`place`: a function (path, array) -> the sharding of a parameter."""
    run = jax.jit(lambda *args: value_and_gradient(f, *args))
    want = run(params, state, *x)
    specs = jax.tree.map_with_path(place, params)
    params = jax.tree.map(
        lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), params, specs
    )
    state, x = (
        jax.device_put(tree, NamedSharding(mesh, spec))
        for tree, spec in ((state, P()), (x, P("data")))
    )
    with jax.set_mesh(mesh):
        got = run(params, state, *x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        chex.assert_trees_all_close(
            a, b, rtol=0, atol=tolerance * max(1, float(jnp.abs(b).max(initial=0)))
        )
    outputs = jax.tree.leaves(got[0][1])[0]
    assert jax.typeof(outputs).sharding.spec[0] == "data"  # the batch remains sharded
    return params, state, x


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_layer_equals_one_device(name, train):
    mesh = MESHES["data_model" if train else "data"]
    case, params, state, x = prepared(name)
    params, state, x = check(call(case, train=train), mesh, params, state, *x)
    with jax.set_mesh(mesh):
        jax.eval_shape(functools.partial(case.layer.init, **case.options), KEY, *x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", zoo.FEW)
def test_model_equals_one_device(name):
    """In float64: with float32, rounding errors move activations over the kinks of relu6."""
    mesh = MESHES[
        "data" if zoo.FEW.index(name) % 3 == 0 else "data_model"
    ]  # one mesh for each model
    model, _, _ = zoo.MODELS[name]
    x = zoo.inputs(name, (8, *zoo.build(name)[3][0][1:]))
    arrays = (*model.init(jax.random.key(0), *x), *x)

    def f(params, state, *x):
        return model(params, *x, state=state, key=KEY, train=True)

    with jax.enable_x64(True):
        check(
            f,
            mesh,
            *jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.float32 else a, arrays),
            tolerance=1e-9,
        )


def leading(_, array):
    return P("model") if array.ndim and array.shape[0] % 2 == 0 else P()


def trailing(_, array):
    return (
        P(*[None] * (array.ndim - 1), "model") if array.ndim and array.shape[-1] % 2 == 0 else P()
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", [leading, trailing])
@pytest.mark.parametrize(
    "name",
    [
        "Dense",
        "MixtureOfExperts",
        "DepthwiseConv",
        "Embed",
        "LayerNorm",
        "GroupNorm",
        "BatchNorm",
        "RNN",
    ],
)
def test_sharded_parameters(name, place):
    case, params, state, x = prepared(name)
    check(call(case, train=True), MESHES["data_model"], params, state, *x, place=place)


def test_heads_sharded_over_the_model_axis():
    case, params, state, x = prepared("Attention")

    def place(path, array):
        out = path[0].key == "out"
        return P() if out else trailing(path, array)

    check(call(case, train=True), MESHES["data_model"], params, state, *x, place=place)


def test_ambiguous_shardings_are_rejected_by_jax():
    case, params, state, x = prepared("Conv")
    with pytest.raises(Exception, match="out_sharding` parameter of `conv_general_dilated`"):
        check(call(case, train=True), MESHES["data_model"], params, state, *x, place=trailing)


SEQUENCES = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 4)), jnp.float32)
LENGTHS = jnp.array([1, 2, 3, 4] * 2)
OPTIONS = {
    "lstm": (nn.LSTM(3, bidirectional=True), {"lengths": LENGTHS}),
    "attention": (
        nn.Attention(2, kv_heads=1, causal=True, rotary=nn.Rotary()),
        {"lengths": LENGTHS},
    ),
    "mask": (nn.Attention(2, dropout=0.5), {"mask": jnp.tri(4, dtype=bool)[None].repeat(8, 0)}),
    "weight": (nn.BatchNorm(), {"weight": jnp.array([1.0, 0, 1, 1, 1, 0.5, 1, 1])}),
    "valid": (nn.MixtureOfExperts(3, 5), {"valid": jnp.arange(4)[None] < LENGTHS[:, None]}),
    "capacity": (nn.MixtureOfExperts(4, 5, capacity=1.0), {}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("constant", [False, True])
def test_options_of_layers(name, constant):
    layer, options = OPTIONS[name]
    params, state = layer.init(KEY, SEQUENCES, **options)

    def f(params, state, x, *arrays):
        given = options if constant else dict(zip(options, arrays))
        return layer(params, x, state=state, key=KEY, train=True, **given)

    check(
        f, MESHES["data_model"], params, state, SEQUENCES, *(() if constant else options.values())
    )


@pytest.mark.exhaustive
def test_decoding_with_a_cache():
    attention = nn.Attention(2, kv_heads=1, causal=True, rotary=nn.Rotary())
    params, _ = attention.init(KEY, SEQUENCES)

    def f(params, state, x):
        y, cache = attention(params, x[:, :2], state=attention.cache(x))
        return y, *attention(params, x[:, 2:], state=cache)

    check(f, MESHES["data_model"], params, {}, SEQUENCES)


@pytest.mark.quick_cases("GPT-greedy")
@pytest.mark.parametrize("how", ["greedy", "sampled", "beam", "stream"])
@pytest.mark.parametrize("name", ["GPT", "LSTMLanguageModel"])
def test_generated_texts(name, how):
    model, prompts = zoo.MODELS[name][0], jnp.arange(32).reshape(8, 4) % zoo.VOCABULARY
    params, _ = model.init(KEY, prompts)
    generate = {
        "greedy": lambda *args: models.generate(model, *args, max_tokens=4, temperature=0),
        "sampled": lambda *args: models.generate(
            model, *args, KEY, max_tokens=4, samples=2, repetition_penalty=1.2
        ),
        "beam": lambda *args: models.beam_search(model, *args, beams=2, max_tokens=4),
        "stream": lambda *args: list(models.stream(model, *args, max_tokens=3, temperature=0)),
    }[how]
    mesh = MESHES["data_model"]
    placed = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((params, P()), (prompts, P("data")))
    )
    with jax.set_mesh(mesh):
        got = generate(*placed)
    chex.assert_trees_all_close(got, generate(params, prompts), rtol=0, atol=1e-5)
