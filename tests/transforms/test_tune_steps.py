"""tune on steps as people write them: what they are given beside arrays, how they are compiled, how
they fail."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import parallel
from fnet import transforms as ft
from tests.checks import close

pytestmark = pytest.mark.usefixtures("quickly", "every_size")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), jnp.float32)


def gradient(w, x):
    return jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)


def fires(step, *args):
    return {row.rule for row in ft.explain(step, *args).rows}


# Arguments and results that are no arrays.


def equinox_step():
    model = eqx.nn.MLP(12, 4, 16, 2, key=jax.random.key(0))
    tx = optax.sgd(0.1, momentum=0.9)

    def step(model, opt_state, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    return step, (
        model,
        tx.init(eqx.filter(model, eqx.is_inexact_array)),
        normal(1, 8, 12),
        jnp.arange(8) % 4,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how", [ft.tune, lambda f: ft.tune(eqx.filter_jit(f)), lambda f: eqx.filter_jit(ft.tune(f))]
)
def test_a_whole_equinox_model(how):
    """Its activation functions are leaves, and no arrays."""
    step, args = equinox_step()
    tuned, want = how(step), eqx.filter_jit(step)(*args)
    got = tuned(*args)
    assert isinstance(got[0], eqx.nn.MLP) and got[0].activation is args[0].activation
    close(*(eqx.filter(result, eqx.is_array) for result in (got, want)))
    got = tuned(*got[:2], *args[2:])  # and on with what came back
    close(
        *(
            eqx.filter(result, eqx.is_array)
            for result in (got, eqx.filter_jit(step)(*want[:2], *args[2:]))
        )
    )
    if hasattr(tuned, "tuned"):
        assert fires(tuned, *args) == {"products"}


class Regularized(eqx.Module):
    dense: eqx.nn.Linear
    dropout: eqx.nn.Dropout  # with a number and a bool
    repeats: int

    def __call__(self, x, key):
        for _ in range(self.repeats):
            x = jnp.tanh(self.dense(x))
        return self.dropout(x, key=key)


@pytest.mark.exhaustive
def test_options_of_an_equinox_model_stay_python_numbers():
    """So that the model that comes back is one to go on with; numbers that the step changes become
    arrays."""
    step = lambda model, count, x, key: (
        eqx.apply_updates(model, eqx.filter_grad(lambda m: (m(x, key) ** 2).sum())(model)),
        {"count": count + 1},
    )
    model = Regularized(eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5), 2)
    tuned, plain, got, want = (
        ft.tune(step, "cpu"),
        eqx.filter_jit(step),
        (model, {"count": 0}),
        (model, {"count": 0}),
    )
    for i in range(3):
        rest = normal(i, 4), jax.random.key(i)
        got, want = tuned(got[0], got[1]["count"], *rest), plain(want[0], want[1]["count"], *rest)
        close(*(eqx.filter(result[0], eqx.is_array) for result in (got, want)))
        options = got[0].repeats, got[0].dropout.p, got[0].dropout.inference
        assert repr(options) == "(2, 0.5, False)" and int(got[1]["count"]) == i + 1


def test_values_that_are_no_arrays_are_traced_for_each():
    seen = []

    def f(x, activation, name="a"):
        seen.append(name)
        return activation(x), name

    tuned = ft.tune(f, "cpu")
    for activation, name in ((jnp.sin, "a"), (jnp.cos, "a"), (jnp.sin, "a"), (jnp.sin, "b")):
        y, said = tuned(jnp.ones(3), activation, name=name)
        np.testing.assert_array_equal(y, jax.jit(activation)(jnp.ones(3)))
        assert said == name
    assert seen == ["a", "a", "b"]
    lowered = tuned.lower(jnp.ones(3), jnp.cos, name="a").as_text()
    assert "cosine" in lowered
    with pytest.raises(
        TypeError, match=re.escape("[0][1] is a set, which is neither an array nor hashable")
    ):
        tuned(jnp.ones(3), {1})


def test_rewrite_hands_back_what_is_no_array():
    y, name = ft.rewrite(lambda x, f: (f(x), f), lambda *_: NotImplemented)(jnp.ones(3), jnp.sin)
    assert name is jnp.sin and y.shape == (3,)


def test_methods():
    class Trainer:
        rate = 0.5

        @ft.tune
        def step(self, w, x):
            return w - self.rate * gradient(w, x)[1]

    w, x = normal(1, 6, 4), normal(2, 8, 6)
    close(Trainer().step(w, x), w - 0.5 * jax.jit(gradient)(w, x)[1])


# Compiled ahead.


@pytest.mark.exhaustive
def test_trace_lower_and_export():
    w, x = normal(1, 6, 4), normal(2, 8, 6)
    want = jax.jit(gradient)(w, x)
    for step in (gradient, jax.jit(gradient)):
        tuned = ft.tune(step, "cpu")
        lowered = tuned.lower(w, jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert "optimization_barrier" in lowered.as_text() and "optimization_barrier" in str(
            tuned.trace(w, x).jaxpr
        )
        close(lowered.compile()(w, x), want)
        exported = export.export(tuned)(w, x)
        close(exported.call(w, x), want)


def test_compiling_ahead_has_the_compilers_options():
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME")
    compiled = ft.tune(conv, "cpu").lower(normal(1, 2, 3, 8, 8), normal(2, 4, 3, 3, 3)).compile()
    assert "__ynn" not in compiled.as_text()


def test_sizes_that_are_not_known():
    (size,) = export.symbolic_shape("b")
    w, x = normal(1, 6, 4), jax.ShapeDtypeStruct((size, 6), jnp.float32)
    exported = export.export(jax.jit(ft.tune(gradient, "cpu")))(w, x)
    for rows in (3, 8):
        close(exported.call(w, normal(2, rows, 6)), jax.jit(gradient)(w, normal(2, rows, 6)))


def test_an_outer_jit_lowers_its_own():
    """jax.jit copies the attributes of a function that it is given; `lower` is not to be one of
    them."""
    tuned = ft.tune(lambda w, x: w - gradient(w, x)[1], "cpu")
    text = jax.jit(tuned, donate_argnums=0).lower(normal(1, 6, 4), normal(2, 8, 6)).as_text()
    assert "tf.aliasing_output" in text and "optimization_barrier" in text


def test_a_planned_step_is_lowered_tuned():
    step = lambda state, batch: ({"w": state["w"] - gradient(state["w"], batch)[1]}, {})
    init = lambda key: {"w": jax.random.normal(key, (6, 4))}
    plan = parallel.plan(step, init, normal(2, 16, 6))
    tuned, state = ft.tune(plan.jit(step), "cpu"), plan.init(jax.random.key(0))
    assert "optimization_barrier" in tuned.lower(state, normal(2, 16, 6)).as_text()
    want, _ = plan.jit(step)(plan.init(jax.random.key(0)), normal(2, 16, 6))
    got, _ = tuned(state, normal(2, 16, 6))
    close(got, want)
    assert state["w"].is_deleted() and got["w"].sharding == want["w"].sharding
    with pytest.raises(
        ValueError, match=r"^plan\.jit: .* has 12 rows, not a multiple of 8 devices"
    ):
        ft.tune(plan.jit(step), "cpu")(plan.init(jax.random.key(0)), normal(2, 12, 6))


def test_donation_of_a_jitted_step_with_bound_arguments():
    def train(n, state, x):
        return {"w": state["w"] * n - x}

    step = ft.tune(functools.partial(jax.jit(train, static_argnums=0, donate_argnums=1), 3), "cpu")
    state, x = {"w": jnp.ones(4)}, jnp.ones(4)
    np.testing.assert_array_equal(step(state, x)["w"], 2)
    assert state["w"].is_deleted() and not x.is_deleted()


# Arrays whose author says where they lie.


@pytest.mark.exhaustive
def test_explicit_sharding_is_left_alone():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def pooled(w, x):
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.square(x @ w).mean()

    step = jax.value_and_grad(pooled, (0, 1))
    args = put(normal(1, 6, 4), None, "model"), put(normal(2, 8, 4, 4, 6), "data")
    got, want = ft.tune(step, "cpu")(*args), jax.jit(step)(*args)
    close(got, want)
    assert [x.sharding for x in got[1]] == [x.sharding for x in want[1]]
    auto = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    args = normal(1, 6, 4), jax.device_put(normal(2, 8, 4, 4, 6), NamedSharding(auto, P("data")))
    assert fires(ft.tune(step, "cpu"), *args) == {"products", "max_pool", "max_pool_gradient"}


# Errors are those of the step, but for what jit alone would not take.


def fails(x):
    raise TypeError("my own")


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (fails, TypeError, "^my own"),
        (
            lambda x: x @ jnp.ones((3, 3)),
            TypeError,
            "^dot_general requires contracting dimensions to have the same shape",
        ),
        (lambda x: {}["k"], KeyError, "^'k'"),
        (
            lambda x, y: x,
            TypeError,
            r"^test_tune_steps.<lambda>\(\) missing 1 required|^<lambda>\(\) missing 1 required",
        ),
        (
            lambda x: 1 if x.sum() > 0 else 0,
            TypeError,
            r"^tune: '<lambda>' cannot be traced with abstract arrays: Attempted boolean "
            r"conversion of traced array with shape bool\[\]\.$",
        ),
        (
            lambda x: np.asarray(x),
            TypeError,
            "^tune: '<lambda>' cannot be traced with abstract arrays",
        ),
        (
            lambda x: [0, 1][x.argmax()],
            TypeError,
            "^tune: '<lambda>' cannot be traced with abstract arrays",
        ),
        (lambda x: x[x > 0], TypeError, "^tune: '<lambda>' cannot be traced with abstract arrays"),
    ],
)
def test_errors_of_a_step(step, error, message):
    with pytest.raises(error, match=message):
        ft.tune(step, "cpu")(normal(1, 4))


def test_a_jitted_step_donates_what_it_says_itself():
    """JAX ignores the donation of a jitted function inside another one, so the caller may use the
    array again."""
    inner = jax.jit(lambda x: x + 1, donate_argnums=0)
    for step, deleted in ((jax.jit(lambda x: inner(x)), False), (lambda x: inner(x), True)):
        x = jnp.ones(4)
        ft.tune(step, "cpu")(x)
        assert x.is_deleted() == deleted
