"""Activations are sent on Megatron's own groups, in step with Megatron's use of them.

A node that includes several hosts is also detected, for each way of setting it.
"""

import copy
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import packed_ranks
import pytest
import session
import torch
import torch.distributed as dist
from test_parity import TOLERANCE, TWO_BY_TWO, worst

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron.attention import plan_book
from megatron_burst.megatron.attention.groups import node_warning


@pytest.mark.parametrize(
    ("hosts", "per_node", "fit"),
    [
        ("aaaa", 4, None),
        ("aabb", 2, None),
        ("aaaa", 2, None),  # two pretended nodes on one host
        ("abcd", 1, None),
        ("aabb", 4, 2),
        ("abcd", 4, 1),
        ("abab", 2, 1),
        ("aaaabbbb", 8, 4),
        ("aabbaabb", 4, 2),
        ("aaabbb", 6, 3),
    ],
)
def test_which_nodes_are_warned_of(hosts, per_node, fit):
    line = node_warning(list(hosts), per_node)
    if fit is None:
        assert line is None
    else:
        assert f"a node of {per_node} context-parallel ranks spans several hosts" in line
        assert f"make nodes of {fit} " in line


@pytest.mark.parametrize(
    ("sizes", "intra_size", "per_node", "fit"),
    [(None, 4, 4, 2), ([4, 1], None, 4, 2), ([2, 2], None, 2, None), (None, None, 2, None)],
)
def test_ranks_on_two_hosts(four, sizes, intra_size, per_node, fit):
    results = four(session.node_lines, "aabb", sizes, intra_size)
    assert [found for _, found in results] == [per_node] * 4
    told = [lines for lines, _ in results]
    assert told[1:] == [[]] * 3
    if fit is None:
        assert not told[0]
    else:
        (line,) = told[0]
        assert f"make nodes of {fit} " in line


def test_no_process_group_outlives_the_launcher(four):
    """Threads of gloo of such a group may abort a run at its end."""
    for made, kept in four(session.kept_by_the_launcher):
        assert made > 10
        assert kept == []


# --- Megatron's groups ----------------------------------------------------------------------------


def out_of_order(logs):
    """Return the groups on which ranks had different orders of operations.

    One queue per rank must be able to serve the order: the ranks have the same collectives, and
    every message that is sent between two collectives is also received there.
    """
    wrong = set()
    for name in {name for log in logs for name in log}:
        epochs = {rank: epochs_of(log[name]) for rank, log in enumerate(logs) if name in log}
        if len({tuple(collective for collective, _ in each) for each in epochs.values()}) > 1:
            wrong.add(name)
            continue
        for each in zip(*epochs.values(), strict=True):
            sent, received = Counter(), Counter()
            for rank, (_, messages) in zip(epochs, each, strict=True):
                for way, peer in messages:
                    if way == "to":
                        sent[rank, peer] += 1
                    else:
                        received[peer, rank] += 1
            if sent != received:
                wrong.add(name)
    return wrong


def epochs_of(events):
    """Return [(collective, the messages before it)], with None for the end."""
    epochs, messages = [], []
    for event in [*events, None]:
        if isinstance(event, tuple):
            messages.append(event)
        else:
            epochs.append((event, messages))
            messages = []
    return epochs


@pytest.mark.parametrize(
    ("flags", "carriers"),
    [
        (
            "--context-parallel-size 4 --context-parallel-algo ring",
            "1 made (flat gradients), reused groups for flat",
        ),
        (
            f"{TWO_BY_TWO} --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            "2 made (intra gradients, inter gradients), reused groups for intra, inter",
        ),
        pytest.param(
            f"{TWO_BY_TWO} --context-parallel-algo hybrid --burst-ulysses-size 2",
            "1 made (inter gradients), reused groups for inter, ulysses",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--context-parallel-size 4 --burst-intra-size 2 --burst-side query",
            "4 made (intra, inter, intra gradients, inter gradients)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rings_share_megatrons_groups_with_megatron(four, common, train, flags, carriers):
    """Loss reductions between calls, recomputation and evaluations change no loss.

    Their order must be one that NCCL's single queue per communicator can serve.
    """
    results = four(session.train_beside_other_uses, [*common, *flags.split()])
    for losses, _, found, _ in results:
        assert worst(losses, train()) < TOLERANCE
        assert found == {f"communicators: {carriers}"}
    logs = [done for _, done, _, _ in results]
    assert not out_of_order(logs)
    shared = [name for name in results[0][3] if ("to", 1) in logs[0][name]]
    assert bool(shared) == ("reused" in carriers)
    for name in shared:  # a message that one rank sends after a collective, others before it
        late = copy.deepcopy(logs)
        late[0][name].remove(("to", 1))
        late[0][name].append(("to", 1))
        assert out_of_order(late) == {name}


def rings_of_normal_priority():
    """Return rings that queue behind attention, and all rings.

    The cases are groups of gloo, and groups that appear as NCCL without and with high priority.
    """
    world = dist.group.WORLD
    groups = mb.Groups.from_topology(world, intra=4, reuse=[world])
    x = torch.zeros(8, 1, 2, 8, requires_grad=True)
    mb.attention(x, x, x, groups=groups)
    found = [plan_book.rings_of_normal_priority(groups)]
    for high in (False, True):
        theirs = SimpleNamespace(options=SimpleNamespace(is_high_priority_stream=high))
        with (
            mock.patch.object(plan_book, "backends", return_value={"cpu": "nccl"}),
            mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=theirs),
        ):
            found.append(plan_book.rings_of_normal_priority(groups))
    return *found, [channel.ring for channel, _ in groups.carriers]


def test_communicators_without_priority_are_named(four):
    for of_gloo, without, with_it, all_rings in four(rings_of_normal_priority):
        assert not of_gloo
        assert without == all_rings != []
        assert not with_it


@pytest.mark.parametrize(
    ("rings", "connections", "named"),
    [
        (["intra", "inter"], None, "--high-priority-stream-groups hcp,"),
        (["flat"], "8", "--high-priority-stream-groups cp,"),
        (["inter", "ulysses"], "", "--high-priority-stream-groups hcp cp,"),
        (["flat"], "1", None),
        ([], None, None),
    ],
)
def test_rings_that_wait_for_kernels_to_drain_are_named(monkeypatch, rings, connections, named):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    line = plan_book.priority_line(rings)
    assert (named in line and ", ".join(rings) in line) if named else line == ""


def test_communicators_that_come_later_are_logged_once(four, common):
    """A windowed layer uses a ring over all ranks, the other layer two rings."""
    flags = f"{TWO_BY_TWO} --window-size 12,0 --window-attn-skip-freq 2 --burst-layout contiguous"
    first, *others = four(session.logged, [*common, *flags.split()])
    assert others == [[]] * 3
    startup, later = first
    assert startup.endswith(" | communicators: 1 made (flat gradients), reused groups for flat")
    assert later == (
        "communicators: 3 made (flat gradients, intra gradients, inter gradients), reused groups "
        "for flat, intra, inter"
    )


def test_a_limit_of_nccl_is_refused_elsewhere(four, common):
    flags = "--context-parallel-size 4 --burst-nccl-max-ctas 8"
    for words in four(session.error, [*common, *flags.split()]):  # Megatron may say where
        assert words.startswith(
            "ValueError: --burst-nccl-max-ctas 8 has an effect only with NCCL, and the "
            "context-parallel group uses gloo: remove the flag"
        )


def sharing_of_two_models():
    """Return the ranks that share heads in two models on the same group: ulysses, then burst."""
    from megatron.core.transformer.enums import AttnMaskType

    with packed_ranks.core_attention("zigzag", choices={"algorithm": "ulysses"}) as first:
        config = copy.copy(first.config)
        config.burst = mb.BurstConfig(intra_size=2)
        second = burst.BurstCoreAttention(config, 1, AttnMaskType.causal, "self")
        return [core.book.groups.topology.ulysses for core in (first, second)]


def test_models_with_different_algorithms_have_different_grids(four):
    assert four(sharing_of_two_models) == [[4, 1]] * 4
