"""The overhead of a call of a jitted training step, compared with handwritten JAX, and of
`ft.pmap`, compared with `jax.pmap`. The training step has three dense layers, so small that
dispatch takes most of the time. `pmap` runs on eight emulated devices.

    python -m benchmarks.dispatch
    python -m benchmarks.dispatch pmap
"""

import sys

import jax
import jax.numpy as jnp

from benchmarks._harness import main, seconds

PMAP = bool({"pmap", "ft.pmap", "jax.pmap"} & set(sys.argv[1:]))
if PMAP:
    jax.config.update("jax_num_cpu_devices", 8)

X, Y = jnp.ones((8, 16)), jnp.ones((8, 4))


def _time(model, params):
    @jax.jit
    def step(params, x, y):
        grads = jax.grad(lambda params: jnp.square(model(params, x) - y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    return seconds(lambda: jax.block_until_ready(step(params, X, Y)), budget=3, repeats=15)


def _model():
    from fnet import layers as nn

    return nn.Sequential(
        fc0=nn.Dense(16), relu0=jax.nn.relu, fc1=nn.Dense(16), relu1=jax.nn.relu, head=nn.Dense(4)
    )


def fnet():
    model = _model()
    return _time(model, model.init(jax.random.key(0), X)[0])


def handwritten():
    def model(params, x):
        for name in "fc0", "fc1":
            x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    return _time(model, _model().init(jax.random.key(0), X)[0])


def _pmap(make):
    step = make(lambda params, x: [p + x.sum() for p in params])
    params = step([jnp.ones((8, 4))] * 8, jnp.ones((8, 4)))
    x = step([jnp.ones((8, 4))], jnp.ones((8, 4)))[0]  # has the sharding of later calls
    return seconds(lambda: jax.block_until_ready(step(params, x)), budget=3, repeats=15)


def fnet_pmap():
    from fnet import transforms as ft

    return _pmap(ft.pmap)


def jax_pmap():
    return _pmap(jax.pmap)


if __name__ == "__main__":
    if PMAP:
        main(
            "benchmarks.dispatch",
            {"ft.pmap": fnet_pmap, "jax.pmap": jax_pmap},
            unit="µs",
            scale=1e6,
            rounds=9,
        )
    else:
        main(
            "benchmarks.dispatch",
            {"fnet": fnet, "hand-written": handwritten},
            unit="µs",
            scale=1e6,
            rounds=9,
        )
