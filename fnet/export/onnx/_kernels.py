"""The dtypes for which onnxruntime has kernels on CPUs, and those in which it computes instead of
the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WIDE = "float32 float64 int32 int64"
_ALL_INTS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
_NUMBERS = f"float32 float64 {_ALL_INTS}"
_MOVES = "float32 float64 int8 int32 int64 uint8 uint32"

# operator -> the dtypes of its operands for which onnxruntime 1.23 to 1.32 has a kernel.
# onnxruntime itself computes float16 in float32, so float16 is in no line. Operators that are not
# here accept every dtype.
_KERNELS = {
    kind: frozenset(dtypes.split())
    for kinds, dtypes in {
        "Exp Log Tanh Sigmoid Sqrt Floor Ceil Reciprocal Round Sin Cos IsInf IsNaN": "float32 float64",
        "Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Erf Conv AveragePool": "float32",
        "Neg": "float32 float64 int8 int16 int32 int64",
        "Abs Sign Add Sub Mul Div Mod": _NUMBERS,
        "Less LessOrEqual Greater GreaterOrEqual": _NUMBERS,
        "Equal": f"{_NUMBERS} bool",
        "Max Min": "float32 float64 int8 int32 int64 uint8 uint32 uint64",
        "Pow": _WIDE,
        "Where": _MOVES,
        "Pad": f"{_MOVES} uint64 bool",
        "ReduceSum ReduceProd ReduceL1 CumSum": _WIDE,
        "ReduceMax ReduceMin": f"{_WIDE} int8 uint8",
        "ArgMax ArgMin": f"{_WIDE} int8 uint8",
        "TopK": _WIDE,
        "MatMul": f"{_WIDE} uint32 uint64",
        "MaxPool": "float32 float64 int8 uint8",
        "BitShift": "uint8 uint32 uint64",
    }.items()
    for kind in kinds.split()
}
# The operators whose operands keep their order, and those that only move elements, in wider
# integers.
_WIDER = {
    "bool": "uint8",
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}
_MOVED = {**_WIDER, "uint64": "int64"}  # as two's complement, so that nothing is lost
_MOVING = {"Where", "Pad"}
_UNSIGNED_SHIFT = {"uint16": "uint32"}

_TESTS = {
    "Equal",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
    "IsNaN",
    "IsInf",
    "Not",
    "And",
    "Or",
    "Xor",
}
_INDICES = {"Shape", "ArgMax", "ArgMin", "Size", "NonZero"}


def compute_dtype(kind: str, dtypes: Sequence[np.dtype | None]) -> np.dtype | None:
    """Returns the dtype to which an operator's operands must be converted, or None if onnxruntime
    has a kernel.

    Raises:
        NotImplementedError: onnxruntime computes this operator in no dtype that contains all
            numbers of the operands.
    """
    supported, dtype = _KERNELS.get(kind), typed(kind, dtypes)
    if supported is None or dtype is None or dtype.name in supported or dtype == np.float16:
        return None
    wider = (_MOVED if kind in _MOVING else _UNSIGNED_SHIFT if kind == "BitShift" else _WIDER).get(
        dtype.name
    )
    while wider is not None and wider not in supported:
        wider = {"uint8": "int32", "int32": "int64"}.get(wider)
    if wider is None:
        raise NotImplementedError(f"onnxruntime has no operator {kind} of {dtype}")
    return np.dtype(wider)


def typed(kind: str, dtypes: Sequence[np.dtype | None]) -> np.dtype | None:
    """Returns the dtype of the operands of an operator."""
    place = 1 if kind == "Where" else 0
    return dtypes[place] if len(dtypes) > place else None


def operands(kind: str, count: int) -> range | tuple[int, ...]:
    """Returns the places of the operands that have the operator's dtype. The others are conditions,
    axes and sizes."""
    if kind == "Where":
        return 1, 2
    if kind in ("Pad",):
        return (0, 2) if count > 2 else (0,)
    if kind.startswith("Reduce") or kind in ("CumSum", "TopK", "ArgMax", "ArgMin"):
        return (0,)
    return range(count)


def result_dtype(
    kind: str, dtypes: Sequence[np.dtype | None], to: np.dtype | None
) -> np.dtype | None:
    """Returns the dtype of an operator's first result, if it is known. `to` is the dtype of a Cast."""
    if kind == "Cast":
        return to
    if kind in _TESTS:
        return np.dtype(bool)
    if kind in _INDICES:
        return np.dtype(np.int64)
    if kind == "MatMulInteger":
        return np.dtype(np.int32)
    if kind in ("Loop", "If"):
        return None
    return typed(kind, dtypes)


def keeps_dtype(kind: str) -> bool:
    """Whether the first result of an operator has the dtype of its operands."""
    return kind not in _TESTS | _INDICES
