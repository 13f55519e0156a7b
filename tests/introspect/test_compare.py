"""compare: faults are found where they are, in models of fnet and of other libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from fnet import introspect
from fnet import layers as nn
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
X = jax.random.normal(jax.random.key(0), (3, 8))
BLOCK = nn.Sequential(
    norm=nn.LayerNorm(), up=nn.Dense(12), act=nn.Sequential(jnp.tanh), down=nn.Dense(8)
)
STACKED = nn.Sequential(nn.Dense(8), blocks=nn.Stack(BLOCK, 12), head=nn.Dense(4))
UNROLLED = nn.Sequential(nn.Dense(8), *[BLOCK] * 12, head=nn.Dense(4))


@pytest.mark.exhaustive
def test_one_fault_in_twelve_layers():
    """20 random placements: a layer, one of its parameters, one element."""
    rng, params = np.random.default_rng(0), UNROLLED.init(jax.random.key(1), X)[0]
    assert introspect.compare(UNROLLED, UNROLLED, params, X).first is None
    for _ in range(20):
        layer, part = str(rng.integers(1, 13)), rng.choice(["norm", "up", "down"])
        name = rng.choice(sorted(params[layer][part]))
        array = params[layer][part][name]
        where = tuple(int(rng.integers(size)) for size in array.shape)
        faulty = {
            **params,
            layer: {**params[layer], part: {**params[layer][part], name: array.at[where].add(0.1)}},
        }
        found = introspect.compare(
            functools.partial(UNROLLED, faulty), functools.partial(UNROLLED, params), X
        )
        assert found.first.name == f"{layer}/{part}"
        assert found.rows[-1].name == "result" and not found.rows[-1].equal


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("iteration", "part"), [(0, "norm"), (7, "down"), (11, "up")])
def test_one_fault_in_a_stack(iteration, part):
    params, _ = STACKED.init(jax.random.key(1), X)
    faulty = ft.intervene(
        STACKED, {f"blocks[{iteration}]/{part}": lambda value, index: 1.01 * value}
    )
    found = introspect.compare(faulty, STACKED, params, X, tolerance=1e-3)
    assert found.first.name == f"blocks/{part} [{iteration}]"
    names = [row.name for row in found.rows]
    assert names[:7] == [
        "0",
        "blocks/norm [0]",
        "blocks/up [0]",
        "blocks/act [0]",
        "blocks/down [0]",
        "blocks[0]",
        "blocks/norm [1]",
    ]
    assert names[-3:] == ["blocks", "head", "result"]
    lines = str(found).splitlines()
    assert lines[-1].startswith(
        f"first difference: blocks/{part} [{iteration}] (error 1.0e-02, tolerance 1.0e-03)"
    )
    assert [line for line in lines if line.endswith("<- first difference")] == [
        lines[names.index(found.first.name) + 1]
    ]


@pytest.mark.exhaustive
def test_low_precision():
    params, _ = STACKED.init(jax.random.key(1), X)
    found = introspect.compare(ft.autocast(STACKED, "bfloat16"), STACKED, params, X)
    assert found.first.name == "0" and 1e-4 < found.first.error < 1e-2
    worst = max(row.error for row in found.rows)
    assert 0.01 < worst < 0.3
    assert (
        introspect.compare(
            ft.autocast(STACKED, "bfloat16"), STACKED, params, X, tolerance=worst
        ).first
        is None
    )


def test_tuned():
    params, _ = STACKED.init(jax.random.key(1), X)
    loss = lambda params, x: jnp.sum(STACKED(params, x) ** 2)
    step = jax.value_and_grad(loss)
    found = introspect.compare(ft.tune(step, "cpu"), step, params, X, tolerance=1e-4)
    assert found.first is None and len(found.rows) == 64 and not any(found.only)


class Twin(linen.Module):
    faulty: bool = False

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6, name="first")(x)
        x = jnp.tanh(x) + (0.01 * x if self.faulty else 0)
        x = linen.LayerNorm(name="normalize", epsilon=1e-5)(x)
        return linen.Dense(4, name="last")(x)


def test_a_twin_of_another_library():
    model = nn.Sequential(
        dense=nn.Dense(6),
        act=nn.Sequential(jnp.tanh),
        norm=nn.LayerNorm(epsilon=1e-5),
        head=nn.Dense(4),
    )
    params, _ = model.init(jax.random.key(1), X)
    variables = {
        "params": {"first": params["dense"], "normalize": params["norm"], "last": params["head"]}
    }
    f = functools.partial(model, params)
    found = introspect.compare(f, functools.partial(Twin().apply, variables), X)
    assert found.first is None
    assert [(row.name, row.other) for row in found.rows] == [
        ("dense", "Twin/first"),
        ("norm", "Twin/normalize"),
        ("head", "Twin/last"),
        ("result", "result"),
    ]
    assert found.only == (("act",), ("Twin",))
    assert str(found).endswith(
        "only in the first program: act\nonly in the second program: Twin\nno difference"
    )
    names = {"dense": "Twin/first", "norm": "Twin/normalize", "head": "Twin/last"}
    found = introspect.compare(
        f, functools.partial(Twin(faulty=True).apply, variables), X, names=names
    )
    assert found.first.name == "norm" and found.rows[0].error < 1e-6


def test_values_that_are_no_numbers():
    def f(x):
        return (
            ft.tag(jnp.where(x > 0, jnp.nan, x), "a"),
            ft.tag(jax.random.key(0), "key"),
            ft.tag(x > 0, "mask"),
        )

    assert introspect.compare(f, f, X).first is None
    g = lambda x: (
        ft.tag(jnp.where(x > 0, x, jnp.inf), "a"),
        ft.tag(jax.random.key(0), "key"),
        ft.tag(x > 1, "mask"),
    )
    found = introspect.compare(g, f, X)
    assert found.first.name == "a" and found.first.error == np.inf
    assert [row.name for row in found.rows if not row.equal] == ["a", "mask", "result"]
    h = lambda x: (ft.tag(x[:1], "a"),)
    assert introspect.compare(h, f, X).rows[0].error == np.inf
    assert introspect.compare(h, f, X).rows[0].types == ("float32[1, 8]", "float32[3, 8]")


def test_errors():
    with pytest.raises(
        ValueError,
        match=r"names give 'haed' for 'head', and the second function has no such site "
        r"left; nearest: 'head'",
    ):
        introspect.compare(
            UNROLLED, UNROLLED, UNROLLED.init(jax.random.key(1), X)[0], X, names={"head": "haed"}
        )
