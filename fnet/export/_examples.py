"""Draws inputs with which an exported program is compared with the original.

A comparison shows only what its inputs can show: with lengths of 0 and 1 no mask is wrong, and with
normal numbers no logarithm loses its digits near 0. So each integer is drawn from the range in
which the program uses it, which `Ranges` reads from the stable form, and there are several rounds
with inputs of different kinds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fnet.export._choices import choices
from fnet.export._tree import described_leaves, size_variables
from fnet.export.standalone import _signature, _sizes

ROUNDS = "usual", "extreme", "special"
# An integer after them is an index if it was one before.
_PASSING = set(
    """reshape broadcast transpose convert add sub max min clamp concatenate slice reverse pad neg gather
dynamic_slice select rem""".split()
)
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
_FAR = 0.0, -0.0, 0.5, -1.5, 2.5, 1e-4, -1e-6, 20.0, -20.0, 100.0, 1e4, -1e4
_BEYOND = 1e10, -1e10, 300.0, -1.0  # for casts to integers, which saturate
_SPECIAL = np.nan, np.inf, -np.inf


@dataclasses.dataclass
class Use:
    """How a program uses an integer input.

    Attributes:
        limits: the sizes, numbers or expressions, of the axes that the input indexes or is compared
            with.
        index: whether the input is an index of such an axis, which must be less than the size. A
            length may equal it.
        divides: whether something is divided by the input.
    """

    limits: set = dataclasses.field(default_factory=set)
    index: bool = False
    divides: bool = False


class Ranges:
    """What a program in stable form does with its inputs.

    Attributes:
        uses: the `Use` of each integer input, {index of the value: Use}.
        loops: whether the program contains a loop whose number of steps depends on values. Its
            inputs are small, so that it ends.
        divides: whether the program divides integers.
        casts: whether the program converts floating-point numbers to integers.
    """

    def __init__(self, stable: Mapping[str, Any] | None):
        self.values, self.uses = (stable or {}).get("values", []), {}
        self.loops = self.divides = self.casts = False
        self.inputs: list = (stable or {}).get("inputs", [])
        if stable is not None:
            self._body(stable, {})

    def _use(self, value) -> Use:
        return self.uses.setdefault(value, Use())

    def _kind(self, a) -> str:
        return np.dtype(a[0] if isinstance(a, list) else self.values[a][0]).kind

    def _shape(self, a) -> list:
        return [] if isinstance(a, list) else self.values[a][1]

    def _body(self, body, extents):
        """Reads a body from its end to its beginning. `extents` are the sizes that values were
        counted to."""
        extents = self._extents(body, dict(extents))
        for operation, ins, outs, options, _ in reversed(body["equations"]):
            integers = [a for a in ins if self._is_integer_value(a)]
            if operation in ("gather", "scatter"):
                shape = self._shape(ins[0])
                self._indexes(ins[1], [shape[axis] for axis in options["indexed"]])
            elif operation in ("dynamic_slice", "dynamic_update_slice"):
                first = 1 if operation == "dynamic_slice" else 2
                for start, size in zip(ins[first:], self._shape(ins[0])):
                    self._indexes(start, [size])
            elif operation == "select" and ins[0] in integers:
                self._indexes(ins[0], [len(ins) - 1])
            elif operation == "cond" and ins[0] in integers:
                self._indexes(ins[0], [len(options["branches"])])
            elif operation in ("div", "rem") and self._kind(ins[0]) in "iu":
                if isinstance(ins[1], int):
                    self.divides = self._use(ins[1]).divides = True
            elif operation == "convert":
                rounds = self._kind(ins[0]) in "fV" and self._kind(outs[0]) in "iu"
                self.casts = self.casts or rounds
            elif operation == "while":
                self.loops = True

            if operation in _COMPARISONS or operation in ("add", "sub"):
                for a, other in (ins, ins[::-1]):
                    if a in integers and isinstance(other, int) and other in extents:
                        self._use(a).limits |= extents[other]
            if operation in _PASSING:
                for use in [self.uses[v] for v in outs if v in self.uses]:
                    for a in integers:
                        self._join(a, use)
            for inner, given in _bodies(operation, ins, options):
                self._inner(inner, given, extents)

    def _inner(self, body, given, extents):
        """Reads the body of a loop or branch whose inputs are the values `given`."""
        values = [(v, a) for v, a in zip(body["inputs"], given) if isinstance(a, int)]
        self._body(body, {v: extents[a] for v, a in values if a in extents})
        for v, a in values:
            if v in self.uses:
                self._join(a, self.uses[v])

    def _is_integer_value(self, a) -> bool:
        """Whether an operand is a value of the program, not a constant, and has an integer dtype."""
        return isinstance(a, int) and self._kind(a) in "iu"

    def _extents(self, body, extents):
        for operation, ins, outs, options, _ in body["equations"]:
            if operation == "iota":
                extents[outs[0]] = {self._shape(outs[0])[options["axis"]]}
            elif operation in _PASSING or operation == "mul":
                sizes = set().union(*(extents.get(a, ()) for a in ins if isinstance(a, int)))
                if sizes:
                    extents[outs[0]] = sizes
        return extents

    def _indexes(self, a, sizes):
        if isinstance(a, int):
            use = self._use(a)
            use.limits |= set(sizes)
            use.index = True

    def _join(self, value, use):
        mine = self._use(value)
        mine.limits |= use.limits
        mine.index, mine.divides = mine.index or use.index, mine.divides or use.divides


def _bodies(operation, ins, options):
    """Yields the bodies of a loop or branch, with the values that are their inputs."""
    if operation == "scan":
        yield options["body"], ins
    elif operation == "while":
        a, b = options["test_consts"], options["test_consts"] + options["body_consts"]
        yield options["test"], [*ins[:a], *ins[b:]]
        yield options["body"], [*ins[a:b], *ins[b:]]
    elif operation == "cond":
        for branch in options["branches"]:
            yield branch, ins[1:]


def drawn(
    described: list, sizes: Mapping[str, int], ranges: Ranges, kind: str = "usual", seed: int = 0
) -> list:
    """Returns the leaves of inputs for the given values of the symbolic sizes.

    Args:
        described: the inputs, [(name, tree of {"dtype", "shape"})].
        ranges: how the program uses the inputs.
        kind: "usual": normal floating-point numbers, and integers that the program expects.
            "extreme": floating-point numbers near 0 and far out, and integers outside their range.
            "special": NaN and Inf, too.
    """
    draw, flat = np.random.default_rng([ROUNDS.index(kind), seed]), []
    places = iter(ranges.inputs[max(len(ranges.inputs) - len(described_leaves(described)), 0) :])

    def one(tree):
        if tree is None:
            return None
        if "dtype" in tree and "shape" in tree:
            shape = tuple(_sizes.size(n, sizes) for n in tree["shape"])
            use = ranges.uses.get(next(places, None), Use())
            if tree["dtype"].startswith("key<"):
                return (
                    jax.random.key(seed)
                    if not shape
                    else jax.random.split(jax.random.key(seed), shape)
                )
            return _array(draw, np.dtype(tree["dtype"]), shape, use, sizes, ranges, kind, seed)
        ((container, children),) = tree.items()
        return (
            {k: one(v) for k, v in children.items()}
            if container == "dict"
            else [one(child) for child in children]
        )

    for _, tree in described:
        _signature.flatten("", "", tree, one(tree), flat, [])
    return flat


def cases(description: Mapping[str, Any], stable: Mapping[str, Any] | None) -> list[list]:
    """Returns inputs for the tests in a bundle, as lists of leaves. If no sizes are found that
    satisfy the constraints of the program, there are none."""
    ranges, described = Ranges(stable), description["inputs"]
    sizes = choices(size_variables(described), description["constraints"])
    return [
        drawn(described, chosen, ranges, kind, seed)
        for chosen, kind, seed in rounds(described, sizes)
        if chosen is sizes[0] or kind == "extreme"
    ]


def rounds(described: list, sizes: list[dict[str, int]]) -> list[tuple[dict[str, int], str, int]]:
    """Returns the choices (sizes, kind, seed) of a check. Small inputs cannot hold all values, so
    they are drawn with several seeds."""
    found = []
    for i, chosen in enumerate(sizes):
        largest = max(
            (
                int(np.prod([_sizes.size(n, chosen) for n in leaf["shape"]]))
                for _, leaf in described_leaves(described)
            ),
            default=0,
        )
        seeds = 1 if largest > 100 or i else 4
        found += [(chosen, kind, i + seed) for kind in ROUNDS[:2] for seed in range(seeds)]
    return found


def _array(draw, dtype, shape, use, sizes, ranges, kind, seed):
    if dtype.kind == "b":
        return draw.random(shape) < (0.5 if kind == "usual" else 0.8)
    if dtype.kind in "iu":
        return _integers(draw, dtype, shape, use, sizes, ranges, kind)
    x = draw.normal(size=shape)
    if kind == "extreme" and not ranges.loops:
        near = draw.random(shape) < 0.3
        x = np.where(near, x * 10.0 ** draw.uniform(-6, 1, shape), x)
        _placed(draw, x, _FAR + (_BEYOND if ranges.casts else ()), seed)
    if kind == "special":
        _placed(draw, x, _SPECIAL, seed)
    with np.errstate(over="ignore"):  # 1e10 is Inf in float16
        return x.astype(dtype)


def _placed(draw, x, values, seed):
    """Writes special values to elements of x: to half of few elements, to a quarter of many.
    Successive seeds write successive values."""
    flat = x.reshape(-1)
    count = min(flat.size, max(1, flat.size // (2 if flat.size < 4 * len(values) else 4)))
    at = draw.permutation(flat.size)[:count]
    flat[at] = [values[(seed * count + i) % len(values)] for i in range(count)]


def _integers(draw, dtype, shape, use, sizes, ranges, kind):
    info, limits = np.iinfo(dtype), []
    for n in use.limits:
        try:
            limits.append(_sizes.size(n, sizes))
        except KeyError:  # a size inside the program that its inputs do not determine
            continue
    if limits:
        low, high = (0, min(limits) - 1) if use.index else (1, min(limits))
        if kind == "extreme":
            low, high = -max(limits) - 2, 2 * max(limits) + 1
    elif ranges.loops:
        low, high = 0, 4
    elif kind == "usual" or ranges.divides:
        low, high = (-9, 9) if info.bits > 8 else (info.min, info.max)
    else:
        low, high = info.min, info.max
    low, high = max(low, info.min), min(max(high, low), info.max)
    x = draw.integers(low, high, shape, dtype, endpoint=True)
    flat = x.reshape(-1)
    if high - low > 1e6:  # small ones, too
        some = draw.random(flat.shape) < 0.5
        flat[some] = draw.integers(-9 if low < 0 else 0, 10, some.sum())
    if flat.size > 1 and (limits or high == info.max):  # the ends of the range
        flat[draw.permutation(flat.size)[:2]] = low, high
    if use.divides and kind == "usual":
        x[x == 0] = 2 if high > 1 else 1
    return x
