"""Communication of a layer by different rivals: timed calls, correct results, bytes to send.

`sent` is the number of bytes that a rank sends to each other rank, by pass, from the rival's
definition; the kernel's counters are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.cluster.mail import PASSES

from . import exchange, gathered, maps
from .settings import ALL_TO_ALL, GATHER, Setting

Tensors = tuple[torch.Tensor, ...]
Sent = dict[str, list[int]]


class Way(NamedTuple):
    """One rival.

    Attributes:
        forward: Function from leaves to outputs; autograd runs backward with the gradients
            `upstream`.
        truth: Correct outputs, then correct gradients of the leaves.
        says: Description for the page.
    """

    leaves: Tensors
    forward: Callable[..., Sequence[torch.Tensor]]
    upstream: Tensors
    truth: Tensors
    sent: Sent
    says: str = ""


def shared_heads(setting: Setting, size: int, rank: int, module: Any | None) -> Way:
    """Return the all-to-all before and after the layer, without the layer."""
    to_heads, from_heads = exchange.exchanges(setting, module)
    in_sections, out_sections = exchange.sections_of(setting), (setting.heads * setting.width,)
    own_rows, all_rows = maps.rows_of(setting, size, rank), torch.arange(setting.tokens * size)

    def tensors(sections: Sequence[int], salt: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's rows of all channels, and all rows of its channels."""
        channels = exchange.owned(setting, size, rank, sections)
        whole = torch.arange(sum(sections))
        return exchange.numbers(own_rows, whole, salt), exchange.numbers(all_rows, channels, salt)

    (x, heads), (out, head_out) = tensors(in_sections, 0), tensors(out_sections, 1)
    (dx, dheads), (dout, dhead_out) = tensors(in_sections, 2), tensors(out_sections, 3)
    input_bytes, output_bytes = setting.exchanged(size)
    sent = [0 if peer == rank else input_bytes + output_bytes for peer in range(size)]
    return Way(
        (x, head_out), lambda a, b: (to_heads(a), from_heads(b)), (dheads, dout),
        (heads, out, dx, dhead_out), dict.fromkeys(PASSES, sent),
        exchange.MEGATRON if module else exchange.TORCH,
    )  # fmt: skip


def all_gather(setting: Setting, size: int, rank: int) -> Way:
    """Return gloo's all-gather, a ring in which each rank passes on what it received."""
    chain, share = maps.chains_of(setting, size), maps.share(setting, size, rank)
    slots, hops = gathered.slots(chain), size - 1
    states, transitions = setting.state_bytes, setting.transition_bytes
    sent = {name: [0] * size for name in PASSES}
    sent["forward"][(rank + 1) % size] = hops * slots * (states + transitions)
    sent["backward"][(rank + 1) % size] = hops * slots * states
    return Way(
        (share.transition, share.increment),
        lambda a, b: (gathered.scan(chain, a, b),),
        (share.upstream,),
        share.truth,
        sent,
    )


def reach(way: Way) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return new leaves, and the results of forward."""
    leaves = [x.detach().requires_grad_() for x in way.leaves]
    return leaves, tuple(way.forward(*leaves))


def make(setting: Setting, rival: str, rank: int, module: Any | None) -> Way | None:
    """Return a rival that is not ours; None for other names."""
    size = dist.get_world_size()
    if rival == ALL_TO_ALL:
        return shared_heads(setting, size, rank, module)
    if rival == GATHER:
        return all_gather(setting, size, rank)
    return None
