"""MixtureOfExperts against loops over tokens and experts in NumPy, its capacity, its losses, and
eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import parallel
from fnet import transforms as ft

KEY = jax.random.key(0)


def softmax(x):
    y = np.exp(x - x.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


def by_loops(layer, params, x, valid=None):
    """The formula of the docstring, token by token, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    tokens = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    probabilities = softmax(tokens @ params["router"]["kernel"])
    chosen = np.argsort(-probabilities, -1, kind="stable")[:, : layer.top_k]
    most = (
        np.inf if layer.capacity is None else np.ceil(layer.capacity * chosen.size / layer.experts)
    )
    out, load = np.zeros_like(tokens), np.zeros(layer.experts)
    for choice in range(layer.top_k):  # first choices of all tokens first
        for token, row in enumerate(tokens):
            expert = chosen[token, choice]
            if valid is not None and not valid.reshape(-1)[token]:
                continue
            load[expert] += 1
            if load[expert] > most:
                continue
            weight = probabilities[token, expert]
            weight /= probabilities[token, chosen[token]].sum() if layer.normalize else 1
            gate = row @ params["gate"][expert]
            hidden = gate / (1 + np.exp(-gate)) * (row @ params["up"][expert])
            out[token] += weight * (hidden @ params["down"][expert])
    return out.reshape(x.shape).astype(np.float32)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


CASES = [  # experts, top_k, shape of x
    (8, 2, (2, 50, 6)),
    (4, 1, (37, 6)),
    (16, 4, (1, 6)),
    (3, 3, (5, 6)),
    (1, 1, (4, 6)),
    (5, 2, (2, 3, 4, 6)),
    (4, 2, (0, 6)),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("experts, top_k, shape", CASES)
@pytest.mark.parametrize(
    "normalize, capacity", [(True, None), (False, None), (True, 0.5), (False, 1.25)]
)
def test_values(experts, top_k, shape, normalize, capacity):
    layer, x = (
        nn.MixtureOfExperts(experts, 7, top_k=top_k, normalize=normalize, capacity=capacity),
        random(*shape),
    )
    params, _ = layer.init(KEY, x)
    params["router"]["kernel"] = random(
        6, experts, seed=1
    )  # some experts receive most of the tokens
    close(jax.jit(layer)(params, x), by_loops(layer, params, x), 1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("capacity", [None, 0.6])
def test_padding_is_not_routed(capacity):
    layer, x = nn.MixtureOfExperts(4, 5, capacity=capacity), random(3, 8, 6)
    params, _ = layer.init(KEY, x)
    valid = np.arange(8) < np.array([[8], [3], [0]])
    y = jax.jit(layer)(params, x, valid)
    close(y, by_loops(layer, params, x, valid), 1e-5)
    assert not np.asarray(y)[~valid].any()
    finite = jnp.where(valid[..., None], x, jnp.inf)
    gradient = jax.jit(jax.grad(lambda params: layer(params, finite, valid)[valid].sum()))(params)
    assert all(
        jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient["up"], gradient["down"]))
    )


def dense(layer, params, x):
    """Each token through all experts, with plain JAX operations, for derivatives."""
    probabilities = jax.nn.softmax(x @ params["router"]["kernel"])
    weights, chosen = jax.lax.top_k(probabilities, layer.top_k)
    weights = weights / weights.sum(-1, keepdims=True)
    weights = (jax.nn.one_hot(chosen, layer.experts, dtype=x.dtype) * weights[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("...f,efh->...eh", x, params["gate"])) * jnp.einsum(
        "...f,efh->...eh", x, params["up"]
    )
    return jnp.einsum("...eh,ehf,...e->...f", hidden, params["down"], weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [None, 4.0])
def test_derivatives(capacity):
    """Gradients, and Hessians times vectors, of the layer and of plain JAX operations. No token is
    dropped."""
    layer, x = nn.MixtureOfExperts(4, 5, capacity=capacity), random(2, 30, 6)
    params, _ = layer.init(KEY, x)

    def loss(f):
        return lambda params, x: jnp.square(f(params, x)).sum()

    theirs = loss(lambda params, x: dense(layer, params, x))
    close(
        jax.jit(jax.grad(loss(layer), (0, 1)))(params, x), jax.grad(theirs, (0, 1))(params, x), 1e-5
    )
    tangent = jax.tree.map(jnp.cos, params)
    ours, theirs = (
        jax.jit(ft.hvp(lambda params, f=f: f(params, x)))(params, tangent)
        for f in (loss(layer), theirs)
    )
    close(ours, theirs, 1e-4)


def test_losses():
    logits = random(3, 20, 8)
    flat = np.asarray(logits, np.float64).reshape(-1, 8)
    chosen = np.argsort(-flat, -1)[:, :2]
    fraction = np.bincount(chosen.reshape(-1), minlength=8) / len(flat)
    close(
        nn.load_balancing_loss(logits, 2),
        8 * (fraction * softmax(flat).mean(0)).sum().astype(np.float32),
        1e-6,
    )
    close(
        nn.router_z_loss(logits),
        (np.log(np.exp(flat).sum(-1)) ** 2).mean().astype(np.float32),
        1e-6,
    )
    valid = np.arange(20) < np.array([[20], [7], [1]])
    kept = logits[valid]
    close(nn.load_balancing_loss(logits, 2, valid=valid), nn.load_balancing_loss(kept, 2), 1e-6)
    close(nn.router_z_loss(logits, valid=valid), nn.router_z_loss(kept), 1e-6)


def test_losses_of_captured_logits_balance_the_router():
    layer, x = nn.Stack(nn.Residual(nn.MixtureOfExperts(4, 5)), 2), random(64, 6)
    params, _ = layer.init(KEY, x)

    def loss(params):
        _, seen = ft.capture(layer, ".*router")(params, x)
        (logits,) = jax.tree.leaves(seen)
        assert logits.shape == (2, 64, 4)
        return nn.load_balancing_loss(logits, 2) + 1e-3 * nn.router_z_loss(logits)

    step = jax.jit(jax.value_and_grad(loss))
    first, _ = step(params)
    for _ in range(40):
        value, gradient = step(params)
        params = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, params, gradient)
    assert value < first
    assert value < 2.1  # 2 if all experts receive equally many tokens


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("capacity", [None, 1.5])
def test_experts_on_eight_devices(capacity):
    layer, x = nn.MixtureOfExperts(8, 16, capacity=capacity), random(8, 12, 4)
    params, _ = layer.init(KEY, x)
    rules = parallel.rules(layer.spec(x).params, {"expert": "tensor"})
    assert rules == {
        "gate": ("tensor", None, None),
        "up": ("tensor", None, None),
        "down": ("tensor", None, None),
    }
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, P(*rules.get(name, ()))))
        for name, leaf in params.items()
    }
    step = jax.jit(jax.value_and_grad(lambda params, x: jnp.square(layer(params, x)).sum()))
    close(step(placed, jax.device_put(x, NamedSharding(mesh, P()))), step(params, x), 1e-5)


def test_half_precision_keeps_the_routing():
    """Weights are computed in float32, so that bfloat16 changes values only by the rounding of
    products."""
    layer, x = nn.MixtureOfExperts(4, 16), random(64, 8)
    params, _ = layer.init(KEY, x)
    y = jax.jit(ft.autocast(layer, "bfloat16", rules={"router": "float32"}))(params, x)
    assert jnp.abs(y - jax.jit(layer)(params, x)).max() < 0.03 * jnp.abs(y).max()


@pytest.mark.parametrize(
    "layer, arguments, text",
    [
        (
            nn.MixtureOfExperts(4, 5, top_k=5),
            (random(2, 6),),
            "expected 1 <= top_k <= experts, got top_k=5 and 4 experts",
        ),
        (
            nn.MixtureOfExperts(4, 5, capacity=0.0),
            (random(2, 6),),
            "expected a capacity > 0 or None, got 0.0",
        ),
        (
            nn.MixtureOfExperts(4, 5),
            (random(2, 6), np.ones(3, bool)),
            r"expected valid \[2\] for x \[2, 6\], got \[3\]",
        ),
    ],
)
def test_errors(layer, arguments, text):
    with pytest.raises(ValueError, match=f"MixtureOfExperts at the root: {text}"):
        layer.init(KEY, *arguments)
