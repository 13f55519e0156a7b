"""Structured output: JSON schemas, regular expressions, choices and grammars as masks of tokens.

The work is llguidance's, a library in Rust: an Earley parser whose lexer is built as it is needed.
Over a vocabulary of 128,000 tokens, on two busy cores, a schema was ready after 1 to 2 ms, and the
next tokens after 0.3 to 0.5 ms on average. outlines-core, the other library that is kept, turns
everything into one regular expression and that into a table over the whole vocabulary first: 11 and
45 seconds. It has no recursion and no grammars either (`python -m benchmarks.structured`).

llguidance ignores keywords of JSON Schema that it does not know, so `_schema` reads schemas first.
Nothing interrupts it, and a schema that is nested deeply enough overflows its stack, so each
grammar is tried in a process of its own, with a limit on its time (`_trial`).
"""
