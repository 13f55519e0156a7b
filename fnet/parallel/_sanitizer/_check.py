"""check: runs each equation that XLA divides as XLA divides it, and on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.jaxpr import Traced, check_function, is_array
from fnet.parallel._plan import Plan
from fnet.parallel._sanitizer import _cases, _processes, _program, _sweep
from fnet.parallel._sanitizer._results import Checked


def check(
    step: Callable,
    *args: Any,
    mesh: Mesh | AbstractMesh | dict[str, int] | None = None,
    shardings: Any = None,
    seconds: float = 120.0,
    gib: float = 32.0,
) -> Checked:
    """Looks for equations of a program that XLA divides wrongly over several devices.

    For a few operations and shardings, XLA's results on several devices differ from those on one,
    without an error. `check` compiles the step, and reads from it how XLA divides each equation.
    Then it runs each such equation alone, as XLA divides it and on one device, and its gradient,
    with cotangents that lie as in the step, replicated, and where XLA puts them. The values are
    small numbers, zeros, ties, subnormal and large numbers; the arrays are smaller than yours, and
    the devices are emulated CPUs in a child process. It may abort or hang: that is a result, too.
    Your step is traced and compiled, but not run, and nothing is compared that is only rounding.

        found = parallel.check(step, state, batch, mesh=mesh, shardings=(P(), P("data")))
        print(found)
        found.check()                       # raises ValueError if something is wrong
        print(found.findings[0].script())   # a script of plain JAX that shows it

    Args:
        step: any JAX function, with its gradient if it computes one. Also the result of `jax.jit`
            or of `plan.jit`.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        mesh: the mesh, also as a dict {axis: length}: the devices need not exist. Default None: that
            of the shardings. Its axes are of the type Auto.
        shardings: those of the arguments, as for `in_shardings` of `jax.jit`: a `PartitionSpec`, a
            `NamedSharding` or None (XLA chooses) for each, or a tree of them; or the result of
            `parallel.plan`. Default None: where the arguments lie.
        seconds: how long a child process may take for one compilation. Default 120.
        gib: how much address space it may take, in GiB. Default 32.

    Returns:
        What was run, and a `Finding` for each equation that differs.

    Raises:
        ValueError: no sharding splits an argument over a mesh, or a sharding does not divide it.
        TypeError: the step is not a function, or cannot be traced with these arguments.

    >>> from jax.sharding import PartitionSpec as P
    >>> step = lambda x: (jnp.cumsum(x, 0) ** 2).sum()
    >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    >>> found = parallel.check(step, x, mesh={"data": 4}, shardings=P("data"))
    >>> found.ok, found.divided
    (True, 3)
    """
    check_function("parallel.check", step)
    limits = _processes.Limits(seconds, gib)
    traced = Traced(step, args, {})
    places, mesh = _places(traced.arrays, args, mesh, shardings)
    axes = tuple(mesh.shape.items())
    everything, recorded = _program.recording(traced.closed)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.closed.in_avals]
    whole = _cases.exported(everything, shapes, gradient=False, in_shardings=places)
    specs = [
        None if place is None else _cases.spec_of(place.spec, len(x.shape))
        for x, place in zip(shapes, places)
    ]
    try:
        chosen = _processes.shardings(whole, specs, axes, limits)
    except _processes.Ended as ended:
        return _sweep.of_step(everything, shapes, whole, specs, axes, str(ended))
    return _sweep.Sweep(_program.equations(*recorded(), chosen), axes, limits).result()


def _is_place(x: Any) -> bool:
    return x is None or isinstance(x, (P, jax.sharding.Sharding))


def _asked(arrays: Sequence[Any], args: tuple, shardings: Any) -> list:
    """Returns what is asked of the place of each array: a PartitionSpec, a sharding, or None."""
    if isinstance(shardings, Plan):
        shardings = shardings.state, shardings.batch
    if shardings is None:
        return [getattr(x, "sharding", None) for x in arrays]
    if len(args) == 1 and not (isinstance(shardings, tuple) and len(shardings) == 1):
        shardings = (shardings,)
    try:
        each = jax.tree.broadcast(shardings, args, is_leaf=_is_place)
    except ValueError as error:
        raise ValueError(
            "parallel.check: shardings must have the structure of the arguments, or of a prefix of "
            f"it, as in_shardings of jax.jit: {error}"
        ) from error
    places = jax.tree.leaves(each, is_leaf=_is_place)
    asked = [place for x, place in zip(jax.tree.leaves(args), places) if is_array(x)]
    if len(asked) != len(arrays):
        raise ValueError(
            "parallel.check: some arguments are modules, which have no tree of shardings; place "
            "their arrays with jax.device_put, and leave out shardings="
        )
    return asked


def _mesh_of(asked: Sequence[Any], mesh: Any, shardings: Any) -> Mesh | AbstractMesh:
    if isinstance(mesh, dict):
        kinds = (AxisType.Auto,) * len(mesh)
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=kinds)
    if mesh is None and isinstance(shardings, Plan):
        mesh = shardings.mesh
    meshes = [mesh] if mesh is not None else [getattr(place, "mesh", None) for place in asked]
    mesh = next((each for each in meshes if each is not None), None)
    if mesh is None:
        raise ValueError(
            "parallel.check: no argument lies on a mesh; pass mesh= and shardings=, such as "
            "mesh={'data': 4}, shardings=(P(), P('data'))"
        )
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            "parallel.check: expected a mesh whose axes have the type Auto, over which XLA divides "
            f"equations; got {mesh}. Pass one with axis_types=(AxisType.Auto, ...)"
        )
    return mesh


def _places(
    arrays: Sequence[Any], args: tuple, mesh: Any, shardings: Any
) -> tuple[tuple[NamedSharding | None, ...], Mesh | AbstractMesh]:
    """Returns the sharding of each array, and the mesh."""
    asked = _asked(arrays, args, shardings)
    mesh = _mesh_of(asked, mesh, shardings)
    places = []
    for i, (x, place) in enumerate(zip(arrays, asked)):
        spec = place if isinstance(place, P) else getattr(place, "spec", None)
        if spec is None:
            places.append(None)
            continue
        place = NamedSharding(mesh, spec)
        if not _cases.fits(
            _cases.spec_of(spec, jnp.ndim(x)), jnp.shape(x), tuple(mesh.shape.items())
        ):
            raise ValueError(
                f"parallel.check: the sharding {spec} does not divide array {i} of the arguments, "
                f"of shape {jnp.shape(x)}, on the mesh {dict(mesh.shape)}"
            )
        places.append(place)
    if not any(any(place.spec) for place in places if place is not None):
        raise ValueError(
            "parallel.check: no argument is split over the mesh, so XLA divides nothing; pass "
            "shardings=, such as (P(), P('data'))"
        )
    return tuple(places), mesh
