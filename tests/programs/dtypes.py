"""Complex numbers, 64-bit types and small dtypes."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import Topic, integers, normal, positive_definite

topic = Topic("dtypes")
c4 = normal(4, dtype="complex64")


@topic(c4)
def complex_arithmetic(z):
    return (
        z * jnp.conj(z),
        jnp.abs(z),
        jnp.exp(z),
        jnp.angle(z),
        z.real,
        lax.complex(z.imag, z.real),
        z @ z,
    )


@topic(c4, float32=False, core=True)
def complex_fft(z):
    return jnp.fft.ifft(jnp.fft.fft(z) * z)


@topic(normal(4))
def real_to_complex_and_back(x):
    return jnp.abs(jnp.fft.fft(x)) ** 2


@topic(c4)
def complex_in_scan_and_cond(z):
    body = lambda c, z: (lax.cond(z.real > 0, lambda: c * z, lambda: jnp.conj(c)), c)
    return lax.scan(body, jnp.complex64(1 + 1j), z)


@topic(positive_definite(3, dtype="complex64"), tolerance=1e-3)
def complex_linear_algebra(a):
    return jnp.linalg.eigvalsh(a), jnp.linalg.cholesky(a), jnp.linalg.inv(a)


@topic(c4, wrt=(), float32=False)
def holomorphic_gradient(z):
    return jax.vmap(jax.grad(lambda z: z**3, holomorphic=True))(z)


@topic(normal(4, dtype="float64"), x64=True, float32=False)
def float64(x):
    return jnp.sin(x) @ x, lax.scan(lambda c, x: (c + x, c), jnp.float64(0.0), x)


@topic(normal(4, 4, dtype="float64"), normal(4), wrt=(0, 1), x64=True, core=True)
def float64_with_float32(a, x):
    return a @ x.astype(jnp.float64), (a.astype(jnp.float32) @ x)


@topic(integers(4, dtype="int64"), x64=True, wrt=(), float32=False)
def int64(i):
    return i.sum(), i << 40, i.astype(jnp.float64) / 3


@topic(normal(4, dtype="complex128"), x64=True, float32=False)
def complex128(z):
    return jnp.fft.fft(z), z * 1j


@topic(normal(3), x64=True)
def float32_arguments_under_x64(x):
    return x * 2, x.sum().astype(jnp.float64), jnp.arange(3), jnp.linspace(0.0, 1.0, 3)


@topic(normal(4).astype("float16"), float32=False)
def float16(x):
    return jnp.sin(x), x * 2


@topic(normal(4, 4).astype(jnp.bfloat16), tolerance=0.05)
def bfloat16(x):
    return x @ x, jnp.exp(x), x.sum()


@topic(normal(4).astype(jnp.bfloat16), normal(4), wrt=(0, 1))
def bfloat16_with_float32(x, y):
    return x.astype(jnp.float32) * y, (x * y.astype(jnp.bfloat16)), x


@topic(normal(4), wrt=())
def float8(x):
    low = x.astype(jnp.float8_e4m3fn), x.astype(jnp.float8_e5m2)
    return low, low[0].astype(jnp.float32) * low[1].astype(jnp.float32)


@topic(normal(4, 4).astype(jnp.float8_e4m3fn), wrt=())
def float8_product(x):
    return lax.dot(x, x, preferred_element_type=jnp.float32)


@topic(integers(4, 4, dtype="int8"), wrt=(), float32=False)
def int8_product(x):
    return lax.dot(x, x, preferred_element_type=jnp.int32)


@topic(integers(4, 4, dtype="int8"), normal(4, 4), wrt=(1,), batched=())
def dequantized_product(q, x):
    return x @ (q.astype(jnp.float32) * 0.1)


@topic(integers(4, dtype="int32"), wrt=())
def uint4_and_int4(i):
    return i.astype(jnp.uint4), (i - 2).astype(jnp.int4).astype(jnp.float32), i.astype(jnp.uint8)


@topic(integers(4), wrt=(), float32=False, core=True)
def integers_alone(i):
    return (
        i * 2 + 1,
        i % 3,
        i // 2,
        i << 1,
        i & 3,
        ~i,
        jnp.sort(i),
        lax.population_count(i),
        lax.clz(i),
        i == 2,
    )


@topic(normal(4) > 0, wrt=(), float32=False)
def booleans_alone(b):
    return (
        ~b,
        b & jnp.roll(b, 1),
        jnp.any(b),
        jnp.all(b),
        jnp.where(b, 1, 0),
        jnp.nonzero(b, size=2),
        jnp.cumsum(b),
    )


@topic(normal(4), wrt=())
def boolean_results(x):
    return x > 0, jnp.isnan(x), jnp.logical_xor(x > 0, x > 1), jnp.allclose(x, x)


@topic(normal(4), wrt=())
def bitcasts(x):
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits, lax.bitcast_convert_type(bits ^ 1, jnp.float32), jax.lax.reduce_precision(x, 8, 7)


@topic(normal(4), promotion="standard", core=True)
def weak_types(x):
    return (
        x * 2,
        jnp.sin(1.0),
        jnp.where(x > 0, 1.0, 0.0),
        jnp.full((2,), 3),
        x.astype(jnp.bfloat16) * 2.0,
        2**x,
    )


@topic(normal(4), promotion="standard")
def weak_types_in_loops_and_branches(x):
    n = lax.fori_loop(0, 3, lambda i, s: s * 2, 1.0)
    return (
        lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0),
        n,
        lax.scan(lambda c, _: (c + 1, c), 0, None, length=2),
    )


@topic(
    integers(5, high=100, dtype="int8"), integers(5, high=200, dtype="uint8"), wrt=(), float32=False
)
def integers_that_wrap(i, u):
    return (
        i * i,
        u + u,
        i.sum(),
        jnp.cumsum(u),
        jnp.prod(i),
        i << 3,
        u >> 1,
        jnp.mean(i > 3, dtype=jnp.bfloat16),
        ~i,
        jnp.dot(i, i),
        jnp.dot(u, u, preferred_element_type=jnp.uint32),
        lax.clz(u),
    )


@topic(normal(4, 3), normal(3, 3), wrt=(0, 1))
def products_with_algorithms_and_types(x, w):
    low = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    a = lax.dot(*low, preferred_element_type=jnp.float32)
    b = lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    c = jnp.einsum("bi,ij,bj->b", x, w, x, precision="highest", preferred_element_type=jnp.float32)
    d = lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)
    return (
        a,
        jnp.cos(b),
        c,
        d,
        jnp.linalg.multi_dot([x, w, w.T]),
        jnp.vecdot(x, x @ w),
        lax.batch_matmul(x[None], w[None]),
    )


@topic(normal(3, dtype="complex64"), normal(3, 3, dtype="complex64"), normal(3, 3), wrt=(0, 1, 2))
def complex_and_real_products_in_scan(z, a, w):
    def body(z, _):
        z = jnp.tanh(a @ z * 0.3) + lax.complex(z.real @ w, z.imag @ w) * 0.1
        return z, (jnp.abs(z), jnp.angle(z), lax.conj(z))

    return lax.scan(jax.checkpoint(body), z, None, length=3)
