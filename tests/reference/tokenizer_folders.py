"""Folders with tokenizers of each kind, trained on The Tempest and some lines in other scripts, and
random texts."""

import io
import json
import pathlib
import random

TEMPEST = pathlib.Path(__file__).parents[2] / "experiments" / "data" / "tempest.txt"
LINES = """Übermäßig schöne Straßen führen über die Brücke.
Où est l'été ? Garçon, un café crème s'il vous plaît !
Быстрая лиса прыгает через ленивую собаку.
Ο γρήγορος λύκος πηδά πάνω από το σκυλί.
敏捷的棕色狐狸跳过懒狗。我们都是梦的材料。
素早い茶色の狐がのろまな犬を飛び越える。カタカナ
다람쥐 헌 쳇바퀴에 타고파
الثعلب البني السريع يقفز فوق الكلب الكسول
השועל החום המהיר קופץ מעל הכלב העצלן
तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है
สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ
def f(x):\n\treturn {"a": x[0] + 1.5e-3, 'b': None}  # 1234567890
👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🏳️‍🌈 flag, 🇩🇪 🇯🇵
""".splitlines()
GPT2 = ["<|endoftext|>"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def lines():
    return TEMPEST.read_text(encoding="utf-8").splitlines() + LINES * 5


def added(token, special=True, **options):
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    } | options


def byte_bpe(folder, size, config, first=(), qwen=False):
    """vocab.json and merges.txt, and a tokenizer_config.json."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if qwen:
        words.normalizer = normalizers.NFC()
        words.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        )
    words.train_from_iterator(
        lines(),
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(first),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    words.model.save(str(folder))
    write(folder, "tokenizer_config.json", config)
    return words


def sentencepiece(path, size, config, **options):
    """A SentencePiece model and a tokenizer_config.json."""
    import sentencepiece as spm

    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()),
        model_writer=model,
        vocab_size=size,
        minloglevel=2,
        **{"character_coverage": 0.998} | options,
    )
    path.write_bytes(model.getvalue())
    write(path.parent, "tokenizer_config.json", config)


def wordpiece(folder, size, lowercase):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.train_from_iterator(
        lines(),
        trainers.WordPieceTrainer(vocab_size=size, special_tokens=BERT, show_progress=False),
    )
    order = sorted(words.get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in order), encoding="utf-8")
    write(
        folder,
        "tokenizer_config.json",
        {"do_lower_case": lowercase, "tokenizer_class": "BertTokenizer"},
    )


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def gpt2(folder, size):
    byte_bpe(
        folder,
        size,
        {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": 1024,
            "additional_special_tokens": ["<|sep|>"],
        },
        GPT2,
    )


def gpt2_begins(folder, size):
    byte_bpe(
        folder,
        size,
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": True,
            "add_prefix_space": True,
            "bos_token": "<|begin|>",
            "eos_token": "<|endoftext|>",
        },
        GPT2,
    )
    write(folder, "added_tokens.json", {"<|begin|>": size, "[tool]": size + 1})


def roberta(folder, size):
    byte_bpe(
        folder, size, {"tokenizer_class": "RobertaTokenizer", "model_max_length": 512}, ROBERTA
    )
    write(
        folder,
        "special_tokens_map.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "cls_token": "<s>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": added("<mask>", lstrip=True) | {"special": True},
        },
    )


def qwen2(folder, size):
    more = [added(token) for token in QWEN] + [added("<tool_call>", special=False)]
    byte_bpe(
        folder,
        size,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "split_special_tokens": False,
            "additional_special_tokens": QWEN[1:],
            "added_tokens_decoder": {str(size + i): token for i, token in enumerate(more)},
        },
        qwen=True,
    )


def llama(folder, size, **config):
    sentencepiece(
        folder / "tokenizer.model",
        size,
        {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": None,
            "sp_model_kwargs": {},
            "added_tokens_decoder": {
                str(i): added(token) for i, token in enumerate(("<unk>", "<s>", "</s>"))
            }
            | {
                str(size): added("<|tool|>"),
                str(size + 1): added("<answer>", special=False, normalized=True),
            },
        }
        | config,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
    )


def llama_legacy(folder, size):
    llama(folder, size, legacy=True, add_eos_token=True)


def llama_no_prefix(folder, size):
    llama(folder, size, add_prefix_space=False, add_bos_token=False)


def gemma(folder, size, **config):
    sentencepiece(
        folder / "tokenizer.model",
        size,
        {
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "sp_model_kwargs": {},
            "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            "use_default_system_prompt": False,
            "spaces_between_special_tokens": False,
            "clean_up_tokenization_spaces": False,
        }
        | config,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=[
            "<mask>",
            "<start_of_turn>",
            "<end_of_turn>",
            "\n\n",
            "  ",
            "<table>",
        ],
    )


def gemma_own(folder, size):
    """Without a list of special tokens, the pieces that the model defines are added tokens."""
    gemma(folder, size, add_bos_token=False, add_eos_token=True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["additional_special_tokens"]
    write(folder, "tokenizer_config.json", config)


def t5(folder, size, **options):
    sentencepiece(
        folder / "spiece.model",
        size,
        {
            "tokenizer_class": "T5Tokenizer",
            "extra_ids": 100,
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        **options,
    )
    write(folder, "added_tokens.json", {f"<extra_id_{i}>": size + 99 - i for i in range(100)})


def xlm_roberta(folder, size, **options):
    sentencepiece(
        folder / "sentencepiece.bpe.model",
        size,
        {"tokenizer_class": "XLMRobertaTokenizer"},
        model_type="unigram",
        **options,
    )


def tokenizer_json(folder, size):
    """A tokenizer.json with added tokens, some of which remove the spaces around them."""
    from tokenizers import AddedToken, decoders, processors

    words = byte_bpe(
        folder,
        size,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "bos_token": "<|begin|>",
        },
        qwen=True,
    )
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<|begin|>", AddedToken("<|end|>", lstrip=True, rstrip=True)])
    words.add_tokens(
        [AddedToken("<tool_call>", single_word=True), AddedToken("Miranda", normalized=True)]
    )
    words.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", size)]
    )
    words.save(str(folder / "tokenizer.json"))
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()


def bert_cased(folder, size):
    wordpiece(folder, size, lowercase=False)


def bert_uncased(folder, size):
    wordpiece(folder, size, lowercase=True)


KINDS = {
    "gpt2": gpt2,
    "gpt2, adds bos": gpt2_begins,
    "roberta": roberta,
    "qwen2": qwen2,
    "llama": llama,
    "llama, legacy": llama_legacy,
    "llama, no prefix": llama_no_prefix,
    "gemma": gemma,
    "gemma, own tokens": gemma_own,
    "t5": t5,
    "xlm-roberta": xlm_roberta,
    "bert cased": bert_cased,
    "bert uncased": bert_uncased,
    "tokenizer.json": tokenizer_json,
}
TOKENS = sorted(
    {
        *GPT2,
        *ROBERTA,
        *QWEN,
        *BERT,
        "<|sep|>",
        "<|begin|>",
        "<|end|>",
        "<tool_call>",
        "[tool]",
        "<|tool|>",
        "<answer>",
        "Miranda",
        "<start_of_turn>",
        "<end_of_turn>",
        "<bos>",
        "<eos>",
        "<table>",
        "<extra_id_0>",
        "<extra_id_99>",
        "<0x41>",
        "▁",
        "##s",
        "<s>NOTUSED",
    }
)
RANGES = [(32, 126)] * 6 + [
    (0, 31),
    (127, 159),
    (0xA0, 0x17F),
    (0x250, 0x36F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x5F4),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE01, 0xE5B),
    (0x1100, 0x11FF),
    (0x1E00, 0x1FFF),
    (0x2000, 0x206F),
    (0x2100, 0x214F),
    (0x2460, 0x24FF),
    (0x3000, 0x30FF),
    (0x4E00, 0x4FFF),
    (0xAC00, 0xACFF),
    (0xFB00, 0xFB06),
    (0xFE00, 0xFE0F),
    (0xFF00, 0xFFEF),
    (0xFFF0, 0xFFFD),
    (0x1D400, 0x1D4FF),
    (0x1F1E6, 0x1F1FF),
    (0x1F300, 0x1F64F),
    (0x20000, 0x20100),
    (0xE000, 0xE010),
    (0xE0020, 0xE007F),
    (0x10FFF0, 0x10FFFF),
]
EMOJI = ["👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪", "❤️", "1️⃣", "👨🏾‍🚀"]


def texts(count, seed=0):
    """Random texts of many scripts, emoji, combining marks, control characters, runs of space and
    added tokens."""
    draw = random.Random(seed)
    sentences = [line for line in lines() if line.strip()]

    def part():
        kind = draw.randrange(10)
        if kind < 3:
            words = draw.choice(sentences).split(" ")
            at = draw.randrange(len(words))
            return " ".join(words[at : at + draw.randint(1, 5)])
        if kind == 3:
            return draw.choice(TOKENS)
        if kind == 4:
            return "".join(
                draw.choice(" \t\n\r\x0b\x0c\x85\xa0\u2003\u2028\u3000")
                for _ in range(draw.randint(1, 5))
            )
        if kind == 5:
            return draw.choice([" ", "  ", "   "])
        if kind == 6:
            return draw.choice(EMOJI)
        if kind == 7:
            marks = (chr(draw.randint(0x300, 0x36F)) for _ in range(draw.randint(1, 3)))
            return draw.choice("aeionuAEcZ가あ") + "".join(marks)
        low, high = draw.choice(RANGES)
        return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 6)))

    return ["", " ", "a", " a", "a "] + [
        "".join(part() for _ in range(draw.randint(1, 8))) for _ in range(count - 5)
    ]
