"""Decoders of transformers with every field of config.json altered in turn; a part of
verify_pretrained.py.

    make verify-pretrained ARGS=altered_decoders            # or ARGS=altered_decoders=gemma,phi3
    python tests/reference/verify_decoders.py [FAMILY ...]

Each field of the config.json of a small random model is altered, one at a time: other values, null,
and absent. `pretrained.load(folder)` raises an error that names the field (or the model's field
that it sets), or the logits are those of transformers for the altered config.json: with the same
weights if their names and shapes fit, otherwise with new ones. Fields that both ignore, such as
those for training, count as equal. Where transformers raises an error, there is nothing to compare
with.
"""

import copy
import dataclasses
import functools
import json
import pathlib
import shutil
import sys
import tempfile
import warnings

import jax
import numpy as np
from verify_families import (
    BOUND,
    EAGER,
    FAMILIES,
    LLAMA3,
    YARN,
    difference,
    random_weights,
    sizes_of,
)
from verifying import check, needed

from fnet import models
from fnet.models import pretrained
from fnet.models.weights._config import IRRELEVANT, Use

LARGE = 10**6  # parameters; sizes that are absent in config.json are those of a published model
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "gelu_fast", "mish")
ROPES = (
    LLAMA3,
    YARN,
    dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    dict(
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    ),
)
OLDER = {  # fields of older files, which today's transformers does not write
    "rope_theta": [500.0],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 3.0}],
    "partial_rotary_factor": [0.5],
    "torch_dtype": ["float32"],
    "pretraining_tp": [2],
    "quantization_config": [{}],
    "pruned_heads": [{"0": [1]}],
    "unknown_field": [1],
}
# Other values than those of `values`.
MORE = {
    "sliding_window": [3, 9, 64],
    "layer_types": [["full_attention"], ["sliding_attention"], ["chunked_attention"]],
    "no_rope_layers": [[0, 1], [1]],
    "mlp_only_layers": [[0]],
    "final_logit_softcapping": [0.5],
    "attn_logit_softcapping": [0.5],
    "num_key_value_heads": [1],
    "use_bidirectional_attention": [True],
    "n_inner": [20],
    "head_dim": [12],
    "query_pre_attn_scalar": [3],
    "clip_qkv": [0.5],
    "decoder_sparse_step": [2],
    "max_position_embeddings": [32],
    "original_max_position_embeddings": [16],
    "_sliding_window_pattern": [2],
    "eos_token_id": [[1, 2]],
    "sliding_window_pattern": [2],
}


def values(name, value, config):
    """Other values of a field."""
    depth = config.get("num_hidden_layers", config.get("n_layer"))
    if name in ("architectures", "model_type"):
        return [["OtherModel"]] if name == "architectures" else ["other"]
    if name in ("rope_parameters", "rope_scaling"):
        whole = [each["rope_parameters"] for each in ROPES]
        parts = [
            value | {part: other}
            for part in value or ()
            for other in _parts(part, value[part], config)
        ]
        return whole + parts
    found = [
        [each[i % len(each)] for i in range(depth)]
        for each in MORE.get(name, ())
        if isinstance(each, list)
    ]
    found += [each for each in MORE.get(name, ()) if not isinstance(each, list)]
    if isinstance(value, str):
        found += [each for each in ACTIVATIONS if each != value] if "act" in name else ["other"]
    elif isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int):
        found.append(2 * value)
    elif isinstance(value, float):
        found.append(value + 0.25)
    elif isinstance(value, list):
        found += [value[::-1], value[:-1]] if value else []
    elif isinstance(value, dict):
        found.append({})
    return found


def _parts(part, value, config):
    """Other values of a part of rope_parameters."""
    return (
        values(part, value, config)
        if isinstance(value, dict)
        else [2 * value]
        if isinstance(value, float)
        else []
    )


def changes(config, family):
    """Yields (field, config.json with that field altered)."""
    for name, value in config.items():
        ignored = name in IRRELEVANT
        others = values(name, value, config)
        for other in others[:1] if ignored else [*others, None]:
            if other != value or type(other) is not type(value):
                yield name, config | {name: copy.deepcopy(other)}
        if not ignored:
            yield name, {key: each for key, each in config.items() if key != name}
    for name, others in OLDER.items():
        for other in others if name not in config else ():
            yield (
                name,
                {
                    key: each
                    for key, each in config.items()
                    if not (name in ("rope_theta", "rope_scaling") and key == "rope_parameters")
                }
                | {name: other},
            )


def reference(cls, folder, tokens, seed):
    """The logits of transformers' model for config.json, whose weights are written if those of the
    folder do not fit.

    Returns:
        (logits, whether the weights are new); None if transformers raises an error, or the model is
        large.
    """
    torch = needed("torch", "PyTorch")
    text = (folder / "config.json").read_text()
    try:
        config = cls.config_class.from_pretrained(folder, **EAGER)
        with torch.device("meta"):
            if sum(each.numel() for each in cls(config).parameters()) > LARGE:
                return None
        model, notes = cls.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **EAGER,
        )
        new = any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        if new:
            torch.manual_seed(seed)
            model = random_weights(cls(config))
            model.save_pretrained(folder)
        with torch.no_grad():
            out = model.eval()(torch.tensor(tokens), use_cache=False)
        return (out.logits if hasattr(out, "logits") else out[0]).numpy(), new
    except Exception:  # of many kinds
        return None
    finally:
        (folder / "config.json").write_text(text)


@functools.partial(jax.jit, static_argnums=0)
def computed(model, params, tokens):
    return model(params, tokens)


def spellings(field, config):
    """The field of config.json, and the field of the model that it sets."""
    tables = [cls.CONFIGS.get(config.get("model_type")) for cls in (models.Decoder, models.GPT)]
    entries = [table.fields.get(field) for table in tables if table is not None]
    return [field, *(f"{entry.field}=" for entry in entries if isinstance(entry, Use))]


def outcome(folder, field, tokens, want):
    """("equal", difference), ("refused", the error) or ("wrong", the error or difference)."""
    try:
        model, params, _ = pretrained.load(folder)
        worst = difference(computed(model, params, tokens % model.vocab_size), want)
    except (ValueError, TypeError) as error:
        config = json.loads((folder / "config.json").read_text())
        return "refused" if any(
            name in str(error) for name in spellings(field, config)
        ) else "wrong", str(error)
    return ("equal" if worst <= BOUND else "wrong"), worst


def altered(name, family):
    """Yields (field, value, kind, detail) for one family; kind None: transformers raises an error."""
    transformers = needed("transformers", "transformers, the reference,")
    cls = getattr(transformers, family.model)
    torch = needed("torch", "PyTorch")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as place:
        folder, place = pathlib.Path(folder), pathlib.Path(place)
        config = getattr(transformers, family.config)(
            **sizes_of(family, 0) | family.cases[0], **EAGER
        )
        model = random_weights(cls(config))
        model.save_pretrained(folder)
        config = {
            key: value for key, value in config.to_dict().items() if not key.startswith("_")
        } | json.loads((folder / "config.json").read_text())
        tokens = np.random.default_rng(0).integers(0, min(config["vocab_size"], 32), (2, 40))
        for number, (field, change) in enumerate(changes(config, family)):
            for path in folder.iterdir():
                shutil.copyfile(path, place / path.name)
            (place / "config.json").write_text(json.dumps(change))
            found = reference(cls, place, tokens, number)
            kind, detail = (
                (None, None) if found is None else outcome(place, field, tokens, found[0])
            )
            yield field, change.get(field, "absent"), kind, detail


@dataclasses.dataclass
class Counts:
    name: str
    fields: set = dataclasses.field(default_factory=set)
    equal: int = 0
    refused: int = 0
    wrong: int = 0
    without: int = 0
    worst: float = 0.0

    def add(self, field, kind, detail):
        self.fields.add(field)
        setattr(self, kind or "without", getattr(self, kind or "without") + 1)
        if kind == "equal":
            self.worst = max(self.worst, detail)

    def row(self):
        return (
            f"| {self.name} | {len(self.fields)} | {self.equal + self.refused + self.wrong} | "
            f"{self.equal} | {self.worst:.1e} | {self.refused} | {self.wrong} |"
        )


HEAD = (
    "| family | fields | configurations | equal | largest relative difference | refused | wrong |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def counts(names=(), say=None):
    """The counts of each family; `say` receives a line for each wrong one."""
    warnings.filterwarnings("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # each program runs once
    logging = needed("transformers", "transformers, the reference,").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, family in FAMILIES.items():
        if names and name not in names:
            continue
        count = Counts(name)
        for field, value, kind, detail in altered(name, family):
            count.add(field, kind, detail)
            if kind == "wrong" and say is not None:
                say(f"{name}: {field}={value}: {detail}")
        jax.clear_caches()
        yield count


@check
def altered_decoders(*names):
    """Decoders with every field of config.json altered in turn: transformers' logits, or an error."""
    wrong = []
    yield HEAD
    for count in counts(names, say=wrong.append):
        yield count.row()
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    print(HEAD)
    for count in counts(sys.argv[1:], say=lambda line: print(line, flush=True)):
        print(count.row(), flush=True)
