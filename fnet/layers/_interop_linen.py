"""Conversion between flax.linen modules and layers. Imports Flax; `_interop` imports this module on
first use."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import core, errors, linen

from fnet import _jax
from fnet.jaxpr import array_leaves, is_array
from fnet.layers import _spec
from fnet.layers._core import Layer
from fnet.layers._scope import Scope, describe, quote

_TRAINING = ("train", "training", "is_training")
_NOT_TRAINING = ("deterministic", "use_running_average", "inference")


def from_linen(module: Any, train: Any) -> Any:
    if not isinstance(module, linen.Module):
        what = (
            f"the class {module.__name__}: call it"
            if isinstance(module, type)
            else describe(module)
        )
        raise TypeError(
            f"from_linen: expected a flax.linen module, e.g. linen.Dense(10); got {what}"
        )
    if module.scope is not None:
        raise ValueError(
            "from_linen: expected a module that is not bound to variables; got a bound "
            f"{type(module).__name__}; pass module.unbind()[0], and its variables as params and "
            "state (inside another linen module, construct it with parent=None)"
        )
    return LinenLayer(_hashable(module), train=train)


def linen_variables(variables: Any) -> tuple:
    variables = dict(core.unfreeze(core.meta.unbox(variables)))
    return variables.pop("params", {}), variables


class LinenLayer(Layer):
    """The layer that `from_linen` returns."""

    module: linen.Module
    _: dataclasses.KW_ONLY
    train: str | None = None

    def __repr__(self) -> str:
        return f"from_linen({type(self.module).__name__})"

    def forward(self, scope: Scope, *inputs: Any, **options: Any) -> Any:
        _, params, state, key = scope.pure(self, *inputs, **options)
        rngs = {}
        if key is not None:
            key = scope.key()
            rngs = {"dropout": key, "params": _spec.fold(key, "params")}
        try:
            y, after = self.module.apply(
                {"params": params, **(state or {})},
                *inputs,
                rngs=rngs,
                mutable=list(state or ()),
                **self._mode(inputs, options, scope.train),
                **options,
            )
        except errors.FlaxError as error:
            hold(
                scope,
                self._record(inputs, options, scope.train, scope._place.path),
                params,
                state,
                repr(self),
            )
            if isinstance(error, errors.InvalidRngError) and key is None:
                scope.key()
            raise
        for name, before in (state or {}).items():
            new = core.unfreeze(core.meta.unbox(after.get(name, before)))
            moves = name != "batch_stats" or scope.train
            if moves and any(
                a is not b for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(before))
            ):
                scope.update(name, new)
        return y

    def _mode(self, inputs: tuple, options: dict, train: Any) -> Any:
        return mode(self.module, self.train, inputs, options, train)

    def _record(self, inputs: tuple, options: dict, train: Any, path: tuple = ()) -> dict:
        # The specs come from Flax's init, which creates all arrays at once. `scope.pure` calls this
        # method.
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf,
            (inputs, options),
        )
        arrays, rebuild = array_leaves(shapes)

        def made(key: Any, leaves: Any) -> tuple:
            inputs, options = rebuild(leaves)
            made = self.module.init(
                {"params": key}, *inputs, **self._mode(inputs, options, train), **options
            )
            params, state = dict(core.unfreeze(made)), {}
            for name in [name for name in params if name != "params"]:
                collection = params.pop(name)
                if _all_dicts(collection):  # sown values are in tuples
                    state[name] = collection
            return params.get("params", {}), state

        @functools.cache
        def variables() -> Any:
            self._check_independent(made, arrays)
            return jax.jit(
                lambda key: made(key, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in arrays])
            )

        params, state = jax.eval_shape(made, jax.random.key(0), arrays)
        record = record_of(params, state, lambda key: core.meta.unbox(variables()(key)), path)
        return {**record, "cache": {}}

    def _check_independent(self, made: Any, arrays: Any) -> Any:
        """Checks that no array that the module creates depends on the values of its inputs, which
        are not known here: layers are initialized from shapes."""
        closed, tree = _jax.make_jaxpr(made, return_shape=True)(jax.random.key(0), arrays)
        count = len(closed.jaxpr.outvars)
        depend = lambda wanted: any(_jax.used_inputs(closed.jaxpr, wanted)[1:])
        if not depend([True] * count):
            return
        paths = [path for path, _ in jax.tree.leaves_with_path(core.meta.unbox(tree))]
        path = next(path for i, path in enumerate(paths) if depend([i == j for j in range(count)]))
        name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        raise ValueError(
            f"{self!r}: the initial value of {name!r} depends on the values of the inputs, and a "
            "layer is initialized from their shapes. Initialize the module itself, and convert "
            "what it returns: params, state = nn.linen_variables(module.init(key, x))"
        )


class FnetLayer(linen.Module):
    """The module that `to_linen` returns."""

    layer: Layer

    @linen.compact
    def __call__(self, *inputs: Any, train: bool = False, **options: Any) -> Any:
        params, state = linen_variables(self.variables)
        state = state.get("batch_stats", {})
        initializing = self.is_initializing()
        if initializing and not params and not state:
            params, state = self.layer.init(
                self.make_rng("params"), *inputs, train=train, **options
            )
            for name, value in params.items():
                self.param(name, lambda key, value=value: value)
            for name, value in state.items():
                self.variable("batch_stats", name, lambda value=value: value)
        drawing = self.has_rng("dropout") or self.has_rng("params")
        y, after = self.layer(
            params,
            *inputs,
            state=state,
            key=self.make_rng("dropout") if drawing else None,
            train=train,
            **options,
        )
        if train and not initializing:
            for name, value in after.items():
                self.put_variable("batch_stats", name, value)
        return y


def mode(module: Any, how: Any, inputs: tuple, options: dict, train: Any) -> dict[str, bool]:
    """Returns the keyword arguments that select training or inference mode in a call of a Flax
    module."""
    if how is not None:
        name = how.removeprefix("not ")
        return {name: train == (name == how)} if name and name not in options else {}
    signature = inspect.signature(module.__call__)
    try:
        given = signature.bind_partial(*inputs, **options).arguments
    except TypeError:
        return {}  # the call itself raises an error
    return {
        name: train == (name in _TRAINING)
        for name in (*_TRAINING, *_NOT_TRAINING)
        if name in signature.parameters
        and name not in given
        and getattr(module, name, None) is None
    }


def record_of(
    params: Any, state: Any, whole: Callable[[Any], tuple], path: tuple
) -> dict[str, dict]:
    """Returns {"params": spec tree, "state": spec tree} for arrays of the given shapes.

    Args:
        params, state: trees of `jax.ShapeDtypeStruct`s, which may be wrapped in Flax metadata, such
            as `linen.Partitioned`.
        whole: a function of a random key that creates all arrays and returns them as (params,
            state).
        path: the beginning of each path in error messages: the path of the Flax layer in the fnet
            model, or ().
    """

    # One function for all arrays of a tree, so that `_spec.Making` keeps what it returns.
    wholes = (lambda key: whole(key)[0]), (lambda key: whole(key)[1])

    def walk(node: Any, names: Any, number: int, kind: str) -> Any:
        if isinstance(node, Mapping):
            return {name: walk(child, (*names, name), number, kind) for name, child in node.items()}
        axes: Any = (
            getattr(node, "names", None) if isinstance(node, core.meta.AxisMetadata) else None
        )
        leaf = core.meta.unbox(node)
        if not hasattr(leaf, "shape"):
            raise TypeError(
                f"{quote((*path, *names))}: a layer's {kind} must be arrays in dicts; got "
                f"{describe(leaf)}"
            )

        def init(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return _spec.get(whole(key)[number], names).astype(dtype)

        fits = axes is not None and len(axes) == len(leaf.shape)
        return _spec.Part(
            leaf.shape,
            leaf.dtype,
            init,
            axes=tuple(axes) if fits else None,
            whole=wholes[number],
            depth=len(names),
        )

    return {"params": walk(params, (), 0, "params"), "state": walk(state, (), 1, "state")}


def hold(scope: Scope, record: Any, params: Any, state: Any, owner: Any) -> None:
    """Checks that params and state contain all arrays of the spec trees in `record`, with the right
    shapes. Raises the same errors as `Scope.param` and `Scope.state`."""
    for kind, tree in (("params", params), ("state", state)):
        for names, leaf in _spec.leaves(record[kind]):
            path = (*scope._place.path, *names)
            if tree is None:
                raise ValueError(
                    f"{owner} needs the state {quote(path)} {leaf.shape}; pass state=, the second "
                    "result of model.init"
                )
            held = _spec.get(tree, names)
            if getattr(held, "shape", None) != leaf.shape:
                place = scope._place
                for name in names[:-1]:
                    place = place.child(name)
                raise place.misfit(kind, names[-1], leaf.shape, held)


def _all_dicts(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(map(_all_dicts, tree.values()))
    return not isinstance(tree, (tuple, list))


def _hashable(value: Any) -> Any:
    """Converts lists to tuples, and converts dicts to FrozenDicts, also in the fields of modules."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return tuple(map(_hashable, value))
    if isinstance(value, Mapping):
        return core.freeze({name: _hashable(item) for name, item in value.items()})
    if isinstance(value, linen.Module):
        fields = {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if f.init and f.name not in ("parent", "name")
        }
        new = {
            name: frozen
            for name, field in fields.items()
            if (frozen := _hashable(field)) is not field
        }
        return value.clone(**new)
    return value
