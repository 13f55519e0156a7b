"""A bucketed function equals the function without padding, whatever is in the padding, in one
program for each size."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bucket_cases import NAMES, SQUARE, TEXT, attention, case, draw
from checks import sampled
from flax import nnx
from jax import lax

from fnet import introspect
from fnet import transforms as ft
from fnet.transforms._bucket import _bucket, _program, _sizes

SIZES = {"t": [4, 9]}
LENGTHS = 1, 3, 4, 8, 9  # 1, a bucket minus 1, a bucket
QUICK = (
    "mean", "extremes", "attention", "conv same stride 2", "max pool valid", "sort", "lstm by hand",
    "ends", "flattened", "drawn", "indices", "gradient of conv same stride 2",
)  # fmt: skip
# JAX itself cannot trace these for sizes of any value.
NOT_TRACED = "correlation", "searched", "interpolated", "gradient of cumulative", "flax conv"
# For these, `depends` follows the positions of the padded program.
PROVED = (
    "mean", "logic", "standardized", "attention", "causal attention", "heads",
    "masked attention", "logsumexp", "conv same", "conv same stride 2", "conv transposed",
    "max pool same", "cumulative back", "ends", "reversed", "padded", "joined", "flattened", "gram",
    "embedded", "fnet attention", "gradient of mean", "gradient of attention",
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            yield


@pytest.fixture
def junk(monkeypatch):
    """Fills the padding with NaN, True and large integers in place of zeros."""

    def filled(x, shape):
        if x.shape == shape:
            return x
        padding = [(0, m - n) for n, m in zip(x.shape, shape)]
        x = np.asarray(x)
        if x.dtype == bool:
            return np.pad(x, padding, constant_values=True)
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        value = np.nan if inexact else np.iinfo(x.dtype).max // 2
        return np.pad(x, padding, constant_values=value)

    monkeypatch.setattr(_program, "_padded", filled)


def equal(got, want, tolerance=1e-6):
    """Equal structure, shapes, dtypes and infinities, and a relative error within the tolerance.
    What is rounding noise beside the largest leaf may differ."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = [tuple(map(np.asarray, pair)) for pair in zip(*map(jax.tree.leaves, (got, want)))]
    size = lambda x: np.abs(np.nan_to_num(x.astype(float), posinf=0, neginf=0)).max(initial=0)
    largest = max(size(want) for _, want in pairs)
    for x, y in pairs:
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * max(size(y), 1e-6 * largest), equal_nan=True
        )


def bucketed(each):
    return ft.bucket(each.f, SIZES, axes=each.axes)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", sampled([name for name in NAMES if name not in NOT_TRACED], QUICK))
def test_equals_the_function_without_padding(name, junk):
    each = case(name)
    f, padded = jax.jit(each.f), bucketed(each)
    for n in LENGTHS:
        inputs, again = each.inputs(n), each.inputs(n)
        placement = _bucket.Placement(SIZES, each.axes)
        if placement.lengths(placement.of(inputs), jax.tree.leaves(inputs))["t"] > 9:
            continue  # the inputs of some cases are longer than n
        equal(padded(*inputs), f(*again))


def proof(each, n):
    """What `depends` says of the padding in the program of a bucket."""
    args = each.inputs(n)
    placement = _bucket.Placement(SIZES, each.axes)
    call = _bucket._Call(each.f, placement, args, {})
    entry = _bucket._Bucketed(each.f, placement)._entry(call)
    program, lengths = entry.program, _program.Lengths(call.lengths, call.ranges)
    arrays = [*entry.consts, *call.arrays]
    padded = [
        np.asarray(_program._padded(np.asarray(x), lengths.shape(shape)))
        for x, shape in zip(arrays, program._inputs)
    ]
    axes = [next((i for i, m in enumerate(s) if _sizes.is_open(m)), None) for s in program._inputs]
    numbers = np.asarray(list(call.lengths.values()), np.int32)

    def kept(*arrays):
        outputs = program.padded(
            call.ranges, numbers, program._closed.consts, arrays, lambda *_: None
        )
        true = [[_sizes.value(m, call.lengths) for m in shape] for shape in program.outputs]
        return [y[tuple(map(slice, shape))] for y, shape in zip(outputs, true)]

    report = introspect.depends(kept, *padded, axes={"t": (tuple(axes), None)})
    return report.padding("t", n, trials=False)


@pytest.mark.parametrize("name", sampled(PROVED, ("mean", "conv same", "ends")))
def test_padding_is_proved_to_reach_nothing_that_is_kept(name):
    verdict = proof(case(name), 6)
    assert verdict.status in ("proved", "proved if"), verdict


def test_padding_of_a_program_without_masks_is_not_proved(monkeypatch):
    monkeypatch.setattr(_program.Lengths, "masked", lambda self, x, *_: x)
    assert proof(case("mean"), 6).status not in ("proved", "proved if")


def programs(run):
    """The number of programs that XLA compiles in a function."""
    count = [0]

    def listen(event, *_, **__):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count[0]


def test_three_programs_for_all_lengths():
    traces = []

    def f(x):
        traces.append(x.shape)
        return jnp.square(x).mean(1)

    padded = ft.bucket(f, {"t": [8, 16, 32]}, axes=TEXT)
    inputs = [draw(n, 2, n, 4) for n in range(1, 33)]
    compiled = programs(lambda: [padded(x) for x in inputs])
    assert compiled == 3
    assert len(traces) == 1


def test_gradient_of_a_bucketed_function_takes_two_programs_for_a_size():
    loss = lambda w, x: jnp.square(attention(x @ w)).mean()
    padded = ft.bucket(loss, {"t": [8]}, axes=(None, TEXT))
    inputs = [draw(n, 2, n, 4) for n in (2, 5, 8)]
    gradients, exact = jax.grad(padded, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))
    gradients(SQUARE, inputs[0])
    assert programs(lambda: gradients(SQUARE, draw(7, 2, 7, 4))) == 0
    for x in inputs:
        equal(gradients(SQUARE, x), exact(SQUARE, x))


def test_gradient_beside_arguments_that_are_no_numbers():
    def loss(table, tokens, mask, key):
        x = jnp.where(mask[..., None], table[tokens], 0)
        return jnp.sum(x.sum(1) * jax.random.normal(key, (4,))), tokens.max()

    axes = (None, "b, t", "b, t", None)
    padded = ft.bucket(loss, SIZES, axes=axes)
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5) % 4
    inputs = SQUARE, tokens, tokens > 0, jax.random.key(0)
    equal(jax.grad(padded, has_aux=True)(*inputs), jax.grad(loss, has_aux=True)(*inputs))


def test_settings_that_change_a_trace():
    padded = ft.bucket(lambda x: x.sum() + jnp.ones(()), SIZES, axes="t")
    x = np.ones(5, np.float32)
    with jax.enable_x64(False):
        assert padded(x).dtype == jnp.float32
    assert padded(x).dtype == jnp.float64


def test_second_derivatives():
    loss = lambda w, x: jnp.square(jnp.sin(x @ w).mean(1)).sum()
    padded, x = ft.bucket(loss, {"t": [8]}, axes=(None, TEXT)), draw(0, 2, 5, 4)
    squared = lambda f: lambda w: jnp.sum(jax.grad(f)(w, x) ** 2)
    equal(jax.jit(jax.grad(squared(padded)))(SQUARE), jax.jit(jax.grad(squared(loss)))(SQUARE))


def test_forward_mode_is_an_error_of_jax():
    padded = ft.bucket(jnp.sin, {"t": [8]}, axes="t")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(padded, (np.ones(3),), (np.ones(3),))


def test_infinite_padding_does_not_reach_gradients(junk):
    def loss(w, x):
        return jnp.log(jnp.abs(x @ w)).sum() + (1 / x).sum()  # infinite where x is 0

    x = 1 + np.abs(draw(0, 2, 5, 4))
    f = ft.bucket(jax.grad(loss, (0, 1)), SIZES, axes=(None, TEXT))
    equal(f(SQUARE, x), jax.grad(loss, (0, 1))(SQUARE, x))
    equal(jax.grad(ft.bucket(loss, SIZES, axes=(None, TEXT)))(SQUARE, x), jax.grad(loss)(SQUARE, x))


def test_composes_with_jit_vmap_and_other_transforms():
    padded, x = bucketed(case("attention")), draw(0, 3, 2, 5, 4)
    want = jax.vmap(attention)(x)
    equal(jax.vmap(padded)(x), want)
    equal(jax.jit(jax.vmap(padded))(x), want)
    equal(ft.bucket(jax.vmap(attention), SIZES, axes="n, b, t, d")(x), want)
    equal(ft.tune(padded)(x[0]), want[0])
    loss = lambda x: jnp.sum(jnp.sin(attention(x)))
    summed = lambda x: jnp.sum(jnp.sin(padded(x)))
    equal(jax.vmap(jax.grad(summed))(x), jax.vmap(jax.grad(loss))(x))
    equal(jax.jit(jax.vmap(jax.grad(summed)))(x), jax.vmap(jax.grad(loss))(x))


def test_batch_and_length_are_padded_at_once():
    f = lambda x: (jax.nn.log_softmax(x, 1).reshape(-1, 4), x.mean(), x.sum(0))
    padded = ft.bucket(f, {"b": [2, 8], "t": [4, 9]}, axes="b, t, d")
    for b, n in ((1, 3), (2, 4), (3, 9), (8, 5)):
        equal(padded(draw(n, b, n, 4)), f(draw(n, b, n, 4)))


def test_trees_keywords_and_arrays_of_any_axes():
    def f(params, batch, *, scale=1.0, shift=None):
        return {"y": (batch["x"] * batch["mask"][..., None] @ params * scale + shift).sum(1)}

    axes = (None, {"x": "b, t, ...", "mask": "..., t"})
    padded = ft.bucket(f, SIZES, axes=axes)
    batch = {"x": draw(0, 2, 6, 4), "mask": np.ones((2, 6))}
    options = {"scale": 2.0, "shift": np.arange(4.0)}
    equal(padded(SQUARE, batch, **options), f(SQUARE, batch, **options))


def test_arrays_in_closures_may_be_traced():
    x = draw(0, 2, 5, 4)
    loss = lambda bucket: lambda w: jnp.sum(bucket(lambda x: jnp.sin(x @ w).mean(1))(x))
    padded = loss(functools.partial(ft.bucket, sizes=SIZES, axes=TEXT))
    equal(jax.grad(padded)(SQUARE), jax.grad(loss(lambda f: f))(SQUARE))
    equal(jax.jit(jax.grad(padded))(SQUARE), jax.grad(loss(lambda f: f))(SQUARE))


def test_modules_of_flax_and_equinox():
    x = draw(0, 2, 5, 4).astype(np.float32)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x)).max(1)

    model, same = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    padded = ft.bucket(lambda model, x: model(x), SIZES, axes=(None, TEXT))
    for _ in range(2):
        equal(padded(model, x), same(x), 1e-5)
        equal(model.norm.mean[...], same.norm.mean[...], 1e-5)
    equal(ft.bucket(model, SIZES, axes=TEXT)(x), same(x), 1e-5)
    mlp = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0), dtype=jnp.float32)
    f = lambda mlp, x: jax.vmap(jax.vmap(mlp))(x).mean(1)
    equal(ft.bucket(f, SIZES, axes=(None, TEXT))(mlp, x), f(mlp, x), 1e-5)


def test_donated_arguments_that_are_not_padded_are_donated():
    step = jax.jit(lambda w, x: w - jnp.einsum("btd,bte->de", x, x), donate_argnums=0)
    w, x = jnp.asarray(SQUARE), draw(0, 2, 5, 4)
    want = step(jnp.asarray(SQUARE), x)
    equal(ft.bucket(step, SIZES, axes=(None, TEXT))(w, x), want)
    assert w.is_deleted()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_dtypes(dtype, junk):
    x = jnp.asarray(draw(0, 2, 7, 4), dtype)
    f = lambda x: (x.max(1), x.sum(1), jnp.sort(x, 1), jnp.tanh(x), jax.nn.softmax(x, 1))
    got, want = ft.bucket(f, SIZES, axes=TEXT)(x), jax.jit(f)(x)
    wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    assert [y.dtype for y in got] == [dtype] * 5
    equal(wide(got), wide(want), 1e-6 if dtype == "float32" else 2e-2)


def test_a_length_that_a_comparison_singles_out_has_a_program_of_its_own():
    def f(x):
        return x * 2 if x.shape[1] == 5 else x.sum(1, keepdims=True) + x

    padded = ft.bucket(f, SIZES, axes=TEXT)
    for n in (4, 5, 6):
        equal(padded(draw(n, 2, n, 4)), f(draw(n, 2, n, 4)))
    assert "t - 5 is 0" in str(ft.explain(padded, draw(0, 2, 5, 4)))
    assert ft.explain(padded, draw(0, 2, 6, 4)).alone is None
    parity = lambda x: x if x.shape[0] % 2 == 0 else -x
    padded = ft.bucket(parity, SIZES, axes="t")
    for n in range(1, 10):
        equal(padded(draw(n, n)), parity(draw(n, n)))
    truth = lambda x: x if x.shape[0] % 3 else -x
    padded = ft.bucket(truth, SIZES, axes="t")
    for n in range(1, 10):
        equal(padded(draw(n, n)), truth(draw(n, n)))
    alike = lambda x, y: (jnp.array_equal(x, y), x.shape[0])
    padded = ft.bucket(alike, SIZES, axes=("t", None))
    for n in (5, 6):
        assert padded(np.ones(n), np.ones(6)) == (n == 6, n)
    described = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    same_type = lambda x, y: x.sum() if described(x) == described(y) else x.max()
    padded = ft.bucket(same_type, SIZES, axes=("t", None))
    for n in (5, 6):
        equal(padded(draw(n, n), np.ones(6)), same_type(draw(n, n), np.ones(6)))


def test_short_lengths_for_which_the_function_means_something_else():
    f = lambda x: jnp.pad(x, (2, 2), "reflect").sum()
    padded = ft.bucket(f, SIZES, axes="t")
    for n in (3, 4, 7, 9):
        equal(padded(draw(n, n)), f(draw(n, n)))
    top = ft.bucket(lambda x: lax.top_k(x, 3)[0], SIZES, axes="t")
    equal(top(draw(0, 3)), lax.top_k(draw(0, 3), 3)[0])
    with pytest.raises(Exception, match="k"):
        top(draw(0, 2))


def test_explain_lists_what_was_added():
    def f(x):
        with jax.named_scope("pool"):
            return jnp.sort(x, 1).mean(1)

    explained = ft.explain(ft.bucket(f, SIZES, axes=TEXT), jnp.ones((2, 5, 4)))
    assert explained.lengths == {"t": 5} and explained.sizes == {"t": 9}
    assert [(row.scope, row.primitive, row.reason) for row in explained.rows] == [
        ("pool", "sort", "sorted with the padding at the end, along t"),
        ("pool", "reduce_sum", "masked with 0 before the sum, over t"),
    ]
    assert "test_bucket.py" in str(explained)


def test_operations_without_a_rule_raise_an_error_that_names_them():
    x = draw(0, 2, 5, 4)
    for f, name in {
        (lambda x: jnp.fft.fft(x, axis=1).real): "fft",
        (lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + jnp.eye(x.shape[1]))): "cholesky",
        (lambda x: lax.reduce(x, np.float64(0), lambda a, b: a + b * b, (1,))): "reduce",
        (lambda x: jax.debug.callback(print, x) or x): "debug_callback",
        (lambda x: jax.pure_callback(np.sort, x, x)): "pure_callback",
        (lambda x: jax.random.normal(jax.random.key(0, impl="rbg"), x.shape)): "random_bits",
        (lambda x: lax.reduce_window(x, 1.0, lax.mul, (1, 2, 1), (1, 1, 1), "SAME")): "reduce_window",
    }.items():  # fmt: skip
        message = rf"no rule for '{name}'.* at test_bucket.py:\d+"
        with pytest.raises(ValueError, match=message):
            ft.bucket(f, SIZES, axes=TEXT)(x)


def test_functions_that_cannot_be_traced_raise_one_error():
    unrolled = lambda x: sum(x[i] for i in range(x.shape[0]))
    with pytest.raises(ValueError, match="cannot be traced for a size t of any value"):
        ft.bucket(unrolled, SIZES, axes="t")(np.ones(5))
    for name in NOT_TRACED:
        with pytest.raises(ValueError, match="cannot be traced for a size t of any value"):
            bucketed(case(name))(*case(name).inputs(5))
    with pytest.raises(TypeError, match="dot_general"):  # the error of the function itself
        ft.bucket(lambda x: x @ np.ones((3, 3)), SIZES, axes="b, t, d")(np.ones((2, 5, 4)))


@pytest.mark.parametrize(
    ("sizes", "axes", "shapes", "message"),
    [
        ({"t": [4]}, "t", [(5,)], r"t = 5 is larger than all sizes of 't', \[4\]"),
        ({"t": [4]}, "b, t", [(3,)], 'has an array of shape (3,), expected "b, t"'),
        ({"t": [4]}, "3, t", [(2, 3)], 'has an array of shape (2, 3), expected "3, t"'),
        ({"t": [8]}, ("t", "t"), [(3,), (4,)], "an axis 't' of 4, but t = 3 in this call"),
        ({"t": [8]}, "2*t", [(3,)], "an axis '2*t' of 3, but t = -1"),
        ({"t": [8]}, ("t", "b"), [(3,)], "axes= has entries for 2 positional arguments"),
        ({"t": [8]}, (None, "t"), [(3,), None], "no array among the arguments has an axis 't'"),
        ({"t": [8], "s": [8]}, "t", [], "no axis is 's'"),
        ({"t": [8]}, "2*t + b", [(3,)], "mixes 't' with 'b'"),
        ({"t": []}, "t", [], "must be positive integers, got []"),
        ({"t": [0]}, "t", [], "must be positive integers, got [0]"),
        ({"t": 8}, "t", [], "expected a list of sizes of 't', got 8"),
        ([8], "t", [], "expected the sizes of each letter"),
        ({"1": [8]}, "t", [], "'1' is no name of a size"),
        ({"t": [8]}, None, [], "axes= says which axis of which argument is padded"),
    ],
)  # fmt: skip
def test_errors(sizes, axes, shapes, message):
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises((ValueError, TypeError), match=pattern):
        f = ft.bucket(lambda *args: args[0], sizes, axes=axes)
        f(*[None if shape is None else np.ones(shape) for shape in shapes])


def test_keys_are_not_padded():
    with pytest.raises(TypeError, match="random keys cannot be padded"):
        ft.bucket(lambda keys: keys, SIZES, axes="t")(jax.random.split(jax.random.key(0), 3))
