"""Uses MiniLM's sentence embeddings to compare the meanings of sentences.

    python experiments/embed.py "A cat sits on the mat." "The feline rests." "Profits fell by a tenth."
    python experiments/embed.py --file=experiments/data/tempest.txt --top=5 "people who dream"

Without --file, the sentences are compared with each other. With --file, the lines of the file that
are most similar to each sentence are printed. --weights names the file or folder of the weights.
Without --weights, the program looks for the weights of the model in ~/.cache/fnet and in Hugging
Face's cache. If there are no weights, the error states what to download. vocab.txt must be in the
folder of the weights (pip install tokenizers).
"""

import dataclasses

import _common as common
import jax
import numpy as np
from absl import flags

from fnet import hardware as hw
from fnet import models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option
PRESETS = ("minilm-l6", "minilm-l12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of the program. Each field is the value of the flag with the same name."""

    model: str = option("minilm-l6", f"name of the model: {', '.join(PRESETS)}", choices=PRESETS)
    weights: str | None = option(
        None, "file or folder of the weights, with vocab.txt in the same folder"
    )
    file: str | None = option(None, "text file whose lines are searched")
    top: int = option(5, "number of lines to show for each sentence", within="[1, 1000000]")
    max_length: int = option(
        256, "number of tokens to which longer sentences are truncated", within="[2, 512]"
    )
    batch_size: int = option(64, "number of sentences in a batch", within="[1, 65536]")
    precision: str = option(
        "float32",
        "dtype of matrix products and convolutions: auto (chosen for the chip), "
        "float32, bfloat16 or float16",
        choices=common.PRECISIONS,
    )


def main(argv):
    sentences = argv[1:]
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        path = pretrained.find(config.weights or config.model)
        model = pretrained.model(config.model, path)
        tokenizer = models.WordPiece.read((path if path.is_dir() else path.parent) / "vocab.txt")
        params, _ = pretrained.load(model, path)
        lines = []
        if config.file:
            tr.flags.regular_file("file", config.file)
            text = common.read_text(common.user_path("file", config.file))
            lines = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    policy = hw.policy() if config.precision == "auto" else hw.policy(config.precision)
    embed = lambda params, tokens, lengths: models.sentence_embedding(
        model(params, tokens, lengths).hidden, lengths
    )
    encode = jax.jit(ft.autocast(embed, policy))

    def vectors(texts):
        """Returns the embeddings, [texts, width]. A batch has sentences of similar length, so that
        it has little padding."""
        rows = [tokenizer.encode(text, config.max_length) for text in texts]
        order = np.argsort([len(row) for row in rows], kind="stable")
        found = np.zeros((len(rows), model.width), np.float32)
        for start in range(0, len(rows), config.batch_size):
            chosen = order[start : start + config.batch_size]
            tokens, lengths = models.padded([rows[i] for i in chosen])
            size = max(8, 1 << (tokens.shape[1] - 1).bit_length())  # few lengths, few compilations
            short = config.batch_size - len(chosen) if len(rows) > config.batch_size else 0
            tokens = np.pad(tokens, ((0, short), (0, min(size, model.context) - tokens.shape[1])))
            found[chosen] = encode(params, tokens, np.pad(lengths, (0, short), constant_values=1))[
                : len(chosen)
            ]
        return found

    own = vectors(sentences)
    if not lines:
        nearness = own @ own.T
        for number, (sentence, row) in enumerate(zip(sentences, nearness), 1):
            print(f"{number:3d}  {' '.join(f'{value:6.3f}' for value in row)}  {sentence}")
        return
    nearness = own @ vectors(lines).T  # [sentences, lines]
    for sentence, row in zip(sentences, nearness):
        print(sentence)
        for index in np.argsort(-row)[: config.top]:
            print(f"  {row[index]:.3f}  {lines[index]}")


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    if not argv[1:]:
        raise tr.ConfigError(
            'no sentence given: python experiments/embed.py "A cat sits." "The feline rests."'
        )
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    return config


if __name__ == "__main__":
    define_flags()
    common.run(main)
