"""Writes the golden bundle. It is not written again: later versions have to read the committed
file.

Run it with:

    python tests/export/make_golden.py tests/export/golden_jax_0.10.2.fnet
"""

import sys

import jax
import jax.numpy as jnp

from fnet import export, models
from fnet import layers as nn

model = models.CNN(10, (4, 6), 1)
params, state = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))


def attend(params, x, lengths):
    """Attention, a scan and an embedding, the operations that a convolutional network lacks."""
    tokens = jnp.argmax(x, -1)  # [batch, time]
    table = params["head"]["kernel"].T  # [10, 6]
    y = table[tokens % 10][:, :, None]  # [batch, time, 1, 6]
    y = nn.dot_product_attention(y, y, y, causal=True, lengths=lengths)[:, :, 0]
    return {"sums": jax.lax.scan(lambda c, a: (c + a, c), y[:, 0], y.swapaxes(0, 1))[1]}


program = export.program(model, params, state, x=export.spec("b, 8, 8, 1"))
program = program.entry(
    "attend", attend, x=export.spec("b, t, 7", where="t <= 32"), lengths=export.spec("b", "int32")
)
program.save(sys.argv[1], labels=range(10))
