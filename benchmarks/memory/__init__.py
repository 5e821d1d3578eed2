"""The memory account beside what a step really holds, on CPU ranks."""
