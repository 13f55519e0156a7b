"""Reports of runs: whole, damaged, hostile and of other programs. They never raise and never
execute what they show."""

import html
import json
import os
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from html_checks import Page, check_page
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import parallel, report
from fnet import training as tr
from fnet.cli import main
from fnet.report import _write as write
from fnet.report._read import thinned

pytestmark = pytest.mark.usefixtures("quickly")


def step(state, batch):
    loss = jnp.mean((state.params["w"] * batch["x"] - 3 * batch["x"]) ** 2)
    return state.apply(optax.sgd(0.1), {"w": 2 * (state.params["w"] - 3)}), {"loss": loss}


def fit(workdir, steps=20, x=None, **options):
    x = np.linspace(0, 1, 16, dtype=np.float32) if x is None else x
    state = tr.TrainState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
    evaluate = {
        "test": lambda state: {"loss": 1 / float(state.step), "accuracy": float(state.step) / 100}
    }
    options = {
        "evaluate": evaluate,
        "every": 5,
        "log_every": 2,
        "tensorboard": False,
        "tune": False,
    } | options
    return tr.fit(
        step, state, tr.Batches({"x": x}, batch_size=8), steps=steps, workdir=workdir, **options
    )


def written(*folders):
    """The text of a report and its data, checked."""
    path = report.write(folders)
    text = path.read_text()
    return text, check_page(text)


def test_a_run(tmp_path):
    fit(
        tmp_path / "one",
        config={"rate": 0.1, "name": "<b>x</b>"},
        notes={"policy": "float32, because"},
        best="test/loss",
        best_mode="min",
    )
    rng = np.random.default_rng(0)
    tr.save_predictions(
        tmp_path / "one",
        rng.dirichlet(np.ones(3), 40),
        rng.integers(0, 3, 40),
        classes="abc",
        images=rng.random((40, 4, 4, 3)),
    )
    (tmp_path / "one" / "sample.txt").write_text("Once <i>upon</i> a time")
    text, data = written(tmp_path / "one")
    for section in (
        "overview",
        "curves",
        "speed",
        "predictions",
        "samples",
        "configuration",
        "environment",
        "checkpoints",
        "log",
    ):
        assert f'<section id="{section}">' in text, section
    assert (
        "finished" in text
        and "20 of 20" in text
        and "best 0.05" not in text
        and "Once &lt;i&gt;upon" in text
    )
    assert "&lt;b&gt;x&lt;/b&gt;" in text and "<b>x</b>" not in text and "float32, because" in text
    assert text.count('src="data:image/png;base64,') == 24 and "jaxlib" in text
    loss = data["charts"][0]
    assert loss["title"] == "loss" and {series["split"] for series in loss["series"]} == {
        "train",
        "test",
    }
    assert next(s for s in loss["series"] if s["split"] == "test")["steps"] == [5, 10, 15, 20]
    assert {chart["title"] for chart in data["charts"] if chart["section"] == "speed"} >= {
        "steps per second"
    }


def test_the_plan_and_profiles_of_a_run(tmp_path):
    example = {"x": np.ones(8, np.float32)}
    init = lambda key: tr.TrainState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
    plan = parallel.plan(step, init, example, devices=jax.devices()[:2], compile=False)
    fit(tmp_path, 6, plan=plan, profile_steps=range(3, 5))
    text, _ = written(tmp_path)
    table = html.unescape(re.search(r'<pre class="wide">(.*?)</pre>', text, re.S)[1])
    assert table.strip() == plan.explain().strip() and all(
        str(each.strategy) in table for each in plan.candidates
    )
    profile = text[text.index('<section id="profile">') : text.index('<section id="environment">')]
    rows = json.loads((tmp_path / "profile" / "3-5" / "profile.json").read_text())
    assert "steps 3 to 5" in profile and f"{1e3 * rows[-1]['seconds']:.3g}</td>" in profile
    (tmp_path / "profile" / "3-5" / "profile.json").write_text(
        '[{"path": "<b>", "seconds": "x", "flops": true}, 3]'
    )
    text, _ = written(tmp_path)
    assert "&lt;b&gt;" in text and "<b>" not in text[text.index('id="profile"') :]
    fit(tmp_path, 2, restart=True)
    assert report.read(tmp_path).plan == ""


def test_seeds_are_one_group_and_differences_come_first(tmp_path):
    for name, config in {
        "a": {"rate": 1, "seed": 0},
        "b": {"rate": 1, "seed": 1},
        "c": {"rate": 2, "seed": 0},
    }.items():
        fit(tmp_path / name, 4, config={"width": 3} | config)
    text, data = written(*(tmp_path / name for name in "abc"))
    assert [(run["name"], run["group"]) for run in data["runs"]] == [("a", 0), ("b", 0), ("c", 1)]
    assert "2 of 3 fields differ: seed, rate" in text or "2 of 3 fields differ: rate, seed" in text
    rows = re.findall(
        r"<tr( class=differs)?><td>(\w+)</td>", text[text.index('id="configuration"') :]
    )
    assert {name for marked, name in rows[:2] if marked} == {"rate", "seed"} and rows[2] == (
        "",
        "width",
    )


def test_runs_with_the_same_name_are_told_apart(tmp_path):
    for above in "xy":
        fit(tmp_path / above / "run", 2)
    _, data = written(tmp_path / "x" / "run", tmp_path / "y" / "run")
    assert [run["name"] for run in data["runs"]] == ["x/run", "y/run"]


def test_events_are_recorded(tmp_path):
    sizes = lambda i: {"x": np.ones(4 + i // 5, np.float32)}
    state = tr.TrainState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
    tr.fit(
        step,
        state,
        sizes,
        steps=8,
        workdir=tmp_path / "a",
        tensorboard=False,
        tune=False,
        log_every=1,
    )
    texts = [text for _, _, text in report.read(tmp_path / "a").events]
    assert texts[0] == "began at step 0 of 8" and texts[-1] == "finished at step 8"
    assert any(
        "step 6 is compiled again: batch/x was float32[4], is float32[5]" in text for text in texts
    )
    with pytest.raises(tr.Diverged):
        fit(tmp_path / "b", x=np.full(16, np.inf, np.float32))
    text, _ = written(tmp_path / "b")
    assert "⚠ ended by Diverged" in text and 'class="state bad"' in text and "Traceback" not in text
    fit(tmp_path / "a2", 4)
    fit(tmp_path / "a2", 4, restart=True)
    assert [text for _, _, text in report.read(tmp_path / "a2").events].count(
        "began at step 0 of 4"
    ) == 1


@pytest.mark.parametrize("restore_best", [False, True])
def test_a_run_that_stopped_early_is_finished(tmp_path, restore_best):
    rule = tr.EarlyStop(metric="test/loss", mode="max", patience=2)
    fit(tmp_path, early_stop=rule, restore_best=restore_best)
    assert write.status(report.read(tmp_path)) == ("finished, stopped early", "good")
    with (tmp_path / "events.jsonl").open("a") as file:  # as an earlier version wrote it
        file.write(
            '{"step": 15, "time": 1.0, "text": "returning the state of step 5, the best by test/loss"}\n'
        )
    assert write.status(report.read(tmp_path)) == ("finished, stopped early", "good")


def test_a_run_in_progress(tmp_path):
    fit(tmp_path, 10)
    (tmp_path / "events.jsonl").unlink()
    lines = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(lines[:-30])  # the last line is being written
    (tmp_path / "config.json").write_text('{"steps": 1000}')
    for folder in (tmp_path / "checkpoints").iterdir():
        if folder.is_dir():
            (folder / "manifest.json").unlink()
    found = report.read(tmp_path)
    assert (
        found.notes == []
        and found.steps == 1000
        and "in progress, or killed" in written(tmp_path)[0]
    )


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
BAD = {
    "nothing": {},
    "not JSON": {
        "metrics.jsonl": b"hello\n\xff\xfe\n{\n",
        "config.json": b"{",
        "predictions.json": b"\0",
        "events.jsonl": b"x\n\n",
    },
    "other JSON": {
        "metrics.jsonl": b"3\n[]\nnull\n{}\n",
        "config.json": b"[1]",
        "predictions.json": b"3",
        "summary.json": b"{}",
        "events.jsonl": b'{"text": 3}\n{"text": "a", "step": "b", "time": "c"}\n',
    },
    "another program": {
        "metrics.jsonl": b'{"epoch": 1, "loss": 0.5}\n{"epoch": 2, "loss": 0.25}\n'
    },
    "numbers": {
        "metrics.jsonl": b'{"step": 1, "a": NaN, "b": Infinity, "c": 1e999, "d": "x", "e": true, "g": {}}\n'
        b'{"step": 2, "a": 1, "b": 1, "c": -1e308, "g": ' + b"9" * 400 + b"}\n"
        b'{"step": -1, "a": 1}\n{"step": 99999999999999999999999}\n{"step": 1.5, "a": 2}\n'
    },
    "deep": {
        "metrics.jsonl": b"[" * 100_000 + b"\n",
        "config.json": b'{"a":' * 100_000,
        "summary.json": b"[" * 100_000,
    },
    "names": {
        "metrics.jsonl": json.dumps(
            {
                "step": 1,
                NASTY: 1.0,
                "train/" + NASTY: 2.0,
                "": 3,
                "/": 4,
                "\ud800": 5,
                "x" * 10_000: 6,
            }
        ).encode()
        + b"\n",
        "config.json": json.dumps({NASTY: NASTY, "long": "y" * 100_000, "list": [NASTY]}).encode(),
        "events.jsonl": json.dumps({"step": 1, "time": 1e300, "text": NASTY}).encode() + b"\n",
        "sample.txt": NASTY.encode() + b"\0\xff",
        "summary.json": json.dumps(
            [
                {"path": NASTY, "output": [NASTY], "parameters": NASTY, "share": jnp.nan},
                {"path": 3, "output": 4, "parameters": 1e400, "share": "x"},
            ]
        ).encode(),
        "predictions.json": json.dumps(
            {
                "classes": [NASTY, "b"],
                "confusion": [[1, 2], [3, 4]],
                "mistakes": [
                    {"label": 0, "guess": 1, "probability": "x", "image": "javascript:alert(1)"},
                    {"label": 0, "guess": 1, "image": 'data:image/png;base64,AA"onerror="alert(1)'},
                    {"label": 7, "guess": 0},
                ],
            }
        ).encode(),
    },
    "wrong shapes": {
        "predictions.json": b'{"classes": ["a", "b"], "confusion": [[1, 2], [3]]}',
        "metrics.jsonl": b"",
    },
    "wrong counts": {"predictions.json": b'{"classes": ["a"], "confusion": [[-1]], "mistakes": 3}'},
    "wrong mistakes": {
        "predictions.json": b'{"classes": ["a"], "confusion": [[1]], "mistakes": [3, null]}'
    },
    "many metrics": {
        "metrics.jsonl": json.dumps({"step": 1} | {f"m{i}": i for i in range(2000)}).encode()
    },
    "checkpoints": {"checkpoints": b"a file"},
    "a checkpoint": {
        "checkpoints/3/manifest.json": b'{"metrics": [1], "notes": 3}',
        "checkpoints/x": b"",
        "checkpoints/4/manifest.json": b'{"metrics": {"a": "b", "c": 1}, "notes": {"chip": 3, "fit": 3}}',
        "checkpoints/5.damaged/manifest.json": b"",
    },
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_give_a_report_with_a_note(tmp_path, name):
    for file, content in BAD[name].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(content)
    text, _ = written(tmp_path)
    notes = report.read(tmp_path).notes
    assert notes and 'class="note"' in text
    assert "<img src=x" not in text and "<script>alert" not in text and "javascript:" not in text
    assert Page(text).tags["script"] == 2 and len(text) < 500_000


def test_files_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")  # which would block a reader for ever
    (tmp_path / "config.json").mkdir()
    (tmp_path / "predictions.json").symlink_to("/dev/zero")
    (tmp_path / "summary.json").symlink_to(tmp_path / "summary.json")
    notes = report.read(tmp_path).notes
    named = {note.partition(":")[0] for note in notes}
    assert named >= {"config.json", "predictions.json", "summary.json"}
    assert "metrics.jsonl: not a regular file" in notes
    written(tmp_path)


def test_a_huge_log_is_thinned(tmp_path):
    rng = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for i in range(30_000):
            file.write(
                json.dumps(
                    {"step": i, "a": 100 if i == 20_001 else None if i == 7 else rng.random()}
                )
                + "\n"
            )
    text, data = written(tmp_path)
    values = data["charts"][0]["series"][0]["values"]
    assert (
        len(values) < 2000
        and max(value for value in values if value is not None) == 100
        and len(text) < 200_000
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=5000))
def test_thinning_keeps_ends_and_extremes(values):
    steps, kept = thinned(list(range(len(values))), values)
    assert len(steps) <= 3100 and steps == sorted(set(steps)) and [values[i] for i in steps] == kept
    finite = [value for value in values if value is not None]
    if finite:
        assert {min(finite), max(finite)} <= set(kept)


FILES = ["metrics.jsonl", "config.json", "events.jsonl", "predictions.json", "summary.json"]


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(FILES),
        st.binary(max_size=300)
        | st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        ["step", "text", "classes", "confusion", "mistakes", "a", "path"]
                    ),
                    inner,
                    max_size=5,
                )
            ),
            max_leaves=20,
        ).map(lambda tree: json.dumps(tree).encode()),
    )
)
def test_any_content_gives_a_report(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("run")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    written(folder)


def test_the_command(tmp_path, capsys):
    fit(tmp_path / "a", 4)
    assert main(["report", str(tmp_path / "a")]) == 0
    assert re.fullmatch(r".*/a/report.html: [\d,]+ bytes\n", capsys.readouterr().out)
    assert (
        main(["report", str(tmp_path / "a"), "-o", str(tmp_path)]) == 0
        and (tmp_path / "report.html").exists()
    )
    for folder, message in {
        "missing": "missing: no such folder",
        "s3://bucket/run": "expected a local folder",
        f"{tmp_path}/report.html": "is a file, expected a folder",
    }.items():
        assert main(["report", folder]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    with pytest.raises(ValueError, match="expected the folder of at least one run"):
        report.write([])


def test_predictions(tmp_path):
    rng = np.random.default_rng(1)
    probabilities, labels = rng.dirichlet(np.ones(4), 50), rng.integers(0, 4, 50)
    found = json.loads(tr.save_predictions(tmp_path, probabilities, labels, worst=5).read_text())
    guesses = probabilities.argmax(1)
    assert found["confusion"] == [
        [int(((labels == i) & (guesses == j)).sum()) for j in range(4)] for i in range(4)
    ]
    wrong = sorted((-probabilities[i].max(), i) for i in range(50) if guesses[i] != labels[i])
    assert [each["index"] for each in found["mistakes"]] == [i for _, i in wrong[:5]]
    assert all("image" not in each for each in found["mistakes"])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            (np.ones(3), np.ones(3, int)),
            {},
            r"expected probabilities \[examples, classes\] and labels \[examples\]",
        ),
        ((np.ones((3, 2)), np.array([0, 1, 2])), {}, "expected labels from 0 to 1, got 0 to 2"),
        ((np.ones((3, 2)), np.array([0, -1, 1])), {}, "expected labels from 0 to 1, got -1 to 1"),
        (
            (np.ones((3, 2)), np.array([0.0, 1.0, 0.5])),
            {},
            "expected labels to be integers, got float64",
        ),
        (
            (np.array([[1, 0], [0, np.nan]]), np.zeros(2, int)),
            {},
            "a probability of example 1 is NaN: has the run div",
        ),
        ((np.ones((3, 2)), np.zeros(3, int)), {"classes": "abc"}, "3 names of 2 classes"),
        (
            (np.ones((3, 2)), np.zeros(3, int)),
            {"images": np.ones((2, 4, 4, 1))},
            "2 images of 3 examples",
        ),
    ],
    ids=["shape", "label", "ignored", "fractions", "nan", "names", "images"],
)
def test_wrong_predictions(tmp_path, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        tr.save_predictions(tmp_path, *arguments, **options)
