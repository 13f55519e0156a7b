"""The analysis remembers equations: what looks equal and is not must not share a result."""

import jax
import jax.numpy as jnp
import numpy as np

from fnet import introspect
from fnet.introspect._depends import _memory, _reach

X = jnp.zeros((4, 3))
ROWS = {"rows": (0, 0)}


def _status(f, *args, axes=None):
    report = introspect.depends(f, *args, axes=axes or ROWS)
    return report.verdict("independent", "rows", trials=False).status


def test_difference_of_one_value_and_of_two():
    def f(x):
        mean = x.mean(0, keepdims=True).astype(jnp.int32)
        other = (x.mean(0, keepdims=True) + 1).astype(jnp.int32)
        return (mean - mean) + x.astype(jnp.int32), (mean - other) + x.astype(jnp.int32)

    assert _status(lambda x: f(x)[0], X) == "proved"
    assert _status(lambda x: f(x)[1], X) != "proved"
    assert _status(lambda x: f(x), X, axes={"rows": (0, (0, 0))}) != "proved"


def test_equal_operations_with_other_options():
    def f(x, axis):
        return x - x.sum(axis, keepdims=True)

    assert _status(lambda x: f(f(x, 1), 1), X) == "proved"
    assert _status(lambda x: f(f(x, 1), 0), jnp.zeros((4, 4))) != "proved"


def test_signs_of_zeros_are_kept_apart():
    memory = _memory.Memory()
    zeros, negative = (_reach.constant(np.full((2,), x, np.float32)) for x in (0.0, -0.0))
    assert memory.kept(zeros) is zeros and memory.kept(negative) is negative
    assert memory.kept(_reach.constant(np.zeros(2, np.float32))) is zeros
    mixed = _reach.constant(np.float32([0.0, -0.0]))
    assert mixed.value.shape == (2,)


def test_large_arrays_with_equal_samples():
    memory = _memory.Memory()
    mask = np.zeros((64, 64), bool)
    other = mask.copy()
    other[3, 7] = True  # an element that the key does not look at
    one, two = _reach.constant(mask), _reach.constant(other)
    assert memory.kept(one) is one and memory.kept(two) is two


def test_every_layer_of_an_unrolled_model_is_named_in_the_conditions():
    mask = jnp.where(jnp.tri(5, dtype=bool), 0.0, -1e9)

    def attend(x):
        return jax.nn.softmax(x @ x.T + mask) @ x

    def model(x):
        for i in range(3):
            with jax.named_scope(f"layer{i}"):
                x = attend(x)
        return x

    report = introspect.depends(model, jnp.ones((5, 2)), axes={"t": (0, 0)})
    verdict = report.verdict("causal", "t", trials=False)
    assert verdict.status == "proved if"
    assert {each.path for each in verdict.conditions} == {"layer0", "layer1", "layer2"}
    assert verdict.holds(jnp.ones((5, 2)))
    assert not verdict.holds(jnp.full((5, 2), jnp.nan))
