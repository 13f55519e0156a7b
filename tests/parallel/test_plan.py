"""plan and plan.jit: with every strategy the results of one device on eight, and the reasons for the choice."""

import functools
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
from fnet.parallel import _compile, _planner

N = 8
TX = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.1, momentum=0.9))


pytestmark = pytest.mark.usefixtures("quickly")    # programs run a few times


def gpt():
    model = models.GPT(64, 64, 2, 2, context=16)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)

    def init(key):
        return tr.TrainState.create(model.init(key, jnp.zeros((1, 16), jnp.int32))[0], TX)

    def step(state, batch, *, microbatches=1):
        loss = lambda params, batch: model.cross_entropy(params, batch["tokens"][:, :-1], batch["tokens"][:, 1:]).mean()
        value, grads = ft.microbatch(jax.value_and_grad(loss), microbatches)(state.params, batch)
        return state.apply(TX, grads), {"loss": value}

    return step, init, {"tokens": tokens}


def cnn():
    """BatchNorm's statistics are over the whole microbatch, wherever it lies."""
    model = nn.Sequential(nn.Conv(32, 3, use_bias=False), nn.BatchNorm(), jax.nn.relu, nn.MaxPool(2),
                          nn.Conv(64, 3), jax.nn.relu, nn.GlobalAvgPool(), nn.Dense(8))
    x = np.random.default_rng(0).normal(3, 1, (32, 8, 8, 3)).astype(np.float32)

    def init(key):
        params, state = model.init(key, x[:1])
        return tr.TrainState.create(params, TX, state=state)

    def step(state, batch, *, microbatches=2):
        def loss(params, x):
            y, after = model(params, x, state=state.state, train=True)
            return jnp.square(y - 1).mean(), after

        (value, after), grads = ft.microbatch(jax.value_and_grad(loss, has_aux=True), microbatches)(state.params, batch)
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


RULES = {r"blocks/attention/(query|key|value)/kernel": (None, None, "tensor"),
         r"blocks/attention/out/kernel": (None, "tensor"), r"blocks/fc/kernel": (None, None, "tensor"),
         r"blocks/proj/kernel": (None, "tensor")}
TENSOR = {"mesh": {"data": -1, "tensor": 2}, "rules": RULES}


@pytest.mark.parametrize(("name", "strategy", "options"), [
    *(("gpt", strategy, {}) for strategy in ("data", "zero1", "fsdp", "fsdp+pins")), ("gpt", "fsdp+pins", TENSOR),
    ("gpt", "data", TENSOR), ("gpt", "fsdp+pins+remat", {}), ("gpt", "zero1+microbatches=2", {}),
    ("gpt", "fsdp+pins+remat+microbatches=2", TENSOR), ("gpt", "fsdp+pins", {"mesh": {"slice": 2, "data": 4}}),
    ("cnn", "data", {}), ("cnn", "fsdp+pins+remat", {}), ("flax", "zero1+remat", {}), ("flax", "fsdp+pins", {})])
def test_eight_devices_have_the_numbers_of_one(name, strategy, options):
    step, init, batch = CASES[name]()
    plan = parallel.plan(step, init, batch, strategy=strategy, compile=False, **options)
    assert plan.strategy.startswith(strategy)
    state, one = plan.init(jax.random.key(0)), jax.jit(init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state, one)
    spread, plain = plan.jit(step), jax.jit(step)
    for _ in range(2):
        given = state
        state, metrics = spread(state, batch)
        one, want = plain(one, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim)
    assert error((state, metrics), (one, want)) <= 1e-5
    assert jax.tree.map(lambda x: x.sharding, state) == plan.state
    split = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    model = [x for x in jax.tree.leaves(getattr(state, "params", state)) if not x.sharding.is_fully_replicated]
    if not options.get("rules"):
        assert bool(split) == (not strategy.startswith("data"))
        assert not strategy.startswith("zero1") or name == "flax" or not model
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert plan.chosen.persistent == held


def test_tensor_parallelism_splits_what_its_rules_name():
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="fsdp", compile=False, **TENSOR)
    specs = {jax.tree_util.keystr(path): tuple(where.spec) for path, where in jax.tree.leaves_with_path(plan.state)}
    assert specs[".params['blocks']['fc']['kernel']"] == (None, "data", "tensor")
    assert specs[".params['blocks']['proj']['kernel']"] == (None, "tensor", "data")
    sent = {transfer.scope: transfer for transfer in plan.chosen.estimate.ledger.transfers
            if transfer.collective == "all-reduce" and transfer.group == 2}
    assert {"blocks/proj", "blocks/attention/out"} <= set(sent)    # the sum of a layer's halves
    data = parallel.plan(step, init, batch, strategy="data", **TENSOR)
    (compiled,) = data.candidates
    wide = [each for each in compiled.ledger.transfers if each.group == 2 and each.scope in sent]
    assert wide and compiled.compiled.arguments == compiled.arguments


def test_logical_axes_make_rules():
    model = models.GPT(64, 64, 2, 2, context=16)    # as gpt()'s
    spec = model.spec(jnp.zeros((1, 16), jnp.int32))[0]
    rules = parallel.rules(spec, {"mlp": "tensor"})
    assert rules and all("tensor" in axes for axes in rules.values())
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="data", compile=False, mesh=TENSOR["mesh"], rules=rules)
    assert "tensor" in plan.state.params["blocks"]["fc"]["kernel"].spec
    with pytest.raises(ValueError, match=re.escape("rules: no parameter has an axis named 'head'; there are ")):
        parallel.rules(spec, {"head": "tensor"})


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
        assert re.search(rf"^{re.escape(each.strategy)} .* {each.ledger.sent / 2 ** 20:,.2f} compiled  ", text, re.M)
    assert re.search(r"sends \d\.\d\d times as much", text)


def limited(monkeypatch, limit):
    """Plans for devices of so much memory."""
    made = _planner.Drafts.__init__

    def init(self, *args):
        made(self, *args)
        self.memory = limit

    monkeypatch.setattr(_planner.Drafts, "__init__", init)


def test_least_is_sent_of_what_fits(monkeypatch):
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch)
    peaks = {each.strategy: each.peak for each in plan.candidates}
    assert plan.strategy == "data" and not plan.pins and peaks["data"] == max(peaks.values())
    lines = plan.explain().splitlines()
    assert re.match(r"8 x .*: data, every chip holds the whole state", lines[0])
    assert "chosen: it sends least of those that fit" in next(line for line in lines if line.startswith("data "))
    limited(monkeypatch, (peaks["data"] - 1) / _planner.ROOM)
    tight = parallel.plan(step, init, batch)
    assert tight.strategy != "data" and "remat" not in tight.strategy
    assert tight.candidates[0].verdict.startswith("rejected: needs more than 92% of")


def test_rungs_are_climbed_where_nothing_fits(monkeypatch):
    def init(key):
        return {"params": [jnp.zeros((64, 64))] * 16}

    def step(state, batch, *, microbatches=1):
        def loss(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.square(x).mean()

        value, grads = ft.microbatch(jax.value_and_grad(loss), microbatches)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    batch = jax.ShapeDtypeStruct((1 << 16, 64), jnp.float32)
    planned = functools.partial(parallel.plan, step, init, batch, compile=False)
    least = lambda plan: min(each.peak for each in plan.candidates)
    limited(monkeypatch, least(planned()) / _planner.ROOM - 1)
    plan = planned()
    assert plan.options.remat and plan.options.microbatches == 1
    assert all(each.verdict.startswith("rejected") for each in plan.candidates if not each.options.remat)
    limited(monkeypatch, least(plan) / _planner.ROOM - 1)
    plan = planned()
    assert plan.options.remat and f"+microbatches={plan.options.microbatches}" in plan.explain()
    assert plan.chosen.ledger.sent
    limited(monkeypatch, 1024)
    said = (r"plan: nothing fits into .* GiB on each of 8 x .*; .* needs least, .* GiB \(estimated\); use a "
            r"smaller batch, .* or more devices\. Its largest arrays \(estimated\): .* at \w+\.py:\d+ \(")
    with pytest.raises(ValueError, match=said):
        planned()


def test_what_is_split_and_what_is_not():
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="fsdp+pins")
    specs = {jax.tree_util.keystr(path): tuple(where.spec) for path, where in jax.tree.leaves_with_path(plan.state)}
    up = ".params['blocks']['fc']['kernel']"
    assert specs[up] == (None, None, "data")    # [depth, width, 4 width], whose first axis a scan goes over
    trace = next(name for name in specs if name.endswith("['blocks']['fc']['kernel']") and name != up)
    assert specs[trace] == specs[up]            # the momentum
    whole = {path: why for path, _, why in plan.whole}
    assert whole[".step"] == "small" and "replicated: .step [] (small)" in plan.explain()
    odd = parallel.plan(lambda s, b: ((s[0] * b.mean(),), 0.0), lambda key: (jnp.ones((81, 81)),), jnp.ones(8),
                        strategy="fsdp")
    assert odd.whole == (("[0]", (81, 81), "no axis of [81, 81] is a multiple of 8"),)


def test_a_state_that_exists_is_copied():
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch, strategy="data")
    mine = jax.jit(init)(jax.random.key(0))
    plan.jit(step)(plan.place(mine), np.ones(batch.shape, np.float32))
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))


def test_some_devices():
    step, init, batch = narrow()
    plan = parallel.plan(step, init, batch, devices=jax.devices()[:2], strategy="fsdp")
    assert plan.mesh.shape == {"data": 2} and plan.explain().startswith("2 x ")


def test_what_the_compiler_refuses_is_rejected(monkeypatch):
    step, init, batch = narrow()

    def compiled(spread, *args):
        return _compile.Compiled(0, None, None, "RESOURCE_EXHAUSTED: Ran out of memory")

    monkeypatch.setattr(_compile, "compiled", compiled)
    with pytest.raises(ValueError, match="nothing fits"):
        parallel.plan(step, init, batch)


STEP, INIT, ROWS = narrow()
SOME = np.ones((64, 512), np.float32)


def called(*, batch=SOME, where=None, devices="local"):
    plan = parallel.plan(STEP, INIT, ROWS, strategy="fsdp", compile=False, devices=devices)
    return plan.jit(STEP)(jax.device_put(INIT(jax.random.key(0)), where), batch)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: parallel.plan(STEP, INIT, ROWS, strategy="magic"),
     "plan: unknown strategy 'magic'; there are auto, data, zero1, fsdp, fsdp+pins, each also with +remat and "
     "+microbatches=N, in this order"),
    (lambda: parallel.plan(STEP, INIT, ROWS, strategy="data+pins"), "unknown strategy 'data+pins'"),
    (lambda: parallel.plan(STEP, INIT, ROWS, strategy="data+microbatches=2"),
     "plan: for microbatches=2 the step needs a keyword: def step(state, batch, *, microbatches=1)"),
    (lambda: parallel.plan(*gpt(), strategy="data+microbatches=3"),
     "plan: 16 rows are not a multiple of 3 microbatches x 8 devices"),
    (lambda: parallel.plan(STEP, INIT, {"x": np.ones((12, 512))}),
     "plan: batch['x'] of shape (12, 512) has 12 rows, not a multiple of 8 devices; use 8 or 16 rows"),
    (lambda: parallel.plan(STEP, INIT, np.ones((3, 512))), "not a multiple of 8 devices; use 8 rows"),
    (lambda: parallel.plan(STEP, INIT, np.float32(1)), "plan: the batch has no rows"),
    (lambda: parallel.plan(lambda s, b: s, INIT, ROWS),
     "plan: expected a step that returns (state, metrics); this one returns dict"),
    (lambda: parallel.plan(lambda s, b: ({"p": s["params"]}, 0), INIT, ROWS),
     "plan: the step must return a state with the structure of init's: expected "),
    (lambda: parallel.plan(lambda s, b: ({"params": [w[:3] for w in s["params"]]}, 0), INIT, ROWS),
     "plan: state['params'][0] must keep its shape and dtype: init returns float32[512, 512], and the step float32[3,"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 3}),
     "plan: mesh {'data': 3} needs 3 devices; 'local' has 8"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": -1, "tensor": -1}),
     "or -1 for the remaining length of one axis"),
    (lambda: parallel.plan(STEP, INIT, ROWS, rules={"0": (None, "tensor")}),
     "plan: the rule '0' for 0 [512, 512] uses the mesh axis 'tensor'; available are none; pass mesh= with such "
     "an axis"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"fc/kernel": (None, "tensor")}),
     "plan: the rule 'fc/kernel' matches no parameter; there are 0, 1, 2, 3"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"0": (None, "tensor"), ".": ()}),
     "plan: two rules match 0 [512, 512]: '0' and '.'; expected one for each parameter"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"0": (None, None, "tensor")}),
     "plan: the rule '0': (None, None, 'tensor') is for 3 axes, but 0 [512, 512] has 2"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"0": ("tensor", "tensor")}),
     "uses a mesh axis twice"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"data": 4, "tensor": 2}, rules={"(": ("tensor",)}),
     "plan: the rule '(' is not a regular expression: "),
    (lambda: parallel.plan(lambda s, b: (s, 0), lambda key: {"params": {"w": jnp.ones((9, 4))}}, np.ones((4, 2)),
                           mesh={"data": 2, "tensor": 4}, rules={"w": ("tensor",)}),
     "plan: the rule 'w' splits axis 0 of w [9, 4] over 'tensor', but 9 is not a multiple of 4; use tensor=3"),
    (lambda: parallel.plan(STEP, INIT, ROWS, mesh={"tensor": 3}),
     "plan: mesh {'tensor': 3, 'data': 2} needs 6 devices"),
    (lambda: called(devices="v2:2x2"), "plan.jit: this plan is for 4 x TPU v2 (8 devices), which are not attached; use "
     "devices='local' to run it"),
    (lambda: called(batch=np.ones((12, 512), np.float32)),
     "plan.jit: batch of shape (12, 512) has 12 rows, not a multiple of 8 devices; parallel.feed pads short"),
    (lambda: called(batch={"x": np.ones((16, 512), np.float32)}),
     "plan.jit: the batch has another structure than in the plan: PyTreeDef({'x': *}) and PyTreeDef(*)"),
    (lambda: called(where=jax.devices()[0]), "plan.jit: state['params'][0] does not have the plan's sharding, but "
     "SingleDeviceSharding(device=CpuDevice(id=0)"),
])
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_functions_are_needed():
    with pytest.raises(TypeError, match="plan: step must be a function; got None"):
        parallel.plan(None, INIT, ROWS)
    with pytest.raises(TypeError, match=r"plan: init must be a function; got \{\}"):
        parallel.plan(STEP, {}, ROWS)


def test_a_step_that_reads_nothing():
    plan = parallel.plan(lambda state, batch: (state, {}), lambda key: {"a": jnp.ones(3)}, np.ones((8, 2)),
                         devices="h100:8", compile=False)
    assert "inf" not in plan.explain()


def test_what_is_no_array():
    with pytest.raises(TypeError, match=re.escape("plan: batch['name'] is a str; the leaves of a batch are arrays")):
        parallel.plan(STEP, INIT, {"x": ROWS, "name": "a"})


def test_an_axis_that_no_rule_names():
    """Its devices do the same work, and the time says so."""
    plan = parallel.plan(STEP, INIT, ROWS, mesh={"tensor": 4}, compile=False, strategy="data")
    assert dict(plan.mesh.shape) == {"data": 2, "tensor": 4}
    assert "no rule uses the mesh axis tensor, so the 4 devices along it do the same work" in plan.explain()
    named = parallel.plan(STEP, INIT, ROWS, mesh={"tensor": 4}, rules={".": (None, "tensor")}, compile=False,
                          strategy="data")
    assert "no rule uses" not in named.explain()
    assert named.chosen.time.compute == pytest.approx(plan.chosen.time.compute / 4)
