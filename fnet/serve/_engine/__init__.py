"""serve.Engine: continuous batching of text generation.

- `_request`: a text that is asked for, from `submit` to its last token.
- `_checks`: what `submit` accepts.
- `_cache`: the cache as a tree of arrays, whose axes for rows and for time are found by its shapes.
- `_adapters`: several LoRA adapters as one tree of parameters, from which each row takes its own.
- `_independent`: the proof that the rows of a decode step are independent.
- `_programs`: the compiled functions: a piece of a prompt, and one token of every row.
- `_sampling`: the state of every row, and the choice of its next token.
- `_prefix`: beginnings of prompts that are already computed, in blocks.
- `_table`: the rows on the device, which are taken, freed and resized.
- `_prompt`: the prompt that is being computed, piece by piece.
- `_stats`: counts and histograms.
- `_engine`: the queue, the turns and the thread.
"""
