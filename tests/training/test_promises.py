"""What the documentation promises of training and searches, for each option: a test that would
notice if it were false.

The promises were found by searching the documentation and the docstrings for "bit for bit", "the
same bits", "exact", "resumes", "never" and "always". A new option of `fit` or of `train` is a new
cell of the first table.
"""

import ast
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from fnet import layers as nn
from fnet import training as tr

TESTS = pathlib.Path(__file__).parents[1]
INTERRUPTED = "training/test_promises.py::test_interrupted_and_resumed_it_ends_with_the_same_bits"


@struct.dataclass
class State:
    step: jax.Array
    total: jax.Array
    ema: jax.Array


def step(state, batch):
    total = state.total * 0.75 + batch.mean()
    return State(state.step + 1, total, 0.9 * state.ema + 0.1 * total), {
        "loss": total,
        "mean": tr.mean(batch),
    }


def batches(*bad):
    return lambda i: np.full(3, np.nan if i in bad else np.sin(i), np.float32)


def measure(state):
    """Falls at first, and rises later."""
    return {
        "loss": float(state.ema) ** 2 + 0.02 * abs(int(state.step) - 9),
        "gap": float(state.total),
    }


EVALUATE = {"evaluate": {"v": measure}, "every": 4}
BEST = EVALUATE | {"best": "v/loss"}
STOP = EVALUATE | {"early_stop": tr.EarlyStop(metric="v/loss", patience=2)}
CASES = {
    "plain": (batches(), {}),
    "save_every": (batches(), {"save_every": 3}),
    "keep": (batches(), {"save_every": 3, "keep": 1}),
    "keep_every": (batches(), {"save_every": 2, "keep": 1, "keep_every": 6}),
    "log_every": (batches(), {"save_every": 5, "log_every": 3}),
    "evaluate": (batches(), EVALUATE | {"save_every": 3}),
    "best": (batches(), BEST | {"save_every": 5}),
    "restore_best": (batches(), BEST | {"save_every": 5, "restore_best": True}),
    "early_stop": (batches(), STOP | {"save_every": 3}),
    "early_stop and restore_best": (batches(), STOP | {"restore_best": True}),
    "skip": (batches(3, 7, 8), EVALUATE | {"nonfinite": "skip", "log_every": 6}),
    "skip before a log": (batches(10, 11), {"nonfinite": "skip", "log_every": 12}),
    "rollback": (batches(7), {"nonfinite": "rollback", "save_every": 3}),
    "rollback twice": (batches(7, 9), {"nonfinite": "rollback", "save_every": 3, "log_every": 4}),
    "rollback with keep=1": (batches(7), {"nonfinite": "rollback", "save_every": 3, "keep": 1}),
    "rollback to the best": (
        batches(10),
        BEST | {"nonfinite": "rollback", "save_every": 20, "every": 3},
    ),
    "rollback with early_stop": (batches(5, 13), STOP | {"nonfinite": "rollback", "save_every": 2}),
    "tensorboard": (batches(), EVALUATE | {"tensorboard": True}),
    "jit": (batches(), EVALUATE | {"jit": False, "save_every": 5}),
    "debug": (batches(), {"debug": True, "save_every": 5}),
    "on_step": (batches(), {"on_step": lambda end: end.stop() if end.step == 15 else None}),
    "on_step that logs": (batches(), {"on_step": lambda end: end.log({"twice": 2 * end.step})}),
}


class Died(Exception):
    pass


def trained(workdir, feed, options, die=None):
    """Trains for 20 steps. The `die`-th call of `on_step` raises an error."""
    calls = [0]

    def dying(end):
        calls[0] += 1
        if calls[0] == die:
            raise Died

    hooks = (options.get("on_step", lambda end: None), dying)
    state = State(jnp.int32(0), jnp.zeros(()), jnp.zeros(()))
    rest = {"tensorboard": False, "tune": False} | {
        name: value for name, value in options.items() if name != "on_step"
    }
    return tr.fit(step, state, feed, steps=20, workdir=workdir, config={}, on_step=hooks, **rest)


def rows(workdir):
    """The log without times. Lines of one step are one, because a resumed run may write them
    separately."""
    merged = {}
    for row in tr.read_metrics(workdir):
        merged.setdefault(row["step"], {}).update(
            {name: value for name, value in row.items() if not name.startswith("time/")}
        )
    return merged


def resumed(workdir, feed, options, deaths):
    for die in deaths:
        try:
            trained(workdir, feed, options, die)
        except Died:
            pass
    return trained(workdir, feed, options)


def same(a, b, folder, other):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))
    assert rows(folder) == rows(other)


@pytest.mark.quick_cases("jit")
@pytest.mark.parametrize("name", CASES)
def test_interrupted_and_resumed_it_ends_with_the_same_bits(tmp_path, name):
    feed, options = CASES[name]
    whole = trained(tmp_path / "whole", feed, options)
    for deaths in ([4], [7, 3], [8], [12]):
        folder = tmp_path / "_".join(map(str, deaths))
        same(whole, resumed(folder, feed, options, deaths), tmp_path / "whole", folder)


def test_a_rollback_passes_over_the_checkpoint_of_an_interruption(tmp_path):
    """At step 7, just before the bad batch: the run goes back to step 6 all the same."""
    feed, options = CASES["rollback"]
    assert float(trained(tmp_path / "whole", feed, options).total) == float(
        resumed(tmp_path / "parts", feed, options, [7]).total
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("die", range(1, 26))
@pytest.mark.parametrize(
    "name",
    [
        "rollback",
        "rollback twice",
        "rollback with keep=1",
        "rollback to the best",
        "skip",
        "skip before a log",
        "rollback with early_stop",
    ],
)
def test_interrupted_at_any_call(tmp_path, name, die):
    feed, options = CASES[name]
    whole = trained(tmp_path / "whole", feed, options)
    same(
        whole,
        resumed(tmp_path / "parts", feed, options, [die]),
        tmp_path / "whole",
        tmp_path / "parts",
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("nonfinite", ["stop", "skip", "rollback"])
def test_interrupted_it_ends_with_the_same_error(tmp_path, nonfinite):
    """All batches from the ninth on are bad: also the number of rollbacks is that of the whole run."""
    feed, options = (
        batches(*range(8, 40)),
        {"nonfinite": nonfinite, "save_every": 3, "log_every": 4},
    )
    texts = []
    for name, deaths in (("whole", []), ("parts", [5, 3])):
        with pytest.raises(tr.Diverged) as error:
            resumed(tmp_path / name, feed, options, deaths)
        texts.append(str(error.value).partition(";")[0])
    assert texts[0] == texts[1]


@pytest.mark.exhaustive
def test_train_interrupted_and_resumed(tmp_path):
    """With loaded arrays, dropout, statistics of batches, weights of examples, a moving average,
    early stopping and the best state."""
    rng = np.random.default_rng(0)
    x, y, weight = (
        rng.normal(size=(40, 3)).astype("f"),
        rng.integers(0, 2, 40),
        rng.random(40).astype("f"),
    )
    model = nn.Sequential(nn.Dense(8), nn.BatchNorm(), jax.nn.relu, nn.Dropout(0.3), nn.Dense(2))
    params, state = model.init(jax.random.key(7), x)

    def run(folder, die=None):
        def dying(end):
            if end.step == die:
                raise Died

        return tr.train(
            model,
            tr.Batches((x, y, weight), 8),
            optax.softmax_cross_entropy_with_integer_labels,
            optax.adam(0.05),
            epochs=6,
            validation=(x, y),
            ema=0.9,
            seed=3,
            params=params,
            state=state,
            workdir=tmp_path / folder,
            metrics={"accuracy": lambda logits, y: logits.argmax(-1) == y},
            config={},
            restore_best=True,
            early_stop=tr.EarlyStop(metric="validation/loss", patience=4),
            tensorboard=False,
            on_step=dying,
        )

    whole = run("whole")
    for die in (3, 10, 17):
        with pytest.raises(Died):
            run("parts", die)
    same(whole, run("parts"), tmp_path / "whole", tmp_path / "parts")


# The tables.

RESUMES = {  # "Resuming is exact", "bit for bit" (fit, docs/reliability.md, docs/how_to/resume.md), for each option
    "steps": "training/test_fit_plan.py::test_it_goes_on_under_another_plan_and_says_so",
    "workdir": "training/test_object_stores.py::test_a_run_is_what_it_is_in_a_folder",
    "evaluate": f"{INTERRUPTED}[evaluate]",
    "every": f"{INTERRUPTED}[evaluate]",
    "log_every": f"{INTERRUPTED}[log_every]",
    "save_every": f"{INTERRUPTED}[save_every]",
    "keep": f"{INTERRUPTED}[keep]",
    "keep_every": f"{INTERRUPTED}[keep_every]",
    "best": f"{INTERRUPTED}[best]",
    "best_mode": f"{INTERRUPTED}[best]",
    "early_stop": f"{INTERRUPTED}[early_stop]",
    "nonfinite": f"{INTERRUPTED}[rollback twice]",
    "debug": f"{INTERRUPTED}[debug]",
    "config": "training/test_run_folder.py::test_a_run_is_resumed_with_its_configuration_only",
    "restart": "training/test_run_folder.py::test_restarting_removes_the_run_when_all_else_is_known_to_be_right",
    "restore_best": f"{INTERRUPTED}[restore_best]",
    "notes": "training/test_checkpoints.py::test_notes_come_back",
    "progress": "training/test_endings.py::test_ctrl_c_while_evaluating_and_on_with_progress",
    "on_step": "training/test_callbacks.py::test_a_resumed_run_calls_it_once_for_each_step",
    "tensorboard": f"{INTERRUPTED}[tensorboard]",
    "jit": f"{INTERRUPTED}[jit]",
    "tune": "training/test_resume.py::test_tune_goes_on_with_the_rules_of_the_beginning",
    "plan": "training/test_fit_plan.py::test_the_same_bits_after_a_death",
    "profile_steps": "training/test_profile_steps.py",
    "check_devices": "training/test_check_devices.py::test_once_for_all_runs_and_processes",
}
TRAINS = dict.fromkeys(
    (
        *("epochs", "validation", "metrics", "inputs", "targets", "seed", "ema", "every", "steps"),
        "params",  # with the state
    ),
    "training/test_promises.py::test_train_interrupted_and_resumed",
)
SITUATIONS = {  # "resumes exactly" in other situations
    "loss scale, moving average, random keys": "training/test_resume.py::test_died_and_gone_on_it_ends_with_the_same_bits",
    "a signal in an evaluation": "training/test_resume.py::test_interrupted_while_evaluating_it_evaluates_again",
    "a damaged checkpoint": "training/test_resume.py::test_a_fallback_goes_on_to_the_same_end",
    "killed at any time": "training/test_torture.py::test_a_short_torture",
    "a function of on_step": "training/test_callbacks.py::test_what_is_left_to_be_done_at_its_step_is_done_after_the_restart",
    "prefetched batches": "training/test_prefetch.py::test_in_order_and_ahead",
    "shuffled batches": "training/test_batches.py::test_a_batch_depends_on_seed_and_step_alone",
    "windows of tokens": "training/test_windows.py::test_a_batch_is_a_function_of_seed_and_step",
    "augmentation": "training/test_augment.py::test_pure_jitted_and_shaped",
    "iterators": "training/test_iterators.py::test_resumed_is_unbroken_bit_for_bit",
    "several processes, each with its own data": "training/test_iterators.py::test_each_process_goes_on_where_it_was",
    "several processes, sharded": "training/test_sharded_checkpoints.py::test_two_processes_save_and_two_or_one_restore",
    "other devices, to rounding": "training/test_resume.py::test_other_devices_take_over_to_rounding",
    "an error ends it in the same way": "training/test_promises.py::test_interrupted_it_ends_with_the_same_error",
    "a population": "search/test_population.py::test_fit_logs_saves_and_resumes_bit_by_bit",
    "population-based training": "search/test_algorithms.py::test_pbt_resumes_bit_by_bit",
    "federated averaging": "federated/test_federated.py::test_fit_resumes_bit_by_bit",
    "halving": "search/test_algorithms.py::test_halving_continues_its_own_search",
    "a sweep": "search/test_sweep.py::test_a_killed_trial_continues",
}
OTHERS = {  # "never", "always", "exactly"
    "fit never saves a state with NaN": "training/test_nonfinite.py::test_every_leaf_and_metric_is_watched",
    "fit never removes files that it did not write": "training/test_run_folder.py::test_files_of_somebody_else_are_never_removed",
    "the state after the last step is evaluated and saved": "training/test_load.py::test_the_best_state_is_saved_when_it_occurs",
    "restore never omits or initializes a leaf": "training/test_checkpoints.py::test_all_that_differs_is_listed",
    "restore never converts unasked": "training/test_checkpoints.py::test_a_cast_is_made_on_request_alone",
    "restored values have the same bits": "training/test_checkpoints.py::test_round_trip_of_every_kind_of_leaf",
    "damaged checkpoints are never deleted": "training/test_checkpoint_damage.py::test_the_damaged_is_set_aside_and_the_one_before_it_used",
    "no damaged bit passes": "training/test_checkpoint_damage.py::test_no_flipped_bit_passes",
    "a run never starts again silently": "training/test_checkpoint_damage.py::test_none_good_is_an_error_today_and_tomorrow",
    "a run does not resume another one": "training/test_run_folder.py::test_other_data_is_another_run",
    "a search does not answer for another one": "search/test_algorithms.py::test_halving_does_not_answer_for_another_search",
    "a population does not answer for another one": "search/test_algorithms.py::test_a_population_is_not_resumed_with_other_arguments",
    "a sweep with other settings is refused": "search/test_sweep.py::test_choices_of_other_types_are_another_sweep",
    "a trial never runs twice at a time": "search/test_sweep.py::test_two_workers_of_which_one_is_killed",
    "fit never waits forever": "training/test_endings.py::test_a_source_that_hangs_is_left_at_a_signal_and_the_last_step_is_saved",
    "an evaluation drops and repeats no example": "training/test_metrics.py::test_evaluator_is_exact_and_compiles_once",
    "counts are exact": "training/test_metrics.py::test_an_evaluation_counts_beyond_float32",
    "every example occurs once in an epoch": "training/test_batches.py::test_every_example_once_per_epoch",
    "each token is predicted once": "training/test_windows.py::test_stretches_predict_each_token_once",
    "each example is in one part, and proportions are kept": "training/test_tables.py::test_stratified_parts_of_any_number",
    "an incomplete download is never read": "training/test_downloads.py::test_a_connection_that_ends_early",
    "a replaced member is no parent": "search/test_algorithms.py::test_replaced_members_are_no_parents_and_no_diverged_member_is_copied",
    "a report executes nothing of a run": "report/test_report.py::test_any_content_gives_a_report",
}
POSITIONAL = {"step", "state", "batches", "model", "data", "loss", "optimizer", "options"}


@pytest.mark.parametrize(
    ("function", "table"), [(tr.fit, RESUMES), (tr.train, TRAINS)], ids=["fit", "train"]
)
def test_no_option_is_without_a_test(function, table):
    assert table.keys() == inspect.signature(function).parameters.keys() - POSITIONAL


def test_the_tests_of_the_tables_exist():
    for promise, cell in [*RESUMES.items(), *TRAINS.items(), *SITUATIONS.items(), *OTHERS.items()]:
        file, _, rest = cell.partition("::")
        name, _, case = rest.partition("[")
        tree = ast.parse((TESTS / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names or (not name and any(each.startswith("test_") for each in names)), (
            promise,
            cell,
        )
        assert not case or case.removesuffix("]") in CASES, (promise, cell)
