"""Losses for distillation, against PyTorch's documented formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet import transforms as ft

RNG = np.random.default_rng(0)
STUDENT, TEACHER = (RNG.normal(size=(5, 7)).astype(np.float32) for _ in range(2))
LABELS = RNG.integers(0, 7, 5)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (4.0, 0.9), (2.5, 0.0)])
def test_logits(temperature, weight):
    """torch.nn.KLDivLoss: target (log target - input); torch.nn.CrossEntropyLoss: -log softmax at
    the label."""
    p, q = softmax(TEACHER / temperature), softmax(STUDENT / temperature)
    soft = temperature**2 * (p * (np.log(p) - np.log(q))).sum(-1)
    hard = -np.log(softmax(STUDENT))[np.arange(5), LABELS]
    loss = lambda logits, labels=LABELS: compress.distillation_loss(
        logits,
        jnp.asarray(TEACHER),
        None if labels is None else jnp.asarray(labels),
        temperature=temperature,
        weight=weight,
    )
    np.testing.assert_allclose(
        loss(jnp.asarray(STUDENT)), weight * soft + (1 - weight) * hard, rtol=1e-5
    )
    np.testing.assert_allclose(loss(jnp.asarray(STUDENT), None), soft, rtol=1e-5, atol=1e-6)
    onehot = np.eye(7)[LABELS]  # T^2 times d KL / d logits is T (q - p)
    want = weight * temperature * (q - p) + (1 - weight) * (softmax(STUDENT) - onehot)
    np.testing.assert_allclose(
        jax.grad(lambda x: loss(x).sum())(jnp.asarray(STUDENT)), want, rtol=1e-4, atol=1e-6
    )
    teacher = jax.grad(lambda t: compress.distillation_loss(jnp.asarray(STUDENT), t).sum())(
        jnp.asarray(TEACHER)
    )
    assert not teacher.any()


def test_hidden_states():
    """Of two GPTs of other widths, in one step of gradient descent on a projection."""
    tokens = jnp.array([[1, 2, 3]])
    small, large = models.GPT(8, 8, 1, 2, context=4), models.GPT(8, 12, 2, 2, context=4)
    params, wide = (
        model.init(jax.random.key(i), tokens)[0] for i, model in enumerate((small, large))
    )
    matrix = jax.random.normal(jax.random.key(2), (8, 12))

    def loss(params, matrix, wide):
        _, mine = ft.capture(small, "norm")(params, tokens)
        _, theirs = ft.capture(large, "norm")(wide, tokens)
        return compress.hidden_loss(mine, theirs, {"norm": "norm"}, {"norm": matrix})

    mine, theirs = (
        jax.jit(ft.capture(model, "norm"))(p, tokens)[1]["norm"]
        for model, p in ((small, params), (large, wide))
    )
    difference = np.asarray(mine) @ np.asarray(matrix) - np.asarray(theirs)
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(params, matrix, wide)
    np.testing.assert_allclose(value, (difference**2).mean(), rtol=1e-5)
    want = 2 * np.einsum("bti,bto->io", mine, difference) / difference.size
    np.testing.assert_allclose(grads[1], want, rtol=1e-4, atol=1e-6)
    assert any(jnp.any(g) for g in jax.tree.leaves(grads[0])) and not any(
        jnp.any(g) for g in jax.tree.leaves(grads[2])
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: compress.distillation_loss(jnp.ones((2, 3)), jnp.ones((2, 4))),
            ValueError,
            r"expected logits of one shape, got \(2, 3\) of the student and \(2, 4\)",
        ),
        (
            lambda: compress.distillation_loss(jnp.ones(3), jnp.ones(3), temperature=0.0),
            ValueError,
            r"expected temperature > 0 and weight in \[0, 1\]; got 0.0 and 0.9",
        ),
        (lambda: compress.hidden_loss({}, {}, {}), ValueError, "expected pairs"),
        (
            lambda: compress.hidden_loss({"a": 1}, {}, {"a": "z"}),
            KeyError,
            "the teacher has no site 'z'; captured: ",
        ),
        (
            lambda: compress.hidden_loss({"a": jnp.ones(2)}, {"z": jnp.ones(3)}, {"a": "z"}),
            ValueError,
            r"'a' has the shape \(2,\), 'z' of the teacher \(3,\); pass projections=\{'a': "
            r"matrix\}",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
