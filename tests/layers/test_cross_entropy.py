"""linear_cross_entropy: the numbers of Optax on whole logits, in pieces of which none is kept; its
errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft
from fnet.jaxpr import bodies

VOCAB = 37
RANDOM = np.random.default_rng(0)
X, KERNEL, BIAS = (
    jnp.asarray(RANDOM.normal(size=shape), jnp.float32)
    for shape in ((2, 12, 8), (8, VOCAB), (VOCAB,))
)
LABELS = jnp.asarray(RANDOM.integers(0, VOCAB, (2, 12)))


def whole(x, kernel, bias):
    logits = x @ kernel + bias[None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)


def chunked(chunk_size):
    return lambda x, kernel, bias: nn.linear_cross_entropy(
        x, kernel, LABELS, bias=bias, chunk_size=chunk_size
    )


def mean(f):
    return lambda *args: f(*args).mean()


def shapes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for sub in bodies(eqn):
            yield from shapes(sub.jaxpr)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunk_size", [None, 1, 5, 6, 100])
def test_losses_and_gradients_are_those_of_whole_logits(chunk_size):
    args = X, KERNEL, BIAS
    f = chunked(chunk_size)
    both = jax.jit(
        lambda *args: [(g(*args), jax.grad(mean(g), (0, 1, 2))(*args)) for g in (f, whole)]
    )
    got, want = both(*args)
    close(got, want, 1e-5)


@pytest.mark.exhaustive
def test_forward_mode_and_second_derivatives():
    args = X, KERNEL, BIAS
    forward = lambda f: jax.jvp(f, args, args)[1]
    twice = lambda f: jax.jvp(jax.grad(mean(f), (0, 1, 2)), args, args)[1]
    back_twice = lambda f: jax.grad(lambda x: jnp.square(jax.grad(mean(f))(x, KERNEL, BIAS)).sum())(
        X
    )
    for g in (forward, twice, back_twice):
        close(*jax.jit(lambda g=g: (g(chunked(5)), g(whole)))(), 1e-5)


@pytest.mark.exhaustive
def test_one_sequence_and_many_axes():
    want = optax.softmax_cross_entropy_with_integer_labels(X @ KERNEL, LABELS)
    close(nn.linear_cross_entropy(X[0], KERNEL, LABELS[0], chunk_size=4), want[0], 1e-5)
    deep = nn.linear_cross_entropy(
        X.reshape(2, 3, 4, 8), KERNEL, LABELS.reshape(2, 3, 4), chunk_size=3
    )
    close(deep, want.reshape(2, 3, 4), 1e-5)
    assert nn.linear_cross_entropy(X[:0], KERNEL, LABELS[:0]).shape == (0, 12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_labels_of_any_integer_type(dtype):
    vocab = 300  # more than int8 counts to
    kernel = jnp.asarray(RANDOM.normal(size=(8, vocab)), jnp.float32)
    want = optax.softmax_cross_entropy_with_integer_labels(X @ kernel, LABELS)
    close(nn.linear_cross_entropy(X, kernel, LABELS.astype(dtype), chunk_size=4), want, 1e-5)


def test_a_label_outside_the_vocabulary_is_nan():
    labels = LABELS.at[0, 3].set(-1).at[1, 5].set(VOCAB)
    bad = np.isnan(nn.linear_cross_entropy(X, KERNEL, labels, chunk_size=4))
    assert np.argwhere(bad).tolist() == [[0, 3], [1, 5]]


@pytest.mark.exhaustive
def test_sums_are_in_float32_for_16_bit_inputs():
    low = [a.astype(jnp.bfloat16) for a in (X, KERNEL)]
    got = nn.linear_cross_entropy(*low, LABELS, chunk_size=4)
    wide = [a.astype(jnp.float32) for a in low]
    assert got.dtype == jnp.float32
    close(got, optax.softmax_cross_entropy_with_integer_labels(wide[0] @ wide[1], LABELS), 1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "cast", [lambda f: f, lambda f: ft.autocast(f, "bfloat16")], ids=["float32", "bfloat16"]
)
def test_whole_logits_never_exist(cast):
    time, vocab = 64, 4096
    x, kernel = (
        jax.ShapeDtypeStruct((2, time, 16), jnp.float32),
        jax.ShapeDtypeStruct((16, vocab), jnp.float32),
    )
    labels = jax.ShapeDtypeStruct((2, time), jnp.int32)

    def memory(chunk_size):
        loss = lambda x, k, y: nn.linear_cross_entropy(x, k, y, chunk_size=chunk_size).mean()
        step = jax.jit(cast(jax.grad(loss, (0, 1))))
        large = max(
            np.prod(shape, dtype=int) for shape in shapes(step.trace(x, kernel, labels).jaxpr.jaxpr)
        )
        return large, step.lower(x, kernel, labels).compile().memory_analysis().temp_size_in_bytes

    (large, temporary), (all_large, all_temporary) = memory(8), memory(time)
    assert all_large == 2 * time * vocab and large == 2 * 8 * vocab
    assert all_temporary > 4 * 2 * time * vocab > 2 * temporary


@pytest.mark.parametrize(("rows", "largest"), [(8, 8 * 1024), (32, 32 * 256), (4096, 4096 * 64)])
def test_the_default_is_one_chunk_up_to_2_gibibytes(rows, largest):
    """For 32 texts of 1,024 tokens, four chunks of 2^28.6 logits; a chunk has at least 64
    positions."""
    x, kernel = (
        jax.ShapeDtypeStruct((rows, 1024, 16), jnp.float32),
        jax.ShapeDtypeStruct((16, 50257), jnp.float32),
    )
    labels = jax.ShapeDtypeStruct((rows, 1024), jnp.int32)
    traced = jax.jit(nn.linear_cross_entropy).trace(x, kernel, labels)
    assert max(np.prod(shape, dtype=int) for shape in shapes(traced.jaxpr.jaxpr)) == largest * 50257


def test_a_batch_over_devices_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    args = (
        jax.ShapeDtypeStruct((8, 12, 8), jnp.float32, sharding=rows),
        jax.ShapeDtypeStruct((8, VOCAB), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((8, 12), jnp.int32, sharding=rows),
    )
    text = (
        jax.jit(lambda *args: nn.linear_cross_entropy(*args, chunk_size=4))
        .lower(*args)
        .compile()
        .as_text()
    )
    assert not any(
        name in text for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    )


def test_heads():
    params = {"embedding": KERNEL.T}
    want = optax.softmax_cross_entropy_with_integer_labels(X @ KERNEL, LABELS)
    close(nn.Embed(VOCAB, 8).cross_entropy(params, X, LABELS), want, 1e-5)
    close(nn.Dense(VOCAB, use_bias=False).cross_entropy({"kernel": KERNEL}, X, LABELS), want, 1e-5)
    close(
        nn.Dense(VOCAB).cross_entropy({"kernel": KERNEL, "bias": BIAS}, X, LABELS),
        whole(X, KERNEL, BIAS),
        1e-5,
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "model",
    [
        models.GPT(19, 16, 1, 2, context=8),
        models.Decoder(19, 16, 1, 2, 1, 24),
        models.Decoder(19, 16, 1, 2, 2, 24, tied=True),
        models.LSTMLanguageModel(19, 8, 1),
        models.LSTMLanguageModel(19, 8, 1, tied=True),
    ],
    ids=["gpt", "llama", "llama tied", "lstm", "lstm tied"],
)
def test_models(model):
    tokens = jnp.asarray(RANDOM.integers(0, 19, (2, 9)), jnp.int32)
    params, _ = model.init(jax.random.key(0), tokens[:, :-1])
    got, logits = jax.jit(
        lambda params: (
            model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]),
            model(params, tokens[:, :-1]),
        )
    )(params)
    close(got, optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=X[0, 0]), r"expected floating-point x \[..., time, features\]; got float32\[8\]"),
        (dict(x=LABELS[..., None]), r"expected floating-point x .*; got int32\[2, 12, 1\]"),
        (
            dict(kernel=KERNEL.T),
            r"expected a floating-point kernel \[8, vocab_size\] for x of shape \[2, 12, 8\]; got "
            r"float32\[37, 8\]",
        ),
        (dict(labels=LABELS[:, :3]), r"expected integer labels \[2, 12\] .*; got int32\[2, 3\]"),
        (dict(labels=X[..., 0]), r"expected integer labels \[2, 12\] .*; got float32\[2, 12\]"),
        (
            dict(bias=BIAS[1:]),
            r"expected a bias \[37\] for a kernel of shape \[8, 37\]; got \[36\]",
        ),
        (dict(chunk_size=0), "chunk_size must be >= 1; got 0"),
    ],
)
def test_errors(change, message):
    arguments = dict(x=X, kernel=KERNEL, labels=LABELS) | change
    with pytest.raises(ValueError, match=message):
        nn.linear_cross_entropy(**arguments)
