"""Layer: an immutable description of a computation. The layer's parameters and state are stored
outside the layer."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet.jaxpr import alike_fields, array_leaves, tag
from fnet.layers import _hints, _spec
from fnet.layers._scope import Place, Run, Scope, describe, quote, written
from fnet.layers._spec import Spec

_RESERVED = ("key", "state", "train")


@typing.dataclass_transform(frozen_default=True)
class Layer:
    """A model or a part of one: an immutable object that is called as a pure function of its
    parameters.

    Subclasses declare their options as dataclass fields and define one method, `forward(self,
    scope, *inputs)`:

    >>> class Scale(nn.Layer):
    ...     factor: float
    ...     def forward(self, scope, x):                                   # [batch, features]
    ...         return self.factor * nn.Dense(3)(scope["dense"], x)
    >>> model, x = Scale(2.0), jnp.ones((4, 5))
    >>> params, state = model.init(jax.random.key(0), x)
    >>> model(params, x).shape
    (4, 3)

    A layer is hashable and picklable, and a pytree without leaves. Lists in fields become tuples;
    an array or a dict in a field raises an error. Define a function that you pass as a field only
    once: each evaluation of a lambda is a new function, for which `jax.jit` traces the model again.
    """

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]  # of the subclasses
    # Whether the class or one of its bases defines __init__.
    _varargs: typing.ClassVar[bool] = False
    _alike: typing.ClassVar[Callable[[Any, Any], Any]] = object.__eq__
    _hash: typing.ClassVar[Callable[[Any], int]] = object.__hash__

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in inspect.get_annotations(cls):
            if name in _METHODS:
                raise TypeError(
                    f"{cls.__name__}.{name}: a field cannot have the name of a Layer's method; "
                    f"rename it"
                )
        for name, function in vars(cls).items():
            if name == "forward" or getattr(function, "is_layer_method", False):
                _check_inputs(f"{cls.__name__}.{name}", function)
        cls._varargs = getattr(cls, "_varargs", False) or "__init__" in vars(cls)
        own = {"__eq__", "__hash__"} & vars(cls).keys()
        dataclasses.dataclass(frozen=True, repr=False, init=not cls._varargs)(cls)
        # Layer defines these methods for all subclasses, so that help() of a layer does not list
        # generated methods.
        cls._alike = cls.__eq__ if own else _alike
        if not own:
            cls._hash = cls.__hash__
            del cls.__eq__, cls.__hash__
        del cls.__setattr__, cls.__delattr__
        jax.tree_util.register_static(cls)
        construct = cls.__init__

        @functools.wraps(construct)
        def __init__(self: Layer, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            if type(self) is cls:
                _freeze(self)

        setattr(cls, "__init__", __init__)  # noqa: B010 - mypy rejects an assignment to a method

    def forward(self, scope: Scope, *inputs: Any, **options: Any) -> Any:
        """Computes the outputs. Subclasses define `forward`; `layer(scope, ...)` and `model(params,
        ...)` call it."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(self, scope, ...)")

    def __call__(self, where: Any, *inputs: Any, **options: Any) -> Any:
        """Computes the outputs. In a model, write `layer(scope, *inputs)`; elsewhere, write
        `model(params, *inputs)`.

            logits = model(params, x)                                             # inference
            logits, state = model(params, x, state=state, key=key, train=True)    # training

        Args:
            where: inside a model, the Scope of the layer; outside a model, the dict of the model's
                parameters.
            inputs, options: the inputs of `forward`. Calls outside a model also accept state, key
                and train.
            state: the dict of the model's state. If a dict is passed, even `{}`, the call also
                returns the new state, which has the structure, shapes and dtypes of `state`.
                Default None: no state is returned.
            key: a `jax.random.key` for layers that use random numbers, such as Dropout. Default
                None.
            train: whether layers such as Dropout and BatchNorm behave as in training. Default
                False.

        Returns:
            The output, or `(output, state)` if state is passed.

        Raises:
            TypeError: the first argument is neither a Scope nor a dict.
            ValueError: an array of params or state is missing or has the wrong shape; the message
                names its path.
        """
        return _call(self, type(self).forward, where, inputs, options)

    def spec(self, *inputs: Any, train: bool = False, **options: Any) -> Spec:
        """Returns `(params, state)`, two trees of `ParamSpec` with the shapes and initializers of
        all arrays.

        The arguments are those of `init` except `key`. `forward` is traced once, and no arrays are
        computed.
        """
        record = self._record(inputs, options, train)
        return Spec(record["params"], record["state"])

    def init(
        self, key: jax.Array, *inputs: Any, train: bool = False, **options: Any
    ) -> tuple[dict, dict]:
        """Creates `(params, state)`, plain nested dicts, without running the model.

        Each array has a random key of its own, derived from `key` and the array's path, so adding a
        layer does not change the initial values of the others.

        Args:
            key: a `jax.random.key`.
            inputs, options: example inputs of `forward`, arrays or `jax.ShapeDtypeStruct`s.
            train: whether the traced call has `train=True`. Default False.

        Returns:
            `(params, state)`. The state is `{}` if no layer has state.
        """
        _check_key("init", key)
        record = self._record(inputs, options, train)
        return (
            _spec.make(record["params"], _spec.fold(key, "params")),
            _spec.make(record["state"], _spec.fold(key, "state")),
        )

    def cache(self, *inputs: Any, **options: Any) -> dict:
        """Creates empty key/value caches for inputs of shape [batch, max_length, ...].

            logits, cache = model(params, prompt, state=model.cache(jax.ShapeDtypeStruct((batch, 1024), jnp.int32)))

        Pass them as `state`, merged with any other state, and take the updated ones from the
        returned state.
        """
        cache = self._record(inputs, options, False)["cache"]
        if not cache:
            raise ValueError(
                f"{type(self).__name__} has no cache, because none of its layers is a causal "
                f"Attention"
            )
        return _spec.make(cache, jax.random.key(0))

    def check(self, params: dict, *inputs: Any, state: dict | None = None, **options: Any) -> None:
        """Checks that `params` (and `state`, if passed) contain exactly the arrays that the model
        uses for the inputs.

        Raises:
            ValueError: arrays are missing, have the wrong shape, or are not used; the message lists
                them.
        """
        record = self._record(inputs, options, False)
        wrong = _differences("params", record["params"], params)
        if state is not None:
            wrong += _differences("state", record["state"], state)
        if wrong:
            raise ValueError(
                f"{type(self).__name__}: arrays do not match the model: {'; '.join(wrong)}"
            )

    def _record(
        self, inputs: tuple, options: dict, train: bool, path: tuple = ()
    ) -> dict[str, dict]:
        """Returns a dict of `ParamSpec` trees, "params", "state" and "cache", and under "layers" the
        layers that were called: {path: [layer, ...]}, in the order of the calls. Paths in errors
        begin with `path`."""
        _check_train(train)
        arrays, rebuild = array_leaves((inputs, options))
        record: dict[str, dict] = {"params": {}, "state": {}, "cache": {}, "layers": {(): [self]}}

        def trace(arrays: Any) -> Any:
            inputs, options = rebuild(arrays)
            run = Run(stateful=True, train=train, record=record, base=path)
            return self.forward(
                Scope(Place(run, None, path, None, None), type(self)), *inputs, **options
            )

        jax.eval_shape(trace, arrays)
        return record

    def __eq__(self, other: object) -> bool:
        return self._alike(other)

    def __hash__(self) -> int:
        return self._hash()

    def __getattr__(self, name: str) -> Any:
        raise _hints.missing_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(
            _hints.assigned(self, name, [field.name for field in dataclasses.fields(self)])
        )

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(
            f"cannot delete {name!r}: {type(self).__name__} is immutable"
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in _options(self).items())})"
        )

    def __reduce__(self) -> tuple:
        # Stores only fields that differ from their defaults: JAX's initializers are closures, which
        # pickle rejects.
        return _restore, (
            type(self),
            {name: _portable(value) for name, value in _options(self).items()},
        )


_METHODS = {name for name in vars(Layer) if not name.startswith("__")}


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a further method of a layer be called like the layer itself: with a scope inside a
    model, and with the parameters outside.

    >>> class Twice(nn.Layer):
    ...     def forward(self, scope, x):
    ...         return nn.Dense(3)(scope["dense"], x)
    ...     @nn.method
    ...     def half(self, scope, x):
    ...         return self.forward(scope, x) / 2
    >>> params, _ = Twice().init(jax.random.key(0), jnp.ones((1, 2)))
    >>> Twice().half(params, jnp.ones((1, 2))).shape    # inside a model: layer.half(scope, x)
    (1, 3)
    """

    @functools.wraps(function)
    def called(self: Layer, where: Any, *inputs: Any, **options: Any) -> Any:
        return _call(self, function, where, inputs, options)

    vars(called)["is_layer_method"] = True
    return called


def layer(function: Callable[..., Any]) -> Callable[..., Layer]:
    """Turns a function into a Layer class. Its keyword-only parameters become fields.

    >>> @nn.layer
    ... def scaled(scope, x, *, features, factor=2.0):
    ...     return factor * nn.Dense(features)(scope["dense"], x)
    >>> model = scaled(features=3)    # constructs a layer; nothing runs
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((4, 5)))
    >>> model(params, jnp.ones((4, 5))).shape
    (4, 3)
    """
    parameters = list(inspect.signature(function).parameters.values())
    name = function.__name__
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        raise TypeError(
            f"@layer: the first parameter of {name} must be a scope: def {name}(scope, x, *, ...)"
        )
    _check_inputs(name, function, first=0)
    fields = [p for p in parameters if p.kind is p.KEYWORD_ONLY]

    @functools.wraps(function)
    def forward(self: Layer, scope: Scope, *inputs: Any, **options: Any) -> Any:
        own = {field.name: getattr(self, field.name) for field in fields}
        return function(scope, *inputs, **options, **own)

    namespace = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__annotations__": {
            f.name: typing.Any if f.annotation is f.empty else f.annotation for f in fields
        },
        "forward": forward,
    }
    for f in fields:
        namespace[f.name] = dataclasses.field(
            kw_only=True, **({} if f.default is f.empty else {"default": f.default})
        )
    made: Any = type(name, (Layer,), namespace)
    construct = made.__init__

    @functools.wraps(construct)
    def __init__(self: Layer, *args: Any, **options: Any) -> None:
        if args:
            raise TypeError(
                f"{name}: expected options by keyword, because this constructs a layer; to call "
                f"it, write {name}(...)(scope, x)"
            )
        construct(self, **options)

    made.__init__ = __init__
    return made


def _call(layer: Layer, function: Callable, where: Any, inputs: tuple, options: dict) -> Any:
    name = type(layer).__name__
    if isinstance(where, Scope):
        if options and any(word in options for word in _RESERVED):
            raise TypeError(
                f"{name} at {quote(where._place.path)}: inside a model, the scope provides state, "
                "key and train; omit them"
            )
        place, run = where._place, where._place.run
        outer, path = run.here, place.path
        if run.record is not None:
            run.record["layers"].setdefault(path[run.base :], []).append(layer)
        # Named scopes can only be nested, so a shared scope from elsewhere in the tree enters its
        # complete path.
        new = path[len(outer) :] if path[: len(outer)] == outer else path
        run.here = path
        try:
            if new:
                with jax.named_scope("/".join(new)):
                    return tag(function(layer, Scope(place, type(layer)), *inputs, **options))
            return function(layer, Scope(place, type(layer)), *inputs, **options)
        finally:
            run.here = outer
    if not isinstance(where, Mapping):
        hint = (
            "; unpack the result of init: params, state = model.init(...)"
            if isinstance(where, tuple)
            else ""
        )
        what = f"an array {where.shape}" if hasattr(where, "shape") else describe(where)
        raise TypeError(
            f"{name}: the first argument must be a Scope (inside a model) or a dict of parameters "
            f"(outside); got {what}{hint}"
        )
    state, key, train = (
        options.pop("state", None),
        options.pop("key", None),
        options.pop("train", False),
    )
    _check_train(train)
    if key is not None:
        _check_key(name, key)
        key = _spec.fold(key, "draws")
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(
            f"{name}: state= must be a dict, the second result of model.init; got {describe(state)}"
        )
    _hints.check_inputs(name, inputs)
    run = Run(stateful=state is not None, key=key, train=train)
    root = Place(run, None, (), where, state)
    y = function(layer, Scope(root, type(layer)), *inputs, **options)
    return y if state is None else (y, written(root))


def _freeze(layer: Layer) -> None:
    """Converts list fields to tuples. Raises an error for a field that cannot be hashed."""
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if value is None or type(value) in (int, float, bool, str):
            continue
        if isinstance(value, list):
            value = _tuples(value)
            object.__setattr__(layer, field.name, value)
        what = _unhashable(value)
        if what:
            raise TypeError(
                f"{type(layer).__name__}.{field.name}: a layer's fields must be numbers, strings, "
                f"functions, layers or tuples of them, and arrays belong in params; got {what}"
            )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _alike(layer: Layer, other: object) -> bool:
    """Whether two layers have the same options: a program traced for one is the program of the
    other."""
    return alike_fields(layer, other) if type(layer) is type(other) else NotImplemented


def _unhashable(value: Any) -> str | None:
    """Returns what in the value of a field cannot be hashed, or None."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array {value.shape}"
    if isinstance(value, tuple):
        return next((what for item in value if (what := _unhashable(item))), None)
    try:
        hash(value)
    except TypeError:
        return f"a {type(value).__name__}"
    return None


def _options(layer: Layer) -> dict[str, Any]:
    """Returns the fields that differ from their defaults."""
    options = {}
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if (
            field.default is dataclasses.MISSING
            or value != field.default
            or type(value) is not type(field.default)
        ):
            options[field.name] = value
    return options


class _Public(typing.NamedTuple):
    """The public name of a JAX function, such as `jax.nn.relu`. A pickled layer contains the name,
    not the function."""

    module: str
    name: str


def _portable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_portable(item) for item in value)
    name = getattr(value, "__name__", None)
    if name:
        for module in ("jax.nn", "jax.numpy", "jax.lax"):
            if getattr(sys.modules[module], name, None) is value:
                return _Public(module, name)
    return value


def _portable_back(value: Any) -> Any:
    if isinstance(value, _Public):
        return getattr(importlib.import_module(value.module), value.name)
    return tuple(_portable_back(item) for item in value) if isinstance(value, tuple) else value


def _restore(cls: type, options: dict) -> Any:
    made: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        object.__setattr__(made, field.name, _portable_back(options.get(field.name, field.default)))
    return made


def _check_inputs(name: str, function: Callable, first: int = 1) -> None:
    for parameter in list(inspect.signature(function).parameters)[first:]:
        if parameter in _RESERVED:
            raise TypeError(
                f"{name}: {parameter!r} is a reserved name and cannot be an input; rename it, or "
                "use scope.key(), scope.state(...) or scope.train"
            )


def _check_train(train: Any) -> None:
    if not isinstance(train, (bool, np.bool_)):
        given = f"an array {train.shape}" if hasattr(train, "shape") else describe(train)
        raise TypeError(
            f"train= must be True or False when the model is traced; got {given} (with jax.jit, "
            "use static_argnames='train')"
        )


def _check_key(who: str, key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    if dtype is None or not (
        jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32
    ):
        given = repr(key) if dtype is None else f"an array {key.shape} of {dtype}"
        raise TypeError(f"{who}: expected a key from jax.random.key(seed); got {given}")


def _differences(kind: str, spec: Any, held: Any) -> list[str]:
    if not isinstance(held, Mapping):
        return [f"{kind} must be a dict, got {describe(held)}"]
    needed, found = dict(_spec.leaves(spec)), dict(_spec.leaves(held))
    wrong = []
    for path, leaf in needed.items():
        if path not in found:
            wrong.append(f"{quote(path)} {leaf.shape} is missing")
        elif np.shape(found[path]) != leaf.shape:
            wrong.append(
                f"{quote(path)}: expected shape {leaf.shape}, got {np.shape(found[path])} in {kind}"
            )
    unused = [path for path in found if path not in needed]
    return wrong + [f"{quote(path)} {np.shape(found[path])} is not used" for path in unused]
