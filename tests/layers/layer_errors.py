"""Errors of containers and of the layers themselves: name: (attempt, type, text)."""

import jax.numpy as jnp
from model_errors import IMAGES, KEY, NORM_PARAMS, NORM_STATE, ROWS, TIMES, init

from fnet import layers as nn

CAUSAL = nn.Attention(2, causal=True)
MASK = (
    "Attention at the root: mask must be boolean (True: attend) with shape [t, s], [b, t, s] or "
    "[b, h, t, s] of (2, 2, 4, 4); got "
)

LAYER_ERRORS = {
    # layers of layers
    "child a number": (
        lambda: nn.Sequential(nn.Dense(3), 3),
        TypeError,
        "Sequential: child '1' must be a layer or a function; got an int",
    ),
    "initializer before the shape": (
        init(nn.layer(lambda scope, x: scope.param("scale", jnp.ones, ()))(), ROWS),
        TypeError,
        "scope.param('scale'): expected a shape, then an initializer; got a function, then a tuple",
    ),
    "shortcut a number": (
        lambda: nn.Residual(nn.Dense(3), shortcut=3),
        TypeError,
        "Residual: shortcut must be a layer or a function; got an int",
    ),
    "residual of two shapes": (
        init(nn.Residual(nn.Dense(5)), ROWS),
        ValueError,
        "Residual at the root: the output (2, 5) and the input (2, 4) must have one shape; pass a "
        "shortcut that maps the input to the output's shape",
    ),
    "parallel of nothing": (
        lambda: nn.Parallel(),
        ValueError,
        "Parallel: expected at least one layer, got none",
    ),
    "stack of two shapes": (
        init(nn.Stack(nn.Dense(5), 2), ROWS),
        ValueError,
        "Stack at the root: a block's output must have the shape and dtype of its first input; "
        "Dense maps float32[2, 4] to float32[2, 5]",
    ),
    "stack of fewer than none": (
        init(nn.Stack(nn.Dense(4), -1), ROWS),
        ValueError,
        "Stack at the root: the number of copies must be >= 0; got -1",
    ),
    "stack of a function": (
        init(nn.Stack(abs, 2), ROWS),
        TypeError,
        "Stack at the root: expected a layer, got a builtin_function_or_method; wrap a function in "
        "nn.Sequential",
    ),
    # convolution, pooling, embedding, norms
    "conv on rows": (
        init(nn.Conv(4, 3), ROWS),
        ValueError,
        "Conv at the root: expected [batch, *space, channels]; got shape (2, 4)",
    ),
    "conv without batch": (
        init(nn.Conv(4, (3, 3)), IMAGES[0]),
        ValueError,
        "Conv at the root: expected 4 axes for window (3, 3); got shape (8, 8, 3); add a batch "
        "axis: x[None]",
    ),
    "conv strides": (
        init(nn.Conv(4, 3, (1, 2, 3)), IMAGES),
        ValueError,
        "Conv at the root: expected 2 numbers for strides, one for each dimension; got (1, 2, 3)",
    ),
    "conv padding": (
        init(nn.Conv(4, 3, padding="same"), IMAGES),
        ValueError,
        "Conv at the root: padding must be 'SAME', 'VALID', 'CAUSAL' (one dimension) or explicit; "
        "got 'same' for 2 dimensions",
    ),
    "conv explicit padding": (
        init(nn.Conv(4, 3, padding=[1]), IMAGES),
        ValueError,
        "Conv at the root: explicit padding must be a number or a (before, after) pair for each of "
        "2 dimensions; got (1,)",
    ),
    "conv groups": (
        init(nn.Conv(4, 3, groups=2), IMAGES),
        ValueError,
        "Conv at the root: the input's 3 channels and features=4 must be multiples of groups=2",
    ),
    "conv window too large": (
        init(nn.Conv(4, 9, padding="VALID"), IMAGES),
        ValueError,
        "Conv at the root: the window (9, 9) is larger than the input (8, 8)",
    ),
    "transposed conv causal": (
        init(nn.ConvTranspose(4, 3, padding="CAUSAL"), TIMES),
        ValueError,
        "ConvTranspose at the root: padding must be 'SAME', 'VALID' or explicit; got 'CAUSAL'",
    ),
    "transposed conv groups": (
        init(nn.ConvTranspose(4, 3, groups=2), IMAGES),
        ValueError,
        "ConvTranspose at the root: the input's 3 channels and features=4 must be multiples of "
        "groups=2",
    ),
    "pool window too large": (
        lambda: nn.MaxPool(9)({}, IMAGES),
        ValueError,
        "MaxPool at the root: the window (9, 9) is larger than the input (8, 8)",
    ),
    "pool padding too large": (
        lambda: nn.MaxPool(2, padding=2)({}, IMAGES),
        ValueError,
        "MaxPool at the root: padding [(2, 2), (2, 2)] must be smaller than the window (2, 2)",
    ),
    "global pool on rows": (
        lambda: nn.GlobalAvgPool()({}, ROWS),
        ValueError,
        "GlobalAvgPool at the root: expected [batch, *space, channels]; got shape (2, 4)",
    ),
    "flatten a scalar": (
        lambda: nn.Flatten()({}, 1.0),
        ValueError,
        "Flatten at the root: expected [batch, ...]; got a scalar",
    ),
    "embed floats": (
        init(nn.Embed(3, 4), ROWS),
        TypeError,
        "Embed at the root: expected integer tokens; got float32[2, 4]",
    ),
    "attend to another length": (
        lambda: nn.Embed(3, 4).attend({"embedding": jnp.ones((3, 4))}, jnp.ones((2, 5))),
        ValueError,
        "Embed.attend at the root: expected [..., 4]; got shape (2, 5)",
    ),
    "dropout rate": (
        lambda: nn.Dropout(1.5)({}, ROWS),
        ValueError,
        "Dropout at the root: rate must be between 0 and 1; got 1.5",
    ),
    "group norm groups": (
        init(nn.GroupNorm(3), ROWS),
        ValueError,
        "GroupNorm at the root: expected [batch, ..., channels] with channels a multiple of "
        "groups=3; got shape (2, 4)",
    ),
    "batch norm without batch": (
        init(nn.BatchNorm(), ROWS[0]),
        ValueError,
        "BatchNorm at the root: expected [batch, ..., channels]; got shape (4,)",
    ),
    "batch norm weight": (
        lambda: nn.BatchNorm()(
            NORM_PARAMS["1"], ROWS, jnp.ones(3), state=NORM_STATE["1"], train=True
        ),
        ValueError,
        "BatchNorm at the root: weight must have the input's shape without channels (2,), or its "
        "first axes; got (3,)",
    ),
    # attention
    "attention on rows": (
        init(nn.Attention(2), ROWS),
        ValueError,
        "Attention at the root: expected [batch, time, features]; got (2, 4)",
    ),
    "attention to another batch": (
        init(nn.Attention(2), TIMES, jnp.ones((3, 4, 4))),
        ValueError,
        "Attention at the root: expected [batch, time, features]; got (2, 4, 4) with context (3, "
        "4, 4)",
    ),
    "attention heads": (
        init(nn.Attention(3), TIMES),
        ValueError,
        "Attention at the root: the 4 features must be a multiple of heads=3; or set head_dim",
    ),
    "attention key heads": (
        init(nn.Attention(4, kv_heads=3), TIMES),
        ValueError,
        "Attention at the root: heads=4 must be a multiple of kv_heads=3",
    ),
    "attention window": (
        init(nn.Attention(2, window=0), TIMES),
        ValueError,
        "Attention at the root: window must be >= 1; got 0",
    ),
    "attention rotary context": (
        init(nn.Attention(2, rotary=nn.Rotary()), TIMES, TIMES),
        ValueError,
        "Attention at the root: rotary= needs self-attention; call it without context=",
    ),
    "attention rotary odd": (
        init(nn.Attention(4, rotary=nn.Rotary()), TIMES),
        ValueError,
        "Attention at the root: head_dim must be even for rotary=; got 1",
    ),
    "rotary odd": (
        lambda: nn.Rotary()(jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2), jnp.int32)),
        ValueError,
        "Rotary: head_dim must be even; got 3",
    ),
    "attention positions": (
        init(nn.Attention(2, rotary=nn.Rotary()), TIMES, positions=jnp.ones(3, jnp.int32)),
        ValueError,
        "Attention at the root: positions must be [batch, time] (2, 4) or [time]; got (3,)",
    ),
    "attention lengths": (
        init(nn.Attention(2), TIMES, lengths=jnp.ones(2)),
        ValueError,
        "Attention at the root: lengths must be integers [batch] (2,); got float32[2]",
    ),
    "attention mask shape": (
        init(nn.Attention(2), TIMES, mask=jnp.ones((4, 5), bool)),
        ValueError,
        MASK + "bool[4, 5]",
    ),
    "attention mask dtype": (
        init(nn.Attention(2), TIMES, mask=jnp.ones((4, 4))),
        ValueError,
        MASK + "float32[4, 4]",
    ),
    "attention mask scalar": (
        init(nn.Attention(2), TIMES, mask=jnp.array(True)),
        ValueError,
        MASK + "bool[]",
    ),
    "attention cache": (
        lambda: CAUSAL(CAUSAL.init(KEY, TIMES)[0], jnp.ones((3, 1, 4)), state=CAUSAL.cache(TIMES)),
        ValueError,
        "Attention at the root: keys (3, 1, 2, 2) do not match the cache (2, 2, 4, 2); create it "
        "with model.cache for inputs of this batch size",
    ),
}
