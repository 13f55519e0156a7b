"""Writes tests/reference/families: small models of transformers, one of each family, and their
logits.

    python tests/reference/make_family_fixtures.py [FAMILY ...]

The weights are in float16; the logits are those of the same weights in float32.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
import verify_families

FOLDER = pathlib.Path(__file__).parent / "families"
CASES = {
    "llama": 5,
    "mistral": 2,
    "qwen2": 1,
    "qwen3": 2,
    "gemma": 2,
    "gemma2": 1,
    "gemma3_text": 1,
    "phi3": 2,
    "smollm3": 2,
    "olmo2": 1,
    "gpt_neox": 1,
    "mixtral": 1,
    "qwen3_moe": 1,
    "gpt2": 1,
}
VOCABULARY = 32

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or CASES:
        family, folder, case = verify_families.FAMILIES[name], FOLDER / name, CASES[name]
        width, _, heads, hidden, _ = family.sizes
        sizes = {"vocab_size": VOCABULARY, width: 24, heads: 4, hidden: 20}
        model = verify_families.created(family, sizes | family.cases[case], case).half()
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config) + "\n")
        tokens = np.random.default_rng(case).integers(0, VOCABULARY, (2, 80))
        model = (
            type(model).from_pretrained(folder, dtype=torch.float32, **verify_families.EAGER).eval()
        )
        logits = verify_families.logits(model, tokens)
        np.savez_compressed(
            folder / "logits.npz", tokens=tokens.astype(np.int8), logits=logits[:, ::8]
        )
        print(
            f"{name}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes", flush=True
        )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
