"""Files in GGUF, written as llama.cpp's converter writes them, of small random models of
transformers; a part of verify_pretrained.py.

    make verify-pretrained ARGS=gguf_files            # or ARGS=gguf_files=gemma3,llama3

`pretrained.load_gguf` gives the logits of the model that was written, and those that transformers'
own reader of GGUF gives for what `save_gguf` writes. That reader does not know everything: for
`_BY_MODEL_ALONE`, only the first is compared.
"""

import pathlib
import tempfile

import numpy as np
from verifying import check, needed

from fnet import transforms as ft
from fnet.models import pretrained

BOUND = 1e-4  # relative to the largest logit
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 24))
SIZES = dict(
    vocab_size=90,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_GEMMA = dict(head_dim=256, query_pre_attn_scalar=256, sliding_window=8)
# name -> (architecture in GGUF, name of the class of the config, its fields)
FAMILIES = {
    "llama": ("llama", "LlamaConfig", dict(num_hidden_layers=2)),
    "llama3": (
        "llama",
        "LlamaConfig",
        dict(num_hidden_layers=2, rope_parameters=LLAMA3, max_position_embeddings=16384),
    ),
    "qwen2": ("qwen2", "Qwen2Config", dict(num_hidden_layers=2)),
    "qwen3": ("qwen3", "Qwen3Config", dict(num_hidden_layers=2, head_dim=128)),  # the reader's
    "gemma2": ("gemma2", "Gemma2Config", dict(num_hidden_layers=3, **_GEMMA)),
    "gemma3": ("gemma3", "Gemma3TextConfig", dict(num_hidden_layers=8, **_GEMMA)),
}
_BY_MODEL_ALONE = {"llama3": "transformers' reader ignores rope_freqs"}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def random_model(family):
    """Returns a model of transformers with random weights, norms included."""
    torch, transformers = needed("torch", "gguf_files"), needed("transformers", "gguf_files")
    _, kind, fields = FAMILIES[family]
    config = getattr(transformers, kind)(
        **{**SIZES, **fields}, attn_implementation="eager", dtype="float32"
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            one = 1.0 if "norm" in name and "gemma" not in family else 0.0
            parameter.copy_(one + 0.2 * torch.randn_like(parameter))
    return model


def arrays(family, model):
    """Returns the arrays of a model as llama.cpp's converter writes them."""
    config, gemma, found = model.config, family.startswith("gemma"), {}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if gemma and name.endswith("norm.weight"):
            array = array + 1
        if name in _TOP:
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                found[_TOP[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        if family.startswith("llama") and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        second = "post_attention_norm" if gemma else "ffn_norm"
        names = _NAMES | {"post_attention_layernorm": second}
        found[f"blk.{layer}.{names[part]}.{kind}"] = array
    if family == "llama3":
        found["rope_freqs.weight"] = rope_freqs(config.rope_parameters, config.head_dim)
    return found


def rope_freqs(rope, head_dim):
    """Returns the divisors of the rotation rates, by the formula of llama.cpp's converter."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def write(file, family, model, kind="F32"):
    """Writes a model in GGUF; `kind` is the format of its matrices."""
    import gguf

    architecture, config = FAMILIES[family][0], model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    elif architecture != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for name, array in arrays(family, model).items():
        raw = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def difference(family, kind="F32"):
    """Returns the largest differences of fnet's logits: from the model's, or for a quantized format
    None, and from those of transformers' reader, or None."""
    torch, transformers = needed("torch", "gguf_files"), needed("transformers", "gguf_files")
    model = random_model(family)
    logits = lambda each: each(torch.tensor(TOKENS)).logits.detach().numpy()
    with tempfile.TemporaryDirectory() as folder:
        old = write(pathlib.Path(folder) / "written.gguf", family, model, kind)
        decoder, params, _ = pretrained.load_gguf(old)
        file = pretrained.save_gguf(decoder, params, pathlib.Path(folder) / "saved.gguf", like=old)
        got = np.asarray(ft.use_implicit_arrays(decoder)(params, TOKENS))
        read = None
        if family not in _BY_MODEL_ALONE:
            read = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
            ).eval()
        apart = lambda want: float(np.abs(got - want).max() / np.abs(want).max())
        return (
            apart(logits(model)) if kind == "F32" else None,
            None if read is None else apart(logits(read)),
        )


@check
def gguf_files(*names):
    """GGUF files of each family: transformers' logits."""
    for family in names or FAMILIES:
        written, read = difference(family)
        assert written < BOUND and (read is None or read < BOUND), (family, written, read)
        if read is None:
            yield f"{family}: differs from the model by {written:.1e}; {_BY_MODEL_ALONE[family]}"
            continue
        _, quantized = difference(family, "Q8_0")
        assert quantized < BOUND, (family, quantized)
        yield (
            f"{family}: differs from the model by {written:.1e}, from transformers' reader by "
            f"{read:.1e}, in Q8_0 by {quantized:.1e}"
        )
