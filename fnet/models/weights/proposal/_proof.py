"""The proof that a model with the arrays of a PyTorch module computes what the module computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fnet.models.weights.proposal._layers import Unit
from fnet.models.weights.proposal._record import Record, matching
from fnet.models.weights.proposal._run import Compared, Program, difference, own_difference
from fnet.models.weights.proposal._source import Group


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was compared, layer by layer and at the end, and what differs.

    >>> proof = models.pretrained.Proof((), output=2e-7, tolerance=1e-5, problem=None)
    >>> proof.equal
    True

    Attributes:
        layers: what was compared of each layer.
        output: the difference of the outputs, relative to the largest value of PyTorch's.
        tolerance: the largest difference that counts as equal.
        problem: what differs first, or None.
    """

    layers: tuple[Compared, ...]
    output: float
    tolerance: float
    problem: str | None

    @property
    def equal(self) -> bool:
        """Whether all outputs agree, those of the layers included."""
        return self.problem is None

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        equal = lambda value: value is not None and value <= self.tolerance
        seen = [each.whole for each in self.layers if equal(each.whole)]
        own = [each.own for each in self.layers if equal(each.own)]
        unseen = [
            each.unit.site for each in self.layers if not equal(each.whole) and not equal(each.own)
        ]
        text = (
            f"equal: the output differs by {self.output:.1e} of its largest value, the outputs of "
            f"{len(seen)} layers by at most {max(seen, default=0):.1e}, and those of {len(own)} "
            f"layers on PyTorch's own inputs by at most {max(own, default=0):.1e}"
        )
        if unseen:
            more = f" and {len(unseen) - 6} more" if len(unseen) > 6 else ""
            text += f". Seen in the output alone: {', '.join(unseen[:6])}{more}"
        return text


def compare(
    program: Program,
    pairs: Sequence[tuple[Unit, Group]],
    trees: tuple[Any, Any],
    record: Record,
    own: bool = True,
) -> tuple[list[Compared], float]:
    """Runs the model, and returns what was compared of each layer, and the difference of the
    outputs.

    Args:
        program: the model.
        pairs: its layers, in the order of their calls, and those of PyTorch.
        trees: parameters and state.
        record: the run of PyTorch.
        own: whether to call each layer on PyTorch's own input, too.
    """
    output, seen = program(*trees)
    layers_of = recurrent_layers(pairs)
    found = []
    for unit, group in pairs:
        ours = program.outputs(unit, seen, output)
        layers = layers_of.get(group.name, 0)
        whole, shapes = difference(unit, group, ours, record, layers) if ours else (None, ())
        alone = own_difference(unit, group, *trees, record, layers) if own else None
        calls = record.calls.get(group.name, [])
        plain = all(call.plain for call in calls)
        found.append(Compared(unit, group, whole, alone, shapes, plain))
    return found, _apart(output, record.outputs)


def recurrent_layers(pairs: Sequence[tuple[Unit, Group]]) -> dict[str, int]:
    """{path of a recurrent module: the number of its layers}."""
    layers: dict[str, int] = {}
    for _, group in pairs:
        if group.layer is not None:
            layers[group.name] = max(layers.get(group.name, 0), group.layer + 1)
    return layers


def first_problem(found: Sequence[Compared], output: float, tolerance: float) -> Compared | None:
    """Returns the first layer whose outputs differ, or None.

    A class of the user's in PyTorch may do more than fnet's layer, such as a norm with its
    activation. So what it returns counts only if the output differs, and nothing else explains it.
    """
    sure = next((each for each in found if each.plain and each.differs(tolerance)), None)
    if sure is not None or output <= tolerance:
        return sure
    return next((each for each in found if each.differs(tolerance)), None)


def proof(
    found: Sequence[Compared],
    output: float,
    record: Record,
    texts: Mapping[str, str],
    tolerance: float,
) -> Proof:
    """Returns the proof, or what is wrong.

    Args:
        found, output: what `compare` returns.
        record: the run of PyTorch.
        texts: {path of a layer: the line that fills it}.
        tolerance: the largest relative difference that counts as equal.
    """
    worst = first_problem(found, output, tolerance)
    problem = None
    if worst is not None:
        problem = _difference(worst, texts, tolerance) + _hidden_before(worst, found)
    elif not output <= tolerance:
        problem = (
            f"The outputs differ by {output:.1e} of the largest value, but no layer that both "
            f"programs show does ({len(found)} compared). The code around the layers differs, or "
            "arrays that belong to no layer are exchanged"
        )
    return Proof(tuple(found), output, tolerance, problem)


def _difference(worst, texts, tolerance):
    unit, group = worst.unit, worst.group
    line = texts.get(unit.path) or f"the rule that reads {group.keys[0]!r}"
    apart = worst.own if worst.whole is None else worst.whole
    ours, theirs = worst.shapes or ("?", "?")
    text = (
        f"The first layer that differs is {unit.site!r}, from {group.name!r}, by {line}: by "
        f"{apart:.1e} of the largest value, with the shape {ours} in fnet and {theirs} in PyTorch. "
    )
    if worst.own is None:
        return text + "Layers of equal shape may be exchanged, or an option of the layer is another"
    if worst.own > tolerance:
        return text + (
            f"On the very input of PyTorch's layer, it differs by {worst.own:.1e}, too: the rule "
            "converts its arrays wrongly, or an option of the layer is another, such as epsilon, "
            "padding or the order of gates"
        )
    return text + (
        "On the very input of PyTorch's layer, it agrees, so its input is another: two layers of "
        "equal shape are exchanged, or the code before it differs"
    )


def _hidden_before(worst, found):
    """The layers before the first that differs of which PyTorch shows no outputs."""
    before = found[: next(at for at, each in enumerate(found) if each is worst)]
    hidden = [each.unit.site for each in before if each.whole is None and each.own is None]
    if not hidden:
        return ""
    more = f" and {len(hidden) - 4} more" if len(hidden) > 4 else ""
    return f". Not seen, and perhaps wrong before it: {', '.join(hidden[:4])}{more}"


def _apart(ours, theirs):
    """The largest relative difference of two lists of outputs, of those that both have."""
    if not ours or not theirs:
        return float("inf")
    worst = 0.0
    for mine, other in zip(ours, theirs):
        apart, scale = matching(mine, np.asarray(other))
        worst = max(worst, apart / scale)
    return worst
