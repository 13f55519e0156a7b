"""Scope and Layer: what `forward` may ask for, what a call gives back, and what init promises."""

import functools
import json
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from flax.core import freeze
from jax import lax
from layer_cases import MLP

from fnet import layers as nn

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones


@nn.layer
def scale(scope, x, *, by=2.0, offset: float = 0.0):
    """Multiplies."""
    return x * by + offset


@nn.layer
def counter(scope, x, *, dtype=jnp.float32):
    """Counts its calls in state."""
    count = scope.state("count", (), zeros, dtype=dtype)
    scope.update("count", count + 1)
    return x


@nn.layer
def noise(scope, x):
    return jax.random.normal(scope.key(), x.shape)


@nn.layer
def two_draws(scope, x):
    return jnp.stack([jax.random.uniform(scope.key()), jax.random.uniform(scope.key())])


# The double call


def test_inside_and_outside_are_one_call():
    inside = nn.Sequential(head=nn.Dense(2))
    params, _ = inside.init(KEY, X)
    same(inside(params, X), nn.Dense(2)(params["head"], X))
    same(nn.Layer.__call__(inside, params, X), inside(params, X))


def test_method_has_the_double_call():
    embed = nn.Embed(5, 4)
    params, _ = embed.init(KEY, jnp.zeros(2, jnp.int32))
    close(embed.attend(params, X), X @ params["embedding"].T)

    @nn.layer
    def head(scope, x):
        return embed.attend(scope["embed"], x)

    same(head()({"embed": params}, X), embed.attend(params, X))
    y, state = embed.attend(params, X, state={})
    assert y.shape == (3, 5)
    assert state == {}


def test_any_mapping_holds_params():
    params, _ = nn.Dense(2).init(KEY, X)
    same(nn.Dense(2)(freeze(params), X), nn.Dense(2)(params, X))
    close(nn.Dense(2)(jax.tree.map(np.asarray, params), X), nn.Dense(2)(params, X))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("train", [False, True])
def test_state_comes_back_where_it_went_in(train):
    model = nn.Sequential(nn.Dense(4), nn.BatchNorm())
    params, state = model.init(KEY, X)
    y, new = model(params, X, state=state, train=train)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert isinstance(nn.Dense(4)(params["0"], X), jax.Array)
    y, new = nn.Dense(4)(params["0"], X, state={}, train=train)
    assert new == {}
    assert y.shape == (3, 4)


def test_state_keeps_structure_dtypes_and_what_it_does_not_know():
    model = nn.Sequential(counter(), nn.BatchNorm())
    params, state = model.init(KEY, X)
    state = jax.tree.map(lambda a: a.astype(jnp.bfloat16), state) | {
        "elsewhere": {"kept": jnp.arange(3)}
    }
    _, new = model(params, X, state=state, train=True)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )
    assert new["0"]["count"] == 1
    same(new["elsewhere"], state["elsewhere"])
    assert state["0"]["count"] == 0  # the caller's is not touched
    _, frozen = model(params, X, state=freeze(state), train=True)
    assert type(frozen) is type(freeze({}))


def test_update_is_seen_by_the_next_reader():
    @nn.layer
    def twice(scope, x):
        place = scope["n"]
        return counter()(place, counter()(place, x))

    model = twice()
    params, state = model.init(KEY, X)
    _, state = model(params, X, state=state)
    assert state == {"n": {"count": 2}}


def test_state_is_a_scan_carry_over_steps():
    model = counter(dtype=jnp.int32)
    params, state = model.init(KEY, X)
    step = lambda state, x: model(params, x, state=state)[::-1]
    state, _ = lax.scan(step, state, jnp.ones((5, 3, 4)))
    assert state["count"] == 5


@pytest.mark.exhaustive
def test_jit_takes_model_and_train_as_static():
    model = nn.Sequential(nn.Dense(4), nn.Dropout(0.5))
    params, _ = model.init(KEY, X)
    run = jax.jit(model, static_argnames="train")
    close(run(params, X, key=KEY, train=True), model(params, X, key=KEY, train=True))
    close(jax.jit(nn.Layer.__call__)(model, params, X), model(params, X))  # a static pytree


# Init


def test_init_takes_shapes_and_never_runs_the_model():
    @nn.layer
    def explosive(scope, x):
        w = scope.param("w", x.shape[-1:], ones)
        jax.debug.callback(lambda _: pytest.fail("init ran the model"), x.sum())
        return x * w[None]

    params, _ = explosive().init(KEY, jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32))
    jax.effects_barrier()
    assert params["w"].shape == (1 << 20,)


def test_adding_a_layer_moves_no_other_numbers():
    small, large = (
        MLP((5, 5, 3)),
        nn.Sequential(new=nn.Dense(4), inner=MLP((5, 5, 3)), newer=nn.Dense(2)),
    )
    params, _ = large.init(KEY, X)
    wider, _ = nn.Sequential(inner=MLP((5, 5, 3))).init(KEY, X)
    same(params["inner"], wider["inner"])
    deep, _ = MLP((5, 5, 5, 3)).init(KEY, X)
    shallow, _ = small.init(KEY, X)
    for name in ("fc0", "fc1"):
        same(deep[name], shallow[name])


def test_places_have_numbers_of_their_own():
    model = nn.Sequential(nn.Dense(4), nn.Dense(4), a=nn.Sequential(nn.Dense(4)))
    params, _ = model.init(KEY, X)
    kernels = [params["0"]["kernel"], params["1"]["kernel"], params["a"]["0"]["kernel"]]
    assert len({float(kernel[0, 0]) for kernel in kernels}) == 3


def test_params_and_draws_are_separate_domains():
    @nn.layer
    def both(scope, x):
        return scope.param("w", (1000,), jax.nn.initializers.normal(1.0)), jax.random.normal(
            scope.key(), (1000,)
        )

    params, _ = both().init(KEY, X)
    _, drawn = both()(params, X, key=KEY)
    assert abs(np.corrcoef(params["w"], drawn)[0, 1]) < 0.15


@pytest.mark.exhaustive
def test_numbers_are_the_same_in_every_process():
    code = (
        "import jax, jax.numpy as jnp; from fnet import layers as nn; p, _ = "
        "nn.Sequential(nn.Dense(2), head=nn.Dense(2)).init(jax.random.key(0), jnp.ones((1, 2))); "
        "print(p['head']['kernel'].tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here, _ = nn.Sequential(nn.Dense(2), head=nn.Dense(2)).init(KEY, jnp.ones((1, 2)))
    assert len(printed) == 1  # the tests compile with options of their own, which round differently
    np.testing.assert_allclose(json.loads(printed.pop()), here["head"]["kernel"], rtol=1e-6)


def test_spec_holds_shapes_dtypes_initializers_and_axes():
    params, state = nn.Sequential(nn.Dense(5), nn.BatchNorm(), nn.Stack(nn.Dense(5), 2)).spec(X)
    kernel = params["0"]["kernel"]
    assert (kernel.shape, kernel.dtype, kernel.axes) == ((4, 5), jnp.float32, ("in", "out"))
    assert params["2"]["kernel"].axes == ("layers", "in", "out")
    assert state["1"]["var"].init(KEY, (2,), jnp.float32).tolist() == [1, 1]
    assert (
        jax.tree.leaves(params, is_leaf=lambda node: False)[0] is params["0"]["bias"]
    )  # a leaf by itself


def test_old_keys_serve():
    same(nn.Dense(2).init(jax.random.PRNGKey(0), X), nn.Dense(2).init(jax.random.key(0), X))


# Draws


@pytest.mark.exhaustive
def test_draws_differ_by_place_and_by_call_and_repeat_by_key():
    a, b = two_draws()({}, X, key=KEY)
    assert a != b
    pair = nn.Parallel(noise(), noise(), combine=lambda a, b: jnp.stack([a, b]))
    y = pair({}, X, key=KEY)
    assert (y[0] != y[1]).any()
    same(pair({}, X, key=KEY), y)
    assert (pair({}, X, key=jax.random.key(1)) != y).any()


def test_adding_a_layer_moves_no_other_draws():
    one, two = nn.Sequential(inner=noise()), nn.Sequential(new=noise(), inner=noise())
    same(two({}, X, key=KEY), one({}, X, key=KEY))


# Names and sharing


def test_names_used_once_per_call_and_trace():
    @nn.layer
    def pair(scope, x):
        return nn.Dense(4)(scope["a"], x)

    @nn.layer
    def shares(scope, x):
        place = scope["shared"]
        return pair()(place, pair()(place, x))

    params, _ = shares().init(KEY, X)
    assert list(params) == ["shared"]
    close(shares()(params, X), pair()(params["shared"], pair()(params["shared"], X)))


@pytest.mark.exhaustive
def test_both_branches_of_a_cond_and_a_scan_body_share_names():
    @nn.layer
    def branches(scope, x):
        dense = lambda x: nn.Dense(4)(scope["a"], x)
        x = lax.cond(x.sum() > 0, dense, lambda x: 2 * dense(x), x)
        x, _ = lax.scan(lambda x, _: (nn.Dense(4)(scope["b"], x), None), x, length=3)
        return jax.vmap(lambda row: nn.Dense(4)(scope["c"], row))(x)

    params, _ = branches().init(KEY, X)
    assert sorted(params) == ["a", "b", "c"]
    y = X @ params["a"]["kernel"] * (1 if X.sum() > 0 else 2)
    for _ in range(3):
        y = y @ params["b"]["kernel"]
    close(branches()(params, X), y @ params["c"]["kernel"])
    assert jnp.isfinite(jax.grad(lambda p: branches()(p, X).sum())(params)["a"]["kernel"]).all()


def test_shared_weights_add_up_their_gradients():
    @nn.layer
    def tied(scope, x):
        place = scope["w"]
        return nn.Dense(4, use_bias=False)(place, nn.Dense(4, use_bias=False)(place, x))

    params, _ = tied().init(KEY, X)
    apart = nn.Sequential(nn.Dense(4, use_bias=False), nn.Dense(4, use_bias=False))
    parts = jax.grad(lambda p: apart(p, X).sum())({"0": params["w"], "1": params["w"]})
    close(
        jax.grad(lambda p: tied()(p, X).sum())(params)["w"],
        jax.tree.map(jnp.add, parts["0"], parts["1"]),
    )


# pure


@nn.layer
def mixture(scope, x, *, experts=3):
    f, params, state, keys = scope.pure(
        nn.Sequential(nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5)), x, copies=experts
    )
    y, state = jax.vmap(lambda p, s, k: f(p, x, state=s, key=k))(params, state, keys)
    for name in state or ():
        scope.update(name, state[name])
    return y.sum(0)


@pytest.mark.exhaustive
def test_pure_takes_a_layer_through_vmap():
    block = nn.Sequential(nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5))
    unrolled = nn.Parallel(*[block] * 3)
    model = mixture()
    params, state = model.init(KEY, X)
    apart = [
        {str(i): jax.tree.map(lambda a, i=i: a[i], tree) for i in range(3)}
        for tree in (params, state)
    ]
    same(tuple(apart), unrolled.init(KEY, X))
    y, state = model(params, X, state=state, key=KEY, train=True)
    y_apart, state_apart = unrolled(apart[0], X, state=apart[1], key=KEY, train=True)
    close(y, y_apart)
    close(jax.tree.map(lambda a: a[2], state), state_apart["2"])


def test_pure_without_state_or_key():
    seen = []

    @nn.layer
    def wrapped(scope, x):
        f, params, state, key = scope.pure(nn.Dense(4), x)
        y, new_state = f(params, x, state=state, key=key)
        seen.append((state, key, new_state))
        return y

    params, _ = wrapped().init(KEY, X)
    same(wrapped()(params, X), nn.Dense(4)(params, X))
    assert seen[-1] == (None, None, None)


# Layers as values


def test_layer_of_a_function_is_a_class():
    assert issubclass(scale, nn.Layer)
    assert (scale.__name__, scale.__doc__, scale.__module__) == ("scale", "Multiplies.", __name__)
    assert scale(by=3.0) == scale(by=3.0) != scale()
    assert repr(scale(by=3.0)) == "scale(by=3.0)"
    assert pickle.loads(pickle.dumps(scale(by=3.0, offset=1.0))) == scale(by=3.0, offset=1.0)
    close(scale(by=3.0, offset=1.0)({}, X), 3 * X + 1)


def test_lists_become_tuples():
    assert MLP([5, [3]]) == MLP((5, (3,)))
    assert hash(MLP([5, 3])) == hash(MLP((5, 3)))


def test_layers_pickle_with_functions_inside():
    model = nn.Sequential(
        nn.Dense(3),
        jax.nn.relu,
        jnp.tanh,
        nn.Remat(nn.Dense(3), policy=None),
        out=nn.Residual(nn.Dense(3), shortcut=nn.Dense(3)),
    )
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert hash(again) == hash(model)
    assert again.layers[1] is jax.nn.relu


def test_subclasses_inherit_fields():
    class Wide(MLP):
        factor: int = 2

        def forward(self, scope, x):
            return self.factor * super().forward(scope, x)

    model = Wide((5, 3))
    params, _ = model.init(KEY, X)
    close(model(params, X), 2 * MLP((5, 3))(params, X))
    assert repr(model) == "Wide(widths=(5, 3))"


def test_a_fresh_lambda_is_another_layer():
    # Which the docs warn of: each one traces anew.
    assert nn.Sequential(lambda x: x) != nn.Sequential(lambda x: x)
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, x):
        traces.append(model)
        return model({}, x)

    for _ in range(2):
        run(nn.Sequential(lambda x: x), X)
        run(nn.Sequential(jnp.tanh), X)
    assert len(traces) == 3


@pytest.mark.exhaustive
def test_params_meet_the_input_in_its_dtype():
    params, _ = nn.Dense(3).init(KEY, X)
    narrow = X.astype(jnp.bfloat16)
    want = narrow @ params["kernel"].astype(jnp.bfloat16)
    same(nn.Dense(3)(params, narrow), want)
    grads = jax.grad(lambda p: nn.Dense(3)(p, narrow).astype(jnp.float32).sum())(params)
    assert grads["kernel"].dtype == jnp.float32
    halved = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert nn.Dense(3)(halved, X).dtype == jnp.float32
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(X), jnp.float64)
        assert nn.Dense(3)(params, wide).dtype == jnp.float64
        assert nn.Dense(3).init(KEY, wide)[0]["kernel"].dtype == jnp.float32


def test_no_layer_stops_forward_mode_by_a_custom_vjp():
    text = str(jax.make_jaxpr(lambda p: MLP((5, 3))(p, X))(MLP((5, 3)).init(KEY, X)[0]))
    assert "custom_vjp" not in text
