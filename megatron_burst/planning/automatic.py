# SPDX-License-Identifier: Apache-2.0
"""Algorithm "auto": the rates of these groups, and the settings that are predicted to be fastest.

Imported where a call asks for it: what simulates schedules and measures links is part of no other
run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ..autotune import measure
from ..autotune.candidates import Fixed, Workload
from ..autotune.rates import Rates
from ..autotune.select import TIE, Choice, best
from ..comm.consensus import attempt
from ..comm.groups import Groups
from ..comm.recent import Recent
from ..schedule.cost import Sizes
from .validate import WIRE, Request

CHOICES_KEPT = 64  # of each grid: kinds of layers times batches of different documents


def resolve(
    request: Request, groups: Groups, rates: Rates | None
) -> tuple[Request, Choice] | ValueError:
    """The request with the algorithm, side and head chunks that were chosen, in its facts too.

    Collective: measures what `rates` does not state. The error is this rank's own.
    """
    with groups.running():
        stated = rates_of(request, groups, rates)
    choice = attempt(partial(_choice, request, groups, stated))
    if isinstance(choice, ValueError):
        return choice
    options, facts = replace(request.options, **choice.call), {"chosen": choice.call}
    wire = WIRE[choice.wire] if choice.wire else request.wire_dtype
    options = replace(options, grad_wire_dtype=wire)
    return replace(request, options=options, wire_dtype=wire, facts=request.facts | facts), choice


def rates_of(request: Request, groups: Groups, rates: Rates | None) -> Rates:
    """All rates: those given, else those known of these groups, else measured now. Collective."""
    rates = rates or groups.cache.get("rates")
    if rates is None:
        rates = measure.links(groups, request.tensors[0].device)
    if rates.compute is not None:
        return rates
    speed = measure.kernel_speed(groups, request.kernel, request.scoring, *request.tensors)
    return replace(rates, compute=speed[0], launch=speed[1])


def _choice(request: Request, groups: Groups, rates: Rates) -> Choice:
    """What is predicted to be fastest on these groups; remembered."""
    options = request.options
    side = None if options.side == "auto" else options.side
    fixed = Fixed(side=side, head_chunks=options.head_chunks)

    def fastest(sizes: Sizes) -> Choice:
        workload = Workload(
            sizes, request.mask, request.layout, options.sequence_chunks, options.row_blocks
        )
        choices: Recent = groups.cache.setdefault("choices", Recent(CHOICES_KEPT))
        return choices.of(
            (workload, fixed, rates), lambda: best(workload, [groups.topology], rates, fixed)
        )

    choice = fastest(request.sizes)
    if options.grad_wire_dtype != "auto" or request.wire_dtype == torch.float64:
        return choice
    if request.tensors[0].dtype == torch.bfloat16:
        # Rounding at every hop has to gain something: a tie goes to the sums as they are.
        narrow = fastest(replace(request.sizes, wire_itemsize=torch.bfloat16.itemsize))
        if narrow.seconds < choice.seconds * (1 - TIE):
            return replace(narrow, wire="bf16")
    return replace(choice, wire="fp32")  # named, so that `call` can be given again
