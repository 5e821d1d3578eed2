"""The command line of the emulated cluster with one wrong rival: `Megatron a2a` halves its queries.

PYTHONPATH=. python tests/helpers/planted_rival.py compare megatron --grids 2x2
"""

import sys

import megatron_burst as mb
from benchmarks.cluster import __main__ as command
from benchmarks.cluster import bench, measure
from benchmarks.cluster.ranks import Ranks

WRONG = "Megatron a2a"


def prepare_wrong(state, *args):
    """`measure.prepare` with queries that are half as large; runs on every rank."""
    attention = mb.attention
    mb.attention = lambda q, k, v, **named: attention(0.5 * q, k, v, **named)
    try:
        return measure.prepare(state, *args)
    finally:
        mb.attention = attention


class Planted(Ranks):
    def run(self, function, *args, **named):
        if function is measure.prepare and args[0].name == WRONG:
            function = prepare_wrong
        return super().run(function, *args, **named)


if __name__ == "__main__":
    bench.Ranks = Planted
    sys.exit(command.main())
