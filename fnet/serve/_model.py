"""A served model, which is an entry point (function) of a bundle: its inputs, compiled programs and
computation."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fnet import transforms as ft
from fnet.export import _evaluate
from fnet.export.standalone import _signature
from fnet.export.standalone._loaded import Bundle
from fnet.serve import _independence, _proof
from fnet.serve._batching import Alone

_PROGRAMS = (
    64  # compiled programs of one model, for inputs of different sizes; the oldest are removed
)
_WARMED = 32  # programs that are compiled at the start
_TOLERANCE = 1e-3  # of the largest output: programs for other sizes round in another order
_LOG = logging.getLogger("fnet.serve")


def leaves(name: str, tree: Any) -> list[tuple[str, dict]]:
    """Returns a list of (name, {"dtype", "shape"}) for the arrays in the description of a tree. The
    names of the arrays are paths such as cache/keys."""
    if tree is None:
        return []
    if "dtype" in tree and "shape" in tree:
        return [(name, tree)]
    ((kind, children),) = tree.items()
    items = children.items() if kind == "dict" else enumerate(children)
    return [leaf for key, child in items for leaf in leaves(f"{name}/{key}", child)]


class Model:
    """An entry point (a function of a bundle), which the server offers as a model.

    Attributes:
        name, version: the name and the version of the model, strings that occur in the URLs of the
            server.
        inputs, outputs: the types of the arrays, [(name, {"dtype", "shape"})].
        rows_name: the size variable that is the first axis of all inputs and outputs and occurs
            nowhere else, or "". An axis like this looks like a batch, but only `warm` finds out
            whether its rows are independent.
        batched: whether requests may be combined, split and padded along the first axis. False
            until `warm` has shown that the rows are independent.
        not_batched: the reason why `batched` is False, or None.
        conditions: the conditions under which rows are proved to be independent, in words, or "".
        tolerance: the largest difference between the outputs of programs for other sizes, divided
            by the largest element: each rounds in its own order.
        rounding: the same for two calls of one program: 0 on a CPU.
        max_batch: the maximum number of rows that are computed together; 1 if `batched` is False.
        variables: the other size variables.
        pad: the sizes to which some of the variables are padded, in ascending order.
    """

    def __init__(
        self,
        name: str,
        version: str,
        bundle: Bundle,
        entry: str,
        max_batch: int,
        pad: Mapping[str, tuple[int, ...]],
        assume_independent_rows: bool = False,
    ):
        self.name, self.version, self.bundle, self.entry = name, version, bundle, entry
        self._description = bundle.manifest["entries"][entry]
        self._stable = jax.default_backend() == "cpu" and "not_stable" not in self._description
        self._weights = [
            *self._description["weights"],
            *(self._description["constants"] if self._stable else ()),
        ]
        self.inputs = [
            leaf for name, tree in self._description["inputs"] for leaf in leaves(name, tree)
        ]
        self.outputs = leaves("output", self._description["output"])
        self._programs: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
        self.constraints = self._description["constraints"]
        self.tolerance = max(_TOLERANCE, self._description["tolerance"])
        self.rounding = 0.0 if jax.default_backend() == "cpu" else self.tolerance
        both = [*self.inputs, *self.outputs]
        elsewhere = set().union(
            *(_words(n) for _, leaf in both for n in leaf["shape"][1:]),
            *map(_words, self.constraints),
        )
        firsts = {leaf["shape"][0] if leaf["shape"] else None for _, leaf in both}
        first = firsts.pop() if len(firsts) == 1 else None
        self.rows_name = (
            first
            if isinstance(first, str) and first.isidentifier() and first not in elsewhere
            else ""
        )
        self._max_batch, self.max_batch, self.batched = max_batch, 1, False
        self.not_batched: str | None = "the model is not ready"
        self.conditions, self._conditional = "", False
        self._assumed = assume_independent_rows
        self._proofs: collections.OrderedDict[tuple, _proof.Proofs] = collections.OrderedDict()
        self._masks: dict[str, list[int | None]] = {}  # {padded variable: what may hide it}
        self.variables = sorted(
            set().union(*(_words(n) for _, leaf in both for n in leaf["shape"]), elsewhere)
            - {self.rows_name}
        )
        self.pad = {
            name: sorted(set(sizes)) for name, sizes in pad.items() if name in self.variables
        }
        for name in self.pad:
            if any(name in _words(n) and n != name for _, leaf in both for n in leaf["shape"]):
                raise ValueError(
                    f"serve: {self.name}: inputs or outputs have sizes computed from {name!r}; it "
                    "cannot be padded"
                )

    def bound(self, arrays: list[np.ndarray]) -> list:
        """Checks the inputs against the dtypes and shapes in the signature, and returns them
        converted to these dtypes.

        Raises:
            BundleError: the inputs do not match the signature (structure, dtypes and shapes of the
                inputs).
        """
        rest, description = iter(arrays), self._description
        named = {name: _signature.unflatten(tree, rest) for name, tree in description["inputs"]}
        flat, sizes = _signature.bound(self.name, self.entry, description, (), named)
        for name, allowed in self.pad.items():
            if sizes[name] > allowed[-1]:
                raise _signature.BundleError(
                    f"{self.name}: {name} = {sizes[name]}, expected at most {allowed[-1]}"
                )
        return flat

    def compute(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs for inputs that `bound` returned. If the rows are independent, they
        are computed in parts of at most `max_batch` rows, otherwise all at once.

        Raises:
            Alone: they must not be combined, split or padded, and `run` is right for each request.
        """
        sizes = self.sizes(arrays)
        arrays = self.padded(arrays, sizes, [0] * len(arrays))
        if not self.batched:
            outputs = self.together(arrays, sizes, rows=False)
        else:
            pieces = [
                self._piece([x[i : i + self.max_batch] for x in arrays], sizes)
                for i in range(0, len(arrays[0]), self.max_batch)
            ]
            outputs = (
                pieces[0] if len(pieces) == 1 else [np.concatenate(parts) for parts in zip(*pieces)]
            )
        return self.cut(outputs, sizes)

    def sizes(self, arrays: Sequence[np.ndarray]) -> dict[str, int]:
        """Returns the values of the size variables that are axes of the inputs."""
        return {
            n: m
            for (_, leaf), x in zip(self.inputs, arrays)
            for n, m in zip(leaf["shape"], x.shape)
            if isinstance(n, str)
        }

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether sizes satisfy the constraints of the program, and give each input a shape."""
        try:
            shapes = [_signature.shape(leaf, sizes) for _, leaf in self.inputs]
        except KeyError:
            return False
        return all(_signature.satisfied(text, sizes) for text in self.constraints) and all(
            n > 0 for shape in shapes for n in shape
        )

    def padded(
        self, arrays: Sequence[np.ndarray], sizes: Mapping[str, int], fills: Sequence[Any]
    ) -> list:
        """Returns the inputs, padded to the smallest sufficient sizes in `pad` with the values
        `fills`, one for each input."""
        for name, allowed in self.pad.items():
            size = next(n for n in allowed if n >= sizes[name])
            arrays = [
                _padded(x, leaf["shape"], name, size, fill)
                for (_, leaf), x, fill in zip(self.inputs, arrays, fills)
            ]
        return list(arrays)

    def cut(self, outputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list:
        """Returns the outputs without their padding."""
        for name in self.pad:
            outputs = [
                y[tuple(slice(sizes[name] if n == name else None) for n in leaf["shape"])]
                for (_, leaf), y in zip(self.outputs, outputs)
            ]
        return list(outputs)

    def drawn(self, sizes: Mapping[str, int], scale: float, seed: int = 0) -> list[np.ndarray]:
        """Returns random inputs of the given sizes: normal numbers of the given scale, and integers
        that are legal as lengths, too: from 0 to the smallest size besides the number of rows, or
        to a part of it with a scale below 1, because larger ones may be no tokens."""
        draw = np.random.default_rng(seed)
        most = min((n for name, n in sizes.items() if name != self.rows_name), default=9)
        most = max(1, int(most * min(scale, 1)))

        def one(shape, dtype):
            if dtype.kind == "b":
                return draw.integers(0, 2, shape).astype(dtype)
            if dtype.kind in "ui":
                return draw.integers(
                    0, 256 if dtype == np.uint8 else most, shape, endpoint=dtype != np.uint8
                ).astype(dtype)
            return (scale * draw.normal(size=shape)).astype(dtype)

        return [
            one(_signature.shape(leaf, sizes), np.dtype(leaf["dtype"])) for _, leaf in self.inputs
        ]

    def _piece(self, arrays, sizes):
        """Computes the outputs for at most `max_batch` rows. Copies of the last row are added until
        the number of rows is a power of two or `max_batch`, so that few programs are compiled."""
        rows = len(arrays[0])
        size = min(1 << (rows - 1).bit_length(), self.max_batch)
        if size > rows:
            arrays = [
                np.concatenate([x, np.broadcast_to(x[-1:], (size - rows, *x.shape[1:]))])
                for x in arrays
            ]
        several = size > 1 and self._proves_rows
        return [y[:rows] for y in self.together(arrays, sizes, rows=several)]

    def together(
        self, arrays: Sequence[np.ndarray], kept: Mapping[str, int], *, rows: bool
    ) -> list[np.ndarray]:
        """Computes the outputs for inputs that are padded from the sizes `kept`. `rows` states
        whether their rows must be independent.

        Raises:
            Alone: the rows are not proved to be independent, or the padding to reach no output, or
                the inputs break a condition of these proofs.
        """
        sizes = self.sizes(arrays)
        padded = [name for name in self.pad if kept[name] < sizes[name]]
        if not rows and not padded:
            return self.run(arrays)
        proofs = self._proved(sizes)
        if rows:
            proofs.rows()
        for name in padded:
            proofs.padding(name, self._masks.get(name, ()), kept[name], arrays)
        if not proofs.conditional:
            return self.run(arrays)
        return self._run_checked(proofs, list(arrays))

    def _proved(self, sizes: Mapping[str, int]) -> _proof.Proofs:
        key = tuple(sorted(sizes.items()))
        proofs = self._proofs.pop(key, None) or _proof.Proofs(self, sizes)
        self._proofs[key] = proofs  # the latest is the last
        if len(self._proofs) > _PROGRAMS:
            self._proofs.popitem(last=False)
        return proofs

    def _run_checked(self, proofs: _proof.Proofs, arrays: list) -> list[np.ndarray]:
        """Computes the outputs, and in the same program whether the inputs, as they are combined and
        padded, fulfill the conditions of proofs."""
        weights = {name: self.bundle.arrays[name] for name in self._description["weights"]}
        if proofs.compiled is None:
            computed = jax.jit(proofs.checked())
            computed = ft.tune(computed) if self._stable else computed
            proofs.compiled = computed.lower(weights, arrays).compile()
        error, outputs = proofs.compiled(weights, arrays)
        if error.get() is not None:
            raise Alone("condition", error.get())
        return [np.asarray(y) for y in outputs]

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs for inputs of exactly these sizes, neither padded nor split."""
        key = tuple(x.shape for x in arrays)
        weights = {name: self.bundle.arrays[name] for name in self._weights}
        arrays = list(arrays)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compiled(weights, arrays)
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return [np.asarray(y) for y in program(weights, arrays)]

    def _compiled(self, weights, arrays):
        """Returns the compiled program for the shapes of `arrays`.

        On a CPU, the program is created from its JSON description in the bundle (the file of the
        exported model), and `ft.tune` optimizes the program. On a GPU or TPU, or if the bundle
        contains no JSON description of the program, the server compiles the serialized `jax.export`
        program in the bundle.
        """
        if self._stable:
            rest = iter(arrays)
            named = {
                name: _signature.unflatten(tree, rest) for name, tree in self._description["inputs"]
            }
            _, sizes = _signature.bound(self.name, self.entry, self._description, (), named)
            return (
                ft.tune(jax.jit(_evaluate.function(self.bundle, self.entry, sizes)))
                .lower(weights, arrays)
                .compile()
            )
        return self.bundle._program(self.entry).lower(weights, arrays).compile()

    @property
    def programs(self) -> int:
        return len(self._programs) + sum(
            each.compiled is not None for each in self._proofs.values()
        )

    def warm(self) -> None:
        """Proves and tests whether the rows of a batch are independent, and whether padding reaches
        no output. Compiles the programs for the batch sizes and padded sizes that can occur, if all
        sizes are known in advance.

        Raises:
            ValueError: an output depends on padding, or the test of the padding shows nothing.
        """
        try:
            _independence.check_padding(self)
        except _independence.Dependent as error:
            raise ValueError(
                f"serve: {self.name}: {error}; serve the model without --pad"
            ) from None
        self.not_batched = self._dependence()
        self.batched = self.not_batched is None
        self.max_batch = self._max_batch if self.batched else 1
        if not self.batched:
            _LOG.warning(
                "%s: requests are computed one by one, because %s", self.name, self.not_batched
            )
        for name in self.pad:
            if (reason := self._find_masks(name)) is not None:
                _LOG.warning(
                    "%s: requests that need padding of %s are computed one by one and unpadded, "
                    "because %s",
                    self.name,
                    name,
                    reason,
                )
        tested, self._programs = self._programs, collections.OrderedDict()
        free = [name for name in self.variables if name not in self.pad]
        batches = sorted(
            {min(1 << i, self.max_batch) for i in range(self.max_batch.bit_length() + 1)}
        )
        for rows, *sizes in itertools.islice(
            itertools.product(batches, *self.pad.values()), 0 if free else _WARMED
        ):
            self._compile({self.rows_name: rows, **dict(zip(self.pad, sizes))}, tested)
        self.conditions = _proof.in_words(self._proofs.values())
        if self.conditions:
            _LOG.warning(
                "%s: requests are computed together if %s; others one by one",
                self.name,
                self.conditions,
            )

    def _compile(self, sizes: dict[str, int], tested: Mapping[tuple, Any]) -> None:
        """Compiles the program for some sizes, as a padded request needs it, if one has them."""
        kept = {
            name: size - 1 if name in self._masks and size - 1 not in (0, *self.pad[name]) else size
            for name, size in sizes.items()
        }
        kept = kept if self.allows(kept) else sizes
        inputs = self.padded(_proof.typical(self, kept), kept, [0] * len(self.inputs))
        key = tuple(x.shape for x in inputs)
        if key in tested:
            self._programs[key] = tested[key]
        with contextlib.suppress(Alone):
            self.together(inputs, kept, rows=len(inputs[0]) > 1 and self._proves_rows)

    @property
    def _proves_rows(self) -> bool:
        return self.batched and not self._assumed

    def _find_masks(self, name: str) -> str | None:
        """Looks for what hides the padding of a size variable. Returns the reason why the padding is
        not proved to reach no output, or None if it is, or none is ever needed."""
        reasons = []
        for sizes in _independence.natural(self, {name})[:1]:
            arrays = self.padded(_proof.typical(self, sizes), sizes, [0] * len(self.inputs))
            proofs = self._proved(self.sizes(arrays))
            for mask in _proof.masks(self, name):
                try:
                    proofs.padding(name, [mask], sizes[name], arrays)
                except Alone as error:
                    reasons.append(str(error))
                else:
                    self._masks.setdefault(name, []).append(mask)
                    if mask is None:
                        return None
        return None if name in self._masks or not reasons else reasons[0]

    def _dependence(self) -> str | None:
        """Returns the reason why the rows are not known to be independent, or None."""
        if not self.rows_name:
            return "the first axes of its inputs and outputs are not one size variable that occurs nowhere else"
        try:
            if not self._assumed and (reason := self._unproved()) is not None:
                return reason
            _independence.check_rows(self, self._max_batch)
        except _independence.Dependent as error:
            return str(error)
        except (
            Exception
        ) as error:  # whatever the backend raises for odd sizes or values: nothing was shown
            return f"the test of its rows failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        return None

    def _unproved(self) -> str | None:
        """Returns the reason why the rows are not proved to be independent, or None. The program is
        the same for all sizes, so a few stand for the others until one is compiled."""
        for sizes in _independence.several(self):
            for count in {2, 3, self._max_batch}:
                try:
                    verdict = self._proved({**sizes, self.rows_name: count}).rows()
                except Alone as error:
                    return str(error)
                self._conditional = self._conditional or bool(verdict.conditions)
        return None

    def tried(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Returns the outputs of a batch of the test, or None if the server would not compute it,
        because it breaks a condition of a proof."""
        if not self._conditional:
            return self.run(arrays)
        try:
            return self.together(arrays, self.sizes(arrays), rows=True)
        except Alone:
            return None


def _padded(x, shape, name, size, fill):
    widths = [(0, size - n if wanted == name else 0) for n, wanted in zip(x.shape, shape)]
    return np.pad(x, widths, constant_values=fill) if any(high for _, high in widths) else x


def _words(text) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", str(text))) - {"floordiv", "mod", "max", "min"}
