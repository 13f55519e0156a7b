"""Finds the sites of a program, its named values, in its jaxpr, which is not evaluated.

A site is a value that was passed to `tag` (see `_tags`), such as the output of a layer, the
untagged outputs of a `jax.named_scope`, or an intermediate value of one of fnet's own primitives,
such as attention weights.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._primitives import description
from fnet.jaxpr._scopes import FORWARD, TOP, Scope, in_jaxpr, marks
from fnet.jaxpr._tags import BLOCK, tag_of

_OBSTACLES = {
    "while_cond": "the condition of a while loop",
    "while_body": "a while loop",
    "branch": "a branch of cond",
    "shard_map": "shard_map",
    "solve": "a linear solve",
}
_CUSTOM = frozenset(("custom_jvp_call", "custom_vjp_call"))


@dataclasses.dataclass(eq=False)
class Site:
    """A value with a name.

    Attributes:
        path: the named scopes around the value, followed by the value's own name if it has one.
        structure: the tree structure of the value.
        types: the type (shape and dtype) of each leaf of the value, or None for a leaf that does
            not occur in the program's jaxpr. For a value that is computed inside a scan, the types
            are those of one iteration.
        scans: (path, length) of the scans around the value, outermost first.
        obstacle: the enclosing operation, such as a while loop, that prevents capturing the value,
            or None.
        differentiated: whether the value is computed in a part of the program that is
            differentiated.
        custom: whether the value is inside a function with a custom derivative.
        compute: a function `compute(eqn, arrays)` that computes an intermediate value of one of
            fnet's own primitives, such as attention weights. None for all other values.
        replace: a function `replace(eqn, arrays, value)` that evaluates an equation of one of
            fnet's own primitives, but uses `value` in place of an intermediate value such as the
            attention weights. None for all other values.
        name: the path, followed by "#0", "#1", ... if several named values of the program have the
            same path.
    """

    path: str
    structure: Any
    types: list
    scans: tuple[tuple[str, int], ...] = ()
    obstacle: str | None = None
    differentiated: bool = False
    custom: bool = False
    compute: Callable | None = None
    replace: Callable | None = None
    name: str = ""

    @property
    def value(self) -> Any:
        """The type of the captured value: a tree of `jax.ShapeDtypeStruct` with a leading axis for
        each scan."""
        lengths = tuple(length for _, length in self.scans)
        return jax.tree.unflatten(
            self.structure,
            [
                None if t is None else jax.ShapeDtypeStruct((*lengths, *t.shape), t.dtype)
                for t in self.types
            ],
        )

    @property
    def leaves(self) -> list[int]:
        """The indices of the leaves of the value that occur in the program's jaxpr."""
        return [i for i, t in enumerate(self.types) if t is not None]


class Level:
    """The sites of one call of a jaxpr. Several calls of the same jaxpr have separate `Level`s.

    Attributes:
        made: {id of an equation: list of (i, site, j)}: output i of the equation is leaf j of the
            site.
        complete: {id of an equation: list of sites}, the sites whose last leaf the equation
            computes.
        inner: {id of an equation, such as a loop: the `Level` of the jaxpr inside it}.
        sites: all sites of the jaxpr, including those inside its equations, in the order in which
            they are computed.
    """

    def __init__(self):
        self.made, self.complete, self.inner = (
            collections.defaultdict(list),
            collections.defaultdict(list),
            {},
        )
        self.sites: list[Site] = []


@dataclasses.dataclass(frozen=True)
class _Place:
    """What all sites of a jaxpr have in common, such as the scans that contain the jaxpr."""

    at: Scope = TOP
    scans: tuple[tuple[str, int], ...] = ()
    obstacle: str | None = None
    differentiated: bool = False
    custom: bool = False

    def site(self, path, structure, types, **options) -> Site:
        options.setdefault("differentiated", self.differentiated)
        return Site(
            path, structure, types, self.scans, self.obstacle, custom=self.custom, **options
        )


def find(jaxpr: Any) -> Level:
    """Returns a `Level` with all sites of a program, and sets the `name` of each."""
    level = _level(jaxpr, _Place(), [True] * len(jaxpr.outvars))
    uses = collections.Counter(site.path for site in level.sites)
    numbers: dict[str, int] = collections.Counter()
    for site in level.sites:
        site.name = site.path if uses[site.path] == 1 else f"{site.path}#{numbers[site.path]}"
        numbers[site.path] += 1
    return level


def _level(jaxpr, place: _Place, live: list[bool]) -> Level:
    """Returns the `Level` of a jaxpr. `live` states for each output whether it is used outside of a
    backward pass."""
    level, scopes = Level(), list(map(in_jaxpr(jaxpr, place.at), jaxpr.eqns))
    forward = [i for i, scope in enumerate(scopes) if scope.phase == FORWARD]
    readers = collections.defaultdict(set)
    for i in forward:
        for v in jaxpr.eqns[i].invars:
            if not isinstance(v, _jax.Literal):
                readers[v].add(i)
    for v, used in zip(jaxpr.outvars, live):
        if used and not isinstance(v, _jax.Literal):
            readers[v].add(len(jaxpr.eqns))
    tagged = _tagged(level, jaxpr, place, scopes, forward)
    untagged = _untagged(level, jaxpr, place, scopes, forward, readers, tagged)
    for i in forward:
        eqn, scope = jaxpr.eqns[i], scopes[i]
        _enter(level, eqn, place, scope, readers)
        _inside(level, eqn, place, scope)
        level.sites += tagged.get(i, ())
        level.sites += untagged.get(i, ())
    return level


def _tagged(level, jaxpr, place, scopes, forward) -> dict[int, list[Site]]:
    """Finds the values of a jaxpr that were passed to `tag`.

    Returns {index of an equation: list of sites}, the sites whose last leaf the equation computes.
    """
    current: dict[Any, tuple[Site, list]] = {}
    groups = []
    for i in forward:
        eqn = jaxpr.eqns[i]
        if (found := tag_of(eqn)) is None:
            continue
        call, index = found
        path = _below(scopes[i].path, call.name)
        if (
            call not in current or current[call][0].types[index] is not None
        ):  # an inlined jaxpr repeats its tags
            site = place.site(
                path,
                call.structure,
                [None] * call.structure.num_leaves,
                differentiated=place.differentiated or _differentiated(eqn),
            )
            current[call] = site, []
            groups.append(current[call])
        site, members = current[call]
        site.types[index] = eqn.outvars[0].aval
        members.append((i, index))
    complete = collections.defaultdict(list)
    for site, members in groups:
        if not site.path:
            continue
        for i, index in members:
            level.made[id(jaxpr.eqns[i])].append((0, site, index))
        last = members[-1][0]
        level.complete[id(jaxpr.eqns[last])].append(site)
        complete[last].append(site)
    return complete


def _below(path, name):
    return (
        path
        if name is None
        else path + name
        if name == BLOCK
        else f"{path}/{name}"
        if path
        else name
    )


@dataclasses.dataclass
class _Run:
    """The equations that were traced in one execution of a `with jax.named_scope(name)` block."""

    key: tuple
    path: str
    members: set[int]
    tagged: bool = False


def _untagged(level, jaxpr, place, scopes, forward, readers, tagged) -> dict[int, list[Site]]:
    """Creates a site for each `jax.named_scope` whose outputs were not passed to `tag`.

    Its outputs are the arrays that are computed inside the scope and used outside of it. Returns
    {index of an equation: list of sites}, the sites whose last leaf the equation computes.
    """
    runs, open_runs = [], []
    for i in forward:
        entries = _entries(jaxpr.eqns[i], scopes[i].path, place.at.path)
        while open_runs and (
            len(open_runs) > len(entries) or open_runs[-1].key != entries[len(open_runs) - 1][1]
        ):
            open_runs.pop()
        while len(open_runs) < len(entries):
            path, key = entries[len(open_runs)]
            open_runs.append(_Run(key, path, set()))
            runs.append(open_runs[-1])
        for run in open_runs:
            run.members.add(i)
        if open_runs and (found := tag_of(jaxpr.eqns[i])) is not None and found[0].name is None:
            open_runs[-1].tagged = True
    complete = collections.defaultdict(list)
    for run in reversed(runs):  # inner scopes before outer ones
        if run.tagged:
            continue
        leaving = [
            (i, k, v)
            for i in sorted(run.members)
            for k, v in enumerate(jaxpr.eqns[i].outvars)
            if readers.get(v, frozenset()) - run.members
        ]
        if not leaving:
            continue
        last = leaving[-1][0]
        structure = jax.tree.structure(0 if len(leaving) == 1 else (0,) * len(leaving))
        differentiated = place.differentiated or _differentiated(jaxpr.eqns[last])
        site = place.site(
            run.path, structure, [v.aval for _, _, v in leaving], differentiated=differentiated
        )
        for leaf, (i, k, _) in enumerate(leaving):
            level.made[id(jaxpr.eqns[i])].append((k, site, leaf))
        level.complete[id(jaxpr.eqns[last])].append(site)
        complete[last].append(site)
    return complete


def _entries(eqn, path, outer) -> list[tuple[str, tuple]]:
    """Returns (path, key) for each `jax.named_scope` around an equation, outermost first.

    The key identifies one execution of a `with jax.named_scope(name)` block: equations that were
    traced in the same execution of the block have equal keys.
    """
    relative = path[len(outer) :].lstrip("/") if outer else path
    if not relative:
        return []
    entries = [
        entry
        for entry in _jax.scope_entries(eqn)
        if entry[0] and entry[0] != "rematted_computation"
    ]
    if "/".join(name for name, _ in entries) != relative:
        entries = [(name, 0) for name in relative.split("/")]  # only the text is known
    found, key = [], ()
    for name, identity in entries:
        outer, key = f"{outer}/{name}" if outer else name, (*key, name, identity)
        found.append((outer, key))
    return found


def _inside(level, eqn, place, scope) -> None:
    for name, inside in description(eqn.primitive).inside.items():
        avals = [v.aval for v in eqn.invars]
        types = jax.eval_shape(
            lambda *arrays, of=inside.compute: of(eqn, arrays),
            *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in avals),
        )
        site = place.site(
            f"{scope.path}/{name}" if scope.path else name,
            jax.tree.structure(0),
            [types],
            differentiated=place.differentiated or _differentiated(eqn),
            compute=inside.compute,
            replace=inside.replace,
        )
        level.complete[id(eqn)].append(site)
        level.sites.append(site)


def _enter(level, eqn, place, scope, readers) -> None:
    """Adds the sites in the bodies of an equation, such as a loop, to `level`."""
    inside, name = bodies(eqn), eqn.primitive.name
    for body in inside:
        obstacle = _OBSTACLES.get(body.kind)
        if body.kind == "other":
            obstacle = f"the primitive '{name}'"
        if name == "custom_vmap_call":
            obstacle = "a function with custom batching"
        within = dataclasses.replace(
            place,
            at=scope,
            obstacle=place.obstacle or obstacle,
            custom=place.custom or name in _CUSTOM,
            differentiated=place.differentiated or _differentiated(eqn),
        )
        live = [True] * len(body.jaxpr.outvars)
        if body.kind in ("call", "scan"):
            carry = scan(eqn).carry if body.kind == "scan" else 0
            live = [i < carry or bool(readers.get(v)) for i, v in enumerate(eqn.outvars)]
        if body.kind == "scan":
            within = dataclasses.replace(within, scans=(*within.scans, (scope.path, body.times)))
        inner = _level(body.jaxpr, within, live)
        level.sites += inner.sites
        if within.obstacle is None and inner.sites:
            level.inner[id(eqn)] = inner


def _differentiated(eqn) -> bool:
    return not marks(eqn).isdisjoint(("jvp", "linearize"))
