"""cost, touched and nbytes of single equations, against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet.jaxpr import cost, equations, nbytes, touched


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def equation(f, *args):
    """The last equation of f."""
    return jax.make_jaxpr(f)(*args).jaxpr.eqns[-1]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("int2", 3),
        ("int4", 5),
        ("uint4", 5),
        ("int8", 9),
        ("bool", 9),
        ("float4_e2m1fn", 5),
        ("float8_e4m3fn", 9),
        ("bfloat16", 18),
        ("float32", 36),
        ("float64", 72),
        ("complex64", 72),
        ("complex128", 144),
    ],
)
def test_bytes_of_nine_numbers(dtype, size):
    assert nbytes(spec(3, 3, dtype=dtype)) == size


def test_bytes_of_keys_and_of_what_is_no_array():
    keys = jax.random.split(jax.random.key(0), 3)
    assert nbytes(jax.typeof(keys)) == jax.random.key_data(keys).nbytes == 24
    token = jax.make_jaxpr(lax.create_token)().out_avals[0]
    assert nbytes(token) == nbytes(spec(3, dtype=jax.dtypes.float0)) == 0
    assert nbytes(spec(0, 3)) == 0 and nbytes(spec()) == 4


COSTS = {
    "dot_general of complex numbers": (
        lambda x: x @ x,
        [spec(4, 4, dtype="complex64")],
        ("matmul", 4 * 2 * 64, (1, 4, 4, 4)),
    ),
    "dot_general of integers": (
        lambda x: x @ x,
        [spec(4, 4, dtype="int32")],
        ("matmul", 2 * 64, (1, 4, 4, 4)),
    ),
    "mul": (lambda x, y: x * y, [spec(3, 5)] * 2, ("elementwise", 15)),
    "add of integers": (lambda x: x + 1, [spec(3, dtype="int32")], ("elementwise", 0)),
    "gt": (lambda x: x > 1, [spec(3)], ("elementwise", 3)),
    "sin": (jnp.sin, [spec(3, 5)], ("transcendental", 15)),
    "reduce_sum": (lambda x: x.sum(0), [spec(3, 5)], ("reduction", 15)),
    "reduce_sum of integers": (
        lambda x: lax.reduce_sum(x, (0,)),
        [spec(3, dtype="int32")],
        ("reduction", 0),
    ),
    "convert_element_type": (lambda x: x.astype("bfloat16"), [spec(3)], ("free", 0)),
    "gather": (lambda x, i: x[i], [spec(9, 2), spec(3, dtype="int32")], ("free", 0)),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y, (0,)),
        [spec(9), spec(2)],
        ("free", 0),
    ),
    "scatter": (
        lambda x, i, y: x.at[i].set(y),
        [spec(9), spec(3, dtype="int32"), spec(3)],
        ("reduction", 0),
    ),
    "scatter-add": (
        lambda x, i, y: x.at[i].add(y),
        [spec(9), spec(3, dtype="int32"), spec(3)],
        ("reduction", 3),
    ),
    "reduce_window_max": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (2, 3), "VALID"),
        [spec(4, 6)],
        ("reduction", 4 * 6),
    ),
    "sort": (lax.sort, [spec(3, 8)], ("elementwise", 24 * 3)),
    "fft": (jnp.fft.fft, [spec(8, dtype="complex64")], ("elementwise", 5 * 8 * 3)),
    "cholesky": (
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
        [spec(6, 6)],
        ("reduction", 6**3 // 3),
    ),
    "lu": (lax.linalg.lu, [spec(6, 6)], ("reduction", 2 * 6**3 // 3)),
    "triangular_solve": (
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        [spec(6, 6), spec(6, 2)],
        ("reduction", 6 * 6 * 2),
    ),
    "pure_callback": (lambda x: jax.pure_callback(np.sin, spec(3), x), [spec(3)], ("unknown", 0)),
}


@pytest.mark.parametrize("name", COSTS)
def test_operations(name):
    f, args, expected = COSTS[name]
    found = cost(
        next(
            e
            for e in equations(jax.make_jaxpr(f)(*args).jaxpr)
            if e.primitive.name == name.split()[0]
        )
    )
    assert found[:2] == expected[:2]
    assert found.shape == (expected[2] if len(expected) == 3 else None)


TOUCHED = {
    "add": (lambda x, y: x + y, [spec(3, 5)] * 2, ([60, 60], [60])),
    "literal": (lambda x: x * 2.0, [spec(3)], ([12, 0], [12])),
    "view": (lambda x: x.reshape(5, 3), [spec(3, 5)], ([0], [0])),
    "broadcast": (lambda x: jnp.broadcast_to(x, (4, 3)), [spec(3)], ([12], [48])),
    "slice": (lambda x: x[:2], [spec(9)], ([8], [8])),
    "dynamic_slice": (
        lambda x, i: lax.dynamic_slice(x, (i,), (2,)),
        [spec(9), spec(dtype="int32")],
        ([8, 4], [8]),
    ),
    "gather": (
        lambda x, i: x.at[i].get(mode="promise_in_bounds"),
        [spec(9, 2), spec(3, 1, dtype="int32")],
        ([24, 12], [24]),
    ),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i,)),
        [spec(9), spec(2), spec(dtype="int32")],
        ([0, 8, 4], [8]),
    ),
    "scatter-add": (
        lambda x, i, y: lax.scatter_add(x, i, y, lax.ScatterDimensionNumbers((), (0,), (0,))),
        [spec(9), spec(3, 1, dtype="int32"), spec(3)],
        ([12, 12, 12], [12]),
    ),
    "int4": (lambda x: x.astype("int8"), [spec(8, dtype="int4")], ([4], [8])),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_bytes_read_and_written(name):
    f, args, expected = TOUCHED[name]
    eqn = equation(f, *args)
    assert touched(eqn) == expected, eqn
