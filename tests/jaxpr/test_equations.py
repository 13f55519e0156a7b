"""Typed access to the parameters of equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from fnet import jaxpr
from fnet import transforms as ft
from fnet.jaxpr import _records


def equation(f, *shapes, name=None):
    """The equation `name`, or the last one."""
    eqns = list(jaxpr.equations(jax.make_jaxpr(f)(*map(jnp.ones, shapes)).jaxpr))
    return next(e for e in reversed(eqns) if name in (None, e.primitive.name))


def conv(x, kernel, **options):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


PRODUCTS = {  # f, shapes, primitive, products that are added up, groups
    "dot": (lambda x, y: x @ y, [(2, 3), (3, 5)], jaxpr.DOT, 3, None),
    "two axes": (
        lambda x, y: jnp.einsum("abc,bcd->ad", x, y),
        [(2, 3, 5), (3, 5, 7)],
        jaxpr.DOT,
        15,
        None,
    ),
    "batched dot": (
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        [(4, 2, 3), (4, 3, 5)],
        jaxpr.DOT,
        3,
        None,
    ),
    "outer product": (lambda x, y: jnp.einsum("i,j->ij", x, y), [(2,), (3,)], jaxpr.DOT, 1, None),
    "conv": (conv, [(1, 8, 8, 4), (3, 5, 4, 6)], jaxpr.CONVOLUTION, 3 * 5 * 4, (1, 1)),
    "groups": (
        lambda x, k: conv(x, k, feature_group_count=2),
        [(1, 8, 8, 4), (3, 3, 2, 6)],
        jaxpr.CONVOLUTION,
        3 * 3 * 2,
        (2, 1),
    ),
    "batch groups": (
        lambda x, k: conv(x, k, batch_group_count=2),
        [(4, 8, 8, 4), (3, 3, 4, 6)],
        jaxpr.CONVOLUTION,
        3 * 3 * 4,
        (1, 2),
    ),
    "dilation": (
        lambda x, k: conv(x, k, rhs_dilation=(2, 2)),
        [(1, 8, 8, 4), (3, 3, 4, 6)],
        jaxpr.CONVOLUTION,
        3 * 3 * 4,
        (1, 1),
    ),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("cast", ["as written", "bfloat16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, cast):
    f, shapes, op, summed, groups = PRODUCTS[name]
    original = jaxpr.product(equation(f, *shapes, name=op.name))
    found = original
    if cast == "bfloat16":
        found = jaxpr.product(equation(ft.autocast(f, "bfloat16"), *shapes, name="lowered"))
    assert (found.op, found.summed, found.dtype) == (
        op,
        summed,
        jnp.dtype("float32" if cast != "bfloat16" else cast),
    )
    assert found.default_precision and found.precision is None
    assert found.dimensions == original.dimensions == found.options["dimension_numbers"]
    if groups:
        assert found.groups == groups
    kept = found.without("precision", "preferred_element_type")
    assert set(found.options) - set(kept) == {"precision", "preferred_element_type"}
    assert all(kept[key] == original.options[key] for key in kept)


@pytest.mark.parametrize(
    ("precision", "default"),
    [
        (None, True),
        ("default", True),
        (("default", "default"), True),
        ("highest", False),
        (("default", "high"), False),
        ("TF32_TF32_F32", False),
    ],
)
def test_who_chose_the_precision(precision, default):
    f = lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ())), precision=precision)
    assert jaxpr.product(equation(f, (3, 3))).default_precision == default


def test_windows_of_convolutions():
    f = lambda x, k: lax.conv_general_dilated(
        x, k, (2,), [(1, 3)], lhs_dilation=(4,), rhs_dilation=(5,)
    )
    for g, name in ((f, None), (ft.autocast(f, "bfloat16"), "lowered")):
        assert jaxpr.product(equation(g, (1, 2, 8), (3, 2, 3), name=name)).window == (
            (2,),
            ((1, 3),),
            (4,),
            (5,),
        )


def test_other_equations_are_no_products():
    assert jaxpr.product(equation(jnp.sin, (3,))) is None
    assert jaxpr.product(equation(jax.jit(lambda x: x @ x), (3, 3), name="jit")) is None


def test_parameters():
    assert jaxpr.options(equation(lambda x: x.transpose(2, 0, 1), (2, 3, 4))).permutation == (
        2,
        0,
        1,
    )
    assert jaxpr.new_dtype(equation(lambda x: x.astype("bfloat16"), (2,))) == jnp.dtype("bfloat16")
    bits = lambda x: jax.random.bits(jax.random.key(0), (3, 5), "uint16")
    assert jaxpr.random_bits(equation(bits, (), name="random_bits")) == (16, 15)


def pooling(window, strides, padding="VALID", **options):
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding, **options)


@pytest.mark.parametrize(
    ("f", "window"),
    [
        (pooling((2, 3), (2, 3)), (2, 3)),
        (pooling((1, 1), (1, 1)), (1, 1)),
        (pooling((2, 3), (1, 3)), None),
        (pooling((2, 3), (2, 3), ((0, 0), (0, 3))), None),
        (pooling((2, 3), (2, 3), ((1, 1), (0, 0))), None),
        (pooling((2, 3), (2, 3), window_dilation=(1, 2)), None),
        (pooling((2, 3), (2, 3), base_dilation=(2, 1)), None),
    ],
)
def test_windows_that_tile(f, window):
    assert jaxpr.pooling_window(equation(f, (8, 12), name="reduce_window_max")) == window


@pytest.mark.parametrize(
    ("reduce", "start", "largest"), [(lax.max, -jnp.inf, True), (lax.min, jnp.inf, False)]
)
def test_which_element_a_pooling_selects(reduce, start, largest):
    f = jax.grad(lambda x: lax.reduce_window(x, start, reduce, (2,), (2,), "VALID").sum())
    assert jaxpr.selects_largest(equation(f, (8,), name="select_and_scatter_add")) is largest


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_explicit_sharding(kind):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with jax.set_mesh(mesh):
        split, whole = jax.device_put(np.ones(4, np.float32), where), jnp.ones(4)
        assert jaxpr.explicit(jax.typeof(split)) == (kind is AxisType.Explicit)
        assert not jaxpr.explicit(jax.typeof(whole))


def test_kept_bits():
    assert jaxpr.kept_bits(equation(lambda x: lax.reduce_precision(x, 5, 10), (3,))) == (5, 10)


def test_every_record_names_parameters_of_its_primitive():
    """A version of JAX that renames a parameter fails here, and not in a transform."""
    x, i = jnp.ones((4, 6)), jnp.array([[1], [2]])
    programs = [
        lambda: jnp.broadcast_to(x[:, None], (4, 2, 6)).reshape(8, 6).T[None][0],
        lambda: jax.lax.rev(jnp.expand_dims(jnp.sort(jnp.concatenate([x, x])), 0), (0,)),
        lambda: [f(x, 0) for f in (jnp.sum, jnp.max, jnp.argmin, jnp.cumsum, jnp.all)],
        lambda: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"),
        lambda: [x[1:3], jax.lax.dynamic_slice(x, (i[0, 0], 0), (2, 6)), jnp.split(x, 2)],
        lambda: [jnp.pad(x, 1), x[i], x.at[i].add(1), x @ x.T, x.astype(jnp.int8), x**3],
        lambda: jax.lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME"),
        lambda: [jnp.fft.fft(x), jax.lax.iota(int, 3), jax.lax.top_k(x, 2)],
        lambda: [
            jax.random.bits(jax.random.key(0), (3,)),
            jnp.asarray(jax.export.symbolic_shape("t")[0]),
        ],
        lambda: jax.grad(pooled)(x),
        lambda: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2, x),
        lambda: jax.shard_map(
            lambda x: jax.lax.psum(x, "a"),
            mesh=jax.sharding.Mesh(jax.devices()[:2], "a"),
            in_specs=jax.P("a"),
            out_specs=jax.P(),
            check_vma=False,
        )(x),
    ]
    pooled = lambda x: jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "VALID"
    ).sum()
    seen = set()
    for program in programs:
        for eqn in jaxpr.equations(jax.make_jaxpr(program)().jaxpr):
            if eqn.primitive.name in _records._RECORDS:
                record = jaxpr.options(eqn)
                assert all(value is eqn.params[name] for name, value in record._asdict().items())
                seen.add(type(record))
    # A primitive of fnet's own, and some that some versions of JAX do not have.
    never = {_records.Attention, _records.Axis, _records.Tile}
    assert seen | never >= set(_records._RECORDS.values())
