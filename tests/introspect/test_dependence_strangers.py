"""What the programs of dependence_strangers state is what happens when they run."""

import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from dependence_strangers import PROGRAMS, Program, observed

QUICK = (
    "dense",
    "sort_then_unsort",
    "causal_attention",
    "mask_that_subtracts_a_billion",
    "reshape_in_place_of_a_transpose",
    "while_with_frozen_rows",
    "sign_of_a_zero_from_another_row",
    "fnet_mixture_of_experts_with_a_capacity",
    "linen_lstm_with_lengths",
    "haiku_causal_attention",
)


def forbidden(count, ordered):
    """The pairs (output position, input position) that a causal or an independent claim excludes."""
    return np.triu(np.ones((count, count), bool), 1) if ordered else ~np.eye(count, dtype=bool)


@pytest.mark.parametrize("name", sampled(PROGRAMS, QUICK))
def test_programs_do_what_they_state(name):
    program = PROGRAMS[name]
    for axis in program.axes:
        seen, finite = (observed(program, axis, values) for values in ("all", "finite"))
        ordered = axis in program.causal
        apart, later = (forbidden(len(seen), order) for order in (False, True))
        assert program.independent[axis] == (not seen[apart].any()), (axis, seen)
        if ordered:
            assert program.causal[axis] == (not seen[later].any()), (axis, seen)
        kept = not finite[later if ordered else apart].any()
        assert program.finite[axis] == kept, (axis, finite)
        if program.independent[axis]:  # and is not constant
            assert finite.diagonal().all(), (axis, finite)
        elif program.finite[axis]:
            assert finite.any(), (axis, finite)


def test_claims_are_consistent():
    assert len(PROGRAMS) >= 70
    for name in QUICK:
        program = PROGRAMS[name]
        assert program.axes.keys() == program.independent.keys() == program.finite.keys(), name
        for axis, independent in program.independent.items():
            strict = program.causal.get(axis, independent)
            assert strict >= independent and program.finite[axis] >= strict, (name, axis)


X = np.random.default_rng(0).standard_normal((4, 6), np.float32)


@pytest.mark.parametrize(
    "f, all, finite",
    [
        (lambda x: x * 2, np.eye(4), np.eye(4)),
        (lambda x: x[::-1], np.eye(4)[::-1], np.eye(4)[::-1]),
        (lambda x: x.cumsum(0), np.tri(4), np.tri(4)),
        (lambda x: x + 0 * x[:1], np.eye(4) + np.eye(4)[:1] > 0, np.eye(4)),
        (lambda x: x + 0 * x[1:2], np.eye(4) + np.eye(4)[1:2] > 0, np.eye(4)),
        (lambda x: x * 0 == 0, np.eye(4), np.zeros((4, 4))),
    ],
    ids=["own", "flip", "cumsum", "zero times the first", "zero times the second", "NaN"],
)
def test_observed(f, all, finite):
    program = Program(f, (X,), {"b": 0}, {}, {}, {})
    np.testing.assert_array_equal(observed(program, "b"), all)
    np.testing.assert_array_equal(observed(program, "b", "finite"), finite)


def test_observed_sees_an_exchange():
    """Only if the first two rows are each other's are all outputs true."""
    exchanged = lambda x: jnp.broadcast_to((x[:2] == X[1::-1]).all(), (4,))
    seen = observed(Program(exchanged, (X,), {"b": 0}, {}, {}, {}), "b")
    np.testing.assert_array_equal(seen, [[0] * 4, [0] * 4, [1, 0, 0, 0], [1, 0, 0, 0]])
