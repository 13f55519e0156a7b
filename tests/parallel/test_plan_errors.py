"""Invalid arguments of plan and of plan.jit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import gpt, narrow

from fnet import parallel

STEP, INIT, ROWS = narrow()
SOME = np.ones((64, 512), np.float32)


def called(*, batch=SOME, where=None, devices="local"):
    plan = parallel.plan(STEP, INIT, ROWS, strategy="fsdp", compile=False, devices=devices)
    return plan.jit(STEP)(jax.device_put(INIT(jax.random.key(0)), where), batch)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: parallel.plan(STEP, INIT, ROWS, strategy="magic"),
            "plan: unknown strategy 'magic'; there are auto, data, zero1, fsdp, fsdp+pins, context, "
            "expert, explicit, pipeline, each also with +remat and +microbatches=N, in this order, and "
            "pipeline with +rounds=N",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, strategy="data+pins"),
            "unknown strategy 'data+pins'",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, strategy="data+microbatches=2"),
            "plan: for microbatches=2 the step needs a keyword: def step(state, batch, *, "
            "microbatches=1)",
        ),
        (
            lambda: parallel.plan(*gpt(), strategy="data+microbatches=3"),
            "plan: 16 rows are not a multiple of 3 microbatches x 8 devices",
        ),
        (
            lambda: parallel.plan(STEP, INIT, {"x": np.ones((12, 512))}),
            "plan: batch['x'] of shape (12, 512) has 12 rows, not a multiple of 8 devices; use 8 "
            "or 16 rows",
        ),
        (
            lambda: parallel.plan(STEP, INIT, np.ones((3, 512))),
            "not a multiple of 8 devices; use 8 rows",
        ),
        (lambda: parallel.plan(STEP, INIT, np.float32(1)), "plan: the batch has no rows"),
        (
            lambda: parallel.plan(lambda s, b: s, INIT, ROWS),
            "plan: expected a step that returns (state, metrics); this one returns dict",
        ),
        (
            lambda: parallel.plan(lambda s, b: ({"p": s["params"]}, 0), INIT, ROWS),
            "plan: the step must return a state with the structure of init's: expected ",
        ),
        (
            lambda: parallel.plan(
                lambda s, b: ({"params": [w[:3] for w in s["params"]]}, 0), INIT, ROWS
            ),
            "plan: state['params'][0] must keep its shape and dtype: init returns float32[512, "
            "512], and the step float32[3,",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 3}),
            "plan: mesh {'data': 3} needs 3 devices; 'local' has 8",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": -1, "tensor": -1}),
            "or -1 for the remaining length of one axis",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, rules={"0": (None, "tensor")}),
            "plan: the rule '0' for 0 [512, 512] uses the mesh axis 'tensor'; available are none; "
            "pass mesh= with such an axis",
        ),
        (
            lambda: parallel.plan(
                STEP,
                INIT,
                ROWS,
                mesh={"data": 4, "tensor": 2},
                rules={"fc/kernel": (None, "tensor")},
            ),
            "plan: the rule 'fc/kernel' matches no parameter; there are 0, 1, 2, 3",
        ),
        (
            lambda: parallel.plan(
                STEP,
                INIT,
                ROWS,
                mesh={"data": 4, "tensor": 2},
                rules={"0": (None, "tensor"), ".": ()},
            ),
            "plan: two rules match 0 [512, 512]: '0' and '.'; expected one for each parameter",
        ),
        (
            lambda: parallel.plan(
                STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"0": (None, None, "tensor")}
            ),
            "plan: the rule '0': (None, None, 'tensor') is for 3 axes, but 0 [512, 512] has 2",
        ),
        (
            lambda: parallel.plan(
                STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"0": ("tensor", "tensor")}
            ),
            "uses a mesh axis twice",
        ),
        (
            lambda: parallel.plan(
                STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"(": ("tensor",)}
            ),
            "plan: the rule '(' is not a regular expression: ",
        ),
        (
            lambda: parallel.plan(
                lambda s, b: (s, 0),
                lambda key: {"params": {"w": jnp.ones((9, 4))}},
                np.ones((4, 2)),
                mesh={"data": 2, "tensor": 4},
                rules={"w": ("tensor",)},
            ),
            "plan: the rule 'w' splits axis 0 of w [9, 4] over 'tensor', but 9 is not a multiple "
            "of 4; use tensor=3",
        ),
        (
            lambda: parallel.plan(STEP, INIT, ROWS, mesh={"tensor": 3}),
            "plan: mesh {'tensor': 3, 'data': 2} needs 6 devices",
        ),
        (
            lambda: called(devices="v2:2x2"),
            "plan.jit: this plan is for 4 x TPU v2 (8 devices), which are not attached; use "
            "devices='local' to run it",
        ),
        (
            lambda: called(batch=np.ones((12, 512), np.float32)),
            "plan.jit: batch of shape (12, 512) has 12 rows, not a multiple of 8 devices; "
            "parallel.feed pads short",
        ),
        (
            lambda: called(batch={"x": np.ones((16, 512), np.float32)}),
            "plan.jit: the batch has another structure than in the plan: PyTreeDef({'x': *}) and "
            "PyTreeDef(*)",
        ),
        (
            lambda: called(where=jax.devices()[0]),
            "plan.jit: state['params'][0] does not have the plan's sharding, but "
            "SingleDeviceSharding(device=CpuDevice(id=0)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_arguments_of_the_wrong_type():
    with pytest.raises(TypeError, match="plan: step must be a function; got None"):
        parallel.plan(None, INIT, ROWS)
    with pytest.raises(TypeError, match=r"plan: init must be a function; got \{\}"):
        parallel.plan(STEP, {}, ROWS)
    with pytest.raises(
        TypeError, match="plan: devices must be the name of devices or a list of devices; got 8"
    ):
        parallel.plan(STEP, INIT, ROWS, devices=8)
    with pytest.raises(
        TypeError, match=r"plan: mesh must be a dict {axis: length}, such as .*; got \[2, 4\]"
    ):
        parallel.plan(STEP, INIT, ROWS, mesh=[2, 4])


def test_what_is_no_array():
    with pytest.raises(
        TypeError, match=re.escape("plan: batch['name'] is a str; the leaves of a batch are arrays")
    ):
        parallel.plan(STEP, INIT, {"x": ROWS, "name": "a"})
