"""How near sentences are in meaning: MiniLM's sentence embeddings.

    python experiments/embed.py "A cat sits on the mat." "The feline rests." "Profits fell by a tenth."
    python experiments/embed.py --file=experiments/data/tempest.txt --top=5 "people who dream"

Sentences alone are compared with each other. With --file, its lines nearest to each sentence are shown. The weights are
looked for where --weights says, else under the model's name in ~/.cache/fnet and Hugging Face's cache; where there are
none, the message says what to download. vocab.txt lies beside them.
"""

import dataclasses
from pathlib import Path

import _common as common
import jax
import numpy as np
from absl import logging

from fnet import hardware as hw
from fnet import models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = common.option
PRESETS = ("minilm-l6", "minilm-l12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Which weights, and what is compared."""

    model: str = option("minilm-l6", f"one of {', '.join(PRESETS)}")
    weights: str | None = option(None, "file or folder of the weights and of vocab.txt")
    file: str | None = option(None, "a text whose lines are searched")
    top: int = option(5, "how many lines to show for a sentence")
    max_length: int = option(256, "tokens of a sentence that count, as many as the model was trained with")
    batch_size: int = option(64, "sentences at a time")
    precision: str = option("float32", "auto (what suits the chip), float32, bfloat16 or float16")


def main(argv):
    logging.set_verbosity(logging.WARNING)                 # JAX reports every accelerator it does not find
    sentences = argv[1:]
    if not sentences:
        common.stop('no sentence given: python experiments/embed.py "A cat sits." "The feline rests."')
    with common.one_line_errors(ValueError, TypeError, OSError):
        config = checked(common.config_from_flags(Config))
        path = pretrained.find(config.weights or config.model)
        model = pretrained.model(config.model, path)
        words = models.WordPiece.read((path if path.is_dir() else path.parent) / "vocab.txt")
        params, _ = pretrained.load(model, path)
        lines = []
        if config.file:
            text = Path(config.file).expanduser().read_text(encoding="utf-8")
            lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    policy = hw.policy() if config.precision == "auto" else hw.policy(config.precision)
    embed = lambda params, tokens, lengths: models.sentence_embedding(model(params, tokens, lengths).hidden, lengths)
    encode = jax.jit(ft.autocast(embed, policy))

    def vectors(texts):
        """[texts, width]: sentences of about one length together, so that little of a batch is padding."""
        rows = [words.encode(text, config.max_length) for text in texts]
        order = np.argsort([len(row) for row in rows], kind="stable")
        found = np.zeros((len(rows), model.width), np.float32)
        for start in range(0, len(rows), config.batch_size):
            chosen = order[start:start + config.batch_size]
            tokens, lengths = models.padded([rows[i] for i in chosen])
            size = max(8, 1 << (tokens.shape[1] - 1).bit_length())          # few lengths, few compilations
            short = config.batch_size - len(chosen) if len(rows) > config.batch_size else 0
            tokens = np.pad(tokens, ((0, short), (0, min(size, model.context) - tokens.shape[1])))
            found[chosen] = encode(params, tokens, np.pad(lengths, (0, short), constant_values=1))[:len(chosen)]
        return found

    own = vectors(sentences)
    if not lines:
        nearness = own @ own.T
        for number, (sentence, row) in enumerate(zip(sentences, nearness), 1):
            print(f"{number:3d}  {' '.join(f'{value:6.3f}' for value in row)}  {sentence}")
        return
    nearness = own @ vectors(lines).T                                       # [sentences, lines]
    for sentence, row in zip(sentences, nearness):
        print(sentence)
        for index in np.argsort(-row)[:config.top]:
            print(f"  {row[index]:.3f}  {lines[index]}")


def checked(config):
    """The configuration, once it is known to make sense."""
    for name, known in {"model": PRESETS, "precision": ("auto", "float32", "bfloat16", "float16")}.items():
        if getattr(config, name) not in known:
            raise tr.ConfigError(f"--{name}={getattr(config, name)}: use {', '.join(known)}")
    for name, least, most in ("top", 1, None), ("batch_size", 1, None), ("max_length", 2, 512):
        value = getattr(config, name)
        if value < least or (most is not None and value > most):
            raise tr.ConfigError(f"--{name}={value}: it has to be {least} or more{f', up to {most}' if most else ''}")
    return config


if __name__ == "__main__":
    common.define_flags(Config)
    common.run(main)
