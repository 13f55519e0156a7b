"""What the turns of a loop add up over the batch is summed over the chips once, and the numbers
stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import parallel
from fnet import transforms as ft
from fnet.parallel._pins import pin

N = 8
MESH = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
ROWS, WHOLE = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())
KERNEL = jax.random.normal(jax.random.key(0), (32, 512)) / 6
X = jax.random.normal(jax.random.key(1), (16, 24, 32))
LABELS = jax.random.randint(jax.random.key(2), (16, 24), 0, 512)


def chunked(kernel, batch):
    x, labels = batch
    return nn.linear_cross_entropy(x, kernel, labels, chunk_size=4).mean()


def lowered(kernel, batch):
    return ft.autocast(chunked, "bfloat16")(kernel, batch)


def transposed(kernel, batch):
    return chunked(kernel.T.reshape(512, 32).T, batch)


def by_hand(kernel, batch):
    """A loop that adds a weight's gradient up itself, and something else beside it."""
    x, _ = batch

    def turn(carried, slice_):  # [batch, features]
        total, count, last = carried
        return (total + slice_.T @ slice_, count + 1, last * 0.5 + slice_.mean(0)), None

    start = jnp.zeros((32, 32)), jnp.zeros(()), jnp.zeros(32)
    (total, count, last), _ = lax.scan(turn, start, jnp.swapaxes(x, 0, 1))
    return (total @ kernel).sum() / count + last.sum()


CASES = {"chunked": chunked, "lowered": lowered, "transposed": transposed, "by_hand": by_hand}


def compiled(step, where):
    return (
        jax.jit(step, in_shardings=(where, ROWS), out_shardings=where)
        .lower(KERNEL, (X, LABELS))
        .compile()
    )


@pytest.mark.quick_cases("chunked-True")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", sampled(CASES, ["chunked", "by_hand"]))
def test_one_sum_over_the_chips(name, split):
    step = jax.grad(CASES[name])
    where = NamedSharding(MESH, P(None, "data")) if split else WHOLE
    late = compiled(pin(step, MESH, "data", activations=split), where)
    sums = [
        each
        for each in parallel.ledger(late).transfers
        if each.collective in ("all-reduce", "reduce-scatter")
        and each.bytes >= 4 * KERNEL.size // N // 2
    ]
    assert sums and all(each.times == 1 for each in sums), sums
    placed = jax.device_put((KERNEL, (X, LABELS)), (where, (ROWS, ROWS)))
    want = jax.jit(step)(KERNEL, (X, LABELS))
    np.testing.assert_allclose(
        late(*placed),
        want,
        rtol=1e-4 if name != "lowered" else 2e-2,
        atol=1e-5 * np.abs(want).max() if name != "lowered" else 2e-2 * np.abs(want).max(),
    )


@pytest.mark.exhaustive
def test_without_it_each_turn_sums():
    plain = parallel.ledger(compiled(jax.grad(chunked), WHOLE))
    late = parallel.ledger(compiled(pin(jax.grad(chunked), MESH, "data", activations=False), WHOLE))
    assert max(each.times for each in plain.transfers) == 6  # as many as chunks
    assert late.sent < 0.3 * plain.sent, (late.sent, plain.sent)


def test_a_weight_of_all_turns_is_gathered_once():
    found = parallel.ledger(
        compiled(pin(jax.grad(chunked), MESH, "data"), NamedSharding(MESH, P(None, "data")))
    )
    gathered = [
        each
        for each in found.transfers
        if each.collective == "all-gather" and each.bytes >= 4 * KERNEL.size
    ]
    assert gathered and all(each.times == 1 for each in gathered), gathered


def used_otherwise(kernel, x):
    def turn(total, slice_):
        total = total + slice_.T @ slice_
        return total * 0.9, None

    return lax.scan(turn, jnp.zeros((32, 32)), jnp.swapaxes(x, 0, 1))[0]


def shown(kernel, x):
    def turn(total, slice_):
        total = total + slice_.T @ slice_
        return total, total[0]

    return lax.scan(turn, jnp.zeros((32, 32)), jnp.swapaxes(x, 0, 1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("f", [used_otherwise, shown])
def test_a_sum_that_is_read_on_the_way_is_left_alone(f):
    late = jax.jit(pin(f, MESH, "data"), in_shardings=(WHOLE, ROWS))
    for got, want in zip(jax.tree.leaves(late(KERNEL, X)), jax.tree.leaves(f(KERNEL, X))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert "8,32,32" not in str(jax.make_jaxpr(pin(f, MESH, "data"))(KERNEL, X))


def doubled(kernel, x):
    return lax.scan(lambda total, _: (total + total, None), kernel, None, length=3)[0] + x.mean()


def handed_out(kernel, x):
    return lax.scan(
        lambda total, rows: (total + rows.T @ rows, total),
        jnp.ones((32, 32)),
        jnp.swapaxes(x, 0, 1),
    )


def cut_off(kernel, x):
    turn = lambda total, rows: (total + (rows.T @ rows * 0.1).astype(jnp.int32), None)
    inside = lambda total, rows: (total + (rows.T @ rows).astype(jnp.int32), None)
    start, rows = jnp.zeros((32, 32), jnp.int32), jnp.swapaxes(x, 0, 1)
    return lax.scan(turn, start, rows)[0], lax.scan(inside, start, rows)[0]


@pytest.mark.parametrize("f", [doubled, handed_out, cut_off])
def test_what_is_no_sum_keeps_its_numbers(f):
    """A carry that is added to itself, one that leaves before it is added to, and sums that are cut
    to integers."""
    for got, want in zip(
        jax.tree.leaves(jax.jit(pin(f, MESH, "data"))(KERNEL, X)), jax.tree.leaves(f(KERNEL, X))
    ):
        assert (
            np.abs(got - want) > 1e-4 * np.abs(want).max()
        ).mean() < 0.01  # a sum may fall on a border
