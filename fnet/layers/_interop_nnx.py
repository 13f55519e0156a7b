"""Conversion between flax.nnx modules and layers. Imports Flax; `_interop` imports this module on
first use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fnet.layers import _spec
from fnet.layers._core import Layer, _differences
from fnet.layers._interop_linen import hold, mode, record_of
from fnet.layers._scope import Scope, describe


def from_nnx(constructor: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(constructor, nnx.Module):
        name = type(constructor).__name__
        raise TypeError(
            f"from_nnx: expected a constructor and its arguments, from_nnx({name}, ...); got a "
            f"{name} that is already constructed; convert its arrays with nnx_variables(module)"
        )
    if not callable(constructor):
        raise TypeError(
            f"from_nnx: expected a constructor and its arguments, from_nnx(nnx.Linear, 4, 3); got "
            f"{describe(constructor)}"
        )
    return NnxLayer(constructor, args, kwargs)


class NnxLayer(Layer):
    """The layer that `from_nnx` returns."""

    constructor: Callable
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        shown = [
            getattr(self.constructor, "__name__", repr(self.constructor)),
            *map(repr, self.arguments),
        ]
        return (
            f"from_nnx({', '.join(shown + [f'{name}={value!r}' for name, value in self.keywords])})"
        )

    def forward(self, scope: Scope, *inputs: Any, **options: Any) -> Any:
        graph, leaves = _abstract(self)
        _, params, state, key = scope.pure(self, *inputs, **options)
        hold(scope, _record(self), params, state, repr(self))
        drawn = jax.random.key(0) if key is None else scope.key()
        before = {
            path: _random(variable, path, drawn)
            if isinstance(variable, nnx.RngState)
            else _spec.get(params if isinstance(variable, nnx.Param) else state, _names(path))
            for path, variable in leaves
        }
        module = nnx.merge(
            graph,
            nnx.from_flat_state(
                [(path, variable.replace(before[path])) for path, variable in leaves]
            ),
        )
        if scope.train:
            module.train()
        else:
            module.eval()
        y = module(*inputs, **mode(module, None, inputs, options, scope.train), **options)
        changed = set()
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            if path not in before or variable.get_value() is before[path]:
                continue
            if isinstance(variable, nnx.RngCount) and key is None:
                scope.key()  # raises the error for a missing key
            if isinstance(variable, (nnx.RngState, nnx.Param)) or (
                isinstance(variable, nnx.BatchStat) and not scope.train
            ):
                continue
            state = _replaced(state, _names(path), variable.get_value())
            changed.add(str(path[0]))
        for name in sorted(changed):
            scope.update(name, state[name])
        return y

    def _record(self, inputs: tuple, options: dict, train: Any, path: tuple = ()) -> dict:
        _abstract(self)  # raises an error for arrays outside of variables
        return {**_record(self), "cache": {}}


class FnetModule(nnx.Module):
    """The module that `to_nnx` returns."""

    def __init__(self, layer: Any, params: Any, state: Any, stream: Any):
        self.layer = layer
        self.params = _held(params, nnx.Param)
        self.state = _held(state, nnx.BatchStat)
        self.rngs = stream
        self.deterministic = False

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        params, state = nnx_variables(self)
        train = not self.deterministic
        y, after = self.layer(
            params, *inputs, state=state, key=self.rngs() if train else None, train=train, **options
        )
        if train:
            for path, variable in nnx.to_flat_state(nnx.state(self.state)):
                variable[...] = _spec.get(after, path)
        return y


def to_nnx(layer: Any, inputs: tuple, options: dict, rngs: Any) -> Any:
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"to_nnx: expected rngs=nnx.Rngs(0), the random streams; got {describe(rngs)}"
        )
    params, state = layer.init(rngs.params(), *inputs, **options)
    return FnetModule(layer, params, state, rngs.dropout.fork())


def nnx_variables(module: Any) -> tuple:
    if isinstance(module, FnetModule):
        return _plain(module.params), _plain(module.state)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"nnx_variables: expected a flax.nnx module; got {describe(module)}")
    params: dict = {}
    state: dict = {}
    for path, variable in _variables(module):
        tree = params if isinstance(variable, nnx.Param) else state
        _spec.put(tree, _names(path), variable.get_value())
    return params, state


def update_nnx(module: Any, params: Any, state: Any) -> None:
    held = nnx_variables(module)
    wrong = _differences("params", held[0], params) + (
        [] if state is None else _differences("state", held[1], state)
    )
    if wrong:
        raise ValueError(
            f"update_nnx: {len(wrong)} arrays do not match {type(module).__name__}: "
            f"{'; '.join(wrong)}"
        )
    parts = (
        ((module.params, params), (module.state, state))
        if isinstance(module, FnetModule)
        else ((module, None),)
    )
    for node, tree in parts:
        for path, variable in _variables(node):
            given = (
                tree if tree is not None else params if isinstance(variable, nnx.Param) else state
            )
            if given is not None:
                variable[...] = jnp.asarray(
                    _spec.get(given, _names(path)), variable.get_value().dtype
                )


def _variables(module: Any) -> list:
    """Returns the (path, variable) pairs of a module, without the variables of random streams."""
    return [
        (path, variable)
        for path, variable in nnx.to_flat_state(nnx.state(module))
        if isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState)
    ]


def _construct(layer: Any, key: Any) -> Any:
    keywords = dict(layer.keywords)
    if _takes_rngs(layer.constructor):
        keywords["rngs"] = nnx.Rngs(key)
    module = layer.constructor(*layer.arguments, **keywords)
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"{layer!r}: expected a constructor of a flax.nnx module; it returned "
            f"{describe(module)}"
        )
    return module


def _takes_rngs(constructor: Any) -> bool:
    # nnx's metaclass accepts any arguments, so read the signature of the class's __init__.
    function = getattr(constructor, "__init__") if isinstance(constructor, type) else constructor  # noqa: B009
    if function is object.__init__:
        return False
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in parameters)


@functools.lru_cache(256)
def _abstract(layer: Any) -> tuple:
    """Returns (graph definition, list of (path, variable)) of the module. The variables contain
    shapes, not values."""
    module = nnx.eval_shape(lambda: _construct(layer, jax.random.key(0)))
    graph, variables = nnx.split(module)
    leaves = list(nnx.to_flat_state(variables))
    # While tracing, nnx treats arrays that are not variables as static attributes.
    loose = [
        (*path, name)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Pytree)
        for name, value in vars(node).items()
        if isinstance(value, jax.core.Tracer)
    ]
    loose += [path for path, leaf in leaves if not isinstance(leaf, nnx.Variable)]
    if loose:
        raise TypeError(
            f"{layer!r}: {'/'.join(_names(loose[0]))!r} is an array outside of a variable; store "
            "it as nnx.Variable(array), so that it is part of the layer's state"
        )
    return graph, leaves


@functools.lru_cache(256)
def _record(layer: Any) -> Any:
    params, state = jax.eval_shape(lambda: nnx_variables(_construct(layer, jax.random.key(0))))
    return record_of(params, state, jax.jit(lambda key: nnx_variables(_construct(layer, key))), ())


def _random(variable: Any, path: tuple, key: Any) -> Any:
    """Returns the initial value of an `nnx.RngState`: 0 for an `nnx.RngCount`, or a key derived
    from `key`."""
    shape = variable.get_value().shape
    if isinstance(variable, nnx.RngCount):
        return jnp.zeros(shape, variable.get_value().dtype)
    key = _spec.fold(key, "/".join(_names(path)))
    return jax.random.split(key, shape) if shape else key


def _held(tree: Mapping, kind: Callable) -> Any:
    return nnx.Dict(
        {
            name: _held(node, kind) if isinstance(node, Mapping) else kind(node)
            for name, node in tree.items()
        }
    )


def _plain(node: Any) -> dict:
    return {
        name: _plain(child) if isinstance(child, nnx.Dict) else child.get_value()
        for name, child in node.items()
    }


def _replaced(tree: Any, names: Any, value: Any) -> dict:
    return {
        **tree,
        names[0]: value if len(names) == 1 else _replaced(tree[names[0]], names[1:], value),
    }


def _names(path: tuple) -> tuple:
    return tuple(map(str, path))
