"""A model of lm-evaluation-harness, whose tasks then run on a model of fnet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fnet._util import _missing
from fnet.models import pretrained
from fnet.models.evaluation import _texts
from fnet.models.evaluation._batches import Item
from fnet.models.evaluation._score import context_of, score_items
from fnet.models.generation._generate import padded
from fnet.models.generation._stream import stream
from fnet.models.tokenizers._chat import encoded
from fnet.models.tokenizers._tokenizers import read_tokenizer

_LONGEST = 2048  # tokens, for a model without a context, as in lm-evaluation-harness
_GENERATED = 256  # tokens, likewise
_ROWS = 16  # texts that are generated together
_SAMPLING = "top_k", "top_p", "min_p", "repetition_penalty"  # named alike here and there


def lm_eval_model(
    model: Any,
    params: Any = None,
    tokenizer: Any = None,
    *,
    context: int | None = None,
    batch_tokens: int | None = None,
    batch_size: int = _ROWS,
) -> Any:
    r"""Makes a model with which lm-evaluation-harness runs its tasks (`pip install lm-eval`).

        import lm_eval
        results = lm_eval.simple_evaluate(model=models.lm_eval_model("path/to/folder"), tasks=["arc_easy", "wikitext"])
        print(results["results"]["arc_easy"]["acc,none"])

    Tasks of all kinds run: multiple choice, perplexity (`loglikelihood_rolling`), and generated
    text with `until`, with and without chat templates. Texts are encoded, cut and divided into
    windows as by its own `hf` model, so the results are the same up to rounding.

    Args:
        model: a folder of weights or a repository, for `pretrained.load` and `read_tokenizer`; or a
            model with logits, as for `score`. Generated text needs one that `generate` accepts.
        params: the parameters of a model, which may be quantized or have adapters.
        tokenizer: the tokenizer of a model, such as the result of `read_tokenizer`.
        context: the maximum number of tokens that the model sees at once; the beginning of a longer
            prompt is cut off. Default: that of the model, or else 2,048.
        batch_tokens: the maximum number of tokens in a batch of `score`.
        batch_size: the number of texts that are generated together.

    Returns:
        An `lm_eval.api.model.TemplateLM`.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
        TypeError: a model comes without parameters or tokenizer, or a folder with them.
        ValueError: a generation task sets an unknown option, or leaves no room for a prompt.

    Source: Biderman et al. (2024), Lessons from the Trenches on Reproducible Evaluation of Language
    Models.

    >>> tokenizer = models.CharTokenizer("to be or not")
    >>> model = models.GPT(tokenizer.vocab_size, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> lm = models.lm_eval_model(model, params, tokenizer)
    >>> lm.tok_encode("to be"), lm.max_length
    ([6, 4, 0, 1, 2], 32)
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            _missing.message("lm_eval_model needs", "lm-eval>=0.4.13", error=error)
        ) from None

    class FnetLM(Requests, TemplateLM):
        """A model of fnet in lm-evaluation-harness."""

        def __init__(self, *arguments):
            TemplateLM.__init__(self)
            Requests.__init__(self, *arguments)

    if isinstance(model, str | os.PathLike):
        if params is not None or tokenizer is not None:
            raise TypeError(
                "lm_eval_model: a folder brings its own parameters and tokenizer; pass the folder "
                "alone, or a model, its parameters and a tokenizer"
            )
        folder = pretrained.find(model)
        model, params, _ = pretrained.load(folder)
        tokenizer = read_tokenizer(folder)
    if params is None or tokenizer is None:
        raise TypeError(
            "lm_eval_model: expected a folder, or a model, its parameters and a tokenizer; "
            f"{'params' if params is None else 'tokenizer'} is missing"
        )
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"lm_eval_model: batch_size must be an integer >= 1; got {batch_size!r}")
    return FnetLM(model, params, tokenizer, context, batch_tokens, batch_size)


class Requests:
    """Answers the requests of lm-evaluation-harness. It is what `lm_eval.api.model.TemplateLM` leaves
    to its subclasses; that class encodes pairs of context and continuation."""

    backend = "causal"

    def __init__(self, model, params, tokenizer, context, batch_tokens, batch_size):
        self.model, self.params, self.tokenizer = model, params, tokenizer
        self.max_length = context_of("lm_eval_model", model, context) or _LONGEST
        self.max_gen_toks = _GENERATED
        self._batch_tokens, self.batch_size = batch_tokens, batch_size
        self._prefix = _texts.prefix_of(tokenizer)

    @property
    def eot_token_id(self) -> int | None:
        named = getattr(self.tokenizer, "eos", None)
        return named if named is not None else next(iter(getattr(self.tokenizer, "stop", ())), None)

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is None:
            raise ValueError(
                "lm_eval_model: a text without a prompt follows the beginning-of-text or the "
                "end-of-text token, and the tokenizer has neither `bos` nor `stop`"
            )
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        name = getattr(self.tokenizer, "path", type(self.tokenizer).__name__)
        return str(name).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Converts a string to tokens. It gets no second beginning-of-text token if it is the
        output of a chat template that has one."""
        plain = encoded(self.tokenizer, string)
        begins = len(plain) > 0 and plain[0] == self._prefix
        if add_special_tokens is False or (add_special_tokens is None and begins):
            return plain
        return [int(token) for token in self.tokenizer.encode(string)]

    def tok_decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    def apply_chat_template(
        self, chat_history: Sequence[Mapping], add_generation_prompt: bool = True
    ) -> str:
        template = self._template()
        return template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the chat template, with which the harness names its results."""
        if chat_template is False or chat_template is None:
            return None
        templates = self._template().templates
        name = "default" if chat_template is True else chat_template
        if name not in templates:
            raise ValueError(
                f"lm_eval_model: there is no chat template {name!r}; expected "
                f"{' or '.join(map(repr, templates))}"
            )
        return templates[name]

    def _template(self):
        template = getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise ValueError(
                "lm_eval_model: the tokenizer has no chat template; evaluate without "
                "apply_chat_template, or read the tokenizer from a folder that has one"
            )
        return template

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores (key, context, continuation) requests. Of a text that is too long, the beginning is
        cut off."""
        items = []
        for key, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"lm_eval_model: the continuation {str(key)[:80]} has {len(continuation)} "
                    f"tokens, and the model sees {self.max_length} at once"
                )
            tokens = np.array([*context, *continuation], np.int32)[-(self.max_length + 1) :]
            items.append(Item(tokens[:-1], tokens[len(tokens) - len(continuation) :]))
        answers = [
            (float(log_probs.sum(dtype=np.float64)), bool(greedy.all()))
            for log_probs, greedy in self._scored(items, disable_tqdm)
        ]
        for (key, *_), answer in zip(requests, answers):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False) -> list[float]:
        items: list[Item] = []
        parts: list[range] = []
        for request in requests:
            tokens = np.array([self.prefix_token_id, *self.tok_encode(request.args[0])], np.int32)
            start = len(items)
            text = _texts.Text(tokens, 1, None)
            items += _texts.windows(text, self.max_length, self.max_length)
            parts.append(range(start, len(items)))
        sums = [
            float(log_probs.sum(dtype=np.float64))
            for log_probs, _ in self._scored(items, disable_tqdm)
        ]
        answers = [sum((sums[i] for i in part), 0.0) for part in parts]
        for request, answer in zip(requests, answers):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def _scored(self, items, quiet):
        from tqdm import tqdm  # lm-eval needs it

        vocab_size = getattr(self.model, "vocab_size", None)
        _texts.check_tokens((item.inputs for item in items), vocab_size, "lm_eval_model")
        _texts.check_tokens((item.labels for item in items), vocab_size, "lm_eval_model")
        with tqdm(total=len(items), disable=quiet, desc="Log-likelihoods") as bar:
            return score_items(
                "lm_eval_model",
                self.model,
                self.params,
                items,
                self.max_length,
                self._batch_tokens,
                bar.update,
            )

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        from tqdm import tqdm

        answers = [""] * len(requests)
        groups: dict[str, list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            groups.setdefault(repr(options), []).append((number, prompt))
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Generated texts") as bar:
            for group in groups.values():
                options = Options(requests[group[0][0]].args[1], self.max_gen_toks)
                room = self.max_length - options.max_tokens
                if room < 1:
                    raise ValueError(
                        f"lm_eval_model: {options.max_tokens} tokens of generated text leave no "
                        f"room for a prompt in the context of {self.max_length}; set max_gen_toks"
                    )
                group.sort(key=lambda pair: -len(pair[1]))
                for start in range(0, len(group), self.batch_size):
                    numbers, prompts = zip(*group[start : start + self.batch_size])
                    texts = self._generated([prompt[-room:] for prompt in prompts], options)
                    for number, text in zip(numbers, texts):
                        answers[number] = text
                        args = requests[number].args
                        self.cache_hook.add_partial("generate_until", args, text)
                    bar.update(len(numbers))
        return answers

    def _generated(self, prompts: list[list[int]], options: Options) -> Iterator[str]:
        """Generates until every text has ended or has a string of `until`, and cuts the texts
        there."""
        tokens, lengths = padded(prompts)
        texts: list[list[int]] = [[] for _ in prompts]
        found = [False] * len(prompts)
        for new in stream(
            self.model,
            self.params,
            tokens,
            jax.random.key(options.seed),
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stop=getattr(self.tokenizer, "stop", ()),
            lengths=lengths,
            **options.sampling,
        ):
            for row, token in enumerate(new):
                if token < 0 or found[row]:
                    found[row] = True
                    continue
                texts[row].append(int(token))
                text = self.tok_decode(texts[row]) if options.until else ""
                found[row] = any(end in text for end in options.until)
            if all(found):
                break
        for row in texts:
            yield options.cut(self.tok_decode(row))


class Options:
    """The generation options of a task, with the harness's names and defaults."""

    def __init__(self, given: Mapping[str, Any], max_tokens: int):
        given = dict(given)
        until = given.pop("until", None) or []
        self.until = [end for end in ([until] if isinstance(until, str) else until) if end]
        lengths = [
            given.pop(name, None)
            for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        ]
        self.max_tokens = int(next((n for n in lengths if n is not None), max_tokens))
        sampled, temperature = given.pop("do_sample", None), given.pop("temperature", None)
        if sampled is None:
            sampled = bool(temperature)
        self.temperature = float(1.0 if temperature is None else temperature) if sampled else 0.0
        self.seed = int(given.pop("seed", 0))
        self.sampling = {name: given.pop(name) for name in _SAMPLING if given.get(name) is not None}
        unknown = [name for name, value in given.items() if value is not None]
        if unknown:
            raise ValueError(
                f"lm_eval_model: unknown generation option {unknown[0]!r}; expected until, "
                f"max_gen_toks, do_sample, temperature, seed, {', '.join(_SAMPLING)}"
            )

    def cut(self, text: str) -> str:
        """Returns the text before the first string of `until`."""
        for end in self.until:
            text = text.split(end)[0]
        return text
