"""Measured waits: on the host, or by CUDA events without blocking."""

import time
from dataclasses import dataclass

import torch

from megatron_burst.comm.waits import WaitClock


@dataclass
class Sleeps:
    seconds: float

    def wait(self):
        time.sleep(self.seconds)


class Stream:
    """A device that has reached `now`; the host is ahead of it."""

    def __init__(self):
        self.now, self.queued, self.made = 0.0, 0.0, 0

    def event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return Event(self)

    def wait(self):
        self.queued += 2.0  # the stream stands still for so long


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.at = self.stream.queued

    def query(self):
        return self.at <= self.stream.now

    def elapsed_time(self, other):
        assert other.query(), "an event that has not passed was read"
        return 1e3 * (other.at - self.at)


def test_on_the_host():
    clock = WaitClock()
    clock.timed(Sleeps(0.02), on_host=True).wait()
    assert 0.02 <= clock.take() < 2
    assert clock.take() == 0


def test_on_a_stream_what_has_not_passed_counts_later(monkeypatch):
    stream, clock = Stream(), WaitClock()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        clock.timed(stream, on_host=False).wait()
    assert clock.take() == 0
    stream.now = 4.0
    assert clock.take() == 4.0
    clock.timed(stream, on_host=False).wait()
    assert stream.made == 6  # two that have passed were used again
    stream.now = 8.0
    assert clock.take() == 4.0


def test_events_of_a_graph_are_not_read(monkeypatch):
    stream, clock = Stream(), WaitClock()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    clock.timed(stream, on_host=False).wait()
    assert (stream.queued, stream.made) == (2.0, 0)
