"""Gradient accumulation: a function of a large batch, computed slice by slice."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax, jaxpr
from fnet.jaxpr import array_leaves, is_array, mutable, wraps
from fnet.transforms._microbatch_state import Program, declared_state, inferred_state


def microbatch(
    f: Callable,
    n: int,
    *,
    argnums: int | tuple[int, ...] | None = None,
    weight: Callable | None = None,
    carry: int | tuple[int, ...] | None = None,
) -> Callable:
    """Accumulates gradients: evaluates `f` on n slices of the batch, one after another in a scan,
    and averages the results.

        step = ft.microbatch(ft.value_and_grad(loss), 8)
        step = ft.microbatch(ft.value_and_grad(loss), 8, weight=lambda params, batch: batch["weight"].sum())

    Only the intermediate values of one slice are in memory at a time. With w_i the weight of slice
    i, the result is

        microbatch(f, n)(params, batch) = sum_i w_i f(params, batch_i) / sum_i w_i

    With equal weights, the default, that is f(params, batch) if f computes a mean over the rows, or
    the gradient of one, and uses no statistics across rows, as batch normalization does. For a
    weighted mean, pass a `weight` that returns the sum of the weights in a slice.
    docs/transforms.md says which rows are in a slice, what happens to random keys, and what weights
    may be.

    State, such as a counter of steps, is not averaged. It goes from slice to slice, so it ends up n
    steps further. It must be an argument of f, not a value in its closure, and f must return it
    with the same tree structure, shapes and dtypes. The state in flax.nnx modules among the
    arguments is always carried.

        step = ft.microbatch(jax.value_and_grad(loss, has_aux=True), 8, argnums=2, carry=1)
        (value, state), grads = step(params, state, batch)

    Args:
        f: a function of parameters and batched arguments. Floating-point outputs are averaged: they
            are summed in at least float32 and returned in their own dtype. Integer outputs, such as
            counts, are summed over the slices.
        n: the number of slices, a divisor of the number of rows. With n = 1, f is called once with
            unchanged arguments, and its outputs are converted to arrays.
        argnums: the positions of the arguments that are batched along the first axis of their
            leaves. Default None: all arguments except the first and those in `carry`.
        carry: the positions of the arguments that are state; `carry=()` means none. Default None:
            an argument is state if an output has its tree structure, shapes and dtypes, and its
            integers and random keys come back with values that are computed from the argument, but
            not from the batch. Where an output may be state, but need not be, for example because
            it has no integers, an error asks for `carry`.
        weight: a function with the arguments of f, which receives one slice in place of the batch
            and returns a real scalar, the weight of the slice. Default None: every weight is 1.

    Returns:
        A function with f's signature and output structure.

    Raises:
        TypeError: a batched argument is a `jax.Ref`, or `weight` is not a function.
        ValueError: the batched arguments contain no arrays or have different numbers of rows, n
            does not divide the number of rows, an output is neither floating point nor integer, an
            output may be the new value of state that `carry` does not name, or `weight` has side
            effects or returns no real scalar.

    >>> f = lambda w, x: jnp.mean(w * x)
    >>> float(ft.microbatch(f, 2)(2.0, jnp.arange(4.0)))
    3.0
    """
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        raise ValueError(f"microbatch: the number of slices must be a positive integer; got {n!r}")
    if weight is not None and not callable(weight):
        raise TypeError(
            "microbatch: weight= must be a function of f's arguments that returns the weight of a "
            f"slice; got {weight!r}"
        )
    n = int(n)

    @wraps(f, "microbatch")
    def sliced(*args: Any, **options: Any) -> Any:
        state = () if carry is None else batched("microbatch", args, carry, "carry")
        state = tuple(i for i in state if not mutable.extract(args[i])[2])  # always carried
        args = tuple(_state_arrays(i, arg) if i in state else arg for i, arg in enumerate(args))
        where = batched("microbatch", args, argnums)
        if argnums is None:
            where = tuple(i for i in where if i not in state)
        elif overlap := set(where) & set(state):
            raise ValueError(
                f"microbatch: argument {min(overlap)} is both in argnums= and in carry=; state is "
                "not split into slices"
            )
        (args, options), modules, found = mutable.extract((args, options))
        rows = batch_rows("microbatch", args, where)
        if rows % n:
            raise ValueError(
                f"microbatch: a batch of {rows} rows cannot be divided into {n} equal slices; use "
                f"{max(d for d in range(1, n + 1) if rows % d == 0)}"
            )
        call = _Call(f, args, options, where, modules, n)
        if n == 1:
            result, updated = call(f, 0, call.batch, *call.start)
            written = call.note(updated)
            return call.result(jax.tree.map(_strong, result), written, found)
        result, written = _accumulated(call, f, n, weight, None if carry is None else state)
        return call.result(result, written, found)

    return sliced


class _Carry(NamedTuple):
    """What the scan over the slices carries.

    Attributes:
        total: the sums of the results that are averaged or summed.
        share: the sum of the weights, or None without weights.
        fixed: {position of an argument that is state: its arrays}.
        written: the arrays of the flax.nnx modules.
    """

    total: list
    share: Any
    fixed: dict[int, list]
    written: list


def _accumulated(
    call: _Call, f: Callable, n: int, weight: Callable | None, state: tuple[int, ...] | None
) -> tuple[Any, list]:
    """Evaluates f on n slices in a scan. Returns the results, and the arrays of the modules after
    it. `state` are the positions of the arguments that are state, or None to infer them."""
    stacked = [_split(jnp.asarray(a), n) for a in call.batch]
    first = call.start, jax.tree.map(lambda a: a[0], stacked)

    def evaluated(i: Any, inputs: tuple) -> tuple:
        result, updated = call(f, i, inputs[1], *inputs[0])
        return _arrays(result), call.note(updated)

    run, shapes, program, arrays = _traced(evaluated, first)
    weights = None if weight is None else _weights(call, weight, first, arrays)
    axes = frozenset() if weights is None else weights.axes
    places = call.state_of(program, shapes, state)  # {argument: indices of its new values}
    types, structure = jax.tree.flatten(shapes[0])
    is_state = {k for leaves in places.values() for k in leaves}
    summed = [k for k in range(len(types)) if k not in is_state]

    def body(carry: _Carry, slice_: tuple) -> tuple[_Carry, None]:
        i, rows = slice_
        inputs = ({**call.start[0], **carry.fixed}, carry.written), rows
        if weights is None:
            share, live = None, None
            result, written = run(i, inputs)
            add = _widened
        else:
            live = weights.of(i, inputs, lax.stop_gradient) != 0
            gate = functools.partial(_gate, live)
            part = jnp.where(live, weights.of(i, inputs, gate), 0)
            share = carry.share + part
            result, written = run(i, inputs, gate)
            add = functools.partial(_weighted, share=part, live=live)
        results = jax.tree.leaves(result)
        total = [t + add(results[k]) for t, k in zip(carry.total, summed)]
        new = (
            {position: [results[k] for k in leaves] for position, leaves in places.items()},
            written,
        )
        if live is not None:  # a slice of weight 0 does not change the state
            old = carry.fixed, carry.written
            new = jax.tree.map(lambda x, before: jnp.where(live, x, before), new, old)
        return _Carry(total, share, *new), None

    start = _Carry(
        total=[_jax.zeros(types[k], dtype=_wide(types[k]), axes=axes) for k in summed],
        share=None if weights is None else _jax.zeros(weights.type, axes=axes),
        fixed={
            position: _as_types(call.start[0][position], [types[k] for k in leaves])
            for position, leaves in places.items()
        },
        written=_as_types(call.start[1], shapes[1]),
    )
    with _jax.classic_tracing():  # has a derivative, which a scan with jax_scan3 has not
        end, _ = lax.scan(body, start, (jnp.arange(n, dtype=jnp.int32), stacked))

    share = jnp.float32(n) if weights is None else end.share
    results = [None] * len(types)
    for y, k in zip(end.total, summed):
        results[k] = _mean(y, share, types[k].dtype)
    for position, leaves in places.items():
        for x, k in zip(end.fixed[position], leaves):
            results[k] = x
    return jax.tree.unflatten(structure, results), end.written


class _Weights(NamedTuple):
    """The weights of the slices.

    Attributes:
        of: `of(i, inputs, gate)` returns the weight of slice i, see `_traced`.
        type: the shape and dtype of a weight.
        axes: the mesh axes of a shard_map over which the weights vary.
    """

    of: Callable
    type: Any
    axes: frozenset


def _weights(call: _Call, weight: Callable, first: tuple, arrays: list) -> _Weights:
    """Traces the function `weight`. `arrays` are the floating-point arrays that f reads."""
    evaluated = lambda i, inputs: _scalar(call(weight, i, inputs[1], *inputs[0])[0])
    run, shape, program, more = _traced(evaluated, first)
    axes = _jax.varies_over(shape)
    missing = set()
    for x in jax.tree.leaves((arrays, more)):
        missing |= axes - _jax.varies_over(x)
    if missing:
        raise ValueError(
            f"microbatch: inside shard_map the weights vary over the mesh axes {sorted(missing)} "
            "and some arguments do not. Use shard_map(..., check_vma=False), or cast these "
            f"arguments first: jax.lax.pcast(x, {tuple(sorted(missing))}, to='varying')"
        )
    if program.effects:
        names = sorted({type(effect).__name__ for effect in program.effects})
        raise ValueError(
            "microbatch: weight= must not have side effects, since it is evaluated twice for each "
            f"slice; got {', '.join(names)}. Move callbacks and uses of a jax.Ref into the "
            "function itself"
        )
    return _Weights(run, shape, axes)


class _Call:
    """One call of the sliced function: its arguments, separated into the batch, the other arrays
    and flax.nnx modules.

    Attributes:
        batch: the arrays that are split into slices.
        start: ({position of an argument that is not batched: its arrays}, the arrays of the
            modules).
    """

    def __init__(self, f, args, options, where, modules, slices):
        self.slices = slices
        self._args, self._options, self._modules = args, options, modules
        self.batch, self._rebuild = batch_leaves(args, where)
        self._rest = {
            i: array_leaves(arg, _is_input) for i, arg in enumerate(args) if i not in where
        }
        self.start = (
            {i: leaves for i, (leaves, _) in self._rest.items()},
            [] if modules is None else modules.arrays,
        )
        self._updated = None

    def __call__(self, f, i, batch, fixed, written):
        """Returns (the result of f for a slice, the modules after the call or None)."""
        args = self._rebuild(i, batch)
        for position, (_, rebuild) in self._rest.items():
            args[position] = rebuild(fixed[position])
        modules = self._modules
        if modules is not None:
            modules = dataclasses.replace(modules, arrays=list(written))
        (args, options), new = mutable.insert((args, self._options), modules)
        with mutable.explained():
            result = mutable.returned(f(*args, **options), new)
        return result, mutable.updates(new, modules)

    def note(self, updated) -> list:
        """Remembers what the function, other than `weight`, changes in the modules. Returns their
        arrays."""
        if updated is None:
            return []
        if updated.changed and self.slices > 1:
            _check_attributes(self._modules, updated)
        # Without the arrays, which belong to the trace of a slice.
        self._updated = dataclasses.replace(updated, arrays=[])
        return updated.arrays

    def result(self, result, written, found):
        """Returns the result of the call, and updates the caller's modules with the arrays
        `written`."""
        updated = self._updated
        if updated is not None:
            updated = dataclasses.replace(updated, arrays=list(written))
        return mutable.apply(result, found, updated)

    def state_of(self, program, shapes, declared) -> dict[int, tuple[int, ...]]:
        """Returns {position of an argument: indices of the results that are its new value}."""
        sources: list = ["index"]
        for i, leaves in self.start[0].items():
            sources += [(i, k) for k in range(len(leaves))]
        sources += ["module"] * len(self.start[1])
        sources += ["batch"] * len(self.batch)
        arguments = {
            i: rebuild(leaves)
            for i, (leaves, rebuild) in self._rest.items()
            if all(map(_is_input, jax.tree.leaves(self._args[i])))
        }
        traced = Program(program.jaxpr, sources, arguments, shapes[0])
        return inferred_state(traced) if declared is None else declared_state(traced, declared)


def _check_attributes(before, after) -> None:
    """Raises a TypeError if a slice changes an attribute of a flax.nnx module, because the program
    is traced for one slice."""
    changed = mutable.changed_attributes(
        (before.graph, before.structure), (after.graph, after.structure)
    )
    for name, old, new in changed:
        raise TypeError(
            f"microbatch: each slice changes the attribute {name!r} of a flax.nnx module, in the "
            f"first from {old!r} to {new!r}, and all slices share one program. Keep a counter in an "
            "nnx.Variable(jnp.asarray(0)), and call model.train() or model.eval() before"
        )


def _is_input(x) -> bool:
    return is_array(x) and not isinstance(x, jax.Ref)


def _state_arrays(position, state):
    """Returns an argument that is state, with its Python numbers as arrays."""
    for path, x in jax.tree.leaves_with_path(state):
        if not _is_input(x) and not isinstance(x, (int, float, complex)):
            raise TypeError(
                f"microbatch: carry= names argument {position}, which must contain only arrays and "
                f"numbers; its leaf {jax.tree_util.keystr(path)} is a {type(x).__name__}. Pass the "
                "arrays of a model alone, those of Equinox from eqx.partition(model, eqx.is_array)"
            )
    return jax.tree.map(lambda x: x if is_array(x) else jnp.asarray(x), state)


def _as_types(arrays, types) -> list:
    """Returns the initial state with the types, for example the varying mesh axes or the explicit
    sharding, of the state after a slice."""
    converted = []
    for x, t in zip(arrays, types, strict=True):
        missing = tuple(sorted(_jax.varies_over(t) - _jax.varies_over(x), key=str))
        if not isinstance(x, jax.Array):
            x = jnp.asarray(x)
        if getattr(x, "weak_type", False):
            x = lax.convert_element_type(x, t.dtype)
        if missing:
            x = lax.pcast(x, missing, to="varying")
        if jaxpr.typed(t) is not None:
            x = jax.sharding.reshard(x, t.sharding)
        converted.append(x)
    return converted


def _arrays(result):
    """Checks that the results of f are arrays, so that their mean can be computed. Returns the
    results."""
    for path, leaf in jax.tree.leaves_with_path(result):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"microbatch: the function must return arrays, whose mean is computed; result"
                f"{jax.tree_util.keystr(path)} is a {type(leaf).__name__}. Return only arrays"
            ) from None
    return result


def _traced(f, first):
    """Traces `f(i, slice)` once.

    Returns:
        (run, shapes, program, values). `run(i, slice, gate)` evaluates `f(i, slice)`, but first
        replaces each floating-point array x in `slice` and in the closure of f by `gate(x)`.
        `shapes` are the shapes of f's outputs. `program` is the closed jaxpr of f. `values` is a
        list of the floating-point arrays in `slice` and in the closure of f.
    """
    # Not jax.closure_convert, whose cache keeps f, and with it the arguments of every call.
    program, shapes = _jax.make_jaxpr(f, return_shape=True)(jnp.int32(0), first)
    structure = jax.tree.structure(shapes)

    def run(i, slice_, gate=lambda x: x):
        slice_ = jax.tree.map(lambda x: gate(x) if _differentiable(x) else x, slice_)
        closed = [gate(x) if _closed_over(x) else x for x in program.consts]
        outputs = _jax.evaluate(program, closed, jax.tree.leaves((i, slice_)))
        # A constant output may be a typed scalar instead of an array.
        return jax.tree.map(
            lambda y, s: y if isinstance(y, jax.Array) else jnp.asarray(y, s.dtype),
            jax.tree.unflatten(structure, outputs),
            shapes,
        )

    closed = filter(_closed_over, program.consts)
    return run, shapes, program, [*filter(_differentiable, jax.tree.leaves(first)), *closed]


def _closed_over(x) -> bool:
    """Whether a constant of a program may depend on a value that is differentiated."""
    return isinstance(x, jax.core.Tracer) and _differentiable(x)


def _differentiable(x) -> bool:
    # A traced jax.Ref is no Array.
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)


def _gate(live, x):
    """Returns x. If `live` is False, the derivative of the result is 0. `microbatch` applies
    `_gate` to the inputs of f. It would not be sufficient to set the cotangents of f's outputs to
    0: a division by 0 inside f, for example, would turn the cotangent 0 into NaN."""
    return jnp.where(live, x, lax.stop_gradient(x))


def _scalar(share):
    """Returns a slice's weight as an array with a dtype of at least float32. Raises an error if the
    weight is not a real scalar."""
    share = jnp.asarray(share)
    if (
        share.shape
        or jnp.issubdtype(share.dtype, jnp.complexfloating)
        or not (share.dtype == jnp.bool_ or jnp.issubdtype(share.dtype, jnp.number))
    ):
        raise ValueError(
            "microbatch: weight= must return a real scalar, the weight of a slice; got "
            f"{share.dtype}{list(share.shape)}"
        )
    return share.astype(_wide(share) if jnp.issubdtype(share.dtype, jnp.inexact) else jnp.float32)


def batched(who: str, args, argnums, name: str = "argnums") -> tuple[int, ...]:
    """Returns the positions of the batched arguments as nonnegative integers. `name` is the option
    `argnums`."""
    if argnums is None:
        return tuple(range(1, len(args)))
    where = (argnums,) if np.ndim(argnums) == 0 else tuple(argnums)
    for i in where:
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool):
            raise TypeError(
                f"{who}: {name} must be an integer or a tuple of integers; got {argnums!r}"
            )
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"{who}: {name} names argument {i}; the function was called with {len(args)}"
            )
    return tuple(i % len(args) for i in where)


def batch_rows(who: str, args, where) -> int:
    """Returns the length of the first axis, which must be the same for all leaves of the batched
    arguments."""
    rows: dict[int, str] = {}  # {number of rows: the first leaf that has so many}
    for i in where:
        for path, leaf in jax.tree.leaves_with_path(args[i]):
            name = f"argument {i}{jax.tree_util.keystr(path)}"
            if isinstance(leaf, jax.Ref):
                raise TypeError(
                    f"{who}: {name} is a jax.Ref, which has no slices; expected arrays. Pass "
                    "ref[...], or exclude this argument from argnums="
                )
            if np.ndim(leaf):
                shape = jnp.shape(leaf)
                rows.setdefault(shape[0], f"{name} {shape}")
    if len(rows) != 1:
        what = "; ".join(rows.values()) if rows else "no arrays"
        raise ValueError(
            f"{who}: the batched arguments must be arrays with the same number of rows (argnums= "
            f"says which arguments are batched); got {what}"
        )
    return next(iter(rows))


def _split(a, n):
    """Splits an array into n slices [n, rows / n, ...]. On a mesh with explicit axes, the rows of a
    slice are split over the devices as those of the batch are."""
    shape, place = (a.shape[0] // n, n, *a.shape[1:]), None
    sharding = jaxpr.typed(jax.typeof(a))
    if sharding is not None:
        over, *rest = sharding.spec.partitions
        names = over if isinstance(over, tuple) else () if over is None else (over,)
        devices = math.prod(sharding.mesh.shape[name] for name in names)
        if shape[0] % devices:
            most = max(d for d in range(1, n + 1) if not a.shape[0] % (d * devices))
            raise ValueError(
                f"microbatch: the type {jax.typeof(a)} splits the rows of the batch over {devices} "
                f"devices, and a slice of {shape[0]} rows cannot be split so; use n={most}, or "
                "replicate the batch with jax.sharding.reshard"
            )
        place = NamedSharding(sharding.mesh, P(over, None, *rest))
    return jnp.swapaxes(jnp.reshape(a, shape, out_sharding=place), 0, 1)


def batch_leaves(args, where):
    """Returns the batched arrays, and a function `rebuild` that replaces the batched arrays in the
    arguments.

    The batched arrays are the non-scalar leaves of the batched arguments. `rebuild(i, arrays)`
    returns all arguments of the call with `arrays` in place of the batched arrays, and with the
    integer i folded into the scalar random keys.
    """
    leaves, structure = jax.tree.flatten([args[i] for i in where])

    def rebuild(i, arrays):
        rest, new = iter(arrays), list(args)
        filled = [next(rest) if np.ndim(a) else _fold_key(a, i) for a in leaves]
        for at, value in zip(where, jax.tree.unflatten(structure, filled)):
            new[at] = value
        return new

    return [a for a in leaves if np.ndim(a)], rebuild


def _fold_key(scalar, i):
    """Folds the integer i into a random key. Scalars that are not keys, and leaves that are not
    arrays, are returned unchanged."""
    key = isinstance(scalar, jax.Array) and jnp.issubdtype(scalar.dtype, jax.dtypes.prng_key)
    return jax.random.fold_in(scalar, i) if key else scalar


def _wide(y):
    """Returns the dtype in which `microbatch` accumulates an output of f over the slices."""
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.float32 if jnp.finfo(y.dtype).bits < 32 else y.dtype
    if jnp.issubdtype(y.dtype, jnp.integer):
        return y.dtype
    raise ValueError(
        "microbatch: expected outputs with floating-point dtype (averaged over slices) or integer "
        f"dtype (summed); got {y.dtype}{list(y.shape)}. If it is the new value of an argument, "
        "such as a random key, pass carry= with the position of this argument"
    )


def _strong(y):
    """Returns an output of f as an array without weak type. Raises an error if `microbatch` can
    neither average nor sum outputs of this dtype."""
    y = jnp.asarray(y, jnp.result_type(y))
    _wide(y)
    return y


def _widened(y):
    return y.astype(_wide(y))


def _weighted(y, *, share, live):
    y = _widened(y)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.where(live, y * share.astype(y.dtype), jnp.zeros_like(y))
    return jnp.where(live, y, jnp.zeros_like(y))


def _mean(y, share, dtype):
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        return y
    return (y / share.astype(y.dtype)).astype(dtype)
