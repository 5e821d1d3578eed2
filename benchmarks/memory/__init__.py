"""Memory account beside the memory of a step on CPU ranks."""
