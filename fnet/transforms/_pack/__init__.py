"""pack: a step written for one padded text per row, on packed rows.

- `_rows`: where each text is in the rows, for every size that depends on a text's length.
- `_values`: values of the function as packed arrays.
- `_moves`: moves to other positions of a text, and reductions of tokens to texts.
- `_rules`: what each primitive does to packed values; `_reductions` and `_products` (with attention)
  have those that sum, `_shifts`, `_indexing` and `_writes` those that move, `_windows` convolutions
  and pooling, `_loops` scan, while and cond.
- `_flat`: all tokens of a batch in an order of their own.
- `_program`: the evaluation of a program that was traced for any texts.
- `_pack`: the transform, and its explanation.
"""
