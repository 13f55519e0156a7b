"""Compares fnet with other libraries, with the same models, weights and batches. Each library has
its own process.

    make bench                                                  # every table, in an environment with all peers
    pip install -e '.[bench]'                                   # or: install PyTorch, Keras and Equinox, then run
    python -m benchmarks.peers gpt cnn mlp
    python -m benchmarks.peers cnn --peers=fnet-tuned,torch,torch-compile --mode=train,infer --dtype=float32,mixed
    python -m benchmarks.peers gpt2-124m --peers=fnet,fnet-tuned,torch-compile        # on an accelerator

All processes are started at the same time and compile one after another. Their first three losses
must agree. Then, in each round, each process runs steps for `--budget` seconds (default 0.5, at
least two steps), while the others sleep. Training waits for the device once, after these steps.
Inference waits after every call.

The table shows milliseconds per step (median, min and max over the rounds), and ratios (the median
of the ratios in the rounds). "first step" contains tracing and compilation. "peak MB" is the peak
resident memory of the process, including libraries; on an accelerator, a plus sign and the peak of
the device memory follow. Tokens or examples per second are computed from the median. On an
accelerator, the table also shows the model FLOPs utilization. It is computed with fnet's count, in
which attention counts as if no mask were applied.

`_workloads` defines the computations. One file for each library implements them, in the style of
the library's documentation. In libraries on JAX, the complete training step is jitted and its state
is donated. In PyTorch, the step uses fused AdamW and scaled_dot_product_attention. The tuned peers
run the same steps with `ft.tune`.
"""
