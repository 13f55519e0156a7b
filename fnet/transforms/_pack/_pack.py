"""pack: a step written for one padded text per row, on packed rows."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from fnet import _jax
from fnet._util._text_table import aligned
from fnet.jaxpr import Structure, Traced, check_function, is_array, mutable, wraps
from fnet.transforms._bucket._bucket import settings
from fnet.transforms._bucket._padded import Note
from fnet.transforms._bucket._program import is_inexact
from fnet.transforms._pack._program import Program, note_of
from fnet.transforms._pack._rows import Rows

SEGMENTS = "segments"


@dataclasses.dataclass(frozen=True)
class Packing:
    """What `pack` does in a call, as `ft.explain` reports it. `str()` returns a table.

    Attributes:
        shape: (rows, length) of the packed rows.
        texts: the most texts that they may hold.
        rows: a `Note` for each equation that was rewritten, with the fields scope, primitive,
            reason and line.
    """

    shape: tuple[int, int]
    texts: int
    rows: tuple[Note, ...]

    def __str__(self):
        first = (
            f"{self.shape[0]} rows of {self.shape[1]} places, up to {self.texts} texts: "
            f"{len(self.rows)} equations changed"
        )
        if not self.rows:
            return first
        table = [("scope", "operation", "line", "what and why")]
        table += [
            (row.scope or "(no scope)", row.primitive, row.line, row.reason) for row in self.rows
        ]
        return "\n".join([first, "", *aligned(table, left=range(4))])


@dataclasses.dataclass(frozen=True)
class _Letters:
    """The letters of the axes: of a text's positions, and of the texts."""

    time: str
    row: str

    def parsed(self, text: str | None, x: Any, i: int) -> tuple[str, ...] | str | None:
        """Returns the letters of an array's axes, "" for any other axis; None for an array that is
        not packed."""
        if text is None or not is_array(x):
            return None
        if text.strip() == SEGMENTS:
            return SEGMENTS
        parts = [part.strip() for part in text.split(",")]
        if "..." in parts:
            where = parts.index("...")
            parts[where : where + 1] = [""] * (np.ndim(x) - len(parts) + 1)
        if len(parts) != np.ndim(x):
            raise ValueError(
                f'pack: argument {i} has an array of shape {tuple(x.shape)}, expected "{text}"; '
                'name each of its axes, or write "..." for some of them'
            )
        found = tuple(part if part in (self.time, self.row) else "" for part in parts)
        if self.time in found and found.count(self.row) != 1:
            raise ValueError(
                f'pack: "{text}" has positions {self.time!r} without texts; each row of an array '
                f'of tokens is a text: write "{self.row}, {self.time}"'
            )
        if found.count(self.time) > 1:
            raise ValueError(f'pack: "{text}" has the axis {self.time!r} twice')
        return found if any(found) else None


class _Call:
    """A call of a packed function.

    Attributes:
        arrays: the arrays of the arguments, with the segments in place of the lengths.
        segments: the segments [rows, length].
        lengths: the numbers of the arrays that are the lengths of the texts.
        texts: the most texts.
    """

    def __init__(self, packed: _Packed, args: tuple, kwargs: dict, segments: Any):
        self._letters, self.f = packed.letters, packed.f
        self.f, own = mutable.opened(self.f)
        (given, self._options), self._modules, self.found = mutable.extract(((*own, *args), kwargs))
        before, arguments = given[: len(own)], given[len(own) :]
        self._leaves, self._structure = jax.tree.flatten(((given, self._options), self._modules))
        self._axes: list[Any] = [None] * len(jax.tree.leaves(before))
        self._axes += _spread(packed.axes, arguments, self._letters)
        self._axes += [None] * (len(self._leaves) - len(self._axes))
        pairs = [(x, axes) for x, axes in zip(self._leaves, self._axes) if is_array(x)]
        self.arrays = [x for x, _ in pairs]
        self.axes = [axes for _, axes in pairs]
        self.lengths = [i for i, axes in enumerate(self.axes) if axes == SEGMENTS]
        self.segments = _segments(segments, [self.arrays[i] for i in self.lengths])
        self.shape = tuple(map(int, self.segments.shape))
        self.texts = self._count(packed.texts)
        self.longest = min(packed.longest or self.shape[1], self.shape[1])
        self._check()

    def _count(self, texts: int | None) -> int:
        given = {
            int(n)
            for x, axes in zip(self.arrays, self.axes)
            if isinstance(axes, tuple) and self._letters.time not in axes
            for n, name in zip(x.shape, axes)
            if name == self._letters.row
        }
        if texts is not None:
            given.add(texts)
        if len(given) > 1:
            raise ValueError(
                f"pack: arrays with an axis {self._letters.row!r} of the texts, or texts=, have "
                f"different sizes: {sorted(given)}; give each one element for every text that the "
                "rows may hold"
            )
        return given.pop() if given else self.shape[0] * self.shape[1]

    def _check(self) -> None:
        for x, axes in zip(self.arrays, self.axes):
            if not isinstance(axes, tuple) or self._letters.time not in axes:
                continue
            here = tuple(x.shape[axes.index(a)] for a in (self._letters.row, self._letters.time))
            if here != self.shape:
                raise ValueError(
                    f"pack: an array of tokens has shape {tuple(x.shape)}, expected the packed rows "
                    f"{list(self.shape)} of the segments"
                )
        if isinstance(self.segments, jax.core.Tracer):
            return
        segments = np.asarray(self.segments)
        before = np.pad(segments, ((0, 0), (1, 0)))[:, :-1]
        begins = (segments != before) & (segments != 0)
        count = int(begins.sum())
        for row, first in zip(segments, begins):
            if len({*row[first]}) < first.sum():
                raise ValueError(
                    f"pack: the segments {row.tolist()} of a row have a number twice; the tokens of "
                    "a text stand next to one another, and texts of one row have different numbers"
                )
        if count > self.texts:
            raise ValueError(
                f"pack: the segments have {count} texts, more than the {self.texts} for which there "
                "is room; pass a larger texts=, or arrays with more elements"
            )
        most = max((int((row == number).sum()) for row in segments for number in {*row} - {0}),
                   default=0)  # fmt: skip
        if most > self.longest:
            raise ValueError(
                f"pack: a text has {most} tokens, more than longest={self.longest}; shorten it, or "
                "pass a larger longest="
            )

    @functools.cached_property
    def key(self) -> tuple:
        tree = jax.tree.unflatten(self._structure, self._leaves)
        types = tuple((axes, _type(x)) for axes, x in zip(self._axes, self._leaves) if is_array(x))
        return Structure(tree), types, self.shape, self.texts, *settings()

    def traced(self, least: int) -> Traced:
        """The function, traced for any number of texts with any length from `least` on."""
        time, row = self._letters.time, self._letters.row
        where = [f"{time} >= {least}", f"{time} <= {self.longest}", f"{row} >= 1"]
        scope = export.SymbolicScope(where)
        leaves = []
        for axes, x in zip(self._axes, self._leaves):
            if axes is None:
                leaves.append(x)
                continue
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            sizes = [name or str(n) for name, n in zip(axes, x.shape)]
            if axes == SEGMENTS:
                sizes, dtype = [row], jnp.int32
            shape = export.symbolic_shape(",".join(sizes), scope=scope)
            leaves.append(jax.ShapeDtypeStruct(shape, dtype))
        return self._traced(leaves)

    def _traced(self, leaves: Sequence) -> Traced:
        tree, modules = jax.tree.unflatten(self._structure, leaves)
        (args, kwargs), _ = mutable.insert(tree, modules)
        return Traced(self.f, args, kwargs)

    def exact(self) -> Traced:
        """The function, traced for one padded text in each row."""
        leaves = []
        for axes, x in zip(self._axes, self._leaves):
            if axes is None:
                leaves.append(x)
                continue
            sizes = self.shape[:1] if axes == SEGMENTS else x.shape
            names = (self._letters.row,) if axes == SEGMENTS else axes
            sizes = [self.shape[0] if a == self._letters.row else n for a, n in zip(names, sizes)]
            dtype = jnp.int32 if axes == SEGMENTS else x.dtype
            leaves.append(jax.ShapeDtypeStruct(tuple(sizes), dtype))
        return self._traced(leaves)


def _type(x: Any) -> tuple:
    return tuple(x.shape), str(x.dtype), getattr(x, "weak_type", False)


def _spread(axes: Any, args: tuple, letters: _Letters) -> list:
    """Returns the letters of each leaf of the positional arguments."""
    if isinstance(axes, str):
        axes = (axes,)
    axes = tuple(axes)
    if len(axes) > len(args):
        raise TypeError(
            f"pack: axes= has entries for {len(axes)} positional arguments, the call has "
            f"{len(args)}: {axes!r}"
        )
    leaf = lambda x: x is None or isinstance(x, str)
    found = []
    for i, (each, argument) in enumerate(zip((*axes, *[None] * len(args)), args)):
        try:
            spread = jax.tree.map(
                lambda text, tree: [text] * len(jax.tree.leaves(tree)), each, argument, is_leaf=leaf
            )
        except ValueError as error:
            raise ValueError(
                f"pack: the entry for argument {i} in axes= is not a tree of its form: {error}"
            ) from None
        texts = jax.tree.leaves(spread, is_leaf=leaf)
        found += [letters.parsed(text, x, i) for text, x in zip(texts, jax.tree.leaves(argument))]
    return found


def _segments(keyword: Any, found: list) -> Any:
    if keyword is not None and found:
        raise TypeError(
            "pack: the segments are an argument already, as axes= says; do not pass segments=, too"
        )
    if keyword is None and not found:
        raise TypeError(
            "pack: which token belongs to which text? Pass segments=, integers [rows, length] with "
            'the number of the text, 0 for padding, or write "segments" in axes= for the argument '
            "that holds the lengths of the texts, and pass the segments in its place"
        )
    segments = keyword if keyword is not None else found[0]
    if any(x is not segments and x.shape != segments.shape for x in found):
        raise ValueError("pack: two arguments have segments of different shapes")
    if np.ndim(segments) != 2 or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            "pack: segments must be integers [rows, length], the number of the text of each token, "
            f"0 for padding; got {segments.dtype}{list(np.shape(segments))}"
        )
    return segments


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A function that was traced for any texts, and the arrays that it closes over."""

    traced: Traced
    consts: list
    program: Program
    run: Callable


class _Packed:
    def __init__(
        self,
        f: Callable,
        axes: Any,
        letters: _Letters,
        texts: int | None = None,
        longest: int | None = None,
    ):
        self.f, self.axes, self.letters = f, axes, letters
        self.texts, self.longest = texts, longest
        self._entries: dict[tuple, _Entry] = {}

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        call, entry = self._opened(args, kwargs)
        arrays = [*entry.consts, *call.arrays]
        if any(isinstance(x, jax.core.Tracer) for x in (*arrays, call.segments)):
            outputs = _differentiable(entry.program, self._evaluation(call, entry.program, entry))(
                call.segments, arrays
            )
        else:
            outputs = entry.run(call.segments, arrays)
        return entry.traced.result(outputs, call.found)

    def explained(self, *args: Any, **kwargs: Any) -> Packing:
        call, entry = self._opened(args, kwargs)
        notes: list[Note] = []
        run = self._evaluation(call, entry.program, entry)
        jax.eval_shape(
            lambda segments, arrays: run(entry.program, segments, arrays, note_of(notes)),
            call.segments,
            [*entry.consts, *call.arrays],
        )
        return Packing(call.shape, call.texts, tuple(dict.fromkeys(notes)))

    def _opened(self, args: tuple, kwargs: dict) -> tuple[_Call, _Entry]:
        kwargs = dict(kwargs)
        segments = kwargs.pop(SEGMENTS, None)
        call = _Call(self, args, kwargs, segments)
        if call.key in self._entries:
            return call, self._entries[call.key]
        traced, least = _traced(call)
        raw = _jax.close(_jax.consts_as_inputs(traced.closed))
        consts = list(traced.closed.consts)
        program = Program(raw, least)
        entry = _Entry(traced, consts, program, lambda *_: None)
        run = self._evaluation(call, program, entry)
        entry = dataclasses.replace(
            entry, run=jax.jit(lambda segments, arrays: run(program, segments, arrays))
        )
        if not any(isinstance(x, jax.core.Tracer) for x in consts):
            self._entries[call.key] = entry
        return call, entry

    def _evaluation(self, call: _Call, program: Program, entry: _Entry) -> Callable:
        """Returns a function (program, segments, arrays) -> outputs."""
        texts, letters = call.texts, self.letters
        lengths = [len(entry.consts) + i for i in call.lengths]
        longest = call.longest
        complete = texts >= call.shape[0] * call.shape[1] and program.least == 1
        complete = complete and longest == call.shape[1]

        def run(program: Program, segments: Any, arrays: Sequence, note: Any = None) -> list:
            # The settings of the user hold for the function, not for what is made of it.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                rows = Rows(segments, texts, letters.time, letters.row)
                arrays = [rows.lengths if i in lengths else x for i, x in enumerate(arrays)]
                outputs = program(rows, arrays, lengths, note)
                if complete:
                    return outputs
                unfit = (rows.lengths < program.least) | (rows.lengths > longest)
                wrong = rows.overflow() | (rows.exists & unfit).any()
                return [_or_nan(y, wrong) for y in outputs]

        return run


def _or_nan(y: Any, wrong: Any) -> Any:
    """Returns NaN for a batch that does not fit, of which a traced program cannot raise an error."""
    return jnp.where(wrong, jnp.asarray(jnp.nan, y.dtype), y) if is_inexact(y) else y


_JAX = os.path.join(os.path.dirname(jax.__file__), "")


def _of_library(error: Exception) -> bool:
    """Whether a function of JAX, and not the user's, asked how long a text is. It does so to decide
    how something is computed, so the answer for longer texts will do. Except `jnp.linspace`, which
    gives its beginning alone for a single element."""
    if not isinstance(error, jax.errors.InconclusiveDimensionOperation):
        return False
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    outside = [name for name in frames if os.path.basename(name) != "shape_poly.py"]
    return outside[-1].startswith(_JAX) and os.path.basename(outside[-1]) != "array_creation.py"


def _traced(call: _Call) -> tuple[Traced, int]:
    """Traces a function for texts of any length, or from the shortest one on for which JAX can.
    Returns it, and the length from which on its result is that of the function."""
    errors: list[Exception] = []
    for least in [1, 2, 3, 4, 8]:
        if least > call.longest:
            break
        try:
            with _jax.symbolic_trace():
                traced = call.traced(least)
            return traced, 1 if all(map(_of_library, errors)) else least
        except Exception as error:
            errors.append(error)
    call.exact()  # raises the error that the function itself has
    lines = [line.strip() for line in str(errors[0]).splitlines() if line.strip()]
    first = (lines or [type(errors[0]).__name__])[0].removesuffix(".")
    raise ValueError(
        f"pack: the function cannot be traced for texts of any length: {first}. Use operations that "
        "need no Python number for a size, such as lax.scan in place of range(x.shape[1])"
    ) from errors[0]


def _differentiable(program: Program, run: Callable) -> Callable:
    """Returns a function (segments, arrays) -> outputs. Its derivative is that of the function,
    traced for any texts and packed on its own."""

    @jax.custom_vjp
    def apply(segments: Any, arrays: list) -> list:
        return run(program, segments, arrays)

    def forward(segments: Any, arrays: list) -> tuple:
        return apply(segments, arrays), (segments, arrays)

    def backward(kept: tuple, cotangents: list) -> tuple:
        segments, arrays = kept
        wanted = [i for i, x in enumerate(arrays) if is_inexact(x)]
        given = [x for x in cotangents if x.dtype != jax.dtypes.float0]
        derivative = program.derivative(tuple(wanted))
        found = _differentiable(derivative, run)(segments, [*arrays, *given])
        results: list = [np.zeros(np.shape(x), jax.dtypes.float0) for x in arrays]
        for i, y in zip(wanted, found):
            results[i] = y
        return np.zeros(np.shape(segments), jax.dtypes.float0), results

    apply.defvjp(forward, backward)
    return apply


def pack(
    f: Callable,
    *,
    axes: Any,
    length: str = "t",
    row: str = "n",
    texts: int | None = None,
    longest: int | None = None,
) -> Callable:
    """Makes a step written for one padded text per row run on packed rows.

        def loss(params, tokens, lengths): ...            # tokens [n, t], lengths [n]

        packed = ft.pack(loss, axes=(None, "n, t", "segments"))
        batch = tr.Packed(texts, length=1024, batch_size=8)(0)
        packed(params, batch["tokens"], batch["segments"])

    Write the step as if each row held one text. `pack` traces it and rewrites its operations, those
    of gradients and optimizers too, so that a row may hold many: positions count from the beginning
    of each text, attention sees one text, a recurrence begins anew, a sum over positions is one for
    each text, a shift stops at a text's border. An array of tokens [n, t, ...] becomes
    [rows, length, ...]; one of texts, [n, ...], has one element for each text, in the order of the
    rows, and zeros for those that do not exist.

    The result is that of `f` where each row is as long as its own text, without padding: what `f`
    computes of each text alone, combined over the texts as `f` combines its rows. If `f` masks what
    is behind `lengths`, this is also its result for padded rows. A size means what it means for
    the text: `x.mean(1)` divides by the text's own length, and `x.mean((0, 1))` by the number of all
    tokens. Random numbers are drawn for the packed rows. What is in the padding reaches nothing.
    An operation that cannot keep the texts apart raises an error that names it and its line;
    `ft.explain` lists what was rewritten. docs/transforms.md describes what is supported.

    Args:
        f: any function of arrays, such as a loss or a whole training step.
        axes: for each positional argument the axes of its arrays, such as "n, t, ..." for tokens
            and "n" for texts; None for an argument without, and a tree of these for a tree of
            arrays. "segments" stands for the argument that holds the lengths [n]: pass the
            segments in its place.
        length: the name of the axis of positions. Default "t".
        row: the name of the axis of texts. Default "n".
        texts: the most texts in a batch. Default: the size of arrays of texts, or if there are
            none, as many as there are places, which is always enough.
        longest: the most tokens of a text. Default: the length of the rows. State it if `f` has,
            for example, positions for fewer.

    Returns:
        A function with f's signature. It takes the packed rows, and segments [rows, length]: the
        number of each token's text, 0 for padding, in place of the lengths or as `segments=`.
        The tokens of a text stand next to one another, and texts of one row have different numbers.
        Outputs of tokens are packed, too. Under jit, more than `texts` texts, or one of more than
        `longest` tokens, give NaN.

    Raises:
        ValueError: an operation has no rule; shapes do not match; there are too many texts; an
            output differs from text to text, but has no axis of texts.

    >>> mean = ft.pack(lambda x: x.mean(1), axes="n, t", texts=3)
    >>> x = jnp.array([[1.0, 2.0, 6.0, 4.0, 6.0, 0.0]])
    >>> print(mean(x, segments=jnp.array([[1, 1, 1, 2, 2, 0]])))
    [3. 5. 0.]
    """
    check_function("pack", f)
    if axes is None or not isinstance(axes, (str, tuple, list)):
        raise TypeError(
            "pack: axes= says which axes of which argument are texts and positions, with one entry "
            f'for each positional argument, such as axes=(None, "{row}, {length}"); got {axes!r}'
        )
    for name in (length, row):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"pack: {name!r} is no name of an axis, such as 't'")
    if length == row:
        raise ValueError(f"pack: the axes of positions and of texts have one name, {row!r}")
    for name, most in (("texts", texts), ("longest", longest)):
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"pack: {name} must be a positive integer, got {most!r}")
    letters = _Letters(length, row)
    spelled = [x for x in jax.tree.leaves(axes) if isinstance(x, str)]
    if not any(length in re.split(r"[,\s]+", text) for text in spelled):
        raise ValueError(
            f"pack: no axis is {length!r} in axes={axes!r}; write its name where it stands, such as "
            f'axes=(None, "{row}, {length}")'
        )
    axes = axes if isinstance(axes, str) else tuple(axes)
    packed = _Packed(f, axes, letters, texts, longest)

    @wraps(f)
    def over_rows(*args: Any, **kwargs: Any) -> Any:
        return packed(args, kwargs)

    over_rows.explained = packed.explained
    return over_rows
