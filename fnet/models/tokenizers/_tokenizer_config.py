"""Reads the tokenizer_config.json and the tokenizer.json next to a vocabulary. Unknown fields and
unsupported fields of tokenizer_config.json raise an error."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fnet.models.weights._config import Config, Fields, Must, read, same
from fnet.models.weights._files import LARGEST

NAME = "tokenizer_config.json"
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_NONE = Must((None, [], {}))
_IRRELEVANT = frozenset(
    """
    model_max_length max_len chat_template response_schema clean_up_tokenization_spaces padding_side truncation_side
    name_or_path _name_or_path special_tokens_map_file tokenizer_file max_length stride truncation_strategy truncation
    padding pad_to_multiple_of pad_token_type_id model_input_names processor_class use_fast transformers_version verbose
    backend is_local local_files_only errors legacy use_default_system_prompt return_token_type_ids
    spaces_between_special_tokens
""".split()
)  # fields for the postprocessing of tokens, for Python classes, and for joining tokens to text
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece(folder: Path, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Reads the options of `WordPiece` from tokenizer_config.json and tokenizer.json in the folder
    of a vocab.txt.

    Args:
        folder: the folder of vocab.txt.
        numbers: {token: its index in vocab.txt}.

    Returns:
        {option: value}, the options that the files set, such as strip_accents. The option lowercase
        is always included. Default of lowercase: True if no token except special tokens such as
        [CLS] contains a letter A to Z, else False.

    Raises:
        ValueError: the files describe another tokenizer, or contradict each other. Also if no file
            sets lowercase, and the only upper-case letters are of other alphabets.
    """

    def added(value, config):
        return _added(
            value,
            lambda token: numbers.get(token) if token in _SPECIAL else None,
            "one of BERT's own",
        )

    table = Config(
        {
            "do_lower_case": _flag("lowercase"),
            "strip_accents": _flag("strip_accents", None),
            "tokenize_chinese_chars": _flag("tokenize_chinese_chars"),
            "clean_up_tokenization_spaces": _flag("clean_up", None),
            "do_basic_tokenize": Must((True,)),
            "never_split": _NONE,
            "wordpieces_prefix": Must(("##",)),
            "split_special_tokens": Must((False,)),
            "tokenizer_class": Must(
                (
                    "BertTokenizer",
                    "BertTokenizerFast",
                    "DistilBertTokenizer",
                    "DistilBertTokenizerFast",
                    None,
                )
            ),
            **{f"{token[1:-1].lower()}_token": _token(token) for token in _SPECIAL},
            "bos_token": _token(None),
            "eos_token": _token(None),
            "added_tokens_decoder": Fields(added),
            "additional_special_tokens": _NONE,
            "extra_special_tokens": _NONE,
            "model_specific_special_tokens": _NONE,
        },
        _IRRELEVANT - {"clean_up_tokenization_spaces"},
    )
    said = values(folder, table)
    upper = next(
        (token for token in numbers if token[:1] != "[" and re.search("[A-Z]", token)), None
    )
    if os.path.lexists(folder / NAME):
        if upper is not None and "lowercase" not in said:
            raise ValueError(
                f"{folder / NAME} has no 'do_lower_case', i.e. true, but vocab.txt has upper-case "
                f"letters ({upper!r}); use WordPiece.read(path, lowercase=...)"
            )
        said = {"lowercase": True, "strip_accents": None, "tokenize_chinese_chars": True} | said
    for field, value in _normalizer(folder / "tokenizer.json", numbers).items():
        if field in said and not same(said[field], value):
            raise ValueError(
                f"{folder / NAME} and tokenizer.json contradict each other: {field} is "
                f"{said[field]} and {value}; use WordPiece.read(path, lowercase=...), which reads "
                "only vocab.txt"
            )
        said[field] = value
    # Single letters are no evidence: a vocabulary of words in lower case may contain signs such as
    # the angstrom's.
    other = next(
        (
            token
            for token in numbers
            if token[:1] != "["
            and len(token.removeprefix("##")) > 1
            and any(unicodedata.category(char) == "Lu" for char in token)
        ),
        None,
    )
    if upper is None and other is not None and "lowercase" not in said:
        raise ValueError(
            f"{folder / 'vocab.txt'} has no letters A to Z and the upper-case letters of "
            f"{other!r}, so it does not tell whether texts become lowercase; use "
            "WordPiece.read(path, lowercase=...)"
        )
    return {"lowercase": upper is None} | said


def llama(folder: Path) -> None:
    """Checks that a tokenizer_config.json next to llama2.c's tokenizer.bin describes Llama's
    tokenizer.

    Raises:
        ValueError: tokenizer_config.json describes another tokenizer.
    """
    tokens = ("<unk>", "<s>", "</s>")

    def added(value, config):
        return _added(
            value,
            lambda token: tokens.index(token) if token in tokens else None,
            "one of Llama's own",
        )

    values(
        folder,
        Config(
            {
                "tokenizer_class": Must(("LlamaTokenizer", "LlamaTokenizerFast", None)),
                "add_bos_token": Must((True, None)),
                "add_eos_token": Must((False, None)),
                "add_prefix_space": Must((True, None)),
                "unk_token": _token("<unk>"),
                "bos_token": _token("<s>"),
                "eos_token": _token("</s>"),
                "sp_model_kwargs": _NONE,
                "added_tokens_decoder": Fields(added),
                "split_special_tokens": Must((False,)),
                "additional_special_tokens": _NONE,
                "extra_special_tokens": _NONE,
            },
            _IRRELEVANT | {"pad_token"},
        ),
    )


def hugging_face(
    folder: Path, tokenizer, encode: Callable, description: Mapping
) -> tuple[int, ...]:
    """Compares tokenizer_config.json with the tokenizer.json in the same folder.

    Args:
        folder: the folder of tokenizer_config.json and tokenizer.json.
        tokenizer: a `tokenizers.Tokenizer` (from the library `tokenizers` of Hugging Face).
        encode: function that converts text to a `tokenizers.Encoding`.
        description: the contents of tokenizer.json.

    Returns:
        A tuple with the index of eos_token in the vocabulary, or () if there is no eos_token.

    Raises:
        ValueError: tokenizer_config.json and tokenizer.json contradict each other, or a field is
            not known.
    """
    parts = {
        part["type"]: part
        for part in _parts([description.get("normalizer"), description.get("pre_tokenizer")])
    }
    bert, ends = parts.get("BertNormalizer"), []

    def known(value, config):
        for each in (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else [value]
        ):
            token = _content(each)
            if token is not None and tokenizer.token_to_id(token) is None:
                raise ValueError(f"tokenizer.json has no token {token!r}")
        return {}

    def end(value, config):
        known([value], config)
        if value is not None:
            ends.append(tokenizer.token_to_id(_content(value)))
        return {}

    def adds(which, at):
        def check(value, config):
            token, found = _content(config.get(which)), encode("a")
            # The mask tells what the tokenizer adds from a text whose own token is the special one,
            # such as an unknown.
            held = (
                token is not None
                and bool(found.ids)
                and found.special_tokens_mask[at] == 1
                and (found.ids[at] == tokenizer.token_to_id(token))
            )
            if value is not None and not same(value, held):
                raise ValueError(f"tokenizer.json {'adds' if held else 'does not add'} the {which}")
            return {}

        return Fields(check)

    def equals(have):
        return Must((have, None))

    lower = bert["lowercase"] if bert else "Lowercase" in parts
    accents = bert["strip_accents"] if bert else "StripAccents" in parts
    values(
        folder,
        Config(
            {
                **{name: Fields(lambda value, config: known([value], config)) for name in TOKENS},
                "eos_token": Fields(end),
                "added_tokens_decoder": Fields(
                    lambda value, config: _added(value, tokenizer.token_to_id, "tokenizer.json's")
                ),
                "additional_special_tokens": Fields(known),
                "extra_special_tokens": Fields(known),
                "add_bos_token": adds("bos_token", 0),
                "add_eos_token": adds("eos_token", -1),
                "add_prefix_space": equals(_prefix(parts)),
                "split_special_tokens": Must((False,)),
                "do_lower_case": equals(lower),
                "strip_accents": equals(accents),
                "sp_model_kwargs": _NONE,
                "tokenize_chinese_chars": equals(bool(bert and bert["handle_chinese_chars"])),
            },
            _IRRELEVANT | {"tokenizer_class", "vocab_size"},
        ),
    )
    return tuple(ends)


def values(folder: Path, table: Config) -> dict[str, Any]:
    """Returns the options that the tokenizer_config.json of a folder sets, or {} if there is no
    such file.

    Raises:
        ValueError: the file contains fields that are not supported or not known; the message lists
            these fields.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        return {}
    try:
        return table.values(read(path))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _flag(option, *more):
    """Returns a `Fields` object that reads the tokenizer option `option` from a field of
    tokenizer_config.json. The value of the field may be true, false or a value in `more`."""

    def check(value, config):
        if not isinstance(value, bool) and value not in more:
            raise ValueError(f"expected {' or '.join(['true', 'false', *('null' for _ in more)])}")
        return {option: value}

    return Fields(check)


def _token(*tokens):
    """Returns a `Fields` object, which checks that the value of a field of tokenizer_config.json is
    one of `tokens`.

    In tokenizer_config.json, a token is a string, or an object whose field "content" is this
    string.
    """

    def check(value, config):
        if _content(value) not in tokens:
            raise ValueError(
                f"expected "
                f"{' or '.join('null' if token is None else repr(token) for token in tokens)}"
            )
        return {}

    return Fields(check)


def _content(token):
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str | None):
        raise ValueError("expected tokens")
    return token


def _added(value, number, whose):
    """Checks that every token in `value`, a dict {index: token}, is in the vocabulary with this
    index."""
    if not isinstance(value, dict):
        raise ValueError("expected {number: token}")
    for key, token in value.items():
        token = _content(token)
        if token is None or str(number(token)) != key:
            raise ValueError(f"token {token!r} is not {whose} with the number {key}")
    return {}


def _normalizer(path, numbers):
    """Returns the options that a tokenizer.json of BERT sets, or {} if there is no such file."""
    if not os.path.lexists(path):
        return {}
    try:
        return _bert(path, read(path, LARGEST), numbers)
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ValueError(
            f"{path} is not a tokenizer.json of BERT: {type(error).__name__} {error}"
        ) from None


def _bert(path, held, numbers):
    model, normalizer = (held.get(name) or {} for name in ("model", "normalizer"))
    steps = (held.get("post_processor") or {}).get("single")
    ends = steps and [next(iter(step.values())).get("id") for step in steps]
    expected = {
        "model.type": (model.get("type", "WordPiece"), "WordPiece"),
        "model.vocab": (model.get("vocab"), dict(numbers)),
        "model.unk_token": (model.get("unk_token"), "[UNK]"),
        "model.continuing_subword_prefix": (model.get("continuing_subword_prefix"), "##"),
        "model.max_input_chars_per_word": (model.get("max_input_chars_per_word"), 100),
        "normalizer.type": (normalizer.get("type"), "BertNormalizer"),
        "normalizer.clean_text": (normalizer.get("clean_text"), True),
        "pre_tokenizer.type": ((held.get("pre_tokenizer") or {}).get("type"), "BertPreTokenizer"),
        "post_processor.single": (ends, None if ends is None else ["[CLS]", "A", "[SEP]"]),
    }
    for name, (have, want) in expected.items():
        if not same(have, want):
            differ = (
                "differs from vocab.txt"
                if name == "model.vocab"
                else f"is {have!r}, expected {want!r}"
            )
            raise ValueError(
                f"{path} and vocab.txt describe different tokenizers: {name!r} {differ}; use "
                "WordPiece.read(path, lowercase=...), which reads only vocab.txt"
            )
    for token in held.get("added_tokens") or ():
        if token["content"] not in _SPECIAL or numbers.get(token["content"]) != token["id"]:
            raise ValueError(
                f"{path}: the added token {token['content']!r} is not one of BERT's own"
            )
    return {
        "lowercase": normalizer["lowercase"],
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }


def _parts(nodes):
    """Yields every object with a field "type" in the normalizers and pre-tokenizers of a
    tokenizer.json."""
    for node in nodes:
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                yield node
            yield from _parts(node.values())
        elif isinstance(node, list):
            yield from _parts(node)


def _prefix(parts):
    """Whether the tokenizer adds a space before the text."""
    if "ByteLevel" in parts:
        return parts["ByteLevel"]["add_prefix_space"]
    if "Metaspace" in parts:
        return parts["Metaspace"].get("prepend_scheme", "always") != "never"
    return "Prepend" in parts
