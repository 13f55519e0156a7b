"""NaN and infinity: found without waiting, named with the step and the layer, never saved, handled
as asked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
from fnet import training as tr

TX = optax.adam(0.01)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 8, 4)).astype(np.float32)


@nn.layer
def root(scope, x):
    return jnp.sqrt(x)


def batches(bad=()):
    def batch(i):
        x = X[i % 40]
        return {"x": np.full_like(x, np.nan) if i in bad else x}

    return batch


def step(state, batch):
    loss = lambda params: jnp.square(jnp.tanh(batch["x"]) @ params["w"] - 1).mean()
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads), {"loss": value}


def start():
    return tr.TrainState.create({"w": jnp.ones(4)}, TX, ema=0.9)


def start_of(model):
    params, _ = model.init(jax.random.key(0), X[0])
    return tr.TrainState.create(jax.tree.map(lambda p: jnp.abs(p) + 0.1, params), TX)


def same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def losses(workdir):
    return {
        row["step"]: row["train/loss"] for row in tr.read_metrics(workdir) if "train/loss" in row
    }


def test_the_step_is_named_and_what_came_after_is_not_saved(tmp_path):
    with pytest.raises(
        tr.Diverged,
        match=r"^the loss was not finite at step 8 of 20 \(batch 7\); the checkpoint of "
        r"step 6 is sound. Lower",
    ):
        tr.fit(
            step,
            start(),
            batches({7}),
            steps=20,
            workdir=tmp_path,
            log_every=10,
            save_every=2,
            keep=9,
        )
    assert tr.Checkpoints(tmp_path / "checkpoints").steps() == [2, 4, 6]


def test_the_host_asks_at_logs_alone(monkeypatch, tmp_path):
    from fnet.training.loop._recovery import Recovery

    asked = []
    monkeypatch.setattr(Recovery, "check", lambda recovery: bool(asked.append(recovery.run.at)))
    tr.fit(step, start(), batches(), steps=12, log_every=6, save_every=2, workdir=tmp_path)
    assert asked == [6, 12] and tr.Checkpoints(tmp_path / "checkpoints").steps() == [8, 10, 12]


@pytest.mark.exhaustive
def test_a_gradient_that_is_not_finite_while_the_loss_is():
    def cusp(state, batch):
        loss = lambda params: jnp.sqrt(jnp.square(params["w"] * batch["x"]).sum())
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    state = tr.TrainState.create({"w": jnp.zeros(())}, TX)
    with pytest.raises(
        tr.Diverged, match=r"the parameter 'params/w' was not finite at step 1 of 3 \(batch 0\)\. "
    ):
        tr.fit(cusp, state, batches(), steps=3)


# The whole state.

LEAVES = {
    "the metric 'norm'": None,
    "'opt_state/0/nu/w'": lambda s: s.opt_state[0].nu,
    "'ema/w'": lambda s: s.ema,
    "'state/mean'": lambda s: s.state,
    "'state/half'": lambda s: s.state,
}


def spoiled(called, value, at=5):
    """A step after which one leaf or metric is not finite, from step `at` on, while loss and
    parameters are."""

    def spoiling(state, batch):
        new, metrics = step(state, batch)
        put = lambda x: jnp.where(state.step == at - 1, jnp.asarray(value, x.dtype), x)
        if called.startswith("'"):
            path = called.strip("'")
            named = lambda where, x: (
                put(x) if jax.tree_util.keystr(where, simple=True, separator="/") == path else x
            )
            new = jax.tree_util.tree_map_with_path(named, new)
        return new, metrics | {"norm": put(jnp.zeros(())) if called == "the metric 'norm'" else 0.0}

    return spoiling


def start_with_state(**more):
    return start().replace(state={"mean": jnp.zeros(()), "half": jnp.ones(3, jnp.bfloat16)} | more)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("called", LEAVES)
def test_every_leaf_and_metric_is_watched(tmp_path, called):
    with pytest.raises(
        tr.Diverged,
        match=rf"^{called} was not finite at step 5 of 9 \(batch 4\); the checkpoint of "
        "step 4 is sound",
    ):
        tr.fit(
            spoiled(called, np.inf),
            start_with_state(),
            batches(),
            steps=9,
            workdir=tmp_path,
            save_every=1,
            keep=9,
            tune=False,
        )
    assert tr.Checkpoints(tmp_path / "checkpoints").steps() == [1, 2, 3, 4]


def test_a_skipped_step_leaves_the_optimizer_alone(tmp_path):
    state = tr.fit(
        spoiled("'opt_state/0/nu/w'", np.nan),
        start_with_state(),
        batches(),
        steps=9,
        nonfinite="skip",
        tune=False,
    )
    expected = tr.fit(step, start_with_state(), batches(), steps=9, tune=False)
    assert int(state.step) == 9 and np.isfinite(np.asarray(state.opt_state[0].nu["w"])).all()
    assert int(state.opt_state[0].count) == 8 and int(expected.opt_state[0].count) == 9


@pytest.mark.exhaustive
def test_large_numbers_whose_squares_overflow_are_finite():
    """And leaves that are infinite from the beginning are meant to be: `reduce_on_plateau` has one."""
    state = start_with_state(
        large=jnp.full((3, 4), 1e30),
        plateau=jnp.float32(np.inf),
        tiny=jnp.full(7, 1e-40),
        mask=jnp.array([0, -np.inf]),
    )
    state = tr.fit(step, state, batches(), steps=3, tune=False)
    assert int(state.step) == 3 and np.isinf(state.state["plateau"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(), (5,), (0, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "float8_e5m2"])
def test_the_first_leaf_that_is_not_finite_is_found(shape, dtype):
    from fnet.training.loop import _nonfinite

    good = jnp.ones(shape, dtype)
    huge = jnp.full((4,), 3e38)
    assert int(_nonfinite._first([good, huge, good])) == -1
    for value in (np.nan, np.inf, -np.inf):
        bad = good.at[(-1,) * len(shape)].set(value) if 0 not in shape else good
        assert int(_nonfinite._first([huge, good, bad, bad])) == (-1 if 0 in shape else 2)


def test_skipped_steps_leave_no_trace(tmp_path, capsys):
    """The state is that of a run in which the bad batches' updates were never made, and the counter
    goes on."""
    state = tr.fit(
        step,
        start(),
        batches({3, 4}),
        steps=9,
        nonfinite="skip",
        workdir=tmp_path,
        log_every=3,
        save_every=3,
        progress=tr.Progress(bar=False),
    )
    assert (
        "skipped 2 of the last 3 steps, which were not finite, the first of them 4"
        in capsys.readouterr().out
    )
    expected, plain = start(), jax.jit(step)
    for i in range(9):
        if i in (3, 4):
            expected = expected.replace(step=expected.step + 1)
        else:
            expected, _ = plain(expected, batches()(i))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert int(state.step) == 9 and all(np.isfinite(value) for value in losses(tmp_path).values())


@pytest.mark.exhaustive
def test_skipping_is_reported_counted_and_exact_across_a_restart(tmp_path, capsys):
    options = {"nonfinite": "skip", "log_every": 5, "save_every": 5, "config": {}}
    whole = tr.fit(
        step,
        start(),
        batches({3, 6}),
        steps=10,
        workdir=tmp_path / "a",
        **options,
        progress=tr.Progress(bar=False),
    )
    out = capsys.readouterr().out
    assert "skipped 1 of the last 5 steps, which were not finite, the first of them 4" in out
    assert "skipped 1 of the last 5 steps, which were not finite, the first of them 7" in out
    for steps in (5, 10):
        parts = tr.fit(
            step, start(), batches({3, 6}), steps=steps, workdir=tmp_path / "b", **options
        )
    same_bits(whole, parts)


def test_when_every_step_is_skipped_the_run_ends():
    with pytest.raises(
        tr.Diverged, match=r"step 4 of 20 \(batch 3\), and so was every step up to 6"
    ):
        tr.fit(step, start(), batches(range(3, 20)), steps=20, nonfinite="skip", log_every=3)


@pytest.mark.exhaustive
def test_rolling_back_passes_over_the_bad_stretch(tmp_path, capsys):
    """From the checkpoint of step 4 on with the batches after the bad one, and all the same after a
    restart."""
    options = {"nonfinite": "rollback", "log_every": 4, "save_every": 4, "config": {}}
    state = tr.fit(
        step,
        start(),
        batches({6}),
        steps=12,
        workdir=tmp_path / "a",
        **options,
        progress=tr.Progress(bar=False),
    )
    assert (
        "step 7 was not finite: rolled back to step 4, continuing with batch 7"
        in capsys.readouterr().out
    )
    shifted = lambda i: batches()(i if i < 4 else i + 3)
    expected = tr.fit(
        step, start(), shifted, steps=12, workdir=tmp_path / "b", log_every=4, save_every=4
    )
    same_bits(state, expected)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for steps in (8, 12):
        again = tr.fit(step, start(), batches({6}), steps=steps, workdir=tmp_path / "c", **options)
    same_bits(again, state)


def test_rolling_back_ends_somewhere(tmp_path):
    with pytest.raises(
        tr.Diverged, match=r"at step 5 of 20 \(batch 7\), after 3 rollbacks to step 4"
    ):
        tr.fit(
            step,
            start(),
            batches(range(4, 40)),
            steps=20,
            nonfinite="rollback",
            log_every=2,
            save_every=2,
            workdir=tmp_path,
        )


@pytest.mark.exhaustive
def test_without_a_checkpoint_there_is_nowhere_to_roll_back_to():
    with pytest.raises(tr.Diverged, match="step 3 of 9"):
        tr.fit(step, start(), batches({2}), steps=9, nonfinite="rollback")


def test_the_first_layer_is_named(tmp_path):
    """The square root of something negative, in a layer in the middle, from the fifth batch on."""
    model = nn.Sequential(first=nn.Dense(6), middle=root(), head=nn.Dense(1))

    def into(state, batch):
        loss = lambda params: jnp.square(model(params, batch["x"])).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    state = start_of(model)
    feed = lambda i: {"x": -np.abs(X[i]) if i == 5 else np.abs(X[i])}
    with pytest.raises(
        tr.Diverged,
        match=r"On a replay of that step the first NaN came from 'sqrt' float32\[8, 6\] in "
        r"'middle'\. Lower",
    ):
        tr.fit(
            jax.jit(into),
            state,
            feed,
            steps=9,
            debug=True,
            save_every=2,
            log_every=3,
            workdir=tmp_path,
        )


def test_what_is_meant_to_be_infinite_is_not_blamed():
    """A logarithm of zero that is masked, at every step; and then one that is not."""

    def masked(state, batch):
        def loss(params):
            with jax.named_scope("mask"):
                masked = jnp.where(batch["x"] > 0, params["w"], -jnp.inf)
                low = jnp.exp(jnp.log(jnp.zeros(())) + masked)
            with jax.named_scope("divide"):
                return (low.sum() + params["w"]) / batch["scale"]

        value, _ = jax.value_and_grad(loss)(state.params)
        return state.replace(step=state.step + 1), {"loss": value}

    state = tr.TrainState.create({"w": jnp.ones(())}, TX)
    feed = lambda i: {"x": X[i], "scale": np.float32(i != 4)}
    with pytest.raises(
        tr.Diverged, match=r"the first infinity came from 'div' float32\[\] in 'divide'"
    ):
        tr.fit(masked, state, feed, steps=9, debug=True, log_every=3)


@pytest.mark.exhaustive
def test_in_a_stack():
    """Inside lax.scan, which the replay enters."""
    model = nn.Sequential(blocks=nn.Stack(nn.Residual(root()), 2), head=nn.Dense(1))

    def into(state, batch):
        loss = lambda params: jnp.square(model(params, batch["x"])).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    with pytest.raises(
        tr.Diverged, match=r"the first NaN came from 'sqrt' float32\[8, 4\] in 'blocks/0'"
    ):
        tr.fit(into, start_of(model), batches(), steps=2, debug=True, tune=False)


def test_input_that_is_not_finite_is_named():
    with pytest.raises(
        tr.Diverged, match=r"On a replay of that step 'batch/x' went into it already not finite"
    ):
        tr.fit(step, start(), batches({2}), steps=4, debug=True)


def test_a_resumed_run_of_which_every_step_was_skipped_is_replayed(tmp_path):
    """It ends before it takes a step, because the step of its checkpoint was not logged."""

    def crash(end):
        if end.step == 6:
            raise OSError("no space left")

    options = {"nonfinite": "skip", "log_every": 3, "workdir": tmp_path, "config": {}}
    feed = batches(range(3, 20))
    with pytest.raises(OSError, match="no space left"):
        tr.fit(step, start(), feed, steps=20, **options, on_step=crash)
    with pytest.raises(
        tr.Diverged,
        match=r"the state or a metric was not finite at step 4 of 20 \(batch 3\), and so was every "
        r"step up to 6; .*\. On a replay of that step 'batch/x' went into it already not finite",
    ):
        tr.fit(step, start(), feed, steps=20, debug=True, **options)


def divided(state, batch):
    new, metrics = step(state, batch)
    with jax.named_scope("divide"):
        return new, {"loss": metrics["loss"] / batch["scale"]}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_batch_after_a_rollback_is_replayed(tmp_path, interrupted):
    """The batches before it have another fault. The checkpoint at which the first process was
    interrupted does not belong to the run any more after the rollback."""
    feed = lambda i: batches({5, 6, 7})(i) | {"scale": np.float32(i != 8)}
    options = {"nonfinite": "rollback", "log_every": 2, "save_every": 2, "config": {}}

    def crash(end):
        if end.step == 5:
            raise OSError("no space left")

    if interrupted:
        with pytest.raises(OSError, match="no space left"):
            tr.fit(
                divided,
                start(),
                feed,
                steps=20,
                workdir=tmp_path,
                **options,
                on_step=crash,
            )
        assert tr.Checkpoints(tmp_path / "checkpoints").steps()[-1] == 5
    with pytest.raises(
        tr.Diverged,
        match=r"at step 5 of 20 \(batch 8\), after 3 rollbacks to step 4; .* the first \w+ came "
        r"from 'div' float32\[\] in 'divide'",
    ):
        tr.fit(divided, start(), feed, steps=20, workdir=tmp_path, debug=True, **options)


def test_a_way_that_there_is_not():
    with pytest.raises(ValueError, match="nonfinite='ignore': use stop, skip, rollback"):
        tr.fit(step, start(), batches(), steps=4, nonfinite="ignore")
