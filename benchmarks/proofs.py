"""The time of `introspect.depends` beside the time of tracing the program.

python -m benchmarks.proofs [--rounds=5]
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from fnet import introspect, models
from fnet import layers as nn
from fnet.jaxpr import equations

ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each program")


def programs():
    """Yields (name, function, arguments, axes, claims)."""
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    both = {"b": ((None, 0), 0), "t": ((None, 1), 1)}
    gpt = models.GPT.preset("gpt2")
    params, _ = jax.eval_shape(gpt.init, jax.random.key(0), tokens)
    claims = {"independent": "b", "causal": "t"}
    yield "GPT-2 124M, scanned", lambda p, x: gpt(p, x), (params, tokens), both, claims
    block = nn.Sequential(
        nn.Residual(nn.LayerNorm(), nn.Attention(12, causal=True)),
        nn.Residual(nn.LayerNorm(), nn.Dense(3072), jax.nn.gelu, nn.Dense(768)),
    )
    unrolled = nn.Sequential(nn.Embed(50_257, 768), *[block] * 12, nn.LayerNorm(), nn.Dense(50_257))
    params, _ = jax.eval_shape(unrolled.init, jax.random.key(0), tokens)
    yield "the same sizes, unrolled", lambda p, x: unrolled(p, x), (params, tokens), both, claims
    images = jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32)
    resnet = models.ResNet.preset("resnet50")
    params, state = jax.eval_shape(resnet.init, jax.random.key(0), images)
    predict = lambda p, x: resnet(p["params"], x, state=p["state"])[0]
    held = {"params": params, "state": state}
    yield "ResNet-50", predict, (held, images), {"b": ((None, 0), 0)}, {"independent": "b"}


def main(_):
    print("| program | equations | tracing s | claim | analysis s | ratio |")
    print("|---|---|---|---|---|---|")
    for name, f, args, axes, claims in programs():
        traced = []
        for _ in range(ROUNDS.value):
            jax.clear_caches()  # JAX would return the program of the round before
            start = time.perf_counter()
            jax.make_jaxpr(f)(*args)
            traced.append(time.perf_counter() - start)
        for kind, axis in claims.items():
            taken = []
            for _ in range(ROUNDS.value):
                report = introspect.depends(f, *args, axes=axes)
                start = time.perf_counter()
                verdict = report.verdict(kind, axis, trials=False)
                taken.append(time.perf_counter() - start)
            assert verdict.status in ("proved", "proved if"), verdict
            trace, analysis = statistics.median(traced), statistics.median(taken)
            count = sum(1 for _ in equations(report.closed.jaxpr))
            row = f"| {name} | {count} | {trace:.2f} | {kind} along {axis}: {verdict.status} "
            print(f"{row}| {analysis:.2f} | {analysis / trace:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
