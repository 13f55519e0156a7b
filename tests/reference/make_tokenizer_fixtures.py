"""Writes tokenizers/: small folders with tokenizers, and what transformers makes of random texts
with them.

    make .venv-verify/.installed && .venv-verify/bin/python tests/reference/make_tokenizer_fixtures.py [KIND ...]

T5 and XLM-R have a small table of characters here; `make verify-pretrained ARGS=tokenizers` uses
SentencePiece's own.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import transformers
from tokenizer_folders import KINDS, texts

HERE = pathlib.Path(__file__).parent / "tokenizers"
SIZES = {
    "xlm-roberta": 420,
    "t5": 420,
    "llama": 680,
    "llama, legacy": 680,
    "llama, no prefix": 680,
    "gemma": 680,
}
LEFT_OUT = (
    "llama, no prefix",
    "gemma, own tokens",
    "bert cased",
    "bert uncased",
)  # tested with the files of others


def main(kinds):
    for kind in kinds or KINDS:
        if kind in LEFT_OUT:
            continue
        make = KINDS[kind]
        folder = HERE / kind.replace(",", "").replace(" ", "_").replace(".", "_")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = {}
        with tempfile.TemporaryDirectory() as place:
            if kind in ("t5", "xlm-roberta"):
                rules = pathlib.Path(place, "rules.tsv")
                rules.write_text("FF21\t41\nFB01\t66 69\n3000\t20\nA0\t20\n9\t20\nA\t20\n1F\t\n")
                options = {"normalization_rule_tsv": str(rules), "character_coverage": 0.98}
            make(folder, SIZES.get(kind, 400), **options)
        name = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))[
            "tokenizer_class"
        ]
        words = getattr(transformers, name).from_pretrained(folder)
        held = []
        for text in texts(40, seed=1):
            tokens = words(text)["input_ids"]
            held.append(
                {
                    "text": text,
                    "tokens": tokens,
                    "decoded": words.decode(tokens, skip_special_tokens=True),
                }
            )
        (folder / "expected.json").write_text(json.dumps(held, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1:])
