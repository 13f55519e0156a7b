"""Populations against the same trainings alone, for each method, on one device and on four."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
from fnet import models, search
from fnet import training as tr
from fnet import transforms as ft
from fnet.search import _methods

N = 4


class Small(nn.Layer):
    def forward(self, scope, x, rate):  # [batch, height, width, 1]
        x = jax.nn.relu(
            nn.BatchNorm()(scope["norm"], nn.Conv(3, 3, use_bias=False)(scope["conv"], x))
        )
        x = nn.Dropout()(scope["drop"], nn.Flatten()(scope["flat"], x), rate=rate)
        return nn.Dense(3)(scope["head"], x)


def program(dtype="float64"):
    """init and step with every hyperparameter that the page names, and data."""
    model, rng = Small(), np.random.default_rng(0)
    images = rng.normal(size=(12, 5, 5, 1)).astype(dtype)
    labels = rng.integers(0, 3, 12).astype(np.int32)

    def tx(hyper):
        return optax.chain(
            optax.add_decayed_weights(hyper["decay"]), optax.sgd(hyper["rate"], momentum=0.9)
        )

    def init(key, hyper):
        params, state = model.init(key, images[:1], rate=0.5)
        params, state = jax.tree.map(lambda x: x.astype(dtype), (params, state))
        return tr.TrainState.create(params, tx(hyper), state=state)

    def step(state, batch, hyper):
        key = jax.random.fold_in(jax.random.key(hyper["seed"]), state.step)
        keys = jax.random.split(key)
        x = batch["x"] + hyper["noise"] * jax.random.normal(
            keys[1], batch["x"].shape, batch["x"].dtype
        )
        targets = optax.smooth_labels(
            jax.nn.one_hot(batch["y"], 3, dtype=dtype), hyper["smoothing"]
        )

        def loss(params):
            logits, new = model(
                params, x, rate=hyper["dropout"], state=state.state, key=keys[0], train=True
            )
            return optax.softmax_cross_entropy(logits, targets).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx(hyper), grads, state=new), {"loss": value}

    def batches(i):
        rows = np.random.default_rng(i).integers(0, 12, 6)
        return {"x": images[rows], "y": labels[rows]}

    spread = lambda low, high: jnp.linspace(low, high, N, dtype=dtype)
    hyper = {
        "rate": spread(0.01, 0.2),
        "decay": spread(0, 0.1),
        "smoothing": spread(0, 0.2),
        "noise": spread(0, 1),
        "dropout": spread(0, 0.6),
        "seed": jnp.arange(N, dtype=jnp.uint32),
    }
    return init, step, batches, hyper


def close(a, b, bound=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= bound * max(np.abs(y).max(), 1e-30)


@pytest.fixture(scope="module")
def alone():
    """The four trainings alone, ten steps in float64."""
    with jax.enable_x64(True):
        init, step, batches, hyper = program()
        run, ends = jax.jit(step), []
        for i in range(N):
            mine = jax.tree.map(lambda x, i=i: x[i], hyper)
            state = jax.jit(init)(jax.random.fold_in(jax.random.key(3), i), mine)
            for at in range(10):
                state, _ = run(state, batches(at), mine)
            ends.append(jax.device_get(state))
    return ends


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "method, devices",
    [
        ("auto", None),
        ("vmap", None),
        ("split", None),
        ("loop", None),
        ("vmap", 2),
        ("split", 2),
        ("loop", 2),
    ],
)
def test_members_equal_runs_alone(alone, method, devices):
    with jax.enable_x64(True):
        init, step, batches, hyper = program()
        devices = devices and jax.devices()[:devices]
        init_n, step_n = search.population(init, step, method=method, devices=devices)
        state = init_n(jax.random.key(3), hyper)
        for at in range(10):
            state, metrics = step_n(state, batches(at))
        assert (
            int(state.step) == 10
            and metrics["loss"].result().shape == (N,)
            and not state.diverged.any()
        )
        if devices:
            assert len(jax.tree.leaves(state.members.params)[0].sharding.device_set) == 2
        for i in range(N):
            close(search.member(state, i), alone[i])


def test_batches_of_their_own(alone):
    with jax.enable_x64(True):
        init, step, batches, hyper = program()
        for method in ("vmap", "loop"):
            init_n, step_n = search.population(init, step, method=method, own_batches=True)
            state = init_n(jax.random.key(3), hyper)
            for at in range(10):
                state, _ = step_n(state, jax.tree.map(lambda x: np.stack([x] * N), batches(at)))
            close(search.member(state, 2), alone[2])


@pytest.mark.exhaustive
def test_the_choice_is_measured_explained_and_kept():
    init, step, batches, hyper = program("float32")
    init_n, step_n = search.population(init, step)
    state = init_n(jax.random.key(0), hyper)
    found = ft.explain(step_n, state, batches(0))
    assert found.seconds[found.chosen] <= _methods._CLOSE * min(found.seconds.values())
    assert set(found.seconds) == {"vmap", "split", "loop"} and "measured" in str(found)
    assert not jax.tree.leaves(state)[0].is_deleted()  # nothing was donated
    _, again = search.population(init, step)
    other = next(name for name in found.seconds if name != found.chosen)
    again.prepare(state, batches(0), {"chosen": other, "members": N, "seconds": {}})
    assert ft.explain(again, state, batches(0)).chosen == other
    dense_init, dense_n = search.population(
        lambda key, h: {"w": jnp.ones((3, 3))}, lambda s, b, h: ({"w": s["w"] - h * (b.T @ b)}, {})
    )
    assert set(
        ft.explain(dense_n, dense_init(jax.random.key(0), jnp.ones(3)), jnp.ones((2, 3))).seconds
    ) == {"vmap", "loop"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_a_member_that_diverges_is_marked(method):
    def step(state, batch, hyper):
        return {"w": state["w"] * hyper}, {"w": state["w"].sum()}

    init_n, step_n = search.population(lambda key, hyper: {"w": jnp.ones(2)}, step, method=method)
    state = init_n(jax.random.key(0), jnp.array([2.0, 1e30, 1.0]))
    state = tr.fit(step_n, state, lambda i: jnp.zeros(()), steps=3)
    state, metrics = step_n(state, jnp.zeros(()))
    assert state.diverged.tolist() == [False, True, False]
    np.testing.assert_allclose(state.members["w"][[0, 2], 0], [16, 1], rtol=1e-6)
    values = metrics["w"].values("w")
    assert np.isnan(values["w/1"]) and values["w/max"] == 16 and values["w/mean"] == 9


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("devices", [None, 2])
def test_members_are_read_and_changed_between_the_steps_of_a_loop(devices):
    """Whether the members are read, copied or given other hyperparameters between two steps, vmap
    does the same."""
    init, step, batches, hyper = program("float32")
    other = {**hyper, "rate": hyper["rate"][::-1]}

    def run(method, read):
        init_n, step_n = search.population(
            init, step, method=method, devices=devices and jax.devices()[:devices]
        )
        state = init_n(jax.random.key(0), hyper)
        state, _ = step_n(state, batches(0))
        if read:
            assert state.members.params["head"]["bias"].shape == (N, 3)
            state = jax.tree.map(jnp.copy, search.take(state, jnp.arange(N)))
        old, (state, _) = state, step_n(state, batches(1))
        if method == "loop":  # the step donates the state
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old) if leaf.shape[1:] == (3,))
        for at in (2, 3):
            state, metrics = step_n(state.replace(hyper=jax.tree.map(jnp.copy, other)), batches(at))
        assert int(state.step) == 4
        return state.members, metrics["loss"].result()

    expected = run("loop", False)
    for a, b in zip(jax.tree.leaves(run("loop", True)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(run("vmap", False)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_population_is_immutable():
    state = search.population(lambda key, hyper: (), lambda s, b, h: (s, {}))[0](
        jax.random.key(0), jnp.ones(2)
    )
    with pytest.raises(AttributeError, match=r"use state.replace\(step=...\)"):
        state.step = 1
    with pytest.raises(TypeError, match="no field steps; it has step, members, hyper, diverged"):
        state.replace(steps=1)
    assert repr(state).startswith("Population(step=")


@pytest.fixture
def evaluation():
    model, (init, step, batches, hyper) = Small(), program("float32")

    def measure(state, batch):
        logits, _ = model(state.params, batch["x"], rate=0.0, state=state.state)
        return {
            "accuracy": tr.mean(logits.argmax(-1) == batch["y"], batch["weight"]),
            "confusion": tr.confusion(batch["y"], logits.argmax(-1), 3, batch["weight"]),
        }

    data = batches(100)
    return init, step, batches, hyper, {"test": tr.evaluator(search.each_member(measure), data, 4)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method, devices", [("split", None), ("loop", None), ("loop", 2)])
@pytest.mark.filterwarnings("ignore::fnet.training.ResumeWarning")
def test_fit_logs_saves_and_resumes_bit_by_bit(method, devices, tmp_path, evaluation):
    init, step, batches, hyper, evaluate = evaluation
    options = {
        "evaluate": evaluate,
        "every": 4,
        "log_every": 4,
        "best": "test/accuracy/max",
        "tensorboard": False,
    }

    def run(folder, steps):
        init_n, step_n = search.population(
            init, step, method=method, devices=devices and jax.devices()[:devices]
        )
        return tr.fit(
            step_n,
            init_n(jax.random.key(0), hyper),
            batches,
            steps=steps,
            workdir=tmp_path / folder,
            config={"n": N},
            **options,
        )

    whole = run("whole", 8)
    run("parts", 4)
    resumed = run("parts", 8)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = tr.read_metrics(tmp_path / "parts")
    assert [row["step"] for row in rows] == [4, 4, 8, 8]
    assert {"train/loss/mean", "train/loss/3"} <= rows[0].keys() and "test/accuracy/max" in rows[1]
    last = [row for row in rows if "test/accuracy/0" in row][-1]
    scores = [last[f"test/accuracy/{i}"] for i in range(N)]
    assert last["test/accuracy/max"] == max(scores)
    if devices:
        assert all(
            len(leaf.sharding.device_set) == 2
            for leaf in jax.tree.leaves((resumed.members, resumed.diverged))
        )
    best = search.member(whole, int(np.argmax(scores)))
    assert jax.tree.structure(best) == jax.tree.structure(
        jax.eval_shape(init, jax.random.key(0), jax.tree.map(lambda x: x[0], hyper))
    )


@pytest.mark.exhaustive
def test_fit_keeps_the_choice_of_the_first_call(tmp_path):
    def step(state, batch, hyper):
        return {"w": state["w"] - hyper * (batch.T @ batch)}, {"mean": batch.mean()}

    hyper, found = jnp.linspace(0.1, 1, N), []
    for steps in (2, 4):
        init_n, step_n = search.population(lambda key, hyper: {"w": jnp.ones((3, 3))}, step)
        if steps == 4:
            step_n._measured = lambda *args: pytest.fail("measured again")
        tr.fit(
            step_n,
            init_n(jax.random.key(0), hyper),
            lambda i: jnp.ones((2, 3)),
            steps=steps,
            workdir=tmp_path,
            config={"n": N},
        )
        found.append(step_n._methods[N].chosen)
    assert found[0] == found[1]


def test_fit_skips_a_step_that_is_not_finite_with_the_method_loop():
    def step(state, batch, hyper):
        return {"w": state["w"] + hyper * batch}, {"mean": batch}

    init_n, step_n = search.population(lambda key, hyper: {"w": jnp.zeros(2)}, step, method="loop")
    state = tr.fit(
        step_n,
        init_n(jax.random.key(0), jnp.array([1.0, 2.0])),
        lambda i: jnp.float32(i),
        steps=4,
        nonfinite="skip",
    )
    np.testing.assert_array_equal(state.members["w"][:, 0], [6, 12])
    assert int(state.step) == 4


def test_memory_of_members():
    init, step, batches, hyper = program("float32")
    one = jax.tree.map(lambda x: x[0], hyper)
    plan = search.fits(init, step, one, batches(0), devices="T4")
    state = jax.eval_shape(init, jax.random.key(0), one)
    assert plan.state == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, one)))
    assert 0 < plan.vmap <= plan.loop and plan.vmap * (plan.state + plan.working) <= plan.memory
    assert "members with vmap" in str(plan)


def test_errors():
    init, step, batches, hyper = program("float32")
    with pytest.raises(TypeError, match=r"population\(init, step\): step is a function; got a int"):
        search.population(init, 3)
    with pytest.raises(ValueError, match="method='pmap'"):
        search.population(init, step, method="pmap")
    init_n, _ = search.population(init, step, method="vmap")
    with pytest.raises(ValueError, match=r"one value for each member.*'b': \[3\]"):
        init_n(jax.random.key(0), {"a": jnp.ones(2), "b": jnp.ones(3)})
    with pytest.raises(ValueError, match="'rate': a number"):
        init_n(jax.random.key(0), {"rate": jnp.ones(())})
    with pytest.raises(ValueError, match="4 members cannot be divided evenly among 3 devices"):
        search.population(init, step, devices=jax.devices()[:3])[0](jax.random.key(0), hyper)
    state = init_n(jax.random.key(0), hyper)
    with pytest.raises(IndexError, match="member 4: the population has 4 members"):
        search.member(state, 4)
    with pytest.raises(TypeError, match=r"must return \(state, metrics\)"):
        search.population(init, lambda s, b, h: s, method="vmap")[1](state, batches(0))


def test_the_rate_of_dropout_is_an_array():
    x, key = jnp.ones((50, 50)), jax.random.key(1)
    call = jax.jit(lambda rate: nn.Dropout()({}, x, rate=rate, key=key, train=True))
    for rate in (0.0, 0.3, 1.0):
        np.testing.assert_allclose(
            call(jnp.float32(rate)), nn.Dropout(rate)({}, x, key=key, train=True), rtol=1e-6
        )
    rates = jnp.array([0.1, 0.9])
    kept = jax.vmap(call)(rates)
    np.testing.assert_allclose((kept > 0).mean((1, 2)), 1 - rates, atol=0.03)
    with pytest.raises(ValueError, match=r"Dropout at .*: expected a rate, got none"):
        nn.Dropout()({}, x, key=key, train=True)
    with pytest.raises(ValueError, match=r"expected one rate, got shape \(2,\)"):
        nn.Dropout()({}, x, rate=rates, key=key, train=True)


def test_models_of_the_library():
    """A whole CNN with BatchNorm; split and vmap agree."""
    model = models.CNN(3, (4,), 1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 8, 1)), jnp.float32)

    def init(key, hyper):
        params, state = model.init(key, x)
        return tr.TrainState.create(params, optax.adam(hyper), state=state)

    def step(state, batch, hyper):
        def loss(params):
            y, new = model(params, batch, state=state.state, train=True)
            return (y**2).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(optax.adam(hyper), grads, state=new), {"loss": value}

    ends = []
    for method in ("vmap", "split"):
        init_n, step_n = search.population(init, step, method=method)
        state = init_n(jax.random.key(0), jnp.array([1e-3, 1e-2]))
        for _ in range(3):
            state, metrics = step_n(state, x)
        ends.append(metrics["loss"].result())
    np.testing.assert_allclose(*ends, rtol=1e-4)
