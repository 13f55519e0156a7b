"""Loops whose rows end one by one, as under `jax.vmap`: no other runtime has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import export

onnxruntime = pytest.importorskip("onnxruntime")


def grown(scale, x):
    """Multiplies each row by 1.5 as often as its first number says, at most five times."""

    def row(r):
        turns = jnp.minimum(jnp.abs(r[0]), 5.0)
        step = lambda c: (c[0] + 1.0, c[1] * 1.5 + r, c[2] + 1)
        _, y, count = lax.while_loop(lambda c: c[0] < turns, step, (0.0, r, 0))
        return y, count

    y, count = jax.vmap(row)(x)
    return scale * y, count


def found(table, x):
    """A binary search of each number, which `jnp.searchsorted` makes such a loop of."""
    return jax.vmap(lambda v: jnp.searchsorted(table, v))(x[:, 0])


PROGRAMS = {"grown": (grown, np.float32(2)), "found": (found, np.linspace(-3, 3, 7, dtype="f"))}


@pytest.mark.parametrize("name", PROGRAMS)
def test_loops_of_rows(name, tmp_path):
    f, params = PROGRAMS[name]
    program = export.program(f, params, x=export.spec("b, 3"))
    program.save(tmp_path / "f.fnet")
    export.renew(tmp_path / "f.fnet", tmp_path / "g.fnet")
    program.onnx(tmp_path / "f.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx")
    bundles = [export.load(tmp_path / path, check=True) for path in ("f.fnet", "g.fnet")]
    for rows in (1, 4):
        x = (3 * np.random.default_rng(rows).normal(size=(rows, 3))).astype(np.float32)
        expected = jax.tree.leaves(jax.jit(f)(params, x))
        results = [session.run(None, {"x": x}), *(jax.tree.leaves(b(x)) for b in bundles)]
        for outputs in results:
            for y, z in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(y, z, rtol=1e-5)
