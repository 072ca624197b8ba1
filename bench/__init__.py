"""Benchmarks: `python -m bench` lists them. This file lets no other package named `bench` take the name."""
