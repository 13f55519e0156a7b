"""Pruning by masks: training that gradually sets the elements of smallest magnitude to zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from fnet.compress._fake import FakeQuantized
from fnet.compress._rules import is_kernel, matching
from fnet.jaxpr import is_implicit

if TYPE_CHECKING:
    import optax


class PruneState(NamedTuple):
    """The state of `prune`.

    >>> optimizer = compress.prune({"kernel": 0.5}, end=10)
    >>> params = {"kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]])}
    >>> state = optimizer.init(params)
    >>> state.masks["kernel"].tolist()
    [[True, True], [True, True]]

    Attributes:
        count: the number of updates so far, int32.
        masks: a tree with the structure of the parameters: a boolean mask for each pruned one,
            False at its zeros, and `optax.MaskedNode()` for every other.
    """

    count: Any
    masks: Any


def prune(
    rules: Mapping[str, float], *, begin: int = 0, end: int, every: int = 1, jointly: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Returns an Optax transformation that sets the elements with the smallest magnitudes to zero.

        optimizer = optax.chain(optax.adamw(1e-3), compress.prune({"blocks": 0.8, "head": 0.5}, begin=500, end=4000))

    It must be the last one of a chain. The fraction of zeros s_t grows from 0 at update `begin` to
    the sparsity s at update `end`, and an element that is zero stays zero:

        s_t = s - s (1 - (t - begin) / (end - begin))^3

    Zeros make no program faster. To that end, `shrink` removes whole channels and heads.

    Args:
        rules: {pattern: sparsity between 0 and 1}. A pattern is a regular expression that matches
            the whole path of a parameter, or its first parts such as "blocks"; the first that
            matches applies. Parameters with fewer than two axes, or named bias, scale, b or offset,
            are not pruned.
        begin, end: the first and the last update in which elements are selected, counted from 0.
            Default of `begin`: 0.
        every: the number of updates from one selection to the next. Default 1.
        jointly: whether all parameters that match a pattern are ranked together (global pruning),
            so that their fractions of zeros differ. Default False: each has the same fraction.
            Layers that are stacked in one array are always ranked together.

    Returns:
        An `optax.GradientTransformationExtraArgs`, whose state is a `PruneState`. Its `update`
        needs the parameters: `update(gradients, state, params)`.

    Raises:
        ValueError: a sparsity is not between 0 and 1, `begin` is negative or larger than `end`,
            `every` is less than 1, or (in `init`) a pattern matches no parameter.

    Source: Zhu and Gupta (2017), To prune, or not to prune, equation 1.

    >>> import optax
    >>> tx = optax.chain(optax.sgd(0.0), compress.prune({"kernel": 0.5}, end=0))
    >>> params = {"kernel": jnp.array([[3.0, -1.0], [0.5, 2.0]])}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["kernel"].tolist()
    [[3.0, 0.0], [0.0, 2.0]]
    """
    import optax

    if not 0 <= begin <= end or every < 1:
        raise ValueError(
            f"prune: expected 0 <= begin <= end and every >= 1; got begin={begin}, end={end}, "
            f"every={every}"
        )

    if isinstance(rules, Mapping):
        for pattern, sparsity in rules.items():
            if not isinstance(sparsity, float) or not 0 < sparsity < 1:
                raise ValueError(
                    f"prune: expected a sparsity between 0 and 1 for {pattern!r}; got {sparsity!r}"
                )

    def init(params):
        masks = []
        for x, pattern in zip(jax.tree.leaves(params), _patterns(params, rules)):
            masks.append(optax.MaskedNode() if pattern is None else jnp.ones(x.shape, bool))
        tree = jax.tree.unflatten(jax.tree.structure(params), masks)
        return PruneState(jnp.zeros((), jnp.int32), tree)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("prune: expected the parameters: tx.update(gradients, state, params)")
        leaves, structure = jax.tree.flatten(updates)
        values, patterns = jax.tree.leaves(params), _patterns(params, rules)
        pruned = [i for i, pattern in enumerate(patterns) if pattern is not None]
        masks, mask_structure = jax.tree.flatten(state.masks)

        sizes = []  # magnitudes after the update, 0 where a parameter is pruned already
        for i, mask in zip(pruned, masks):
            x = values[i]
            sizes.append(jnp.where(mask, jnp.abs(x + leaves[i].astype(x.dtype)), 0))
        names = [patterns[i] for i in pruned]
        masks = jax.lax.cond(
            _due(state.count, begin, end, every),
            lambda: _select(sizes, names, rules, _progress(state.count, begin, end), jointly),
            lambda: masks,
        )
        for i, mask in zip(pruned, masks):
            to_zero = -values[i].astype(leaves[i].dtype)
            leaves[i] = jnp.where(mask, leaves[i], to_zero)
        new_state = PruneState(state.count + 1, jax.tree.unflatten(mask_structure, masks))
        return jax.tree.unflatten(structure, leaves), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _patterns(params, rules) -> list[str | None]:
    """Returns for each leaf the pattern that applies to it, or None. An implicit array (such as
    a quantized array) can be pruned only if it is a `FakeQuantized`. In a `FakeQuantized`, only
    the leaf `values` can be pruned."""
    paths = []  # "" for a leaf that cannot be pruned
    for path, leaf in jax.tree.leaves_with_path(params, is_implicit):
        name = keystr(path, simple=True, separator="/") if is_kernel(path, leaf) else ""
        if not is_implicit(leaf):
            paths.append(name)
            continue
        for below in jax.tree.leaves(leaf):
            prunable = isinstance(leaf, FakeQuantized) and below is leaf.values
            paths.append(name if prunable else "")
    first = matching("prune", rules, list(filter(None, paths)), "kernel or table")
    return [first.get(path) for path in paths]


def _due(count, begin, end, every):
    return (count >= begin) & (((count <= end) & ((count - begin) % every == 0)) | (count == end))


def _progress(count, begin, end):
    """Returns s_t / s, the sparsity at update `count` divided by the final sparsity."""
    elapsed = jnp.clip((count - begin).astype(jnp.float32) / max(1, end - begin), 0, 1)
    return 1 - (1 - jnp.where(count >= end, 1.0, elapsed)) ** 3


def _select(sizes, names, rules, progress, jointly) -> list:
    """Returns new masks for the parameters. `sizes` contains the magnitudes of the elements of the
    parameters."""
    together: dict[Any, list[int]] = {}
    for i, name in enumerate(names):
        together.setdefault(name if jointly else i, []).append(i)
    masks: list[Any] = [None] * len(sizes)
    for members in together.values():
        flat = jnp.concatenate([sizes[i].ravel() for i in members])
        zeros = jnp.round(progress * rules[names[members[0]]] * flat.size).astype(jnp.int32)
        order = jnp.argsort(flat)
        kept = (
            jnp.zeros(flat.shape, bool)
            .at[order]
            .set(jnp.arange(flat.size, dtype=jnp.int32) >= zeros)
        )
        start = 0
        for i in members:
            masks[i] = kept[start : start + sizes[i].size].reshape(sizes[i].shape)
            start += sizes[i].size
    return masks
