"""FLOPs and bytes against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fnet import hardware as hw
from fnet import layers as nn
from fnet import transforms as ft


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_dense_is_2bmnk_and_its_bytes():
    counted = hw.count(lambda x, w: x @ w, spec(8, 32), spec(32, 64))
    assert counted.flops == counted.model_flops == 2 * 8 * 32 * 64
    assert (
        counted.io_bytes
        == counted.total.bytes
        == counted.total.fused_bytes
        == 4 * (8 * 32 + 32 * 64 + 8 * 64)
    )
    (matmul,) = counted.matmuls
    assert (
        matmul.shape == (1, 8, 64, 32) and matmul.dtype == "float32" and counted.dtype == "float32"
    )
    assert counted.notes == ()


def test_batched_contraction():
    counted = hw.count(
        lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b), spec(2, 3, 5, 7), spec(2, 3, 11, 7)
    )
    assert counted.flops == 2 * 2 * 3 * 5 * 11 * 7 and counted.matmuls[0].shape == (6, 5, 11, 7)


def test_ragged_dot():
    counted = hw.count(lax.ragged_dot, spec(12, 5), spec(3, 5, 7), spec(3, dtype="int32"))
    assert counted.flops == 2 * 12 * 5 * 7


CONVS = [  # (image, kernel, strides, dilation, groups, outputs per side)
    ((2, 8, 8, 6), (3, 3, 6, 10), 1, 1, 1, 8),
    ((2, 8, 8, 6), (3, 3, 6, 10), 2, 1, 1, 4),
    ((2, 9, 9, 6), (3, 3, 6, 10), 1, 2, 1, 9),
    ((2, 8, 8, 6), (3, 3, 3, 10), 1, 1, 2, 8),
    ((1, 8, 8, 6), (5, 5, 1, 6), 1, 1, 6, 8),
]


def conv(x, w, strides=1, dilation=1, groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        (strides,) * 2,
        "SAME",
        rhs_dilation=(dilation,) * 2,
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@pytest.mark.parametrize(("image", "kernel", "strides", "dilation", "groups", "side"), CONVS)
def test_conv_counts_its_nominal_window_and_thrice_with_gradients(
    image, kernel, strides, dilation, groups, side
):
    f = functools.partial(conv, strides=strides, dilation=dilation, groups=groups)
    nominal = 2 * image[0] * side**2 * kernel[3] * kernel[0] * kernel[1] * image[3] // groups
    assert hw.count(f, spec(*image), spec(*kernel)).flops == nominal
    training = hw.count(
        jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1)), spec(*image), spec(*kernel)
    )
    assert training.model_flops == 3 * nominal


def test_a_transposed_conv_does_not_count_the_zeros_between_its_inputs():
    f = lambda x, w: lax.conv_transpose(
        x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert hw.count(f, spec(1, 8, 8, 4), spec(2, 2, 4, 6)).flops == 2 * 8 * 8 * 4 * 2 * 2 * 6


def test_a_scan_is_its_length_times_its_body():
    one = hw.count(lambda x, w: jnp.tanh(x @ w), spec(4, 16), spec(16, 16))
    many = hw.count(
        lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)[0],
        spec(4, 16),
        spec(16, 16),
    )
    assert (
        many.flops == 7 * one.flops
        and many.total.transcendental == 7 * one.total.transcendental == 7 * 64
    )
    assert many.matmuls[0].times == 7
    nested = hw.count(
        lambda x, w: lax.fori_loop(
            0, 3, lambda i, y: lax.fori_loop(0, 5, lambda j, z: z @ w, y), x
        ),
        spec(4, 16),
        spec(16, 16),
    )
    assert nested.flops >= 15 * 2 * 4 * 16 * 16 and nested.model_flops == 15 * 2 * 4 * 16 * 16


def test_a_while_loop_is_counted_once_and_says_so():
    counted = hw.count(
        lambda x: lax.while_loop(lambda y: y.sum() < 9.0, lambda y: y @ y, x), spec(4, 4)
    )
    assert counted.model_flops == 2 * 4**3
    assert counted.notes == ("while loop: its number of iterations is unknown, one is counted",)


def test_a_cond_is_its_most_expensive_branch():
    def f(x):
        with jax.named_scope("gate"):
            return lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    counted = hw.count(f, spec(4, 4))
    assert counted.model_flops == 2 * 2 * 4**3 and len(counted.matmuls) == 2
    assert counted.notes == ("cond in 'gate': only the most expensive of 2 branches is counted",)


def test_elementwise_reductions_and_transcendentals():
    total = hw.count(lambda x: (jnp.exp(x) * x + 1.0).sum(), spec(10)).total
    assert (total.elementwise, total.reduction, total.transcendental, total.matmul) == (
        20,
        10,
        10,
        0,
    )
    assert (
        hw.count(lambda i: i * 3 + 1, spec(10, dtype="int32")).flops == 0
    )  # index arithmetic is no FLOP
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    assert hw.count(pool, spec(8, 8)).total.reduction == 8 * 8


def test_custom_derivatives_and_jitted_bodies_are_read():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
    assert hw.count(jax.jit(f), spec(4, 8), spec(8, 2)).flops == 2 * 4 * 8 * 2
    both = hw.count(jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1)), spec(4, 8), spec(8, 2))
    assert both.model_flops == 3 * 2 * 4 * 8 * 2
    assert (
        hw.count(lambda x: jax.nn.relu(x), spec(16)).total.elementwise == 16
    )  # a custom_jvp around a jit


def test_the_gradient_of_dense_costs_three_forwards():
    forward = lambda x, w: (x @ w).sum()
    counted = hw.count(jax.value_and_grad(forward, (0, 1)), spec(8, 32), spec(32, 64))
    assert counted.model_flops == 3 * 2 * 8 * 32 * 64


def test_recomputation_is_counted_and_kept_out_of_the_model_flops():
    def f(x, w):
        with jax.named_scope("block"):
            return jnp.sin(jnp.sin(x @ w) @ w).sum()

    plain = hw.count(jax.value_and_grad(f), spec(4, 16), spec(16, 16))
    remat = hw.count(jax.value_and_grad(jax.checkpoint(f)), spec(4, 16), spec(16, 16))
    assert plain.total.recomputed == 0 and remat.total.recomputed > 0
    assert (
        remat.flops > plain.flops
        and remat.model_flops == plain.model_flops == 2 * 2 * 2 * 4 * 16 * 16
    )
    assert set(remat.scopes) <= {"block", ""}


def test_forward_and_backward_fall_to_the_same_scope():
    def f(x, w):
        with jax.named_scope("block"), jax.named_scope("fc"):
            return jax.vmap(lambda row: row @ w)(x).sum()

    counted = hw.count(jax.value_and_grad(f, (0, 1)), spec(8, 32), spec(32, 64))
    assert counted.under("block").matmul == counted.scopes["block/fc"].matmul == 3 * 2 * 8 * 32 * 64
    assert counted.by_depth(1)["block"].matmul == counted.total.matmul


def gpt(params, tokens, heads):
    """A decoder with dense causal attention: L blocks by scan, an output head."""
    x = params["embed"][tokens]
    batch, time, width = x.shape

    def block(x, p):
        split = lambda t: t.reshape(batch, time, heads, width // heads)
        with jax.named_scope("attention"):
            q, k, v = map(split, jnp.split(x @ p["qkv"], 3, axis=-1))
            x = (
                x
                + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
            )
        with jax.named_scope("mlp"):
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    with jax.named_scope("blocks"):
        x, _ = lax.scan(block, x, params["blocks"])
    with jax.named_scope("head"):
        return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()


def test_gpt_training_is_6n_plus_12lhds_per_token():
    width, depth, heads, vocab, batch, time = 64, 3, 4, 100, 2, 16
    blocks = {
        "qkv": spec(depth, width, 3 * width),
        "out": spec(depth, width, width),
        "up": spec(depth, width, 4 * width),
        "down": spec(depth, 4 * width, width),
    }
    params = {"embed": spec(vocab, width), "blocks": blocks, "head": spec(width, vocab)}
    tokens = spec(batch, time, dtype="int32")
    n = depth * 12 * width**2 + width * vocab  # the embedding is a look-up, not a product
    per_token = 6 * n + 12 * depth * heads * (width // heads) * time
    training = hw.count(jax.value_and_grad(gpt), params, tokens, heads=heads)
    assert training.model_flops == per_token * batch * time
    assert hw.count(gpt, params, tokens, heads=heads).model_flops * 3 == training.model_flops
    assert training.under("blocks/mlp").matmul == 3 * 2 * batch * time * depth * 8 * width**2
    assert training.under("head").matmul == 6 * batch * time * width * vocab


def test_shard_map_counts_all_shards():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    f = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert hw.count(f, spec(8, 16), spec(16, 4)).flops == 2 * 8 * 16 * 4


def test_what_has_no_rule_is_named():
    counted = hw.count(lambda x: jnp.linalg.eigh(x)[0], spec(8, 8))
    assert any(
        note.startswith("eigh") and "its FLOPs are unknown" in note for note in counted.notes
    )
    callback = hw.count(lambda x: jax.pure_callback(lambda y: y, spec(4), x), spec(4))
    assert callback.notes == ("pure_callback: its FLOPs are unknown, counted as 0",)


def test_a_product_that_autocast_lowered_counts_in_its_narrow_type():
    counted = hw.count(ft.autocast(lambda x, w: x @ w, "bfloat16"), spec(8, 32), spec(32, 64))
    assert (
        counted.model_flops == 2 * 8 * 32 * 64
        and counted.dtype == "bfloat16"
        and counted.notes == ()
    )


def test_no_xla_cost_analysis_and_no_values_are_needed():
    big = spec(2**20, 2**16, dtype="bfloat16")
    assert hw.count(lambda a: a.T @ a, big).flops == 2 * 2**16 * 2**16 * 2**20


def test_xla_agrees_where_it_is_exact():
    f = jax.jit(lambda x, w: x @ w)
    (x, w) = jnp.ones((8, 32)), jnp.ones((32, 64))
    assert f.lower(x, w).compile().cost_analysis()["flops"] == hw.count(f, x, w).flops


def test_bytes_of_slices_and_updates_are_those_of_the_slice():
    update = hw.count(
        lambda cache, x: lax.dynamic_update_slice(cache, x, (5, 0)), spec(1000, 8), spec(1, 8)
    )
    assert update.total.bytes == 2 * 4 * 8
    gather = hw.count(lambda table, i: table[i], spec(1000, 8), spec(3, dtype="int32"))
    assert gather.total.fused_bytes < 1000


def test_fusion_keeps_an_update_bound_by_its_arrays():
    counted = hw.count(lambda p, m, g: (p - 0.1 * (0.9 * m + g), 0.9 * m + g), *[spec(1000)] * 3)
    assert counted.total.fused_bytes == counted.io_bytes == 5 * 4000 < counted.total.bytes


def test_an_elementwise_epilogue_is_not_stored():
    counted = hw.count(lambda x, w: jnp.tanh(x @ w), spec(32, 32), spec(32, 32))
    assert counted.total.fused_bytes == 3 * 4 * 32 * 32


def test_static_arguments_pass_through():
    f = lambda x, *, train, mode: x * 2.0 if train and mode == "double" else x
    assert hw.count(f, spec(4), train=True, mode="double").flops == 4
    assert hw.count(f, spec(4), train=False, mode="double").flops == 0


def test_the_table_reads():
    def f(x, w):
        with jax.named_scope("fc"):
            return jnp.tanh(x @ w)

    text = str(hw.count(f, spec(8, 32), spec(32, 64)))
    assert (
        "fc" in text and "32.77 kF" in text and "unfused, upper bound" in text and "total" in text
    )


@nn.layer
def block(scope, x):
    y = nn.Dense(6)(scope["fc"], x)
    return x + nn.Dense(4)(scope["proj"], jnp.tanh(y))


def test_counts_by_path_agree_in_every_form_of_recomputation():
    x = jax.random.normal(jax.random.key(1), (5, 4))

    def gradient(form):
        inner = {"Remat": nn.Remat(block())}.get(form, block())
        model = nn.Sequential(blocks=inner, head=nn.Dense(3))
        params, _ = model.init(jax.random.key(0), x)
        call = jax.checkpoint(model.__call__) if form == "checkpoint" else model
        step = jax.grad(lambda p: jnp.square(call(p, x)).mean())
        return ft.rematerialize(step) if form == "rematerialize" else step, params

    plain = hw.count(*gradient("plain"))
    paths = {"blocks/fc", "blocks/proj", "head"}
    assert {path for path, cost in plain.scopes.items() if cost.matmul} == paths
    for form in ("Remat", "checkpoint", "rematerialize"):
        counted = hw.count(*gradient(form))
        assert {path for path, cost in counted.scopes.items() if cost.matmul} == paths, form
        for path in paths:
            assert counted.under(path).model_flops == plain.under(path).matmul, (form, path)
        assert (
            counted.under("blocks").matmul
            == plain.under("blocks").matmul + counted.total.recomputed
        )
    assert hw.count(*gradient("Remat")).total.recomputed > 0
