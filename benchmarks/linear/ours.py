"""mb.state_scan with any of its algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

import megatron_burst as mb
from benchmarks.cluster.mail import PASSES
from megatron_burst.layout.routes import preceding

from . import exchange, maps
from .settings import ACTIVATION, Setting
from .ways import Sent, Way

FORMS = {"scalar": "scalar_decay", "vector": "vector_decay", "matrix": "gated_delta_rule"}
CONVOLVED, WIDTH = 16, 4  # tokens per rank, taps


def way(setting: Setting, algorithm: str, groups: mb.Groups, rates: mb.Rates | None) -> Way:
    """Return the scan of a setting's maps; "auto" chooses by `rates`. Collective."""
    share = maps.share(setting, groups.size, groups.rank)
    plan = plan_of(setting, algorithm, groups, rates)

    def forward(transition: torch.Tensor, increment: torch.Tensor) -> Sequence[torch.Tensor]:
        return (mb.state_scan(transition, increment, plan=plan),)

    sent = sent_by(plan)
    return Way(
        (share.transition, share.increment),
        forward,
        (share.upstream,),
        share.truth,
        sent,
        says(plan),
    )


def convolution(setting: Setting, groups: mb.Groups) -> Way:
    """Return the exchange of rows before each piece that the short convolution needs. Collective.

    The number of tokens is small, so only the exchange takes time.
    """
    short = setting._replace(tokens=CONVOLVED)
    size, rank = groups.size, groups.rank
    channels = setting.convolved
    order = maps.rows_of(short, size, rank)
    positions = torch.arange(CONVOLVED * size)
    x, upstream = (
        (exchange.numbers(positions, torch.arange(channels), salt) % 8).squeeze(1).float()
        for salt in (4, 5)
    )
    weight = torch.tensor([1.0, -1.0, 2.0, 1.0]).expand(channels, WIDTH).contiguous()
    whole = x.T.requires_grad_()
    out = F.conv1d(F.pad(whole, (WIDTH - 1, 0)), weight[:, None], groups=channels)
    (grad,) = torch.autograd.grad(out, whole, upstream.T)
    own_rows = [
        t.T[order][:, None].bfloat16() for t in (whole.detach(), upstream.T, out.detach(), grad)
    ]
    plan = plan_of(short, "ring", groups, None)
    chain = maps.chains_of(short, size)
    row = channels * ACTIVATION
    sent_forward = [len(rows) * row for rows in preceding(chain, WIDTH, rank).sends]
    sent_backward = [len(preceding(chain, WIDTH, peer).sends[rank]) * row for peer in range(size)]
    sent_forward[rank] = sent_backward[rank] = 0
    kernel = weight.bfloat16()
    return Way(
        (own_rows[0],), lambda rows: (mb.short_convolution(rows, kernel, plan=plan),),
        (own_rows[1],), (own_rows[2], own_rows[3]),
        dict(zip(PASSES, (sent_forward, sent_backward), strict=True)),
    )  # fmt: skip


def plan_of(setting: Setting, algorithm: str, groups: mb.Groups, rates: mb.Rates | None) -> Any:
    """Return the plan of a layer with these states; activations only have shapes."""
    row = setting.tokens, 1, setting.heads

    def like(*sizes: int) -> torch.Tensor:
        return torch.zeros((), dtype=torch.bfloat16).expand(*row, *sizes).requires_grad_()

    q, k, v = (like(setting.width) for _ in range(3))
    decay = like(setting.width) if setting.form == "vector" else like()
    return mb.prepare_linear(
        q, k, v, decay=decay, beta=like() if setting.form == "matrix" else None,
        form=FORMS[setting.form], algorithm=algorithm, groups=groups, layout=setting.layout,
        rates=rates if algorithm == "auto" else None, kernel="torch",
    )  # fmt: skip


def says(plan: Any) -> str:
    """Return for example "scan in 8 blocks", and the choice of "auto" with its reason."""
    cut = f" in {plan.blocks} blocks" if plan.blocks > 1 else ""
    return plan.why.removeprefix("auto: ") or f"{plan.algorithm}{cut}"


def sent_by(plan: Any) -> Sent:
    """Return bytes that this rank sends to each other rank, by pass, from the plan's messages."""
    sent: Sent = {}
    for name, scan in zip(PASSES, (plan.job.forward, plan.job.backward), strict=True):
        program = scan.program
        sent[name] = [0] * plan.groups.size
        for program_round in program.rounds:
            for parcel in program_round.sends:
                numbers = sum(s.numel() for hop in parcel.hops
                              for s in program.shapes(hop, plan.states))  # fmt: skip
                sent[name][parcel.peer] += numbers * plan.states.dtype.itemsize
    return sent
