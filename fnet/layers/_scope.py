"""Scope: a node of a model's params and state, with the arrays of one layer. A scope is an ordinary
argument of the method `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from fnet import _jax
from fnet._util._nearest import did_you_mean
from fnet.jaxpr import is_implicit
from fnet.layers import _spec
from fnet.layers._spec import ParamSpec

_CLASHES = {
    "scope": ("scope", "param", "state"),
    "param": ("param", "scope"),
    "state": ("state", "scope"),
}


class Run:
    """The data of one call of a model: its arguments, and the arrays that layers record or update
    during the call."""

    __slots__ = ("base", "blocked", "here", "key", "record", "stateful", "trace", "train", "wrote")

    def __init__(
        self,
        *,
        stateful: bool,
        key: Any = None,
        train: bool = False,
        record: dict | None = None,
        base: tuple = (),
        blocked: bool = False,
    ):
        self.stateful = stateful  # whether state= was passed
        self.key = key
        self.train = train
        self.record = record  # what `Layer._record` returns, while a spec is traced
        self.base = len(base)  # length of the path of this run's root
        self.here = base  # the path of the layer that is running
        # Whether key() must fail, because the call is inside a jax transform.
        self.blocked = blocked
        self.trace = _jax.trace_state()
        self.wrote: list[Place] = []  # the Places with updated state


class Place:
    """The parameters, the state and the random key of one layer during one call of a model. All
    scopes with the same path share one `Place`."""

    __slots__ = ("_key", "children", "draws", "params", "parent", "path", "run", "state", "written")

    def __init__(
        self, run: Run, parent: Place | None, path: tuple[str, ...], params: Any, state: Any
    ):
        self.run, self.parent, self.path = run, parent, path
        self.params, self.state = params, state
        self.children: dict[str, Place] = {}
        self.written: dict[str, Any] = {}
        self.draws = 0
        self._key = None

    def child(self, name: str) -> Place:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Place(
                self.run,
                self,
                (*self.path, name),
                _spec.get(self.params, (name,)),
                _spec.get(self.state, (name,)),
            )
        return found

    def key(self) -> Any:
        """Derives the layer's random key from its path and the key of the call. Returns None if the
        call has no key."""
        if self._key is None and self.run.key is not None:
            self._key = (
                self.run.key
                if self.parent is None
                else _spec.fold(self.parent.key(), self.path[-1])
            )
        return self._key

    def read(self, name: str, spec: Any) -> Any:
        """Returns the parameter `name` after checking its shape. While the shapes of a model are
        traced, returns zeros."""
        if self.run.record is not None:
            return self.record("params", name, spec)
        held = self.params.get(name) if isinstance(self.params, Mapping) else self.params
        if getattr(held, "shape", None) != spec.shape or isinstance(held, ParamSpec):
            raise self.misfit("params", name, spec.shape, held)
        if is_implicit(held):
            raise TypeError(
                f"{quote((*self.path, name))}: a {type(held).__name__} array; call "
                "ft.use_implicit_arrays(model)(params, ...)"
            )
        return held

    def record(self, kind: str, name: str, spec: Any) -> jax.Array:
        assert self.run.record is not None
        node = self.run.record[kind]
        for part in self.path[self.run.base :]:
            node = node.setdefault(part, {})
        known = node.setdefault(name, spec)
        if isinstance(known, Mapping) or known.shape != spec.shape:
            raise ValueError(
                f"{quote((*self.path, name))}: expected shape {spec.shape}, but in the same model "
                f"it was {'a scope' if isinstance(known, Mapping) else f'{known.shape}'} before; "
                "share a scope only between layers of one shape, or use another name"
            )
        return jnp.zeros(spec.shape, spec.dtype)

    def record_tree(self, kind: str, tree: Any) -> dict:
        """Records all leaves of a spec tree below this node, and returns a tree of zeros with their
        shapes."""
        return {
            name: self.child(name).record_tree(kind, node)
            if isinstance(node, Mapping)
            else self.record(kind, name, node)
            for name, node in tree.items()
        }

    def misfit(self, kind: str, name: str, needed: Any, held: Any) -> ValueError:
        """Returns the error for an array that is missing or does not have the shape `needed`."""
        path = (*self.path, name)
        expected = f"{quote(path)}: expected shape {needed} for this input"
        if held is not None:
            return ValueError(f"{expected}, got {describe(held)} in {kind}")
        place = self
        while not isinstance(getattr(place, kind), Mapping) and place.parent is not None:
            place = place.parent
        tree = getattr(place, kind)
        names = sorted(map(str, tree)) if isinstance(tree, Mapping) else []
        meant = did_you_mean(path[len(place.path)], names)
        there = f"{quote(place.path)} contains {', '.join(names) or 'nothing'}"
        hint = f"; {meant}" if meant else ""
        return ValueError(f"{expected}, but {kind} has no such array ({there}{hint})")


class Scope:
    """Gives a layer access to its arrays, one node (a dict) of the parameter tree. It is an
    argument of `forward`, valid for one call, and uses no global state.

    >>> class Scale(nn.Layer):
    ...     def forward(self, scope, x):
    ...         return x * scope.param("scale", (), jax.nn.initializers.ones)
    >>> params, _ = Scale().init(jax.random.key(0), jnp.zeros((2, 3)))
    >>> params
    {'scale': Array(1., dtype=float32)}

    The complete interface is: `scope["name"]` (the scope of a child, which is a layer inside this
    one), `param`, `state`, `update`, `key`, `train` and `pure`. To share the arrays of a child
    among several calls, keep its scope in a variable:

        shared = scope["embed"]
        x = embed(shared, tokens)
        logits = embed.attend(shared, x)
    """

    __slots__ = ("_layer", "_names", "_place")

    def __init__(self, place: Place, layer: type):
        self._place, self._layer = place, layer
        self._names: dict = {}

    @property
    def _owner(self) -> str:
        return self._layer.__name__

    def __repr__(self) -> str:
        return f"Scope({quote(self._place.path)})"

    def __str__(self) -> str:
        return quote(self._place.path)

    def __getitem__(self, name: str) -> Scope:
        """Returns the scope of the child `name` (a layer in this layer). Within one call of a
        model, a name may be used only once for each scope."""
        self._use(name, "scope")
        return Scope(self._place.child(name), self._layer)

    @property
    def train(self) -> bool:
        """Whether the model was called with `train=True`."""
        return self._place.run.train

    def param(
        self,
        name: str,
        shape: Sequence[int],
        init: Callable,
        axes: Sequence[str | None] | None = None,
        *,
        roles: Sequence[str | None] | None = None,
    ) -> jax.Array:
        """Returns the parameter `name` of this layer.

        Args:
            name: the last segment of the parameter's path in the parameter tree.
            shape: the shape of the parameter for the current input.
            init: the initializer, `init(key, shape, dtype)` as in `jax.nn.initializers`. Only
                `Layer.init` calls it.
            axes: a logical name or None for each axis, as a hint for sharding. Default: no names.
            roles: what each axis is to an optimizer: "in", "out", "layers", or another word (see
                `ParamSpec`). Muon and Adafactor need them for an array with several axes. Default:
                not declared.

        Returns:
            The array from the caller's `params`, without a cast. `Layer.init` creates it in
            float32.

        Raises:
            ValueError: `params` has no array with the name `name` and the shape `shape`.

        >>> from fnet import layers as nn
        >>> @nn.layer
        ... def scale(scope, x):
        ...     return x * scope.param("scale", (), jax.nn.initializers.ones)
        >>> scale().init(jax.random.key(0), jnp.ones((2, 3)))[0]
        {'scale': Array(1., dtype=float32)}
        """
        self._use(name, "param")
        if not callable(init):
            raise TypeError(
                f"scope.param({name!r}): expected a shape, then an initializer; got a "
                f"{type(shape).__name__}, then a {type(init).__name__}"
            )
        place, shape = self._place, tuple(shape)
        for option, words in (("axes", axes), ("roles", roles)):
            if words is not None and len(words) != len(shape):
                raise ValueError(
                    f"{quote((*place.path, name))}: expected one name for each axis of shape "
                    f"{shape}, got {option}={tuple(words)}"
                )
        return place.read(
            name,
            ParamSpec(
                shape,
                jnp.float32,
                init,
                None if axes is None else tuple(axes),
                roles=(None,) * len(shape) if roles is None else tuple(roles),
                layer=self._layer,
            ),
        )

    @overload
    def state(
        self,
        name: str,
        shape: Sequence[int],
        init: Callable,
        kind: Literal["stats"] = "stats",
        *,
        dtype: Any = jnp.float32,
    ) -> jax.Array: ...

    @overload
    def state(
        self,
        name: str,
        shape: Sequence[int],
        init: Callable,
        kind: str,
        *,
        dtype: Any = jnp.float32,
    ) -> jax.Array | None: ...

    def state(
        self,
        name: str,
        shape: Sequence[int],
        init: Callable,
        kind: str = "stats",
        *,
        dtype: Any = jnp.float32,
    ) -> jax.Array | None:
        """Returns the state `name` of this layer: the array that the caller of the model passed, or
        the one that `scope.update` has set earlier in the same call.

        Args:
            name: the last segment of the array's path in the state tree.
            shape: the shape of the array.
            init: the initializer, `init(key, shape, dtype)` as in `jax.nn.initializers`.
            kind: "stats" (default), which `Layer.init` creates and the caller must pass, or
                "cache", which `Layer.cache` creates and the caller may leave out. A missing cache
                is None, and the shape of a cache is not checked.
            dtype: the dtype with which the array is created. Default float32.

        Raises:
            ValueError: kind is "stats", and the caller passed no array with the name `name` and the
                shape `shape`.
        """
        self._use(name, "state")
        place, run, shape = self._place, self._place.run, tuple(shape)
        if run.record is not None:
            spec = ParamSpec(shape, dtype, init, layer=self._layer)
            zeros = place.record("state" if kind == "stats" else "cache", name, spec)
            return zeros if kind == "stats" else None
        if name in place.written:
            return place.written[name]
        held = place.state.get(name) if isinstance(place.state, Mapping) else place.state
        if kind == "cache":
            return held
        if not run.stateful:
            raise ValueError(
                f"{self._owner} needs the state {quote((*place.path, name))} {shape}; pass state=, "
                "the second result of model.init"
            )
        if getattr(held, "shape", None) != shape:
            raise place.misfit("state", name, shape, held)
        return held

    def update(self, name: str, value: Any) -> None:
        """Sets the state `name` to `value`, cast to the dtype of the state that the caller passed.
        For a subtree of the state (see `pure`), `value` is a dict.

        Raises:
            RuntimeError: the call is inside a JAX transform that `forward` applies, which the value
                could not leave.
            ValueError: `name` was not declared with `state`, or `value` has another shape.
        """
        place = self._place
        self._same_trace(f"update({name!r})")
        if place.run.record is not None:
            return
        held = _spec.get(place.state, (name,))
        if held is None:
            raise ValueError(
                f"{self._owner} updates the state {quote((*place.path, name))}, which is missing "
                "in the state that was passed in; declare it with scope.state"
            )
        if not place.written:
            place.run.wrote.append(place)
        place.written[name] = _like(held, value, (*place.path, name))

    def key(self) -> jax.Array:
        """Returns a random key, a different one in each call. It is derived from the `key=` that
        the caller of the model passed, the path of this scope, and a counter.

        Raises:
            RuntimeError: the call is inside a JAX transform that `forward` applies, such as
                `lax.scan`, all iterations of which would use the same key.
            ValueError: the caller passed no key.
        """
        place = self._place
        self._same_trace("key()")
        if place.run.record is not None:
            return jax.random.key(0)
        if place.run.key is None:
            raise ValueError(
                f"{self._owner} at {quote(place.path)} needs random numbers; pass "
                "key=jax.random.key(...) to the model"
            )
        place.draws += 1
        return jax.random.fold_in(place.key(), place.draws)

    def pure(
        self, layer: Any, *inputs: Any, copies: int | None = None, **options: Any
    ) -> tuple[Callable, Mapping, Any, Any]:
        """Turns `layer` into a pure function, to which JAX's transforms can be applied, and returns
        it with its arrays.

            f, params, state, key = scope.pure(self.block, x)
            y, state = jax.checkpoint(f)(params, x, state=state, key=key)
            for name in state or ():
                scope.update(name, state[name])

        Args:
            layer: the layer, whose arrays are stored at the path of this scope.
            inputs: example inputs of the layer, or of one copy of it if `copies` is set. Only the
                shapes and dtypes of arrays are used.
            copies: the number of stacked copies of the layer. Every array of params, state and key
                then has a leading axis of this length, and copy `i` has the initial values that the
                layer would have in `scope[str(i)]`. Default None: one layer, and no leading axis.
            options: example keyword arguments of the layer; only shapes and dtypes are used.

        Returns:
            `(f, params, state, key)`. The function is `f(params, *inputs, state=None, key=None,
            train=None, **options)` and returns `(y, state)`. `state` and `key` are None if the
            caller of the model passed none. With `train=None`, `f` uses `scope.train`.
        """
        place, run = self._place, self._place.run
        recording = run.record is not None
        if not hasattr(layer, "_record"):
            raise TypeError(
                f"{self._owner} at {self}: expected a layer, got {describe(layer)}; wrap a "
                "function in nn.Sequential"
            )
        if copies is not None and copies < 0:
            raise ValueError(
                f"{self._owner} at {self}: the number of copies must be >= 0; got {copies}"
            )
        if recording:
            assert run.record is not None
            record = layer._record(inputs, options, run.train, place.path)
            for path, layers in record.pop("layers", {}).items():
                called = run.record["layers"].setdefault((*place.path[run.base :], *path), [])
                called.extend(layers)
            if copies is not None:
                record = {kind: _spec.copies(tree, copies) for kind, tree in record.items()}
            params: Mapping = place.record_tree("params", record["params"])
            state = place.record_tree("state", record["state"])
            place.record_tree("cache", record["cache"])
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
                key = jax.vmap(lambda number: jax.random.fold_in(key, number))(
                    _spec.numbers(copies)
                )

        def f(
            params: Any,
            *inputs: Any,
            state: Any = None,
            key: Any = None,
            train: Any = None,
            **options: Any,
        ) -> tuple:
            inner = Run(
                stateful=state is not None,
                key=key,
                train=run.train if train is None else train,
                base=place.path,
                blocked=blocked and key is None,
            )
            root = Place(inner, None, place.path, params, state)
            y = layer.forward(Scope(root, type(layer)), *inputs, **options)
            return y, written(root)

        return f, params, state, key

    def _use(self, name: str, kind: str) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            raise TypeError(
                f"{self!r}: expected a name that is a non-empty string without '/'; got {name!r}"
            )
        now = _jax.trace_state()
        for other in _CLASHES[kind]:
            if self._names.get((other, name)) == now:
                place = quote((*self._place.path, name))
                raise ValueError(
                    f"{place} is used twice in one call of {self._owner}; use another name, or, to "
                    f"share its parameters, keep the scope in a variable (shared = scope[{name!r}])"
                )
        self._names[kind, name] = now

    def _same_trace(self, what: str) -> None:
        run = self._place.run
        if run.blocked or _jax.trace_state() != run.trace:
            raise RuntimeError(
                f"{self._owner} at {quote(self._place.path)} calls scope.{what} inside a jax "
                "transform (scan, cond, vmap, jit, ...); use scope.pure"
            )


def quote(path: tuple) -> str:
    return repr("/".join(path)) if path else "the root"


def describe(value: Any) -> str:
    """Describes a value in an error: an array by its shape, a dict by its names, anything else by
    its type."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted(map(str, value)))}"
    shape = None if isinstance(value, ParamSpec) else getattr(value, "shape", None)
    if shape is not None:
        return str(shape)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIO' else 'a'} {kind}"


def _like(held: Any, value: Any, path: tuple) -> Any:
    """Returns `value` with the dtypes of `held`, after checking that both have the same structure
    and shapes."""
    if isinstance(held, Mapping):
        if not isinstance(value, Mapping) or set(value) != set(held):
            given = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(
                f"{quote(path)}: expected a new state with {sorted(held)}, as passed in, got "
                f"{given}"
            )
        return {name: _like(held[name], value[name], (*path, name)) for name in held}
    value = jnp.asarray(value)
    if value.shape != jnp.shape(held):
        raise ValueError(
            f"{quote(path)}: expected a new state of shape {jnp.shape(held)}, as passed in, got "
            f"{value.shape}"
        )
    return value.astype(jnp.result_type(held)) if value.dtype != jnp.result_type(held) else value


def written(place: Place) -> Any:
    """Returns the new state of a layer and its sublayers: the state that was passed, with this
    call's updates.

    Returns None if the caller passed no state, and {} if the caller's state does not contain the
    path of the layer.
    """
    if not place.run.stateful:
        return None
    state, depth = place.state if isinstance(place.state, Mapping) else {}, len(place.path)
    for other in place.run.wrote:
        if other.path[:depth] == place.path:
            state = _replace(state, other.path[depth:], other.written)
    return state


def _replace(tree: Any, path: tuple, values: Any) -> Any:
    new = dict(tree)
    if path:
        new[path[0]] = _replace(new[path[0]], path[1:], values)
    else:
        new.update(values)
    return new if type(tree) is dict else type(tree)(new)


def _check_copies(kind: str, tree: Any, count: Any, path: tuple, owner: Any) -> None:
    for below, leaf in _spec.leaves(tree or {}):
        shape = jnp.shape(leaf)
        if shape[:1] != (count,):
            raise ValueError(
                f"{quote((*path, *below))}: expected shape ({count}, ...) for {count} copies of "
                f"{owner}, got {shape} in {kind}"
            )
