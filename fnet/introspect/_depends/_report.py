"""`depends`: which positions of a function's results depend on which positions of its arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fnet.introspect._depends import _symbolic, _trials
from fnet.introspect._depends._checks import checked
from fnet.introspect._depends._claims import (
    Axis,
    Causal,
    Claim,
    Independent,
    Padding,
    Segments,
    along,
    first_break,
)
from fnet.introspect._depends._conditions import FEW, Assumptions, Condition
from fnet.introspect._depends._reach import (
    MOST,
    Reach,
    constant,
    everything,
    nothing,
    source,
    uniform,
)
from fnet.introspect._depends._trials import Counterexample
from fnet.introspect._depends._walk import Step, Walk, keeps_state
from fnet.jaxpr import (
    Interpreter,
    Structure,
    Traced,
    array_leaves,
    check_function,
    is_array,
    mutable,
    pack,
    title,
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known about a claim.

    Attributes:
        claim: the claim in words.
        status: "proved", "proved if" (the conditions hold), "refuted" or "tested" (neither proved
            nor refuted).
        conditions: the `Condition`s under which the claim is proved.
        path: the path of the layer in which the claim breaks, "" if there is none.
        primitive: the operation that breaks it, "" if there is none.
        positions: a pair (output position, input position) that the claim excludes and the analysis
            does not, or None.
        counterexample: a `Counterexample` if the claim is refuted.
        trials: how many pairs of inputs were compared.
        opaque: the operations without a rule, {name: path}.

    >>> shifted = lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1]
    >>> print(introspect.depends(shifted, jnp.ones((4, 2))).verdict("causal", 0))
    causal along 0: proved
    """

    claim: str
    status: str
    conditions: tuple[Condition, ...] = ()
    path: str = ""
    primitive: str = ""
    positions: tuple[int, int] | None = None
    counterexample: Counterexample | None = None
    trials: int = 0
    opaque: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _report: Dependence | None = dataclasses.field(default=None, repr=False)
    _constants: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)

    def holds(self, *args: Any, **kwargs: Any) -> bool:
        """Whether a batch fulfills the conditions: arguments as those of `depends`, of the same
        shapes.

        Raises:
            ValueError: the arguments have another structure, other shapes, dtypes, or values that
                are not arrays.
        """
        if self._report is None:
            return False
        arrays = self._report._arrays_of(args, kwargs)
        if any(_as(arrays[i], x).tobytes() != x.tobytes() for i, x in self._constants.items()):
            return False
        if self.status == "proved":
            return True
        error, _ = self._checked(*arrays)
        return error.get() is None

    @functools.cached_property
    def _checked(self) -> Callable:
        assert self._report is not None
        return jax.jit(self._report._checks_of(self))

    def _and(self, other: Verdict) -> Verdict:
        """This claim together with another one of the same report."""
        if other.status not in ("proved", "proved if"):
            return dataclasses.replace(other, claim=f"{self.claim}, {other.claim}")
        conditions = {each.key: each for each in (*self.conditions, *other.conditions)}
        status = "proved if" if conditions else "proved"
        return dataclasses.replace(self, status=status, conditions=tuple(conditions.values()))

    def __str__(self) -> str:
        if self.status == "proved":
            return f"{self.claim}: proved"
        if self.status == "proved if":
            lines = [f"{self.claim}: proved if", *(f"  {each}" for each in self.conditions)]
            return "\n".join(lines)
        place = f" in {self.path}" if self.path else ""
        where = f"; the first operation that breaks it is {self.primitive}{place}"
        where = where if self.primitive else ""
        if self.positions is not None:
            i, j = self.positions
            where += f", with output position {i} and input position {j}"
        if self.counterexample is not None:
            return f"{self.claim}: refuted, because {self.counterexample}{where}"
        opaque = ", ".join(
            f"{name} in {path}" if path else name for name, path in self.opaque.items()
        )
        unknown = f"; no rule for {opaque}" if opaque else ""
        tested = f"tested with {self.trials} changes, " if self.trials else ""
        return f"{self.claim}: {tested}not proved{unknown}{where}"


class NotProved(Exception):
    """Raised by `Dependence.check`. The attribute `verdict` is the `Verdict`.

    >>> try:
    ...     introspect.depends(lambda x: x - x.mean(0), jnp.ones((4,))).check(independent=0)
    ... except introspect.NotProved as error:
    ...     error.verdict.status, error.verdict.primitive
    ('refuted', 'reduce_sum')
    """

    def __init__(self, verdict: Verdict, advice: str = ""):
        super().__init__(str(verdict) + advice)
        self.verdict = verdict


class Dependence:
    """The result of `depends`.

        report = introspect.depends(model, params, tokens, axes={"b": ((None, 0), 0), "t": ((None, 1), 1)})
        report.check(independent="b", causal="t", assume="finite")

    `print(report)` shows, for each named axis, how the results depend on the arguments.

    >>> report = introspect.depends(jnp.cumsum, jnp.ones((3,)), axes={"t": 0})
    >>> print(report.check(causal="t"))
    result along 't': the same and all earlier positions
    """

    def __init__(
        self,
        traced: Traced,
        axes: Mapping[str, Axis],
        names: Sequence[str],
        arguments: Mapping[str, Any],
        structure: Any,
    ):
        self._traced = traced
        self._structure = structure
        self._axes = dict(axes)
        self._outputs = list(names)
        self._arguments = arguments
        self._opened: dict = {}

    @property
    def closed(self) -> Any:
        return self._traced.closed

    def _arrays_of(self, args: tuple, kwargs: Mapping) -> list:
        """The arrays of arguments like those of `depends`.

        Raises:
            ValueError: they have another structure, other shapes, dtypes, or values that are not
                arrays.
        """
        if _structure(args, kwargs) != self._structure:
            raise ValueError(
                "depends: expected arguments as those that were analyzed: the same ones by position "
                "and by name, and equal values of all that is no array"
            )
        tree, modules, _ = mutable.extract((args, kwargs))
        arrays, _ = array_leaves((tree, modules))
        types = [(tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays]
        expected = [(tuple(v.aval.shape), v.aval.dtype) for v in self.closed.jaxpr.invars]
        if types != expected:
            raise ValueError(f"depends: expected arrays {expected}, got {types}")
        return arrays

    def verdict(self, kind: str, axis: str | int, *, trials: bool = True) -> Verdict:
        """Returns the `Verdict` on a claim.

        Args:
            kind: "independent", "causal" or "segments".
            axis: the name of an axis; for segments, the name of an argument.
            trials: whether to look for a counterexample if the claim is not proved. It runs the
                function, which a loop could keep from ending. Default True.
        """
        claim = self._claim(kind, axis)
        found = self._decided(claim, trials)
        if isinstance(claim, Segments) and found.status in ("proved", "proved if"):
            for rows in claim.apart:
                found = found._and(self._decided(rows, trials))
        return found

    def padding(
        self,
        axis: str | int,
        length: int,
        *,
        known: Mapping[str, Any] | None = None,
        trials: bool = True,
    ) -> Verdict:
        """Returns the `Verdict` that what comes after the first `length` positions of the arguments
        reaches nothing that is kept: the first `length` positions of the results along the axis, and
        results without this axis.

        Args:
            axis: the name of an axis.
            length: the number of positions that are kept.
            known: {argument: array}, such as a mask: the claim is for these values of it. An array
                in a tree has a name such as "batch['mask']". Default: none.
            trials: as for `verdict`.

        Raises:
            ValueError: the axis or an argument is unknown.

        >>> mean = lambda x, mask: jnp.where(mask, x, 0).sum() / mask.sum().astype(x.dtype)
        >>> report = introspect.depends(mean, jnp.ones(4), jnp.ones(4, bool), axes={"t": (0, None)})
        >>> report.padding("t", 3).status
        'refuted'
        >>> report.padding("t", 3, known={"mask": jnp.array([True, True, True, False])}).status
        'proved'
        """
        constants = {}
        for name, x in (known or {}).items():
            index = self._index(name)
            constants[index] = self._constant(name, index, x)
        return self._decided(Padding(self._axis(axis), axis, length, constants), trials)

    def _decided(self, claim: Claim, trials: bool) -> Verdict:
        for allowed, largest in ((False, FEW), (False, MOST), (True, MOST)):
            walk, outputs = self._reaches(claim, Assumptions(allowed, largest))
            broken = claim.broken(outputs)
            if broken is None:
                conditions = tuple(walk.assumed.made.values())
                status = "proved if" if conditions else "proved"
                return Verdict(
                    claim.text, status, conditions, _report=self, _constants=claim.constants
                )
        k, positions = broken  # type: ignore[misc]
        step = self._culprit(claim, k)
        found, count = None, 0
        if trials:
            found, count = _trials.find(
                lambda *arrays: Interpreter().outputs(self.closed, arrays),
                [claim.constants.get(i, x) for i, x in enumerate(self._traced.arrays)],
                claim.sources,
                claim.compared(len(self.closed.jaxpr.outvars)),
                claim.leak,
                positions,
            )
        return Verdict(
            claim.text,
            "tested" if found is None else "refuted",
            (),
            step.path if step else "",
            title(step.eqn) if step else "",
            positions,
            found,
            count,
            dict(walk.opaque),
        )

    def checked(self, *verdicts: Verdict) -> Callable:
        """Returns a function of the arguments that returns (error, result), where `error.get()` is
        None if the conditions of some verdicts of this report hold. It can be compiled, and then
        costs little more than the function alone.

        >>> report = introspect.depends(lambda x: x + 0 * x.sum(), jnp.ones(3))
        >>> f = jax.jit(report.checked(report.verdict("independent", 0)))
        >>> error, y = f(jnp.array([1, 2, jnp.inf]))
        >>> error.get() is None
        False
        """
        run = self._checks_of(*verdicts)

        def computed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            error, outputs = run(*self._arrays_of(args, kwargs))
            return error, self._traced.tree(outputs)[0]

        return computed

    def _checks_of(self, *verdicts: Verdict) -> Callable:
        """Returns a function of the arrays in the arguments that returns (error, the arrays in the
        result), as `checked`."""
        every = {each.key: each for verdict in verdicts for each in verdict.conditions}
        return checked(self.closed, self._opened, list(every.values()))

    def check(
        self,
        *,
        independent: str | int | None = None,
        causal: str | int | None = None,
        segments: str | None = None,
        assume: str | None = None,
    ) -> Dependence:
        """Returns the report if the claims are proved, and raises `NotProved` otherwise.

        Args:
            independent: an axis. Each position of the results depends on the same position of the
                arguments alone: its bits do not change, whatever the bits at other positions, NaN
                and Inf included.
            causal: an axis. Each position of the results depends on the same and earlier positions.
            segments: the name of an argument of the function, integers [time] or [rows, time]: the
                texts that are packed into a row. Each position of the results depends on positions
                with the same integer alone. It is proved for these integers, so they must be an
                array, and for any other argument. `axes` must contain its axes. With [rows, time],
                rows are proved to be independent, too.
            assume: "finite" accepts claims that are proved under conditions, such as that values
                which a mask multiplies by 0 are finite. The `Verdict` lists them. Default None.

        Raises:
            NotProved: a claim is refuted, or neither proved nor refuted, or holds under conditions
                only and `assume` is None.
            ValueError: an axis or `assume` is unknown.
        """
        if assume not in (None, "finite"):
            raise ValueError(f"assume must be None or 'finite', got {assume!r}")
        claims = (("independent", independent), ("causal", causal), ("segments", segments))
        for kind, axis in claims:
            if axis is None:
                continue
            found = self.verdict(kind, axis)
            if found.status == "proved if" and assume is None:
                raise NotProved(found, "\nAccept this with check(..., assume='finite').")
            if found.status not in ("proved", "proved if"):
                raise NotProved(found)
        return self

    def _axis(self, name: str | int) -> Axis:
        if name in self._axes:
            return self._axes[name]  # type: ignore[index]
        known = ", ".join(map(repr, self._axes)) or "none"
        raise ValueError(f"unknown axis {name!r}; the axes of this report are {known}")

    def _claim(self, kind: str, name: str | int) -> Claim:
        if kind == "segments":
            return self._segments(name)
        if kind not in ("independent", "causal"):
            raise ValueError(f"unknown claim {kind!r}: expected independent, causal or segments")
        axis = self._axis(name)
        if not axis.targets:
            raise ValueError(f"depends: axis {name!r}: no result has an axis in out_axes")
        return (Independent if kind == "independent" else Causal)(axis, name)

    def _index(self, name: str) -> int:
        """The index of an argument that is an array among the inputs of the program."""
        wanted = self._arguments.get(name)
        for i, x in enumerate(self._traced.arrays):
            if x is wanted:
                return i
        known = ", ".join(dict.fromkeys(each.partition("[")[0] for each in self._arguments))
        raise ValueError(f"{name!r} is no array; the arguments of the function are {known}")

    def _segments(self, name: Any) -> Segments:
        index = self._index(name)
        ids = self._arguments[name]
        if isinstance(ids, jax.ShapeDtypeStruct) or np.ndim(ids) not in (1, 2):
            raise ValueError(
                f"segments={name!r}: expected an array [time] or [rows, time] of integers"
            )
        along = [axis for axis in self._axes.values() if axis.sources.get(index) == ids.ndim - 1]
        rows = [
            axis for axis in self._axes.values() if axis.sources.get(index) == 0 and ids.ndim == 2
        ]
        if not along or (ids.ndim == 2 and not rows):
            raise ValueError(f"segments={name!r}: axes= must name each axis of this argument")
        return Segments(along[0], name, index, self._constant(name, index, ids), rows[:1])

    def _constant(self, name: str, index: int, values: Any) -> np.ndarray:
        """The numbers of an argument, as the program sees them: JAX may narrow them."""
        kind = self.closed.jaxpr.invars[index].aval
        if np.shape(values) != kind.shape:
            raise ValueError(
                f"depends: {name!r} has the shape {kind.shape}, and the numbers given for it "
                f"{np.shape(values)}"
            )
        narrowed = _as(values, kind)
        if not np.array_equal(narrowed, values):
            raise ValueError(
                f"depends: {name!r} has numbers that {kind.dtype}, in which the program sees them, "
                "does not have"
            )
        return narrowed

    def _reaches(
        self, claim: Claim, assumed: Assumptions, record: bool = False
    ) -> tuple[Any, list[Reach]]:
        inputs = []
        for i, v in enumerate(self.closed.jaxpr.invars):
            if i in claim.constants:
                inputs.append(constant(claim.constants[i]))
            elif i in claim.sources:
                inputs.append(source(v.aval.shape, claim.sources[i]))
            else:
                inputs.append(nothing(v.aval.shape))
        walk = Walk(assumed, record, self._opened)
        if (state := keeps_state(self.closed.jaxpr)) is not None:
            walk.opaque[state] = ""
            walk.steps = []
            whole = everything(inputs)
            return walk, [uniform(v.aval.shape, *whole) for v in self.closed.jaxpr.outvars]
        outputs, walk.steps = walk(self.closed.jaxpr, self.closed.consts, inputs)
        return walk, outputs

    def _culprit(self, claim: Claim, output: int) -> Step | None:
        """The operation at which the claim breaks: the last one, going back from the output, all of
        whose operands still fulfill it."""
        walk, _ = self._reaches(claim, Assumptions(True), record=True)
        return first_break(claim, walk.steps, self.closed.jaxpr.outvars[output])

    def __str__(self) -> str:
        lines = []
        for name, axis in self._axes.items():
            _, outputs = self._reaches(Claim(axis, name), Assumptions(True))
            for k, place in axis.targets.items():
                lines.append(f"{self._outputs[k]} along {name!r}: {relation(outputs[k], place)}")
        return "\n".join(lines)


def _as(values: Any, like: Any) -> np.ndarray:
    return np.asarray(values).astype(like.dtype)


def _structure(args: tuple, kwargs: Mapping) -> Structure:
    """The structure of arguments, and the values of all that is no array."""
    tree, modules, _ = mutable.extract((args, dict(kwargs)))
    return Structure((tree, modules))


def relation(reach: Reach, axis: int) -> str:
    """How the positions of a result depend on those of the followed axis, in words."""
    size = reach.shape[axis]
    low, high = (each.astype(np.int64) for each in along(reach, (axis,)))
    here = np.arange(size)
    some = low <= high
    if not some.any():
        return "independent of it"
    if (low == here).all() and (high == here).all():
        return "the same position"
    before, after = int((here - low)[some].max()), int((high - here)[some].max())
    if (low == 0).all() and (high == here).all():
        return "the same and all earlier positions"
    if max(abs(before), abs(after)) < max(size - 1, 1):
        return _window(-before, after)
    return "all positions" if (low == 0).all() and (high >= size - 1).all() else "several positions"


def _window(first: int, last: int) -> str:
    """Positions relative to that of the result, in words."""
    words = lambda n: "the same" if n == 0 else f"{abs(n)} {'before' if n < 0 else 'after'}"
    return f"position {words(first)}" if first == last else f"{words(first)} to {words(last)}"


def depends(f: Callable, *args: Any, axes: Any = None, **kwargs: Any) -> Dependence:
    """Analyzes which positions of the results of f(*args, **kwargs) depend on which positions of its
    arguments, along named axes. See the guide page introspection.

        report = introspect.depends(model, params, tokens, axes={"b": ((None, 0), 0), "t": ((None, 1), 1)})
        print(report)
        report.check(independent="b", causal="t", assume="finite")

    The program is not run: each of its equations is evaluated on the positions that an element can
    depend on. What is proved holds for arrays of these shapes, whatever is in them, and for the
    operations of the program as JAX defines them.

    Args:
        f: a function of arrays, of any library.
        args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do. If a claim cannot be proved,
            these arguments are changed to look for a counterexample. Symbolic sizes, such as those
            of `export.spec("b, t")`, are names of axes; the analysis uses the sizes 5, 6, ... for
            them.
        axes: {name: (in_axes, out_axes)} as for `jax.vmap`: in_axes has an axis or None for each
            argument, or a tree of them, and out_axes for the results. Arrays with None, such as
            parameters, are shared. Instead of the pair, an integer is the axis of all arguments that
            are arrays, and of all results; arrays in lists, tuples and dicts are shared. Default:
            the symbolic sizes, or else {0: 0}.

    Returns:
        A `Dependence`.

    Raises:
        ValueError: an array has no such axis, or the axis has different lengths; a keyword argument
            has no entry in in_axes; a symbolic size occurs twice in one array.

    >>> def mean_of_neighbors(x):
    ...     return (x[:, :-1] + x[:, 1:]) / 2
    >>> print(depends(mean_of_neighbors, jnp.ones((4, 8)), axes={"b": 0, "t": 1}))
    result along 'b': the same position
    result along 't': the same to 1 after
    """
    check_function("depends", f)
    args, kwargs = _distinct((args, kwargs))
    named, args = _symbolic.axes(f, args, kwargs)
    traced = Traced(f, args, kwargs)
    given = named or {0: 0} if axes is None else axes
    if not isinstance(given, Mapping):
        given = {given: given}
    count = len(traced.closed.jaxpr.outvars)
    tree, _ = traced.tree(map(_Output, range(count)))
    names = ["result"] * count
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, _Output):
            names[leaf.index] = "result" + jax.tree_util.keystr(path)
    followed = {
        name: _followed(name, each, args, kwargs, traced, tree) for name, each in given.items()
    }
    try:
        bound: Mapping = inspect.signature(f).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function without a signature
        bound = {}
    arguments = {
        name + jax.tree_util.keystr(path): leaf
        for name, argument in bound.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument)
    }
    return Dependence(traced, followed, names, arguments, _structure(args, kwargs))


@dataclasses.dataclass(frozen=True)
class _Output:
    """Stands for an output of the program in the tree of results."""

    index: int


def _distinct(tree: Any) -> Any:
    """Makes copies of arrays that occur twice, so that each occurrence has an axis of its own."""
    packed, form = pack(tree)  # flax.nnx modules may share arrays
    leaves = [x for x in jax.tree.leaves(packed) if is_array(x)]
    if len({id(x) for x in leaves}) == len(leaves):
        return tree
    seen: set[int] = set()

    def once(x: Any) -> Any:
        if not is_array(x):
            return x
        if id(x) in seen:
            struct = isinstance(x, jax.ShapeDtypeStruct)
            return jax.ShapeDtypeStruct(x.shape, x.dtype) if struct else x.copy()
        seen.add(id(x))
        return x

    changed = jax.tree.map(once, packed)
    return changed if form is None else form.unpack(changed)


def _followed(
    name: Any, given: Any, args: tuple, kwargs: Mapping, traced: Traced, tree: Any
) -> Axis:
    wanted: dict[int, int] = {}  # id of an array: its axis
    if isinstance(given, (int, np.integer)):
        in_axes: Any = tuple(int(given) if is_array(x) else None for x in args)
        out_axes: Any = int(given)
        wanted.update({id(x): int(given) for x in kwargs.values() if is_array(x)})
    else:
        in_axes, out_axes = given
        by_name = [key for key, x in kwargs.items() if any(map(is_array, jax.tree.leaves(x)))]
        if by_name:
            raise ValueError(
                f"depends: axis {name!r}: in_axes has no entry for the keyword argument "
                f"{by_name[0]!r}; pass it by position"
            )
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    if len(axes) != len(args):
        raise ValueError(
            f"depends: axis {name!r}: in_axes has {len(axes)} entries for {len(args)} arguments"
        )
    for axis, arg in zip(axes, args):
        for leaf, at in _spread(name, axis, arg):
            wanted[id(leaf)] = at
    missing = set(wanted) - set(map(id, traced.arrays))
    if missing:
        raise ValueError(
            f"depends: axis {name!r}: in_axes has an axis for what is no array that JAX traces; "
            "register its class as a pytree, or pass its arrays"
        )
    sources = {}
    for i, x in enumerate(traced.arrays):
        if id(x) in wanted:
            sources[i] = _checked(name, wanted[id(x)], x.shape)
    targets = {}
    for leaf, at in _spread(name, out_axes, tree):
        if isinstance(leaf, _Output):  # another leaf is a constant
            v = traced.closed.jaxpr.outvars[leaf.index]
            targets[leaf.index] = _checked(name, at, v.aval.shape)
    lengths = {traced.arrays[i].shape[axis] for i, axis in sources.items()}
    if len(lengths) != 1:
        raise ValueError(
            f"depends: axis {name!r} needs one length in all arguments, got {sorted(lengths)}"
        )
    return Axis(sources, targets, lengths.pop())


def _spread(name: Any, axes: Any, tree: Any) -> list[tuple[Any, int]]:
    """Pairs (leaf, axis) of a tree for which a tree of axes has an entry."""
    if axes is None:
        return []
    if isinstance(axes, (int, np.integer)):
        return [(leaf, int(axes)) for leaf in jax.tree.leaves(tree)]
    pairs: list[tuple[Any, int]] = []
    same = isinstance(axes, Mapping) == isinstance(tree, Mapping) and len(axes) == len(tree)
    if not same or (isinstance(axes, Mapping) and axes.keys() != tree.keys()):
        raise ValueError(
            f"depends: axis {name!r}: {axes} does not have the structure of "
            f"{jax.tree.structure(tree)}; write None for what is shared"
        )
    for key in axes if isinstance(axes, Mapping) else range(len(axes)):
        pairs += _spread(name, axes[key], tree[key])
    return pairs


def _checked(name: Any, axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"depends: axis {name!r} is {axis}, but an array has shape {tuple(shape)}")
    return axis % len(shape)
