"""Errors for arguments of the wrong type, the same in all transforms and inspections; and Taylor
mode of autocast."""

import jax.numpy as jnp
import optax
import pytest
from jax.experimental.jet import jet

from fnet import introspect
from fnet import transforms as ft
from fnet.parallel._sharding_rules import applied

X = jnp.ones((3, 3))
GIVEN_NONE = {
    **{
        name: lambda name=name: getattr(ft, name)(None)
        for name in (
            "autocast",
            "full_precision",
            "hvp",
            "per_example",
            "pmap",
            "rematerialize",
            "scaled_value_and_grad",
            "sites",
            "tune",
            "use_implicit_arrays",
        )
    },
    "capture": lambda: ft.capture(None, "a"),
    "capture_cotangents": lambda: ft.capture_cotangents(None, "a"),
    "intervene": lambda: ft.intervene(None, {"a": lambda value, index: value}),
    "microbatch": lambda: ft.microbatch(None, 2),
    r"fold\(f, params\)": lambda: ft.fold(None, {}),
    "rewrite": lambda: ft.rewrite(None, lambda *args: NotImplemented),
    "check_gradient": lambda: introspect.check_gradient(None, X),
    "compare": lambda: introspect.compare(jnp.sin, None, X),
    "profile": lambda: introspect.profile(None, X),
    "statistics": lambda: introspect.statistics(None, X),
}


@pytest.mark.parametrize("who", GIVEN_NONE)
def test_none_is_no_function(who):
    with pytest.raises(
        TypeError, match=f"^{who}: expected a function, got None; pass the function itself, not its"
    ):
        GIVEN_NONE[who]()


@pytest.mark.parametrize("who", ["summary", "graph"])
def test_none_is_no_layer(who):
    with pytest.raises(
        TypeError, match=f"^{who}: expected a layer, .* or a function .* got a NoneType"
    ):
        getattr(introspect, who)(None, X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: ft.microbatch(lambda w, x: {"name": "a"}, 2)(X, X[:2]),
            TypeError,
            r"^microbatch: the function must return arrays, whose mean is computed; "
            r"result\['name'\] is a str\. Return only",
        ),
        (
            lambda: ft.loss_scale(optax.sgd(0.1), initial="a"),
            TypeError,
            r"^loss_scale: expected a number as initial, got 'a'; pass a float, such as 2\.0\*\*15",
        ),
        (
            lambda: ft.capture(jnp.sin, 3),
            TypeError,
            "^capture: a pattern must be a string, .*; got a int",
        ),
        (
            lambda: applied({"w": ("data",)}, [], {"data": 8}),
            ValueError,
            "^plan: the rule 'w' matches no parameter; there are no parameters; pass rules={}",
        ),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.exhaustive
def test_taylor_mode_of_autocast():
    f = lambda x: jnp.tanh(x @ X) @ X
    series = (X, jnp.zeros_like(X))
    value, terms = jet(ft.autocast(f, "bfloat16"), (0.1 * X,), (series,))
    exact, exact_terms = jet(f, (0.1 * X,), (series,))
    for got, want in zip([value, *terms], [exact, *exact_terms], strict=True):
        assert jnp.abs(got - want).max() <= 0.02 * (1 + jnp.abs(want).max())
