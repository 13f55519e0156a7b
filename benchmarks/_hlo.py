"""Reads kernels, their traffic with main memory, and their products from the optimized HLO of a
compiled program.

The roofline time of a kernel is the maximum of FLOPs / peak and bytes / bandwidth. The sum of the
roofline times of all kernels is a lower bound of the time of a step. Actual products reach only
about 70 % of the peak. Therefore, compare these times with each other, and do not quote them as
absolute times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

SIZES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "bf16": 2,
    "token": 0,
    **{f"f8{kind}": 1 for kind in ("e4m3fn", "e5m2")},
    **{f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)},
}
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|token)\[([\d,]*)\](\{[^}]*\})?")
_NO_KERNEL = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "iota",
        "async-start",
        "async-update",
        "async-done",
        "opt-barrier",
    )
)
_SLICES = ("dynamic-slice", "slice", "gather")
_DONE = ("copy-done", "slice-done", "dynamic-slice-done", "dynamic-update-slice-done")


class Array(NamedTuple):
    """An array of a program: its dtype, shape and layout, as written in HLO."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> float:
        return SIZES.get(self.dtype, 1) * math.prod(self.shape)

    @property
    def in_main_memory(self) -> bool:
        """Whether the array is in main memory, memory space 0. Other memory spaces are on the chip
        (VMEM) or contain semaphores."""
        return re.search(r"S\([1-9]\)", self.layout) is None


class Operation:
    """One line of HLO: name, opcode, operands, attributes, and the arrays of its result."""

    def __init__(self, line: str):
        self.root = line.lstrip().startswith("ROOT ")
        name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
        self.name = name.lstrip("%")
        end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
        self.arrays = [
            Array(dtype, tuple(map(int, filter(None, shape.split(",")))), layout or "")
            for dtype, shape, layout in _ARRAY.findall(rest[:end])
        ]
        rest = rest[end:].lstrip()
        opening = rest.index("(")
        closing = _closing(rest, opening)
        self.code, self.inner, self.attributes = (
            rest[:opening],
            rest[opening + 1 : closing],
            rest[closing + 1 :],
        )
        self.operands = (
            [] if self.code in ("constant", "parameter") else re.findall(r"%([\w.\-]+)", self.inner)
        )

    def attribute(self, key: str) -> str:
        found = re.search(rf"\b{key}=%?\"?([\w.\-$]+)", self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """The name of the function that a custom call runs."""
        return self.attribute("custom_call_target")

    @property
    def written(self) -> float:
        return sum(array.bytes for array in self.arrays if array.in_main_memory)

    @property
    def size(self) -> float:
        return sum(array.bytes for array in self.arrays)


class Product(NamedTuple):
    """A matrix product or convolution: its FLOPs, and the dtypes of its operands and result, such
    as "bf16 x bf16 -> f32"."""

    flops: float
    dtypes: str


class Kernel(NamedTuple):
    """A kernel. `times` is the number of times that a step runs it. `cycles` is the number of
    cycles that a TPU's compiler estimates, or 0."""

    name: str
    kind: str
    times: int
    bytes: float
    products: tuple[Product, ...]
    cycles: int
    scope: str
    target: str = ""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)


def _closing(text, opening):
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if not depth:
            return i
    raise ValueError(f"no closing bracket: {text[opening : opening + 100]}")


def parse(text: str) -> tuple[dict[str, dict[str, Operation]], str]:
    """Returns ({name of a computation: {name: operation}}, the name of the entry computation)."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.rstrip().endswith("{"):
            name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)[1]
            current = computations[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":  # the attributes of a kernel may have several lines
            current = None
        elif current is not None and re.match(r"\s+(ROOT )?%?[\w.\-]+ = ", line):
            operation = Operation(line)
            current[operation.name] = operation
    return computations, entry


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of a program in order. A kernel in the body of a loop is listed once, and
    `times` contains the number of iterations."""
    computations, entry = parse(text)
    return [_kernel(computations, *found) for found in _walk(computations, entry, 1)]


def _walk(computations, name, times) -> Iterator:
    for operation in computations[name].values():
        if operation.code == "while":
            count = times * _iterations(computations, operation)
            yield from _walk(computations, operation.attribute("body"), count)
        elif operation.code == "conditional":
            branches = re.search(r"branch_computations=\{%?([\w.\-]+)", operation.attributes)
            branch = branches[1] if branches else operation.attribute("true_computation")
            yield from _walk(computations, branch, times)
        elif operation.code == "call":
            yield from _walk(computations, operation.attribute("to_apply"), times)
        elif operation.code == "async-start" and operation.attribute("calls") in computations:
            yield from _walk(computations, operation.attribute("calls"), times)
        elif operation.code not in _NO_KERNEL:
            yield computations[name], operation, times


def _iterations(computations, operation) -> int:
    if found := re.search(r"known_trip_count\D*(\d+)", operation.attributes):
        return int(found[1])
    condition = computations[operation.attribute("condition")].values()
    bounds = [
        int(each.inner)
        for each in condition
        if each.code == "constant" and each.inner.isdigit() and each.arrays[0].dtype == "s32"
    ]
    return max(bounds, default=1)


def _inside(computations, operation) -> Iterator:
    """Yields the (computation, operation) pairs of a fusion, including nested fusions."""
    body = computations[operation.attribute("calls" if operation.code == "fusion" else "to_apply")]
    for each in body.values():
        yield body, each
        if each.code in ("fusion", "call"):
            yield from _inside(computations, each)


def _kernel(computations, computation, operation, times) -> Kernel:
    parts = [(computation, operation)]
    if operation.code == "fusion":
        parts = list(_inside(computations, operation))
    products = [_product(*part) for part in parts if part[1].code in ("dot", "convolution")]
    codes = {each.code for _, each in parts}
    kind, called = _called(computation, operation)
    found = re.search(r'"estimated_cycles":"?(\d+)', operation.attributes)
    scope = re.search(r'op_name="([^"]*)"', operation.attributes)
    return Kernel(
        operation.name,
        kind or ("product" if products else _kind(operation, codes)),
        times,
        sum(_traffic(computations, computation, operation)),
        (*products, *called),
        int(found[1]) if found else 0,
        scope[1] if scope else "",
        operation.target,
    )


def _kind(operation, codes) -> str:
    """Returns the kind of a kernel without products, such as "cast" if it only converts values, and
    "copy" if it only moves and converts values."""
    idle = {
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "reshape",
        "broadcast",
        "fusion",
    }
    work = codes - idle
    if work and work <= {
        "copy",
        "transpose",
        "convert",
        "copy-start",
        "copy-done",
        "slice",
        "concatenate",
    }:
        return "cast" if work == {"convert"} else "copy"
    if operation.code == "broadcast" or (not work and "broadcast" in codes):
        return "fill"
    for kind in ("sort", "scatter", "gather", "reduce-window", "reduce"):
        if kind in codes:
            return kind
    return "custom" if operation.code == "custom-call" else "elementwise"


def _called(computation, operation) -> tuple[str, list[Product]]:
    """Returns (kind, products) for a call of a library or of an attention kernel in Pallas, and
    ("", []) for all other operations."""
    target = operation.target
    arrays = [
        computation[name].arrays[0] for name in operation.operands if computation[name].arrays
    ]
    if "cublas" in target:
        contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', operation.attributes)
        summed = arrays[0].shape[int(contracted[1])] if contracted else 0
        return "product", [
            _described(
                2 * math.prod(operation.arrays[0].shape) * summed, *arrays[:2], operation.arrays[0]
            )
        ]
    if "cudnn" in target and "onv" in target:
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.attributes)
        cotangent, kernel = operation.arrays[0], arrays[1]  # for a forward convolution
        if "BackwardFilter" in target:
            cotangent, kernel = arrays[1], operation.arrays[0]
        elif "BackwardInput" in target:
            cotangent = arrays[0]
        features = cotangent.shape[labels[3].index("f")]
        flops = 2 * math.prod(cotangent.shape) * math.prod(kernel.shape) / features
        return "product", [_described(flops, *arrays[:2], operation.arrays[0])]
    name = operation.attribute("op_name") + operation.name + operation.attributes
    if "fmha" in target or (operation.code == "custom-call" and "splash" in name):
        heads = next(
            (array for array in arrays if len(array.shape) >= 4), None
        )  # [batch, heads, time, head_dim]
        if heads is None:
            heads = max(arrays, key=lambda array: array.bytes)
        backward = any(each in name for each in ("Backward", "bwd", "dkv", "_dq"))
        time = max(sorted(heads.shape)[-2:]) if len(heads.shape) < 4 else max(heads.shape[1:3])
        flops = (
            2 * math.prod(heads.shape) * time * (2.5 if backward else 1)
        )  # causal, so half of 4 b h t² d
        return "attention", [_described(flops, heads, heads, operation.arrays[0])]
    return "", []


def _described(flops, left, right, out) -> Product:
    return Product(flops, f"{left.dtype} x {right.dtype} -> {out.dtype}")


def _product(computation, operation) -> Product:
    left, right = (computation[name].arrays[0] for name in operation.operands[:2])
    out = operation.arrays[0]
    if operation.code == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.attributes)[1]
        summed = math.prod(left.shape[int(axis)] for axis in axes.split(",") if axis)
        return _described(2 * math.prod(out.shape) * summed, left, right, out)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.attributes)
    features = right.shape[labels[2].index("o")]
    flops = 2 * math.prod(out.shape) * math.prod(right.shape) / features
    return _described(flops * _useful(operation, labels, left, right, out), left, right, out)


def _useful(operation, labels, left, right, out) -> float:
    """Returns the fraction of a convolution's multiplications that read neither padding nor the
    zeros of a dilation."""
    window = re.search(r"window=\{([^}]*)\}", operation.attributes)
    options = dict(re.findall(r"(\w+)=([\w\-]+)", window[1])) if window else {}
    axes = len(labels[1]) - 2

    def read(key, default):
        return options[key].split("x") if key in options else [default] * axes

    fraction = 1.0
    for axis in range(axes):
        size, window_size, count = (
            array.shape[labels[i].index(str(axis))]
            for i, array in ((1, left), (2, right), (3, out))
        )
        stride, dilation, window_dilation = (
            int(read(key, 1)[axis]) for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(read("pad", "0_0")[axis].split("_")[0])
        places = [
            place * stride - low + step * window_dilation
            for place in range(count)
            for step in range(window_size)
        ]
        fraction *= sum(
            at >= 0 and not at % dilation and at // dilation < size for at in places
        ) / len(places)
    return fraction


def _traffic(computations, computation, operation) -> tuple[float, float]:
    """Returns the bytes that an operation reads from main memory, and the bytes that it writes. For
    slices and in-place updates, only the elements that they read or write count."""
    inputs = [computation[name] for name in operation.operands if name in computation]
    if operation.code == "fusion":
        return _fused_traffic(computations[operation.attribute("calls")], operation, inputs)
    if operation.code in _SLICES:
        return operation.written, operation.written
    if operation.code == "dynamic-update-slice":
        update = computation[operation.operands[1]].written
        return update, update
    if operation.code in _DONE or operation.target in ("AllocateBuffer", "ConcatBitcast"):
        return 0, 0
    if operation.code == "copy-start":  # (destination, source, context)
        sides = [array.bytes if array.in_main_memory else 0 for array in operation.arrays[:2]]
        return sides[1], sides[0]
    if operation.code == "slice-start":
        return operation.arrays[-1].bytes, 0
    if operation.code == "broadcast":
        return 0, operation.written
    return sum(each.written for each in inputs), operation.written


def _fused_traffic(body, operation, inputs):
    parameters = {int(each.inner): each for each in body.values() if each.code == "parameter"}
    read, updated_in_place = 0, 0
    for i, source in enumerate(inputs):
        whole = source.written
        names, touched, partial = (
            [parameters[i].name] if i in parameters else [],
            0,
            i in parameters,
        )
        while names and partial:
            name = names.pop()
            for user in (each for each in body.values() if name in each.operands):
                if user.code in ("bitcast", "reshape"):
                    names.append(user.name)
                elif user.code in _SLICES:
                    touched += user.size
                elif user.code == "dynamic-update-slice" and user.operands[0] == name:
                    updated_in_place += user.size - body[user.operands[1]].size
                else:
                    partial = False
        read += min(whole, touched) if partial else whole
    root = next(each for each in body.values() if each.root)
    if root.code == "scatter" and body[root.operands[0]].code in ("parameter", "bitcast"):
        updates = body[root.operands[-1]].size
        return max(0, read - root.size) + updates, updates
    return read, max(0, operation.written - updated_in_place)
