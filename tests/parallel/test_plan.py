"""plan and parallel: the numbers of one device on eight, whichever way a step is spread, and why it was chosen."""

import importlib.util
import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from fnet import layers as nn
from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft
from fnet.parallel import _plan

N = 8
TX = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.1, momentum=0.9))


@pytest.fixture(scope="module", autouse=True)
def quickly():
    jax.config.update("jax_disable_most_optimizations", True)    # programs run twice here
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()    # other modules' operations are not to be those compiled here


def gpt():
    model = models.GPT(64, 64, 2, 2, context=16)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)

    def init(key):
        return tr.TrainState.create(model.init(key, jnp.zeros((1, 16), jnp.int32))[0], TX)

    def step(state, batch):
        loss = lambda params: model.cross_entropy(params, batch["tokens"][:, :-1], batch["tokens"][:, 1:]).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    return step, init, {"tokens": tokens}


def cnn():
    """BatchNorm's statistics are over the whole batch, wherever it lies; the step cuts it into microbatches."""
    model = nn.Sequential(nn.Conv(32, 3, use_bias=False), nn.BatchNorm(), jax.nn.relu, nn.MaxPool(2),
                          nn.Remat(nn.Conv(64, 3)), jax.nn.relu, nn.GlobalAvgPool(), nn.Dense(8))
    x = np.random.default_rng(0).normal(3, 1, (32, 8, 8, 3)).astype(np.float32)

    def init(key):
        params, state = model.init(key, x[:1])
        return tr.TrainState.create(params, TX, state=state)

    def step(state, batch):
        def loss(params, x):
            y, after = model(params, x, state=state.state, train=True)
            return jnp.square(y - 1).mean(), after

        (value, after), grads = ft.microbatch(jax.value_and_grad(loss, has_aux=True), 2)(state.params, batch)
        return state.apply(TX, grads, state=after), {"loss": value}

    return step, init, x


def flax():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
            return x + linen.Dense(64)(linen.gelu(linen.Dense(128)(x)))

    x = np.random.default_rng(0).normal(size=(16, 8, 64)).astype(np.float32)

    def init(key):
        params = Block().init(key, x[:1])
        return {"params": params, "opt": TX.init(params)}

    def step(state, batch):
        loss = lambda params: jnp.square(Block().apply(params, batch)).mean()
        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, init, x


def mlp():
    model = nn.Sequential(nn.Dense(512), jnp.tanh, nn.Dense(16))
    x = jax.ShapeDtypeStruct((4096, 32), jnp.float32)

    def init(key):
        return tr.TrainState.create(model.init(key, x)[0], TX)

    def step(state, x):
        return state.apply(TX, jax.grad(lambda params: jnp.square(model(params, x)).mean())(state.params)), {}

    return step, init, x


CASES = {"gpt": gpt, "cnn": cnn, "flax": flax}


def error(got, want):
    """max|a - b| / max|b| of the worst leaf; one that vanishes but for rounding is measured by the largest."""
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    least = 1e-2 * max(np.abs(b).max() for b in want)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in zip(got, want))


@pytest.mark.parametrize(("name", "strategy"), [
    *(("gpt", strategy) for strategy in parallel.STRATEGIES), ("cnn", "data"), ("cnn", "fsdp+pins"),
    ("flax", "zero1"), ("flax", "fsdp+pins")])
def test_eight_devices_have_the_numbers_of_one(name, strategy):
    step, init, batch = CASES[name]()
    plan = parallel.plan(step, init, batch, strategy=strategy)
    assert plan.strategy.startswith(strategy)
    state, one = plan.init(jax.random.key(0)), jax.jit(init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state, one)
    spread, plain = ft.parallel(step, plan), jax.jit(step)
    for _ in range(2):
        given = state
        state, metrics = spread(state, batch)
        one, want = plain(one, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim)
    assert error((state, metrics), (one, want)) <= 1e-5
    assert jax.tree.map(lambda x: x.sharding, state) == plan.state
    split = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    model = [x for x in jax.tree.leaves(getattr(state, "params", state)) if not x.sharding.is_fully_replicated]
    assert bool(split) == (strategy != "data") and (strategy != "zero1" or name == "flax" or not model)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    chosen = next(each for each in plan.candidates if each.strategy == plan.strategy)
    assert chosen.persistent == held


def transformer():
    """A language model in plain JAX, of stacked blocks, its weights large beside its activations."""
    width, vocab, depth, rows, time = 128, 512, 4, 32, 32
    shapes = {"embed": (vocab, width), "q": (depth, width, width), "o": (depth, width, width),
              "up": (depth, width, 4 * width), "down": (depth, 4 * width, width)}

    def init(key):
        return {"params": {name: jax.random.normal(key, shape) * 0.02 for name, shape in shapes.items()}}

    def step(state, batch):
        def loss(params):
            x = params["embed"][batch[:, :-1]]

            def block(x, p):
                h = (x @ p["q"]).reshape(*x.shape[:2], 4, -1)
                h = jax.nn.dot_product_attention(h, h, h, is_causal=True).reshape(x.shape)
                x = x + h @ p["o"]
                return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

            x, _ = lax.scan(jax.checkpoint(block), x, {k: v for k, v in params.items() if k != "embed"})
            return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"].T, batch[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    return step, init, jax.ShapeDtypeStruct((rows, time + 1), jnp.int32)


def narrow():
    """Weights of 512 x 512 and a batch of 64 rows: activations are the smaller of the two."""
    def init(key):
        return {"params": [jax.random.normal(key, (512, 512)) * 0.04 for _ in range(4)]}

    def step(state, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.square(x).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    return step, init, jax.ShapeDtypeStruct((64, 512), jnp.float32)


@pytest.mark.parametrize(("make", "pins"), [(transformer, True), (narrow, False)])
def test_pins_where_they_send_less(make, pins):
    plan = parallel.plan(*make(), strategy="fsdp")
    assert plan.pins == pins and {each.strategy for each in plan.candidates} == {"fsdp", "fsdp+pins"}
    sent = {each.strategy: each.ledger.sent for each in plan.candidates}
    assert sent["fsdp+pins"] < 0.6 * sent["fsdp"] if pins else sent["fsdp"] < 0.5 * sent["fsdp+pins"], sent
    text = plan.explain()
    for each in plan.candidates:
        assert re.search(rf"^{re.escape(each.strategy)} .* {each.ledger.sent / 2 ** 20:,.2f}  ", text, re.M)
    assert re.search(r"sends \d\.\d\d times as much", text)


def test_least_is_sent_of_what_fits(monkeypatch):
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch)
    peaks = {each.strategy: each.peak for each in plan.candidates}
    assert plan.strategy == "data" and not plan.pins and peaks["data"] == max(peaks.values())
    chosen = plan.explain().splitlines()
    assert re.match(r"8 x .*: data, every chip holds the whole state", chosen[0])
    assert "chosen: it sends least of those that fit" in next(line for line in chosen if line.startswith("data "))
    monkeypatch.setattr(_plan, "_memory", lambda chip: (peaks["data"] - 1) / _plan.ROOM)
    tight = parallel.plan(step, init, batch)
    assert tight.strategy != "data"
    assert tight.candidates[0].verdict.startswith("rejected: needs more than 92% of")
    monkeypatch.setattr(_plan, "_memory", lambda chip: 1024)
    said = (r"plan: nothing fits into 0\.0 GiB on each of 8 x .*; .* comes nearest with .* GiB: use a smaller batch, "
            "ft.microbatch, nn.Remat, or more devices")
    with pytest.raises(ValueError, match=said):
        parallel.plan(step, init, batch)


def test_what_is_split_and_what_is_not():
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="fsdp+pins")
    specs = {jax.tree_util.keystr(path): tuple(where.spec) for path, where in jax.tree.leaves_with_path(plan.state)}
    up = ".params['blocks']['fc']['kernel']"
    assert specs[up] == (None, None, "data")    # [depth, width, 4 width], whose first axis a scan goes over
    trace = next(name for name in specs if name.endswith("['blocks']['fc']['kernel']") and name != up)
    assert specs[trace] == specs[up]            # the momentum
    whole = {path: why for path, _, why in plan.whole}
    assert whole[".step"] == "small" and "on every chip: .step [] (small)" in plan.explain()
    odd = parallel.plan(lambda s, b: ((s[0] * b.mean(),), 0.0), lambda key: (jnp.ones((81, 81)),), jnp.ones(8),
                        strategy="fsdp")
    assert odd.whole == (("[0]", (81, 81), "no axis of [81, 81] is a multiple of 8"),)


def test_a_state_that_exists_is_copied():
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch, strategy="data")
    mine = jax.jit(init)(jax.random.key(0))
    ft.parallel(step, plan)(plan.place(mine), np.ones(batch.shape, np.float32))
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))


def test_some_devices():
    step, init, batch = narrow()
    plan = parallel.plan(step, init, batch, devices=jax.devices()[:2], strategy="fsdp")
    assert plan.mesh.shape == {"data": 2} and plan.explain().startswith("2 x ")


STEP, INIT, ROWS = narrow()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: parallel.plan(STEP, INIT, ROWS, strategy="magic"),
     "plan: no strategy is called 'magic'; there are auto, data, zero1, fsdp, fsdp+pins"),
    (lambda: parallel.plan(STEP, INIT, {"x": np.ones((12, 512))}),
     "plan: batch['x'] of shape (12, 512) has 12 rows, which 8 devices do not divide; nearest that do: 8 or 16"),
    (lambda: parallel.plan(STEP, INIT, np.ones((3, 512))), "nearest that do: 8"),
    (lambda: parallel.plan(STEP, INIT, ROWS, devices="cluster"),
     "plan: devices are 'local', a list of devices, or a TPU slice such as 'v5e:4x4' (of v2, v3, v4, v5e, v5p, v6e, "
     "tpu7x); got 'cluster'"),
    (lambda: parallel.plan(STEP, INIT, ROWS, devices="v9:2x2"), "got 'v9:2x2'"),
    (lambda: parallel.plan(STEP, INIT, ROWS, devices=[]), "plan: there must be at least one device; got an empty list"),
    (lambda: parallel.plan(lambda s, b: s, INIT, ROWS), "plan: a step returns (state, metrics); this one returns dict"),
    (lambda: parallel.plan(lambda s, b: ({"p": s["params"]}, 0), INIT, ROWS),
     "plan: the step returns a state of another structure than init makes"),
    (lambda: parallel.plan(lambda s, b: ({"params": [w[:3] for w in s["params"]]}, 0), INIT, ROWS),
     "plan: init makes state['params'][0] float32[512, 512], and the step returns it as float32[3, 512]"),
])
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_slice_needs_libtpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("plan: compiling for 'v5e:2x2' needs libtpu: pip install "
                                                            "'fnet[tpu-plan]'")):
        parallel.plan(STEP, INIT, ROWS, devices="v5e:2x2")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_slice_that_is_not_there():
    plan = parallel.plan(STEP, INIT, ROWS, devices="v5e:2x2")
    assert plan.explain().startswith("4 x TPU v5e, 16.0 GiB each: ")
    assert {each.strategy for each in plan.candidates} == set(parallel.STRATEGIES)
    assert all(each.peak > each.persistent > 0 and each.ledger.sent for each in plan.candidates)
    exact = {"data": 4 << 20, "fsdp": 1 << 20}
    assert all(each.persistent == exact.get(each.strategy, each.persistent) for each in plan.candidates)
    with pytest.raises(ValueError, match=r"plan\.init: this plan is for 4 x TPU v5e that are not here; plan for "
                                         "devices='local' to run"):
        plan.init(jax.random.key(0))
    with pytest.raises(ValueError, match="plan: TPUs do not come as 'v5e:3x7': "):
        parallel.plan(STEP, INIT, ROWS, devices="v5e:3x7")
