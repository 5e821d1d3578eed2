"""The drawings of docs/concepts, a module for each page; docs/make_concepts.py writes them."""
