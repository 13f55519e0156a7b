"""Flax modules as layers, and layers as Flax modules: flax.linen and flax.nnx, both ways.

Flax is imported by the first call, never by `import fnet`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fnet.layers._core import Layer, _tuples
from fnet.layers._scope import describe

if TYPE_CHECKING:
    from flax import linen, nnx


def from_linen(module: linen.Module, *, train: str | None = None) -> Layer:
    """A flax.linen module as a layer.

    params are `variables["params"]` as they are; state holds the other collections by their names:
    `{"batch_stats": {...}}`. What a module sows is left out. `init` makes them as `module.init` does, from a key of
    the layer's own. With `train=True` batch statistics move and dropout draws from the model's key (rngs "dropout",
    and "params" for every other stream).

    Args:
        module: the module, not bound. Lists in its fields become tuples, dicts FrozenDicts, so that it hashes.
        train: the module's own argument that says whether this is a training step, as "is_training" or, where it
            says the opposite, "not frozen". None: found in the signature of its `__call__` (train, training,
            is_training; deterministic, use_running_average, inference). "": none.

    Returns:
        A layer with the module's inputs.

    Raises:
        TypeError: where `module` is no linen module, or is a class.
        ValueError: where it is bound to variables already.

    >>> from flax import linen
    >>> from fnet import layers as nn
    >>> model = nn.Sequential(nn.Dense(8), norm=nn.from_linen(linen.BatchNorm()))
    >>> x = jnp.ones((2, 4))
    >>> params, state = model.init(jax.random.key(0), x)
    >>> jax.tree.map(jnp.shape, state)
    {'norm': {'batch_stats': {'mean': (8,), 'var': (8,)}}}
    >>> y, state = model(params, x, state=state, train=True)
    """
    from fnet.layers import _interop_linen

    return _interop_linen.from_linen(module, train)


def to_linen(layer: Layer, *, name: str | None = None) -> linen.Module:
    """A layer as a flax.linen module.

    Its `variables["params"]` and `variables["batch_stats"]` are the layer's params and state, under the same names.
    Call it with `train=True` for a training step, with `mutable=["batch_stats"]` where the layer has state and
    `rngs={"dropout": key}` where it draws.

    Args:
        layer: the layer.
        name: the module's name inside a bigger module, as for any linen module.

    >>> from fnet import layers as nn
    >>> module = nn.to_linen(nn.Sequential(nn.Dense(8), nn.BatchNorm(), nn.Dropout(0.5)))
    >>> x = jnp.ones((2, 4))
    >>> variables = module.init(jax.random.key(0), x)
    >>> y, moved = module.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})
    >>> sorted(variables), sorted(moved)
    (['batch_stats', 'params'], ['batch_stats'])
    """
    from fnet.layers import _interop_linen

    return _interop_linen.FnetLayer(_layer("to_linen", layer), name=name)


def linen_variables(variables) -> tuple[dict, dict]:
    """The variables of a flax.linen module as the `(params, state)` of its layer.

    Plain dicts: FrozenDicts are thawed and boxes with logical axes opened. The way back is
    `{"params": params, **state}`.

    >>> from flax import linen
    >>> module = linen.BatchNorm(use_running_average=True)
    >>> params, state = linen_variables(module.init(jax.random.key(0), jnp.ones((2, 3))))
    >>> y, _ = from_linen(module)(params, jnp.ones((2, 3)), state=state)
    """
    from fnet.layers import _interop_linen

    return _interop_linen.linen_variables(variables)


def from_nnx(constructor: Callable[..., nnx.Module], *args, **kwargs) -> Layer:
    """A flax.nnx module as a layer: `from_nnx(CNN, features=32)` for `CNN(features=32, rngs=...)`.

    params are the module's `nnx.Param`s by their paths, as nested dicts (the numbers of a list's items as strings);
    state is every other variable, batch statistics among them. `init` constructs the module with
    `rngs=nnx.Rngs(key)`. Each call makes a module of the arrays that it is given, puts it into train or eval mode,
    and runs it; streams of random numbers inside begin at the model's key, which is needed wherever the module draws
    (nnx.RNN does for its first carry, even in eval mode).

    Args:
        constructor: the module's class, or a function that makes one; given `rngs=` where it takes it.
        args, kwargs: its arguments; hashable, like a layer's fields.

    Returns:
        A layer with the module's inputs.

    Raises:
        TypeError: for a module that is made already (take its arrays with `nnx_variables`), and where one holds
            arrays that are no `nnx.Variable`s.

    >>> from flax import nnx
    >>> layer = from_nnx(nnx.Linear, 4, 3)
    >>> params, state = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> jax.tree.map(jnp.shape, params), state
    ({'bias': (3,), 'kernel': (4, 3)}, {})
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.from_nnx(constructor, tuple(map(_tuples, args)),
                                 tuple((name, _tuples(value)) for name, value in kwargs.items()))


def to_nnx(layer: Layer, *inputs, rngs: nnx.Rngs, **options) -> nnx.Module:
    """A layer as a flax.nnx module with params and state made from `rngs`.

    Its arrays are `nnx.Param`s in `module.params` and `nnx.BatchStat`s in `module.state`, under the layer's names. Like
    every nnx module it is in train mode until `module.eval()`.

    Args:
        layer: the layer.
        inputs: what its first call takes, read for shapes alone; `options` likewise.
        rngs: the streams "params" and "dropout".

    >>> from flax import nnx
    >>> from fnet import layers as nn
    >>> x = jnp.ones((2, 4))
    >>> module = nn.to_nnx(nn.Sequential(nn.Dense(8), nn.Dropout(0.5)), x, rngs=nnx.Rngs(0))
    >>> module.params["0"]["kernel"].shape, module(x).shape
    ((4, 8), (2, 8))
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.to_nnx(_layer("to_nnx", layer), inputs, options, rngs)


def nnx_variables(module: nnx.Module) -> tuple[dict, dict]:
    """The arrays of a flax.nnx module, trained perhaps, as the `(params, state)` of its layer.

    >>> from flax import nnx
    >>> module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    >>> params, state = nnx_variables(module)
    >>> bool((from_nnx(nnx.Linear, 4, 3)(params, jnp.ones((2, 4))) == module(jnp.ones((2, 4)))).all())
    True
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.nnx_variables(module)


def update_nnx(module: nnx.Module, params: dict, state: dict | None = None) -> None:
    """Writes `(params, state)`, as `nnx_variables` gives them, into a flax.nnx module.

    Args:
        module: the module, of the same shapes.
        params: all its parameters.
        state: all its other variables; None: they stay as they are.

    Raises:
        ValueError: listing every array that is missing, has another shape, or that the module has no place for.
    """
    from fnet.layers import _interop_nnx

    _interop_nnx.update_nnx(module, params, state)


def _layer(who, layer):
    if not isinstance(layer, Layer):
        what = f"the class {layer.__name__}" if isinstance(layer, type) else describe(layer)
        raise TypeError(f"{who} takes a layer, e.g. nn.Dense(10); got {what}")
    return layer
