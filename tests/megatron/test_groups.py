"""A node that lies on several hosts is noticed, however it was asked for."""

import pytest
import session

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
        assert f"a node of {per_node} context-parallel ranks lies on several hosts" in line
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
