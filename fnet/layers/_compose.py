"""Layers made of layers: Sequential, Residual, Parallel, Stack and Remat."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import KW_ONLY

import jax
from jax import lax

from fnet.layers import _spec
from fnet.layers._core import Layer
from fnet.layers._scope import Scope, describe


class _Children(Layer):
    """Layers and plain functions by name: positional ones are "0", "1", ..., keyword ones carry their names."""

    layers: tuple[Callable, ...]
    names: tuple[str, ...]

    def __init__(self, *layers, **named):
        object.__setattr__(self, "layers", (*layers, *named.values()))
        object.__setattr__(self, "names", (*map(str, range(len(layers))), *named))
        for name, child in zip(self.names, self.layers):
            if not callable(child):
                raise TypeError(f"{type(self).__name__}: child {name!r} is {describe(child)}, neither a layer nor a "
                                "function")

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(self._shown())})"

    def _shown(self):
        for number, (name, child) in enumerate(zip(self.names, self.layers)):
            shown = repr(child) if isinstance(child, Layer) else getattr(child, "__name__", repr(child))
            yield shown if name == str(number) else f"{name}={shown}"

    def _each(self, scope):
        """(name, the child as a function of its inputs), in order."""
        for name, child in zip(self.names, self.layers):
            yield functools.partial(child, scope[name]) if isinstance(child, Layer) else child


class Sequential(_Children):
    """One after the other: the first takes the inputs, every other the output before it.

    Children may be layers or plain functions of one array.

    >>> model = Sequential(Dense(16), jax.nn.relu, head=Dense(10))
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> sorted(params)
    ['0', 'head']
    """

    def forward(self, scope: Scope, *inputs):
        if not self.layers:
            return inputs[0] if len(inputs) == 1 else inputs
        first, *rest = self._each(scope)
        y = first(*inputs)
        for child in rest:
            y = child(y)
        return y


class Residual(_Children):
    """The input plus what the children make of it in sequence: `y = shortcut(x) + f(x)`.

    Args:
        layers: as in `Sequential`.
        shortcut: a layer or function for the input's way round, its parameters under "shortcut"; None: the input.

    Source: He et al. (2016), Deep Residual Learning for Image Recognition, eq. 1 and 2.
    """

    _: KW_ONLY
    shortcut: Callable | None = None

    def __init__(self, *layers, shortcut=None, **named):
        super().__init__(*layers, **named)
        object.__setattr__(self, "shortcut", shortcut)
        if shortcut is not None and not callable(shortcut):
            raise TypeError(f"Residual: the shortcut is {describe(shortcut)}, neither a layer nor a function")

    def _shown(self):
        yield from super()._shown()
        if self.shortcut is not None:
            yield f"shortcut={self.shortcut!r}"

    def forward(self, scope: Scope, x):
        y = x
        for child in self._each(scope):
            y = child(y)
        if self.shortcut is not None:
            x = self.shortcut(scope["shortcut"], x) if isinstance(self.shortcut, Layer) else self.shortcut(x)
        if y.shape != x.shape:
            raise ValueError(f"Residual at {scope} adds {y.shape} to {x.shape}: give it a shortcut that maps the "
                             "input to the output's shape")
        return x + y


class Parallel(_Children):
    """Every child on the same inputs, then the outputs put together.

    Args:
        layers: as in `Sequential`.
        combine: a function of two outputs, applied from left to right; the sum by default.
    """

    _: KW_ONLY
    combine: Callable = operator.add

    def __init__(self, *layers, combine=operator.add, **named):
        super().__init__(*layers, **named)
        object.__setattr__(self, "combine", combine)
        if not self.layers:
            raise ValueError("Parallel needs at least one layer")

    def _shown(self):
        yield from super()._shown()
        if self.combine is not operator.add:
            yield f"combine={getattr(self.combine, '__name__', self.combine)}"

    def forward(self, scope: Scope, *inputs):
        return functools.reduce(self.combine, [child(*inputs) for child in self._each(scope)])


class Stack(Layer):
    """`depth` copies of a block one after the other, as one `lax.scan` over stacked parameters.

    Trace and compile time do not grow with the depth. Every array of the block has a leading axis of length depth
    ("layers" among its logical axes), and copy i has the numbers of the child str(i) of
    `Sequential(*[block] * depth)`. The stack adds no name to the path.

    Args:
        block: the layer; its output has the shape and dtype of its first input.
        depth: how many.
        unroll: how many copies one iteration of the scan holds, as in `lax.scan`.

    Inputs: x, and whatever else the block takes; the latter goes to every copy alike.
    """

    block: Layer
    depth: int
    _: KW_ONLY
    unroll: int = 1

    def forward(self, scope: Scope, x, *inputs, **options):
        f, params, state, keys = scope.pure(self.block, x, *inputs, copies=self.depth, **options)

        def body(x, copy):
            params, state, key = copy
            y, state = f(params, x, *inputs, state=state, key=key, **options)
            _same(scope, self.block, x, y)
            return y, state

        x, state = lax.scan(body, x, (params, state, keys), length=self.depth, unroll=self.unroll)
        for name in state or ():
            scope.update(name, state[name])
        return x


class Remat(Layer):
    """A block whose intermediate values are computed again in the backward pass instead of kept: `jax.checkpoint`.

    Adds no name to the path and changes no numbers.

    Args:
        block: the layer.
        policy: what to keep all the same, from `jax.checkpoint_policies`; None: nothing.

    Source: Chen et al. (2016), Training Deep Nets with Sublinear Memory Cost.
    """

    block: Layer
    _: KW_ONLY
    policy: Callable | None = None

    def forward(self, scope: Scope, *inputs, **options):
        f, params, state, key = scope.pure(self.block, *inputs, **options)
        arrays, rebuild = _spec.partition((inputs, options))

        @functools.partial(jax.checkpoint, policy=self.policy)
        def run(params, state, key, arrays):
            inputs, options = rebuild(arrays)
            return f(params, *inputs, state=state, key=key, **options)

        y, state = run(params, state, key, arrays)
        for name in state or ():
            scope.update(name, state[name])
        return y


def _same(scope, block, x, y):
    """A block that is stacked gives what it takes."""
    taken, given = (jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (x, y))
    if taken != given:
        raise ValueError(f"Stack at {scope}: {type(block).__name__} takes {taken} and gives {given}; a stacked "
                         "block's output must have its first input's shape and dtype")
