"""fnet beside its peers: the same models, weights and batches, each library in a process of its own, in turns.

    python -m benchmarks.peers gpt
    python -m benchmarks.peers cnn --peers=fnet,torch,torch-compile --dtype=mixed --rounds=5
"""
