"""Generates text that continues prompts.

    python experiments/generate.py "Once upon a time"                            # stories15m, of llama2.c
    python experiments/generate.py --weights=runs/language_model "MIRANDA."     # what language_model.py trained
    python experiments/generate.py --model=gpt2 --top_k=40 "The answer" "In 1912"      # several prompts at once
    python experiments/generate.py --weights=model.bin                          # llama2.c's, of any size
    python experiments/generate.py --weights=HuggingFaceTB/SmolLM2-135M "The answer"   # any folder with config.json

The weights are looked for where --weights says, else under the model's name in ~/.cache/fnet and Hugging Face's cache;
where there are none, the message says what to download. The tokenizer lies beside them: tokenizer.bin (llama2.c),
characters.json, or tokenizer.json (pip install tokenizers).
"""

import dataclasses
import time

import _common as common
import jax
import jax.numpy as jnp
import language_model
import numpy as np
from absl import flags

from fnet import hardware as hw
from fnet import models
from fnet import training as tr
from fnet.models import pretrained

option = tr.flags.option
PRESETS = tuple(preset for cls in (models.Decoder, models.GPT) for preset in cls.PRESETS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The weights, and the options of sampling."""

    model: str = option("stories15m", f"one of {', '.join(PRESETS)}")
    weights: str | None = option(None, "file or folder of the weights, or the folder of a run of language_model.py")
    tokenizer: str | None = option(None, "file or folder of the tokenizer (default: beside the weights)")
    max_tokens: int = option(200, "how many tokens to generate at most", within="[1, 1048576]")
    temperature: float = option(0.8, "what logits are divided by; 0: the likeliest token every time",
                                within="[0, 1000]")
    top_k: int = option(0, "draw among so many of the likeliest tokens; 0: all", within="[0, 2147483647]")
    top_p: float = option(0.95, "draw among the likeliest tokens that have this probability together; 1: all",
                          within="(0, 1]")
    min_p: float = option(0.0, "sample from tokens with this part of the largest probability, or more", within="[0, 1]")
    repetition_penalty: float = option(1.0, "divisor of the logits of tokens that the text has; 1: none",
                                       within="[0.001, 1000]")
    precision: str = option("float32", "of the weights: float32, bfloat16 or float16",
                             choices=("float32", "bfloat16", "float16"))
    seed: int = option(0, "of the draws", within=tr.flags.SEED)


def main(argv):
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        path = pretrained.find(config.weights or config.model)
        folder = path if path.is_dir() else path.parent
        model, words = read(config, folder, path)
        precision = jnp.dtype(config.precision)
        if model is None:
            model, params, _ = pretrained.load(path, dtype=precision)
            fitting(words, model, words.vocab_size <= model.vocab_size)
        else:
            params, _ = pretrained.load(model, path, dtype=precision)
        prompts = argv[1:] or [""]
        starts = [words.encode(prompt) if prompt else begin(words) for prompt in prompts]
        tokens, lengths = models.padded(starts)
        if jax.default_backend() == "cpu":
            model, params = models.unstack(model, params)
        most = min(config.max_tokens, model.context + 1 - int(lengths.max()))
        if most < 1:
            raise ValueError(f"the longest prompt has {lengths.max()} tokens; the model sees {model.context}")
        options = dict(temperature=config.temperature, top_k=config.top_k or None, lengths=lengths, stop=words.stop,
                       top_p=config.top_p if config.top_p < 1 else None, min_p=config.min_p or None,
                       repetition_penalty=config.repetition_penalty if config.repetition_penalty != 1 else None)
    print(f"{config.model if not config.weights else config.weights}: {type(model).__name__}, "
          f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {config.precision}, {hw.detect().name}")

    key = jax.random.key(config.seed)
    began = time.perf_counter()
    jax.block_until_ready(models.generate(model, params, tokens, key, max_tokens=most, **options))
    first = time.perf_counter() - began
    began = time.perf_counter()
    out = jax.block_until_ready(models.generate(model, params, tokens, key, max_tokens=most, **options))
    took = time.perf_counter() - began
    for start, row, length in zip(starts, np.asarray(out.tokens), np.asarray(out.lengths)):
        print(f"\n{words.decode([*start, *row[:length]])}")
    count = int(out.lengths.sum())
    print(f"\n{count} tokens in {took:.2f} s, {count / took:.0f} tokens/s (compiling included: {first:.1f} s)")


def read(config, folder, path):
    """(the model, its tokenizer): of a preset, or of a run of language_model.py. The model of another folder with a
    config.json is None."""
    run = None
    if (folder / "metrics.jsonl").is_file() and (folder / "config.json").is_file():
        run = tr.load_config(language_model.Config, folder / "config.json")
    if run is not None and run.tokens == "byte":
        words = models.ByteTokenizer()
    else:
        words = models.read_tokenizer(common.user_path("tokenizer", config.tokenizer) if config.tokenizer else folder)
    if run is not None:
        return language_model.make_model(run, run.vocab_size or words.vocab_size), words
    file = folder / "model.bin" if path.is_dir() else path
    if file.suffix == ".bin" and file.is_file():
        model = models.Decoder.of_model_bin(file)
    elif config.weights and path.is_dir() and (path / "config.json").is_file():
        return None, words
    else:
        model = pretrained.model(config.model, path)
    fitting(words, model, words.vocab_size == model.vocab_size)
    return model, words


def fitting(words, model, fits):
    if not fits:
        raise ValueError(f"the tokenizer has {words.vocab_size} tokens, the model {model.vocab_size}: use a "
                         "tokenizer and a model of one vocabulary")


def begin(words):
    """The token that precedes a text without a prompt: the token that ends a text, or a line break."""
    return words.encode("") if len(words.encode("")) else np.array(words.stop[:1] or words.encode("\n"), np.int32)


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """The configuration that the flags describe.

    Raises:
      ValueError: the flags cannot be used; the message names one of them.
    """
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """The configuration, if its values are possible and do not contradict each other; otherwise raises ConfigError."""
    tr.flags.check(config)
    common.check_temperature(config.temperature)
    if config.weights is None and config.model not in PRESETS:
        raise tr.ConfigError(f"--model={config.model}: use {', '.join(PRESETS)}")
    return config


if __name__ == "__main__":
    define_flags()
    common.run(main)
