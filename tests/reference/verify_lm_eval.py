"""models.score against transformers, and lm-evaluation-harness on a model of fnet against its own
backend for transformers; a part of verify_pretrained.py.

    make verify-pretrained ARGS=score_against_transformers
    make verify-pretrained ARGS=lm_eval_against_hf
"""

import json
import os
import pathlib
import tempfile

import numpy as np
from verifying import check, needed

from fnet import models
from fnet.models import pretrained

WORDS = "the tempest storm king island duke magic ship sea spirit drown my his a is was no of and".split()
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONTEXT = 48


def networks(torch, transformers, vocab_size):
    """(name, network) of random weights so large that the most probable token varies."""
    common = dict(
        vocab_size=vocab_size,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    llama = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=CONTEXT,
        **common,
    )
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, **common)
    for name, kind, config in (
        ("llama", transformers.LlamaForCausalLM, llama),
        ("gpt2", transformers.GPT2LMHeadModel, gpt2),
    ):
        torch.manual_seed(0)
        yield name, kind(config).eval()


def sentences(count, least, most, seed):
    rng = np.random.default_rng(seed)
    return [
        " ".join(rng.choice(WORDS, rng.integers(least, most + 1)).tolist()) for _ in range(count)
    ]


def write_tokenizer(folder, bos):
    """Trains a byte-level BPE of 300 tokens on the sentences, with or without a token before each
    text, and returns transformers' form of it."""
    tokenizers = needed("tokenizers", "tokenizers")
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences(200, 5, 20, 9), trainer)
    if bos:
        bpe.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return bpe.get_vocab_size()


def reference(torch, network, tokens):
    """The log-probability of each token but the first."""
    with torch.no_grad():
        logits = network(torch.tensor([list(tokens)])).logits[0, :-1]
    rows = torch.log_softmax(logits.double(), -1)
    return rows[np.arange(len(tokens) - 1), list(tokens[1:])].numpy(), logits.argmax(-1).numpy()


@check
def score_against_transformers():
    """Log-probabilities, greedy and perplexity of random texts equal those of transformers."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    rng = np.random.default_rng(0)
    for name, network in networks(torch, transformers, 300):
        with tempfile.TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            model, params, _ = pretrained.load(folder)
        texts = [rng.integers(0, 300, n).tolist() for n in rng.integers(2, CONTEXT + 1, 40)]
        for text in texts[:20]:  # the most probable continuation, which is greedy
            start = np.array([text[:3]], np.int32)
            out = models.generate(model, params, start, max_tokens=8, temperature=0)
            texts.append([*text[:3], *np.asarray(out.tokens[0]).tolist()])
        pairs = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts[:40]]
        pairs += [(text[:3], text[3:]) for text in texts[40:] if len(text) > 3]
        found, answers = models.score(model, params, texts), models.score(model, params, pairs)
        error = 0.0
        for text, score in zip(texts, found):
            want, best = reference(torch, network, text)
            error = max(error, np.abs(score.log_probs - want).max())
            assert score.greedy == bool((best == text[1:]).all())
        for (prompt, rest), score in zip(pairs, answers):
            want, best = reference(torch, network, [*prompt, *rest])
            start = len(prompt) - 1
            error = max(error, np.abs(score.log_probs - want[start:]).max())
            assert score.greedy == bool((best[start:] == rest).all())
        assert error < 1e-4, error
        greedy = sum(score.greedy for score in answers)
        counts = f"{len(texts)} texts and {len(pairs)} pairs ({greedy} greedy)"
        yield f"{name}: {counts}: log-probabilities within {error:.1e}"
        yield _sliding(torch, network, name, model, params, rng)


def _sliding(torch, network, name, model, params, rng):
    """The loop of transformers' guide "Perplexity of fixed-length models"; the length is such that
    its last window is full."""
    longest, stride = CONTEXT, 16
    text = rng.integers(0, 300, longest + 9 * stride).tolist()
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(text), stride):
        end = min(begin + longest, len(text))
        window = torch.tensor([text[begin:end]])
        labels = window.clone()
        labels[:, : -(end - previous)] = -100
        with torch.no_grad():
            loss = network(window, labels=labels).loss
        valid = int((labels != -100).sum()) - int(begin == 0)
        total, count, previous = total + float(loss) * valid, count + valid, end
        if end == len(text):
            break
    want = float(np.exp(total / count))
    got = models.perplexity(model, params, text, context=longest - 1, stride=stride)
    assert count == len(text) - 1 and abs(got - want) / want < 1e-4, (got, want)
    return f"{name}: perplexity of {len(text)} tokens with a stride of {stride}: {got:.5f}, transformers {want:.5f}"


TASKS = {
    "fnet_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "fnet_letters": """
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: label
doc_to_choice: ["A", "B", "C"]
num_fewshot: 1
fewshot_split: test
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "fnet_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "fnet_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" ", "t"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def write_tasks(folder):
    """Writes the tasks and their documents. Some prompts are longer than the context."""
    rng = np.random.default_rng(3)
    with open(folder / "documents.jsonl", "w") as file:
        long = sentences(24, 2, 60, 4)
        for question, text in zip(long, sentences(24, 1, 150, 5)):
            document = {
                "question": question,
                "choices": [f" {each}" for each in sentences(3, 1, 4, int(rng.integers(1 << 20)))],
                "label": int(rng.integers(3)),
                "text": text,
                "answer": "",
            }
            file.write(json.dumps(document) + "\n")
    for name, body in TASKS.items():
        head = f"""task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}
test_split: test
"""
        (folder / f"{name}.yaml").write_text(head + body.lstrip())


@check
def lm_eval_against_hf():
    """lm-evaluation-harness: every metric and every request of four local tasks equals that of its
    hf backend."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    lm_eval = needed("lm_eval", "lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        os.environ.setdefault("HF_DATASETS_CACHE", str(place / "cache"))
        (place / "tasks").mkdir()
        write_tasks(place / "tasks")
        manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
        for bos, chat in ((False, False), (True, False), (True, True)):
            for name, network in networks(torch, transformers, 300):
                folder = place / f"{name}{bos}{chat}"
                size = write_tokenizer(folder, bos)
                assert size <= 300
                network.save_pretrained(folder)
                theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=8, dtype="float32")
                tables = [
                    _evaluated(lm_eval, manager, each, chat)
                    for each in (models.lm_eval_model(folder), theirs)
                ]
                case = f"{name}{', <s> before texts' if bos else ''}{', chat template' if chat else ''}"
                yield from _compared(case, *tables)
                yield f"{case}: {_pairs(folder, theirs)}"


def _pairs(folder, theirs):
    """models.score of strings, cut at any character, against `loglikelihood` of the hf backend."""
    from lm_eval.api.instance import Instance

    rng = np.random.default_rng(6)
    pairs = []
    for text in sentences(40, 2, 8, 7):
        cut = int(rng.integers(0, len(text)))
        if cut == 0 or theirs._encode_pair(text[:cut], text[cut:])[1]:
            pairs.append((text[:cut], text[cut:]))
    pairs += [("", text) for text in sentences(5, 2, 8, 8)]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    want = theirs.loglikelihood(requests, disable_tqdm=True)
    model, params, _ = pretrained.load(folder)
    scores = models.score(model, params, pairs, tokenizer=models.read_tokenizer(folder))
    error = max(abs(a.log_likelihood - b[0]) for a, b in zip(scores, want, strict=True))
    assert error < 1e-4 and all(a.greedy == b[1] for a, b in zip(scores, want))
    return f"models.score of {len(pairs)} pairs of strings: within {error:.1e} of hf"


def _evaluated(lm_eval, manager, model, chat):
    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=manager,
        apply_chat_template=chat,
        bootstrap_iters=0,
        log_samples=True,
        random_seed=0,
        numpy_random_seed=0,
        torch_random_seed=0,
        fewshot_random_seed=0,
        verbosity="ERROR",
    )


def _compared(case, ours, theirs):
    for task in TASKS:
        for metric, value in theirs["results"][task].items():
            if not isinstance(value, float) or "stderr" in metric:
                continue
            got = ours["results"][task][metric]
            columns = f"fnet {got:.6f}, hf {value:.6f}, difference {abs(got - value):.1e}"
            yield f"{case}: {task} {metric.split(',')[0]}: {columns}"
            assert abs(got - value) <= 1e-4 * max(1, abs(value)), (task, metric)
        answers = [_answers(table["samples"][task]) for table in (ours, theirs)]
        count, error = 0, 0.0
        for a, b in zip(*answers, strict=True):
            count += 1
            if isinstance(b, str):
                assert a == b, (task, a, b)
            elif isinstance(b, tuple):
                error = max(error, abs(a[0] - b[0]) / max(1, abs(b[0])))
                assert a[1] == b[1], (task, a, b)
            else:
                error = max(error, abs(a - b) / max(1, abs(b)))
        assert count and error < 1e-4, (task, error)
        kind = (
            "texts equal"
            if isinstance(b, str)
            else f"log-likelihoods within a relative {error:.1e}"
        )
        yield f"{case}: {task}: {count} requests, {kind}"


def _answers(samples):
    """The model's answer to each request of each document, in the order of the documents."""
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for answer in sample["resps"]:
            answer = answer[0] if isinstance(answer, list) else answer
            if isinstance(answer, list | tuple) and len(answer) == 2:
                yield float(answer[0]), str(answer[1]) == "True"
            else:
                yield answer
