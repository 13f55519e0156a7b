"""bucket: one program for all lengths between two sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fnet import _jax, jaxpr
from fnet._util._text_table import aligned
from fnet.jaxpr import Structure, Traced, check_function, is_array, mutable, wraps
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._axes import Axes, Placement
from fnet.transforms._bucket._padded import Note
from fnet.transforms._bucket._program import Program, is_inexact


@dataclasses.dataclass(frozen=True)
class Buckets:
    """What `bucket` does in a call, as `ft.explain` reports it. `str()` returns a table.

    Attributes:
        lengths: {letter: the length of the call}.
        sizes: {letter: the size to which it is padded}.
        alone: why the call has a program of its own, without padding, or None.
        rows: a `Note` for each equation to which a mask or the like was added, with the fields
            scope, primitive, reason and line.
    """

    lengths: dict[str, int]
    sizes: dict[str, int]
    alone: str | None
    rows: tuple[Note, ...]

    def __str__(self):
        parts = [f"{name} = {n} in {self.sizes[name]}" for name, n in self.lengths.items()]
        first = f"{', '.join(parts)}: {len(self.rows)} equations changed"
        if self.alone:
            return f"{', '.join(parts)}: a program of its own, without padding, as {self.alone}"
        if not self.rows:
            return first
        table = [("scope", "operation", "line", "what and why")]
        table += [
            (row.scope or "(no scope)", row.primitive, row.line, row.reason) for row in self.rows
        ]
        return "\n".join([first, "", *aligned(table, left=range(4))])


class _Call:
    """A call of a bucketed function.

    Attributes:
        f: the function, whose first arguments are the flax.nnx modules in it.
        found: the modules among the arguments.
        arrays: the arrays of the arguments.
        lengths: {letter: length}.
        ranges: {letter: (shortest length, size)} of its bucket.
    """

    def __init__(self, f: Callable, placement: Placement, args: tuple, kwargs: dict):
        self.f, own = mutable.opened(f)
        (given, self._options), self._modules, self.found = mutable.extract(((*own, *args), kwargs))
        before, arguments = given[: len(own)], given[len(own) :]
        self._leaves, self._structure = jax.tree.flatten(((given, self._options), self._modules))
        axes: list[Axes | None] = [None] * len(jax.tree.leaves(before))
        axes += placement.of(arguments)
        axes += [None] * (len(self._leaves) - len(axes))
        self.arrays = [x for x in self._leaves if is_array(x)]
        self._axes, self._placement = axes, placement
        self.lengths = placement.lengths(axes, self._leaves)
        self.ranges = placement.chosen(self.lengths)

    @functools.cached_property
    def key(self) -> tuple:
        tree = jax.tree.unflatten(self._structure, self._leaves)
        types = tuple(
            (None if each is None else (each.texts, _unspelled(each, x)), _type(x, each))
            for each, x in zip(self._axes, self._leaves)
            if is_array(x)
        )
        return Structure(tree), types, *settings()

    def exact(self) -> Traced:
        """The function, traced for the sizes of this call."""
        return self._traced(self._leaves)

    def open(self, least: int) -> Traced:
        """The function, traced for lengths of any value from `least` on."""
        return self._traced(self._placement.types(self._axes, self._leaves, least))

    @property
    def leasts(self) -> list[int]:
        """The shortest lengths for which the function may be traced: 1, or a power of two up to the
        smallest bucket."""
        smallest = min(min(sizes) for sizes in self._placement.buckets.values())
        return [n for n in (1 << i for i in range(smallest.bit_length())) if n <= smallest]

    def _traced(self, leaves: Sequence) -> Traced:
        tree, modules = jax.tree.unflatten(self._structure, leaves)
        (args, kwargs), _ = mutable.insert(tree, modules)
        return Traced(self.f, args, kwargs)


def _unspelled(axes: Axes, x: Any) -> tuple:
    return tuple(None if text else n for text, n in zip(axes.texts, x.shape))


def _type(x: Any, axes: Axes | None) -> tuple:
    return (x.shape if axes is None else None, str(x.dtype), getattr(x, "weak_type", False))


_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


def settings() -> tuple:
    """Returns the values of the settings on which a trace depends."""
    return tuple(getattr(jax.config, name, None) for name in _CONFIG)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A function that was traced for lengths of any value, and the arrays that it closes over."""

    traced: Traced
    consts: list
    program: Program


class _Bucketed:
    def __init__(self, f: Callable, placement: Placement):
        self._f, self._placement = f, placement
        self._entries: dict[tuple, _Entry] = {}
        self._exact: dict[tuple, tuple[Traced, Callable]] = {}

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        call = _Call(self._f, self._placement, args, kwargs)
        entry = self._entry(call)
        if entry.program.unlike(call.lengths):
            return self._alone(call)
        arrays = [*entry.consts, *call.arrays]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            outputs = _differentiable(entry.program, call.lengths, call.ranges)(arrays)
        else:
            outputs = entry.program(call.lengths, call.ranges, arrays)
        return closed(entry.traced.result(outputs, call.found), call.lengths)

    def explained(self, *args: Any, **kwargs: Any) -> Buckets:
        call = _Call(self._f, self._placement, args, kwargs)
        program = self._entry(call).program
        sizes = {name: size for name, (_, size) in call.ranges.items()}
        why = program.unlike(call.lengths)
        rows = () if why else tuple(program.notes(call.ranges))
        return Buckets(call.lengths, sizes, why, rows)

    def _entry(self, call: _Call) -> _Entry:
        if call.key in self._entries:
            return self._entries[call.key]
        entry = _opened(call)
        if not any(isinstance(x, jax.core.Tracer) for x in entry.consts):
            self._entries[call.key] = entry
        return entry

    def _alone(self, call: _Call) -> Any:
        """Evaluates the function without padding, in a program for the lengths of the call."""
        if any(isinstance(x, jax.core.Tracer) for x in call.arrays):
            traced = call.exact()
            return traced.result(_evaluated(traced.closed)(*call.arrays), call.found)
        key = call.key, tuple(call.lengths.items())
        if key not in self._exact:
            traced = call.exact()
            self._exact[key] = traced, jax.jit(_evaluated(traced.closed))
        traced, run = self._exact[key]
        return traced.result(run(*call.arrays), call.found)


def _evaluated(closed: Any) -> Callable:
    return lambda *arrays: _jax.evaluate(closed, closed.consts, list(arrays))


def closed(result: Any, lengths: dict) -> Any:
    """Returns a result with numbers in place of sizes that the function returns as they are."""
    if not any(map(_sizes.is_open, jax.tree.leaves(result))):
        return result
    return jax.tree.map(lambda x: _sizes.value(x, lengths) if _sizes.is_open(x) else x, result)


def _opened(call: _Call) -> _Entry:
    """Traces a function for lengths of any value, or from the shortest one on for which JAX can."""
    errors: list[Exception] = []
    for least in call.leasts:
        try:
            with _jax.symbolic_trace() as unequal:
                traced = call.open(least)
            raw = _jax.close(_jax.consts_as_inputs(traced.closed))
            consts = list(traced.closed.consts)
            donated = [len(consts) + i for i in _donated(traced.closed.jaxpr)]
            return _Entry(traced, consts, Program(raw, unequal, least, donated))
        except Exception as error:
            errors.append(error)
    call.exact()  # raises the error that the function itself has
    raise ValueError(_not_traced(call.lengths, errors[0])) from errors[0]


def _not_traced(lengths: dict, error: Exception) -> str:
    names = " and ".join(lengths)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = (lines or [type(error).__name__])[0].removesuffix(".")
    return (
        f"bucket: the function cannot be traced for a size {names} of any value: {first}. It works "
        "for the sizes of this call alone. Use operations that need no Python number for a size, "
        "such as lax.scan or lax.fori_loop in place of range(x.shape[0])"
    )


def _donated(program: Any) -> list[int]:
    """The inputs of a program that its only call donates."""
    if len(program.eqns) != 1:
        return []
    (eqn,) = program.eqns
    given = {id(v) for v, donated in zip(eqn.invars, jaxpr.donated(eqn)) if donated}
    return [i for i, v in enumerate(program.invars) if id(v) in given]


def _differentiable(program: Program, lengths: dict, ranges: dict) -> Callable:
    """Returns a function from arrays to outputs. Its derivative is that of the function, traced for
    lengths of any value and padded on its own: the derivative of a padded program would multiply
    zeros by what is in the padding, which may be infinite."""

    @jax.custom_vjp
    def apply(arrays: list) -> list:
        return program(lengths, ranges, arrays)

    def forward(arrays: list) -> tuple:
        return apply(arrays), arrays

    def backward(arrays: list, cotangents: list) -> tuple:
        wanted = [i for i, x in enumerate(arrays) if is_inexact(x)]
        given = [x for x in cotangents if x.dtype != jax.dtypes.float0]
        derivative = program.derivative(tuple(wanted))
        if why := derivative.unlike(lengths):
            raise ValueError(
                f"bucket: the derivative for {lengths} needs a program of its own, as {why}; "
                "transform the gradient, ft.bucket(ft.grad(f), ...), which makes one"
            )
        found = _differentiable(derivative, lengths, ranges)([*arrays, *given])
        results: list = [np.zeros(x.shape, jax.dtypes.float0) for x in arrays]
        for i, y in zip(wanted, found):
            results[i] = y
        return (results,)

    apply.defvjp(forward, backward)
    return apply


def bucket(f: Callable, sizes: Mapping[str, Sequence[int]], *, axes: Any) -> Callable:
    """Pads arrays to one of a few sizes, so that a few compiled programs serve all lengths.

        predict = ft.bucket(model, {"t": [64, 128, 256]}, axes=(None, "b, t"))
        logits = predict(params, tokens)    # tokens [2, 77], padded to 128; logits [2, 77, vocab]

    A jitted function is compiled again for each new length; with `bucket`, once for each size. The
    result is that of `f` without padding, up to the order of sums. Wherever a reduction, a product,
    a convolution, a scan or the like runs over a padded axis, the padding is masked, whatever is in
    it, also NaN, and a mean is divided by the true length. `ft.explain` lists what was added. An
    operation without a rule raises an error that names it and its line.

    `f` is traced with symbols as sizes, as `export.program` does it, and is jitted. A length for
    which a comparison in `f` has another answer, such as 1 for `t == 1`, gets a program of its own.
    docs/transforms.md describes what is supported.

    Args:
        f: any function of arrays, such as a model or `ft.value_and_grad(loss)`.
        sizes: {name: the sizes to which an axis of this name is padded}.
        axes: for each positional argument the axes of its arrays, as in `export.spec`: "b, t, d",
            or "b, 2*t". The names in `sizes` are padded; others, and numbers, stay. "..." stands
            for any axes, None for an argument that is not padded, and a tree of these for a tree of
            arrays. A single text is that of the only positional argument.

    Returns:
        A function with f's signature and results. Its gradients are those of f, with respect to all
        of its arguments; transform the gradient function for the fewest programs.

    Raises:
        ValueError: an operation has no rule; a length is larger than all sizes; axes disagree;
            the function cannot be traced for sizes of any value.

    >>> mean = ft.bucket(lambda x: x.mean(0), {"t": [4, 8]}, axes="t, d")
    >>> print(mean(jnp.array([[1.0], [2.0], [6.0]])))
    [3.]
    >>> print(ft.explain(mean, jnp.ones((3, 1))))  # doctest: +ELLIPSIS
    t = 3 in 4: 1 equations changed
    ...
    """
    check_function("bucket", f)
    bucketed = _Bucketed(f, Placement(sizes, axes))

    @wraps(f)
    def padded(*args: Any, **kwargs: Any) -> Any:
        return bucketed(args, kwargs)

    padded.explained = bucketed.explained
    return padded
