"""Whole training steps on packed rows, texts that are compared, the errors, and proofs."""

import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from pack_cases import CASES, EMBED, LENGTHS, D, V, packed, parameters, texts_of
from test_pack import TEXTS, close, wide  # noqa: F401 (a fixture)

from fnet import introspect
from fnet import layers as nn
from fnet import transforms as ft

AXES = None, "n, t, ...", "segments"


def padded(texts):
    """The texts in rows of their own, and their lengths."""
    longest = max(map(len, texts))
    pad = lambda x: np.pad(x, [(0, longest - len(x))] + [(0, 0)] * (x.ndim - 1))
    return np.stack([pad(x) for x in texts]), np.array([len(x) for x in texts], np.int32)


def masked_loss(params, tokens, lengths):
    """The mean over all predicted tokens, for padded rows."""
    logits = (jnp.cumsum(params["embed"][tokens], 1) @ params["out"])[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    mask = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
    return (losses * mask).sum() / mask.sum()


def test_a_step_with_an_optimizer_equals_that_of_padded_rows():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))

    def step(state, tokens, lengths):
        params, opt = state
        loss, grads = jax.value_and_grad(masked_loss)(params, tokens, lengths)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    texts = texts_of(CASES["next token"])
    rows, segments, _ = packed(texts, 2**30)
    fast = jax.jit(ft.pack(step, axes=AXES))
    params = jax.tree.map(jnp.asarray, EMBED)
    ours = theirs = params, tx.init(params)
    for _ in range(3):
        ours, loss = fast(ours, rows, segments)
        theirs, want = step(theirs, *padded(texts))
        close(loss, want)
    jax.tree.map(close, ours, theirs)


def test_texts_may_be_compared():
    """A contrastive loss between all texts, with labels for each."""

    def loss(params, x, lengths, labels):
        mask = jnp.arange(x.shape[1]) < lengths[:, None]
        z = jnp.where(mask[..., None], x @ params["w"], 0).sum(1) / lengths[:, None]
        z /= jnp.linalg.norm(z, axis=-1, keepdims=True)
        scores = z @ z.T / 0.1
        same = labels[:, None] == labels[None]
        logs = jax.nn.log_softmax(jnp.where(jnp.eye(x.shape[0], dtype=bool), -1e9, scores))
        return -(logs * same).sum() / same.sum() + scores.mean() + z.var(0).sum()

    params = parameters(CASES["statistics"])
    texts = texts_of(CASES["statistics"])
    rows, segments, _ = packed(texts, np.nan)
    labels = np.arange(len(texts)) % 3
    step = ft.pack(jax.value_and_grad(loss), axes=(*AXES, "n"))
    more = np.concatenate([labels, [1, 2]])  # room for two texts more
    got = step(params, rows, segments, more)
    want = jax.value_and_grad(loss)(params, *padded(texts), labels)
    jax.tree.map(close, got, want)
    jax.tree.map(close, step(params, rows, segments, labels), want)


def test_statistics_over_all_tokens():
    """Sums over all tokens that are used again for each, as in batch normalization."""

    def f(params, x, lengths):
        mask = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
        count = mask.sum()
        mean = jnp.where(mask, x, 0).sum((0, 1)) / count
        var = jnp.where(mask, (x - mean) ** 2, 0).sum((0, 1)) / count
        y = (x - mean) / jnp.sqrt(var) * params["scale"]
        at_each = jnp.where(mask, x, 0).sum(0) / mask.sum(0)  # of all texts, at each position
        return jnp.where(mask, y * (x - at_each), 0).sum()

    texts = texts_of(CASES["plain mean"])
    params = {"scale": np.arange(1.0, D + 1)}
    rows, segments, _ = packed(texts, np.nan)
    got = ft.pack(jax.value_and_grad(f), axes=AXES)(params, rows, segments)
    jax.tree.map(close, got, jax.value_and_grad(f)(params, *padded(texts)))


def test_a_mean_over_rows_and_positions_is_one_over_tokens():
    texts = texts_of(CASES["plain mean"])
    rows, segments, _ = packed(texts, np.nan)
    got = ft.pack(lambda x: x.mean(), axes="n, t, ...")(rows, segments=segments)
    close(got, np.concatenate(texts).mean())
    got = ft.pack(lambda x: x.mean((1, 2)).mean(), axes="n, t, ...")(rows, segments=segments)
    close(got, np.mean([x.mean() for x in texts]))


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, tokens, lengths):
        x = linen.Embed(V, D, param_dtype=jnp.float64)(tokens)
        mask = (jnp.arange(tokens.shape[1]) < lengths[:, None])[:, None, None]
        attention = linen.MultiHeadDotProductAttention(2, param_dtype=jnp.float64)
        x = linen.LayerNorm(param_dtype=jnp.float64)(x + attention(x, mask=mask))
        x = x + linen.RNN(linen.GRUCell(D, param_dtype=jnp.float64))(x)
        return linen.Dense(3, param_dtype=jnp.float64)(x[:, 0])


def test_a_linen_model():
    model, texts = Encoder(), texts_of(CASES["next token"])
    rows, segments, _ = packed(texts, 2**30)
    params = model.init(jax.random.key(0), *padded(texts))
    f = lambda params, tokens, lengths: jnp.sin(model.apply(params, tokens, lengths)).sum()
    step = jax.value_and_grad(f)
    value, grads = ft.pack(step, axes=AXES)(params, rows, segments)
    alone = [jax.jit(step)(params, x[None], np.array([len(x)], np.int32)) for x in texts]
    close(value, sum(v for v, _ in alone), 1e-6)
    for leaf, *ones in zip(*map(jax.tree.leaves, (grads, *(g for _, g in alone)))):
        close(leaf, sum(ones), 1e-6)


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.conv = nnx.Conv(D, D, 3, padding="CAUSAL", rngs=rngs)
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, tokens):
        return self.head(jax.nn.gelu(self.conv(self.embed(tokens))))


def test_an_nnx_model():
    model, texts = Tagger(nnx.Rngs(0)), texts_of(CASES["next token"])
    rows, segments, where = packed(texts, 2**30)
    got = ft.pack(lambda model, x: model(x), axes=(None, "n, t"))(model, rows, segments=segments)
    for (row, start, length), text in zip(where, texts):
        close(got[row, start : start + length], model(text[None])[0], 1e-5)


def test_an_equinox_model():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    parts = {
        "embed": eqx.nn.Embedding(V, D, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, D, key=keys[1]),
        "norm": eqx.nn.LayerNorm(D),
    }
    params, static = eqx.partition(parts, eqx.is_array)

    def one(params, tokens, length):
        model = eqx.combine(params, static)
        x = jax.vmap(model["embed"])(tokens)
        mask = jnp.arange(tokens.shape[0]) < length
        y = model["attention"](x, x, x, mask=jnp.broadcast_to(mask, (*tokens.shape, *tokens.shape)))
        return jax.vmap(model["norm"])(x + y)

    f = lambda params, tokens, lengths: jax.vmap(one, (None, 0, 0))(params, tokens, lengths)
    texts = texts_of(CASES["next token"])
    rows, segments, where = packed(texts, 2**30)
    got = ft.pack(f, axes=AXES)(params, rows, segments)
    for (row, start, length), text in zip(where, texts):
        want = f(params, text[None], np.array([length], np.int32))[0]
        close(got[row, start : start + length], want, 1e-5)


@pytest.mark.parametrize("name", ["bag of words", "attention", "last by length", "recurrence"])
def test_gradients_of_a_packed_function(name):
    each, params = CASES[name], parameters(CASES[name])
    rows, segments, _ = packed(texts_of(each), 0)
    total = lambda f: lambda *args: sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*args)))
    outside = jax.jit(jax.grad(total(ft.pack(each.f, axes=AXES, texts=TEXTS))))
    inside = ft.pack(jax.grad(total(each.f)), axes=AXES, texts=TEXTS)
    jax.tree.map(close, outside(params, rows, segments), inside(params, rows, segments))


PROVED = "attention", "causal attention", "convolution", "causal convolution", "recurrence"


@pytest.mark.parametrize("name", PROVED)
def test_no_text_reaches_another(name):
    """Proved for all contents of texts with these numbers."""
    each = CASES[name]
    params = jax.tree.map(np.float32, parameters(each))
    rows, segments, _ = packed(texts_of(each), 0)
    f = ft.pack(each.f, axes=AXES)
    run = lambda x, segments: jax.tree.leaves(f(params, x, segments))[-1]
    with jax.enable_x64(False):
        report = introspect.depends(run, np.float32(rows), segments, axes={"b": 0, "t": 1})
        report.check(segments="segments", assume="finite")


def test_numbers_are_drawn_for_each_token():
    def f(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    rows, segments = np.ones((4, 64)), np.ones((4, 64), np.int32)
    y = ft.pack(f, axes=(None, "n, t"))(jax.random.key(0), rows, segments=segments)
    assert 0.3 < y.mean() < 0.7 and len({tuple(row) for row in np.asarray(y)}) == 4


def test_any_numbers_and_orders_of_segments():
    """Numbers may repeat in other rows, and need not ascend."""
    x = np.arange(12.0).reshape(2, 6)
    segments = np.array([[7, 7, 3, 0, 5, 5], [0, 0, 5, 5, -7, 0]])
    got = ft.pack(lambda x: x.sum(1), axes="n, t", texts=6)(x, segments=segments)
    close(got, np.array([1.0, 2.0, 9.0, 17.0, 10.0, 0.0]))


def test_no_text_at_all():
    zeros = np.zeros((2, 4))
    f = ft.pack(lambda x: (x.sum(1), jnp.exp(x)), axes="n, t", texts=3)
    sums, tokens = f(zeros * np.nan, segments=zeros.astype(int))
    assert not sums.any() and not tokens.any()


def failing(f, *args, match, **options):
    with pytest.raises(Exception, match=re.escape(match)):
        ft.pack(f, **options)(*args)


X, S = np.ones((2, 4)), np.ones((2, 4), np.int32)


def test_errors():
    f = lambda x: x.mean(1)
    with pytest.raises(TypeError, match="axes= says which axes"):
        ft.pack(f, axes=None)
    with pytest.raises(ValueError, match="no axis is 't' in axes"):
        ft.pack(f, axes="n, d")
    with pytest.raises(ValueError, match="have one name, 't'"):
        ft.pack(f, axes="t", row="t")
    with pytest.raises(ValueError, match="texts must be a positive integer, got 0"):
        ft.pack(f, axes="n, t", texts=0)
    with pytest.raises(ValueError, match="longest must be a positive integer, got 0"):
        ft.pack(f, axes="n, t", longest=0)
    with pytest.raises(ValueError, match="'a b' is no name of an axis"):
        ft.pack(f, axes="n, t", length="a b")
    failing(f, X, axes="n, t", match="which token belongs to which text? Pass segments=")
    failing(f, X, axes="n, t, d", match='shape (2, 4), expected "n, t, d"')
    failing(f, X, axes=(None, "n, t"), match="entries for 2 positional arguments, the call has 1")
    g = lambda x, lengths: x.mean(1)
    failing(g, X, S[:, :3], axes=("n, t", "segments"), match="expected the packed rows [2, 3]")
    failing(g, X, S[0], axes=("n, t", "segments"), match="segments must be integers [rows, length]")
    failing(g, X, S * 1.0, axes=("n, t", "segments"), match="segments must be integers")
    failing(lambda x: x, np.ones(4), axes="t", match="has positions 't' without texts")
    many = np.array([[1, 2, 3, 4], [1, 1, 1, 1]])
    failing(g, X, many, axes=("n, t", "segments"), texts=4, match="5 texts, more than the 4")
    twice = np.array([[1, 2, 1, 1], [1, 1, 1, 1]])
    failing(
        g, X, twice, axes=("n, t", "segments"), match="[1, 2, 1, 1] of a row have a number twice"
    )
    h = lambda x, lengths, y, z: x
    failing(
        h, X, S, np.ones(3), np.ones(2), axes=("n, t", "segments", "n", "n"),
        match="different sizes: [2, 3]",
    )  # fmt: skip


def test_what_has_no_meaning_on_packed_rows_is_an_error():
    axes = "n, t", "segments"
    failing(lambda x, _: x.sum() / x.shape[1], X, S, axes=axes,
            match="differs from text to text, since it depends on the length t")  # fmt: skip
    failing(lambda x, _: jnp.fft.fft(x).real, X, S, axes=axes,
            match="pack: no rule for 'fft' on packed texts, as it is computed over a whole")  # fmt: skip
    failing(
        lambda x, _: x[1:],
        X,
        S,
        axes=axes,
        match="the size n - 1 is no multiple of the number of texts",
    )
    failing(lambda x, _: jnp.pad(x, ((0, 0), (1, 0))), X, S, axes=axes,
            match="output 0, [n, t + 1], is longer than the text")  # fmt: skip
    failing(lambda x, _: jnp.stack([x[:, i] for i in range(x.shape[1])]), X, S, axes=axes,
            match="the function cannot be traced for texts of any length")  # fmt: skip
    failing(lambda x, _: jnp.einsum("nt,ms->nmts", x, x), X, S, axes=axes,
            match="as it combines the tokens of all pairs of texts: inputs [n, t], [n, t]")  # fmt: skip

    def mixed(x, lengths):
        step = lambda c, y: (c * 0.5 + y.sum(), None)
        return jax.lax.scan(step, 0.0, x.T)[0]

    failing(mixed, X, S, axes=axes, match="its carry mixes the texts")


def test_too_many_texts_in_a_traced_call_give_nan():
    f = jax.jit(ft.pack(lambda x, _: x.sum(1), axes=("n, t", "segments"), texts=2))
    assert np.isnan(f(X, np.array([[1, 2, 3, 0], [0, 0, 0, 0]]))).all()
    close(f(X, np.array([[1, 2, 2, 0], [0, 0, 0, 0]])), np.array([1.0, 2.0]))


def test_a_function_that_asks_for_the_length_is_right_or_nan():
    def f(x, lengths):
        return x.sum(1) if x.shape[1] > 2 else 5 * x.sum(1)

    run = ft.pack(f, axes=("n, t", "segments"), texts=2)
    close(run(X, np.array([[1, 1, 1, 0], [1, 1, 1, 1]])), np.array([3.0, 4.0]))
    assert np.isnan(run(X, np.array([[1, 1, 1, 0], [1, 1, 0, 0]]))).all()


def test_a_table_of_positions_that_is_shorter_than_the_rows():
    table = np.arange(3.0)
    axes = None, "n, t", "segments"
    f = lambda table, x, lengths: x + table[: x.shape[1]]
    run = ft.pack(f, axes=axes, longest=3)
    segments = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])
    close(run(table, X, segments), np.array([[1.0, 2, 1, 2], [1, 2, 3, 0]]))
    with pytest.raises(ValueError, match="a text has 4 tokens, more than longest=3"):
        run(table, X, S)
    assert np.isnan(jax.jit(run)(table, X, S)).all()


def test_explanation():
    f = ft.pack(masked_loss, axes=AXES)
    rows, segments, _ = packed(texts_of(CASES["next token"]), 0)
    found = ft.explain(f, EMBED, rows, segments)
    assert found.shape == (5, 8) and found.texts == 40
    kinds = {(row.primitive, row.reason) for row in found.rows}
    assert ("cumsum", "it begins anew with each text") in kinds
    assert ("gather", "moved within each text, from t to t - 1") in kinds
    assert "test_pack_steps.py" in str(found) and "5 rows of 8 places" in str(found)


def test_other_names_of_axes_and_trees():
    f = lambda batch: {"sum": batch["x"].sum(1), "scaled": batch["x"] * batch["w"][:, None]}
    axes = ({"x": "text, time", "w": "text", "l": "segments"},)
    run = ft.pack(f, axes=axes, length="time", row="text")
    w = np.array([2.0, 3.0, 5.0])
    segments = np.array([[1, 1, 2, 2], [1, 1, 1, 0]])
    got = run({"x": X, "w": w, "l": segments})
    close(got["sum"], np.array([2.0, 2.0, 3.0]))
    close(got["scaled"], np.array([[2.0, 2, 3, 3], [5, 5, 5, 0]]))


def test_packed_rows_of_the_training_package():
    from fnet import training as tr

    texts = [np.arange(1, n + 1) for n in LENGTHS]
    batch = tr.Packed(texts, length=8, batch_size=3, shuffle=False)(0)
    model = nn.Embed(9, D)
    params, _ = model.init(jax.random.key(0), batch["tokens"])
    f = lambda params, tokens, positions: (model(params, tokens), positions)
    run = ft.pack(f, axes=(None, "n, t", "n, t"))
    x, positions = run(params, batch["tokens"], batch["positions"], segments=batch["segments"])
    np.testing.assert_array_equal(positions, batch["positions"])
    close(x[batch["segments"] != 0], model(params, batch["tokens"])[batch["segments"] != 0])


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda h, x: (h + x - x.mean(0), 0.0), "read what all texts have at the same position"),
        (lambda h, x: (h + jax.jit(lambda x: x / x.sum())(x), 0.0), "read what all texts have"),
        (
            lambda h, x: (h + lax.fori_loop(0, 2, lambda i, y: y - y.max(), x), 0.0),
            "read what all texts have at the same position",
        ),
        (lambda h, x: (h + jnp.cumsum(x), 0.0), "cumsum in it combines the texts"),
        (lambda h, x: (jnp.tanh(h + x), x.sum()), "returns a sum over the texts at each position"),
    ],
)
def test_texts_that_meet_in_a_loop_over_positions_are_refused(cell, message):
    def f(x):
        last, each = lax.scan(cell, jnp.zeros(x.shape[0]), x.T)
        return (last + 0.1 * each.sum()).sum()

    with pytest.raises(ValueError, match=message):
        ft.pack(f, axes="n, t")(X, segments=S)


def test_what_all_texts_have_at_a_position_is_not_summed_over_positions():
    spread = lambda x: (x.sum(1) + jnp.log1p(x.sum(0)).sum()).mean()
    with pytest.raises(ValueError, match="what all texts have at each of them"):
        ft.pack(spread, axes="n, t")(X, segments=S)
    with pytest.raises(ValueError, match="what all texts have at each of them"):
        ft.pack(lambda x: x.sum(1) + x.sum(0).max(), axes="n, t")(X, segments=S)
    rest = lambda x: x - x.sum(0)  # but each text may read it at its positions
    close(ft.pack(rest, axes="n, t")(X, segments=S), rest(X))
    total = lambda x: x.sum(0).sum()  # and the sum of all is one
    close(ft.pack(total, axes="n, t")(X, segments=S), total(X))


def test_refusals_name_the_reason():
    failing(lambda x, _: jnp.cumsum(x, 0), X, S, axes=("n, t", "segments"), match="of all texts")
    failing(lambda x, _: jnp.sort(x, 0), X, S, axes=("n, t", "segments"), match="different texts")
    failing(lambda x, _: x[0, 0], X, S, axes=("n, t", "segments"), match="some of the texts")


def test_linspace_of_a_single_position_is_nan():
    ramp = lambda x: (x * jnp.linspace(0.0, 1.0, x.shape[1])).sum(1)
    sums = lambda rows: ft.pack(ramp, axes="n, t", texts=2)(X[:1], segments=np.array([rows]))
    close(sums([1, 1, 2, 2]), [1.0, 1.0])
    assert np.isnan(sums([1, 1, 1, 2])).all()
