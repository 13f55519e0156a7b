"""An equation on smaller arrays: the errors of the partitioner do not depend on sizes, except on
whether the devices divide them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fnet import _jax
from fnet.jaxpr import without_shardings
from fnet.parallel._sanitizer import _cases
from fnet.parallel._sanitizer._program import Equation

_SMALL = 1 << 13
_LARGE = 1 << 21
_SIZES = ("shape", "new_sizes", "slice_sizes", "sizes", "limit_indices")


class Alone(NamedTuple):
    """An equation as a program of its own.

    Attributes:
        function: of the inputs that are not literals; returns a list.
        shapes: their shapes and dtypes.
        params: the parameters of the primitive, with the sizes of these shapes.
    """

    function: Callable
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    params: dict


def alone(equation: Equation, mesh: _cases.Axes) -> Alone | None:
    """Returns an equation on arrays that are as small as possible. None: they are still too large
    to be run on emulated devices."""
    avals = [v.aval for v in equation.eqn.invars]
    results = [v.aval for v in equation.eqn.outvars]
    elements = sum(math.prod(aval.shape) for aval in (*avals, *results))
    first = original(equation)
    if elements <= _SMALL:
        return first
    sizes = {n for aval in (*avals, *results) for n in aval.shape}
    smaller = _applied(equation, _mapped(sizes, _cases.size(mesh)))
    if smaller is not None and _as_even(equation, smaller, mesh):
        return smaller
    return first if elements <= _LARGE else None


def original(equation: Equation) -> Alone:
    """Returns an equation on arrays of its own sizes."""
    return _applied(equation, {})  # type: ignore[return-value]


def _mapped(sizes: set[int], devices: int) -> dict[int, int]:
    """Returns a smaller size for each size. Multiples of the number of devices stay multiples, and
    products of two sizes stay products."""
    mapped: dict[int, int] = {}
    multiples = itertools.count(1)
    for n in sorted(sizes):
        product = next((p for p in mapped if p > 1 and n % p == 0 and n // p in mapped), None)
        if product is not None and n // product > 1:
            mapped[n] = mapped[product] * mapped[n // product]
        elif n <= 2 * devices:
            mapped[n] = n
        else:
            mapped[n] = next(multiples) * devices + n % devices
            while mapped[n] in list(mapped.values())[:-1]:
                mapped[n] += devices
    return mapped


def _applied(equation: Equation, mapped: dict[int, int]) -> Alone | None:
    eqn = equation.eqn
    params = {
        name: _sized(value, mapped) if name in _SIZES else value
        for name, value in _parameters(eqn).items()
    } | without_shardings(eqn)
    literal = [isinstance(atom, _jax.Literal) for atom in eqn.invars]
    shapes = tuple(
        jax.ShapeDtypeStruct(tuple(mapped.get(n, n) for n in v.aval.shape), v.aval.dtype)
        for v, flag in zip(eqn.invars, literal)
        if not flag
    )

    def function(*arrays: Any) -> list:
        rest = iter(arrays)
        inputs = [v.val if flag else next(rest) for v, flag in zip(eqn.invars, literal)]
        return _jax.bind(eqn.primitive, inputs, params)

    if mapped:
        try:
            jax.eval_shape(function, *shapes)
        except Exception:  # a parameter states sizes in another way
            return None
    return Alone(function, shapes, params)


def _parameters(eqn: Any) -> dict:
    return dict(eqn.primitive.get_bind_params(eqn.params))


def _sized(value: Any, mapped: dict[int, int]) -> Any:
    if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
        return tuple(mapped.get(n, n) for n in value)
    return value


def _as_even(equation: Equation, smaller: Alone, mesh: _cases.Axes) -> bool:
    """Whether the shardings split smaller arrays as evenly as they split those of the step."""
    eqn = equation.eqn
    live = [
        (v.aval.shape, spec)
        for v, spec in zip(eqn.invars, equation.inputs)
        if not isinstance(v, _jax.Literal)
    ]
    pairs = [(shape, x.shape, spec) for (shape, spec), x in zip(live, smaller.shapes)]
    results = jax.eval_shape(smaller.function, *smaller.shapes)
    pairs += [
        (v.aval.shape, y.shape, spec) for v, y, spec in zip(eqn.outvars, results, equation.outputs)
    ]
    return all(_cases.fits(s, a, mesh) == _cases.fits(s, b, mesh) for a, b, s in pairs)
