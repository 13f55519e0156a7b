"""Complex numbers, 64-bit types and small dtypes."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import Topic, integers, normal, positive_definite

topic = Topic("dtypes")
c4 = normal(4, dtype="complex64")


@topic(c4)
def complex_arithmetic(z):
    return z * jnp.conj(z), jnp.abs(z), jnp.exp(z), jnp.angle(z), z.real, lax.complex(z.imag, z.real), z @ z


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
    return jax.vmap(jax.grad(lambda z: z ** 3, holomorphic=True))(z)


@topic(normal(4, dtype="float64"), x64=True, float32=False)
def float64(x):
    return jnp.sin(x) @ x, lax.scan(lambda c, x: (c + x, c), jnp.float64(0.), x)


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
    return x * 2, x.sum().astype(jnp.float64), jnp.arange(3), jnp.linspace(0., 1., 3)


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
    return i * 2 + 1, i % 3, i // 2, i << 1, i & 3, ~i, jnp.sort(i), lax.population_count(i), lax.clz(i), i == 2


@topic(normal(4) > 0, wrt=(), float32=False)
def booleans_alone(b):
    return ~b, b & jnp.roll(b, 1), jnp.any(b), jnp.all(b), jnp.where(b, 1, 0), jnp.nonzero(b, size=2), jnp.cumsum(b)


@topic(normal(4), wrt=())
def boolean_results(x):
    return x > 0, jnp.isnan(x), jnp.logical_xor(x > 0, x > 1), jnp.allclose(x, x)


@topic(normal(4), wrt=())
def bitcasts(x):
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits, lax.bitcast_convert_type(bits ^ 1, jnp.float32), jax.lax.reduce_precision(x, 8, 7)


@topic(normal(4), promotion="standard", core=True)
def weak_types(x):
    return x * 2, jnp.sin(1.0), jnp.where(x > 0, 1.0, 0.0), jnp.full((2,), 3), x.astype(jnp.bfloat16) * 2.0, 2 ** x


@topic(normal(4), promotion="standard")
def weak_types_in_loops_and_branches(x):
    n = lax.fori_loop(0, 3, lambda i, s: s * 2, 1.0)
    return lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0), n, lax.scan(lambda c, _: (c + 1, c), 0, None, length=2)
