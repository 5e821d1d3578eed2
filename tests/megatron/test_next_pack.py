"""The broadcast of the next micro-batch's documents: who takes part, the message, the threads."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core import utils
from no_sync import HostSync, NoSync, pinning
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron import patching
from megatron_burst.megatron.attention import plans_ahead
from megatron_burst.megatron.data import loader, next_pack
from megatron_burst.megatron.data.packed import Pack

TOTAL = 24
# Documents of 5 and 7 tokens with room for 6 and 10, and 8 tokens of padding.
PACK = Pack(TOTAL, (0, 6, 16, 24), 16, (0, 5, 6, 13, 16, 24), (1, 3, 4))
NUMBERS = [24, 16, 4, 6, 3, 0, 6, 16, 24, 0, 5, 6, 13, 16, 24, 1, 3, 4]


def test_the_message_has_a_fixed_size_and_contains_the_pack():
    message = next_pack.encoded(PACK)
    assert message.tolist() == NUMBERS + [0] * (next_pack.CAPACITY - len(NUMBERS))
    assert next_pack.decoded(message) == PACK


def test_the_pack_of_the_data_path_is_the_pack_of_the_message():
    lengths = {"cu_seqlens": [0, 5, 12], "cu_seqlens_padded": [0, 6, 16]}
    batch = {name: torch.tensor([ends], dtype=torch.int32) for name, ends in lengths.items()}
    assert loader.plan_ahead(batch | {"tokens": torch.zeros(1, TOTAL)}) == PACK


def many(documents):
    bounds = tuple(range(documents + 1))
    return Pack(documents, bounds, documents, bounds)


@pytest.mark.parametrize("pack", [
    None, many(5000), Pack(TOTAL, (0, TOTAL), TOTAL, (0, TOTAL), spans=((1, 2),)),
])  # fmt: skip
def test_a_pack_that_cannot_be_sent_is_no_pack(pack):
    message = next_pack.encoded(pack)
    assert len(message) == next_pack.CAPACITY
    assert next_pack.decoded(message) is None


def test_packs_of_two_thousand_documents_with_padding_fit():
    bounds, documents = tuple(range(0, 4001, 2)), tuple(range(4001))
    pack = Pack(4000, bounds, 4000, documents, tuple(range(1, 4000, 2)))
    assert next_pack.decoded(next_pack.encoded(pack)) == pack


@pytest.fixture
def state():
    """Return the state of an installation without a run."""
    burst.install("striped")
    state = patching.run_state()
    state.shares_packs = True
    yield state
    burst.uninstall()


GROUP = mock.Mock(size=lambda: 2)


def of_rank(rank, next_of_rank, device="cpu", **changes):
    """Run the wrapper on one tensor-parallel rank; return the broadcasts of the wrapper.

    `changes` are other arguments of Megatron's function.
    """
    sent = []

    def broadcast(message, source, group):
        sent.append((len(message), message.dtype, message.device.type, source, group))

    patching.run_state().next_pack = next_of_rank
    arguments = {
        "batch": {"cu_seqlens": torch.zeros(1, 3)}, "is_hybrid_cp": False, "has_cu_seqlens": True,
        "broadcast_src_rank": 6, "broadcast_group": GROUP, "tp_rank": rank,
    }  # fmt: skip

    def original(batch, is_hybrid_cp, broadcast_src_rank, broadcast_group, tp_rank,
                has_cu_seqlens=None, is_sft=None):  # fmt: skip
        return batch

    with (
        mock.patch.object(next_pack.dist, "broadcast", broadcast),
        mock.patch.object(next_pack, "_device", return_value=torch.device(device)),
    ):
        call = arguments | changes
        assert next_pack._with_next_pack(original, **call) is call["batch"]
    assert patching.run_state().next_pack is None
    return sent


MESSAGE = (next_pack.CAPACITY, torch.int32, "cpu", 6, GROUP)


@pytest.mark.parametrize("pack", [PACK, None, many(5000)])
@pytest.mark.parametrize("batch", [{"cu_seqlens": torch.zeros(1, 3)}, {"cu_seqlens": None}, {}])
def test_data_do_not_change_who_takes_part(state, pack, batch):
    """Rank 1 has no next pack. A rank's batch may have no cu_seqlens."""
    assert of_rank(0, pack, batch=batch) == of_rank(1, None) == [MESSAGE]


@pytest.mark.parametrize("changes", [
    {"has_cu_seqlens": False}, {"has_cu_seqlens": None, "is_sft": False}, {"is_hybrid_cp": True},
    {"broadcast_group": mock.Mock(size=lambda: 1)},
])  # fmt: skip
def test_no_rank_takes_part_without_packed_batches_and_ranks_that_receive(state, changes):
    assert of_rank(0, PACK, **changes) == of_rank(1, None, **changes) == []


def test_the_parameter_of_0_18(state):
    assert of_rank(1, None, has_cu_seqlens=None, is_sft=True) == [MESSAGE]


def test_nothing_is_sent_outside_a_step(state):
    state.shares_packs = False
    assert of_rank(0, PACK) == of_rank(1, None) == []


STEPS = {
    "packs": ({}, True),
    "CUDA graphs": ({"cuda_graph_impl": "local"}, False),
    "one context-parallel rank": ({"context_parallel_size": 1}, False),
    "Megatron's attention": ({"burst": None}, False),
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("iterator", [None, [None], "batches"])
def test_the_configuration_decides_for_all_ranks(state, case, iterator):
    """Only rank 0 has a data iterator."""
    changes, shares = STEPS[case]
    chosen = mb.BurstConfig(layout="striped")
    settings = {"burst": chosen, "context_parallel_size": 2, "calculate_per_token_loss": True}
    config = SimpleNamespace(**{"cuda_graph_impl": "none"} | settings | changes)
    seen = []

    def run(**named):
        state.next_pack = PACK  # of a script that reads no further batch
        seen.append(state.shares_packs)
        if len(seen) > 1:
            raise KeyError

    source = iter([]) if iterator == "batches" else iterator
    named = {"model": [mock.Mock(config=config)], "data_iterator": source, "num_microbatches": 2}
    loader._noting(run, dict(named))
    assert (state.next_pack, state.shares_packs) == (None, False)
    with pytest.raises(KeyError):
        loader._noting(run, dict(named))
    assert (state.next_pack, state.shares_packs) == (None, False)
    assert seen == [shares] * 2


def batch(*ends):
    """Return a packed batch, or an unpacked batch without `ends`."""
    lengths = {"cu_seqlens": torch.tensor([ends], dtype=torch.int32)} if ends else {}
    return {"tokens": torch.zeros(1, TOTAL)} | lengths


@pytest.mark.parametrize(("count", "batches", "expected"), [
    (2, [batch(0, 9, 24), batch(0, 7, 24), batch(0, 5, 24)], [(0, 7, 24), None, None]),
    (3, [batch(0, 9, 24), batch(), batch(0, 5, 24)], [None, None, None]),
    (3, [batch(0, 9, 24), batch(0, 7, 24)], [(0, 7, 24), None]),
])  # fmt: skip
def test_the_next_pack_is_known_only_within_a_step(state, count, batches, expected):
    iterator, found = loader.BatchIterator(iter(batches), count=count), []
    for _ in batches:
        next(iterator)
        found.append(state.next_pack and state.next_pack.bounds)
    assert found == expected


class Call:
    """A call whose plan is the name of the thread that made it."""

    measures = False
    facts: dict = {"name": "value"}  # noqa: RUF012
    device = torch.device("cpu")

    def length(self, book):
        return TOTAL

    def operation(self, book, pack, needs_grad):
        return self

    def check(self):
        return self

    def build(self, request):
        return threading.current_thread().name


@pytest.fixture
def ahead(state):
    yield plans_ahead.PlansAhead()
    if state.planner is not None:
        state.planner.shutdown()


def planned_by(ahead, call, pack):
    return ahead.builder(call, pack, call)(call).partition("_0")[0]


def message(ahead, receive, planned=()):
    """A message arrives while the next one starts, as in `next_pack`."""
    ahead.collect()
    ahead.start_received(None, receive, planned)


PLANNER, FORWARD = "megatron_burst planner", "MainThread"


def test_the_forward_does_not_wait_for_the_pack_of_the_next_micro_batch(ahead):
    """The second message arrives only after the forward of the first pack."""
    call, arrives, packs = Call(), threading.Event(), [PACK, many(TOTAL)]
    ahead.expect(call, [])

    def late():
        assert arrives.wait(60)
        return packs[1]

    message(ahead, lambda: packs[0])
    message(ahead, late)
    assert planned_by(ahead, call, packs[0]) == PLANNER
    arrives.set()
    message(ahead, lambda: None)  # the last micro-batch of a step
    assert planned_by(ahead, call, packs[1]) == PLANNER
    assert (ahead.started, ahead.used) == (2, 2)


def test_a_pack_that_does_not_arrive_is_planned_by_the_forward(ahead):
    call = Call()
    ahead.expect(call, [])

    def fails():
        raise RuntimeError("planted")

    for receive in (fails, lambda: None, lambda: PACK):
        message(ahead, receive)
        assert planned_by(ahead, call, PACK) == FORWARD
    message(ahead, fails)
    assert planned_by(ahead, call, PACK) == PLANNER


def test_a_pack_that_has_a_plan_is_not_planned_again(ahead):
    call = Call()
    ahead.expect(call, [])
    for planned in ([], [], [(call, many(TOTAL))]):  # the chunks of a stage receive the same pack
        message(ahead, lambda: PACK, planned)
    message(ahead, lambda: many(TOTAL), [(call, many(TOTAL))])
    message(ahead, lambda: None)
    assert ahead.started == 1


def test_nothing_is_planned_for_a_script_that_makes_other_packs(ahead):
    ahead.expect(Call(), [])
    for length in range(1, 2 * plans_ahead.UNUSED):
        bounds = (0, length, 10 * TOTAL)
        pack = Pack(TOTAL, bounds, TOTAL, bounds)
        message(ahead, lambda pack=pack: pack)
    assert ahead.started == plans_ahead.UNUSED


def test_a_thread_that_plans_after_the_end_of_the_run(state):
    """Its results are not used, and it does not fail."""
    ahead, release = plans_ahead.PlansAhead(), threading.Event()
    ahead.expect(Call(), [])

    def late():
        assert release.wait(60)
        return next_pack._receive(torch.from_numpy(next_pack.encoded(PACK)), None)

    message(ahead, late)
    job = ahead._receiving
    burst.uninstall()
    release.set()
    ((key, future),) = job.result().items()
    assert key[1] == PACK
    assert future.result()[1].startswith(PLANNER)


def test_received_packs_share_their_layout_with_the_packs_of_batches(state):
    from megatron_burst.megatron.data.cut import BatchCut
    from megatron_burst.megatron.data.packed import packs

    ends, padded = torch.tensor([0, 5, 12]), torch.tensor([0, 6, 16])
    received = next_pack._receive(torch.from_numpy(next_pack.encoded(PACK)), None)
    layout = received.layout(BatchCut("striped"), 2)
    assert packs().of(TOTAL, ends, padded).layout(BatchCut("striped"), 2) is layout


class Book:
    """A plan book that keeps the function that a thread would call, and the order of the calls."""

    def __init__(self, calls=None):
        self.receive, self.calls = [], [] if calls is None else calls

    @property
    def ahead(self):
        return self

    def collect(self):
        self.calls.append("collect")

    def plan_received(self, receive):
        self.calls.append("receive")
        self.receive.append(receive)


def test_plans_of_all_books_are_collected_before_the_next_message(state):
    """Otherwise the thread may wait for the next message before it makes plans of this one."""
    calls = []
    state.plan_books |= {"one group": Book(calls), "another group": Book(calls)}
    of_rank(1, PACK)
    assert calls == ["collect"] * 2 + ["receive"] * 2


class Recorded:
    """A CUDA event."""

    device = None

    def __init__(self, blocking):
        assert blocking
        self.calls = []

    def record(self, stream):
        self.calls.append(stream)

    def synchronize(self):
        self.calls.append("synchronize")


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need CUDA's torch"
)
def test_only_the_thread_waits_for_the_device(state):
    book = Book()
    state.plan_books["group"] = book
    with ExitStack() as stack:
        for name, value in (("Event", Recorded), ("current_stream", lambda device: "stream")):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for context in (FakeTensorMode(allow_non_fake_inputs=True), pinning()):
            stack.enter_context(context)
        with NoSync(downloads=True) as mode:
            for pack in (PACK, None):
                assert of_rank(0, pack, "cuda")[0][2] == "cuda"
            assert (mode.uploads, mode.downloads) == (2, 0)
            assert of_rank(1, None, "cuda")[0][2] == "cuda"
        assert (mode.uploads, mode.downloads) == (2, 1)
        with pytest.raises(HostSync), NoSync():  # the check itself
            of_rank(1, None, "cuda")
    host, ready = book.receive[0].args
    assert host.device.type == "cpu"
    assert ready.calls == ["stream"]
    numbers = torch.from_numpy(next_pack.encoded(PACK))
    with mock.patch.object(torch.cuda, "device", mock.MagicMock()):
        assert next_pack._receive(numbers, ready) == PACK
    assert ready.calls == ["stream", "synchronize"]


def test_the_wrapper_is_installed_where_megatron_has_the_function():
    if not hasattr(utils, "get_batch_on_this_tp_rank"):
        pytest.skip("Megatron-Core 0.16 and 0.17 do not have the function")
    before = utils.get_batch_on_this_tp_rank
    burst.install("striped")
    try:
        assert utils.get_batch_on_this_tp_rank.__wrapped__ is before
    finally:
        burst.uninstall()
    assert utils.get_batch_on_this_tp_rank is before
