"""Attention with symbolic sizes, and as portable operations in exported programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax import export

from fnet.layers import _attend_flash as flash
from fnet.layers import _attend_xla as xla
from fnet.layers import dot_product_attention, linear_cross_entropy
from fnet.transforms import autocast, explain

pytestmark = pytest.mark.usefixtures("quickly")
KERNELS = re.compile(r"custom_call @(?!shape_assertion)(\w+)")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def agrees(f, specs, *calls):
    program = export.export(jax.jit(f), platforms=("cpu", "cuda", "tpu"))(*specs)
    assert not KERNELS.findall(program.mlir_module())
    for args in calls:
        close(program.call(*args), jax.jit(f)(*args), 1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [0, 2])
def test_vmap_over_a_symbolic_axis(axis):
    n, b, t = export.symbolic_shape("n, b, t")
    shape = [b, t, 2, 4]
    shape.insert(axis, n)
    concrete = [{"n": 3, "b": 2, "t": 5}.get(str(size), size) for size in shape]
    f = jax.vmap(functools.partial(dot_product_attention, causal=True), axis)
    agrees(f, [spec(*shape)] * 3, [normal(*concrete, seed=i) for i in range(3)])


def test_vmap_of_the_query_alone_with_a_mask():
    n, b, t = export.symbolic_shape("n, b, t")
    f = jax.vmap(
        lambda q, k, v, mask: dot_product_attention(q, k, v, mask=mask), (0, None, None, None)
    )
    mask = jnp.tri(5, dtype=bool)[None, None]
    agrees(
        f,
        [spec(n, b, t, 2, 4), *[spec(b, t, 2, 4)] * 2, spec(1, 1, t, t, dtype=jnp.bool_)],
        [normal(3, 2, 5, 2, 4), normal(2, 5, 2, 4, seed=1), normal(2, 5, 2, 4, seed=2), mask],
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", [False, True])
def test_window_with_more_queries_than_keys(causal):
    """Some queries see no key. With symbolic sizes this is not known."""
    b, t, s = export.symbolic_shape("b, t, s")
    f = jax.grad(
        lambda q, k, v: jnp.square(dot_product_attention(q, k, v, causal=causal, window=2)).sum(),
        (0, 1, 2),
    )
    agrees(
        f,
        [spec(b, t, 2, 4), *[spec(b, s, 2, 4)] * 2],
        *[
            [normal(2, t, 2, 4), normal(2, s, 2, 4, seed=1), normal(2, s, 2, 4, seed=2)]
            for t, s in ((7, 3), (3, 7))
        ],
    )


def test_kernels_are_not_exported():
    """A file must not depend on cuDNN's version; the same program compiled here has the kernel."""
    attend = jax.jit(functools.partial(dot_product_attention, causal=True))
    x = [spec(2, 512, 2, 64, dtype=jnp.bfloat16)] * 3
    for platforms in ("cuda",), ("tpu",), ("cpu", "cuda", "tpu"):
        assert not KERNELS.findall(export.export(attend, platforms=platforms)(*x).mlir_module())
    assert "cudnn" in attend.trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    assert not KERNELS.findall(attend.trace(*x).lower(lowering_platforms=("cpu", "cuda")).as_text())


@pytest.mark.exhaustive
def test_one_program_for_every_scope():
    """Sizes of the same name that belong to different exports are different sizes."""
    attend = jax.jit(functools.partial(dot_product_attention, causal=True))
    x = normal(2, 3, 2, 4)
    for _ in range(2):
        b, t = export.symbolic_shape("b, t")
        close(export.export(attend)(*[spec(b, t, 2, 4)] * 3).call(x, x, x), attend(x, x, x), 1e-6)


def test_explain_names_symbolic_sizes():
    (t,) = export.symbolic_shape("t")
    attend = functools.partial(dot_product_attention, causal=True)
    assert "plain XLA, because symbolic times cannot be split into blocks" in str(
        explain(autocast(attend, "bfloat16"), *[spec(2, t, 2, 4)] * 3)
    )


def test_why_a_kernel_is_refused():
    (b,) = export.symbolic_shape("b")
    form, q = xla.Form(True, None, 1.0), spec(b, 512, 2, 64, dtype=jnp.bfloat16)
    for platform in "cuda", "tpu":
        assert flash.refusal(platform, form, jnp.bfloat16, q, q) == (
            "a kernel needs concrete sizes, and these are symbolic"
        )
        assert flash.refusal(platform, form, jnp.bfloat16, q, q, "portable") == (
            "a program that is exported or lowered for several platforms must not depend on a "
            "kernel's library"
        )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_cross_entropy_of_symbolic_sizes(chunk_size):
    b, t = export.symbolic_shape("b, t")
    f = jax.grad(
        lambda x, kernel, y: linear_cross_entropy(x, kernel, y, chunk_size=chunk_size).sum(), (0, 1)
    )
    draw = np.random.default_rng(0)
    agrees(
        f,
        [spec(b, t, 6), spec(6, 11), spec(b, t, dtype=jnp.int32)],
        *[
            [normal(2, t, 6), normal(6, 11), jnp.asarray(draw.integers(0, 11, (2, t)), jnp.int32)]
            for t in (4, 9)
        ],
    )
