"""invariant: the same bits for every batch size, and on every number of devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax, jaxpr
from fnet.jaxpr import Structure, Traced, check_function, is_array, mutable, wraps
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._bucket import closed, settings
from fnet.transforms._invariant._explained import Invariance, changes, price
from fnet.transforms._invariant._layout import NAME, Rows, is_open
from fnet.transforms._invariant._program import Program
from fnet.transforms._invariant._run import Run, spec
from fnet.transforms._microbatch import batch_rows, batched


def invariant(
    f: Callable,
    *,
    argnums: int | tuple[int, ...] | None = None,
    mesh: Mesh | None = None,
) -> Callable:
    """Gives the rows of a batch the same bits whatever the batch size and the number of devices.

        predict = ft.invariant(model)                           # predict(params, x)[i] depends on x[i] alone
        step = ft.invariant(step, argnums=(2, 3), mesh=mesh)    # step(params, state, x, y)

    Compilers choose the order of a sum by the shapes, so that the same example gets other last bits
    in a larger batch, and a training step others on more devices. The function is traced for any
    number of rows. What an example needs is then compiled for one row and done for one row after
    another; sums over rows, such as those of gradients and of batch statistics, are added in the
    order of a tree, which depends on nothing but the numbers of the rows. Hence

    - results for rows have the same bits in every batch;
    - a step has the same bits on 1, 2, 4, 8 or any number of devices, and rows of zeros at the end
      of the batch, such as those of weight 0, change nothing;
    - numbers are drawn for each row, with its number folded into the key. They are not those that f
      itself draws.

    What needs all rows at once, such as the similarities of all pairs, is the same on any number of
    devices, but may depend on the batch size. `ft.explain` lists it, all that was changed, and the
    measured price. Another processor or another version of JAX may round in another way.

    Args:
        f: any function of arrays, such as a model or a training step. For gradients, transform the
            gradient function: `ft.invariant(ft.value_and_grad(loss))`.
        argnums: the positions of the arguments that are batched along the first axis of their
            leaves, as in `microbatch`. Default: all but the first.
        mesh: the devices over which the rows are divided, in equal parts. All other arguments are
            on each of them. Default: one device.

    Returns:
        A function with f's signature and results, which is compiled when it is called.

    Raises:
        ValueError: the batched arguments have different numbers of rows or none; the devices do not
            divide them; the function cannot be traced for any number of rows, or decides by it.

    >>> double = ft.invariant(lambda w, x: x @ w)
    >>> w, x = jnp.ones((3, 2)), jnp.arange(12.0).reshape(4, 3)
    >>> bool((double(w, x)[:1] == double(w, x[:1])).all())
    True
    """
    check_function("invariant", f)
    transformed = _Invariant(f, argnums, mesh)

    @wraps(f)
    def same(*args: Any, **kwargs: Any) -> Any:
        return transformed(args, kwargs)

    same.explained = transformed.explained
    return same


def is_invariant(f: Any) -> bool:
    """Whether a function is a result of `invariant`."""
    return isinstance(getattr(getattr(f, "explained", None), "__self__", None), _Invariant)


class _Call:
    """A call of an invariant function.

    Attributes:
        rows: the number of rows.
        arrays: the arrays of the arguments.
        states: for each of them its rows, or None.
        found: the flax.nnx modules among the arguments.
    """

    def __init__(self, f: Callable, argnums: Any, args: tuple, kwargs: dict):
        self.f, own = mutable.opened(f)
        where = batched("invariant", args, argnums)
        given, self._modules, self.found = mutable.extract(((*own, *args), kwargs))
        self.rows = batch_rows("invariant", given[0][len(own) :], where)
        if not self.rows:
            raise ValueError("invariant: the batch has no rows")
        self._leaves, self._structure = jax.tree.flatten((given, self._modules))
        in_batch: list[bool] = []
        for i, arg in enumerate(given[0]):
            in_batch += [i - len(own) in where] * len(jax.tree.leaves(arg))
        in_batch += [False] * (len(self._leaves) - len(in_batch))
        self._in_batch = [mine and np.ndim(x) > 0 for mine, x in zip(in_batch, self._leaves)]
        pairs = [(x, mine) for x, mine in zip(self._leaves, self._in_batch) if is_array(x)]
        self.arrays = [x for x, _ in pairs]
        self.states = [Rows(0, 1, 1) if mine else None for _, mine in pairs]

    @property
    def key(self) -> tuple:
        types = tuple(
            (jnp.shape(x)[mine:], str(x.dtype), getattr(x, "weak_type", False), mine)
            for x, mine in zip(self._leaves, self._in_batch)
            if is_array(x)
        )
        return Structure(jax.tree.unflatten(self._structure, self._leaves)), types, *settings()

    def exact(self) -> Any:
        """Returns the jaxpr of the function itself for the arguments of this call."""
        return self._trace(self._leaves).closed

    def traced(self) -> Traced:
        """The function, traced for any number of rows."""
        (symbol,) = jax.export.symbolic_shape(NAME)
        leaves = [
            _type(x, (symbol, *x.shape[1:]) if mine else x.shape) if is_array(x) else x
            for x, mine in zip(self._leaves, self._in_batch)
        ]
        return self._trace(leaves)

    def _trace(self, leaves: list) -> Traced:
        tree, modules = jax.tree.unflatten(self._structure, leaves)
        (args, kwargs), _ = mutable.insert(tree, modules)
        return Traced(self.f, args, kwargs)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A function that was traced for any number of rows.

    Attributes:
        consts: the arrays that it closes over.
        unequal: texts of sizes that its trace assumed not to be 0.
        compiled: {number of rows: the compiled evaluation}.
    """

    traced: Traced
    consts: list
    program: Program
    unequal: list[str]
    compiled: dict[int, Callable] = dataclasses.field(default_factory=dict)


class _Invariant:
    def __init__(self, f: Callable, argnums: Any, mesh: Mesh | None):
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(f"invariant: mesh= must be a jax.sharding.Mesh, got {mesh!r}")
        self._f, self._argnums = f, argnums
        self._mesh = mesh and jaxpr.misdivided.with_automatic_axes(mesh)
        self._entries: dict[tuple, _Entry] = {}

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        call = _Call(self._f, self._argnums, args, kwargs)
        if is_open(call.rows):  # inside of another invariant function, which sees the same program
            return self._f(*args, **kwargs)
        entry = self._entry(call)
        result = entry.traced.result(self._run(entry, call), call.found)
        return closed(result, {NAME: call.rows})

    def explained(self, *args: Any, **kwargs: Any) -> Invariance:
        call = _Call(self._f, self._argnums, args, kwargs)
        entry = self._entry(call)
        cost = None
        if all(isinstance(x, (jax.Array, np.ndarray)) for x in call.arrays):
            plain = call.exact()
            run = jax.jit(lambda arrays: _jax.evaluate(plain, plain.consts, arrays))
            cost = price(lambda: self._run(entry, call), lambda: run(call.arrays))
        times = sum(bool(rows.writes) for _, rows in entry.program.phases)
        return Invariance(call.rows, times, tuple(changes(entry.program)), cost)

    def _run(self, entry: _Entry, call: _Call) -> list:
        if call.rows not in entry.compiled:
            entry.compiled[call.rows] = _not_differentiable(jax.jit(self._evaluation(entry, call)))
        consts, arrays = (
            [_placed(x, self._mesh) for x in xs] for xs in (entry.consts, call.arrays)
        )
        with _without_explicit_axes(arrays, self._mesh):
            return entry.compiled[call.rows](np.bool_(True), consts, arrays)

    def _evaluation(self, entry: _Entry, call: _Call) -> Callable:
        mesh = self._mesh
        names = () if mesh is None else tuple(mesh.axis_names)
        devices = 1 if mesh is None else math.prod(mesh.shape.values())
        if call.rows % devices:
            raise ValueError(
                f"invariant: {call.rows} rows cannot be divided over the {devices} devices of the "
                f"mesh {dict(mesh.shape)}; use a multiple of {devices}"
            )

        def evaluate(go: Any, consts: list, arrays: list) -> list:
            go = lax.optimization_barrier(go)
            return Run(entry.program, call.rows, devices, names, go)(consts, arrays)

        if mesh is None:
            return evaluate
        rows = [P() if at is None else P(names) for at in call.states]
        return jax.shard_map(
            evaluate,
            mesh=mesh,
            in_specs=(P(), P(), rows),
            out_specs=[spec(entry.program, v, names) for v in entry.program.outputs],
            check_vma=False,
        )

    def _entry(self, call: _Call) -> _Entry:
        entry = self._entries.get(call.key) or _traced(call)
        if not any(isinstance(x, jax.core.Tracer) for x in entry.consts):
            self._entries[call.key] = entry
        for text in entry.unequal:
            if _sizes.value(text, {NAME: call.rows}) == 0:
                raise ValueError(
                    f"invariant: the function does something else for {call.rows} rows than for "
                    f"other numbers: it asks whether {text} is 0 ({NAME} is the number of rows). "
                    "Decide before the call, not inside the function"
                )
        return entry


def _traced(call: _Call) -> _Entry:
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            with _jax.symbolic_trace(broadcasts=False) as unequal:
                traced = call.traced()
            with _jax.symbolic_trace(broadcasts=False) as more:
                flat = jaxpr.flatten(traced.closed, kept=("while",))
    except Exception as error:
        call.exact()  # raises the error that the function itself has
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = (lines or [type(error).__name__])[0].removesuffix(".")
        hint = "It works for these rows alone"
        if "integer" in first or "constant" in first:
            hint = (
                "Use operations that need no Python number for it, such as lax.scan or lax.map in "
                "place of range(x.shape[0])"
            )
        raise ValueError(
            f"invariant: the function cannot be traced for any number of rows: {first}. {hint}"
        ) from error
    kept = [True] * len(flat.jaxpr.invars)
    needed, _ = _jax.without_unused(flat.jaxpr, kept)
    program = Program(_jax.ClosedJaxpr(needed, flat.consts), call.states)
    consts = list(program.closed.consts)
    return _Entry(traced, consts, program, [str(each) for each in (*unequal, *more)])


def _type(x: Any, shape: tuple) -> Any:
    """Returns the type of an array, without the devices over which it is divided."""
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    dtype = x.dtype if keys else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=getattr(x, "weak_type", False))


def _placed(x: Any, mesh: Mesh | None) -> Any:
    """Returns an array on the devices of the mesh. Without one, XLA would divide the sums along an
    axis that is divided over devices, in another order."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    if mesh is None:
        divided = isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated
        return jax.device_put(x, NamedSharding(x.sharding.mesh, P())) if divided else x
    there = getattr(x.sharding, "mesh", mesh)
    if not x.committed or (x.sharding.device_set == set(mesh.devices.flat) and there == mesh):
        return x
    return jax.device_put(x, NamedSharding(mesh, P()))


def _without_explicit_axes(arrays: list, mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Returns a context without the mesh of `jax.set_mesh`, if that has explicit axes."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return contextlib.nullcontext()
    if mesh is None or any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ValueError(
            "invariant: the mesh of jax.set_mesh has explicit axes, for which JAX decides itself how "
            "each operation is divided. Pass mesh=, and call the function outside of jax.jit"
        )
    return jax.set_mesh(mesh)


def _not_differentiable(run: Callable) -> Callable:
    """The order of a gradient's sums would not be that of a tree."""
    wrapped = jax.custom_jvp(run)

    def derivative(primals: Any, tangents: Any) -> Any:
        raise ValueError(
            "invariant: the transformed function cannot be differentiated; transform the gradient "
            "function instead, as in ft.invariant(ft.value_and_grad(loss))"
        )

    wrapped.defjvp(derivative)
    return wrapped
