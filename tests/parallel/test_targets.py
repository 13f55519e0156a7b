"""What a plan is for, by name; and plans for chips that are not there, estimated and compiled."""

import importlib.util
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft
from fnet.parallel import _drafts, _planner, _targets
from fnet.parallel._targets import target

TX = optax.adamw(1e-3)


def language_model(rows, vocab_size=256, width=128, depth=4, heads=4, context=64, **options):
    model = models.GPT(vocab_size, width, depth, heads, context=context, **options)

    def init(key):
        return tr.TrainState.create(model.init(key, jnp.zeros((1, context), jnp.int32))[0], TX)

    def step(state, batch):
        loss = lambda params: model.cross_entropy(params, batch[:, :-1], batch[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(TX, grads), {"loss": value}

    return step, init, jax.ShapeDtypeStruct((rows, context + 1), jnp.int32)


def tiny():
    """A step of small arrays, which are mostly padding on TPUs."""

    def step(state, batch):
        value, grads = jax.value_and_grad(lambda w: jnp.square(batch @ w).mean())(state["params"])
        return {**state, "params": state["params"] - grads}, value

    init = lambda key: {
        "params": jnp.zeros((3, 1)),
        "keys": jax.random.split(key, 3),
        "n": jnp.int32(0),
    }
    return step, init, jax.ShapeDtypeStruct((16, 3), jnp.float32)


@pytest.fixture
def no_compilers(monkeypatch):
    find = importlib.util.find_spec
    without = lambda name, *rest: None if name == "libtpu" else find(name, *rest)
    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(
        _targets._gpus, "devices", lambda *_: (None, "jax's plugin is not installed")
    )


@pytest.mark.parametrize(
    ("name", "chip", "count", "groups"),
    [
        ("v5e:16x16", "TPU v5e", 256, 1),
        ("v5p:4x4x4", "TPU v5p", 64, 1),
        ("v5e:4x4*2", "TPU v5e", 32, 2),
        ("v2:2x2", "TPU v2", 8, 1),
        ("v3:4x4", "TPU v3", 32, 1),
        ("tpu7x:2x2x1", "TPU7x (Ironwood)", None, 1),
        ("h100:4x8", "H100 SXM5 80GB", 32, 4),
        ("h100:8", "H100 SXM5 80GB", 8, 1),
        ("H100:2x8", "H100 SXM5 80GB", 16, 2),
        ("RTX 3080", "RTX 3080 10GB", 1, 1),
        ("TPU v2", "TPU v2", 2, 1),
        ("dgx-1", "V100 SXM2 16GB", 8, 1),
    ],
)
def test_names(no_compilers, name, chip, count, groups):
    found = target(name)
    assert found.chip.name == chip and found.groups == groups and count in (None, found.count)
    assert not found.attached and found.devices is None and found.why


def test_what_a_chip_sends(no_compilers):
    """Two links of a torus' axis, one of an axis of two chips; a TPU v2's links are shared by its
    two devices."""
    each = target("v5e:16x16").chip.links.each_way
    assert target("v5e:16x16").sent == 4 * each and target("v5e:2x2").sent == 2 * each
    assert target("v5e:1x1").sent is None or target("v5e:1x1").count == 1
    assert target("v2:2x2").sent == target("v2:2x2").chip.links.each_way
    assert target("h100:4x8").sent == 450e9 and target("h100:4x8").sent_between == 50e9
    assert target("v5e:4x4*2").sent_between == 3.125e9 and target("RTX 3080").sent is None


def test_devices_of_this_run():
    assert target("local").devices == jax.devices() and target(jax.devices()[:2]).count == 2
    assert target("local").attached and str(target("local")).startswith("8 x ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ([], "plan: expected at least one device; got an empty list"),
        (
            "cluster",
            "or a system such as 'dgx-1'; got 'cluster': unknown chip 'cluster'; slices are of v2, "
            "v3, v4, v5e, v5p, v6e, tpu7x; similar names in the catalog: ",
        ),
        ("v9:2x2", "unknown chip 'v9'"),
        ("v5e:2x2x2", "plan: slices of TPU v5e have 2 axes, e.g. 'v5e:2x2'; got 'v5e:2x2x2'"),
        (
            "h100:1x2x3",
            "plan: GPUs must be MACHINESxGPUS, such as 'h100:4x8', or GPUS of one machine, "
            "'h100:8'; got ",
        ),
        (
            "v5e:16x17",
            "plan: there are no TPUs 'v5e:16x17': an axis must be 1, 2 or a multiple of 4, up to "
            "16",
        ),
        ("v5e:32x16", "up to 16"),
        ("RTX 9999", "unknown chip 'RTX 9999'"),
    ],
)
def test_what_is_no_target(no_compilers, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        target(name)


def test_an_estimate_says_so_and_what_it_costs(no_compilers):
    plan = parallel.plan(*language_model(512), devices="v5e:16x16")
    text = plan.explain()
    assert text.startswith("256 x TPU v5e, 16.0 GiB each: ") and "mesh: data 256" in text
    why = (
        "compiling for TPUs that are not attached needs the package libtpu, which is not "
        "installed: pip install libtpu"
    )
    assert f"This is an estimate: {why}." in text and "compiled" not in text.splitlines()[4]
    assert re.search(
        r"at that speed \(estimated\): \$\S+ a step, \$\S+ a million tokens \(\$1.2 an hour", text
    )
    assert re.search(
        r"bound by \w+ \(compute .*, memory .*, links .*\), [\d,]+ tokens/s at most", text
    )
    message = "plan.init: this plan is for 256 x TPU v5e, which are not attached; use devices='local' to run it"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.init(jax.random.key(0))


def test_power_is_told_where_it_is_known(no_compilers):
    assert re.search(
        r"\S+ Wh a step, \S+ Wh a million tokens \(700 W a chip\)",
        parallel.plan(*language_model(64), devices="h100:8").explain(),
    )


@pytest.mark.exhaustive
def test_thousands_of_chips(no_compilers):
    began = time.perf_counter()
    plan = parallel.plan(*language_model(8192, width=256, depth=8, heads=8), devices="v5p:16x16x16")
    assert plan.mesh.size == 4096 and time.perf_counter() - began < 60


def test_slices_send_gradients_alone(no_compilers):
    plan = parallel.plan(*language_model(64), devices="v5e:4x4*2", strategy="fsdp")
    assert dict(plan.mesh.shape) == {"slice": 2, "data": 16} and plan.axes == ("slice", "data")
    assert {each.collective for each in plan.chosen.estimate.between.transfers} == {"all-reduce"}
    split = sum(
        np.prod(where.shard_shape(x.shape))
        for x, where in zip(
            jax.tree.leaves(jax.eval_shape(plan.init_fn, jax.random.key(0)).params),
            jax.tree.leaves(plan.state.params),
        )
    )
    between = plan.chosen.estimate.between.sent / 4  # a gradient's bytes, at two slices
    assert 0.9 * split <= between < 1.1 * split
    assert not any(
        "slice" in (axis or ()) for where in jax.tree.leaves(plan.state) for axis in where.spec
    )
    assert "and between slices: " in plan.explain()


def test_one_chip(no_compilers):
    def init(key):
        return {"params": {"in": jnp.zeros((64, 256)), "w": [jnp.zeros((256, 256))] * 8}}

    def step(state, batch, *, microbatches=1):
        def loss(params, batch):
            x = jnp.tanh(batch @ params["in"])
            for w in params["w"]:
                x = jnp.tanh(x @ w)
            return jnp.square(x).mean()

        value, grads = ft.microbatch(jax.value_and_grad(loss), microbatches)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    rows = lambda n: jax.ShapeDtypeStruct((n, 64), jnp.float32)
    plan = parallel.plan(step, init, rows(64), devices="RTX 3080")
    assert plan.strategy == "data" and plan.mesh.size == 1
    (plain, most), (remat, more), (slices, by_slices) = plan.largest_batches
    assert (
        not plain.remat
        and remat.remat
        and slices.microbatches == 8
        and 64 < most < more < by_slices
    )
    text = plan.explain()
    assert f"largest batch that fits: {most:,} rows (estimated)" in text
    assert (
        f"largest batch that fits, with activations recomputed: {more:,} rows (estimated)" in text
    )
    assert f"recomputed, in 8 microbatches: {by_slices:,} rows (estimated)" in text
    fits = parallel.plan(step, init, rows(most), devices="RTX 3080", strategy="data")
    assert fits.chosen.peak <= _drafts.ROOM * fits.chip.memory_bytes < 1.03 * fits.chosen.peak
    again = parallel.plan(step, init, rows(int(1.1 * most)), devices="RTX 3080")
    assert again.strategy == "data+remat" and "rejected: over 92% of 10.0 GiB" in again.explain()
    with pytest.raises(
        ValueError, match=r"use a smaller batch of at most [\d,]+ rows \(estimated\)"
    ):
        parallel.plan(step, init, rows(4 * by_slices + 1), devices="RTX 3080")


@pytest.mark.parametrize("devices", ["v5e:2x2", "v3:2x2", "h100:4", "TPU v5e"])
def test_no_peak_is_below_the_arguments(no_compilers, devices):
    plan = parallel.plan(*tiny(), devices=devices)
    for each in plan.candidates:
        assert each.exact and each.estimate.peak >= each.arguments > each.persistent
    assert " exact" in plan.explain()


@pytest.mark.parametrize(("extra", "exact"), [(0, True), (512, False)])
def test_sizes_that_the_compiler_contradicts_are_estimated(monkeypatch, extra, exact):
    """Of another version of libtpu, say."""
    compiled = _planner._compile.compiled

    def other(step, state, batch):
        found = compiled(step, state, batch)
        return found._replace(arguments=found.arguments + extra)

    monkeypatch.setattr(_planner._compile, "compiled", other)
    plan = parallel.plan(*tiny(), devices=jax.devices(), strategy="data")
    assert {each.exact for each in plan.candidates} == {exact}
    assert (" exact" in plan.explain()) == exact and (
        "+512 bytes from the prediction" in plan.explain()
    ) != exact


def test_libtpu_is_asked_with_settings_that_do_not_stay(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    with _targets._environment(_targets._LIBTPU):
        assert os.environ["TPU_ACCELERATOR_TYPE"] and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    assert "TPU_ACCELERATOR_TYPE" not in os.environ and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"


LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@LIBTPU
def test_a_slice_that_is_not_there():
    """Bytes of state and batch are the program's arguments, and the estimate of its peak is near."""
    step, init, batch = language_model(64, 4096, 256, 4, 4, context=256)
    plan = parallel.plan(step, init, batch, devices="v5e:2x2", strategy="fsdp")
    for each in plan.candidates:
        assert each.compiled.arguments == each.arguments > each.persistent
        assert (
            abs(each.estimate.peak / each.compiled.peak - 1) < 0.5
        )  # of larger ones a quarter: on-chip memory
        assert each.ledger.sent
    assert "compiled" in plan.explain() and "This is an estimate" not in plan.explain()
    with pytest.raises(ValueError, match=r"plan: there are no TPUs 'v5e:3x7': "):
        parallel.plan(step, init, batch, devices="v5e:3x7")


@LIBTPU
def test_stages_that_are_not_there():
    """A pipeline on four chips, each of which has its own layer."""
    case = language_model(64, 4096, 256, 4, 4, context=256)
    plan = parallel.plan(*case, devices="v5e:2x2", mesh={"stage": 4}, strategy="pipeline")
    compiled = plan.chosen.compiled
    assert compiled.arguments == plan.chosen.arguments
    # Of larger ones within 15 %: the estimate has a layer's values of all rows, not of a microbatch.
    assert 0.9 < plan.chosen.estimate.peak / compiled.peak < 1.75
    assert compiled.ledger.bytes["collective-permute"]
    whole = jax.tree.leaves(jax.eval_shape(case[1], jax.random.key(0)).params["blocks"])
    parts = jax.tree.leaves(plan.state.params["blocks"])
    assert all(y.shard_shape(x.shape) == (1, *x.shape[1:]) for x, y in zip(whole, parts))


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax's CUDA plugin is not installed",
)
def test_gpus_that_are_not_there():
    plan = parallel.plan(
        *language_model(64, 4096, 256, 4, 4, context=256), devices="h100:2x2", strategy="fsdp"
    )
    for each in plan.candidates:
        assert each.compiled.arguments == each.arguments and each.compiled.peak and each.ledger.sent
    assert plan.explain().endswith("not which cuDNN kernels it would use.")


def test_a_gpu_that_no_description_is_known_of():
    found = target("RTX 4090")
    assert found.devices is None
    assert found.why == (
        "XLA's description of RTX 4090 is not included in fnet; included are H100 SXM5 80GB, A100 "
        "SXM4 80GB"
    )


@LIBTPU
def test_attention_has_the_chips_kernel_on_a_slice():
    """Each chip attends to its own rows, for XLA cannot split a kernel."""
    step, init, batch = language_model(8, width=64, depth=2, heads=1, context=512)
    plan = parallel.plan(step, init, batch, devices="v5e:2x2", strategy="fsdp+pins", compile=False)
    state = jax.eval_shape(init, jax.random.key(0))
    text = plan.jit(step).lower(state, batch).as_text()
    assert text.count("tpu_custom_call") >= 2 and "512x512xf32" not in text
    wide = {"mesh": {"data": 2, "tensor": 2}, "rules": {"blocks/fc/kernel": (None, None, "tensor")}}
    split = parallel.plan(
        step, init, batch, devices="v5e:2x2", strategy="data", compile=False, **wide
    )
    assert "tpu_custom_call" not in split.jit(step).lower(state, batch).as_text()
    assert split.chosen.estimate.peak > plan.chosen.estimate.peak
