"""SVRG against NumPy in float64, and its convergence beside SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr

L2, RATE, BATCH = 0.05, 0.3, 4


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5))
    return x, np.sign(x @ rng.normal(size=5) + 0.5 * rng.normal(size=60))


def gradient(w, x, y):
    """NumPy's, of mean log(1 + exp(-y x.w)) + l2 / 2 |w|^2."""
    return -(x * (y / (1 + np.exp(y * (x @ w))))[:, None]).mean(0) + L2 * w


def risk(w, x, y):
    return jnp.logaddexp(0.0, -y * (x @ w)).mean() + L2 / 2 * (w @ w)


def run(method, x, y, steps, every=30):
    tx = tr.svrg(optax.sgd(RATE)) if method == "svrg" else optax.sgd(RATE)
    rows = np.random.default_rng(1).integers(0, len(x), (steps, BATCH))

    @jax.jit
    def step(w, state, batch, at):
        of_batch = lambda w: jax.grad(risk)(w, x[batch], y[batch])
        if method == "svrg":
            full = lambda w: jax.grad(risk)(w, x, y)
            state = jax.lax.cond(
                at % every == 0, lambda s: tr.refresh_anchor(s, w, full), lambda s: s, state
            )
        updates, state = tx.update(
            of_batch(w), state, w, **({"gradient": of_batch} if method == "svrg" else {})
        )
        return w + updates, state

    x, y = jnp.asarray(x), jnp.asarray(y)
    w = jnp.zeros(x.shape[1])
    state, path = tx.init(w), []
    for at in range(steps):
        w, state = step(w, state, rows[at], at)
        path.append(np.asarray(w))
    return np.array(path), rows


def test_every_iterate_equals_numpy(data):
    x, y = data
    with jax.enable_x64(True):
        path, rows = run("svrg", x, y, 100)
    w = np.zeros(5)
    for at, batch in enumerate(rows):
        if at % 30 == 0:
            anchor, full = w, gradient(w, x, y)
        w = w - RATE * (
            gradient(w, x[batch], y[batch]) - gradient(anchor, x[batch], y[batch]) + full
        )
        assert np.abs(path[at] - w).max() <= 1e-6 * np.abs(w).max()


@pytest.mark.exhaustive
def test_the_gap_decreases_linearly_where_sgd_stalls(data):
    x, y = data
    with jax.enable_x64(True):
        best = np.zeros(5)
        for _ in range(5000):
            best = best - 0.5 * gradient(best, x, y)
        gap = lambda path: [
            float(risk(jnp.asarray(w), x, y) - risk(jnp.asarray(best), x, y)) for w in path[29::30]
        ]
        reduced, plain = gap(run("svrg", x, y, 600)[0]), gap(run("sgd", x, y, 600)[0])
    assert reduced[-1] < 1e-10 and min(plain[5:]) > 1e-5
    logs = np.log(np.maximum(reduced, 1e-14))[:12]
    line = np.polyval(np.polyfit(range(12), logs, 1), range(12))
    assert np.corrcoef(line, logs)[0, 1] > 0.95  # a line in a logarithmic plot


def test_noise_of_the_same_key_cancels():
    """With the same dropout mask at both points, an update at the anchor is that of the full
    gradient."""
    tx, w = tr.svrg(optax.sgd(1.0)), jnp.array([1.0, 2.0])
    state = tr.refresh_anchor(tx.init(w), w, lambda w: 3 * w)
    noisy = lambda w: w * jax.random.bernoulli(jax.random.key(7), 0.5, w.shape).astype(w.dtype)
    updates, _ = tx.update(noisy(w), state, w, gradient=noisy)
    np.testing.assert_array_equal(updates, -3 * w)


def test_an_inner_optimizer_keeps_its_state():
    tx, w = tr.svrg(optax.adam(0.1)), {"w": jnp.ones(3)}
    state = tr.refresh_anchor(tx.init(w), w, lambda w: w)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(w, state, w, gradient=lambda w: w)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)
    assert int(state.inner[0].count) == 1


def test_errors():
    tx = tr.svrg(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"svrg: call update\(grads, state, params, gradient=f\)"):
        tx.update(jnp.ones(2), state, jnp.ones(2))
    with pytest.raises(ValueError, match=r"svrg: gradient\(params\) returned"):
        tx.update(jnp.ones(2), state, jnp.ones(2), gradient=lambda w: (w, w))
    with pytest.raises(TypeError, match="refresh_anchor: expected the state of svrg"):
        tr.refresh_anchor(optax.chain(tx).init(jnp.ones(2)), jnp.ones(2), lambda w: w)
