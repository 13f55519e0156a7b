"""train: the same numbers as a step written by hand for fit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
from fnet import training as tr

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32) + (X[:, 1] > 0)
MODEL = nn.Sequential(nn.Dense(8), nn.BatchNorm(), jax.nn.relu, nn.Dropout(0.2), nn.Dense(3))
LOSS = optax.softmax_cross_entropy_with_integer_labels
CORRECT = {"accuracy": lambda logits, y: logits.argmax(-1) == y}
TX = tr.optimizer("adam", 0.02)


def by_hand(state, batch):
    key = jax.random.fold_in(jax.random.key(3), state.step)

    def objective(params):
        logits, new = MODEL(params, batch["x"], state=state.state, key=key, train=True)
        return LOSS(logits, batch["y"]).mean(), (logits, new)

    (value, (logits, new)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    return state.apply(TX, grads, state=new), {
        "loss": value,
        "accuracy": tr.mean(logits.argmax(-1) == batch["y"]),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("hand")
    params, variables = MODEL.init(jax.random.key(3), X)
    state = tr.TrainState.create(params, TX, state=variables, ema=0.9)
    state = tr.fit(
        by_hand,
        state,
        tr.Batches({"x": X, "y": Y}, 16),
        steps=8,
        log_every=4,
        workdir=workdir,
        config={},
    )
    return state, tr.read_metrics(workdir)


FORMS = {
    "tuple": ((X, Y), {}),
    "dict": ({"x": X, "y": Y}, {}),
    "names": ({"image": X, "label": Y}, {"inputs": "image", "targets": "label"}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_of_fit(tmp_path, form, reference):
    data, names = FORMS[form]
    state = tr.train(
        MODEL,
        tr.Batches(data, 16),
        LOSS,
        TX,
        epochs=2.5,
        validation=data,
        metrics=CORRECT,
        seed=3,
        ema=0.9,
        workdir=tmp_path,
        config={},
        log_every=4,
        **names,
    )
    assert int(state.step) == 8
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, reference[0]
    )
    rows = tr.read_metrics(tmp_path)
    for row, want in zip([row for row in rows if "train/loss" in row], reference[1]):
        np.testing.assert_allclose(
            [row["train/loss"], row["train/accuracy"]],
            [want["train/loss"], want["train/accuracy"]],
            rtol=1e-5,
        )
    evaluations = [row for row in rows if "validation/loss" in row]
    assert [row["step"] for row in evaluations] == [4, 8]  # each epoch, and the end
    logits, _ = MODEL(state.averaged, X, state=state.state)
    np.testing.assert_allclose(
        evaluations[-1]["validation/loss"], LOSS(logits, Y).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        evaluations[-1]["validation/accuracy"], (logits.argmax(-1) == Y).mean(), rtol=1e-5
    )


def test_best_weights_and_early_stopping(tmp_path):
    state = tr.train(
        MODEL,
        tr.Batches((X, Y), 16),
        LOSS,
        optax.sgd(0.5),
        epochs=100,
        validation=(X[:20], Y[:20]),
        workdir=tmp_path,
        config={},
        restore_best=True,
        early_stop=tr.EarlyStop(metric="validation/loss", mode="min", patience=3),
    )
    losses = {
        row["step"]: row["validation/loss"]
        for row in tr.read_metrics(tmp_path)
        if "validation/loss" in row
    }
    assert int(state.step) == min(losses, key=losses.get) and max(losses) < 313


def test_generators_without_a_length():
    batches = tr.from_iterator(
        lambda epoch: ((X[i : i + 20], Y[i : i + 20]) for i in range(0, 50, 20))
    )
    assert int(tr.train(MODEL, batches, LOSS, TX, steps=4, validation=(X, Y)).step) == 4
    with pytest.raises(
        TypeError, match="from_iterator: a generator has no length: give the number of steps"
    ):
        batches.steps(1)


def test_an_endless_source():
    """As Grain's MapDataset after `repeat()`: the number of its batches is too large for a counter
    of steps."""

    class Endless:
        def __len__(self):
            return 2**58

        def __getitem__(self, i):
            return np.full((4, 2), i, np.float32), np.zeros((4, 1), np.float32)

    state = tr.train(
        nn.Dense(1), tr.from_iterator(Endless()), optax.squared_error, optax.sgd(0.1), steps=3
    )
    assert int(state.step) == 3


def test_sequences_and_functions():
    model = nn.Sequential(nn.Embed(5, 4), nn.Dense(5))
    tokens = np.arange(24, dtype=np.int32).reshape(8, 3) % 5
    state = tr.train(
        model,
        lambda i: (tokens, tokens),
        LOSS,
        optax.sgd(0.5),
        steps=2,
        validation=(tokens, tokens),
    )
    assert int(state.step) == 2


WEIGHTS = {
    "float32": RNG.uniform(size=50).astype(np.float32),
    "int32": RNG.integers(0, 3, 50).astype(np.int32),
    "float64": RNG.uniform(size=50),
    "bool": RNG.random(50) < 0.5,
}


@pytest.mark.quick_cases("float64-dict")
@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_of_examples(tmp_path, kind, form):
    """Each step of gradient descent, the logged loss and the evaluation, in NumPy; the last batch
    of each is short."""
    w, y = WEIGHTS[kind], X @ np.array([[1.0], [-2.0], [0.5], [0.0]], np.float32) + 1
    data = (X, y, w) if form == "tuple" else {"x": X, "y": y, "weight": w}
    chunk = lambda i: jax.tree.map(
        lambda a: a[16 * i : 16 * i + 16], data
    )  # of 16, 16, 16 and 2 examples
    state = tr.train(
        nn.Dense(1, use_bias=False),
        chunk,
        optax.squared_error,
        optax.sgd(0.1),
        steps=4,
        workdir=tmp_path,
        validation=data,
        config={},
        log_every=1,
        tune=False,
    )
    kernel = np.asarray(
        nn.Dense(1, use_bias=False).init(jax.random.key(0), X)[0]["kernel"], np.float64
    )
    losses = []
    for i in range(4):
        x, t, v = (np.asarray(a[16 * i : 16 * i + 16], np.float64) for a in (X, y, w))
        error = (x @ kernel - t)[:, 0]
        losses.append((v * error**2).sum() / v.sum())
        kernel -= 0.1 * (2 * (v * error) @ x / v.sum())[:, None]
    np.testing.assert_allclose(state.params["kernel"], kernel, rtol=1e-5, atol=1e-6)
    rows = tr.read_metrics(tmp_path)
    np.testing.assert_allclose(
        [row["train/loss"] for row in rows if "train/loss" in row], losses, rtol=1e-5
    )
    v = w.astype(np.float64)
    whole = (v * ((X @ kernel - y)[:, 0]) ** 2).sum() / v.sum()
    np.testing.assert_allclose(rows[-1]["validation/loss"], whole, rtol=1e-5)


def test_a_batch_whose_weights_are_all_zero_changes_nothing():
    weights = lambda i: np.full(50, float(i == 1), np.float32)
    model = nn.Dense(1)
    target = np.ones((50, 1), np.float32)
    once, twice = (
        tr.train(
            model,
            lambda i, skip=skip: (X, target, weights(i + skip)),
            optax.squared_error,
            optax.sgd(0.1),
            steps=steps,
            tune=False,
        )
        for skip, steps in ((1, 1), (0, 2))
    )
    jax.tree.map(np.testing.assert_array_equal, once.params, twice.params)


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_the_weights_of_every_batch_are_checked(wrong):
    weight = np.ones(50, np.float32)
    weight[47] = wrong  # in the third batch
    with pytest.raises(
        ValueError,
        match=rf"train: batch 2 has an example of weight {wrong:g}: expected numbers from",
    ):
        tr.train(
            nn.Dense(1),
            tr.Batches((X, X[:, :1], weight), 20, shuffle=False),
            optax.squared_error,
            optax.sgd(0.1),
            steps=3,
        )


@pytest.mark.exhaustive
def test_a_loss_with_one_value_for_each_token_is_weighted_by_example():
    tokens = np.arange(12, dtype=np.int32).reshape(4, 3) % 5
    model = nn.Sequential(nn.Embed(5, 4), nn.Dense(5))
    some = lambda i: (tokens, tokens, np.array([0, 0, 1, 1], bool))
    part = lambda i: (tokens[2:], tokens[2:])
    a, b = (
        tr.train(model, data, LOSS, optax.sgd(0.5), steps=2, tune=False).params
        for data in (some, part)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray])
def test_a_run_starts_from_loaded_arrays(convert):
    """No step at rate 0 changes the parameters, the statistics continue from the given ones, and the
    caller keeps the arrays."""
    params, state = jax.tree.map(convert, MODEL.init(jax.random.key(7), X))
    state = jax.tree.map(lambda leaf: leaf + 3, state)
    data = tr.Batches((X, Y), 50)
    trained = tr.train(MODEL, data, LOSS, optax.sgd(0.0), steps=1, params=params, state=state)
    jax.tree.map(np.testing.assert_array_equal, trained.params, params)
    _, after = MODEL(params, data(0)[0], state=state, key=jax.random.key(0), train=True)
    jax.tree.map(np.testing.assert_allclose, trained.state["1"], after["1"])
    fresh = tr.train(MODEL, data, LOSS, optax.sgd(0.0), steps=1, state=state, seed=7)
    jax.tree.map(np.testing.assert_array_equal, fresh.params, params)
    assert np.isfinite(params["0"]["kernel"]).all()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (
            lambda params, state: {"params": params},
            "train: got params without state, but the model has the state '1/mean', '1/var': pass",
        ),
        (
            lambda params, state: {"params": params | {"0": {}}, "state": state},
            "arrays do not match the model: '0/kernel' .4, 8. is missing",
        ),
        (lambda params, state: {"state": {}}, "'1/mean' .8,. is missing"),
    ],
)
def test_arrays_of_another_model(arrays, text):
    arrays = arrays(*MODEL.init(jax.random.key(7), X))
    with pytest.raises(ValueError, match=text):
        tr.train(MODEL, tr.Batches((X, Y), 16), LOSS, TX, steps=1, **arrays)


def test_a_model_without_init():
    with pytest.raises(
        TypeError,
        match=r"train: model is a layer with init, got a function: write a step for tr.fit",
    ):
        tr.train(lambda params, x: x, tr.Batches((X, Y), 16), LOSS, TX, epochs=1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"data": (X, Y)},
            TypeError,
            r"data is a function of the step, got a tuple: pass tr.Batches\(data, batch_size\)",
        ),
        (
            {"epochs": None},
            ValueError,
            "give epochs or steps, one of the two; got epochs=None, steps=None",
        ),
        ({"steps": 2}, ValueError, "got epochs=1, steps=2"),
        (
            {"data": lambda i: (X, Y)},
            ValueError,
            "the number of batches of an epoch is not known: give steps instead of",
        ),
        (
            {"data": tr.Batches({"a": X, "b": Y}, 4)},
            TypeError,
            r"batches with 'x' and 'y', got \['a', 'b'\]: pass inputs=",
        ),
        (
            {"data": tr.Batches(X, 4)},
            TypeError,
            r"or \(x, y, weight\), or dicts with 'x' and 'y', got a ndarray",
        ),
        ({"data": tr.Batches((X,), 4)}, TypeError, "got a tuple of 1"),
        (
            {"loss": lambda a, b: LOSS(a, b).mean()},
            ValueError,
            r"'loss' must return one value for each of 16 examples, got shape \(\): leave out its "
            r"mean",
        ),
        (
            {"metrics": {"m": lambda a, b: jnp.zeros(2)}},
            ValueError,
            r"'m' must return one value .* got shape \(2,\)",
        ),
        ({"data": tr.Batches((X, Y, Y, Y), 4)}, TypeError, "got a tuple of 4"),
        (
            {"data": tr.Batches({"x": X, "y": Y, "weights": Y, "id": Y}, 4)},
            TypeError,
            r"have \['id', 'weights'\], which train does not use: leave them out",
        ),
        (
            {"validation": {"x": X, "y": Y, "id": Y}},
            TypeError,
            r"have \['id'\], which train does not use",
        ),
        (
            {"data": tr.Batches((X, Y, X**2), 16)},
            ValueError,
            r"a weight for each of 16 examples, got shape \(16, 4\)",
        ),
        (
            {"data": tr.Batches((X, Y, Y - 1), 16)},
            ValueError,
            "batch 0 has an example of weight -1: expected numbers",
        ),
        (
            {"validation": (X, Y, np.full(50, np.nan))},
            ValueError,
            "validation has an example of weight nan",
        ),
    ],
    ids=range(15),
)
def test_wrong_arguments(options, error, text):
    arguments = {"data": tr.Batches((X, Y), 16), "loss": LOSS, "epochs": 1} | options
    with pytest.raises(error, match="train: .*" + text):
        tr.train(MODEL, arguments.pop("data"), arguments.pop("loss"), TX, **arguments)
