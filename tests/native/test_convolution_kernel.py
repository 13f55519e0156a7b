"""The kernel for convolutions computes what XLA computes, with NaN and infinities at the same places."""

import dataclasses
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import native
from fnet.native import _library

AXES = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.fixture(scope="module", autouse=True)
def kernels():
    library = native.library()
    if not library:
        pytest.skip(library.reason)
    return library


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of x [batch, *space, channels] with a window, or one of its gradients.

    `kind` is "product", "transposed" (the kernel's features are before its channels), or "gradient"
    (of the kernel). Space has one to three axes.
    """

    kind: str
    batch: int
    space: tuple[int, ...]
    channels: int
    features: int
    window: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    x_dilation: tuple[int, ...] = ()
    w_dilation: tuple[int, ...] = ()
    groups: int = 1
    flipped: bool = False
    compute: type = F32
    result: type = F32

    def spatial(self, name, filler=1):
        """The attribute for three axes; those in front have size 1."""
        values = tuple(getattr(self, name)) or (filler,) * len(self.space)
        return (filler,) * (3 - len(values)) + values

    @property
    def pads(self):
        return self.spatial("padding", (0, 0))

    @property
    def w_shape(self):
        return (*self.spatial("window"), self.channels // self.groups, self.features)

    def draw(self, seed=0):
        """(x, w) in float32, rounded to the dtype of the operands."""
        random = np.random.default_rng(seed)
        shapes = (self.batch, *self.spatial("space"), self.channels), self.w_shape
        return [_rounded(random.normal(size=shape), self.compute) for shape in shapes]

    def by_xla(self, x, w):
        """XLA's convolution with as many axes as the space has. Their number decides which zeros it
        leaves out."""
        axes = len(self.space)
        first = 3 - axes
        w = w[::-1, ::-1, ::-1] if self.flipped else w
        # JAX 0.10.2 reads memory behind the input if the padding is negative before and positive
        # after it. What negative padding removes is cut off here, where no dilation is between.
        pads = []
        for axis, (pad, dilation) in enumerate(zip(self.pads, self.spatial("x_dilation")), 1):
            cut = [max(0, -side) if dilation == 1 else 0 for side in pad]
            x = lax.slice_in_dim(x, cut[0], max(cut[0], x.shape[axis] - cut[1]), axis=axis)
            pads.append(tuple(side + less for side, less in zip(pad, cut)))
        y = lax.conv_general_dilated(
            x.reshape(x.shape[0], *x.shape[1 + first :]),
            w.reshape(w.shape[first:]),
            self.spatial("strides")[first:],
            pads[first:],
            self.spatial("x_dilation")[first:],
            self.spatial("w_dilation")[first:],
            AXES[axes],
            self.groups,
        )
        return y.reshape(y.shape[0], *(1,) * first, *y.shape[1:])

    def by_kernel(self, first, second, shape):
        """Calls the kernel for x and w, or for x and the gradient of the output."""
        if self.kind == "transposed":
            window, features = second.shape[:3], self.features // self.groups
            parts = second.reshape(*window, -1, self.groups, features).transpose(0, 1, 2, 5, 4, 3)
            second = parts.reshape(*window, features, self.channels)
        spatial = {name: self.spatial(name) for name in ("strides", "x_dilation", "w_dilation")}
        spatial["low"] = tuple(low for low, _ in self.pads)
        flags = dict(
            kind=self.kind == "gradient",
            groups=self.groups,
            flipped=self.flipped,
            transposed=self.kind == "transposed",
        )
        call = jax.ffi.ffi_call(
            native.library().target("fnet_convolution"), jax.ShapeDtypeStruct(shape, self.result)
        )
        return call(
            jnp.asarray(first, self.compute),
            jnp.asarray(second, self.compute),
            **{name: np.asarray(value, np.int64) for name, value in spatial.items()},
            **{name: np.int64(value) for name, value in flags.items()},
        )


def _rounded(values, dtype):
    return np.asarray(jnp.asarray(values, dtype).astype(F32))


def check(case, seed=0):
    """Compares the kernel with XLA: finite values, and NaN and infinities in the second operand."""
    x, w = case.draw(seed)
    y = jax.eval_shape(case.by_xla, x, w)
    if case.kind == "gradient":
        second = _rounded(np.random.default_rng(seed + 1).normal(size=y.shape), case.compute)
        xla, shape = (
            jax.jit(lambda x, dy: jax.vjp(lambda w: case.by_xla(x, w), w)[1](dy)[0]),
            w.shape,
        )
    else:
        second, xla, shape = w, jax.jit(case.by_xla), y.shape
    kernel = jax.jit(functools.partial(case.by_kernel, shape=shape))
    # Where only finite values are compared: XLA computes a gradient with groups as one without, and
    # spreads what is not finite to all features; and the sizes that remain after negative padding
    # decide which zeros XLA leaves out.
    groups = case.kind == "gradient" and case.groups > 1
    cut = any(side < 0 for pad in case.pads for side in pad)
    for bad in (None,) if groups or cut else (None, np.nan, np.inf, -np.inf):
        first, other = x.copy(), second.copy()
        if bad is not None and other.size:
            other.flat[seed % other.size] = bad
        if bad == -np.inf and first.size:
            first.flat[-1] = np.nan
        expected = np.asarray(xla(first, other))
        actual = np.asarray(kernel(first, other).astype(F32))
        assert actual.shape == expected.shape
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite], str(case))
        scale = np.abs(expected[finite]).max(initial=0)
        error = np.abs(actual[finite] - expected[finite]).max(initial=0)
        assert error <= scale * (1e-5 if case.result == F32 else 2**-8), case
    again = np.asarray(kernel(x, second).astype(F32))
    np.testing.assert_array_equal(again, np.asarray(kernel(x, second).astype(F32)))


def forms(*args, **options):
    """The three kinds, in float32 and in both forms of bfloat16, drawn such that each occurs."""
    kinds = ("product", "transposed", "gradient")
    return [Case(kind, *args, **options) for kind in kinds if _possible(kind, options)]


def _possible(kind, options):
    return kind != "gradient" or not (options.get("x_dilation") or options.get("flipped"))


SAME = ((1, 1), (1, 1))
QUICK = [
    *forms(2, (9, 8), 6, 20, (3, 3), padding=SAME),
    *forms(3, (8, 8), 64, 64, (3, 3), padding=SAME),
    *forms(1, (7, 7), 150, 130, (3, 3), padding=SAME),
    *forms(2, (11, 10), 3, 64, (7, 7), strides=(2, 2), padding=((2, 3), (3, 3))),
    *forms(5, (6, 6), 32, 48, (1, 1)),
    *forms(2, (9, 7), 32, 16, (1, 1), strides=(2, 3)),
    *forms(2, (12, 9), 16, 8, (3, 2), w_dilation=(2, 3), padding=((2, 1), (0, 4))),
    *forms(2, (5, 6), 8, 12, (3, 4), x_dilation=(2, 2), padding=((2, 1), (0, 3))),
    *forms(2, (5, 6), 8, 12, (3, 4), x_dilation=(3, 1), padding=((1, 2), (3, 0))),
    *forms(
        2, (5, 6), 8, 12, (2, 3), x_dilation=(2, 3), w_dilation=(3, 2), padding=((2, 1), (4, 3))
    ),
    *forms(2, (5, 6), 8, 12, (3, 2), x_dilation=(2, 1), strides=(1, 2), padding=SAME),
    *forms(2, (8, 8), 12, 24, (3, 3), padding=SAME, groups=3),
    *forms(2, (6, 5), 8, 8, (3, 3), padding=SAME, groups=8),
    *forms(1, (5, 6), 10, 34, (3, 3), x_dilation=(2, 2), padding=SAME, groups=2),
    *forms(2, (8, 8), 8, 20, (2, 3), padding=((-1, 2), (3, -2))),
    *forms(1, (2, 3), 7, 9, (5, 6), padding=((4, 4), (3, 5))),
    *forms(2, (33,), 5, 18, (4,), strides=(2,), padding=((3, 1),)),
    *forms(1, (40,), 16, 16, (5,), w_dilation=(4,), padding=((16, 0),)),
    *forms(3, (7,), 6, 18, (3,), x_dilation=(2,), padding=((1, 2),)),
    *forms(2, (5, 4, 6), 3, 17, (2, 3, 3), strides=(1, 2, 1), padding=((0, 1), (1, 1), (2, 0))),
    *forms(1, (3, 4, 3), 4, 6, (2, 2, 3), x_dilation=(2, 1, 2), padding=((1, 1), (0, 1), (2, 2))),
    *forms(0, (5, 5), 4, 8, (3, 3), padding=SAME),
    *forms(2, (2, 2), 4, 8, (3, 3)),  # no output
    Case("product", 2, (6, 5), 8, 12, (3, 2), padding=SAME, flipped=True),
    Case("transposed", 2, (5, 6), 8, 33, (3, 4), x_dilation=(2, 2), padding=SAME, flipped=True),
]
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32)]


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize("seed", range(len(QUICK)))
def test_products_and_gradients_are_those_of_xla(seed):
    compute, result = DTYPES[seed % 3] if seed % 2 else (F32, F32)
    check(dataclasses.replace(QUICK[seed], compute=compute, result=result), seed)


def drawn(seed):
    """A random case. Sizes are at least 2: XLA makes some convolutions with less elementwise
    products, which leave out other zeros."""
    random = np.random.default_rng(seed)
    whole = lambda low, high, size=None: random.integers(low, high + 1, size)
    axes, kind = whole(1, 3), str(random.choice(["product", "transposed", "gradient"]))
    groups = int(random.choice([1, 1, 1, 2, 3]))
    wide = random.random() < 0.3
    many = lambda: tuple(int(v) for v in whole(1, 3, axes))
    x_dilation = many() if kind != "gradient" and random.random() < 0.4 else (1,) * axes
    compute, result = DTYPES[random.integers(3)]
    return Case(
        kind,
        int(whole(1, 4)),
        tuple(int(v) for v in whole(2, 12 if axes < 3 else 6, axes)),
        groups * int(whole(2, 40 if wide else 9)),
        groups * int(whole(2, 140 if wide else 20)),
        tuple(int(v) for v in whole(1, 4, axes)),
        tuple(s if d == 1 else 1 for s, d in zip(many(), x_dilation)),
        tuple(
            (int(low), int(high)) if d == 1 else (abs(int(low)), int(high))
            for (low, high), d in zip(whole(-1, 4, (axes, 2)), x_dilation)
        ),
        x_dilation,
        many() if random.random() < 0.3 else (1,) * axes,
        groups,
        bool(kind != "gradient" and random.random() < 0.3),
        compute,
        result,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_a_thousand_random_shapes(part):
    done = 0
    for seed in range(part * 1000, (part + 1) * 1000):
        case = drawn(seed)
        try:
            shape = jax.eval_shape(case.by_xla, *case.draw()).shape
        except (TypeError, ValueError):  # padding removes more than there is
            continue
        if 0 not in shape:
            check(case, seed)
            done += 1
        if done == 50:
            return
    pytest.fail(f"only {done} cases have outputs")


def call(x=(1, 1, 4, 4, 6), w=(1, 3, 3, 6, 8), y=(1, 1, 2, 2, 8), types=(F32, F32, F32), **options):
    ones = np.ones(3, np.int64)
    given = dict(kind=0, strides=ones, low=0 * ones, x_dilation=ones, w_dilation=ones)
    given |= dict(groups=1, flipped=0, transposed=0) | options
    shaped = jax.ShapeDtypeStruct(y, types[2])
    target = native.library().target("fnet_convolution")
    given = {name: np.asarray(value, np.int64)[()] for name, value in given.items()}
    return jax.ffi.ffi_call(target, shaped)(jnp.ones(x, types[0]), jnp.ones(w, types[1]), **given)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(kind=2), "expected kind 0 or 1, got 2"),
        (dict(x=(4, 4, 6)), r"expected arrays of five axes, got \[4, 4, 6\]"),
        (
            dict(strides=np.array([1, 0, 1])),
            r"expected three strides of at least 1, got \[1, 0, 1\]",
        ),
        (dict(low=np.array([0, 2**40, 0])), "expected three paddings"),
        (dict(x_dilation=np.array([1, 1, -2])), "expected three dilations of at least 1"),
        (
            dict(strides=np.array([1, 2, 1]), x_dilation=np.array([1, 2, 1])),
            "a dilated input has stride 1 and kind 0, got stride 2 and kind 0",
        ),
        (dict(groups=4), "expected channels and features that 4 groups divide, got 6 and 8"),
        (
            dict(w=(1, 3, 3, 5, 8)),
            r"expected a kernel \[depth, height, width, 6, 8\], got \[1, 3, 3, 5, 8\]",
        ),
        (dict(transposed=1), r"expected a kernel \[depth, height, width, 8, 6\]"),
        (dict(y=(2, 1, 2, 2, 8)), "expected as many examples in both arrays"),
        (dict(types=(F32, BF16, F32)), "expected operands of one type"),
        (dict(types=(jnp.int32, jnp.int32, jnp.int32)), "expected float32, or bfloat16"),
        (dict(kind=1, w=(1, 1, 2, 2, 8), y=(1, 3, 3, 6, 8), flipped=1), "is not flipped"),
    ],
)
def test_invalid_calls_name_what_was_expected(options, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(**options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    compiler = _library._compiler()
    program, source = tmp_path / "sanitize", Path(__file__).parent / "sanitize.cpp"
    flags = [flag for flag in _library.FLAGS if flag not in ("-O3", "-shared", "-fPIC")]
    flags += ["-O1", "-g", f"-fsanitize={sanitizer}", f"-I{_library.SOURCE}", "-pthread"]
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}")
    probe = [*compiler, f"-fsanitize={sanitizer}", str(empty), "-o", str(program)]
    if subprocess.run(probe, capture_output=True).returncode or not shutil.which(compiler[0]):
        pytest.skip(f"the library of -fsanitize={sanitizer} is not installed")
    subprocess.run([*compiler, *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program), "1", "600"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert "0 of 600 differ" in done.stdout
