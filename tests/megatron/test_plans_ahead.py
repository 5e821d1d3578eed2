"""Plans of the next micro-batch that a thread makes: results, errors, and the data path."""

import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import packed_ranks
import pytest
import torch
import torch.distributed as dist
from packed_ranks import HEADS, TOTAL, WIDTH

from megatron_burst.megatron.data import loader
from megatron_burst.megatron.data.loader import BatchIterator

MICRO_BATCHES = 10


def lengths_of(draw):
    """Return the lengths of up to nine documents, with empty ones, of TOTAL tokens together."""
    cuts = sorted(draw.choices(range(TOTAL + 1), k=draw.randrange(8)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, TOTAL], strict=True)]


def new_packs(seed):
    """Return the number of different packs after the first one, which shows what is needed."""
    draw = random.Random(seed)
    return len({tuple(x for x in lengths_of(draw) if x) for _ in range(MICRO_BATCHES)}) - 1


def attended(layout, ahead, seed):
    """Return outputs and gradients of random packs on this rank, and (started, used) plans.

    Before each forward, `ahead(rank, lengths)` returns the lengths for which the rank starts plans.
    The thread waits for a random time before each plan, which differs between ranks.
    """
    from megatron_burst.megatron.attention import plans_ahead
    from megatron_burst.megatron.data.packed import packs

    packs_of, rank = random.Random(seed), dist.get_rank()
    waits, plan = random.Random(seed + rank), plans_ahead._plan

    def late(*args):
        time.sleep(waits.random() / 50)
        return plan(*args)

    results, rows = [], TOTAL // dist.get_world_size()
    q = torch.randn(rows, HEADS, WIDTH, generator=torch.Generator().manual_seed(rank))
    with (
        packed_ranks.core_attention(layout) as core,
        mock.patch.object(plans_ahead, "_plan", late),
    ):
        for _ in range(MICRO_BATCHES):
            lengths = lengths_of(packs_of)
            for next_lengths in ahead(rank, lengths):
                ends = packed_ranks.bounds(next_lengths)
                core.book.plan_ahead(packs().of(TOTAL, ends))
            asked, x = packed_ranks.params(lengths, None), q.clone().requires_grad_()
            packs().note_cut(packs().of(TOTAL, asked.cu_seqlens_q))  # as the data path does
            out = core(x, x, x, packed_seq_params=asked)
            out.square().sum().backward()
            results += [out.detach(), x.grad]
        counts = core.book.ahead.started, core.book.ahead.used
    return results, counts


def nothing(rank, lengths):
    return []


def always(rank, lengths):
    return [lengths]


def on_some_ranks(rank, lengths):
    """Rank 1 has no lengths on the host, and rank 2 has plans of other packs too."""
    return [[lengths], [], [lengths[::-1], lengths], [lengths]][rank]


def three_ways(layout):
    return [attended(layout, ahead, 5) for ahead in (nothing, always, on_some_ranks)]


@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_plans_made_ahead_give_the_same_bits(four, layout):
    expected, made, mixed = zip(*four(three_ways, layout), strict=True)
    for (plain, _), (early, _), (some, _) in zip(expected, made, mixed, strict=True):
        assert len(plain) == 2 * MICRO_BATCHES
        assert all(map(torch.equal, plain, early))
        assert all(map(torch.equal, plain, some))
    assert [counts for _, counts in expected] == [(0, 0)] * 4
    new = new_packs(5)
    assert new > 5
    assert [counts for _, counts in made] == [(new, new)] * 4
    started, used = zip(*(counts for _, counts in mixed), strict=True)
    assert started[:2] == (new, 0)
    assert started[2] > started[3] == new
    assert used == (new, 0, new, new)


def linear_outputs(layout, ahead, algorithm):
    """Return outputs and gradients of linear layers, and (started, used) plans."""
    import megatron_burst as mb
    from megatron_burst.megatron.data.cut import cut_of_run
    from megatron_burst.megatron.data.packed import packs
    from megatron_burst.megatron.linear.state_layers import LinearKind

    packs_of, results, rows = random.Random(11), [], TOTAL // dist.get_world_size()
    draw = torch.Generator().manual_seed(dist.get_rank())
    choices = {"linear": algorithm}
    with packed_ranks.core_attention(layout, choices=choices) as core:
        burst, book = core.config.burst, core.book
        kind = LinearKind(burst, "linear", (HEADS, HEADS, WIDTH, WIDTH, 0), cut_of_run(layout))
        for _ in range(MICRO_BATCHES):
            pack = packs().of(TOTAL, packed_ranks.bounds(lengths_of(packs_of)))
            if ahead:
                book.plan_ahead(pack)
            shape = rows, 1, HEADS, WIDTH
            q, k, v = (torch.randn(shape, generator=draw).requires_grad_() for _ in range(3))
            inputs = {"q": q, "k": k, "v": v.detach()}  # values without a gradient
            plan = book.plan(kind, True, inputs, pack)
            out = mb.linear_attention(*inputs.values(), plan=plan, label=0)
            out.square().sum().backward()
            results += [out.detach(), q.grad, k.grad]
        return results, (book.ahead.started, book.ahead.used)


def two_ways(layout, algorithm):
    return [linear_outputs(layout, ahead, algorithm) for ahead in (False, True)]


@pytest.mark.parametrize("algorithm", ["auto", "scan"])
def test_plans_of_linear_layers_are_made_ahead(four, algorithm):
    draw = random.Random(11)
    new = len({tuple(x for x in lengths_of(draw) if x) for _ in range(MICRO_BATCHES)}) - 1
    for (plain, counts), (early, early_counts) in four(two_ways, "balanced", algorithm):
        assert all(map(torch.equal, plain, early))
        assert counts == (0, 0)
        assert early_counts == (new, new)


def failing(names):
    """Return this rank's error if the builds of a rank's thread, or also of its forward, fail."""
    from megatron_burst.megatron.attention import plan_book

    build, where = plan_book.AttentionOperation.build, dist.get_rank()

    def broken(self, request):
        thread = "planner" in threading.current_thread().name
        if where == 2 and (thread or "forward" in names):
            raise ValueError(f"planted, {'thread' if thread else 'forward'}")
        return build(self, request)

    def ahead(rank, lengths):
        failing.packs += 1
        if failing.packs == 2:
            patched.start()
        return [lengths]

    failing.packs = 0
    patched = mock.patch.object(plan_book.AttentionOperation, "build", broken)
    try:
        results, (started, used) = attended("striped", ahead, 7)
        return len(results), started, used
    except ValueError as error:
        return str(error)
    finally:
        patched.stop()


def test_an_error_of_the_thread_is_the_error_of_the_forward(four):
    """The forward makes the plan again, and only its own error is raised, on all ranks."""
    new = new_packs(7)
    used = [new, new, 0, new]
    assert four(failing, ["thread"]) == [(2 * MICRO_BATCHES, new, number) for number in used]
    assert four(failing, ["thread", "forward"]) == ["rank 2: planted, forward"] * 4


def other_documents():
    """Return this rank's error if rank 3 calls with other documents than it planned ahead."""
    from megatron_burst.megatron.data.packed import packs

    with packed_ranks.core_attention("striped") as core:
        x = torch.ones(TOTAL // 4, HEADS, WIDTH)
        for number, lengths in enumerate([[100, 140], [60, 180]]):
            core.book.plan_ahead(packs().of(TOTAL, packed_ranks.bounds(lengths)))
            if number and dist.get_rank() == 3:
                lengths = [70, 170]
            asked = packed_ranks.params(lengths, None)
            packs().note_cut(packs().of(TOTAL, asked.cu_seqlens_q))
            try:
                core(x, x, x, packed_seq_params=asked)
            except ValueError as error:
                return str(error)
    return None


def test_ranks_with_other_documents_get_an_error(four):
    errors = four(other_documents)
    assert len(set(errors)) == 1
    assert "ranks disagree" in errors[0]
    assert "170" in errors[0] or "70" in errors[0]


@dataclass(frozen=True)
class Call:
    """A call whose facts contain a number that the test changes."""

    facts: dict = field(default_factory=lambda: {"number": 1}, hash=False)
    measures: bool = False

    @property
    def device(self):
        return torch.device("cpu")

    def length(self, book):
        return TOTAL

    def operation(self, book, pack, needs_grad):
        return self

    def check(self):
        return mock.Mock(facts=dict(self.facts))

    def build(self, request):
        return threading.current_thread().name, request.facts["number"]


@pytest.fixture
def ahead():
    """Return the class and its state without a run of Megatron."""
    from megatron_burst.megatron.attention import plans_ahead

    state = mock.Mock(planner=None)
    with mock.patch.object(plans_ahead.patching, "run_state", return_value=state):
        yield plans_ahead.PlansAhead()
    if state.planner is not None:
        state.planner.shutdown()


def pack_of(*lengths):
    from megatron_burst.megatron.data.packed import Pack

    bounds = tuple(packed_ranks.bounds(lengths).tolist())
    return Pack(TOTAL, bounds, TOTAL, bounds)


def test_a_plan_of_other_facts_is_made_again(ahead):
    """For instance because "auto" chose another algorithm in the meantime."""
    call, pack = Call(), pack_of(100, 140)
    ahead.expect(call, [])
    for expected in ("megatron_burst planner_0", "MainThread"):
        ahead.start(None, pack, [])
        build = ahead.builder(call, pack, call)
        ahead._futures.clear()
        if expected == "MainThread":
            wait(ahead)
            call.facts["number"] = 2
        name, number = build(call.check())
        assert (name, number) == (expected, call.facts["number"])
    assert (ahead.started, ahead.used) == (2, 1)


def wait(ahead):
    """Wait until the thread has made all plans."""
    from megatron_burst.megatron.attention import plans_ahead

    plans_ahead._planner().submit(int).result()


def test_no_plans_are_made_for_a_script_that_makes_other_packs(ahead):
    from megatron_burst.megatron.attention import plans_ahead

    ahead.expect(Call(), [])
    for length in range(1, TOTAL):
        ahead.start(None, pack_of(length, TOTAL - length), [])
    assert ahead.started == plans_ahead.UNUSED
    assert len(ahead._futures) <= plans_ahead.PLANS_AHEAD


def test_a_pack_of_another_length_or_with_a_plan_is_not_planned(ahead):
    from megatron_burst.megatron.data.packed import Pack

    call, bounds = Call(), (0, TOTAL // 2)
    ahead.expect(call, [])
    ahead.start(None, Pack(TOTAL // 2, bounds, TOTAL // 2, bounds), [])
    ahead.start(None, pack_of(100, 140), [(call, pack_of(100, 140))])
    assert not ahead.started


def batches(number, read, packed=True):
    """Yield packed batches, and add the number of each to `read`."""
    for index in range(number):
        read.append(index)
        ends = torch.tensor([[0, 5 + index, 24]])
        yield {"tokens": torch.full((1, 24), index)} | ({"cu_seqlens": ends} if packed else {})


@pytest.fixture
def planned(monkeypatch):
    """Return the list of batches whose plans the data path started, by number."""
    numbers = []
    monkeypatch.setattr(
        loader, "plan_ahead", lambda batch: numbers.append(int(batch["tokens"][0, 0]))
    )
    return numbers


def test_packed_batches_are_read_one_ahead_within_a_step(planned):
    read = []
    iterator = BatchIterator(batches(9, read), count=3)
    for index in range(3):
        assert int(next(iterator)["tokens"][0, 0]) == index
        assert read == list(range(min(index + 2, 3)))
    assert planned == [1, 2]
    assert not iterator.unused()
    assert int(next(iterator)["tokens"][0, 0]) == 3  # a step that reads more batches
    assert planned == [1, 2]


def test_other_batches_are_not_read_ahead(planned):
    read = []
    iterator = BatchIterator(batches(9, read, packed=False), count=3)
    next(iterator)
    assert read == [0]
    assert not planned


def test_an_error_of_the_data_loader_is_raised_when_the_batch_is_used(planned):
    iterator = BatchIterator(batches(2, []), count=4)
    assert [int(next(iterator)["tokens"][0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_batch_that_a_step_does_not_use_is_the_first_of_the_next_step(planned):
    source, steps = batches(9, []), []

    def run(model, data_iterator, num_microbatches, forward_only):
        steps.append([int(next(data_iterator)["tokens"][0, 0]) for _ in range(2)])

    state = mock.Mock(read_ahead=[], logged=set())
    model = mock.Mock(config=SimpleNamespace(cuda_graph_impl="none"))
    named = {"model": model, "data_iterator": source, "num_microbatches": 3, "forward_only": True}
    with mock.patch.object(loader.patching, "run_state", return_value=state):
        for _ in range(3):
            loader._noting(run, named)
    assert steps == [[0, 1], [2, 3], [4, 5]]
    assert planned == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("graphs", "numbers"), [("none", [1]), ("local", [])])
def test_nothing_is_read_ahead_if_cuda_graphs_may_be_captured(planned, graphs, numbers):
    config = SimpleNamespace(cuda_graph_impl=graphs, cuda_graph_scope=["moe_router"])
    named = {"model": [mock.Mock(config=config)], "num_microbatches": 2, "forward_only": True}
    named["data_iterator"] = [batches(9, [])]

    def run(data_iterator, **more):
        for _ in range(2):
            next(data_iterator[0])

    with mock.patch.object(loader.patching, "run_state", return_value=mock.Mock(read_ahead=[])):
        loader._noting(run, named)
    assert planned == numbers
