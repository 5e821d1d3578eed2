"""What ranks of the tests of packed batches run: one layer's core attention, without a model."""

import contextlib

import torch
import torch.distributed as dist
from session import parallel

TOTAL, HEADS, WIDTH = 240, 4, 8
# (documents without their padding, with it): every length of 1 to 70 that comes along, an empty
# document, padding between documents and at the end.
LENGTHS = (70, 1, 33, 0, 7, 40, 2, 52)
ROOM = (70, 3, 33, 2, 12, 40, 2, 58)


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def params(lengths=LENGTHS, room=ROOM):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, padded = bounds(lengths), None if room is None else bounds(room)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
    )  # fmt: skip


@contextlib.contextmanager
def core_attention(layout, attention=None, choices=None, **changes):
    """One layer's core attention over all ranks, installed for the time being; in the layout
    ``attention``, if that is not the one of the tokens. choices: further ones of the user."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_burst as mb
    import megatron_burst.megatron as burst

    with parallel(layout, context_parallel_size=dist.get_world_size()):
        config = TransformerConfig(
            num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS,
            context_parallel_size=dist.get_world_size(), attention_dropout=0.0,
            calculate_per_token_loss=True, **changes,
        )  # fmt: skip
        chosen = mb.BurstConfig(
            layout=layout, attention_layout=attention, intra_size=2, **choices or {}
        )
        burst.configure(config, chosen)
        yield burst.BurstCoreAttention(config, 1, AttnMaskType.causal, "self")


def worst_errors(layout, padded, window, attention=None, choices=None):
    """Largest error of the output and of the gradients of q, k and v, gathered in order, against a
    dense mask of the documents; and the largest magnitude in rows of padding."""
    import megatron_burst.megatron as burst

    asked = params() if padded else params(ROOM, None)
    real = LENGTHS if padded else ROOM
    draw = torch.Generator().manual_seed(3)
    q, k, v, seed = (
        torch.randn(TOTAL, HEADS, WIDTH, generator=draw, dtype=torch.float64) for _ in range(4)
    )
    windows = {"window_size": window and (window - 1, 0)}
    with core_attention(layout, attention, choices, **windows) as core:
        mine = [burst.shard_sequence(x, asked, dim=0).requires_grad_() for x in (q, k, v)]
        out = core(*mine, packed_seq_params=asked)
        out.backward(burst.shard_sequence(seed, asked, dim=0).flatten(1))
        found = [out, *(x.grad.flatten(1) for x in mine)]
        found = [burst.gather_sequence(x, asked).view(TOTAL, HEADS, WIDTH) for x in found]
    expected, seen = dense(q, k, v, seed, real, window)
    empty = max(x[~seen].abs().max().item() for x in found)
    return [(x - y).abs().max().item() for x, y in zip(found, expected, strict=True)], empty


def dense(q, k, v, seed, lengths, window):
    """(out, dq, dk, dv) by a table of who sees whom, written here by hand, and who sees any."""
    table, start = torch.zeros(TOTAL, TOTAL, dtype=torch.bool), 0
    for length, room in zip(lengths, ROOM, strict=True):
        for row in range(length):
            first = max(0, row - window + 1) if window else 0
            table[start + row, start + first : start + row + 1] = True
        start += room
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5
    shares = logits.masked_fill(~table, -torch.inf).softmax(-1).nan_to_num()
    # Rows that see nothing have weight 0 and, by `where`, no gradient.
    out = torch.einsum("hqk,khd->qhd", torch.where(table, shares, 0.0), v)
    seen = table.any(1)
    out = torch.where(seen[:, None, None], out, 0.0)
    grads = torch.autograd.grad(out[seen], (q, k, v), seed[seen])
    return [out.detach(), *(x.nan_to_num() for x in grads)], seen


def said(choices):
    """The start-up line, and how many tokens each document has on this rank."""
    import megatron_burst.megatron as burst

    asked = params(ROOM, None)
    room = torch.tensor([*ROOM, TOTAL - sum(ROOM)])  # what pads the end is one more
    document = torch.repeat_interleave(torch.arange(len(room)), room)
    with core_attention("balanced", choices=choices) as core:
        x = burst.shard_sequence(torch.zeros(TOTAL, HEADS, WIDTH), asked, dim=0)
        core(x, x, x, packed_seq_params=asked)
        mine = burst.shard_sequence(document, asked, dim=0)
        return core.book.startup, torch.bincount(mine, minlength=len(room)).tolist()


def error(how, ranks):
    """What this rank ends in if the batches of ``ranks`` are wrong in this way; None if in nothing.

    The others get the right one."""
    import megatron_burst as mb
    import megatron_burst.megatron as burst

    odd, rank = dist.get_rank() in ranks, dist.get_rank()
    x = torch.zeros(TOTAL, HEADS, WIDTH)
    try:
        with core_attention("balanced") as core:
            asked = params(ROOM, None)
            if odd and how == "a document longer than the pack":
                asked = params((TOTAL + 4,), None)
            if odd and how == "tokens that do not fill the ranks":
                x = x[:-2]
                asked = params((*ROOM[:-1], ROOM[-1] - 2 - (TOTAL - sum(ROOM))), None)
            if odd and how == "cut in zigzag order before":
                x = mb.shard(x, mb.layout.make("zigzag", cp_size=dist.get_world_size()), rank)
            else:
                x = burst.shard_sequence(x, asked, dim=0)
            if odd and how == "no documents":
                core(*[x[:, None]] * 3)
            core(x, x, x, packed_seq_params=asked)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


def without_the_way_back(stream, attention):
    """As `worst_errors`, with results that stay where attention has them."""
    from unittest import mock

    from megatron_burst.comm import rows

    exchange = rows.exchange_rows

    def one_way(tensors, *rest):
        return tensors if len(tensors) == 1 else exchange(tensors, *rest)

    with mock.patch.object(rows, "exchange_rows", one_way):
        return worst_errors(stream, True, None, attention)
