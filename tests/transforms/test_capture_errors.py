"""Errors of sites, capture, intervene and capture_cotangents."""

import jax
import jax.numpy as jnp
import pytest
from checks import same
from jax import lax

from fnet import layers as nn
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
X = jax.random.normal(jax.random.key(0), (2, 5, 8))
BLOCK = nn.Sequential(attend=nn.Dense(8), mlp=nn.Dense(8))
MODEL = nn.Sequential(nn.Dense(8), blocks=nn.Stack(BLOCK, 3), head=nn.Dense(4))
PARAMS = MODEL.init(jax.random.key(1), X)[0]


def loss(params, x):
    return jnp.sum(jnp.sin(MODEL(params, x)))


def looping(x):
    def body(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    return lax.while_loop(lambda x: x.sum() > 100, body, ft.tag(x, "start"))


def branching(x):
    def branch(x):
        with jax.named_scope("inside"):
            return jnp.sin(x)

    return lax.cond(x.sum() > 0, branch, lambda x: x, x)


@jax.custom_vjp
def own_derivative(x):
    with jax.named_scope("inside"):
        return jnp.sin(x)


own_derivative.defvjp(lambda x: (own_derivative(x), x), lambda x, g: (g,))


@pytest.mark.parametrize(
    "transform",
    [ft.capture, lambda f, p: ft.intervene(f, {p: lambda v, i: v}), ft.capture_cotangents],
    ids=["capture", "intervene", "capture_cotangents"],
)
@pytest.mark.parametrize(
    ("f", "what"),
    [(looping, "a while loop"), (branching, "a branch of cond")],
    ids=["while", "cond"],
)
def test_no_single_value(transform, f, what):
    with pytest.raises(
        ValueError, match=f"the site 'inside' is inside {what}, where it has no single value"
    ):
        transform(f, "inside")(X)
    assert f"inside  float32[2, 5, 8]  (inside {what}: not available)" in str(ft.sites(f)(X))
    same(ft.capture(looping, "start")(X)[1]["start"], X)


def test_inside_a_function_with_its_own_derivative():
    y, seen = ft.capture(own_derivative, "inside")(X)
    same(seen["inside"], y)
    captured = jax.grad(lambda x: ft.capture(own_derivative, "inside")(x)[0].sum())(X)
    same(captured, jnp.ones_like(X))  # its own derivative, not cos
    with pytest.raises(ValueError, match="the site 'inside' is inside a function with custom_jvp"):
        ft.intervene(own_derivative, {"inside": lambda value, index: value})(X)


def test_a_differentiated_site_cannot_be_changed():
    with pytest.raises(
        ValueError,
        match=r"'head' is in a part of the function that has been differentiated.*"
        r"grad\(intervene\(f",
    ):
        ft.intervene(jax.grad(loss), {"head": lambda value, index: value})(PARAMS, X)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "blocks/atend",
            r"capture: the pattern 'blocks/atend' matches no site; nearest: 'blocks/attend'",
        ),
        ("blocks[3]/mlp", "has the index 3, and the scan at 'blocks' has 3 iterations"),
        ("head[0]", r"the pattern 'head\[0\]' matches no site"),
        (
            "(",
            r"the pattern '\(' is not a regular expression \(missing \), unterminated subpattern",
        ),
        (3, None),
        ([3], "a pattern must be a string, such as 'blocks/attention'; got a int"),
    ],
)
def test_errors_of_patterns(pattern, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ft.capture(MODEL, pattern)(PARAMS, X)


def test_no_named_scopes():
    with pytest.raises(ValueError, match="nearest: the function has no named scopes"):
        ft.capture(jnp.sin, "x")(X)


def test_an_index_that_is_also_a_regular_expression():
    def f(x):
        x = ft.tag(x, "block1")
        return lax.scan(lambda c, row: (ft.tag(c + row, "block"), None), x[0], x)[0]

    assert list(ft.capture(f, "block(1)")(X)[1]) == ["block1"]
    with pytest.raises(
        ValueError,
        match=r"'block\[1\]' is ambiguous: as a regular expression it matches 'block1', as "
        r"an index 'block\[1\]'",
    ):
        ft.capture(f, "block[1]")(X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda value, index: value[0],
            r"the change of 'head' must return float32\[2, 5, 4\], as the original value; it "
            r"returned float32\[5, 4\]",
        ),
        (lambda value, index: value.astype(jnp.bfloat16), r"it returned bfloat16\[2, 5, 4\]"),
        (lambda value, index: (value,), r"it returned \('float32\[2, 5, 4\]',\)"),
        (lambda value, index: None, "it returned None"),
    ],
    ids=["shape", "dtype", "structure", "None"],
)
def test_errors_of_changes(change, message):
    with pytest.raises(TypeError, match=message):
        ft.intervene(MODEL, {"head": change})(PARAMS, X)


def test_other_errors():
    with pytest.raises(TypeError, match=r"intervene: changes are \{pattern: change\}"):
        ft.intervene(MODEL, {"head": 0})
    with pytest.raises(
        TypeError, match=r"name_scopes: expected a flax\.nnx\.Module, got a Sequential"
    ):
        ft.name_scopes(MODEL)
    for f, has_aux, message in (
        (
            MODEL,
            False,
            r"with has_aux=False the function must return a floating-point scalar; it returned "
            r"float32\[2, 5, 4\]",
        ),
        (
            loss,
            True,
            r"must return a pair \(floating-point scalar, anything else\); it returned a \w*Tracer",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            ft.capture_cotangents(f, "head", has_aux=has_aux)(PARAMS, X)
