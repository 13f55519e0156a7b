"""Metrics: exact under weights, padding and any cutting into batches."""

import jax.numpy as jnp
import numpy as np
import pytest

from fnet import training as tr
from fnet.training.record import _metrics

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


LABELS = {
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int64": np.int64,
    "bool": np.bool_,
}


@pytest.mark.parametrize("kind", LABELS)
@pytest.mark.parametrize("shape", [(60,), (3, 4, 5), (0,)])
def test_confusion_of_labels_outside_the_classes(kind, shape):
    """As scikit-learn's confusion_matrix(labels=range(classes)): such pairs do not count."""
    draw = lambda: (
        RNG.integers(-3, 300, shape) if kind not in ("int8", "bool") else RNG.integers(-3, 5, shape)
    )
    label, prediction = (
        np.where(RNG.random(shape) < 0.7, RNG.integers(0, 4, shape), draw()).astype(LABELS[kind])
        for _ in range(2)
    )
    weight = RNG.integers(0, 3, shape).astype(np.float32)
    for classes, w in ((4, None), (2, weight), (260, weight)):
        want = np.zeros((classes, classes))
        for a, b, n in zip(
            label.ravel().tolist(), prediction.ravel().tolist(), weight.ravel().tolist()
        ):
            if 0 <= a < classes and 0 <= b < classes:
                want[int(a), int(b)] += 1 if w is None else n
        got = tr.confusion(label, prediction, classes, w).total
        np.testing.assert_array_equal(got, want)
        assert got.dtype == (jnp.int32 if w is None else jnp.float32)


def test_confusion_ignores_the_weight_of_a_pair_that_does_not_count():
    counts = tr.confusion(jnp.array([0, -1]), jnp.array([0, 0]), 1, jnp.array([1.0, jnp.nan])).total
    assert counts.tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            ([0.0], [0], 2),
            TypeError,
            "expected label to be integers, the indices of classes, got float32",
        ),
        (([0], [np.nan], 2), TypeError, "expected prediction to be integers"),
        (([0, 1], [0], 2), ValueError, r"of one shape, got \(2,\), \(1,\) and \(2,\)"),
        (([0], [0], 2, [[1]]), ValueError, r"of one shape, got \(1,\), \(1,\) and \(1, 1\)"),
        (([0], [0], 0), ValueError, r"confusion\(classes=0\): expected at least one class"),
    ],
    ids=range(5),
)
def test_confusion_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        tr.confusion(*(jnp.asarray(each) if isinstance(each, list) else each for each in arguments))


@pytest.mark.exhaustive
def test_one_call_counts_beyond_float32():
    """2^24 + 3 is not a float32."""
    label = np.zeros(2**24 + 3, np.uint8)
    assert tr.confusion(label, label, 1).total.tolist() == [[2**24 + 3]]


def test_an_evaluation_counts_beyond_float32():
    """Each batch counts 2^22 + 1, a float32; the sum of eight of them is none."""

    def measure(state, batch):
        many = batch["x"] * batch["weight"] * (2**22 + 1)
        return {
            "total": tr.Total(many.sum()),
            "mean": tr.Mean(many.sum(), many.sum() + 1),
            "whole": tr.Total(many.sum().astype(jnp.int32)),
        }

    out = tr.evaluator(measure, {"x": np.ones(9, np.float32)}, batch_size=1)(0)
    assert out["total"] == out["whole"] == 9 * (2**22 + 1)
    assert out["mean"] == 9 * (2**22 + 1) / (9 * (2**22 + 2))


def test_totals_of_small_dtypes_do_not_wrap():
    full = tr.Total(jnp.full(2, 200, jnp.uint8))
    assert (full + full).total.tolist() == [400, 400]
    assert _metrics.as_metrics({"n": full})["n"].total.dtype == jnp.int32
    assert (
        tr.evaluator(
            lambda state, batch: {"n": tr.Total(batch[0].sum(dtype=jnp.uint8))},
            (np.full(4, 100, np.uint8),),
            2,
        )(0)["n"]
        == 400
    )
    assert float(tr.mean(jnp.full(100, 200, jnp.uint8)).result()) == 200
    assert float(tr.mean(jnp.full(100, -100, jnp.int8)).result()) == -100


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
    assert len(traces) <= 3  # shapes of the metrics twice, one compile


def test_evaluator_refuses_what_padding_would_spoil():
    evaluate = tr.evaluator(lambda s, b: {"loss": b["x"].mean()}, {"x": np.ones(3)}, batch_size=2)
    with pytest.raises(ValueError, match="'loss' is a plain value, in which padding counts"):
        evaluate(0)
    with pytest.raises(ValueError, match="arrays of one length, at least 1, got lengths"):
        tr.evaluator(lambda s, b: {}, {"x": np.ones(3), "y": np.ones(2)}, batch_size=2)
