"""Kernels: the local attention on one device. `base` has the protocol, `registry` the table."""
