"""Structured pruning, which removes channels, heads and hidden units from a function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet import hardware as hw
from fnet._util._text_table import aligned
from fnet.compress._rules import matching
from fnet.compress._shrink._groups import Call, apply_cuts, cuts, groups
from fnet.compress._shrink._removal import Removal, shrunk_function
from fnet.compress._shrink._scores import METHODS, scores
from fnet.compress._shrink._smaller_model import smaller_model
from fnet.jaxpr import Form, is_array, is_implicit, pack


@dataclasses.dataclass(frozen=True)
class Axes:
    """One row of the report of `shrink`: axes of parameters that are pruned, or kept, together.

    Attributes:
        parameters: the axes, each a string such as "head/kernel (0)" for axis 0 of the parameter
            "head/kernel".
        size, kept: the number of indices before and after. Where attention heads are removed from
            an axis of size heads * head_dim, these are numbers of heads.
        reason: why no indices were removed, or "" if some were.
    """

    parameters: tuple[str, ...]
    size: int
    kept: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ShrinkReport:
    """What `shrink` removed, and what it could not remove. `print` shows it as a table.

    >>> model, x = nn.Sequential(nn.Dense(8), jax.nn.relu, nn.Dense(2)), jnp.ones((1, 3))
    >>> shrunk = compress.shrink(model, model.init(jax.random.key(0), x)[0], x, fraction=0.5)
    >>> shrunk.report.parameters
    (50, 26)

    Attributes:
        axes: the rows: first the axes from which indices were removed, then those that keep all.
        parameters: the number of parameters before and after.
        flops: the number of FLOPs before and after.
        seconds: the time before and after, estimated by the chip's roofline model, or None if
            `shrink` was called without `seconds=`.
        chip: the name of the chip, or "" without `seconds=`.
    """

    axes: tuple[Axes, ...]
    parameters: tuple[int, int]
    flops: tuple[int, int]
    seconds: tuple[float, float] | None = None
    chip: str = ""

    def __str__(self) -> str:
        rows = [("axes", "size", "kept", "")]
        for each in self.axes:
            more = len(each.parameters) - 1
            name = each.parameters[0] + (f" and {more} more" if more else "")
            rows.append((name, str(each.size), str(each.kept), each.reason))
        lines = [
            f"parameters {self.parameters[0]:,} -> {self.parameters[1]:,}, "
            f"FLOPs {self.flops[0]:,} -> {self.flops[1]:,}"
        ]
        if self.seconds:
            before, after = self.seconds
            lines.append(
                f"at the roofline of {self.chip}: {before:.3g} s -> {after:.3g} s (estimate)"
            )
        return "\n".join([*lines, "", *aligned(rows, left=(0, 3))])


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The result of `shrink`.

    >>> model, x = nn.Sequential(nn.Dense(8), jax.nn.relu, nn.Dense(2)), jnp.ones((1, 3))
    >>> shrunk = compress.shrink(model, model.init(jax.random.key(0), x)[0], x, fraction=0.5)
    >>> shrunk.f(shrunk.params, jnp.ones((5, 3))).shape, shrunk.params["0"]["kernel"].shape
    ((5, 2), (3, 4))

    Attributes:
        f: a function with the arguments of the original one, for these `params` and this `state`.
            It can be differentiated, compiled and batched, and called with another batch size or
            other keyword arguments than the example.
        params, state: without the removed indices. `state` is None if the original function was
            called without state.
        model: a smaller model of the original's class, with smaller fields such as its width, that
            has the same program as `f` for the shapes and keyword arguments of the example; None if
            `shrink` finds none. With other keyword arguments it may differ from `f`, which keeps
            the original constants, if the class computes with its fields: for example with the
            square root of its width only in training.
        report: a `ShrinkReport`.
    """

    f: Callable
    params: Any
    state: Any
    model: Any
    report: ShrinkReport


def shrink(
    f: Callable,
    params: Any,
    *args: Any,
    fraction: float | None = None,
    flops: float | None = None,
    seconds: float | None = None,
    chip: Any = None,
    score: str = "magnitude",
    loss: Callable | None = None,
    keep: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> Shrunk:
    """Removes channels, heads and hidden units from any function (structured pruning).

        shrunk = compress.shrink(model, params, x, fraction=0.5)
        y = shrunk.f(shrunk.params, x)

        shrunk = compress.shrink(model, params, x, state=state, fraction=0.5)    # with BatchNorm
        y, state = shrunk.f(shrunk.params, x, state=shrunk.state, train=True)

    f is traced to find groups of parameter axes that must have equal sizes: the channels between
    two convolutions and of the normalization in between, all that a residual connection adds, the
    heads of the query, key, value and output kernels of an attention layer (a key/value head goes
    with the query heads that use it). From each group, the indices with the lowest scores are
    removed.

    The shrunk function equals f with the removed parameters set to zero. Where removing would
    change more than that, nothing is removed, and `report` states why: LayerNorm averages over its
    features, and the inputs and results of f keep their shapes, so a classifier keeps all of its
    input features and classes. Of the axes into which a reshape splits a parameter's axis, such as
    heads and features per head, only the first that can be pruned is. docs/compress.md has measured
    speedups.

    Args:
        f: `f(params, *args, **kwargs)`, a model of any library or any JAX function. Each call of
            the shrunk function traces f again, so apply `jax.jit` to it.
        params: a tree of arrays, or a module of flax.nnx in inference mode, or of Equinox.
        *args, **kwargs: example arguments of f; for `score="magnitude"`, they may be
            `jax.ShapeDtypeStruct`s. With a keyword argument `state`, f must return (result, new
            state), and removed channels are removed from the state too.
        fraction: the fraction of indices to keep in each group, between 0 and 1; their number is
            rounded up. Exactly one of `fraction`, `flops` and `seconds` is required.
        flops: the maximum FLOPs for the example arguments, as `cost.count` counts them. As few
            indices as possible are removed, the same fraction from all pruned axes (except those
            in `keep`).
        seconds: the maximum time on `chip`, in seconds, as the roofline model estimates it. As for
            `flops`; the remaining sizes are multiples of the tile sizes of the chip's matrix units.
        chip: for `seconds`: a `Chip`, a JAX device, or the name of a device kind. Default: the
            local chip.
        score: how indices are ranked, by the mean square of the parameters w at an index
            ("magnitude", the default), of w * dL/dw with L = `loss` ("taylor"), or of the
            activations that are multiplied by them, for the example arguments ("activations").
        loss: a function from the result of f to a scalar, for `score="taylor"`. Default None.
        keep: {pattern: fraction of indices to keep}; 1 keeps all. A pattern is a regular expression
            that matches the whole path of a parameter, or its first parts; the first that matches
            applies. It holds for all axes of the parameter, and for those of others that are pruned
            together with them. Default None.

    Returns:
        `Shrunk(f, params, state, model, report)`.

    Raises:
        ValueError: none or several of `fraction`, `flops` and `seconds` are set, a fraction is not
            between 0 and 1, the limit cannot be reached, a pattern in `keep` matches no parameter,
            no index can be removed, a score is NaN or infinite, or no activations are multiplied by
            parameters along an axis that could be pruned (`score="activations"`).
        TypeError: a parameter is an implicit array, such as a quantized array.

    Source: Li et al. (2017), Pruning Filters for Efficient ConvNets; Molchanov et al. (2017),
    Pruning Convolutional Neural Networks for Resource Efficient Inference; Fang et al. (2023),
    DepGraph.

    >>> params = {"in": jnp.array([[1.0, 2.0, 0.5, 3.0]]), "out": jnp.ones((4, 1))}
    >>> f = lambda params, x: jax.nn.relu(x @ params["in"]) @ params["out"]
    >>> shrunk = compress.shrink(f, params, jnp.ones((8, 1)), fraction=0.5)
    >>> shrunk.params["in"].tolist(), shrunk.f(shrunk.params, jnp.ones((2, 1))).tolist()
    ([[2.0, 3.0]], [[5.0], [5.0]])
    """
    arrays, form = pack(params)
    if form is not None and form.graph is not None:
        options = {"fraction": fraction, "flops": flops, "seconds": seconds, "chip": chip}
        options |= {"score": score, "loss": loss, "keep": keep}
        shrunk = shrink(_of_arrays(f, form), arrays, *args, **options, **kwargs)
        return _of_modules(shrunk, form)
    name, limit = _limits(fraction, flops, seconds)
    _check(params, (args, kwargs), score, loss)
    args = params, *args
    call = Call(f, args, kwargs)
    found = groups(call)
    fractions = _fractions(keep or {}, call, found)
    free = [group for group in found if not group.reason]
    ranked = [group for group in free if fractions.get(group.atom) != 1]
    if not ranked:
        raise ValueError(
            f"shrink: no axis can be cut: "
            f"{_reasons(call, found) or 'the function has no parameters'}"
        )
    ranks = {
        atom: np.argsort(-each, kind="stable")
        for atom, each in scores(score, call, ranked, f, args, kwargs, loss).items()
    }
    removal = Removal(
        f, args, kwargs, call, free, fractions, ranks, None if seconds is None else hw.detect(chip)
    )
    kept = removal.kept(limit if name == "fraction" else removal.largest(name, limit))
    removed = cuts(call, kept)
    small, smaller = apply_cuts(args, kwargs, removed)
    function = shrunk_function(f, removed)
    report = ShrinkReport(
        _rows(call, found, kept, fractions),
        (_size(params), _size(small[0])),
        (removal.flops({}), removal.flops(kept)),
        None if seconds is None else (removal.seconds({}), removal.seconds(kept)),
        "" if removal.chip is None else removal.chip.name,
    )
    return Shrunk(
        function,
        small[0],
        smaller.get("state"),
        smaller_model(f, function, small, smaller, removed),
        report,
    )


def _of_arrays(f: Callable, form: Form) -> Callable:
    """Returns f, whose parameters are a flax.nnx module, as a function of the module's arrays."""

    def of_arrays(arrays: Any, *args: Any, **kwargs: Any) -> Any:
        params = form.unpack(arrays)
        result = f(params, *args, **kwargs)
        if form.lost(params, arrays):
            raise TypeError(
                "shrink: the function updates flax.nnx variables in place. Split the module, and "
                "return the new state: f(params, x, state=state) -> (y, new state). Or call "
                "model.eval() before, for inference mode"
            )
        return result

    return of_arrays


def _of_modules(shrunk: Shrunk, form: Form) -> Shrunk:
    def f(params: Any, *args: Any, **kwargs: Any) -> Any:
        return shrunk.f(pack(params)[0], *args, **kwargs)

    return dataclasses.replace(shrunk, f=f, params=form.unpack(shrunk.params), model=None)


def _size(params) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params) if is_array(x))


def _rows(call, found, kept, fractions) -> tuple[Axes, ...]:
    """Returns the rows of the report of `shrink`. The report has one row for each pruned group of
    axes (axes that are pruned together). Axes that are not pruned share one row of the report if
    they have the same size and the report states the same reason for them."""
    cut, whole = [], {}
    for group in found:
        names = _names(call, group)
        if group.atom in kept:
            cut.append(Axes(names, group.size, len(kept[group.atom]), ""))
        else:
            own = (
                "excluded by keep=" if group.atom in fractions else "fewer indices are not possible"
            )
            reason = group.reason or own
            whole.setdefault((group.size, reason), []).extend(names)
    return *cut, *(
        Axes(tuple(names), size, size, reason) for (size, reason), names in whole.items()
    )


def _limits(fraction, flops, seconds) -> tuple[str, float]:
    given = {
        name: value
        for name, value in (("fraction", fraction), ("flops", flops), ("seconds", seconds))
        if value is not None
    }
    if len(given) != 1:
        raise ValueError(
            "shrink: expected exactly one of fraction=, flops= and seconds=; got "
            f"{' and '.join(given) or 'none'}"
        )
    ((name, value),) = given.items()
    if not isinstance(value, (int, float, np.number)) or not 0 < value < (
        1 if name == "fraction" else math.inf
    ):
        what = (
            "the part of the indices to keep, between 0 and 1"
            if name == "fraction"
            else "a positive number"
        )
        raise ValueError(f"shrink: expected {name}= as {what}; got {value!r}")
    return name, float(value)


def _check(params, others, score, loss) -> None:
    if score not in METHODS:
        raise ValueError(
            f"shrink: expected score= as {', '.join(map(repr, METHODS))}; got {score!r}"
        )
    if (loss is None) == (score == "taylor"):
        raise ValueError(
            'shrink: score="taylor" ranks by the derivative of a scalar: pass loss=, a function of the '
            "result of f"
            if loss is None
            else f'shrink: loss= is for score="taylor"; got score={score!r}'
        )
    for path, x in jax.tree.leaves_with_path(params, is_leaf=is_implicit):
        if is_implicit(x):
            raise TypeError(
                f"shrink: {jax.tree_util.keystr(path, simple=True, separator='/')!r} is a "
                f"{type(x).__name__}; shrink plain parameters first, then quantize or adapt the "
                f"result"
            )
    abstract = lambda tree: any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))
    if abstract(params) or (score != "magnitude" and abstract(others)):
        raise TypeError(
            f"shrink: score={score!r} needs arrays as parameters"
            f"{'' if score == 'magnitude' else ' and arguments'}; got a jax.ShapeDtypeStruct"
        )


def _fractions(keep, call, found) -> dict[int, float]:
    """Returns {identifier of a group of axes: fraction of the indices to keep} for the patterns in
    `keep`.

    The axes of a group are pruned together, and the identifier of the group is the integer
    `Group.atom`. A pattern in `keep` applies to a group of axes if it matches the path of at least
    one parameter that has an axis in this group. The result contains only the groups to which a
    pattern applies.
    """

    def check(pattern, value):
        if not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ValueError(
                f"shrink: expected a fraction above 0 and at most 1 in keep= for {pattern!r}; got "
                f"{value!r}"
            )

    paths = [leaf.path for leaf in call.leaves if leaf.role == "params"]
    first, order, chosen = matching("shrink", keep, paths, "parameter", check), list(keep), {}
    for group in found:
        matched = [
            first[path] for i, _, _ in group.members if (path := call.leaves[i].path) in first
        ]
        if matched:
            chosen[group.atom] = keep[min(matched, key=order.index)]
    return chosen


def _reasons(call, found) -> str:
    named: dict[str, str] = {}
    for group in found:
        named.setdefault(group.reason or "excluded by keep=", _names(call, group)[0])
    return "; ".join(f"{name}: {reason}" for reason, name in list(named.items())[:4])


def _names(call, group) -> tuple[str, ...]:
    return tuple(f"{call.leaves[i].path} ({axis})" for i, axis, _ in group.members)
