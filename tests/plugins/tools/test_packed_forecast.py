"""benchmarks/packed: groups cost what their shards cost, the search finds the optimum, it runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.packed import megatron, search
from benchmarks.packed.__main__ import main
from benchmarks.packed.ours import passes
from benchmarks.packed.plans import Group, Rings, together
from benchmarks.packed.rings import MULTICAST, Ring
from benchmarks.packed.setting import LENGTHS, Setting
from megatron_burst.autotune.rates import Rates
from megatron_burst.layout import make

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


def test_estimates_are_what_was_simulated_at_its_points():
    ring = Ring(SMALL, 2, MULTICAST)
    assert ring.estimate(16.0, 64.0**2) == pytest.approx(ring.layer(16.0, 64.0**2))


class Formula(Rings):
    """Costs by a formula, so that all plans of few documents can be looked at."""

    def __init__(self, tokens, exchange):
        super().__init__(Setting(tokens=tokens), MULTICAST)
        self.exchange = exchange

    def estimate(self, size, tokens, squares):
        return tokens + squares / size / 8 + self.exchange * tokens * (size > 1) + 0.1 * size

    def layer(self, group):
        return self.estimate(group.size, group.tokens, group.squares)


def partitions(items):
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for at in range(len(found)):
            yield [*found[:at], [first, *found[at]], *found[at + 1 :]]


def least(lengths, ranks, rings, most):
    """The seconds of the best plan there is, of at most so many micro-batches."""
    room, found = rings.setting.tokens, np.inf
    for groups in partitions(list(lengths)):
        for sizes in product([1, 2, 4], repeat=len(groups)):
            if any(sum(g) > s * room for g, s in zip(groups, sizes, strict=True)):
                continue
            for batches in product(range(most), repeat=len(groups)):
                held = np.bincount(batches, sizes, most)
                if held.max() > ranks:
                    continue
                slowest = np.zeros(most)
                for g, s, b in zip(groups, sizes, batches, strict=True):
                    slowest[b] = max(slowest[b], rings.layer(Group(s, tuple(g))))
                found = min(found, slowest.sum())
    return found


@pytest.mark.parametrize(
    ("lengths", "exchange"),
    [([16, 7, 3, 2], 0.1), ([9, 9, 8, 8], 2.0), ([12, 5, 4, 1], 0.5), ([4, 4, 4, 3], 0.2)],
)
def test_the_search_finds_the_best_plan_of_few_documents(lengths, exchange):
    rings = Formula(8, exchange)
    plan = search.best(lengths, 4, rings, moves=600, largest=4)
    documents = [x for groups in plan for group in groups for x in group.lengths]
    assert sorted(documents) == sorted(lengths)
    assert together(plan, rings) == pytest.approx(least(lengths, 4, rings, 3))


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
    words = "--ranks 8 --seeds 1 --tokens 256 --moves 20 "
    words += f"--methods flat dynamic flexsp balanced --out {tmp_path}"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "| layout balanced, all ranks: `auto`" in text
    assert "**8 ranks**" in text
    assert (tmp_path / "packed.png").stat().st_size > 1000
    before = (tmp_path / "packed.json").read_text()
    assert main(words.split()) == 0  # all of it is known
    assert (tmp_path / "packed.json").read_text() == before
