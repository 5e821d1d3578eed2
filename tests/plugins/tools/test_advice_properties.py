"""What must hold whatever is predicted: faster never takes longer, slower never less."""

from dataclasses import replace

import numpy as np
import pytest
import wants
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_burst.autotune.candidates import Workload
from megatron_burst.autotune.candidates import grids as grids_of
from megatron_burst.autotune.clusters import Cluster
from megatron_burst.autotune.exchanges import Wires
from megatron_burst.autotune.places import Nodes, places
from megatron_burst.autotune.prepared import PreparedSchedule
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.select import TIE, best
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.layout import make
from megatron_burst.masks import Causal, Full
from megatron_burst.plugins.tools.advise.forecast.attention_time import attention_time
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model
from megatron_burst.plugins.tools.advise.simulate import simulate
from megatron_burst.schedule import rings
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.tables import ROUTES, SIDES, Grid
from megatron_burst.schedule.topology import Topology

SIZES = Sizes(16, 1, 8, 4, 16, 16, 4, 4, 4, (True, True, True))
KV = 16 * 2 * 4 * 16 * 4
ROUNDING = 1 + 1e-12
MODEL = Model("small", layers=8, hidden=512, heads=32, kv_heads=16, ffn=1024, vocabulary=4096)
few = settings(max_examples=30)


@st.composite
def passes(draw):
    """(a pass, seconds of its pairs): any algorithm, grid, side, route, mask and wires."""
    nodes, ranks = draw(st.sampled_from([(1, 4), (2, 2), (2, 4), (4, 2), (3, 3), (8, 1), (4, 4)]))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = nodes * ranks
    visible = random.random((size, size)) < draw(st.sampled_from([0.4, 1.0]))
    plan = rings.backward(
        draw(st.sampled_from(sorted(ALGORITHMS))), Grid(nodes, ranks),
        draw(st.sampled_from(SIDES)), visibility=wants.at_random(random, visible),
        row_bytes=SIZES.backward, route=draw(st.sampled_from(ROUTES)),
    )  # fmt: skip
    nics = draw(st.sampled_from([None, 1, 2]))
    shared = None if nics is None else places(Topology(size, ranks), Nodes(ranks, nics))
    wires = Wires(places=shared)
    seconds = np.where(visible, random.integers(1, 9, visible.shape), 0).astype(float)
    return PreparedSchedule(plan, wires), seconds


@st.composite
def rates(draw):
    """Any: a chunk of keys and values takes 1/8 to 16 times a pair's least seconds."""
    hop, crossing = (2.0 ** draw(st.integers(-3, 4)) for _ in range(2))
    some = st.sampled_from([0.0, 0.125, 0.5])
    return Rates(
        KV / hop, KV / crossing, draw(some), 1.0, draw(some), draw(some), half_rows=8 * draw(some),
        slowdown=draw(some), nic=draw(st.sampled_from([None, 1.5 * KV / crossing])),
    )  # fmt: skip


counts = st.sampled_from([1, 2, 4])


@given(passes(), rates(), counts, st.floats(1, 8), st.data())
def test_faster_parts_never_take_longer(made, slow, count, factor, data):
    """Of a fixed pass: links, NICs, the device, and what comes once per message, call, exchange.

    The order of messages is the program's, not that in which ranks happen to be done, so the
    anomalies of list scheduling (Graham 1969) cannot occur.
    """
    plan, seconds = made
    name = data.draw(st.sampled_from(["intra", "inter", "nic", "latency", "launch", "posting",
                                      "half_rows", "slowdown", "compute"]))  # fmt: skip
    before = pass_time(plan, SIZES, seconds, slow, count).seconds
    if name == "compute":
        after = pass_time(plan, SIZES, seconds / factor, slow, count).seconds
    else:
        old = getattr(slow, name)
        faster = name in ("intra", "inter", "nic")
        new = old and (old * factor if faster else old / factor)
        after = pass_time(plan, SIZES, seconds, replace(slow, **{name: new}), count).seconds
    assert after <= before * ROUNDING


@given(passes(), rates(), counts)
def test_no_pass_is_shorter_than_what_its_busiest_part_does(made, given_rates, count):
    plan, seconds = made
    found = pass_time(plan, SIZES, seconds, given_rates, count)
    assert found.seconds * ROUNDING >= max(found.compute, found.intra, found.inter)


# --- calls, steps and choices ------------------------------------------------------------------

runs = st.builds(
    lambda cp, tp, ulysses, placement, algorithm, count: Settings(
        2**14, tp=tp, cp=cp, ulysses=min(ulysses, cp), placement=placement, algorithm=algorithm,
        head_chunks=count, pp=2, dp=2, micro_batches=4,
    ),
    st.sampled_from([4, 8, 16]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]),
    st.sampled_from(["head_first", "context_first"]),
    st.sampled_from(["ring", "burst", "double_ring", "multicast", "tile"]),
    st.sampled_from([1, 2]),
)  # fmt: skip


def on(run, **more):
    return Cluster("a100", run.gpus if run.gpus > 4 else 4, per_node=4, **more)


def possible(run):
    """Whether nodes hold equal numbers of every ring's ranks."""
    try:
        attention_time(MODEL, on(run), run)
    except ValueError:
        return False
    return True


@few
@given(
    runs.filter(possible), st.sampled_from(["nics", "nic_rate", "nvlink", "peak", "memory_rate"])
)
def test_a_better_cluster_takes_no_longer(run, what):
    poor = on(run, nics=2, nic_rate=12e9)
    if what in ("nics", "nic_rate"):
        better = replace(poor, **{what: 2 * getattr(poor, what)})
    else:
        better = replace(poor, gpu=replace(poor.gpu, **{what: 2 * getattr(poor.gpu, what)}))
    for part in ("attention", "layer", "step"):
        before, after = (simulate(MODEL, c, run, part=part).seconds for c in (poor, better))
        assert after <= before * ROUNDING


@few
@given(runs.filter(possible))
def test_the_parts_of_a_step_add_up(run):
    step = simulate(MODEL, on(run), run)
    assert sum(step.parts.values()) == pytest.approx(step.seconds, rel=1e-12)


workloads = st.builds(
    lambda mask, layout, tokens, kv: Workload(
        Sizes(tokens, 1, 8, kv, 64, 64, 2, 4, 4, (True, True, True)), mask,
        make(layout, cp_size=8),
    ),
    st.sampled_from([Causal(), Full()]), st.sampled_from(["zigzag", "contiguous"]),
    st.sampled_from([64, 1024]), st.sampled_from([2, 8]),
)  # fmt: skip


@settings(max_examples=12)
@given(workloads, st.sampled_from(["intra", "inter", "compute"]), st.floats(1, 4))
def test_a_faster_part_raises_what_is_taken_by_no_more_than_the_tie(work, name, factor):
    """The one taken may exceed the best by TIE, times the handicap of algorithms that hold more."""
    slow = Rates(50e9, 5e9, 1e-5, 50e12, 1e-5)
    fast = replace(slow, **{name: factor * getattr(slow, name)})
    grids = grids_of(8, 4, work.sizes)
    before, after = (best(work, grids, each) for each in (slow, fast))
    handicap = max(each.handicap for each in ALGORITHMS.values())
    allowed = (1 + TIE) * (handicap if before.taken.algorithm == "all_gather" else 1)
    assert after.seconds <= before.seconds * allowed * ROUNDING
    assert min(c.seconds for c in (after.taken, *after.others)) <= before.seconds * ROUNDING
