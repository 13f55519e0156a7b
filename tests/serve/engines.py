"""Tiny models for the tests of the engine, and the text of a prompt that is generated alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fnet import compress, models, serve

VOCAB, CONTEXT, LONGEST = 24, 64, 40


def decoder(**options):
    return models.Decoder(VOCAB, 16, 2, 4, 2, 20, context=CONTEXT, **options)


MODELS = {
    "gpt": models.GPT(VOCAB, 16, 2, 2, context=CONTEXT),
    "grouped queries": decoder(),
    "sliding window": decoder(window=(6, None)),
    "lstm": models.LSTMLanguageModel(VOCAB, 16),
    "dropless experts": decoder(experts=4, experts_per_token=2),
    "angles by length": decoder(rope_scaling=models.DynamicScaling(2.0, 16)),
}


def start(name):
    """A model, and parameters whose texts are not all alike."""
    model = MODELS[name]
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    return model, jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)


def engine(model, params, **options):
    return serve.Engine(model, params, **{"slots": 2, "chunk": 16, **options})


def adapted(params, rules, seed):
    """Parameters with a LoRA adapter that changes the texts."""

    def trained(leaf):
        if not isinstance(leaf, compress.LowRank):
            return leaf
        return dataclasses.replace(
            leaf, b=0.5 * jax.random.normal(jax.random.key(seed), leaf.b.shape)
        )

    tree = compress.lora(jax.random.key(seed), params, rules)
    return jax.tree.map(trained, tree, is_leaf=lambda x: isinstance(x, compress.ImplicitArray))


def prompts(*lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, length).tolist() for length in lengths]


def alone(model, params, prompt, count, *, seed=None, **options):
    """The text of `models.generate` for one prompt. All prompts are padded to one length, so that
    one program serves all."""
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(prompt)] = prompt
    key = None if seed is None else jax.random.key(seed)
    if seed is None:
        options["temperature"] = 0
    out = models.generate(
        model, params, row, key, max_tokens=count, lengths=jnp.asarray([len(prompt)]), **options
    )
    return np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()
