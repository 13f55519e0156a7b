"""pmap: runs a program on every device, each with its slice of the arguments, with collectives over
a named axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.jaxpr import Compiled, Form, check_function, has_modules, mutable, pack, static, wraps
from fnet.transforms._replicated import may_differ


def pmap(
    f: Callable,
    axis_name: Hashable = "devices",
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Callable:
    """Runs `f` on every device with the device's slice of the arguments, like `jax.pmap`, but based
    on `jit` and `shard_map`.

        @functools.partial(ft.pmap, in_axes=(None, 0), out_axes=None)
        def step(params, batch):
            grads = jax.grad(loss)(params, batch)                        # of this device's rows
            return jax.tree.map(lambda p, g: p - 0.1 * lax.pmean(g, "devices"), params, grads)

        params = step(params, ft.shard(batch))

    Modules of flax.nnx and Equinox may be arguments, with one axis or None for all arrays of each.
    With None, what the function changes in a module of flax.nnx must be equal on all devices.

    To combine the values of all devices, call a collective in `f`, such as `lax.psum` or
    `lax.all_gather`, with `axis_name`. Code without collectives needs no `pmap`: use `jax.jit` with
    sharded arguments.

    Args:
        f: a function of arrays.
        axis_name: the axis name for collectives. Default "devices".
        in_axes: the axis of each positional argument along which it is split, whose length must be
            the number of devices. An integer or None applies to all arguments; a tuple has one
            element for each, an integer, None, or a tree of these. None gives every device the
            whole argument. Negative axes count from the end of the shape, as in `jax.vmap`. Keyword
            arguments are split along axis 0. Default 0.
        out_axes: the axis along which each result is stacked: an integer, None or a tree of these,
            as in `in_axes`. Negative axes count from the end of the stacked result. None is for
            results that are equal on every device, such as those of `psum` and `all_gather`; they
            are returned once. Default 0.
        static_argnums: the positions of arguments that are hashable values instead of arrays.
            Default ().
        donate_argnums: the positions of arguments whose memory may be reused for the results.
            Default ().
        devices: the devices. Default None: all devices.

    Returns:
        A function with f's signature, and with the methods `lower` and `trace` as in `jax.jit`.
        Results stay on the devices that computed them.

    Raises:
        TypeError: in_axes or out_axes contain anything but integers and None, or a static argument
            is not hashable.
        ValueError: in a call, the length of a split axis is not the number of devices, out_axes is
            out of range, a result with out_axes=None may differ between devices, or the call is
            inside another pmap or shard_map.

    >>> pmap(lambda x: lax.psum(x, "devices"), out_axes=None, devices=jax.devices()[:1])(jnp.ones((1, 3)))
    Array([1., 1., 1.], dtype=float32)
    """
    check_function("pmap", f)
    _check_axes("in_axes", in_axes), _check_axes("out_axes", out_axes)
    static, donated = (
        _positions("static_argnums", static_argnums),
        _positions("donate_argnums", donate_argnums),
    )
    mesh = _mesh(devices, axis_name)
    of_modules = _OfModules(
        f,
        in_axes,
        out_axes,
        functools.partial(
            pmap,
            axis_name=axis_name,
            in_axes=in_axes,
            donate_argnums=donate_argnums,
            devices=devices,
        ),
    )
    mapped = _Mapped(f, axis_name, in_axes, out_axes, static, mesh)
    compiled = jax.jit(mapped.run, donate_argnums=donated)

    def call(*args, **kwargs):
        outer = jax.sharding.get_abstract_mesh().manual_axes
        if outer:
            raise ValueError(
                f"pmap: '{mapped.name}' is called inside another pmap or shard_map, which maps the "
                f"axis {outer[0]!r}. Use jax.vmap inside."
            )
        if has_modules([arg for i, arg in enumerate(args) if i not in static]):
            if kwargs or static:
                raise TypeError(
                    f"pmap: '{mapped.name}' gets modules, so all of its arguments must be "
                    "positional and none static; bind the others with functools.partial"
                )
            return of_modules(*args)
        for i in donated:
            if i < len(args) and any(_elsewhere(x, mesh) for x in jax.tree.leaves(args[i])):
                args = (*args[:i], mapped.placed(i, args), *args[i + 1 :])
        try:
            return compiled(*mapped.boxed(args), **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error):
                raise
        # Arrays that are committed to a single device, or to devices outside the mesh.
        args = tuple(arg if i in static else mapped.placed(i, args) for i, arg in enumerate(args))
        return compiled(
            *mapped.boxed(args),
            **{
                name: _put(mesh, arg, [0] * len(jax.tree.leaves(arg)), axis_name)
                for name, arg in kwargs.items()
            },
        )

    return Compiled(
        f,
        call,
        lambda *args, **kwargs: compiled.lower(*mapped.boxed(args), **kwargs),
        lambda *args, **kwargs: compiled.trace(*mapped.boxed(args), **kwargs),
    )


class _OfModules:
    """pmap of a function with modules among its arguments: maps a function of their arrays, which
    also returns the arrays of flax.nnx that the function changes."""

    def __init__(self, f: Callable, in_axes: Any, out_axes: Any, mapping: Callable):
        self._f, self._in_axes, self._out_axes, self._mapping = f, in_axes, out_axes, mapping
        self._programs: dict = {}

    def __call__(self, *args: Any) -> Any:
        arrays, form = pack(args)
        if form not in self._programs:
            self._programs[form] = self._program(form, len(args))
        mapped, returned = self._programs[form]
        result, changed = mapped(*arrays)
        leaves, structure = jax.tree.flatten(arrays)
        if jax.tree.leaves(changed):
            kept = structure.flatten_up_to(changed)
            new = [old if x is None else x for x, old in zip(kept, leaves)]
            form.update(args, jax.tree.unflatten(structure, new), arrays)
        return result if returned["form"] is None else returned["form"].unpack(result)

    def _program(self, form: Form, count: int) -> tuple[Callable, dict]:
        returned: dict = {}

        @wraps(self._f, signature=False)
        def of_arrays(*arrays: Any) -> Any:
            args = form.unpack(arrays)
            with mutable.explained():
                result, returned["form"] = pack(self._f(*args))
            after, new = pack(args)
            if new != form:
                raise TypeError(
                    f"pmap: of a module, '{of_arrays.__name__}' may change the arrays alone, but "
                    f"{'; '.join(form.differences(new))}. Keep a counter in an "
                    "nnx.Variable(jnp.asarray(0))"
                )
            return result, jax.tree.map(lambda x, old: None if x is old else x, after, arrays)

        axes = self._in_axes
        own = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,) * count
        return self._mapping(of_arrays, out_axes=(self._out_axes, own)), returned


def shard(tree: Any, devices: Sequence[jax.Device] | None = None) -> Any:
    """Splits the rows of a batch over devices: [rows, ...] becomes [devices, rows / devices, ...].

    Args:
        tree: a tree of arrays.
        devices: the devices. Default: all devices.

    Raises:
        ValueError: the number of rows of a leaf is not a multiple of the number of devices.

    >>> shard({"x": np.zeros((6, 2))}, jax.devices()[:1])["x"].shape
    (1, 6, 2)
    """
    mesh = _mesh(devices, "devices")

    def split(path, x):
        if not np.ndim(x) or len(x) % mesh.size:
            raise ValueError(
                f"shard: {_named(path)}has shape {np.shape(x)}; its first axis must be a multiple "
                f"of the {mesh.size} devices"
            )
        return _put(mesh, x.reshape(mesh.size, -1, *x.shape[1:]), [0], "devices")

    return jax.tree.map_with_path(split, tree)


def replicate(tree: Any, devices: Sequence[jax.Device] | None = None) -> Any:
    """Copies a tree to each device: a leaf [...] becomes [devices, ...]. You may go on using or
    donating the original.

    >>> replicate({"w": np.zeros(3)}, jax.devices()[:1])["w"].shape
    (1, 3)
    """
    mesh = _mesh(devices, "devices")
    where = NamedSharding(mesh, P("devices"))
    copies = lambda tree: jax.tree.map(
        lambda x: jnp.broadcast_to(jnp.asarray(x)[None], (mesh.size, *jnp.shape(x))), tree
    )
    whole = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), tree)
    return jax.jit(copies, out_shardings=where)(whole)


def unreplicate(tree: Any) -> Any:
    """Returns the first device's slice of a result of `replicate` or `pmap`: [devices, ...] becomes
    [...].

    Raises:
        ValueError: a leaf is a scalar, so it has no first axis with one position for each device.

    >>> devices = jax.devices()[:1]
    >>> ft.unreplicate(ft.replicate({"w": jnp.ones(3)}, devices))["w"].shape
    (3,)
    """

    def first(path, x):
        if not np.ndim(x):
            raise ValueError(
                f"unreplicate: {_named(path)}is a scalar; expected a leading axis of devices"
            )
        shards = getattr(x, "addressable_shards", ())
        if len(shards) > 1 and shards[0].data.shape[0] == 1:
            return shards[0].data[0]  # without a gather, which x[0] would need
        return x[0]

    return jax.tree.map_with_path(first, tree)


class _Mapped:
    def __init__(self, f, axis, in_axes, out_axes, static, mesh):
        self.f, self.axis, self.static, self.mesh = f, axis, static, mesh
        self.in_axes, self.out_axes = in_axes, out_axes
        self.name = getattr(f, "__name__", type(f).__name__)

    def boxed(self, args) -> tuple:
        """Returns the arguments with each static argument in a `Static`: `jax.jit` compares its own
        static arguments with `==`, for which (1,) and (True,), or 0.0 and -0.0, are one program."""
        return tuple(
            static(arg, f"pmap: argument {i}") if i in self.static else arg
            for i, arg in enumerate(args)
        )

    def run(self, *args, **kwargs):
        """Runs f under shard_map. `pmap` jits this method, with `boxed` arguments. Results are
        stacked along a new first axis, which is then moved to the position in out_axes."""
        args = tuple(arg.value if i in self.static else arg for i, arg in enumerate(args))
        axes = [
            axis
            for i, arg in enumerate(args)
            if i not in self.static
            for axis in self.axes(i, args)
        ]
        axes += [0] * len(jax.tree.leaves(kwargs))
        given = {i: arg for i, arg in enumerate(args) if i not in self.static}, kwargs
        paths, structure = jax.tree.flatten_with_path(given)
        axes = [self.checked(path, jnp.shape(x), axis) for (path, x), axis in zip(paths, axes)]
        leaves = [x for _, x in paths]
        specs = [P() if axis is None else P(*[None] * axis, self.axis) for axis in axes]

        def body(*leaves):
            leaves = [
                x if axis is None else lax.squeeze(x, (axis,)) for x, axis in zip(leaves, axes)
            ]
            rest, kwargs = jax.tree.unflatten(structure, leaves)
            return self.f(
                *({**dict(enumerate(args)), **rest}[i] for i in range(len(args))), **kwargs
            )

        def stacked(*leaves):
            results = body(*leaves)
            self.check_out_axes(results)
            return self.over(
                lambda y, axis: y if axis is None else lax.expand_dims(jnp.asarray(y), (0,)),
                results,
            )

        out_specs = jax.tree.map(
            lambda axis: P() if axis is None else P(self.axis),
            self.out_axes,
            is_leaf=lambda x: x is None,
        )
        # As in jax.pmap, check_vma is off: otherwise the gradient of a replicated argument would be
        # a sum over devices.
        spread = lambda f, out_specs: jax.shard_map(
            f, mesh=self.mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
        )(*leaves)
        if any(
            axis is None for axis in jax.tree.leaves(self.out_axes, is_leaf=lambda x: x is None)
        ):
            jax.eval_shape(lambda: spread(lambda *leaves: self.check_same(body, leaves, axes), ()))
        results = spread(stacked, out_specs)
        return self.over(lambda y, axis: jnp.moveaxis(y, 0, axis) if axis else y, results)

    def axes(self, i, args) -> list:
        """Returns the mapped axis of each leaf of positional argument i."""
        axes = self.in_axes
        if isinstance(axes, (tuple, list)):
            if len(axes) != len(args):
                raise ValueError(
                    f"pmap: '{self.name}' has {len(args)} positional arguments, but "
                    f"in_axes={axes!r} has {len(axes)} entries"
                )
            axes = axes[i]
        return _broadcast(
            axes, args[i], f"pmap: in_axes={self.in_axes!r} is not a tree prefix of argument {i}"
        )

    def over(self, g, results):
        """Applies `g(leaf, axis)` to every leaf of the results of `f`. `axis` is the element of
        `out_axes` for the leaf."""
        leaves, structure = jax.tree.flatten(results)
        return jax.tree.unflatten(
            structure, [g(y, axis) for y, axis in zip(leaves, self.out_axes_of(results))]
        )

    def out_axes_of(self, results) -> list:
        message = f"pmap: out_axes={self.out_axes!r} is not a tree prefix of the results"
        return _broadcast(self.out_axes, results, message)

    def check_out_axes(self, results):
        for (path, y), axis in zip(jax.tree.leaves_with_path(results), self.out_axes_of(results)):
            if axis is not None and not -jnp.ndim(y) <= axis + 1 <= jnp.ndim(y) + 1:
                raise ValueError(
                    f"pmap: result {_named(path)}of '{self.name}' has shape {jnp.shape(y)} on each "
                    f"device and {jnp.ndim(y) + 1} axes when stacked; out_axes={axis} is out of "
                    "range"
                )

    def checked(self, path, shape, axis):
        if axis is None:
            return None
        where = axis if axis >= 0 else len(shape) + axis
        if not 0 <= where < len(shape) or shape[where] != self.mesh.size:
            name = f"{path[1].key}{jax.tree_util.keystr(path[2:])}"
            raise ValueError(
                f"pmap: {'keyword ' * path[0].idx}argument {name} has shape {tuple(shape)}; its "
                f"axis {axis} needs one slice for each of {self.mesh.size} devices. ft.shard "
                "splits the rows of a batch in this way; with in_axes=None every device gets the "
                "complete argument"
            )
        return where

    def check_same(self, body, leaves, axes):
        """Raises an error if a result with out_axes=None may differ between devices. `check_same`
        must be called inside shard_map."""
        closed, results = _jax.make_jaxpr(body, return_shape=True)(*leaves)
        differ = may_differ(
            closed.jaxpr, [axis is not None for axis in axes], self.axis, self.mesh.size
        )
        out_axes = self.out_axes_of(results)
        for (path, y), axis, differs in zip(jax.tree.leaves_with_path(results), out_axes, differ):
            if axis is None and differs:
                raise ValueError(
                    f"pmap: result {_named(path)}of shape {y.shape} has out_axes=None and may "
                    "differ between devices: combine it first, e.g. with lax.pmean(..., "
                    f"{self.axis!r}), or use out_axes=0 to stack it"
                )
        return ()

    def placed(self, i, args):
        return _put(self.mesh, args[i], self.axes(i, args), self.axis)


def _check_axes(name, axes):
    for axis in jax.tree.leaves(axes):
        if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
            raise TypeError(
                f"pmap: {name} must be integers, None, or trees of them; got {axis!r} in "
                f"{name}={axes!r}"
            )


def _positions(name, positions) -> tuple[int, ...]:
    numbers = (
        tuple(positions)
        if isinstance(positions, (tuple, list, range, set, frozenset))
        else (positions,)
    )
    if not all(isinstance(i, (int, np.integer)) and i >= 0 for i in numbers):
        raise ValueError(
            f"pmap: {name} must be positions of arguments, counted from 0; got {positions!r}"
        )
    return numbers


def _broadcast(prefix, tree, message) -> list:
    """Returns a list with the mapped axis (or None) of each leaf of `tree`. `prefix` is a tree of
    axes, whose structure is a prefix of that of `tree`."""
    count = len(jax.tree.leaves(tree))
    if prefix is None or isinstance(prefix, int):
        return [prefix] * count
    leaf = lambda x: x is None
    try:
        boxed = jax.tree.map(lambda axis: SimpleNamespace(axis=axis), prefix, is_leaf=leaf)
        return [box.axis for box in jax.tree.leaves(jax.tree.broadcast(boxed, tree))]
    except ValueError as error:
        raise ValueError(f"{message}, which has {jax.tree.structure(tree)}") from error


def _mesh(devices, axis) -> Mesh:
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError("pmap needs at least one device; got devices=[]")
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def _elsewhere(x, mesh) -> bool:
    return isinstance(x, jax.Array) and getattr(getattr(x, "sharding", None), "mesh", None) != mesh


def _put(mesh, tree, axes, name):
    """Copies the leaves of a tree to the mesh's devices. The results are new arrays, so that they
    can be donated."""
    leaves, structure = jax.tree.flatten(tree)
    moved = []
    for x, axis in zip(leaves, axes):
        spec = (
            P() if axis is None else P(*[None] * (axis if axis >= 0 else np.ndim(x) + axis), name)
        )
        if isinstance(x, jax.Array) and axis is None:
            x = jnp.copy(x)  # device_put shares the memory of x on its own device
        moved.append(
            x if isinstance(x, jax.core.Tracer) else jax.device_put(x, NamedSharding(mesh, spec))
        )
    return jax.tree.unflatten(structure, moved)


def _named(path) -> str:
    return f"{jax.tree_util.keystr(path)} " if path else ""
