"""The relay stream on CPU ranks that share a process: two orders of its work, at both extremes.

A CUDA device may run the work of the relay stream as soon as it is launched, or as late as the
computing stream waits for it. `EARLY` and `LATE` do so for whole chains. Buffers of the in-process
transport are filled with NaN until their message has landed and when they are released. So a
missing wait is NaN, or a message that was overwritten in flight.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from megatron_burst.comm.relays import InOrder
from megatron_burst.planning import pipeline
from megatron_burst.plugins.testing.local import LocalEndpoint


class Late(InOrder):
    """A chain starts when the computing stream waits for one of its boundaries."""

    def __init__(self):
        self.launched = []

    def start(self, work):
        self.launched.append(work)

    def wait(self, boundary):
        while self.launched:
            self.launched.pop(0)()


EARLY, LATE = InOrder, Late


@contextmanager
def relay_stream(order):
    """Plans of in-process ranks use a relay stream, whose work runs in this order."""

    def relays(self, device):
        return order()

    def with_streams(*of):
        return replace(real(*of), streams=True)

    real = pipeline.visibility_of
    with (
        mock.patch.object(pipeline, "visibility_of", with_streams),
        mock.patch.object(LocalEndpoint, "relays", relays),
    ):
        yield
