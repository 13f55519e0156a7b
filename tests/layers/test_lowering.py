"""fnet's layers cost nothing: a train step lowers to the operations of the same model written by
hand in jnp."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fnet import layers as nn

COUNTED = (
    "dot_general",
    "convolution",
    "reduce",
    "reduce_window",
    "select_and_scatter",
    "scatter",
    "gather",
    "while",
    "sort",
)
PRODUCT = re.compile(r"(?<= )(?:dot|convolution)\(")  # in compiled HLO
KEY = jax.random.key(0)


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def functions(text):
    """{name: body} of the functions of a module, the entry first."""
    parts = re.split(r"func\.func (?:public|private) @", text)[1:]
    return {re.match(r"[\w.]+", part).group(): part for part in parts}


def operations(text):
    """How often each counted operation runs; a function counts at each of its calls."""
    bodies = functions(text)

    def count(name):
        body = bodies[name]
        found = Counter(op for op in re.findall(r"stablehlo\.(\w+)", body) if op in COUNTED)
        for callee in re.findall(r"call @([\w.]+)", body):
            found += count(callee)
        return found

    return count("main")


def step_of(loss):
    """Plain SGD, with the model's state beside its parameters."""

    def step(params, state, x, labels):
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

    return step


# The same three models, by fnet's layers and by hand.

mlp = nn.Sequential(nn.Dense(16), jax.nn.relu, nn.Dense(16), jax.nn.relu, nn.Dense(10))
cnn = nn.Sequential(
    nn.Conv(8, 3),
    nn.BatchNorm(),
    jax.nn.relu,
    nn.MaxPool(2),
    nn.Conv(8, 3, 2),
    nn.BatchNorm(),
    jax.nn.relu,
    nn.AvgPool(2),
    nn.Flatten(),
    nn.Dense(10),
)


@nn.layer
def gpt(scope, tokens):
    embed, at = nn.Embed(32, 16), scope["embed"]
    x = embed(at, tokens)  # [batch, time, features]
    block = scope["block"]
    x = x + nn.Attention(2, causal=True)(block["attention"], nn.LayerNorm()(block["norm1"], x))
    y = jax.nn.gelu(nn.Dense(64)(block["up"], nn.LayerNorm()(block["norm2"], x)))
    x = x + nn.Dense(16)(block["down"], y)
    return embed.attend(at, nn.LayerNorm()(scope["norm"], x))


def dense(p, x):
    y = x @ p["kernel"]
    return y + jnp.expand_dims(p["bias"], range(y.ndim - 1))


def mlp_by_hand(params, state, x):
    x = jax.nn.relu(dense(params["0"], x))
    x = jax.nn.relu(dense(params["2"], x))
    return dense(params["4"], x), state


def conv(p, x, strides):
    y = lax.conv_general_dilated(
        x, p["kernel"], strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + p["bias"][None, None, None]


def batch_norm(p, state, x):
    mean = x.mean((0, 1, 2))
    var = jnp.square(x - mean[None, None, None]).mean((0, 1, 2))
    y = (x - mean[None, None, None]) * (lax.rsqrt(var + 1e-5) * p["scale"])[None, None, None]
    state = {
        "mean": 0.9 * state["mean"] + 0.1 * lax.stop_gradient(mean),
        "var": 0.9 * state["var"] + 0.1 * lax.stop_gradient(var),
    }
    return y + p["bias"][None, None, None], state


def pool(x, start, reduce):
    return lax.reduce_window(x, start, reduce, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def cnn_by_hand(params, state, x):
    state = dict(state)
    x, state["1"] = batch_norm(params["1"], state["1"], conv(params["0"], x, (1, 1)))
    x = pool(jax.nn.relu(x), -jnp.inf, lax.max)
    x, state["5"] = batch_norm(params["5"], state["5"], conv(params["4"], x, (2, 2)))
    x = pool(jax.nn.relu(x), 0.0, lax.add) / 4
    return dense(params["9"], x.reshape(len(x), -1)), state


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
    return x * p["scale"][None, None] + p["bias"][None, None]


def attention(p, x, heads):
    b, t, f = x.shape
    q, k, v = (
        dense(p[name], x)
        .reshape(b, t, heads, -1)
        .transpose(0, 2, 1, 3)  # [batch, heads, time, head_dim]
        for name in ("query", "key", "value")
    )
    logits = q @ k.transpose(0, 1, 3, 2) / (f // heads) ** 0.5  # [batch, heads, time, time]
    seen = jnp.tril(jnp.ones((t, t), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(logits.dtype).min))
    return dense(p["out"], (weights @ v).transpose(0, 2, 1, 3).reshape(b, t, f))


def gpt_by_hand(params, state, tokens):
    table, block = params["embed"]["embedding"], params["block"]
    x = jnp.take(table, tokens, axis=0)
    x = x + attention(block["attention"], layer_norm(block["norm1"], x), 2)
    y = jax.nn.gelu(dense(block["up"], layer_norm(block["norm2"], x)))
    x = x + dense(block["down"], y)
    return layer_norm(params["norm"], x) @ table.T, state


MODELS = {
    "mlp": (mlp, mlp_by_hand, jnp.ones((4, 8)), jnp.zeros(4, jnp.int32)),
    "cnn": (
        cnn,
        cnn_by_hand,
        jnp.linspace(-1, 1, 4 * 8 * 8 * 3).reshape(4, 8, 8, 3),
        jnp.zeros(4, jnp.int32),
    ),
    "gpt": (
        gpt(),
        gpt_by_hand,
        jnp.arange(12, dtype=jnp.int32).reshape(2, 6),
        jnp.zeros((2, 6), jnp.int32),
    ),
}


# The backward pass of attention names the product of queries and keys again, which the compiler
# finds to be the forward pass's, and has one sum less than that of a softmax. BatchNorm computes
# its statistics in one pass, with fewer sums than the mean and variance by hand.
APART = {"gpt": Counter(dot_general=1, reduce=-1), "cnn": Counter(reduce=-4)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_step_lowers_like_the_model_by_hand(name):
    model, by_hand, x, labels = MODELS[name]
    params, state = model.init(KEY, x)

    def loss(params, state, x, labels):
        logits, state = model(params, x, state=state, train=True)
        return cross_entropy(logits, labels), state

    def loss_by_hand(params, state, x, labels):
        logits, state = by_hand(params, state, x)
        return cross_entropy(logits, labels), state

    args = params, state, x, labels
    lowered, lowered_by_hand = (jax.jit(step_of(f)).lower(*args) for f in (loss, loss_by_hand))
    counts, counts_by_hand = operations(lowered.as_text()), operations(lowered_by_hand.as_text())
    assert counts_by_hand["dot_general"] > 2
    counts.subtract(APART.get(name, {}))
    assert counts == counts_by_hand
    compiled, compiled_by_hand = lowered.compile(), lowered_by_hand.compile()
    assert len(PRODUCT.findall(compiled.as_text())) <= len(
        PRODUCT.findall(compiled_by_hand.as_text())
    )
    ours, theirs = compiled(*args), compiled_by_hand(*args)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)
    )


def test_operations_counts_each_call():
    text = jax.jit(lambda x: jnp.sin(x @ x) @ x + x.sum()).lower(jnp.ones((3, 3))).as_text()
    assert operations(text) == {"dot_general": 2, "reduce": 1}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(), nn.RMSNorm(), nn.GroupNorm(4), nn.BatchNorm()], ids=str
)
def test_residual_gradient_is_computed_once(norm):
    """What XLA:CPU fuses in a gradient reads no more arrays in deeper networks: where the gradient
    of a residual stream is not kept, each block computes it again from those of all blocks
    behind."""

    @nn.layer
    def model(scope, x, *, depth):
        for i in range(depth):
            x = x + nn.Dense(32)(scope[f"dense{i}"], norm(scope[f"norm{i}"], x))
        return x

    def most_read(depth):
        x = jnp.ones((4, 16, 32))
        params, state = model(depth=depth).init(KEY, x)
        loss = lambda params: jnp.square(
            model(depth=depth)(params, x, state=state, train=True)[0]
        ).sum()
        compiled = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
        return max(operands.count("%") for operands in re.findall(r" fusion\(([^)]*)\)", compiled))

    assert most_read(6) <= most_read(3)
