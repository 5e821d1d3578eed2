"""Both functions of FlashAttention 4 with lists of blocks, written by hand in float64.

Reads what the package's kernels read: counts, indices, sizes of blocks, a mask function for partly
visible blocks, and its tensors. Mask functions are the twins of `kernels.flash4_masks` in torch.
"""

import torch


def intervals(query, key, lengths, tensors):
    begin, end = tensors
    return (key >= begin[query]) & (key < end[query])


def tables(query, key, lengths, tensors):
    """A matrix of table numbers, one per 128 x 128 pairs, with one more column; 4 words a row."""
    bits, numbers = tensors
    across = -(-lengths[1] // 128) + 1
    number = numbers[query // 128 * across + key // 128]
    word = bits[number * 512 + query % 128 * 4 + key % 128 // 32]
    return (word >> key % 32) & 1 == 1


def intervals_packed(query, key, lengths, tensors):
    return intervals(query, key, lengths, tensors)


def tables_packed(query, key, lengths, tensors):
    return tables(query, key, lengths, tensors)


class Masks:
    """Mask functions by name; packed ones are called by forward on sm_100 only."""

    intervals = staticmethod(intervals)
    tables = staticmethod(tables)
    intervals_packed = staticmethod(intervals_packed)
    tables_packed = staticmethod(tables_packed)


def listed(count, index):
    """Return the listed blocks of each block: ascending, each once; entries after them are 0."""
    assert count.dtype == index.dtype == torch.int32
    assert count.shape[:2] == index.shape[:2] == (1, 1)  # for every batch entry and head
    found = []
    for n, row in zip(count[0, 0].tolist(), index[0, 0].tolist(), strict=True):
        assert row[:n] == sorted(set(row[:n]))
        assert not any(row[n:])
        found.append(row[:n])
    return found


def visible(lists, mask_mod, tensors, lengths, by):
    """Return bool [rows, columns] of the visible pairs; `by` is 0 in forward, 1 in backward."""
    block, seen = lists.block_size, torch.zeros(lengths, dtype=torch.bool)
    partial = listed(lists.mask_block_cnt, lists.mask_block_idx)
    full = listed(lists.full_block_cnt, lists.full_block_idx)
    assert len(partial) == len(full) == -(-lengths[by] // block[by])
    for one, (some, every) in enumerate(zip(partial, full, strict=True)):
        assert not set(some) & set(every)
        for other in (*some, *every):
            i, j = (one, other) if by == 0 else (other, one)
            # The kernels also call mask functions beyond the ends, for whole blocks of 256 rows.
            q = torch.arange(i * block[0], (i + 1) * block[0])[:, None]
            k = torch.arange(j * block[1], (j + 1) * block[1])[None, :]
            cell = torch.ones(block, dtype=torch.bool)
            if other in some:
                cell = mask_mod(q, k, lengths, tensors)
                assert not cell[:, lengths[1] - j * block[1] :].any()
            else:
                assert (j + 1) * block[1] <= lengths[1]
            part = seen[q[0, 0] : q[-1, 0] + 1, k[0, 0] : k[0, -1] + 1]
            part |= cell[: len(part), : part.shape[1]]
    return seen


class Interpreter:
    """Forward and backward on tensors [b, s, h, d]; lse [b, h, s]."""

    def __init__(self):
        self.calls = []  # (pass, mask function, size of blocks)

    def forward(self, q, k, v, softmax_scale, mask_mod=None, aux_tensors=None,
                block_sparse_tensors=None, pack_gqa=None, **given):  # fmt: skip
        assert pack_gqa is False
        scores, _, v = self._scores(
            "forward", q, k, v, softmax_scale, mask_mod, aux_tensors, block_sparse_tensors, given
        )
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
        return torch.einsum("bhst,bthw->bshw", p, v), lse

    def backward(self, dout, q, k, v, out, lse, dlse, dq, dk, dv, softmax_scale, deterministic,
                 mask_mod=None, aux_tensors=None, block_sparse_tensors=None, **given):  # fmt: skip
        assert not out.any()
        assert not deterministic
        scores, k, v = self._scores(
            "backward", q, k, v, softmax_scale, mask_mod, aux_tensors, block_sparse_tensors, given
        )
        p = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
        ds = p * (torch.einsum("bshw,bthw->bhst", dout, v) + dlse[..., None]) * softmax_scale
        dq[:] = torch.einsum("bhst,bthd->bshd", ds, k)
        for into, x, y in ((dk, ds, q), (dv, p, dout)):
            grad = torch.einsum("bhst,bshd->bthd", x, y)
            into[:] = grad.unflatten(2, (into.shape[2], -1)).sum(3)

    def _scores(self, name, q, k, v, scale, mask_mod, tensors, lists, given):
        assert not given["causal"]
        rest = ("window_size_left", "cu_seqlens_q", "cu_seqlens_k")
        assert [given[one] for one in rest] == [None] * 3
        self.calls.append((name, mask_mod, lists.block_size))
        lengths = q.shape[1], k.shape[1]
        seen = visible(lists, mask_mod, tensors, lengths, int(name == "backward"))
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
        return scores.masked_fill(~seen, float("-inf")), k, v
