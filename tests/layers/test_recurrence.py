"""LSTM and GRU as one operation: its derivatives are JAX's of the same program, and transforms that
change nothing in it leave it whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import cost, jaxpr
from fnet import layers as nn
from fnet import transforms as ft
from fnet.layers import _recurrence
from tests.checks import close

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
every = pytest.mark.parametrize("kind", KINDS)


def made(layer, shape=(3, 5, 4)):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(0, 1, shape), jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    return jax.tree.map(
        lambda a: a + jnp.asarray(draw.uniform(-0.2, 0.2, a.shape), a.dtype), params
    ), x


def names(f, *args):
    equations = jaxpr.equations(jax.make_jaxpr(f)(*args).jaxpr)
    found = [eqn.primitive.name for eqn in equations]
    return [name for name in found if name.startswith("recurrence")]


@pytest.mark.quick_cases("LSTM-lengths0-True-True")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("lengths", [[5, 0, 2], None])
@every
def test_derivatives_are_those_of_the_program(kind, lengths, reverse, bias):
    with jax.enable_x64(True):
        layer = KINDS[kind](6, use_bias=bias)
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), made(layer))
        carry = jax.tree.map(lambda a: a + 0.3, layer.zero_carry(3, jnp.float64))
        states, valid = tuple(jax.tree.leaves(carry)), None
        if lengths:
            valid = (np.arange(5)[:, None] < np.array(lengths))[..., None]

        def ours(params, x, states):
            how = {"reverse": reverse, "unroll": 2}
            return _recurrence.recurrence(layer.cell, params, x, states, valid, **how)

        def plain(params, x, states):
            operands = {"x": x, **params, **{f"state{i}": s for i, s in enumerate(states)}}
            operands |= {} if valid is None else {"valid": valid}
            form = _recurrence.Form(layer.cell, tuple(operands), reverse, 2)
            y, *after = _recurrence._forward(*operands.values(), form=form, keeps=False)
            return y, tuple(after)

        args = params, x, states
        assert names(ours, *args) == ["recurrence"] and not names(plain, *args)
        (want, pull), (got, ours_pull) = (jax.vjp(f, *args) for f in (plain, ours))
        close(got, want, 1e-12)
        close(ours_pull(want), pull(want), 1e-12)
        tangents = jax.tree.map(jnp.cos, args)
        close(jax.jvp(ours, args, tangents), jax.jvp(plain, args, tangents), 1e-12)

        def of_gradient(f):
            norm = lambda *args: sum((a**2).sum() for a in jax.tree.leaves(f(*args)))
            return lambda *args: jax.jvp(jax.grad(norm, (0, 1, 2)), args, tangents)

        close(of_gradient(ours)(*args), of_gradient(plain)(*args), 1e-11)


def test_subsets_of_derivatives():
    layer = nn.GRU(4)
    params, x = made(layer)
    whole = jax.grad(lambda p: jnp.square(layer(p, x)).sum())(params)
    for name in ("kernel", "recurrent_bias"):
        loss = lambda a, name=name: jnp.square(layer({**params, name: a}, x)).sum()
        close(jax.grad(loss)(params[name]), whole[name])
        tangent = jax.jvp(loss, (params[name],), (params[name],))[1]
        close(tangent, (whole[name] * params[name]).sum(), 1e-4)
    last = lambda x: layer.scan(params, x)[1].sum()
    close(jax.grad(last)(x), jax.grad(lambda x: layer(params, x)[:, -1].sum())(x))


@pytest.mark.quick_cases(1)
@every
def test_stays_one_operation_where_nothing_changes(kind):
    layer = KINDS[kind](4)
    params, x = made(layer)
    grad = jax.grad(lambda p, x: layer(p, x).sum())
    both = ["recurrence", "recurrence_gradient"]
    assert names(grad, params, x) == both
    assert names(ft.rewrite(grad, lambda *_: NotImplemented), params, x) == both
    assert (
        names(ft.microbatch(jax.value_and_grad(lambda p, x: layer(p, x).mean()), 3), params, x)
        == both
    )
    cast = ft.autocast(grad, "bfloat16")
    assert not names(cast, params, x)
    assert "bf16" in str(jax.make_jaxpr(cast)(params, x))
    close(jax.vmap(layer, (None, 0))(params, x[:, None])[:, 0], layer(params, x))


@every
def test_is_counted_as_its_products(kind):
    layer = KINDS[kind](8)
    params, x = made(layer, (3, 5, 4))
    flops = cost.count(layer, params, x).total.matmul
    assert flops == 2 * 3 * 5 * layer.gates * 8 * (4 + 8)
