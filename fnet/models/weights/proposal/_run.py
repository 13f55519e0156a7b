"""Runs of a model whose layers are compared with those of a PyTorch module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import layers as nn
from fnet.models.weights.proposal._layers import Unit
from fnet.models.weights.proposal._record import Call, Record, layouts, matching
from fnet.models.weights.proposal._source import Group
from fnet.transforms import capture, sites

_MASKS = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


@dataclasses.dataclass(frozen=True)
class Compared:
    """One layer in both programs.

    Attributes:
        unit, group: the layer of the model, and that of PyTorch.
        whole: the difference of its outputs in the whole run, relative to PyTorch's largest value;
            None if they cannot be compared.
        own: the same for the input that PyTorch's layer got.
        shapes: those of the two outputs.
        plain: whether the layer is of one of PyTorch's own classes, whose outputs are those that a
            layer of fnet must return.
        fixed: whether the user wrote the rule.
    """

    unit: Unit
    group: Group
    whole: float | None
    own: float | None = None
    shapes: tuple = ()
    plain: bool = True
    fixed: bool = False

    def differs(self, tolerance: float) -> bool:
        """Whether the outputs were compared and are not equal."""
        apart = self.own if self.whole is None else self.whole
        return apart is not None and not apart <= tolerance


class Program:
    """A model and one input of it, compiled once for all arrays."""

    def __init__(self, model: Any, inputs: tuple, units: Sequence[Unit]):
        def run(params, state, *inputs):
            return model(params, *inputs, state=state)[0]

        spec = model.spec(*inputs)
        there = [site.name for site in sites(run)(*spec, *inputs) if site.inside is None]
        self._uses: dict[str, list[str]] = {}
        for unit in units:
            for path in unit.paths:
                numbered = (f"{path}#{number}" for number in range(len(there)))
                uses = [path] if path in there else [each for each in numbered if each in there]
                self._uses[path] = uses
        wanted = list(dict.fromkeys(site for uses in self._uses.values() for site in uses))
        captured = capture(run, wanted) if wanted else lambda *args: (run(*args), {})
        self._run, self._inputs = jax.jit(captured), inputs

    def __call__(self, params: Any, state: Any) -> tuple[list, dict]:
        """Returns the arrays of the output, and {site: value}."""
        with jax.default_matmul_precision("highest"):
            output, seen = self._run(params, state, *self._inputs)
        return list(map(np.asarray, jax.tree.leaves(output))), seen

    def outputs(self, unit: Unit, seen: Mapping[str, Any], output: list) -> list[np.ndarray]:
        """Returns what a layer returned in each of its calls."""
        if not unit.path:
            return output[:1]
        parts = [
            [np.asarray(jax.tree.leaves(seen[site])[0]) for site in self._uses[path]]
            for path in unit.paths
        ]
        calls = [np.concatenate(each, -1) if len(each) > 1 else each[0] for each in zip(*parts)]
        return [call[unit.index] for call in calls]


def difference(unit: Unit, group: Group, ours: list, record: Record, layers: int) -> tuple:
    """Returns (relative difference of a layer's outputs, their two shapes); None in place of the
    difference if the outputs cannot be compared.

    Args:
        unit, group: the layer of the model, and that of PyTorch.
        ours: the outputs of the model's layer.
        record: the run of PyTorch.
        layers: the number of recurrent layers in the module.
    """
    theirs = _theirs(group, record.calls.get(group.name, []), layers)
    if not theirs or len(theirs) != len(ours):
        return None, ()
    worst, shapes = 0.0, (ours[0].shape, theirs[0].shape)
    for mine, other in zip(ours, theirs):
        if mine.size != other.size:
            return None, (mine.shape, other.shape)
        apart, scale = matching(mine, other)
        if not np.isfinite(apart) and np.isfinite(mine).all():
            return None, (mine.shape, other.shape)
        if apart / scale > worst:
            worst, shapes = apart / scale, (mine.shape, other.shape)
    if worst > 1e-3 and all(_permuted(*pair) for pair in zip(ours, theirs)):
        return None, shapes
    return worst, shapes


def _permuted(ours, theirs):
    """Whether two arrays have the same numbers in another order, such as the windows of an image."""
    apart = np.abs(np.sort(ours, None) - np.sort(theirs, None)).max(initial=0)
    return bool(apart <= 1e-5 * np.abs(theirs).max(initial=0))


def _theirs(group: Group, calls: Sequence[Call], layers: int) -> list[np.ndarray]:
    if not calls or not all(call.outputs for call in calls):
        return []
    if group.kind == "array":
        return []
    if group.kind == "recurrent" and group.layer is None:  # a cell, which is called for each step
        return [np.stack([call.outputs[0] for call in calls], 1)]
    if group.kind == "recurrent" and group.layer != layers - 1:
        return []  # PyTorch shows the outputs of the last layer alone
    return [call.outputs[0] for call in calls]


def own_difference(
    unit: Unit, group: Group, params: Any, state: Any, record: Record, layers: int
) -> float | None:
    """Returns the relative difference of a layer's outputs on the input that PyTorch's layer got, or
    None if the layer cannot be called with it."""
    calls = record.calls.get(group.name, [])
    theirs = _theirs(group, calls[:1], layers)
    if unit.layer is None or not theirs or (group.kind == "recurrent" and layers != 1):
        return None
    if group.kind == "recurrent" and (group.layer is None or len(calls[0].inputs) > 1):
        return None
    best: float | None = None
    for inputs, options in _inputs(unit, calls[0]):
        try:
            ours = _called(unit, params, state, inputs, options)
        except (TypeError, ValueError):  # another layout of the input
            continue
        apart, scale = matching(ours, theirs[0])
        if np.isfinite(apart):
            best = apart / scale if best is None else min(best, apart / scale)
    return best


def _inputs(unit, call):
    """Yields (inputs, options) of a layer of the model, for the input of PyTorch's layer."""
    if unit.kind == "attention":
        yield from _attention_inputs(unit, call)
        return
    given = [*call.inputs, *call.options.values()]
    if not given or not isinstance(given[0], np.ndarray):
        return
    if unit.kind == "embed":
        yield (given[0],), {}
        return
    kernels = [spec for path, spec in unit.leaves.items() if path.endswith("/kernel")]
    width = None
    if kernels and unit.kind in ("dense", "lstm", "gru", "rnn", "conv_transpose"):
        width = kernels[0].shape[-2] * getattr(unit.layer, "groups", 1)
    for each in layouts(given[0]):
        if width in (None, each.shape[-1]):
            yield (each,), {}


def _attention_inputs(unit, call):
    given = dict(zip(_MASKS, call.inputs)) | dict(call.options)
    q, k = given.get("query"), given.get("key")
    if q is None or k is None or q.ndim != 3:
        return
    same = q.shape == k.shape and np.array_equal(q, k)
    padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
    for turn in (False, True):
        x, source = (each.swapaxes(0, 1) if turn else each for each in (q, k))
        allowed = np.ones((x.shape[0], 1, x.shape[1], source.shape[1]), bool)
        if padding is not None:
            if padding.shape != (x.shape[0], source.shape[1]):
                continue
            allowed &= ~_forbidden(padding)[:, None, None]
        if mask is not None:
            if mask.ndim != 2 or mask.shape != allowed.shape[2:]:
                continue
            allowed &= ~_forbidden(mask)
        options = {} if allowed.all() else {"mask": allowed}
        yield ((x,) if same else (x, source)), options


def _forbidden(mask):
    return mask if mask.dtype == bool else np.isneginf(mask)


def _called(unit, params, state, inputs, options):
    parts = []
    for path in unit.paths:
        own = [_node(tree, path, unit.index) for tree in (params, state)]
        layer = unit.layer
        if isinstance(layer, nn.Dense):
            layer = dataclasses.replace(layer, features=own[0]["kernel"].shape[-1])
        with jax.default_matmul_precision("highest"):
            y, _ = layer(own[0], *map(jnp.asarray, inputs), state=own[1], **options)
        parts.append(np.asarray(jax.tree.leaves(y)[0]))
    return np.concatenate(parts, -1) if len(parts) > 1 else parts[0]


def _node(tree, path, index):
    """The arrays of a layer, of one copy in a stack; {} if it has none in this tree."""
    for part in path.split("/") if path else ():
        if part not in tree:
            return {}
        tree = tree[part]
    return jax.tree.map(lambda array: array[index], tree) if index else tree
