"""Structured pruning: against masked parameters, formulas in NumPy, Flax and Equinox."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet import hardware as hw
from fnet import layers as nn
from fnet import transforms as ft

DRAW = np.random.default_rng(2)
X = DRAW.normal(size=(6, 5)).astype(np.float32)
PARAMS = {
    "in": DRAW.normal(size=(5, 8)).astype(np.float32),
    "bias": DRAW.normal(size=8).astype(np.float32),
    "out": DRAW.normal(size=(8, 3)).astype(np.float32),
}


def f(params, x):
    return jnp.tanh(x @ params["in"] + params["bias"][None]) @ params["out"]


def test_the_indices_with_the_smallest_parameters_are_removed():
    score = (PARAMS["in"] ** 2).mean(0) + PARAMS["bias"] ** 2 + (PARAMS["out"] ** 2).mean(1)
    kept = np.sort(np.argsort(-score)[:3])
    shrunk = compress.shrink(f, PARAMS, X, fraction=3 / 8)
    np.testing.assert_array_equal(shrunk.params["in"], PARAMS["in"][:, kept])
    np.testing.assert_array_equal(shrunk.params["out"], PARAMS["out"][kept])
    want = np.tanh(X[:2] @ PARAMS["in"] + PARAMS["bias"])[:, kept] @ PARAMS["out"][kept]
    np.testing.assert_allclose(shrunk.f(shrunk.params, X[:2]), want, rtol=1e-5, atol=1e-5)
    assert (
        shrunk.report.parameters == (8 * 9, 3 * 9) and shrunk.state is None and shrunk.model is None
    )


def test_scores_by_taylor_and_activations():
    slopes = jax.grad(lambda params: jnp.square(f(params, X)).sum())(PARAMS)
    each = {name: (PARAMS[name] * np.asarray(slope)) ** 2 for name, slope in slopes.items()}
    taylor = each["in"].mean(0) + each["bias"] + each["out"].mean(1)
    hidden = (np.tanh(X @ PARAMS["in"] + PARAMS["bias"]) ** 2).mean(0)
    for score, options in (
        (taylor, {"score": "taylor", "loss": lambda y: jnp.square(y).sum()}),
        (hidden, {"score": "activations"}),
    ):
        kept = np.sort(np.argsort(-score)[:4])
        shrunk = compress.shrink(f, PARAMS, X, fraction=0.5, **options)
        np.testing.assert_array_equal(shrunk.params["out"], PARAMS["out"][kept])


def test_activations_inside_a_scan():
    def deep(params, x):
        return jax.lax.scan(lambda x, layer: (x + f(layer, x), None), x, params)[0]

    params = {
        "in": DRAW.normal(size=(2, 3, 8)),
        "bias": np.zeros((2, 8)),
        "out": DRAW.normal(size=(2, 8, 3)),
    }
    params = jax.tree.map(np.float32, params)
    x = X[:, :3]
    hidden = []
    for i in range(2):
        h = np.tanh(x @ params["in"][i])
        hidden.append((h**2).mean(0))
        x = x + h @ params["out"][i]
    kept = np.sort(np.argsort(-np.mean(hidden, 0))[:4])
    shrunk = compress.shrink(deep, params, X[:, :3], fraction=0.5, score="activations")
    np.testing.assert_array_equal(shrunk.params["out"], params["out"][:, kept])


def test_a_limit_of_flops_is_kept_and_used():
    whole = hw.count(f, PARAMS, X).flops
    for part in (0.3, 0.8):
        before, after = compress.shrink(f, PARAMS, X, flops=part * whole).report.flops
        assert before == whole and part * whole - whole / 8 < after <= part * whole


def test_seconds_are_those_of_the_roofline_with_full_tiles():
    params = {"in": jnp.ones((64, 512)), "bias": jnp.ones(512), "out": jnp.ones((512, 64))}
    x = jax.ShapeDtypeStruct((16384, 64), "float32")  # enough not to be bound by latency
    seconds = hw.roofline(f, params, x, chip="TPU v5e").total.seconds
    shrunk = compress.shrink(f, params, x, seconds=0.7 * seconds, chip="TPU v5e")
    assert shrunk.params["in"].shape == (64, 256)
    assert shrunk.report.seconds[0] == seconds and shrunk.report.seconds[1] <= 0.7 * seconds
    small = hw.roofline(f, shrunk.params, x, chip="TPU v5e").total.seconds
    assert abs(
        shrunk.report.seconds[1] - small
    ) < 1e-3 * small and "at the roofline of TPU v5e" in str(shrunk.report)


def test_rules_decide_for_their_groups():
    params = {"a": PARAMS, "b": {**PARAMS, "in": jnp.ones((3, 8))}}
    both = lambda params, x: f(params["b"], f(params["a"], x))
    shrunk = compress.shrink(both, params, X, fraction=0.5, keep={"a": 1, "b/out": 0.25})
    assert jax.tree.map(jnp.shape, shrunk.params) == {
        "a": {"in": (5, 8), "bias": (8,), "out": (8, 3)},
        "b": {"in": (3, 2), "bias": (2,), "out": (2, 3)},
    }
    excluded = {
        name
        for row in shrunk.report.axes
        if row.reason == "excluded by keep="
        for name in row.parameters
    }
    assert excluded == {"a/in (1)", "a/bias (0)", "a/out (0)", "a/out (1)", "b/in (0)"}


def test_the_report_lists_axes_that_cannot_be_cut():
    text = str(
        compress.shrink(
            models.MLP((6, 3)), models.MLP((6, 3)).init(jax.random.key(0), X)[0], X, fraction=0.5
        ).report
    )
    assert text.splitlines()[0] == "parameters 57 -> 30, FLOPs 666 -> 342"
    assert re.search(r"fc0/bias \(0\) and 2 more +6 +3\n", text)
    assert re.search(r"head/bias \(0\) and 1 more +3 +3  an axis of a result", text)


def test_a_normalization_keeps_the_features_that_it_averages():
    """A LayerNorm does, because removed features would change its mean; an RMSNorm does not."""

    def network(norm):
        return nn.Sequential(nn.Dense(8), norm, nn.Dense(3))

    for norm, features in ((nn.LayerNorm(), None), (nn.RMSNorm(), 4)):
        model = network(norm)
        params, _ = model.init(jax.random.key(0), X)
        if features is None:
            with pytest.raises(
                ValueError, match=r"0/bias \(0\): summed over where it is not zero, as in the mean"
            ):
                compress.shrink(model, params, X, fraction=0.5)
        else:
            assert compress.shrink(model, params, X, fraction=0.5).params["0"]["kernel"].shape == (
                5,
                features,
            )


def test_state_train_and_derivatives_of_the_shrunk_model():
    model = models.CNN(3, (4,))
    x = jnp.asarray(DRAW.normal(size=(4, 6, 6, 3)), jnp.float32)
    params, state = model.init(jax.random.key(0), x)
    shrunk = compress.shrink(model, params, x, state=state, fraction=0.5)
    assert shrunk.model == models.CNN(3, (2,))

    def loss(params, f):
        y, new = f(params, x[:3], state=shrunk.state, train=True, key=jax.random.key(1))
        return jnp.square(y).mean(), new

    (want, got) = (
        jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(shrunk.params, f)
        for f in (shrunk.model, shrunk.f)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), want, got)


@pytest.mark.exhaustive
def test_an_equinox_model():
    eqx = pytest.importorskip("equinox")
    network = eqx.nn.MLP(5, 3, 16, 2, key=jax.random.key(0))
    shrunk = compress.shrink(lambda network, x: jax.vmap(network)(x), network, X, fraction=0.5)
    want = X
    for layer in shrunk.params.layers[:-1]:
        want = np.maximum(want @ np.asarray(layer.weight).T + np.asarray(layer.bias), 0)
    last = shrunk.params.layers[-1]
    assert want.shape == (6, 8)
    np.testing.assert_allclose(
        shrunk.f(shrunk.params, X),
        want @ np.asarray(last.weight).T + np.asarray(last.bias),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.exhaustive
def test_a_flax_model():
    flax = pytest.importorskip("flax.linen")

    class Network(flax.Module):
        width: int

        @flax.compact
        def __call__(self, x):
            return flax.Dense(3)(flax.silu(flax.Dense(self.width)(x)))

    params = Network(8).init(jax.random.key(0), X)
    shrunk = compress.shrink(Network(8).apply, params, X, fraction=0.5)
    np.testing.assert_allclose(
        shrunk.f(shrunk.params, X), Network(4).apply(shrunk.params, X), rtol=1e-5, atol=1e-5
    )


def test_an_autocast_function():
    shrunk = compress.shrink(ft.autocast(f, hw.policy("bfloat16")), PARAMS, X, fraction=0.5)
    exact = compress.shrink(f, PARAMS, X, fraction=0.5)
    jax.tree.map(np.testing.assert_array_equal, shrunk.params, exact.params)
    want = ft.autocast(exact.f, hw.policy("bfloat16"))(exact.params, X)
    np.testing.assert_array_equal(shrunk.f(shrunk.params, X), want)


def test_a_module_of_nnx():
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Sequential(
        nnx.Linear(5, 8, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(1)),
        nnx.relu,
        nnx.Linear(8, 3, rngs=nnx.Rngs(2)),
    )
    static, params, statistics = nnx.split(module, nnx.Param, ...)
    shrunk = compress.shrink(
        lambda params, x, state: nnx.merge(static, params, state)(x),
        params,
        X,
        fraction=0.5,
        state=statistics,
    )
    first, norm, last = (shrunk.params["layers"][i] for i in (0, 1, 3))
    hidden = (X @ first["kernel"][...] + first["bias"][...][None]) / np.sqrt(1 + 1e-5)
    want = (
        np.maximum(hidden * norm["scale"][...][None] + norm["bias"][...][None], 0)
        @ last["kernel"][...]
    )
    assert want.shape == (6, 3) and shrunk.state["layers"][1]["mean"][...].shape == (4,)
    np.testing.assert_allclose(
        shrunk.f(shrunk.params, X, state=shrunk.state),
        want + last["bias"][...][None],
        rtol=1e-4,
        atol=1e-5,
    )
    module.train()
    with pytest.raises(
        TypeError,
        match=r"updates flax.nnx variables in place. Split the module, and return the new",
    ):
        compress.shrink(lambda module, x: module(x), module, X, fraction=0.5)


def test_grouped_convolutions_lose_whole_groups():
    params = {
        "a": DRAW.normal(size=(1, 1, 3, 8)),
        "b": DRAW.normal(size=(3, 3, 2, 8)),
        "c": DRAW.normal(size=(8, 2)),
    }
    params = jax.tree.map(np.float32, params)

    def grouped(params, x):
        x = jax.lax.conv_general_dilated(
            x, params["a"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.lax.conv_general_dilated(
            jax.nn.relu(x),
            params["b"],
            (1, 1),
            "SAME",
            feature_group_count=4,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return x.mean((1, 2)) @ params["c"]

    x = DRAW.normal(size=(2, 4, 4, 3)).astype(np.float32)
    shrunk = compress.shrink(grouped, params, x, fraction=0.5)
    assert shrunk.params["b"].shape == (3, 3, 2, 4)
    zeros = jax.tree.map(lambda x, kept: jnp.where(np.isin(x, kept), x, 0), params, shrunk.params)
    np.testing.assert_allclose(shrunk.f(shrunk.params, x), grouped(zeros, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", ["magnitude", "taylor", "activations"])
def test_indices_are_not_ranked_by_what_is_not_finite(score):
    """NumPy would sort the channel with NaN last, and remove it."""
    loss = {"loss": lambda y: (y**2).sum()} if score == "taylor" else {}
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
    f = lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]
    for bad in (np.nan, np.inf):
        wrong, x = params, np.full((5, 3), bad, np.float32)
        if score == "magnitude":
            wrong, x = params | {"a": params["a"].at[0, 1].set(bad)}, np.ones((5, 3), np.float32)
        with pytest.raises(
            ValueError, match=r"the scores of a \(1\) are NaN or infinite, so its indices cannot"
        ):
            compress.shrink(f, wrong, x, fraction=0.5, score=score, **loss)


def test_axes_without_activations_are_not_ranked():
    """Two activations are multiplied along the axis, and none with a parameter."""
    params = {
        "a": jnp.ones((3, 4)),
        "b": jnp.arange(12.0).reshape(3, 4),
        "c": jnp.ones((3, 6)),
        "d": jnp.ones((6, 2)),
    }

    def f(p, x):
        return ((x @ p["a"]) * (x @ p["b"])).sum(-1), jax.nn.relu(x @ p["c"]) @ p["d"]

    with pytest.raises(
        ValueError, match=r"score='activations' cannot rank the indices of [ab] \(1\): no matrix"
    ):
        compress.shrink(f, params, jnp.ones((5, 3)), fraction=0.5, score="activations")
    shrunk = compress.shrink(
        f, params, jnp.ones((5, 3)), fraction=0.5, score="activations", keep={"a": 1}
    )
    assert shrunk.params["a"].shape == (3, 4) and shrunk.params["c"].shape == (3, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {},
            ValueError,
            "shrink: expected exactly one of fraction=, flops= and seconds=; got none",
        ),
        (
            {"fraction": 0.5, "flops": 10},
            ValueError,
            "fraction=, flops= and seconds=; got fraction and flops",
        ),
        (
            {"fraction": 1.5},
            ValueError,
            "fraction= as the part of the indices to keep, between 0 and 1; got 1.5",
        ),
        ({"fraction": 0}, ValueError, "between 0 and 1; got 0"),
        ({"flops": -1}, ValueError, "expected flops= as a positive number; got -1"),
        ({"flops": 1e9}, ValueError, r"flops=1e\+09 removes nothing: the function needs 816 FLOPs"),
        (
            {"flops": 1},
            ValueError,
            "flops=1 cannot be reached: with the fewest indices the function needs 102 FLOPs",
        ),
        (
            {"fraction": 0.5, "score": "size"},
            ValueError,
            "score= as 'magnitude', 'taylor', 'activations'; got 'size'",
        ),
        (
            {"fraction": 0.5, "score": "taylor"},
            ValueError,
            "by the derivative of a scalar: pass loss=",
        ),
        (
            {"fraction": 0.5, "loss": jnp.sum},
            ValueError,
            "loss= is for score=\"taylor\"; got score='magnitude'",
        ),
        (
            {"fraction": 0.5, "keep": {"inn": 1}},
            ValueError,
            "pattern 'inn' matches no parameter; nearest: 'in'",
        ),
        (
            {"fraction": 0.5, "keep": {"in": 2}},
            ValueError,
            "above 0 and at most 1 in keep= for 'in'; got 2",
        ),
        (
            {"fraction": 0.5, "keep": {".*": 1}},
            ValueError,
            r"no axis can be cut: .*bias \(0\): excluded by keep=",
        ),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        compress.shrink(f, PARAMS, X, **options)


def test_implicit_and_original_parameters_are_rejected():
    with pytest.raises(
        TypeError, match="'in' is a Quantized; shrink plain parameters first, then quantize"
    ):
        compress.shrink(f, compress.quantize(PARAMS, {"in": compress.Int8()}), X, fraction=0.5)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(
        TypeError, match="score='activations' needs arrays as parameters and arguments; got a jax"
    ):
        compress.shrink(f, PARAMS, x, fraction=0.5, score="activations")
    with pytest.raises(TypeError, match="score='magnitude' needs arrays as parameters; got a jax"):
        compress.shrink(
            f, {**PARAMS, "bias": jax.ShapeDtypeStruct((8,), "float32")}, x, fraction=0.5
        )
    shrunk = compress.shrink(f, PARAMS, x, fraction=0.5)
    with pytest.raises(
        ValueError,
        match=r"'bias' in params: expected shape \(4,\), got \(8,\); pass the parameters",
    ):
        shrunk.f(PARAMS, X)


def test_other_arguments_that_need_the_whole_axis_are_an_error():
    def flexible(params, x, hidden=False):
        return jnp.tanh(x @ params["in"]) if hidden else f(params, x)

    shrunk = compress.shrink(flexible, PARAMS, X, fraction=0.5)
    with pytest.raises(
        ValueError, match=r"axis 1 of 'in' was cut, but with these arguments .*an axis of a result"
    ):
        shrunk.f(shrunk.params, X, hidden=True)


HIDDEN = {name: PARAMS[name] for name in ("in", "out")}  # an axis that can always be pruned


@pytest.mark.parametrize(
    "update",
    [
        lambda at, y: at.set(y),
        lambda at, y: at.add(jnp.exp(y)),
        lambda at, y: at.multiply(y),
        lambda at, y: at.max(y),
    ],
)
def test_updates_by_index_are_not_left_out(update):
    """Left out, an update would leave the operand's value, which is not that of a zero."""
    params = {**HIDDEN, "w": DRAW.normal(size=(3, 4)).astype(np.float32)}
    params["w"][:, 1] = 0

    def f(params, x):
        y = jnp.tanh(x @ params["in"]) @ params["out"] @ params["w"]
        return update(jnp.ones((len(x), 6)).at[:, np.array([0, 2, 3, 5])], y).sum(1)

    shrunk = compress.shrink(f, params, X, fraction=0.25)
    small = shrunk.params
    assert small["w"].shape[1] == 4 and small["in"].shape[1] < 8
    np.testing.assert_allclose(shrunk.f(small, X), f(small, X), rtol=1e-5, atol=1e-5)


def test_the_count_of_tiles_is_kept():
    params = {**HIDDEN, "v": np.arange(6, dtype=np.float32)}

    def f(params, x):
        y = jnp.tanh(x @ params["in"]) @ params["out"]
        return (jnp.tile(y, (1, 2)) * params["v"][None]).sum(1)

    shrunk = compress.shrink(f, params, X, fraction=0.25)
    small = shrunk.params
    assert small["v"].size == 2 * small["out"].shape[1] and small["in"].shape[1] < 8
    np.testing.assert_allclose(shrunk.f(small, X), f(small, X), rtol=1e-5, atol=1e-5)
