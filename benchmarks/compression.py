"""Quantizes published models, and measures size, accuracy and time relative to float32.

    python -m benchmarks.compression                       # all models; their weights must be available
    python -m benchmarks.compression --compress_models=minilm --compress_time=false
    python -m benchmarks.compression --compress_memory --compress_time=false --compress_accuracy=false

`pretrained.find` locates the weights; experiments/llama2c.py converts those of stories15m. MiniLM
embeds 500 sentences of The Tempest. stories15m is evaluated on stories that it samples itself, and
calibrated on other such stories. ResNet-50 classifies crops of the photos that scikit-image,
scikit-learn and matplotlib contain. If qwix is installed, it rounds the same kernels for
comparison. Times are fractions of the time in float32.
"predicted" is the prediction of `compress.advise`. For the memory, each model is exported as a
bundle. A new process loads the bundle and runs it for one example. "resident" is the memory that
this adds to a process that has only imported JAX.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from fnet import compress, export, models
from fnet import transforms as ft
from fnet.compress import Float8, Int4, Int8
from fnet.models import pretrained

NAMES = ("minilm", "stories15m", "resnet50")
MODELS = flags.DEFINE_list("compress_models", list(NAMES), f"some of {', '.join(NAMES)}")
TIMES = flags.DEFINE_bool("compress_time", True, "measure times")
ACCURACY = flags.DEFINE_bool("compress_accuracy", True, "measure the agreement with float32")
MEMORY = flags.DEFINE_bool(
    "compress_memory", False, "measure the memory of processes that run the exported models"
)
BATCHES = flags.DEFINE_list("compress_batches", ["1", "32"], "batch sizes of the times")
KERNELS = {
    "minilm": ["blocks/.*"],
    "stories15m": ["blocks/.*"],
    "resnet50": ["(?!stem|head).*"],
}
PHOTOS = (
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/chelsea.png"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
)


def minilm():
    """Returns (f, params, batches for calibration, (name of the accuracy, function of f and params
    that computes it), function from a batch size to inputs)."""
    path = pretrained.find("minilm")
    model = pretrained.model("minilm-l6", path)
    params, _ = pretrained.load(model, path)
    text = (pathlib.Path(__file__).parents[1] / "experiments" / "data" / "tempest.txt").read_text(
        encoding="utf-8"
    )
    lines = [line.strip() for line in text.splitlines() if len(line.split()) > 4]
    tokenizer = models.read_tokenizer(path / "vocab.txt")
    tokens, lengths = models.padded([tokenizer.encode(line) for line in lines[:660]])
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)

    def embed(params, tokens, lengths):
        return models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)

    exact = jax.jit(embed)(params, tokens[160:], lengths[160:])

    def cosine(f, params):
        near = (jax.jit(f)(params, tokens[160:], lengths[160:]) * exact).sum(-1)
        return f"{near.mean():.4f}, least {near.min():.4f}"

    return (
        embed,
        params,
        [(tokens[i : i + 32], lengths[i : i + 32]) for i in range(0, 160, 32)],
        ("cosine similarity", cosine),
        lambda n: (tokens[:n], lengths[:n]),
    )


def stories15m():
    path = pretrained.find("stories15m")
    model = pretrained.model("stories15m", path)
    params, _ = pretrained.load(model, path)
    write = lambda seed, n: (
        models.generate(
            model, params, [[1]] * n, max_tokens=255, temperature=1.0, key=jax.random.key(seed)
        ).tokens
    )
    known, held = (
        jnp.concatenate([jnp.ones((n, 1), int), jnp.asarray(write(seed, n))], 1)
        for seed, n in ((0, 48), (1, 48))
    )

    def perplexity(f, params):
        f = jax.jit(f)
        losses = []
        for rows in jnp.split(held, 6):
            logits = f(params, rows[:, :-1])
            losses.append(
                -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1).mean()
            )
        return f"{jnp.exp(jnp.mean(jnp.stack(losses))):.4f}"

    return (
        model,
        params,
        list(jnp.split(known, 6)),
        ("perplexity", perplexity),
        lambda n: (known[:n, :128],),
    )


def resnet50():
    from PIL import Image

    path = pretrained.find("resnet50")
    model = pretrained.model("resnet50", path)
    params, state = pretrained.load(model, path)
    prepare = model.NAMES[pretrained.names_of(model, path)].image
    rng, crops = np.random.default_rng(0), []
    for package, file in PHOTOS:
        spec = importlib.util.find_spec(package)
        if spec is not None and (pathlib.Path(spec.origin).parent / file).is_file():
            photo = Image.open(pathlib.Path(spec.origin).parent / file).convert("RGB")
            for _ in range(60):
                size = rng.uniform(0.3, 1) * min(photo.size)
                left, top = (rng.uniform(0, n - size) for n in photo.size)
                crop = photo.resize((224, 224), Image.BICUBIC, (left, top, left + size, top + size))
                crops.append(prepare.normalize(np.asarray(crop)))
    crops = rng.permutation(np.stack(crops))
    classify = lambda params, x: model(params, x, state=state)[0]
    batches = np.split(crops[:200], 8)
    names = lambda f, params: np.concatenate([np.asarray(f(params, x)).argmax(-1) for x in batches])
    exact = names(jax.jit(classify), params)
    agreement = lambda f, params: (
        f"{(names(jax.jit(f), params) == exact).mean():.3f} of {len(exact)} crops"
    )
    return (
        classify,
        params,
        np.split(crops[200:232], 4),
        ("top-1 agreement", agreement),
        lambda n: (crops[:n],),
    )


def recipes(name, stats, with_gram):
    """Returns {name: function that quantizes parameters}."""
    every = lambda format: dict.fromkeys(KERNELS[name], format)
    rounded = lambda format, **options: (
        lambda params: compress.quantize(params, every(format), **options)
    )
    found = {
        "float32": lambda params: params,
        "int8": rounded(Int8()),
        "int8, dynamic activations": rounded(Int8(activations="dynamic")),
        "int8, calibrated activations": rounded(Int8(activations="percentile"), stats=stats),
        "float8": rounded(Float8()),
        "int4, groups of 32": rounded(Int4(32)),
    }
    if with_gram:
        found |= {
            "int8 and the embedding": lambda params: compress.quantize(
                rounded(Int8())(params), {"embed.*": Int8(axes=-1)}
            ),
            "int4, groups of 32, GPTQ": rounded(Int4(32), stats=stats),
        }
        if importlib.util.find_spec("qwix") is not None:
            found["int4, groups of 32, qwix"] = lambda params: _qwix(
                rounded(Int4(32))(params), params
            )
    return found


def _qwix(chosen, params):
    """Returns the parameters with the kernels rounded by qwix. `chosen` states which kernels are
    quantized."""
    from qwix._src.core import qarray

    def rounded(choice, w):
        if not isinstance(choice, compress.Quantized):
            return w
        how = qarray.HowToQuantize(
            qtype=jnp.int4,
            channelwise_axes=[i for i in range(w.ndim) if i != w.ndim - 2],
            tiled_axes={w.ndim - 2: 32},
            calibration_method="absmax",
        )
        return qarray.dequantize(qarray.quantize(w, how)).astype(w.dtype)

    return jax.tree.map(
        rounded, chosen, params, is_leaf=lambda x: isinstance(x, compress.Quantized)
    )


# The process that runs a bundle. It prints the increase of resident memory and of its peak, in MB.
PROCESS = """
import sys
import jax, numpy as np
def read(name):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(name)).split()[1]) / 1e3
jax.block_until_ready(jax.jit(lambda x: x @ x)(np.ones((64, 64), np.float32)))
before = read("VmRSS")
sys.path.insert(0, sys.argv[1])
import load
model, inputs = load.load(sys.argv[1]), np.load(sys.argv[2])
for _ in range(3):
    model(*(inputs[name] for name in inputs))
print(read("VmRSS") - before, read("VmHWM") - before)
"""


def memory(f, params, inputs) -> tuple[float, float, float]:
    """Returns (MB of the bundle, resident MB, MB of the peak)."""
    specs = {
        f"x{i}": export.spec(", ".join(map(str, x.shape)), str(x.dtype))
        for i, x in enumerate(inputs)
    }
    with tempfile.TemporaryDirectory() as folder:
        bundle, arrays = pathlib.Path(folder) / "model.fnet", pathlib.Path(folder) / "inputs.npz"
        export.program(f, params, **specs).save(bundle)
        np.savez(arrays, **dict(zip(specs, map(np.asarray, inputs))))
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, bundle, arrays],
            capture_output=True,
            text=True,
            check=True,
        )
        return (bundle.stat().st_size / 1e6, *map(float, done.stdout.split()))


def ratios(functions, inputs):
    """Returns {name: median of the ratio of a function's time to the time of the first function}.
    The functions alternate for at most 12 calls each, or about 20 seconds."""
    times, end = {name: [] for name in functions}, time.perf_counter() + 20
    for number in range(12):
        if number >= 5 and time.perf_counter() > end:
            break
        for name, run in functions.items():
            began = time.perf_counter()
            jax.block_until_ready(run(*inputs))
            times[name].append(time.perf_counter() - began)
    first = times[next(iter(times))][2:]
    return {
        name: statistics.median(a / b for a, b in zip(values[2:], first))
        for name, values in times.items()
    }


def table(name):
    f, params, batches, (figure, measure), inputs = {
        "minilm": minilm,
        "stories15m": stories15m,
        "resnet50": resnet50,
    }[name]()
    text = name != "resnet50"
    stats = compress.calibrate(f, params, batches, gram=text)
    implicit = ft.use_implicit_arrays(f)
    trees = {label: change(params) for label, change in recipes(name, stats, text).items()}
    slow, predicted = {}, {}
    if TIMES.value:
        for n in map(int, BATCHES.value):
            predicted[n] = predictions(f, params, inputs(n), trees)
            runs = {
                label: functools.partial(jax.jit(implicit), tree) for label, tree in trees.items()
            }
            slow[n] = ratios(runs, inputs(n))
    sizes = (
        {label: memory(implicit, tree, inputs(1)) for label, tree in trees.items()}
        if MEMORY.value
        else {}
    )
    print(
        f"\n**{name}**\n\n| parameters | MB | {figure} |"
        + " file MB | resident MB | peak MB |" * MEMORY.value
        + "".join(f" time, batch {n} | predicted |" for n in slow)
    )
    print("|---" * (3 + 3 * MEMORY.value + 2 * len(slow)) + "|")
    for label, tree in trees.items():
        print(
            f"| {label} | {compress.size(tree) / 1e6:.1f} | "
            f"{measure(implicit, tree) if ACCURACY.value else ''} |"
            + "".join(f" {each:.1f} |" for each in sizes.get(label, ()))
            + "".join(f" {slow[n][label]:.2f} | {predicted[n][label]:.2f} |" for n in slow),
            flush=True,
        )
    pairs = [
        (slow[n][label], predicted[n][label])
        for n in slow
        for label, tree in trees.items()
        if any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))
    ]
    if pairs:
        sign = sum((a < 1) == (b < 1) or max(abs(a - 1), abs(b - 1)) < 0.05 for a, b in pairs)
        near = sum(0.7 <= b / a <= 1.3 for a, b in pairs)
        print(
            f"\n{name}: faster or slower as predicted in {sign} of {len(pairs)} (also if both are "
            f"within 5 % of 1), within 30 % in {near}",
            flush=True,
        )


def predictions(f, params, inputs, trees):
    """Returns {label: ratio of the time that `compress.advise` predicts to the time in float32}."""
    formats = {}
    for tree in trees.values():
        for leaf in jax.tree.leaves(tree, is_leaf=is_quantized):
            if is_quantized(leaf):
                formats.setdefault(
                    (type(leaf.format), getattr(leaf.format, "activations", None)), leaf.format
                )
    advice = compress.advise(f, params, *inputs, formats=list(formats.values()))
    print(f"\n{advice}\n", flush=True)
    return {label: advice.predict(tree) / advice.before for label, tree in trees.items()}


def is_quantized(leaf):
    return isinstance(leaf, compress.Quantized)


def main(argv):
    del argv
    for name in MODELS.value:
        table(name)


if __name__ == "__main__":
    app.run(main)
