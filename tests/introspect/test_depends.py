"""`introspect.depends`: what is proved, under which conditions, and what breaks a claim."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import introspect, models
from fnet import layers as nn
from fnet import transforms as ft


@pytest.fixture(autouse=True)
def as_a_stranger(quickly):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


ROOT = Path(__file__).parents[2]
X = np.asarray(jax.random.normal(jax.random.key(0), (4, 6, 8)))
AXES = {"b": 0, "t": 1}
SHARED = {"b": ((None, 0), 0), "t": ((None, 1), 1)}


def statuses(f, *args, axes=AXES):
    report = introspect.depends(f, *args, axes=axes)
    independent = {name: report.verdict("independent", name).status for name in axes}
    causal = {name: report.verdict("causal", name).status for name in axes}
    return independent, causal


def attention(mask_scores):
    def f(x):
        scores = jnp.einsum("bqd,bkd->bqk", x, x)
        return jax.nn.softmax(mask_scores(scores), -1) @ x

    return f


LOWER = np.tril(np.ones((6, 6), bool))
MASKS = {
    "where -inf": lambda s: jnp.where(LOWER, s, -jnp.inf),
    "where finfo.min": lambda s: jnp.where(LOWER, s, jnp.finfo(s.dtype).min),
    "where -1e9": lambda s: jnp.where(jnp.arange(6)[:, None] >= jnp.arange(6), s, -1e9),
    "minus 1e9": lambda s: s - (1 - LOWER) * 1e9,
    "plus -1e9 before scaling": lambda s: (s + jnp.where(LOWER, 0, -1e9)) / 3,
    "plus -inf": lambda s: s + jnp.where(LOWER, 0, -jnp.inf),
    "tril of a matrix": lambda s: jnp.where(jnp.tril(jnp.ones((6, 6))) == 0, -1e30, s),
    "inverted twice": lambda s: jnp.where(~(~jnp.asarray(LOWER)), s, -1e9),
    "16 bits": lambda s: s.astype(jnp.bfloat16) + jnp.where(LOWER, 0, -1e9).astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", MASKS)
def test_causal_attention_is_proved_for_finite_values(name):
    f = lambda x: attention(MASKS[name])(x).astype(jnp.float32)
    independent, causal = statuses(f, X)
    assert independent["b"] == "proved" and causal["t"] == "proved if"
    report = introspect.depends(f, X, axes=AXES)
    verdict = report.verdict("causal", "t")
    assert verdict.holds(X) and not verdict.holds(np.full_like(X, np.nan))
    if name in ("minus 1e9", "plus -1e9 before scaling"):
        assert not verdict.holds(X * 1e6)  # scores of 1e12 are above the mask


NOT_CAUSAL = {
    "no mask": lambda s: s,
    "off by one": lambda s: jnp.where(np.tril(np.ones((6, 6), bool), 1), s, -jnp.inf),
    "upper": lambda s: jnp.where(LOWER.T, s, -jnp.inf),
    "too small a number": lambda s: jnp.where(LOWER, s, -5.0),
    "softmax over queries": lambda s: jnp.where(LOWER, s, -jnp.inf).swapaxes(1, 2),
    "computed mask": lambda s: jnp.where(s > 0, s, -jnp.inf),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_leaks_are_refuted(name):
    report = introspect.depends(attention(NOT_CAUSAL[name]), X, axes=AXES)
    verdict = report.verdict("causal", "t")
    assert verdict.status == "refuted"
    found = verdict.counterexample
    before, after = (outputs[0] for outputs in found.outputs)
    assert (before[:, found.affected] != after[:, found.affected]).any()
    assert found.affected < found.changed
    one, other = (inputs[0] for inputs in found.inputs)
    same = np.asarray(one) == np.asarray(other)
    assert same[:, [t for t in range(6) if t != found.changed]].all()


PROGRAMS = {  # name: (function, independent along b and t, causal along t)
    "elementwise": (jnp.tanh, True, True, True),
    "mean over the batch": (lambda x: x - x.mean(0), False, True, True),
    "mean over time": (lambda x: x - x.mean(1, keepdims=True), True, False, False),
    "cumulative sum": (lambda x: x.cumsum(1), True, False, True),
    "reversed cumulative sum": (
        lambda x: jnp.flip(jnp.flip(x, 1).cumsum(1), 1),
        True,
        False,
        False,
    ),
    "two flips": (lambda x: jnp.flip(jnp.flip(x, 1), 1), True, True, True),
    "roll": (lambda x: jnp.roll(x, 1, 1), True, False, False),
    "shift": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], True, False, True),
    "permuted rows": (lambda x: x[jnp.asarray([1, 0, 3, 2])], False, True, True),
    "permuted there and back": (
        lambda x: jnp.tanh(x[jnp.asarray([1, 0, 3, 2])])[jnp.asarray([1, 0, 3, 2])],
        True,
        True,
        True,
    ),
    "merged and split": (
        lambda x: jnp.sin(x.reshape(24, 8) @ np.ones((8, 8), np.float32)).reshape(4, 6, 8),
        True,
        True,
        True,
    ),
    "wrongly split": (lambda x: x.reshape(6, 4, 8).swapaxes(0, 1), False, False, False),
    "causal convolution": (
        lambda x: lax.conv_general_dilated(
            x,
            np.ones((3, 8, 8), np.float32),
            (1,),
            [(2, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
        ),
        True,
        False,
        True,
    ),
    "centered convolution": (
        lambda x: lax.conv_general_dilated(
            x, np.ones((3, 8, 8), np.float32), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ),
        True,
        False,
        False,
    ),
    "max pooling over time": (
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME"),
        True,
        False,
        False,
    ),
    "sort": (lambda x: jnp.sort(x, 1), True, False, False),
    "0 times another row": (lambda x: x + 0 * jnp.roll(x, 1, 0), "if", True, True),
    "0 times whole numbers": (
        lambda x: x + 0 * jnp.roll((x > 0).astype(int), 1, 0).astype(x.dtype).astype(int),
        True,
        True,
        True,
    ),
    "selected by a constant": (
        lambda x: jnp.where(np.arange(4)[:, None, None] < 9, x, jnp.roll(x, 1, 0)),
        True,
        True,
        True,
    ),
    "scan over time": (
        lambda x: lax.scan(lambda c, r: (c + r, c), x[:, 0] * 0, x.swapaxes(0, 1))[1].swapaxes(
            0, 1
        ),
        True,
        False,
        True,
    ),
    "scan backward": (
        lambda x: lax.scan(lambda c, r: (c + r, c), x[:, 0] * 0, x.swapaxes(0, 1), reverse=True)[
            1
        ].swapaxes(0, 1),
        True,
        False,
        False,
    ),
    "loop of known length": (
        lambda x: lax.fori_loop(0, 5, lambda i, y: jnp.tanh(y + x), x),
        True,
        True,
        True,
    ),
    "loop until all rows converge": (
        lambda x: lax.while_loop(lambda y: (y > 1).any(), lambda y: y / 2, jnp.abs(x)),
        False,
        False,
        False,
    ),
    "branch on one row": (
        lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
        False,
        False,
        None,
    ),
    "vmapped branch": (
        jax.vmap(lambda row: lax.cond(row[0, 0] > 0, jnp.sin, jnp.cos, row)),
        True,
        False,
        None,
    ),
    "one-hot permutation": (
        lambda x: jnp.einsum("ij,jtd->itd", jax.nn.one_hot(jnp.asarray([1, 0, 3, 2]), 4), x),
        None,
        True,
        True,
    ),
    "lookup by a computed index": (
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
        True,
        False,
        False,
    ),
    "written cache": (
        lambda x: lax.dynamic_update_slice(jnp.zeros((4, 6, 8)), x[:, :2], (0, 3, 0)),
        True,
        False,
        True,
    ),
    "sums of segments": (
        lambda x: jax.ops.segment_sum(x, jnp.asarray([0, 0, 1, 1]), 4),
        False,
        True,
        True,
    ),
    "Fourier transform": (lambda x: jnp.fft.fft(x, axis=2).real, True, True, True),
    "Fourier transform over time": (lambda x: jnp.fft.fft(x, axis=1).real, True, False, False),
    "solve": (
        lambda x: jnp.linalg.solve(
            np.eye(8, dtype=np.float32) + x[:, :1].swapaxes(1, 2) @ x[:, :1], x.swapaxes(1, 2)
        ).swapaxes(1, 2),
        None,
        None,
        None,
    ),
    "custom derivative": (jax.nn.relu6, True, True, True),
    "checkpoint": (
        jax.checkpoint(lambda x: jnp.sin(x) @ np.ones((8, 8), np.float32)),
        True,
        True,
        True,
    ),
    "associative scan": (
        lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
        True,
        False,
        True,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f, independent_b, independent_t, causal_t = PROGRAMS[name]
    independent, causal = statuses(f, X)
    expected = {
        True: ("proved",),
        False: ("refuted", "tested"),
        "if": ("proved if",),
        None: ("proved", "tested", "refuted", "proved if"),
    }
    assert independent["b"] in expected[independent_b], independent
    assert independent["t"] in expected[independent_t], independent
    assert causal["t"] in expected[causal_t], causal


def gpt():
    model = models.GPT(vocab_size=11, width=16, depth=3, heads=2, context=16)
    tokens = jax.random.randint(jax.random.key(0), (3, 7), 0, 11)
    return model, model.init(jax.random.key(1), tokens)[0], tokens


def test_a_decoder_and_its_gradient():
    model, params, tokens = gpt()
    report = introspect.depends(model, params, tokens, axes=SHARED)
    assert report.verdict("independent", "b").status == "proved"
    report.check(independent="b", causal="t", assume="finite")
    with pytest.raises(introspect.NotProved, match=r"proved if\n(.*\n)*.*finite") as caught:
        report.check(causal="t")
    assert caught.value.verdict.holds(params, tokens)
    assert "assume='finite'" in str(caught.value)

    def loss(params, row):
        return -jax.nn.log_softmax(model(params, row[None]))[0, :-1, 0].mean()

    each = jax.vmap(jax.grad(loss), (None, 0))
    axes = {"b": ((None, 0), 0)}
    assert introspect.depends(each, params, tokens, axes=axes).verdict(
        "independent", "b"
    ).status in (
        "proved",
        "proved if",
    )


@nn.layer
def deep(scope, x, *, leaking, leak):
    """Twelve blocks of attention, of which one looks ahead."""
    for i in range(12):
        here = scope[f"block{i}"]
        y = nn.Attention(2, causal=not (i == leaking and leak == "attention"))(here["attention"], x)
        x = x + nn.Dense(8)(here["dense"], nn.LayerNorm()(here["norm"], y))
        if i == leaking and leak == "mean":
            with jax.named_scope(f"block{i}"):
                x = x - x.mean(1, keepdims=True)
        if i == leaking and leak == "pool":
            pool = nn.MaxPool(3, 1, padding="SAME")
            x = x + pool(here["pool"], x)
    return x


LEAKS = [(layer, leak) for leak in ("attention", "mean", "pool") for layer in range(12)]
PLANTED = [LEAKS[i] for i in np.random.default_rng(0).choice(len(LEAKS), 20, replace=False)]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("layer", "leak"), PLANTED)
def test_a_planted_leak_is_found_in_its_layer(layer, leak):
    model = deep(leaking=int(layer), leak=str(leak))
    params, _ = model.init(jax.random.key(0), X)
    report = introspect.depends(model, params, X, axes=SHARED)
    with pytest.raises(introspect.NotProved) as caught:
        report.check(causal="t", assume="finite")
    verdict = caught.value.verdict
    assert verdict.status == "refuted" and f"block{layer}/" in verdict.path + "/"
    assert f"block{layer}" in str(caught.value)


def test_fnets_own_promises_about_rows():
    """Per-example gradients, and each token of generated texts."""
    model, params, tokens = gpt()

    def loss(params, tokens):
        return -jax.nn.log_softmax(model(params, tokens))[:, :-1, 0].mean()

    each = ft.per_example(ft.grad(loss))
    axes = {"b": ((None, 0), 0)}
    report = introspect.depends(each, params, tokens, axes=axes)
    assert report.verdict("independent", "b", trials=False).status == "proved"
    decode = lambda params, token, cache: model(params, token, state=cache)
    cache = model.cache(tokens)
    rows = jax.tree.map(lambda x: 1 if x.ndim > 1 else 0, cache)  # after the layers, if any
    report = introspect.depends(
        decode, params, tokens[:, :1], cache, axes={"b": ((None, 0, rows), (0, rows))}
    )
    assert report.verdict("independent", "b", trials=False).status == "proved"


def test_recurrent_layers():
    for layer, causal in (
        (nn.LSTM(8), True),
        (nn.GRU(8), True),
        (nn.LSTM(8, bidirectional=True), False),
    ):
        params, _ = layer.init(jax.random.key(0), X)
        report = introspect.depends(layer, params, X, axes=SHARED)
        assert report.verdict("independent", "b").status == "proved"
        assert (report.verdict("causal", "t").status == "proved") == causal


def test_batch_normalization():
    model = nn.Sequential(nn.Dense(4), nn.BatchNorm())
    params, state = model.init(jax.random.key(0), X)
    axes = {"b": ((None, 0), 0)}
    trained = lambda params, x: model(params, x, state=state, train=True)[0]
    evaluated = lambda params, x: model(params, x, state=state)[0]
    assert (
        introspect.depends(trained, params, X, axes=axes).verdict("independent", "b").status
        == "refuted"
    )
    introspect.depends(evaluated, params, X, axes=axes).check(independent="b")


def test_operations_without_a_rule_are_named():
    def called(x):
        return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    verdict = introspect.depends(called, X, axes=AXES).verdict("independent", "b")
    assert verdict.status == "tested" and "pure_callback" in verdict.opaque
    assert "no rule for pure_callback" in str(verdict)


def test_shapes_are_enough():
    described = jax.ShapeDtypeStruct((4, 6, 8), np.float32)
    report = introspect.depends(attention(MASKS["where -inf"]), described, axes=AXES)
    report.check(independent="b", causal="t", assume="finite")
    leak = introspect.depends(attention(NOT_CAUSAL["off by one"]), described, axes=AXES)
    assert leak.verdict("causal", "t").status == "refuted"


def test_the_report_says_how_results_depend():
    f = lambda x: {
        "mean": x.mean(0),
        "shifted": jnp.pad(x, ((0, 0), (2, 0), (0, 0)))[:, :-2],
        "all": jnp.sort(x, 1),
    }
    report = str(introspect.depends(f, X, axes={"t": (1, {"mean": None, "shifted": 1, "all": 1})}))
    assert report == (
        "result['shifted'] along 't': position 2 before\nresult['all'] along 't': all positions"
    )


def test_errors():
    with pytest.raises(ValueError, match="axis 'b' is 3, but an array has shape"):
        introspect.depends(jnp.tanh, X, axes={"b": 3})
    with pytest.raises(ValueError, match="needs one length in all arguments, got \\[4, 6\\]"):
        introspect.depends(lambda x, y: x @ y.T, X[:, 0], X[0], axes={"b": 0})
    with pytest.raises(ValueError, match="in_axes has 3 entries for 1 arguments"):
        introspect.depends(jnp.tanh, X, axes={"b": ((None, None, 0), 0)})
    report = introspect.depends(jnp.tanh, X)
    with pytest.raises(ValueError, match="unknown axis 't'; the axes of this report are 0"):
        report.check(causal="t")
    with pytest.raises(ValueError, match="assume must be None or 'finite', got True"):
        report.check(independent=0, assume=True)
    assert report.check(independent=0) is report


def test_symbolic_sizes_are_names():
    (b, t) = jax.export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, 8), np.float32)
    report = introspect.depends(lambda x: (x.cumsum(1), x.sum(1)), x)
    assert str(report) == (
        "result[0] along 'b': the same position\n"
        "result[1] along 'b': the same position\n"
        "result[0] along 't': the same and all earlier positions"
    )
    report.check(independent="b", causal="t")
    twice = jax.ShapeDtypeStruct((2 * b,), np.float32)
    with pytest.raises(ValueError, match="the size 2\\*b is computed from others"):
        introspect.depends(jnp.tanh, twice)


MARKED = """
import jax, jax.numpy as jnp, pytest

@pytest.fixture
def x():
    return jnp.ones((4, 6))

@pytest.mark.independent()
@pytest.mark.causal(1)
def test_right(x):
    return lambda x: x.cumsum(1), x

@pytest.mark.causal("t", in_axes=(None, 1), out_axes=1)
def test_leak(x):
    return lambda p, x: p * x[:, ::-1], jnp.float32(2), x

@pytest.mark.independent("b")
def test_symbolic():
    (b,) = jax.export.symbolic_shape("b")
    return jnp.tanh, jax.ShapeDtypeStruct((b, 3), jnp.float32)

@pytest.mark.segments("ids", axes={"t": 0})
def test_apart():
    return lambda x, ids: x, jnp.ones(3), jnp.asarray([1, 1, 2])

@pytest.mark.independent()
def test_nothing_returned(x):
    assert True

@pytest.mark.independent(axis=3)
def test_wrong_argument(x):
    return jnp.tanh, x
"""


def test_marks_prove_what_tests_return(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["fnet.introspect.pytest_plugin"]')
    (tmp_path / "test_marked.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert "3 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "NotProved: causal along 't': refuted, because" in done.stdout
    assert "it returned NoneType" in done.stdout
    assert "unknown arguments axis" in done.stdout


def packed(leak):
    """Attention over texts that are packed into rows, as in training."""

    def f(x, segment_ids):
        scores = jnp.einsum("bqd,bkd->bqk", x, x)
        mask = segment_ids[:, :, None] == segment_ids[:, None, :]
        if leak == "another layer":
            x = x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        if leak == "rows of another order":
            mask = mask[::-1]
        if leak == "padding joins the last text":
            mask = mask | (segment_ids == 0)[:, None, :]
        if leak == "no mask":
            mask = mask | True
        if leak == "only a causal mask":
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), mask.shape)
        scores = jnp.where(mask & jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
        return jax.nn.softmax(scores, -1) @ x

    return f


IDS = np.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6]])
PACKED = {"b": 0, "t": 1}


def test_packed_texts_are_apart():
    report = introspect.depends(packed(None), X, IDS, axes=PACKED)
    report.check(independent="b", causal="t", segments="segment_ids", assume="finite")
    verdict = report.verdict("segments", "segment_ids")
    assert verdict.status == "proved if" and verdict.holds(X, IDS)
    single = introspect.depends(
        lambda x, ids: packed(None)(x[None], ids[None])[0], X[0], IDS[0], axes={"t": 0}
    )
    assert single.verdict("segments", "ids").status == "proved if"


@pytest.mark.parametrize(
    "leak",
    [
        "another layer",
        "rows of another order",
        "padding joins the last text",
        "no mask",
        "only a causal mask",
    ],
)
def test_leaks_between_packed_texts_are_refuted(leak):
    report = introspect.depends(packed(leak), X, IDS, axes=PACKED)
    if leak == "padding joins the last text":  # a causal mask hides it, unless padding comes first
        report = introspect.depends(packed(leak), X, IDS[:, ::-1].copy(), axes=PACKED)
    assert report.verdict("segments", "segment_ids").status == "refuted"


def test_errors_of_segments():
    report = introspect.depends(packed(None), X, IDS, axes={"t": ((1, None), 1)})
    with pytest.raises(ValueError, match="axes= must name each axis of this argument"):
        report.check(segments="segment_ids")
    with pytest.raises(
        ValueError, match="'ids' is no array; the arguments of the function are x, segment_ids"
    ):
        report.check(segments="ids")
    described = jax.ShapeDtypeStruct((4, 6), np.int32)
    with pytest.raises(ValueError, match="expected an array"):
        introspect.depends(packed(None), X, described, axes=PACKED).check(segments="segment_ids")
