"""What calling a model costs beside hand-written JAX: the jitted training step of three dense layers, small enough
that dispatch is what is timed.

    python -m benchmarks.dispatch
"""

import jax
import jax.numpy as jnp

from benchmarks._harness import main, seconds

X, Y = jnp.ones((8, 16)), jnp.ones((8, 4))


def _time(model, params):
    @jax.jit
    def step(params, x, y):
        grads = jax.grad(lambda params: jnp.square(model(params, x) - y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    return seconds(lambda: jax.block_until_ready(step(params, X, Y)), budget=3, repeats=15)


def _model():
    from fnet import layers as nn

    return nn.Sequential(fc0=nn.Dense(16), relu0=jax.nn.relu, fc1=nn.Dense(16), relu1=jax.nn.relu, head=nn.Dense(4))


def fnet():
    model = _model()
    return _time(model, model.init(jax.random.key(0), X)[0])


def handwritten():
    def model(params, x):
        for name in "fc0", "fc1":
            x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    return _time(model, _model().init(jax.random.key(0), X)[0])


if __name__ == "__main__":
    main("benchmarks.dispatch", {"fnet": fnet, "hand-written": handwritten}, unit="µs", scale=1e6, rounds=9)
