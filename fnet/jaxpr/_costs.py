"""The cost of one equation: the operations, computed from the shapes, and the bytes that are read
and written."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet import _jax
from fnet.jaxpr._equations import DOT, Product, product
from fnet.jaxpr._primitives import traits

_FREE = frozenset(("alias", "layout", "gather", "collective", "random", "effect", "cast"))


class Cost(NamedTuple):
    """The number of operations of one equation, and their kind: "matmul", "elementwise",
    "reduction", "transcendental", "free" or "unknown". For a matmul, `shape` is (batch, m, n,
    k)."""

    kind: str
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None


def cost(eqn: Any) -> Cost:
    """Returns the cost of an equation that contains no jaxpr.

    The matrix product of arrays of shapes [B, M, K] and [B, K, N] costs 2 B M N K FLOPs. A
    convolution costs 2 x (output elements) x (size of the kernel window) x (input features) /
    groups FLOPs. In a convolution, multiplications with padding are counted, but not
    multiplications with the zeros that a transposed convolution inserts in its input. An
    elementwise operation costs one FLOP per output element, and a reduction one FLOP per input
    element; a polynomial costs two for each power of its variable. If all inputs and outputs of an
    elementwise operation or a reduction are integers or bools, the operation costs nothing.
    """
    name = eqn.primitive.name
    kind = traits(name).kind
    ins = [v.aval for v in eqn.invars]
    outs = [v.aval for v in eqn.outvars]
    found = product(eqn)
    if found is not None:
        return _dot(found, ins) if found.op is DOT else _conv(found, ins, outs[0])
    if name == "ragged_dot_general":
        return _ragged_dot(eqn, ins)
    if kind in _FREE:
        return Cost("free")

    floating = any(_inexact(aval) for aval in (*ins, *outs))
    size = sum(_size(aval) for aval in outs)
    if kind == "transcendental":
        return Cost("transcendental", size)
    if name == "polynomial":  # Horner's rule: a product and a sum for each power of x
        return Cost("elementwise", 2 * (len(ins) - 2) * size if floating else 0)
    if kind == "elementwise" or name == "select_and_gather_add":
        return Cost("elementwise", size if floating else 0)
    if kind == "reduction":
        return Cost("reduction", _size(ins[0]) if floating else 0)
    if kind == "scatter":
        combines = floating and name != "scatter"  # a plain scatter only replaces elements
        return Cost("reduction", _size(ins[-1]) if combines else 0)
    if kind == "window":
        windows = _size(ins[0]) if name.startswith("select_and_scatter") else size
        return Cost("reduction", math.prod(eqn.params["window_dimensions"]) * windows)
    if kind == "sort":
        comparisons = math.log2(max(2, ins[0].shape[-1]))
        return Cost("elementwise", int(_size(ins[0]) * comparisons))
    if kind == "linear_algebra":
        return _linear_algebra(eqn, ins, outs)

    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return Cost("matmul", int(estimate.flops))
    return Cost("unknown")


def touched(eqn: Any) -> tuple[list[int], list[int]]:
    """Returns (bytes read from each input, bytes written to each output) of an equation. The
    numbers are those of an equation that XLA does not fuse with other equations."""
    name = eqn.primitive.name
    reads = [0 if isinstance(v, _jax.Literal) else nbytes(v.aval) for v in eqn.invars]
    writes = [nbytes(v.aval) for v in eqn.outvars]
    if traits(name).kind == "alias" and name != "broadcast_in_dim":
        return [0] * len(reads), [0] * len(writes)
    if name in ("gather", "dynamic_slice", "slice"):
        reads[0] = min(reads[0], writes[0])
    elif name == "dynamic_update_slice":  # in place: only the slice is touched
        reads[0], writes[0] = 0, reads[1]
    elif traits(name).kind == "scatter":
        reads[0] = writes[0] = reads[-1]
    return reads, writes


def nbytes(aval: Any) -> int:
    """Returns the bytes of an array of the type `aval`, and 0 for types that are not arrays, such
    as a token."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    # The itemsize of a type smaller than a byte, such as int4, is 1.
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        bits = 8 * dtype.itemsize
    if bits % 8 == 0:
        return _size(aval) * (bits // 8)
    return -(-_size(aval) * bits // 8)  # "/" would fail for symbolic sizes


def _dot(found: Product, ins: list[Any]) -> Cost:
    (contract, rhs_contract), (batch, rhs_batch) = found.dimensions
    lhs, rhs = ins[0].shape, ins[1].shape
    b = math.prod(lhs[i] for i in batch)
    k = math.prod(lhs[i] for i in contract)
    m = math.prod(size for i, size in enumerate(lhs) if i not in (*contract, *batch))
    n = math.prod(size for i, size in enumerate(rhs) if i not in (*rhs_contract, *rhs_batch))
    return Cost("matmul", _complex(ins) * 2 * b * m * n * k, (b, m, n, k))


def _ragged_dot(eqn: Any, ins: list[Any]) -> Cost:
    """In a ragged dot, each row of the left operand is multiplied by the matrix of one group. The
    number of FLOPs of a ragged dot is 2 x (size of the left operand) x (columns of the right
    operand)."""
    lhs, rhs = ins[0].shape, ins[1].shape
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contract, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
    k = math.prod(lhs[i] for i in contract)
    skip = (*rhs_contract, *rhs_batch, *numbers.rhs_group_dimensions)
    columns = math.prod(size for i, size in enumerate(rhs) if i not in skip)
    rows = math.prod(lhs) // max(k, 1)
    return Cost("matmul", 2 * rows * k * columns, (1, rows, columns, k))


def _conv(found: Product, ins: list[Any], out: Any) -> Cost:
    rhs, spec = ins[1].shape, found.dimensions.rhs_spec
    features, window = rhs[spec[0]], math.prod(rhs[i] for i in spec[2:])
    # The kernel's input features are already divided by the groups.
    per_output = rhs[spec[1]] * window
    groups = math.prod(found.groups)
    # In a transposed convolution, one of `zeros` inputs is nonzero.
    zeros = math.prod(found.options["lhs_dilation"])
    macs = _size(out) * per_output // zeros
    rows = _size(out) // features
    return Cost(
        "matmul",
        _complex(ins) * 2 * macs,
        (groups, rows, features // groups, max(1, per_output // zeros)),
    )


def _linear_algebra(eqn: Any, ins: list[Any], outs: list[Any]) -> Cost:
    name, size = eqn.primitive.name, _size(ins[0])
    if name == "fft":
        n = math.prod(eqn.params["fft_lengths"])
        return Cost("elementwise", int(5 * max(size, _size(outs[0])) * math.log2(max(2, n))))
    if name == "cholesky":
        return Cost("reduction", size * ins[0].shape[-1] // 3)
    if name == "lu":
        return Cost("reduction", 2 * size * min(ins[0].shape[-2:]) // 3)
    return Cost("reduction", _size(ins[1]) * ins[0].shape[-1])  # triangular_solve


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _complex(ins: list[Any]) -> int:
    return 4 if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in ins) else 1
