"""Compares steps of fnet, plain JAX and Flax, compiled for GPUs and TPUs that are not attached.

    python -m pip install --no-deps jax-cuda13-pjrt==VERSION jax-cuda13-plugin==VERSION    # jax's own version, for GPUs
    python -m pip install libtpu                                                           # for TPUs
    python -m benchmarks.accelerators [--chips=h100,v5e] [--programs=gpt,resnet,decode] [--forms=...] [--small]

The steps do not run. All figures are read from the optimized HLO: kernels, bytes from and to main
memory, the roofline time, the time that a TPU's compiler estimates, copies, and products by dtype.
The roofline time is a lower bound, with which rows can be compared. `--check` compares the counts
of the small size with the recorded counts. The exit code is 1 if they are worse. `--largest` prints
the largest batch of the GPT that fits the memory of each chip instead.
"""

import collections
import dataclasses
import json
import math
import pathlib
import sys
import time

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import _accelerator_steps as steps
from benchmarks import _hlo
from fnet import transforms as ft
from fnet.parallel import _targets

CHIPS = {
    "h100": "h100:1",
    "a100": "a100-80gb:1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
}
FORMS = {
    "gpt": (
        "hand",
        "fnet",
        "fnet-tuned",
        "fnet-residual-tuned",
        "fnet-unstacked",
        "linen",
        "linen-tuned",
        "linen-scan",
        "linen-scan-tuned",
        "nnx",
        "nnx-tuned",
        "nnx-scan",
        "nnx-scan-tuned",
    ),
    "resnet": (
        "hand",
        "fnet",
        "fnet-residual",
        "fnet-tuned",
        "fnet-residual-tuned",
        "linen",
        "linen-tuned",
        "nnx",
        "nnx-tuned",
    ),
    "decode": ("hand", "fnet", "fnet-tuned"),
    "decode8": ("hand", "fnet", "fnet-tuned"),
}
CHECKED = {
    "gpt": ("fnet", "fnet-tuned", "fnet-residual-tuned"),
    "resnet": ("fnet",),
    "decode": ("fnet",),
    "decode8": ("fnet",),
}
RECORD = pathlib.Path(__file__).with_suffix(".json")

CHIP = flags.DEFINE_list("chips", ["h100", "v5e"], f"of {', '.join(CHIPS)}")
PROGRAM = flags.DEFINE_list("programs", list(FORMS), f"of {', '.join(FORMS)}")
FORM = flags.DEFINE_list(
    "forms",
    None,
    "forms to compile, such as hand,fnet-tuned; default: all. Forms "
    "of the GPT: -residual (residual stream in bfloat16), -unstacked, -whole (complete logits)",
)
SMALL = flags.DEFINE_bool("small", False, "tiny models, not GPT-2 124M, ResNet-50 and Llama 135M")
BATCH = flags.DEFINE_integer("batch", None, "batch size of the GPT instead of 8", lower_bound=1)
SAVE = flags.DEFINE_string("save", None, "a folder for the HLO of each program")
CHECK = flags.DEFINE_bool("check", False, "compare with the recorded counts of the small size")
LARGEST = flags.DEFINE_bool(
    "largest", False, "print the largest batch of the GPT that fits each chip"
)
WRITE = flags.DEFINE_bool("record", False, "record the counts of the small size")


def device(name):
    """Returns a device to compile for and its chip. The device is None if the compiler is not
    installed."""
    target = _targets.target(CHIPS[name])
    if target.devices is None:
        print(f"{name} is skipped: {target.why}")
        return None, target.chip
    return target.devices[0], target.chip


def compiled(program, form, size, where, chip):
    """Returns a step, compiled for the device `where`, and its arguments."""
    platform = "tpu" if chip.kind == "tpu" else "cuda"
    step, donated, args = steps.PROGRAMS[program](form.removesuffix("-tuned"), size, platform)
    place = NamedSharding(Mesh(np.array([where]), ("data",)), P())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    step = jax.jit(step, donate_argnums=donated)
    if form.endswith("-tuned"):
        step = ft.tune(step, chip)
    return step.trace(*args).lower(lowering_platforms=(platform,)).compile(), args


def figures(program, compiled_step, text, chip):
    """Returns the figures of a program, which are one row of the table."""
    kernels = _hlo.kernels(text)
    peak, bandwidth = chip.peak("bfloat16").flops, chip.bandwidth
    seconds = cycles = 0
    products = collections.Counter()
    for kernel in kernels:
        wide = chip.kind == "gpu" and any(
            product.dtypes.startswith("f32 x f32") for product in kernel.products
        )
        seconds += kernel.times * max(
            (2 if wide else 1) * kernel.flops / peak, kernel.bytes / bandwidth
        )
        cycles += kernel.times * kernel.cycles
        for product in kernel.products:
            products[product.dtypes] += kernel.times
    moved = sum(kernel.times * kernel.bytes for kernel in kernels)
    copies = sum(
        kernel.times * kernel.bytes for kernel in kernels if kernel.kind in ("copy", "cast")
    )
    memory = compiled_step.memory_analysis()
    clock = chip.units.get("clock_ghz")
    return {
        "kernels": sum(kernel.times for kernel in kernels if kernel.bytes),
        "GB": moved / 1e9,
        "ms": seconds * 1e3,
        "cycles ms": cycles / clock / 1e6 if clock and chip.kind == "tpu" else None,
        "copies GB": copies / 1e9,
        "temporary GiB": memory.temp_size_in_bytes / 2**30,
        "state GiB": memory.argument_size_in_bytes / 2**30,
        "BackwardInput": sum("BackwardInput" in kernel.target for kernel in kernels),
        "products": dict(products),
    }


def needed(form, size, batch, where, chip):
    """Returns the bytes of memory that a step of the GPT needs, or infinity if the compiler finds
    no form that fits."""
    size = dataclasses.replace(size, gpt=dataclasses.replace(size.gpt, batch=batch))
    try:
        memory = compiled("gpt", form, size, where, chip)[0].memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def largest(chips, forms, size):
    """Prints the largest batch of the GPT, a multiple of 8, that fits the memory of each chip."""
    print(
        "| chip, form | largest batch | GB | GB of the next batch | other batches: GB "
        "|\n|---|---|---|---|---|"
    )
    for chip_name in chips:
        where, chip = device(chip_name)
        capacity = chip.memory_bytes / 2**30 * 1e9  # GB, not GiB: the rest is for the runtime
        for form in forms if where is not None else ():
            tried = {0: 0.0}
            step = 128
            while step >= 8:  # bisection, after steps of 128 upward
                batch = max(each for each, found in tried.items() if found <= capacity) + step
                if batch not in tried:
                    tried[batch] = needed(form, size, batch, where, chip)
                if tried[batch] > capacity:
                    step //= 2
            best = max(batch for batch, found in tried.items() if found <= capacity)
            others = ", ".join(
                f"{batch}: {found / 1e9:.1f}"
                for batch, found in sorted(tried.items())
                if batch not in (0, best, best + 8)
            )
            print(
                f"| {chip_name} {form} | {best} | {tried[best] / 1e9:.1f} | "
                f"{tried[best + 8] / 1e9:.1f} | {others} |",
                flush=True,
            )


def row(name, found):
    cells = [
        f"{found['kernels']:,}",
        f"{found['GB']:.3g}",
        f"{found['ms']:.3g}",
        "" if found["cycles ms"] is None else f"{found['cycles ms']:.3g}",
        f"{found['copies GB']:.2g}",
        f"{found['temporary GiB']:.2f}",
        ", ".join(f"{count} {kind}" for kind, count in sorted(found["products"].items())),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def table(chips, programs, forms, size):
    """Compiles each program and prints its row of the table. Returns {name: figures}."""
    every = {}
    print(
        "| chip, program, form | kernels | GB | roofline ms | compiler's ms | copies GB | "
        "temporary GiB | products |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for chip_name in chips:
        where, chip = device(chip_name)
        for program in programs if where is not None else ():
            for form in forms or (CHECKED if CHECK.value or WRITE.value else FORMS)[program]:
                start = time.perf_counter()
                name = f"{chip_name} {program} {form}"
                step, _ = compiled(program, form, size, where, chip)
                text = step.as_text()
                if SAVE.value:
                    folder = pathlib.Path(SAVE.value)
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / f"{name.replace(' ', '.')}.hlo").write_text(text)
                every[name] = figures(program, step, text, chip)
                print(row(name, every[name]), f"{time.perf_counter() - start:.0f} s", flush=True)
    return every


def worse(found, recorded):
    """Yields an error message for each count that is worse than the recorded one."""
    for name, old in recorded.items():
        if (new := found.get(name)) is None:
            continue
        if new["GB"] > 1.1 * old["GB"]:
            yield f"{name}: {new['GB']:.4f} GB of traffic, recorded {old['GB']:.4f}"
        wide = lambda each: sum(
            count for kind, count in each["products"].items() if kind.startswith("f32 x f32")
        )
        if wide(new) > wide(old):
            yield f"{name}: {wide(new)} products of float32 operands, recorded {wide(old)}"
        if new["BackwardInput"] < old["BackwardInput"]:
            yield (
                f"{name}: {new['BackwardInput']} of cuDNN's backward-input convolutions, recorded "
                f"{old['BackwardInput']}"
            )


def main(_):
    if BATCH.value and (CHECK.value or WRITE.value):
        sys.exit("--check and --record are for the recorded batch size: omit --batch")
    size = steps.SMALL if SMALL.value or CHECK.value or WRITE.value else steps.LARGE
    if BATCH.value:
        size = dataclasses.replace(size, gpt=dataclasses.replace(size.gpt, batch=BATCH.value))
    print(f"`python -m benchmarks.accelerators {' '.join(sys.argv[1:])}`, jax {jax.__version__}\n")
    if LARGEST.value:
        return largest(CHIP.value, FORM.value or ("fnet", "fnet-residual-tuned"), size)
    found = table(CHIP.value, PROGRAM.value, FORM.value, size)
    if WRITE.value:
        old = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        RECORD.write_text(json.dumps({**old, **found}, indent=1) + "\n")
    if CHECK.value:
        sentences = list(worse(found, json.loads(RECORD.read_text())))
        print(*sentences, sep="\n")
        sys.exit(bool(sentences))


if __name__ == "__main__":
    app.run(main)
