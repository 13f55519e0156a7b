"""One process of a federated run, started by test_federated.py. Prints the result as JSON.

Run it with:

    python tests/federated/two_processes.py PORT PROCESS COUNT FOLDER
"""

import json
import os
import sys

PORT, PROCESS, COUNT = map(int, sys.argv[1:4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("FNET_TEST_XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={4 // COUNT}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from fnet import federated, parallel  # noqa: E402
from fnet import training as tr  # noqa: E402


def loss(params, batch, weight, key):
    error = jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]
    return (error**2 * weight).sum() / weight.sum()


def main():
    if COUNT > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        parallel.initialize(f"127.0.0.1:{PORT}", COUNT, PROCESS, initialization_timeout=60)
    assert jax.process_count() == COUNT and len(jax.devices()) == 4
    rng = np.random.default_rng(0)
    parts = [
        {
            "x": rng.normal(size=(n, 3)).astype(np.float32),
            "y": rng.normal(size=n).astype(np.float32),
        }
        for n in (4, 3, 5, 2, 6, 4, 1, 5, 3)
    ]
    params = {
        "w": rng.normal(size=(3, 5)).astype(np.float32),
        "v": rng.normal(size=5).astype(np.float32),
    }
    measure = lambda state, batch: {
        "loss": tr.mean(
            (jnp.tanh(batch["x"] @ state.params["w"]) @ state.params["v"] - batch["y"]) ** 2,
            batch["weight"],
        )
    }
    results = {}
    for method in ("vmap", "loop"):
        server = optax.adam(0.05)
        round = federated.fedavg(
            federated.local(loss, optax.sgd(0.05, momentum=0.9)),
            federated.clients(parts),
            server=server,
            sampled=8,
            epochs=2,
            batch_size=2,
            dropout=0.2,
            method=method,
            devices=jax.devices(),
        )
        evaluate = {"all": tr.evaluator(measure, parts[4], 3)}
        for rounds in (2, 5):  # the second call resumes
            state = federated.init(jax.random.key(3), jax.tree.map(jnp.asarray, params), server)
            state = tr.fit(
                round,
                state,
                federated.no_batches,
                steps=rounds,
                workdir=f"{sys.argv[4]}/{method}",
                evaluate=evaluate,
                every=1,
                log_every=1,
                tensorboard=False,
                config={},
            )
        results[method] = {
            "params": jax.tree.map(lambda x: np.asarray(x).tolist(), state.params),
            "bytes": float(state.bytes),
            "loss": evaluate["all"](state)["loss"],
        }
    return results


if __name__ == "__main__":
    print(json.dumps(main()))
