"""Optimisers and schedules by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr

AXES = {".*/kernel": "in out", ".*/bias": "out", ".*/scale": "layers out"}
PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "stack": {"norm": {"scale": jnp.ones((4, 3))}},
}


@pytest.mark.quick_cases("momentum", "radam")
@pytest.mark.parametrize("name", tr.OPTIMIZERS)
def test_every_optimizer_goes_downhill_under_strict_promotion(name):
    tx = tr.optimizer(
        name,
        tr.schedule("cosine", 0.05, 10),
        weight_decay=0.0 if name == "adam" else 1e-4,
        clip=1.0,
        axes=AXES,
    )
    loss = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))
    state = tr.TrainState.create(PARAMS, tx)
    update = jax.jit(lambda s: s.apply(tx, jax.grad(loss)(s.params)))
    for _ in range(5):
        state = update(state)
    assert float(loss(state.params)) < float(loss(PARAMS))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "adamw", "nadamw", "lion", "lamb", "lars", "adafactor"]
)
def test_weight_decay_spares_biases_and_norm_scales(name):
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    moved = {}
    for decay_all in (False, True):
        tx = tr.optimizer(name, 0.1, weight_decay=0.5, decay_all=decay_all, axes=AXES)
        new = tr.TrainState.create(PARAMS, tx).apply(tx, zero).params
        moved[decay_all] = [
            not np.allclose(a, b) for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(PARAMS))
        ]
    assert moved[False] == [False, True, False]  # dense/bias, dense/kernel, norm/scale
    assert moved[True] == [True, True, True]


def test_decays():
    assert tr.decays(PARAMS) == {
        "dense": {"kernel": True, "bias": False},
        "stack": {"norm": {"scale": False}},
    }


def test_adamw_is_optax_adamw():
    ours = tr.optimizer("adamw", 0.1, weight_decay=0.01, b1=0.8)
    theirs = optax.adamw(0.1, weight_decay=0.01, b1=0.8, mask=tr.decays)
    grads = jax.tree.map(lambda x: 0.3 * x, PARAMS)
    a = tr.TrainState.create(PARAMS, ours).apply(ours, grads).params
    b = tr.TrainState.create(PARAMS, theirs).apply(theirs, grads).params
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.exhaustive
def test_clip_bounds_the_norm():
    tx = tr.optimizer("sgd", 1.0, clip=0.5)
    params = {"w": jnp.zeros(4)}
    new = tr.TrainState.create(params, tx).apply(tx, {"w": jnp.full(4, 10.0)}).params
    assert np.linalg.norm(new["w"]) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    "name, warmup, expected",
    [
        ("constant", 0.0, {0: 2.0, 50: 2.0, 100: 2.0}),
        ("constant", 0.1, {0: 0.0, 5: 1.0, 10: 2.0, 100: 2.0}),
        ("cosine", 0.0, {0: 2.0, 50: 1.0, 100: 0.0}),
        ("cosine", 0.2, {0: 0.0, 10: 1.0, 20: 2.0, 60: 1.0, 100: 0.0}),
        ("linear", 0.5, {25: 1.0, 50: 2.0, 75: 1.0, 100: 0.0}),
        ("step", 0.0, {49: 2.0, 51: 0.2, 74: 0.2, 76: 0.02}),
        ("step", 0.1, {5: 1.0, 49: 2.0, 51: 0.2, 76: 0.02}),
        ("one_cycle", 0.0, {0: 0.08, 30: 2.0}),
    ],
)
def test_schedules_at_known_points(name, warmup, expected):
    rate = tr.schedule(name, 2.0, 100, warmup=warmup)
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, rel=1e-5, abs=1e-6), step
        assert float(rate(jnp.int32(step))) == pytest.approx(value, rel=1e-5, abs=1e-6), step


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_final_rate(name):
    """A fraction of the largest rate."""
    assert float(tr.schedule(name, 2.0, 10, final=0.1)(10)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: tr.optimizer("adamx", 0.1), "no optimizer is called 'adamx'; there are sgd"),
        (
            lambda: tr.optimizer("adam", 0.1, weight_decay=0.1),
            "adam has no weight decay: use adamw",
        ),
        (lambda: tr.optimizer("sgd", 0.1, b1=0.1), "sgd has no option 'b1'; it has"),
        (lambda: tr.schedule("cosin", 0.1, 10), "no schedule is called 'cosin'; there are const"),
        (lambda: tr.schedule("cosine", 0.1, 10, warmup=1.0), "warmup=1.0: expected the fraction"),
        (lambda: tr.schedule("cosine", 0.1, 0), "steps=0: a schedule needs the run's length"),
    ],
)
def test_optimizer_errors(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def logistic():
    """(x, y, w) and NumPy's gradient of mean log(1 + exp(-y x.w))."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5))
    y = np.sign(x @ rng.normal(size=5))
    return x, y, lambda w: -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0)


def trained(tx, steps, x, y, **more):
    """The parameters of a jitted run in float64, in two leaves."""
    loss = lambda p: jnp.logaddexp(0.0, -y * (x @ jnp.concatenate([p["a"], p["b"]]))).mean()
    extra = {"grad_fn": lambda p, _: jax.grad(loss)(p)} if "sam" in more else {}
    step = jax.jit(lambda s: s.apply(tx, jax.grad(loss)(s.params), **extra))
    state = tr.TrainState.create({"a": jnp.full(2, 0.1), "b": jnp.full(3, 0.1)}, tx)
    for _ in range(steps):
        state = step(state)
    return state


@pytest.mark.exhaustive
def test_sam_equals_numpy():
    """The gradient at a distance of 0.3 in the direction of the gradient, in momentum."""
    x, y, gradient = logistic()
    with jax.enable_x64(True):
        tx = optax.contrib.sam(
            tr.optimizer("momentum", 0.5),
            optax.chain(optax.contrib.normalize(), optax.sgd(0.3)),
            opaque_mode=True,
        )
        params = trained(tx, 7, x, y, sam=True).params
    w, velocity = np.full(5, 0.1), np.zeros(5)
    for _ in range(7):
        g = gradient(w)
        velocity = 0.9 * velocity + gradient(w + 0.3 * g / np.linalg.norm(g))
        w = w - 0.5 * velocity
    np.testing.assert_allclose(np.concatenate([params["a"], params["b"]]), w, rtol=1e-9)


def test_lookahead_equals_numpy():
    x, y, gradient = logistic()
    with jax.enable_x64(True):
        state = trained(tr.lookahead(tr.optimizer("momentum", 0.5), period=3, rate=0.4), 8, x, y)
    w, slow, velocity = np.full(5, 0.1), np.full(5, 0.1), np.zeros(5)
    for step in range(8):
        velocity = 0.9 * velocity + gradient(w)
        w = w - 0.5 * velocity
        if step % 3 == 2:
            w = slow = slow + 0.4 * (w - slow)
    np.testing.assert_allclose(np.concatenate(list(state.params.values())), w, rtol=1e-9)
    np.testing.assert_allclose(np.concatenate(list(state.opt_state.slow.values())), slow, rtol=1e-9)
    with pytest.raises(ValueError, match="lookahead: call update"):
        tr.lookahead(optax.sgd(0.1)).update(
            jnp.ones(2), tr.lookahead(optax.sgd(0.1)).init(jnp.ones(2))
        )
