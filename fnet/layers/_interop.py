"""Conversion between Flax modules (flax.linen and flax.nnx) and layers, in both directions.

Flax is imported when a conversion function is first called, not by `import fnet`.
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

    >>> from flax import linen
    >>> from fnet import layers as nn
    >>> model = nn.Sequential(nn.Dense(8), norm=nn.from_linen(linen.BatchNorm()))
    >>> x = jnp.ones((2, 4))
    >>> params, state = model.init(jax.random.key(0), x)
    >>> jax.tree.map(jnp.shape, state)
    {'norm': {'batch_stats': {'mean': (8,), 'var': (8,)}}}
    >>> y, state = model(params, x, state=state, train=True)

    The layer's params are the module's `variables["params"]`, its state a dict of the other
    collections, such as `{"batch_stats": {...}}`. What the module stores with `sow` is discarded.
    `init` calls `module.init` with a key derived from the layer's path. With `train=True`, batch
    statistics are updated. From the key of a call, the module gets two rngs, "dropout" and
    "params"; for any other name, Flax uses "params".

    Args:
        module: the module, which must not be bound to variables. Lists in its fields become tuples,
            and dicts FrozenDicts, so that it can be hashed.
        train: the name of the module's argument that selects training mode, such as "is_training",
            or with "not " before it the name of one that selects inference mode, such as "not
            frozen". If there is none, pass `train=""`. Default None: `from_linen` searches the
            signature of `__call__` for train, training or is_training, and for deterministic,
            use_running_average or inference.

    Returns:
        A layer that accepts the same inputs as the flax.linen module.

    Raises:
        TypeError: `module` is a class, or not a linen module.
        ValueError: `module` is bound to variables. The layer's `init` raises it if an initial value
            depends on the values of the inputs, because layers are initialized from shapes alone.
    """
    from fnet.layers import _interop_linen

    return _interop_linen.from_linen(module, train)


def to_linen(layer: Layer, *, name: str | None = None) -> linen.Module:
    """Converts a layer to a flax.linen module.

    >>> from fnet import layers as nn
    >>> module = nn.to_linen(nn.Sequential(nn.Dense(8), nn.BatchNorm(), nn.Dropout(0.5)))
    >>> x = jnp.ones((2, 4))
    >>> variables = module.init(jax.random.key(0), x)
    >>> y, moved = module.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})
    >>> sorted(variables), sorted(moved)
    (['batch_stats', 'params'], ['batch_stats'])

    The module's `variables["params"]` and `variables["batch_stats"]` are the layer's params and
    state, with the same names. In a training step, call it with `train=True`, with
    `mutable=["batch_stats"]` if the layer has state, and with `rngs={"dropout": key}` if it needs
    random numbers.

    Args:
        layer: the layer.
        name: the module's name inside another linen module. Default: chosen by Flax.

    Returns:
        A flax.linen module that takes the inputs of the layer.

    Raises:
        TypeError: `layer` is not a layer.
    """
    from fnet.layers import _interop_linen

    return _interop_linen.FnetLayer(_layer("to_linen", layer), name=name)


def linen_variables(variables: Mapping) -> tuple[dict, dict]:
    """Converts the variables of a flax.linen module to `(params, state)` of the layer that
    `from_linen` returns.

    >>> from flax import linen
    >>> module = linen.BatchNorm(use_running_average=True)
    >>> params, state = linen_variables(module.init(jax.random.key(0), jnp.ones((2, 3))))
    >>> y, _ = from_linen(module)(params, jnp.ones((2, 3)), state=state)

    The results are plain dicts, without FrozenDicts and metadata boxes such as
    `linen.LogicallyPartitioned`. The way back is `{"params": params, **state}`.
    """
    from fnet.layers import _interop_linen

    return _interop_linen.linen_variables(variables)


def from_nnx(constructor: Callable[..., nnx.Module], *args: Any, **kwargs: Any) -> Layer:
    """Converts a flax.nnx module to a layer. For `CNN(features=32, rngs=...)`, write `from_nnx(CNN,
    features=32)`.

    >>> from flax import nnx
    >>> layer = from_nnx(nnx.Linear, 4, 3)
    >>> params, state = layer.init(jax.random.key(0), jnp.ones((2, 4)))
    >>> jax.tree.map(jnp.shape, params), state
    ({'bias': (3,), 'kernel': (4, 3)}, {})

    The layer's params are the module's `nnx.Param`s as nested dicts, named like its attributes; an
    item of a list has its index as its name. The state has all other variables, for example batch
    statistics. `init` constructs the module with `rngs=nnx.Rngs(key)`. Each call creates a module
    with the arrays that were passed, sets train or eval mode, and runs it. Its random streams come
    from the key of the call, so a module that uses one needs a key even in eval mode, as nnx.RNN
    does for its first carry.

    Args:
        constructor: the module's class, or a function that returns a module. `rngs=` is passed if
            the constructor has this argument.
        args, kwargs: the arguments of the constructor, hashable like a layer's fields.

    Returns:
        A layer that accepts the same inputs as the flax.nnx module.

    Raises:
        TypeError: `constructor` is a module (convert its arrays with `nnx_variables`), or the
            module contains arrays that are not `nnx.Variable`s.
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.from_nnx(
        constructor,
        tuple(map(_tuples, args)),
        tuple((name, _tuples(value)) for name, value in kwargs.items()),
    )


def to_nnx(layer: Layer, *inputs: Any, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """Converts a layer to a flax.nnx module, with params and state initialized from `rngs`.

    >>> from flax import nnx
    >>> from fnet import layers as nn
    >>> x = jnp.ones((2, 4))
    >>> module = nn.to_nnx(nn.Sequential(nn.Dense(8), nn.Dropout(0.5)), x, rngs=nnx.Rngs(0))
    >>> module.params["0"]["kernel"].shape, module(x).shape
    ((4, 8), (2, 8))

    The layer's params are `nnx.Param`s in `module.params`, and its state `nnx.BatchStat`s in
    `module.state`, with the same names. Like every nnx module, it is in train mode until
    `module.eval()` is called.

    Args:
        layer: the layer.
        inputs, options: example inputs of the layer; only shapes and dtypes are used.
        rngs: an `nnx.Rngs` with the streams "params" and "dropout".

    Returns:
        A flax.nnx module that takes the inputs of the layer.

    Raises:
        TypeError: `layer` is not a layer, or `rngs` is not an `nnx.Rngs`.
    """
    from fnet.layers import _interop_nnx

    return _interop_nnx.to_nnx(_layer("to_nnx", layer), inputs, options, rngs)


def nnx_variables(module: nnx.Module) -> tuple[dict, dict]:
    """Returns the arrays of a flax.nnx module as `(params, state)` of the layer that `from_nnx`
    returns.

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

    >>> from flax import nnx
    >>> module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    >>> params, state = nnx_variables(module)
    >>> update_nnx(module, jax.tree.map(jnp.zeros_like, params))
    >>> module(jnp.ones(4)).tolist()
    [0.0, 0.0, 0.0]

    Args:
        module: the module, whose arrays must have the shapes of those in `params` and `state`.
        params: all parameters of the module.
        state: all other variables of the module. Default: these do not change.

    Raises:
        ValueError: arrays of the module are missing in `params` or `state`, have another shape
            there, or are not in the module; the message lists their paths.
    """
    from fnet.layers import _interop_nnx

    _interop_nnx.update_nnx(module, params, state)


def _layer(who: str, layer: Any) -> Layer:
    if not isinstance(layer, Layer):
        what = f"the class {layer.__name__}" if isinstance(layer, type) else describe(layer)
        raise TypeError(f"{who}: expected a layer, e.g. nn.Dense(10); got {what}")
    return layer
