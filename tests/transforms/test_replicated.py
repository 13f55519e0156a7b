"""may_differ: which values of a mapped function may differ between devices; more in
tests/transforms/test_pmap.py."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fnet.transforms._replicated import may_differ


def outputs(f, *differs, axis="i"):
    closed = jax.make_jaxpr(f, axis_env=[("i", 2), ("j", 2)])(*[jnp.float32(1)] * len(differs))
    return may_differ(closed.jaxpr, differs, axis, 2)


CASES = {
    "elementwise": (lambda x, y: (x + y, y * 2, x, 3.0), (True, False), [True, False, True, False]),
    "psum": (
        lambda x: (lax.psum(x, "i"), lax.psum(x, "j"), lax.psum(x, ("i", "j"))),
        (True,),
        [False, True, False],
    ),
    "extrema": (lambda x: (lax.pmax(x, "i"), lax.pmin(x, "j")), (True,), [False, True]),
    "all_gather": (
        lambda x: (lax.all_gather(x, "i"), lax.all_gather(x, "j")),
        (True,),
        [False, True],
    ),
    "parts": (
        lambda x: (
            lax.psum_scatter(x * jnp.ones(2), "i"),
            lax.all_to_all(x * jnp.ones(2), "i", 0, 0),
            lax.all_to_all(x * jnp.ones(2), "j", 0, 0),
        ),
        (False,),
        [True, True, False],
    ),
    "permutations": (
        lambda x, y: [
            lax.ppermute(z, "i", perm)
            for z in (x, y)
            for perm in ([(0, 1), (1, 0)], [(0, 0)], [(0, 1)])
        ],
        (True, False),
        [True, True, True, False, True, True],
    ),
    "groups": (
        lambda x, y: [
            f(z, "i", axis_index_groups=groups)
            for z in (x, y)
            for f in (lax.psum, lax.pmax)
            for groups in ([[0], [1]], [[0, 1]])
        ],
        (True, False),
        [True] * 4 + [False] * 4,
    ),
    "groups gathered": (
        lambda x, y: [lax.all_gather(z, "i", axis_index_groups=[[0], [1]]) for z in (x, y)],
        (True, False),
        [True, False],
    ),
    "index": (lambda x: (lax.axis_index("i"), lax.axis_index("j")), (False,), [True, False]),
    "calls": (
        lambda x, y: jax.jit(lambda a, b: (jax.checkpoint(jnp.sin)(b), a))(x, y),
        (True, False),
        [False, True],
    ),
    "scan": (
        lambda x, y: lax.scan(
            lambda c, _: ((c[1], y + c[1], c[2]), c[2]), (x, y, y), None, length=2
        ),
        (True, False),
        [True, False, False, False],
    ),  # the length may be 0
    "scan over several iterations": (
        lambda x, y: lax.scan(lambda c, _: ((c[1], c[2], c[2]), c[0]), (y, y, x), None, length=3),
        (True, False),
        [True, True, True, True],
    ),
    "while": (
        lambda x, y: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (y, x)),
        (True, False),
        [False, True],
    ),
    "while that ends differently": (
        lambda x, y: lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] * 2), (y, y)),
        (True, False),
        [True, True],
    ),
    "branches": (
        lambda x, y: lax.cond(y > 0, lambda: (x, y), lambda: (y, y)),
        (True, False),
        [True, False],
    ),
    "a choice that differs": (
        lambda x, y: lax.cond(x > 0, lambda: y, lambda: 2 * y),
        (True, False),
        [True],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_may_differ(name):
    f, differs, expected = CASES[name]
    assert outputs(f, *differs) == expected


def test_a_ref_is_not_followed():
    def f(x):
        r = jax.new_ref(x)
        r[...] = 2 * x
        return r[...]

    assert outputs(f, False) == [True]
