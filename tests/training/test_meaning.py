"""A run that began under an earlier rule of an optimizer is not resumed under the new one."""

import jax.numpy as jnp
import optax
import pytest

from fnet import training as tr

STACK = {
    "blocks": {"kernel": jnp.ones((2, 3, 3))},
    "head": {"kernel": jnp.ones((3, 1)), "bias": jnp.ones(1)},
}
AXES = {"blocks/kernel": "layers in out", "head/kernel": "in logits", "head/bias": "out"}
QUERY = {"query": {"w": jnp.ones((3, 3)), "b": jnp.ones((3, 3))}}


def run(tx, params, folder, steps):
    step = lambda state, batch: (state.apply(tx, state.params), {})
    return tr.fit(
        step,
        tr.TrainState.create(params, tx),
        lambda i: jnp.ones(3),
        steps=steps,
        workdir=folder,
        config={},
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "earlier, now, params, text",
    [
        (
            optax.lamb(0.1),
            tr.optimizer("lamb", 0.1, axes=AXES),
            STACK,
            "treats each layer of a stack by itself",
        ),
        (
            optax.contrib.muon(0.1),
            tr.optimizer("muon", 0.1, axes=AXES),
            STACK,
            "Muon took every array with two axes for a",
        ),
        (
            optax.adamw(0.1, mask=True),
            tr.optimizer("adamw", 0.1, weight_decay=0.1),
            QUERY,
            "spares all biases and scales",
        ),
    ],
)
def test_a_run_under_an_earlier_rule(earlier, now, params, text, tmp_path):
    run(optax.chain(earlier), params, tmp_path, 1)
    with pytest.raises(tr.CheckpointError, match=text) as raised:
        run(now, params, tmp_path, 2)
    assert "begin a new run with its parameters, which tr.load(workdir).params returns" in str(
        raised.value
    )


@pytest.mark.quick_cases("earlier0-now0-params0")
@pytest.mark.parametrize(
    "earlier, now, params",
    [
        (
            optax.lamb(0.1),
            tr.optimizer("lamb", 0.1, axes={"head": "in out"}),
            {"head": jnp.ones((3, 1))},
        ),
        (
            optax.adamw(0.1, mask=True),
            tr.optimizer("adamw", 0.1, weight_decay=0.1),
            {"head": STACK["head"]},
        ),
        (optax.adam(0.1), tr.optimizer("adam", 0.1), QUERY),
    ],
)
def test_a_run_that_means_the_same_resumes(earlier, now, params, tmp_path):
    run(optax.chain(earlier), params, tmp_path, 1)
    assert int(run(now, params, tmp_path, 2).step) == 2


def test_an_average_of_16_bits(tmp_path):
    tx, params = optax.sgd(0.1), {"w": jnp.ones(2, jnp.bfloat16)}
    new = tr.TrainState.create(params, tx, ema=0.9)
    old = new.replace(ema=params)
    with tr.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, {"state": old})
    with pytest.raises(
        tr.CheckpointError, match="averages of 16-bit parameters are now stored in float32"
    ):
        tr.restore(tmp_path, new)
    assert tr.restore(tmp_path, new, cast=True).ema["w"].dtype == jnp.float32
