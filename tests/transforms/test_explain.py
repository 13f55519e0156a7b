"""explain: what autocast makes of each equation, as rows and as a table."""

import functools

import jax
import jax.numpy as jnp
import pytest

from fnet import hardware as hw
from fnet import layers as nn
from fnet import transforms as ft

MODEL = nn.Sequential(
    stem=nn.Conv(4, 3), flat=nn.Flatten(), hidden=nn.Dense(8), act=jnp.tanh, head=nn.Dense(3)
)
X = jax.ShapeDtypeStruct((2, 4, 4, 1), jnp.float32)
PARAMS = jax.eval_shape(lambda key: MODEL.init(key, X)[0], jax.random.key(0))


def loss(params, x):
    return jnp.exp(MODEL(params, x)).mean()


def rows(policy, f=loss, **options):
    return ft.explain(ft.autocast(f, policy, **options), PARAMS, X).rows


def one(rows, scope, primitive):
    found = {
        (row.kind, row.dtype, row.reason)
        for row in rows
        if (row.scope, row.primitive) == (scope, primitive)
    }
    assert len(found) == 1, found
    return found.pop()


def test_rows_say_what_and_why():
    found = rows("bfloat16")
    assert one(found, "stem", "conv_general_dilated")[:2] == ("lower", "bfloat16")
    assert one(found, "hidden", "dot_general")[:2] == ("lower", "bfloat16")
    assert "float32 sums" in one(found, "hidden", "dot_general")[2]
    assert one(found, "head", "dot_general")[2].endswith("the result is only used in float32")
    assert one(found, "", "exp")[:2] == ("float32", "float32")
    assert one(found, "", "reduce_sum") == (
        "float32",
        "float32",
        "needs float32's range or sums, or is in no list",
    )


def test_a_rule_and_a_policy_without_convolutions_are_named():
    found = rows("bfloat16", rules={"hidden": "float32"})
    assert one(found, "hidden", "dot_general") == (
        "author",
        "float32",
        "kept in float32 by a rule or full_precision",
    )
    apart = rows(hw.Policy(compute="bfloat16", convolution="float32"))
    assert one(apart, "stem", "conv_general_dilated") == (
        "convolution",
        "float32",
        "the policy keeps convolutions in float32",
    )
    assert one(apart, "hidden", "dot_general")[:2] == ("lower", "bfloat16")


def test_every_call_of_a_jitted_function_counts_and_nothing_is_computed():
    twice = jax.jit(lambda x: x @ x)
    f = lambda x: twice(twice(x)).sum()
    found = ft.explain(ft.autocast(f, "bfloat16"), jax.ShapeDtypeStruct((4, 4), jnp.float32)).rows
    assert sum(row.primitive == "dot_general" for row in found) == 2


def test_backward_equations_stand_in_their_layers_scope():
    found = rows("bfloat16", ft.grad(loss))
    assert sum((row.scope, row.primitive) == ("hidden", "dot_general") for row in found) == 3


def test_the_table_has_the_policy_and_a_line_for_each_scope_and_reason():
    text = str(ft.explain(jax.jit(ft.autocast(loss, "bfloat16")), PARAMS, X))
    lines = text.splitlines()
    assert lines[0].startswith("parameters float32, compute bfloat16") and lines[2].split() == [
        "scope",
        "dtype",
        "operations:",
        "why",
    ]
    assert any(
        line.startswith("stem ") and "1 conv_general_dilated: a product" in line for line in lines
    )
    assert any(line.startswith("(no scope)") and "exp" in line for line in lines)
    scopes = [line.split("  ")[0] for line in lines[3:]]
    assert all(
        scopes.index(s) + scopes.count(s) > i for i, s in enumerate(scopes)
    )  # a scope's lines stand together


def test_bound_arguments_are_explained():
    f = functools.partial(ft.autocast(loss, "bfloat16"), PARAMS)
    assert str(ft.explain(f, X)) == str(ft.explain(ft.autocast(loss, "bfloat16"), PARAMS, X))


def test_what_autocast_has_not_wrapped_is_an_error():
    message = (
        r"explain: expected a function returned by autocast, tune or use_implicit_arrays; got "
        r"'loss'\. "
        r"Call explain\(ft.autocast\(f\)"
    )
    with pytest.raises(ValueError, match=message):
        ft.explain(loss, PARAMS, X)
