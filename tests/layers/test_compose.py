"""Sequential, Residual, Parallel, Stack, Remat: their arithmetic, their names, what they keep and
compute again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, counted, same

from fnet import layers as nn
from fnet.jaxpr import bodies

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
BLOCK = nn.Sequential(nn.Dense(4, use_bias=False), nn.BatchNorm(), jnp.tanh, nn.Dropout(0.5))


def trained(model, params, state, x):
    def loss(params):
        y, new = model(params, x, state=state, key=KEY, train=True)
        return jnp.square(y).sum(), (y, new)

    return jax.jit(jax.grad(loss, has_aux=True))(params)


def equations(f, *args, name):
    """How often a primitive stands in f's jaxpr, wherever."""

    def count(jaxpr):
        return sum(
            (eqn.primitive.name == name) + sum(count(sub.jaxpr) for sub in bodies(eqn))
            for eqn in jaxpr.eqns
        )

    return count(jax.make_jaxpr(f)(*args).jaxpr)


@pytest.mark.exhaustive
def test_sequential_counts_functions_and_hands_all_inputs_to_the_first():
    model = nn.Sequential(nn.Parallel(nn.Dense(4)), jnp.tanh, nn.Dense(2), last=nn.Dense(1))
    params, _ = model.init(KEY, X)
    assert sorted(params) == ["0", "2", "last"]
    both = nn.Sequential(jnp.add, jnp.tanh)
    close(both({}, X, X), jnp.tanh(2 * X))
    first = nn.Sequential(nn.Attention(2))
    params, _ = first.init(KEY, X[None], X[None, :2])
    close(first(params, X[None], X[None, :2]), nn.Attention(2)(params["0"], X[None], X[None, :2]))


def test_sequential_of_nothing_is_the_identity():
    assert nn.Sequential()({}, X) is X
    assert nn.Sequential().init(KEY, X) == ({}, {})


def test_residual_adds_the_input_or_its_shortcut():
    model = nn.Residual(nn.Dense(4), jnp.tanh)
    params, _ = model.init(KEY, X)
    close(model(params, X), X + jnp.tanh(nn.Dense(4)(params["0"], X)))
    model = nn.Residual(nn.Dense(2), shortcut=nn.Dense(2))
    params, _ = model.init(KEY, X)
    assert sorted(params) == ["0", "shortcut"]
    close(model(params, X), nn.Dense(2)(params["shortcut"], X) + nn.Dense(2)(params["0"], X))
    close(nn.Residual(jnp.tanh, shortcut=jnp.sin)({}, X), jnp.sin(X) + jnp.tanh(X))


def test_parallel_combines_from_left_to_right():
    model = nn.Parallel(jnp.sin, jnp.cos, jnp.tanh, combine=lambda a, b: a - b)
    close(model({}, X), jnp.sin(X) - jnp.cos(X) - jnp.tanh(X))
    model = nn.Parallel(nn.Dense(2), wide=nn.Dense(2))
    params, _ = model.init(KEY, X)
    assert sorted(params) == ["0", "wide"]
    close(model(params, X), nn.Dense(2)(params["0"], X) + nn.Dense(2)(params["wide"], X))


def test_reprs_read_like_the_code():
    assert repr(nn.Sequential(nn.Dense(3), jnp.tanh, head=nn.Dense(2, use_bias=False))) == (
        "Sequential(Dense(features=3), tanh, head=Dense(features=2, use_bias=False))"
    )
    assert repr(nn.Residual(nn.Dense(3), shortcut=nn.Dense(3))) == (
        "Residual(Dense(features=3), shortcut=Dense(features=3))"
    )
    assert repr(nn.Stack(nn.Dense(3), 2)) == "Stack(block=Dense(features=3), depth=2)"


# Remat


@pytest.mark.exhaustive
def test_remat_changes_no_numbers_and_no_names():
    params, state = BLOCK.init(KEY, X)
    remat = nn.Remat(BLOCK)
    same(remat.init(KEY, X), (params, state))
    close(trained(remat, params, state, X), trained(BLOCK, params, state, X))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_remat_computes_again_what_the_policy_does_not_keep(policy):
    block = nn.Sequential(nn.Dense(4), jnp.sin, nn.Dense(4), jnp.sin)
    params, _ = block.init(KEY, X)
    dots, sines = (
        [
            equations(jax.grad(lambda p, m=model: m(p, X).sum()), params, name=name)
            for model in (block, nn.Remat(block, policy=policy))
        ]
        for name in ("dot_general", "sin")
    )
    assert sines[1] > sines[0]
    assert (dots[1] > dots[0]) == (policy is None)


def test_remat_takes_static_and_array_options():
    @nn.layer
    def powers(scope, x, *, unused=0):
        return scope.param("w", (4,), jax.nn.initializers.ones)[None] * x

    @nn.layer
    def masked(scope, x, mask, how):
        return jnp.where(mask, x, -x) if how == "sign" else powers()(scope["p"], x)

    remat = nn.Remat(masked())
    params, _ = remat.init(KEY, X, X > 0, "power")
    same(remat(params, X, X > 0, "power"), X)
    close(remat({}, X, X > 0, how="sign"), jnp.abs(X))


# Stack


def stacked_trees(depth, block=BLOCK):
    params, state = nn.Stack(block, depth).init(KEY, X)
    return params, state, nn.Stack(block, depth)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "wrap",
    [
        lambda stack: stack,
        nn.Remat,
        lambda stack: nn.Stack(stack.block, stack.depth, unroll=2),
        lambda stack: nn.Stack(nn.Remat(stack.block), stack.depth),
    ],
    ids=["stack", "remat", "unroll", "remat_inside"],
)
def test_stack_and_remat_compose(wrap):
    params, state, stack = stacked_trees(3)
    model = wrap(stack)
    same(model.init(KEY, X), (params, state))
    close(trained(model, params, state, X), trained(stack, params, state, X))


@pytest.mark.exhaustive
def test_stacks_nest():
    inner = nn.Stack(nn.Dense(4), 2)
    model = nn.Stack(inner, 3)
    params, _ = model.init(KEY, X)
    assert params["kernel"].shape == (3, 2, 4, 4)
    y = X
    for i in range(3):
        y = inner(jax.tree.map(lambda a, i=i: a[i], params), y)
    close(model(params, X), y)
    same(params["kernel"][1], inner_of_sequential(inner)["1"]["kernel"])


def inner_of_sequential(inner):
    return nn.Sequential(*[inner] * 3).init(KEY, X)[0]


def test_stack_of_none_is_the_identity():
    model = nn.Stack(nn.Dense(4), 0)
    params, _ = model.init(KEY, X)
    assert params["kernel"].shape == (0, 4, 4)
    same(model(params, X), X)


def test_stack_hands_extra_inputs_to_every_copy():
    @nn.layer
    def gated(scope, x, gate, *, power=1):
        return nn.Dense(4)(scope["dense"], x) * gate**power

    model = nn.Stack(gated(power=2), 3)
    gate = jnp.full((3, 4), 0.5)
    params, _ = model.init(KEY, X, gate)
    y = X
    for i in range(3):
        y = gated(power=2)(jax.tree.map(lambda a, i=i: a[i], params), y, gate)
    close(model(params, X, gate), y)


@pytest.mark.exhaustive
def test_stack_in_a_place_of_its_own():
    model = nn.Sequential(nn.Dense(4), blocks=nn.Stack(BLOCK, 2))
    params, state = model.init(KEY, X)
    assert sorted(params["blocks"]) == ["0", "1"]
    apart = nn.Sequential(nn.Dense(4), blocks=nn.Sequential(*[BLOCK] * 2)).init(KEY, X)[0]["blocks"]
    same(jax.tree.map(lambda a: a[1], params["blocks"]), apart["1"])
    y, new = model(params, X, state=state, key=KEY, train=True)
    assert (new["blocks"]["1"]["mean"] != state["blocks"]["1"]["mean"]).any()
    assert jnp.isfinite(y).all()


def test_stack_under_vmap_and_per_device():
    params, _, stack = stacked_trees(2, nn.Sequential(nn.Dense(4), jnp.tanh))
    xs = jnp.stack([X, 2 * X])
    close(
        jax.vmap(stack, in_axes=(None, 0))(params, xs),
        jnp.stack([stack(params, X), stack(params, 2 * X)]),
    )


@pytest.mark.exhaustive
def test_stack_traces_its_block_once_a_call():
    activation = counted(jnp.tanh)
    counts = []
    for depth in (2, 48):
        model = nn.Stack(nn.Sequential(nn.Dense(4), activation), depth)
        params, _ = model.init(KEY, X)
        activation.calls = 0
        jax.make_jaxpr(model)(params, X)
        counts.append(activation.calls)
    assert counts == [1, 1]
