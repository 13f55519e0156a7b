"""Array operations: sorting, scatters, cumulative sums, FFT, windows, convolutions and products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program import Made, Topic, integers, normal, uniform

topic = Topic("numeric")
x6, m34 = normal(6), normal(3, 4)


@topic(x6, core=True)
def sort_argsort_top_k(x):
    return (
        jnp.sort(x),
        jnp.argsort(x),
        lax.top_k(x, 2),
        lax.sort((x, jnp.arange(6)), num_keys=1, dimension=0),
    )


@topic(normal(64))
def approximate_top_k(x):
    return lax.approx_max_k(x, 3)


@topic(m34)
def argmax_and_take_along_axis(x):
    i = jnp.argmax(x, axis=1)
    return i, jnp.take_along_axis(x, i[:, None], axis=1), jnp.argmin(x)


@topic(x6, integers(6, high=3))
def segment_sum_and_max(x, i):
    return jax.ops.segment_sum(x, i, 3), jax.ops.segment_max(x, i, 3), jnp.bincount(i, length=3)


@topic(x6, integers(3, high=6), normal(3, seed=1), wrt=(0, 2), core=True)
def scatters(x, i, u):
    at = x.at[i]
    return (
        at.set(u),
        at.add(u),
        x.at[:3].multiply(u),
        at.min(u),
        at.max(u),
        x.at[i + 3].add(1.0, mode="drop"),
    )


@topic(m34, integers(2, high=3))
def gathers(x, i):
    return (
        x[i],
        x[:, i],
        x[i, i],
        x.at[i + 5].get(mode="fill", fill_value=-1.0),
        x[-1, ::2],
        jnp.take(x, i, axis=0),
    )


@topic(m34, integers(high=3))
def dynamic_slices(x, i):
    y = lax.dynamic_slice(x, (i, 0), (2, 2))
    return y, lax.dynamic_update_slice(x, y * 2, (0, i)), lax.dynamic_index_in_dim(x, i)


@topic(m34)
def cumulative(x):
    return (
        jnp.cumsum(x, 1),
        jnp.cumprod(x, 0),
        lax.cummax(x, 1),
        lax.cumlogsumexp(x, 0, reverse=True),
    )


@topic(x6)
def reductions(x):
    return (
        jnp.prod(x),
        jnp.std(x),
        jnp.median(x),
        jnp.max(x),
        jnp.linalg.norm(x),
        jnp.any(x > 0),
        jnp.ptp(x),
    )


@topic(x6)
def reduce_with_a_function(x):
    return lax.reduce(
        x, jnp.float32(0.0), lambda a, b: jnp.maximum(a, b) * 1.0, (0,)
    ), jnp.quantile(x, jnp.float32(0.3))


@topic(normal(8))
def fft(x):
    y = jnp.fft.fft(x)
    return y, jnp.fft.irfft(jnp.fft.rfft(x) * 2), jnp.abs(jnp.fft.fftshift(y))


@topic(normal(4, 4))
def fft_in_two_dimensions(x):
    return jnp.fft.ifft2(jnp.fft.fft2(x) * jnp.complex64(1 + 2j)).real


@topic(normal(2, 3, 4), normal(2, 4, 5))
def einsums(a, b):
    return (
        jnp.einsum("bij,bjk->bik", a, b),
        jnp.einsum("bij,bjk->", a, b),
        jnp.einsum("bii->b", a[:, :, :3]),
    )


@topic(normal(6, 4), normal(2, 4, 3), excluded={("*", "vmap"): "JAX cannot batch it here"})
def ragged_dot(x, w):
    return lax.ragged_dot(x, w, jnp.array([4, 2], jnp.int32))


@topic(m34, normal(4, 2))
def dot_with_precision_and_types(x, w):
    return (
        jnp.dot(x, w, precision="highest"),
        jnp.dot(x, w, preferred_element_type=jnp.float32),
        lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
    )


@topic(normal(2, 5, 5, 3), normal(3, 3, 3, 4), core=True)
def conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@topic(normal(1, 6, 6, 4), normal(3, 3, 2, 4))
def conv_grouped_strided_dilated(x, w):
    return lax.conv_general_dilated(
        x,
        w,
        (2, 1),
        [(2, 1), (0, 2)],
        rhs_dilation=(1, 2),
        feature_group_count=2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@topic(normal(1, 6, 6, 4), normal(3, 3, 1, 4))
def conv_depthwise(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", feature_group_count=4, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@topic(normal(1, 4, 4, 3), normal(3, 3, 3, 2))
def conv_transposed(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME")


@topic(normal(2, 8, 2), normal(3, 2, 4))
def conv_in_one_dimension_causal(x, w):
    return lax.conv_general_dilated(x, w, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC"))


@topic(normal(4, 3, 2, 2), normal(2, 2, 3, 4))
def conv_with_batch_groups(x, w):
    return lax.conv_general_dilated(
        x, w.transpose(3, 2, 0, 1), (1, 1), "VALID", batch_group_count=2
    )


@topic(normal(1, 4, 4, 2))
def pooling(x):
    window = (1, 2, 2, 1)
    return (
        lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"),
        lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 1, 1), "SAME"),
    )


@topic(x6)
def reduce_window_with_dilation(x):
    return lax.reduce_window(
        x, 0.0, lax.add, (2,), (1,), [(1, 1)], window_dilation=(2,)
    ), jnp.convolve(x, x[:3])


@topic(m34, normal(4), normal(4, seed=1))
def layer_norm(x, s, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6) * s[
        None
    ] + b[None]


@topic(
    normal(2, 6, 2, 4),
    normal(2, 6, 2, 4, seed=1),
    normal(2, 6, 2, 4, seed=2),
    wrt=(0, 1, 2),
    core=True,
)
def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@topic(normal(2, 5, 4, 4), normal(2, 5, 2, 4, seed=1), uniform(2, 4, 5, 5), wrt=(0, 1))
def attention_with_bias_and_grouped_heads(q, k, bias):
    return jax.nn.dot_product_attention(q, k, k, bias=bias, mask=bias > 0.2, scale=0.3)


@topic(m34)
def layout(x):
    return (
        x.T,
        x.reshape(2, 6),
        jnp.tile(x, (2, 1)),
        jnp.repeat(x, 2, axis=1),
        jnp.roll(x, 1),
        jnp.flip(x, 0),
        jnp.pad(x, 1),
        jnp.stack([x, x], 1),
        *jnp.split(x, 2, axis=1),
        lax.expand_dims(x, (1,)),
        jnp.triu(x),
    )


@topic(m34)
def pad_with_negative_and_interior_padding(x):
    return lax.pad(x, 0.0, ((-1, 2, 1), (0, -1, 0))), jnp.pad(x, 1, mode="reflect")


@topic(uniform(6))
def special_functions(x):
    return (
        jax.scipy.special.gammaln(x),
        lax.erf_inv(x),
        lax.betainc(jnp.ones(6), jnp.full(6, 2.0), x),
        lax.lgamma(x),
        jax.scipy.special.ndtri(x),
        jax.scipy.special.i0e(x),
        lax.digamma(x),
        jnp.sinc(x),
        lax.igamma(x, x),
    )


@topic(x6)
def elementwise(x):
    return (
        jnp.tan(x),
        jnp.arctan2(x, x + 1),
        jnp.hypot(x, x),
        jnp.cbrt(x),
        jnp.log1p(x * x),
        jnp.expm1(x),
        x**3,
        jnp.power(jnp.abs(x), x),
        jnp.sign(x),
        jnp.floor(x),
        jnp.remainder(x, 0.7),
    )


@topic(m34)
def interpolation_and_histogram(x):
    return (
        jnp.interp(x[0], jnp.arange(4.0), x[1]),
        jnp.searchsorted(jnp.arange(4.0), x[0]),
        jnp.histogram(x[2], bins=3, range=(-2.0, 2.0))[0],
        jax.image.resize(x, (6, 8), "bilinear"),
    )


@topic(normal(1, 3, 5, 5))
def patches(x):
    return lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID")


@topic(m34)
def map_coordinates_and_polyfit(x):
    return (
        jax.scipy.ndimage.map_coordinates(
            x, [jnp.array([0.5, 1.2]), jnp.array([0.1, 2.2])], order=1
        ),
        jnp.polyval(x[0], x[1]),
        jnp.gradient(x[2]),
        jnp.trapezoid(x[0]),
    )


@topic(normal(5, 3), normal(4, 3))
def vmapped_functions(x, y):
    distance = jax.vmap(jax.vmap(lambda a, b: jnp.sum((a - b) ** 2), (None, 0)), (0, None))(x, y)
    return (
        distance,
        jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x),
        jnp.apply_along_axis(jnp.sort, 1, x),
    )


@topic(normal(8, 5), normal(5, 3), integers(8, high=3), wrt=(1,), batched=(0, 2), core=True)
def cross_entropy(x, w, labels):
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


@topic(normal(8, 4, 4, 2), normal(3, 3, 2, 3), wrt=(1,), batched=(0,))
def conv_pool_and_dense(x, w):
    y = jax.nn.relu(
        lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(jnp.square(y.reshape(-1, 12)).sum(1))


@topic(normal(4, 5, 3), normal(3, 8), wrt=(1,), batched=(0,), tolerance=1e-4)
def lstm_by_hand(x, w):
    def step(c, x):
        i, f = jnp.split(jnp.concatenate([x, c], -1) @ jnp.concatenate([w, w])[:5], 2, axis=-1)
        c = jax.nn.sigmoid(f[:, :2]) * c + jax.nn.sigmoid(i[:, :2]) * jnp.tanh(i[:, 2:])
        return c, c

    return jnp.mean(lax.scan(step, jnp.zeros((x.shape[0], 2)), x.swapaxes(0, 1))[1] ** 2)


@topic(normal(3, 3), normal(2, 3) * 4, float16=True)
def products_scaled_up_and_down(w, x):
    return ((x @ w) * 3e4 / 3e4) @ w


# What plain float16 cannot hold either; a loss scale skips such steps.
ROW_OF_ZEROS = dict.fromkeys(
    (("autocast16", "gradient"), ("autocast16", "gradient inside")),
    "the gradient of a row of zeros is at least 1e8 times that of another row",
)


@topic(
    normal(3, 3),
    normal(2, 3) * np.float32([[1], [0]]),
    float16=True,
    core=True,
    excluded=ROW_OF_ZEROS,
)
def normalized_row_of_zeros(w, x):
    h = x @ w
    h = h / (jnp.max(jnp.abs(h), -1, keepdims=True) + 1e-8)
    return h @ w


@topic(normal(3, 3), normal(2, 3) * np.float32([[1], [0]]), float16=True, excluded=ROW_OF_ZEROS)
def normalized_with_maximum(w, x):
    h = x @ w
    return (h / jnp.maximum(jnp.max(jnp.abs(h), axis=-1, keepdims=True), 1e-12)) @ w


@topic(m34 * 30, float16=True)
def logsumexp_of_large_values(x):
    return jax.nn.logsumexp(x @ x.T, axis=-1), jax.nn.softmax(x @ x.T)


@topic(normal(4))
def nan_and_infinity_stay(x):
    y = jnp.concatenate([x, jnp.array([jnp.nan, jnp.inf, -jnp.inf])])
    return (
        y @ jnp.ones(7),
        jnp.maximum(y, 0.0),
        jnp.max(y),
        jnp.sort(y),
        jnp.where(jnp.isfinite(y), y, 0.0),
    )


@topic(normal(6), integers(6, high=3), normal(6, seed=2), wrt=(0, 2))
def sort_of_several_operands(x, i, y):
    k, a, b = lax.sort((i, x, y), num_keys=2, is_stable=True)
    return k, a * b, lax.sort((y, i), num_keys=1)[1], jnp.lexsort((x, i)), lax.top_k(x, 2)


@topic(
    normal(6, 4),
    normal(3, 4, 5),
    Made(lambda: jnp.array([2, 0, 4], jnp.int32)),
    wrt=(0, 1),
    excluded={("*", "vmap"): "JAX cannot batch the sizes of groups"},
)
def ragged_dot_with_an_empty_group(x, w, sizes):
    return lax.ragged_dot(x, w, sizes), jnp.tanh(
        lax.ragged_dot(x, w, sizes[::-1], preferred_element_type=jnp.float32)
    )


@topic(normal(4, 3))
def gradients_that_are_not_finite(x):
    y = x - x[:1]  # a row of zeros
    return (
        jnp.linalg.norm(y, axis=-1),
        jnp.sqrt(jnp.abs(y)),
        jnp.where(y != 0, y / jnp.where(y != 0, y, 1.0), 0.0),
        (
            jnp.log(jnp.abs(y) + 1.0),
            jnp.max(y, -1),
            jax.nn.softmax(jnp.where(y == 0, -jnp.inf, y), -1)[1:],
        ),
    )


@topic(normal(2, 6, 6, 3), normal(3, 3, 3, 4), wrt=(0, 1))
def convolutions_with_preferred_types_and_odd_layouts(x, w):
    conv = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 2), padding=((1, 0), (2, 1))
    )
    a = conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=jnp.float32)
    b = conv(
        x.transpose(3, 1, 2, 0), w.transpose(3, 2, 0, 1), dimension_numbers=("CHWN", "OIHW", "HWNC")
    )
    c = lax.conv_general_dilated(
        x.astype(jnp.bfloat16),
        w.astype(jnp.bfloat16),
        (1, 1),
        ((0, 1), (1, 0)),
        lhs_dilation=(2, 1),
        rhs_dilation=(1, 2),
        preferred_element_type=jnp.float32,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    q = lax.conv_general_dilated(
        jnp.round(x * 3).astype(jnp.int8),
        jnp.round(w * 3).astype(jnp.int8),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        preferred_element_type=jnp.int32,
    )
    return a, jnp.sin(b), c, q


@topic(normal(4, 3), normal(3, 3), wrt=(0, 1))
def gathers_and_scatters_with_modes(x, w):
    y = x @ w
    i = jnp.array([3, -1, 9, 0])
    return (
        y.at[i].get(mode="fill", fill_value=7.0),
        y.at[i].get(mode="clip"),
        y.at[i].add(x, mode="drop"),
        y.at[i].mul(2.0, mode="drop"),
        y.at[i].max(x, mode="drop"),
        y.at[i].min(x, mode="drop"),
        y.at[i, 1].set(5.0, mode="drop"),
        y.at[jnp.array([0, 0])].add(1.0),
        y.at[::2].divide(3.0),
        jnp.take(y, i, axis=0, mode="wrap"),
        lax.dynamic_slice(y, (9, -1), (2, 2)),
        lax.dynamic_update_slice(y, x[:1, :2], (-3, 2)),
    )
