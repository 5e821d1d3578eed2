# SPDX-License-Identifier: Apache-2.0
"""Mask functions of `flash4` in CuTe DSL: the visible pairs of partly visible blocks.

FlashAttention 4 compiles its kernels once per mask function. So these functions are at module
level, and read everything that depends on the mask from the tensors of `block_lists.PairMask`. New
documents need no compilation.

A function gets one query and one key, and returns a boolean. A `_packed` function gets one query
and 32 adjacent keys, the first one at a multiple of 32, and returns 32 bits. Only forward on sm_100
calls packed functions. `lengths` has the numbers of queries and keys of the call.

This module requires FlashAttention 4. CuTe DSL compiles these functions for the host, too, so a
test runs them on a CPU.
"""

import cutlass  # pyright: ignore
import cutlass.cute as cute  # pyright: ignore
from flash_attn.cute import utils  # pyright: ignore


@cute.jit
def intervals(batch, head, query, key, lengths, tensors):
    """Return True if begin[query] <= key < end[query]; `tensors` are begin and end."""
    begin = utils.scalar_to_ssa(tensors[0][query[0]], cutlass.Int32)
    end = utils.scalar_to_ssa(tensors[1][query[0]], cutlass.Int32)
    return (key >= begin) & (key < end)


@cute.jit
def intervals_packed(batch, head, query, key, lengths, tensors):
    """Return the results of `intervals` for one query and 32 keys, as 32 bits."""
    before = tensors[0][query[0]] - key[0]  # bits below the first visible key
    after = 32 - (tensors[1][query[0]] - key[0])  # bits above the last visible key
    ones, none = cutlass.Uint32(0xFFFFFFFF), cutlass.Uint32(0)
    # A shift by 32 or more bits is undefined.
    low = none if before > 31 else ones << cutlass.Uint32(cutlass.max(before, 0))
    high = none if after > 31 else ones >> cutlass.Uint32(cutlass.max(after, 0))
    result = cute.make_rmem_tensor(1, cutlass.Uint32)
    result[0] = low & high
    return result.load()


@cute.jit
def tables_packed(batch, head, query, key, lengths, tensors):
    """Return the 32 bits of one query and 32 keys; `tensors` are bits and numbers.

    Tables have 128 x 128 pairs. `numbers` is a matrix of table numbers, one per 128 queries and 128
    keys; it has one more column than there are groups of 128 keys.
    """
    row, column = query[0], key[0]
    across = ((lengths.seqlen_k + 127) >> 7) + 1
    table = tensors[1][(row >> 7) * across + (column >> 7)]
    word = (table * 128 + (row & 127)) * 4 + ((column & 127) >> 5)
    result = cute.make_rmem_tensor(1, cutlass.Uint32)
    result[0] = cutlass.Uint32(tensors[0][word])
    return result.load()


@cute.jit
def tables(batch, head, query, key, lengths, tensors):
    """Return True if the bit of a pair is set; `tensors` are the same as in `tables_packed`."""
    word = tables_packed(batch, head, query, key, lengths, tensors)
    bit = (word[0] >> cutlass.Uint32(key[0] & 31)) & cutlass.Uint32(1)
    return utils.scalar_to_ssa(bit == cutlass.Uint32(1), cutlass.Boolean)


for packed in (intervals_packed, tables_packed):
    packed.__vec_size__ = 32  # pyright: ignore
