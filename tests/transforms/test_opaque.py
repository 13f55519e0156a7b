"""Programs whose products no rule can reach: autocast, tune and count say so, and name what hides
them. One kind of program each, and one primitive in every place where it can stand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import hijax, io_callback
from jax.experimental import pallas as pl
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from fnet import cost
from fnet import transforms as ft

X, W = np.ones((8, 16), np.float32), np.ones((16, 16), np.float32)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)

hidden_p = Primitive("hidden_matmul")
hidden_p.def_abstract_eval(lambda x, w: jax.core.ShapedArray(x.shape, x.dtype))
hidden_p.def_impl(jnp.matmul)
mlir.register_lowering(hidden_p, mlir.lower_fun(jnp.matmul, multiple_results=False))
ad.primitive_jvps[hidden_p] = lambda primals, tangents: (hidden_p.bind(*primals), primals[0])
hidden = hidden_p.bind


def by_numpy(x, w):
    return np.asarray(x) @ np.asarray(w)


def kernel(x, w, y):
    y[...] = x[...] @ w[...]


partitioned = custom_partitioning(lambda x, w: x @ w)
partitioned.def_partition(
    infer_sharding_from_operands=lambda *_: None,
    partition=lambda *_: None,
    sharding_rule="i j, j k -> i k",
)


@jax.custom_vjp
def custom(x, w):
    return hidden(x, w)


custom.defvjp(lambda x, w: (custom(x, w), (x, w)), lambda saved, c: saved)


class OfRef(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    """Reads a mutable array, so it cannot be a function of arrays."""

    def __init__(self, ref, w):
        self.in_avals, self.out_aval, self.params = (ref, w), jax.typeof(jnp.asarray(X)), {}
        super().__init__()

    def expand(self, ref, w):
        return ref[...] @ w


def of_ref(x, w):
    ref = jax.new_ref(x)
    return OfRef(jax.typeof(ref), jax.typeof(w))(ref, w)


def scaled(x, w):
    low = lambda a: a[None].astype("float8_e4m3fn")
    scales = lambda rows: jnp.ones((1, rows, 1), "float8_e8m0fnu")
    return jax.nn.scaled_matmul(low(x), low(w), scales(8), scales(16))


PROGRAMS = {  # name: (function, how it is called in the reports)
    "a primitive": (hidden, "hidden_matmul"),
    "in jit": (jax.jit(hidden), "hidden_matmul"),
    "in checkpoint": (jax.checkpoint(hidden), "hidden_matmul"),
    "in scan": (
        lambda x, w: lax.scan(lambda c, _: (hidden(c, w), None), x, None, 3)[0],
        "hidden_matmul",
    ),
    "in while": (
        lambda x, w: lax.fori_loop(0, x.size, lambda i, c: hidden(c, w), x),
        "hidden_matmul",
    ),
    "in cond": (lambda x, w: lax.cond(x.sum() > 0, hidden, lambda x, w: x, x, w), "hidden_matmul"),
    "in custom_vjp": (custom, "hidden_matmul"),
    "in a gradient": (jax.grad(lambda x, w: hidden(x, w).sum()), "hidden_matmul"),
    "pure_callback": (lambda x, w: jax.pure_callback(by_numpy, LIKE, x, w), "pure_callback"),
    "io_callback": (lambda x, w: io_callback(by_numpy, LIKE, x, w), "io_callback"),
    "buffer_callback": (
        lambda x, w: buffer_callback(lambda *_: None, LIKE)(x, w),
        "buffer_callback",
    ),
    "ffi_call": (lambda x, w: jax.ffi.ffi_call("no_target", LIKE)(x, w), "ffi_call"),
    "pallas": (
        lambda x, w: pl.pallas_call(kernel, out_shape=LIKE, interpret=True)(x, w),
        "pallas_call",
    ),
    "custom_partitioning": (partitioned, "custom_partitioning"),
    "linear_call": (
        lambda x, w: linear_call(lambda w, x: x @ w, lambda w, c: c @ w.T, w, x),
        "linear_call",
    ),
    "an exported function": (
        lambda x, w: jax.export.export(jax.jit(jnp.matmul))(x, w).call(x, w),
        "call_exported",
    ),
    "scaled_matmul": (scaled, "scaled_matmul_wrapper"),
    "a HiPrim of a ref": (of_ref, "OfRef (HiPrim)"),
    "svd": (lambda x, w: jnp.linalg.svd(x)[0], "svd"),
    "eigh": (lambda x, w: jnp.linalg.eigh(w)[1], "eigh"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_tune_and_count_name_what_they_cannot_reach(name):
    f, primitive = PROGRAMS[name]
    rows = ft.explain(ft.autocast(f, "bfloat16"), X, W).rows
    assert {(row.primitive, row.dtype) for row in rows if row.kind == "opaque"} == {
        (primitive, "float32")
    }
    tuning = ft.explain(ft.tune(f), X, W)
    assert set(tuning.opaque) == {primitive}
    assert f"no rule reaches the operations inside: {tuning.opaque[primitive]} {primitive}" in str(
        tuning
    )
    assert any(note.startswith(primitive) for note in cost.count(f, X, W).notes)


def test_a_program_that_is_reached_everywhere_is_not_reported():
    def f(x, w):
        y, _ = lax.scan(lambda c, _: (jax.checkpoint(jnp.matmul)(c, w), None), x, None, 3)
        return jax.nn.relu(lax.linalg.triangular_solve(w, y)).sum()

    assert "opaque" not in {row.kind for row in ft.explain(ft.autocast(f, "bfloat16"), X, W).rows}
    assert not ft.explain(ft.tune(f), X, W).opaque


def test_the_operands_of_an_opaque_operation_keep_their_dtype():
    half = ft.autocast(lambda x, w: hidden(x @ w, w).astype(jnp.float32), "bfloat16")
    closed = jax.make_jaxpr(half)(X, W)
    (eqn,) = (e for e in closed.jaxpr.eqns if e.primitive is hidden_p)
    assert {v.aval.dtype.name for v in eqn.invars} == {"float32"}
