"""autocast on every primitive of its lists: the dtype it runs in, and equality with the same casts
written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from precision_cases import normal
from precision_checks import BF16, F16, F32, equations, to_the_letter, worst

from fnet import jaxpr
from fnet import transforms as ft
from fnet.jaxpr import _primitives

MESH = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
X, Y = normal(1, 4, 8), normal(2, 8, 4)
IMAGE, WINDOW = normal(3, 2, 6, 6, 3), normal(4, 3, 3, 3, 5)
convolve = functools.partial(
    lax.conv_general_dilated,
    window_strides=(1, 1),
    padding="SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
)
both = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
each = pytest.mark.parametrize(
    "dtype", [BF16, pytest.param(F16, marks=pytest.mark.exhaustive)], ids=str
)


def number(x, like):
    return like.dtype.type(x)


# Functions of a [4, 4] product.
FOLLOW = {
    # structure
    "reshape": lambda x: x.reshape(2, 8),
    "transpose": lambda x: x.T,
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (4, 3, 4)).reshape(2, 24),
    "squeeze": lambda x: lax.squeeze(x.reshape(4, 1, 4), (1,)),
    "slice": lambda x: x[1:3],
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 2), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2, :2] * 2, (1, 2)),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "pad": lambda x: lax.pad(x, number(0, x), [(1, 1, 0)] * 2),
    "rev": lambda x: x[::-1],
    "gather": lambda x: x[jnp.array([2, 0])],
    "copy": jnp.copy,
    "select_n": lambda x: jnp.where(x > 0, x, -x),
    "split": lambda x: jnp.split(x, 2)[1],
    "stack": lambda x: jnp.stack([x, x]),
    "unstack": lambda x: jnp.unstack(x)[1].reshape(2, 2),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "name": lambda x: checkpoint_name(x, "x"),
    "optimization_barrier": lax.optimization_barrier,
    "stop_gradient": lax.stop_gradient,
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P())),
    "device_put": lambda x: jax.device_put(x, NamedSharding(MESH, P())),
    # arithmetic
    "add": lambda x: x + x,
    "sub": lambda x: x - 2 * x,
    "mul": lambda x: x * x,
    "div": lambda x: x / 3,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": jnp.sign,
    "max": lambda x: jnp.maximum(x, 0.5),
    "min": lambda x: jnp.minimum(x, 0.5),
    "clamp": lambda x: lax.clamp(number(-0.5, x), x, number(0.5, x)),
    "add_any": lambda x: jax.linear_transpose(lambda h: (h, h), x)((x, x))[0],
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.scipy.special.erf,
    "reduce_max": lambda x: x.max(0),
    "reduce_min": lambda x: x.min(0),
    "argmax": lambda x: x[jnp.argmax(x, 0)],
    "argmin": lambda x: x[jnp.argmin(x, 0)],
    "eq": lambda x: jnp.where(x == x.T, x, -x),
    "ne": lambda x: jnp.where(x != x.T, x, -x),
    "lt": lambda x: jnp.where(x < 0, x, -x),
    "le": lambda x: jnp.where(x <= 0, x, -x),
    "gt": lambda x: jnp.where(x > 0, x, -x),
    "ge": lambda x: jnp.where(x >= 0, x, -x),
    "is_finite": lambda x: jnp.where(jnp.isfinite(x), x, -x),
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": lax.round,
    "sort": lambda x: jnp.sort(x, 0),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "reduce_window_max": lambda x: lax.reduce_window(
        x, number(-np.inf, x), lax.max, (2, 2), (1, 1), "SAME"
    ),
}

# Functions of a [1, 8] product on each of 8 devices.
COLLECTIVE = {
    "all_gather": lambda x: lax.all_gather(x, "i", axis=1),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 1)]),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True),
    "reduce_scatter": lambda x: jnp.tile(
        lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), (1, 8)
    ),
    "psum_invariant": lambda x: x - lax.psum(x, "i"),
    "pmax": lambda x: x - lax.pmax(x, "i"),
    "pmin": lambda x: x - lax.pmin(x, "i"),
    "pvary": lambda x: lax.pcast(lax.psum(x, "i"), "i", to="varying"),
    "psum": lambda x: x - lax.psum(x, "i"),  # without the check of what varies
}

NEW = {  # primitives since jax 0.12
    "log2": lambda x: jnp.log2(x * x + 1),
    "polynomial": lambda x: lax.polynomial(x, [1.0, -2.0, x.T]),
}
FLOAT32 = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": lambda x: jnp.log(x * x + 1),
    "log1p": lambda x: jnp.log1p(x * x),
    **(NEW if hasattr(lax, "log2_p") else {}),
    "pow": lambda x: (x * x + 1) ** jnp.float32(1.5),
    "sqrt": lambda x: jnp.sqrt(x * x + 1),
    "rsqrt": lambda x: lax.rsqrt(x * x + 1),
    "cbrt": jnp.cbrt,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": lambda x: lax.tan(x / 10),
    "asin": lambda x: lax.asin(x / 100),
    "acos": lambda x: lax.acos(x / 100),
    "atan": lax.atan,
    "atan2": lambda x: lax.atan2(x, x.T),
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "asinh": lax.asinh,
    "acosh": lambda x: lax.acosh(x * x + 2),
    "atanh": lambda x: lax.atanh(x / 100),
    "erfc": lax.erfc,
    "erf_inv": lambda x: lax.erf_inv(x / 10),
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "rem": lambda x: lax.rem(x, x.T + 9),
    "nextafter": lambda x: lax.nextafter(x, x.T),
    "reduce_sum": lambda x: x.sum(0),
    "reduce_prod": lambda x: x.prod(0),
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cumlogsumexp": lax.cumlogsumexp,
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, number(0, x), lax.add, (2, 2), (1, 1), "SAME"
    ),
    "scatter-add": lambda x: x.at[jnp.array([0, 0])].add(x[:2]),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10),
    "cholesky": lambda x: lax.linalg.cholesky(x * x.T / 9 + 99 * jnp.eye(4)),
    "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(
        x + 9 * jnp.eye(4), x, lower=True
    ),
    "lu": lambda x: jax.scipy.linalg.lu_factor(x)[0],
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
}


def floats(eqn):
    return {
        v.aval.dtype
        for v in (*eqn.invars, *eqn.outvars)
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    }


@pytest.mark.quick_cases(1)
@each
@pytest.mark.parametrize("name", FOLLOW)
def test_follows_what_it_is_given(name, dtype):
    """Between two products, each of these runs in the low dtype, as by hand."""

    def f(x, y, z):
        return FOLLOW[name](x @ y).reshape(-1, 2) @ z

    def by_hand(x, y, z):
        h = lax.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=F32).astype(dtype)
        return lax.dot(FOLLOW[name](h).reshape(-1, 2), z.astype(dtype), preferred_element_type=F32)

    cast, args = ft.autocast(f, dtype.name), (X, Y, Y[:2])
    at = [eqn for eqn in equations(cast, *args) if eqn.primitive.name == name]
    assert at and all(floats(eqn) == {dtype} for eqn in at)
    same(to_the_letter(cast, *args), to_the_letter(by_hand, *args))


@pytest.mark.quick_cases("reduce_scatter-bfloat16")
@each
@pytest.mark.parametrize("name", COLLECTIVE)
def test_collectives_follow(name, dtype):
    x, y, z = normal(1, 8, 16), normal(2, 16, 8), jnp.ones((8, 2))
    checked = name != "psum"

    def over(f):
        part = lambda x, y, z: f(lambda h: COLLECTIVE[name](h).reshape(-1, 8), x, y, z)
        return jax.shard_map(
            part, mesh=MESH, in_specs=(P("i"), P(), P()), out_specs=P("i"), check_vma=checked
        )

    plain = over(lambda g, x, y, z: g(x @ y) @ z)
    by_hand = over(
        lambda g, x, y, z: lax.dot(
            g(lax.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=F32).astype(dtype)),
            z.astype(dtype),
            preferred_element_type=F32,
        )
    )
    cast = ft.autocast(plain, dtype.name)
    at = [eqn for eqn in equations(cast, x, y, z) if eqn.primitive.name == name]
    assert any(floats(eqn) == {dtype} for eqn in at)  # the operands are marked as varying, too
    same(to_the_letter(cast, x, y, z), to_the_letter(by_hand, x, y, z))


def test_reshard_follows():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        f = lambda x, y: jax.sharding.reshard(x @ y, P(None, None)) @ y.T
        x = jax.device_put(normal(1, 8, 8), P("i", None))
        cast = ft.autocast(f, "bfloat16")
        at = [eqn for eqn in equations(cast, x, Y) if eqn.primitive.name == "reshard"]
        assert at and all(floats(eqn) == {BF16} for eqn in at)
        assert worst(jax.jit(cast)(x, Y), f(x, Y)) < 2e-2


def test_every_primitive_of_the_lists_is_tested():
    """pbroadcast appears only in what JAX itself makes of shard_map; reshard has a test of its own.
    site and divided are fnet's: the first is removed before autocast, and the second is on meshes."""
    of = lambda *precisions: {
        name for name, each in _primitives._TRAITS.items() if each.precision in precisions
    }
    assert of("exact", "arithmetic") - FOLLOW.keys() - COLLECTIVE.keys() == {
        "divided",
        "pbroadcast",
        "reshard",
        "site",
    }
    assert of("power") - {"one_minus_square"} == POWERS.keys() - {"one_minus_square"}
    assert not (of("exact", "arithmetic", "power") | jaxpr.BILINEAR.keys()) & FLOAT32.keys()


@pytest.mark.quick_cases(7)
@each
@pytest.mark.parametrize("name", FLOAT32)
def test_runs_in_float32(name, dtype):
    cast = ft.autocast(lambda x, y: FLOAT32[name](x @ y), dtype.name)
    at = [eqn for eqn in equations(cast, X, Y) if eqn.primitive.name == name]
    assert at and all(floats(eqn) == {F32} for eqn in at)
    by_hand = lambda x, y: FLOAT32[name](
        lax.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=F32)
    )
    assert worst(to_the_letter(cast, X, Y), to_the_letter(by_hand, X, Y)) < 1e-6


POWERS = {"square": jnp.square, "integer_pow": lambda x: x**3}
if hasattr(lax, "one_minus_square_p"):  # the slope of tanh, jax >= 0.12
    POWERS["one_minus_square"] = lambda x: lax.one_minus_square_p.bind(x)


@pytest.mark.quick_cases(3)
@both
@pytest.mark.parametrize("name", POWERS)
def test_powers_follow_in_bfloat16_alone(name, dtype):
    cast = ft.autocast(lambda x, y: POWERS[name](x @ y) @ jnp.ones((4, 2)), dtype.name)
    at = [eqn for eqn in equations(cast, X, Y) if eqn.primitive.name == name]
    assert at and all(floats(eqn) == {BF16 if dtype == BF16 else F32} for eqn in at)

    def by_hand(x, y):
        h = lax.dot(x.astype(dtype), y.astype(dtype), preferred_element_type=F32)
        h = POWERS[name](h.astype(dtype) if dtype == BF16 else h).astype(dtype)
        return lax.dot(h, jnp.ones((4, 2), dtype), preferred_element_type=F32)

    same(to_the_letter(cast, X, Y), to_the_letter(by_hand, X, Y))


@pytest.mark.quick_cases(1)
@both
def test_products_are_the_casts_by_hand(dtype):
    low = lambda *xs: (x.astype(dtype) for x in xs)
    same(ft.autocast(jnp.matmul, dtype.name)(X, Y), lax.dot(*low(X, Y), preferred_element_type=F32))
    same(
        ft.autocast(convolve, dtype.name)(IMAGE, WINDOW),
        jax.jit(lambda x, y: convolve(*low(x, y)).astype(F32))(IMAGE, WINDOW),
    )
    between = ft.autocast(lambda x, y: (x @ y) @ (x @ y), dtype.name)  # wanted in the low dtype
    seen = [
        eqn.outvars[0].aval.dtype
        for eqn in equations(between, X, Y)
        if eqn.primitive.name == "lowered"
    ]
    assert seen == [dtype, dtype, F32]
    h = lax.dot(*low(X, Y), preferred_element_type=F32).astype(dtype)
    same(
        to_the_letter(between, X, Y),
        to_the_letter(lambda h: lax.dot(h, h, preferred_element_type=F32), h),
    )


@pytest.mark.quick_cases(1)
@both
def test_gradients_of_products_are_the_casts_by_hand(dtype):
    """Low-precision operands and float32 sums backward, too, and float32 gradients."""
    f = lambda x, y: jnp.square(x @ y).sum()

    def by_hand(x, y):
        x, y = x.astype(dtype), y.astype(dtype)
        g = (2 * lax.dot(x, y, preferred_element_type=F32)).astype(dtype)
        return lax.dot(g, y.T, preferred_element_type=F32), lax.dot(
            x.T, g, preferred_element_type=F32
        )

    want = to_the_letter(by_hand, X, Y)
    same(to_the_letter(jax.grad(ft.autocast(f, dtype.name), (0, 1)), X, Y), want)
    same(to_the_letter(ft.autocast(jax.grad(f, (0, 1)), dtype.name), X, Y), want)
