"""Text generation against transformers' `generate`; a part of verify_pretrained.py."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from verifying import check, needed

from fnet import models
from fnet.models import pretrained
from fnet.models.generation._sampling import candidates, penalized, sampling

PROMPTS = np.random.default_rng(0).integers(3, 24, (4, 6)).astype(np.int32)


def networks(torch, transformers):
    """(network, fnet's model, its parameters), of random weights so large that the most probable
    token varies."""
    for seed in range(3):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=24,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=20,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        network = transformers.LlamaForCausalLM(config).eval()
        model = models.Decoder(24, 16, 2, 4, 2, 20, context=64)
        with tempfile.TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            params, _ = pretrained.load(model, folder)
        yield network, model, params


@check
def generation_against_transformers():
    """Greedy text with penalties, beam search, and the candidates of sampling equal those of
    transformers."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    tokens, texts, beams = torch.tensor(PROMPTS.astype(np.int64)), 0, 0
    for network, model, params in networks(torch, transformers):
        for penalty in (1.0, 1.3, 0.8):
            for stop in ((), (5, 11)):
                more = {"eos_token_id": list(stop)} if stop else {}
                want = network.generate(
                    tokens,
                    max_new_tokens=20,
                    do_sample=False,
                    repetition_penalty=penalty,
                    pad_token_id=0,
                    **more,
                )[:, 6:].numpy()
                out = models.generate(
                    model,
                    params,
                    PROMPTS,
                    max_tokens=20,
                    temperature=0,
                    stop=stop,
                    repetition_penalty=penalty,
                )
                for row, length, known in zip(np.asarray(out.tokens), out.lengths, want):
                    assert (row[:length] == known[:length]).all(), (row, known)
                    texts += 1
                for width, power in ((2, 1.0), (4, 0.0), (5, 2.0)):
                    if penalty != 1.0:
                        continue
                    want = network.generate(
                        tokens,
                        max_new_tokens=12,
                        do_sample=False,
                        num_beams=width,
                        num_return_sequences=width,
                        length_penalty=power,
                        pad_token_id=0,
                        output_scores=True,
                        return_dict_in_generate=True,
                        **more,
                    )
                    best = models.beam_search(
                        model,
                        params,
                        PROMPTS,
                        beams=width,
                        max_tokens=12,
                        stop=stop,
                        length_penalty=power,
                    )
                    scores = want.sequences_scores.numpy().reshape(4, width)
                    np.testing.assert_allclose(best.scores, scores, rtol=1e-4)
                    known = want.sequences[:, 6:].numpy().reshape(4, width, -1)
                    for i in range(4):
                        length = int(best.lengths[i, 0])
                        assert (
                            np.asarray(best.tokens[i, 0, :length]) == known[i, 0, :length]
                        ).all()
                        beams += width
    yield f"{texts} greedy texts of 20 tokens with and without repetition penalty and stop tokens: equal"
    yield f"{beams} texts of beam searches with 2, 4 and 5 beams: scores within 1e-4, the best texts equal"
    yield from _warpers(torch, transformers)


def _warpers(torch, transformers):
    from transformers.generation import logits_process as hf

    rng, count = np.random.default_rng(1), 0
    for _ in range(50):
        logits = (rng.normal(size=(4, 30)) * 4).astype(np.float32)
        values = dict(
            temperature=rng.uniform(0.3, 2),
            top_k=int(rng.integers(1, 30)),
            top_p=rng.uniform(0.1, 0.99),
            min_p=rng.uniform(0.001, 0.5),
            repetition_penalty=rng.uniform(0.5, 2),
        )
        text = rng.integers(0, 30, (4, 7))
        steps = [
            hf.RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]),
            hf.TemperatureLogitsWarper(values["temperature"]),
            hf.TopKLogitsWarper(values["top_k"]),
            hf.TopPLogitsWarper(values["top_p"]),
            hf.MinPLogitsWarper(values["min_p"]),
        ]
        want = torch.tensor(logits)
        for step in steps:
            want = step(torch.tensor(text), want)
        options = sampling("generate", **values)
        seen = np.stack([np.isin(np.arange(30), row) for row in text])
        got = candidates(
            penalized(jnp.asarray(logits), options, seen, jnp.zeros((4, 30), jnp.int32)), options
        )
        np.testing.assert_allclose(jax.device_get(got), want.numpy(), rtol=1e-5)
        count += 1
    yield f"{count} random combinations of temperature, top_k, top_p, min_p and repetition penalty: equal candidates"
