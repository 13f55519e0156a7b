"""What is read from a step that the compiler refuses to compile or to print; other errors are
raised."""

import types

import jax
import pytest

from fnet.parallel import _compile

STATS = types.SimpleNamespace(
    argument_size_in_bytes=8, output_size_in_bytes=8, alias_size_in_bytes=4, temp_size_in_bytes=2
)
HLO = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()


def raising(error):
    def call():
        raise error

    return call


def step(compile=None, as_text=lambda: HLO):
    program = types.SimpleNamespace(memory_analysis=lambda: STATS, as_text=as_text)
    lowered = types.SimpleNamespace(compile=compile or (lambda: program))
    return types.SimpleNamespace(lower=lambda state, batch: lowered)


def test_a_program():
    found = _compile.compiled(step(), None, None)
    assert (found.arguments, found.peak, found.ledger.sent) == (8, 14, 0)


@pytest.mark.parametrize(
    "as_text", [lambda: None, raising(jax.errors.JaxRuntimeError("INTERNAL: too large"))]
)
def test_a_program_that_is_not_printed_has_no_ledger(as_text):
    assert _compile.compiled(step(as_text=as_text), None, None) == _compile.Compiled(8, 14, None)


def test_too_little_memory():
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory, 17G of 15.75G hbm. Over by 1G.\nmore"
    )
    found = _compile.compiled(step(raising(error)), None, None)
    assert (
        found.peak is None
        and found.said == "RESOURCE_EXHAUSTED: Ran out of memory, 17G of 15.75G hbm"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"compile": raising(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: mine"))},
        {"compile": raising(KeyError("mine"))},
        {"as_text": raising(KeyError("mine"))},
        {"as_text": raising(MemoryError("mine"))},
    ],
)
def test_other_errors_are_raised(options):
    with pytest.raises((jax.errors.JaxRuntimeError, KeyError, MemoryError), match="mine"):
        _compile.compiled(step(**options), None, None)
