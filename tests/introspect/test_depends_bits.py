"""What once was proved, or held, although the bits of another row show in a result: dtypes, signs of
zeros, lookups that fill, states, and names that are not JAX's own."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import hijax, io_callback
from jax.extend import random as random_bits
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fnet import introspect


@pytest.fixture(autouse=True)
def as_a_stranger(quickly):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = np.asarray(jax.random.normal(jax.random.key(0), (4, 3)))
ROWS = {"rows": (0, 0)}


def changed(row, value, x=X):
    y = np.array(x)
    y[row] = value
    return y


OTHER = changed(3, -X[3])
LARGE = changed(3, 1e5)
WHOLE = np.arange(1, 13, dtype=np.int32).reshape(4, 3)


def rows_that_differ(f, a, b, row):
    p, q = (np.asarray(jax.jit(f)(each)) for each in (a, b))
    same = (p == q) | ((p != p) & (q != q))
    if p.dtype.kind == "f":
        same &= (np.signbit(p) == np.signbit(q)) | (p != p)
    return {int(i) for i in np.argwhere(~same)[:, 0]} - {row}


def product(x, y, contract=((1,), (0,)), **options):
    return lax.dot_general(x, y, (contract, ((), ())), **options)


def masked(x):
    """Zeros whose signs are those of other rows."""
    return x[::-1] * 0.0


def divided_in_the_next_iteration(x):
    row = x[:, 0][::-1]
    return lax.scan(lambda c, _: (row * 0.0, 1 / (c + 0)), jnp.zeros(4), None, length=2)[1].T


def divided_in_a_while_loop(x):
    row = x[:, 0][::-1]
    step = lambda s: (s[0] + 1, row * 0.0, 1 / s[1])
    start = 0, jnp.zeros(4), jnp.zeros(4)
    return lax.while_loop(lambda s: s[0] < 4000, step, start)[2][:, None]


def divided_again(x):
    a = 1 / jnp.zeros((4, 3))  # the same division, of a constant
    return jnp.where(jnp.isinf(a), 1 / masked(x), a)


def in_shard_map(x):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    inverse = jax.shard_map(lambda z: 1 / z, mesh=mesh, in_specs=spec, out_specs=spec)
    return inverse(masked(x))


def in_a_callback(x):
    sign = lambda z: np.signbit(np.asarray(z)).astype(np.float32)
    return jax.pure_callback(sign, jax.ShapeDtypeStruct((4, 3), jnp.float32), masked(x))


def of_svd(x):
    first = jnp.concatenate([masked(x)[:, :1], jnp.ones((4, 1))], 1)
    return jnp.linalg.svd(jnp.stack([first, jnp.ones((4, 2))], 1))[0].reshape(4, 4)


def of_qr(x):
    a = jnp.concatenate([masked(x)[:, :1], jnp.ones((4, 1))], 1)[..., None]
    return jnp.linalg.qr(a)[0].reshape(4, 2)


def of_triangular_solve(x):
    a = masked(x)[:, :1][..., None]
    solve = lax.linalg.triangular_solve
    return solve(a, jnp.ones((4, 1, 1)), left_side=True, lower=True)[..., 0]


def filled(x):
    c = jnp.zeros(1).at[jnp.array([5])].get(mode="fill", fill_value=7.0)
    return jnp.where((c == 0)[:, None], x, x[::-1])


def pooled_apart(x):
    pool = lambda z: lax.reduce_window(z, -jnp.inf, lax.max, (1, 1), (2, 1), ((2, 2), (0, 0)))
    return jax.vjp(pool, jnp.ones_like(x))[1](x)[0]


def underflow(x):
    tiny, large = np.float32(1e-25), np.float32(1e38)
    return jnp.exp(jnp.where(x[::-1] > 0, -1.0, -1e20) * tiny * tiny * large * large)


def underflow_in_16_bits(x):
    bound = jnp.where(x[::-1] > 0, -1e-10, -1.0).astype(jnp.float16)
    return jnp.exp(bound.astype(jnp.float32) * np.float32(1e30))


def subtracted_mask(x):
    right = np.full((4, 3), -1.1e9, np.float32)
    right[:, 1] = 4000
    return jnp.exp(jnp.where(x[::-1] > 0, -1e9, -1.2e9) - right)


def smaller_than_30(numbers):
    return lambda x: jnp.where((numbers().astype(jnp.float32) < 30)[:, None], x, x[::-1])


FIVE = np.full(4, 5, jnp.float8_e3m4)
FOUR = np.full(4, 4, jnp.float8_e8m0fnu)
PROGRAMS = {  # function, an input, the same with another row
    "integers that are infinite in 16 bits": (
        lambda x: product(jnp.zeros((4, 4), "float16"), x, preferred_element_type="float16"),
        WHOLE,
        changed(3, 100_000, WHOLE),
    ),
    "the right operand's dtype": (
        lambda x: product(x.T, jnp.zeros((4, 4), "float16"), preferred_element_type=jnp.float16).T,
        X,
        LARGE,
    ),
    "an algorithm of 16 bits": (
        lambda x: product(jnp.zeros((4, 4)), x, precision=lax.DotAlgorithmPreset.F16_F16_F16),
        X,
        LARGE,
    ),
    "a bound near zero": (underflow, X, OTHER),
    "a bound near zero in 16 bits": (underflow_in_16_bits, X, OTHER),
    "a subtracted mask": (subtracted_mask, X, OTHER),
    "a lookup that fills": (filled, X, OTHER),
    "a pooling with gaps": (pooled_apart, X, changed(1, -X[1])),
    "logarithm of a complex number": (
        lambda x: jnp.log(lax.complex(-jnp.ones((4, 3)), masked(x))).imag,
        X,
        OTHER,
    ),
    "inverse of a complex number": (
        lambda x: (1 / lax.complex(masked(x), jnp.zeros((4, 3)))).real,
        X,
        OTHER,
    ),
    "zeros that become complex": (
        lambda x: jnp.log(masked(x).astype(jnp.complex64)).imag,
        X,
        OTHER,
    ),
    "a rounded bound": (
        lambda x: jnp.concatenate([lax.reduce_precision(x[::-1, :1] - 1e4, 8, 0), x], 1).max(1)[
            :, None
        ],
        np.full((4, 3), -4500, np.float32),
        changed(3, 4900, np.full((4, 3), -4500, np.float32)),
    ),
    "shard_map": (in_shard_map, X, OTHER),
    "a callback": (in_a_callback, X, OTHER),
    "a reduction of the user": (
        lambda x: lax.reduce(masked(x)[..., None], np.float32(-0.0), lambda a, b: a + 1 / b, (2,)),
        X,
        OTHER,
    ),
    "a function applied in place": (
        lambda x: masked(x).at[jnp.arange(4)].apply(lambda v: 1 / v),
        X,
        OTHER,
    ),
    "qr": (of_qr, X, OTHER),
    "svd": (of_svd, X, OTHER),
    "triangular_solve": (of_triangular_solve, X, OTHER),
    "gamma": (lambda x: jax.random.gamma(jax.random.key(0), masked(x)), X, OTHER),
    "the next iteration of a scan": (divided_in_the_next_iteration, X, OTHER),
    "the next iteration of a while loop": (divided_in_a_while_loop, X, OTHER),
    "an equation seen before": (divided_again, X, OTHER),
    "squares of 8 bits": (smaller_than_30(lambda: lax.square(jnp.asarray(FIVE))), X, OTHER),
    "positions of 8 bits": (
        smaller_than_30(lambda: lax.iota(jnp.float8_e3m4, 20)[16:]),
        X,
        OTHER,
    ),
    "negative powers of two": (
        lambda x: jnp.where((lax.neg(jnp.asarray(FOUR)) < FOUR)[:, None], x, x[::-1]),
        X,
        OTHER,
    ),
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_other_rows(name):
    f, a, b = PROGRAMS[name]
    (row,) = np.flatnonzero((a != b).any(1))
    if not rows_that_differ(f, a, b, int(row)):
        pytest.skip("this CPU or JAX computes it without a difference")
    verdict = introspect.depends(f, a, axes=ROWS).verdict("independent", "rows", trials=False)
    assert verdict.status != "proved"
    assert verdict.status != "proved if" or not (verdict.holds(a) and verdict.holds(b))


def test_constants_of_8_bits():
    two = np.full(3, 2, jnp.float8_e5m2)
    introspect.depends(lambda x: x + jnp.asarray(two).astype("float32"), X).check(independent=0)


def test_elements_that_are_iterated_together():
    """Until jax 0.12, all elements of an incomplete beta function stop together."""
    shape = np.ones(2, np.float32)
    report = introspect.depends(lambda a, b, x: lax.betainc(a, b, x), shape, shape, shape / 2)
    status = report.verdict("independent", 0, trials=False).status
    assert status == ("tested" if jax.__version_info__ < (0, 12) else "proved")


def test_state_of_python():
    total = types.SimpleNamespace(value=0.0)

    def add(x):
        total.value = total.value + np.asarray(x)
        return np.asarray(total.value, np.float32)

    kind = jax.ShapeDtypeStruct((3,), jnp.float32)
    f = lambda x: jnp.stack([io_callback(add, kind, x[i], ordered=True) for i in range(4)])
    verdict = introspect.depends(f, X).verdict("independent", 0, trials=False)
    assert verdict.status == "tested" and "io_callback" in verdict.opaque


HiPrim = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class Applied(HiPrim):
    """Computes whole numbers by a function that its parameters do not name."""

    def __init__(self, aval, how):
        kind = jax.core.ShapedArray(aval.shape, jnp.int32)
        self.in_avals, self.out_aval, self.params = (aval,), kind, {}
        self.how = how
        super().__init__()

    def expand(self, x):
        return self.how((x * 100).astype(jnp.int32))


def test_hiprims():
    def written(x):
        ref = jax.new_ref(jnp.zeros(x.shape, jnp.int32))
        ref[...] = x[::-1]
        return ref[...]

    apply = lambda x, how: Applied(jax.typeof(x), how)(x)
    both = lambda x: apply(x, lambda v: v) + 1000 * apply(x, lambda v: v[::-1])
    for f in (both, lambda x: apply(x, written)):
        assert rows_that_differ(f, X, OTHER, 3)
        verdict = introspect.depends(f, X, axes=ROWS).verdict("independent", "rows", trials=False)
        assert verdict.status == "tested"


@pytest.mark.parametrize("name", ["optimization_barrier", "call"])
def test_names_that_are_not_jax_s_own(name):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, **_: [x])
    lowering = mlir.lower_fun(lambda x, **_: [x[::-1]], multiple_results=True)
    mlir.register_lowering(primitive, lowering)
    body = {"jaxpr": jax.make_jaxpr(lambda x: x)(X)} if name == "call" else {}
    f = lambda x: primitive.bind(x, **body)[0]
    assert introspect.depends(f, X).verdict("independent", 0, trials=False).status == "tested"


def test_a_tag_that_is_taken():
    rbg = random_bits.rbg_prng_impl
    impl = random_bits.define_prng_impl(
        key_shape=rbg.key_shape,
        seed=rbg.seed,
        split=rbg.split,
        random_bits=rbg.random_bits,
        fold_in=rbg.fold_in,
        name="mine",
        tag="fry",
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (3,)))
    for kind, status in ((impl, "tested"), ("threefry2x32", "proved")):
        keys = jax.random.split(jax.random.key(0, impl=kind), 4)
        verdict = introspect.depends(uniform, keys).verdict("independent", 0, trials=False)
        assert verdict.status == status


def test_indices_without_columns():
    numbers = lax.ScatterDimensionNumbers((), (0,), ())
    add = lambda u: lax.scatter_add(jnp.zeros(4), np.zeros((4, 0), int), u, numbers, mode="clip")
    report = introspect.depends(add, np.ones(4, np.float32))
    assert report.verdict("independent", 0, trials=False).status == "tested"


# What a claim is about.


def test_segments_of_several_rows():
    ids = np.array([[1, 1, 2, 2], [3, 3, 4, 4]], np.int32)
    x = np.ones((2, 4), np.float32)
    decided = lambda f: introspect.depends(f, x, ids, axes={"b": 0, "t": 1}).verdict(
        "segments", "ids", trials=False
    )
    other_row = decided(lambda x, ids: x[::-1] + 0 * ids)
    assert other_row.status == "tested" and "independent along 'rows'" in other_row.claim
    same = lambda x, ids: jnp.where(ids[:, :, None] == ids[:, None], x[:, None], 0).max(2)
    assert decided(same).status == "proved"
    times = decided(lambda x, ids: x + 0 * x[::-1])
    assert times.status == "proved if" and times.holds(x, ids)
    assert not times.holds(changed(0, np.inf, x), ids)


@pytest.mark.parametrize("ids", [[0, 0, 2**32, 2**32], [1, 1, 1 + 1e-12, 1 + 1e-12]])
def test_numbers_that_the_program_sees_otherwise(ids):
    apart = lambda x, ids: jnp.where((ids[:, None] != ids)[..., None], -jnp.inf, x[None]).max(1)
    report = introspect.depends(apart, X, np.array(ids), axes={"t": 0})
    with pytest.raises(ValueError, match=r"'ids' has numbers that (int|float)32"):
        report.verdict("segments", "ids")


def test_masks_that_the_program_sees_otherwise():
    f = lambda x, mask: jnp.where(jnp.roll(~mask, 1), 0, x).sum()
    x, mask = np.arange(1, 5, dtype=np.float32), np.array([1, 1, 1, 0], bool)
    report = introspect.depends(f, x, mask, axes={"t": (0, None)})
    for known in (mask, [1, 1, 1, 0]):  # ~True is False, and ~1 is -2
        assert report.padding("t", 3, known={"mask": known}, trials=False).status == "tested"
    with pytest.raises(ValueError, match="'mask' has numbers that bool"):
        report.padding("t", 3, known={"mask": [1, 2, 1, 0]})
    for shape in ((1,), (), (3,)):
        with pytest.raises(ValueError, match=r"'mask' has the shape \(4,\)"):
            report.padding("t", 3, known={"mask": np.zeros(shape, bool)})


def test_a_verdict_holds_for_the_arguments_that_were_analyzed():
    flipped = lambda x, flip=False: x[::-1] if flip else x
    verdict = introspect.depends(flipped, X, flip=False).verdict("independent", 0)
    assert verdict.status == "proved" and verdict.holds(X, flip=False)
    scaled = introspect.depends(lambda x, k: x * k, X, 1.0, axes={"b": ((0, None), 0)})
    swapped = lambda z, a: jnp.tril(jnp.ones((4, 4))) @ z + a
    named = introspect.depends(swapped, z=X, a=X.copy(), axes={"b": 0}).verdict("causal", "b")
    bad = changed(3, np.nan)
    assert named.status == "proved if"
    assert named.holds(z=X, a=bad) and not named.holds(z=bad, a=X)
    for call in (
        lambda: verdict.holds(X, flip=True),
        lambda: verdict.holds(X),
        lambda: named.holds(bad, X),
        lambda: scaled.checked()([X], 1.0),
    ):
        with pytest.raises(ValueError, match="expected arguments as those that were analyzed"):
            call()


def test_axes_that_would_not_be_followed():
    with pytest.raises(ValueError, match="no entry for the keyword argument 'y'"):
        introspect.depends(lambda x, y: x + y[::-1], X, y=X.copy(), axes={"b": (0, 0)})
    square = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, t"), jnp.float32)
    with pytest.raises(ValueError, match="the size t occurs twice in an array"):
        introspect.depends(lambda x: x.sum(1), square)


def test_conditions_beside_loops_of_rows():
    """The conditions of a program with a loop that `jax.vmap` made are checked in it, too."""

    def f(x):
        y = x + 0 * x[::-1]
        turns = lambda r: lax.while_loop(
            lambda c: c < jnp.minimum(jnp.abs(r[0]), 5.0), lambda c: c + 1 / (r[1] * 0 + 1), 0.0
        )
        return y + jax.vmap(turns)(y)[:, None]

    report = introspect.depends(f, X)
    verdict = report.verdict("independent", 0, trials=False)
    assert verdict.status == "proved if" and verdict.holds(X)
    assert not verdict.holds(changed(1, np.inf))
    error, y = jax.jit(report.checked(verdict))(X)
    assert error.get() is None
    np.testing.assert_array_equal(y, jax.jit(f)(X))


def test_a_mask_with_another_sign_of_zero():
    phase = lambda x, mask: jnp.where(mask > 0, x, 0).sum() + jnp.arctan2(mask, -1.0).sum()
    x, mask = np.ones(4, np.float32), np.array([1, 1, 1, 0], np.float32)
    report = introspect.depends(phase, x, mask, axes={"t": ((0, 0), None)})
    verdict = report.padding("t", 3, known={"mask": mask}, trials=False)
    assert verdict.status == "proved" and verdict.holds(x, mask)
    assert not verdict.holds(x, np.array([1, 1, 1, -0.0], np.float32))
