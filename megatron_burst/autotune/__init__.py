"""Which settings are predicted to be fastest: rates, a simulator of schedules, a selection.

Needs no torch, except `measure`, which times real links and kernels.
"""
