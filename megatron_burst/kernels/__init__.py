"""The local attention on one device: a protocol (`base`), a table (`registry`), the kernels."""
