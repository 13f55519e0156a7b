"""fit(profile_steps=): the profile of chosen steps in the run's folder."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
from fnet import training as tr

MODEL = nn.Sequential(hidden=nn.Dense(64), act=jax.nn.relu, head=nn.Dense(2))
TX = optax.adam(1e-2)
BATCHES = tr.Batches(
    {"x": np.ones((64, 8), np.float32), "y": np.zeros(64, np.int32)}, batch_size=16
)


def step(state, batch):
    def loss(params):
        logits = MODEL(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads), {"loss": value}


def fresh():
    return tr.TrainState.create(MODEL.init(jax.random.key(0), jnp.ones((1, 8)))[0], TX)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_the_profile_is_written_and_the_run_is_the_same(tmp_path):
    plain = tr.fit(step, fresh(), BATCHES, steps=8)
    state = tr.fit(
        step, fresh(), BATCHES, steps=8, workdir=tmp_path, config={}, profile_steps=range(3, 6)
    )
    assert same(plain, state)
    folder = tmp_path / "profile" / "3-6"
    assert sorted(file.name for file in folder.iterdir()) == [
        "profile.html",
        "profile.json",
        "profile.txt",
        "trace.json.gz",
    ]
    rows = {row["path"]: row for row in json.loads((folder / "profile.json").read_text())}
    assert (
        rows["hidden"]["forward"] > 0
        and rows["hidden"]["backward"] > 0
        and rows[""]["optimizer"] > 0
    )
    assert rows["hidden"]["flops"] >= 2 * 2 * 16 * 8 * 64
    assert "mean of 3 steps" in (folder / "profile.txt").read_text()
    assert "<h1>steps 3 to 6</h1>" in (folder / "profile.html").read_text()
    assert json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    again = tr.fit(
        step, fresh(), BATCHES, steps=12, workdir=tmp_path, config={}, profile_steps=range(0, 10)
    )
    assert int(again.step) == 12 and (tmp_path / "profile" / "9-10").is_dir()  # step 8 compiles


def test_an_error_in_the_middle_stops_the_profiler(tmp_path):
    def fail(end):
        if end.step == 4:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match=r"^no$"):
        tr.fit(
            step,
            fresh(),
            BATCHES,
            steps=8,
            workdir=tmp_path,
            profile_steps=range(2, 7),
            on_step=fail,
        )
    assert not (tmp_path / "profile").exists()
    with jax.profiler.trace(str(tmp_path / "mine")):  # the profiler is free
        jnp.ones(3).block_until_ready()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(profile_steps=5), "expected consecutive steps of the 8, such as range"),
        (dict(profile_steps=range(0, 8, 2)), "expected consecutive steps"),
        (dict(profile_steps=range(6, 9)), "expected consecutive steps"),
        (dict(profile_steps=range(2, 4)), "name a workdir"),
        (dict(profile_steps=range(2, 4), workdir="memory://runs/a"), "expected a local workdir"),
        (dict(profile_steps=range(2, 4), workdir="unused", jit=False), "with jit=False"),
    ],
)
def test_errors(options, text):
    with pytest.raises(ValueError, match=text):
        tr.fit(step, fresh(), BATCHES, steps=8, **options)
