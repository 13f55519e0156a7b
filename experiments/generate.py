"""Generates text that continues prompts.

    python experiments/generate.py "Once upon a time"                            # stories15m, of llama2.c
    python experiments/generate.py --weights=runs/language_model "MIRANDA."     # weights from language_model.py
    python experiments/generate.py --model=gpt2 --top_k=40 "The answer" "In 1912"      # several prompts at once
    python experiments/generate.py --weights=model.bin                          # a model.bin of llama2.c
    python experiments/generate.py --weights=HuggingFaceTB/SmolLM2-135M "The answer"   # any folder with config.json
    python experiments/generate.py --weights=HuggingFaceTB/SmolLM2-135M-Instruct --chat    # a conversation
    python experiments/generate.py --weights=FOLDER --beams=4 --max_tokens=40 "The answer"   # the most probable text

--weights names a file, a folder or a repository. Without --weights, the program looks for the
weights of the model in ~/.cache/fnet and in Hugging Face's cache. If there are no weights, the
error states what to download. llama2c.py reads a model.bin. The tokenizer is read from the folder
of the weights: tokenizer.bin (llama2.c), characters.json, or tokenizer.json (pip install
tokenizers).
"""

import dataclasses
import sys
import time

import _common as common
import jax
import jax.numpy as jnp
import language_model
import llama2c
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
    """The flags: the weights, and the options of the generation."""

    model: str = option("stories15m", f"name of the model: {', '.join(PRESETS)}")
    weights: str | None = option(
        None, "file or folder of the weights, or folder of a run of language_model.py"
    )
    tokenizer: str | None = option(
        None,
        "file or folder of the tokenizer; if not given, the tokenizer in the folder of the weights",
    )
    max_tokens: int = option(200, "maximum number of tokens to generate", within="[1, 1048576]")
    temperature: float = option(
        0.8,
        "temperature by which the logits are divided; 0: always select the most probable token",
        within="[0, 1000]",
    )
    top_k: int = option(
        0,
        "number of the most probable tokens from which a token is sampled; 0: all tokens",
        within="[0, 2147483647]",
    )
    top_p: float = option(
        0.95,
        "sample from the most probable tokens whose total probability is at least this number; "
        "1: all tokens",
        within="(0, 1]",
    )
    min_p: float = option(
        0.0,
        "sample from tokens whose probability is at least this fraction of the largest probability",
        within="[0, 1]",
    )
    repetition_penalty: float = option(
        1.0,
        "number by which the logits of tokens that are already in the text are "
        "divided; 1: no penalty",
        within="[0.001, 1000]",
    )
    presence_penalty: float = option(
        0.0,
        "number that is subtracted from the logits of tokens that have already been generated",
        within="[-100, 100]",
    )
    frequency_penalty: float = option(
        0.0,
        "number that is subtracted from the logit of a token once for each time it "
        "has been generated",
        within="[-100, 100]",
    )
    samples: int = option(1, "number of texts to generate for each prompt", within="[1, 4096]")
    beams: int = option(
        0,
        "number of texts that beam search keeps for each prompt; 0: sampling instead of beam "
        "search",
        within="[0, 1024]",
    )
    length_penalty: float = option(
        1.0,
        "exponent of the length in the scores of beam search; larger values favor longer texts",
        within="[-100, 100]",
    )
    stop: str | None = option(None, "string that ends a text; several strings are separated by |")
    log_probs: bool = option(False, "print the sum of the log-probabilities of each text")
    chat: bool = option(
        False,
        "hold a conversation with the model's chat template; each prompt, or each line of "
        "input, is a message",
    )
    system: str | None = option(
        None, "with --chat: the system message, with which the conversation starts"
    )
    precision: str = option(
        "float32",
        "dtype of the weights: float32, bfloat16 or float16",
        choices=("float32", "bfloat16", "float16"),
    )
    seed: int = option(0, "random seed for sampling", within=tr.flags.SEED)


def main(argv):
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        path = pretrained.find(config.weights or config.model)
        folder = path if path.is_dir() else path.parent
        model, tokenizer = read(config, folder, path)
        precision = jnp.dtype(config.precision)
        if model is None:
            model, params, _ = pretrained.load(path, dtype=precision)
            fitting(tokenizer, model, tokenizer.vocab_size <= model.vocab_size)
        elif llama2c.is_file(path):
            _, params = llama2c.load(path)
            params = jax.tree.map(lambda leaf: leaf.astype(precision), params)
        else:
            params, _ = pretrained.load(model, path, dtype=precision)
        if config.chat:
            return converse(config, model, params, tokenizer, argv[1:])
        prompts = argv[1:] or [""]
        starts = [tokenizer.encode(prompt) if prompt else begin(tokenizer) for prompt in prompts]
        tokens, lengths = models.padded(starts)
        if jax.default_backend() == "cpu":
            model, params = models.unstack(model, params)
        most = min(config.max_tokens, model.context + 1 - int(lengths.max()))
        if most < 1:
            raise ValueError(
                f"the longest prompt has {lengths.max()} tokens; the model sees {model.context}"
            )
        options = dict(lengths=lengths, stop=tokenizer.stop)
        if config.beams:
            options |= dict(beams=config.beams, length_penalty=config.length_penalty)
        else:
            options |= dict(sampling(config), samples=config.samples)
    describe(config, model, params)

    key = jax.random.key(config.seed)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        out = jax.block_until_ready(
            models.beam_search(model, params, tokens, max_tokens=most, **options)
            if config.beams
            else models.generate(model, params, tokens, key, max_tokens=most, **options)
        )
        seconds.append(time.perf_counter() - began)
    first, took = seconds
    if config.beams:  # the best text of each prompt
        rows, sizes, scores = (np.asarray(x[:, 0]) for x in out)
    else:
        rows, sizes, scores = (
            np.asarray(out.tokens),
            np.asarray(out.lengths),
            np.asarray(out.log_probs.sum(-1)),
        )
    for i, (row, length, score) in enumerate(zip(rows, sizes, scores)):
        start = starts[i // (1 if config.beams else config.samples)]
        print(f"\n{ended(tokenizer, start, row[:length], stops(config))}")
        if config.log_probs:
            print(f"({'score' if config.beams else 'log-probability'} {score:.4f})")
    count = int(out.lengths.sum())
    print(
        f"\n{count} tokens in {took:.2f} s, {count / took:.0f} tokens/s (compiling included: "
        f"{first:.1f} s)"
    )


def sampling(config):
    """Returns the sampling options for `models.generate` and `models.chat`."""
    return dict(
        temperature=config.temperature,
        top_k=config.top_k or None,
        min_p=config.min_p or None,
        top_p=config.top_p if config.top_p < 1 else None,
        repetition_penalty=config.repetition_penalty if config.repetition_penalty != 1 else None,
        presence_penalty=config.presence_penalty or None,
        frequency_penalty=config.frequency_penalty or None,
    )


def stops(config):
    return [text for text in (config.stop or "").split("|") if text]


def ended(tokenizer, start, tokens, stop):
    """Returns the text of the prompt and of the generated tokens, up to the first stop string after
    the prompt."""
    text, begin = tokenizer.decode([*start, *tokens]), len(tokenizer.decode(start))
    return text[
        : min(
            (at for at in (text.find(each, begin) for each in stop) if at >= 0), default=len(text)
        )
    ]


def describe(config, model, params):
    print(
        f"{config.model if not config.weights else config.weights}: {type(model).__name__}, "
        f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {config.precision}, "
        f"{hw.detect().name}"
    )


def converse(config, model, params, tokenizer, prompts):
    """Holds one conversation, in which the model answers each prompt. If `prompts` is empty, the
    model answers each nonempty line of standard input."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "--chat needs a folder with a chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): name one with --weights"
        )
    if jax.default_backend() == "cpu":
        model, params = models.unstack(model, params)
    describe(config, model, params)
    messages = [{"role": "system", "content": config.system}] if config.system else []
    key = jax.random.key(config.seed)
    for number, line in enumerate(prompts or lines()):
        if prompts:
            print(f"\n> {line}")
        messages.append({"role": "user", "content": line})
        answer = ""
        for piece in models.chat(
            model,
            params,
            tokenizer,
            messages,
            jax.random.fold_in(key, number),
            max_tokens=config.max_tokens,
            stop=stops(config),
            **sampling(config),
        ):
            print(piece, end="", flush=True)
            answer += piece
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def lines():
    """Yields the nonempty lines of standard input."""
    while True:
        if sys.stdin.isatty():
            print("\n> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def read(config, folder, path):
    """Returns (the model, its tokenizer) for a preset, a run of language_model.py, or another
    folder with a config.json. In the last case, the model is None."""
    run = None
    if (folder / "metrics.jsonl").is_file() and (folder / "config.json").is_file():
        run = tr.load_config(language_model.Config, folder / "config.json")
    if run is not None and run.tokens == "byte":
        tokenizer = models.ByteTokenizer()
    else:
        beside = common.user_path("tokenizer", config.tokenizer) if config.tokenizer else folder
        tokenizer = models.read_tokenizer(beside)
    if run is not None:
        return language_model.make_model(run, run.vocab_size or tokenizer.vocab_size), tokenizer
    if llama2c.is_file(path):
        model = llama2c.model_of(path)
    elif config.weights and path.is_dir() and (path / "config.json").is_file():
        return None, tokenizer
    else:
        model = pretrained.model(config.model, path)
    fitting(tokenizer, model, tokenizer.vocab_size == model.vocab_size)
    return model, tokenizer


def fitting(tokenizer, model, fits):
    if not fits:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}: use a "
            "tokenizer and a model of one vocabulary"
        )


def begin(tokenizer):
    """Returns the tokens with which a text without a prompt begins. By default, the result is the
    encoding of an empty text. If the encoding of an empty text has no tokens, the result is the
    first token in `tokenizer.stop`, which contains the tokens that end a text. If `tokenizer.stop`
    is also empty, the result is the encoding of a line
    break."""
    empty = tokenizer.encode("")
    return empty if len(empty) else np.array(tokenizer.stop[:1] or tokenizer.encode("\n"), np.int32)


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    common.check_temperature(config.temperature)
    if config.beams and config.samples > 1:
        raise tr.ConfigError("--beams and --samples: use one of them; beam search does not sample")
    if config.chat and (config.beams or config.samples > 1 or config.log_probs):
        raise tr.ConfigError(
            "--chat generates one answer: leave out --beams, --samples and --log_probs"
        )
    if config.system and not config.chat:
        raise tr.ConfigError("--system is for --chat")
    if config.weights is None and config.model not in PRESETS:
        raise tr.ConfigError(f"--model={config.model}: use {', '.join(PRESETS)}")
    return config


if __name__ == "__main__":
    define_flags()
    common.run(main)
