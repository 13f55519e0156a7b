"""Transformed functions have the names of the original, and no `lower` or `trace` but their own."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import same

from fnet import parallel
from fnet import transforms as ft
from fnet.jaxpr import Compiled, wraps
from fnet.parallel._pins import pin

ONE = jax.devices()[:1]
X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 4)), jnp.float32)


def loss(x: jax.Array, scale: float = 2.0) -> jax.Array:
    """Half of a sum."""
    return scale / 4 * jnp.square(x).sum()


def step(state, batch):
    return state + batch.mean(), {"loss": batch.sum()}


def planned():
    return parallel.plan(
        step, lambda key: jax.random.normal(key), jnp.ones(8), devices=jax.devices(), compile=False
    )


COMPILED = {
    "pmap": lambda: (ft.pmap(loss, devices=ONE), (X,)),
    "plan.jit": lambda: (planned().jit(step), (jnp.float32(1), jnp.ones(8))),
}
TRANSFORMS = {
    "microbatch": lambda f: ft.microbatch(f, 1),
    "per_example": lambda f: ft.per_example(f, argnums=0),
    "hvp": ft.hvp,
    "scaled_value_and_grad": ft.scaled_value_and_grad,
    "rematerialize": ft.rematerialize,
    "pin": lambda f: pin(f, jax.make_mesh((1,), ("data",))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", COMPILED)
def test_lower_and_trace_are_not_those_of_the_original(transform, compiled):
    f, _ = COMPILED[compiled]()
    f.note = "mine"
    g = TRANSFORMS[transform](f)
    assert g.__name__ == f.__name__ and g.__doc__ == f.__doc__ and g.__module__ == f.__module__
    assert not {"lower", "trace", "eval_shape", "clear_cache", "note", "autocast", "tuned"} & set(
        dir(g)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compiled", COMPILED)
def test_jit_of_a_compiled_function_lowers_the_outer_one(compiled):
    f, args = COMPILED[compiled]()
    outer = jax.jit(lambda *args: jax.tree.map(lambda y: y * 3 + 1, f(*args)))
    for g in (jax.jit(f), functools.wraps(f)(outer), outer):
        assert g.lower.__self__ is g and g.trace.__self__ is g
    assert jax.jit(f).lower(*args).as_text().count("func.func public") == 1
    assert f.lower(*args).as_text() == f.trace(*args).lower().as_text()
    want = jax.tree.map(lambda y: y * 3 + 1, f(*jax.tree.map(jnp.copy, args)))
    same(functools.wraps(f)(outer).lower(*args).compile()(*args), want)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_compiled_function_is_like_a_function(compiled):
    f, _ = COMPILED[compiled]()
    original = {"pmap": loss, "plan.jit": step}[compiled]
    assert (
        isinstance(f, Compiled)
        and f.__wrapped__ is original
        and inspect.signature(f) == inspect.signature(original)
    )
    assert repr(f) == f"<compiled function {original.__name__}>"
    assert hash(f) != hash(COMPILED[compiled]()[0]) and f == f

    class Holder:
        method = ft.pmap(
            lambda self, x: x + self.n, static_argnums=0, in_axes=(None, 0), devices=ONE
        )
        n = 2

    same(Holder().method(X), X + 2)
    assert isinstance(Holder.method, Compiled)


def test_signatures():
    bound = functools.partial(loss, scale=4.0)
    g = wraps(bound)(lambda x: None)
    assert (g.__name__, g.__doc__, g.__wrapped__) == ("loss", "Half of a sum.", bound)
    assert inspect.signature(ft.microbatch(bound, 2)) == inspect.signature(bound)
    assert ft.microbatch(loss, 2).__annotations__ == loss.__annotations__
    for transformed, first in (
        (ft.hvp(loss), ["x", "v"]),
        (ft.scaled_value_and_grad(loss), ["opt_state", "args"]),
    ):
        assert list(inspect.signature(transformed).parameters)[:2] == first
        assert (
            not hasattr(transformed, "__wrapped__") and "scale" not in transformed.__annotations__
        )
    # jax.jit checks argument numbers against the signature.
    product = jax.jit(ft.hvp(lambda x: jnp.square(x).sum()), donate_argnums=1)
    same(product(X, jnp.ones_like(X)), 2 * jnp.ones_like(X))
    assert (
        wraps(optax.sgd(0.1))(lambda: None).__name__ == "<lambda>"
    )  # a callable or not, without a name
