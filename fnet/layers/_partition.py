"""Splits a tree of parameters into trainable and frozen parameters, which are selected by their
paths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_map_with_path

from fnet._util._nearest import nearest_to_pattern


def partition(params: Any, pattern: str | Sequence[str]) -> tuple[Any, Any]:
    """Splits parameters by their paths into trainable and frozen ones.

        trainable, frozen = nn.partition(params, "head")
        grads = jax.grad(lambda trainable: loss(nn.combine(trainable, frozen)))(trainable)

    Both trees keep the structure of `params`, with None wherever a leaf lives in the other one. JAX
    skips None, so gradients, optimizer states and checkpoints of `trainable` contain no frozen
    parameters.

    Args:
      params: a tree of arrays (traced or not) or of `jax.ShapeDtypeStruct`s.
      pattern: a regular expression, or a sequence of them. A leaf is trainable if one matches its
        complete path, such as "block1/conv2/kernel", or the first names of it, such as "block1" or
        "block1/conv2". The layers of a `Stack` share their paths, so they are selected together.

    Returns:
      (trainable, frozen). Leaves that cannot have a gradient, such as integers, bools and random
      keys, are always frozen.

    Raises:
      ValueError: a pattern is not a regular expression, or matches no leaf with a gradient.

    Example:
      >>> params = {"body": {"kernel": jnp.ones((2, 2))}, "head": {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}}
      >>> trainable, frozen = partition(params, ["head/kernel", ".*/bias"])
      >>> jax.tree.map(jnp.shape, trainable)
      {'body': {'kernel': None}, 'head': {'bias': (1,), 'kernel': (2, 1)}}
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    compiled = {}
    for each in patterns:
        try:
            compiled[each] = re.compile(each)
        except re.error as error:
            raise ValueError(
                f"partition: the pattern {each!r} is not a regular expression: {error}"
            ) from None
    matched, paths = set(), []

    def trains(path: tuple, leaf: Any) -> Any:
        parts = keystr(path, simple=True, separator="/").split("/")
        if not jnp.issubdtype(getattr(leaf, "dtype", None) or jnp.result_type(leaf), jnp.inexact):
            return False
        prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        paths.append(prefixes[-1])
        found = [each for each, regex in compiled.items() if any(map(regex.fullmatch, prefixes))]
        matched.update(found)
        return bool(found)

    selected = tree_map_with_path(trains, params)
    for each in patterns:
        if each not in matched:
            raise ValueError(
                f"partition: the pattern {each!r} matches no parameter that has a gradient; "
                f"nearest: {nearest_to_pattern(each, paths) or 'there is none'}"
            )
    trainable = jax.tree.map(lambda chosen, leaf: leaf if chosen else None, selected, params)
    frozen = jax.tree.map(lambda chosen, leaf: None if chosen else leaf, selected, params)
    return trainable, frozen


def combine(*parts: Any) -> Any:
    """Puts the parts that `partition` returned together again.

    Args:
      parts: trees with the same structure. Each leaf is an array in one of them, and None in all
        others.

    Raises:
      ValueError: the structures differ, or two parts contain the same leaf.

    Example:
      >>> params = {"body": jnp.ones(2), "head": jnp.zeros(2)}
      >>> jax.tree.map(jnp.shape, combine(*partition(params, "head")))
      {'body': (2,), 'head': (2,)}
    """

    def one(path: tuple, *leaves: Any) -> Any:
        held = [leaf for leaf in leaves if leaf is not None]
        if len(held) > 1:
            raise ValueError(
                f"combine: '{keystr(path, simple=True, separator='/')}' is in {len(held)} of the "
                "parts: pass the two trees that partition returned"
            )
        return held[0] if held else None

    is_leaf = lambda x: x is None
    structures = [jax.tree.structure(part, is_leaf=is_leaf) for part in parts]
    for structure in structures[1:]:
        if structure != structures[0]:
            raise ValueError(
                "combine: expected trees of one structure, got\n  "
                + "\n  ".join(map(str, structures))
            )
    return tree_map_with_path(one, *parts, is_leaf=is_leaf)
