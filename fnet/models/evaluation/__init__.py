"""Evaluation of language models: log-likelihoods, perplexity, and lm-evaluation-harness."""
