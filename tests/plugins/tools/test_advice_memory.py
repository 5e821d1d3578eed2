"""More memory, of GPUs or of the host, never removes a configuration and never costs time."""

from dataclasses import replace
from itertools import pairwise

from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.gpus import gpu
from megatron_burst.autotune.select import TIE
from megatron_burst.plugins.tools.advise.advice import DoesNotFit, advise
from megatron_burst.plugins.tools.advise.shapes.models import Model

GB = 10**9
MODEL = Model("small", layers=8, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocabulary=32000)


def cluster(memory, host=5.0):
    """Two nodes of four GPUs; gigabytes."""
    small = replace(gpu("a100"), memory=max(GB + 1, int(memory * GB)))
    return Cluster(small, 8, 4, host_memory=int(host * GB), reserve=GB)


def ways(on):
    """Ways to share eight GPUs out -> seconds of the best run that fits."""
    try:
        advice = advise(MODEL, on, seq=2**20, tokens_per_step=2**20, top=99, pp=1, layout="zigzag")
    except DoesNotFit:
        return {}
    return {
        (each.run.tp, each.run.pp, each.run.cp, each.run.dp): each.seconds for each in advice.ranked
    }


def check_grown(less, more):
    assert set(less) <= set(more)
    # Of runs that tie the simplest is taken, so the time may rise by the tie.
    assert all(more[way] <= less[way] * (1 + TIE) for way in less)


def test_more_gpu_memory_never_removes_a_way_nor_slows_it():
    """Chunks of rows that keep all of attention beat whole rows that keep none of it: also where
    there is room for the latter."""
    found = [ways(cluster(memory)) for memory in (4, 8, 10)]
    for less, more in pairwise(found):
        check_grown(less, more)
    assert not found[0]
    assert min(found[1].values()) > min(found[-1].values())


def test_more_host_memory_never_removes_a_way_nor_slows_it():
    found = [ways(cluster(8, host)) for host in (1, 40)]
    for less, more in pairwise(found):
        check_grown(less, more)
    assert min(found[0].values(), default=1e9) > min(found[-1].values())
