"""Benchmarks and the demo that `make demo` runs."""
