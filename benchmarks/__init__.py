"""Benchmarks of fnet and other libraries. Each table is one command; RESULTS.md contains measured figures."""
