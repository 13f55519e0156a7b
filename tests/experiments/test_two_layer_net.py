"""The three versions agree, and the script would say so if they did not."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments" / "two_layer_net.py"
OPTIONS = dict(steps=12, batch_size=32, width=16, rate=1.0, seed=0, print_every=5)


@pytest.fixture(scope="module")
def script():
    if str(SCRIPT.parent) not in sys.path:  # where a script finds its neighbors
        sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("two_layer_net", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(script):
    return script.datasets.load("digits")


def run(*args):
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.exhaustive
def test_the_three_agree(script, data, capsys):
    trained = script.train(data, **OPTIONS)
    out = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\S+)$", out, re.M)
    assert [row[0] for row in rows] == ["1", "5", "10", "12"]
    for _, *losses, apart in rows:
        np.testing.assert_allclose([float(loss) for loss in losses], float(losses[0]), rtol=1e-5)
        assert float(apart) <= 1e-5
    assert "all three agreed at each of 12 steps" in out
    assert float(rows[-1][1]) < float(rows[0][1])
    a, b, c = trained.values()
    chex.assert_trees_all_close(a, b, c, rtol=1e-4, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrong", [1.0001, np.nan])
@pytest.mark.parametrize("version", ["step_by_hand", "step_with_grad"])
def test_a_wrong_step_is_noticed(script, data, monkeypatch, version, wrong):
    right = getattr(script, version)

    def broken(params, x, labels, rate):
        loss, new = right(params, x, labels, rate)
        new["hidden"]["kernel"] *= wrong
        return loss, new

    monkeypatch.setattr(script, version, broken)
    with pytest.raises(SystemExit, match=r"step 1: the three differ by \S+, more than 1e-05"):
        script.train(data, **OPTIONS)


def test_the_difference_is_the_largest_of_all_arrays(script):
    a = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([4.0])}
    b = {"x": jnp.array([1.0, 2.0]), "y": jnp.array([5.0])}
    assert float(script.difference(a, b)) == pytest.approx(0.2)
    assert float(script.difference(a, a)) == 0


X = np.concatenate([np.linspace(-85, 85, 3001), [0.0]]).astype(np.float32)


@pytest.mark.exhaustive
def test_the_sigmoid_is_exact_everywhere(script):
    e = np.exp(-np.abs(X.astype(np.float64)))
    value, slope = np.where(X >= 0, 1, e) / (1 + e), e / (1 + e) ** 2
    np.testing.assert_allclose(script.sigmoid(X), value, rtol=1e-6)
    np.testing.assert_allclose(script.sigmoid(X), jax.nn.sigmoid(X), rtol=1e-6)
    slopes = jax.jit(jax.vmap(jax.grad(script.sigmoid)))
    np.testing.assert_allclose(slopes(X), slope, rtol=1e-6)
    # That is more than jax.nn.sigmoid's s (1 - s) gives: it is zero where s rounds to one.
    assert jax.grad(jax.nn.sigmoid)(20.0) == 0 < jax.grad(script.sigmoid)(20.0)
    middle = X[np.abs(X) < 5]
    theirs = jax.vmap(jax.grad(jax.nn.sigmoid))(middle)
    np.testing.assert_allclose(slopes(middle), theirs, rtol=1e-5)


@pytest.mark.exhaustive
def test_the_sigmoid_is_finite_at_the_ends(script):
    ends = jnp.array([-jnp.inf, -1e30, -1e4, 1e4, 1e30, jnp.inf])
    np.testing.assert_array_equal(script.sigmoid(ends), [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(jax.vmap(jax.grad(script.sigmoid))(ends), np.zeros(6))
    assert jnp.isnan(script.sigmoid(jnp.nan))
    plain = lambda x: 1 / (1 + jnp.exp(-x))
    assert jnp.isnan(jax.grad(plain)(-1e4))


@pytest.mark.exhaustive
def test_the_sigmoids_gradient_numerically(script):
    x = jax.random.normal(jax.random.key(0), (3, 4))
    chex.assert_numerical_grads(script.sigmoid, (x,), order=1, modes=("rev",))


@pytest.mark.exhaustive
def test_the_script_from_end_to_end():
    done = run("--steps=400", "--print_every=200")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "all three agreed at each of 400 steps" in done.stdout
    assert re.search(r"^ -1000 +nan +0 +0 +0$", done.stdout, re.M)
    last = re.findall(
        r"^test accuracy (0\.\d{4})  (by hand|with grad|with layers)$", done.stdout, re.M
    )
    assert len(last) == 3 and min(float(value) for value, _ in last) > 0.93


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "argument, message",
    [
        ("--batch_size=2000", "flag --batch_size=2000: 2000 is not an integer in the range"),
        ("digits", "digits: flags begin with --, as in --seed=1"),
    ],
)
def test_wrong_arguments(argument, message):
    done = run(argument)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
