"""tune(measure=True): selects rules by time, for each program once, and changes nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr
from fnet import transforms as ft
from fnet.transforms._tune import _measure

X = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype(np.float32)
W = {"w": np.random.default_rng(1).normal(size=(3, 3, 1, 4)).astype(np.float32)}


def loss(params, x):
    y = jax.lax.conv_general_dilated(
        x, params["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return (y**2).mean()


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FNET_CACHE", str(tmp_path))
    return tmp_path / "tuned"


@pytest.fixture
def taken(monkeypatch, folder):
    """Sets the times of variants, and records what is timed. A missing variant takes 1."""

    class Taken(dict):
        def __init__(self):
            self.calls = []

    taken = Taken()

    def times(programs, arguments):
        taken.calls = [*taken.calls, sorted(programs)]
        return {name: [taken.get(name, 1.0)] * 3 for name in programs}

    monkeypatch.setattr(_measure, "_times", times)
    return taken


def selected(**more):
    """(the measured selection, the rules that applied), without the rules that never apply here."""
    found = ft.explain(ft.tune(step, "cpu", measure=True, **more), W, X)
    return found.measured, {row.rule for row in found.rows}


ALL = {"max_pool", "max_pool_gradient"}


def variants():
    every = {row.rule for row in ft.explain(ft.tune(step, "cpu"), W, X).rows}
    options = ft.explain(ft.tune(step, "cpu"), W, X).options
    return sorted(every) + ["convolution_kernels"] * bool(options)


def test_all_rules_are_kept_if_none_is_slower(taken):
    measured, rows = selected()
    assert taken.calls == [
        sorted(["all rules", "no rule", *(f"without {name}" for name in variants())])
    ]
    assert set(variants()) <= set(measured.rules) and ALL <= rows
    assert (
        measured.reason == "all rules: the fastest, measured" and measured.seconds["no rule"] == 1
    )


def test_a_slow_rule_is_left_out(taken):
    taken["without max_pool"] = 0.9
    measured, rows = selected()
    assert "max_pool" not in measured.rules and rows & ALL == {"max_pool_gradient"}
    assert (
        str(ft.explain(ft.tune(step, "cpu", measure=True), W, X))
        .splitlines()[0]
        .startswith(
            f"{ft.explain(ft.tune(step, 'cpu'), W, X).chip.name}: without max_pool: the fastest, "
            f"measured ("
        )
    )


def test_differences_within_noise_change_nothing(taken):
    taken |= {"without max_pool": 0.985, "no rule": 0.99}
    assert ALL <= selected()[1]


def test_two_slow_rules_are_left_out_together_if_that_is_faster(taken):
    together = "without max_pool, max_pool_gradient"
    taken |= {"without max_pool": 0.9, "without max_pool_gradient": 0.8, together: 0.75}
    measured, rows = selected()
    assert taken.calls[-1] == sorted(["all rules", together]) and not rows & ALL
    assert measured.seconds[together] == 0.75


def test_no_rule_is_used_if_the_plain_program_is_the_fastest(taken):
    taken |= {"no rule": 0.5, "without max_pool": 0.7}
    measured, rows = selected()
    assert not rows and not set(variants()) & set(measured.rules)


def test_the_selection_is_kept_for_the_same_program(taken, folder):
    taken["without max_pool"] = 0.9
    first = selected()
    assert len(taken.calls) == 1 and len(list(folder.iterdir())) == 1
    assert selected() == first and len(taken.calls) == 1
    assert (
        selected(rules={"max_pool": False})[1] & ALL == {"max_pool_gradient"}
        and len(taken.calls) == 2
    )
    (file, *_) = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    for damaged in ("", "[]", "{", json.dumps({"rules": ["other"], "seconds": {}, "reason": ""})):
        for each in folder.iterdir():
            each.write_text(damaged)
        before = len(taken.calls)
        assert selected() == first and len(taken.calls) == before + 1
    ft.tune(step, "cpu", measure=True)(W, X[:1])  # another shape is another program
    assert len(taken.calls) == before + 2 and file.exists()


def test_real_times_and_equal_results(folder):
    plain = jax.jit(step)
    params = jax.tree.map(jnp.asarray, W)
    fast = ft.tune(jax.jit(step, donate_argnums=0), "cpu", measure=True)
    measured = fast.measured(params, X)
    assert (
        min(measured.seconds.values()) > 0 and {"all rules", "no rule"} <= measured.seconds.keys()
    )
    for _ in range(2):
        expected, value = plain(params, X)
        params, found = fast(params, X)  # measured on copies: these are donated once
        np.testing.assert_allclose(found, value, rtol=1e-5)
        np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (
            lambda name, x: x @ x.T,
            ("a", np.ones((600, 600), np.float32)),
            "an argument is not an array",
        ),
        (lambda x: jnp.sin(x), (np.ones(3, np.float32),), "no rule applies"),
        (
            lambda p, x: (jax.debug.callback(lambda v: None, x.sum()), step(p, x))[1],
            (W, X),
            "the step has callbacks, which would run more often",
        ),
    ],
)
def test_what_is_not_measured(taken, function, arguments, reason):
    fast = ft.tune(function, "cpu", measure=True)
    assert reason in str(fast.measured(*arguments)) and not taken.calls
    fast(*arguments)


def test_large_arguments_are_not_copied(taken, monkeypatch):
    monkeypatch.setattr(_measure, "_MEMORY", 1e-12)
    measured, rows = selected()
    assert "too much memory" in str(measured) and ALL <= rows and not taken.calls


def test_shapes_cannot_be_timed_but_later_arrays_can(taken):
    fast = ft.tune(step, "cpu", measure=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (W, X))
    fast.lower(*shapes)
    assert not taken.calls
    fast(W, X)
    assert len(taken.calls) == 1


@pytest.mark.exhaustive
def test_under_another_transformation_nothing_is_timed(taken):
    fast = ft.tune(
        step, "cpu", measure=True, rules={"convolution_kernels": False}
    )  # options cannot be kept here
    jax.vmap(fast, in_axes=(None, 0))(W, X[:, None])
    assert not taken.calls


def test_a_long_run_measures_and_a_resumed_run_has_its_rules(taken, tmp_path, monkeypatch, capsys):
    """A run of which one second at the peak rate counts as long."""
    from fnet.training.loop import _tuning

    monkeypatch.setattr(_tuning, "_LONG", 0)
    taken["without max_pool"] = 0.9
    tx = optax.sgd(0.1)

    def train(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch["x"])
        return state.apply(tx, grads), {"loss": value}

    def run(steps):
        state = tr.TrainState.create(jax.tree.map(jnp.asarray, W), tx)
        return tr.fit(
            train,
            state,
            tr.Batches({"x": X}, batch_size=2),
            steps=steps,
            workdir=tmp_path / "run",
            config={},
            progress=tr.Progress(),
        )

    first = run(2)
    assert (
        "tune: without max_pool: the fastest, measured" in capsys.readouterr().out
        and len(taken.calls) == 1
    )
    taken["without max_pool"] = 1.1
    for each in (tmp_path / "tuned").iterdir():
        each.unlink()
    second = run(4)  # keeps the rules, measures nothing
    assert len(taken.calls) == 1 and int(second.step) == 4 and int(first.step) == 2
    monkeypatch.setattr(_tuning, "_LONG", 1e9)
    tr.fit(
        train,
        tr.TrainState.create(jax.tree.map(jnp.asarray, W), tx),
        tr.Batches({"x": X}, batch_size=2),
        steps=2,
    )
    assert len(taken.calls) == 1
