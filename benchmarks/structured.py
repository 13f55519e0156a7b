"""What structured output costs: grammars ready, the next tokens, and turns of the engine.

    python -m benchmarks.structured                     # with outlines-core, if it is installed
    python -m benchmarks.structured --engine            # turns with 0, 1 and 8 masked rows of 8
    python -m benchmarks.structured --hostile           # the slowest next tokens of awkward patterns

The vocabulary has 128,000 tokens: the most frequent pieces of the sources of the installed packages.
Texts are drawn at random from the allowed tokens.
"""

import argparse
import collections
import json
import random
import re
import statistics
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fnet import models, serve
from fnet.serve._structured import _trial, _vocabulary

SIZE, TEXTS, TOKENS = 128_000, 10, 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {"person": PERSON, "any object": {"type": "object"}}
PATTERNS = {
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "words": "[a-z ]{1,200}",
    "choice": "yes|no|maybe",
}
AWKWARD = [
    *("(a|b)*a(a|b){200}", "((a{1000}){1000}){1000}", "(a{300}){300}", "([a-z]{1,90} ){1,90}"),
    *(r"(\w{1,500}\W{1,500}){1,500}", "(.*a){30}", r"(\pL|\pN){1,2000}", "[ab]?" * 400),
]


def tokenizer():
    found = collections.Counter()
    pieces = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z]{1,6}|\s+")
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    for path in (path for folder in folders for path in sorted(Path(folder).rglob("*.py"))):
        found.update(pieces.findall(path.read_text(errors="ignore")))
        if len(found) > 4 * SIZE:
            break
    words = [piece.encode()[:30] for piece, _ in found.most_common(SIZE - 259)]
    named = [b"<0x%02X>" % byte for byte in range(256)]
    return models.LlamaBPE([b"<unk>", b"<s>", b"</s>", *named, *words], [0.0] * (259 + len(words)))


def followed(start, allowed, take):
    """Times of the next tokens in ms, over random texts."""
    times = []
    for seed in range(TEXTS):
        state, draw = start(), random.Random(seed)
        for _ in range(TOKENS):
            began = time.perf_counter()
            row = allowed(state)
            times.append(1e3 * (time.perf_counter() - began))
            tokens = () if row is None else np.flatnonzero(row)
            if not len(tokens):
                break
            take(state, int(draw.choice(tokens)))
    return f"{statistics.fmean(times):8.3f} {np.percentile(times, 99):8.3f} {max(times):8.3f}"


def row(library, name, began, times):
    print(f"{library:14} {name:12} {1e3 * began:10.1f} {times}", flush=True)


def llguidance(tokens):
    limits = _vocabulary.library().LLParserLimits(**_trial.LIMITS)
    made = [(name, serve.json_schema, schema) for name, schema in SCHEMAS.items()]
    for name, make, value in [*made, *((n, serve.regex, p) for n, p in PATTERNS.items())]:
        grammar = make(value, tokens)
        known = grammar._vocabulary
        began = time.perf_counter()
        form = _vocabulary.library().LLMatcher.grammar_from_lark(grammar.text)
        _vocabulary.library().LLMatcher(known.tokens, form, limits=limits)
        ready = time.perf_counter() - began
        times = followed(
            lambda grammar=grammar: (grammar.walk(SIZE, (2,)), []),
            lambda state: state[0].allowed(state[1]),
            lambda state, token: state[1].append(token),
        )
        row("llguidance", name, ready, times)


def outlines(tokens):
    try:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema
    except ModuleNotFoundError:
        return
    kept = collections.defaultdict(list)
    for token, piece in enumerate(tokens.pieces):
        if token > 2:
            kept[bytes([token - 3]) if token < 259 else piece].append(token)
    known = outlines_core.Vocabulary(2, dict(kept))
    built = {name: build_regex_from_schema(json.dumps(each)) for name, each in SCHEMAS.items()}
    words = np.zeros((SIZE + 31) // 32, np.int32)

    def allowed(guide):
        guide.write_mask_into(words.ctypes.data, words.size, 4)
        bits = np.unpackbits(words.view(np.uint8), count=SIZE, bitorder="little")
        bits[2] = 0
        return bits

    for name, pattern in (built | PATTERNS).items():
        began = time.perf_counter()
        index = outlines_core.Index(pattern, known)
        ready = time.perf_counter() - began
        times = followed(
            lambda index=index: outlines_core.Guide(index),
            allowed,
            lambda guide, token: guide.advance(token, return_tokens=False),
        )
        row("outlines-core", name, ready, times)


def engine(tokens, rounds):
    model = models.Decoder(SIZE, 256, 4, 4, 4, 512, context=256)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    engine = serve.Engine(model, params, slots=8, context=128, prefix_cache=False)
    mask = serve.regex("[a-z ]{1000}", tokens)
    times = collections.defaultdict(list)
    for _ in range(rounds + 1):
        for count in (0, 1, 8):
            asked = [mask if slot < count else None for slot in range(8)]
            began = time.perf_counter()
            requests = [engine.submit([5, 6], max_tokens=64, mask=each) for each in asked]
            [request.result() for request in requests]
            times[count].append(1e3 * (time.perf_counter() - began) / 64)
    plain = statistics.median(times[0][1:])
    for count, held in times.items():
        middle = statistics.median(held[1:])
        print(f"{count} of 8 rows masked: {middle:.2f} ms a token, {middle / plain:.3f} of none")


def hostile(tokens):
    for pattern in AWKWARD:
        try:
            grammar = serve.regex(pattern, tokens)
        except ValueError as error:
            print(f"{pattern:.40}: {error}")
            continue
        try:
            times = followed(
                lambda grammar=grammar: (grammar.walk(SIZE, (2,)), []),
                lambda state: state[0].allowed(state[1]),
                lambda state, token: state[1].append(token),
            )
        except ValueError as error:
            times = f"ends: {error}"
        print(f"{pattern:40.40} {times}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokens = tokenizer()
    began = time.perf_counter()
    _vocabulary.vocabulary(tokens)
    print(f"a vocabulary of {SIZE:,} tokens is read in {time.perf_counter() - began:.2f} s")
    if options.engine:
        engine(tokens, options.rounds)
    elif options.hostile:
        hostile(tokens)
    else:
        print("ms: library, grammar, ready, next tokens: mean, 99 %, longest")
        llguidance(tokens)
        outlines(tokens)


if __name__ == "__main__":
    main()
