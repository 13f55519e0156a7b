"""The log-likelihoods of texts, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fnet.models._model import LanguageModel
from fnet.models.evaluation import _program, _texts
from fnet.models.evaluation._batches import Item, batches

_CPU, _ACCELERATOR = 2048, 16384  # tokens in a batch


class Score(NamedTuple):
    """How probable a model finds a text, one of the results of `score`.

    Attributes:
        log_probs: float32 [tokens], the log-probability of each token that was scored, in nats. A
            token of probability 0 has -inf.
        greedy: whether every one of these tokens is the most probable, so that
            `generate(temperature=0)` would write them.
        bytes: the number of bytes of a string in UTF-8, or None for tokens.

    >>> score = models.Score(np.log(np.float32([0.5, 0.25])), greedy=False, bytes=6)
    >>> round(score.log_likelihood, 4), round(score.perplexity, 4), round(score.bits_per_byte, 4)
    (-2.0794, 2.8284, 0.5)
    """

    log_probs: np.ndarray
    greedy: bool
    bytes: int | None = None

    @property
    def log_likelihood(self) -> float:
        """The log-probability of the text in nats, the sum of `log_probs`; 0 without tokens."""
        return float(self.log_probs.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp(-log_likelihood / tokens), or NaN without tokens."""
        return _perplexity(self.log_likelihood, len(self.log_probs))

    @property
    def bits_per_byte(self) -> float:
        """-log2 of the text's probability for each of its bytes, or NaN without bytes. It compares
        models with different tokenizers.

        Raises:
            ValueError: the text was given as tokens.
        """
        if self.bytes is None:
            raise ValueError(
                "bits_per_byte needs the bytes of the text; pass strings and tokenizer= to score"
            )
        return -self.log_likelihood / math.log(2) / self.bytes if self.bytes else math.nan


def score(
    model: Any,
    params: Any,
    texts: Iterable[Any],
    *,
    tokenizer: Any = None,
    prefix: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    batch_tokens: int | None = None,
) -> list[Score]:
    """Computes the log-likelihood of each text, or of continuations after their prompts.

        scores = models.score(model, params, ["To be or not to be"], tokenizer=tokenizer)
        scores = models.score(model, params, [("Q: 2 + 2? A:", " 4"), ("Q: 2 + 2? A:", " 5")], tokenizer=tokenizer)
        best = max(scores, key=lambda score: score.log_likelihood)

    Texts of different lengths share the rows of a batch, with `segments=`, so hardly any of it is
    padding: one program is compiled for all texts of up to 512 tokens, and one for each power of two
    above it. A model that takes one text a row (LSTMLanguageModel, your own function) gets padding
    and one program for each power of two. What a text gets does not depend on the others. Only the
    positions that are scored reach the head of a model of fnet, 256 at a time, and prompts that
    occur several times are computed once if their continuations have one token. Log-probabilities
    are float32 whatever the dtype of the parameters.

    Args:
        model: GPT, Decoder or LSTMLanguageModel; or a layer or function of yours, `f(params,
            tokens)`, that returns logits [batch, time, vocab_size] and in which no token affects
            an earlier one. Keep the function: a new one, such as a lambda, is compiled again.
        params: the parameters, which may be quantized or have adapters.
        texts: strings, sequences of tokens, or tuples (prompt, continuation) of either, of which
            only the continuation is scored. As in lm-evaluation-harness, both strings are encoded
            as one, and spaces at the end of a prompt count as the beginning of the continuation.
        tokenizer: what encodes strings, such as the result of `read_tokenizer`.
        prefix: the token before a text without a prompt, unless the text begins with it. Default:
            for strings, the tokenizer's beginning-of-text token, or else its end-of-text token;
            for tokens none, so that the first token is not scored.
        context: the maximum number of tokens that the model sees at once. Default: that of the
            model, if it has one.
        stride: scores longer texts in windows, each of which has `context` tokens and scores the
            next `stride`. Default: a longer text is an error. See `perplexity`.
        batch_tokens: the maximum number of tokens in a batch; a row of more is a batch of its own.
            Default: 2,048 on a CPU, 16,384 elsewhere.

    Returns:
        A `Score` for each text. A continuation without tokens has the log-likelihood 0.

    Raises:
        ValueError: a text is longer than the context, a token is outside of the vocabulary, an
            argument is outside its range, the model returns no logits, or it is a mixture of
            experts with a capacity, which drops tokens depending on the batch.
        TypeError: a text is neither a string nor integers, or there is no tokenizer for a string.

    >>> model = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> scores = models.score(model, params, [[1, 2, 3], ([1, 2], [3])])
    >>> len(scores[0].log_probs), len(scores[1].log_probs)
    (2, 1)
    >>> bool(scores[0].log_probs[1] == scores[1].log_probs[0])
    True
    """
    return _score(
        "score",
        model,
        params,
        texts,
        tokenizer=tokenizer,
        prefix=prefix,
        context=context,
        stride=stride,
        batch_tokens=batch_tokens,
    )


def perplexity(
    model: Any,
    params: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    prefix: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    batch_tokens: int | None = None,
) -> float:
    """Computes the perplexity of a text of any length, exp of the mean negative log-probability.

        models.perplexity(model, params, text, tokenizer=tokenizer, stride=512)

    A text longer than the context is scored in windows, each token once: the first window scores
    its `context` tokens, and every further one the next `stride` tokens, after as many earlier
    ones as fit into the context. With the default these are the windows of `loglikelihood_rolling`
    in lm-evaluation-harness. A smaller stride is slower and gives every token more context,
    at least `context - stride` tokens. That is the sliding window of transformers' guide
    "Perplexity of fixed-length models" with its max_length = context + 1, except that the last
    window here is a full one.

    Args:
        model, params, tokenizer, prefix, batch_tokens: as for `score`.
        text: a string, which is encoded without special tokens, a sequence of tokens, or a list of
            texts, none of which sees another; their tokens count alike. `score(..., stride=)`
            returns the log-probabilities.
        context: the maximum number of tokens that the model sees at once. Default: that of the
            model; without one, every text is one window.
        stride: the number of tokens by which a window moves, from 1 to `context`. Default:
            `context`.

    Returns:
        The perplexity of each token. NaN without tokens, inf if a token has probability 0.

    Raises:
        ValueError, TypeError: as for `score`.

    Source: Baevski and Auli (2019), Adaptive Input Representations, section 4.4 (context windows).

    >>> model = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=8)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> round(models.perplexity(model, jax.tree.map(jnp.zeros_like, params), [1, 2, 3] * 10), 4)
    7.0
    """
    alone = isinstance(text, str) or _texts.is_tokens(text)
    longest = context_of("perplexity", model, context)
    scores = _score(
        "perplexity",
        model,
        params,
        [text] if alone else text,
        tokenizer=tokenizer,
        prefix=prefix,
        context=context,
        stride=longest if stride is None else stride,
        batch_tokens=batch_tokens,
    )
    tokens = sum(len(each.log_probs) for each in scores)
    return _perplexity(sum(each.log_likelihood for each in scores), tokens)


def _perplexity(log_likelihood: float, tokens: int) -> float:
    if not tokens:
        return math.nan
    with np.errstate(over="ignore"):
        return float(np.exp(-np.float64(log_likelihood) / tokens))


def _score(
    caller, model, params, texts, *, tokenizer, prefix, context, stride, batch_tokens
) -> list[Score]:
    if isinstance(texts, str):
        raise TypeError(f"{caller}: expected a list of texts, got the string {texts[:60]!r}")
    longest = context_of(caller, model, context)
    _check_stride(caller, stride, longest)
    start = prefix  # of strings
    if prefix is None and tokenizer is not None:
        start = _texts.prefix_of(tokenizer)
    texts = [
        _texts.read(text, tokenizer, start if _texts.is_string(text) else prefix, caller)
        for text in texts
    ]
    _texts.check_tokens((text.tokens for text in texts), getattr(model, "vocab_size", None), caller)
    items: list[Item] = []
    parts: list[range] = []  # the numbers of the windows of each text
    for number, text in enumerate(texts):
        if stride is None and longest is not None and len(text.tokens) - 1 > longest:
            raise ValueError(
                f"{caller}: text {number} has {len(text.tokens)} tokens with its prompt, and the "
                f"model sees {longest} at once; pass stride= to score it in windows, or a shorter "
                "prompt"
            )
        first = len(items)
        items += _texts.windows(text, longest, stride)
        parts.append(range(first, len(items)))
    results = score_items(caller, model, params, items, longest, batch_tokens)
    return [_joined([results[i] for i in part], text.bytes) for part, text in zip(parts, texts)]


def score_items(
    caller: str,
    model: Any,
    params: Any,
    items: Sequence[Item],
    context: int | None,
    batch_tokens: int | None,
    done: Callable[[int], None] = lambda count: None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (log-probabilities, whether the most probable) of the labels of each item. `done` is
    called with the number of items of each batch."""
    if getattr(model, "expert_capacity", None) is not None:
        raise ValueError(
            f"{caller}: with expert_capacity={model.expert_capacity}, which tokens the experts drop "
            "depends on the batch; pass dataclasses.replace(model, expert_capacity=None)"
        )
    if batch_tokens is None:
        batch_tokens = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    if not isinstance(batch_tokens, int) or batch_tokens < 1:
        raise ValueError(f"{caller}: batch_tokens must be an integer >= 1; got {batch_tokens!r}")
    results: list[Any] = [None] * len(items)
    packs = isinstance(model, LanguageModel) and model.PACKS
    for batch, numbers in batches(items, packs=packs, context=context, batch_tokens=batch_tokens):
        found = [np.asarray(x) for x in _program.scored(model, params, batch)]
        start = 0
        for number in numbers:
            stop = start + len(items[number].labels)
            results[number] = tuple(x[start:stop] for x in found)
            start = stop
        done(len(numbers))
    return results


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], size: int | None) -> Score:
    log_probs = np.concatenate([np.zeros(0, np.float32), *(part[0] for part in parts)])
    return Score(log_probs, all(bool(part[1].all()) for part in parts), size)


def context_of(caller: str, model: Any, context: int | None) -> int | None:
    """Returns the maximum number of tokens that the model sees at once, or None."""
    most = getattr(model, "context", None)
    if context is None:
        return most
    if not isinstance(context, int) or context < 1 or (most is not None and context > most):
        limit = "" if most is None else f" to {most}, the context of the model"
        raise ValueError(f"{caller}: context must be an integer from 1{limit}; got {context!r}")
    return context


def _check_stride(caller: str, stride: int | None, context: int | None) -> None:
    if stride is None:
        return
    if context is None:
        raise ValueError(
            f"{caller}: stride={stride} needs context=, because the model has no maximum length"
        )
    if not isinstance(stride, int) or not 1 <= stride <= context:
        raise ValueError(
            f"{caller}: stride must be an integer from 1 to the context of {context}; got {stride!r}"
        )
