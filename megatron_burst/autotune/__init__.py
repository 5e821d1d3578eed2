"""Predicts which settings are fastest: rates, a simulator of schedules, candidates, a selection.

Needs no torch, except `measure`, which times real links and kernels.
"""
