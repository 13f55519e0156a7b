"""Writes text.npz and tokenizers.json: what transformers' GPT-2, Llama and BERT compute, and what
tokenizers and llama2.c make of texts.

    python -m venv torch-env && torch-env/bin/pip install torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3 numpy
    git clone https://github.com/karpathy/llama2.c
    torch-env/bin/python tests/reference/make_text_fixtures.py llama2.c/run.c [published FOLDER]

Weights are drawn from their keys (tests/drawn.py); models compute in float64, the training curve in
float32. With `published`, it writes published_minilm.npz as well: what transformers computes in
float32, and tokenizers makes of the sentences, with all-MiniLM-L6-v2's model.safetensors,
config.json and tokenizer.json in FOLDER.
"""

import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = pathlib.Path(__file__).parent
TEMPEST = HERE.parents[1] / "experiments" / "data" / "tempest.txt"
sys.path.insert(0, str(HERE.parent))
import drawn  # noqa: E402

VOCAB, TIME, LENGTHS, MORE = 69, 12, (12, 5, 9), 16
STEPS, BATCH, CONTEXT = 100, 8, 32
CASES = {
    "gpt": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=CONTEXT,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        ),
    ),
    "llama_tied": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
    ),
    "bert": (
        transformers.BertModel,
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=20,
        ),
    ),
}


def filled(cls, config):
    """The model with drawn weights, and their shapes by the keys of its own files."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.safetensors"
        cls(config).save_pretrained(folder)
        shapes = {key: list(value.shape) for key, value in load_file(file).items()}
        weights = drawn.weights(shapes)
        save_file(
            {key: torch.from_numpy(value) for key, value in weights.items()}, file, {"format": "pt"}
        )
        return cls.from_pretrained(folder).eval(), shapes, weights


def tokens_and_mask():
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(1, VOCAB, (len(LENGTHS), TIME)), np.array(LENGTHS)
    real = np.arange(TIME)[None] < lengths[:, None]
    return np.where(real, tokens, 0), real


def goes_on(model, tokens, length):
    """Greedy decoding without a cache: the definition."""
    row = torch.from_numpy(tokens[:length])[None]
    for _ in range(MORE):
        with torch.no_grad():
            row = torch.cat([row, model(row).logits[:, -1].argmax(-1)[:, None]], 1)
    return row[0, length:].numpy()


def models(arrays):
    tokens, real = tokens_and_mask()
    for name, (cls, config) in CASES.items():
        model, shapes, weights = filled(cls, config)
        model = model.double()
        with torch.no_grad():
            out = model(
                torch.from_numpy(tokens), attention_mask=torch.from_numpy(real.astype(np.int64))
            )
        if name == "bert":
            segment = (np.arange(TIME) >= 4).astype(np.int64)[None].repeat(len(tokens), 0)
            with torch.no_grad():
                second = model(torch.from_numpy(tokens), token_type_ids=torch.from_numpy(segment))
            made = {
                "hidden": out.last_hidden_state,
                "pooled": out.pooler_output,
                "second": second.last_hidden_state,
                "segment": torch.from_numpy(segment),
            }
        else:
            made = {"logits": out.logits}
            more = [goes_on(model, row, length) for row, length in zip(tokens, LENGTHS)]
            arrays[f"{name}/more"] = np.stack(more).astype(np.int32)
        arrays |= {f"{name}/{key}": value.numpy().astype(np.float32) for key, value in made.items()}
        arrays[f"{name}/shapes"] = np.array(json.dumps(shapes))
        arrays[f"{name}/checksum"] = np.array(drawn.checksum(weights))
        print(name, sum(value.size for value in weights.values()), "numbers")
    arrays |= {"tokens": tokens.astype(np.int32), "lengths": np.array(LENGTHS, np.int32)}


def curve(arrays):
    """GPT-2 in PyTorch under AdamW, from drawn weights, on characters of The Tempest."""
    model, _, _ = filled(*CASES["gpt"])
    text = TEMPEST.read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    assert len(characters) == VOCAB
    row = np.array([characters.index(char) for char in text])
    starts = np.random.default_rng(1).integers(0, len(row) - CONTEXT, (STEPS, BATCH))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for start in starts:
        batch = torch.from_numpy(np.stack([row[at : at + CONTEXT + 1] for at in start]))
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    arrays |= {
        "curve/starts": starts.astype(np.int32),
        "curve/losses": np.array(losses, np.float32),
    }
    print("curve", losses[0], losses[-1])


TEXTS = [
    "",
    " ",
    "Our revels now are ended.",
    "MIRANDA.\nO brave new world,\tThat has such people in't!",
    "  two  spaces  ",
    "Crème brûlée, naïve façade; ÅNGSTRÖM",
    "ΣΑΣ σας",
    "İstanbul ǅ ﬁ ①",
    "汉字 and かな",
    "don't-stop 3.14 $5 <a@b> ^`~|",
    "zero\u200bwidth \u00ad soft \x00 null \ufffd repl \x85 nel",
    "a\u0301 e\u0300",
    "[SEP] [CLS] ##ing",
    "x" * 101,
    "🙂👍🏽",
    "<s> <0x41> </s>",
    "unknownest of all the island's spirits",
]


def pieces_of(words, count, seed):
    """`count` pieces of two to four characters as they stand in words, and whether each begins its
    word."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        word = rng.choice(words)
        start, size = rng.randrange(len(word)), rng.choice((2, 3, 4))
        if start + size <= len(word):
            found[word[start : start + size], start == 0] = None
    return list(found)


def wordpiece():
    """A small vocabulary, and tokenizers' own tokens of texts. (Its trainer makes another one every
    time.)"""
    words = [
        word
        for word in TEMPEST.read_text(encoding="utf-8").lower().split()[:4000]
        if word.isalpha()
    ]
    characters = sorted({*"".join(words), *".,;:!?'-$<>@^`~|[]0123456789汉éÅ"})
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *characters,
        *(f"##{char}" for char in characters),
    ]
    vocabulary += [piece if first else f"##{piece}" for piece, first in pieces_of(words, 200, 0)]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "vocab.txt"
        file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        lower, cased = (
            tokenizers.BertWordPieceTokenizer(str(file), lowercase=low) for low in (True, False)
        )
        # Theirs takes special tokens out of the text first; ours is for text alone.
        texts = [text for text in TEXTS if "[SEP]" not in text]
        return {
            "vocabulary": vocabulary,
            "texts": texts,
            "lower": [lower.encode(text).ids for text in texts],
            "cased": [cased.encode(text).ids for text in texts],
        }


HARNESS = """
#define TESTING
#include "%s"
int main(int argc, char **argv) {
    Tokenizer t; build_tokenizer(&t, argv[1], atoi(argv[2]));
    for (int i = 3; i < argc; i++) {
        int n, *tokens = malloc((strlen(argv[i]) + 3) * sizeof(int));
        encode(&t, argv[i], 1, 0, tokens, &n);
        for (int j = 0; j < n; j++) printf("%%d ", tokens[j]);
        printf("\\n");
    }
}
"""


def llama_bpe(source):
    """A small vocabulary of merges, written as a tokenizer.bin, and llama2.c's own tokens of texts."""
    words = [" " + word for word in TEMPEST.read_text(encoding="utf-8").split()[:4000]]
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*sorted({char for word in words for char in word}), "é", "汉"]
    pieces += dict.fromkeys(piece for piece, _ in pieces_of(words, 160, 1))
    scores = [0.0] * 259 + [-float(number // 3) for number in range(len(pieces) - 259)]  # with ties
    raw = struct.pack("<i", max(len(piece.encode()) for piece in pieces))
    for piece, score in zip(pieces, scores):
        raw += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    texts = [text for text in TEXTS if "\0" not in text and "<" not in text] + [
        "".join(words[:120])
    ]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "harness.c").write_text(HARNESS % pathlib.Path(source).resolve())
        (folder / "tokenizer.bin").write_bytes(raw)
        subprocess.run(
            ["gcc", "-O1", "-w", "harness.c", "-lm", "-o", "harness"], cwd=folder, check=True
        )
        out = subprocess.run(
            ["./harness", "tokenizer.bin", str(len(pieces)), *texts],
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    return {
        "pieces": pieces[259:],
        "scores": scores[259:],
        "texts": texts,
        "tokens": [list(map(int, line.split())) for line in out.split("\n")[:-1]],
    }


SENTENCES = {  # by the shape of their batch: two sizes, two lengths
    (4, 24): (
        "A cat sits on the mat.",
        "The feline rests on a rug, quite unbothered by the noise outside.",
        "Quarterly profits fell by a tenth.",
        "Dogs.",
    ),
    (2, 64): (
        "We are such stuff as dreams are made on, and our little life is rounded with a sleep.",
        "Crème brûlée, naïve façade: don't-stop 3.14 <汉字>!",
    ),
}


def published(folder):
    """MiniLM's hidden states at the tokens that are real, and its sentence embeddings."""
    words = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    words.no_truncation()
    words.no_padding()
    model, arrays = transformers.BertModel.from_pretrained(folder).eval(), {}
    for (batch, time), sentences in SENTENCES.items():
        rows = [words.encode(sentence).ids for sentence in sentences]
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((batch, time), np.int32)
        for row, given in zip(tokens, rows):
            row[: len(given)] = given
        real = torch.from_numpy(np.arange(time)[None] < lengths[:, None])
        with torch.no_grad():
            hidden = model(torch.from_numpy(tokens), attention_mask=real.long()).last_hidden_state
        mean = (hidden * real[..., None]).sum(1) / real.sum(
            1, keepdim=True
        )  # sentence-transformers' pooling
        made = {
            "sentences": np.array(sentences),
            "tokens": tokens,
            "lengths": lengths,
            "hidden": hidden[real].numpy(),
            "embeddings": torch.nn.functional.normalize(mean).numpy(),
        }
        arrays |= {f"{batch}x{time}/{name}": value for name, value in made.items()}
    np.savez_compressed(HERE / "published_minilm.npz", **arrays)


def main():
    if sys.argv[2:]:
        published(sys.argv[3])
    arrays = {}
    models(arrays)
    curve(arrays)
    np.savez_compressed(HERE / "text.npz", **arrays)
    made = {"wordpiece": wordpiece(), "llama_bpe": llama_bpe(sys.argv[1])}
    (HERE / "tokenizers.json").write_text(json.dumps(made, ensure_ascii=True, indent=None) + "\n")
    for name in ("text.npz", "tokenizers.json", "published_minilm.npz"):
        print(f"{name}: {(HERE / name).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
