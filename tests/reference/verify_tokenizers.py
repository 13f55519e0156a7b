"""Tokenizers against transformers' for random texts; a part of verify_pretrained.py."""

import json
import pathlib
import tempfile

import numpy as np
from tokenizer_folders import KINDS, texts
from verifying import check, needed

from fnet import models

SIZE, COUNT = 1200, 2000


@check
def tokenizers(*kinds):
    """Tokenizers of each kind, trained here: tokens and decoded text of 2,000 random texts as
    transformers'."""
    transformers = needed("transformers", "transformers")
    for library in ("tokenizers", "sentencepiece"):
        needed(library, library)
    yield f"transformers {transformers.__version__}; {COUNT} texts each"
    yield "| kind | files | equal tokens | without special tokens | equal text |"
    wrong = []
    for kind in kinds or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            KINDS[kind](folder, SIZE)
            files = sorted(
                path.name for path in folder.iterdir() if path.name != "tokenizer_config.json"
            )
            name = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))[
                "tokenizer_class"
            ]
            theirs = getattr(transformers, name).from_pretrained(folder)
            own = models.read_tokenizer(folder)
        equal = np.zeros(3, int)
        for text in texts(COUNT):
            wanted = theirs(text)["input_ids"]
            tokens = own.encode(text).tolist()
            plain = theirs(text, add_special_tokens=False)["input_ids"]
            result = np.array(
                [
                    tokens == wanted,
                    own.encode(text, special_tokens=False).tolist() == plain,
                    own.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True),
                ]
            )
            if not result.all() and len(wrong) < 3:
                wrong.append(
                    f"{kind}: {text!r}: {tokens}, expected {wanted}; {own.decode(wanted)!r}, "
                    f"expected {theirs.decode(wanted, skip_special_tokens=True)!r}"
                )
            equal += result
        yield f"| {kind} | {', '.join(files)} | {equal[0]} | {equal[1]} | {equal[2]} |"
        if own.vocab_size != len(theirs):
            wrong.append(
                f"{kind}: {own.vocab_size} tokens in the vocabulary, expected {len(theirs)}"
            )
    assert not wrong, "; ".join(wrong)
