"""Memory account and measured memory of a step on CPU ranks."""
