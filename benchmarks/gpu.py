"""Measures fnet on a GPU or TPU in a short session with a device. The most important parts run
first.

    python -m benchmarks.gpu [--minutes=9] [--parts=gpt,attention,...] [--json=gpu.json] [--rehearsal]

After each part, its table is printed and all figures are written to the JSON file. A part that
fails, or that exceeds its share of the time, does not affect the others. If PyTorch is installed,
it is measured for comparison.
"""

import dataclasses
import importlib.util
import json
import pathlib
import statistics
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import _accelerator_steps as steps
from benchmarks.peers import _workloads as spec
from fnet import hardware, models
from fnet import layers as nn
from fnet import transforms as ft

MINUTES = flags.DEFINE_float("minutes", 9, "the time for all parts; no part begins after it")
PARTS_ = flags.DEFINE_list(
    "parts", None, "of gpt, numerics, attention, resnet, decode, float16, medium; default: all"
)
JSON = flags.DEFINE_string("json", "gpu.json", "the file of the figures")
REHEARSAL = flags.DEFINE_bool("rehearsal", False, "small sizes, on any device")


def filled(shapes, *, vocab=1):
    """Returns arrays of these shapes. Floating-point arrays contain absolute values of normal
    random numbers times 0.02, which are also valid as squares in an optimizer's state. Integer
    arrays contain integers below `vocab`."""
    rng = np.random.default_rng(0)

    def one(shape):
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, vocab, shape.shape), shape.dtype)
        return jnp.asarray(np.abs(rng.standard_normal(shape.shape, np.float32)) * 0.02, shape.dtype)

    return jax.tree.map(one, shapes)


def timed(call, state, *, seconds, most=100):
    """Returns the median seconds of `state = call(state)`, and the last state. The calls take about
    `seconds` in total, after a first call that is not counted."""
    state = jax.block_until_ready(call(state))
    durations, end = [], time.perf_counter() + seconds
    while len(durations) < 3 or (time.perf_counter() < end and len(durations) < most):
        start = time.perf_counter()
        state = jax.block_until_ready(call(state))
        durations.append(time.perf_counter() - start)
    return statistics.median(durations), state


def measured(step, donated, args, *, seconds, tuned=False):
    """Returns the figures of a training step. The first outputs of the step replace its donated
    arguments."""
    step = jax.jit(step, donate_argnums=donated)
    step = ft.tune(step) if tuned else step
    start = time.perf_counter()
    compiled = step.lower(*args).compile()
    compiling = time.perf_counter() - start
    rest = args[len(donated) :]
    duration, state = timed(
        lambda state: compiled(*state[: len(donated)], *rest), args, seconds=seconds
    )
    memory = compiled.memory_analysis()
    found = {
        "seconds": duration,
        "compile s": compiling,
        "loss": float(state[-1]),
        "predicted GiB": (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
    }
    measured_memory = jax.devices()[0].memory_stats() or {}
    return {**found, "peak GiB": measured_memory.get("peak_bytes_in_use", 0) / 2**30}


def pytorch(workload, seconds):
    """Returns {"PyTorch": figures of a training step with torch.compile, autocast and SDPA}, or {}
    if PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from benchmarks.peers import _torch

    run = _torch.build(
        workload,
        spec.weights(workload),
        spec.batches(workload, 1),
        train=True,
        mixed=True,
        compiled=_torch.DEVICE == "cuda",
    )
    start = time.perf_counter()
    loss = float(run.step(0))
    compiling = time.perf_counter() - start

    def step(_):
        loss = run.step(0)
        run.wait(loss)
        return float(loss)

    duration, loss = timed(step, loss, seconds=seconds)
    return {
        "PyTorch": {
            "seconds": duration,
            "compile s": compiling,
            "loss": loss,
            "peak GiB": (run.memory() or 0) / 2**30,
        }
    }


def gpt(size, seconds):
    """GPT-2 in bfloat16: fnet with and without tune, handwritten JAX, and PyTorch with
    torch.compile."""
    w, platform, rows = size.gpt, _platform(), {}
    peak = hardware.detect().peak("bfloat16")
    useful = 6 * size.parameters * w.batch * w.time + 6 * w.depth * w.batch * w.time**2 * w.width
    for name, form, tuned in (
        ("fnet", "fnet", True),
        ("fnet, not tuned", "fnet", False),
        ("plain JAX", "hand", False),
    ):
        step, donated, shapes = steps.gpt(form, size, platform)
        rows[name] = measured(
            step, donated, filled(shapes, vocab=w.vocab), seconds=seconds, tuned=tuned
        )
    rows |= pytorch(w, seconds)
    for row in rows.values():
        row["tokens/s"] = w.batch * w.time / row["seconds"]
        row["MFU"] = useful / row["seconds"] / peak.flops if peak else None
    return rows


def attention(size, seconds):
    """Causal attention: seconds and fraction of the peak, for the forward pass, and for forward and
    backward pass together."""
    w, rows = size.gpt, {}
    shape = jax.ShapeDtypeStruct((w.batch, w.time, w.heads, w.width // w.heads), jnp.bfloat16)
    q = filled(shape)
    run = lambda q, k, v: nn.dot_product_attention(q, k, v, causal=True)
    plain = lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="xla"
    )
    flops = 2 * w.batch * w.time**2 * w.width
    peak = hardware.detect().peak("bfloat16")
    for name, f in ("fnet", run), ("jax.nn, XLA", plain):
        both = jax.jit(
            jax.grad(lambda q, k, v, f=f: f(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
        )
        for passes, call, work in (("forward", jax.jit(f), 1), ("both passes", both, 3.5)):
            duration, _ = timed(lambda _, call=call: call(q, q, q), None, seconds=seconds)
            rows[f"{name}, {passes}"] = {
                "seconds": duration,
                "of the peak": work * flops / duration / peak.flops if peak else None,
            }
    return rows


def resnet(size, seconds):
    """ResNet-50 in bfloat16: fnet with tune, handwritten JAX, and PyTorch with torch.compile."""
    rows = {}
    for name, form, tuned in (("fnet", "fnet", True), ("plain JAX", "hand", False)):
        step, donated, shapes = steps.resnet(form, size, _platform())
        rows[name] = measured(
            step, donated, filled(shapes, vocab=size.resnet.classes), seconds=seconds, tuned=tuned
        )
    rows |= pytorch(size.resnet, seconds)
    for row in rows.values():
        row["images/s"] = size.resnet.batch / row["seconds"]
    return rows


def decode(size, seconds):
    """Tokens per second of `models.generate` in bfloat16, batch 1 and 8."""
    model, rows = size.llama, {}
    params, _ = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    count = min(256, model.context // 2)
    for batch in 1, 8:
        prompts = jnp.ones((batch, 16), jnp.int32)
        call = lambda _, prompts=prompts: models.generate(
            model, params, prompts, max_tokens=count, temperature=0, dtype="bfloat16"
        )
        duration, _ = timed(call, None, seconds=seconds, most=5)
        rows[f"batch {batch}"] = {"seconds": duration, "tokens/s": batch * count / duration}
    return rows


def float16(size, seconds):
    """GPT-2 in float16 with loss scaling, as on Volta and Turing."""
    w = size.gpt
    model = models.GPT(w.vocab, w.width, w.depth, w.heads, context=w.time)
    tx = ft.loss_scale(optax.adamw(6e-4), initial=2.0**15)
    tokens = filled(jax.ShapeDtypeStruct((w.batch, w.time + 1), jnp.int32), vocab=w.vocab)
    params = filled(jax.eval_shape(model.init, jax.random.key(0), model.example())[0])
    loss = lambda params, tokens: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()

    def step(params, opt_state, tokens):
        value, grads = ft.autocast(ft.scaled_value_and_grad(loss), "float16")(
            opt_state, params, tokens
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    found = measured(step, (0, 1), (params, tx.init(params), tokens), seconds=seconds, tuned=True)
    return {"fnet": {**found, "tokens/s": w.batch * w.time / found["seconds"]}}


def medium(size, seconds):
    """GPT-2 350M in bfloat16, with a batch of four texts and tune."""
    if size is steps.LARGE:
        size = dataclasses.replace(
            size, gpt=dataclasses.replace(size.gpt, batch=4, width=1024, depth=24, heads=16)
        )
    step, donated, shapes = steps.gpt("fnet", size, _platform())
    row = measured(step, donated, filled(shapes, vocab=size.gpt.vocab), seconds=seconds, tuned=True)
    return {"fnet": {**row, "tokens/s": size.gpt.batch * size.gpt.time / row["seconds"]}}


def numerics(size, seconds):
    """Relative errors on this device: attention and its gradients, and gradients of a small GPT in
    bfloat16, compared with float32 formulas."""
    w = size.gpt
    q, k, v = (
        jax.random.normal(key, (2, w.time, w.heads, w.width // w.heads))
        for key in jax.random.split(jax.random.key(0), 3)
    )
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    fnet = lambda q, k, v: jnp.sin(
        nn.dot_product_attention(q, k, v, causal=True).astype(jnp.float32)
    ).sum()
    plain = lambda q, k, v: jnp.sin(
        jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    ).sum()
    model = models.GPT(101, 64, 2, 2, context=64)
    tokens = filled(jax.ShapeDtypeStruct((4, 65), jnp.int32), vocab=101)
    params, _ = model.init(jax.random.key(0), tokens[:, :-1])
    loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()

    def error(got, want):
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want))
        wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
        top = max(np.abs(wide(x)).max() for x in jax.tree.leaves(want))
        return max(np.abs(wide(a) - wide(b)).max() for a, b in pairs) / top

    def timed_error(got, want):
        start = time.perf_counter()
        value = jax.block_until_ready(got())
        with jax.default_matmul_precision("highest"):
            return {"seconds": time.perf_counter() - start, "error": error(value, want())}

    wide = [x.astype(jnp.float32) for x in low]
    gradient = jax.value_and_grad(loss)
    return {
        "attention, gradients, bfloat16": timed_error(
            lambda: jax.jit(jax.grad(fnet, (0, 1, 2)))(*low),
            lambda: jax.jit(jax.grad(plain, (0, 1, 2)))(*wide),
        ),
        "GPT, gradients, bfloat16": timed_error(
            lambda: ft.tune(ft.autocast(gradient, "bfloat16"))(params),
            lambda: jax.jit(gradient)(params),
        ),
    }


PARTS = {
    "gpt": gpt,
    "numerics": numerics,
    "attention": attention,
    "resnet": resnet,
    "decode": decode,
    "float16": float16,
    "medium": medium,
}


def _platform():
    return "tpu" if jax.default_backend() == "tpu" else "cuda"


def table(rows):
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    show = lambda value: "" if value is None else f"{value:.4g}"
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {name} | {' | '.join(show(row.get(column)) for column in columns)} |"
                for name, row in rows.items()
            ),
        ]
    )


def run(parts, size, *, minutes, path):
    """Runs the parts one after another until the time is over. Returns the content of the JSON
    file."""
    found = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "parts": {},
        "failed": {},
        "skipped": [],
    }
    end = time.perf_counter() + 60 * minutes
    for number, (name, part) in enumerate(parts.items()):
        left = end - time.perf_counter()
        if left <= 0:
            found["skipped"] = list(parts)[number:]
            print(f"no time is left for {', '.join(found['skipped'])}")
            break
        try:
            found["parts"][name] = part(
                size, left / (len(parts) - number) / 8
            )  # half of the time is for compilation
            print(f"\n**{name}**: {part.__doc__}\n\n{table(found['parts'][name])}", flush=True)
        except Exception as error:  # a failed part must not end the session
            found["failed"][name] = f"{type(error).__name__}: {error}"
            print(f"\n**{name}** failed:", file=sys.stderr)
            traceback.print_exc()
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main(_):
    print(
        f"`python -m benchmarks.gpu {' '.join(sys.argv[1:])}`, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind}"
    )
    parts = {name: PARTS[name] for name in PARTS_.value or PARTS}
    size = steps.SMALL if REHEARSAL.value else steps.LARGE
    found = run(parts, size, minutes=MINUTES.value, path=pathlib.Path(JSON.value))
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    app.run(main)
