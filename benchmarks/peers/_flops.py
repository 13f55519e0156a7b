"""Counts the model FLOPs of a workload's step, from the handwritten model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import _handwritten, _steps
from fnet import cost


def model_flops(workload, *, train: bool) -> int:
    """Returns the FLOPs of products and convolutions in a training step or a forward pass.
    Attention counts as if no mask were applied."""
    shapes = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in workload.shapes().items()
    }
    params, stats = _steps.nested(shapes), _steps.nested(shapes, stats=True)
    x, y = workload.draw(np.random.default_rng(0))
    apply = lambda params, stats, x, train: _handwritten.MODELS[type(workload)](
        workload, jnp.float32, params, stats, x, train
    )
    if not train:
        return cost.count(
            lambda params, stats, x: apply(params, stats, x, False)[0], params, stats, x
        ).model_flops
    tx = _steps.optimizer()
    state = params, stats, jax.eval_shape(tx.init, params)
    return cost.count(_steps.training(apply, tx), state, x, y).model_flops
