"""A run always ends, and keeps its last finished step: sources that hang or raise, evaluations,
steps, signals."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr
from fnet.training.loop import _signals
from fnet.training.loop._prefetch import Prefetch

pytestmark = pytest.mark.usefixtures("quickly")
TX = optax.sgd(0.1)
OPTIONS = {"tensorboard": False, "tune": False, "config": {}}


def step(state, batch):
    value, grads = jax.value_and_grad(
        lambda params: jnp.square(params["w"] * batch["x"] - 1).mean()
    )(state.params)
    return state.apply(TX, grads), {"loss": value}


def start():
    return tr.TrainState.create({"w": jnp.zeros(())}, TX)


def batches(i):
    return {"x": np.ones(8, np.float32)}


def steps_of(workdir):
    return tr.Checkpoints(workdir / "checkpoints").steps()


@pytest.fixture
def hanging():
    """A source whose batch 5 sends a signal and never comes."""
    release = threading.Event()

    def source(i):
        if i == 5:
            threading.Timer(
                0.5, os.kill, (os.getpid(), signal.SIGTERM)
            ).start()  # when the loop waits
            release.wait()
        return batches(i)

    yield source
    release.set()


# The source.


@pytest.mark.parametrize(
    "batch, text",
    [
        ((x for x in "ab"), "returned generator <generator"),
        ({"x": np.ones(8), "name": "a"}, "returned str 'a' as 'name'"),
        ({"x": np.array(["a"])}, r"returned <U1\[1\] as 'x'"),
    ],
)
def test_a_batch_of_other_things_is_named(batch, text):
    with pytest.raises(
        TypeError, match=rf"batches\(i\) {text}.*: a batch is a tree of arrays and numbers"
    ):
        tr.fit(step, start(), lambda i: batch, steps=3)


def test_a_batch_without_an_array_that_the_step_reads_keeps_the_state(tmp_path):
    source = lambda i: batches(i) if i != 4 else {"z": np.ones(8, np.float32)}
    with pytest.raises(KeyError, match="x"):
        tr.fit(step, start(), source, steps=6, workdir=tmp_path, **OPTIONS)
    assert steps_of(tmp_path) == [4]
    assert int(tr.fit(step, start(), batches, steps=6, workdir=tmp_path, **OPTIONS).step) == 6


def test_a_clock_that_does_not_move(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert int(tr.fit(step, start(), batches, steps=4, log_every=2, tune=False).step) == 4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("steps", [15.0, 40 / 8 * 3])
def test_a_whole_number_of_steps_may_be_a_float(steps):
    assert int(tr.fit(step, start(), batches, steps=steps, tune=False).step) == 15


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "error", [OSError("disk gone"), SystemExit("the end"), StopIteration("no more")]
)
def test_an_error_of_the_source_is_raised_and_what_is_finished_is_saved(tmp_path, error):
    def broken(i):
        if i == 3:
            raise error
        return batches(i)

    with pytest.raises(type(error), match=str(error)):
        tr.fit(step, start(), broken, steps=15.0, workdir=tmp_path, **OPTIONS)
    assert steps_of(tmp_path) == [3]
    assert int(tr.fit(step, start(), batches, steps=15, workdir=tmp_path, **OPTIONS).step) == 15


def test_a_source_that_hangs_is_left_at_a_signal_and_the_last_step_is_saved(tmp_path, hanging):
    with pytest.raises(tr.Interrupted, match=r"SIGTERM: stopped at step [1-5] of 9 and saved it"):
        tr.fit(step, start(), hanging, steps=9, workdir=tmp_path, **OPTIONS)
    assert len(steps_of(tmp_path)) == 1


def test_a_source_that_hangs_at_its_first_batch(tmp_path, hanging):
    with pytest.raises(
        tr.Interrupted, match="SIGTERM: stopped before the first batch was available; nothing"
    ):
        tr.fit(step, start(), lambda i: hanging(5), steps=9, workdir=tmp_path, **OPTIONS)
    assert not (tmp_path / "checkpoints").exists()


def test_a_thread_that_is_gone_is_an_error():
    feed = Prefetch(batches, 0, 1)
    feed()
    with pytest.raises(
        RuntimeError, match="the thread that prepares batches ended without a batch or an error"
    ):
        feed()


# The evaluation.


@pytest.mark.exhaustive
def test_the_state_is_saved_before_an_evaluation_that_raises(tmp_path):
    def broken(state):
        raise ZeroDivisionError("in the evaluation")

    options = OPTIONS | {"workdir": tmp_path, "every": 4, "save_every": 6}
    with pytest.raises(ZeroDivisionError, match="in the evaluation"):
        tr.fit(step, start(), batches, steps=8, evaluate={"v": broken}, **options)
    assert steps_of(tmp_path) == [4]
    measured = []
    tr.fit(
        step,
        start(),
        batches,
        steps=8,
        **options,
        evaluate={"v": lambda state: {"at": measured.append(int(state.step)) or 1.0}},
    )
    assert measured == [4, 8] and [
        row["step"] for row in tr.read_metrics(tmp_path) if "v/at" in row
    ] == [4, 8]


def test_a_signal_ends_an_evaluation_of_any_kind(tmp_path):
    def slow(state):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            time.sleep(600)
        except Exception:  # retrying on errors does not swallow a signal
            time.sleep(600)

    with pytest.raises(tr.Interrupted, match="SIGTERM: stopped at step 2 of 4 and saved it"):
        tr.fit(
            step,
            start(),
            batches,
            steps=4,
            evaluate={"v": slow},
            every=2,
            workdir=tmp_path,
            **OPTIONS,
        )
    assert steps_of(tmp_path) == [2]


def test_ctrl_c_while_evaluating_and_on_with_progress(tmp_path, capsys):
    """Found with a script: the resumed run showed its evaluation before it had anything to show it
    with."""
    measured = tr.evaluator(
        lambda s, b: {"loss": tr.mean((s.params["w"] * b["x"] - 1) ** 2, b["weight"])},
        {"x": np.ones(40, np.float32)},
        batch_size=8,
    )

    def run(interrupt):
        def evaluate(state):
            if interrupt and int(state.step) == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return measured(state)

        return tr.fit(
            step,
            start(),
            batches,
            steps=8,
            workdir=tmp_path,
            evaluate={"v": evaluate},
            every=4,
            log_every=4,
            progress=tr.Progress(bar=False),
            **OPTIONS,
        )

    with pytest.raises(tr.Interrupted, match="SIGINT: stopped at step 4 of 8"):
        run(True)
    assert [int(run(False).step) for _ in range(2)] == [8, 8]
    assert [row["step"] for row in tr.read_metrics(tmp_path) if "v/loss" in row] == [4, 8]
    assert "step 4/8  v/loss" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_an_evaluation_done_before_a_death_is_not_done_again(tmp_path):
    """The checkpoint is written before the evaluation and amended after it."""
    measured = []
    evaluate = {
        "v": lambda state: {
            "a": measured.append(int(state.step)) or float(state.step),
            "nan": np.nan,
        }
    }
    options = OPTIONS | {
        "workdir": tmp_path,
        "evaluate": evaluate,
        "every": 2,
        "best": "v/a",
        "best_mode": "max",
        "early_stop": tr.EarlyStop(metric="v/nan", mode="max", patience=9),
    }
    tr.fit(step, start(), batches, steps=4, **options)
    tr.fit(step, start(), batches, steps=6, **options)
    assert measured == [2, 4, 6]
    assert tr.load(tmp_path).metrics == {"v/a": 6.0}
    checkpoints = tr.Checkpoints(tmp_path / "checkpoints", best="v/a", mode="max")
    assert checkpoints.best() == 6 and checkpoints.notes()["evaluated"] == {
        "v/a": 6.0,
        "v/nan": None,
    }


# The step.


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda s: s.replace(params={"w": s.params["w"].astype(jnp.bfloat16)}),
            r"'params/w': float32\[\] became bfloat16\[\]",
        ),
        (
            lambda s: s.replace(params={"w": s.params["w"][None]}),
            r"'params/w': float32\[\] became float32\[1\]",
        ),
        (
            lambda s: s.replace(state={"new": s.params["w"]}),
            r"'state/new': nothing became float32\[\]",
        ),
        (lambda s: s.replace(opt_state=list(s.opt_state)), "PyTreeDef"),
    ],
)
def test_a_step_that_changes_the_state_is_rejected_before_the_first(tmp_path, change, text):
    def changing(state, batch):
        state, metrics = step(state, batch)
        return change(state), metrics

    with pytest.raises(
        TypeError, match=rf"must return a state with the structure, .* it takes, .*\n  .*{text}"
    ):
        tr.fit(changing, start(), batches, steps=3, workdir=tmp_path, **OPTIONS)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            lambda s, m: (s.replace(params={"w": s.params["w"].astype(jnp.bfloat16)}), m),
            TypeError,
            r"'params/w': float32\[\] became bfloat16\[\]",
        ),
        (
            lambda s, m: (s, {"other": m["loss"]}),
            ValueError,
            r"the metrics \['loss'\] became \['other'\]",
        ),
    ],
)
def test_a_batch_of_another_shape_for_which_the_step_changes_its_results(
    tmp_path, change, error, text
):
    def changing(state, batch):
        results = step(state, batch)
        return change(*results) if len(batch["x"]) == 3 else results

    with pytest.raises(error, match=text):
        tr.fit(
            changing,
            start(),
            lambda i: {"x": np.ones(8 if i < 2 else 3, np.float32)},
            steps=3,
            workdir=tmp_path,
            **OPTIONS,
        )
    assert steps_of(tmp_path) == [2]


@pytest.mark.parametrize(
    "argument, text",
    [
        ({"progress": True}, "progress=.: expected Progress, got True"),
        ({"best": 3}, "best=.: expected str, got 3"),
        ({"early_stop": "v/a"}, "early_stop=.: expected EarlyStop, got 'v/a'"),
        ({"plan": 3}, "plan=.: expected Plan"),
        ({"log_every": None}, "log_every=None: expected a number of steps"),
        ({"notes": {"a": {1}}}, "notes: 'a' is .1., which JSON"),
    ],
)
def test_arguments_of_another_kind(argument, text):
    with pytest.raises((TypeError, ValueError), match=text):
        tr.fit(step, start(), batches, steps=3, **argument)


@pytest.mark.parametrize("increase", [0, 2])
def test_a_step_that_does_not_count_is_rejected_at_the_first(tmp_path, increase):
    def still(state, batch):
        new, metrics = step(state, batch)
        return new.replace(step=state.step + increase), metrics

    with pytest.raises(
        ValueError,
        match=rf"step 0 must return a state whose `step` is 1; it is {increase}. Use state",
    ):
        tr.fit(still, start(), batches, steps=3, workdir=tmp_path, **OPTIONS)
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize(
    "result, text",
    [
        (lambda s: s, "must return .state, metrics.; got a TrainState"),
        (lambda s: (s, "loss"), "with a dict of metrics; got a str in its place"),
    ],
)
def test_a_step_that_returns_something_else(result, text):
    with pytest.raises(TypeError, match=text):
        tr.fit(lambda state, batch: result(state), start(), batches, steps=3)


@pytest.mark.parametrize(
    "evaluate, text",
    [
        (
            print,
            r"evaluate=\): expected functions by name, such as .* got <built-in function print>",
        ),
        ({"v": {"a": 1.0}}, "expected functions by name"),
        (
            {"v": lambda state: 1.0},
            "the evaluation 'v' must return a dict of metrics, such as .* got a float",
        ),
    ],
)
def test_an_evaluation_that_is_none(evaluate, text):
    with pytest.raises(TypeError, match=text):
        tr.fit(step, start(), batches, steps=1, evaluate=evaluate, tune=False)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "value, text",
    [
        (
            None,
            "returned NoneType None as 'a': expected a number, an array of numbers, tr.Histogram",
        ),
        ({"b": 1.0}, "returned dict {'b': 1.0} as 'a'"),
        ("0.5", "returned str '0.5' as 'a'"),
        (1j, "returned complex 1j as 'a'"),
        (10**400, "returned int 1000"),
        (
            np.zeros(3),
            r"'v/a' is the monitored metric, but it is float64\[3\]: expected a single number",
        ),
        ([1.0], r"'v/a' is the monitored metric, but it is list \[1.0\]"),
        (tr.Text("good"), r"'v/a' is the monitored metric, but it is Text"),
    ],
)
def test_an_evaluation_that_returns_no_number_keeps_the_state(tmp_path, value, text):
    with pytest.raises((TypeError, ValueError), match=text):
        tr.fit(
            step,
            start(),
            batches,
            steps=2,
            workdir=tmp_path,
            evaluate={"v": lambda state: {"a": value}},
            every=1,
            save_every=2,
            best="v/a",
            best_mode="max",
            **OPTIONS,
        )
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "NoneType None"),
        ("x", "str 'x'"),
        ({"b": 1.0}, "dict {'b': 1.0}"),
        (1j, "complex 1j"),
        (jax.random.key(0), r"key<fry>\[\]"),
    ],
)
def test_a_metric_of_the_step_that_is_no_number(value, text):
    with pytest.raises(
        TypeError, match=f"the metric 'a' is {text}: return a real number, or training.mean"
    ):
        tr.fit(
            lambda state, batch: (step(state, batch)[0], {"a": value}), start(), batches, steps=3
        )


def test_no_number_of_steps():
    with pytest.raises(
        ValueError, match="steps=None: expected a number of steps, an integer from 1"
    ):
        tr.fit(step, start(), batches, steps=None)


@pytest.mark.parametrize("counter", [0.0, np.zeros(2, np.int32)])
def test_a_counter_that_does_not_count(counter):
    with pytest.raises(TypeError, match=r"fit: state\.step counts the steps made, an integer; got"):
        tr.fit(step, start().replace(step=counter), batches, steps=3)


# Signals.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1"])
def test_a_closed_terminal_and_a_preemption_warning_save(tmp_path, name):
    def signalling(i):
        if i == 3:
            os.kill(os.getpid(), getattr(signal, name))
        return batches(i)

    with pytest.raises(tr.Interrupted, match=rf"{name}: stopped at step \d of 9 and saved it"):
        tr.fit(step, start(), signalling, steps=9, workdir=tmp_path, **OPTIONS)
    assert steps_of(tmp_path)


def test_what_is_ignored_or_the_users_own_stays():
    own = lambda *_: None
    signal.signal(signal.SIGUSR1, own)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with _signals.signals() as seen:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.getsignal(signal.SIGUSR1) is own and seen.received is None
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.exhaustive
def test_forked_workers_have_the_old_handlers_and_their_signals_do_not_count():
    """A worker forked by the thread that prepares batches gets SIGINT with its whole group, over a
    second later."""
    program = textwrap.dedent("""
        import os, signal, threading, time, warnings
        from fnet.training.loop import _signals
        def fork():
            pid = os.fork()
            if pid == 0:
                ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
                os.write(1, b"child %d\\n" % ours)
                try: time.sleep(60)
                except KeyboardInterrupt: os.write(1, b"child interrupted\\n")
                os._exit(0)
            return pid
        children = []
        with _signals.signals() as seen:
            thread = threading.Thread(target=lambda: children.append(fork()))
            thread.start(); thread.join()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.3)
            os.kill(children[0], signal.SIGINT)
            os.waitpid(children[0], 0)
            time.sleep(0.3)
            print("still here", seen.received, flush=True)
        print("left", flush=True)
        """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        "child 1",
        "child interrupted",
        "still here SIGINT",
        "left",
    ], done.stderr


@pytest.mark.exhaustive
def test_gnu_timeout_signals_the_group_too_and_that_is_one(tmp_path):
    """`timeout` signals its child, and then the group that the child is in."""
    program = (
        "import os, signal, time\nfrom fnet.training.loop import _signals\nwith _signals.signals() "
        "as seen:\n"
        "    for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(1.2)\n"
        "    print(seen.received)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr


def test_a_repeat_within_a_second_does_not_meet_the_old_handlers(monkeypatch):
    monkeypatch.setattr(_signals, "REST", 0.6)
    repeats = []
    before = signal.signal(signal.SIGTERM, lambda *_: repeats.append(1))
    try:
        with _signals.signals() as seen:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert seen.received == "SIGTERM" and not repeats
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_terminal_that_is_gone_does_not_end_a_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with (
        pytest.raises(BrokenPipeError),
        open(write, "w", buffering=1) as stream,
    ):  # raised when it is closed
        for bar in (False, True):
            progress = tr.Progress(stream, bar=bar)
            state = tr.fit(
                step, start(), batches, steps=2, log_every=1, progress=progress, tune=False
            )
    assert int(state.step) == 2
