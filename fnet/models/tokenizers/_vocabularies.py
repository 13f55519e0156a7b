"""Creates the content of a tokenizer.json from a vocab.json and its merges.txt, or from a
SentencePiece model."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnet._util import _missing
from fnet.models.tokenizers import _tokenizer_config as config_file
from fnet.models.weights._config import Config, Fields, Must, read
from fnet.models.weights._files import LARGEST, SMALL, check_count, contents

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_GPT2 = {name: "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = _LLAMA | {
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
# The special tokens of each class if a folder does not set them.
_BYTE_LEVEL = {
    "GPT2Tokenizer": _GPT2,
    "RobertaTokenizer": _ROBERTA,
    "Qwen2Tokenizer": _GPT2 | {"bos_token": None, "pad_token": "<|endoftext|>"},
}
_MODELS = {
    "LlamaTokenizer": _LLAMA,
    "XLMRobertaTokenizer": _ROBERTA,
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
_CLASSES = {
    "gpt2": "GPT2Tokenizer",
    "roberta": "RobertaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "llama": "LlamaTokenizer",
    "t5": "T5Tokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
}
# Qwen's words.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_OPTIONS = {"single_word": False, "lstrip": False, "rstrip": False}
# Types of pieces and of models in sentencepiece_model.proto.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2


def describe(path: Path) -> tuple[dict[str, Any], str | None]:
    """Returns the content of a tokenizer.json for a vocabulary, and the token that ends a text.

    Args:
        path: vocab.json (next to merges.txt) or a SentencePiece model. The class of the tokenizer
            and its special tokens are read from the other files in the same folder.

    Raises:
        ModuleNotFoundError: the file is a SentencePiece model, and the library sentencepiece is not
            installed.
        ValueError: the files are damaged, or describe a tokenizer that is not supported.
    """
    config = _config(path)
    name = config["tokenizer_class"]
    parts, own, more = (
        _byte_level(path, config) if name in _BYTE_LEVEL else _sentencepiece(path, config)
    )
    special = {key: config.get(key, token) for key, token in (_BYTE_LEVEL | _MODELS)[name].items()}
    special |= {key: config[key] for key in config_file.TOKENS if key in config}
    if name in ("XLMRobertaTokenizer", "T5Tokenizer"):
        for key, token in _MODELS[name].items():
            have = _content(special[key])
            if have != token:
                raise ValueError(
                    f"{path.parent}: {key!r} is {have!r}, expected {token!r} for a {name}"
                )
    # A list in the folder replaces the model's own added tokens. Their pieces are then encoded like
    # any other text.
    lists = [
        config[key] or []
        for key in ("extra_special_tokens", "additional_special_tokens")
        if key in config
    ]
    extra = [*next(filter(None, lists), [] if lists else own), *more]
    vocab = parts["model"]["vocab"]
    numbers = (
        vocab
        if isinstance(vocab, dict)
        else {piece: number for number, (piece, _) in enumerate(vocab)}
    )
    added = _added(path, numbers, config.get("added_tokens_decoder") or {}, special, extra)
    bos, eos, cls, sep = (
        _content(special.get(f"{key}_token")) for key in ("bos", "eos", "cls", "sep")
    )
    begin, end = (
        (bos if config.get("add_bos_token") else None),
        (eos if config.get("add_eos_token") else None),
    )
    if name in ("RobertaTokenizer", "XLMRobertaTokenizer"):
        begin, end = (cls, sep) if name == "RobertaTokenizer" else (bos, eos)
    elif name == "T5Tokenizer":
        end = "</s>"
    found = {token["content"]: token["id"] for token in added}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "post_processor": _template(begin, end, found),
        **parts,
    }, eos


def _config(path):
    """Returns the checked fields of tokenizer_config.json and of the files of special tokens."""
    folder = path.parent
    config = read(folder / config_file.NAME) if os.path.lexists(folder / config_file.NAME) else {}
    name = config.get("tokenizer_class")
    if name is None and os.path.lexists(folder / "config.json"):
        name = _CLASSES.get(read(folder / "config.json").get("model_type"))
    name = name.removesuffix("Fast") if isinstance(name, str) else name
    known = _MODELS if path.name in SENTENCEPIECE else _BYTE_LEVEL
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{folder / config_file.NAME}: 'tokenizer_class' is {name!r}, expected one of "
            f"{', '.join(known)} for {path.name}; convert other tokenizers to a tokenizer.json"
        )
    token, tokens = Fields(lambda value, config: _list([value], config)), Fields(_list)
    bpe, t5 = name in ("LlamaTokenizer", "GemmaTokenizer"), name == "T5Tokenizer"
    flag = config_file._flag("flag", None)
    fields = {
        **{key: token for key in config_file.TOKENS},
        "added_tokens_decoder": Fields(_numbered),
        "additional_special_tokens": tokens,
        "extra_special_tokens": tokens,
        "split_special_tokens": Must((False,)),
        "sp_model_kwargs": Must((None, {})),
        "add_prefix_space": Must((True, None))
        if name in ("XLMRobertaTokenizer", "T5Tokenizer")
        else (Must((False, None)) if name == "GemmaTokenizer" else flag),
        "add_bos_token": flag,
        "add_eos_token": flag,
        "legacy": flag,
        **(
            {"extra_ids": Fields(_count)}
            if t5
            else {"trim_offsets": flag}
            if name == "RobertaTokenizer"
            else {}
        ),
    }
    if name in ("RobertaTokenizer", "XLMRobertaTokenizer", "T5Tokenizer"):
        fields |= {
            "add_bos_token": Must((None, name != "T5Tokenizer")),
            "add_eos_token": Must((None, True)),
        }
    try:
        Config(
            fields, config_file._IRRELEVANT - {"legacy"} | {"tokenizer_class", "vocab_size"}
        ).values(config)
        if bpe and not isinstance(config.get("add_bos_token"), bool):
            raise ValueError(
                "'add_bos_token' is absent, expected true or false: transformers 4 assumes true, "
                "and transformers 5 false"
            )
    except ValueError as error:
        raise ValueError(f"{folder / config_file.NAME}: {error}") from None
    config["tokenizer_class"] = name
    return config if "added_tokens_decoder" in config else _older(folder, config)


def _older(folder, config):
    """Adds the content of special_tokens_map.json and added_tokens.json to `config`. Older folders
    contain these files."""
    path = folder / "special_tokens_map.json"
    if os.path.lexists(path):
        for key, value in read(path).items():
            if key in config_file.TOKENS:
                _content(value)
                config[key] = value | {"special": True} if isinstance(value, dict) else value
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                _list(value, config)
                config[key] = value
            else:
                raise ValueError(f"{path}: {key!r} is a field which fnet does not know")
    path = folder / "added_tokens.json"
    if os.path.lexists(path):
        special = {_content(config.get(key)) for key in config_file.TOKENS}
        special |= {
            _content(token)
            for key in ("additional_special_tokens", "extra_special_tokens")
            for token in config.get(key) or ()
        }
        numbers = read(path)
        if not all(type(number) is int and number >= 0 for number in numbers.values()):
            raise ValueError(f"{path}: expected {{token: number}}")
        config["added_tokens_decoder"] = {
            str(number): {"content": token, "special": token in special}
            for token, number in numbers.items()
        }
    return config


def _added(path, numbers, decoder, special, extra) -> list[dict[str, Any]]:
    """Returns the added tokens with their indices. Added tokens without an index get indices after
    the vocabulary."""
    stated = {int(number): token for number, token in decoder.items()}
    by_content = {token["content"]: token for token in stated.values()}
    named = {_content(token) for token in special.values()}
    added, following = {}, len(numbers)
    for token in [*(stated[number] for number in sorted(stated)), *special.values(), *extra]:
        content = _content(token)
        if content is None or content in added:
            continue
        token = by_content.get(content, token)
        token = dict(token) if isinstance(token, dict) else {"content": content, "special": True}
        token.pop("__type", None)
        token["normalized"] = token.get("normalized", not token.get("special", False))
        token["special"] = token.get("special", False) or content in named
        number = numbers.get(content, following)
        following += content not in numbers
        added[content] = {"id": number, **_OPTIONS, **token}
    for number, token in stated.items():
        if added[token["content"]]["id"] != number:
            raise ValueError(
                f"{path.parent}: the token {token['content']!r} is said to have the number "
                f"{number}; by {path.name} and the tokens before it, it has "
                f"{added[token['content']]['id']}"
            )
    return sorted(added.values(), key=lambda token: token["id"])


def _byte_level(path, config):
    """Returns (fields of tokenizer.json, [], []) for a vocabulary in the files vocab.json and
    merges.txt.

    The returned fields describe a byte-level BPE, as in GPT-2, RoBERTa and Qwen. `_byte_level`
    returns two empty lists of added tokens, so that its result has the same form as the result of
    `_sentencepiece`.
    """
    held = read(path, LARGEST)
    check_count(path, len(held))
    if sorted(held.values(), key=lambda number: number if type(number) is int else -1) != list(
        range(len(held))
    ):
        raise ValueError(
            f"{path}: expected {{token: number}} with the numbers 0 to {len(held) - 1}"
        )
    merges, lines = [], contents(path.parent / "merges.txt", most=SMALL)
    check_count(path.parent / "merges.txt", lines.count("\n"))
    for number, line in enumerate(lines.split("\n"), 1):
        pair = line.removesuffix("\r").split(" ")
        if line.startswith("#version") or (number > 1 and line == ""):
            continue
        if len(pair) != 2 or not all(part in held for part in (*pair, "".join(pair))):
            raise ValueError(
                f"{path.parent / 'merges.txt'}: line {number} is {line!r}, expected two tokens of "
                "vocab.json that form a third one"
            )
        merges.append(pair)
    prefix = bool(config.get("add_prefix_space"))
    qwen = config["tokenizer_class"] == "Qwen2Tokenizer"
    split = {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": not qwen,
    }
    words = {
        "type": "Split",
        "pattern": {"Regex": _PIECES},
        "behavior": "Isolated",
        "invert": False,
    }
    return (
        {
            "normalizer": {"type": "NFC"} if qwen else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, split]}
            if qwen
            else split,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": held,
                "merges": merges,
            },
        },
        [],
        [],
    )


def _sentencepiece(path, config):
    """Returns (fields of tokenizer.json, added tokens of the model, added tokens of the tokenizer
    class).

    The returned fields describe a SentencePiece model: the BPE of Llama and Gemma, or the unigrams
    of T5 and XLM-R.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            _missing.message(f"{path} needs", "sentencepiece", "protobuf", error=error)
        ) from None
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(contents(path, text=False))
    except Exception as error:  # protobuf's DecodeError
        if type(error).__name__ != "DecodeError":
            raise
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
    check_count(path, len(model.pieces))
    name = config["tokenizer_class"]
    pieces = [piece.piece for piece in model.pieces]
    if not pieces or len(set(pieces)) < len(pieces):
        raise ValueError(
            f"{path} is not a SentencePiece model: expected distinct pieces, got {len(pieces)}"
        )
    own = [
        {"content": piece.piece, "special": piece.type == _CONTROL, "normalized": False}
        for piece in model.pieces
        if piece.type in (_CONTROL, _USER)
    ]
    unigram, gemma = name in ("XLMRobertaTokenizer", "T5Tokenizer"), name == "GemmaTokenizer"
    prefix, spec = config.get("add_prefix_space") is not False and not gemma, model.normalizer_spec
    wanted = {
        "model_type": (model.trainer_spec.model_type, _UNIGRAM if unigram else _BPE),
        "byte_fallback": (model.trainer_spec.byte_fallback, not unigram),
        "add_dummy_prefix": (
            spec.add_dummy_prefix,
            prefix or (spec.add_dummy_prefix and not gemma),
        ),
        "remove_extra_whitespaces": (spec.remove_extra_whitespaces, unigram),
        "escape_whitespaces": (spec.escape_whitespaces, True),
        "precompiled_charsmap": (
            bool(spec.precompiled_charsmap),
            unigram and bool(spec.precompiled_charsmap),
        ),
        "treat_whitespace_as_suffix": (model.trainer_spec.treat_whitespace_as_suffix, False),
    }
    for field, (have, want) in wanted.items():
        if have != want:
            raise ValueError(f"{path}: {field} is {have}, expected {want} for a {name}")
    if gemma:
        parts = _llama(path, config, model, pieces, prefix)
        return (
            parts
            | {
                "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                "pre_tokenizer": None,
            },
            own,
            [],
        )
    if not unigram:
        return _llama(path, config, model, pieces, prefix), own, []
    vocab, extra, unknown = [[piece.piece, piece.score] for piece in model.pieces], [], 2
    if name == "XLMRobertaTokenizer":
        unknown = 3
        if pieces[:3] != ["<unk>", "<s>", "</s>"]:
            raise ValueError(
                f"{path}: expected the first pieces <unk>, <s>, </s> for a {name}, got {pieces[:3]}"
            )
        # As in fairseq, the special tokens <s>, <pad>, </s>, <unk> are before all pieces, and
        # <mask> is after them.
        vocab = [
            ["<s>", 0.0],
            ["<pad>", 0.0],
            ["</s>", 0.0],
            ["<unk>", 0.0],
            *vocab[3:],
            ["<mask>", 0.0],
        ]
    else:
        if pieces[2:3] != ["<unk>"] or model.pieces[2].type != _UNKNOWN:
            raise ValueError(f"{path}: expected <unk> as piece 2 for a {name}, got {pieces[2:3]}")
        # <extra_id_0> is the last token.
        extra = [f"<extra_id_{number}>" for number in reversed(range(config.get("extra_ids", 100)))]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            if key in config:
                config[key] = [token for token in config[key] or () if _content(token) not in extra]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
    return (
        {
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}
            if charsmap
            else None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
            },
            "decoder": metaspace,
            "model": {"type": "Unigram", "unk_id": unknown, "byte_fallback": False, "vocab": vocab},
        },
        own,
        extra,
    )


def _llama(path, config, model, pieces, prefix):
    """Returns the fields of tokenizer.json for Llama's BPE.

    If the concatenation of two pieces (token strings) of the vocabulary is also a piece, these two
    pieces form a BPE merge. The merges are sorted by the index of the piece that each merge
    creates.
    """
    scores = [piece.score for piece in model.pieces if piece.type == _NORMAL]
    if scores != sorted(scores, reverse=True):
        raise ValueError(
            f"{path}: expected pieces in the order of their scores for a "
            f"{config['tokenizer_class']}"
        )
    vocab, merges = {piece: number for number, piece in enumerate(pieces)}, []
    for piece in pieces:
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += sorted(pairs, key=lambda pair: (len(pair[0]), len(pair[1])))
    scheme = "never" if not prefix else "always" if config.get("legacy") else "first"
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _template(begin, end, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Returns the post-processor of tokenizer.json that puts tokens before and after a text."""
    steps: list[dict] = [{"Sequence": {"id": "A", "type_id": 0}}]
    steps = [{"SpecialToken": {"id": begin, "type_id": 0}}] * (begin is not None) + steps
    steps += [{"SpecialToken": {"id": end, "type_id": 0}}] * (end is not None)
    return {
        "type": "TemplateProcessing",
        "single": steps,
        "pair": [*steps, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [numbers[token]], "tokens": [token]}
            for token in (begin, end)
            if token is not None
        },
    }


def _content(token):
    if isinstance(token, dict):
        known = {"__type", "content", "special", "normalized", *_OPTIONS}
        flags = all(isinstance(token[key], bool) for key in token.keys() - {"__type", "content"})
        if not token.keys() <= known or not flags or not isinstance(token.get("content"), str):
            raise ValueError("expected tokens, as strings or as objects with content and flags")
    return config_file._content(token)


def _list(value, config):
    if value is not None and not isinstance(value, list):
        raise ValueError("expected a list of tokens")
    for token in value or ():
        _content(token)
    return {}


def _numbered(value, config):
    if not isinstance(value, dict) or not all(
        key.isdecimal() and isinstance(token, dict) and _content(token)
        for key, token in value.items()
    ):
        raise ValueError("expected {number: token}")
    return {}


def _count(value, config):
    if type(value) is not int or not 0 <= value <= 1000:
        raise ValueError("expected a number of tokens, up to 1000")
    return {}
