"""Proves that the rows of a batch are independent, and that padding reaches no output: whatever one
client sends, and whatever is in the padding, no bit of another client's answer changes.

The proofs are about the portable program in the bundle, before `ft.tune` or a kernel changes it.
Nothing that the manifest says is believed.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fnet import introspect
from fnet.export import _evaluate
from fnet.export.standalone import _signature
from fnet.serve._batching import Alone

_KEPT = 1024  # verdicts on padding of one size that are kept; a mask of other numbers has its own


class Proofs:
    """What is proved about the portable program of a model at some sizes, padding included.

    Attributes:
        compiled: what `checked` returned, compiled, or None.
    """

    def __init__(self, model: Any, sizes: Mapping[str, int]):
        self._model, self._sizes = model, sizes
        self._accepted: dict[tuple, introspect.Verdict] = {}
        self._padding: collections.OrderedDict[tuple, introspect.Verdict]
        self._padding = collections.OrderedDict()
        self.compiled: Any = None

    @property
    def conditional(self) -> bool:
        """Whether a proof that was asked for rests on conditions."""
        return bool(self._accepted)

    @property
    def texts(self) -> list[str]:
        """The conditions in words."""
        return [str(each) for verdict in self._accepted.values() for each in verdict.conditions]

    def rows(self) -> introspect.Verdict:
        """Returns the verdict that the rows of a batch are independent.

        Raises:
            Alone: they are not proved to be.
        """
        return self._accept(self._rows, "rows")

    def padding(
        self, name: str, masks: Iterable[int | None], length: int, arrays: Sequence[np.ndarray]
    ) -> int | None:
        """Proves that no number in the padding of a size variable reaches an output.

        If an input hides the padding, the proof is for the numbers in it. As the rows of a batch are
        independent, it is made for batches of equal rows, of which there are few.

        Args:
            name: the size variable.
            masks: what may hide the padding (see `masks`), in the order in which it is tried.
            length: the size before the padding.
            arrays: the padded inputs.

        Returns:
            What hides it.

        Raises:
            Alone: it is not proved.
        """
        reason = Alone("padding", f"the padding of {name} is not proved to reach no output")
        for mask in masks:
            try:
                for values in self._versions(name, mask, arrays):
                    self._hidden(name, mask, length, values)
            except Alone as error:
                reason = error
            else:
                return mask
        raise reason

    def _versions(
        self, name: str, mask: int | None, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray | None]:
        """The batches of equal rows of an input that may be a mask."""
        if mask is None:
            return [None]
        values, (leaf, kind) = arrays[mask], self._model.inputs[mask]
        if name in kind["shape"] and not np.isin(values, (0, 1)).all():
            raise Alone("padding", f"the input {leaf!r} is no mask of zeros and ones")
        if not self._model.batched:
            return [values]
        rows = {row.tobytes(): row for row in values}
        return [np.broadcast_to(row, values.shape) for row in rows.values()]

    def checked(self) -> Callable:
        """Returns a function (weights, inputs) -> (error, outputs), where `error.get()` is None if
        all conditions hold on which the proofs up to now rest."""
        return self._report.checked(*self._accepted.values())

    def _hidden(self, name: str, mask: int | None, length: int, values: np.ndarray | None) -> None:
        key = name, mask, length, None if values is None else values.tobytes()
        if key not in self._padding:
            for i, (other, leaf) in enumerate(self._model.inputs):
                if i != mask and leaf["shape"].count(name) > 1:
                    raise Alone("padding", f"the input {other!r} has several axes {name}")
            known = {} if values is None else {f"inputs[{mask}]": values}
            verdict = self._report.padding(name, length, known=known, trials=False)
            self._padding[key] = verdict
            if len(self._padding) > _KEPT:
                self._padding.popitem(last=False)
        self._accept(self._padding[key], "padding")

    def _accept(self, verdict: introspect.Verdict, what: str) -> introspect.Verdict:
        if verdict.status not in ("proved", "proved if"):
            raise Alone(what, " ".join(str(verdict).split()))
        conditions = tuple(each.key for each in verdict.conditions)
        if conditions and conditions not in self._accepted:
            self._accepted[conditions] = verdict
            self.compiled = None
        return verdict

    @functools.cached_property
    def _rows(self) -> introspect.Verdict:
        return self._report.verdict("independent", self._model.rows_name, trials=False)

    @functools.cached_property
    def _report(self) -> introspect.Dependence:
        model, sizes = self._model, self._sizes
        description, bundle = model.bundle.manifest["entries"][model.entry], model.bundle
        try:
            run = _evaluate.function(bundle, model.entry, sizes)
        except _signature.BundleError as error:
            raise Alone("rows", f"nothing is proved about its rows: {error}") from None
        constants = {name: bundle.arrays[name] for name in description["constants"]}
        weights = {name: _described(bundle.arrays[name]) for name in description["weights"]}
        inputs = [
            jax.ShapeDtypeStruct(_signature.shape(leaf, sizes), np.dtype(leaf["dtype"]))
            for _, leaf in model.inputs
        ]

        def outputs(weights: dict, inputs: list) -> list:
            return list(run({**constants, **weights}, inputs))

        axes = {
            name: ((None, _places(name, model.inputs)), _places(name, model.outputs))
            for name in (model.rows_name, *model.pad)
            if name
        }
        return introspect.depends(outputs, weights, inputs, axes=axes)


def masks(model: Any, name: str) -> Iterator[int | None]:
    """Yields None and the inputs that may hide the padding of a size variable: lengths, and what has
    its axis. The only input that has it is none of them: a proof for its numbers would be a proof
    for one request."""
    yield None
    kinds = [np.dtype(leaf["dtype"]).kind for _, leaf in model.inputs]
    along = [i for i, (_, leaf) in enumerate(model.inputs) if name in leaf["shape"]]
    yield from (i for i, kind in enumerate(kinds) if i not in along and kind in "iu")
    if len(along) > 1:
        yield from (i for wanted in ("b", "iu", "fV") for i in along if kinds[i] in wanted)


def typical(model: Any, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """Inputs whose masks and lengths are those that a client would send: ones, and the size."""
    length = min((sizes[name] for name in model.pad), default=0)
    inputs = [leaf for _, leaf in model.inputs]
    masks = [not model.pad.keys().isdisjoint(leaf["shape"]) for leaf in inputs]
    return [
        np.full(_signature.shape(leaf, sizes), 1 if mask else length).astype(leaf["dtype"])
        for leaf, mask in zip(inputs, masks)
    ]


def in_words(proofs: Iterable[Proofs]) -> str:
    """The conditions of proofs in one line."""
    texts = list(dict.fromkeys(text for each in proofs for text in each.texts))
    more = f" and {len(texts) - 3} more conditions hold" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _places(name: str, leaves: Sequence[tuple[str, Mapping]]) -> list[int | None]:
    """The axis of each array whose size is a variable, or None."""
    return [leaf["shape"].index(name) if name in leaf["shape"] else None for _, leaf in leaves]


def _described(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(array), array.dtype)
