"""Errors of models, scopes and layer classes: name: (attempt, type, text)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import layers as nn

KEY = jax.random.key(0)
ROWS, TIMES, IMAGES = jnp.ones((2, 4)), jnp.ones((2, 4, 4)), jnp.ones((2, 8, 8, 3))
zeros = jax.nn.initializers.zeros
MLP = nn.Sequential(nn.Dense(5), jax.nn.relu, head=nn.Dense(3))
PARAMS, _ = MLP.init(KEY, ROWS)
DROP = nn.Sequential(nn.Dense(4), nn.Dropout(0.5))
NORM = nn.Sequential(nn.Dense(4), nn.BatchNorm())
NORM_PARAMS, NORM_STATE = NORM.init(KEY, ROWS)
STACK = nn.Stack(nn.Dense(4), 3)


@nn.layer
def name_twice(scope, x):
    return nn.Dense(4)(scope["a"], nn.Dense(4)(scope["a"], x))


@nn.layer
def param_twice(scope, x):
    return scope.param("w", (4,), zeros) + scope.param("w", (4,), zeros)


@nn.layer
def shared_between_shapes(scope, x):
    shared = scope["a"]
    return nn.Dense(4)(shared, nn.Dense(5)(shared, x))


@nn.layer
def name_and_scope(scope, x):
    return nn.Dense(4)(scope["a"], x) + scope.param("a", (4,), zeros)


@nn.layer
def key_in_scan(scope, x):
    return lax.scan(
        lambda c, _: (c + jax.random.normal(scope.key(), c.shape), None), x, None, length=2
    )[0]


@nn.layer
def dropout_in_vmap(scope, x):
    return jax.vmap(lambda row: nn.Dropout(0.5)(scope["drop"], row))(x)


@nn.layer
def norm_in_cond(scope, x):
    return lax.cond(True, lambda x: nn.BatchNorm()(scope["norm"], x), lambda x: x, x)


@nn.layer
def named(scope, x, *, name):
    return nn.Dense(3)(scope[name], x)


@nn.layer
def undeclared(scope, x):
    scope.update("n", x)
    return x


@nn.layer
def misshaped(scope, x):
    scope.state("n", (4,), zeros)
    scope.update("n", x)
    return x


@nn.layer
def train_inside(scope, x):
    return nn.Dense(3)(scope["a"], x, train=True)


@nn.layer
def too_many_axes(scope, x):
    return scope.param("w", (4,), zeros, ("a", "b"))


class Holds(nn.Layer):
    field: object

    def forward(self, scope, x):
        return x


def init(layer, *x, **options):
    return lambda: layer.init(KEY, *x, **options)


def input_named_key():
    class Noise(nn.Layer):
        def forward(self, scope, x, key):
            return x


def method_input_named_state():
    class Cell(nn.Layer):
        @nn.method
        def step(self, scope, x, state):
            return x


def field_named_init():
    class Bad(nn.Layer):
        init: int = 3


def layer_field_named_cache():
    @nn.layer
    def bad(scope, x, *, cache=1):
        return x


def layer_input_named_train():
    @nn.layer
    def bad(scope, x, *, train):
        return x


def layer_without_scope():
    @nn.layer
    def bad(*, x):
        return x


class NoForward(nn.Layer):
    pass


FLOATS = "convert it, e.g. x.astype(jnp.float32) / 255 for images"
FIRST = "the first argument must be a Scope (inside a model) or a dict of parameters (outside); got"
TWICE = "use another name, or, to share its parameters, keep the scope in a variable"
RESERVED = "is a reserved name and cannot be an input; rename it, or use scope.key(), scope.state(...) or scope.train"
FIELDS = (
    "a layer's fields must be numbers, strings, functions, layers or tuples of them, and arrays "
    "belong in params; got"
)
PURE = "inside a jax transform (scan, cond, vmap, jit, ...); use scope.pure"

MODEL_ERRORS = {
    # shapes and dtypes
    "last dimension": (
        lambda: MLP(PARAMS, jnp.ones((2, 7))),
        ValueError,
        "'0/kernel': expected shape (7, 5) for this input, got (4, 5) in params",
    ),
    "channels": (
        lambda: nn.Conv(4, 3)(
            {"kernel": jnp.ones((3, 3, 3, 4)), "bias": jnp.ones(4)}, jnp.ones((2, 8, 8, 1))
        ),
        ValueError,
        "'kernel': expected shape (3, 3, 1, 4) for this input, got (3, 3, 3, 4) in params",
    ),
    "integer images": (
        init(nn.Conv(4, 3), jnp.ones((2, 8, 8, 3), jnp.uint8)),
        TypeError,
        f"Conv at the root: expected floating-point input; got uint8[2, 8, 8, 3]; {FLOATS}",
    ),
    "integers": (
        lambda: MLP(PARAMS, jnp.ones((2, 4), jnp.int32)),
        TypeError,
        f"Dense at '0': expected floating-point input; got int32[2, 4]; {FLOATS}",
    ),
    "integers in norm": (
        init(nn.LayerNorm(), jnp.ones((2, 4), jnp.int32)),
        TypeError,
        f"LayerNorm at the root: expected floating-point input; got int32[2, 4]; {FLOATS}",
    ),
    "integers in mean": (
        lambda: nn.AvgPool(2)({}, jnp.ones((2, 4, 4, 1), jnp.int32)),
        TypeError,
        f"AvgPool at the root: expected floating-point input; got int32[2, 4, 4, 1]; {FLOATS}",
    ),
    "booleans in max": (
        lambda: nn.MaxPool(2)({}, jnp.ones((2, 4, 4, 1), bool)),
        TypeError,
        "MaxPool at the root: expected real numbers; got bool[2, 4, 4, 1]",
    ),
    "scalar": (
        init(nn.Dense(4), jnp.float32(1)),
        ValueError,
        "Dense at the root: expected at least one axis; got a scalar",
    ),
    # params
    "parameter missing": (
        lambda: MLP({"0": PARAMS["0"]}, ROWS),
        ValueError,
        "'head/kernel': expected shape (5, 3) for this input, but params has no such array (the "
        "root contains 0)",
    ),
    "parameter misspelled": (
        lambda: MLP({"0": PARAMS["0"], "heads": PARAMS["head"]}, ROWS),
        ValueError,
        "'head/kernel': expected shape (5, 3) for this input, but params has no such array (the "
        "root contains 0, heads; did you mean 'heads'?)",
    ),
    "bias missing": (
        lambda: MLP({"0": PARAMS["0"], "head": {"kernel": PARAMS["head"]["kernel"]}}, ROWS),
        ValueError,
        "'head/bias': expected shape (3,) for this input, but params has no such array ('head' "
        "contains kernel)",
    ),
    "params of another model": (
        lambda: MLP(PARAMS["0"], ROWS),
        ValueError,
        "'0/kernel': expected shape (4, 5) for this input, but params has no such array (the root "
        "contains bias, kernel)",
    ),
    "a spec for params": (
        lambda: MLP(MLP.spec(ROWS).params, ROWS),
        ValueError,
        "'0/kernel': expected shape (4, 5) for this input, got a ParamSpec in params",
    ),
    "check": (
        lambda: MLP.check(
            {"0": PARAMS["0"], "head": {"kernel": jnp.ones((4, 4))}, "extra": {"w": jnp.ones(3)}},
            ROWS,
        ),
        ValueError,
        "Sequential: arrays do not match the model: 'head/kernel': expected shape (5, 3), got (4, "
        "4) in params; 'head/bias' (3,) is missing; 'extra/w' (3,) is not used",
    ),
    "check state": (
        lambda: NORM.check(
            NORM_PARAMS, ROWS, state={"1": {"mean": jnp.ones(4), "var": jnp.ones(5)}}
        ),
        ValueError,
        "Sequential: arrays do not match the model: '1/var': expected shape (4,), got (5,) in "
        "state",
    ),
    "check of a tuple": (
        lambda: MLP.check((PARAMS, {}), ROWS),
        ValueError,
        "Sequential: arrays do not match the model: params must be a dict, got a tuple",
    ),
    "what init returned": (
        lambda: MLP((PARAMS, {}), ROWS),
        TypeError,
        f"Sequential: {FIRST} a tuple; unpack the result of init: params, state = model.init(...)",
    ),
    "arguments in the wrong order": (
        lambda: MLP(ROWS, PARAMS),
        TypeError,
        f"Sequential: {FIRST} an array (2, 4)",
    ),
    "stack of another depth": (
        lambda: nn.Stack(nn.Dense(4), 2)(STACK.init(KEY, ROWS)[0], ROWS),
        ValueError,
        "'kernel': expected shape (2, ...) for 2 copies of Dense, got (3, 4, 4) in params",
    ),
    # state, key, train
    "state forgotten": (
        lambda: NORM(NORM_PARAMS, ROWS),
        ValueError,
        "BatchNorm needs the state '1/mean' (4,); pass state=, the second result of model.init",
    ),
    "state empty": (
        lambda: NORM(NORM_PARAMS, ROWS, state={}),
        ValueError,
        "'1/mean': expected shape (4,) for this input, but state has no such array (the root "
        "contains nothing)",
    ),
    "state of another shape": (
        lambda: NORM(NORM_PARAMS, ROWS, state={"1": {"mean": jnp.ones(3), "var": jnp.ones(4)}}),
        ValueError,
        "'1/mean': expected shape (4,) for this input, got (3,) in state",
    ),
    "state no dict": (
        lambda: MLP(PARAMS, ROWS, state=(1,)),
        TypeError,
        "Sequential: state= must be a dict, the second result of model.init; got a tuple",
    ),
    "key forgotten": (
        lambda: DROP(DROP.init(KEY, ROWS)[0], ROWS, train=True),
        ValueError,
        "Dropout at '1' needs random numbers; pass key=jax.random.key(...) to the model",
    ),
    "a seed for a key": (
        lambda: DROP({}, ROWS, train=True, key=0),
        TypeError,
        "Sequential: expected a key from jax.random.key(seed); got 0",
    ),
    "a seed for init": (
        lambda: MLP.init(0, ROWS),
        TypeError,
        "init: expected a key from jax.random.key(seed); got 0",
    ),
    "train a number": (
        lambda: MLP(PARAMS, ROWS, train=1),
        TypeError,
        "train= must be True or False when the model is traced; got an int (with jax.jit, use "
        "static_argnames='train')",
    ),
    "train traced": (
        lambda: jax.jit(lambda train: MLP(PARAMS, ROWS, train=train))(True),
        TypeError,
        "train= must be True or False when the model is traced; got an array () (with jax.jit, use "
        "static_argnames='train')",
    ),
    "train inside": (
        init(train_inside(), ROWS),
        TypeError,
        "Dense at 'a': inside a model, the scope provides state, key and train; omit them",
    ),
    "nothing to cache": (
        lambda: MLP.cache(ROWS),
        ValueError,
        "Sequential has no cache, because none of its layers is a causal Attention",
    ),
    # scopes
    "name twice": (
        init(name_twice(), ROWS),
        ValueError,
        f"'a' is used twice in one call of name_twice; {TWICE} (shared = scope['a'])",
    ),
    "parameter twice": (
        init(param_twice(), ROWS),
        ValueError,
        f"'w' is used twice in one call of param_twice; {TWICE} (shared = scope['w'])",
    ),
    "parameter named like a scope": (
        init(name_and_scope(), ROWS),
        ValueError,
        f"'a' is used twice in one call of name_and_scope; {TWICE} (shared = scope['a'])",
    ),
    "children of one name": (
        init(nn.Sequential(nn.Dense(3), **{"0": nn.Dense(4)}), ROWS),
        ValueError,
        f"'0' is used twice in one call of Sequential; {TWICE} (shared = scope['0'])",
    ),
    "a scope shared between shapes": (
        init(shared_between_shapes(), ROWS),
        ValueError,
        "'a/kernel': expected shape (5, 4), but in the same model it was (4, 5) before; share a "
        "scope only between layers of one shape, or use another name",
    ),
    "name a number": (
        init(named(name=0), ROWS),
        TypeError,
        "Scope(the root): expected a name that is a non-empty string without '/'; got 0",
    ),
    "name with a slash": (
        init(named(name="a/b"), ROWS),
        TypeError,
        "Scope(the root): expected a name that is a non-empty string without '/'; got 'a/b'",
    ),
    "key in scan": (
        lambda: key_in_scan()({}, ROWS, key=KEY),
        RuntimeError,
        f"key_in_scan at the root calls scope.key() {PURE}",
    ),
    "key in vmap": (
        lambda: dropout_in_vmap()({}, ROWS, key=KEY, train=True),
        RuntimeError,
        f"Dropout at 'drop' calls scope.key() {PURE}",
    ),
    "key in vmap while recording": (
        init(dropout_in_vmap(), ROWS, train=True),
        RuntimeError,
        f"Dropout at 'drop' calls scope.key() {PURE}",
    ),
    "update in cond": (
        lambda: norm_in_cond()(
            {"norm": NORM_PARAMS["1"]}, ROWS, state={"norm": NORM_STATE["1"]}, train=True
        ),
        RuntimeError,
        f"BatchNorm at 'norm' calls scope.update('mean') {PURE}",
    ),
    "update undeclared": (
        lambda: undeclared()({}, ROWS, state={}),
        ValueError,
        "undeclared updates the state 'n', which is missing in the state that was passed in; "
        "declare it with scope.state",
    ),
    "update of another shape": (
        lambda: misshaped()({}, ROWS, state={"n": jnp.ones(4)}),
        ValueError,
        "'n': expected a new state of shape (4,), as passed in, got (2, 4)",
    ),
    "axes": (
        init(too_many_axes(), ROWS),
        ValueError,
        "'w': expected one name for each axis of shape (4,), got axes=('a', 'b')",
    ),
    # classes
    "input named key": (input_named_key, TypeError, f"Noise.forward: 'key' {RESERVED}"),
    "method's input named state": (
        method_input_named_state,
        TypeError,
        f"Cell.step: 'state' {RESERVED}",
    ),
    "layer's input named train": (layer_input_named_train, TypeError, f"bad: 'train' {RESERVED}"),
    "field named init": (
        field_named_init,
        TypeError,
        "Bad.init: a field cannot have the name of a Layer's method; rename it",
    ),
    "field named cache": (
        layer_field_named_cache,
        TypeError,
        "bad.cache: a field cannot have the name of a Layer's method; rename it",
    ),
    "no scope": (
        layer_without_scope,
        TypeError,
        "@layer: the first parameter of bad must be a scope: def bad(scope, x, *, ...)",
    ),
    "called at once": (
        lambda: name_twice(ROWS),
        TypeError,
        "name_twice: expected options by keyword, because this constructs a layer; to call it, "
        "write name_twice(...)(scope, x)",
    ),
    "no forward": (
        lambda: NoForward()({}, ROWS),
        NotImplementedError,
        "NoForward has no forward(self, scope, ...)",
    ),
    "field a dict": (lambda: Holds({"a": 1}), TypeError, f"Holds.field: {FIELDS} a dict"),
    "field an array": (
        lambda: Holds(np.ones(3)),
        TypeError,
        f"Holds.field: {FIELDS} an array (3,)",
    ),
    "field a list of arrays": (
        lambda: Holds([jnp.ones(3)]),
        TypeError,
        f"Holds.field: {FIELDS} an array (3,)",
    ),
    "field assigned": (
        lambda: setattr(Holds(1), "field", 2),
        dataclasses.FrozenInstanceError,
        "cannot assign to field 'field': Holds is immutable; use dataclasses.replace(layer, "
        "field=...)",
    ),
}
