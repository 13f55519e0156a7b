"""fnet compared with other libraries: the same models, weights and batches, each library in its own process.

    make bench                                                  # every table, in an environment with all peers
    pip install -e '.[bench]'                                   # or by hand: PyTorch, Keras and Equinox
    python -m benchmarks.peers gpt cnn mlp
    python -m benchmarks.peers cnn --peers=fnet-tuned,torch,torch-compile --mode=train,infer --dtype=float32,mixed
    python -m benchmarks.peers gpt2-124m --peers=fnet,fnet-tuned,torch-compile        # on an accelerator

All processes run at the same time and compile one after another. Their first three losses must agree. Then, in each
round, each process in turn runs for a quarter of a second, at least two steps, while the others sleep. Training waits
for the device once, at the end of the quarter second; inference after every call.

The columns: milliseconds per step (median, min and max over the rounds); ratios (the median of the ratios in the
rounds); the seconds of the first step, which traces and compiles; the peak resident memory of the process, including
libraries, and on an accelerator the peak of the device memory after a plus; tokens or examples per second at the
median; on an accelerator the model FLOPs utilization by fnet's count, with attention counted in full.

`_workloads` defines the computation, and one file for each library its implementation, as in the library's
documentation: the training step is jitted as a whole and its state donated (JAX), or it uses fused AdamW and
scaled_dot_product_attention (PyTorch). The tuned peers are the same steps with `ft.tune`.
"""
