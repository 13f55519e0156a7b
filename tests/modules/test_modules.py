"""Modules of flax.nnx and Equinox, and steps of them, under every transform and tool: each case
equals the case without it, or is one error that says what to do."""

import re

import jax
import pytest

from .cells import CELLS
from .subjects import SUBJECTS

MODELS = ("nnx module", "eqx model")
STEPS = ("nnx step", "eqx step")
# Where a tool is for only one of them.
KINDS = dict.fromkeys(
    (
        "microbatch_of_gradients",
        "capture_cotangents",
        "fold",
        "loss_scale",
        "depends",
        "summary",
        "quantize",
        "lora",
        "shrink",
        "program",
        "program_of_the_model",
    ),
    MODELS,
) | dict.fromkeys(("plan", "plan_not_attached", "fit"), STEPS)

_COUNTER = r"the attribute 'calls' .*nnx\.Variable\(jnp\.asarray\("
_EXPORTED = r"Call model\.eval\(\) before, for inference mode"
_NO_CUT = "shrink: no axis can be cut: .*(an axis of an argument|an axis of a result)"
# (the cell, what the subject's name begins with): the error, in the order in which they are tried.
ERRORS = {
    ("microbatch", "nnx module counting"): _COUNTER,
    ("microbatch", "nnx step counting"): _COUNTER,
    ("microbatch", "eqx step"): r"carry= names argument .* eqx\.partition\(model, eqx\.is_array\)",
    ("microbatch_of_gradients", "nnx module counting"): _COUNTER,
    ("pmap", "nnx module counting"): _COUNTER,
    ("pmap", "nnx step counting"): _COUNTER,
    # Equinox: its State does not accept values that were computed in any `jax.shard_map`.
    ("pmap", "eqx model state"): "Old and new values have different structures",
    ("pmap", "eqx step state"): "Old and new values have different structures",
    ("intervene", "nnx step"): r"before differentiation: grad\(intervene\(f, \.\.\.\)\)",
    ("intervene", "eqx step"): r"before differentiation: grad\(intervene\(f, \.\.\.\)\)",
    ("name_scopes", "eqx"): "expected a flax.nnx.Module, .* other libraries name their scopes",
    ("fold", "nnx module custom"): "changes 0/largest/inputs, .*" + _EXPORTED,
    (
        "shrink",
        "nnx module custom",
    ): r"updates flax\.nnx variables in place\. .* call model\.eval\(\)",
    ("shrink", "nnx module shared"): _NO_CUT,
    ("shrink", "nnx module stacked"): _NO_CUT,
    ("shrink", "nnx module streams"): _NO_CUT,
    ("shrink", "nnx module counting"): _NO_CUT,
    ("shrink", "eqx model tied"): _NO_CUT,
    ("shrink", "eqx model state"): _NO_CUT,
    ("plan", "nnx step counting"): _COUNTER,
    ("plan_not_attached", "nnx step counting"): _COUNTER,
    ("fit", "nnx step counting"): _COUNTER,
    ("program", "nnx module streams"): r"the output is random.*" + _EXPORTED,
    ("program", "nnx module custom"): "changes .*" + _EXPORTED,
    ("program_of_the_model", "nnx module streams"): r"the output is random.*" + _EXPORTED,
    ("program_of_the_model", "nnx module custom"): "changes .*" + _EXPORTED,
    ("program_of_the_model", "eqx model state"): "missing 1 required positional argument: 'state'",
}
# Half of a model is none.
ABSENT = {("program_of_the_model", "eqx model frozen")}


def error(cell: str, subject: str) -> str | None:
    return next(
        (
            text
            for (name, start), text in ERRORS.items()
            if name == cell and subject.startswith(start)
        ),
        None,
    )


CASES = [
    (cell, subject.name)
    for cell in CELLS
    for subject in SUBJECTS.values()
    if subject.kind in KINDS.get(cell, (*MODELS, *STEPS)) and (cell, subject.name) not in ABSENT
]


def test_the_table_of_errors_names_cases():
    for cell, start in ERRORS:
        assert any(cell == name and subject.startswith(start) for name, subject in CASES)


@pytest.mark.quick_cases(
    "microbatch_of_gradients-nnx module norm",
    "plan-eqx step dense",
    "fit-nnx step counting",
)
@pytest.mark.filterwarnings("ignore:tune. the compiler options")  # of the jit around it
@pytest.mark.parametrize("cell,subject", CASES, ids=[f"{a}-{b}" for a, b in CASES])
def test_modules(cell, subject, quickly):
    expected = error(cell, subject)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if expected is None:
            CELLS[cell](SUBJECTS[subject])
            return
        with pytest.raises((TypeError, ValueError)) as raised:
            CELLS[cell](SUBJECTS[subject])
    assert re.search(expected, str(raised.value), re.DOTALL), raised.value
