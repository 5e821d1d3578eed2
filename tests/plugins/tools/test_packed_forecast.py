"""benchmarks/packed: groups cost what their shards cost, Megatron's groups, it runs."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.packed import megatron
from benchmarks.packed.__main__ import main
from benchmarks.packed.ours import passes
from benchmarks.packed.plans import Group
from benchmarks.packed.rings import Ring, Way
from benchmarks.packed.setting import LENGTHS, Setting
from megatron_burst.autotune.rates import Rates
from megatron_burst.layout import make

MULTICAST = Way(("multicast",))
SMALL = Setting(
    tokens=64, per_node=2, layers=2, parameters=1000, linear=1e9, backward=4e8,
    rates=Rates(intra=4e9, inter=1e9, latency=1e-6, compute=5e8, launch=1e-6),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_group_costs_what_zigzag_within_its_documents_does(ranks):
    """The closed form beside the package's own counts of shards."""
    lengths = np.array([2, 1, 5], dtype=np.int64) * 8 * ranks
    layout = make("zigzag", cp_size=ranks, cu_seqlens=[0, *np.cumsum(lengths)])
    wanted = passes(SMALL, layout, lengths, ("multicast",), head_chunks=(1,))
    got = Ring(SMALL, ranks, MULTICAST).passes(64.0, float((lengths**2).sum()))
    assert got == pytest.approx((wanted.forward.seconds, wanted.backward.seconds), rel=1e-9)


def test_half_the_tokens_are_half_the_bytes():
    ring = Ring(SMALL, 4, MULTICAST)
    alone = Ring(replace(SMALL, tokens=32), 4, MULTICAST)
    assert ring.passes(32.0, 128.0**2) == pytest.approx(alone.passes(32.0, 128.0**2))


def test_megatrons_scheduler_by_hand():
    """16 tokens on a rank, 4 ranks: 40 needs 4. Beside it 20 finds room on 4 ranks only, as 10 + 5
    are at most 16; 6 on them would be 16.5."""
    assert megatron.dynamic([6, 20, 40], 4, 16) == [[Group(4, (40, 20))], [Group(4, (6,))]]
    # 30 has two ranks; 16 and 9 a rank each; 8 + 9 are too many tokens for one, and so 8 goes where
    # 15 + 4 are too many, too: it waits, and is then spread over all ranks.
    first, last = megatron.dynamic([8, 9, 16, 30], 4, 16)
    assert first == [Group(2, (30,)), Group(1, (16,)), Group(1, (9,))]
    assert last == [Group(4, (8,))]


def test_groups_of_one_size_are_filled_in_order():
    """Three packs for two groups: the last one that holds several documents gives one away."""
    plan = megatron.fixed([30, 20, 10, 16], 4, 2, 16)
    assert plan == [[Group(2, (30,)), Group(2, (20,))], [Group(2, (16,)), Group(2, (10,))]]
    assert megatron.fixed([9], 4, 2, 16) == [[Group(2, (9,)), Group(2, ())]]


@pytest.mark.parametrize("seed", range(5))
def test_every_document_once_and_no_rank_too_full(seed):
    lengths = LENGTHS[1].draw(seed, 8 * 4096)
    for plan in (megatron.dynamic(lengths, 8, 4096), megatron.fixed(lengths, 8, 8, 4096)):
        documents = [x for groups in plan for group in groups for x in group.lengths]
        assert sorted(documents) == sorted(lengths.tolist())
        for groups in plan:
            assert sum(group.size for group in groups) <= 8
            assert max(group.tokens for group in groups) <= 4096


def test_a_tiny_forecast_prints_its_tables(tmp_path, capsys):
    words = "--ranks 8 --seeds 1 --tokens 256 "
    words += f"--methods flat dynamic balanced --out {tmp_path}"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "| layout balanced, all ranks: `auto`" in text
    assert "**8 ranks**" in text
    before = (tmp_path / "packed.json").read_text()
    assert main(words.split()) == 0  # all of it is known
    assert (tmp_path / "packed.json").read_text() == before
