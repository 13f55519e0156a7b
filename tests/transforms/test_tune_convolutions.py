"""Convolutions and their gradients in tune's forms, beside XLA's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import layers as nn
from fnet import transforms as ft
from fnet.transforms._tune import _library

RNG = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def depthwise(shape, window, **options):
    """(f(x, w), x, w) for x of a shape [batch, *space, channels]."""
    return convolution(shape, window, shape[-1], shape[-1], **options)


def convolution(
    shape,
    window,
    out,
    groups,
    *,
    strides=None,
    padding="SAME",
    dilation=None,
    x_dilation=None,
    spec=None,
):
    n = len(window)
    axes = "DHW"[-n:]
    spec = spec or (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    sizes = dict(zip(f"N{axes}C", shape))
    kernel = dict(zip(axes, window)) | {"I": shape[-1] // groups, "O": out}
    x, w = draw(*(sizes[name] for name in spec[0])), draw(*(kernel[name] for name in spec[1]))

    def f(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            strides or (1,) * n,
            padding,
            lhs_dilation=x_dilation,
            rhs_dilation=dilation,
            dimension_numbers=spec,
            feature_group_count=groups,
        )

    return f, x, w


CASES = {
    "3x3": depthwise((4, 8, 8, 6), (3, 3)),
    "3x3, stride 2": depthwise((4, 9, 8, 6), (3, 3), strides=(2, 2)),
    "5x3, strides 3 and 1": depthwise((2, 11, 9, 4), (5, 3), strides=(3, 1)),
    "valid": depthwise((2, 7, 7, 3), (3, 3), padding="VALID"),
    "explicit padding": depthwise((2, 7, 6, 3), (3, 3), strides=(2, 2), padding=((2, 0), (1, 3))),
    "negative padding": depthwise((2, 9, 9, 3), (3, 3), padding=((-1, 0), (1, -2))),
    "more padding than the window": depthwise(
        (1, 4, 4, 2), (3, 3), padding=((5, 4), (0, 6)), strides=(2, 3)
    ),
    "dilated": depthwise((2, 9, 9, 3), (3, 3), dilation=(2, 3)),
    "dilated and strided": depthwise(
        (2, 9, 9, 3), (3, 3), dilation=(2, 1), strides=(2, 2), padding=((2, 2), (1, 1))
    ),
    "7x7": depthwise((1, 10, 10, 4), (7, 7)),
    "even window": depthwise((2, 8, 8, 4), (2, 4), strides=(2, 2)),
    "1x1": depthwise((2, 5, 5, 4), (1, 1)),
    "1-D": depthwise((3, 17, 5), (4,), strides=(2,)),
    "3-D": depthwise((2, 5, 6, 7, 3), (3, 2, 3), strides=(1, 2, 1)),
    "channels first": depthwise(
        (2, 8, 8, 3), (3, 3), strides=(2, 2), spec=("NCHW", "OIHW", "NCHW")
    ),
    "mixed layouts": depthwise((2, 8, 7, 3), (3, 3), spec=("NHWC", "OIHW", "NCHW")),
    "transposed": depthwise((2, 5, 5, 3), (3, 3), x_dilation=(2, 2), padding=((2, 1), (1, 2))),
    "many examples": depthwise((24, 64, 64, 8), (3, 3)),
    "window larger than the array": depthwise((2, 3, 3, 2), (5, 5)),
}


GROUPED = {
    "groups: two groups": convolution((2, 7, 6, 4), (3, 3), 6, 2),
    "groups: strided": convolution((2, 9, 8, 6), (3, 3), 6, 3, strides=(2, 2)),
    "groups: dilated": convolution(
        (2, 9, 8, 6), (3, 2), 9, 3, dilation=(2, 1), padding=((2, 1), (0, 3))
    ),
    "groups: channels first": convolution(
        (3, 6, 6, 8), (3, 3), 4, 4, spec=("NCHW", "OIHW", "NCHW")
    ),
    "groups: 1-D": convolution((3, 12, 8), (5,), 8, 4),
    "groups: 3-D": convolution((2, 4, 5, 6, 4), (2, 3, 1), 4, 2),
    "groups: two filters for a channel": convolution((2, 8, 8, 4), (3, 3), 8, 4),
    "groups: transposed": convolution(
        (2, 4, 4, 4), (3, 3), 6, 2, x_dilation=(2, 2), padding=((2, 1), (1, 2))
    ),
}


DILATED = {  # with the number of rewritten convolutions of three
    "3-D": (
        convolution(
            (2, 3, 4, 5, 3), (2, 3, 2), 4, 1, x_dilation=(2, 1, 3), padding=((1, 1), (2, 0), (1, 2))
        ),
        2,
    ),
    "3-D, strided": (convolution((2, 5, 6, 7, 3), (3, 3, 3), 4, 1, strides=(2, 2, 1)), 1),
    "3-D, plain": (convolution((2, 5, 6, 7, 3), (3, 3, 3), 4, 1), 0),
    "2-D": (
        convolution((2, 9, 9, 3), (3, 3), 4, 1, x_dilation=(2, 2), padding=((2, 1), (1, 2))),
        1,
    ),
    "2-D, channels first": (
        convolution(
            (2, 9, 9, 3),
            (3, 3),
            4,
            1,
            x_dilation=(1, 3),
            padding=((2, 1), (1, 2)),
            spec=("NCHW", "OIHW", "NCHW"),
        ),
        1,
    ),
    "2-D, unequal": (
        convolution((2, 11, 9, 3), (4, 3), 4, 1, x_dilation=(2, 3), padding=((1, 2), (0, -1))),
        1,
    ),
    "many zeros": (
        convolution((1, 2, 2, 2, 3), (2, 2, 2), 4, 1, x_dilation=(3, 3, 3), padding=((1, 1),) * 3),
        1,
    ),
    "patches": (convolution((1, 36, 36, 3), (9, 9), 4, 1, strides=(9, 9), padding="VALID"), 0),
    "2-D, small": (
        convolution((2, 4, 4, 3), (3, 3), 4, 1, x_dilation=(2, 2), padding=((2, 1), (1, 2))),
        0,
    ),
}


SMALL = {  # with the number of convolutions that become products, of: the convolution and its two gradients
    "3x3 on 2x2": (convolution((4, 2, 2, 5), (3, 3), 6, 1), 2),
    "3x3 on 1x1": (convolution((4, 1, 1, 5), (3, 3), 6, 1), 2),
    "stride 2": (convolution((4, 2, 2, 5), (3, 3), 6, 1, strides=(2, 2)), 2),
    "stride 2 on 4x4": (convolution((4, 4, 4, 5), (3, 3), 6, 1, strides=(2, 2)), 1),
    "5x3 on 4x2": (convolution((3, 4, 2, 5), (5, 3), 6, 1), 2),
    "7x7 on 2x3": (convolution((2, 2, 3, 5), (7, 7), 6, 1), 2),
    "dilated": (convolution((2, 2, 2, 5), (3, 3), 6, 1, dilation=(2, 1)), 2),
    "1-D": (convolution((4, 2, 5), (3,), 6, 1), 2),
    "3-D": (convolution((2, 2, 1, 2, 3), (3, 3, 3), 4, 1, strides=(1, 2, 1)), 2),
    "channels first": (convolution((4, 2, 2, 5), (3, 3), 6, 1, spec=("NCHW", "OIHW", "NCHW")), 2),
    "mixed layouts": (convolution((4, 2, 2, 5), (3, 3), 6, 1, spec=("NHWC", "OIHW", "NCHW")), 2),
    "much padding": (convolution((2, 2, 2, 5), (4, 4), 6, 1, padding=((5, 1), (0, 4))), 2),
    "negative padding": (convolution((2, 2, 2, 5), (3, 3), 6, 1, padding=((-1, 3), (2, 2))), 1),
    "padding above half of the window": (
        convolution((4, 1, 1, 5), (3, 3), 6, 1, strides=(2, 2), padding=((2, 2), (2, 2))),
        3,
    ),
    "every third position": (
        convolution((2, 1, 2, 3), (7, 4), 2, 1, strides=(3, 2), padding=((6, 6), (3, 3))),
        3,
    ),
    "1-D, every second position": (
        convolution((3, 1, 4), (4,), 2, 1, strides=(2,), padding=((3, 3),)),
        3,
    ),
    "3-D, every second position": (
        convolution(
            (2, 1, 1, 1, 3), (3, 3, 3), 2, 1, strides=(2, 1, 2), padding=((2, 2), (1, 1), (2, 2))
        ),
        2,
    ),
    "transposed 4x4 on 1x1": (
        convolution(
            (4, 1, 1, 5), (4, 4), 6, 1, x_dilation=(2, 2), dilation=(2, 2), padding=((8, 8), (8, 8))
        ),
        1,
    ),
    "long in one axis": (convolution((4, 2, 8, 5), (3, 3), 6, 1), 0),
    "two groups": (convolution((4, 2, 2, 6), (3, 3), 6, 2), 0),
}


def outputs(f, x, w):
    y, back = jax.vjp(f, x, w)
    return (y, *back(y + 0.5))


@pytest.mark.quick_cases("explicit padding", "3-D")
@pytest.mark.parametrize("case", [*CASES, *GROUPED])
def test_value_and_gradients(case):
    f, x, w = (CASES | GROUPED)[case]
    both = lambda x, w: outputs(f, x, w)
    expected = both(x, w)
    fast = ft.tune(both, "cpu", rules={"convolution_kernels": False})
    found = fast(x, w)
    rows = [row.rule for row in ft.explain(fast, x, w).rows]
    assert rows.count("depthwise_convolution" if case in CASES else "grouped_convolution") == 3, (
        rows
    )
    for a, b in zip(found, expected):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.quick_cases("2-D", "many zeros")
@pytest.mark.parametrize("case", DILATED)
def test_inputs_with_zeros(case):
    (f, x, w), count = DILATED[case]
    both = lambda x, w: outputs(f, x, w)
    fast = ft.tune(both, "cpu", rules={"convolution_kernels": False, "convolution_gradient": False})
    assert [row.rule for row in ft.explain(fast, x, w).rows].count("dilated_input") == count
    for a, b in zip(fast(x, w), both(x, w)):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL)
def test_windows_larger_than_the_input(case, dtype, every_size, monkeypatch):
    monkeypatch.setattr(_library, "onednn", lambda: False)
    (f, x, w), count = SMALL[case]
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    both = lambda x, w: outputs(f, x, w)
    fast = ft.tune(both, "cpu", rules={"convolution_kernels": False, "convolution_gradient": False})
    assert [row.rule for row in ft.explain(fast, x, w).rows].count("small_input") == count
    for a, b in zip(fast(x, w), both(x.astype("float32"), w.astype("float32"))):
        assert a.shape == b.shape and a.dtype == dtype
        limit = 2e-2 if dtype == "bfloat16" else 2e-5
        np.testing.assert_allclose(
            a.astype("float32"), b, rtol=limit, atol=limit * float(jnp.abs(b).max())
        )


def test_positions_of_a_strided_window_that_are_not_adjacent(every_size):
    """The first output reads the last position of the window, the second output the first position."""
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (2, 2), ((2, 2), (2, 2)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x, w = draw(3, 1, 1, 4), draw(3, 3, 4, 5)
    corners = np.stack([w[2, 2], w[2, 0], w[0, 2], w[0, 0]]).reshape(2, 2, 4, 5)
    fast = ft.tune(f, "cpu", rules={"convolution_kernels": False})
    assert [row.rule for row in ft.explain(fast, x, w).rows] == ["small_input"]
    np.testing.assert_allclose(
        fast(x, w), np.einsum("nc,hwco->nhwo", x[:, 0, 0], corners), rtol=1e-5, atol=1e-5
    )


def test_a_small_convolution_of_few_multiplications_stays():
    (f, x, w), _ = SMALL["3x3 on 2x2"]
    assert not ft.explain(ft.tune(f, "cpu"), x, w).rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["3x3, stride 2", "groups: strided"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype, case):
    with jax.enable_x64(True):
        f, x, w = (CASES | GROUPED)[case]
        x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
        both = lambda x, w: outputs(f, x, w)
        fast = ft.tune(
            both, "cpu", rules={"convolution_kernels": False, "convolution_library": False}
        )
        rewritten = {row.rule for row in ft.explain(fast, x, w).rows}
        rules = {"depthwise_convolution", "grouped_convolution"}
        assert bool(rewritten & rules) == (dtype == "bfloat16")
        exact = outputs(f, x.astype("float64"), w.astype("float64"))
        for a, b in zip(fast(x, w), exact):
            assert a.dtype == dtype
            limit = {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}[dtype]
            np.testing.assert_allclose(
                a.astype("float64"), b, atol=limit * float(jnp.abs(b).max()), rtol=0
            )


@pytest.mark.parametrize(
    ("shape", "kernel", "options"),
    [
        ((2, 8, 8, 80), (3, 3, 2, 80), dict(feature_group_count=40)),  # many groups
        ((2, 8, 8, 1), (3, 3, 1, 4), dict()),  # one channel
        (
            (1, 12, 12, 40),
            (9, 9, 1, 40),
            dict(feature_group_count=40),
        ),  # 81 positions, many channels
    ],
)
def test_other_convolutions_stay(shape, kernel, options):
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )
    rows = ft.explain(ft.tune(f, "cpu"), draw(*shape), draw(*kernel)).rows
    assert not {"depthwise_convolution", "grouped_convolution"} & {row.rule for row in rows}


def test_nan_and_infinity_stay_where_they_are():
    f, x, w = CASES["3x3, stride 2"]
    x = x.copy()
    x[0, 3, 3, 1], x[1, 0, 0, 0], x[2, 8, 7, 5] = np.nan, np.inf, -np.inf
    expected, found = f(x, w), ft.tune(f, "cpu")(x, w)
    for same in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(same(found), same(expected))


def test_empty_arrays():
    for shape in ((0, 8, 8, 4), (2, 0, 8, 4)):
        f = lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )
        assert (
            ft.tune(f, "cpu")(np.zeros(shape, np.float32), draw(3, 3, 1, 4)).shape
            == f(np.zeros(shape, np.float32), draw(3, 3, 1, 4)).shape
        )


@pytest.mark.exhaustive
def test_under_other_transforms():
    """vmap over kernels, a scan over layers, remat, and second derivatives."""
    f, x, w = CASES["3x3"]
    ws = draw(3, *w.shape)
    many = lambda x, ws: jax.vmap(f, (None, 0))(x, ws)
    scanned = lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(jax.checkpoint(f)(x, w)), None), x, ws)[
        0
    ]
    hessian = lambda x, ws: jax.jvp(jax.grad(lambda w: (f(x, w) ** 3).sum()), (ws[0],), (ws[1],))[1]
    for g in (
        many,
        scanned,
        hessian,
        lambda x, ws: jax.grad(lambda ws: (scanned(x, ws) ** 2).sum())(ws),
    ):
        fast = ft.tune(g, "cpu", rules={"convolution_kernels": False})
        expected = g(x, ws)
        np.testing.assert_allclose(
            fast(x, ws), expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max())
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("strides", [1, 2, 3])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_all_small_sizes(strides, padding):
    for size, window, dilation in itertools.product((1, 2, 5, 6), (1, 2, 3), (1, 2)):
        if padding == "VALID" and (window - 1) * dilation + 1 > size:
            continue
        f, x, w = depthwise(
            (3, size, size, 2),
            (window, window),
            strides=(strides,) * 2,
            padding=padding,
            dilation=(dilation,) * 2,
        )
        both = lambda x, w, f=f: outputs(f, x, w)
        fast = ft.tune(both, "cpu", rules={"convolution_kernels": False})
        for a, b in zip(fast(x, w), jax.jit(both)(x, w)):
            np.testing.assert_allclose(
                a, b, rtol=2e-5, atol=2e-5 * max(1.0, float(jnp.abs(b).max()))
            )


@pytest.mark.exhaustive
def test_a_layer():
    layer = nn.DepthwiseConv(3, 2, padding=1)
    x = draw(2, 8, 8, 4)
    params, _ = layer.init(jax.random.key(0), x)
    loss = lambda params, x: (layer(params, x) ** 2).sum()
    fast = ft.tune(jax.grad(loss), "cpu", rules={"convolution_kernels": False})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        fast(params, x),
        jax.grad(loss)(params, x),
    )
