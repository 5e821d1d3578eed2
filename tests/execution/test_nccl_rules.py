"""Posts and waits of ranks run under NCCL's rules, and the rules detect programs that do not.

`test_every` replays its random calls too: any grid, algorithm, mask, side, head chunks and partial
recomputation, with several calls in flight.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from nccl_rules import COMMUNICATORS, STREAMS, STRICT, Post, Rules, Sent, Wait, Wanted, record
from nccl_rules import faults as all_faults

import megatron_burst as mb
from megatron_burst.comm.packing import NO_CALL, Envelope
from megatron_burst.comm.transport import Channel
from megatron_burst.planning import build
from megatron_burst.plugins.testing import in_process

CONNECTIONS, QUEUE = Rules(True, False, False), Rules(False, True, False)
NOTHING = Rules(False, False, False)


# --- the rules, on traces written by hand ---------------------------------------------------

PARTS = ((torch.Size([3]), torch.float32),)
X, Y = Channel("flat", False), Channel("flat", True)


def post(channel, to=None, of=None):
    sent = () if to is None else (Sent(to, PARTS, None),)
    wanted = () if of is None else (Wanted(of, PARTS, Envelope(NO_CALL, 0)),)
    return Post(channel, sent, wanted, f"{channel.ring} {channel.gradient}")


def channels(rank, channel):
    return channel


def ended(traces, rules):
    """Return whether every rank ends under these rules, with one communicator per channel."""
    (found,) = all_faults(traces, channels, (rules,)) or [None]
    assert found is None or found.startswith("deadlock: rank 0 at ")
    return found is None


def test_two_communicators_in_another_order():
    first = [post(X, to=1), post(Y, to=1), Wait(0), Wait(1)]
    second = [post(Y, of=0), post(X, of=0), Wait(0), Wait(1)]
    assert ended([first, second], STREAMS._replace(connections=False))
    assert not ended([first, second], CONNECTIONS)
    assert not ended([first, second], QUEUE)


def test_two_ranks_that_wait_for_each_other_before_they_send():
    """On any hardware, each rank sends after it has waited."""
    first = [post(X, of=1), Wait(0), post(Y, to=1), Wait(2)]
    second = [post(Y, of=0), Wait(0), post(X, to=0), Wait(2)]
    assert not ended([first, second], NOTHING)
    assert not ended([first, second], Rules(False, False, True))
    # as one batch each, it is how rings move
    assert ended([[post(X, to=1, of=1), Wait(0)], [post(X, to=0, of=0), Wait(0)]], STRICT)


def test_a_batch_is_complete_when_all_of_its_messages_are():
    """Rank 0 sends to 1 and 2 at once; 1 receives, but reaches 2 only through 0's next batch."""
    both = Post(X, (*post(X, to=1).sent, *post(X, to=2).sent), (), "both")
    traces = [
        [both, Wait(0), post(Y, to=1), Wait(2)],
        [post(X, of=0), Wait(0), post(Y, of=0), Wait(2), post(Y, to=2), Wait(4)],
        [post(Y, of=1), Wait(0), post(X, of=0), Wait(2)],
    ]
    assert not ended(traces, NOTHING)
    traces[2] = [post(X, of=0), Wait(0), post(Y, of=1), Wait(2)]
    assert ended(traces, STRICT)


def test_first_messages_link_batches_beyond_their_neighbours():
    """Rank 1's batch connects to 0 and 2, so 0's first message waits until 2 posts too."""
    middle = Post(X, post(X, to=2).sent, post(X, of=0).wanted, "middle")
    late = [post(Y, of=0), Wait(0), post(X, of=1), Wait(2)]
    traces = [[post(X, to=1), post(Y, to=2), Wait(0), Wait(1)], [middle, Wait(0)], late]
    assert ended(traces, NOTHING)
    assert not ended(traces, CONNECTIONS)


def test_only_the_first_message_makes_a_connection():
    apart = [post(X, to=1), Wait(0), post(Y, to=1), Wait(2)]
    other = [post(X, of=0), Wait(0), post(Y, of=0), Wait(2)]
    first = [*apart, post(X, to=1), post(Y, to=1), Wait(4), Wait(5)]
    second = [*other, post(Y, of=0), post(X, of=0), Wait(4), Wait(5)]
    assert ended([first, second], CONNECTIONS)
    assert not ended([first, second], QUEUE)


# --- faults in what ranks really post -------------------------------------------------------

RANK = 1


@pytest.fixture(scope="module")
def ring():
    """Return (topology, traces) of a flat ring of four that sends queries and their gradients."""
    return ran(1, 4, "ring")


def ran(inter, intra, algorithm):
    groups = in_process.groups(inter=inter, intra=intra)
    traces = record(groups)
    each = range(inter * intra)
    x = [[torch.randn(4, 1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in each]
         for _ in "qkv"]  # fmt: skip
    outs = in_process.attention(
        *x, groups=groups, algorithm=algorithm, side="query", mask=mb.masks.Full(),
        kernel="reference",
    )  # fmt: skip
    torch.autograd.grad(outs, [t for each in x for t in each], outs)
    return groups.topology, traces


def faults(topology, traces, name="gradients apart", rules=(STRICT, STREAMS)):
    return all_faults(traces, COMMUNICATORS[name](topology), rules)


def edited(traces, edit):
    """Return the traces with another trace of `RANK`."""
    trace = list(traces[RANK])
    edit(trace)
    return [*traces[:RANK], trace, *traces[RANK + 1 :]]


def posts(trace, alike):
    """Return the positions of two consecutive posts, on the same channel or not."""
    places = [at for at, event in enumerate(trace) if isinstance(event, Post)]
    return next(
        p for p in pairwise(places) if (trace[p[0]].channel == trace[p[1]].channel) == alike
    )


def swapped(traces, alike):
    def swap(trace):
        a, b = posts(trace, alike)
        trace[a], trace[b] = trace[b], trace[a]

    return edited(traces, swap)


@pytest.mark.parametrize("name", COMMUNICATORS)
def test_the_calls_that_are_spoilt_below_are_right(ring, name):
    assert sum(len(trace) for trace in ring[1]) > 40
    assert faults(*ring, name) == []


def test_two_messages_of_a_channel_swapped_are_others(ring):
    """They have the same size, like the keys of two ranks."""
    topology, traces = ring
    for name in COMMUNICATORS:
        assert "is another: " in faults(topology, swapped(traces, alike=True), name)[0]


def test_posts_on_two_communicators_swapped_are_a_deadlock(ring):
    topology, traces = ring
    for rules in (STRICT, QUEUE):
        assert (
            "deadlock: " in faults(topology, swapped(traces, False), "gradients apart", (rules,))[0]
        )
    assert not faults(topology, swapped(traces, False), "all apart", (NOTHING,))
    assert "into" in faults(topology, swapped(traces, False), "shared")[0]


def test_a_missing_wait_is_said(ring):
    topology, traces = ring

    def forget(trace):
        gone = next(at for at, event in enumerate(trace) if isinstance(event, Wait))
        del trace[gone]  # and the places of posts behind it have moved
        trace[:] = [e if isinstance(e, Post) else Wait(e.post - (e.post > gone)) for e in trace]

    (found,) = faults(topology, edited(traces, forget))
    assert found.startswith(f"rank {RANK} waited 0 times: ")


def test_a_missing_post_is_said(ring):
    topology, traces = ring
    found = faults(topology, edited(traces, lambda trace: trace.pop(posts(trace, True)[1])))
    assert "has no " in found[0] or "is another" in found[0]
    # the last one leaves nothing to be taken for it
    last = max(at for at, event in enumerate(traces[RANK]) if isinstance(event, Post))
    found = faults(topology, edited(traces, lambda trace: trace.__delitem__(slice(last, None))))
    assert any("has no send" in fault for fault in found)
    assert any("has no receive" in fault for fault in found)


@pytest.mark.parametrize("other", [(torch.Size([4, 1]), torch.float64), (None, torch.float32)])
def test_a_message_of_another_size_or_dtype_is_said(ring, other):
    topology, traces = ring

    def resize(trace):
        at = posts(trace, True)[0]
        message = trace[at].sent[0]
        (shape, _), *rest = message.parts
        parts = ((other[0] or shape, other[1]), *rest)
        trace[at] = trace[at]._replace(sent=(message._replace(parts=parts),))

    assert " into " in faults(topology, edited(traces, resize))[0]


@pytest.mark.parametrize(("sizes", "algorithm"), [((1, 4), "ring"), ((2, 3), "burst")])
def test_a_rank_that_takes_its_channels_in_another_order_is_caught(sizes, algorithm, monkeypatch):
    """In the ring's own posts; ranks that share a process do not block."""
    made = build._step

    def backwards(*given):
        step = made(*given)
        both = [x for exchange in step.exchanges for x in (*exchange.leaving, *exchange.arriving)]
        hops = [payload.hop for payload in both]
        here = [{hop.src, hop.dst} for hop in hops]
        mine = here and set.intersection(*here) == {RANK}
        return replace(step, exchanges=step.exchanges[::-1]) if mine else step

    monkeypatch.setattr(build, "_step", backwards)
    topology, traces = ran(*sizes, algorithm)
    assert Counter(type(e) for e in traces[RANK])[Post] > 3
    assert "deadlock: " in faults(topology, traces)[0]
    assert faults(topology, traces, "shared")
