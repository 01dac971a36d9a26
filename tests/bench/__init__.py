"""Benchmarks, run by `make bench-...`; pytest collects none of them."""
