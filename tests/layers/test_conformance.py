"""What every layer keeps, for every layer: the table of layer_cases.py drives each promise in turn."""

import functools
import json
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from checks import checking_leaks, close, same, sampled
from conformance import ALONE, FEW, KEY, KINDS, call, compiled, every, prepared
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import BATCH, CASES, GOLDEN, golden, inputs

from fnet import layers as nn


def kinds():
    return {
        getattr(nn, name)
        for name in nn.__all__
        if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Layer)
    } - {nn.Layer}


def test_table_has_every_layer():
    missing = kinds() - {type(case.layer) for case in CASES.values()}
    assert not missing, (
        f"add these layers to layer_cases.py: {sorted(kind.__name__ for kind in missing)}"
    )


def check_variant(variant, name):
    case, params, state, x = prepared(name)
    y, new_state = variant(call(case, train=False))(params, state, *x)
    close(jax.tree.map(jnp.asarray, (y, new_state)), compiled(name, False))


class Variants(chex.TestCase):
    """Not compiled: the numbers of `jax.jit`."""

    @chex.variants(without_jit=True)
    @parameterized.named_parameters((name, name) for name in KINDS if name != "MixtureOfExperts")
    def test_variants_agree(self, name):
        check_variant(self.variant, name)


@pytest.mark.exhaustive
class VariantOfExperts(chex.TestCase):
    """The same, of the layer with the most operations."""

    @chex.variants(without_jit=True)
    def test_variants_agree(self):
        check_variant(self.variant, "MixtureOfExperts")


@pytest.mark.exhaustive
class VariantsOnDevices(chex.TestCase):
    """From the host, on eight devices."""

    @chex.variants(without_device=True, with_pmap=True)
    @parameterized.named_parameters((name, name) for name in KINDS)
    def test_variants_agree(self, name):
        check_variant(self.variant, name)


@pytest.mark.quick_cases(9)
@every
def test_output_shape_and_dtype(name):
    case, params, state, x = prepared(name)
    for train in (False, True):
        y, _ = jax.eval_shape(call(case, train=train), params, state, *x)
        assert y.shape == (BATCH, *case.out)
        assert y.dtype == jnp.float32


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["BatchNorm", "Dropout", "MLP", "Stack"])
def test_jit_equals_eager_in_training(name):
    case, params, state, x = prepared(name)
    close(call(case, train=True)(params, state, *x), compiled(name, True))


@pytest.mark.quick_cases(1)
@every
def test_init_is_spec_and_jitted_init(name):
    case, _, _, x = prepared(name)
    init = functools.partial(case.layer.init, **case.options)
    made = init(jax.random.key(3), *x)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    spec = case.layer.spec(*shapes, **case.options)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(
        lambda s: (s.shape, s.dtype), (spec.params, spec.state)
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
    for leaf in jax.tree.leaves(spec.params):
        assert isinstance(leaf, nn.ParamSpec)
        assert leaf.axes is None or len(leaf.axes) == len(leaf.shape)
    if name in ALONE:
        same(jax.jit(init)(jax.random.key(3), *shapes), made)
    assert case.layer.check(made[0], *x, state=made[1], **case.options) is None


def test_golden_names():
    # Checkpoints depend on these names: a line of golden_names.json changes only on purpose.
    assert json.loads(GOLDEN.read_text()) == golden()


@pytest.mark.parametrize("name", sampled(CASES, KINDS))
def test_vmap_equals_batch(name):
    case, params, state, x = prepared(name)

    def one(*row):
        y, _ = call(case, train=False)(params, state, *(a[None] for a in row))
        return y[0]

    close(jax.jit(jax.vmap(one))(*x), compiled(name, False)[0])


@pytest.mark.quick_cases(7)
@every
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.exhaustive)]
)
def test_half_precision(name, dtype):
    case, params, state, x = prepared(name)
    if all(a.dtype == jnp.int32 for a in x):
        return  # tokens: the output has the table's dtype
    x = inputs(case, dtype=dtype)
    made = jax.eval_shape(case.layer.init, jax.random.key(0), *x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
    for train in (False, True):
        y, new_state = jax.eval_shape(call(case, train=train), params, state, *x)
        assert y.dtype == dtype
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new_state) == jax.tree.map(
            lambda a: (a.shape, a.dtype), state
        )
    if dtype == jnp.bfloat16 and name in ALONE:
        y, _ = jax.jit(call(case, train=False))(params, state, *x)
        close(y.astype(jnp.float32), compiled(name, False)[0], 0.04)


@pytest.mark.quick_cases(2)
@every
@pytest.mark.parametrize("train", [False, True])
def test_state_is_a_scan_carry(name, train):
    case, params, state, x = prepared(name)

    def body(state, _):
        y, state = call(case, train=train)(params, state, *x)
        return state, y

    jax.eval_shape(
        lambda state: jax.lax.scan(body, state, length=2), state
    )  # raises where a carry changes
    if not state:
        return
    new_state = compiled(name, train)[1]
    if not train:
        same(new_state, state)
    else:
        assert any(
            (a != b).any() for a, b in zip(jax.tree.leaves(new_state), jax.tree.leaves(state))
        )


def apart(params, state, depth):
    """Stacked trees as the trees of Sequential's children."""
    return tuple({str(i): layer(tree, i) for i in range(depth) if tree} for tree in (params, state))


def layer(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "Attention_grouped",
            "BatchNorm",
            "Conv_1d_causal",
            "Dense_normal",
            "Dropout",
            "MaxPool_same",
            "Parallel",
            "Stack",
        ],
        ["Attention_grouped", "BatchNorm", "Dropout", "Stack"],
    ),
)
def test_stack_equals_unrolled(name):
    case, _, _, x = prepared(name)
    depth = 3
    stacked, unrolled = nn.Stack(case.layer, depth), nn.Sequential(*[case.layer] * depth)
    params, state = stacked.init(KEY, *x)
    same(unrolled.init(KEY, *x), apart(params, state, depth))
    params, state = jax.tree.map(lambda a: a + 0.3, (params, state))
    params_apart, state_apart = apart(params, state, depth)
    train = functools.partial(nn.Layer.__call__, key=KEY, train=True)
    y, new_state = jax.jit(train, static_argnums=0)(stacked, params, *x, state=state)
    y_apart, new_apart = jax.jit(train, static_argnums=0)(
        unrolled, params_apart, *x, state=state_apart
    )
    close(y, y_apart)
    for i in range(depth):
        close(layer(new_state, i), new_apart.get(str(i), {}))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled(KINDS, FEW))
def test_sharded_equals_one_device(name):
    """Compiled for eight devices, in training: statistics are global, draws are the same."""
    case, params, state, x = prepared(name)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    spread, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    x = jax.device_put(x, spread)
    params, state = jax.device_put((params, state), everywhere)
    y, new_state = jax.jit(call(case, train=True))(params, state, *x)
    close((y, new_state), compiled(name, True))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled(KINDS, [*FEW, "MixtureOfExperts"]))
def test_gradient_in_shard_map_equals_one_device(name):
    """Each device computes its rows. JAX adds the gradients of the parameters, because all devices
    share them."""
    case, params, state, x = prepared(name)

    def gradient(params, state, *x):
        def loss(params):
            y = jax.tree.leaves(call(case, train=False)(params, state, *x)[0])
            return sum(
                jnp.sin(leaf.reshape(len(leaf), -1)).sum(0)
                @ jnp.cos(jnp.arange(leaf[0].size, dtype=leaf.dtype))
                for leaf in y
            )

        return jax.grad(loss)(params)

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    specs = (P(), P(), *(P("batch"),) * len(x))
    got = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=P()))(
        params, state, *x
    )
    want = jax.jit(gradient)(params, state, *x)
    scale = max((float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want)), default=1.0)
    chex.assert_trees_all_close(got, want, rtol=0, atol=2e-6 * scale)


@pytest.mark.quick_cases(7)
@every
def test_layer_is_a_value(name):
    layer = CASES[name].layer
    again = pickle.loads(pickle.dumps(layer))
    assert again == layer
    assert hash(again) == hash(layer)
    assert repr(again) == repr(layer)
    assert repr(layer).startswith(f"{type(layer).__name__}(")
    assert jax.tree.leaves(layer) == []
    assert jax.tree.structure(layer) == jax.tree.structure(again)


@pytest.mark.quick_cases(13)
@every
def test_one_trace_for_equal_layers(name):
    case, params, state, x = prepared(name)
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def step(layer, params, state, *x):
        return layer(params, *x, state=state, key=KEY, train=True, **case.options)

    for _ in range(3):
        layer = pickle.loads(pickle.dumps(case.layer))
        jax.eval_shape(functools.partial(step, layer), params, state, *x)


@pytest.mark.parametrize(
    "names", [FEW[:2], pytest.param([*CASES], marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def test_no_tracer_leaks(names):
    prepare = [prepared(name) for name in names]

    def loss(case, params, state, *x):
        y, state = call(case, train=True)(params, state, *x)
        return y.sum(), state

    with checking_leaks():
        for case, params, state, x in prepare:
            jax.jit(jax.grad(functools.partial(loss, case), has_aux=True)).trace(params, state, *x)
            jax.jit(case.layer.init).trace(KEY, *x, **case.options)
