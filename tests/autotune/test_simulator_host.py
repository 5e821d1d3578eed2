"""What a host that copies its own messages takes, links that are shared, and what is recorded."""

import math

import numpy as np
import pytest

from megatron_burst.autotune.exchanges import Wires
from megatron_burst.autotune.rates import Rates
from megatron_burst.autotune.recording import Recording
from megatron_burst.autotune.simulator import pass_time
from megatron_burst.schedule import rings
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.demand import everything
from megatron_burst.schedule.tables import Grid

# K and V of 16 rows, 8 heads of 16 in fp32.
SIZES = Sizes(16, 1, 8, 8, 16, 16, 4, 4, 4, (True, True, True))
KV = 16384
LINKS = Rates(float(KV), float(KV), compute=math.inf)  # a chunk takes a second


def there(algorithm, inter, intra):
    grid = Grid(inter, intra)
    return rings.forward(algorithm, grid, wanted=everything(grid.size, 16))


def seconds(schedule, rates, compute=0.0, **more):
    size = schedule.grid.size
    return pass_time(schedule, SIZES, np.full((size, size), compute), rates, **more).seconds


def test_what_a_rank_handles_delays_its_own_messages_and_its_computing():
    """A ring of 4: 3 hops of a second each, before each of which the rank copies for 1/4 s."""
    rates = Rates(KV, KV, compute=math.inf, handling=0.25 / KV)
    ring = there("ring", 1, 4)
    assert seconds(ring, LINKS) == 3
    assert seconds(ring, rates) == 3 * 1.25
    # Computing for 2 s hides hops, not copies: 3 copies and 4 pairs.
    assert seconds(ring, rates, compute=2.0) == 3 * 0.25 + 4 * 2


def test_messages_that_start_together_end_together():
    """all_gather on 3 ranks: 2 chunks over one port. One by one the first is there after a second,
    together both are after two; then a rank that computes for a second per pair ends later."""
    gather = there("all_gather", 1, 3)
    assert seconds(gather, LINKS) == 2
    assert seconds(gather, LINKS, wires=Wires(together=True)) == 2
    # own pair until 1, the first chunk's until 2, the second's until 3
    assert seconds(gather, LINKS, compute=1.0) == 3
    # own pair until 1, then both chunks wait until 2
    assert seconds(gather, LINKS, compute=1.0, wires=Wires(together=True)) == 4


def test_one_message_per_port_is_the_same_alone_and_together():
    for name in ("ring", "burst"):
        plan = there(name, 2, 2)
        alone = seconds(plan, LINKS, compute=0.7)
        assert seconds(plan, LINKS, compute=0.7, wires=Wires(together=True)) == alone


def test_a_recording_holds_what_ran_and_what_was_sent():
    """A ring of 2: a hop of a second beside the own pair of half a second, then the other's."""
    recording = Recording()
    plan = there("ring", 1, 2)
    total = seconds(plan, LINKS, compute=0.5, recording=recording)
    assert total == 1.5
    found = sorted(recording.spans)
    computed = [(s.start, s.end) for s in found if s.what == "compute" and s.rank == 1]
    assert computed == [(0.0, 0.5), (1.0, 1.5)]
    sent = [(s.rank, s.peer, s.what, s.start, s.end) for s in found if s.what != "compute"]
    assert sent == [(0, 1, "intra", 0.0, 1.0), (1, 0, "intra", 0.0, 1.0)]
    assert seconds(plan, LINKS, compute=0.5) == total  # recording changes nothing


def test_handling_must_be_seconds():
    with pytest.raises(ValueError, match="handling must be seconds"):
        Rates(1.0, 1.0, handling=-1.0)
