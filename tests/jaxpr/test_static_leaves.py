"""A traced program is reused only for arguments of the same type and value, where Python's == is
too coarse."""

import dataclasses
import decimal
import enum
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers as nn
from fnet import transforms as ft
from fnet.jaxpr._static_leaves import Static, alike


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Option:
    value: Any
    note: str = dataclasses.field(default="", compare=False)


class Scale(nn.Layer):
    factor: Any = 1

    def forward(self, scope, x):
        return x * self.factor


DIFFERENT = [
    1,
    True,
    1.0,
    Color.RED,
    1 + 0j,
    decimal.Decimal("1.0"),
    decimal.Decimal("1.00"),
    0.0,
    -0.0,
    0,
    False,
    complex(0, 0.0),
    complex(0, -0.0),
    math.nan,
    (1,),
    (True,),
    (1.0,),
    (1, 1),
    ((0.0,),),
    ((-0.0,),),
    frozenset({1}),
    frozenset({True}),
    range(1),
    range(2),
    Option(1),
    Option(True),
    Option((0.0,)),
    Option((-0.0,)),
    "a",
    b"a",
    Scale(1),
    Scale(True),
    Scale((1.0,)),
    Scale((1,)),
    nn.Dropout(0),
    nn.Dropout(0.0),
    None,
    jnp.sin,
    jnp.cos,
]


def test_alike():
    for i, j in itertools.product(range(len(DIFFERENT)), repeat=2):
        a, b = DIFFERENT[i], DIFFERENT[j]
        assert alike(a, b) is (i == j), (a, b)
        assert (Static(a) == Static(b)) is (i == j), (a, b)
    for make in (
        lambda: (1.5, float("nan")),
        lambda: Option((2, "x")),
        lambda: Scale((1.0, 2)),
        lambda: 10**30,
        lambda: frozenset({(1, 2), (3, 4)}),
        lambda: {"a": (1,)},
        lambda: nn.Sequential(nn.Dense(3)),
    ):
        assert alike(make(), make())
    assert alike(
        Option(1, "first"), Option(1, "second")
    )  # == of the dataclass does not compare this field
    assert hash(Static(0.0)) is not None and hash(Static(Option(1))) == hash(Static(Option(1)))


def test_fold_traces_once_for_each_argument():
    seen = []

    def f(params, x, option):
        seen.append(option)
        return x

    folded, x = ft.fold(f, {}), jnp.ones(3)
    for option in [option for option in DIFFERENT if option is not None]:
        for _ in range(2):
            folded(x, option)
    # A tuple is a tree, whose numbers are leaves.
    assert list(map(repr, seen)) == [repr(option) for option in DIFFERENT if option is not None]
    for option in ({1: x}, {True: x}, {1.0: x}, {(0.0,): x}, {(-0.0,): x}):
        folded(x, option)
        folded(x, option)
        assert repr(next(iter(seen[-1]))) == repr(next(iter(option)))
    assert len(seen) == len(DIFFERENT) - 1 + 5
    with pytest.raises(
        TypeError, match=r"\[0\]\[1\] is a set, which is neither an array nor hashable"
    ):
        folded(x, {1})


def test_fold_divides_by_the_zero_of_the_call():
    folded = ft.fold(lambda params, x, divisor: x / divisor, {})
    for divisor in (0.0, -0.0, 1, 2, 2.0):
        expected = (
            np.arange(1, 3, dtype=np.float32) / np.float32(divisor)
            if divisor
            else np.copysign(np.float32([np.inf, np.inf]), divisor)
        )
        np.testing.assert_array_equal(folded(jnp.arange(1.0, 3.0), divisor), expected)
    constant = ft.fold(
        lambda params, x, number: jnp.full_like(x, number, dtype=jnp.asarray(number).dtype), {}
    )
    assert [constant(jnp.arange(3), n).dtype for n in (3, 3.0, 3)] == ["int32", "float32", "int32"]


@pytest.mark.exhaustive
def test_pmap_and_tune_trace_for_each_static_argument():
    for make in (lambda f: ft.pmap(f, static_argnums=1, in_axes=(0, None)), ft.tune):
        step = make(lambda x, option: x * (7.0 if option.value is True else 2.0) / option.note)
        x = jnp.ones((len(jax.devices()), 1))
        for value, note in ((1, 1.0), (True, 1.0), (1.0, 1.0)):
            np.testing.assert_array_equal(
                step(x, Option(value, note)), x * (7 if value is True else 2)
            )
        if make is ft.tune:  # the field `note` is not compared
            continue
        zeros = ft.pmap(lambda x, zero: x / zero[0], static_argnums=1, in_axes=(0, None))
        assert [float(zeros(x, (zero,))[0, 0]) for zero in (0.0, -0.0)] == [math.inf, -math.inf]
        assert zeros.lower(x, (1.0,)).compile() is not None


def test_equal_layers_are_one_program():
    assert Scale(1) == Scale(1) and hash(Scale(1)) == hash(Scale(1)) and Scale([1]) == Scale((1,))
    assert Scale(1) != Scale(True) and Scale(0.0) != Scale(-0.0) and Scale(1) != nn.Dropout(1)
    factor, f = (
        jax.jit(lambda layer: jnp.asarray(layer.factor)),
        jax.jit(lambda layer, x: layer({}, x)),
    )
    assert [factor(Scale(value)).dtype for value in (2, 2.0, 2)] == ["int32", "float32", "int32"]
    assert [float(1 / f(Scale(zero), jnp.ones(()))) for zero in (0.0, -0.0)] == [
        math.inf,
        -math.inf,
    ]


def test_derivatives_of_equal_numbers_that_are_not_alike():
    def f(fill):
        return lambda x: jnp.take(x, jnp.array([5]), mode="fill", fill_value=fill).sum()

    nothing = lambda *a: NotImplemented
    signs = [
        float(1 / jax.value_and_grad(ft.rewrite(f(fill), nothing))(jnp.ones(3))[0])
        for fill in (0.0, -0.0)
    ]
    assert signs == [float(1 / f(fill)(jnp.ones(3))) for fill in (0.0, -0.0)]
