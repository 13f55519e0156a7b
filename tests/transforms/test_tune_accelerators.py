"""tune for GPUs and TPUs: which rule applies where, and the numbers of the original step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close
from jax import lax

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft
from fnet.jaxpr import equations
from fnet.transforms._tune import _accelerators as rules

RANDOM = np.random.default_rng(0)
WEIGHTS = jnp.asarray(RANDOM.normal(size=(3, 8, 8)) * 0.3, jnp.float32)
X = jnp.asarray(RANDOM.normal(size=(4, 8)), jnp.float32)
LOGITS = jnp.asarray(RANDOM.normal(size=(4, 11)), jnp.float32)
LABELS = jnp.asarray([3, 0, 10, 7])


def layers(weights, x, body=lambda w, x: jnp.tanh(x @ w)):
    return jnp.square(lax.scan(lambda x, w: (body(w, x), None), x, weights)[0]).mean()


def fired(step, *args, chip="H100 SXM5 80GB", **how):
    return [(row.rule, row.primitive) for row in ft.explain(ft.tune(step, chip, **how), *args).rows]


def loops(step, *args):
    """The number of iterations of each scan in a tuned step that is still a loop."""
    traced = ft.tune(step, "TPU v5e").trace(*args)
    return [
        each.params["length"]
        for each in equations(traced.jaxpr.jaxpr)
        if each.primitive.name == "scan" and each.params["unroll"] == 1
    ]


def same(step, *args, bound=1e-6):
    close(jax.jit(ft.tune(step, "TPU v5e"))(*args), jax.jit(step)(*args), bound)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chip", ["H100 SXM5 80GB", "TPU v5e"])
def test_loops_over_layers_are_unrolled_in_both_passes(chip):
    step = jax.value_and_grad(layers, (0, 1))
    assert fired(step, WEIGHTS, X, chip=chip) == [("unrolled_layers", "scan")] * 2
    assert loops(step, WEIGHTS, X) == []
    same(step, WEIGHTS, X)
    assert fired(step, WEIGHTS, X, rules={"unrolled_layers": False}) == []


def test_layers_get_separate_weights_and_gradients_on_tpus(monkeypatch):
    step = jax.value_and_grad(layers)
    assert ("separate_layers", "scan") not in fired(
        step, WEIGHTS, X, chip="TPU v5e"
    )  # the weights are small
    monkeypatch.setattr(rules, "LARGE", 8 * 8)
    assert fired(step, WEIGHTS, X) == [("unrolled_layers", "scan")] * 2  # not for GPUs
    assert (
        fired(step, WEIGHTS, X, chip="TPU v5e")
        == [("unrolled_layers", "scan"), ("separate_layers", "scan")] * 2
    )
    traced = ft.tune(step, "TPU v5e").trace(WEIGHTS, X)
    copied = [
        each.outvars[0].aval.shape
        for each in equations(traced.jaxpr.jaxpr)
        if each.primitive.name == "optimization_barrier"
    ]
    assert copied == [(8, 8)] * 3 * 3  # weights in both passes, and their gradients
    for got, want in zip(
        *(jax.tree.leaves(jax.jit(f)(WEIGHTS, X)) for f in (ft.tune(step, "TPU v5e"), step))
    ):
        np.testing.assert_array_equal(got, want)
    by_hand = lambda weights, x: lax.scan(
        lambda x, w: (jnp.tanh(x @ w), None), x, weights, unroll=3
    )[0].sum()
    assert fired(by_hand, WEIGHTS, X, chip="TPU v5e") == [("separate_layers", "scan")]
    recurrent = lambda w, xs: lax.scan(
        lambda h, x: (jnp.tanh(x @ w + h), None), xs[0], xs, unroll=3
    )[0].sum()
    assert fired(recurrent, WEIGHTS[0], jnp.stack([WEIGHTS[0]] * 3), chip="TPU v5e") == []


@pytest.mark.exhaustive
def test_steps_of_autocast_too():
    step = ft.autocast(jax.value_and_grad(layers), "bfloat16")
    assert fired(step, WEIGHTS, X) == [("unrolled_layers", "scan")] * 2
    same(step, WEIGHTS, X, bound=2e-2)


def test_other_loops_stay(monkeypatch):
    recurrent = lambda w, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ w[0] + x), None), x, x[None].repeat(5, 0)
    )[0].sum()
    remat = lambda weights, x: layers(
        weights, x, jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w)))
    )
    assert loops(jax.grad(recurrent), WEIGHTS, X) == [
        5,
        5,
    ]  # the weights are the same in each iteration
    assert 3 in loops(jax.grad(remat), WEIGHTS, X)
    assert 3 in loops(
        ft.rematerialize(
            jax.grad(lambda w, x: layers(w, x, lambda w, x: jnp.sin(jnp.tanh(x @ w))))
        ),
        WEIGHTS,
        X,
    )
    monkeypatch.setattr(rules, "UNROLLED", 2)
    assert loops(jax.grad(layers), WEIGHTS, X) == [3, 3]


def test_casts_of_constants_leave_the_loop(monkeypatch):
    monkeypatch.setattr(rules, "LARGE", 1)

    def chunks(table, x):
        def one(part):
            return jax.nn.logsumexp(
                (part.astype(jnp.bfloat16) @ table.astype(jnp.bfloat16)).astype(jnp.float32)
            )

        return lax.map(jax.checkpoint(one), x.reshape(2, 2, 8)).sum()

    step = jax.value_and_grad(chunks)
    assert ("hoisted_casts", "scan") in fired(step, WEIGHTS[0], X)
    traced = ft.tune(step, "TPU v5e").trace(WEIGHTS[0], X).jaxpr
    scans = [each for each in equations(traced.jaxpr) if each.primitive.name == "scan"]
    assert (
        all(
            v.aval.dtype == jnp.bfloat16
            for each in scans
            for v in each.invars
            if v.aval.shape == (8, 8) and v.aval.dtype != jnp.float32
        )
        and len(scans) == 2
    )
    same(step, WEIGHTS[0], X, bound=1e-2)
    both = lambda table, x: lax.map(
        lambda part: (
            part @ table
            + (part.astype(jnp.bfloat16) @ table.astype(jnp.bfloat16)).astype(jnp.float32)
        ),
        x.reshape(2, 2, 8),
    ).sum()
    assert fired(both, WEIGHTS[0], X) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_logit_of_a_label_by_comparison(dtype):
    loss = lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean()
    step = jax.value_and_grad(loss)
    logits = LOGITS.astype(dtype)
    assert [rule for rule, _ in fired(step, logits, LABELS)] == ["comparison"] * 2
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Optax needs both
        close(
            jax.jit(ft.tune(step, "TPU v5e"))(logits, LABELS),
            jax.jit(step)(logits, LABELS),
            1e-2 if dtype == jnp.bfloat16 else 1e-6,
        )


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds", None])
def test_lookups_keep_their_mode(mode):
    pick = lambda x, i: jnp.take_along_axis(x, i[:, None], -1, mode=mode)[:, 0]
    labels = LABELS if mode == "promise_in_bounds" else jnp.asarray([3, -1, 99, -99])
    step = lambda x, i: (pick(x, i), jax.grad(lambda x: jnp.nansum(pick(x, i) ** 2))(x))
    assert [rule for rule, _ in fired(step, LOGITS, labels)][:1] == ["comparison"]
    for logits in LOGITS, LOGITS.at[0, 3].set(jnp.nan).at[1, 2].set(jnp.inf):
        for got, want in zip(
            jax.jit(ft.tune(step, "TPU v5e"))(logits, labels), jax.jit(step)(logits, labels)
        ):
            np.testing.assert_array_equal(got, want)


def test_other_lookups_stay():
    table = lambda x, i: x[i]
    assert fired(table, LOGITS, LABELS % 4) == []
    assert fired(lambda x, i: jnp.take_along_axis(x, i[:, None] % 4, 0), LOGITS, LABELS) == []


def test_a_step_of_a_language_model():
    model = models.Decoder(19, 16, 2, 2, 1, 24)
    tokens = jnp.asarray(RANDOM.integers(0, 19, (2, 9)), jnp.int32)
    params, _ = model.init(jax.random.key(0), tokens[:, :-1])
    step = jax.value_and_grad(
        lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
    )
    assert loops(step, params) == []
    same(step, params, bound=1e-5)


ROW, MATRIX = (
    jnp.asarray(RANDOM.normal(0, 1, shape), jnp.bfloat16) for shape in ((1, 256), (256, 256))
)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: w @ x[0],
        lambda x, w: x[0] @ w,
        lambda x, w: jnp.einsum("ij,bi->jb", w, x),
        lambda x, w: jnp.einsum("bthk,hkd->btd", x.reshape(1, 1, 4, 64), w.reshape(4, 64, 256)),
        lambda x, w: jnp.einsum("bti,ohi->bhto", x[None], w.reshape(16, 16, 256)),
        lambda x, w: lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
    ],
)
def test_products_of_one_row_on_gpus(product):
    """Sums are in float32: the result is that of float32 operands, rounded once, by at most 2^-9."""
    assert fired(product, ROW, MATRIX) == [("two_rows", "dot_general")]
    assert fired(product, ROW, MATRIX, chip="TPU v5e") == []
    got = ft.tune(product, "H100 SXM5 80GB")(ROW, MATRIX)
    exact = product(ROW.astype(jnp.float32), MATRIX.astype(jnp.float32))
    plain = jax.eval_shape(product, ROW, MATRIX)
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    close(got.astype(jnp.float32), exact, 2**-8 if got.dtype == jnp.bfloat16 else 1e-5)


def test_other_products_stay_on_gpus():
    product = lambda x, w: x @ w
    assert (
        fired(product, ROW.astype(jnp.float32), MATRIX.astype(jnp.float32)) == []
    )  # may use TensorFloat-32
    assert fired(product, jnp.concatenate([ROW, ROW]), MATRIX) == []
    assert fired(product, ROW[:, :32], MATRIX[:32]) == []  # a small matrix
    assert fired(lambda x, w: jnp.einsum("bi,bij->bj", x, w), ROW, MATRIX[None]) == []


@pytest.mark.quick_cases("1.0")
@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
def test_statistics_of_bfloat16_arrays_without_a_shift_on_tpus(mean):
    """Convolutions and BatchNorm under autocast. The statistics stay as accurate as the inputs in
    bfloat16."""
    model = nn.Sequential(
        nn.Conv(4, 1, use_bias=False), nn.BatchNorm(momentum=0.0), jax.nn.relu, nn.Conv(2, 3)
    )
    x = jnp.asarray(np.random.default_rng(0).normal(mean, 1.0, (16, 9, 9, 3)), jnp.float32)
    params, state = model.init(jax.random.key(0), x)
    step = lambda params: model(params, x, state=state, train=True)
    low = ft.autocast(step, "bfloat16")
    assert fired(low, params, chip="TPU v5e") == [("unshifted", "name")]
    assert fired(low, params) == fired(step, params, chip="TPU v5e") == []  # GPUs; float32
    exact, shifted, tuned = (
        jax.jit(f)(params)[1]["1"] for f in (step, low, ft.tune(low, "TPU v5e"))
    )
    error = lambda stats: jnp.abs(stats["var"] / exact["var"] - 1).max()
    close(tuned["mean"], shifted["mean"], 1e-5)
    assert jnp.abs(tuned["var"] / shifted["var"] - 1).max() <= 1e-6 * (
        1 + mean**2
    )  # measured: 1.2e-7
    assert error(tuned) <= 1.5 * error(shifted) + 1e-6
    gradient = jax.grad(lambda params: jnp.sin(ft.autocast(step, "bfloat16")(params)[0]).sum())
    close(
        jax.jit(ft.tune(gradient, "TPU v5e"))(params),
        jax.jit(gradient)(params),
        1e-3 if mean < 30 else 2e-2,
    )


@pytest.mark.parametrize(
    ("write", "fires"),
    [
        (
            lambda x, new, at: x.at[jnp.arange(4)[:, None], :, at].set(new, mode="drop"),
            True,
        ),  # as a cache
        (lambda x, new, at: x.at[:, :, at[:, 0]].set(new[0, 0][None, :, None], mode="drop"), True),
        (lambda x, new, at: x.at[jnp.arange(4)[:, None], :, at].add(new, mode="drop"), False),
        (lambda x, new, at: x.at[jnp.arange(4)[:, None], :, at].set(new, mode="clip"), False),
        (
            lambda x, new, at: x.at[jnp.arange(1)[:, None], :, at[:1]].set(new[:1], mode="drop"),
            False,
        ),
        (lambda x, new, at: x.at[jnp.arange(4)[:, None], :, at].apply(jnp.exp), False),
    ],
)  # the same primitive
def test_a_few_slices_are_overwritten_by_selection_on_tpus(monkeypatch, write, fires):
    monkeypatch.setattr(rules, "LARGE", 1)
    x, new = (
        jnp.asarray(RANDOM.normal(size=shape), jnp.float32)
        for shape in ((4, 3, 7, 5), (4, 1, 3, 5))
    )
    x, at = (
        x.at[0, 0, 0, 0].set(jnp.nan),
        jnp.asarray([[6], [0], [7], [-1]]),
    )  # 7 is out of range, -1 is the last
    assert fired(write, x, new, at, chip="TPU v5e") == [("few_updates", "scatter")] * fires
    assert fired(write, x, new, at) == []  # GPUs
    np.testing.assert_array_equal(
        jax.jit(ft.tune(write, "TPU v5e"))(x, new, at), jax.jit(write)(x, new, at)
    )
    monkeypatch.setattr(rules, "UPDATES", 3)
    assert fired(write, x, new, at, chip="TPU v5e") == []
