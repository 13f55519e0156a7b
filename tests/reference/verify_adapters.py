"""LoRA adapters against PEFT, in both directions; a part of verify_pretrained.py."""

import dataclasses
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from verifying import check, needed

from fnet import compress, models
from fnet import transforms as ft
from fnet.models import pretrained

TOKENS = np.array([[1, 5, 9, 2], [3, 3, 0, 7]])


def cases(transformers):
    """{name: (network, fnet's model, options of LoraConfig)}"""
    llama = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
    )
    gpt2 = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    return {
        "Llama": (
            transformers.LlamaForCausalLM(llama).eval(),
            models.Decoder(24, 16, 3, 4, 2, 20, context=16),
            {
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "rank_pattern": {"layers.1.mlp.down_proj": 2},
            },
        ),
        "GPT-2": (
            transformers.GPT2LMHeadModel(gpt2).eval(),
            models.GPT(24, 16, 2, 4, context=16),
            {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        ),
    }


def drawn(params):
    """Random changes of the attention."""
    rules = {".*attention/(query|value).*": 3, ".*attention/out.*": 2}
    params = compress.lora(jax.random.key(0), params, rules, alpha=5)
    is_change = lambda x: isinstance(x, compress.LowRank)
    fill = lambda w: (
        dataclasses.replace(w, b=jax.random.normal(jax.random.key(3), w.b.shape))
        if is_change(w)
        else w
    )
    return jax.tree.map(fill, params, is_leaf=is_change)


def relative(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@check
def adapters_against_peft():
    """Logits with adapters that PEFT wrote, and PEFT's with those that fnet wrote."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    peft = needed("peft", "PEFT")
    torch.manual_seed(0)
    theirs = lambda network: network(torch.tensor(TOKENS)).logits.detach().numpy()
    for name, (network, model, options) in cases(transformers).items():
        ours = lambda params, model=model: ft.use_implicit_arrays(model)(
            params, jnp.asarray(TOKENS)
        )
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            network.save_pretrained(folder / "base")
            params, _ = pretrained.load(model, folder / "base", check_config=False)
            config = peft.LoraConfig(r=4, lora_alpha=7, init_lora_weights=False, **options)
            adapted = peft.get_peft_model(network, config).eval()
            adapted.save_pretrained(folder / "theirs")
            want = theirs(adapted)
            read = relative(ours(pretrained.load_adapter(model, params, folder / "theirs")), want)
            changed = drawn(params)
            pretrained.save_adapter(model, changed, folder / "ours")
            base = type(network).from_pretrained(folder / "base").eval()
            want = theirs(peft.PeftModel.from_pretrained(base, folder / "ours").eval())
            written = relative(ours(changed), want)
        yield f"{name}: read from PEFT within {read:.1e} of the largest logit, written for PEFT within {written:.1e}"
        assert max(read, written) < 2e-6
