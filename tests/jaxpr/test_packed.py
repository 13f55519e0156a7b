"""Trees with modules as trees of arrays."""

import collections

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fnet import compress
from fnet.jaxpr import holds_arrays, map_arrays, nodes, pack


def linear(seed=0):
    return nnx.Linear(2, 3, rngs=nnx.Rngs(seed))


def test_a_tree_of_arrays_and_numbers_stays():
    tree = {"a": jnp.ones(2), "b": [1, True, None, 2.0]}
    arrays, form = pack(tree)
    assert arrays is tree and form is None


def test_an_equinox_module_of_arrays_alone_stays():
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert pack(model) == (model, None)


def test_the_names_of_arrays_are_their_paths():
    model = nnx.Sequential(linear(), nnx.relu, linear(1))
    arrays, form = pack((model, {"count": 3}))
    assert jax.tree.map(jnp.shape, arrays) == (
        {"layers": {"0": {"bias": (3,), "kernel": (2, 3)}, "2": {"bias": (3,), "kernel": (2, 3)}}},
        {"count": ()},
    )
    again, counts = form.unpack(arrays)
    assert counts == {"count": 3} and again is not model
    assert again.layers[0].kernel.get_value() is model.layers[0].kernel.get_value()
    assert pack((again, counts))[1] == form and hash(form) == hash(pack((model, counts))[1])


def test_shared_variables_are_packed_once():
    model = linear()
    arrays, form = pack({"a": model, "b": model, "c": nnx.Dict(kernel=model.kernel)})
    assert jax.tree.map(jnp.shape, arrays)["b"] == arrays["c"] == {}
    again = form.unpack(arrays)
    assert again["a"] is again["b"] and again["c"]["kernel"] is again["a"].kernel


def test_a_state_of_nnx_is_a_tree_of_arrays():
    _, state = nnx.split(linear())
    assert pack(state) == (state, None)


def test_functions_and_options_belong_to_the_form():
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    drop = eqx.nn.Dropout(0.5)
    arrays, form = pack({"model": model, "drop": drop, "lr": 0.1})
    assert arrays["lr"] == 0.1 and arrays["drop"] == {}
    assert all(isinstance(x, (jax.Array, float)) for x in jax.tree.leaves(arrays))
    again = form.unpack(arrays)
    assert again["drop"] == drop and eqx.tree_equal(again["model"], model)
    other = pack({"model": model, "drop": eqx.nn.Dropout(0.25), "lr": 0.1})[1]
    assert form.differences(other) == ["drop/p was 0.5, is 0.25"]


def test_optimizers_of_equinox_models_have_the_names_of_the_model():
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    (named, opt_state), _ = pack((model, optax.adam(1e-3).init(eqx.filter(model, eqx.is_array))))
    assert jax.tree.structure(opt_state[0].mu) == jax.tree.structure(named)


def test_update_writes_only_what_is_new():
    model, other = linear(), linear(1)
    arrays, form = pack((model, other))
    new = ({**arrays[0], "bias": jnp.ones(3)}, arrays[1])
    kernel = model.kernel.get_value()
    assert form.update((model, other), new)[0] is model
    assert model.kernel.get_value() is kernel
    np.testing.assert_array_equal(model.bias[...], 1)


def test_lost_updates_are_named_without_random_streams():
    model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    arrays, form = pack(model)
    view = form.unpack(arrays)
    assert form.lost(view, arrays) == []
    view(jnp.ones((3, 2)))
    assert form.lost(view, arrays) == ["layers/0/mean", "layers/0/var"]
    assert form.random == {"layers/1/rngs/count", "layers/1/rngs/key"}


def test_attributes_that_change_are_named():
    model = linear()
    _, form = pack(model)
    model.calls = 1
    assert form.differences(pack(model)[1]) == ["the attribute 'calls' was None, is 1"]


def test_an_array_that_is_no_variable_in_a_traced_constructor():
    class Loose(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.mask = jnp.ones(2) > 0

    pack(Loose())
    try:
        jax.eval_shape(lambda: pack(Loose())[0])
    except TypeError as error:
        assert "mask of a Loose is an array outside of a variable" in str(error)


def test_two_arrays_with_one_path():
    class Twice(eqx.Module):
        tree: collections.OrderedDict
        f: object = jax.nn.relu

    model = Twice(collections.OrderedDict({1: jnp.ones(2), "1": jnp.ones(2)}))
    with pytest.raises(ValueError, match="two arrays have the path 'model/tree/1'"):
        pack({"model": model})


def test_implicit_arrays_are_leaves():
    model = compress.quantize(linear(), {"kernel": compress.Int8()})
    arrays, form = pack(model)
    assert isinstance(arrays["kernel"], compress.Quantized)
    assert isinstance(form.unpack(arrays).kernel.get_value(), compress.Quantized)
    plain = map_arrays(lambda path, x: jnp.zeros(x.shape) if path == "kernel" else x, model)
    np.testing.assert_array_equal(plain.kernel[...], 0)


def test_what_holds_arrays():
    mlp = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    assert holds_arrays(mlp) and holds_arrays(linear())
    assert not holds_arrays(jnp.sin) and not holds_arrays(jnp.ones(2))
    found = dict(nodes(eqx.nn.Sequential([eqx.nn.Dropout(0.5)])))
    assert isinstance(found["layers/0"], eqx.nn.Dropout)
