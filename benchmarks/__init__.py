"""Benchmarks of fnet and other libraries. One command creates each table. RESULTS.md contains
measured figures."""
