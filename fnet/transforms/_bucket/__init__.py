"""bucket: one program for all lengths between two sizes.

- `_axes`: the user's spelling of the axes, and the sizes of a call.
- `_sizes`: sizes as expressions of letters: their values and their bounds.
- `_padded`: arrays whose true part is in front: masks, windows, shifts.
- `_rules`: what each primitive does to them; `_windows` has convolutions and pooling, `_indexing`
  gathers, scatters and slices, `_loops` scan, while and cond.
- `_program`: the evaluation of a program that was traced for sizes of any value.
- `_bucket`: the transform, and its explanation.
"""
