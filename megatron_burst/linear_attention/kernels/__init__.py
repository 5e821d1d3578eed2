"""Kernels of linear attention: the local computation of one rank."""
