"""Random and wrong uses of the public API, by seed: `make fuzz`, `python -m tests.fuzz --help`.

What is random here is judged by oracles written by hand (`oracle`, `rules`), never by the package.
"""
