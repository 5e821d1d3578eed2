"""The order of copies: asynchronous, fetched one frame ahead, without leftovers.

A gate replaces the clock of the emulated link and holds copies until a test releases them. So order
and overlap do not depend on time.
"""

import gc
import itertools
import threading

import pytest
import torch

import megatron_burst as mb
from megatron_burst.plugins.longseq.host import engines
from megatron_burst.plugins.longseq.host.copies import HostCopy

ROWS = 4  # of float32: a layer's tensor is 16 bytes


def memory(strict=True, **given):
    return mb.HostMemory(2**20, strict=strict, device="cpu", **given)


class Layers:
    """Layers that each move one tensor as a frame of its own; `name` identifies the layer."""

    def __init__(self, host):
        self.host, self.left = host, {}

    def forward(self, *names):
        for name in names:
            with self.host.frame():
                self.left[name] = self.host.move(torch.full((ROWS,), float(name)))

    def backward(self, *names):
        for name in names:
            assert (self.left[name].get() == name).all()
            del self.left[name]


@pytest.fixture
def fetches(monkeypatch):
    """Record the numbers of tensors in the order of their fetches; negative if discarded."""
    seen, fetch, unfetch = [], HostCopy.fetch, HostCopy.unfetch

    def name(copy):
        return int(copy._block.bytes().view(torch.float32)[0])

    def fetched(self):
        if self._buffer is None and self._fetched is None:
            self._sent.wait()
            seen.append(name(self))
        fetch(self)

    def given_up(self):
        if self._buffer is not None:
            seen.append(-name(self))
        unfetch(self)

    monkeypatch.setattr(HostCopy, "fetch", fetched)
    monkeypatch.setattr(HostCopy, "unfetch", given_up)
    return seen


def test_the_frame_before_is_fetched_ahead(fetches):
    layers = Layers(memory())
    layers.forward(1, 2, 3, 4)
    layers.backward(4)
    assert fetches == [4, 3]
    layers.backward(3)
    assert fetches == [4, 3, 2]
    layers.backward(2, 1)
    assert fetches == [4, 3, 2, 1]
    assert (layers.host.used, layers.host.frames) == (0, 0)


def schedule(stage, stages, batches, layers=2):
    """Return 1F1B of one pipeline stage: [("forward" or "backward", names of its layers)]."""

    def names(batch):
        return [10 * (batch + 1) + layer for layer in range(layers)]

    ahead = min(stages - stage - 1, batches)
    order = [("forward", names(b)) for b in range(ahead)]
    for batch in range(batches - ahead):
        order += [("forward", names(batch + ahead)), ("backward", names(batch)[::-1])]
    return order + [("backward", names(b)[::-1]) for b in range(batches - ahead, batches)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_order_is_learned_from_the_last_step(stage, fetches):
    """From the second step on, a layer is fetched during the backward before it, and never twice.

    This holds across micro-batches too, if the layer exists by then.
    """
    layers, order = Layers(memory()), schedule(stage, 4, 6)
    taken = [name for what, names in order if what == "backward" for name in names]
    for step in range(3):
        begun, there = fetches.__len__(), set()
        for what, names in order:
            for name in names:
                getattr(layers, what)(name)
                if what == "forward":
                    there.add(name)
                    continue
                following = taken[taken.index(name) + 1 :][:1]
                if step and following and following[0] in there:
                    assert following[0] in fetches[begun:]
        assert fetches[begun:] == taken if step else sorted(fetches[begun:]) == sorted(taken)
        assert (layers.host.used, layers.host.frames) == (0, 0)
    assert layers.host.bytes_out == layers.host.bytes_back == 3 * len(taken) * 4 * ROWS


def test_a_changed_order_costs_bytes_and_no_error(fetches):
    host = memory()
    layers = Layers(host)
    for order in ((4, 3, 2, 1), (1, 2, 3, 4), (3, 1, 4, 2), (2, 4)):
        layers.forward(1, 2, 3, 4)
        layers.backward(*order)
        ahead = sum(moved._copy._buffer is not None for moved in layers.left.values())
        assert ahead <= 1
        layers.left.clear()
        assert (host.used, host.frames) == (0, 0)
    assert any(name < 0 for name in fetches)
    fetches.clear()
    layers.forward(1, 2, 3, 4)  # of the last step only "4 after 2" is known
    layers.backward(4, 3, 2, 1)
    assert sorted(name for name in fetches if name > 0) == [1, 2, 3, 4]


def test_frames_of_a_recompute_do_not_drive_out_what_was_fetched(fetches):
    host = memory()
    outer, inner = Layers(host), Layers(host)
    for _ in range(2):
        fetches.clear()
        outer.forward(1, 2, 3)
        for name in (3, 2, 1):
            assert (outer.left[name].get() == name).all()
            inner.forward(10 * name, 10 * name + 1)
            inner.backward(10 * name + 1, 10 * name)
            del outer.left[name]
        assert sorted(fetches) == [1, 2, 3, 10, 11, 20, 21, 30, 31]
        assert fetches.index(2) < fetches.index(31)  # before the recompute of 3 went on


# --- overlap -----------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Hold copies until `gate.release(n)`; `gate.begun` is the number of copies that have begun."""

    class Gate(threading.Semaphore):
        begun = 0

    gate = Gate(0)

    def pause(_):
        gate.begun += 1
        assert gate.acquire(timeout=60)

    monkeypatch.setattr(engines, "pause", pause)
    yield gate
    gate.release(1000)


def test_forward_goes_on_while_copies_are_under_way(gate):
    host = memory(rate=1e12)
    layers = Layers(host)
    layers.forward(1, 2)  # returns although nothing has been copied
    assert not any(copy._copy.sent() for copy in layers.left.values())
    third = threading.Thread(target=layers.forward, args=(3,))
    third.start()
    third.join(0.2)
    assert third.is_alive()  # waits for the first: at most two are held by the device
    gate.release()
    third.join(60)
    assert [name for name in (1, 2, 3) if layers.left[name]._copy.holds_source] == [2, 3]
    gate.release(1000)
    layers.backward(3, 2, 1)


def test_backward_runs_while_the_next_layer_is_fetched(gate):
    host = memory(rate=1e12)
    layers = Layers(host)
    gate.release(3)
    layers.forward(1, 2, 3)
    gate.release(1)  # one copy back: that of 3
    layers.backward(3)
    ahead = layers.left[2]._copy
    assert ahead._buffer is not None
    assert not ahead._arrived.done()  # under way while the backward of 3 runs
    assert torch.isnan(ahead._buffer).all()
    gate.release(1000)
    layers.backward(2, 1)


def test_memory_freed_during_a_copy_is_not_written_before_its_end(gate):
    host = memory(strict=False, rate=1e12)
    gate.release(1)
    first = host.move(torch.full((ROWS,), 1.0))
    first.fetch()  # the copy back is held by the gate
    buffer = first._copy._buffer
    first._copy._sent.settle()
    del first
    second = host.move(torch.full((ROWS,), 2.0))
    assert second._copy._block.start == 0  # in the same place
    gate.release(1000)
    second.release()
    assert (buffer == 1).all()
    assert (second.get() == 2).all()


# --- strict mode sees what is not waited for -----------------------------------------------------


def test_a_missing_wait_before_use_is_a_wrong_number(monkeypatch):
    host = memory()
    moved = host.move(torch.ones(ROWS))
    moved.release()
    monkeypatch.setattr(engines.WorkerEvent, "wait", engines.WorkerEvent.settle)
    assert torch.isnan(moved.get()).all()


def test_a_missing_wait_of_the_copy_back_for_the_copy_out_is_a_wrong_number(monkeypatch):
    host = memory()
    with torch.no_grad():
        host.move(torch.ones(ROWS)).get()  # what it leaves is poisoned
    moved, copy = host.move(torch.ones(ROWS)), engines.WorkerEngine.copy
    # Neither the engine nor the holder of the source waits.
    monkeypatch.setattr(HostCopy, "release", lambda self: None)
    monkeypatch.setattr(
        engines.WorkerEngine, "copy", lambda self, target, source, _: copy(self, target, source, ())
    )
    assert torch.isnan(moved.get()).all()


def test_freed_memory_is_poisoned():
    host = memory()
    moved = host.move(torch.ones(ROWS))
    moved.release()
    seen = moved._copy._block.bytes().view(torch.float32)
    assert (seen == 1).all()
    del moved
    assert host.used == 0
    assert torch.isnan(seen).all()


# --- nothing is left behind ------------------------------------------------------------------


def test_a_failed_copy_is_told_to_who_waits(monkeypatch):
    host = memory(rate=1.0)
    monkeypatch.setattr(engines, "pause", lambda _: 1 / 0)
    moved = host.move(torch.ones(ROWS))
    with pytest.raises(RuntimeError, match="copy between device and host failed"):
        moved.get()


def test_a_source_is_dropped_when_its_copy_was_waited_for():
    host = memory()
    layers = Layers(host)
    layers.forward(*range(1, 6))
    held = [copy._copy.holds_source for copy in layers.left.values()]
    assert held == [False, False, False, True, True]
    layers.backward(5)
    assert not layers.left[4]._copy.holds_source


def test_backward_does_not_find_sources_on_the_device_next_to_what_is_fetched():
    host = memory()
    moved = host.move(torch.ones(ROWS))
    moved.fetch()
    assert not moved._copy.holds_source
    layers = Layers(host)
    layers.forward(1, 2, 3, 4)
    layers.backward(1)  # of another micro-batch, say: nothing of it is pending
    assert not layers.left[3]._copy.holds_source  # of the last frame's only


def test_threads_end_with_their_memory():
    host = memory()
    host.move(torch.ones(ROWS)).get()
    threads = [host._traffic.out._thread, host._traffic.back._thread]
    assert all(thread.is_alive() for thread in threads)
    del host
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("length", range(5))
def test_what_backward_never_asks_for_is_freed(length):
    host = memory()
    layers = Layers(host)
    for used in itertools.permutations((1, 2, 3), min(length, 3)):
        layers.forward(1, 2, 3)
        layers.backward(*used)
        layers.left.clear()
        assert (host.used, host.frames) == (0, 0)
