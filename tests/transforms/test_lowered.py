"""The low-precision product: values, dtypes and derivatives in every order, against the same casts
by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fnet import transforms as ft
from fnet.transforms._autocast._lowered import as_matrices, lowered

KEY = jax.random.key(0)
CONV = dict(window_strides=(2, 2), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
CASES = {
    "matmul": (lambda x, y: x @ y, (4, 6), (6, 5)),
    "batch leads": (lambda x, y: jnp.einsum("bik,bkj->bij", x, y), (2, 4, 6), (2, 6, 3)),
    "batch inside": (lambda x, y: jnp.einsum("bthd,bshd->bhts", x, y), (2, 4, 3, 5), (2, 6, 3, 5)),
    "outer": (lambda x, y: jnp.einsum("i,j->ij", x, y), (4,), (5,)),
    "dot": (lambda x, y: jnp.einsum("i,i->", x, y), (4,), (4,)),
    "conv": (lambda x, y: lax.conv_general_dilated(x, y, **CONV), (2, 6, 6, 3), (3, 3, 3, 4)),
}


def product(name, compute, out=jnp.float32):
    f, *shapes = CASES[name]
    x, y = (jax.random.normal(key, shape) for key, shape in zip(jax.random.split(KEY), shapes))
    eqn = next(
        e
        for e in jax.make_jaxpr(f)(x, y).eqns
        if e.primitive.name in ("dot_general", "conv_general_dilated")
    )
    direct = lambda x, y: eqn.primitive.bind(
        x, y, **{**eqn.params, "preferred_element_type": jnp.dtype("float32")}
    )
    low = lambda x, y: lowered(eqn.primitive, x, y, eqn.params, compute=compute, out=out)
    return low, direct, x, y


def rounded(x, dtype):
    """x as the low dtype holds it, in float32: products of such numbers are exact in float32 for
    bfloat16."""
    return x.astype(dtype).astype(jnp.float32)


def error(a, b):
    return float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())


@pytest.mark.quick_cases("float16-batch leads", "float16-dot")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_values_are_those_of_operands_cast_by_hand(name, compute):
    low, direct, x, y = product(name, compute)
    # XLA:CPU sums convolutions in the low dtype.
    bound = {"bfloat16": 2e-2, "float16": 3e-3}[compute] if name == "conv" else 1e-6
    assert error(jax.jit(low)(x, y), direct(rounded(x, compute), rounded(y, compute))) <= bound


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_operands_dtypes_and_low_precision_values(name):
    low, direct, x, y = product(name, "bfloat16")
    total = lambda f: lambda x, y: jnp.square(f(x, y)).sum()
    grads = jax.jit(jax.grad(total(low), (0, 1)))(x, y)
    wanted = jax.grad(total(direct), (0, 1))(x, y)
    assert [g.dtype for g in grads] == [jnp.float32] * 2
    assert max(map(error, grads, wanted)) <= 3e-2
    narrow = jax.grad(lambda x: total(low)(x, y))(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["matmul", "batch inside", "conv"])
def test_second_derivatives_and_batches(name):
    low, direct, x, y = product(name, "bfloat16")
    total = lambda f: lambda x: jnp.square(f(x, y)).sum()
    twice = lambda f: jax.jvp(jax.grad(total(f)), (x,), (x,))[1]
    assert error(twice(low), twice(direct)) <= 3e-2
    xs, ys = jnp.stack([x, 2 * x]), jnp.stack([y, -y])
    for axes, args in ((0, 0), (xs, ys)), ((0, None), (xs, y)), ((None, 0), (x, ys)):
        assert error(jax.vmap(low, axes)(*args), jax.vmap(direct, axes)(*args)) <= 2e-2


@pytest.mark.quick_cases("matmul")
@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_derivatives_on_one_mesh_after_another(name):
    """What is kept for a kind of product belongs to the mesh for which it was traced."""
    _, _, x, y = product(name, "bfloat16")
    low = ft.autocast(CASES[name][0], "bfloat16")
    want = jax.grad(lambda y: low(x, y).sum())(y)
    for mesh in (
        jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,)),
        jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2),
    ):
        gradient = jax.shard_map(
            jax.grad(lambda y, x: jax.vmap(low, (0, None))(x[:, None], y).sum()),
            mesh=mesh,
            in_specs=(P(), P("i")),
            out_specs=P(),
        )
        assert error(jax.jit(gradient)(y, x), want) <= 2e-2


@pytest.mark.quick_cases("matmul")
@pytest.mark.parametrize("name", ["matmul", "conv"])
def test_gradients_of_replicated_operands_on_an_explicit_mesh(name):
    low, _, x, y = product(name, "bfloat16")
    gradient = jax.grad(lambda x, y: low(x, y).sum(), (0, 1))
    with jax.set_mesh(jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,))):
        got = jax.jit(gradient)(jax.device_put(x, P("i")), jax.device_put(y, P()))
    assert [jax.typeof(g).sharding.spec[0] for g in got] == ["i", None]
    assert max(map(error, got, gradient(x, y))) <= 2e-2


def test_every_product_of_a_gradient_takes_low_operands_and_sums_in_float32():
    low, _, x, y = product("batch inside", "bfloat16")
    text = jax.jit(jax.grad(lambda x, y: jnp.square(low(x, y)).sum(), (0, 1))).lower(x, y).as_text()
    types = re.findall(
        r"dot_general.*?: \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\) -> tensor<[\dx]*x(\w+)>",
        text,
    )
    assert types == [("bf16", "bf16", "f32")] * 3


def test_an_accelerator_sums_in_float32_and_writes_what_is_asked_for():
    low, _, x, y = product("matmul", "bfloat16", jnp.bfloat16)
    text = jax.export.export(jax.jit(low), platforms=["tpu"])(x, y).mlir_module()
    assert re.search(
        r"dot_general.*\(tensor<4x6xbf16>, tensor<6x5xbf16>\) -> tensor<4x5xbf16>", text
    )
    wide, _, x, y = product("matmul", "bfloat16")
    text = jax.export.export(jax.jit(wide), platforms=["cuda"])(x, y).mlir_module()
    assert re.search(
        r"dot_general.*\(tensor<4x6xbf16>, tensor<6x5xbf16>\) -> tensor<4x5xf32>", text
    )


def test_numpy_operands_and_eager_calls():
    low, _, x, y = product("matmul", "bfloat16")
    np.testing.assert_array_equal(low(np.asarray(x), np.asarray(y)), low(x, y))


@pytest.mark.parametrize(
    ("one", "other", "left", "right", "count"),
    [
        ((4, 8), (8, 3), 1, 0, 0),  # x w
        ((8, 5), (8, 3), 0, 0, 2),  # a weight gradient: the narrower operand and the result
    ],
)
def test_which_matrices_are_transposed(one, other, left, right, count):
    """The form decides about the speed alone."""
    product = lambda x, y: as_matrices(x, y, (((left,), (right,)), ((), ())), jnp.bfloat16)
    text = str(jax.make_jaxpr(product)(jnp.ones(one, jnp.bfloat16), jnp.ones(other, jnp.bfloat16)))
    assert text.count("= transpose[") == count
