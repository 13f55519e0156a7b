"""The twenty operations of `check_devices`: what a device computes, what NumPy computes, and how
far apart rounding may bring the two.

The bounds are derived, not fitted. Data movement, integers, and float32 sums of small integers have
no rounding errors, so their results must be exact. A sum of n products may be off by about n
rounding errors of the sum of their absolute values, in any order of summation (Higham, Accuracy and
Stability of Numerical Algorithms, 2002, section 3.1). The rounding error is taken as float32's eps
instead of eps / 2, because tensor cores truncate (Fasi et al., Numerical behavior of NVIDIA tensor
cores, 2021). The errors of exp, log, tanh and division are the largest that XLA's own exhaustive
tests accept on any platform (xla/tests/exhaustive), which are those of older TPUs.

No axis is a multiple of a tile, and most are longer than one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax

AXIS = "devices"  # the mesh axis of the program that runs on all devices
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers may be flushed to zero
_EXP, _DIVISION, _ERF = 75 * EPS, 136 * EPS, 300 * EPS  # relative; erf divides two polynomials
_LOG, _TANH = 2e-4, 5e-4  # absolute
_HIGHEST = lax.Precision.HIGHEST


class Expected(NamedTuple):
    """What NumPy computes, in float64 or exactly, and the largest error of each element."""

    values: np.ndarray
    bound: np.ndarray | float = 0.0


class Operation(NamedTuple):
    """One operation of the check.

    Attributes:
        name, dtype, shape: as they are reported.
        draw: a function of a NumPy generator that returns the inputs.
        run: computes the outputs from the inputs, as a dict from the name of a part to an array.
            JAX traces it, in one program with the other operations.
        expect: computes the same from the same inputs with NumPy.
        placed: whether `expect` takes two more arguments before the inputs: the position of the
            device, and the number of devices.
        by_itself: whether `run` is not traced. It takes the devices as one more argument before
            the inputs, and its outputs have one row for each.
    """

    name: str
    dtype: str
    shape: str
    draw: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    run: Callable[..., Mapping[str, Any]]
    expect: Callable[..., Mapping[str, Expected]]
    placed: bool = False
    by_itself: bool = False


def rounding(n: int, eps: float = EPS) -> float:
    """Returns the relative error of n roundings, each of which may be off by `eps`."""
    return n * eps / (1 - n * eps)


# Matrix products. A float32 product in TF32 or in one bfloat16 pass is wrong, because the highest
# precision is requested.

_M, _K, _N = 131, 130, 67


def _matrices(dtype: Any) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    return lambda rng: tuple(
        rng.standard_normal(shape).astype(dtype) for shape in ((_M, _K), (_K, _N))
    )


def _halves(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Float16 numbers that are bfloat16 numbers, too: TPUs may multiply them as such."""
    return tuple(matrix.astype(np.float16) for matrix in _matrices(jnp.bfloat16)(rng))


def _product(a: Any, b: Any) -> dict[str, Any]:
    return {"product": lax.dot(a, b, precision=_HIGHEST, preferred_element_type=jnp.float32)}


def _expect_product(a: np.ndarray, b: np.ndarray) -> dict[str, Expected]:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return {"product": Expected(a @ b, rounding(_K) * (abs(a) @ abs(b)))}


def _draw_int8(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.integers(-128, 128, shape, np.int8) for shape in ((_M, _K), (_K, _N)))


def _product_int8(a: Any, b: Any) -> dict[str, Any]:
    return {"product": lax.dot(a, b, preferred_element_type=jnp.int32)}


def _expect_int8(a: np.ndarray, b: np.ndarray) -> dict[str, Expected]:
    return {"product": Expected(a.astype(np.int64) @ b.astype(np.int64))}


# A convolution [batch, height, width, channels] with its gradients.

_STRIDES, _PADDING = (2, 1), ((1, 2), (0, 1))
_X, _W = (2, 13, 11, 13), (3, 3, 13, 7)
_Y = (2, 7, 10, 7)


def _draw_convolution(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal(shape, np.float32) for shape in (_X, _W, _Y))


def _convolution(x: Any, w: Any, g: Any) -> dict[str, Any]:
    y, backward = jax.vjp(
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            _STRIDES,
            _PADDING,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=_HIGHEST,
        ),
        x,
        w,
    )
    dx, dw = backward(g)
    return {"output": y, "gradient of the input": dx, "gradient of the kernel": dw}


def _expect_convolution(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> dict[str, Expected]:
    height, width, _, channels = w.shape
    forward, into_x, into_w = (
        rounding(n)
        for n in (height * width * w.shape[2], height * width * channels, g[..., 0].size)
    )
    y, dx, dw = _convolved(*(a.astype(np.float64) for a in (x, w, g)))
    sizes = _convolved(*(abs(a.astype(np.float64)) for a in (x, w, g)))
    return {
        "output": Expected(y, forward * sizes[0]),
        "gradient of the input": Expected(dx, into_x * sizes[1]),
        "gradient of the kernel": Expected(dw, into_w * sizes[2]),
    }


def _convolved(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the convolution and its two gradients, as one matrix product for each element of the
    window."""
    padded = np.pad(x, ((0, 0), *_PADDING, (0, 0)))
    y, dx, dw = np.zeros(g.shape), np.zeros(padded.shape), np.zeros(w.shape)
    rows, columns = (size * stride for size, stride in zip(g.shape[1:3], _STRIDES))
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            window = (
                slice(None),
                slice(i, i + rows, _STRIDES[0]),
                slice(j, j + columns, _STRIDES[1]),
            )
            y += padded[window] @ w[i, j]
            dx[window] += g @ w[i, j].T
            dw[i, j] = np.tensordot(padded[window], g, ((0, 1, 2), (0, 1, 2)))
    (top, bottom), (left, right) = _PADDING
    _, height, width, _ = padded.shape
    return y, dx[:, top : height - bottom, left : width - right], dw


# Sums of small integers in float32, which are exact below 2^24 in any order, also where XLA
# computes them as products of bfloat16.


def _integers(*shape: int, high: int = 128) -> Callable[[np.random.Generator], tuple]:
    return lambda rng: (rng.integers(0, high, shape).astype(np.float32),)


def _sum(x: Any) -> dict[str, Any]:
    return {
        "all": jnp.sum(x),
        "rows": jnp.sum(x, axis=1),
        "columns": jnp.sum(x, axis=0),
        "largest of the columns": jnp.max(x, axis=0),
    }


def _expect_sum(x: np.ndarray) -> dict[str, Expected]:
    x = x.astype(np.float64)
    return {
        "all": Expected(x.sum()),
        "rows": Expected(x.sum(1)),
        "columns": Expected(x.sum(0)),
        "largest of the columns": Expected(x.max(0)),
    }


def _cumsum(x: Any) -> dict[str, Any]:
    return {"sums": lax.cumsum(x, 1)}


def _expect_cumsum(x: np.ndarray) -> dict[str, Expected]:
    return {"sums": Expected(np.cumsum(x.astype(np.float64), 1))}


# Order. Many keys are equal, so the order of equal keys is checked, too.

_TOP = 13


def _draw_keys(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    keys = rng.integers(-100, 100, (3, 1009)).astype(np.float32) / 4
    keys[0, 5], keys[1, 700] = np.inf, -np.inf
    return (keys,)


def _sort(x: Any) -> dict[str, Any]:
    ordered, where = lax.sort((x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), num_keys=1)
    top, top_where = lax.top_k(x, _TOP)
    return {
        "sorted": ordered,
        "indices of sort": where,
        "top_k": top,
        "indices of top_k": top_where,
    }


def _expect_sort(x: np.ndarray) -> dict[str, Expected]:
    where, top_where = (np.argsort(keys, axis=1, kind="stable") for keys in (x, -x))
    top_where = top_where[:, :_TOP]
    return {
        "sorted": Expected(np.take_along_axis(x, where, 1)),
        "indices of sort": Expected(where),
        "top_k": Expected(np.take_along_axis(x, top_where, 1)),
        "indices of top_k": Expected(top_where),
    }


# Indices: repeated ones, and ones outside of the array.


def _draw_rows(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return (
        rng.standard_normal((139, 35), np.float32),
        rng.integers(-5, 150, 517, np.int32),
        np.array([131, 7], np.int32),
    )


def _gather(x: Any, rows: Any, start: Any) -> dict[str, Any]:
    return {
        "rows": x.at[rows].get(mode="fill", fill_value=-1.0, wrap_negative_indices=False),
        "dynamic slice": lax.dynamic_slice(x, start, (19, 11)),  # moved back into the array
    }


def _expect_gather(x: np.ndarray, rows: np.ndarray, start: np.ndarray) -> dict[str, Expected]:
    inside = (rows >= 0) & (rows < len(x))
    i, j = len(x) - 19, start[1]
    return {
        "rows": Expected(np.where(inside[:, None], x[np.where(inside, rows, 0)], -1)),
        "dynamic slice": Expected(x[i : i + 19, j : j + 11]),
    }


def _draw_updates(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return (
        rng.integers(0, 128, (37, 5)).astype(np.float32),
        rng.integers(0, 40, 1009, np.int32),
        rng.integers(0, 128, (1009, 5)).astype(np.float32),
    )


def _scatter(x: Any, rows: Any, updates: Any) -> dict[str, Any]:
    return {
        "sums": x.at[rows].add(updates, mode="drop"),
        "dynamic update": lax.dynamic_update_slice(x, updates[:4, :3], (rows[0], rows[1])),
    }


def _expect_scatter(x: np.ndarray, rows: np.ndarray, updates: np.ndarray) -> dict[str, Expected]:
    sums: np.ndarray = x.astype(np.float64)
    inside = rows < len(x)
    np.add.at(sums, rows[inside], updates[inside])
    updated = x.copy()
    i, j = min(int(rows[0]), len(x) - 4), min(int(rows[1]), x.shape[1] - 3)
    updated[i : i + 4, j : j + 3] = updates[:4, :3]
    return {"sums": Expected(sums), "dynamic update": Expected(updated)}


def _draw_axes(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.standard_normal((3, 5, 7, 37), np.float32), rng.standard_normal(
        (131, 67), np.float32
    )


def _moved(library: Any, x: Any, matrix: Any) -> dict[str, Any]:
    return {
        "axes 3, 1, 0, 2": library.transpose(x, (3, 1, 0, 2)),
        "matrix": library.transpose(matrix, (1, 0)),
        "reversed": library.flip(matrix, 0),
    }


def _expect_moved(x: np.ndarray, matrix: np.ndarray) -> dict[str, Expected]:
    return {name: Expected(array) for name, array in _moved(np, x, matrix).items()}


# Functions of one number, up to the ends of float32.


def _draw_logits(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    logits = 10 * rng.standard_normal((5, 1003), np.float32)
    logits[1, ::3] = -np.inf  # a mask
    logits[2] = 3.0
    logits[3, 17] = 1000.0
    return (logits,)


def _softmax(x: Any) -> dict[str, Any]:
    return {"softmax": jax.nn.softmax(x, axis=-1), "logsumexp": jax.nn.logsumexp(x, axis=-1)}


def _expect_softmax(x: np.ndarray) -> dict[str, Expected]:
    x = x.astype(np.float64)
    below = x - x.max(-1, keepdims=True)
    each = np.exp(below)
    total = each.sum(-1, keepdims=True)
    # The rounding of a difference is a relative error of its exponential.
    apart = np.where(np.isfinite(below), abs(below), 0) * EPS
    sums = rounding(x.shape[-1]) + _EXP + (apart * each).sum(-1, keepdims=True) / total
    softmax, logsumexp = each / total, (x.max(-1, keepdims=True) + np.log(total))[:, 0]
    return {
        "softmax": Expected(softmax, (apart + _EXP + sums + _DIVISION) * softmax + TINY),
        "logsumexp": Expected(logsumexp, sums[:, 0] + _LOG + 2 * EPS * abs(logsumexp)),
    }


def _draw_numbers(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    far = np.array([-87, 88.5, 0, -0.0, 1e-30, -1e-30, 20, -20, 5, -5, 0.5, -0.5])
    powers = np.geomspace(1.2e-38, 3.4e38, 1001)
    return (
        np.concatenate((far, rng.uniform(-87, 88.5, 1001))).astype(np.float32),
        np.concatenate(([1.0, 1.0 + EPS, np.inf], powers)).astype(np.float32),
    )


def _functions(x: Any, positive: Any) -> dict[str, Any]:
    return {"exp": lax.exp(x), "log": lax.log(positive), "tanh": lax.tanh(x), "erf": lax.erf(x)}


def _expect_functions(x: np.ndarray, positive: np.ndarray) -> dict[str, Expected]:
    x, positive = x.astype(np.float64), positive.astype(np.float64)
    exp, log, erf = np.exp(x), np.log(positive), np.array([math.erf(one) for one in x])
    return {
        "exp": Expected(exp, _EXP * exp + TINY),
        "log": Expected(log, _LOG + EPS * np.where(np.isinf(log), 0, abs(log))),
        "tanh": Expected(np.tanh(x), _TANH),
        "erf": Expected(erf, _ERF * abs(erf) + TINY),
    }


# Random bits, and integers that overflow.


def _draw_counters(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.integers(0, 2**32, 2, np.uint32), rng.integers(0, 2**32, 2006, np.uint32)


def _random(key: Any, counters: Any) -> dict[str, Any]:
    bits = _jax.threefry_2x32(key, counters)
    one = lax.bitcast_convert_type((bits >> 9) | np.uint32(0x3F800000), jnp.float32)
    return {"bits": bits, "uniform": one - np.float32(1)}


def _expect_random(key: np.ndarray, counters: np.ndarray) -> dict[str, Expected]:
    bits = threefry(key, counters)
    return {"bits": Expected(bits), "uniform": Expected((bits >> np.uint32(9)) * 2.0**-23)}


def threefry(key: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Returns 32 random bits for each counter, by Threefry-2x32 with 20 rounds (Salmon et al.,
    Parallel random numbers: as easy as 1, 2, 3, 2011)."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x, y = (half.copy() for half in np.split(counters, 2))
    x += keys[0]
    y += keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x += y
            y = ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn))) ^ x
        x += keys[(i + 1) % 3]
        y += keys[(i + 2) % 3]
        y += np.uint32(i + 1)
    return np.concatenate((x, y))


def _draw_words(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    a, b = (rng.integers(-(2**31), 2**31, 1003, np.int64).astype(np.int32) for _ in range(2))
    b[:500] //= 2**22
    return a, np.where(b == 0, 3, b).astype(np.int32)


def _arithmetic(a: Any, b: Any) -> dict[str, Any]:
    by = b & np.int32(31)
    results = (
        a + b,
        a * b,
        lax.div(a, b),
        lax.rem(a, b),
        lax.shift_left(a, by),
        lax.shift_right_arithmetic(a, by),
        lax.shift_right_logical(a, by),
        (a & b) | (~a ^ b),
    )
    return {"results": jnp.stack(results)}  # one kernel compiles faster than eight


def _expect_arithmetic(a: np.ndarray, b: np.ndarray) -> dict[str, Expected]:
    by = b & np.int32(31)
    wide: np.ndarray = a.astype(np.int64)
    other: np.ndarray = b.astype(np.int64)
    quotient = np.sign(wide) * np.sign(other) * (abs(wide) // abs(other))
    results = (
        (wide + other).astype(np.int32),
        (wide * other).astype(np.int32),
        quotient,
        wide - quotient * other,
        (wide << by).astype(np.int32),
        wide >> by,
        (a.view(np.uint32) >> by.view(np.uint32)).view(np.int32),
        (a & b) | (~a ^ b),
    )
    return {"results": Expected(np.stack(results))}


_A, _C = np.int32(1664525), np.int32(1013904223)


def _draw_loops(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.integers(0, 37, (53, 37), np.int32), rng.integers(1, 60, 37, np.int32)


def _loops(steps: Any, numbers: Any) -> dict[str, Any]:
    def forward(carry: Any, order: Any) -> Any:
        carry = (carry * _A + _C)[order]
        return carry, carry

    def halve(carry: Any) -> Any:
        n, counts = carry
        running = n > 1
        following = jnp.where(n & 1 == 1, 3 * n + 1, n >> 1)
        return jnp.where(running, following, n), counts + running.astype(jnp.int32)

    _, scanned = lax.scan(forward, numbers, steps)
    _, counts = lax.while_loop(lambda c: jnp.any(c[0] > 1), halve, (numbers, 0 * numbers))
    return {"scan": scanned, "while": counts}


def _expect_loops(steps: np.ndarray, numbers: np.ndarray) -> dict[str, Expected]:
    carry, scanned = numbers, []
    for order in steps:
        carry = (carry.astype(np.int64) * int(_A) + int(_C)).astype(np.int32)[order]
        scanned.append(carry)
    counts = []
    for n in map(int, numbers):
        count = 0
        while n > 1:
            n, count = 3 * n + 1 if n % 2 else n // 2, count + 1
        counts.append(count)
    return {"scan": Expected(np.stack(scanned)), "while": Expected(np.array(counts))}


# Libraries.


def _draw_signal(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return tuple(rng.standard_normal((3, 105), np.float32) for _ in range(2))


def _fft(re: Any, im: Any) -> dict[str, Any]:
    z = jnp.fft.fft(lax.complex(re, im))
    return {"real": z.real, "imaginary": z.imag}  # not every platform transfers complex numbers


def _expect_fft(re: np.ndarray, im: np.ndarray) -> dict[str, Expected]:
    re, im = re.astype(np.float64), im.astype(np.float64)
    z, n = np.fft.fft(re + 1j * im), re.shape[1]
    # The bound of a sum of n products, which no fast algorithm exceeds. A product of complex
    # numbers has four more roundings.
    bound = rounding(n + 4) * (abs(re) + abs(im)).sum(1, keepdims=True)
    return {"real": Expected(z.real, bound), "imaginary": Expected(z.imag, bound)}


def _draw_positive(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    a = rng.uniform(-0.5, 0.5, (131, 131)).astype(np.float32)
    return np.tril(a, -1) + np.tril(a, -1).T + 40 * np.eye(131, dtype=np.float32), a[:, :67]


def _cholesky(a: Any, b: Any) -> dict[str, Any]:
    lower = lax.linalg.cholesky(a, symmetrize_input=False)
    # The right-hand side is the input's, so that the errors of the two parts are separate.
    solved = lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
    return {"factor": lower, "triangular solve": solved}


def _expect_cholesky(a: np.ndarray, b: np.ndarray) -> dict[str, Expected]:
    a, b = a.astype(np.float64), b.astype(np.float64)
    n = len(a)
    each = rounding(n + 1) + _DIVISION
    factor = np.linalg.cholesky(a)
    # The backward error of a factorization (Higham, theorem 10.3), through the derivative of the
    # factor: dL = L times the lower triangle of L^-1 dA L^-T.
    inverse = abs(np.linalg.inv(factor))
    backward = each * abs(factor) @ abs(factor.T)
    off = abs(factor) @ np.tril(inverse @ backward @ inverse.T)
    # The error of substitution (theorem 8.5), with blocks that may be inverted first.
    lower = np.tril(a)
    inverse = abs(np.linalg.inv(lower))
    return {
        "factor": Expected(factor, off),
        "triangular solve": Expected(
            np.linalg.solve(lower, b), each * inverse @ abs(lower) @ inverse @ abs(b)
        ),
    }


# Several devices.


def _collectives(x: Any) -> dict[str, Any]:
    count = lax.axis_size(AXIS)
    mine = x * (lax.axis_index(AXIS) + 1).astype(jnp.float32)
    ring = [(i, (i + 1) % count) for i in range(count)]
    return {"psum": lax.psum(mine, AXIS), "ppermute": lax.ppermute(mine, AXIS, ring)}


def _expect_collectives(at: int, count: int, x: np.ndarray) -> dict[str, Expected]:
    x = x.astype(np.float64)
    return {
        "psum": Expected(x * (count * (count + 1) // 2)),
        "ppermute": Expected(x * ((at - 1) % count + 1)),
    }


# Every operation is a program of its own, as in code without jax.jit. jax 0.11 computed such
# programs wrongly on an RTX A6000, where the same operations were right within a larger program:
# https://github.com/jax-ml/jax/issues/40633


def _one_by_one(devices: Sequence[Any], x: Any) -> dict[str, Any]:
    """Computes with arrays whose first axis is divided among the devices, so that each program is
    compiled once for all of them."""
    count = len(devices)
    divided = NamedSharding(Mesh(np.array(devices), AXIS), P(AXIS))
    x = jax.device_put(np.stack([x] * count), divided)
    shifted = 2 * x - 5
    parts = sorted(shifted.addressable_shards, key=lambda part: part.index[0].start or 0)
    following = [*devices[1:], devices[0]]
    return {
        "sqrt(512)": jnp.sqrt(jax.device_put(np.full(count, 512, np.float32), divided)),
        "ones(4) + 1": jnp.ones((count, 4), jnp.float32, device=divided) + 1,
        "2 * x - 5": shifted,
        "copy to the next device": [
            jax.device_put(part.data, device)[0] for part, device in zip(parts, following)
        ],
    }


def _expect_one_by_one(x: np.ndarray) -> dict[str, Expected]:
    root, shifted = math.sqrt(512), 2.0 * x - 5
    return {
        "sqrt(512)": Expected(np.array(root), 2 * EPS * root),
        "ones(4) + 1": Expected(np.full(4, 2.0)),
        "2 * x - 5": Expected(shifted),
        "copy to the next device": Expected(shifted),
    }


_PRODUCT = f"[{_M}, {_K}] x [{_K}, {_N}]"
OPERATIONS = (
    Operation("matmul", "float32", _PRODUCT, _matrices(np.float32), _product, _expect_product),
    Operation("matmul", "bfloat16", _PRODUCT, _matrices(jnp.bfloat16), _product, _expect_product),
    Operation("matmul", "float16", _PRODUCT, _halves, _product, _expect_product),
    Operation("matmul", "int8", _PRODUCT, _draw_int8, _product_int8, _expect_int8),
    Operation(
        "convolution",
        "float32",
        f"{list(_X)} * {list(_W)}",
        _draw_convolution,
        _convolution,
        _expect_convolution,
    ),
    Operation("sum", "float32", "[331, 307]", _integers(331, 307), _sum, _expect_sum),
    Operation("cumsum", "float32", "[35, 1009]", _integers(35, 1009), _cumsum, _expect_cumsum),
    Operation("sort and top_k", "float32", "[3, 1009]", _draw_keys, _sort, _expect_sort),
    Operation("gather", "float32", "[139, 35], 517 rows", _draw_rows, _gather, _expect_gather),
    Operation(
        "scatter-add", "float32", "[37, 5], 1009 rows", _draw_updates, _scatter, _expect_scatter
    ),
    Operation(
        "transpose",
        "float32",
        "[3, 5, 7, 37], [131, 67]",
        _draw_axes,
        lambda *arrays: _moved(jnp, *arrays),
        _expect_moved,
    ),
    Operation("softmax", "float32", "[5, 1003]", _draw_logits, _softmax, _expect_softmax),
    Operation(
        "exp, log, tanh, erf", "float32", "[1013]", _draw_numbers, _functions, _expect_functions
    ),
    Operation("random bits", "uint32", "[2006]", _draw_counters, _random, _expect_random),
    Operation("arithmetic", "int32", "[1003]", _draw_words, _arithmetic, _expect_arithmetic),
    Operation("scan and while", "int32", "[53, 37]", _draw_loops, _loops, _expect_loops),
    Operation("fft", "complex64", "[3, 105]", _draw_signal, _fft, _expect_fft),
    Operation("cholesky", "float32", "[131, 131]", _draw_positive, _cholesky, _expect_cholesky),
    Operation(
        "psum and ppermute",
        "float32",
        "[1003]",
        _integers(1003),
        _collectives,
        _expect_collectives,
        placed=True,
    ),
    Operation(
        "one by one",
        "float32",
        "[1003]",
        _integers(1003),
        _one_by_one,
        _expect_one_by_one,
        by_itself=True,
    ),
)
