"""Recomputed statistics of BatchNorm, against NumPy, with the BatchNorm of five libraries."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from fnet import layers as nn
from fnet import training as tr

BATCHES = [np.random.default_rng(i).normal(5, 2, (64, 3)).astype(np.float32) for i in range(4)]
MEAN, VAR = (np.mean([getattr(x, name)(0) for x in BATCHES], 0) for name in ("mean", "var"))
STALE = jnp.asarray(77.0 + np.arange(12.0).reshape(4, 3), jnp.float32)


def test_statistics_are_those_of_the_batches():
    """Two BatchNorms, of which the second sees what the first makes of each batch; PyTorch's
    update_bn in NumPy."""
    model = nn.Sequential(nn.Dense(4), nn.BatchNorm(momentum=0.7), jnp.tanh, nn.BatchNorm())
    batches = [
        np.random.default_rng(i).normal(i, 1 + i, (32, 3)).astype(np.float32) for i in range(3)
    ]
    params, state = model.init(jax.random.key(0), batches[0])
    wrong = jax.tree.map(lambda x: x + 5, state)
    got = tr.batch_statistics(model, params, wrong, batches)
    outputs = [x @ np.asarray(params["0"]["kernel"]) for x in batches]
    np.testing.assert_allclose(
        got["1"]["mean"], np.mean([y.mean(0) for y in outputs], 0), rtol=1e-4
    )
    first = np.mean([y.var(0) for y in outputs], 0)
    assert np.allclose(got["1"]["var"], first, rtol=1e-4) or np.allclose(
        got["1"]["var"], first * 32 / 31, rtol=1e-4
    )
    inner = [np.tanh((y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)) for y in outputs]
    np.testing.assert_allclose(got["3"]["mean"], np.mean([y.mean(0) for y in inner], 0), atol=1e-4)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    logits = model(params, batches[0], state=got)[0]
    assert not np.allclose(logits, model(params, batches[0], state=wrong)[0], atol=0.1)


def test_state_that_is_no_average_is_kept():
    def f(params, x, *, state, train):
        return x, {
            "mean": 0.9 * state["mean"] + 0.1 * x.mean(),
            "count": state["count"] + 1,
            "last": x[0, 0],
        }

    state = {"mean": jnp.zeros(()), "count": jnp.int32(7), "last": jnp.float32(3)}
    got = tr.batch_statistics(f, {}, state, [jnp.ones((2, 2)), (3 * jnp.ones((2, 2)),)])
    np.testing.assert_allclose(got["mean"], 2, rtol=1e-6)
    assert got["count"] == 7


@jax.numpy_dtype_promotion("standard")  # Haiku needs it
def haiku_model(decay, steps):
    net = hk.without_apply_rng(
        hk.transform_with_state(lambda x, train: hk.BatchNorm(True, True, decay)(x, train))
    )
    params, state = net.init(jax.random.key(0), STALE, True)
    state = jax.lax.fori_loop(0, steps, lambda _, s: net.apply(params, s, STALE, True)[1], state)
    return lambda p, x, *, state, train: net.apply(p, state, x, train), params, state


@pytest.mark.quick_cases("0.9-5", "0.99-500", "0.999-2000")
@pytest.mark.parametrize(("decay", "steps"), [(0.9, 0), (0.9, 5), (0.99, 500), (0.999, 2000)])
def test_haiku(decay, steps):
    """An average that is divided by 1 - decay ** counter when it is updated."""
    model, params, state = haiku_model(decay, steps)
    with jax.numpy_dtype_promotion("standard"):
        new = tr.batch_statistics(model, params, state, BATCHES)
        outputs = model(params, BATCHES[0], state=new, train=False)[0]
    for name, want in (("mean", MEAN), ("var", VAR)):
        got = new[f"batch_norm/~/{name}_ema"]
        np.testing.assert_allclose(got["average"][0], want, rtol=1e-4)
        np.testing.assert_allclose(
            got["hidden"], got["average"] * (1 - decay**steps), rtol=2e-3, atol=1e-5
        )
        assert int(got["counter"]) == steps
    np.testing.assert_allclose(outputs, (BATCHES[0] - MEAN) / np.sqrt(VAR + 1e-5), atol=2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [0, 3, 400])
def test_equinox_batch_mode(steps):
    """An average that is divided by 1 - momentum ** counter when it is used."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", momentum=0.99, mode="batch")
    params, static = eqx.partition(norm, eqx.is_inexact_array)

    def model(params, x, *, state, train):
        norm = eqx.combine(params, static)
        run = jax.vmap(
            lambda x, state: norm(x, state, inference=not train),
            axis_name="batch",
            in_axes=(0, None),
            out_axes=(0, None),
        )
        return run(x, state)

    for _ in range(min(steps, 3)):
        state = model(params, STALE, state=state, train=True)[1]
    leaves, structure = jax.tree.flatten(state)
    state = structure.unflatten([jnp.int32(steps) if x.dtype == jnp.int32 else x for x in leaves])
    new, x = tr.batch_statistics(model, params, state, BATCHES), BATCHES[0]
    np.testing.assert_allclose(
        model(params, x, state=new, train=False)[0], (x - MEAN) / np.sqrt(VAR + 1e-5), atol=2e-3
    )


@pytest.mark.quick_cases("linen", "nnx")
@pytest.mark.parametrize("library", ["linen", "nnx", "fnet", "fnet, bfloat16"])
def test_averages_that_begin_anywhere(library):
    if library.startswith("fnet"):
        model, init = nn.BatchNorm(momentum=0.99), lambda m: m.init(jax.random.key(0), STALE)
    else:
        model = (
            nn.from_linen(linen.BatchNorm(momentum=0.99))
            if library == "linen"
            else nn.from_nnx(nnx.BatchNorm, 3, momentum=0.99)
        )
        init = lambda m: m.init(jax.random.key(0), STALE)
    params, state = init(model)
    dtype = jnp.bfloat16 if "bfloat16" in library else jnp.float32
    stale = jax.tree.map(lambda x: (x + 70).astype(dtype), state)
    new = tr.batch_statistics(model, params, stale, BATCHES)
    got = {path[-1].key: x for path, x in jax.tree.leaves_with_path(new)}
    assert all(x.dtype == dtype for x in got.values())
    for name, want in (("mean", MEAN), ("var", VAR)):
        np.testing.assert_allclose(
            np.float32(got[name]), want, rtol=1e-4 if dtype == jnp.float32 else 4e-3
        )


def test_what_is_no_average():
    def maximum(params, x, *, state, train):
        mean = 0.9 * state["mean"] + 0.1 * x.mean()
        return x, {
            "mean": mean,
            "largest": jnp.maximum(state["largest"], x.max()),
            "seen": jnp.array(True),
        }

    state = {"mean": jnp.zeros(()), "largest": jnp.float32(1.5), "seen": jnp.array(False)}
    new = tr.batch_statistics(maximum, {}, state, BATCHES)
    np.testing.assert_allclose(new["mean"], np.mean(BATCHES), rtol=1e-5)
    assert float(new["largest"]) == 1.5 and bool(new["seen"])


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_weights_that_differ_between_elements_and_batches(order, stop):
    """The mean of each class, which a batch without the class leaves as it is; no batch has class
    3."""
    old = jax.lax.stop_gradient if stop else lambda x: x

    def f(params, x, y, *, state, train):
        one_hot = jax.nn.one_hot(y, 4)
        count = one_hot.sum(0)
        m = jnp.where(count > 0, jnp.array([0.9, 0.99, 0.5, 0.9]), 1.0)
        return x, {
            "mean": m * old(state["mean"]) + (1 - m) * (one_hot.T @ x) / jnp.maximum(count, 1)
        }

    x = np.random.default_rng(0).normal(5, 2, (3, 12)).astype(np.float32)
    y = np.stack([np.arange(12) % 3, np.arange(12) % 2, np.full(12, 2)])
    want = [
        np.mean([x[b][y[b] == c].mean() for b in range(3) if (y[b] == c).any()]) for c in range(3)
    ]
    got = tr.batch_statistics(f, {}, {"mean": jnp.full(4, 77.0)}, [(x[b], y[b]) for b in order])[
        "mean"
    ]
    np.testing.assert_allclose(got, [*want, 77], rtol=1e-4)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e6])
def test_what_is_no_average_is_kept_at_any_size(size):
    def f(params, x, *, state, train):
        return x, {
            "mean": 0.9 * state["mean"] + 0.1 * x.mean(0),
            "largest": jnp.maximum(state["largest"], x.max(0)),
            "decay": jnp.array([0.5, 0.9, 1.0]) * state["decay"],
        }

    state = {"mean": jnp.zeros(3), "largest": jnp.ones(3), "decay": jnp.ones(3)}
    new = tr.batch_statistics(f, {}, state, [size * x for x in BATCHES])
    np.testing.assert_allclose(new["mean"], size * MEAN, rtol=1e-4)
    assert new["largest"].tolist() == new["decay"].tolist() == [1, 1, 1]


def test_errors():
    def mixed(params, x, *, state, train):
        mean = 0.9 * state["mean"] + 0.1 * x.mean()
        return x, {"mean": mean, "second": 0.5 * state["second"] + 0.5 * (x - state["mean"]).mean()}

    def secret(params, x, *, state, train):
        new = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(), "n": state["n"] + 1}
        return x + state["mean"] * state["n"].astype(jnp.float32), new

    state = {"mean": jnp.float32(1), "second": jnp.float32(1)}
    with pytest.raises(ValueError, match="'second' depends on other arrays of the state"):
        tr.batch_statistics(mixed, {}, state, BATCHES)
    with pytest.raises(ValueError, match="the output of the model depends on the counters"):
        tr.batch_statistics(secret, {}, {"mean": jnp.float32(1), "n": jnp.int32(2)}, BATCHES)
    with pytest.raises(ValueError, match="the statistics 'mean' of the first batch are not finite"):
        tr.batch_statistics(
            nn.BatchNorm(),
            {"scale": jnp.ones(3), "bias": jnp.ones(3)},
            {"mean": jnp.ones(3), "var": jnp.ones(3)},
            [np.full((2, 3), np.nan, np.float32)],
        )
    with pytest.raises(ValueError, match="the statistics 'mean' of batch 1 are not finite"):
        tr.batch_statistics(
            nn.BatchNorm(),
            {"scale": jnp.ones(3), "bias": jnp.ones(3)},
            {"mean": jnp.ones(3), "var": jnp.ones(3)},
            [BATCHES[0], BATCHES[0] * np.float32(np.inf)],
        )
    with pytest.raises(ValueError, match="batch 1 changes 'mean' in another way than batch 0"):
        tr.batch_statistics(
            lambda p, x, *, state, train: (
                x,
                {
                    "mean": jnp.where(
                        x.mean() > 0, 0.9 * state["mean"] + 0.1 * x.mean(), 3 * state["mean"]
                    )
                },
            ),
            {},
            {"mean": jnp.ones(())},
            [BATCHES[0], -BATCHES[0]],
        )
    with pytest.raises(
        ValueError, match=r"expected f to return \(output, new state\) with the structure"
    ):
        tr.batch_statistics(lambda p, x, *, state, train: (x, {}), {}, state, BATCHES)
    with pytest.raises(ValueError, match="batch_statistics: expected at least one batch; got none"):
        tr.batch_statistics(nn.BatchNorm(), {}, {}, [])
