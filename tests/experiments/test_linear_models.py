"""Three losses against solvers that nobody here wrote, and what hidden layers are good for."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments" / "linear_models.py"


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam and L-BFGS mix floats with an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def script():
    if str(SCRIPT.parent) not in sys.path:  # where a script finds its neighbors
        sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("linear_models", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tumours(script):
    return script.tumours()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name, loss",
    [
        ("linear regression", lambda s, y: (s - y) ** 2),
        ("logistic regression", lambda s, y: np.log1p(np.exp(-y * s))),
        ("linear SVM", lambda s, y: np.maximum(0, 1 - y * s)),
    ],
)
def test_the_risk_is_what_the_docstring_says(script, name, loss):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((7, 3), np.float32), rng.standard_normal((3, 1), np.float32)
    y, bias = np.sign(rng.standard_normal(7)).astype(np.float32), np.ones(1, np.float32)
    risk = script.empirical_risk(script.network(), script.LOSSES[name], x, y, 0.3)
    expected = loss((x @ kernel)[:, 0] + 1, y).mean() + 0.15 * (kernel**2).sum()
    got = risk({"head": {"kernel": kernel, "bias": bias}})
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_least_squares_equals_the_closed_form(script, tumours):
    (x, y), _ = tumours
    params = script.fit_linear("linear regression", x, y, 0.1)["head"]
    kernel, bias = script.least_squares(x.astype(np.float64), y.astype(np.float64), 0.1)
    np.testing.assert_allclose(params["kernel"][:, 0], kernel, atol=1e-5 * np.abs(kernel).max())
    np.testing.assert_allclose(params["bias"], [bias], rtol=1e-5)


def test_the_closed_form_equals_ridge_regression(script, tumours):
    from sklearn.linear_model import Ridge

    (x, y), _ = tumours
    x, y = x.astype(np.float64), y.astype(np.float64)
    theirs = Ridge(alpha=0.1 / 2 * len(x), solver="svd").fit(x, y)
    kernel, bias = script.least_squares(x, y, 0.1)
    np.testing.assert_allclose(kernel, theirs.coef_, rtol=1e-9)
    np.testing.assert_allclose(bias, theirs.intercept_, rtol=1e-9)


@pytest.mark.exhaustive
def test_in_float64_the_agreement_is_better_still(script, tumours):
    (x, y), _ = tumours
    x, y = x.astype(np.float64), y.astype(np.float64)
    kernel, _ = script.least_squares(x, y, 0.01)
    with jax.enable_x64(True):
        start = {"head": {"kernel": np.zeros((30, 1)), "bias": np.zeros(1)}}
        loss = script.LOSSES["linear regression"]
        risk = script.empirical_risk(script.network(), loss, x, y, 0.01)
        params, risks = script.minimise(risk, start, script.optax.lbfgs(), 400)
        params, risks = jax.device_get((params, risks))
    np.testing.assert_allclose(
        params["head"]["kernel"][:, 0], kernel, atol=1e-6 * np.abs(kernel).max()
    )
    assert risks.dtype == np.float64 and risks[0] == 1 and np.all(np.diff(risks) <= 1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name, solver, tolerance",
    [("logistic regression", "LogisticRegression", 1e-4), ("linear SVM", "SVC", 1e-2)],
)
def test_the_others_equal_scikit_learns(script, tumours, name, solver, tolerance):
    (x, y), (test_x, test_y) = tumours
    params = script.fit_linear(name, x, y, 0.1)
    how, theirs = script.solved_otherwise(name, x, y, 0.1)
    assert how == solver
    risk = script.empirical_risk(script.network(), script.LOSSES[name], x, y, 0.1)
    np.testing.assert_allclose(risk(params), risk(theirs), rtol=1e-5)
    assert script.apart(params, theirs) < tolerance
    assert script.accuracy(script.network(), params, test_x, test_y) > 0.95


def test_tumours_are_standardised_by_the_training_set_alone(tumours):
    (x, y), (test_x, test_y) = tumours
    assert x.shape == (455, 30) and test_x.shape == (114, 30) and x.dtype == y.dtype == np.float32
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=0), 1, atol=1e-5)
    assert np.abs(test_x.mean(axis=0)).max() > 1e-3
    assert set(y) == set(test_y) == {-1, 1}
    assert abs((y == 1).mean() - (test_y == 1).mean()) < 0.01


def test_the_spirals(script):
    x, y = script.spirals(2000, 0.0, 3)
    again, _ = script.spirals(2000, 0.0, 3)
    np.testing.assert_array_equal(x, again)
    assert (y == 1).sum() == (y == -1).sum() == 1000
    radius = np.linalg.norm(x, axis=1)
    assert 0.1 < radius.min() and radius.max() <= 1
    angle = 4 * np.pi * radius + np.pi * (y == -1)
    arm = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    np.testing.assert_allclose(x, radius[:, None] * arm, atol=1e-5)


@pytest.mark.exhaustive
def test_every_hidden_layer_helps_and_the_picture_shows_it(script, tmp_path, capsys):
    panels, points = script.compare_depths(12, 1500, 0.03, 0)
    lines = re.findall(r"layers? +([\d.]+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.M)
    risks, _, test = np.array(lines, float).T
    assert risks[0] > risks[1] > risks[2]
    assert test[0] < 0.75 and 0.8 < test[1] < test[2] and test[2] > 0.97
    for accuracy, (title, scores) in zip(test, panels):
        assert f"test accuracy {accuracy:.1%}" in title
        assert scores(points[0][:5]).shape == (5, 1)

    path = tmp_path / "decision_regions.png"
    script.draw(panels, points, path)
    picture = matplotlib.image.imread(path)[..., :3]
    assert picture.shape == (504, 1440, 3)
    reddish = (picture[..., 0] > picture[..., 2] + 0.2).mean()
    bluish = (picture[..., 2] > picture[..., 0] + 0.2).mean()
    assert reddish > 0.2 and bluish > 0.2


def run(*args):
    command = [sys.executable, str(SCRIPT), *args]
    env = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


@pytest.mark.exhaustive
def test_the_script_from_end_to_end(tmp_path):
    done = run("--steps=30", f"--workdir={tmp_path / 'a' / 'b'}")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name in ("linear regression", "logistic regression", "linear SVM"):
        assert re.search(rf"^{name} +0\.\d+ +0\.9\d+ +0\.9\d+ +0\.\d+ ", done.stdout, re.M), (
            done.stdout
        )
    picture = tmp_path / "a" / "b" / "decision_regions.png"
    assert done.stdout.endswith(f"decision regions: {picture}\n")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_wrong_arguments(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(f"--workdir={tmp_path / 'file'}")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --workdir={tmp_path / 'file'} cannot be created (File exists): "
        "choose another folder\n"
    )
