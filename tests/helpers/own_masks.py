"""Masks of a user, as `--burst-mask` names them, and the same as dense matrices written by hand."""

from dataclasses import dataclass

import numpy as np
import torch

import megatron_burst as mb

CHUNK, PREFIX = 24, 20  # neither divides a rank's rows


@dataclass(frozen=True)
class SameChunk(mb.masks.Mask):
    """A query sees the keys of its own chunk of positions; no more than a mask has to define."""

    size: int

    def visible(self, q, k):
        return np.floor_divide(q, self.size) == np.floor_divide(k, self.size)

    def cover(self, q_span, k_span):
        return mb.masks.Cover.PARTIAL


@dataclass(frozen=True, eq=False)
class SameId(mb.masks.Mask):
    """Causal attention between positions with the same id in a table."""

    ids: np.ndarray

    def visible(self, q, k):
        return (self.ids[q] == self.ids[k]) & (k <= q)


def chunked_local(layer, batch):
    """As Llama 4: causal within chunks, and every second layer (there: fourth) over all tokens."""
    return mb.masks.Causal() if layer.number % 2 == 0 else mb.masks.Causal() & SameChunk(CHUNK)


def prefix_lm(layer, batch):
    """The first tokens see each other, all others what is before them."""
    return mb.masks.Causal() | mb.masks.Prefix(PREFIX)


def dense(name, layer, length):
    """bool [length, length]: what a query (row) must not see, as Megatron's own attention takes
    it."""
    row, column = np.mgrid[:length, :length]
    seen = column <= row
    if name == "prefix_lm":
        seen |= column < PREFIX
    elif layer % 2:
        seen &= row // CHUNK == column // CHUNK
    return torch.from_numpy(~seen)


def of_the_rank(layer, batch):
    """Another mask on every rank."""
    return mb.masks.Causal() & SameChunk(8 + torch.distributed.get_rank())


def broken_on_one(layer, batch):
    """An error on one rank only."""
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("no such table")
    return mb.masks.Causal()


def no_mask(layer, batch):
    """What is no mask."""
    return batch.seq_len


NOT_CALLABLE = 3
