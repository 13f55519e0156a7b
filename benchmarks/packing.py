"""Training a GPT on the speeches of a play: one in a row, packed by `tr.Packed` with segments or with
`ft.pack`, and packed by Grain.

    python -m benchmarks.packing [FILE]            # a text whose speeches are separated by empty lines
    python -m benchmarks.packing losses [FILE]     # trains with each, and prints the losses of held-out speeches

The names of peers, such as "ft.pack", choose these alone.

The peers have the same model, and begin with the same parameters:

- one in a row: 16 texts, each in a row of its own, padded to the full length, with `lengths=`. For the losses, the
  texts of a packed batch, so that each step is the same as that of `packed` up to rounding;
- packed: `tr.Packed` with `segments=`, 4 rows;
- ft.pack: the same rows, and a step that is written for one text in each row, with `lengths=`;
- Grain: `grain.experimental.BestFitPackIterDataset`, 4 rows, with a mask and positions that the model's author writes.

A time is the processor time of a step, data included, for 1,000 predicted tokens. Speeches of more than 1,024
characters are cut. Default FILE: experiments/data/tempest.txt.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness
from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft

LENGTH, ROWS, BINS, STEPS = 1024, 4, 64, 20
TEXT = "FNET_PACKING_TEXT"
TEMPEST = Path(__file__).parent.parent / "experiments/data/tempest.txt"


@functools.cache
def speeches() -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Returns (training texts, held-out texts, size of the vocabulary), with a token for each
    character. 0 is the padding."""
    text = Path(os.environ.get(TEXT, TEMPEST)).read_text("utf-8", "replace")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters, 1)}
    texts = [part.strip() for part in text.split("\n\n") if part.strip()]
    tokens = [np.array([number[c] for c in f"{part}\n"], np.int32) for part in texts]
    tokens = [part[:LENGTH] for part in tokens]
    return [x for i, x in enumerate(tokens) if i % 10], tokens[::10], len(characters) + 1


def gpt() -> models.GPT:
    size = dict(width=128, depth=2, heads=4, context=LENGTH)
    return models.GPT(vocab_size=speeches()[2], **size, stacked=False)


@nn.layer
def handwritten(scope, tokens, labels, segments, positions, *, model):
    """The losses of `model`, with a mask and positions instead of `segments=`."""
    embed, table = nn.Embed(model.vocab_size, model.width), nn.Embed(model.context, model.width)
    mask = (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
    own = scope["embed"]
    x = embed(own, tokens) + table(scope["positions"], positions)
    norm, attention = nn.LayerNorm(epsilon=model.epsilon), nn.Attention(model.heads, causal=True)
    blocks = scope["blocks"]
    for i in range(model.depth):
        at = blocks[str(i)]
        x = x + attention(at["attention"], norm(at["norm1"], x), mask=mask)
        y = nn.Dense(4 * model.width)(at["fc"], norm(at["norm2"], x))
        x = x + nn.Dense(model.width)(at["proj"], jax.nn.gelu(y))
    return embed.cross_entropy(own, norm(scope["norm"], x), labels)


def packed():
    return tr.Packed(speeches()[0], length=LENGTH, batch_size=ROWS)


def in_rows(batch):
    """The texts of a packed batch, one in a row. The number of rows is a multiple of 16, so that
    few programs are compiled."""
    rows = batch["segments"].max(1).sum()
    apart = np.zeros((2, -(-rows // 16) * 16, LENGTH), np.int32)
    at = 0
    for tokens, segments in zip(batch["tokens"], batch["segments"]):
        for number in range(1, segments.max() + 1):
            text = tokens[segments == number]
            apart[:, at, : len(text)] = text, np.ones(len(text))
            at += 1
    return _padded(*apart)


def padded_batches():
    texts = speeches()[0]
    rows = tr.Batches(np.arange(len(texts)), 16)

    def batch(step):
        parts = [texts[i] for i in rows(step)]
        tokens = np.stack([np.pad(part, (0, LENGTH - len(part))) for part in parts])
        return _padded(tokens, (tokens != 0).astype(np.int32))

    return batch


def same_texts_padded():
    """Batches with the texts of those of `packed`."""
    source = packed()
    return lambda i: in_rows(source(i))


def _padded(tokens, segments):
    lengths = segments.sum(1, dtype=np.int32)
    return {"tokens": tokens, "segments": segments, "lengths": lengths}


def grain_batches():
    import grain
    from grain import experimental

    texts = [{"tokens": text} for text in speeches()[0]]
    source = grain.MapDataset.source(texts).shuffle(seed=0).repeat().to_iter_dataset()
    rows = experimental.BestFitPackIterDataset(
        source, length_struct={"tokens": LENGTH}, num_packing_bins=BINS
    )
    batches = iter(rows.batch(ROWS))
    names = {"tokens": "tokens", "segments": "tokens_segment_ids", "positions": "tokens_positions"}

    def batch(_):
        found = next(batches)
        return {name: np.asarray(found[theirs], np.int32) for name, theirs in names.items()}

    return batch


def padded_losses(model, params, labels, batch):
    return model.cross_entropy(params, batch["tokens"], labels, batch["lengths"])


def packed_losses(model, params, labels, batch):
    return model.cross_entropy(params, batch["tokens"], labels, segments=batch["segments"])


def handwritten_losses(model, params, labels, batch):
    more = batch["segments"], batch["positions"]
    return handwritten(model=model)(params, batch["tokens"], labels, *more)


class Training:
    """Trains the model from the same parameters as its peers, step by step."""

    def __init__(self, batches, losses):
        self.model, self.number = gpt(), 0
        self.batches = batches()
        params, _ = self.model.init(jax.random.key(0), self.model.example())
        tx = optax.adamw(1e-3)
        self.state = params, tx.init(params)

        def updated(loss, state):
            params, momenta = state
            (_, count), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            updates, momenta = tx.update(gradients, momenta, params)
            return (optax.apply_updates(params, updates), momenta), count

        @jax.jit
        def step(state, batch):
            def loss(params):
                labels, weights = nn.next_tokens(batch["tokens"], batch["segments"])
                each = losses(self.model, params, labels, batch)
                return (each * weights).sum() / weights.sum(), weights.sum()

            return updated(loss, state)

        def one_in_a_row(state, tokens, lengths):
            def loss(params):
                labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
                each = self.model.cross_entropy(params, tokens, labels, lengths)
                weights = (jnp.arange(tokens.shape[1]) < lengths[:, None] - 1).astype(each.dtype)
                return (each * weights).sum() / weights.sum(), weights.sum()

            return updated(loss, state)

        rewritten = jax.jit(ft.pack(one_in_a_row, axes=(None, "n, t", "segments")))
        by_pack = lambda state, batch: rewritten(state, batch["tokens"], batch["segments"])
        self.step = by_pack if losses is None else step

    def one(self) -> int:
        """Trains one step, and returns the number of predicted tokens."""
        self.state, count = self.step(self.state, self.batches(self.number))
        self.number += 1
        return int(count)

    def held_out(self) -> float:
        """Returns the mean loss of the held-out tokens."""
        source = tr.Packed(speeches()[1], length=LENGTH, batch_size=1, shuffle=False)
        total, count = 0.0, 0.0

        @jax.jit
        def sums(params, batch):
            labels, weights = nn.next_tokens(batch["tokens"], batch["segments"])
            each = packed_losses(self.model, params, labels, batch)
            return (each * weights).sum(), weights.sum()

        for i in range(source.rows):
            loss, predicted = sums(self.state[0], source(i))
            total, count = total + float(loss), count + float(predicted)
        return total / count


KINDS = {
    "one in a row": (padded_batches, padded_losses),
    "Grain": (grain_batches, handwritten_losses),
    "ft.pack": (packed, None),
    "packed": (packed, packed_losses),
}


training = functools.cache(lambda name: Training(*KINDS[name]))


def seconds(name: str) -> float:
    """Returns the processor time of one step for 1,000 predicted tokens."""
    run = training(name)
    start = time.process_time()
    batch = run.batches(run.number)
    prepared = time.process_time() - start
    jax.block_until_ready(run.step(run.state, batch))  # compiles
    start = time.process_time()
    run.state, count = jax.block_until_ready(run.step(run.state, batch))
    run.number += 1
    return (prepared + time.process_time() - start) / int(count) * 1000


def padding(name: str) -> float:
    """Returns the share of padding in the batches of an epoch."""
    batches = KINDS[name][0]()
    steps = packed().steps(1)
    return float(np.mean([(batches(i)["segments"] == 0).mean() for i in range(min(steps, STEPS))]))


def losses() -> None:
    print(_harness.header("python -m benchmarks.packing losses", 1, ("grain",)))
    print("| peer | steps | predicted tokens | loss of held-out tokens | padding |")
    print("|---|---|---|---|---|")
    for name in [name for name in KINDS if name in sys.argv] or KINDS:
        batches, loss = KINDS[name]
        run = Training(same_texts_padded if batches is padded_batches else batches, loss)
        count = sum(run.one() for _ in range(STEPS))
        print(
            f"| {name} | {STEPS} | {count:,} | {run.held_out():.4f} | {padding(name):.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    if files := [word for word in sys.argv[1:] if word not in (*KINDS, "losses")]:
        os.environ[TEXT] = str(Path(files[0]).resolve())
    if "losses" in sys.argv:
        losses()
    else:
        peers = {name: functools.partial(seconds, name) for name in KINDS}
        _harness.main("benchmarks.packing", peers, unit="ms", scale=1e3, rounds=7, base="packed")
