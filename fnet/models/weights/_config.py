"""Compares the config.json next to pretrained weights with a model. Unknown fields and unsupported
fields of config.json raise an error."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fnet._util._nearest import did_you_mean
from fnet.models.weights._json import read, text_of

LISTED = 8  # number of problems that an error lists; the others are only counted
NUMBERS = (int, float)
# Used instead of a field's value: do not compare the field with the model, or do not write it.
SKIP = object()


@dataclasses.dataclass(frozen=True)
class Use:
    """Describes a field of config.json that sets exactly one field of the model.

    Args:
        field: the name of the model's field.
        absent: the value that the original framework uses if config.json lacks the field, or a
            function that computes this value from the content of config.json. With the default
            SKIP, a missing field is not compared with the model.
        default: a function that takes the model, and returns a default value. Both null in
            config.json and None in the model's field stand for this default value.
        shorter: whether the value of the model's field may be smaller than the value in
            config.json, for example for the context length.
        square: whether config.json may contain a list of two equal values, such as [height, width],
            instead of one number.
    """

    field: str
    absent: Any = SKIP
    default: Callable | None = None
    shorter: bool = False
    square: bool = False

    def wanted(self, value, config) -> dict[str, Any]:
        if self.square and isinstance(value, list) and len(value) == 2 and same(*value):
            value = value[0]
        if self.square and isinstance(value, list):
            raise ValueError("expected a number, or two equal ones")
        return {self.field: value}

    def written(self, model) -> Any:
        value = getattr(model, self.field)
        if value is None and self.absent is None:
            return SKIP
        return self.default(model) if value is None and self.default is not None else value


@dataclasses.dataclass(frozen=True)
class Must:
    """Describes a field of config.json that must have one of the supported values. The field of
    config.json does not set a field of the model.

    Args:
        values: the supported values.
        absent: as in `Use`.
    """

    values: tuple
    absent: Any = SKIP

    def wanted(self, value, config) -> dict[str, Any]:
        if not any(same(value, each) for each in self.values):
            raise ValueError(f"expected {' or '.join(map(text_of, self.values))}")
        return {}

    def written(self, model) -> Any:
        supported = self.absent is SKIP or any(same(self.absent, each) for each in self.values)
        return SKIP if supported else self.values[0]


@dataclasses.dataclass(frozen=True)
class Fields:
    """A field of config.json that sets several fields of the model.

    Args:
        read: function that takes the field's value and the content of config.json, and returns
            {field of the model: value}. For an unsupported value, `read` raises ValueError with a
            description of the expected value.
        absent: as in `Use`.
        write: function that takes the model, and returns the field's value for config.json, or SKIP
            to write no value. `write` is the inverse of `read`, and raises ValueError if
            config.json cannot describe the model. By default, nothing is written.
        partial: whether the model's fields may also be None, for example in a model without a head.
        others: values of the model's fields that are accepted even if they differ from config.json.
            For example, a model may have another head than the head that config.json states.
    """

    read: Callable[[Any, Mapping], dict[str, Any]]
    absent: Any = SKIP
    write: Callable[[Any], Any] | None = None
    partial: bool = False
    others: tuple = ()

    def wanted(self, value, config) -> dict[str, Any]:
        return self.read(value, config)

    def written(self, model) -> Any:
        return SKIP if self.write is None else self.write(model)


@dataclasses.dataclass(frozen=True)
class Config:
    """The meaning of each field of config.json, for one `model_type` of one class of models.

    Args:
        fields: {field: Use, Must or Fields}.
        irrelevant: the fields that have no effect on the forward pass.
        names: the frameworks (keys of the model's `NAMES`) whose weights may be in the same folder
            as this config.json.
    """

    fields: Mapping[str, Use | Must | Fields]
    irrelevant: frozenset[str] = frozenset()
    names: tuple[str, ...] = ("huggingface",)

    def values(self, config: Mapping) -> dict[str, Any]:
        """Returns {field of the model: the value that config.json sets}.

        Raises:
            ValueError: config.json contains fields that are not supported or not known; the message
                lists these fields.
        """
        wanted, problems = self._wanted(config)
        self._raise(problems)
        return {field: value for *_, values in wanted for field, value in values.items()}

    def write(self, model) -> dict[str, Any]:
        """Returns the fields of config.json for a model: the inverse of `values`.

        Raises:
            ValueError: config.json cannot describe this model.
        """
        config, written = {}, set()
        for name, entry in self.fields.items():
            if isinstance(entry, Use):
                if entry.field in written:  # another name of the same field
                    continue
                written.add(entry.field)
            if (value := entry.written(model)) is not SKIP:
                config[name] = value
        return config

    def check(self, model, config: Mapping) -> None:
        """Compares config.json with a model.

        Raises:
            ValueError: fields of config.json differ from the model, are not supported or not known;
                the message lists these fields.
        """
        wanted, problems = self._wanted(config)
        changes = {}
        for entry, given, values in wanted:
            for field, want in values.items():
                have = getattr(model, field)
                if fits(entry, model, want, have):
                    continue
                if _comparable(want, have, null=getattr(type(model), field, ...) is None):
                    changes[field] = want
                    problems.append(f"{given}, the model has {field}={have!r}")
                else:
                    problems.append(f"{given}, expected a value like {text_of(have)}")
        advice = ", ".join(f"{field}={value!r}" for field, value in changes.items())
        self._raise(problems, f". Use dataclasses.replace(model, {advice})" if advice else "")

    def reads_architecture(self, config: Mapping) -> bool:
        """Whether the value of `architecture` (timm) or `architectures` (transformers) is
        supported."""
        name = "architecture" if "architecture" in self.fields else "architectures"
        if name not in self.fields or name not in config:
            return True
        try:
            self.fields[name].wanted(config[name], config)
        except ValueError:
            return False
        return True

    def compared(self) -> set[str]:
        """Returns a set of field names of the model: the attribute `field` of each `Use` object in
        `self.fields`."""
        return {entry.field for entry in self.fields.values() if isinstance(entry, Use)}

    def _wanted(self, config):
        """Returns a list of the settings in config.json, and a list of problems.

        Each setting is a tuple (entry, text, values) for one field of config.json. `entry` is the
        `Use`, `Must` or `Fields` object that describes the field. `text` states the name and the
        value of the field in error messages. `values` is a dict {field of the model: value}.
        """
        wanted, problems = [], []
        for name in [*config, *(name for name in self.fields if name not in config)]:
            if name in self.irrelevant:
                continue
            entry = self.fields.get(name)
            if entry is None:
                problems.append(f"{name!r} is {text_of(config[name])}, which fnet does not know")
                continue
            value = config.get(name, entry.absent)
            value = value(config) if callable(value) else value
            if value is SKIP:
                continue
            given = (
                f"{name!r} is {text_of(value)}"
                if name in config
                else f"{name!r} is absent, i.e. {text_of(value)}"
            )
            try:
                wanted.append((entry, given, entry.wanted(value, config)))
            except ValueError as error:
                problems.append(f"{given}, {error}")
        return wanted, problems

    def _raise(self, problems, advice=""):
        if problems:
            more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise ValueError(f"{'; '.join(problems[:LISTED])}{more}{advice}")


class Configuration:
    """The config.json of a folder, which is read when it is first needed, and only then."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "config.json"

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """The content of the file. Raises ValueError if it is damaged."""
        return read(self.path)

    @property
    def kind(self) -> Any:
        return kind_of(self.content)

    def check(self, model) -> Config | None:
        """Compares a model with the file.

        Returns:
            The `Config` that was used. The result is None if the folder has no config.json, or if a
            training run wrote the config.json.

        Raises:
            ValueError: config.json is damaged, or describes another model.
        """
        if not os.path.lexists(self.path):
            return None
        if self.kind is None and (self.folder / "metrics.jsonl").is_file():
            return None
        table = self._table(model)
        try:
            table.check(model, self.content)
        except ValueError as error:
            unknown = "which fnet does not know" in str(error)
            advice = ". If a field has no effect on the output, load with check_config=False"
            raise ValueError(
                f"{self.path} does not describe this {type(model).__name__}: {error}"
                + unknown * advice
            ) from None
        return table

    def model(self, classes: Sequence[type]) -> Any:
        """Returns the model that the file describes.

        Args:
            classes: the classes of models. The first model class that supports the `model_type` and
                the architecture in config.json is used.

        Raises:
            FileNotFoundError: the folder has no config.json.
            ValueError: config.json is damaged, is not supported by any model class, or has fields
                that are not supported or not known.
        """
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.folder} has no config.json, so its model is unknown; pass the model, "
                "pretrained.load(model, path)"
            )
        cls = self._class(classes)
        table = cls.CONFIGS[self.kind]
        try:
            return made(cls, table, self.content)
        except ValueError as error:
            raise ValueError(
                f"{self.path} describes a {cls.__name__} that fnet does not support: {error}"
            ) from None

    def _table(self, model) -> Config:
        """Returns the meaning of the fields for a model."""
        known, who = getattr(model, "CONFIGS", {}), type(model).__name__
        reads = " or ".join(_word(each) for each in known) or "none (its class has no CONFIGS)"
        if self.kind is None:
            raise ValueError(
                f"{self.path} has no 'model_type', so its model is unknown. A {who} reads {reads}."
                " If it is not the configuration of these weights, load with check_config=False"
            )
        if not isinstance(self.kind, str) or self.kind not in known:
            raise ValueError(
                f"{self.path}: 'model_type' is {text_of(self.kind)}: these weights are for another "
                f"model. A {who} reads {reads}"
            )
        return known[self.kind]

    def _class(self, classes):
        """Returns the first class that reads the `model_type` and the architecture."""
        candidates = [
            cls for cls in classes if isinstance(self.kind, str) and self.kind in cls.CONFIGS
        ]
        if not candidates:
            kinds = sorted({each for cls in classes for each in cls.CONFIGS})
            meant = did_you_mean(str(self.kind), kinds)
            raise ValueError(
                f"{self.path}: 'model_type' is {text_of(self.kind)}, which fnet does not support"
                + (f"; {meant} " if meant else "; ")
                + f"it supports {', '.join(kinds)}"
            )
        for cls in candidates:
            if cls.CONFIGS[self.kind].reads_architecture(self.content):
                return cls
        return candidates[0]


def made(cls, table, config):
    """Returns the model of class `cls` that config.json describes."""
    return cls(**{**cls.NAMES[names_for(table, cls)].config, **table.values(config)})


def names_for(table, cls):
    """Returns the framework (a key of `NAMES`) of the weights next to config.json."""
    return next((name for name in table.names if name in cls.NAMES), None)


def kind_of(config):
    """Returns the `model_type` of config.json or None. Returns "timm" if config.json has an
    `architecture` instead of a `model_type`, as in timm."""
    kind = config.get("model_type")
    return "timm" if kind is None and "architecture" in config else kind


def same(a, b) -> bool:
    """Whether a equals b. Unlike in Python, a boolean does not equal a number: True differs from 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def fits(entry, model, want, have):
    """Whether a model's field has the value that config.json sets."""
    if getattr(entry, "default", None) is not None:
        want, have = (entry.default(model) if value is None else value for value in (want, have))
    if (
        same(want, have)
        or (have is None and getattr(entry, "partial", False))
        or have in getattr(entry, "others", ())
    ):
        return True
    return getattr(entry, "shorter", False) and _comparable(want, have) and have < want


def _comparable(want, have, null=False):
    """Whether the types of two values are compatible: `want` in config.json, and `have` in the
    model's field. `null` states whether `want` may be None."""
    if want is None:
        return null
    if have is None:
        return not isinstance(want, bool | str | list | dict)
    if isinstance(want, bool) or isinstance(have, bool):
        return isinstance(want, bool) and isinstance(have, bool)
    return isinstance(want, NUMBERS) == isinstance(have, NUMBERS) and not isinstance(
        want, str | list | dict
    )


def _word(kind):
    return (
        "timm's config.json (with 'architecture')" if kind == "timm" else f"'model_type' {kind!r}"
    )


IRRELEVANT = frozenset(
    """
    transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash transformers.js_config
    _attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled
    use_cache gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward pretraining_tp
    output_attentions output_hidden_states return_dict output_scores return_dict_in_generate
    initializer_range initializer_factor layer_norm_init
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id mask_token_id
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params tokenizer_class prefix
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
""".split()
)


def transformers(
    fields: Mapping,
    *,
    architectures: Sequence[str] | Mapping[str, Mapping],
    irrelevant: str = "",
    other_heads: tuple[str, ...] = (),
    **options,
) -> Config:
    """Returns a `Config` for transformers' config.json: `fields`, and those of all model families.

    Args:
        fields: {field: Use, Must or Fields}, the meaning of each field for one family.
        architectures: the class names that the field `architectures` may contain, or a dict from
            them to fields of the model, such as {"BertForMaskedLM": {"head": "masked_lm"}}.
        irrelevant: more fields that have no effect on the forward pass, separated by spaces. One
            that is also in `fields` is ignored by `load`, but written by `save`. With
            `save(like=...)`, fields without effect are copied from the config.json of `like`.
        other_heads: heads that a model may have although `architectures` states another. All heads
            must have different array names, so that `load` can detect a file with the weights of
            another head.
        options: other arguments of `Config`.
    """

    def architecture(value, config):
        if not (
            value is None
            or (isinstance(value, list) and all(each in architectures for each in value))
        ):
            raise ValueError(f"expected one of {', '.join(architectures)}")
        kinds = [
            {field: x for field, x in heads[each].items() if x is not ...} for each in value or ()
        ]
        if any(kind != kinds[0] for kind in kinds):
            raise ValueError("expected classes with the same head")
        return kinds[0] if kinds else {}

    def written(model):
        fitting = (
            name
            for name, kind in heads.items()
            if all(
                getattr(model, field) is not None
                if value is ...
                else getattr(model, field) == value
                for field, value in kind.items()
            )
        )
        name = next(fitting, None)
        return SKIP if name is None else [name]

    heads = (
        architectures
        if isinstance(architectures, Mapping)
        else {name: {} for name in architectures}
    )

    common = {
        "model_type": Fields(lambda value, config: {}),
        "architectures": Fields(architecture, write=written, partial=True, others=other_heads),
        "is_encoder_decoder": Must((False,)),
        "is_decoder": Must((False,)),
        "add_cross_attention": Must((False,)),
        "cross_attention_hidden_size": Must((None,)),
        "tie_encoder_decoder": Must((False,)),
        "pruned_heads": Must(({}, None)),
        "quantization_config": Must((None,)),
    }
    return Config(
        common | dict(fields), (IRRELEVANT - set(fields)) | set(irrelevant.split()), **options
    )
