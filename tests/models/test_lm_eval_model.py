"""The requests of lm-evaluation-harness, without that library: tests/reference/verify_lm_eval.py runs
its tasks."""

import sys
import types

import jax
import numpy as np
import pytest

from fnet import models
from fnet.models.evaluation._lm_eval import Options, Requests

pytest.importorskip("tqdm")  # of lm-eval
TEXT = "the king was in the tempest, and the ship was not"
CONTEXT = 24


class Hook:
    def __init__(self):
        self.kept = []

    def add_partial(self, kind, request, answer):
        self.kept.append((kind, request, answer))


def request(*args):
    return types.SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def parts():
    tokenizer = models.CharTokenizer(TEXT + "<")
    tokenizer.bos = int(tokenizer.encode("<")[0])
    model = models.GPT(tokenizer.vocab_size, 16, 1, 2, context=CONTEXT)
    params, _ = model.init(jax.random.key(0), model.example())
    return model, jax.tree.map(lambda x: 10 * x, params), tokenizer


@pytest.fixture
def lm(parts):
    lm = Requests(*parts, None, None, 2)
    lm.cache_hook = Hook()
    return lm


def test_log_likelihoods_in_the_order_of_the_requests(lm, parts):
    model, params, tokenizer = parts
    pairs = [("the", " king"), ("the ship was", " not"), ("the", " ship"), ("in", " the tempest")]
    encoded = [(pair, *map(tokenizer.encode, pair)) for pair in pairs]
    answers = lm._loglikelihood_tokens(encoded, disable_tqdm=True)
    scores = models.score(model, params, pairs, tokenizer=tokenizer)
    for (value, greedy), score in zip(answers, scores, strict=True):
        assert value == pytest.approx(score.log_likelihood, abs=1e-5) and greedy == score.greedy
    assert [kept[:2] for kept in lm.cache_hook.kept] == [("loglikelihood", pair) for pair in pairs]


def test_the_beginning_of_a_long_prompt_is_cut_off(lm, parts):
    model, params, tokenizer = parts
    tokens = tokenizer.encode(TEXT)
    ((value, _),) = lm._loglikelihood_tokens([(None, tokens[:-3], tokens[-3:])], disable_tqdm=True)
    kept = tokens[-(CONTEXT + 1) :]
    (score,) = models.score(model, params, [(kept[:-3], kept[-3:])])
    assert value == pytest.approx(score.log_likelihood, abs=1e-5) and not lm.cache_hook.kept
    with pytest.raises(ValueError, match="has 49 tokens, and the model sees 24 at once"):
        lm._loglikelihood_tokens([(None, tokens[:1], tokens)], disable_tqdm=True)


def test_rolling_log_likelihoods(lm, parts):
    model, params, tokenizer = parts
    texts = [TEXT, "the", "", TEXT[:30]]
    answers = lm.loglikelihood_rolling([request(text) for text in texts], disable_tqdm=True)
    scores = models.score(model, params, texts, tokenizer=tokenizer, stride=CONTEXT)
    assert answers == pytest.approx([score.log_likelihood for score in scores], abs=1e-4)
    assert lm.cache_hook.kept[0] == ("loglikelihood_rolling", (TEXT,), answers[0])


def test_generated_texts_end_before_a_stop_string(lm, parts):
    model, params, tokenizer = parts
    prompts = ["the", "king", TEXT, "in", "was not"]

    def alone(prompt, count):
        tokens = tokenizer.encode(prompt)[-(CONTEXT - count) :]
        out = models.generate(model, params, [tokens], max_tokens=count, temperature=0)
        return tokenizer.decode(out.tokens[0])

    whole = [alone(prompt, 8) for prompt in prompts]
    until = whole[0][3]  # some texts have it, others may not
    options = {"until": [until], "max_gen_toks": 8, "do_sample": False}
    other = {"until": None, "max_new_tokens": 4}
    requests = [request(prompt, options) for prompt in prompts]
    requests.insert(2, request("in", other))
    answers = lm.generate_until(requests, disable_tqdm=True)
    expected = [text.split(until)[0] for text in whole]
    expected.insert(2, alone("in", 4))
    assert answers == expected and len(answers[0]) <= 3 and len(answers[2]) == 4
    assert sorted(kept[2] for kept in lm.cache_hook.kept) == sorted(answers)
    assert lm.generate_until([request("", other)], disable_tqdm=True) == [alone("<", 4)]
    with pytest.raises(ValueError, match="24 tokens of generated text leave no room"):
        lm.generate_until([request("in", {"max_gen_toks": 24})], disable_tqdm=True)


def test_options_of_generation():
    greedy = Options({"until": "a", "temperature": 0.0, "do_sample": None}, 256)
    assert (greedy.until, greedy.temperature, greedy.max_tokens) == (["a"], 0.0, 256)
    assert Options({"do_sample": False, "temperature": 0.7}, 1).temperature == 0
    sampled = Options({"do_sample": True, "top_p": 0.9, "max_tokens": 3, "until": ["", "b"]}, 1)
    assert (sampled.temperature, sampled.sampling) == (1.0, {"top_p": 0.9})
    assert (sampled.max_tokens, sampled.until) == (3, ["b"])
    assert Options({"temperature": 0.5}, 1).temperature == 0.5
    assert greedy.cut("xay") == "x" and sampled.cut("no end") == "no end"
    with pytest.raises(ValueError, match="unknown generation option 'num_beams'; expected until"):
        Options({"num_beams": 3}, 1)


def test_no_second_token_before_a_text(lm):
    class Begins:
        bos, stop = 1, (2,)

        def encode(self, text, *, special_tokens=True):
            return np.array([1] * special_tokens + [9 if char == "a" else 1 for char in text])

    lm.tokenizer, lm._prefix = Begins(), 1
    assert lm.tok_encode("aa") == [1, 9, 9]
    assert lm.tok_encode("<a") == [1, 9]  # what a chat template wrote
    assert lm.tok_encode("aa", add_special_tokens=False) == [9, 9]
    assert lm.tok_encode("<a", add_special_tokens=True) == [1, 1, 9]
    assert lm.eot_token_id == 2 and lm.prefix_token_id == 1


def test_chat_templates(lm):
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    source = "{% for m in messages %}[{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    lm.tokenizer.chat_template = models.ChatTemplate({"default": source, "other": "b"})
    try:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        assert lm.apply_chat_template(turns[:1]) == "[a>"
        assert lm.apply_chat_template(turns, add_generation_prompt=False) == "[a[b"
        assert lm.chat_template(True) == source and lm.chat_template("other") == "b"
        assert lm.chat_template(False) is None
        with pytest.raises(
            ValueError, match="no chat template 'none'; expected 'default' or 'other'"
        ):
            lm.chat_template("none")
    finally:
        del lm.tokenizer.chat_template


def test_errors(parts, monkeypatch):
    model, params, tokenizer = parts
    lm = Requests(model, params, types.SimpleNamespace(encode=lambda text: []), None, None, 2)
    with pytest.raises(ValueError, match="the tokenizer has neither `bos` nor `stop`"):
        lm.prefix_token_id  # noqa: B018
    api = types.ModuleType("lm_eval.api.model")
    api.TemplateLM = type("TemplateLM", (), {})
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", api)
    with pytest.raises(
        TypeError, match="a model, its parameters and a tokenizer; tokenizer is missing"
    ):
        models.lm_eval_model(model, params)
    with pytest.raises(TypeError, match="a folder brings its own parameters and tokenizer"):
        models.lm_eval_model("folder", params)
    with pytest.raises(ValueError, match="context must be an integer from 1 to 24"):
        models.lm_eval_model(model, params, tokenizer, context=25)
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1; got 0"):
        models.lm_eval_model(model, params, tokenizer, batch_size=0)
    assert isinstance(models.lm_eval_model(model, params, tokenizer), api.TemplateLM)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .lm-eval>=0\.4\.13"):
        models.lm_eval_model(model, params, tokenizer)
