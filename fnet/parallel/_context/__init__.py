"""Context parallelism: one text is split over several devices along time. `rewrite` splits the
activations of a step, and replaces its attention, which needs all of time, by one of two forms that
run on the parts:

- `ring`: keys and values travel from device to device, and each device adds what it sees.
- `ulysses`: the devices exchange time for heads, so that each one has all of time for some heads.
"""
