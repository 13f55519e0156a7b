"""Plans the training step of a Flax GPT for TPUs that need not be attached.

    python experiments/plan_flax.py                                     # estimates, in half a minute
    python experiments/plan_flax.py --compile                           # asks the TPU's compiler: pip install libtpu
    python experiments/plan_flax.py --devices=h100:1x8 --batch_size=64

The step is Flax and Optax alone. fnet makes it mixed precision, shards it and tunes it.
"""

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from flax import linen

from fnet import parallel
from fnet import transforms as ft

DEVICES = flags.DEFINE_string("devices", "v5e:4x4", "what to plan for; need not be attached")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "texts in a batch")
LENGTH = flags.DEFINE_integer("length", 1024, "tokens in a text")
COMPILE = flags.DEFINE_bool("compile", False, "whether to compile the strategies for the devices")


class GPT(linen.Module):
    """A decoder of 405 million parameters."""

    vocab: int = 50_304
    width: int = 1024
    depth: int = 24
    heads: int = 16

    @linen.compact
    def __call__(self, tokens):  # [batch, time]
        x = linen.Embed(self.vocab, self.width)(tokens)  # [batch, time, width]
        mask = linen.make_causal_mask(tokens)
        for _ in range(self.depth):
            h = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(self.heads)(h, h, mask=mask)
            h = linen.Dense(4 * self.width)(linen.LayerNorm()(x))
            x = x + linen.Dense(self.width)(jax.nn.gelu(h))
        return linen.Dense(self.vocab)(linen.LayerNorm()(x))  # [batch, time, vocab]


def training(model, length):
    """The functions `init` and `step` of one device."""
    tx = optax.adamw(3e-4)

    def init(key):
        params = model.init(key, jnp.zeros((1, length), jnp.int32))
        return params, tx.init(params)

    def step(params, opt_state, batch):  # batch: [rows, length + 1]
        def loss(params):
            logits = model.apply(params, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return init, step


def main(_):
    init, step = training(GPT(), LENGTH.value)
    batch = jax.ShapeDtypeStruct((BATCH_SIZE.value, LENGTH.value + 1), jnp.int32)

    step = ft.autocast(step, "bfloat16")
    plan = parallel.plan(step, init, batch, devices=DEVICES.value, compile=COMPILE.value)
    print(plan)
    if plan.attached:
        step = ft.tune(plan.jit(step))
        *_, loss = step(*plan.init(jax.random.key(0)), jnp.zeros(batch.shape, batch.dtype))
        print(f"loss of a step: {loss:.4f}")


if __name__ == "__main__":
    app.run(main)
