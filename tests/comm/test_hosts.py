"""Hosts by name and boot id, compared with the launcher's LOCAL_WORLD_SIZE."""

import os
import socket
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import megatron_burst as mb
from megatron_burst.comm import hosts
from megatron_burst.comm.hosts import HostIdentity, host_labels, launcher_warning, this_host


def by_host(names, boots, folder, local_world_size):
    """Return the ranks per node of `Groups.by_host`, and the warnings.

    Names and boot ids have one letter per rank.
    """
    rank = dist.get_rank()
    boot_id = Path(folder) / f"boot_id_{rank}"
    boot_id.write_text(f"{boots[rank]}\n")
    with (
        mock.patch.object(socket, "gethostname", return_value=names[rank]),
        mock.patch.object(hosts, "BOOT_ID", boot_id),
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": local_world_size}),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        groups = mb.Groups.by_host(dist.group.WORLD)
    return groups.topology.per_node, [(str(w.message), w.filename) for w in caught]


@pytest.mark.parametrize(
    ("names", "boots", "per_node"),
    [
        ("aaaa", "xxxx", 4),
        ("aaaa", "xxyy", 2),  # two machines whose containers have the same host name
        ("aabb", "xxxx", 2),  # two containers of one machine: NCCL connects them by sockets
        ("aabb", "xxyy", 2),
        ("aaaa", "wxyz", 1),
    ],
)
def test_a_node_has_one_host_name_and_one_boot_id(ranks, tmp_path, names, boots, per_node):
    results = ranks(4).run(by_host, names, boots, str(tmp_path), str(per_node))
    assert results == [(per_node, [])] * 4


def test_nodes_that_contradict_the_launcher_are_warned_of_on_one_rank(ranks, tmp_path):
    first, *others = ranks(4).run(by_host, "aaaa", "xxxx", str(tmp_path), "2")
    assert others == [(4, [])] * 3
    per_node, ((line, file),) = first
    assert per_node == 4
    assert "ranks [0, 1, 2, 3] have 1 node(s) by host name and boot id (a)" in line
    assert "but LOCAL_WORLD_SIZE=2 implies 2;" in line
    assert file == __file__


@pytest.mark.parametrize(
    ("ranks_of_group", "names", "sizes", "warned"),
    [
        ([0, 1, 2, 3], "aabb", "2222", False),
        ([0, 1, 2, 3], "aabb", "4444", True),
        ([0, 1, 2, 3], "aaaa", "2222", True),
        ([0, 2, 4, 6], "aabb", "4444", False),  # two tensor-parallel ranks between
        ([0, 4, 8, 12], "abcd", "4444", False),
        ([0, 4, 8, 12], "aaaa", "4444", True),
        ([1, 2, 3, 4], "aaab", "4444", False),
        ([0, 1, 2, 3], "aaaa", ["", "", "", ""], False),
        ([0, 1, 2, 3], "aaab", "3331", False),  # nodes of different sizes: not compared
    ],
)
def test_which_hosts_contradict_the_launcher(ranks_of_group, names, sizes, warned):
    line = launcher_warning(
        ranks_of_group, [HostIdentity(name, "x") for name in names], list(sizes)
    )
    assert (line is not None) == warned


def test_labels_have_the_boot_id_where_hosts_share_a_name():
    assert host_labels([HostIdentity("a", "x"), HostIdentity("b", "y")]) == ["a", "b"]
    assert host_labels([HostIdentity("a", "x"), HostIdentity("a", "y")]) == [
        "a (boot id x)",
        "a (boot id y)",
    ]


def test_a_system_without_boot_ids_has_host_names(tmp_path):
    with mock.patch.object(hosts, "BOOT_ID", tmp_path / "absent"):
        assert this_host() == HostIdentity(socket.gethostname(), "")
