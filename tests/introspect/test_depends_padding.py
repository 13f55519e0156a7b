"""`Dependence.padding`: what is cut off along an axis reaches nothing that is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import introspect

pytestmark = pytest.mark.usefixtures("quickly")

X = np.asarray(jax.random.normal(jax.random.key(0), (3, 6, 4)))


def pooled(x, mask):
    weights = jnp.where(mask, 1, 0).astype(x.dtype)[..., None]
    return (x * weights).sum(1) / weights.sum(1)


def attention(x, mask):
    scores = jnp.einsum("bqd,bkd->bqk", x, x)
    return jax.nn.softmax(jnp.where(mask[:, None], scores, -1e9), -1) @ x


PROGRAMS = {  # name: (function of x and a mask, whether results have the axis, the status)
    "running sum": (lambda x, mask: x.cumsum(1), True, "proved"),
    "each position": (lambda x, mask: jnp.tanh(x), True, "proved"),
    "selected": (
        lambda x, mask: jnp.where(mask[..., None], x, 0).sum(1),
        False,
        "proved",
    ),
    "multiplied": (pooled, False, "proved if"),
    "attention": (attention, True, "proved if"),
    "mean": (lambda x, mask: x.mean(1), False, "refuted"),
    "neighbors": (lambda x, mask: x[:, :-1] + x[:, 1:], None, "refuted"),
    "the last": (lambda x, mask: x[:, -1], False, "refuted"),
    "one of two": (
        lambda x, mask: (x, jnp.where(mask[..., None], x, 0).sum(1) + 1e-20 * x.max(1)),
        (True, False),
        "refuted",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("length", [1, 4, 5])
def test_padding_reaches_nothing(name, length):
    f, along, status = PROGRAMS[name]
    mask = np.broadcast_to(np.arange(6) < length, (3, 6))
    if along is None:
        f, along = (
            lambda x, mask: jnp.pad(PROGRAMS[name][0](x, mask), ((0, 0), (0, 1), (0, 0))),
            True,
        )
    out_axes = jax.tree.map(lambda has: 1 if has else None, along)
    report = introspect.depends(f, X, mask, axes={"t": ((1, 1), out_axes)})
    verdict = report.padding("t", length, known={"mask": mask})
    assert verdict.status == status
    assert verdict.claim == f"independent of 't' from {length} on"
    if status == "refuted":
        assert verdict.counterexample.changed >= length > verdict.counterexample.affected
        return
    other = X.copy()
    other[:, length:] = np.nan if status == "proved" else 1e3
    assert verdict.holds(X, mask) and verdict.holds(other, mask)
    assert not verdict.holds(X, ~mask)  # the claim is about one mask
    for a, b, has in zip(*map(jax.tree.leaves, (f(X, mask), f(other, mask), along))):
        np.testing.assert_array_equal(a[:, :length] if has else a, b[:, :length] if has else b)
    unknown = report.padding("t", length)
    assert unknown.status == ("proved" if name in ("running sum", "each position") else "refuted")


def test_nothing_is_kept_apart_from_all():
    report = introspect.depends(jnp.sum, X, axes={"t": (1, None)})
    assert report.padding("t", 6).status == "proved"  # there is no padding
    verdict = report.padding("t", 5)
    assert verdict.primitive == "reduce_sum" and verdict.positions == (0, 5)
    assert "because another value at position 5 changes position 0" in str(verdict)


def test_arguments_in_trees_and_unknown_ones():
    f = lambda batch: jnp.where(batch["mask"], batch["x"], 0).sum()
    batch = {"x": jnp.ones(4), "mask": jnp.ones(4, bool)}
    report = introspect.depends(f, batch, axes={"t": ((0,), None)})
    mask = np.arange(4) < 2
    assert report.padding("t", 2, known={"batch['mask']": mask}).status == "proved"
    with pytest.raises(ValueError, match="'mask' is no array; the arguments of the function are b"):
        report.padding("t", 2, known={"mask": mask})
    with pytest.raises(ValueError, match=r"has the shape \(4,\), and the numbers given"):
        report.padding("t", 2, known={"batch['mask']": mask[:3]})
    with pytest.raises(ValueError, match="no result has an axis in out_axes"):
        report.verdict("independent", "t")


def hidden(x):
    return x + 0 * x.sum(0, keepdims=True)


def scanned(x):
    return jax.lax.scan(lambda c, r: (hidden(c), None), x, jnp.arange(3))[0]


@pytest.mark.parametrize("f", [scanned, jax.jit(scanned)])
def test_conditions_are_computed_with_the_results(f):
    x = X[:, 0]
    report = introspect.depends(f, x)
    verdict = report.verdict("independent", 0)
    assert verdict.status == "proved if"
    computed = jax.jit(report.checked(verdict))
    for value, holds in ((1.0, True), (np.nan, False), (3e38, False)):
        changed = x.copy()
        changed[:, 0] = value
        error, y = computed(changed)
        assert (error.get() is None) == holds == verdict.holds(changed)
        np.testing.assert_allclose(y, f(changed), 1e-6)


def test_conditions_of_a_branch_that_is_not_taken_hold():
    f = lambda i, x: jax.lax.cond(i[0] > 0, hidden, jnp.sin, x)
    zeros, ones = np.zeros(3, np.float32), np.ones(3, np.float32)
    finite, infinite = np.ones((3, 2), np.float32), np.full((3, 2), np.inf, np.float32)
    verdict = introspect.depends(f, zeros, finite, axes={"b": ((None, 0), 0)}).verdict(
        "independent", "b"
    )
    assert verdict.status == "proved if"
    assert verdict.holds(zeros, infinite) and verdict.holds(ones, finite)
    assert not verdict.holds(ones, infinite)
