"""Plans GPTs for slices of TPUs that are not attached, and compares the estimates with the
compiler's values.

    python -m pip install libtpu        # 200 MB; no TPU is needed
    python -m benchmarks.pods [--only=124M]

Each plan has its own process. The exit code is 1 if the predicted bytes of state and batch differ
from those of the compiled program, or if the estimated peak of the selected strategy differs from
the compiled peak by more than 25 %.
"""

import json
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

# {name: (configuration of the GPT, number of texts of 1,024 tokens in a batch, chips)}
CASES = {
    "124M": (dict(vocab_size=50257, width=768, depth=12, heads=12), 512, "v5e:16x16"),
    "872M": (dict(vocab_size=32000, width=1536, depth=29, heads=12), 32, "v5e:2x2"),
}
ONLY = flags.DEFINE_string("only", None, f"one of {', '.join(CASES)}")
CHILD = flags.DEFINE_bool(
    "child", False, "run in this process and print the figures as JSON in the last line"
)


def planned(config, rows, devices, **options):
    """Returns the number of parameters, and the plan of a training step in bfloat16 with AdamW."""
    model, tx = models.GPT(**config), optax.adamw(6e-4)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    state = jax.eval_shape(init, jax.random.key(0))
    count = sum(x.size for x in jax.tree.leaves(state.params))
    return count, parallel.plan(
        step, init, jax.ShapeDtypeStruct((rows, 1025), jnp.int32), devices=devices, **options
    )


def figures(name):
    began = time.perf_counter()
    count, plan = planned(*CASES[name])
    print(f"{count:,} parameters")
    print(plan)
    seconds = time.perf_counter() - began
    compiled = [
        (
            each.strategy,
            each.arguments,
            each.compiled.arguments,
            each.estimate.peak,
            each.compiled.peak,
        )
        for each in plan.candidates
        if each.compiled and each.compiled.peak
    ]
    return {
        "name": name,
        "seconds": seconds,
        "chosen": plan.strategy,
        "compiled": compiled,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main(argv):
    del argv
    if CHILD.value:
        print(json.dumps(figures(ONLY.value)))
        return
    wrong = False
    for name in [ONLY.value] if ONLY.value else CASES:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.pods", f"--only={name}", "--child"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        text, last = child.stdout.rstrip().rsplit("\n", 1)
        found = json.loads(last)
        print(text)
        print(
            f"\n{name} on {CASES[name][2]}: {found['chosen']}, planned and compiled in "
            f"{found['seconds']:.0f} s, {found['gib']:.2f} GiB of memory"
        )
        for strategy, arguments, said, peak, needs in found["compiled"]:
            exact = "exactly" if arguments == said else "not"
            print(
                f"  {strategy}: {arguments / 2**20:,.1f} MiB of state and batch, {exact} as "
                f"predicted; peak predicted {peak / 2**20:,.0f} MiB, {peak / needs:.2f} of the "
                f"compiler's {needs / 2**20:,.0f}"
            )
            wrong |= arguments != said or (
                strategy == found["chosen"] and not 0.75 <= peak / needs <= 1.25
            )
        print(flush=True)
    sys.exit(int(wrong))


if __name__ == "__main__":
    app.run(main)
