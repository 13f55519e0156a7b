"""Values in closed form and against Flax, where PyTorch's fixtures do not reach."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fnet import layers as nn

KEY = jax.random.key(0)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def randomised(tree, seed=1):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda a: a + jnp.asarray(draw.normal(size=a.shape), a.dtype), tree)


# Maxout


def test_maxout_is_the_maximum_of_affine_maps():
    x, layer = draw(5, 4), nn.Maxout(3, 2)
    params = randomised(layer.init(KEY, x)[0])
    kernel, bias = (np.asarray(params[name]) for name in ("kernel", "bias"))
    pieces = [np.asarray(x) @ kernel[:, :, i] + bias[None, :, i] for i in range(2)]
    close(layer(params, x), jnp.asarray(np.maximum(*pieces)))


def test_maxout_makes_an_absolute_value():
    params = {"kernel": jnp.array([[[1.0, -1.0]]]), "bias": jnp.zeros((1, 2))}
    assert nn.Maxout(1)(params, jnp.array([[-2.0], [3.0]])).tolist() == [[2], [3]]


def test_maxout_is_initialized_by_its_inputs():
    kernel = nn.Maxout(64, 4).init(KEY, jnp.ones((1, 256)))[0]["kernel"]
    np.testing.assert_allclose(kernel.std(), 256**-0.5, rtol=0.02)


# Dropout


def test_dropout_keeps_the_mean_and_drops_its_share():
    x = jnp.ones((200, 200))
    y = nn.Dropout(0.3)({}, x, key=KEY, train=True)
    kept = np.asarray(y != 0)
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(0.7)}
    deviation = (0.3 * 0.7 / x.size) ** 0.5
    assert abs(kept.mean() - 0.7) < 4 * deviation
    assert abs(np.asarray(y).mean() - 1) < 4 * deviation / 0.7
    neighbors = np.corrcoef(kept[:, :-1].ravel(), kept[:, 1:].ravel())[0, 1]
    assert abs(neighbors) < 4 / x.size**0.5


@pytest.mark.exhaustive
def test_dropout_broadcasts_one_draw():
    y = nn.Dropout(0.5, broadcast=(1, -2))({}, jnp.ones((4, 3, 3, 8)), key=KEY, train=True)
    assert (y == y[:, :1, :1]).all()
    assert len(np.unique(y[:, 0, 0])) == 2


def test_dropout_of_nothing_and_of_everything():
    x = draw(3, 4)
    assert nn.Dropout(0.5)({}, x) is x
    assert (nn.Dropout(0.0)({}, x, train=True) == x).all()
    assert (nn.Dropout(1.0)({}, x, train=True) == 0).all()
    assert jnp.isfinite(jax.grad(lambda x: nn.Dropout(1.0)({}, x, train=True).sum())(x)).all()


# BatchNorm

X = draw(16, 3, 4, seed=2) * 3 + 1
NORM = nn.BatchNorm(momentum=0.8)
NORM_PARAMS, NORM_STATE = (randomised(tree) for tree in NORM.init(KEY, X))
NORM_STATE["var"] = jnp.abs(NORM_STATE["var"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("train", [False, True])
def test_batch_norm_is_flax_s(train):
    twin = linen.BatchNorm(use_running_average=not train, momentum=0.8, use_fast_variance=False)
    want, new = twin.apply(
        {"params": NORM_PARAMS, "batch_stats": NORM_STATE}, X, mutable=["batch_stats"]
    )
    close(NORM(NORM_PARAMS, X, state=NORM_STATE, train=train), (want, new["batch_stats"]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("weight", ["batch", "positions"])
def test_batch_norm_weight_counts_rows(weight):
    """Whole weights are repetitions; weight 0 leaves a row out, NaN and all."""
    counts = np.random.default_rng(3).integers(0, 3, (16,) if weight == "batch" else (16, 3))
    each = np.broadcast_to(counts.reshape(16, -1), (16, 3))
    rows = jnp.asarray(np.repeat(np.asarray(X).reshape(48, 4), each.ravel(), axis=0))
    spoilt = jnp.where(each[..., None] == 0, jnp.nan, X)
    y, state = NORM(NORM_PARAMS, spoilt, jnp.asarray(counts), state=NORM_STATE, train=True)
    y_rows, want = NORM(NORM_PARAMS, rows, state=NORM_STATE, train=True)
    close(state, want)
    first = np.repeat(np.arange(48), each.ravel())
    close(y.reshape(48, 4)[first], y_rows)


@pytest.mark.exhaustive
def test_batch_norm_weight_leaves_padding_without_gradient():
    weight = jnp.arange(16) < 10
    grad = jax.grad(
        lambda x: jnp.sin(NORM(NORM_PARAMS, x, weight, state=NORM_STATE, train=True)[0][:10]).sum()
    )(X)
    short = jax.grad(
        lambda x: jnp.sin(NORM(NORM_PARAMS, x, state=NORM_STATE, train=True)[0]).sum()
    )(X[:10])
    close(grad[:10], short, 1e-4)
    assert (grad[10:] == 0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", ["pmap", "vmap", "shard_map"])
def test_batch_norm_statistics_over_a_mapped_axis(how, weighted):
    norm = nn.BatchNorm(momentum=0.8, axis_name="devices")
    weight = jnp.asarray(np.arange(16) % 3, jnp.float32) if weighted else None
    want = NORM(NORM_PARAMS, X, weight, state=NORM_STATE, train=True)

    def step(x, weight=None):
        return norm(NORM_PARAMS, x, weight, state=NORM_STATE, train=True)

    arrays = (X,) if weight is None else (X, weight)
    if how == "shard_map":
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        f = jax.shard_map(step, mesh=mesh, in_specs=P("devices"), out_specs=(P("devices"), P()))
        y, state = jax.jit(f)(*arrays)
    else:
        mapped = (jax.pmap if how == "pmap" else jax.vmap)(step, axis_name="devices")
        y, state = mapped(*(a.reshape(8, 2, *a.shape[1:]) for a in arrays))
        assert all((a == a[:1]).all() for a in jax.tree.leaves(state))
        y, state = y.reshape(X.shape), jax.tree.map(lambda a: a[0], state)
    close((np.asarray(y), jax.tree.map(np.asarray, state)), jax.tree.map(np.asarray, want))


@pytest.mark.exhaustive
def test_batch_norm_without_an_axis_is_local_under_vmap():
    y, _ = jax.vmap(lambda x: NORM(NORM_PARAMS, x, state=NORM_STATE, train=True))(
        X.reshape(8, 2, 3, 4)
    )
    close(y[0], NORM(NORM_PARAMS, X[:2], state=NORM_STATE, train=True)[0])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mean", [0.0, 1e3, -1e6])
def test_batch_norm_is_accurate_for_large_means(mean):
    """One pass over x, with sums of x - shift: with sums of x and x squared, the variance would be
    lost."""
    x = (np.random.default_rng(0).normal(mean, [0.5, 2, 8], (64, 9, 9, 3))).astype(np.float32)
    norm, deviation = nn.BatchNorm(momentum=0.0), x.astype(np.float64).std((0, 1, 2))
    params, state = norm.init(jax.random.key(0), x)
    y, state = jax.jit(lambda x: norm(params, x, state=state, train=True))(x)
    np.testing.assert_allclose(state["var"], deviation**2, rtol=1e-4)
    np.testing.assert_allclose(
        state["mean"], x.astype(np.float64).mean((0, 1, 2)), rtol=1e-5, atol=1e-5
    )
    want = (x - x.astype(np.float64).mean((0, 1, 2))) / np.sqrt(deviation**2 + 1e-5)
    assert np.abs(y - want).max() < 1e-4 + 1e-7 * abs(mean)


def test_batch_norm_gradients_and_constants():
    x = jnp.asarray(np.random.default_rng(1).normal(3, 2, (6, 5)), jnp.float32)
    norm = nn.BatchNorm(use_scale=False, use_bias=False)
    batch = lambda x: norm(
        {}, x, state={"mean": jnp.zeros(x.shape[1:]), "var": jnp.ones(x.shape[1:])}, train=True
    )[0]
    loss = lambda x: jnp.sin(batch(x)).sum()

    def two_passes(x):
        center = x - x.mean(0)
        return jnp.sin(center * lax.rsqrt(jnp.square(center).mean(0) + 1e-5)).sum()

    with jax.numpy_rank_promotion("allow"):
        close(jax.jit(jax.grad(loss))(x), jax.jit(jax.grad(two_passes))(x), 1e-5)
        close(
            jax.jit(jax.hessian(loss))(x[:3, :2]), jax.jit(jax.hessian(two_passes))(x[:3, :2]), 1e-4
        )
    flat = jnp.full((4, 5), 7.0)
    assert (batch(flat) == 0).all() and jnp.isfinite(jax.jit(jax.grad(loss))(flat)).all()
    assert batch(flat[:0]).shape == (0, 5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layer", [nn.LayerNorm(), nn.RMSNorm(), nn.GroupNorm(2), nn.BatchNorm()])
def test_statistics_are_taken_in_float32(layer):
    """In 16 bits the squares of these inputs overflow (float16) or lose their digits (bfloat16)."""
    x = draw(8, 6, 4) * 100 + 300
    params, state = layer.init(KEY, x)
    for dtype in (jnp.float16, jnp.bfloat16):
        narrow = x.astype(dtype)
        y, _ = layer(params, narrow, state=state, train=True)
        want, _ = layer(params, narrow.astype(jnp.float32), state=state, train=True)
        assert y.dtype == dtype
        close(y.astype(jnp.float32), want, 2 * float(jnp.finfo(dtype).eps))


# Convolution


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 9),
    window=st.integers(1, 4),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["SAME", "VALID", 1, [(0, 1)]]),
)
def test_conv_transpose_gives_back_conv_s_shape(size, window, stride, dilation, padding):
    """Shapes only: what ConvTranspose makes, Conv takes back to where it came from."""
    options = {"padding": padding, "dilation": dilation}
    shape = lambda layer, x: jax.eval_shape(lambda x: layer(layer.init(KEY, x)[0], x), x)
    up = nn.ConvTranspose(2, window, stride, **options)
    x = jax.ShapeDtypeStruct((1, size, 3), jnp.float32)
    if (size - 1) * stride + dilation * (window - 1) + 1 <= 2:  # the padding would take all away
        return
    y = shape(up, x)
    if padding == "SAME":
        assert y.shape[1] == size * stride
    assert shape(nn.Conv(3, window, stride, **options), y).shape == x.shape


@pytest.mark.parametrize(
    ("window", "strides", "padding", "dilation", "groups", "extra", "size"),
    [
        ((3,), (1,), "SAME", (1,), 1, 0, 6),
        ((3,), (2,), "SAME", (1,), 1, 0, 6),
        ((2,), (3,), "SAME", (1,), 1, 0, 6),
        ((4,), (2,), "SAME", (1,), 1, 0, 6),
        ((3,), (2,), "VALID", (1,), 1, 0, 7),
        ((3,), (2,), "VALID", (1,), 1, 1, 8),
        ((3,), (2,), [(1, 1)], (1,), 2, 1, 6),
        ((2,), (1,), [(1, 0)], (2,), 1, 0, 6),
        ((3, 2), (2, 1), "SAME", (1, 1), 1, 0, 6),
        ((2, 2, 2), (2, 2, 2), "VALID", (1, 1, 1), 1, 0, 4),
    ],
)
def test_conv_transpose_is_the_vjp_of_conv(window, strides, padding, dilation, groups, extra, size):
    """With the same kernel, its channel axes exchanged within each group."""
    dims, inner, outer = len(window), 4, 6
    down = nn.Conv(
        outer, window, strides, padding=padding, dilation=dilation, groups=groups, use_bias=False
    )
    up = nn.ConvTranspose(
        inner,
        window,
        strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        use_bias=False,
        output_padding=(extra,) + (0,) * (dims - 1),
    )
    x = draw(2, *(size,) * dims, inner)
    params, _ = down.init(KEY, x)  # [*window, inner / groups, outer]
    y, pull = jax.vjp(lambda x: down(params, x), x)
    cotangent = draw(*y.shape, seed=4)
    kernel = params["kernel"].reshape(*window, inner // groups, groups, outer // groups)
    kernel = (
        jnp.moveaxis(kernel, -1, dims).swapaxes(-1, -2).reshape(*window, outer // groups, inner)
    )
    close(up({"kernel": kernel}, cotangent), pull(cotangent)[0])


def test_depthwise_conv_keeps_channels_apart():
    x, layer = draw(2, 5, 5, 3), nn.DepthwiseConv(3, multiplier=2)
    params, _ = layer.init(KEY, x)
    y = layer(params, x)
    for channel in range(3):
        kernel = params["kernel"][..., 2 * channel : 2 * channel + 2]
        alone = lax.conv_general_dilated(
            x[..., channel : channel + 1],
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        close(y[..., 2 * channel : 2 * channel + 2], alone)


@pytest.mark.exhaustive
def test_causal_conv_sees_no_later_position():
    layer, x = nn.Conv(2, 3, padding="CAUSAL", dilation=2), draw(1, 8, 2)
    params, _ = layer.init(KEY, x)
    reach = jax.jacobian(lambda x: layer(params, x)[0])(x)[
        :, :, 0
    ]  # [time, features, time, features]
    seen = np.abs(reach).sum((1, 3)) > 0
    assert (
        seen == (np.subtract.outer(np.arange(8), np.arange(8))[..., None] == [0, 2, 4]).any(-1)
    ).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [(nn.Dense(64), 256), (nn.Conv(64, 3), 9 * 256), (nn.Conv(64, 3, groups=4), 9 * 64)],
)
def test_kernels_start_with_variance_one_over_fan_in(layer, fan_in):
    shape = (1, 256) if isinstance(layer, nn.Dense) else (1, 4, 4, 256)
    params, _ = layer.init(KEY, jax.ShapeDtypeStruct(shape, jnp.float32))
    np.testing.assert_allclose(params["kernel"].std(), fan_in**-0.5, rtol=0.02)
    assert (params["bias"] == 0).all()


# Embed, pooling


def test_embed_takes_numpy_params_and_marks_what_it_lacks():
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    y = nn.Embed(3, 2)({"embedding": table}, np.array([[2, 0, 3, -1]]))
    assert y[0, :2].tolist() == [[4, 5], [0, 1]]
    assert jnp.isnan(y[0, 2:]).all()
    assert (
        nn.Embed(3, 2)({"embedding": jnp.asarray(table, jnp.bfloat16)}, jnp.array([1])).dtype
        == jnp.bfloat16
    )


def test_max_pool_padding_never_wins():
    x = -1 - jnp.abs(draw(1, 5, 5, 2))
    assert (nn.MaxPool(3, 1, padding="SAME")({}, x) < 0).all()
    small = nn.MaxPool(2, padding=1)({}, jnp.full((1, 2, 2, 1), 3, jnp.uint8))
    assert small.dtype == jnp.uint8
    assert (small == 3).all()


def test_avg_pool_counts_what_is_there():
    ones = jnp.ones((1, 5, 5, 1))
    assert (nn.AvgPool(3, 2, padding="SAME")({}, ones) == 1).all()
    assert nn.AvgPool(2, padding=1, count_padding=True)({}, ones)[0, 0, 0, 0] == 0.25
