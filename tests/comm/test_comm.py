"""Transports and grids: sent bytes are counted, errors are reported, nothing is copied.

The in-process transport must detect what fails on real hardware: a buffer that is overwritten while
it is sent, an exchange with one end, a message of another size.
"""

import copy
import pickle
import re
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm import packing
from megatron_burst.comm.packing import CallTag, Envelope
from megatron_burst.comm.transport import Channel, Counters, Receive, Send
from megatron_burst.plugins.testing import in_process

FLAT = Channel("flat", False)
CPU = torch.device("cpu")


def pair():
    """Return the two endpoints of an in-process grid of two."""
    return [rank.ring for rank in in_process.groups(intra=2).ranks]


def post(a, b, sent, received, label="a to b", channel=FLAT):
    sending = a.exchange(channel, [Send(1, "intra", sent)], [], label)
    receiving = b.exchange(channel, [], [Receive(0, received)], label)
    return sending, receiving


# --- the in-process transport --------------------------------------------------------------


def test_a_message_arrives_whole():
    sent, received = [torch.arange(3.0), torch.ones(2)], [torch.zeros(3), torch.zeros(2)]
    for pending in post(*pair(), sent, received):
        pending.wait()
    assert all(torch.equal(x, y) for x, y in zip(sent, received, strict=True))


FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
def test_what_was_not_waited_for_is_poisoned(dtype):
    """Also if its sender waited long ago, and again after its release."""
    poison = "nan" if dtype in FLOATS else str(torch.tensor(-1).to(dtype).item())

    def poisoned():
        return {str(x) for x in received[0].tolist()} == {poison}

    ends, received = pair(), [torch.zeros(3).to(dtype)]
    sending, receiving = post(*ends, [torch.ones(3).to(dtype)], received)
    assert poisoned()
    sending.wait()
    assert poisoned()
    receiving.wait()
    assert received[0].tolist() == [1, 1, 1]
    receiving.wait()  # a second one has nothing to bring
    ends[1].released(received)
    assert poisoned()


def test_messages_of_one_channel_stay_in_order_and_channels_apart():
    a, b = pair()
    first, second, gradient = [torch.zeros(1)], [torch.zeros(1)], [torch.zeros(1)]
    a.exchange(FLAT, [Send(1, "intra", [torch.tensor([1.0])])], [], "first")
    a.exchange(FLAT, [Send(1, "intra", [torch.tensor([2.0])])], [], "second")
    a.exchange(Channel("flat", True), [Send(1, "intra", [torch.tensor([3.0])])], [], "gradient")
    waits = [
        b.exchange(Channel("flat", True), [], [Receive(0, gradient)], "gradient"),
        b.exchange(FLAT, [], [Receive(0, first)], "first"),
        b.exchange(FLAT, [], [Receive(0, second)], "second"),
    ]
    for pending in waits:
        pending.wait()
    assert [x[0].item() for x in (first, second, gradient)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("landed", [False, True])
def test_overwriting_in_flight_is_caught(landed):
    """Also after it was received: its sender cannot know that before it waited."""
    sent = [torch.ones(3)]
    sending, receiving = post(*pair(), sent, [torch.zeros(3)], "keys of rank 0")
    if landed:
        receiving.wait()
    sent[0].add_(1)
    with pytest.raises(RuntimeError, match="keys of rank 0: a sent tensor was overwritten"):
        sending.wait()


def test_a_message_with_another_envelope_is_caught():
    """The message has the expected size, channel and ranks."""
    a, b = pair()
    sent = packing.pack([torch.ones(3)], envelope(content=1))
    room = packing.empty([(torch.Size([3]), torch.float32)], torch.device("cpu"))
    a.exchange(FLAT, [Send(1, "intra", sent.tensors, sent.flat)], [], "keys")
    wanted = Receive(0, room.tensors, room, envelope(content=2))
    with pytest.raises(RuntimeError, match=r"keys: .* received a message of another pass or chunk"):
        b.exchange(FLAT, [], [wanted], "keys").wait()


def test_writing_after_the_wait_is_fine():
    sent, received = [torch.ones(3)], [torch.zeros(3)]
    sending, receiving = post(*pair(), sent, received)
    sending.wait()
    sent[0].add_(1)
    receiving.wait()
    assert received[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("end", ["send", "receive"])
def test_an_exchange_with_one_end_is_a_deadlock_not_a_hang(end):
    a, b = pair()
    x = [torch.ones(1)]
    if end == "send":
        pending = a.exchange(FLAT, [Send(1, "intra", x)], [], "lonely")
    else:
        pending = b.exchange(FLAT, [], [Receive(0, x)], "lonely")
    with pytest.raises(RuntimeError, match=r"deadlock: only the sender .*: lonely"):
        pending.wait()


@pytest.mark.parametrize("received", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)])
def test_another_size_or_dtype_is_caught(received):
    _, receiving = post(*pair(), [torch.ones(3)], [received], "short")
    with pytest.raises(RuntimeError, match=r"short: a tensor .* was sent"):
        receiving.wait()


# --- counters ------------------------------------------------------------------------------


def test_counters_count_what_is_sent_by_link_class():
    a, b = (rank.ring for rank in in_process.groups(inter=2, intra=1).ranks)
    a.exchange(FLAT, [Send(1, "inter", [torch.zeros(3), torch.zeros(2, 2).bfloat16()])], [], "")
    a.exchange(FLAT, [Send(1, "intra", [torch.zeros(1).double()])], [], "")
    b.exchange(FLAT, [], [Receive(0, [torch.zeros(3)])], "")
    assert a.counters == Counters(intra=8, inter=20)
    assert b.counters == Counters(0, 0)
    a.counters.reset()
    assert a.counters == Counters(0, 0)


# --- grids ---------------------------------------------------------------------------------


def test_ranks_of_an_in_process_grid():
    groups = in_process.groups(inter=2, intra=3)
    assert (groups.size, groups.topology.inter_size, groups.topology.intra_size) == (6, 2, 3)
    assert [rank.rank for rank in groups.ranks] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_groups_refuse_to_be_copied(copier):
    with pytest.raises(TypeError, match="holds process groups and cannot be copied or pickled"):
        copier(mb.Groups.single())


def shape(groups):
    return groups.topology.inter_size, groups.topology.intra_size, groups.rank, groups.backend


def grids_of_four():
    """Return on every rank the grid made in every possible way, and how attention sees it."""
    world = dist.group.WORLD
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    me = dist.get_rank()
    made = {
        "flat": mb.Groups.flat(world),
        "by host": mb.Groups.by_host(world),
        "topology": mb.Groups.from_topology(world, intra=2),
        "pair": mb.Groups(intra=nodes[me // 2], inter=columns[me % 2]),
    }
    return {name: shape(groups) for name, groups in made.items()}


def test_the_same_grid_from_a_topology_from_two_groups_and_from_hosts(ranks):
    pool = ranks(4)
    for rank, seen in enumerate(pool.run(grids_of_four)):
        assert seen == {
            "flat": (1, 4, rank, "gloo"),
            "by host": (1, 4, rank, "gloo"),
            "topology": (2, 2, rank, "gloo"),
            "pair": (2, 2, rank, "gloo"),
        }
    pool.close()


def refusal(make):
    """Return the message of the ValueError that `make` raises."""
    try:
        make()
    except ValueError as error:
        return str(error)
    return None


def bad_topologies():
    world = dist.group.WORLD
    return [refusal(lambda n=n: mb.Groups.from_topology(world, intra=n)) for n in (0, 2, 4)]


def test_nodes_that_do_not_fit_are_refused(ranks):
    for messages in ranks(3).run(bad_topologies):
        assert messages == [
            f"intra: 3 ranks cannot be cut into nodes of {n}; use 1 or 3" for n in (0, 2, 4)
        ]


def nodes_of_three_and_one():
    """Ranks 1 and 2 have no rank with their index on the other node."""
    rank, intra, inter = dist.get_rank(), None, None
    for members in ([0, 1, 2], [3]):
        made = dist.new_group(members, timeout=timedelta(seconds=4))
        intra = made if rank in members else intra
    for members in ([0, 3], [1], [2]):
        made = dist.new_group(members, timeout=timedelta(seconds=4))
        inter = made if rank in members else inter
    return refusal(lambda: mb.Groups(intra=intra, inter=inter))


def test_every_rank_is_told_of_nodes_of_unequal_size(ranks):
    words = "intra: nodes must have the same number of ranks, got [[0, 1, 2], [3]]"
    assert ranks(4).run(nodes_of_three_and_one) == [words] * 4


def without_a_group():
    """Rank 1 passes None, so it cannot communicate; return the error of each rank."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    given = None if dist.get_rank() == 1 else group
    try:
        mb.Groups.from_topology(given, intra=2)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_whose_groups_another_does_not_make_are_told_so(ranks):
    first, second = ranks(2).run(without_a_group)
    assert first.startswith("groups: not all of the ranks [0, 1] took part")
    assert second.startswith("group must be a process group that contains this rank, got None")


def uneven_hosts(hosts):
    name = hosts[dist.get_rank()]
    real, socket.gethostname = socket.gethostname, lambda: name
    try:
        return refusal(lambda: mb.Groups.by_host(dist.group.WORLD))
    finally:
        socket.gethostname = real


@pytest.mark.parametrize("hosts", ["aab", "aba", "abab", "aaba"])
def test_hosts_that_form_no_grid_are_refused(ranks, hosts):
    for message in ranks(len(hosts)).run(uneven_hosts, hosts):
        assert "hosts must have the same number of consecutive ranks" in message
        assert "set the number of ranks per node" in message


def beside_uneven_groups():
    """Two ranks make a grid that the others do not; then all make groups, ours and torch's."""
    rank = dist.get_rank()
    over_all = dist.new_group(list(range(4)))
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    q, k, v = torch.randn(3, 8, 1, 2, 4)
    if rank < 2:
        mb.attention(q, k, v, groups=mb.Groups.flat(pair))
    out = mb.attention(q, k, v, groups=mb.Groups.from_topology(over_all, intra=2))
    last, total = dist.new_group(list(range(4))), torch.ones(1)
    dist.all_reduce(total, group=last)
    return out.shape[0], int(total)


def test_ranks_may_be_in_different_numbers_of_groups(ranks):
    """Our groups have names on which members agree, and do not change torch's count."""
    pool = ranks(4)
    assert pool.run(beside_uneven_groups) == [(8, 4)] * 4
    pool.close()  # its ranks stay in different numbers of groups


def handed_to_torch():
    """Return the counters and the bytes that torch sent in one forward and backward."""
    groups = mb.Groups.from_topology(dist.group.WORLD, intra=2)
    sent, real = [], dist.batch_isend_irecv

    def spy(ops):
        sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real(ops)

    dist.batch_isend_irecv = spy
    try:
        qkv = [torch.randn(4, 1, 2, 4, requires_grad=True) for _ in range(3)]
        mb.attention(*qkv, groups=groups, side="query").sum().backward()
    finally:
        dist.batch_isend_irecv = real
    return groups.counters.intra + groups.counters.inter, sum(sent), len(sent)


def test_counters_count_what_torch_is_asked_to_send(ranks):
    """One message per hop: 3 in forward, 3 activations and 3 gradients in backward.

    Each has an envelope, which is not counted.
    """
    for counted, sent, messages in ranks(4).run(handed_to_torch):
        assert messages == 9
        assert counted == sent - packing.ENVELOPE * messages > 0


def calls_of_groups(ulysses, reused):
    """Return the groups of this rank, those whose first call was a collective, and the reused ones.

    They come from a forward and backward in which some ranks have nothing to send.
    """
    given = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    given = [given[dist.get_rank() // 2], given[2 + dist.get_rank() % 2]] if reused else []
    first, seen = {}, {"all_reduce": dist.all_reduce, "batch_isend_irecv": dist.batch_isend_irecv}

    def reduce(tensor, *rest, group):
        first.setdefault(group, "all_reduce")
        return seen["all_reduce"](tensor, *rest, group=group)

    def batch(ops):
        for op in ops:
            first.setdefault(op.group, "batch_isend_irecv")
        return seen["batch_isend_irecv"](ops)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", reduce)
        patched.setattr(dist, "batch_isend_irecv", batch)
        groups = mb.Groups.from_topology(dist.group.WORLD, intra=2, ulysses=ulysses, reuse=given)
        qkv = [torch.randn(4, 1, 2, 4, requires_grad=True) for _ in range(3)]
        mask = mb.masks.Documents([0, 4, 12, 16]) & mb.masks.Causal()
        out = mb.attention(*qkv, groups=groups, mask=mask, layout="contiguous")
        out.sum().backward()
    mine = set(groups.ring.channels.values())
    joined = sum(first.get(group) == "all_reduce" for group in mine)
    return len(mine), joined, len(mine & set(given))


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_all_members_take_part_in_the_first_call_of_a_group(ranks, ulysses, reused):
    """NCCL makes a communicator there, and waits for members that have nothing to send."""
    for there, joined, given in ranks(4).run(calls_of_groups, ulysses, reused):
        assert there == joined >= 2
        assert given == 2 * reused


def refused_grid(arguments):
    """Return the error of this rank for a grid with `arguments`, by rank."""
    mine = arguments[dist.get_rank()]
    return refusal(lambda: mb.Groups.from_topology(dist.group.WORLD, **mine))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"intra": 4}, "ranks disagree: rank 0 has intra=2.* rank 1 has intra=4"),
        ({"intra": 3}, "ranks disagree: rank 0 has intra=2.* rank 1 has intra=3"),
        ({"intra": 2, "ulysses": 2}, "ranks disagree: .*ulysses=1.* rank 1 has .*ulysses=2"),
        ({"intra": 2, "placement": "context_first"}, "ranks disagree: .*'context_first'"),
        ({"intra": 2, "placement": "nowhere"}, "ranks disagree: .*'nowhere'"),
    ],
)
def test_ranks_that_ask_for_different_grids_are_told_so(ranks, odd, words):
    """They would wait for each other's groups, or exchange on rings that do not match."""
    arguments = [{"intra": 2}, odd, {"intra": 2}, {"intra": 2}]
    messages = ranks(4).run(refused_grid, arguments)
    assert len(set(messages)) == 1
    assert re.search(words, messages[0]), messages


def test_a_group_that_is_none_is_refused():
    """torch.distributed.group.WORLD is None before init_process_group."""
    for make in (
        lambda: mb.Groups.flat(None),
        lambda: mb.Groups.from_topology(None, intra=2),
        lambda: mb.Groups.by_host(None),
        lambda: mb.Groups(intra=None, inter=None),
    ):
        with pytest.raises(ValueError, match=r"group .*init_process_group first, got None"):
            make()


# --- packing --------------------------------------------------------------------------------


def envelope(plan=1, call=1, label=1, content=1):
    return Envelope(CallTag(plan, call, label), content)


def test_a_message_keeps_tensors_of_any_dtype_aligned():
    tensors = [torch.arange(3.0), torch.arange(5).bfloat16().view(5, 1), torch.arange(2.0).double()]
    message = packing.pack(tensors, envelope())
    assert all(torch.equal(x, y) for x, y in zip(message.tensors, tensors, strict=True))
    assert [(t.data_ptr() - message.flat.data_ptr()) % 16 for t in message.tensors] == [0, 0, 0]
    # 12, 10 and 16 bytes, each rounded up, and the envelope
    assert message.flat.numel() == 3 * 16 + 40
    assert packing.mismatch(message.flat, envelope()) is None


def test_a_message_has_the_room_asked_for():
    wanted = [(torch.Size([4]), torch.float32)]
    small, large = (packing.empty(wanted, torch.device("cpu"), room) for room in (0, 1000))
    assert (small.flat.numel(), small.room.numel()) == (56, 56)
    assert (large.flat.numel(), large.room.numel()) == (56, 1000)
    assert large.room.data_ptr() == large.flat.data_ptr() == large.tensors[0].data_ptr()


TAIL = "; the ranks do not run the same plans in the same order"


def message_of(sent, received, envelopes, room):
    """Rank 0 sends `sent` elements and rank 1 expects `received`; return the error."""
    me, groups = dist.get_rank(), mb.Groups.from_topology(dist.group.WORLD, intra=2)
    groups.connect([FLAT], CPU)
    endpoint = groups.ring
    if me == 0:
        flat, tensors, _ = packing.pack([torch.ones(sent)], envelopes[0])
        pending = endpoint.exchange(FLAT, [Send(1, "intra", tensors, flat)], [], "keys")
    else:
        shapes = [(torch.Size([received]), torch.float32)]
        message = packing.empty(shapes, torch.device("cpu"), room)
        # what the memory held before must not pass for an envelope
        packing.write_envelope_(message, envelopes[1])
        receive = Receive(0, message.tensors, message, envelopes[1])
        pending = endpoint.exchange(FLAT, [], [receive], "keys")
    try:
        pending.wait()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("sent", "received", "arrived", "words"),
    [
        (1000, 2000, envelope(), "received a message of another size than the expected 8040 bytes"),
        (2000, 1000, envelope(), "received a message of another size than the expected 4040 bytes"),
        (8, 8, envelope(call=2), "call 1 of this rank received a message of call 2"),
        (8, 8, envelope(plan=-7), "call 1 has another plan on the sending rank"),
        (8, 8, envelope(label=2), "call 1 has another label or sink (or host"),
        (8, 8, envelope(content=2), "call 1 received a message of another pass or chunk"),
    ],
)
def test_a_message_that_gloo_takes_in_silence_is_caught(ranks, sent, received, arrived, words):
    """If it is longer than expected, gloo would end the process."""
    first, second = ranks(2).run(message_of, sent, received, (arrived, envelope()), 8040)
    assert first is None
    assert second.startswith(f"exchange failed: keys: from member 0 of the group: {words}"), second
    assert second.endswith(TAIL)


def test_a_message_of_the_expected_size_and_envelope_passes(ranks):
    assert ranks(2).run(message_of, 5, 5, (envelope(), envelope()), 0) == [None, None]


def test_one_rank_needs_no_list_and_no_process_group():
    q, k, v = torch.randn(3, 12, 1, 2, 4, dtype=torch.float64)
    groups = mb.Groups.single()
    assert (groups.size, groups.rank) == (1, 0)
    out = mb.attention(q, k, v, groups=groups, layout="contiguous", mask=mb.masks.Causal())
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / 4**0.5
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("bhqk,kbhd->qbhd", weights, v)
    assert (out - expected).abs().max() < 1e-12
    assert not torch.distributed.is_initialized()
