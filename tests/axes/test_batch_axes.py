"""batch_axes: the batch is followed through every kind of equation."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from fnet.axes import batch_axes, through
from fnet.jaxpr import Description, Traits, describe

B = 16
FOLLOWED = {
    "transpose": (lambda x: x.transpose(1, 2, 0), 2),
    "reshape merges": (lambda x: x.reshape(B * 4, 6), 0),
    "reshape splits": (lambda x: x.reshape(B, 2, 2, 6), 0),
    "reshape behind": (lambda x: x.reshape(1, B, 24), 1),
    "reshape mixes": (lambda x: x.transpose(1, 0, 2).reshape(-1), None),
    "sum over the batch": (lambda x: x.sum(0), None),
    "sum before": (lambda x: x.transpose(1, 0, 2).sum(0), 0),
    "broadcast": (lambda x: x[:, None] + jnp.ones((1, 3, 1, 1)), 0),
    "squeeze": (lambda x: x[None].squeeze(0), 0),
    "elementwise": (lambda x: jnp.where(x > 0, jnp.exp(x), 0), 0),
    "product": (lambda x: x @ jnp.ones((6, 2)), 0),
    "product from the right": (lambda x: jnp.ones((3, 4)) @ x, 0),
    "product, own axis right": (lambda x: jnp.einsum("ij,bjk->ikb", jnp.ones((5, 4)), x), 2),
    "batched product": (lambda x: jnp.einsum("bij,bkj->bik", x, x), 0),
    "weight gradient": (lambda x: jnp.einsum("bij,bik->jk", x, x), None),
    "look-up": (lambda x: jnp.ones((9, 5))[x[..., 0].astype(int)], 0),
    "rows": (lambda x: x[:, 1], 0),
    "take along": (lambda x: jnp.take_along_axis(x, jnp.zeros((B, 4, 1), int), -1), 0),
    "slice of the batch": (lambda x: x[:3], None),
    "concatenate": (lambda x: jnp.concatenate([x, x], 1), 0),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), 0),
    "argmax": (lambda x: x.argmax(-1), 0),
    "cumsum": (lambda x: x.cumsum(1), 0),
    "jit": (jax.jit(lambda x: x.T), 2),
    "remat": (jax.checkpoint(jnp.sin), 0),
    "relu": (jax.nn.relu, 0),
    "cond": (lambda x: lax.cond(True, lambda x: x, lambda x: 2 * x, x), 0),
    "scan carry": (lambda x: lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)[0], 0),
    "scan results": (lambda x: lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)[1], 1),
    "scan slices": (lambda x: lax.scan(lambda c, x: (c, x.T), 0, x.swapaxes(0, 1))[1], 2),
    "scan from zeros": (
        lambda x: lax.scan(lambda c, _: (c + x, None), jnp.zeros((B, 4, 6)), None, length=3)[0],
        0,
    ),
    "scan over the batch": (lambda x: lax.scan(lambda c, x: (c, 2 * x), 0, x)[1], None),
    "convolution": (
        lambda x: lax.conv_general_dilated(
            x, jnp.ones((3, 6, 2)), (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
        ),
        0,
    ),
    "convolution's gradient": (
        lambda x: jax.grad(
            lambda w: lax.conv_general_dilated(
                x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            ).sum()
        )(jnp.ones((3, 6, 2))),
        None,
    ),
    "max pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        0,
    ),
    "while": (lambda x: lax.while_loop(lambda c: c.sum() < 0, jnp.sin, x), None),
    "branches that disagree": (
        lambda x: lax.cond(
            True,
            lambda x: x[..., 0] @ jnp.ones((4, B)),
            lambda x: jnp.ones((B, 4)) @ x[..., 0].T,
            x,
        ),
        None,
    ),
    "scatter": (lambda x: x.at[:, 1].add(1.0), 0),
    "two arguments": (lambda x: x + jnp.ones((B, 4, 6)), 0),
    "sort": (lambda x: jnp.sort(x, 1), 0),
    "split": (lambda x: jnp.split(x, 2, 1)[0], 0),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_which_axis_is_the_batch(name):
    f, want = FOLLOWED[name]
    jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((B, 4, 6), jnp.float32)).jaxpr
    axes = {jaxpr.invars[0]: 0}
    for eqn in jaxpr.eqns:
        found = batch_axes(
            eqn, [axes.get(v) if isinstance(v, type(jaxpr.invars[0])) else None for v in eqn.invars]
        )
        axes.update(zip(eqn.outvars, found))
    assert axes.get(jaxpr.outvars[0]) == want


def test_nothing_is_followed_from_nothing():
    eqn = jax.make_jaxpr(lambda x: jnp.split(x, 2))(jnp.ones((4, 3))).jaxpr.eqns[0]
    for given, expected in ((None, [None, None]), (1, [1, 1]), (0, [None, None])):
        assert batch_axes(eqn, [given]) == expected


def test_primitives_of_fnet_say_that_the_batch_is_first():
    made = Primitive("first")
    made.multiple_results = True
    made.def_abstract_eval(lambda x, w: [x, w])
    describe(made, Description(Traits("product"), batch_first=True))
    (eqn,) = jax.make_jaxpr(made.bind)(jnp.ones((4, 3)), jnp.ones((4, 2))).jaxpr.eqns
    assert batch_axes(eqn, [None, 0]) == [0, 0]


def test_a_batch_of_one_row_is_followed_through_reshapes():
    """An axis of size 1 has no factors by which a reshape could be matched."""
    for before, after, note, expected in (
        ((1, 4, 6), (1, 24), 0, 0),
        ((1, 24), (1, 4, 6), 0, 0),
        ((3, 1, 8), (3, 1, 2, 4), 1, 1),
        ((1, 4, 6), (4, 6, 1), 0, None),
    ):
        x = jax.ShapeDtypeStruct(before, jnp.float32)
        (eqn,) = jax.make_jaxpr(lambda x, after=after: x.reshape(after))(x).jaxpr.eqns
        assert batch_axes(eqn, [note]) == [expected]


def test_a_rule_replaces_what_is_known_also_inside_of_loops():
    """It can follow an axis through what ends the batch, such as a slice."""

    def f(x):
        return lax.scan(lambda c, _: (jnp.sin(c[:3]), None), x[:3], None, length=2)[0]

    def rule(eqn, notes):
        return [notes[0]] if eqn.primitive.name == "slice" else None

    jaxpr = jax.make_jaxpr(f)(jnp.ones((B, 4))).jaxpr
    assert through(jaxpr, [0]) == [None]
    assert through(jaxpr, [0], rule=rule) == [0]
