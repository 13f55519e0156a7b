"""Time of log-likelihoods: `models.score`, a plain loop in JAX, and transformers.

    python -m benchmarks.scoring               # in .venv-verify, which has PyTorch and transformers
    python -m benchmarks.scoring --memory      # bytes of the compiled programs, nothing runs

64 texts of 16 to 512 random tokens; the shape of SmolLM-135M with 4 of its 30 layers and random
float32 weights. Each peer has its own process and scores all texts once before the time counts.
"padded" is a jitted `jax.nn.log_softmax(model(params, tokens))` on 4 texts at once, padded to 512
tokens. "transformers" takes 8 texts at once, the longest first, padded to the longest of them, as
the hf model of lm-evaluation-harness does.
"""

from __future__ import annotations

import functools
import sys
import time

from benchmarks._harness import main

LAYERS, LONGEST, COUNT = 4, 512, 64


@functools.cache
def texts():
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(0, 49152, n).tolist() for n in rng.integers(16, LONGEST + 1, COUNT)]


def timed(run):
    """Returns a function that returns the seconds of `run()`, without those of its first call."""

    @functools.cache
    def prepared():
        work = run()
        work()
        return work

    def seconds():
        work = prepared()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return seconds


@functools.cache
def model():
    import jax
    import jax.numpy as jnp

    from fnet import models

    model = models.Decoder.preset("smollm-135m", depth=LAYERS)
    params, _ = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return model, params


@timed
def score():
    from fnet import models

    return lambda: models.score(*model(), texts())


def plain(params, tokens):
    import jax
    import jax.numpy as jnp

    log_probs = jax.nn.log_softmax(model()[0](params, tokens))  # [batch, time, vocab_size]
    labels = jnp.roll(tokens, -1, 1)[..., None]
    return jnp.take_along_axis(log_probs, labels, 2)[..., 0], log_probs.argmax(-1)


@timed
def padded():
    import jax
    import numpy as np

    from fnet import models

    program = jax.jit(plain)
    tokens, _ = models.padded(texts())

    def work():
        for start in range(0, COUNT, 4):
            for array in program(model()[1], tokens[start : start + 4]):
                np.asarray(array)

    return work


@timed
def transformers():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            num_hidden_layers=LAYERS,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    ).eval()
    order = sorted(texts(), key=len, reverse=True)

    def work():
        for start in range(0, COUNT, 8):
            rows = order[start : start + 8]
            tokens = torch.zeros(len(rows), len(rows[0]), dtype=torch.long)
            for row, text in zip(tokens, rows):
                row[: len(text)] = torch.tensor(text)
            with torch.inference_mode():
                log_probs = torch.log_softmax(network(tokens[:, :-1]).logits, -1)
                log_probs.argmax(-1)
                log_probs.gather(2, tokens[:, 1:, None])

    return work


PEERS = {"score": score, "padded": padded, "transformers": transformers}


def memory():
    """Prints the bytes that each compiled program needs beside its arguments."""
    import jax
    import numpy as np

    from fnet.models.evaluation import _program
    from fnet.models.evaluation._batches import Item, batches

    items = [Item(np.array(text[:-1], np.int32), np.array(text[1:], np.int32)) for text in texts()]
    batch, _ = next(batches(items, packs=True, context=2048, batch_tokens=2048))
    found = {
        "score": _program.scored.lower(*model(), batch),
        "padded": jax.jit(plain).lower(model()[1], batch.tokens),
    }
    print(f"tokens {list(batch.tokens.shape)}, logits {batch.tokens.size * 49152 * 4 / 1e6:.0f} MB")
    for name, lowered in found.items():
        size = lowered.compile().memory_analysis().temp_size_in_bytes
        print(f"{name:8} {size / 1e6:7.0f} MB")


if __name__ == "__main__":
    if "--memory" in sys.argv:
        memory()
    else:
        count = sum(map(len, texts()))
        main("benchmarks.scoring", PEERS, unit=f"s for {count} tokens", scale=1, base="score")
