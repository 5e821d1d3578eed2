"""Simulation at sizes that no machine here has. Written by the owner of the simulator."""


def section() -> str:
    return "Not simulated yet."
