"""A layout of any pieces."""

from megatron_burst.layout import Layout, Span


class Pieces(Layout):
    """Any spans at all, which a test has drawn; neighbours may be joined or apart."""

    name = "pieces"

    def __init__(self, shards):
        super().__init__(len(shards))
        self.shards = shards

    def _spans(self, rank, seq_len):
        return tuple(Span(start, 1, stop - start) for start, stop in self.shards[rank])
