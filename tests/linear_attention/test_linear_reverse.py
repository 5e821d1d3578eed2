"""Linear attention from the last token to the first, and in both directions, against recurrences.

The oracle goes through the tokens of a document by hand. No test reverses rows to make a truth.
"""

import numpy as np
import pytest
import recurrences
import torch
from pieces import Pieces
from state_chains import GRIDS, LAYOUTS, documents
from test_linear_attention_ranks import ALGORITHMS, FORMS, close, problem

import megatron_burst as mb
from megatron_burst.layout.pieces import chains
from megatron_burst.plugins.testing import in_process

NAMES = ("q", "k", "v", "decay", "beta")
REVERSE = (True, "both")


class Whole:
    """A call over a whole sequence.

    Its leaves are q, k, v, the gates, initial states and, for "both", gates of the other way.
    """

    def __init__(self, form, bounds, reverse, own_gates=True):
        *tensors, initial = problem(form, bounds)
        self.bounds, self.reverse = bounds, reverse
        self.tensors = dict(zip(NAMES, tensors, strict=True))
        self.initial = initial
        if reverse == "both":
            *_, decay, beta, later = problem(form, bounds, seed=1)
            if own_gates:
                self.tensors |= {"reverse_decay": decay, "reverse_beta": beta}
            self.initial = torch.cat([initial, later]).detach().requires_grad_()
        self.leaves = [t for t in (*self.tensors.values(), self.initial) if t is not None]

    def truth(self):
        """Return outputs and final states of the recurrences."""
        cases, v = [], self.tensors["v"]
        for prefix in ("", "reverse_"):
            gates = []
            for name in ("decay", "beta"):
                gate = self.tensors.get(prefix + name)
                gates.append(self.tensors[name] if gate is None else gate)
            if gates[0] is not None and gates[0].dim() == 1:  # one for all tokens
                gates[0] = gates[0].expand(*v.shape[:3])
            cases.append(recurrences.Case(*(self.tensors[n] for n in "qkv"), *gates))
        scale, count = self.tensors["q"].shape[3] ** -0.5, len(self.bounds) - 1
        if self.reverse is True:
            return recurrences.documents(cases[0], self.bounds, self.initial, scale, True)
        out, ends = recurrences.documents(cases[0], self.bounds, self.initial[:count], scale)
        back, starts = recurrences.documents(
            cases[1], self.bounds, self.initial[count:], scale, True
        )
        return (out + back) / 2, torch.cat([ends, starts])

    def shards(self, layout):
        """Return the tensors by name, as lists over the ranks if they have rows."""
        return {
            name: t
            if t is None or t.dim() == 1
            else [mb.shard(t, layout, rank, dim=0) for rank in range(layout.cp_size)]
            for name, t in self.tensors.items()
        }


def check(whole, layout, groups, planned=False, **keywords):
    """Compare outputs, final states and all gradients."""
    out, finals = whole.truth()
    lists = whole.shards(layout)
    keywords |= {"groups": groups, "layout": layout, "cu_seqlens": whole.bounds,
                 "reverse": whole.reverse}  # fmt: skip
    if planned:
        keywords = {"plan": in_process.prepare_linear(**lists, **keywords)}
    own, ends = in_process.linear_attention(
        **lists, initial_state=whole.initial, return_final_state=True, **keywords
    )
    own = mb.unshard(own, layout, dim=0)
    close(own, out)
    for end in ends:
        close(end, finals)
    make = torch.Generator().manual_seed(1)
    of_out, of_finals = (torch.randn(t.shape, generator=make).double() for t in (out, finals))
    truth = torch.autograd.grad((out * of_out).sum() + (finals * of_finals).sum(), whole.leaves)
    parts = sum((end * of_finals).sum() for end in ends) / layout.cp_size
    found = torch.autograd.grad((own * of_out).sum() + parts, whole.leaves)
    for one, other in zip(found, truth, strict=True):
        close(one, other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("reverse", REVERSE)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_algorithm(form, reverse, algorithm):
    bounds = documents("zigzag", 4, packed=True)
    layout = LAYOUTS["zigzag"](4, bounds)
    groups = in_process.groups(inter=2, intra=2)
    check(Whole(form, bounds, reverse), layout, groups, algorithm=algorithm)


@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", REVERSE)
def test_every_layout_and_world(reverse, layout, world):
    bounds = documents(layout, world, packed=True)
    inter, intra = GRIDS[world]
    groups, cut = in_process.groups(inter=inter, intra=intra), LAYOUTS[layout](world, bounds)
    check(Whole("gated_delta_rule", bounds, reverse), cut, groups, planned=True)


@pytest.mark.parametrize("form", ["lightning", "kda"])
def test_both_ways_share_gates_unless_the_reverse_has_its_own(form):
    layout, groups = mb.layout.make("zigzag", cp_size=2), in_process.groups(intra=2)
    whole = Whole(form, [0, 5, 16], "both", own_gates=False)
    check(whole, layout, groups, kernel="reference")


def test_shared_heads_over_uneven_pieces():
    """Value heads share keys; ranks hold pieces of any lengths out of order."""
    layout = Pieces([[(4, 9), (0, 3)], [(3, 4), (9, 16)]])
    bounds, groups = [0, 1, 8, 8, 16], in_process.groups(intra=2)
    for reverse in REVERSE:
        whole = Whole("vector_decay", bounds, reverse)
        assert whole.tensors["v"].shape[2] > whole.tensors["q"].shape[2]
        check(whole, layout, groups)


@pytest.mark.parametrize("form", ["linear", "scalar_decay"])
def test_both_ways_are_a_dense_matrix(form):
    """A token counts itself once; half of every other token decays on the way to it."""
    whole, layout = Whole(form, [0, 8], "both"), mb.layout.make("zigzag", cp_size=2)
    with torch.no_grad():
        outs = in_process.linear_attention(
            **whole.shards(layout), groups=in_process.groups(intra=2), layout=layout,
            reverse="both",
        )  # fmt: skip
        q, k, v, decay, _, back, _ = whole.tensors.values()
        weight = torch.zeros(8, 8, *v.shape[1:3], dtype=torch.float64)
        for t in range(8):
            for j in range(8):
                if decay is None:
                    log = torch.zeros(v.shape[1:3]).double()
                else:
                    log = decay[j + 1 : t + 1].sum(0) if j < t else back[t:j].sum(0)
                weight[t, j] = log.exp() * (1.0 if j == t else 0.5)
        scores = torch.einsum("tbgd,jbgd->tjbg", q, k) * q.shape[3] ** -0.5
        close(mb.unshard(outs, layout, dim=0), torch.einsum("tjbh,jbhw->tbhw", scores * weight, v))


# --- chains ------------------------------------------------------------------------------------


def by_hand(rows, home):
    """Return (rank, first row, length, document, positions) of runs of a rank's rows.

    Args:
        rows: For each rank, the position of each of its rows, or None for a gap.
        home: Document of each position.
    """
    found = []
    for rank, positions in enumerate(rows):
        for row, position in enumerate(positions):
            last = found[-1] if found and found[-1][0] == rank else None
            if last and last[4][-1] == position + 1 and home[position] == home[position + 1]:
                last[2] += 1
                last[4].append(position)
            else:
                found.append([rank, row, 1, home[position], [position]])
    return sorted(found, key=lambda piece: -piece[4][0])


@pytest.mark.parametrize("world", GRIDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_reversed_chains_are_the_runs_of_reversed_rows(name, world):
    bounds = documents(name, world, packed=True)
    layout, total = LAYOUTS[name](world, bounds), bounds[-1]
    home = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    forward = chains(layout, total, bounds)
    backward = forward.reversed_rows()
    truth = by_hand(
        [layout.positions(rank, total)[::-1].tolist() for rank in range(world)], home.tolist()
    )
    expected = [(*piece[:4], total - 1 - piece[4][0]) for piece in truth]
    assert [tuple(row) for row in backward.table.tolist()] == expected
    both = forward.followed_by(backward)
    assert both.documents == 2 * forward.documents
    assert np.array_equal(both.table[: len(forward)], forward.table)
    shift = [0, total // world, 0, forward.documents, total]
    assert np.array_equal(both.table[len(forward) :], backward.table + shift)


# --- trees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", REVERSE)
def test_documents_as_a_tree(reverse):
    """Rows 5 and 6 are padding and one document."""
    whole, layout = Whole("kda", [0, 5, 7, 16], reverse), mb.layout.make("zigzag", cp_size=2)
    tree = mb.masks.Tree([5] * 5 + [0] * 2 + [16] * 9)
    out, finals = whole.truth()
    outs, ends = in_process.linear_attention(
        **whole.shards(layout), groups=in_process.groups(intra=2), layout=layout, tree=tree,
        reverse=reverse, initial_state=whole.initial, return_final_state=True, algorithm="scan",
    )  # fmt: skip
    close(mb.unshard(outs, layout, dim=0), out)
    close(ends[0], finals)


@pytest.mark.parametrize("reverse", REVERSE)
@pytest.mark.parametrize("out", [[16] * 4 + [9] * 5 + [16] * 7, [16] * 4 + [0] + [16] * 11])
def test_a_segment_that_continues_another_is_refused(out, reverse):
    whole, layout = Whole("linear", [0, 16], reverse), mb.layout.make("zigzag", cp_size=2)
    row = 4 if out[4] else 5
    words = (
        f"tree: the segment at row {row} continues the segment at row 0, but reverse={reverse!r}"
    )
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(
            **whole.shards(layout), groups=in_process.groups(intra=2), tree=mb.masks.Tree(out),
            reverse=reverse,
        )  # fmt: skip


# --- arguments ---------------------------------------------------------------------------------


def small(reverse=None, **changes):
    """Return keywords of a call on two ranks, with gates of the other way."""
    shapes = {"q": (2, 3), "k": (2, 3), "v": (2, 4), "decay": (2,), "beta": (2,)}
    lists = {n: [torch.zeros(4, 1, *shape) for _ in range(2)] for n, shape in shapes.items()}
    call = lists | {"groups": in_process.groups(intra=2), "reverse": reverse}
    return {name: x for name, x in (call | changes).items() if x is not None}


def two(*shape, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for _ in range(2)]


WRONG = {
    "a word": (small("backward"), "reverse must be False, True or 'both', got 'backward'"),
    "a number": (small(1), "reverse must be False, True or 'both', got 1"),
    "no reverse": (
        small(reverse_decay=two(4, 1, 2)),
        "reverse_decay requires reverse='both', got reverse=False; pass the tensor as decay",
    ),
    "one way": (
        small(True, reverse_beta=two(4, 1, 2)),
        "reverse_beta requires reverse='both', got reverse=True",
    ),
    "no beta": (
        small("both", reverse_beta=two(4, 1, 2)) | {"beta": None},
        "reverse_beta requires beta, got beta=None",
    ),
    "shape": (
        small("both", reverse_decay=two(4, 1, 2, 3)),
        r"reverse_decay must be \[shape of decay\], here \[4, 1, 2\], got \[4, 1, 2, 3\]",
    ),
    "dtype": (
        small("both", reverse_decay=two(4, 1, 2, dtype=torch.float64)),
        "reverse_decay must have the device and the dtype of decay",
    ),
    "initial": (
        small("both", initial_state=torch.zeros(1, 1, 2, 3, 4)),
        r"initial_state must be \[documents, b, h, d, w\], here \[2, 1, 2, 3, 4\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(**call)


@pytest.mark.parametrize("reverse", REVERSE)
def test_a_plan_serves_its_direction_alone(reverse):
    call = small(reverse)
    plan = in_process.prepare_linear(**call)
    assert f"reverse {reverse}" in plan.describe()
    tensors = {name: call[name] for name in NAMES}
    in_process.linear_attention(**tensors, plan=plan)
    with pytest.raises(ValueError, match=r"plan cannot be combined with \['reverse'\]"):
        in_process.linear_attention(**tensors, plan=plan, reverse=False)
    words = "plan: made for reverse_decay None on cpu, got"
    with pytest.raises(ValueError, match=words):
        in_process.linear_attention(**tensors, reverse_decay=two(4, 1, 2), plan=plan)
    words = f"plan was made with reverse={reverse!r}, but mb.short_convolution computes only"
    with pytest.raises(ValueError, match=words):
        in_process.short_convolution(two(4, 1, 3), torch.zeros(3, 2), plan=plan)
    words = f"plan was made with reverse={reverse!r}, but mb.state_scan computes only"
    with pytest.raises(ValueError, match=words):
        in_process.state_scan(None, two(2, 1, 2, 3, 4), plan=plan)
