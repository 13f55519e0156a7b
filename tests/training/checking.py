"""One of two processes that check their devices: what test_check_devices.py starts.

    python tests/training/checking.py PORT PROCESS COUNT WHERE

Both train, and then again after a fault in the devices of the second. Prints as JSON the last step
of the first run, and the error of the second.
"""

import json
import os
import sys
import warnings

if __name__ == "__main__":
    PORT, ME, COUNT, WHERE = *map(int, sys.argv[1:4]), sys.argv[4]
    warnings.simplefilter("error")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["FNET_PROBE"], os.environ["FNET_CACHE"] = "1", f"{WHERE}/cache{ME}"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("FNET_TEST_XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )

import jax
import numpy as np
import optax

from fnet import hardware as hw
from fnet import parallel
from fnet import training as tr
from fnet.hardware import _device_check
from fnet.hardware._operations import OPERATIONS

TX = optax.sgd(0.1)
SUM = next(one for one in OPERATIONS if one.name == "sum")
FEW = [OPERATIONS[0], SUM, *OPERATIONS[-2:]]


def step(state, batch):
    return state.apply(TX, {"w": state.params["w"] * batch.mean()}), {"loss": batch.mean()}


def start(key=None):
    return tr.TrainState.create({"w": jax.numpy.ones(2)}, TX)


def off(x):
    sums = SUM.run(x)
    return {**sums, "all": sums["all"] - 1}


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    parallel.initialize(f"127.0.0.1:{PORT}", COUNT, ME, initialization_timeout=60)
    plan = parallel.plan(step, start, np.zeros(8, np.float32), strategy="data", compile=False)

    def run():
        feed = lambda i: np.full(8, i, np.float32)
        options = {"plan": plan, "tensorboard": False, "tune": False}
        return tr.fit(step, start(), feed, steps=2, workdir=f"{WHERE}/run", config={}, **options)

    _device_check.OPERATIONS = FEW
    right = int(run().step)
    if ME == 1:
        _device_check.OPERATIONS = [FEW[0], SUM._replace(run=off)]
        _device_check._known.clear()
        os.environ["FNET_CACHE"] = f"{WHERE}/empty"
    try:
        run()
    except hw.FaultyDevice as error:
        return {"right": right, "wrong": str(error)}


if __name__ == "__main__":
    print(json.dumps(main()))
