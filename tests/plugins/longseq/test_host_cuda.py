"""The CUDA engine of host memory with streams that only record calls, without a GPU.

Tensors are on the CPU and copies are synchronous. The tests check that events order every copy
after its inputs and before its users.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.longseq.host import engines, mover
from megatron_burst.plugins.longseq.host.arena import ALIGN

BYTES = 16


class Stream:
    """A stream; `seen` is the progress that it has observed of each stream."""

    def __init__(self, name):
        self.name, self.seen = name, {name: 0}

    def advance(self):
        self.seen[self.name] += 1
        return dict(self.seen)

    def wait_event(self, event):
        for name, count in event.seen.items():
            self.seen[name] = max(self.seen.get(name, 0), count)

    def record_event(self):
        event = Event()
        event.record(self)
        return event


class Event:
    over = False  # what `query` answers

    def __init__(self, enable_timing=False):
        self.seen = {}

    def record(self, stream):
        self.seen = stream.advance()

    def query(self):
        return Event.over

    def elapsed_time(self, other):
        return 1.0

    def synchronize(self):
        raise AssertionError("the host waits")


class Device:
    """Replacement of `torch.cuda`; `copies` has target, source and the observed progress."""

    def __init__(self):
        self.compute, self.made, self.copies = Stream("compute"), [], []
        self.current = self.compute
        self.pinned, self.status = {}, 0

    def stream_of(self, device):
        self.made.append(Stream(f"copies {len(self.made)}"))
        return self.made[-1]

    @contextmanager
    def use(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def copy(self, target, source, non_blocking=False):
        if self.current is not self.compute:
            assert non_blocking
            places = target.data_ptr(), source.data_ptr()
            self.copies.append(SimpleNamespace(target=places[0], source=places[1],
                                               seen=self.current.advance()))  # fmt: skip
        return COPY(target, source)

    def register(self, address, size, flags):
        if not self.status:
            self.pinned[address] = size
        return self.status


COPY = torch.Tensor.copy_


@pytest.fixture
def device(monkeypatch):
    found = Device()
    runtime = SimpleNamespace(
        cudaHostRegister=found.register, cudaHostUnregister=found.pinned.__delitem__
    )
    for name, value in {
        "Stream": found.stream_of, "Event": Event, "stream": found.use,
        "current_stream": lambda: found.current, "cudart": lambda: runtime,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda t, s, **k: found.copy(t, s, **k))
    monkeypatch.setattr(mover, "movable", lambda tensor, kind: True)
    monkeypatch.setattr(Event, "over", False)
    return found


def before(first, second):
    """Return whether events order a copy before another operation."""
    mine = {name: count for name, count in first.seen.items() if name.startswith("copies")}
    return all(second.get(name, 0) >= count for name, count in mine.items())


def test_copies_are_ordered_after_what_they_need_and_before_what_needs_them(device):
    host = mb.HostMemory(2**20, device="cuda")
    produced = device.compute.advance()["compute"]
    moved = host.move(torch.ones(4))
    (out,) = device.copies
    assert out.seen["compute"] >= produced
    assert not before(out, device.compute.seen)  # the computation goes on
    freed = device.compute.advance()["compute"]  # last use of the memory that the copy back gets
    moved.fetch()
    back = device.copies[1]
    assert before(out, back.seen)
    assert back.seen["compute"] >= freed
    assert not before(back, device.compute.seen)
    assert (moved.get() == 1).all()
    assert before(back, device.compute.seen)
    assert len(device.made) == 2  # one stream per direction


def test_memory_of_a_block_is_written_after_its_last_copy_back(device):
    host = mb.HostMemory(ALIGN * 8, device="cuda")
    first = host.move(torch.ones(4))
    first.fetch()
    back = device.copies[1]
    del first
    host.move(torch.ones(4))
    again = device.copies[2]
    assert again.target == back.source
    assert before(back, again.seen)


def test_a_source_is_held_until_the_computation_waits_for_its_copy(device):
    host = mb.HostMemory(2**20, device="cuda")
    moved = [host.move(torch.ones(4)) for _ in range(3)]
    assert [one._copy.holds_source for one in moved] == [False, True, True]
    assert before(device.copies[0], device.compute.seen)
    assert not before(device.copies[1], device.compute.seen)


def test_what_is_dropped_early_is_recorded_on_the_stream_of_its_copy(device):
    host = mb.HostMemory(2**20, device="cuda")
    recorded = []
    guard = engines.StreamEngine.guard

    def watched(self, tensor):
        recorded.append((self.stream, tensor.data_ptr()))
        guard(self, tensor)

    with mock.patch.object(engines.StreamEngine, "guard", watched):
        tensor = torch.ones(4)
        moved = host.move(tensor)
        del moved
        assert recorded == [(host._traffic.out.stream, tensor.data_ptr())]
        moved = host.move(tensor)
        moved.fetch()
        place = moved._copy._buffer.data_ptr()
        del moved
        assert recorded[1:] == [(host._traffic.back.stream, place)]
    on_device = mock.Mock(is_cuda=True)
    host._traffic.out.guard(on_device)
    on_device.record_stream.assert_called_once_with(host._traffic.out.stream)


def test_slabs_are_pinned_until_they_are_dropped(device):
    host = mb.HostMemory(2**20, device="cuda")
    moved = host.move(torch.ones(4))
    assert list(device.pinned.values()) == [2**20]
    del moved, host
    assert not device.pinned
    device.status = 2
    with pytest.raises(RuntimeError, match=r"error 2.*--burst-host-memory"):
        mb.HostMemory(2**20, device="cuda").move(torch.ones(4))


def test_rates_come_from_timed_events(device):
    host = mb.HostMemory(2**20, device="cuda")
    moved = host.move(torch.ones(4))
    moved.get()
    assert host.rates() == (None, None)
    Event.over = True
    assert host.rates() == (BYTES / 1e-3, BYTES / 1e-3)


def test_a_rate_is_of_the_cpu_only(device):
    with pytest.raises(ValueError, match="rate must be"):
        mb.HostMemory(2**20, device="cuda", rate=1e9)
