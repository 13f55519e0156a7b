"""Scope: the place in a model's trees where a layer's arrays live, handed to `forward` as an ordinary argument."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fnet import _jax
from fnet.layers import _spec
from fnet.layers._spec import ParamSpec

_CLASHES = {"scope": ("scope", "param", "state"), "param": ("param", "scope"), "state": ("state", "scope")}


class Run:
    """One call of a model from outside: what was passed in, and what came up on the way."""

    __slots__ = ("base", "blocked", "here", "key", "record", "stateful", "trace", "train", "wrote")

    def __init__(self, *, stateful, key=None, train=False, record=None, base=(), blocked=False):
        self.stateful = stateful    # whether state= was given
        self.key = key
        self.train = train
        self.record = record        # {"params": {}, "state": {}, "cache": {}} while a spec is traced
        self.base = len(base)       # how many names of every path stand above this run's trees
        self.here = base            # the path of the layer that runs now
        self.blocked = blocked      # the key was withheld: the call stands inside a jax transform
        self.trace = _jax.trace_state()
        self.wrote = []             # places with new state


class Place:
    """A node of the trees of one run: the same for everybody who comes to that path."""

    __slots__ = ("_key", "children", "draws", "params", "parent", "path", "run", "state", "written")

    def __init__(self, run, parent, path, params, state):
        self.run, self.parent, self.path = run, parent, path
        self.params, self.state = params, state
        self.children, self.written, self.draws, self._key = {}, {}, 0, None

    def child(self, name):
        found = self.children.get(name)
        if found is None:
            params, state = self.params, self.state
            found = self.children[name] = Place(
                self.run, self, (*self.path, name),
                params.get(name) if isinstance(params, Mapping) else None,
                state.get(name) if isinstance(state, Mapping) else None)
        return found

    def key(self):
        """The run's key, folded along the path; None where the run has none."""
        if self._key is None and self.run.key is not None:
            self._key = self.run.key if self.parent is None else _spec.fold(self.parent.key(), self.path[-1])
        return self._key

    def read(self, name, spec):
        """The parameter `name`, held to its spec; while recording, zeros in its stead."""
        if self.run.record is not None:
            return self.record("params", name, spec)
        held = self.params.get(name) if isinstance(self.params, Mapping) else self.params
        if getattr(held, "shape", None) != spec.shape or isinstance(held, ParamSpec):
            raise self.misfit("params", name, spec.shape, held)
        return held

    def record(self, kind, name, spec):
        node = self.run.record[kind]
        for part in self.path[self.run.base:]:
            node = node.setdefault(part, {})
        known = node.setdefault(name, spec)
        if isinstance(known, Mapping) or known.shape != spec.shape:
            raise ValueError(f"{quote((*self.path, name))} is asked for as {spec.shape} and was "
                             f"{'a scope' if isinstance(known, Mapping) else known.shape} before in the same model: "
                             "share a scope only between layers of one shape, or give the second its own name")
        return jnp.zeros(spec.shape, spec.dtype)

    def record_tree(self, kind, tree):
        """Records a whole spec tree below this place; returns its zeros."""
        return {
            name: self.child(name).record_tree(kind, node) if isinstance(node, Mapping)
            else self.record(kind, name, node)
            for name, node in tree.items()
        }

    def misfit(self, kind, name, needed, held) -> ValueError:
        """What to say where the caller's tree holds nothing of the shape that this input needs."""
        verb = "hold" if kind == "params" else "holds"
        path = (*self.path, name)
        if held is not None:
            return ValueError(f"{quote(path)}: this input needs {needed}, {kind} {verb} {describe(held)}")
        place = self
        while not isinstance(getattr(place, kind), Mapping) and place.parent is not None:
            place = place.parent
        tree = getattr(place, kind)
        names = sorted(map(str, tree)) if isinstance(tree, Mapping) else []
        near = difflib.get_close_matches(path[len(place.path)], names, 1)
        there = f"{quote(place.path)} holds {', '.join(names) or 'nothing'}"
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ValueError(f"{quote(path)}: this input needs {needed}, {kind} {verb} none ({there}{hint})")


class Scope:
    """Where a layer finds its arrays: an explicit argument of `forward`, valid for one call of one layer.

    The whole vocabulary is: `scope["name"]`, the place of a child; `param`, `state`, `update`, `key`, `train` and
    `pure`. A Scope knows nothing global, and keeping it in a variable shares what lives there:

        shared = scope["embed"]
        x = embed(shared, tokens)
        logits = embed.attend(shared, x)
    """

    __slots__ = ("_names", "_owner", "_place")

    def __init__(self, place: Place, owner: str):
        self._place, self._owner, self._names = place, owner, {}

    def __repr__(self):
        return f"Scope({quote(self._place.path)})"

    def __str__(self):
        return quote(self._place.path)

    def __getitem__(self, name: str) -> Scope:
        """The place of the child `name`."""
        self._use(name, "scope")
        return Scope(self._place.child(name), self._owner)

    @property
    def train(self) -> bool:
        """Whether the model was called with `train=True`."""
        return self._place.run.train

    def param(self, name: str, shape, init, axes=None) -> jax.Array:
        """The parameter `name` of this layer.

        Args:
            name: its last name in the parameter tree.
            shape: the shape this input needs.
            init: `init(key, shape, dtype)`, as in `jax.nn.initializers`; used by `Layer.init` alone.
            axes: a logical name (or None) for each axis, a hint for sharding; nothing else reads it.

        Returns:
            The array as the caller's `params` hold it (made in float32 by `init`), never cast.

        Raises:
            ValueError: where params hold nothing of that name and shape.
        """
        self._use(name, "param")
        place, shape = self._place, tuple(shape)
        if axes is not None and len(axes) != len(shape):
            raise ValueError(f"{quote((*place.path, name))}: axes {tuple(axes)} name {len(axes)} axes of shape {shape}")
        return place.read(name, ParamSpec(shape, jnp.float32, init, None if axes is None else tuple(axes)))

    def state(self, name: str, shape, init, kind: str = "stats", *, dtype=jnp.float32) -> jax.Array | None:
        """The state `name` of this layer, as `update` left it or the caller passed it in.

        Args:
            name: its last name in the state tree.
            shape: its shape.
            init: `init(key, shape, dtype)`.
            kind: "stats" is made by `Layer.init` and has to be passed in; "cache" is made by `Layer.cache` alone:
                where none is passed, None comes back, and where one is, its shape is the caller's affair.
            dtype: its dtype when it is made.

        Raises:
            ValueError: where "stats" are needed and none of that name and shape were passed.
        """
        self._use(name, "state")
        place, run, shape = self._place, self._place.run, tuple(shape)
        if run.record is not None:
            zeros = place.record("state" if kind == "stats" else "cache", name, ParamSpec(shape, dtype, init))
            return zeros if kind == "stats" else None
        if name in place.written:
            return place.written[name]
        held = place.state.get(name) if isinstance(place.state, Mapping) else place.state
        if kind == "cache":
            return held
        if not run.stateful:
            raise ValueError(f"{self._owner} needs the state {quote((*place.path, name))} {shape}: pass state=, "
                             "the second result of model.init")
        if getattr(held, "shape", None) != shape:
            raise place.misfit("state", name, shape, held)
        return held

    def update(self, name: str, value) -> None:
        """Makes `value` the new state `name`; for a subtree (see `pure`), a dict of new values.

        The caller gets it back in the dtype that was passed in.

        Raises:
            RuntimeError: inside a jax transform that was entered in `forward`, where the value could not get out.
            ValueError: for a name that was not declared with `state`, or a value of another shape.
        """
        place = self._place
        self._same_trace(f"update({name!r})")
        if place.run.record is not None:
            return
        held = place.state.get(name) if isinstance(place.state, Mapping) else None
        if held is None:
            raise ValueError(f"{self._owner} updates the state {quote((*place.path, name))}, which the state passed in "
                             "does not hold: declare it with scope.state")
        if not place.written:
            place.run.wrote.append(place)
        place.written[name] = _like(held, value, (*place.path, name))

    def key(self) -> jax.Array:
        """A fresh random key, from the caller's `key=` folded along this path; another one at each call.

        Raises:
            RuntimeError: inside a jax transform that was entered in `forward`: there it would be the same every time.
            ValueError: where the caller passed no key.
        """
        place = self._place
        self._same_trace("key()")
        if place.run.record is not None:
            return jax.random.key(0)
        if place.run.key is None:
            raise ValueError(f"{self._owner} at {quote(place.path)} draws random numbers: pass key=jax.random.key(...) "
                             "to the model")
        place.draws += 1
        return jax.random.fold_in(place.key(), place.draws)

    def pure(self, layer, *inputs, copies: int | None = None, **options):
        """`layer`, at this place, as a pure function: the way into JAX's own transforms.

        Glossary: with `copies`, every array of params, state and key has a leading axis of that length, and copy
        `i` has the numbers of a child named `str(i)`.

            f, params, state, key = scope.pure(self.block, x)
            y, state = jax.checkpoint(f)(params, x, state=state, key=key)
            for name in state or ():
                scope.update(name, state[name])

        Args:
            layer: the layer; it shares this place's path and names.
            inputs: example inputs (of one copy), read for their shapes alone; `options` likewise.
            copies: how many of it live here, stacked; None: one.

        Returns:
            `(f, params, state, key)` with `f(params, *inputs, state=None, key=None, train=None, **options) ->
            (y, state)`. State and key are None where the caller gave none; train=None means the caller's.
        """
        place, run = self._place, self._place.run
        recording = run.record is not None
        if not hasattr(layer, "_record"):
            raise TypeError(f"{self._owner} at {self} takes a layer; got {describe(layer)}: wrap a function in "
                            "nn.Sequential")
        if copies is not None and copies < 0:
            raise ValueError(f"{self._owner} at {self}: the number of copies can't be negative; got {copies}")
        if recording:
            record = layer._record(inputs, options, run.train, place.path)
            if copies is not None:
                record = {kind: _spec.copies(tree, copies) for kind, tree in record.items()}
            params, state, _ = (place.record_tree(kind, record[kind]) for kind in ("params", "state", "cache"))
        else:
            params = place.params if isinstance(place.params, Mapping) else {}
            state = written(place)
        blocked = run.blocked or _jax.trace_state() != run.trace
        key = None
        if not blocked:
            key = jax.random.key(0) if recording else place.key()
        if copies is not None:
            for kind, tree in (("params", params), ("state", state)):
                _check_copies(kind, tree, copies, place.path, type(layer).__name__)
            if key is not None:
                key = jax.vmap(lambda number: jax.random.fold_in(key, number))(_spec.numbers(copies))

        def f(params, *inputs, state=None, key=None, train=None, **options):
            inner = Run(stateful=state is not None, key=key, train=run.train if train is None else train,
                        base=place.path, blocked=blocked and key is None)
            root = Place(inner, None, place.path, params, state)
            y = layer.forward(Scope(root, type(layer).__name__), *inputs, **options)
            return y, written(root)

        return f, params, state, key

    def _use(self, name, kind):
        if not isinstance(name, str) or not name or "/" in name:
            raise TypeError(f"a name in {self!r} is a non-empty string without '/'; got {name!r}")
        now = _jax.trace_state()
        for other in _CLASHES[kind]:
            if self._names.get((other, name)) == now:
                place = quote((*self._place.path, name))
                raise ValueError(f"{place} is used twice in one call of {self._owner}: give the second another name, "
                                 f"or, to share it, keep its scope in a variable (shared = scope[{name!r}])")
        self._names[kind, name] = now

    def _same_trace(self, what):
        run = self._place.run
        if run.blocked or _jax.trace_state() != run.trace:
            raise RuntimeError(f"{self._owner} at {quote(self._place.path)} calls scope.{what} inside a jax transform "
                               "(scan, cond, vmap, jit, ...): take the layer through it with scope.pure")


def quote(path) -> str:
    return repr("/".join(path)) if path else "the root"


def describe(value) -> str:
    """A value as an error names it: an array by its shape, a dict by its names, anything else by its type."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted(map(str, value)))}"
    shape = None if isinstance(value, ParamSpec) else getattr(value, "shape", None)
    if shape is not None:
        return str(shape)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIO' else 'a'} {kind}"


def _like(held, value, path):
    """`value`, held to the structure, shapes and dtypes of `held`."""
    if isinstance(held, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(held):
            given = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{quote(path)}: the new state has {given}, the state passed in {sorted(held)}")
        return {name: _like(held[name], value[name], (*path, name)) for name in held}
    value = jnp.asarray(value)
    if value.shape != jnp.shape(held):
        raise ValueError(f"{quote(path)}: the new state is {value.shape}, the state passed in {jnp.shape(held)}")
    return value.astype(jnp.result_type(held)) if value.dtype != jnp.result_type(held) else value


def written(place: Place):
    """The state at a place: exactly what came in, with the values that were updated there and below.

    None where none came in; {} where the caller's state has nothing at this place.
    """
    if not place.run.stateful:
        return None
    state, depth = place.state if isinstance(place.state, Mapping) else {}, len(place.path)
    for other in place.run.wrote:
        if other.path[:depth] == place.path:
            state = _replace(state, other.path[depth:], other.written)
    return state


def _replace(tree, path, values):
    new = dict(tree)
    if path:
        new[path[0]] = _replace(new[path[0]], path[1:], values)
    else:
        new.update(values)
    return new if type(tree) is dict else type(tree)(new)


def _check_copies(kind, tree, count, path, owner):
    for below, leaf in _spec.leaves(tree or {}):
        shape = jnp.shape(leaf)
        if shape[:1] != (count,):
            raise ValueError(f"{quote((*path, *below))}: {count} copies of {owner} need ({count}, ...), {kind} hold "
                             f"{shape}")
