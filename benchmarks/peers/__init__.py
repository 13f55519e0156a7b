"""fnet beside its peers: the same models, weights and batches, each library in a process of its own, in turns.

    make bench                                                  # every table, in an environment with all peers
    pip install -e '.[bench]'                                   # or by hand: PyTorch, Keras and Equinox
    python -m benchmarks.peers gpt cnn mlp
    python -m benchmarks.peers cnn --peers=fnet-tuned,torch,torch-compile --mode=train,infer --dtype=float32,mixed
    python -m benchmarks.peers gpt2-124m --peers=fnet,fnet-tuned,torch-compile        # on an accelerator

All processes are alive at once and compile one after the other. Their first three losses must agree before anything is
timed. Then in each round each in turn runs for a quarter of a second, two steps at least, while the others sleep.
Training waits once, at the end of a turn; inference after every call.

The columns: milliseconds per step, median, min and max over the rounds; ratios, each the median of the rounds' own;
the seconds of the first step, which traces and compiles; the peak resident memory of the process, libraries included,
and on an accelerator the peak of its memory behind a plus; tokens or examples per second at the median; on an
accelerator the model FLOPs utilization by fnet's own count, attention counted in full.

What is computed stands in `_workloads`, how in a file for each library: as its documentation has it, with the
training step jitted whole and its state donated (JAX), or fused AdamW and scaled_dot_product_attention (PyTorch). The
tuned peers are the same steps in `ft.tune`.
"""
