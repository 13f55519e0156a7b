"""Kernels and turns of loops, and the time that they take."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fnet import cost, parallel
from fnet import hardware as hw
from fnet import layers as nn
from fnet.jaxpr import trips
from fnet.parallel._cost import hops


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def total(f, *args):
    return cost.count(f, *args).total


def test_elementwise_operations_are_one_kernel_and_products_one_each():
    # The tanh is computed with the first product.
    assert total(lambda x: jnp.tanh(x * 2 + 1) - x, spec(8)).kernels == 1
    assert total(lambda x, w: jnp.tanh(x @ w) @ w, spec(8, 8), spec(8, 8)).kernels == 2
    assert total(lambda x, w: x @ w @ w @ w, spec(8, 8), spec(8, 8)).kernels == 3
    assert total(lambda x: [x + i for i in range(5)], spec(8)).kernels == 5


def test_kernels_and_turns_of_loops_count_for_each_iteration():
    def recurrent(w, x):
        return lax.scan(lambda h, x: (jnp.tanh(x + h @ w), h), x[0], x)

    found = total(recurrent, spec(8, 8), spec(512, 4, 8))
    assert found.turns == 512 and found.updates == 512 and found.kernels >= 512
    assert found.light == 0  # the product needs a kernel of its own
    light = total(lambda x: lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x) + 1, x), spec(8))
    assert light.turns == light.kernels == light.light == 100
    nested = lambda x: lax.fori_loop(
        0, 3, lambda _, x: lax.fori_loop(0, 5, lambda _, x: x * 2, x), x
    )
    assert total(nested, spec(8)).turns == 3 + 15


@pytest.mark.parametrize(
    ("begin", "test", "by", "count"),
    [
        (0, lambda i: i < 300, 1, 300),
        (0, lambda i: i <= 300, 1, 301),
        (1, lambda i: i < 10, 4, 3),
        (10, lambda i: i > 0, -3, 4),
        (10, lambda i: i >= 0, -5, 3),
        (5, lambda i: i < 5, 1, 0),
        (0, lambda i: 7 > i, 1, 7),
    ],
)
def test_loops_that_count_to_a_constant(begin, test, by, count):
    f = lambda x: lax.while_loop(lambda c: test(c[0]), lambda c: (c[0] + by, c[1] * 2), (begin, x))
    (loop,) = [eqn for eqn in jax.make_jaxpr(f)(1.0).eqns if eqn.primitive.name == "while"]
    assert trips(loop) == count
    turn = lambda carry: (carry[0] + by, carry[1] + 1)
    assert lax.while_loop(lambda carry: test(carry[0]), turn, (begin, 0))[1] == count
    assert not cost.count(f, 1.0).notes and total(f, spec(8)).turns == count


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.while_loop(lambda y: y.sum() < 9, lambda y: y + 1, x),
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] * 2, c[1]), (1, x)),
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] - 1, c[1]), (1, x)),
        lambda x: lax.while_loop(lambda c: c[0] < 5.0, lambda c: (c[0] + 0.5, c[1]), (0.0, x)),
        lambda x: lax.fori_loop(0, x.sum().astype(int), lambda _, x: x + 1, x),
    ],
)
def test_other_loops_are_counted_once(f):
    counted = cost.count(f, spec(4))
    assert counted.total.turns == 1 and "unknown" in counted.notes[0]


def lstm(time):
    layer = nn.LSTM(64)
    params = layer.spec(spec(1, time, 64))[0]
    shapes = jax.tree.map(lambda each: spec(*each.shape), params)
    return (lambda params, x: layer(params, x)), (shapes, spec(1, time, 64))


@pytest.mark.parametrize("chip", ["TPU v2", "TPU v5e", "H100 SXM5 80GB"])
def test_an_lstm_is_bound_by_latency(chip):
    f, args = lstm(512)
    report = cost.roofline(f, *args, chip=chip)
    kernel = hw.chips[chip].latency.kernel
    assert report.total.bound == "latency"
    assert report.total.latency >= 1024 * kernel and report.total.seconds == report.total.latency
    assert report.total.latency > 2 * max(report.total.compute, report.total.memory)
    assert "kernels and 512 turns of loops one after another" in str(report)
    assert "(estimated)" in str(report) and hw.chips[chip].basis("latency") == "estimated"
    short, long = (cost.roofline(*((g := lstm(n))[0], *g[1]), chip=chip) for n in (64, 256))
    assert 3.5 < long.total.latency / short.total.latency < 4.5


def test_an_lstm_in_a_plan_and_in_compare():
    f, (params, _) = lstm(512)

    def step(state, batch):
        grads = jax.grad(lambda params: jnp.square(f(params, batch)).mean())(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {}

    init = lambda key: {"params": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)}
    batch = spec(8, 512, 64)
    (column,) = parallel.compare(step, init, batch, ["TPU v2-8"]).columns
    assert column.time.bound == "latency"
    plan = parallel.plan(step, init, batch, devices="v5e:2x2", compile=False)
    assert plan.chosen.time.bound == "latency" and ", latency " in plan.explain()


def test_every_estimated_constant_has_a_source():
    kinds = set()
    for chip in hw.chips.values():
        if chip.latency is None:
            continue
        kinds.add(chip.kind)
        assert chip.basis("latency") == "estimated"
        values = {k: v for k, v in vars(chip.latency).items() if k != "sources" and v is not None}
        assert set(values) == set(chip.latency.sources) and "kernel" in values
        assert all(text.startswith("estimated: ") for text in chip.latency.sources.values())
        assert all(1e-9 < value < 1e-4 for value in values.values())
    assert kinds == {"cpu", "gpu", "tpu"}


def test_messages_take_hops():
    v5e, v5p, h100 = (hw.chips[name] for name in ("TPU v5e", "TPU v5p", "H100 SXM5 80GB"))
    assert hops("all-gather", 16, v5e) == 4  # 2 along each axis of 4 x 4, in both directions
    assert hops("all-reduce", 16, v5e) == 8
    assert hops("all-gather", 64, v5p) == 6  # 4 x 4 x 4
    assert hops("all-gather", 8, h100) == 7 and hops("all-reduce", 8, h100) == 14
    assert hops("collective-permute", 64, v5e) == 1
    assert hops("all-reduce", 2, v5e, network=True) == 2


def test_what_is_expected_needs_a_measured_chip():
    f, x = (lambda x: jnp.tanh(x) @ x), spec(16, 16)
    assert cost.roofline(f, x, chip="TPU v5e").expected is None
    assert cost.roofline(f, jnp.ones((16, 16)), measure=False).expected is None
    chip = hw.measure(dtypes=("float32",), size=64, copy_bytes=2**16, seconds=0.002)
    assert chip.basis("latency") == "measured" and chip.latency.kernel > 0
    report = cost.roofline(f, x, chip=chip)
    assert report.expected > chip.latency.call and "from measured latencies" in str(report)
    longer = cost.roofline(lambda x: f(f(f(x))), x, chip=chip)
    assert longer.expected > report.expected
    large = cost.roofline(f, spec(4096, 4096), chip=chip)
    assert large.expected is None  # not a small program
