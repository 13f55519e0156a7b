"""How tune is called: arguments of any structure, nnx modules, and compiler options that an outer
jit would lose."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax import lax

from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("every_size")
X = jnp.arange(3.0)


def test_values_that_are_not_arrays_may_change_between_calls():
    f = lambda x, mode: (
        x
        if mode is None
        else x * 2
        if mode == "double"
        else mode(x)
        if callable(mode)
        else x * mode
    )
    g = ft.tune(f, "cpu")
    for mode in (
        None,
        "double",
        jnp.sin,
        3.0,
        jnp.float32(4),
        None,
        jnp.cos,
        "double",
        "other" and "double",
    ):
        np.testing.assert_allclose(g(X, mode), f(X, mode))
    h = ft.tune(lambda x, *, mode=None: f(x, mode), "cpu")
    for options in ({}, {"mode": "double"}, {"mode": jnp.sin}, {}):
        np.testing.assert_allclose(h(X, **options), f(X, options.get("mode")))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Options:
    value: float | bool


def test_numbers_in_objects_are_told_apart_by_type_and_sign():
    f = lambda x, options: (x, str(options.value))
    g = ft.tune(f, "cpu")
    for value in (1, 1.0, True, 0.0, -0.0, 0, False, float("nan"), float("nan"), 1):
        assert g(X, Options(value))[1] == str(value)


def test_results_that_are_not_arrays_may_appear_in_later_calls():
    f = lambda d: {
        "y": d["a"] * 2,
        **({"note": "big", "count": len(d)} if "flag" in d else {}),
        **({"shape": str(d["a"].shape)} if d["a"].size > 1 else {}),
    }
    g = ft.tune(f, "cpu")
    for d in ({"a": X[:1]}, {"a": X[:1], "flag": 1.0}, {"a": X}, {"a": X[:1]}):
        got, want = g(d), f(d)
        np.testing.assert_allclose(got.pop("y"), want.pop("y"))
        assert got == want


def test_steps_with_values_that_are_not_arrays_compile_ahead_of_time():
    tuned = ft.tune(lambda x, f, d: (f(x), {"name": "a", **d}), "cpu")
    compiled = tuned.lower(X, jnp.cos, {"b": X}).compile()
    for _ in range(2):
        y, rest = compiled(X, jnp.cos, {"b": X + 1})
        np.testing.assert_allclose(y, jnp.cos(X), rtol=1e-6)
        np.testing.assert_array_equal(rest.pop("b"), X + 1)
        assert rest == {"name": "a"}
    assert (
        tuned.trace(X, jnp.cos, {"b": X}).lower().compile()(X, jnp.cos, {"b": X})[1]["name"] == "a"
    )
    assert "cosine" in tuned.lower(X, jnp.cos, {}).as_text()


def test_a_value_without_a_hash_is_named():
    with pytest.raises(
        TypeError, match=r"\[0\]\[1\] is a set, which is neither an array nor hashable"
    ):
        ft.tune(lambda x, s: x, "cpu")(X, {1})
    with pytest.raises(
        TypeError, match=r"^the result is a set, which is neither an array nor hashable"
    ):
        ft.tune(lambda x: {1}, "cpu")(X)


def convolution(w, x):
    return (
        lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ** 2
    ).sum()


CONVOLVED = jnp.ones((3, 3, 4, 8)) / 9, jnp.ones((2, 6, 6, 4))


def test_options_that_an_outer_jit_loses_are_told_once():
    step = jax.value_and_grad(convolution)
    tuned = ft.tune(step, "cpu", rules={"convolution_kernels": True})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        want = tuned(*CONVOLVED)
        assert not told
        for _ in range(2):
            close(jax.jit(tuned)(*CONVOLVED), want)
        close(jax.jit(lambda *args: tuned(*args))(*CONVOLVED), want)
    (warning,) = told
    assert "xla_cpu_experimental_ynn_fusion_type" in str(warning.message)
    assert str(warning.message).endswith(
        "call ft.tune(step) itself instead of jitting it, or pass compiler_options= to your jit"
    )
    explanation = ft.explain(tuned, *CONVOLVED)
    assert explanation.options and "not under an outer jit" in str(explanation)


def test_no_warning_without_options():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(ft.tune(lambda x: x @ x, "cpu"))(jnp.eye(3))


# flax.nnx: modules that are updated in place.

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.norm, self.dense = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)
        self.drop, self.calls = nnx.Dropout(0.5, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.drop(self.dense(self.norm(x)))


def loss(model, x):
    return jnp.square(model(x)).mean()


def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def trained(wrap, steps=3):
    model = Model(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    run = wrap(step)
    x = jax.random.normal(jax.random.key(0), (8, 4)) + 5
    values = [run(model, optimizer, x) for _ in range(steps)]
    plain = lambda a: (
        jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a
    )
    return values, jax.tree.map(plain, nnx.to_pure_dict(nnx.state((model, optimizer))))


WRAPS = {
    "tune": lambda f: ft.tune(f, "cpu"),
    "nnx.jit(tune)": lambda f: nnx.jit(ft.tune(f, "cpu")),
    "rewrite": lambda f: ft.rewrite(f, lambda *_: NotImplemented),
    "nnx.jit(rewrite)": lambda f: nnx.jit(ft.rewrite(f, lambda *_: NotImplemented)),
    "tune of tune": lambda f: ft.tune(ft.tune(f, "cpu"), "cpu"),
    "rematerialize": ft.rematerialize,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRAPS)
def test_an_nnx_step_trains(name):
    (values, state), (wanted, expected) = trained(WRAPS[name]), trained(nnx.jit)
    assert values[0] > values[-1]
    close([values, state], [wanted, expected], 1e-4)
    assert state["0" if "0" in state else 0]["calls"] == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_an_nnx_step_trains_under_autocast(wrap):
    values, state = trained(lambda f: wrap(ft.autocast(f, "bfloat16")))
    wanted, expected = trained(wrap)
    np.testing.assert_allclose(values, wanted, rtol=0.1)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    first = lambda tree: tree["0" if "0" in tree else 0]
    np.testing.assert_allclose(
        first(state)["norm"]["mean"], first(expected)["norm"]["mean"], rtol=1e-2
    )
    assert first(state)["calls"] == 3


@pytest.mark.exhaustive
def test_gradients_of_a_transformed_loss_keep_statistics():
    for wrap in (lambda f: f, lambda f: ft.autocast(f, "bfloat16"), lambda f: ft.tune(f, "cpu")):
        model = Model(rngs=nnx.Rngs(0))
        nnx.value_and_grad(wrap(loss))(model, jnp.ones((8, 4)) * 5)
        np.testing.assert_allclose(model.norm.mean[...], 0.05, rtol=1e-2)
        assert model.calls[...] == 1


def test_shared_variables_stay_shared():
    def tied(pair, x):
        pair["a"].kernel[...] *= 2
        return pair["b"](x)

    def of(wrap):
        layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        pair = {"a": layer, "b": layer}
        return wrap(tied)(pair, X), layer.kernel[...]

    close(of(lambda f: ft.rewrite(f, lambda *_: NotImplemented)), of(lambda f: f))
    close(of(lambda f: ft.tune(f, "cpu")), of(lambda f: f))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", WRAPS)
def test_attributes_and_results_are_those_of_nnx_jit(name):
    class Holder(nnx.Module):
        def __init__(self, *, rngs):
            self.model, self.mode = Model(rngs=rngs), "train"
            self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs)])

    def evaluate(holder, x):
        holder.eval()
        holder.mode = "eval"
        return holder.model(x), {"holder": holder}

    def run(wrap):
        holder = Holder(rngs=nnx.Rngs(0))
        call = wrap(evaluate)
        for _ in range(2):  # compiled by the first call
            holder.train()
            y, returned = call(holder, jnp.ones((8, 4)))
            assert returned["holder"] is holder
        model = holder.model
        return (
            y,
            model.calls[...],
            (
                holder.mode,
                model.drop.deterministic,
                model.norm.use_running_average,
                holder.layers[0].deterministic,
            ),
        )

    (y, calls, modes), (expected, *_) = run(WRAPS[name]), run(nnx.jit)
    close(y, expected, 1e-6)
    assert calls == 2 and modes == ("eval", True, True, True)


def test_new_variables_are_an_error():
    def grows(model, x):
        model.extra = nnx.Variable(x)
        return x

    for wrap in (lambda f: ft.autocast(f, "bfloat16"), lambda f: ft.tune(f, "cpu")):
        with pytest.raises(
            TypeError, match="may update the variables of an nnx module, but not add or remove them"
        ):
            wrap(grows)(Model(rngs=nnx.Rngs(0)), X)


def test_a_module_that_is_closed_over_is_an_error():
    model = Model(rngs=nnx.Rngs(0))
    with pytest.raises(Exception, match="trace level"):
        ft.autocast(lambda x: jnp.square(model(x)).mean(), "bfloat16")(jnp.ones((8, 4)))


@pytest.mark.parametrize("groups", [1, 2, 4], ids=["ungrouped", "grouped", "depthwise"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_grouped_convolutions_keep_their_kernels(groups, gradient):
    def f(w, x):
        y = lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.square(y).sum()

    args = jnp.ones((3, 3, 4 // groups, 8)), CONVOLVED[1]
    options = ft.explain(ft.tune(jax.grad(f) if gradient else f, "cpu"), *args).options
    assert bool(options) == (groups == 1)
