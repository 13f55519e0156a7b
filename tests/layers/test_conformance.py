"""What every layer keeps, for every layer: the table of layer_cases.py drives each promise in turn."""

import functools
import json
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from checks import close, counted, same
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import BATCH, CASES, GOLDEN, golden, inputs

from fnet import layers as nn
from fnet import transforms as ft
from fnet.jaxpr import bodies

KEY = jax.random.key(7)
every = pytest.mark.parametrize("name", CASES)
COMPOSED = ("MLP", "Parallel", "Residual", "Sequential", "Tied", "residual_block")    # of layers named above
ALONE = [name for name in CASES if name not in COMPOSED]
KINDS = [name for name in ALONE if name == type(CASES[name].layer).__name__]      # one of each kind


@functools.cache
def prepared(name):
    """(case, params, state, inputs), with a state that is not the initial one and biases that are not zero."""
    case = CASES[name]
    x = inputs(case)
    params, state = case.layer.init(jax.random.key(0), *x, **case.options)
    draw = np.random.default_rng(1)
    params, state = jax.tree.map(lambda a: a + jnp.asarray(draw.uniform(0.1, 0.5, a.shape), a.dtype), (params, state))
    return case, params, state, x


def call(case, *, train):
    """(params, state, *inputs) -> (y, state), as a function that transforms take."""
    def f(params, state, *x):
        return case.layer(params, *x, state=state, key=KEY, train=train, **case.options)

    return f


@functools.cache
def compiled(name, train):
    case, params, state, x = prepared(name)
    return jax.jit(call(case, train=train))(params, state, *x)


def kinds():
    return {getattr(nn, name) for name in nn.__all__ if isinstance(getattr(nn, name), type)
            and issubclass(getattr(nn, name), nn.Layer)} - {nn.Layer}


def test_table_has_every_layer():
    missing = kinds() - {type(case.layer) for case in CASES.values()}
    assert not missing, f"add these layers to layer_cases.py: {sorted(kind.__name__ for kind in missing)}"


class Variants(chex.TestCase):
    """Compiled or not, from the host or a device, on eight devices: the same numbers."""

    @chex.all_variants
    @parameterized.named_parameters((name, name) for name in KINDS)
    def test_variants_agree(self, name):
        case, params, state, x = prepared(name)
        y, new_state = self.variant(call(case, train=False))(params, state, *x)
        y, new_state = jax.tree.map(jnp.asarray, (y, new_state))
        close((y, new_state), compiled(name, False))


@every
def test_output_shape_and_dtype(name):
    case, params, state, x = prepared(name)
    for train in (False, True):
        y, _ = jax.eval_shape(call(case, train=train), params, state, *x)
        assert y.shape == (BATCH, *case.out)
        assert y.dtype == jnp.float32


@pytest.mark.parametrize("name", ["BatchNorm", "Dropout", "MLP", "Stack"])
def test_jit_equals_eager_in_training(name):
    case, params, state, x = prepared(name)
    close(call(case, train=True)(params, state, *x), compiled(name, True))


@every
def test_init_is_spec_and_jitted_init(name):
    case, _, _, x = prepared(name)
    init = functools.partial(case.layer.init, **case.options)
    made = init(jax.random.key(3), *x)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    spec = case.layer.spec(*shapes, **case.options)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), made) == jax.tree.map(
        lambda s: (s.shape, s.dtype), (spec.params, spec.state))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
    for leaf in jax.tree.leaves(spec.params):
        assert isinstance(leaf, nn.ParamSpec)
        assert leaf.axes is None or len(leaf.axes) == len(leaf.shape)
    if name in ALONE:
        same(jax.jit(init)(jax.random.key(3), *shapes), made)
    assert case.layer.check(made[0], *x, state=made[1], **case.options) is None


@every
def test_golden_names(name):
    # Checkpoints live by these names: a line of golden_names.json changes only on purpose.
    assert json.loads(GOLDEN.read_text())[name] == golden()[name]


def test_golden_names_has_no_other():
    assert set(json.loads(GOLDEN.read_text())) == set(CASES)


@every
def test_vmap_equals_batch(name):
    case, params, state, x = prepared(name)

    def one(*row):
        y, _ = call(case, train=False)(params, state, *(a[None] for a in row))
        return y[0]

    close(jax.jit(jax.vmap(one))(*x), compiled(name, False)[0])


@every
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(name, dtype):
    case, params, state, x = prepared(name)
    if all(a.dtype == jnp.int32 for a in x):
        return    # tokens: the output has the table's dtype
    x = inputs(case, dtype=dtype)
    made = jax.eval_shape(case.layer.init, jax.random.key(0), *x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made))
    for train in (False, True):
        y, new_state = jax.eval_shape(call(case, train=train), params, state, *x)
        assert y.dtype == dtype
        assert jax.tree.map(lambda a: (a.shape, a.dtype), new_state) == jax.tree.map(
            lambda a: (a.shape, a.dtype), state)
    if dtype == jnp.bfloat16 and name in ALONE:
        y, _ = jax.jit(call(case, train=False))(params, state, *x)
        close(y.astype(jnp.float32), compiled(name, False)[0], 0.04)


@every
@pytest.mark.parametrize("train", [False, True])
def test_state_is_a_scan_carry(name, train):
    case, params, state, x = prepared(name)

    def body(state, _):
        y, state = call(case, train=train)(params, state, *x)
        return state, y

    jax.eval_shape(lambda state: jax.lax.scan(body, state, length=2), state)    # raises where a carry changes
    if not state:
        return
    new_state = compiled(name, train)[1]
    if not train:
        same(new_state, state)
    else:
        assert any((a != b).any() for a, b in zip(jax.tree.leaves(new_state), jax.tree.leaves(state)))


def apart(params, state, depth):
    """Stacked trees as the trees of Sequential's children."""
    return tuple({str(i): layer(tree, i) for i in range(depth) if tree} for tree in (params, state))


def layer(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


@pytest.mark.parametrize("name", [
    "Attention_grouped", "BatchNorm", "Conv_1d_causal", "Dense_normal", "Dropout", "MaxPool_same", "Parallel", "Stack"])
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
    y_apart, new_apart = jax.jit(train, static_argnums=0)(unrolled, params_apart, *x, state=state_apart)
    close(y, y_apart)
    for i in range(depth):
        close(layer(new_state, i), new_apart.get(str(i), {}))


@pytest.mark.parametrize("name", KINDS)
def test_sharded_equals_one_device(name):
    """Compiled for eight devices, in training: statistics are global, draws are the same."""
    case, params, state, x = prepared(name)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    spread, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    x = jax.device_put(x, spread)
    params, state = jax.device_put((params, state), everywhere)
    y, new_state = jax.jit(call(case, train=True))(params, state, *x)
    close((y, new_state), compiled(name, True))


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


@every
def test_no_tracer_leaks(name):
    case, params, state, x = prepared(name)

    def loss(params, state, *x):
        y, state = call(case, train=True)(params, state, *x)
        return y.sum(), state

    with jax.check_tracer_leaks():
        jax.jit(jax.grad(loss, has_aux=True)).trace(params, state, *x)
        jax.jit(case.layer.init).trace(KEY, *x, **case.options)


# Derivatives.

@every
def test_derivatives_of_every_kind_trace(name):
    """Reverse, forward, forward over reverse, the Hessian both ways: nothing ends forward mode."""
    case, params, state, x = prepared(name)
    floats = [a for a in x if a.dtype == jnp.float32]

    def loss(args):
        params, floats = args
        rest = iter(floats)
        y, _ = call(case, train=True)(params, state, *(next(rest) if a.dtype == jnp.float32 else a for a in x))
        return jnp.square(y).sum()

    args = params, floats
    for derivative in (jax.grad(loss), jax.jacfwd(loss)):
        assert jax.tree.map(jnp.shape, jax.eval_shape(derivative, args)) == jax.tree.map(jnp.shape, args)
    assert jax.tree.map(jnp.shape, jax.eval_shape(ft.hvp(loss), args, args)) == jax.tree.map(jnp.shape, args)
    for hessian in (jax.hessian(loss), jax.jacrev(jax.grad(loss))):
        rows = jax.eval_shape(hessian, args)
        assert len(jax.tree.leaves(rows)) == len(jax.tree.leaves(args)) ** 2


def flat(name):
    """The layer as a function of one vector of parameters and float inputs, in float64, and that vector."""
    case, params, state, _ = prepared(name)
    params, state = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, state))
    x = inputs(case, 2, jnp.float64)
    floats = [a for a in x if a.dtype == jnp.float64]
    vector, rebuild = ravel_pytree((params, floats))

    @jax.jit
    def f(vector):
        params, floats = rebuild(vector)
        rest = iter(floats)
        filled = [next(rest) if a.dtype == jnp.float64 else a for a in x]
        return call(case, train=True)(params, state, *filled)[0]

    return f, vector


@pytest.mark.parametrize("name", sorted(
    set(KINDS) - {"Attention", "BatchNorm", "Dropout"} | {"Attention_grouped", "BatchNorm_bare", "Conv_1d_causal"}))
def test_numerical_gradients(name):
    """Forward and reverse against finite differences."""
    with jax.enable_x64(True):
        f, vector = flat(name)
        chex.assert_numerical_grads(f, (vector,), 1, atol=1e-6 / vector.size, rtol=1e-5, eps=1e-5)


@pytest.mark.parametrize("name", ["Maxout", "BatchNorm_bare", "Attention_grouped"])
def test_hvp_is_hessian_times_vector(name):
    with jax.enable_x64(True):
        f, vector = flat(name)
        loss = lambda vector: jnp.square(f(vector)).sum()
        v = jnp.cos(jnp.arange(vector.size, dtype=vector.dtype))
        close(jax.jit(ft.hvp(loss))(vector, v), jax.jit(jax.hessian(loss))(vector) @ v, 1e-6)


# Named scopes: where an array meets the input, the equation carries the array's path.

def uses(jaxpr, names, prefix=()):
    """(path of an argument, scope of an equation that takes it), through every jaxpr inside."""
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        scope = (*prefix, *(part for part in stack.split("/") if part and not part.startswith("jit(")))
        taken = [names.get(v) if not hasattr(v, "val") else None for v in eqn.invars]
        inner = [sub for sub in bodies(eqn) if len(sub.jaxpr.invars) == len(taken)]
        for sub in inner:
            yield from uses(sub.jaxpr, {v: n for v, n in zip(sub.jaxpr.invars, taken) if n is not None}, scope)
        if not inner:
            yield from ((path, scope) for path in taken if path is not None)


def scopes(f, *args):
    """Every use of the first argument's leaves in f's jaxpr: {path: {scope, ...}}."""
    paths = [tuple(part.key for part in path) for path, _ in jax.tree.leaves_with_path(args[0])]
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    found = {path: set() for path in paths}
    for path, scope in uses(jaxpr, dict(zip(jaxpr.invars, paths))):
        found[path].add(scope)
    return found


@every
def test_scope_is_path(name):
    case, params, state, x = prepared(name)
    for path, found in scopes(lambda *args: call(case, train=True)(*args)[0], params, state, *x).items():
        assert found, path
        assert found == {path[:-1]}, path


@pytest.mark.parametrize("name", ["MLP", "Remat", "Tied"])
def test_scope_is_path_in_compiled_backward(name):
    """What a profile shows: the backward pass of every kernel stands at the kernel's path."""
    case, params, state, x = prepared(name)
    loss = lambda params, *x: jnp.square(call(case, train=True)(params, state, *x)[0]).sum()
    text = jax.jit(jax.grad(loss)).lower(params, *x).compile().as_text()
    found = set()
    for stack in re.findall(r'op_name="([^"]*transpose\([^"]*)"', text):
        parts = re.sub(r"jit\([^()]*\)|\b(jvp|transpose)\(|\)", "", stack).split("/")
        found.add("/".join(part for part in parts[:-1] if part and part not in MACHINERY))
    kernels = {"/".join(part.key for part in path[:-1]) for path, leaf in jax.tree.leaves_with_path(params)
               if path[-1].key in ("kernel", "embedding")}
    assert kernels <= found


MACHINERY = ("while", "body", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation")


def test_stack_runs_its_block_as_often_at_any_depth():
    calls = []
    for depth in (2, 48):
        activation = counted(jnp.tanh)
        model = nn.Stack(nn.Sequential(nn.Dense(4), activation), depth)
        x = jnp.ones((2, 4))
        params, _ = model.init(jax.random.key(0), x)
        made = activation.calls
        jax.jit(jax.grad(lambda params, model=model, x=x: model(params, x).sum())).trace(params)
        calls.append((made, activation.calls - made))
    assert calls[0] == calls[1]
    assert max(calls[0]) <= 3


def operations(jaxpr, name=None):
    """How many equations (of that name) run, those inside counted as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        total += sum(sub.times * operations(sub.jaxpr, name) for sub in inner) if inner else (
            name in (None, eqn.primitive.name))
    return total


@pytest.mark.parametrize("block", [nn.Sequential(nn.Dense(4), jnp.tanh), nn.Residual(nn.LayerNorm(), nn.Attention(2))],
                         ids=["dense", "attention"])
def test_backward_costs_linearly_in_depth(block):
    x = jnp.ones((2, 4, 4))

    def cost(model):
        params, _ = model.init(jax.random.key(0), x)
        return operations(jax.make_jaxpr(jax.grad(lambda params: model(params, x).sum()))(params).jaxpr)

    for wrap in (lambda depth: nn.Sequential(*[block] * depth), lambda depth: nn.Stack(block, depth)):
        two, four, eight = (cost(wrap(depth)) for depth in (2, 4, 8))
        assert four > two
        assert eight - four == 2 * (four - two)


def test_backward_costs_a_small_multiple_of_forward():
    model, x = nn.Sequential(*[nn.Dense(4)] * 8), jnp.ones((2, 4))
    params, _ = model.init(jax.random.key(0), x)
    dots = lambda f: operations(jax.make_jaxpr(f)(params, x).jaxpr, "dot_general")
    assert dots(model) == 8
    assert dots(jax.grad(lambda params, x: model(params, x).sum(), argnums=(0, 1))) == 8 + 2 * 8
