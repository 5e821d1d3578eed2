"""Comparisons on the emulated cluster: their problems, bytes and suites, by hand; and a run.

What needs namespaces is in test_cluster.py but for a slow run, which is skipped where the machine
refuses them.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megatron_burst as mb
from benchmarks.cluster import __main__ as command
from benchmarks.cluster import (
    cells,
    cuts,
    groups,
    mail,
    measure,
    predict,
    problems,
    record,
    rounding,
    suites,
    whole,
)
from benchmarks.cluster.network import Network, Rates
from benchmarks.packed.plans import Group
from megatron_burst.autotune.rates import Rates as Measured
from megatron_burst.layout import make
from megatron_burst.plugins.testing import in_process
from megatron_burst.schedule.algorithms import ALGORITHMS, burst
from megatron_burst.schedule.cost import Sizes
from megatron_burst.schedule.demand import BACKWARD, Demand, visibility_of
from megatron_burst.schedule.rings import forward
from megatron_burst.schedule.tables import Grid

ROOT = Path(__file__).parents[2]
RATES = Rates(10**6, 4 * 10**6)


# --- problems ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", problems.DOCUMENTS)
def test_documents_fill_the_sequence_and_a_seed_says_which(name):
    found = problems.bounds(name, 3, 32768)
    assert found == problems.bounds(name, 3, 32768) != problems.bounds(name, 4, 32768)
    assert (found[0], found[-1]) == (0, 32768)
    lengths = np.diff(np.concatenate([problems.bounds(name, s, 1 << 20) for s in range(4)]))
    lengths = lengths[lengths > 0]
    median, _, cap = problems.DOCUMENTS[name]
    assert 0.8 < np.median(lengths) / median < 1.25
    assert lengths.max() <= cap


@pytest.mark.parametrize(
    "name", ["causal", "full", "window 24", "blocks 16", "documents 500 seed 1"]
)
def test_the_truth_is_that_of_a_dense_mask(name, monkeypatch):
    monkeypatch.setattr(problems, "ROWS", 20)
    monkeypatch.setitem(problems.DOCUMENTS, "500", problems.Lengths(10, 1.0, 40))
    length = 96
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(length, 1, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, length, 1, 2, 8, generator=generator, dtype=torch.float64)
    i, j = np.ogrid[:length, :length]
    if name.startswith("documents"):
        which = np.searchsorted(problems.bounds("500", 1, length), np.arange(length), "right")
        assert len(set(which)) > 3
        seen = (which[:, None] == which[None, :]) & (j <= i)
    elif name.startswith("blocks"):
        table = np.random.default_rng(0).random((6, 6)) < problems.SHOWN
        seen = (table | np.eye(6, dtype=bool)).repeat(16, 0).repeat(16, 1) & (j <= i)
    else:
        near = i - j < (24 if name.startswith("window") else length)
        seen = np.ones((length, length), dtype=bool) if name == "full" else (j <= i) & near
    k2, v2 = (x.repeat_interleave(2, 2)[:, 0].permute(1, 0, 2) for x in (k, v))
    scores = q[:, 0].permute(1, 0, 2) @ k2.transpose(1, 2) * 8**-0.5
    right = scores.masked_fill(~torch.from_numpy(np.array(seen)), -torch.inf).softmax(-1) @ v2
    found = problems.attend(q, k, v, name)
    assert (found[:, 0].permute(1, 0, 2) - right).abs().max() < 1e-10


def test_a_mask_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"--masks: there is causal, .* got 'documents 500'"):
        problems.mask_of("documents 500", 64)


# --- layouts -------------------------------------------------------------------------------


def documents(monkeypatch, median=20):
    """Small ones under the usual name."""
    monkeypatch.setitem(problems.DOCUMENTS, "500", problems.Lengths(median, 1.0, 4 * median))
    return "documents 500 seed 1", problems.bounds("500", 1, 128)


@pytest.mark.parametrize("layout", cuts.LAYOUTS)
def test_every_layout_holds_every_token_once_and_documents_see_themselves_alone(
    layout, monkeypatch
):
    name, bounds = documents(monkeypatch)
    found = cuts.cut(layout, name, 128, 2, 2)
    rows = len(found.tokens)
    held = np.concatenate([found.layout.positions(rank, rows) for rank in range(4)])
    assert sorted(held) == list(range(rows))
    real = np.flatnonzero(found.tokens >= 0)
    assert found.tokens[real].tolist() == list(range(128))
    of = np.searchsorted(bounds, found.tokens[real], "right")
    seen = (of[:, None] == of) & (found.tokens[real][:, None] >= found.tokens[real])
    assert (found.mask.visible(real[:, None], real[None, :]) == seen).all()
    padding = np.flatnonzero(found.tokens < 0)
    assert not found.mask.visible(real[:, None], padding[None, :]).any()
    wanted = sum(-(-n // 8) * 8 for n in np.diff(bounds)) if layout == "documents" else 128
    assert rows == wanted


def test_a_cut_tensor_has_its_tokens_and_its_padding(monkeypatch):
    name, _ = documents(monkeypatch)
    found = cuts.cut("documents", name, 128, 2, 2)
    x = torch.arange(128.0)[:, None]
    for padding, there in ((-1.0, [-1.0]), (-1 - x, (-1 - x[:8, 0]).tolist())):
        shards = [found.shard(x, rank, padding)[:, 0] for rank in range(4)]
        whole = torch.cat(shards)
        assert sorted(whole[whole >= 0].tolist()) == x[:, 0].tolist()
        assert whole[whole < 0].unique().flip(0).tolist()[: len(there)] == there


def test_layouts_without_documents_are_refused():
    with pytest.raises(ValueError, match=r"layout balanced needs packed documents, got .*'causal'"):
        cuts.cut("balanced", "causal", 128, 2, 2)
    with pytest.raises(ValueError, match=r"layout: there is zigzag, documents, balanced, got 'x'"):
        cuts.cut("x", "causal", 128, 2, 2)


def test_errors_are_multiples_of_their_bounds_where_the_truth_is_known():
    truth, bounds = torch.tensor([2.0, cuts.UNKNOWN, -4.0]), torch.tensor([0.5, 0.5, 2.0])

    def worst(*values):
        return measure.worst_error([torch.tensor(values)], [truth], [bounds])

    assert worst(2.0, 9.0, -4.0) == 0.0
    assert worst(3.0, 9.0, -4.0) == 2.0
    assert worst(2.0, 9.0, -3.0) == 0.5
    assert not worst(np.nan, 9.0, -4.0) <= 1.0


def test_shares_of_all_layouts_are_one_problem(monkeypatch, tmp_path):
    """Tokens of the whole sequence: the same inputs and truth in every layout."""
    name, _ = documents(monkeypatch)
    problem = cells.Problem(32, 2, 2, 8, name)
    states = loaded(problem, tmp_path)
    shares = [{name: measure.shares(state, name)[0] for name in cuts.LAYOUTS} for state in states]
    joined = {}
    for layout in cuts.LAYOUTS:
        found = shares[0][layout].cut
        rows = np.concatenate([found.layout.positions(r, len(found.tokens)) for r in range(4)])
        order = np.argsort(rows)[found.tokens >= 0]
        tensors = zip(*((*s[layout].inputs, *s[layout].truth) for s in shares), strict=True)
        whole = [torch.cat(parts) for parts in tensors]
        joined[layout] = [x[order] for x in whole]
        empty = [x[np.argsort(rows)[found.tokens < 0]] for x in whole]
        assert not any(x.any() for x in (empty[3], *empty[5:]))
        assert empty[4].isnan().all()
    for layout in cuts.LAYOUTS:
        for x, y in zip(joined[layout], joined["zigzag"], strict=True):
            assert torch.equal(x, y)


def loaded(problem, folder):
    """What four ranks know of a problem."""
    network = Network(2, 2, RATES)
    measure.write_problem(problem, network, folder)
    states = [{"rank": rank, "network": network} for rank in range(4)]
    for state in states:
        measure.load(state, problem, folder)
    return states


def test_a_problem_in_bf16_has_the_truth_of_its_rounded_inputs(monkeypatch, tmp_path):
    name, _ = documents(monkeypatch)
    state = loaded(cells.Problem(32, 2, 2, 8, name, "bf16", "bf16"), tmp_path)[0]
    q, k, v = (x for x, _ in state["whole"][:3])
    assert {x.dtype for x in measure.shares(state, "balanced")[0].inputs} == {torch.bfloat16}
    right = problems.attend(q.double(), k.double(), v.double(), name)
    out = state["whole"][4][0]
    assert (out - right).abs().max() < 1e-5
    assert out.dtype == torch.float32


# --- bounds of bf16 ------------------------------------------------------------------------


def test_absolute_sums_by_hand():
    """Two tokens of width 1, causal, scale 1. P = [[1, 0], [1/4, 3/4]] for scores 0 and ln 3.

    dP = dO V^T = [[6, .], [-4, 8]], O = [2, -5/2] and D = [6, 5].
    dS = [[0, 0], [1/4 * -9, 3/4 * 3]] = [[0, 0], [-9/4, 9/4]].
    """
    q, k = ([0.0, math.log(3.0)], [0.0, 1.0])
    v, dout = ([2.0, -4.0], [3.0, -2.0])
    q, k, v, dout = (torch.tensor(x).reshape(2, 1, 1, 1) for x in (q, k, v, dout))
    out = torch.tensor([2.0, -2.5]).reshape(2, 1, 1, 1)
    found = rounding.absolute_sums(q, k, v, dout, out, "causal")
    ln = math.log(3.0)
    wanted = {
        "out": [2, 0.5 + 3], "dq": [0, 9 / 4], "dk": [9 / 4 * ln, 9 / 4 * ln],
        "dv": [3 + 0.5, 1.5],
        # rowsum(|dO| * P |V|) = 6 and 7
        "dq_of_delta": [0, 7 * 3 / 4], "dk_of_delta": [7 / 4 * ln, 7 * 3 / 4 * ln],
    }  # fmt: skip
    for name, values in wanted.items():
        assert getattr(found, name).flatten().tolist() == pytest.approx(values, rel=1e-5), name


def test_roundings_by_hand():
    """A ring of four: partial dK and dV of an owner leave the three other ranks."""
    groups_of = in_process.groups(inter=2, intra=2)
    plan = in_process.prepare(shape=(1536, 1, 1, 4), groups=groups_of, algorithm="ring", side="kv",
                      mask=mb.masks.Full(), kernel="aten")  # fmt: skip
    found = [rounding.roundings(each) for each in plan.ranks]
    assert found == [rounding.Roundings(6, 3, 0, 0, 3)] * 4
    assert [rounding.query_blocks(n) for n in (1, 33, 191, 192, 767, 768, 1025)] == [
        1, 2, 6, 3, 12, 3, 5,
    ]  # fmt: skip
    plan = in_process.prepare(shape=(64, 1, 1, 4), groups=groups_of, algorithm="ring", side="query",
                      kernel="aten")  # fmt: skip
    assert rounding.roundings(plan.ranks[0]) == rounding.Roundings(2, 1, 0, 3, 0)


@pytest.fixture(scope="module", params=[("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")])
def narrow(request, tmp_path_factory):
    """A problem on 2 x 2 ranks in which tensors, partial results or both are bf16."""
    dtype, wire = request.param
    problem = cells.Problem(192, 4, 4, 16, "documents 500 seed 3", wire, dtype)
    return problem, loaded(problem, tmp_path_factory.mktemp("narrow"))


def worst_of_all_ranks(narrow, ulysses=1, algorithm="ring", side="kv", change=None, **options):
    """The largest error of a run in process, in multiples of its bound.

    change: of the results (out, dq, dk, dv) of all ranks, before they are compared.
    """
    problem, states = narrow
    inner = in_process.groups(inter=2, intra=2, ulysses=ulysses)
    held = [measure.shares(state, "zigzag")[0] for state in states]
    q, k, v, dout = ([*x] for x in zip(*(share.inputs for share in held), strict=True))
    leaves = [[x.detach().requires_grad_() for x in part] for part in (q, k, v)]
    plan = in_process.prepare(
        *leaves, groups=inner, algorithm=algorithm, side=side, kernel="aten",
        mask=held[0].cut.mask, layout=held[0].cut.layout, grad_wire_dtype=problem.wire, **options,
    )  # fmt: skip
    outs = in_process.attention(*leaves, plan=plan)
    grads = torch.autograd.grad(outs, [x for part in leaves for x in part], dout)
    results = [[out.detach() for out in outs], grads[:4], grads[4:8], grads[8:]]
    results = [[x.clone() for x in part] for part in results]
    if change is not None:
        change(results, held)
    found = rounding.Roundings()
    for each in plan.ranks:
        found = found.most(rounding.roundings(each))
    return max(
        measure.worst_error(
            [part[rank] for part in results], share.truth,
            rounding.bounds(problem, found, share.truth, share.sums),
        )
        for rank, share in enumerate(held)
    )  # fmt: skip


WAYS = (
    {}, {"side": "query"}, {"ulysses": 2}, {"ulysses": 4, "algorithm": "ulysses"},
    {"algorithm": "tile", "side": "auto"},
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_right_results_are_within_the_bounds_of_bf16(narrow, way):
    assert 0.0 < worst_of_all_ranks(narrow, **way) <= 1.0


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25])
def test_a_wrong_scale_exceeds_the_bounds(narrow, factor):
    assert worst_of_all_ranks(narrow, softmax_scale=factor * 16**-0.5) > 1.0


@pytest.mark.parametrize("tensor", [1, 2, 3])
def test_a_lost_partial_sum_exceeds_the_bounds(narrow, tensor):
    """The gradients of rank 0 without the part of the pairs of rank 0 with itself."""

    def drop(results, held):
        q, k, v, dout = (x[:, 0].float().transpose(0, 1) for x in held[0].inputs)
        out = held[0].truth[0][:, 0].transpose(0, 1)
        whole = states[0]["whole"]
        every_k = whole[1][0][:, 0].float().transpose(0, 1)
        at = held[0].cut.layout.positions(0, 768)
        seen = torch.from_numpy(held[0].cut.mask.visible(at[:, None], np.arange(768)[None]))
        p = (q @ every_k.mT / 4).masked_fill(~seen, -math.inf).softmax(-1)[:, :, at]
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / 4
        part = (None, ds @ k, ds.mT @ q, p.mT @ dout)[tensor]
        mine = results[tensor][0]
        mine.copy_((mine[:, 0].float() - part.transpose(0, 1))[:, None])

    _, states = narrow
    assert worst_of_all_ranks(narrow, change=drop) > 1.0


# --- groups of ranks -----------------------------------------------------------------------


def test_large_groups_come_first_and_documents_go_once():
    """Two documents of 3 tokens: the first one goes to the first group that asks for one."""
    plan = [[Group(1, (3,)), Group(2, (5, 4)), Group(1, ())], [Group(4, (3,))]]
    assert groups.placed(plan, [3, 4, 5, 3]) == [
        [groups.Part(0, 2, (2, 1)), groups.Part(2, 1, (0,))], [groups.Part(0, 4, (3,))],
    ]  # fmt: skip
    assert groups.words(groups.placed(plan, [3, 4, 5, 3])) == "groups of 2, 1, then 4 ranks"


def test_groups_by_megatrons_rule_by_hand(monkeypatch):
    """Four ranks of 32 tokens. The document of 60 needs two of them. Those of 30 get a rank each.
    That of 4 fits beside neither of these (34 tokens), and no rank is free: it goes beside the 60,
    where a rank then holds 32 tokens and its work, 60 * 60 / 2 + 4 * 4 / 2, stays below the bound
    of 1.05 * 60 * 32."""
    monkeypatch.setattr(groups, "bounds_of", lambda *_: [0, 60, 90, 120, 124])
    cell = cells.Cell(2, 2, RATES, "MHA 8", "compute", 32, mask="documents 500 seed 0")
    assert groups.planned(cell) == [
        [groups.Part(0, 2, (0, 3)), groups.Part(2, 1, (1,)), groups.Part(3, 1, (2,))]
    ]


def test_groups_hold_every_document_once_and_fit():
    cell = cells.Cell(2, 4, RATES, "MHA 8", "compute", 2048, mask="documents 1K seed 1", width=16)
    plan = groups.planned(cell)
    bounds = problems.bounds("1K", 1, 8 * 2048)
    held = [number for parts in plan for part in parts for number in part.documents]
    assert sorted(held) == list(range(len(bounds) - 1))
    lengths = np.diff(bounds)
    for parts in plan:
        ranks = [rank for part in parts for rank in range(part.first, part.first + part.size)]
        assert len(ranks) == len(set(ranks)) <= 8
        assert all(lengths[[*part.documents]].sum() <= part.size * 2048 for part in parts)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"nodes": 3}, "--grids: groups need a power of two of ranks, got 3x2"),
        ({"mask": "causal"}, "--masks: groups need packed documents, got 'causal'"),
    ],
)
def test_groups_that_cannot_be_are_refused(changed, told):
    cell = cells.Cell(2, 2, RATES, "MHA 8", "compute", 64, mask="documents 500 seed 1")
    with pytest.raises(ValueError, match=told):
        groups.planned(cell._replace(**changed))


def test_a_rank_holds_the_documents_of_its_groups(monkeypatch, tmp_path):
    """Each rank's rows of each micro-batch, joined by token, are all tokens once."""
    name, bounds = documents(monkeypatch)
    numbers = list(range(len(bounds) - 1))
    parts = [[groups.Part(0, 2, tuple(numbers[:2])), groups.Part(2, 2, tuple(numbers[3:]))],
             [groups.Part(3, 1, (2,))]]  # fmt: skip
    states = loaded(cells.Problem(32, 2, 2, 8, name), tmp_path)
    held = [measure.shares(state, "dynamic", parts) for state in states]
    assert [len(each) for each in held] == [1, 1, 1, 2]
    q, seen = states[0]["whole"][0][0], []
    for rank, each in enumerate(held):
        for share in each:
            first, size = share.ranks
            rows = share.cut.layout.positions(rank - first, len(share.cut.tokens))
            tokens = share.cut.tokens[rows]
            assert torch.equal(share.inputs[0][tokens >= 0], q[tokens[tokens >= 0]])
            assert len(tokens) * size == len(share.cut.tokens)
            seen += tokens[tokens >= 0].tolist()
    assert sorted(seen) == list(range(128))


def test_what_groups_cost_a_rank_is_added_up_and_sent_to_the_ranks_they_are():
    def work(*sent, least=0):
        link = {p: {"intra": sum(sent), "inter": 1} for p in mail.PASSES}
        return record.Work(link, {p: [*sent] for p in mail.PASSES}, "", {"forward": 2.0,
                           "backward": 5.0}, link, dict.fromkeys(mail.PASSES, least))  # fmt: skip

    found = measure.total_work(4, [(work(0, 3), (2, 2)), (work(1, 0, 4, 2, least=7), (0, 4))])
    assert found.sent["forward"] == [1, 0, 4, 5]
    assert found.bytes["backward"] == found.messages["forward"] == {"intra": 10, "inter": 2}
    assert found.flops == {"forward": 4.0, "backward": 10.0}
    assert found.least == {"forward": 7, "backward": 7}


def test_the_layout_is_that_of_the_fastest_forecast(monkeypatch):
    """One long document and eight short ones. Without compute, zigzag of each sends every row of
    the short ones to other ranks, the others none; without links, zigzag of the pack gives the
    ranks unequally many pairs."""
    bounds = [0, 64, *range(72, 129, 8)]
    monkeypatch.setattr(cuts, "bounds_of", lambda *_: bounds)
    monkeypatch.setattr(problems, "bounds_of", lambda *_: bounds)
    cell = cells.Cell(2, 2, RATES, "MHA 8", "compute", 32, mask="documents 500 seed 1")
    assert predict.best_layout(cell, Measured(1e9, 1e9, compute=np.inf)) != "documents"
    assert predict.best_layout(cell, Measured(1e15, 1e15, compute=1e6)) != "zigzag"


# --- what links carry ----------------------------------------------------------------------


def test_a_nic_is_as_busy_as_its_busier_direction_and_a_direct_link_alone():
    """Rank 3 receives from all: 2 of the other node, 1 of its own."""
    sent = np.zeros((4, 4), dtype=int)
    sent[:3, 3] = 10
    sent[0, 1] = 7
    loads = {w: Network(2, 2, RATES, w).loads for w in ("nic", "node", "mesh")}
    assert max(loads["nic"](sent, "inter")) == 20  # of ranks 0 and 1 into one NIC
    assert sorted(loads["nic"](sent, "intra"))[-4:] == [7, 7, 10, 10]  # sent and received
    assert max(loads["node"](sent, "inter")) == 20
    assert max(loads["mesh"](sent, "inter")) == 10
    assert sorted(x for x in loads["mesh"](sent, "intra") if x) == [7, 10]


def demand(name, grid, tokens):
    layout = make("zigzag", cp_size=grid.size)
    spans = [layout.spans(rank, tokens * grid.size) for rank in range(grid.size)]
    return visibility_of(problems.mask_of(name, tokens * grid.size), spans, spans)


def test_whole_chunks_travel_to_whoever_sees_a_row_of_them():
    grid = Grid(2, 2)
    each = Demand(grid, "kv", demand("window 16", grid, 64), BACKWARD)
    found, rows = whole.tables(each), burst.tables(each)
    carried = {
        name: t.keys.rows_of(t.transfers.owner, t.transfers.rows)
        for name, t in (("whole", found), ("rows", rows))
    }
    assert set(carried["whole"].tolist()) == {64}
    assert carried["rows"].max() < 64


def test_whole_chunks_go_the_way_that_crosses_nodes_less_often():
    """Rank 0 of four nodes is wanted by the last node alone: round the ring it crosses thrice, if
    rings went that way, and directly once."""
    grid = Grid(4, 1)
    seen = demand("causal", grid, 8)
    only = seen.visible & False
    only[3, 0] = only[2, 3] = only[1, 2] = True  # 3 wants 0, 2 wants 3, 1 wants 2: all the one way
    only[0, 2] = True
    whole_chunks = seen.keys.whole()
    keys = type(whole_chunks)(
        whole_chunks.owner, whole_chunks.number, only.T[whole_chunks.owner], whole_chunks.runs
    )
    each = Demand(grid, "kv", type(seen)(only, keys, keys), BACKWARD)
    sent = whole.tables(each).transfers
    copies = sent.where(~sent.accumulated)
    assert len(copies.owner) == only.sum()


def test_whole_chunks_are_an_algorithm_only_where_they_are_registered():
    before = dict(ALGORITHMS)
    try:
        whole.register()
        assert set(ALGORITHMS) - set(before) <= {whole.NAME, whole.RING, whole.GATHER}
        assert ALGORITHMS[whole.NAME].tables is whole.tables
    finally:
        ALGORITHMS.clear()
        ALGORITHMS.update(before)


def test_the_least_bytes_between_nodes_count_a_row_once_per_node():
    """2 x 2 causal zigzag of 4 rows per rank: the rank with rows r, 7 - r in pieces of 2. Every key
    row that a later query of the other node sees crosses once: of ranks 0 and 1 all but none, of
    ranks 2 and 3 the first pieces."""
    grid, tokens = Grid(2, 2), 4
    sizes = Sizes(tokens, 1, 1, 1, 1, 1, 4, 4, 4, (True, True, True))
    schedule = forward("burst", grid, visibility=demand("causal", grid, tokens),
                       row_bytes=sizes.forward)  # fmt: skip
    layout = make("zigzag", cp_size=4)
    positions = [layout.positions(rank, 16) for rank in range(4)]
    rows = sum(
        any(q >= key for peer in peers for q in positions[peer])
        for owner, peers in ((0, (2, 3)), (1, (2, 3)), (2, (0, 1)), (3, (0, 1)))
        for key in positions[owner]
    )
    assert mail.least_between(schedule, sizes) == rows * 8


def test_the_least_bytes_are_said_once():
    """By the first rank of a plan: causal zigzag of 2 x 2, 2 rows of a piece. Keys and values of 6
    of the 8 pieces are seen by the other node, by hand: all but the last of ranks 0 and 1."""
    grid = in_process.groups(inter=2, intra=2)
    plan = in_process.prepare(shape=(4, 1, 1, 4), groups=grid, algorithm="burst", side="kv")
    found = [mail.of(each)["least"]["forward"] for each in plan.ranks]
    assert found == [found[0], 0, 0, 0]
    assert found[0] == 6 * 2 * 2 * 4 * 4


# --- suites --------------------------------------------------------------------------------


def test_a_suite_runs_every_batch_on_every_grid():
    def settings(*words):
        parsed = command.parser().parse_args(["compare", *words])
        return command.settings(suites.SUITES[words[0]], parsed)

    _, found = settings("documents")
    assert len(found) == len(set(found)) == 2 * 2 * 12
    assert {cell.tokens for cell in found} == {4096}
    suite, found = settings("documents", "--seeds", "3", "--masks", "1K", "--rivals", "burst")
    assert [cell.mask for cell in found] == ["documents 1K seed 3"] * 2
    assert [r.name for r in suite.rivals] == [suites.WHOLE, "burst"]
    suite, found = settings("packed")
    assert len(found) == 3 * 3 * 12 * 3
    assert {r.layout for r in suite.rivals} == {"documents", groups.DYNAMIC, cells.CHOSEN}
    assert {(c.dtype, c.wire) for c in found} == {("bf16", "bf16")}
    assert {(c.mask.split()[1], c.regime) for c in found} == set(suite.targets)
    assert {suite.ours, *suite.base} < {r.name for r in suite.rivals}
    suite, found = settings("packed", "--regimes", "compute", "--rivals", "groups,ours")
    assert {c.regime for c in found} == {"compute"}
    assert [r.layout for r in suite.rivals] == ["dynamic", "chosen"]
    _, found = settings("tiles")
    assert {(c.grid, c.mask, c.wire) for c in found} == {
        (g, m, w) for g in ("4x2", "4x4") for m in ("full", "causal") for w in ("fp32", "bf16")
    }


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["documents", "packed"])
def test_a_small_comparison_runs(tmp_path, suite):
    """Results and bytes are checked by the run itself."""
    out = tmp_path / "x.json"
    words = ["compare", suite, "--grids", "2x2", "--tokens", "256", "--seeds", "1-2",
             "--repeats", "2", "--masks", "500", "--regimes", "compute",
             "--out", str(out)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cluster", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(out.read_text())["cells"]) == 2
    assert ", 2 batches" in done.stdout
