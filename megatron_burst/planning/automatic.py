# SPDX-License-Identifier: Apache-2.0
"""Algorithm "auto": measure rates, and choose the settings with the shortest predicted time.

This module is imported only for calls with "auto", because other calls need neither the simulator
nor measurements.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..autotune import measure
from ..autotune.candidates import FixedSettings, Workload
from ..autotune.rates import Rates
from ..autotune.select import TIE, Choice, best
from ..comm.consensus import attempt
from ..comm.groups import Groups
from ..layout import Replicated
from ..schedule.cost import Sizes
from .validate import WIRE, Request

CHOICES_KEPT = 64  # cached choices per grid: one per kind of layer and batch of documents


def resolve(request: Request, groups: Groups, rates: Rates | None) -> Request | ValueError:
    """Choose values for the settings of an attention call that are "auto". A collective call.

    Args:
        request: Checked arguments of this rank.
        groups: Groups of the call.
        rates: Rates of links and compute, or None. Missing rates are measured.

    Returns:
        A copy of `request` with the chosen settings in the options and facts; or the error of this
        rank.
    """
    with groups.running():
        stated = rates_of(request, groups, rates)
    choice = attempt(_choice, request, groups, stated)
    if isinstance(choice, ValueError):
        return choice
    options, facts = replace(request.options, **choice.keywords), {"chosen": choice.keywords}
    wire = WIRE[choice.wire] if choice.wire else request.wire_dtype
    options = replace(options, grad_wire_dtype=wire)
    return replace(
        request, options=options, wire_dtype=wire, facts=request.facts | facts, choice=choice
    )


def rates_of(request: Request, groups: Groups, rates: Rates | None) -> Rates:
    """Return `rates`, or the cached rates of `groups`; measure missing rates. A collective call."""
    rates = rates or groups.cache.get("rates")
    if rates is None:
        rates = measure.links(groups, request.tensors[0].device)
    if rates.compute is not None:
        return rates
    speed = measure.kernel_speed(groups, request.kernel, request.scoring, *request.tensors)
    return replace(rates, compute=speed[0], launch=speed[1])


def _choice(request: Request, groups: Groups, rates: Rates) -> Choice:
    """Return the fastest settings, including the wire dtype if `grad_wire_dtype` is "auto"."""
    options = request.options
    choice = _fastest(request, request.sizes, groups, rates)
    if options.grad_wire_dtype != "auto" or request.wire_dtype == torch.float64:
        return choice
    if request.tensors[0].dtype == torch.bfloat16:
        # bf16 rounds sums at every hop, so use it only if it is faster by more than TIE.
        sizes = replace(request.sizes, wire_itemsize=torch.bfloat16.itemsize)
        narrow = _fastest(request, sizes, groups, rates)
        if narrow.seconds < choice.seconds * (1 - TIE):
            return replace(narrow, wire="bf16")
    return replace(choice, wire="fp32")  # explicit, so that `Choice.keywords` selects it


def _fastest(request: Request, sizes: Sizes, groups: Groups, rates: Rates) -> Choice:
    options = request.options
    assert not isinstance(request.key_layout, Replicated)
    workload = Workload(
        sizes, request.mask, request.layout, options.sequence_chunks, options.row_blocks,
        key_layout=request.key_layout,
        streams=request.relay_stream,
    )  # fmt: skip
    side = None if options.side == "auto" else options.side
    fixed = FixedSettings(side=side, head_chunks=options.head_chunks)
    return fastest(workload, fixed, groups, rates)


def fastest(workload: Workload, fixed: FixedSettings, groups: Groups, rates: Rates) -> Choice:
    """Return the settings with the shortest predicted time. Does not communicate.

    Args:
        workload: Sizes, mask and layout of the call.
        fixed: Settings that the user chose.
        groups: Groups of the call. They cache the result.
        rates: Rates of links and compute.
    """
    choices, key = groups.recent("choices", CHOICES_KEPT), (workload, fixed, rates)
    choice = choices.find(key)
    if choice is None:
        choice = choices.keep(key, best(workload, [groups.topology], rates, fixed))
    return choice
