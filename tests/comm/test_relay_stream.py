"""The relay stream of CUDA, on streams that only record what they are asked for."""

from contextlib import contextmanager

import pytest
import torch

from megatron_burst.comm.relays import InOrder, StreamRelays, one_queue
from megatron_burst.comm.transport import Counters, ProcessEndpoint
from megatron_burst.comm.waits import WaitClock


class Streams:
    """Two streams, and the calls on them in order."""

    def __init__(self, monkeypatch):
        self.calls, self.current = [], "computing"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other):
        self.calls.append(f"relay stream waits for {other}")

    @contextmanager
    def entered(self, stream):
        before, self.current = self.current, "relay" if stream is self else stream
        yield
        self.current = before

    def run(self, what):
        self.calls.append(f"{what} on {self.current}")


class Event:
    def __init__(self, streams):
        self.streams = streams

    def record(self, stream):
        assert stream is self.streams
        self.streams.calls.append("recorded on relay")

    def wait(self):
        self.streams.calls.append(f"{self.streams.current} waits")


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def test_after_an_error_kernels_wait_for_the_relay_stream(streams, monkeypatch):
    """Its copies may still read buffers that are freed."""
    waited = []
    computing = type("Computing", (), {"wait_stream": lambda _, other: waited.append(other)})()
    streams.current = computing
    relays = StreamRelays(streams)
    relays.abandon()  # no chain has started
    assert not waited
    relays.start(lambda: None)
    relays.abandon()
    assert waited == [streams]


@pytest.mark.parametrize("clock", [False, True])
def test_a_chain_waits_for_the_kernels_before_it_and_later_kernels_wait_for_its_marks(
    streams, monkeypatch, clock
):
    timed = WaitClock()
    monkeypatch.setattr(timed, "wait_on_stream", lambda mark: (streams.run("timed"), mark.wait()))
    relays = StreamRelays(streams, timed if clock else None)

    def chain():
        assert timed._off == clock
        streams.run("exchange 0")
        with relays.memory():
            streams.run("buffer")
        relays.mark(1)
        streams.run("exchange 1")
        relays.mark(2)

    relays.wait(0)
    relays.start(chain)
    assert not timed._off
    streams.run("kernel")
    for boundary in (1, 1, 2):
        relays.wait(boundary)
    waits = [*["timed on computing"] * clock, "computing waits"]
    assert streams.calls == [
        "relay stream waits for computing", "exchange 0 on relay", "buffer on computing",
        "recorded on relay", "exchange 1 on relay", "recorded on relay", "kernel on computing",
        *waits, *waits,
    ]  # fmt: skip


@pytest.mark.parametrize(("value", "one"), [(None, False), ("1", True), ("8", False)])
def test_the_stream_needs_more_than_one_queue(monkeypatch, value, one):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert one_queue() is one


def test_an_endpoint_makes_one_stream_for_a_device(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given, **more: made.append((given, more)))
    endpoint, device = ProcessEndpoint(0, (0,), {}, Counters()), torch.device("cuda", 0)
    assert isinstance(endpoint.relays(torch.device("cpu")), InOrder)
    both = [endpoint.relays(device) for _ in range(2)]
    assert both[0] is not both[1]
    assert made == [((device,), {"priority": -1})]
