"""Chat templates against transformers' `apply_chat_template`; a part of verify_pretrained.py.

Run it with:

    make verify-pretrained ARGS=chat
    .venv-verify/bin/python tests/reference/verify_chat.py    # writes chat.json for tests/models/test_chat.py
"""

import json
import pathlib
import tempfile

import jax
from chat_templates import CONVERSATIONS, DATE, TEMPLATES
from verifying import check, needed

from fnet import models
from fnet.models import pretrained

HERE = pathlib.Path(__file__).parent


def tokenizer(transformers, tokens, template):
    """A fast tokenizer whose tokens are words and signs, with the special tokens of a style."""
    import tokenizers

    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {chr(code): index for index, code in enumerate(range(33, 127))}, [], unk_token="?"
        )
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {name: token for name, token in tokens.items() if token}
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", **names)
    if "bos_token" in names:  # which a rendered template must not get twice
        bos = names["bos_token"]
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, words.convert_tokens_to_ids(bos))]
        )
        words = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", **names)
    words.chat_template = template
    return words


def rendered(words, name):
    """The text of transformers, or None for messages that the template rejects."""
    messages, options = CONVERSATIONS[name]
    try:
        return words.apply_chat_template(messages, tokenize=False, **DATE, **options)
    except Exception:  # templates raise exceptions of any type
        return None


@check
def chat():
    """Conversations rendered by templates of nine styles equal those of transformers, and so do
    their tokens."""
    transformers = needed("transformers", "transformers")
    needed("tokenizers", "tokenizers")
    for style, (template, tokens) in TEMPLATES.items():
        theirs = tokenizer(transformers, tokens, template)
        equal = rejected = 0
        for form in ("jinja", "config", "list"):
            with tempfile.TemporaryDirectory() as folder:
                if form == "list":
                    theirs.chat_template = {
                        "default": template,
                        "short": "{{ messages[0].content }}",
                    }
                theirs.save_pretrained(folder, save_jinja_files=form == "jinja")
                words = models.read_tokenizer(folder)
            for name, (messages, options) in CONVERSATIONS.items():
                want = rendered(theirs, name)
                try:
                    text = words.chat_template.render(messages, **DATE, **options)
                except ValueError as error:
                    assert want is None, (style, name, error)
                    rejected += 1
                    continue
                assert text == want, (style, name, text, want)
                ids = theirs.apply_chat_template(messages, **DATE, **options)["input_ids"]
                assert models.tokenizers._chat.encoded(words, text) == ids, (style, name, ids)
                equal += 1
        yield f"{style}: {equal} texts and their tokens are equal, {rejected} rejected by both"
    yield _answers(transformers)


def _answers(transformers):
    """Greedy answers, which stop at the stop tokens, against transformers' `generate`."""
    import torch

    template, tokens = TEMPLATES["chatml"]
    count, stopped = 0, 0
    for seed in range(4):
        theirs = tokenizer(transformers, tokens, template)
        torch.manual_seed(seed)
        network = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=len(theirs),
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=20,
                max_position_embeddings=256,
                initializer_range=0.5,
                bos_token_id=None,
                eos_token_id=40,
                pad_token_id=0,
            )
        ).eval()
        with tempfile.TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            theirs.save_pretrained(folder)
            model, params, _ = pretrained.load(folder)
            words = models.read_tokenizer(folder)
        for messages, _ in list(CONVERSATIONS.values())[:4]:
            inputs = theirs.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt"
            )
            ids = network.generate(
                **inputs, max_new_tokens=60, do_sample=False, eos_token_id=[40, *words.stop]
            )[0, inputs["input_ids"].shape[1] :].tolist()
            stopped += ids[-1] in words.stop
            want = theirs.decode(
                ids[:-1] if ids[-1] in words.stop else ids,
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            with jax.default_matmul_precision("highest"):
                text = "".join(
                    models.chat(model, params, words, messages, max_tokens=60, temperature=0)
                )
            assert text.split() == want.split(), (text, want)
            count += 1
    return f"{count} greedy answers of `models.chat` equal those of transformers; {stopped} end with a stop token"


def write():
    """Writes the texts of transformers to chat.json: {style: {conversation: text, or null}}."""
    import transformers

    texts = {
        style: {
            name: rendered(tokenizer(transformers, tokens, template), name)
            for name in CONVERSATIONS
        }
        for style, (template, tokens) in TEMPLATES.items()
    }
    (HERE / "chat.json").write_text(
        json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    write()
