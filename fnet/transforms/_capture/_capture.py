"""Lists, captures and replaces intermediate values of a function, and captures their cotangents.

These values are called sites: the outputs of layers and of other named scopes, values named with
`tag`, and the weights of attentions.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr import Traced, tagging, typed, wraps
from fnet.transforms._capture._inspect import Inspector
from fnet.transforms._capture._sites import Site
from fnet.transforms._capture._sites import find as find_sites
from fnet.transforms._patterns import Match, matches


def sites(f: Callable) -> Callable:
    """Returns a function that lists the sites of `f`, the named values that `capture` can read and
    `intervene` can replace.

        print(ft.sites(model)(params, x))

    A site is the output of a layer or of any other named scope, a value named with `tag`, or the
    weights of an attention layer. The output of a layer has the path of the layer as its name.
    Where several sites have the same path, they are called `path#0`, `path#1` and so on.

    A site inside a scan is captured with a leading axis for the iterations. `layers.Stack` runs its
    blocks in a scan, and its site `path[:]` contains the outputs of all blocks.

    Flax linen, Haiku and Equinox name the scopes of their layers, too, Equinox by types, such as
    `eqx.nn.Linear#1`. For flax.nnx, apply `name_scopes` first.

    Args:
        f: any function.

    Returns:
        A function of f's arguments that returns a `Sites` object: a tuple with one `SiteInfo` for
        each site, in the order of computation. f is only traced, so `jax.ShapeDtypeStruct`s will do
        as arguments.

    >>> def f(x):
    ...     with jax.named_scope("double"):
    ...         x = x * 2
    ...     return jnp.sin(x)
    >>> print(sites(f)(jnp.ones(3)))
    double  float32[3]
    """

    @wraps(f, "sites")
    def listed(*args, **kwargs):
        return Sites(
            SiteInfo(
                site.name, site.value, tuple(length for _, length in site.scans), site.obstacle
            )
            for site in _Program(f, args, kwargs).level.sites
        )

    return listed


@dataclasses.dataclass(frozen=True)
class SiteInfo:
    """A named value of a function, such as the output of a layer (see `sites`).

    Attributes:
        name: the name, such as "blocks/attention".
        value: a tree of `jax.ShapeDtypeStruct` with the shapes and dtypes of the captured value.
        scans: a tuple of the lengths of the scans around the value, which are the sizes of the
            first axes of the captured value.
        inside: the construct that prevents capturing the value ("a while loop", "a branch of cond",
            ...), or None.

    >>> site = ft.sites(lambda x: ft.tag(2 * x, "double").sum())(jnp.ones(3))[0]
    >>> site.name
    'double'
    """

    name: str
    value: Any
    scans: tuple[int, ...] = ()
    inside: str | None = None

    def __str__(self):
        types = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(self.value))
        return f"{self.name}  {types}" + (
            f"  (inside {self.inside}: not available)" if self.inside else ""
        )


class Sites(tuple):
    """The named values of a function. `str()` returns one line for each.

    >>> ft.sites(lambda x: ft.tag(2 * x, "double").sum())(jnp.ones(3)).names
    ('double',)
    """

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self)

    def __str__(self):
        return "\n".join(map(str, self))


def capture(f: Callable, pattern: str | Sequence[str]) -> Callable:
    """Returns a function that computes `f`, and also returns named intermediate values of it.

        logits, seen = ft.capture(model, "blocks/attention")(params, x)

    Args:
        f: any function: a model, a loss, a gradient, a training step.
        pattern: the name of a value, a regular expression that matches whole names, or a sequence
            of these. "blocks[3]/mlp" is the value "mlp" in layer 3 of the `layers.Stack` "blocks".
            `sites` lists all names.

    Returns:
        A function with f's arguments that returns (f's result, {name: value}). The value of a layer
        is exactly its output, with a leading axis for the iterations if it is in a scan, and one
        for the batch if it depends on the mapped arguments of a `vmap` in f. If f computes
        derivatives, the values are those of the forward pass. In a compiled program, values that
        you do not capture cost nothing.

    Raises:
        ValueError: a pattern matches no named value, or one inside a while loop, a branch of cond
            or a shard_map.

    >>> model = nn.Sequential(hidden=nn.Dense(4), head=nn.Dense(2))
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((3, 5)))
    >>> y, seen = capture(model, "hidden")(params, jnp.ones((3, 5)))
    >>> {name: value.shape for name, value in seen.items()}
    {'hidden': (3, 4)}
    """
    patterns = _patterns("capture", pattern)

    @wraps(f, "capture")
    def captured(*args, **kwargs):
        program = _Program(f, args, kwargs)
        found = program.matches("capture", patterns)
        uses = collections.Counter(match.site for match in found)
        single = {
            match.site: match.indices
            for match in found
            if uses[match.site] == 1 and _numbers(match.site)
        }
        result, leaves = program.run(Inspector(program.level, uses, selected=single))
        return result, {
            match.name: _value(
                match, leaves[match.site], () if match.site in single else match.indices
            )
            for match in found
        }

    return captured


def intervene(f: Callable, changes: Mapping[str, Callable]) -> Callable:
    """Returns a function that computes `f`, but replaces some of its named intermediate values (see
    `sites`).

        y = ft.intervene(model, {"blocks[3]/mlp": lambda value, index: 0 * value})(params, x)

    Whatever reads a changed value reads the new one. If nothing needs the original value any more,
    a compiled program does not compute it. The order of transforms matters: in
    `vmap(intervene(f, ...))`, your functions receive the value of one example, and in
    `intervene(vmap(f), ...)` the value of the whole batch.

    Args:
        f: any function. For the gradient of the changed function, use
            `grad(intervene(f, changes))`, not `intervene(grad(f), changes)`.
        changes: {pattern: change}, with patterns as in `capture`. `change(value, index)` returns a
            tree with the structure, shapes and dtypes of `value`. `index` is a tuple with the
            iteration of each scan around the value, outermost first: (layer,) in a stack of layers,
            () outside of scans. If several patterns match a value, their functions are applied in
            the order of the dict.

    Returns:
        A function with f's arguments and results.

    Raises:
        ValueError: a pattern matches no named value. Or it matches one that cannot be replaced: a
            value inside a while loop, a branch of cond or a shard_map; a value inside a function
            with a custom derivative; or a value in a part of `f` that `f` itself differentiates. In
            the last two cases, the derivative would still use the original value.
        TypeError: a new value differs from the original value in structure, shape or dtype.

    >>> def f(x):
    ...     return jnp.sin(tag(x * 2, "doubled"))
    >>> intervene(f, {"doubled": lambda value, index: jnp.zeros_like(value)})(jnp.ones(2)).tolist()
    [0.0, 0.0]
    """
    if not isinstance(changes, Mapping) or not all(map(callable, changes.values())):
        raise TypeError(
            "intervene: changes are {pattern: change}, with change(value, index) -> value; got "
            f"{changes!r}"
        )
    _patterns("intervene", list(changes))

    @wraps(f, "intervene")
    def intervened(*args, **kwargs):
        program = _Program(f, args, kwargs)
        steps: dict[Site, list] = {}
        for pattern, change in changes.items():
            for match in program.matches("intervene", [pattern]):
                _check_original("intervene", match.site)
                steps.setdefault(match.site, []).append((match, change))
        every = {site: _changed(site, todo) for site, todo in steps.items()}
        return program.run(Inspector(program.level, changes=every))[0]

    return intervened


def capture_cotangents(
    f: Callable, pattern: str | Sequence[str], *, has_aux: bool = False
) -> Callable:
    """Returns a function that computes a scalar function `f`, and its derivatives with respect to
    named intermediate values.

        loss, cotangents = ft.capture_cotangents(loss, "blocks/attention")(params, batch)

    Args:
        f: a function that returns a floating-point scalar. Pass the function itself, not its
            gradient.
        pattern: one or several patterns, as in `capture`. `sites` lists the names.
        has_aux: whether f returns a pair (scalar, auxiliary outputs). Default False.

    Returns:
        A function with f's arguments that returns (f's result, {name: cotangent}). A cotangent has
        the structure and shapes of the captured value, with None for leaves that are not
        floating-point.

    Raises:
        TypeError: f does not return a floating-point scalar.
        ValueError: as for `intervene`.

    >>> def f(x):
    ...     return jnp.sum(tag(x * 2, "doubled") ** 2)
    >>> capture_cotangents(f, "doubled")(jnp.ones(2))[1]["doubled"].tolist()
    [4.0, 4.0]
    """
    patterns = _patterns("capture_cotangents", pattern)

    @wraps(f, "capture_cotangents")
    def captured(*args, **kwargs):
        program = _Program(f, args, kwargs)
        found = program.matches("capture_cotangents", patterns)
        for match in found:
            _check_original("capture_cotangents", match.site)
        chosen = dict.fromkeys(match.site for match in found)

        def shifted(offsets):
            each = dict(zip(chosen, offsets))
            outputs, _ = program.evaluate(
                Inspector(program.level, changes=dict.fromkeys(chosen, _shift), offsets=each)
            )
            return _scalar(program.traced.tree(outputs)[0], has_aux), outputs

        (_, outputs), slopes = jax.value_and_grad(shifted, has_aux=True)(
            [_offsets(site) for site in chosen]
        )
        slopes = {
            site: [x for i, x in enumerate(leaves) if i in site.leaves]
            for site, leaves in zip(chosen, slopes)
        }
        return program.traced.result(outputs), {
            match.name: _value(match, slopes[match.site], match.indices) for match in found
        }

    return captured


class _Program:
    """A traced function whose jaxpr marks the named values of the function with tags."""

    def __init__(self, f, args, kwargs):
        with tagging(True):
            self.traced = Traced(f, args, kwargs)
        self.level = find_sites(self.traced.closed.jaxpr)

    def matches(self, who, patterns) -> list[Match]:
        found = [match for pattern in patterns for match in matches(who, pattern, self.level.sites)]
        return list({(match.site, match.indices): match for match in found}.values())

    def evaluate(self, inspector) -> tuple[list, dict]:
        return inspector(self.traced.closed, self.traced.arrays)

    def run(self, inspector) -> tuple[Any, dict]:
        outputs, leaves = self.evaluate(inspector)
        return self.traced.result(outputs), leaves


def _patterns(who, pattern) -> list[str]:
    patterns = (
        list(pattern)
        if isinstance(pattern, Iterable) and not isinstance(pattern, str)
        else [pattern]
    )
    for each in patterns:
        if not isinstance(each, str):
            raise TypeError(
                f"{who}: a pattern must be a string, such as 'blocks/attention'; got a "
                f"{type(each).__name__}"
            )
    return patterns


def _value(match, leaves, indices) -> Any:
    """Returns a captured named value as a tree. If the value was computed inside scans, `indices`
    selects iterations of these scans."""
    site, rest = match.site, iter(leaves)
    where = tuple(slice(None) if i is None else i for i in indices)
    whole = all(i is None for i in indices)
    return jax.tree.unflatten(
        site.structure,
        [
            None if t is None or (x := next(rest)) is None else x if whole else x[where]
            for t in site.types
        ],
    )


def _numbers(site) -> bool:
    """Returns False if a named value contains PRNG keys. A value that is captured in a single
    iteration of a scan becomes a part of the scan's carry. The initial carry contains zeros in
    place of the captured value, but zeros do not exist for PRNG keys."""
    return not any(
        t is not None and jax.dtypes.issubdtype(t.dtype, jax.dtypes.extended) for t in site.types
    )


def _scalar(result, has_aux):
    """Returns the scalar to differentiate."""
    kind = "a pair (floating-point scalar, anything else)" if has_aux else "a floating-point scalar"
    value = result
    if has_aux:
        value = result[0] if isinstance(result, tuple) and len(result) == 2 else None
    if (
        not isinstance(value, jax.Array)
        or value.shape != ()
        or not jnp.issubdtype(value.dtype, jnp.floating)
    ):
        what = (
            f"{value.dtype}{list(value.shape)}"
            if isinstance(value, jax.Array)
            else f"a {type(result).__name__}"
        )
        raise TypeError(
            f"capture_cotangents: with has_aux={has_aux} the function must return {kind}; it "
            f"returned {what}"
        )
    return value


def _check_original(who, site) -> None:
    if site.differentiated:
        raise ValueError(
            f"{who}: the site {site.name!r} is in a part of the function that has been "
            "differentiated: its backward pass uses the original value. Apply it to the function "
            f"before differentiation: grad({who}(f, ...))"
        )
    if site.custom:
        raise ValueError(
            f"{who}: the site {site.name!r} is inside a function with custom_jvp or custom_vjp, "
            "whose derivative uses the original value"
        )


def _changed(site, steps) -> Callable:
    """Returns a function `change(leaves, indices)` that applies the user's changes to a named
    value, in order.

    `leaves` are the leaves of the named value in one iteration of the scans that contain it.
    `indices` are the indices of this iteration, one for each scan. `change` returns the new leaves.
    """

    def change(leaves, indices):
        rest = iter(leaves)
        value = jax.tree.unflatten(
            site.structure, [None if t is None else next(rest) for t in site.types]
        )
        for match, function in steps:
            value = _one_change(match, function, value, indices)
        return jax.tree.leaves(value)

    return change


def _one_change(match, function, value, indices):
    def apply(value):
        new = function(value, indices)
        _check_same(match, value, new)
        return jax.tree.map(_as_type_of, value, new)

    chosen = [index == i for index, i in zip(indices, match.indices) if i is not None]
    if not chosen:
        return apply(value)
    return lax.cond(jnp.stack(chosen).all(), apply, lambda value: value, value)


def _as_type_of(x, y):
    """Returns y with the varying mesh axes and the explicit sharding of x, for which the rest of
    the program was traced."""
    y = _jax.vary_alike(x, jnp.asarray(y))[1]
    place = typed(jax.typeof(x))
    return y if place is None else jax.sharding.reshard(y, place)


def _check_same(match, old, new) -> None:
    types = [
        jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
        for tree in (old, new)
    ]
    if types[0] != types[1]:
        raise TypeError(
            f"intervene: the change of {match.name!r} must return {types[0]}, as the original "
            f"value; it returned {types[1]}"
        )


@jax.custom_jvp
def _shifted(x, offset):
    """Returns x. The derivatives of the function are those of x + offset, so the derivative with
    respect to `offset` is the cotangent of x. The array `offset` contains only zeros."""
    return x


@_shifted.defjvp
def _shifted_jvp(primals, tangents):
    return _shifted(*primals), tangents[0] + tangents[1]


def _shift(leaves, indices, offsets):
    return [
        x if offset is None else _shifted(x, offset)
        for x, offset in zip(leaves, offsets, strict=True)
    ]


def _offsets(site) -> list:
    """Returns zeros to add to each floating-point leaf of a site, with one leading axis for each
    scan around it: the gradient with respect to them is the leaf's cotangent."""
    lengths = tuple(length for _, length in site.scans)
    return [
        _jax.zeros(t, lead=lengths) if jnp.issubdtype(t.dtype, jnp.inexact) else None
        for t in (site.types[i] for i in site.leaves)
    ]
