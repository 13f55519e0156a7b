"""Batches from iterables: torch's DataLoader, Hugging Face and Grain data sets, generators."""

from __future__ import annotations

import base64
import inspect
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.data._arrays import is_leaf, numbers_of
from fnet.training.data._batches import Batches
from fnet.training.loop._fingerprint import ResumeWarning

GUARANTEES = {
    "exact": "a resumed run continues with the batches of an uninterrupted run",
    "epoch": "a resumed run reads the epoch again up to its batch; the batches are those of an uninterrupted run if "
    "the "
    "source yields the same ones whenever it is asked for that epoch",
    "none": "a resumed run reads the data from its beginning",
}
_SAVED = 8  # number of checkpoints whose states are kept
_STATES = (
    64  # number of steps whose states are kept, because batches are prepared before they are needed
)


def from_iterator(
    source: Any,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    resume: str | None = None,
) -> Callable[[int], Any]:
    """Makes batches for `fit` from an iterable: a DataLoader, a dataset, a generator function.

    The result is a function: `batches(i)` is the batch of step i, and one epoch follows another.
    Tensors of torch and TensorFlow become NumPy arrays, without an import of torch, TensorFlow,
    datasets, torchdata or grain. Which batches a resumed run gets depends on the source;
    `batches.resume` says it, and `fit` logs it:

    - "exact": those of an uninterrupted run. The source is read by index (a sequence, a Grain
      MapDataset, a Hugging Face Dataset), or it or its iterator has a state to save: state_dict and
      load_state_dict, or get_state and set_state (a Hugging Face IterableDataset, a torchdata
      StatefulDataLoader, a Grain IterDataset).

    - "epoch": the interrupted epoch is read again and skipped up to the interruption, which gives
      the same batches if the source repeats itself. So it is for a function that returns a
      generator for each epoch, for a DataLoader that does not shuffle, and for a Hugging Face
      IterableDataset after `shuffle(buffer_size=)`, whose state lacks the shuffle buffer.

    - "none": those from the beginning of the data, with a `ResumeWarning`. So it is for a shuffled
      DataLoader, whose order cannot be repeated.

    Args:
      source: an iterable that can be iterated again for each epoch, or a function that returns one,
        of no argument or of the number of the epoch. Its items are batches, trees of arrays; with
        `batch_size`, they are examples.
      batch_size: the number of examples to combine into a batch. Default None: the items are
        batches.
      seed, shuffle: the seed of the permutations (default 0), and whether to permute (default
        True), as in `Batches`. Used only with `batch_size` and a source that is read by index.
      resume: "epoch" or "none", to settle for less, for example if reading the epoch again would
        take too long. Default None: the best that the source supports.

    Raises:
      TypeError: `source` cannot be iterated, or only once, as an iterator. `batches(i)` raises it
        for values that are not numbers.
      ValueError: the source has no batches. `batches(i)` raises it for a batch with another
        structure than the one before.

    Example:
      >>> batches = from_iterator(lambda epoch: ({"x": np.full(2, 10 * epoch + i)} for i in range(3)))
      >>> [batches(i)["x"][0].item() for i in range(5)], batches.resume
      ([0, 1, 2, 10, 11], 'epoch')
    """
    if resume not in (None, "epoch", "none"):
        raise ValueError(
            f"from_iterator: resume={resume!r}: expected 'epoch', 'none' or None, for the best "
            f"guarantee"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(
            f"from_iterator: batch_size={batch_size}: a batch needs at least one example"
        )
    if isinstance(source, Mapping):
        raise TypeError(
            "from_iterator: expected an iterable of batches, got a dict: use Batches for arrays"
        )
    factory = isinstance(source, type) or (callable(source) and not hasattr(source, "__iter__"))
    if not factory and hasattr(source, "__next__"):
        raise TypeError(
            f"from_iterator: expected an iterable that can be iterated for each epoch, got a "
            f"{type(source).__name__}, which can be iterated once. Pass the function that creates "
            f"it"
        )
    # A data set of Hugging Face.
    table = hasattr(source, "column_names") and hasattr(source, "iter")
    if table and batch_size is None:
        raise ValueError("from_iterator: the items of this data set are examples: pass batch_size=")
    random_access = not factory and all(
        hasattr(source, name) for name in ("__getitem__", "__len__")
    )
    if random_access and resume is None:
        if len(source) < 1:
            raise ValueError("from_iterator: the source is empty")
        return _Indexed(source, batch_size, seed, shuffle)
    if table and hasattr(source, "batch"):
        source, batch_size = source.batch(batch_size), None
    if not factory and not hasattr(source, "__iter__"):
        raise TypeError(
            "from_iterator: expected an iterable of batches, or a function that returns one, got a "
            f"{type(source).__name__}"
        )
    return _Stream(source, factory, batch_size, resume)


class _Indexed:
    """Batches of a sequence."""

    resume = "exact"

    def __init__(self, items: Any, batch_size: int | None, seed: int, shuffle: bool):
        self._items, self._many = items, hasattr(items, "column_names")
        self._rows = batch_size and Batches(
            np.arange(len(items)), batch_size, seed=seed, shuffle=shuffle
        )
        # A MapDataset has no last index: epochs differ in order.
        self._endless = hasattr(items, "to_iter_dataset")
        self._structure = _Structure()

    def __call__(self, step: int) -> Any:
        if self._rows is None:
            batch = self._items[step if self._endless else step % len(self._items)]
        elif self._many:
            batch = self._items[self._rows(step).tolist()]
        else:
            batch = _stacked([self._items[i] for i in self._rows(step).tolist()])
        return self._structure.checked(batch, step)

    def steps(self, epochs: float) -> int:
        """Returns the number of batches in `epochs` epochs, rounded up."""
        return (
            math.ceil(epochs * len(self._items)) if self._rows is None else self._rows.steps(epochs)
        )

    def identity(self) -> dict[str, Any]:
        """Returns a dict of values that identify this data source, as `Batches.identity` does."""
        return {"items": len(self._items)} if self._rows is None else self._rows.identity()


class _Stream:
    """Batches of an iterable source, in the order in which the source yields them.

    Attributes:
      resume: states which batches a resumed run gets: "exact", "epoch" or "none" (see
          `from_iterator`).
      why: the reason if a resumed run cannot continue with the same batches (`resume` is "none"),
          or None.
    """

    def __init__(self, source: Any, factory: bool, batch_size: int | None, resume: str | None):
        self._source, self._factory, self._batch_size = source, factory, batch_size
        self._lock = threading.Lock()  # a thread that waits for its first batch may be left behind
        self._structure, self._last = _Structure(), None
        self._epochs = {0: 0}  # first step: epoch
        self._states: dict[int, str] = {}  # the source's state before a step
        self._saved: dict[int, None] = {}  # steps whose states are kept, in order
        self._stateful = resume is None
        self._open(0)
        self._stateful = (
            resume is None and self._methods() is not None and not _forgets(self._opened)
        )
        self.why = "resume='none'" if resume else _unrepeatable(self._opened, self._factory)
        self.resume = resume or ("exact" if self._stateful else "none" if self.why else "epoch")

    def __call__(self, step: int) -> Any:
        """The batch of step `step`."""
        with self._lock:
            if step == self._at - 1 and self._last is not None:
                return self._last
            self._go(step)
            self._last = self._structure.checked(self._next(), step)
            return self._last

    def steps(self, epochs: float) -> int:
        """Returns the number of batches in `epochs` epochs, rounded up.

        Raises:
          TypeError: the source has no length.
        """
        if not hasattr(self._opened, "__len__"):
            raise TypeError(
                f"from_iterator: a {type(self._opened).__name__} has no length: give the number of "
                f"steps"
            )
        return math.ceil(epochs * math.ceil(len(self._opened) / (self._batch_size or 1)))

    def position(self, step: int) -> dict[str, Any]:
        """Returns the position of batch `step` in the source: a dict (epoch, first step of the
        epoch, state of the source) for JSON. The source's states are kept only for the last few
        batches, so `step` must be recent."""
        self._saved[step] = None
        if len(self._saved) > _SAVED:
            self._saved.pop(old := next(iter(self._saved)))
            if old < step - _STATES:
                self._states.pop(old, None)
        # The thread may add one.
        first = max(first for first in tuple(self._epochs) if first <= step)
        return {"epoch": self._epochs[first], "first": first, "state": self._states.get(step)}

    def seek(self, step: int, position: Mapping[str, Any] | None) -> None:
        """Continues with batch `step`. The argument `position` is the dict that the method
        `position` returned for this step in an earlier process, or None if the checkpoint contains
        no such dict. If the number of processes has changed, the value of the dict's key "state" is
        None."""
        if self.resume == "none":
            warnings.warn(
                f"the data is read from its beginning at step {step}, not from the position that "
                f"the run had reached: {self.why}",
                ResumeWarning,
                stacklevel=5,
            )
        elif position is not None:
            self._epochs[position["first"]] = position["epoch"]
            if self._stateful and position["state"] is not None:
                self._states[step] = position["state"]
                self._saved[step] = None

    def _go(self, step: int) -> None:
        """Moves the iterator to batch `step`. The source is opened at the nearest earlier batch
        whose position is known, and the batches before `step` are skipped."""
        if step != self._at and self.resume != "none":
            start = max(at for at in (*self._epochs, *self._states) if at <= step)
            if not start <= self._at < step:
                self._open(start)
            while self._at < step:
                self._next()
        self._at = step

    def _open(self, at: int) -> None:
        """Opens the source, so that the next batch is the batch of step `at`. `at` must be the
        first step of an epoch, or a step for which the state of the source has been stored."""
        self._at, self._first = at, max(first for first in self._epochs if first <= at)
        self._opened = self._make(self._epochs[self._first])
        state, of_source = self._states.get(at), _state_methods(self._opened)
        if state is not None and of_source:
            of_source[1](_decoded(state))
        self._start()
        if state is not None and not of_source:
            self._methods()[1](_decoded(state))

    def _make(self, epoch: int) -> Any:
        """Returns the iterable of the batches of an epoch."""
        source = self._source
        if self._factory:
            source = source(epoch) if _takes_epoch(source) else source()
            if not hasattr(source, "__iter__"):
                raise TypeError(
                    "from_iterator: the function must return an iterable of batches, got a "
                    f"{type(source).__name__}"
                )
        for part in (source, getattr(source, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        return source

    def _start(self) -> None:
        self._iterator = iter(self._opened)
        self._items = (
            self._iterator
            if self._batch_size is None
            else _grouped(self._iterator, self._batch_size)
        )

    def _methods(self) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
        return _state_methods(self._opened) or _state_methods(self._iterator)

    def _next(self) -> Any:
        """Returns the next batch. After the last batch of an epoch, `_next` opens the next epoch
        and returns its first batch."""
        epoch = self._epochs[self._first]
        item = next(self._items, _END)
        if item is _END and self._at > self._first:
            epoch, self._first = epoch + 1, self._at
            self._epochs[self._first] = epoch
            self._states.pop(self._first, None)  # the state at the end of the previous epoch
            self._opened = self._make(epoch)
            self._start()
            item = next(self._items, _END)
        if item is _END:
            again = (
                ": the function must return a new iterable at each call"
                if self._factory and epoch
                else ""
            )
            raise ValueError(f"from_iterator: epoch {epoch} has no batches{again}")
        self._at += 1
        if self._stateful:
            try:
                self._states[self._at] = _encoded(self._methods()[0]())
            except (
                TypeError,
                ValueError,
            ):  # a state that JSON cannot hold: read the epoch again instead
                self._stateful, self.resume = False, "none" if self.why else "epoch"
            if (old := self._at - _STATES) not in self._saved:
                self._states.pop(old, None)
        return item


class _Structure:
    """Converts batches to NumPy arrays, and checks that all batches have the same tree structure."""

    def __init__(self):
        self._paths: list[str] | None = None

    def checked(self, batch: Any, step: int) -> Any:
        paths: list[str] = []

        def convert(path, leaf):
            paths.append(jax.tree_util.keystr(path, simple=True, separator="/"))
            array = _array(leaf)
            return (
                array
                if isinstance(array, jax.Array)
                else numbers_of(array, f"batch {step}", paths[-1])
            )

        batch = jax.tree_util.tree_map_with_path(convert, batch, is_leaf=is_leaf)
        if not paths:
            raise ValueError(f"from_iterator: batch {step} has no arrays: it is {batch!r}")
        if self._paths is not None and paths != self._paths:
            raise ValueError(
                f"from_iterator: batch {step} has the arrays {paths}, and the batches before it "
                f"have {self._paths}: all batches must have one structure"
            )
        self._paths = paths
        return batch


def _array(leaf: Any) -> np.ndarray | jax.Array:
    """Converts a leaf (an array, a list, a tensor of torch or TensorFlow) to a NumPy array. Arrays
    of JAX are returned unchanged."""
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
        return (
            leaf.float().numpy().astype(jnp.bfloat16)
            if "bfloat16" in str(leaf.dtype)
            else leaf.numpy()
        )
    if isinstance(leaf, list):
        leaf = [_array(each) if hasattr(each, "detach") else each for each in leaf]
        try:
            return np.asarray(leaf)
        except ValueError:
            raise TypeError(
                "from_iterator: a batch holds lists of different lengths: pad them to one length"
            ) from None
    if isinstance(leaf, jax.Array):
        return leaf
    return np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)


def _stacked(examples: list[Any]) -> Any:
    stack = lambda *leaves: np.stack([_array(leaf) for leaf in leaves])
    try:
        return jax.tree.map(stack, *examples, is_leaf=is_leaf)
    except ValueError as error:
        raise ValueError(
            f"from_iterator: the examples of a batch do not fit together: {error}"
        ) from None


def _grouped(iterator: Iterator[Any], size: int) -> Iterator[Any]:
    examples = []
    for example in iterator:
        examples.append(example)
        if len(examples) == size:
            yield _stacked(examples)
            examples = []
    if examples:
        yield _stacked(examples)


def _takes_epoch(function: Callable) -> bool:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name == "epoch" for p in positional)


def _unrepeatable(source: Any, fresh: bool) -> str | None:
    """Returns the reason why the order of a DataLoader cannot be repeated, or None if the order can
    be repeated. The order of a shuffled DataLoader can be repeated only if the DataLoader and its
    random generator are created anew for each epoch. `fresh` states whether the user passed a
    function that creates the DataLoader for each epoch."""
    sampler = getattr(getattr(source, "batch_sampler", None), "sampler", None) or getattr(
        source, "sampler", None
    )
    if hasattr(sampler, "generator") and (sampler.generator is None or not fresh):
        return (
            "a shuffled DataLoader has another order in each process: pass a function of the "
            "epoch, lambda epoch: DataLoader(..., shuffle=True, "
            "generator=torch.Generator().manual_seed(epoch))"
        )
    return None


def _forgets(source: Any) -> bool:
    """Returns True if the saved state of the source lacks the shuffle buffer, as for a Hugging Face
    IterableDataset. A run resumed from a state without the shuffle buffer would have other
    batches."""
    parts = [source]
    while parts:
        part = parts.pop()
        if "BufferShuffled" in type(part).__name__:
            return True
        held = getattr(part, "__dict__", {})
        parts += [held[name] for name in ("dataset", "_ex_iterable", "ex_iterable") if name in held]
        parts += held.get("ex_iterables", ())
    return False


def _state_methods(part: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    for get, put in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if hasattr(part, get) and hasattr(part, put):
            return getattr(part, get), getattr(part, put)
    return None


def _encoded(state: Any) -> str:
    def other(value):
        if isinstance(value, bytes):
            return {"__base64__": base64.b64encode(value).decode()}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError

    return json.dumps(state, default=other)


def _decoded(state: str) -> Any:
    bytes_of = lambda found: (
        base64.b64decode(found["__base64__"]) if found.keys() == {"__base64__"} else found
    )
    return json.loads(state, object_hook=bytes_of)


_END = object()
