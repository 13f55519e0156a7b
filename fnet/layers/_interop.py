"""Conversion between Flax modules (flax.linen and flax.nnx) and layers, in both directions.

Flax is imported by the first call, not by `import fnet`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fnet.layers._core import Layer, _tuples
from fnet.layers._scope import describe

if TYPE_CHECKING:
    from flax import linen, nnx


def from_linen(module: linen.Module, *, train: str | None = None) -> Layer:
    """Converts a flax.linen module to a layer.

    The layer's params are `variables["params"]`. Its state holds the other collections by name:
    `{"batch_stats": {...}}`. Sown values are discarded. `init` calls `module.init` with a key derived from the layer's
    path. With `train=True`, batch statistics are updated, and dropout uses the model's key (rngs "dropout", and
    "params" for all other streams).

    Args:
        module: the module, not bound. In its fields, lists become tuples and dicts become FrozenDicts, so that it can
            be hashed.
        train: the name of the module's argument that selects training mode, such as "is_training". If it selects
            inference mode, write "not frozen". None: found in the signature of `__call__` (train, training,
            is_training; deterministic, use_running_average, inference). "": there is no such argument.

    Returns:
        A layer with the module's inputs.

    Raises:
        TypeError: `module` is a class, or not a linen module.
        ValueError: `module` is bound to variables.

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
    """Converts a layer to a flax.linen module.

    Its `variables["params"]` and `variables["batch_stats"]` are the layer's params and state, with the same names. For
    a training step, call it with `train=True`; with `mutable=["batch_stats"]` if the layer has state, and with
    `rngs={"dropout": key}` if it needs random numbers.

    Args:
        layer: the layer.
        name: the module's name inside another linen module.

    Returns:
        A flax.linen module with the layer's inputs.

    Raises:
        TypeError: `layer` is not a layer.

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


def linen_variables(variables: Mapping) -> tuple[dict, dict]:
    """Converts the variables of a flax.linen module to the `(params, state)` of its layer.

    The results are plain dicts: FrozenDicts are unfrozen, and boxes with logical axes are unboxed. The inverse is
    `{"params": params, **state}`.

    >>> from flax import linen
    >>> module = linen.BatchNorm(use_running_average=True)
    >>> params, state = linen_variables(module.init(jax.random.key(0), jnp.ones((2, 3))))
    >>> y, _ = from_linen(module)(params, jnp.ones((2, 3)), state=state)
    """
    from fnet.layers import _interop_linen

    return _interop_linen.linen_variables(variables)


def from_nnx(constructor: Callable[..., nnx.Module], *args: Any, **kwargs: Any) -> Layer:
    """Converts a flax.nnx module to a layer: `from_nnx(CNN, features=32)` for `CNN(features=32, rngs=...)`.

    The layer's params are the module's `nnx.Param`s by path, as nested dicts (items of a list have their index as
    name). The layer's state consists of all other variables, for example batch statistics. `init` constructs the module
    with `rngs=nnx.Rngs(key)`. Each call creates a module with the arrays that it receives, sets train or eval mode, and
    runs it. Random streams inside start from the model's key, which is needed whenever the module uses them (nnx.RNN
    does for its first carry, even in eval mode).

    Args:
        constructor: the module's class, or a function that creates one. `rngs=` is passed if the constructor accepts
          it.
        args, kwargs: the arguments of the constructor; they must be hashable, like a layer's fields.

    Returns:
        A layer with the module's inputs.

    Raises:
        TypeError: `constructor` is a module (convert its arrays with `nnx_variables`), or the module contains arrays
            that are not `nnx.Variable`s.

    >>> from flax import nnx
    >>> layer = from_nnx(nnx.Linear, 4, 3)
    >>> params, state = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> jax.tree.map(jnp.shape, params), state
    ({'bias': (3,), 'kernel': (4, 3)}, {})
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.from_nnx(constructor, tuple(map(_tuples, args)),
                                 tuple((name, _tuples(value)) for name, value in kwargs.items()))


def to_nnx(layer: Layer, *inputs: Any, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """Converts a layer to a flax.nnx module, with params and state initialized from `rngs`.

    The arrays are `nnx.Param`s in `module.params` and `nnx.BatchStat`s in `module.state`, with the layer's names. As
    with every nnx module, it is in train mode until `module.eval()`.

    Args:
        layer: the layer.
        inputs: inputs of its first call; only shapes and dtypes are used, as for `options`.
        rngs: the streams "params" and "dropout".

    Returns:
        A flax.nnx module with the layer's inputs.

    Raises:
        TypeError: `layer` is not a layer, or `rngs` is not an `nnx.Rngs`.

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
    """Returns the arrays of a flax.nnx module as the `(params, state)` of its layer (see `from_nnx`).

    >>> from flax import nnx
    >>> module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    >>> params, state = nnx_variables(module)
    >>> bool((from_nnx(nnx.Linear, 4, 3)(params, jnp.ones((2, 4))) == module(jnp.ones((2, 4)))).all())
    True
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.nnx_variables(module)


def update_nnx(module: nnx.Module, params: dict, state: dict | None = None) -> None:
    """Writes `(params, state)` of a layer, as returned by `nnx_variables`, into a flax.nnx module.

    Args:
        module: the module, with arrays of the same shapes.
        params: all of its parameters.
        state: all of its other variables. Default: they do not change.

    Raises:
        ValueError: arrays are missing, have another shape, or are not in the module; the message lists them.

    >>> from flax import nnx
    >>> module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    >>> params, state = nnx_variables(module)
    >>> update_nnx(module, jax.tree.map(jnp.zeros_like, params))
    >>> module(jnp.ones(4)).tolist()
    [0.0, 0.0, 0.0]
    """
    from fnet.layers import _interop_nnx

    _interop_nnx.update_nnx(module, params, state)


def _layer(who, layer):
    if not isinstance(layer, Layer):
        what = f"the class {layer.__name__}" if isinstance(layer, type) else describe(layer)
        raise TypeError(f"{who}: expected a layer, e.g. nn.Dense(10); got {what}")
    return layer
