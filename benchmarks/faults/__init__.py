"""Faults for whole runs: what `benchmarks.chaos` is made of. Nothing of it is imported by the product."""
