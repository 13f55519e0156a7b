"""Published weights of the text models against published answers; a part of verify_pretrained.py."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file
from verifying import Skip, check, needed, weights

from fnet import models
from fnet import training as tr
from fnet.models import pretrained

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1] / "experiments"))
import llama2c  # noqa: E402
from numpy_llama import Decoder  # noqa: E402


def first(*names):
    """Where the weights lie, by the first of these names that is on this disk."""
    for name in names[:-1]:
        try:
            return weights(name)
        except Skip:
            pass
    return weights(names[-1])


def stories():
    """The folder, the model, its parameters, the tokenizer, and model.bin's bytes."""
    path = weights("stories15m")
    model, params = llama2c.load(path)
    return path, model, params, (path / "model.bin").read_bytes()


@check
def minilm_against_transformers():
    """MiniLM's tokens, hidden states and sentence embeddings against tokenizers' and transformers'
    own."""
    path = first("minilm-l6", "minilm")
    model = pretrained.model("minilm-l6", path)
    params, _ = pretrained.load(model, path)
    words = models.read_tokenizer(path / "vocab.txt")
    encode = jax.jit(model)
    with np.load(HERE / "published_minilm.npz") as held:
        for shape in sorted({key.split("/")[0] for key in held}):
            tokens, lengths, hidden, embeddings, sentences = (
                held[f"{shape}/{name}"]
                for name in ("tokens", "lengths", "hidden", "embeddings", "sentences")
            )
            own, own_lengths = models.padded(
                [words.encode(str(sentence)) for sentence in sentences]
            )
            assert np.array_equal(own_lengths, lengths) and np.array_equal(
                own, tokens[:, : own.shape[1]]
            ), "tokens"
            got = encode(params, tokens, lengths).hidden
            near = models.sentence_embedding(got, lengths)
            real = np.arange(tokens.shape[1])[None] < lengths[:, None]
            apart = np.abs(np.asarray(got)[real] - hidden).max() / np.abs(hidden).max()
            embedded = np.abs(near - embeddings).max()
            yield (
                f"{shape.replace('x', ' sentences of ')}: the same tokens, hidden states within "
                f"{apart:.1e} of the largest, sentence embeddings within {embedded:.1e}"
            )
            assert apart < 1e-5 and embedded < 1e-6


@check
def stories15m_greedy_text():
    """200 tokens against a decoder in NumPy that reads model.bin by itself."""
    path, model, params, raw = stories()
    out = models.generate(model, params, [[1]], max_tokens=200, temperature=0)
    expected = Decoder(raw, np.float32).greedy([1], 200)
    same = sum(a == b for a, b in zip(out.tokens[0].tolist(), expected))
    yield f"{same} of 200 tokens are the same"
    yield repr(models.read_tokenizer(path / "tokenizer.bin").decode([1, *expected])[:100] + "...")
    assert same == 200


@check
def stories15m_cache():
    """Logits token by token through the cache against those of the full pass, for prompts of
    unequal length."""
    _, model, params, raw = stories()
    story = np.array([1, *Decoder(raw, np.float32).greedy([1], 100)], np.int32)
    text, lengths = (
        np.stack([story[:64], story[20:84], story[37:101]]),
        np.array([24, 3, 11], np.int32),
    )
    full = jax.jit(model)(params, text)
    step = jax.jit(lambda tokens, lengths, cache: model(params, tokens, lengths, state=cache))
    logits, cache = step(
        text[:, :24], lengths, model.cache(jax.ShapeDtypeStruct((3, 256), jnp.int32))
    )
    rows = np.arange(3)
    worst = np.abs(logits[rows, lengths - 1] - full[rows, lengths - 1]).max()
    for at in range(40):
        logits, cache = step(text[rows, lengths + at][:, None], np.ones(3, np.int32), cache)
        worst = max(worst, np.abs(logits[:, 0] - full[rows, lengths + at]).max())
    worst /= np.abs(full).max()
    yield f"41 logits of each of 3 rows within {worst:.1e} of the largest"
    assert worst < 1e-5


@check
def stories15m_speed():
    """Greedy tokens a second, beside llama2.c's own (its run, by $LLAMA2C), in turns."""
    path, model, params, _ = stories()
    model, params = models.unstack(model, params)
    ours = lambda: jax.block_until_ready(
        models.generate(model, params, [[1]], max_tokens=200, temperature=0)
    )
    ours()
    run, times, theirs = os.environ.get("LLAMA2C"), [], []
    for _ in range(5):
        began = time.perf_counter()
        ours()
        times.append(200 / (time.perf_counter() - began))
        if run:
            done = subprocess.run(
                [run, path / "model.bin", "-z", path / "tokenizer.bin", "-t", "0", "-n", "201"],
                capture_output=True,
                text=True,
                errors="replace",
                check=True,
            )
            theirs.append(float(re.search(r"achieved tok/s: ([\d.]+)", done.stderr)[1]))
    yield f"{np.median(times):.0f} tokens/s (best {max(times):.0f}) on {os.cpu_count()} cores"
    if theirs:
        yield (
            f"llama2.c: {np.median(theirs):.0f} tokens/s (best {max(theirs):.0f}); fnet's median "
            f"is {np.median(times) / np.median(theirs):.2f} of its, fnet's best "
            f"{max(times) / max(theirs):.2f}"
        )
    else:
        yield "($LLAMA2C names no binary of llama2.c's run.c: its speed was not measured)"


@check
def gpt_learns_as_in_pytorch():
    """A GPT and its twin in torch.nn, from the same weights on the same batches: 100 steps of AdamW
    in float32."""
    torch = needed("torch", "PyTorch")
    from safetensors.torch import load_file as load_torch
    from torch_networks import GPT

    text = (HERE.parents[1] / "experiments" / "data" / "tempest.txt").read_text(encoding="utf-8")
    words, time, batch = models.CharTokenizer(text), 64, 16
    sizes = words.vocab_size, 128, 4, 4
    model, twin = models.GPT(*sizes, context=time), GPT(*sizes, time)
    params, _ = model.init(jax.random.key(0), model.example())
    with tempfile.TemporaryDirectory() as folder:
        twin.load_state_dict(load_torch(pretrained.save(model, params, {}, folder)), strict=True)
    windows = tr.Windows(words.encode(text), length=time, batch_size=batch, seed=0)
    tx = tr.optimizer("adamw", 1e-3, weight_decay=0.1, decay_all=True, b2=0.95)
    theirs = torch.optim.AdamW(
        twin.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )

    @jax.jit
    def step(state, tokens):
        def loss(params):
            logits = model(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), value

    state, losses, expected = tr.TrainState.create(params, tx), [], []
    for number in range(100):
        tokens = windows(number)["tokens"]
        state, value = step(state, tokens)
        losses.append(float(value))
        row = torch.from_numpy(tokens).long()
        loss = torch.nn.functional.cross_entropy(
            twin(row[:, :-1]).flatten(0, 1), row[:, 1:].flatten()
        )
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        expected.append(loss.item())
    apart = np.abs(np.subtract(losses, expected)).max()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    yield (
        f"{count:,} parameters, batches of {batch} x {time} characters: the loss falls from "
        f"{losses[0]:.3f} to {losses[-1]:.3f}, PyTorch's to {expected[-1]:.3f}; never more than "
        f"{apart:.1e} apart"
    )
    assert apart < 1e-3


@check
def text_weights_back():
    """MiniLM and stories15m saved and compared with the files they came from."""
    for names, preset in ((("minilm-l6", "minilm"), "minilm-l6"), (("stories15m",), "stories15m")):
        path = first(*names)
        with tempfile.TemporaryDirectory() as folder:
            if preset == "stories15m":
                file = path / "model.bin"
                back = llama2c.save(*llama2c.load(file), pathlib.Path(folder))
            else:
                file = path / "model.safetensors"
                model = pretrained.model(preset, path)
                params, _ = pretrained.load(model, path)
                target = pathlib.Path(folder) / file.name
                back = pretrained.save(model, params, {}, target, like=path)
            same = tensors(back), tensors(file)
        assert same[0].keys() == same[1].keys()
        assert all(np.array_equal(same[0][key], same[1][key]) for key in same[0])
        yield f"{preset}: {len(same[0])} arrays out, every one the same, bit for bit"


def tensors(file):
    if file.suffix == ".bin":
        return {"all": np.frombuffer(file.read_bytes(), np.uint8)}
    return load_file(file)
