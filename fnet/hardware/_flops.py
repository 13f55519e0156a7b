"""What one equation costs: operations from its shapes alone, and the bytes it touches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

_ELEMENTWISE = frozenset(
    "add sub mul div neg abs sign max min rem floor ceil round clamp select_n select_and_gather_add integer_pow square "
    "one_minus_square add_any eq ne lt le gt ge eq_to le_to lt_to is_finite nextafter real imag complex conj "
    "reduce_precision mul_add and or xor not population_count clz shift_left shift_right_logical "
    "shift_right_arithmetic".split())
_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p logistic tanh sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh pow sqrt "
    "rsqrt cbrt erf erfc erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma_grad zeta "
    "regularized_incomplete_beta bessel_i0e bessel_i1e".split())
_REDUCTION = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin cumsum cumprod "
    "cummax cummin cumlogsumexp".split())
_SCATTER = frozenset("scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max "
                     "scatter_max scatter-sub scatter_sub".split())
ALIASES = frozenset("reshape squeeze expand_dims stop_gradient name optimization_barrier sharding_constraint "
                    "reshard pvary pcast pbroadcast broadcast_in_dim device_put copy copy_p layout_constraint".split())
FOLDED = ALIASES | {"transpose"}      # what compilers fold into the operation beside it
_MOVEMENT = ALIASES | frozenset(
    "transpose slice dynamic_slice dynamic_update_slice concatenate pad rev gather iota convert_element_type "
    "bitcast_convert_type split stack unstack tile eye empty create_token after_all all_gather all_to_all ppermute "
    "reduce_scatter psum psum_invariant psum2 pmax pmin axis_index all_gather_invariant broadcast random_bits "
    "random_wrap random_unwrap random_seed random_split random_fold_in random_clone threefry2x32 debug_callback "
    "debug_print get swap addupdate empty2 ref_get ref_set to_edtype from_edtype".split())
_HEAVY = frozenset(
    "dot_general ragged_dot_general ragged_dot conv_general_dilated gather dynamic_slice dynamic_update_slice sort "
    "top_k fft cholesky triangular_solve lu reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter_add select_and_scatter concatenate lowered attention attention_slope "
    "attention_backward".split()) | _REDUCTION | _SCATTER


class Cost(NamedTuple):
    """Operations of one equation: `kind` is "matmul", "elementwise", "reduction", "transcendental", "free" or
    "unknown"; `shape` is (batch, m, n, k) for a matmul."""

    kind: str
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None


class _StandIn(NamedTuple):
    """An equation as another primitive would write it."""

    primitive: Any
    params: dict
    invars: Any
    outvars: Any


def unwrap(eqn: Any) -> tuple[Any, Any]:
    """The equation behind autocast's `lowered` (a bilinear primitive on operands cast to `compute`), and that type.

    Any other equation comes back as it is, with the type of its first operand.
    """
    if eqn.primitive.name == "lowered" and {"op", "params", "compute"} <= eqn.params.keys():
        params = eqn.params["params"]
        inner = _StandIn(eqn.params["op"], params() if callable(params) else params, eqn.invars, eqn.outvars)
        return inner, eqn.params["compute"]
    return eqn, eqn.invars[0].aval.dtype if eqn.invars and hasattr(eqn.invars[0].aval, "dtype") else None


def cost(eqn: Any) -> Cost:
    """The operations of an equation that holds no jaxpr of its own.

        dot_general           2 B M N K, exact
        conv_general_dilated  2 x outputs x window x in / groups, nominal: taps that fall on padding count, the zeros
                              that a transposed convolution puts between its inputs do not
        elementwise           1 per output, on floating types only (index arithmetic is no FLOP)
        reductions            1 per input
    """
    name = eqn.primitive.name
    ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    if name == "dot_general":
        return _dot(eqn, ins)
    if name in ("ragged_dot_general", "ragged_dot"):
        return _ragged_dot(eqn, ins, outs)
    if name == "conv_general_dilated":
        return _conv(eqn, ins, outs[0])
    floating = any(_inexact(aval) for aval in (*ins, *outs))
    size = sum(_size(aval) for aval in outs)
    if name in _MOVEMENT:
        return Cost("free")
    if name in _TRANSCENDENTAL:
        return Cost("transcendental", size)
    if name in _ELEMENTWISE:
        return Cost("elementwise", size if floating else 0)
    if name in _REDUCTION:
        return Cost("reduction", _size(ins[0]) if floating else 0)
    if name in _SCATTER:
        return Cost("reduction", _size(ins[-1]) if floating and name != "scatter" else 0)
    if name.startswith("reduce_window") and "window_dimensions" in eqn.params:
        return Cost("reduction", size * math.prod(eqn.params["window_dimensions"]))
    if name.startswith("select_and_scatter"):
        return Cost("reduction", _size(ins[0]) * math.prod(eqn.params["window_dimensions"]))
    if name in ("sort", "top_k"):
        return Cost("elementwise", int(_size(ins[0]) * math.log2(max(2, ins[0].shape[-1]))))
    if name == "fft":
        n = math.prod(eqn.params["fft_lengths"])
        return Cost("elementwise", int(5 * max(_size(ins[0]), _size(outs[0])) * math.log2(max(2, n))))
    if name == "cholesky":
        return Cost("reduction", _size(ins[0]) * ins[0].shape[-1] // 3)
    if name == "lu":
        return Cost("reduction", 2 * _size(ins[0]) * min(ins[0].shape[-2:]) // 3)
    if name == "triangular_solve":
        return Cost("reduction", _size(ins[1]) * ins[0].shape[-1])
    if hasattr(eqn.primitive, "flops"):      # a primitive that knows its own cost says it
        return Cost("matmul", int(eqn.primitive.flops(*ins, **eqn.params)))
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return Cost("matmul", int(estimate.flops))
    return Cost("unknown")


def touched(eqn: Any) -> tuple[list[int], list[int]]:
    """Bytes an equation reads of each input and writes of each output, as if it ran alone."""
    name = eqn.primitive.name
    reads = [0 if hasattr(v, "val") else nbytes(v.aval) for v in eqn.invars]
    writes = [nbytes(v.aval) for v in eqn.outvars]
    if name in ALIASES and name != "broadcast_in_dim":
        return [0] * len(reads), [0] * len(writes)
    if name in ("gather", "dynamic_slice", "slice"):
        reads[0] = min(reads[0], writes[0])
    elif name == "dynamic_update_slice":      # in place: only the slice is touched
        reads[0], writes[0] = 0, reads[1]
    elif name in _SCATTER:
        reads[0] = writes[0] = reads[-1]
    return reads, writes


def is_heavy(name: str) -> bool:
    """Whether compilers write an operation's inputs and outputs to memory rather than fuse it with its neighbours."""
    return name in _HEAVY


def nbytes(aval: Any) -> int:
    try:
        bits = jnp.finfo(aval.dtype).bits if _inexact(aval) else 8 * aval.dtype.itemsize
        if "int4" in str(aval.dtype):
            bits = 4
        elif jnp.issubdtype(aval.dtype, jnp.complexfloating):
            bits = 8 * aval.dtype.itemsize
    except (AttributeError, TypeError, ValueError):
        return 0      # tokens, keys, references
    return math.ceil(_size(aval) * bits / 8)


def _dot(eqn: Any, ins: list[Any]) -> Cost:
    (contract, rhs_contract), (batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = ins[0].shape, ins[1].shape
    b = math.prod(lhs[i] for i in batch)
    k = math.prod(lhs[i] for i in contract)
    m = math.prod(size for i, size in enumerate(lhs) if i not in (*contract, *batch))
    n = math.prod(size for i, size in enumerate(rhs) if i not in (*rhs_contract, *rhs_batch))
    return Cost("matmul", _complex(ins) * 2 * b * m * n * k, (b, m, n, k))


def _ragged_dot(eqn: Any, ins: list[Any], outs: list[Any]) -> Cost:
    """Every row of the left side meets one group of the right: 2 x (size of the left) x (columns of the right)."""
    lhs, rhs = ins[0].shape, ins[1].shape
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        columns, k = rhs[-1], lhs[-1]
    else:
        (contract, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
        k = math.prod(lhs[i] for i in contract)
        skip = (*rhs_contract, *rhs_batch, *numbers.rhs_group_dimensions)
        columns = math.prod(size for i, size in enumerate(rhs) if i not in skip)
    rows = math.prod(lhs) // max(k, 1)
    return Cost("matmul", 2 * rows * k * columns, (1, rows, columns, k))


def _conv(eqn: Any, ins: list[Any], out: Any) -> Cost:
    params, rhs = eqn.params, ins[1].shape
    spec = params["dimension_numbers"].rhs_spec
    features, window = rhs[spec[0]], math.prod(rhs[i] for i in spec[2:])
    per_output = rhs[spec[1]] * window          # the kernel's input features are already divided by the groups
    groups = params["feature_group_count"] * params["batch_group_count"]
    zeros = math.prod(params["lhs_dilation"])   # of `zeros` inputs of a transposed convolution one is not a zero
    macs = _size(out) * per_output // zeros
    rows = _size(out) // features
    return Cost("matmul", _complex(ins) * 2 * macs, (groups, rows, features // groups, max(1, per_output // zeros)))


def _size(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _complex(ins: list[Any]) -> int:
    return 4 if any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in ins) else 1
