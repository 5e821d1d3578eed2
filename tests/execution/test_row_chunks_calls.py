"""Row chunks in calls: checkpoints, largest scores, memory, refusals, ranks out of step."""

import weakref

import pytest
import row_chunk_cases as rows
import torch
import torch.distributed as dist
from row_chunk_cases import Case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron_burst as mb
from megatron_burst.plugins.testing import in_process

BURST = Case(grid=(1, 2, 1), algorithm="burst", chunks=3, side="query")


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize(
    ("grid", "algorithm", "layout"),
    [
        ((1, 2, 1), "burst", "zigzag"),
        ((2, 2, 2), "hybrid", "zigzag"),
        ((1, 3, 1), "tile", "striped"),
    ],
)
def test_a_checkpoint_keeps_rows_of_every_chunk(grid, algorithm, layout, keep):
    case = Case(grid=grid, algorithm=algorithm, layout=layout, chunks=4, sink=True)
    groups, n = rows.groups_of(case), case.size
    *qkv, douts = rows.shards(case)
    leaves = [x.requires_grad_() for xs in qkv for x in xs]
    sink = rows.problem(case)[1].clone().requires_grad_()
    plan = in_process.prepare(*qkv, groups=groups, sink=sink, store=keep, **case.choices())
    ran = []

    def attend(plan, q, k, v, sink):
        ran.append(torch.is_grad_enabled())
        return mb.attention(q, k, v, plan=plan, sink=sink)

    outs = in_process.checkpoint(groups, attend, plan.ranks, *qkv, [sink] * n, keep=keep)
    first = [rank.counters.intra + rank.counters.inter for rank in groups.ranks]
    grads = torch.autograd.grad(outs, [*leaves, sink], douts)
    assert len(ran) == 2 * n
    each = list(zip(outs, grads[:n], grads[n : 2 * n], grads[2 * n : 3 * n], strict=True))
    assert rows.error(case, (each, grads[-1])) < 1e-10
    if grid[2] == 1 and keep == 1:  # nothing is computed again, and no key travels for it
        for one, rank, there in zip(plan.ranks, groups.ranks, first, strict=True):
            assert rank.counters.intra + rank.counters.inter - there == one.traffic()[1].total
    kept = sum(
        len(chunk.recompute.own_kept) for one in plan.ranks for chunk in one.rank_plan.chunks
    )
    assert kept == round(keep * case.length / n) * n
    assert f"store {keep:g} (" in plan.describe()


def test_a_call_in_chunks_takes_what_it_kept():
    case = Case(grid=(2, 2, 2), algorithm="hybrid", chunks=3)
    groups, given = rows.groups_of(case), rows.shards(case)
    plan = in_process.prepare(*given[:3], groups=groups, store=0.5, needs_grad=(True,) * 3,
                      **case.choices())  # fmt: skip

    def run(plan, q, k, v):
        call = plan.chunked(k, v)
        worst = []
        for c, at in enumerate(plan.row_chunks):
            out, lse = call.forward(c, q[at])
            again = call.forward(c, q[at], stored=call.kept(c, out, lse))
            worst += [(x - y).abs().max().item() for x, y in zip(again, (out, lse), strict=True)]
        return max(worst)

    assert max(groups.run(run, plan.ranks, *given[:3])) < 1e-12


# --- largest scores -----------------------------------------------------------------------------


def test_largest_scores_are_those_of_one_pass():
    found = []
    for chunks in (1, 5):
        case = BURST._replace(chunks=chunks, kernel="reference")
        largest = torch.full((4,), -torch.inf, dtype=torch.float64)
        *qkv, _ = rows.shards(case)
        in_process.attention(
            *qkv, groups=rows.groups_of(case), max_logits=largest, **case.choices()
        )
        found.append(largest)
    assert torch.equal(*found)
    assert found[0].isfinite().all()


# --- memory -------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Largest bytes of live storages that were allocated inside."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def peak(chunks, each=256, heads=4, width=16):
    """Return the peak bytes of a forward and backward by row chunks, in units of q, per rank."""
    groups = in_process.groups(intra=2)
    q, k, v, dout = ([torch.randn(each, 1, heads, width) for _ in range(2)] for _ in range(4))
    plan = in_process.prepare(
        q, k, v, groups=groups, sequence_chunks=chunks, side="query", kernel="aten",
        needs_grad=(True,) * 3,
    )  # fmt: skip

    def run(plan, q, k, v, dout):
        call = plan.chunked(k, v)
        for c, at in enumerate(plan.row_chunks):
            part = q[at]
            call.backward(c, part, *call.forward(c, part), dout[at])

    with Peak() as found:
        groups.run(run, plan.ranks, q, k, v, dout)
    return found.most / (2 * q[0].numel() * q[0].element_size())


def test_queries_and_what_becomes_of_them_are_never_whole():
    """Live memory is a + b / chunks: keys, their copies and sums, and the rows of one row chunk."""
    one, two, four, eight = map(peak, (1, 2, 4, 8))
    assert eight < 0.65 * one
    assert two - four == pytest.approx(2 * (four - eight), rel=0.05)
    # Without queries: dk, dv; those of one pair; the keys on their way, packed and arrived; and
    # half a tensor of scores.
    assert eight - (four - eight) < 9


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"sequence_chunks": 0}, "sequence_chunks must be a positive integer, got 0"),
        ({"sequence_chunks": True}, "sequence_chunks must be a positive integer, got True"),
        ({"sequence_chunks": 2.0}, r"sequence_chunks must be a positive integer, got 2\.0"),
        ({"row_blocks": 5}, "row_blocks must divide the 12 rows of a shard, got 5; pad to 15"),
        ({"row_blocks": -1}, "row_blocks must be a positive integer, got -1"),
    ],
)
def test_what_cannot_be_is_refused(choices, words):
    *qkv, _ = rows.shards(BURST)
    with pytest.raises(ValueError, match=words):
        in_process.prepare(*qkv, groups=rows.groups_of(BURST), **choices)


EVERY = slice(None)


def results(call, q, plan, c=0, lse=EVERY, out=EVERY):
    """Return the arguments of a row chunk's backward, from its forward."""
    part = q[plan.row_chunks[c]]
    result = call.forward(c, part)
    return c, part, result[0][out], result[1][lse], torch.ones_like(result[0])


def twice(function, *given):
    function(*given)
    function(*given)


def taken_twice(call, q, plan):
    for c in range(3):
        call.backward(*results(call, q, plan, c))
    twice(call.gradients)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda call, q, k, plan: call.forward(3, q[:4]),
            "c must be a row chunk of the plan, 0 to 2",
        ),
        (
            lambda call, q, k, plan: call.forward(0, q),
            r"q_c of row chunk 0 .*use q\[plan.row_chunks",
        ),
        (lambda call, q, k, plan: call.forward(0, q[:4].float()), "q_c of row chunk 0 must be"),
        (
            lambda call, q, k, plan: call.backward(*results(call, q, plan, lse=slice(1))),
            r"lse_c of row chunk 0 must have shape \(4, .*got \(1, ",
        ),
        (
            lambda call, q, k, plan: call.backward(*results(call, q, plan, out=slice(2))),
            r"out_c of row chunk 0 must have shape \(4, .*got \(2, ",
        ),
        (
            lambda call, q, k, plan: twice(call.backward, *results(call, q, plan)),
            "backward was already called for row chunk 0",
        ),
        (
            lambda call, q, k, plan: (call.backward(*results(call, q, plan)), call.gradients()),
            r"backward was not called for row chunks \[1, 2\]",
        ),
        (
            lambda call, q, k, plan: taken_twice(call, q, plan),
            r"gradients\(\) was called before",
        ),
        (lambda call, q, k, plan: plan.chunked(k[:4], k), "k: the plan was made for"),
        (
            lambda call, q, k, plan: call.kept(0, q, q),
            "kept.. requires a plan that keeps results",
        ),
        (lambda call, q, k, plan: plan.chunked(k, None), "v: the plan was made for"),
        (lambda call, q, k, plan: plan.chunked(k, call, torch.zeros(3)), "v: the plan was made"),
    ],
)
def test_a_call_in_chunks_says_what_is_wrong(wrong, words):
    case = BURST._replace(grid=(1, 1, 1))
    groups, given = rows.groups_of(case), rows.shards(case)
    (plan,) = in_process.prepare(*given[:3], groups=groups, **case.choices()).ranks

    def run(q, k, v):
        wrong(plan.chunked(k, v), q, k, plan)

    with pytest.raises(ValueError, match=words):
        groups.run(run, *given[:3])


# --- ranks out of step --------------------------------------------------------------------------


def other_chunks(plan, q, k, v):
    """Rank 1 begins with another row chunk."""
    call = plan.chunked(k, v)
    odd = dist.get_rank() == 1
    for c in (1, 0) if odd else (0, 1):
        call.forward(c, q[plan.row_chunks[c]])


def another_number(groups, given, case):
    chunks = case.chunks + (dist.get_rank() == 1)
    mb.prepare(*given, groups=groups, **case._replace(chunks=chunks).choices())


def caught(what):
    groups = mb.Groups.flat(dist.new_group())
    given = [each[dist.get_rank()] for each in rows.shards(BURST)[:3]]
    try:
        if what == "number":
            another_number(groups, given, BURST)
        else:
            other_chunks(mb.prepare(*given, groups=groups, **BURST.choices()), *given)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_out_of_step_are_told(ranks):
    told = ranks(2).run(caught, "number")
    assert all("ranks disagree" in each and "sequence_chunks" in each for each in told)
    assert all(each.startswith("RuntimeError") for each in ranks(2).run(caught, "order"))
