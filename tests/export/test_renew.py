"""The stable form: evaluated by NumPy, and renewed as a program of the installed JAX. The golden
bundle."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax import lax
from test_bundles import digits, opened, specs_of
from zoo import FEW, build, inputs

from fnet import cli, export
from fnet.export import _stable, _write
from fnet.export.standalone import _interpret

pytestmark = pytest.mark.usefixtures("quickly")
GOLDEN = Path(__file__).parent / "golden_jax_0.10.2.fnet"
DRAW = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(DRAW.normal(size=shape), jnp.float32)


def ints(*shape, high=5):
    return jnp.asarray(DRAW.integers(0, high, shape), jnp.int32)


def conv(x, kernel, **options):
    return lax.conv_general_dilated(
        x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


# name -> (function, arguments): operations with their options, beyond those of the models.
PROGRAMS = {
    "unary": (
        lambda x: [
            f(jnp.abs(x) / 4 + 0.1)
            for f in (
                jnp.exp2,
                jnp.expm1,
                jnp.log,
                jnp.log1p,
                jnp.sin,
                jnp.cos,
                jnp.tan,
                jnp.arcsin,
                jnp.arccos,
                jnp.arctan,
                jnp.sinh,
                jnp.cosh,
                jnp.arcsinh,
                jnp.arctanh,
                jnp.sqrt,
                lax.rsqrt,
                jnp.cbrt,
                lax.erf,
                lax.erfc,
                lax.erf_inv,
                lax.lgamma,
                jnp.floor,
                jnp.ceil,
                jnp.round,
                jnp.sign,
                jnp.isfinite,
                jax.nn.sigmoid,
            )
        ],
        [normal(3, 4)],
    ),
    "binary": (
        lambda x, y: [
            x + y,
            x - y,
            x * y,
            x / y,
            jnp.maximum(x, y),
            jnp.minimum(x, y),
            jnp.arctan2(x, y),
            lax.rem(x, y),
            lax.pow(jnp.abs(x), y),
            jnp.clip(x, -0.5, 0.5),
            x**3,
            1 / x**2,
        ],
        [normal(3, 4), normal(3, 4)],
    ),
    "integers": (
        lambda x, y: [
            x // y,
            lax.rem(x, y),
            x & y,
            x | y,
            x ^ y,
            ~x,
            x << 2,
            x >> 1,
            lax.div(-x, y),
            x == y,
            x < y,
            lax.population_count(x),
        ],
        [ints(3, 4), ints(3, 4) + 1],
    ),
    "bools": (
        lambda x, y: [x & y, x | y, x ^ y, ~x, x.all(1), x.any(0), jnp.where(x, y, ~y)],
        [normal(3, 4) > 0, normal(3, 4) > 0],
    ),
    "reductions": (
        lambda x: [
            x.sum(0),
            x.prod(1),
            x.max(),
            x.min((0, 1)),
            x.argmax(1),
            x.argmin(0),
            lax.cumsum(x, 1),
            lax.cumprod(x, 0, reverse=True),
            lax.cummax(x, 1),
            lax.cummin(x, 0, reverse=True),
        ],
        [normal(3, 4)],
    ),
    "layout": (
        lambda x: [
            x.T,
            x[::-1],
            x[1:, ::2],
            jnp.tile(x, (2, 3)),
            jnp.stack([x, 2 * x], 1),
            x.reshape(2, 6),
            jnp.split(x, 2, 1)[1],
            jnp.pad(x, 1),
            lax.pad(x, 1.0, ((-1, 2, 1), (0, -1, 2))),
            jnp.roll(x, 1, 0),
            jnp.tri(3),
        ],
        [normal(3, 4)],
    ),
    "indexing": (
        lambda x, i: [
            x[i],
            x[:, i % 4],
            jnp.take_along_axis(x, i[:, None] % 4, 1),
            x.at[i].add(1.0),
            x.at[i, i % 4].set(2.0, unique_indices=True),
            x.at[0].max(0.5),
            jnp.nan_to_num(jnp.take(x, i + 3, 0, mode="fill"), nan=-7.0),
            jax.vmap(lambda row, j: row[j])(x, i),
            jax.vmap(lambda row, j: lax.dynamic_slice(row, (j,), (2,)))(x, i),
            jax.vmap(lambda row, j: lax.dynamic_update_slice(row, jnp.zeros(2), (j,)))(x, i),
            lax.dynamic_slice(x, (i[0], 1), (2, 2)),
            lax.dynamic_update_slice(x, jnp.ones((2, 2)), (i[0], i[1])),
        ],
        [normal(5, 4), jnp.array([0, 2, 1, 4, 3], jnp.int32)],
    ),
    "sorting": (
        lambda x, y: [
            *lax.sort((x, y), num_keys=1),
            *lax.sort((y, x), num_keys=2),
            *lax.top_k(x, 2),
            jnp.argsort(x, 0),
        ],
        [normal(3, 6), ints(3, 6)],
    ),
    "products": (
        lambda x, y: [
            jnp.einsum("abc,adc->abd", x, y),
            jnp.einsum("abc,ebc->ae", x, y),
            jnp.einsum("abc,dec->abde", x, y),
            x @ y.swapaxes(1, 2),
        ],
        [normal(2, 3, 4), normal(2, 3, 4)],
    ),
    "convolutions": (
        lambda x, k, g: [
            conv(x, k, window_strides=(1, 1), padding="SAME"),
            conv(x, k, window_strides=(2, 1), padding=((1, 0), (2, 1))),
            conv(x, k, window_strides=(1, 1), padding="VALID", rhs_dilation=(2, 1)),
            conv(x, k, window_strides=(1, 1), padding=((2, 2), (2, 2)), lhs_dilation=(2, 3)),
            conv(x, g, window_strides=(1, 1), padding="SAME", feature_group_count=2),
        ],
        [normal(2, 6, 5, 4), normal(3, 2, 4, 6), normal(3, 3, 2, 6)],
    ),
    "windows": (
        lambda x: [
            lax.reduce_window(
                x, -jnp.inf, lax.max, (1, 2, 3, 1), (1, 2, 1, 1), ((0, 0), (0, 1), (1, 1), (0, 0))
            ),
            lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"),
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
        ],
        [normal(2, 6, 6, 3)],
    ),
    "gradient of a pooling": (
        jax.grad(
            lambda x: jnp.square(
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME")
            ).sum()
        ),
        [normal(2, 7, 6, 3)],
    ),
    "gradient of a convolution": (
        jax.grad(
            lambda x, k: jnp.square(conv(x, k, window_strides=(2, 1), padding="SAME")).sum(), (0, 1)
        ),
        [normal(2, 6, 5, 3), normal(3, 2, 3, 4)],
    ),
    "loops": (
        lambda x: [
            *lax.scan(lambda c, a: (c + a, c * a), x[0], x),
            *lax.scan(lambda c, a: (c + a, c * a), x[0], x, reverse=True),
            lax.while_loop(
                lambda c: c[0].sum() < 100, lambda c: (c[0] * 2, c[1] + 1), (jnp.abs(x), 0)
            )[0],
            lax.fori_loop(0, 5, lambda i, c: c * 0.5 + i, x),
        ],
        [normal(4, 3)],
    ),
    "branches": (
        lambda x, i: [
            lax.cond(i[0] > 0, jnp.sin, jnp.cos, x),
            lax.switch(i[1], [lambda x: x, lambda x: x * 2, jnp.exp], x),
        ],
        [normal(3), jnp.array([1, 2], jnp.int32)],
    ),
}


def stable(name):
    f, args = PROGRAMS[name]
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(f(*args)))(*args)
    program, constants = _stable.stable(closed)
    return (
        json.loads(json.dumps(program, allow_nan=False)),
        constants,
        args,
        jax.tree.leaves(jax.jit(f)(*args)),
    )


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numpy_computes_the_same(name):
    program, constants, args, wanted = stable(name)
    for got, want in zip(_interpret.run(program, constants, args, {}), wanted, strict=True):
        assert got.dtype == want.dtype
        close(got, want, 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("indexing", "loops", "windows")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in PROGRAMS
    ],
)
def test_a_renewed_program_computes_the_same(name, tmp_path):
    f, args = PROGRAMS[name]
    program = export.program(
        lambda params, *args: f(*args), {}, **{f"x{i}": a for i, a in enumerate(args)}
    )
    program.save(tmp_path / "f", tests={"predict": {f"x{i}": a for i, a in enumerate(args)}})
    export.renew(tmp_path / "f", tmp_path / "g")
    for got, want in zip(
        jax.tree.leaves(export.load(tmp_path / "g")(*args)),
        jax.tree.leaves(jax.jit(f)(*args)),
        strict=True,
    ):
        close(got, want, 1e-5)


def renews(name, folder):
    """A bundle beyond JAX's window: JAX refuses its program, NumPy reads it, and the renewed one
    has all sizes."""
    f, params, _, shapes = build(name)
    x = [inputs(name, shape) for shape in shapes]
    export.program(f, params, **specs_of(name)).save(
        folder / "old", tests={"predict": {f"x{i}": a for i, a in enumerate(x[0])}}
    )
    archive, manifest, files = opened(folder / "old")
    files["programs/predict.portable.jax"] = b"a format that JAX no longer reads"
    tensors = {name: archive.tensors(name) for name in ("weights.safetensors", "tests.safetensors")}
    _write.write(
        folder / "old",
        {**manifest, "created": "2020-01-01", "read_until": "2020-06-29"},
        files,
        tensors,
    )
    export.renew(folder / "old", folder / "new")
    bundle = export.load(folder / "new", check=True)
    assert (
        bundle.read_until > "2026"
        and bundle.manifest["provenance"]["renewed"]["written"] == "2020-01-01"
    )
    for each in x:
        wanted = jax.tree.leaves(jax.jit(f)(params, *each))
        for got in bundle(*each), export.load(folder / "old").interpret("predict", *each):
            for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
                close(a, b, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEW)
def test_renews_models(name, tmp_path):
    renews(name, tmp_path)


def test_programs_without_a_stable_form(tmp_path):
    f = lambda params, x, key: x + jax.random.normal(key, x.shape)
    program = export.program(
        f, {}, x=export.spec("2, 3"), key=jax.eval_shape(lambda: jax.random.key(0))
    )
    program.save(tmp_path / "f")
    bundle = export.load(tmp_path / "f", check=True)
    reason = "has no stable form: the operation 'random_bits' at 'the top level' has no form that is independent of JAX"
    with pytest.raises(export.BundleError, match=reason):
        bundle.interpret("predict", np.ones((2, 3), np.float32), jax.random.key(0))
    with pytest.raises(export.BundleError, match=reason):
        export.renew(tmp_path / "f")


def test_the_command(tmp_path, capsys):
    digits(tmp_path / "f", labels=range(10))
    assert cli.main(["bundle", "show", str(tmp_path / "f")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("predict(x: float32[b, 8, 8, 1]) -> float32[b, 10]\n  portable ")
    assert "stable form included" in shown and "labels: 10 (0, 1, 2, 3, 4, ...)" in shown
    assert "JAX guarantees to read it until" in shown and "(180 days)" in shown
    assert cli.main(["bundle", "check", str(tmp_path / "f")]) == 0
    assert "predict: JAX equal, NumPy " in capsys.readouterr().out

    archive, manifest, files = opened(tmp_path / "f")
    files["programs/predict.portable.jax"] = b""
    tensors = {name: archive.tensors(name) for name in ("weights.safetensors", "tests.safetensors")}
    _write.write(tmp_path / "f", {**manifest, "read_until": "2020-01-01"}, files, tensors)
    assert cli.main(["bundle", "check", str(tmp_path / "f")]) == 1
    shown = capsys.readouterr().out
    assert (
        f"JAX's guarantee to read it ended on 2020-01-01: run fnet bundle renew {tmp_path / 'f'}"
        in shown
    )
    assert "cannot read programs/predict.portable.jax" in shown and "predict: NumPy " in shown
    assert cli.main(["bundle", "renew", str(tmp_path / "f")]) == 0
    assert cli.main(["bundle", "check", str(tmp_path / "f")]) == 0
    (tmp_path / "f").write_bytes(b"nothing")
    assert cli.main(["bundle", "show", str(tmp_path / "f")]) == 2
    assert "is not a complete bundle" in capsys.readouterr().err


def test_the_golden_bundle():
    """Written by jax 0.10.2 (tests/export/make_golden.py); every later version of JAX and fnet has
    to read it."""
    assert GOLDEN.stat().st_size < 1_000_000
    bundle = export.load(GOLDEN)
    assert bundle.manifest["versions"]["jax"] == "0.10.2"
    bundle.checked_by_numpy("predict")
    if bundle.read_until >= "2026-12-31":  # JAX may refuse it afterwards
        assert len(bundle.check()) == 2


@pytest.mark.exhaustive
def test_the_golden_bundle_is_renewed(tmp_path):
    export.renew(GOLDEN, tmp_path / "new")
    bundle = export.load(tmp_path / "new", check=True)
    assert bundle.entries == ("predict", "attend")
    assert bundle.manifest["versions"]["jax"] == jax.__version__
