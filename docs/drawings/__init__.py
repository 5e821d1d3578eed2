"""Drawings of docs/concepts, one module per page; docs/make_concepts.py writes the files."""
