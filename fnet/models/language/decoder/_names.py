"""The names of a Decoder's arrays in the files of transformers and llama.cpp."""

from __future__ import annotations

from fnet.models.weights._torch_layers import fused, qkv, torch_layers
from fnet.models.weights._weight_names import DENSE, SAME, Names, Rule, Spare, Tied, interleaved
from fnet.models.weights._words import torch

KERNELS = (
    *(f"attention/{name}" for name in ("query", "key", "value", "out")),
    "gate",
    "down",
    "up",
)


def block(ours, keys):
    """Returns the rules that map the keys of a file to the arrays of a Llama block. `keys` contains
    the keys of the kernels in the order of `KERNELS`, then the keys of the two norms. In the file,
    kernels have the layout [out,
    in]."""
    paths = (
        *(f"{ours}/{name}/kernel" for name in KERNELS),
        f"{ours}/norm1/scale",
        f"{ours}/norm2/scale",
    )
    return tuple(
        Rule(path, key, DENSE if path.endswith("kernel") else SAME)
        for path, key in zip(paths, keys)
    )


def both(rules):
    """Returns two sets of naming rules: for stacked parameters of all blocks, and for separate
    parameters per block."""
    return rules("blocks"), rules("blocks/{i}")


def ends(block_rules):
    """Returns the naming rules for all arrays of a decoder: the embedding, the blocks, the last
    norm and the head."""
    rates = "model.layers.{i}.self_attn.rotary_emb.inv_freq"
    return (
        torch.embed("embed", "model.embed_tokens"),
        torch.dense("head", "lm_head"),
        both(block_rules),
        torch.norm("norm", "model.norm"),
        Tied("lm_head.weight", "embed/embedding"),
        both(lambda ours: Spare(rates, f"{ours}/attention/query/kernel")),
    )


def norms(model, ours, theirs):
    """Returns the rules that map the keys of a file to the norms of a block. The key
    post_attention_layernorm belongs to the norm after the attention if the model has `post_norm`.
    If the model has no `post_norm`, post_attention_layernorm belongs to the norm before the MLP."""
    second = "pre_feedforward_layernorm" if model.post_norm else "post_attention_layernorm"
    return torch_layers(
        ours,
        theirs,
        {},
        {
            "norm1": "input_layernorm",
            "norm2": second,
            "post_norm1": "post_attention_layernorm",
            "post_norm2": "post_feedforward_layernorm",
        },
    )


def experts(
    ours, theirs, router="mlp.gate", name="mlp.experts.{e}.{}_proj", parts=("gate", "up", "down")
):
    """Returns the naming rules for the router of an MLP with experts, and for the kernels of each
    expert."""
    kernels = zip(("gate", "up", "down"), parts)
    return (
        torch.dense(f"{ours}/router", f"{theirs}.{router}"),
        *(
            Rule(f"{ours}/{mine}", f"{theirs}.{name.replace('{}', part)}.weight", DENSE)
            for mine, part in kernels
        ),
    )


def mixtral(model):
    def rules(ours, theirs="model.layers.{i}"):
        return (
            attention(ours, theirs),
            norms(model, ours, theirs),
            experts(
                ours,
                theirs,
                "block_sparse_moe.gate",
                "block_sparse_moe.experts.{e}.{}",
                ("w1", "w3", "w2"),
            ),
        )

    return ends(rules)


def attention(ours, theirs):
    return torch_layers(
        f"{ours}/attention",
        f"{theirs}.self_attn",
        {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"},
        {"query_norm": "q_norm", "key_norm": "k_norm"},
    )


def huggingface(model):
    def rules(ours, theirs="model.layers.{i}"):
        mlp = (
            torch.dense(f"{ours}/{name}", f"{theirs}.mlp.{name}_proj")
            for name in ("gate", "up", "down")
        )
        return attention(ours, theirs), *mlp, experts(ours, theirs), norms(model, ours, theirs)

    return ends(rules)


def phi3(model):
    """Returns the naming rules for files in which one matrix contains the kernels of query, key and
    value, and another matrix contains those of gate and up."""

    def rules(ours, theirs="model.layers.{i}"):
        kernels = tuple(f"{each}/kernel" for each in qkv(ours))
        return (
            Rule(kernels, f"{theirs}.self_attn.qkv_proj.weight", DENSE),
            Rule(
                (f"{ours}/gate/kernel", f"{ours}/up/kernel"),
                f"{theirs}.mlp.gate_up_proj.weight",
                DENSE,
            ),
            torch.dense(f"{ours}/attention/out", f"{theirs}.self_attn.o_proj"),
            torch.dense(f"{ours}/down", f"{theirs}.mlp.down_proj"),
            norms(model, ours, theirs),
        )

    return ends(rules)


def gpt_neox(model):
    """Returns the naming rules for files in which one matrix contains the kernels of query, key and
    value, interleaved by head."""
    layout = interleaved(model.heads)

    def rules(ours, theirs="gpt_neox.layers.{i}"):
        spare = (
            Spare(f"{theirs}.attention.{name}", f"{ours}/norm1/scale")
            for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
        )
        return (
            fused(qkv(ours), f"{theirs}.attention.query_key_value", layout, layout),
            torch_layers(
                ours,
                theirs,
                {
                    "attention/out": "attention.dense",
                    "up": "mlp.dense_h_to_4h",
                    "down": "mlp.dense_4h_to_h",
                },
                {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
            ),
            *spare,
        )

    return (
        torch.embed("embed", "gpt_neox.embed_in"),
        torch.dense("head", "embed_out"),
        both(rules),
        torch.norm("norm", "gpt_neox.final_layer_norm"),
        Tied("embed_out.weight", "embed/embedding"),
    )


def _plain(**others):
    return dict(gated=True, layer_norm=False, parallel=False) | others


_PYTORCH = {"format": "pt"}
NAMES = {
    "huggingface": Names(huggingface, config=_plain(interleaved=False), metadata=_PYTORCH),
    "phi3": Names(phi3, config=_plain(interleaved=False), metadata=_PYTORCH, only_named=True),
    "mixtral": Names(mixtral, config=_plain(interleaved=False), metadata=_PYTORCH, only_named=True),
    "gpt_neox": Names(
        gpt_neox,
        config={"interleaved": False, "gated": False, "layer_norm": True},
        metadata=_PYTORCH,
    ),
}
