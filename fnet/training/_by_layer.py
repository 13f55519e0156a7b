"""Applies an optimizer to each layer of stacked parameters by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from fnet.training._axes import Axes

_ONE = "one layer"


def by_layer(optimizer: optax.GradientTransformation, axes: Any) -> optax.GradientTransformation:
    """Returns an Optax transformation that treats each layer of a stack as a parameter of its own.

    Many optimizers do something for each layer: they divide by its norm, orthogonalize its matrix,
    or store a sum for each of its rows and columns. To Optax, a layer is an array. `nn.Stack` keeps
    all of its layers in one array, and so do `flax.linen.scan`, `nnx.vmap` and
    `equinox.filter_vmap`; one norm would then be shared by all.

        optimizer = tr.by_layer(optax.adafactor(1e-3), model.spec(x))

    `optimizer` sees what it would see for the unstacked model. A kernel is a matrix [inputs,
    outputs]: the window and the input channels of a convolution are its inputs, heads and head_dim
    of a query kernel its outputs. The groups of a grouped convolution and the experts of a mixture
    are separate matrices. A parameter without inputs or without outputs, such as a bias, is a
    vector.

    Args:
        optimizer: the Optax transformation, which must treat each array by itself. For example,
            clip by a global norm outside of `by_layer`.
        axes: what the axes of the parameters are: `model.spec(x)` of a layer, or a dict {pattern:
            words}, such as `{".*/kernel": "layers in out", ".*/bias": "layers out"}`. A pattern is
            a regular expression for the path of a parameter, or for the first names of its path; of
            several patterns that match, the last counts. The words are explained at
            `ParamSpec.roles`. To change some entries of a spec, pass a list: `[model.spec(x),
            {"head": "in logits"}]`.

    Returns:
        The transformation. If there are stacked layers, its state is a dict with one state of
        `optimizer` for each number of layers.

    Raises:
        ValueError: the axes of a parameter are not known, or do not fit its shape. The
            transformation raises it when it is first used.

    >>> params = {"kernel": jnp.stack([jnp.ones((2, 2)), 3 * jnp.ones((2, 2))])}     # [layers, in, out]
    >>> tx = tr.by_layer(optax.scale_by_trust_ratio(), {"kernel": "layers in out"})
    >>> updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    >>> updates["kernel"][:, 0, 0].tolist()                                          # norms 2 and 6, divided by 2
    [1.0, 3.0]
    """
    return each_layer(lambda _: optimizer, Axes(axes, "by_layer"))


def each_layer(
    build: Callable[[Any], optax.GradientTransformation], axes: Axes, *, matrices: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation of `by_layer`.

    Args:
        build: a function that maps a tree of `Layout`s to the transformation of these parameters.
            The tree has None for each parameter that has another number of layers.
        axes: the user's axes.
        matrices: whether the transformation sees the parameter of each layer as a matrix or a
            vector. Otherwise, it sees the array with its own axes: enough for a norm, and a sharded
            array is not reshaped.
    """

    def groups(tree):
        """Yields (name, sizes of the axes of layers, {number of the leaf: layout}), a tuple for
        each group."""
        layouts = axes.layouts(tree, matrices=matrices)
        if not matrices:
            layouts = [layout.without_groups() for layout in layouts]
        sizes = [layout.separate(x.shape) for layout, x in zip(layouts, jax.tree.leaves(tree))]
        for size in sorted(set(sizes)) or [()]:
            yield (
                "x".join(map(str, size)) or _ONE,
                size,
                {i: layouts[i] for i, own in enumerate(sizes) if own == size},
            )

    def only(structure, chosen):
        return structure.unflatten([chosen.get(i) for i in range(structure.num_leaves)])

    def viewed(tree, layouts):
        leaves, structure = jax.tree.flatten(tree)
        return only(
            structure, {i: layout.view(leaves[i], merge=matrices) for i, layout in layouts.items()}
        )

    def mapped(function, size):
        for _ in size:
            function = jax.vmap(function)
        return function

    def init(params):
        structure, states = jax.tree.structure(params), {}
        for name, size, layouts in groups(params):
            transformation = build(only(structure, layouts))
            states[name] = mapped(transformation.init, size)(viewed(params, layouts))
        return states[_ONE] if list(states) == [_ONE] else states

    def update(updates, state, params=None, **extra):
        leaves, structure = jax.tree.flatten(updates)
        parts, states = list(groups(updates)), {}
        held = {_ONE: state} if [name for name, *_ in parts] == [_ONE] else state
        for name, size, layouts in parts:
            transformation = optax.with_extra_args_support(build(only(structure, layouts)))
            one = mapped(
                lambda *arrays, transform=transformation.update: transform(*arrays, **extra), size
            )
            seen = None if params is None else viewed(params, layouts)
            new, states[name] = one(viewed(updates, layouts), held[name], seen)
            for (i, layout), x in zip(layouts.items(), jax.tree.leaves(new), strict=True):
                leaves[i] = layout.joined(x, leaves[i].shape, merge=matrices)
        return structure.unflatten(leaves), states[_ONE] if held is not state else states

    return optax.GradientTransformationExtraArgs(init, update)
