"""Operations of plain JAX on many shardings, compared with one device: what XLA divides wrongly.

    python -m benchmarks.sharded_operations                          # all of them, about half an hour
    python -m benchmarks.sharded_operations --only 'conv|pool' --json results.json
    python -m benchmarks.sharded_operations --draw 40                # 40 drawn shardings of each

Each operation runs with each placement of its arguments, forward and gradient, with the result and
the cotangents placed in several ways, on eight emulated devices, in child processes. The table
lists what differs from one device, by operation. Aborts of XLA are among the results.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

from fnet.parallel._sanitizer import _cases, _processes
from fnet.parallel._sanitizer._cases import Case, Program, Spec


class Operation(NamedTuple):
    """A function of arrays, their shapes and dtypes, and the domain of their values."""

    f: Callable
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    domain: str = ""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return of(jnp.int32, *shape)


def _convolution(**options: Any) -> Callable:
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    layout = ("NHWC", "HWIO", "NHWC")
    return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=layout, **options)


def _convolution_1d(**options: Any) -> Callable:
    options = {"window_strides": (1,), "padding": "SAME"} | options
    layout = ("NHC", "HIO", "NHC")
    return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=layout, **options)


def _pool(start: float, combine: Callable, size: int, stride: int, padding: str) -> Callable:
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lambda x: lax.reduce_window(x, start, combine, window, strides, padding)


def _recurrence(a: Any, b: Any) -> Any:
    combine = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
    return lax.associative_scan(combine, (a, b), axis=0)[1]


def _rnn(x: Any, w: Any) -> Any:
    def cell(h: Any, row: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h + row @ w)
        return h, h

    return lax.scan(cell, jnp.zeros((x.shape[1], w.shape[1])), x)


def _power(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y + jnp.roll(y, 1, 0)), x)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


IMAGE, KERNEL = f32(8, 8, 8, 8), f32(3, 3, 8, 8)
SEQUENCE = f32(8, 16, 8)
MATRIX, VECTOR = f32(8, 16), f32(16)
CUBE = f32(8, 8, 8)

OPERATIONS: dict[str, Operation] = {
    "add, broadcast": Operation(lambda x, y: x + y, (MATRIX, VECTOR)),
    "dot": Operation(lambda x, y: x @ y, (MATRIX, f32(16, 8))),
    "dot, batched": Operation(
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (SEQUENCE, f32(8, 8, 16))
    ),
    "dot, two contracted": Operation(
        lambda x, y: jnp.einsum("bij,ijk->bk", x, y), (SEQUENCE, f32(16, 8, 8))
    ),
    "dot, bfloat16": Operation(
        lambda x, y: x @ y, (of(jnp.bfloat16, 8, 16), of(jnp.bfloat16, 16, 8))
    ),
    "dot, int8": Operation(
        lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.int32),
        (of(jnp.int8, 8, 16), of(jnp.int8, 16, 8)),
    ),
    "conv": Operation(_convolution(), (IMAGE, KERNEL)),
    "conv, strided": Operation(_convolution(window_strides=(2, 2)), (IMAGE, KERNEL)),
    "conv, strided 3": Operation(_convolution(window_strides=(3, 3)), (f32(8, 12, 12, 8), KERNEL)),
    "conv, valid": Operation(_convolution(padding="VALID"), (IMAGE, KERNEL)),
    "conv, dilated": Operation(_convolution(rhs_dilation=(2, 2)), (IMAGE, KERNEL)),
    "conv, large window": Operation(_convolution(), (IMAGE, f32(7, 7, 8, 8))),
    "conv, grouped": Operation(_convolution(feature_group_count=4), (IMAGE, f32(3, 3, 2, 8))),
    "conv, depthwise": Operation(_convolution(feature_group_count=8), (IMAGE, f32(3, 3, 1, 8))),
    "conv, batch groups": Operation(_convolution(batch_group_count=2), (IMAGE, KERNEL)),
    "conv, transposed": Operation(
        lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), (f32(8, 4, 4, 8), KERNEL)
    ),
    "conv, 1d": Operation(_convolution_1d(), (SEQUENCE, f32(4, 8, 8))),
    "conv, 1d causal": Operation(_convolution_1d(padding=[(3, 0)]), (SEQUENCE, f32(4, 8, 8))),
    "conv, 1d strided": Operation(_convolution_1d(window_strides=(2,)), (SEQUENCE, f32(4, 8, 8))),
    "conv, 1d depthwise": Operation(
        _convolution_1d(feature_group_count=8), (SEQUENCE, f32(4, 1, 8))
    ),
    "patches": Operation(
        lambda x: lax.conv_general_dilated_patches(x, (2, 2), (2, 2), "VALID"), (IMAGE,)
    ),
    "max pool": Operation(_pool(-jnp.inf, lax.max, 2, 2, "VALID"), (IMAGE,)),
    "max pool, overlapping": Operation(_pool(-jnp.inf, lax.max, 3, 1, "SAME"), (IMAGE,)),
    "max pool, overlapping, strided": Operation(_pool(-jnp.inf, lax.max, 3, 2, "SAME"), (IMAGE,)),
    "max pool, gaps": Operation(_pool(-jnp.inf, lax.max, 2, 3, "VALID"), (f32(8, 12, 12, 8),)),
    "min pool": Operation(_pool(jnp.inf, lax.min, 2, 2, "VALID"), (IMAGE,)),
    "sum pool": Operation(_pool(0.0, lax.add, 2, 2, "VALID"), (IMAGE,)),
    "sum pool, overlapping": Operation(_pool(0.0, lax.add, 3, 1, "SAME"), (IMAGE,)),
    "sum pool, strided": Operation(_pool(0.0, lax.add, 3, 2, "SAME"), (IMAGE,)),
    "sum pool, dilated": Operation(
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (3, 1), (1, 1), "VALID", window_dilation=(2, 1)
        ),
        (f32(16, 8),),
    ),
    "sum pool, gaps": Operation(_pool(0.0, lax.add, 2, 3, "VALID"), (f32(8, 12, 12, 8),)),
    "cumsum": Operation(lambda x: jnp.cumsum(x, 0), (MATRIX,)),
    "cumsum, reverse": Operation(lambda x: lax.cumsum(x, 0, reverse=True), (MATRIX,)),
    "cumprod": Operation(lambda x: jnp.cumprod(x, 0), (MATRIX,)),
    "cummax": Operation(lambda x: lax.cummax(x, 0), (MATRIX,)),
    "cummin, reverse": Operation(lambda x: lax.cummin(x, 0, reverse=True), (MATRIX,)),
    "cumlogsumexp": Operation(lambda x: lax.cumlogsumexp(x, 0), (MATRIX,)),
    "associative scan": Operation(_recurrence, (MATRIX, MATRIX)),
    "sort": Operation(lambda x: jnp.sort(x, 0), (MATRIX,)),
    "sort, two keys": Operation(
        lambda x, y: lax.sort((x, y), dimension=0, num_keys=2), (MATRIX, MATRIX)
    ),
    "argsort": Operation(lambda x: jnp.argsort(x, 0), (MATRIX,)),
    "top_k": Operation(lambda x: lax.top_k(x, 3), (MATRIX,)),
    "top_k, first axis": Operation(lambda x: lax.top_k(x.T, 3), (MATRIX,)),
    "approx_max_k": Operation(
        lambda x: lax.approx_max_k(x, 3, recall_target=1.0), (MATRIX,), "distinct"
    ),
    "argmax": Operation(lambda x: jnp.argmax(x, 0), (MATRIX,)),
    "argmin, last axis": Operation(lambda x: jnp.argmin(x, -1), (MATRIX,)),
    "max": Operation(lambda x: jnp.max(x, 0), (MATRIX,)),
    "min of all": Operation(lambda x: jnp.min(x), (MATRIX,)),
    "prod": Operation(lambda x: jnp.prod(x, 0), (MATRIX,)),
    "any": Operation(lambda x: jnp.any(x > 2, 0), (MATRIX,)),
    "xor": Operation(lambda x: lax.reduce(x, 0, lax.bitwise_xor, (0,)), (i32(8, 16),)),
    "logsumexp": Operation(lambda x: jax.nn.logsumexp(x, 0), (MATRIX,)),
    "softmax": Operation(lambda x: jax.nn.softmax(x, 0), (MATRIX,)),
    "var": Operation(lambda x: jnp.var(x, 0), (MATRIX,)),
    "median": Operation(lambda x: jnp.median(x, 0), (MATRIX,), "distinct"),
    "quantile": Operation(lambda x: jnp.quantile(x, 0.3, 0), (MATRIX,), "distinct"),
    "take": Operation(lambda x, i: jnp.take(x, i, 0), (MATRIX, i32(8))),
    "take, last axis": Operation(lambda x, i: jnp.take(x, i, 1, mode="clip"), (MATRIX, i32(8))),
    "take, two indices": Operation(lambda x, i, j: x[i, j], (MATRIX, i32(8), i32(8))),
    "take, fill": Operation(
        lambda x, i: x.at[i].get(mode="fill", fill_value=7.0), (MATRIX, i32(8, 4))
    ),
    "take rows of each": Operation(
        lambda x, i: jax.vmap(lambda row, k: row[k])(x, i), (SEQUENCE, i32(8, 4))
    ),
    "take_along_axis": Operation(
        lambda x, i: jnp.take_along_axis(x, i, 0, mode="clip"), (MATRIX, i32(8, 16))
    ),
    "scatter add": Operation(lambda x, i, y: x.at[i].add(y), (MATRIX, i32(8), MATRIX)),
    "scatter add, columns": Operation(
        lambda x, i, y: x.at[:, i].add(y), (MATRIX, i32(8), f32(8, 8))
    ),
    "scatter set": Operation(
        lambda x, y: x.at[jnp.array([5, 1, 2, 7])].set(y, unique_indices=True),
        (MATRIX, f32(4, 16)),
    ),
    "scatter multiply": Operation(lambda x, i, y: x.at[i].mul(y), (MATRIX, i32(8), MATRIX)),
    "scatter max": Operation(lambda x, i, y: x.at[i].max(y), (MATRIX, i32(8), MATRIX)),
    "scatter to each": Operation(
        lambda x, i, y: jax.vmap(lambda row, k, v: row.at[k].add(v))(x, i, y),
        (SEQUENCE, i32(8, 4), f32(8, 4, 8)),
    ),
    "segment sum": Operation(lambda x, i: jax.ops.segment_sum(x, i, 8), (MATRIX, i32(8))),
    "segment max": Operation(lambda x, i: jax.ops.segment_max(x, i, 8), (MATRIX, i32(8))),
    "x.at[::2].set": Operation(lambda x, y: x.at[::2].set(y), (MATRIX, f32(4, 16))),
    "x.at[1:-1].add": Operation(lambda x, y: x.at[1:-1].add(y), (MATRIX, f32(6, 16))),
    "dynamic_slice": Operation(lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 16)), (MATRIX, i32())),
    "dynamic_slice of each": Operation(
        lambda x, i: jax.vmap(lambda row, k: lax.dynamic_slice(row, (k, 0), (4, 8)))(x, i),
        (SEQUENCE, i32(8)),
    ),
    "dynamic_update_slice": Operation(
        lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), (MATRIX, f32(4, 16), i32())
    ),
    "dynamic_update_slice of each": Operation(
        lambda x, y, i: jax.vmap(lambda row, v, k: lax.dynamic_update_slice(row, v, (k, 0)))(
            x, y, i
        ),
        (SEQUENCE, f32(8, 4, 8), i32(8)),
    ),
    "slice": Operation(lambda x: x[1:7], (MATRIX,)),
    "slice, strided": Operation(lambda x: x[1::2], (MATRIX,)),
    "slice, columns": Operation(lambda x: x[:, 3:11], (MATRIX,)),
    "reverse": Operation(lambda x: x[::-1], (MATRIX,)),
    "roll": Operation(lambda x: jnp.roll(x, 3, 0), (MATRIX,)),
    "roll, dynamic": Operation(lambda x, i: jnp.roll(x, i, 0), (MATRIX, i32())),
    "shift": Operation(lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]), (MATRIX,)),
    "roll by each width": Operation(
        lambda x: [jnp.roll(x, k, 0) for k in (-7, -3, 1, 2, 5, 8, 11)], (f32(16, 8),)
    ),
    "roll, columns and rows": Operation(lambda x: jnp.roll(x, (3, 5), (0, 1)), (f32(12, 16),)),
    "swapped parts": Operation(lambda x: jnp.concatenate([x[5:], x[:5]]), (f32(16, 8),)),
    "overlapping parts": Operation(
        lambda x: [jnp.concatenate([x[a:], x[:b]]) for a, b in ((4, 6), (6, 4), (12, 12), (1, 16))],
        (f32(16, 8),),
    ),
    "wrapped around": Operation(
        lambda x: [
            jnp.concatenate([x[16 - a :], x, x[:b]]) for a, b in ((1, 1), (4, 4), (2, 7), (9, 3))
        ],
        (f32(16, 8),),
    ),
    "reduce two arrays": Operation(
        lambda x, y: lax.reduce(
            (x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (0,)
        ),
        (MATRIX, MATRIX),
    ),
    "pool, base dilation": Operation(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "VALID", base_dilation=(2, 1)),
        (f32(16, 8),),
    ),
    "pool, uneven padding": Operation(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (5, 1), (2, 1), [(4, 1), (0, 0)]),
        (f32(16, 8),),
    ),
    "conv, uneven padding": Operation(
        _convolution(padding=[(4, 0), (0, 3)], window_strides=(2, 1)), (IMAGE, KERNEL)
    ),
    "conv, negative padding": Operation(_convolution(padding=[(-1, 2), (0, -2)]), (IMAGE, KERNEL)),
    "conv, input dilated": Operation(
        _convolution(lhs_dilation=(2, 3), padding=[(1, 2), (2, 1)]), (f32(8, 4, 4, 8), KERNEL)
    ),
    "cumsum of columns": Operation(lambda x: jnp.cumsum(x, 1), (MATRIX,)),
    "scatter min, columns": Operation(
        lambda x, i, y: x.at[:, i].min(y), (MATRIX, i32(8), f32(8, 8))
    ),
    "scatter, clipped": Operation(
        lambda x, i, y: x.at[i].add(y, mode="clip"), (MATRIX, i32(8), MATRIX)
    ),
    "scatter points": Operation(
        lambda x, i, j, y: x.at[i, j].add(y), (MATRIX, i32(8), i32(8), f32(8))
    ),
    "scatter windows": Operation(
        lambda x, i, y: jax.vmap(lambda k, v: lax.dynamic_update_slice(x, v, (k, 0)))(i, y),
        (MATRIX, i32(4), f32(4, 3, 16)),
    ),
    "gather windows": Operation(
        lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (3, 16)))(i), (MATRIX, i32(4))
    ),
    "gather points": Operation(lambda x, i, j: x[i, j], (CUBE, i32(4, 4), i32(4, 4))),
    "put_along_axis": Operation(
        lambda x, y: jnp.put_along_axis(x, jnp.argsort(y, 0), y, 0, inplace=False), (MATRIX, MATRIX)
    ),
    "sort with indices": Operation(
        lambda x, i: lax.sort((x, i), dimension=1, num_keys=1), (MATRIX, i32(8, 16))
    ),
    "lexsort": Operation(lambda x, y: jnp.lexsort((x, y), axis=0), (i32(8, 16), i32(8, 16))),
    "bitonic": Operation(lambda x: jnp.partition(x, 3, 0), (MATRIX,), "distinct"),
    "logcumsumexp of rows": Operation(lambda x: lax.cumlogsumexp(x, 1, reverse=True), (MATRIX,)),
    "move axes": Operation(lambda x: x.reshape(2, 4, 16, 8).transpose(0, 2, 1, 3), (SEQUENCE,)),
    "patches by reshape": Operation(
        lambda x: x.reshape(8, 2, 4, 2, 4, 8).transpose(0, 1, 3, 2, 4, 5).reshape(8, 4, 128),
        (IMAGE,),
    ),
    "depth to space": Operation(
        lambda x: x.reshape(8, 8, 8, 2, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(8, 16, 16, 2),
        (IMAGE,),
    ),
    "flip both": Operation(lambda x: jnp.flip(x, (0, 1)), (MATRIX,)),
    "rotate by 90": Operation(lambda x: jnp.rot90(x), (MATRIX,)),
    "strided by 3": Operation(lambda x: x[::3, 1::2], (f32(12, 16),)),
    "strided backwards": Operation(lambda x: x[::-2], (f32(16, 8),)),
    "insert": Operation(lambda x, y: jnp.insert(x, 3, y, 0), (MATRIX, VECTOR)),
    "delete": Operation(lambda x: jnp.delete(x, 3, 0), (MATRIX,)),
    "block diagonal": Operation(
        lambda x, y: jax.scipy.linalg.block_diag(x, y), (f32(8, 4), f32(4, 8))
    ),
    "outer": Operation(jnp.outer, (VECTOR, f32(8))),
    "vander": Operation(lambda x: jnp.vander(x, 4), (VECTOR,)),
    "ptp": Operation(lambda x: jnp.ptp(x, 0), (MATRIX,)),
    "convolve 2d": Operation(
        lambda x, y: jax.scipy.signal.convolve2d(x, y, "same"), (f32(16, 16), f32(3, 3))
    ),
    "local conv": Operation(
        lambda x, k: lax.conv_general_dilated_local(
            x, k, (1,), "VALID", (3,), dimension_numbers=("NHC", "HIO", "NHC")
        ),
        (f32(8, 10, 4), f32(8, 12, 4)),
    ),
    "conv, reversed kernel": Operation(
        lambda x, k: jax.vjp(lambda y: _convolution()(y, k), x)[1](x)[0], (IMAGE, KERNEL)
    ),
    "vmap of conv": Operation(
        lambda x, k: jax.vmap(_convolution_1d())(x, k), (f32(4, 8, 8, 4), f32(4, 3, 4, 4))
    ),
    "dot general, batch in the middle": Operation(
        lambda x, y: jnp.einsum("ibj,kjb->ibk", x, y), (CUBE, f32(16, 8, 8))
    ),
    "trilinear": Operation(lambda x, y, z: jnp.einsum("ij,jk,ki->k", x, y, z), (f32(8, 8),) * 3),
    "diff": Operation(lambda x: jnp.diff(x, axis=0), (MATRIX,)),
    "concatenate": Operation(lambda x, y: jnp.concatenate([x, y]), (MATRIX, f32(4, 16))),
    "split": Operation(lambda x: jnp.split(x, [3, 5]), (MATRIX,)),
    "stack": Operation(lambda x, y: jnp.stack([x, y], 1), (MATRIX, MATRIX)),
    "pad": Operation(lambda x: jnp.pad(x, ((1, 2), (0, 0))), (MATRIX,)),
    "pad, reflect": Operation(lambda x: jnp.pad(x, ((2, 2), (0, 0)), "reflect"), (MATRIX,)),
    "pad, wrap": Operation(lambda x: jnp.pad(x, ((3, 3), (0, 0)), "wrap"), (MATRIX,)),
    "pad, between": Operation(lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0))), (MATRIX,)),
    "pad, negative": Operation(lambda x: lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 0))), (MATRIX,)),
    "merge axes": Operation(lambda x: x.reshape(-1, x.shape[-1]), (SEQUENCE,)),
    "merge last axes": Operation(lambda x: x.reshape(len(x), -1), (SEQUENCE,)),
    "split an axis": Operation(lambda x: x.reshape(2, 4, 4, 4), (MATRIX,)),
    "reshape, 12 x 10": Operation(lambda x: x.reshape(10, 12), (f32(12, 10),)),
    "flatten": Operation(jnp.ravel, (CUBE,)),
    "transpose": Operation(lambda x: x.transpose(2, 0, 1), (SEQUENCE,)),
    "where": Operation(lambda x, y: jnp.where(x > 0, y, x), (MATRIX, MATRIX)),
    "clip": Operation(lambda x: jnp.clip(x, -1, 1), (MATRIX,)),
    "repeat": Operation(lambda x: jnp.repeat(x, 3, 0), (MATRIX,)),
    "tile": Operation(lambda x: jnp.tile(x, (2, 1)), (MATRIX,)),
    "diagonal": Operation(jnp.diagonal, (f32(16, 16),)),
    "trace": Operation(jnp.trace, (f32(16, 16),)),
    "tril": Operation(jnp.tril, (MATRIX,)),
    "kron": Operation(jnp.kron, (f32(4, 4), f32(2, 4))),
    "one_hot": Operation(lambda i: jax.nn.one_hot(i, 8), (i32(8, 4),)),
    "nonzero": Operation(lambda x: jnp.nonzero(x > 1, size=8, fill_value=-1), (MATRIX,)),
    "unique": Operation(lambda x: jnp.unique(x, size=8), (i32(16),)),
    "bincount": Operation(lambda x: jnp.bincount(jnp.abs(x), length=8), (i32(16),)),
    "searchsorted": Operation(lambda x, y: jnp.searchsorted(jnp.sort(x), y), (VECTOR, f32(8))),
    "histogram": Operation(lambda x: jnp.histogram(x, 8, (-4, 4))[0], (VECTOR,)),
    "convolve": Operation(lambda x, y: jnp.convolve(x, y, mode="same"), (VECTOR, f32(5))),
    "interp": Operation(lambda x, y: jnp.interp(x, jnp.arange(16.0), y), (f32(8), VECTOR)),
    "resize": Operation(
        lambda x: jax.image.resize(x, (8, 16, 16, 8), "bilinear"), (f32(8, 8, 8, 8),)
    ),
    "fft": Operation(lambda x: jnp.fft.fft(x).real, (MATRIX,)),
    "fft, first axis": Operation(lambda x: jnp.fft.fft(x, axis=0).imag, (MATRIX,)),
    "fft2": Operation(lambda x: jnp.fft.fft2(x).real, (CUBE,)),
    "rfft": Operation(lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, (MATRIX,)),
    "irfft": Operation(lambda x: jnp.fft.irfft(x + 0j), (f32(8, 9),)),
    "cholesky": Operation(jnp.linalg.cholesky, (CUBE,), "definite"),
    "qr": Operation(jnp.linalg.qr, (CUBE,), "definite"),
    "eigh": Operation(jnp.linalg.eigvalsh, (CUBE,), "definite"),
    "svd": Operation(lambda x: jnp.linalg.svd(x, compute_uv=False), (CUBE,), "definite"),
    "solve": Operation(jnp.linalg.solve, (CUBE, f32(8, 8, 4)), "triangular"),
    "triangular solve": Operation(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (CUBE, f32(8, 8, 4)),
        "triangular",
    ),
    "inverse": Operation(jnp.linalg.inv, (CUBE,), "definite"),
    "determinant": Operation(lambda x: jnp.linalg.slogdet(x)[1], (CUBE,), "definite"),
    "lu": Operation(lambda x: lax.linalg.lu(x)[0], (CUBE,), "definite"),
    "tridiagonal solve": Operation(
        lambda a, b, c, d: lax.linalg.tridiagonal_solve(a, b + 20, c, d),
        (f32(8, 16), f32(8, 16), f32(8, 16), f32(8, 16, 4)),
    ),
    "ragged_dot": Operation(
        lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 0, 9, 4], jnp.int32)),
        (f32(16, 8), f32(4, 8, 8)),
    ),
    "scan": Operation(_rnn, (f32(4, 8, 8), f32(8, 8))),
    "map": Operation(lambda x: lax.map(lambda row: jnp.cumsum(row) * row, x), (MATRIX,)),
    "scan, rolled": Operation(
        lambda x: lax.scan(lambda y, _: (jnp.tanh(y + jnp.roll(y, 1, 0)), None), x, length=3)[0],
        (MATRIX,),
    ),
    "cond": Operation(
        lambda x, i: lax.cond(i > 1, lambda x: x[::-1], lambda x: jnp.roll(x, 1, 0), x),
        (MATRIX, i32()),
    ),
    "while_loop": Operation(_power, (MATRIX,)),
    "attention": Operation(_attention, (f32(8, 8, 4, 8),) * 3),
    "layer norm": Operation(lambda x: jax.nn.standardize(x, 0), (MATRIX,)),
    "random bits": Operation(
        lambda seed: jax.random.uniform(jax.random.key(seed), (8, 16)), (of(jnp.uint32),)
    ),
    "permutation": Operation(
        lambda x, seed: jax.random.permutation(jax.random.key(seed), x),
        (MATRIX, of(jnp.uint32)),
    ),
    "float8": Operation(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (MATRIX,)),
    "bitcast, narrower": Operation(
        lambda x: lax.bitcast_convert_type(x, jnp.uint8), (of(jnp.uint32, 8, 16),)
    ),
    "bitcast, wider": Operation(
        lambda x: lax.bitcast_convert_type(x, jnp.uint32), (of(jnp.uint8, 8, 16, 4),)
    ),
    "complex product": Operation(
        lambda x, y: ((x + 1j * y) @ (y.T + 2j * x.T)).imag, (MATRIX, MATRIX)
    ),
    "iota": Operation(lambda x: x * lax.broadcasted_iota(jnp.float32, x.shape, 0), (MATRIX,)),
}


class Placement(NamedTuple):
    """Where the arguments of an operation lie.

    Attributes:
        mesh: the lengths of the axes "a" and "b".
        first: (axis of the first argument, mesh axes) for each axis that is split; -1 is the last.
        others: "whole", "alike" (as the first argument), or (axis, mesh axes).
        stated: by constraints inside of the compiled function, with uneven splits.
    """

    mesh: tuple[int, ...]
    first: tuple[tuple[int, str], ...]
    others: Any = "whole"
    stated: bool = False


PLACEMENTS = (
    Placement((4,), ((0, "a"),)),
    Placement((4,), ((1, "a"),)),
    Placement((4,), ((-1, "a"),), "alike"),
    Placement((2, 2), ((0, "a"),), "alike"),
    Placement((2, 2), ((1, "a"),)),
    Placement((2, 2), ((0, "a"), (1, "b")), "alike"),
    Placement((2, 2), ((0, "ab"),)),
    Placement((2, 4), ((1, "b"), (-1, "a")), "alike"),
    Placement((2, 4), ((1, "b"),), (-1, "a")),
    Placement((2, 4), ((0, "a"),), (0, "b")),
    Placement((2, 4), (), (-1, "a")),
    Placement((3,), ((0, "a"),), "alike", stated=True),
    Placement((2, 3), ((1, "b"),), stated=True),
    Placement((2, 3), ((0, "b"), (1, "a")), "alike", stated=True),
)
MODES = (
    "forward",
    "forward, placed result",
    "gradient, free cotangents",
    "gradient, whole cotangents",
    "gradient, placed cotangents",
)


def split(shape: tuple[int, ...], places: Any, mesh: _cases.Axes, stated: bool) -> Spec:
    """Returns the sharding that splits an array as `places` say, where its axes permit it."""
    lengths, parts = dict(mesh), [()] * len(shape)
    for axis, names in places:
        axis = axis + len(shape) if axis < 0 else axis
        if not 0 <= axis < len(shape) or parts[axis]:
            continue
        n = math.prod(lengths[name] for name in names)
        if shape[axis] % n == 0 or (stated and shape[axis] >= n):
            parts[axis] = tuple(names)
    return tuple(parts)


def cases(key: str, program: Program, placement: Placement) -> Iterator[tuple[str, Case]]:
    """Yields (mode, case) of an operation with a placement."""
    mesh = tuple(zip("ab", placement.mesh))
    place = lambda shape, places: split(shape, places, mesh, placement.stated)
    shapes = [shape for shape, _ in program.inputs]
    others = {"whole": (), "alike": placement.first}.get(
        placement.others if isinstance(placement.others, str) else "", (placement.others,)
    )
    inputs = (place(shapes[0], placement.first), *(place(s, others) for s in shapes[1:]))
    if not any(map(_cases.divides, inputs)):
        return
    results = [shape for shape, _ in program.outputs]
    free = (None,) * len(results)
    placed = tuple(place(shape, placement.first or others) for shape in results)
    stated = placement.stated
    yield MODES[0], Case(key, mesh, inputs, free, stated=stated)
    if any(map(_cases.divides, placed)):
        yield MODES[1], Case(key, mesh, inputs, placed, stated=stated)
    inexact = [*map(_cases.inexact, program.outputs)]
    live = [*map(_cases.inexact, program.inputs)]
    if not program.differentiable:
        return
    keep = lambda specs, which: tuple(spec for spec, wanted in zip(specs, which) if wanted)
    whole = tuple(((),) * len(shape) for shape in results)
    unplaced = (None,) * sum(live)
    for mode, cotangents, gradients in (
        (MODES[2], free, unplaced),
        (MODES[3], whole, unplaced),
        (MODES[4], placed, keep(inputs, live)),
    ):
        yield mode, Case(key, mesh, inputs, free, keep(cotangents, inexact), gradients, stated)


DRAWN = ((2, 2), (2, 4), (4, 2), (8,), (4,), (3,), (3, 2))


def drawn(key: str, program: Program, count: int) -> Iterator[tuple[str, Case]]:
    """Yields (mode, case) of an operation with shardings that are drawn for each of its arrays."""
    for i in range(count):
        draw = random.Random(f"{key} {i}")
        mesh = tuple(zip("ab", draw.choice(DRAWN)))
        stated = draw.random() < 0.4
        place = lambda kind: _drawn_spec(draw, kind[0], mesh, stated)  # noqa: B023
        free_or = lambda kind: None if draw.random() < 0.3 else place(kind)  # noqa: B023
        inputs = tuple(map(place, program.inputs))
        outputs = tuple(map(free_or, program.outputs))
        if any(map(_cases.divides, (*inputs, *outputs))):
            yield "forward, drawn", Case(key, mesh, inputs, outputs, stated=stated)
        if program.differentiable:
            cotangents = tuple(free_or(kind) for kind in program.outputs if _cases.inexact(kind))
            gradients = tuple(free_or(kind) for kind in program.inputs if _cases.inexact(kind))
            if any(map(_cases.divides, (*inputs, *cotangents, *gradients))):
                yield (
                    "gradient, drawn",
                    Case(key, mesh, inputs, outputs, cotangents, gradients, stated),
                )


def _drawn_spec(draw: Any, shape: tuple[int, ...], mesh: _cases.Axes, stated: bool) -> Spec:
    """Draws for each axis of the mesh the axis of an array that it splits, or none."""
    parts: list[tuple[str, ...]] = [()] * len(shape)
    axes = [name for name, _ in mesh]
    for name in draw.sample(axes, len(axes)):
        axis = draw.choice((None, *range(len(shape))))
        if axis is not None:
            more = (*parts[axis], name)
            n = math.prod(dict(mesh)[each] for each in more)
            if shape[axis] % n == 0 or (stated and shape[axis] >= n):
                parts[axis] = more
    return tuple(parts)


def programs(names: list[str]) -> dict[str, Program]:
    found = {}
    for name in names:
        f, shapes, domain = OPERATIONS[name]
        found[name] = _cases.exported(lambda *xs, f=f: jax.tree.leaves(f(*xs)), shapes, domain)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression of operations")
    parser.add_argument("--draw", type=int, default=0, help="draw so many shardings of each")
    parser.add_argument("--json", help="a file for each result")
    options = parser.parse_args()
    names = [name for name in OPERATIONS if re.search(options.only, name)]
    begun = time.monotonic()
    known = programs(names)
    tried = [
        (name, k, mode, case)
        for name in names
        for k, placement in enumerate(PLACEMENTS)
        for mode, case in cases(name, known[name], placement)
    ]
    if options.draw:
        tried = [
            (name, case.mesh, mode, case)
            for name in names
            for mode, case in drawn(name, known[name], options.draw)
        ]
    results = _processes.run(known, [case for *_, case in tried], _processes.Limits())
    if options.json:
        rows = [
            {"name": name, "placement": k, "mode": mode, **case._asdict(), **result}
            for (name, k, mode, case), result in zip(tried, results)
        ]
        with open(options.json, "w") as stream:
            json.dump(rows, stream)
    counts = collections.Counter(result["status"] for result in results)
    combinations = {(name, case.mesh, case.inputs) for name, *_, case in tried}
    print(
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}: {len(names)} operations, "
        f"{len(combinations)} combinations with shardings of the arguments, {len(results)} runs, "
        f"{time.monotonic() - begun:.0f} s"
    )
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    by_kind: dict[tuple, list] = collections.defaultdict(list)
    for (name, k, mode, case), result in zip(tried, results):
        if result["status"] != "right":
            by_kind[name, mode.split(",")[0], result["status"]].append((k, mode, case, result))
    for (name, direction, status), rows in by_kind.items():
        print(f"\n{name}, {direction}: {status} in {len(rows)} runs")
        for k, mode, case, result in rows[:4]:
            print("   ", k, mode, dict(case.mesh), [_text(spec) for spec in case.inputs], end=" ")
            print(*[_text(spec) for spec in case.outputs], _said(result))


def _text(spec: Spec) -> str:
    return "free" if spec is None else str(_cases.partition(spec)).replace("PartitionSpec", "P")


def _said(result: dict) -> str:
    if result["status"] != "wrong":
        return result["text"][:150]
    factor = f"factor {result['factor']}" if result["factor"] is not None else "no constant factor"
    return (
        f"output {result['output']}: {result['count']} of {result['size']} elements differ, {factor}, "
        f"e.g. {result['index']}: {result['many']}, not {result['one']}"
    )


if __name__ == "__main__":
    main()
