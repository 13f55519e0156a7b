"""A served model, which is an entry point (function) of a bundle: its inputs, compiled programs and computation."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fnet import transforms as ft
from fnet.export import _rebuild, _signature
from fnet.export._loaded import Bundle

_PROGRAMS = 64      # compiled programs of one model, for inputs of different sizes; the oldest are removed
_WARMED = 32        # programs that are compiled at the start


def leaves(name: str, tree: Any) -> list[tuple[str, dict]]:
    """Returns a list of (name, {"dtype", "shape"}) for the arrays in the description of a tree. The names of the arrays
    are paths such as cache/keys."""
    if tree is None:
        return []
    if "dtype" in tree and "shape" in tree:
        return [(name, tree)]
    (kind, children), = tree.items()
    items = children.items() if kind == "dict" else enumerate(children)
    return [leaf for key, child in items for leaf in leaves(f"{name}/{key}", child)]


class Model:
    """An entry point (a function of a bundle), which the server offers as a model.

    Attributes:
        name, version: the name and the version of the model, strings that occur in the URLs of the server.
        inputs, outputs: the types of the arrays, [(name, {"dtype", "shape"})].
        batched: whether the first axis of all inputs and outputs is a batch of independent rows. Rows are assumed to be
            independent if the first axes of all inputs and outputs have the same symbolic size, which occurs in no
            other axis and in no constraint.
    """

    def __init__(self, name: str, version: str, bundle: Bundle, entry: str, max_batch: int,
                 pad: Mapping[str, tuple[int, ...]]):
        self.name, self.version, self.bundle, self.entry = name, version, bundle, entry
        self._description = bundle.manifest["entries"][entry]
        self._stable = jax.default_backend() == "cpu" and "not_stable" not in self._description
        self._weights = [*self._description["weights"], *(self._description["constants"] if self._stable else ())]
        self.inputs = [leaf for name, tree in self._description["inputs"] for leaf in leaves(name, tree)]
        self.outputs = leaves("output", self._description["output"])
        self._programs: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
        words = [_words(n) for _, leaf in [*self.inputs, *self.outputs] for n in leaf["shape"][1:]]
        words += [_words(text) for text in self._description["constraints"]]
        firsts = {str(leaf["shape"][0]) if leaf["shape"] else "" for _, leaf in [*self.inputs, *self.outputs]}
        self._rows_name = firsts.pop() if len(firsts) == 1 else ""
        self.batched = self._rows_name.isidentifier() and all(self._rows_name not in names for names in words)
        self.max_batch = max_batch if self.batched else 1
        self.variables = sorted(set().union(*words) - {self._rows_name}) if words else []
        self.pad = {name: sorted(sizes) for name, sizes in pad.items() if name in self.variables}
        for name in self.pad:
            if any(name in _words(n) and n != name for _, leaf in self.outputs for n in leaf["shape"]):
                raise ValueError(f"serve: {self.name}: outputs have sizes computed from {name!r}; it cannot be padded")

    def bound(self, arrays: list[np.ndarray]) -> list:
        """Checks the inputs against the dtypes and shapes in the signature, and returns them converted to these dtypes.

        Raises:
            BundleError: the inputs do not match the signature (structure, dtypes and shapes of the inputs).
        """
        rest, description = iter(arrays), self._description
        named = {name: _signature.unflatten(tree, rest) for name, tree in description["inputs"]}
        flat, sizes = _signature.bound(self.name, self.entry, description, (), named)
        for name, allowed in self.pad.items():
            if sizes[name] > allowed[-1]:
                raise _signature.BundleError(f"{self.name}: {name} = {sizes[name]}, expected at most {allowed[-1]}")
        return flat

    def compute(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Computes the outputs for inputs that `bound` returned, in parts of at most `max_batch` rows."""
        sizes = {n: m for (_, leaf), x in zip(self.inputs, arrays) for n, m in zip(leaf["shape"], x.shape)}
        for name, allowed in self.pad.items():
            arrays = [_padded(x, leaf["shape"], name, next(n for n in allowed if n >= sizes[name]))
                      for (_, leaf), x in zip(self.inputs, arrays)]
        if not self.batched:
            outputs = self._run(arrays)
        else:
            pieces = [self._piece([x[i:i + self.max_batch] for x in arrays])
                      for i in range(0, len(arrays[0]), self.max_batch)]
            outputs = pieces[0] if len(pieces) == 1 else [np.concatenate(parts) for parts in zip(*pieces)]
        for name in self.pad:
            outputs = [y[tuple(slice(sizes[name] if n == name else None) for n in leaf["shape"])]
                       for (_, leaf), y in zip(self.outputs, outputs)]
        return outputs

    def _piece(self, arrays):
        """Computes the outputs for at most `max_batch` rows. Copies of the last row are added until the number of rows
        is a power of two or `max_batch`, so that few programs are compiled."""
        rows = len(arrays[0])
        size = min(1 << (rows - 1).bit_length(), self.max_batch)
        if size > rows:
            arrays = [np.concatenate([x, np.broadcast_to(x[-1:], (size - rows, *x.shape[1:]))]) for x in arrays]
        return [y[:rows] for y in self._run(arrays)]

    def _run(self, arrays):
        key = tuple(x.shape for x in arrays)
        weights = {name: self.bundle.arrays[name] for name in self._weights}
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compiled(weights, arrays)
            if len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return [np.asarray(y) for y in program(weights, arrays)]

    def _compiled(self, weights, arrays):
        """Returns the compiled program for the shapes of `arrays`.

        On a CPU, the program is created from its JSON description in the bundle (the file of the exported model), and
        `ft.tune` optimizes the program. On a GPU or TPU, or if the bundle contains no JSON description of the program,
        the server compiles the serialized `jax.export` program in the bundle.
        """
        if self._stable:
            rest = iter(arrays)
            named = {name: _signature.unflatten(tree, rest) for name, tree in self._description["inputs"]}
            _, sizes = _signature.bound(self.name, self.entry, self._description, (), named)
            return ft.tune(jax.jit(_rebuild.function(self.bundle, self.entry, sizes))).lower(weights, arrays).compile()
        return self.bundle._program(self.entry).lower(weights, arrays).compile()

    @property
    def programs(self) -> int:
        return len(self._programs)

    def warm(self) -> None:
        """Compiles the programs for the batch sizes and padded sizes that can occur, if all sizes are known in advance.
        Tests that the padding has no effect on the outputs.

        Raises:
            ValueError: an output depends on padding.
        """
        free = [name for name in self.variables if name not in self.pad]
        batches = sorted({min(1 << i, self.max_batch) for i in range(self.max_batch.bit_length() + 1)})
        for rows, *sizes in itertools.islice(itertools.product(batches, *self.pad.values()), 0 if free else _WARMED):
            known = {self._rows_name: rows, **dict(zip(self.pad, sizes))}
            self._run([np.zeros(_signature.shape(leaf, known), leaf["dtype"]) for _, leaf in self.inputs])
        if self.pad and not free:
            self._test_padding()

    def _test_padding(self):
        inputs, wanted = self.bundle.tests()[self.entry]
        if not wanted:
            return
        outputs = self.compute(list(inputs))
        for (name, _), got, want in zip(self.outputs, outputs, wanted):
            got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
            if np.abs(got - want).max(initial=0) > 1e-3 * np.abs(want).max(initial=0):
                raise ValueError(f"serve: {self.name}: the output {name!r} depends on the padding of "
                                 f"{', '.join(self.pad)}; serve the model without --pad")


def _padded(x, shape, name, size):
    widths = [(0, size - n if wanted == name else 0) for n, wanted in zip(x.shape, shape)]
    return np.pad(x, widths) if any(high for _, high in widths) else x


def _words(text) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", str(text))) - {"floordiv", "mod", "max", "min"}
