"""Which parameters weight decay applies to: all except biases and scales."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from fnet.training._axes import Axes, Leaf, leaves

# Words of a parameter's name, in lower case and without digits.
_SPARED = {
    "bias",
    "biases",
    "b",
    "beta",
    "offset",
    "shift",
    "scale",
    "scales",
    "gamma",
    "gain",
    "slope",
}
_DECAYED = {
    "kernel",
    "kernels",
    "w",
    "weights",
    "matrix",
    "embedding",
    "embeddings",
    "embed",
    "table",
    "token",
    "tokens",
    "position",
    "positions",
    "pos",
    "gate",
    "up",
    "down",
}
_EQUINOX_NORMS = {"LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm"}
_PARTS_OF_IMPLICIT_ARRAYS = {"a", "b", "base", "values", "codes"}


def decays(params: Any, axes: Any = None) -> Any:
    """Returns a tree of bools: whether weight decay applies to each leaf of `params`.

    It does not apply to biases and the scales of normalizations. The number of axes does not tell
    them apart, since a bias in an attention layer or in a stack of layers has several. If `axes`
    names the axes of a leaf, these decide: a bias or a scale has one number for each output, so all
    of its axes are outputs (or layers). Otherwise the name decides, such as "bias", "b", "scale",
    "offset" or "gamma" on the one hand, "kernel", "w" or "embedding" on the other; in a module of
    Equinox, the class of the module that contains the array `weight`.

    Args:
        params: parameters of any library.
        axes: what the axes of the parameters are, as in `by_layer`, for example `model.spec(x)`.
            Default None.

    Raises:
        ValueError: neither `axes` nor the name of a leaf say whether it is a bias or scale.

    >>> tr.decays({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
    {'bias': False, 'kernel': True}
    >>> tr.decays({"query": {"theta": jnp.ones((4, 8))}}, {"query/theta": "out out"})
    {'query': {'theta': False}}
    """
    known = Axes(axes, "decays")
    return jax.tree.structure(params).unflatten([_decays(leaf, known) for leaf in leaves(params)])


def _decays(leaf: Leaf, axes: Axes) -> bool:
    if not jnp.issubdtype(jnp.result_type(leaf.value), jnp.inexact):
        return False
    if leaf.part is not None and leaf.part.split("/")[-1] not in _PARTS_OF_IMPLICIT_ARRAYS:
        return False  # a scale or a step size
    layout = axes.layout(leaf)
    if layout is not None and layout.declared and None not in layout.roles:
        return not layout.spared
    if (named := _by_name(leaf)) is None:
        raise ValueError(
            f"weight decay: whether {leaf.shown} is a bias or a scale is not known from its name. "
            f"Say what its axes "
            f'are, for example tr.optimizer(..., axes={{{leaf.path!r}: "in out"}}) for a matrix, {{{leaf.path!r}: '
            f'"out"}} for a bias or a scale, "layers out" if it is stacked; or pass decay_all=True'
        )
    return named


def _by_name(leaf: Leaf) -> bool | None:
    """Whether a leaf decays according to its name and to the module that contains it; None if they
    do not say."""
    words = {
        re.sub(r"\d+", "", word)
        for word in re.split(r"[\W_]+", leaf.names[-1].lower() if leaf.names else "")
    }
    bases = [base for base in type(leaf.owner).__mro__ if base.__module__.startswith("equinox.nn")]
    if any(base.__name__ in _EQUINOX_NORMS for base in bases):
        return False
    if "lora" in words:  # lora_a and lora_b of nnx
        return True
    if words & _SPARED:
        return False
    return True if words & _DECAYED or (bases and "weight" in words) else None
