"""Metrics: exact under weights, padding and any cutting into batches."""

import jax.numpy as jnp
import numpy as np
import pytest

from fnet import training as tr
from fnet.training import _metrics

RNG = np.random.default_rng(1)


def test_mean_with_weights():
    values, weight = RNG.normal(size=9).astype(np.float32), RNG.random(9).astype(np.float32)
    parts = [tr.mean(values[i : i + 4], weight[i : i + 4]) for i in (0, 4, 8)]
    both = parts[0] + parts[1] + parts[2]
    assert float(both.result()) == pytest.approx(np.average(values, weights=weight), rel=1e-5)


def test_what_stands_in_padding_does_not_matter():
    values = jnp.array([1.0, 3.0, jnp.nan, jnp.inf])
    assert float(tr.mean(values, jnp.array([1, 1, 0, 0])).result()) == 2


def test_mean_of_bools_and_of_nothing():
    assert float(tr.mean(jnp.array([True, False])).result()) == 0.5
    assert np.isnan(_metrics.results({"m": tr.mean(jnp.ones(2), jnp.zeros(2))})["m"])


def test_mean_wants_one_weight_per_value():
    with pytest.raises(ValueError, match=r"values \(3,\), weight \(2,\)"):
        tr.mean(jnp.ones(3), jnp.ones(2))


def test_confusion_counts():
    label, prediction = jnp.array([0, 1, 2, 2, 2]), jnp.array([0, 2, 2, 2, 0])
    counts = tr.confusion(label, prediction, 3, jnp.array([1, 1, 1, 1, 0])).result()
    np.testing.assert_array_equal(counts, [[1, 0, 0], [0, 0, 1], [0, 0, 2]])


@pytest.mark.parametrize("length, size", [(10, 4), (8, 4), (3, 4), (1, 1)])
def test_evaluator_is_exact_and_compiles_once(length, size):
    data = {"x": RNG.normal(size=(length, 2)).astype(np.float32), "y": np.arange(length) % 3}
    traces = []

    def metrics(state, batch):
        traces.append(batch["x"].shape)
        return {
            "mean": tr.mean(batch["x"][:, 0] * state, batch["weight"]),
            "table": tr.confusion(batch["y"], batch["y"], 3, batch["weight"]),
        }

    evaluate = tr.evaluator(metrics, data, batch_size=size)
    for scale in (1.0, 2.0):
        out = evaluate(jnp.float32(scale))
        assert out["mean"] == pytest.approx(scale * data["x"][:, 0].mean(), rel=1e-5)
        np.testing.assert_array_equal(np.diag(out["table"]), np.bincount(data["y"], minlength=3))
    assert set(traces) == {(min(size, length), 2)}
    assert len(traces) <= 3                                # shapes of the metrics twice, one compile


def test_evaluator_refuses_what_padding_would_spoil():
    evaluate = tr.evaluator(lambda s, b: {"loss": b["x"].mean()}, {"x": np.ones(3)}, batch_size=2)
    with pytest.raises(ValueError, match="'loss' is a plain value, in which padding counts"):
        evaluate(0)
    with pytest.raises(ValueError, match="arrays of one length, at least 1, got lengths"):
        tr.evaluator(lambda s, b: {}, {"x": np.ones(3), "y": np.ones(2)}, batch_size=2)
