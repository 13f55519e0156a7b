"""Layers that contain layers: Sequential, Residual, Parallel, Stack and Remat."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from fnet.jaxpr import BLOCK, array_leaves, tag
from fnet.layers._core import Layer
from fnet.layers._scope import Scope, describe


class _Children(Layer):
    """A layer with named children (inner layers or functions). The name of a child that is passed
    by position is "0", "1", .... The name of a child that is passed by keyword is the keyword."""

    layers: tuple[Callable, ...]
    names: tuple[str, ...]

    def __init__(self, *layers: Callable, **named: Callable):
        object.__setattr__(self, "layers", (*layers, *named.values()))
        object.__setattr__(self, "names", (*map(str, range(len(layers))), *named))
        for name, child in zip(self.names, self.layers):
            if not callable(child):
                raise TypeError(
                    f"{type(self).__name__}: child {name!r} must be a layer or a function; "
                    f"got {describe(child)}"
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._shown())})"

    def _shown(self) -> Iterator[str]:
        for number, (name, child) in enumerate(zip(self.names, self.layers)):
            shown = (
                repr(child) if isinstance(child, Layer) else getattr(child, "__name__", repr(child))
            )
            yield shown if name == str(number) else f"{name}={shown}"

    def _each(self, scope: Scope) -> Iterator:
        """Yields, for each child in order, a function that applies the child to inputs."""
        for name, child in zip(self.names, self.layers):
            yield functools.partial(child, scope[name]) if isinstance(child, Layer) else child


class Sequential(_Children):
    """Applies layers one after another, each to the output of the one before.

    >>> model = Sequential(Dense(16), jax.nn.relu, head=Dense(10))
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> sorted(params)
    ['0', 'head']

    Args:
        layers: layers, or plain functions of one array. Those passed by position are named "0",
            "1", ..., functions included; a keyword is the name of its layer.

    Inputs: the inputs of the first layer. Output: the output of the last layer.
    """

    if TYPE_CHECKING:  # type checkers would take the fields for the arguments of a dataclass

        def __init__(self, *layers: Callable, **named: Callable): ...

    def forward(self, scope: Scope, *inputs: Any) -> Any:
        if not self.layers:
            return inputs[0] if len(inputs) == 1 else inputs
        first, *rest = self._each(scope)
        y = first(*inputs)
        for child in rest:
            y = child(y)
        return y


class Residual(_Children):
    """Computes `y = shortcut(x) + f(x)`, where f applies layers one after another.

    >>> from fnet import layers as nn
    >>> block = nn.Residual(nn.LayerNorm(), nn.Dense(8))
    >>> params, _ = block.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> block(params, jnp.ones((2, 8))).shape
    (2, 8)

    Args:
        layers: the layers of f, passed and named as in `Sequential`.
        shortcut: a layer or function for the input, before the addition. The parameters of a layer
            are at the path "shortcut". Default: the input is added unchanged.

    Source: He et al. (2016), Deep Residual Learning for Image Recognition, eq. 1 and 2.
    """

    _: KW_ONLY
    shortcut: Callable | None = None

    def __init__(self, *layers: Callable, shortcut: Callable | None = None, **named: Callable):
        super().__init__(*layers, **named)
        object.__setattr__(self, "shortcut", shortcut)
        if shortcut is not None and not callable(shortcut):
            raise TypeError(
                f"Residual: shortcut must be a layer or a function; got {describe(shortcut)}"
            )

    def _shown(self) -> Iterator[str]:
        yield from super()._shown()
        if self.shortcut is not None:
            yield f"shortcut={self.shortcut!r}"

    def forward(self, scope: Scope, x: Any) -> Any:
        y = x
        for child in self._each(scope):
            y = child(y)
        if self.shortcut is not None:
            x = (
                self.shortcut(scope["shortcut"], x)
                if isinstance(self.shortcut, Layer)
                else self.shortcut(x)
            )
        if y.shape != x.shape:
            raise ValueError(
                f"Residual at {scope}: the output {y.shape} and the input {x.shape} must have one "
                "shape; pass a shortcut that maps the input to the output's shape"
            )
        return x + y


class Parallel(_Children):
    """Applies several layers to the same inputs, and combines their outputs.

    >>> from fnet import layers as nn
    >>> model = nn.Parallel(nn.Dense(8), jax.nn.relu, combine=lambda a, b: a * b)
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> sorted(params)
    ['0']

    Args:
        layers: the layers, passed and named as in `Sequential`.
        combine: a function of two arrays, which combines the outputs from left to right as in
            `functools.reduce`. Default: addition.
    """

    _: KW_ONLY
    combine: Callable = operator.add

    def __init__(self, *layers: Callable, combine: Callable = operator.add, **named: Callable):
        super().__init__(*layers, **named)
        object.__setattr__(self, "combine", combine)
        if not self.layers:
            raise ValueError("Parallel: expected at least one layer, got none")

    def _shown(self) -> Iterator[str]:
        yield from super()._shown()
        if self.combine is not operator.add:
            yield f"combine={getattr(self.combine, '__name__', self.combine)}"

    def forward(self, scope: Scope, *inputs: Any) -> Any:
        return functools.reduce(self.combine, [child(*inputs) for child in self._each(scope)])


class Stack(Layer):
    """Applies `depth` copies of a block one after another, as one `lax.scan` over stacked
    parameters, so that tracing and compiling take no longer for a deeper model.

    >>> from fnet import layers as nn
    >>> stack = nn.Stack(nn.Dense(8), 12)
    >>> params, _ = stack.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> params["kernel"].shape
    (12, 8, 8)

    Every parameter and state array of the block gets a leading axis of length `depth`, with the
    logical name "layers" as a hint for sharding. Its path stays the same, and its initial values
    are those of `Sequential(*[block] * depth)`, stacked.

    Args:
        block: the layer that is copied. Its output must have the shape and dtype of its first
            input.
        depth: the number of copies.
        unroll: the number of copies in one iteration of the loop, as in `lax.scan`. Default 1.

    Inputs: x, and any further inputs of the block. Each copy gets the output of the one before as
    its first input, and the same further inputs.
    """

    block: Layer
    depth: int
    _: KW_ONLY
    unroll: int = 1

    def forward(self, scope: Scope, x: Any, *inputs: Any, **options: Any) -> Any:
        f, params, state, keys = scope.pure(self.block, x, *inputs, copies=self.depth, **options)

        def body(x: jax.Array, copy: Any) -> tuple:
            params, state, key = copy
            y, state = f(params, x, *inputs, state=state, key=key, **options)
            _same(scope, self.block, x, y)
            return tag(y, BLOCK), state

        x, state = lax.scan(body, x, (params, state, keys), length=self.depth, unroll=self.unroll)
        for name in state or ():
            scope.update(name, state[name])
        return x


class Remat(Layer):
    """Applies `jax.checkpoint` to a block: the backward pass recomputes its intermediate values
    instead of storing them.

    >>> from fnet import layers as nn
    >>> model = nn.Stack(nn.Remat(nn.Residual(nn.Dense(8), jax.nn.relu)), 4)
    >>> model(model.init(jax.random.key(0), jnp.ones((2, 8)))[0], jnp.ones((2, 8))).shape
    (2, 8)

    Results and the paths of parameters are those of the block alone.

    Args:
        block: the layer.
        policy: a policy from `jax.checkpoint_policies`, which selects values to store after all.
            Default None: none are stored.

    Source: Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost.
    """

    block: Layer
    _: KW_ONLY
    policy: Callable | None = None

    def forward(self, scope: Scope, *inputs: Any, **options: Any) -> Any:
        f, params, state, key = scope.pure(self.block, *inputs, **options)
        arrays, rebuild = array_leaves((inputs, options))

        @functools.partial(jax.checkpoint, policy=self.policy)
        def run(params: dict, state: dict, key: Any, arrays: tuple) -> Any:
            inputs, options = rebuild(arrays)
            return f(params, *inputs, state=state, key=key, **options)

        y, state = run(params, state, key, arrays)
        for name in state or ():
            scope.update(name, state[name])
        return y


def _same(scope: Scope, block: Layer, x: jax.Array, y: jax.Array) -> None:
    """Checks that the output of a stacked block has the same shape and dtype as the first input of
    the block."""
    taken, given = (jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (x, y))
    if taken != given:
        raise ValueError(
            f"Stack at {scope}: a block's output must have the shape and dtype of its first input; "
            f"{type(block).__name__} maps {taken} to {given}"
        )
