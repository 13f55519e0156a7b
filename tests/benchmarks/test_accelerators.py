"""benchmarks.accelerators: what it reads from HLO, its steps, and its comparison with recorded
counts."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks import _accelerator_steps as steps
from benchmarks import _hlo, accelerators

CUDNN = """
ENTRY %main (p0: bf16[8,16,16,4], p1: bf16[3,3,4,32]) -> f32[8,16,16,32] {
  %p0 = bf16[8,16,16,4]{3,2,1,0} parameter(0)
  %p1 = bf16[3,3,4,32]{3,2,1,0} parameter(1)
  %conv = (bf16[8,16,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%p0, %p1), dim_labels=b01f_01io->b01f, CALLED
  %y = bf16[8,16,16,32]{3,2,1,0} get-tuple-element(%conv), index=0
  %vmem = bf16[8,16,16,32]{3,2,1,0:S(1)} copy(%y)
  %half = bf16[4,16,16,32]{3,2,1,0} slice(%y), slice={[0:4], [0:16], [0:16], [0:32]}
  ROOT %wide = f32[8,16,16,32]{3,2,1,0} convert(%y), metadata={op_name="jit(f)/block/convert"}
}
""".replace("CALLED", 'custom_call_target="__cudnn$convForward"')


def text(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def test_a_program_of_a_gpu():
    conv, vmem, half, wide = _hlo.kernels(CUDNN)
    x, w, y = 2 * 8 * 16 * 16 * 4, 2 * 9 * 4 * 32, 2 * 8 * 16 * 16 * 32
    assert conv.products == (_hlo.Product(2 * 8 * 16 * 16 * 32 * 9 * 4, "bf16 x bf16 -> bf16"),)
    assert (conv.kind, conv.bytes, conv.target) == ("product", x + w + y, "__cudnn$convForward")
    assert (vmem.kind, vmem.bytes) == ("copy", y)  # the destination is on the chip
    assert (half.bytes, half.kind) == (y, "copy")  # half of the array, read and written
    assert (wide.bytes, wide.kind, wide.scope) == (3 * y, "cast", "jit(f)/block/convert")


def test_products_in_a_loop_count_once_for_each_iteration():
    f = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    kernels = _hlo.kernels(text(f, jnp.ones((5, 64, 64)), jnp.ones((32, 64))))
    assert sum(kernel.times * kernel.flops for kernel in kernels) == 5 * 2 * 32 * 64 * 64
    dots = {product.dtypes for kernel in kernels for product in kernel.products}
    assert dots == {"f32 x f32 -> f32"}


def test_zeros_of_a_dilation_are_no_flops():
    hlo = """
ENTRY %main (p0: f32[1,8,8,4], p1: f32[1,1,4,4]) -> f32[1,15,15,4] {
  %p0 = f32[1,8,8,4]{3,2,1,0} parameter(0)
  %p1 = f32[1,1,4,4]{3,2,1,0} parameter(1)
  ROOT %c = f32[1,15,15,4]{3,2,1,0} convolution(%p0, %p1), window={size=1x1 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f
}
"""
    (kernel,) = _hlo.kernels(hlo)
    assert kernel.flops == 2 * 8 * 8 * 4 * 4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("program", "form"),
    [
        (program, form)
        for program, forms in accelerators.FORMS.items()
        for form in forms
        if not form.endswith("tuned")
    ],
)
def test_steps_have_equal_outputs(program, form):
    """Every step can be traced, and returns its donated arguments."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step, donated, args = steps.PROGRAMS[program](form, steps.SMALL, "cuda")
        out = jax.eval_shape(step, *args)
    shapes = lambda tree: sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(tree))
    assert all(set(shapes(args[i])) <= set(shapes(out)) for i in donated)


def test_worse_counts_are_named():
    good = {"GB": 1.0, "products": {"bf16 x bf16 -> f32": 3}, "BackwardInput": 2}
    bad = {"GB": 1.2, "products": {"f32 x f32 -> f32": 1}, "BackwardInput": 1}
    assert list(accelerators.worse({"a": good}, {"a": good})) == []
    assert len(list(accelerators.worse({"a": bad}, {"a": good}))) == 3
    assert list(accelerators.worse({"a": good}, {"a": bad})) == []
