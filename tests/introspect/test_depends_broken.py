"""Programs that once were proved although they are not what was claimed: most were found by reading
the rules. Each result of the first table depends on another row."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from fnet import introspect
from fnet import transforms as ft


@pytest.fixture(autouse=True)
def as_a_stranger(quickly):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = np.asarray(jax.random.normal(jax.random.key(0), (4, 3)))
SUBNORMAL = np.array([1e-40, 1, 1e-40, 1], np.float32)
SQUARED = np.full(4, 1.1, ml_dtypes.bfloat16)


def written(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x[::-1]
    return ref[...]


def mask_of_16_bits(x):
    i, j = (lax.broadcasted_iota(jnp.bfloat16, (4, 4), d) + 256 for d in (0, 1))
    return jnp.where((i >= j)[..., None], x[None], 0.0).max(1)


def of_a_large_remainder(x):
    index = lax.dynamic_slice(jnp.arange(4), (jnp.uint32(2**32 - 1),), (1,))
    return jnp.where(index == 3, x, x[::-1])


ROWS = {
    "what a ref holds": written,
    "applied to what is there": lambda x: x[::-1].at[jnp.arange(4)].apply(jnp.sin),
    "a case beyond the last": lambda x: lax.select_n(jnp.full((4, 3), 7), x, x, x[::-1]),
    "squares in 16 bits": lambda x: jnp.where(
        (lax.square(SQUARED) == np.asarray(1.2109375, ml_dtypes.bfloat16))[:, None], x[::-1], x
    ),
    "integer zeros times floats": lambda x: lax.dot_general(
        jnp.zeros((4, 4), jnp.int8), x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    ),
    "flushed numbers in a loop": lambda x: lax.scan(
        lambda s, v: (s, jnp.where(v[0] > 0, v[1], v[2])), 0.0, (SUBNORMAL, x, x[::-1])
    )[1],
    "a flushed number in a branch": lambda x: lax.cond(
        lax.optimization_barrier(SUBNORMAL)[0] > 0, lambda x: x, lambda x: x[::-1], x
    ),
    "a bound that wraps": lambda x: jnp.exp(
        jnp.where(x[::-1] > 0, -4876, -4996).astype(jnp.uint8).astype(jnp.float32) * 0.3
    ),
    "a product that wraps": lambda x: jnp.exp(
        (jnp.where(x[::-1] > 0, -5000, -4000) * 1000000).astype(jnp.float32)
    ),
    "an unsigned start": of_a_large_remainder,
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_depend_on_others_are_not_proved(name):
    verdict = introspect.depends(ROWS[name], X).verdict("independent", 0)
    assert verdict.status != "proved", verdict


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_that_are_used_together(kind):
    keys = jax.random.split(jax.random.key(0, impl=kind), 4)
    draw = jax.vmap(lambda key: jax.random.uniform(key, (3,)))
    assert introspect.depends(draw, keys).verdict("independent", 0, trials=False).status == "tested"
    default = jax.random.split(jax.random.key(0), 4)
    assert introspect.depends(draw, default).verdict("independent", 0).status == "proved"


def test_large_positions_in_16_bits():
    def f(x):
        i, j = (lax.broadcasted_iota(jnp.bfloat16, (301, 301), d) for d in (0, 1))
        return jnp.where(i >= j, x[:, 0], 0.0).max(1)

    report = introspect.depends(f, np.ones((301, 3), np.float32))
    assert report.verdict("causal", 0, trials=False).status == "tested"


def test_one_array_passed_twice():
    square = np.asarray(jax.random.normal(jax.random.key(1), (3, 3)))
    f = lambda a, b: a[::-1].T + b.T
    report = introspect.depends(f, square, square, axes={"b": ((0, 1), 0)})
    assert report.verdict("independent", "b").status == "refuted"


def test_a_primitive_of_the_same_name():
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    reversing = Primitive("tanh")
    reversing.def_abstract_eval(lambda x: x)
    mlir.register_lowering(reversing, mlir.lower_fun(lambda x: x[::-1], multiple_results=False))
    verdict = introspect.depends(reversing.bind, X).verdict("independent", 0, trials=False)
    assert verdict.status == "tested"


NAN = X.copy()
NAN[2] = np.nan


def solved(x):
    return lax.custom_linear_solve(
        lambda v: v * 2.0,
        x,
        solve=lambda _, b: b[::-1] * jnp.zeros((4, 3)) + b * 0.5,
        symmetric=True,
    )


CONDITIONS = {  # (function, changed arguments)
    "in a solve": (solved, NAN),
    "the sign of a zero": (lambda x: 1 / (x[::-1] * 0.0), -X),
    "the sign in an angle": (lambda x: jnp.arctan2(x[::-1] * 0.0, -jnp.ones((4, 3))), -X),
    "a power of a zero": (lambda x: (x[::-1] * 0.0) ** -1, -X),
    "bits of a zero": (lambda x: jnp.signbit(x[::-1] * 0.0).astype(jnp.float32), -X),
    "the sign of a sum of zeros": (lambda x: lax.rsqrt((x[::-1] * 0.0).sum(1)), -X),
    "the sign in a loop": (
        lambda x: lax.scan(lambda c, r: (c, 1 / r), 0.0, (x[::-1] * 0.0).sum(1))[1],
        -X,
    ),
    "the largest zero": (lambda x: lax.top_k(x[::-1] * 0.0, 1)[1], -X),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_fail_where_the_claim_does(name):
    f, other = CONDITIONS[name]
    verdict = introspect.depends(f, X).verdict("independent", 0, trials=False)
    assert verdict.status != "proved"
    if verdict.status == "proved if":
        assert not (verdict.holds(X) and verdict.holds(other))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_in_16_bits(dtype):
    lower = np.tril(np.ones((4, 4), np.float32))
    f = ft.autocast(lambda x: jnp.asarray(lower) @ x, dtype)
    large = X.copy()
    large[-1] = 1e5 if dtype == "float16" else 3.395e38
    verdict = introspect.depends(f, X).verdict("causal", 0)
    assert verdict.status == "proved if" and verdict.holds(X) and not verdict.holds(large)


def test_other_numbers_of_texts():
    def f(x, ids):
        same = (ids[:, None] == ids[None]) | (ids[3] == 7)
        return jnp.where(same[..., None], x[None], -jnp.inf).max(1)

    x, ids = np.ones((6, 3), np.float32), np.array([0, 0, 0, 1, 1, 1], np.int32)
    verdict = introspect.depends(f, x, ids, axes={"t": 0}).verdict("segments", "ids")
    assert verdict.status == "proved" and verdict.holds(x, ids)
    assert not verdict.holds(x, np.array([0, 0, 0, 7, 7, 7], np.int32))
    with pytest.raises(ValueError, match="expected arrays"):
        verdict.holds(x[:3], ids)


def test_what_is_followed_is_what_was_said():
    f = lambda x, y=None: x + y[::-1]
    assert introspect.depends(f, X, y=X.copy()).verdict("independent", 0).status == "refuted"
    both = lambda x: (x, x[::-1])
    with pytest.raises(ValueError, match="does not have the structure"):
        introspect.depends(both, X, axes={"b": (0, (0,))})
    with pytest.raises(ValueError, match="no result has an axis"):
        introspect.depends(both, X, axes={"b": (0, None)}).verdict("independent", "b")

    class Box:
        def __init__(self, x):
            self.x = x

    with pytest.raises(ValueError, match="no array that JAX traces"):
        introspect.depends(lambda x, box: x + box.x, X, Box(X), axes={"b": ((0, 0), 0)})


def test_constant_results_and_empty_arrays():
    report = introspect.depends(lambda x: (x, 5, True, np.ones(4)), X)
    assert report.verdict("independent", 0).status == "proved"
    reversed_and_constant = introspect.depends(lambda x: (x[::-1], 0), X)
    assert reversed_and_constant.verdict("independent", 0).status == "refuted"
    empty = introspect.depends(lambda x: jnp.sort(x, 1).sum(1), np.ones((0, 3), np.float32))
    assert empty.verdict("independent", 0).status == "proved"
    keys = introspect.depends(lambda k: k[::-1], jax.random.split(jax.random.key(0), 4))
    assert keys.verdict("independent", 0).status in ("refuted", "tested")
    key = jax.random.key(0)
    noisy = introspect.depends(lambda x: x + jax.random.normal(key, x.shape), X)
    assert noisy.verdict("independent", 0).status == "proved"
    assert introspect.depends(jnp.tanh, X, axes={"b": np.int64(0)}).check(independent="b")
