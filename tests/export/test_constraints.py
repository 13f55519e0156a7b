"""Sizes and constraints in Python's notation."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from fnet import export
from fnet.export import _constraints

WRITTEN = [
    "t <= 64",
    "t < 7",
    "t > 2",
    "2 <= t < 9",
    "t % 4 == 0",
    "t // 2 >= 2, t <= b",
    "t - 2*b <= 3",
    "3 <= (t + b) // 2",
    "-t + 8 >= b",
    "max(t, b) <= 5",
    "mod(t, 3) == 0",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_constraints_mean_what_python_says(text):
    spec = export.spec("b, t", where=text)
    program = export.program(lambda params, x: x + 1, {}, x=spec)
    floordiv, mod = (lambda a, b: a // b), (lambda a, b: a % b)
    names = {"max": max, "min": min, "floordiv": floordiv, "mod": mod}
    for b, t in itertools.product(range(1, 10), repeat=2):
        mine = all(eval(each, {"b": b, "t": t, **names}) for each in spec.where)
        theirs = eval(f"all(({text},))", {"b": b, "t": t, **names})
        assert mine == theirs, (text, spec.where, b, t)
    assert program.entries["predict"].constraints == list(spec.where)


def test_a_bundle_refuses_what_its_constraints_exclude(tmp_path):
    spec = export.spec("b, h", where="4 <= h < 9, h % 2 == 0")
    export.program(lambda params, x: x.sum(1), {}, x=spec).save(tmp_path / "f.fnet")
    bundle = export.load(tmp_path / "f.fnet", check=True)
    np.testing.assert_array_equal(bundle(np.ones((2, 8), np.float32)), [8, 8])
    for size in (2, 5, 10):
        with pytest.raises(export.BundleError):
            bundle(np.ones((2, size), np.float32))


def test_sizes():
    assert (
        _constraints.sizes("b, h // 2 + 1, (w + 1) % 3") == "b, floordiv(h, 2) + 1, mod(w + 1, 3)"
    )
    assert _constraints.sizes("b, 2*h") == "b, 2*h"
    assert export.spec("b, 8*h//2").shape == "b, floordiv(8*h, 2)"
    with pytest.raises(ValueError, match="'b, h/2' is no shape"):
        export.spec("b, h/2")
    caches = export.spec_of(lambda b: {"keys": jnp.zeros((b, 8))}, where="b < 16")
    assert caches.where == ("b + 1 <= 16",)
