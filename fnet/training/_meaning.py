"""Marks the state of an optimizer if an earlier release of fnet would have updated the parameters
in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fnet.training._axes import Axes, leaves
from fnet.training._decays import decays

_NEW_RUN = (
    "Continue the run with the release of fnet that began it, or begin a new run with its "
    "parameters, which tr.load(workdir).params returns"
)
_EXPLAINED = {
    "layers_apart": "the optimizer now treats each layer of a stack by itself; when the run began, all layers of a "
    f"stack shared one norm, and Muon took every array with two axes for a matrix. {_NEW_RUN}",
    "decay_by_role": "weight decay now spares all biases and scales; when the run began, it took arrays with two axes "
    f"for kernels. {_NEW_RUN}",
}
_WIDENED = (
    "averages of 16-bit parameters are now stored in float32, because they did not move in 16 "
    "bits. tr.restore(workdir, state, cast=True) converts the checkpoint; pass its result to fit "
    "with a new workdir"
)


class Meaning(NamedTuple):
    """The state of `meaning`. A field is a number if the rule applies to the parameters, and else
    None.

    A checkpoint of a run that began under the earlier rule does not have this number, and is
    rejected when it is resumed. Runs whose updates are the same under both rules have no numbers,
    so they resume as ever.

    Attributes:
        layers_apart: 1 if the optimizer treats a stack as separate layers, and the earlier rule did
            not.
        decay_by_role: 1 if weight decay applies to other parameters than under the earlier rule.
    """

    layers_apart: jax.Array | None
    decay_by_role: jax.Array | None


def meaning(name: str, axes: Any, decaying: bool) -> optax.GradientTransformation:
    """Returns a transformation that changes no updates, and whose state is a `Meaning`.

    Args:
        name: the name of the optimizer.
        axes: the argument `axes` of the optimizer.
        decaying: whether weight decay spares biases and scales.
    """

    def init(params):
        marks = (
            name in ("muon", "lamb", "lars") and _apart(name, params, Axes(axes, name)),
            decaying and jax.tree.leaves(decays(params, axes)) != _decayed_earlier(params),
        )
        return Meaning(*(jnp.int32(1) if mark else None for mark in marks))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def _apart(name, params, axes):
    layouts = [axes.layout(leaf) for leaf in leaves(params)]
    layouts = [layout for layout in layouts if layout is not None]
    if any("layers" in layout.roles for layout in layouts):
        return True
    return name == "muon" and any(layout.matrix != (len(layout.roles) == 2) for layout in layouts)


def _decayed_earlier(params):
    name = lambda path: jax.tree_util.keystr(path[-1:], simple=True) if path else ""
    return [
        name(path) not in ("bias", "scale") and jnp.ndim(leaf) > 1
        for path, leaf in jax.tree.leaves_with_path(params)
    ]


def explained(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Explains why a checkpoint of an earlier release does not fit, from the entries {path:
    description} of its leaves and of the leaves of the target. The result is empty if no rule has
    changed."""
    lines = [
        text
        for name, text in _EXPLAINED.items()
        if any(path.split("/")[-1] == name for path in wanted.keys() - saved.keys())
    ]
    wider = lambda path: (
        (saved[path].get("dtype"), wanted[path].get("dtype"))
        in (("bfloat16", "float32"), ("float16", "float32"))
    )
    if any(
        wider(path) and {"ema", "mean", "slow"} & set(path.split("/"))
        for path in wanted.keys() & saved.keys()
    ):
        lines.append(_WIDENED)
    return lines
