"""Benchmarks: scripts, and packages such as `cluster` and `gpu`."""
