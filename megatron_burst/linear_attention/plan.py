# SPDX-License-Identifier: Apache-2.0
"""Plans of operations on chains: made of a request, agreed on by all ranks with one gather.

Resolves algorithm "auto". What is refused is `request`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..comm import packing
from ..comm.consensus import Facts, identity
from ..comm.groups import Groups, check_groups, check_label
from ..comm.operation import Operation, prepared
from ..comm.packing import CallTag
from ..comm.rows import GRID
from ..kernels.online_softmax import accumulation_dtype
from ..layout.layouts import Layout
from ..layout.pieces import Chains
from ..schedule.scans.blocks import StateBlocks, cut
from ..units import byte_size, grid_of
from . import forms
from .kernels import registry
from .kernels.base import LinearInputs, RankPieces
from .program import (
    ConvolutionWindow,
    Directions,
    PackedSequence,
    States,
    TreeWalk,
    chains_of,
    choice_of,
    directions,
    longest_message,
    walk,
    window,
)
from .request import (
    ChainRequest,
    LocalWork,
    Options,
    check_device,
    check_tensor,
    check_together,
    default,
    described,
    is_finite,
    request_of,
    sequence_of_rows,
    spread,
)
from .scan import DirectedScan, Finals, ScanCall, ScanJob


@dataclass(frozen=True)
class LinearPlan:
    """Everything that calls of `linear_attention`, `state_scan` and `short_convolution` on one rank
    need besides their tensors, made by `prepare_linear`.

    groups: the rank's. sequence: layout, length and documents. device, signature: of the tensors it
    was made for, by name. states: what travels, None if only rows of a convolution do. local: form,
    kernel and scale of linear attention, None for a plan of another operation. algorithm: which
    runs, and why, if it was left open. job: what this rank executes. facts: what all ranks agreed
    on, the same on each; identity: digest of it.
    """

    groups: Groups
    sequence: PackedSequence
    device: torch.device
    signature: tuple[tuple[str, Any], ...]
    states: States | None
    local: LocalWork | None
    algorithm: str
    why: str
    job: ScanJob | None
    facts: Facts
    identity: int

    @property
    def layout(self) -> Layout:
        """Which positions each rank holds."""
        return self.sequence.layout

    @property
    def chains(self) -> Chains:
        """The pieces of all documents."""
        return chains_of(self.groups, self.sequence)

    @property
    def blocks(self) -> int:
        """Into how many parts a state is cut on its way."""
        return 1 if self.job is None else self.job.forward.program.blocks.number

    def traffic(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes of states that this rank sends per call, forward and backward, each (within its
        node, to others); final states and rows of a convolution come on top.
        """
        if self.states is not None and self.sequence.tree is not None:
            near, far = (n * self.states.bytes.map for n in self.walk().sent)
            return (near, far), (near, far)
        if self.job is None or self.states is None:
            return (0, 0), (0, 0)
        blocks = self.job.forward.program.blocks
        both = directions(self.groups, self.sequence, self.algorithm, blocks).hops
        sizes, topology = self.states.bytes, self.groups.topology
        sent = [sizes.sent(hops, blocks.number, topology)[self.groups.rank] for hops in both]
        (a, b), (c, d) = (each.tolist() for each in sent)
        return (a, b), (c, d)

    @property
    def longest_message(self) -> int:
        """Bytes of the longest message of states that any rank sends, with envelope and alignment;
        0 if the plan has no scan.
        """
        if self.job is None or self.states is None:
            return 0
        blocks, finals = self.job.forward.program.blocks, self.job.finals
        both = directions(self.groups, self.sequence, self.algorithm, blocks)
        messages = [longest_message(hops, blocks, self.states) for hops in both.hops]
        messages.append((finals.message, len(finals.holders)))
        return max(size + count * packing.ALIGNMENT for size, count in messages) + packing.ENVELOPE

    def describe(self) -> str:
        """What runs, on one line: choices, and the bytes of states per layer and rank."""
        topology = self.groups.topology
        sent = [f"{byte_size(a)} intra + {byte_size(b)} inter" for a, b in self.traffic()]
        why = f" ({self.why})" if self.why else ""
        line = [
            f"burst linear attention: algorithm {self.algorithm}{why}",
            grid_of(topology.per_node, topology.size // topology.per_node),
            f"layout {self.layout.describe()}",
        ]
        if self.local is not None:
            why = f" ({self.local.why})" if self.local.why else ""
            line += [f"form {self.local.form.name}", f"kernel {self.local.kernel}{why}"]
        if self.states is not None:
            heads, rows, columns = self.states.sizes
            line += [f"states {heads} x {rows} x {columns} in {self.blocks} blocks"]
            line += [f"bytes per layer and rank: forward {sent[0]}, backward {sent[1]}"]
        return " | ".join(line)

    def check(self, tensors: dict[str, Any]) -> None:
        """Raise ValueError unless the plan was made for tensors of these shapes and dtypes.

        tensors: name -> tensor or None, as the operation takes them.
        """
        for name, wanted in self.signature:
            tensor = tensors[name]
            dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if tensor is not None and not dense:
                raise ValueError(f"{name} must be a tensor, and not sparse, got {tensor!r:.100}")
            if described(tensor) != wanted or (tensor is not None and tensor.device != self.device):
                raise ValueError(
                    f"plan: made for {name} {wanted} on {self.device}, got {described(tensor)}"
                    + (f" on {tensor.device}" if tensor is not None else "")
                    + "; call mb.prepare_linear for these tensors"
                )

    def cut(self, final: bool) -> RankPieces:
        """The pieces of this rank. final: are final states wanted?"""
        chains = self.chains
        own = chains.of(self.groups.rank)
        mapped = (True if final else not ends for ends in chains.ends[own].tolist())
        return RankPieces(tuple(chains.table[own, 2].tolist()), tuple(mapped))

    def window(self, width: int) -> ConvolutionWindow:
        """How rows come to a convolution of this width."""
        return window(self.groups, self.sequence, width, self.device)

    def walk(self) -> TreeWalk:
        """How states come along a tree."""
        return walk(self.groups, self.sequence, self.device)

    def begin(self, label: object, initial: bool, final: bool) -> ScanCall:
        """A scan begins: what it needs beside tensors. label: of the call; initial, final: are
        there initial states, are final ones wanted?
        """
        assert self.job is not None
        return ScanCall(self.job, self.call(label, initial, final), final)

    def call(self, label: object, *choices: bool) -> CallTag:
        """A call begins: the tag of its messages. label: of the call; choices: what the plan leaves
        open, and ranks have to share.
        """
        check_label(label)
        calls = self.groups.calls
        return calls.forward(self.identity, (label, *map(int, choices)), False)


def prepare_linear(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    beta: Any = None,
    form: str | None = None,
    cu_seqlens: Any = None,
    scale: float | None = None,
    algorithm: str | None = None,
    kernel: str | None = None,
    groups: Groups | None,
    layout: Any = None,
    tree: Any = None,
    rates: Any = None,
) -> LinearPlan:
    """Check the arguments of `linear_attention`, on all ranks alike, and resolve every "auto".

    The plan serves `mb.linear_attention` on tensors like these, and on the same rows, documents and
    layout `mb.short_convolution` and, with states of the same shapes, `mb.state_scan`. Collective:
    every rank of `groups` must call it (one all-gather of 1.3 KB per rank on the host; the first
    makes a process group of all ranks). Make one per micro-batch and use it in every layer of the
    same shapes.

    q, k, v, decay, beta: as `linear_attention` takes them; only shapes, dtypes, device and
    `requires_grad` are read. form, cu_seqlens, scale, algorithm, kernel, layout, tree, rates: as
    there.
    Raises the same ValueError on every rank.
    """
    check_groups(groups)
    assert groups is not None
    options = Options.of(layout, cu_seqlens, algorithm, rates, tree)
    operation = LinearAttentionOperation(
        groups=groups, options=options,
        tensors={"q": q, "k": k, "v": v, "decay": decay, "beta": beta},
        form=default(form, "auto"), kernel=default(kernel, "auto"), scale=scale,
    )  # fmt: skip
    return prepared(operation)


@dataclass(frozen=True, kw_only=True)
class ChainOperation(Operation[ChainRequest, LinearPlan]):
    """A call on chains on one rank. label: of the call that the plan is made for."""

    groups: Groups
    options: Options
    label: object = None

    @abstractmethod
    def request(self) -> ChainRequest:
        """Return the checked request of this rank."""

    def check(self) -> ChainRequest:
        self.groups.check()
        check_label(self.label)
        return self.request()

    def agree(self, facts: Facts | ValueError) -> None:
        self.groups.agree(facts)

    def build(self, request: ChainRequest) -> LinearPlan:
        chosen, facts = _resolved(request, self.groups), request.facts
        algorithm, why, job = request.options.algorithm, "", None
        if chosen is not None:
            algorithm, why = chosen.algorithm, chosen.why
            job = _job(request, self.groups, chosen.tables)
            facts = facts | {
                "algorithm and blocks": (algorithm, chosen.blocks.number),
                "digest of tables": chosen.tables.digest,
            }
        elif request.sequence.tree is not None and algorithm == "auto":
            algorithm, why = "all_gather", "auto: the one that serves trees"
        return LinearPlan(
            groups=self.groups, sequence=request.sequence, device=request.device,
            signature=request.signature, states=request.states, local=request.local,
            algorithm=algorithm, why=why, job=job, facts=facts, identity=identity(facts),
        )  # fmt: skip

    def connect(self, plan: LinearPlan) -> None:
        self.groups.expect(plan.longest_message)
        self.groups.connect([GRID], plan.device)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionOperation(ChainOperation):
    """A call of `linear_attention` on one rank; its arguments. tensors: by name."""

    tensors: dict[str, Any]
    form: str
    kernel: str
    scale: float | None
    return_final_state: bool = False

    def request(self) -> ChainRequest:
        initial = self.tensors.get("initial_state")
        tensors = {name: t for name, t in self.tensors.items() if name != "initial_state"}
        q, k, v, decay, beta = (tensors[name] for name in ("q", "k", "v", "decay", "beta"))
        check_tensor("q", q, {"s, b, g, d": (None,) * 4})
        check_tensor("k", k, {"s, b, g, d": tuple(q.shape)})
        rows, batch, few, width = q.shape
        check_tensor("v", v, {"s, b, h, w": (rows, batch, None, None)})
        heads, columns = v.shape[2:]
        if heads % few:
            raise ValueError(f"v: the {few} heads of q and k must divide its heads, got {heads}")
        taken_form = forms.of(decay, beta, self.form)
        each = (rows, batch, heads)
        if decay is not None:
            shapes = {"s, b, h": each, "s, b, h, d": (*each, width), "h": (heads,)}
            check_tensor("decay", decay, shapes)
        if beta is not None:
            check_tensor("beta", beta, {"s, b, h": each})
        check_together({"q": q, "k": k, "v": v}, dtype=True)
        present = {name: t for name, t in tensors.items() if t is not None}
        check_together(present, dtype=False)
        check_device(self.groups, "q", q)
        scale = self.scale
        if scale is not None and not is_finite(scale):
            raise ValueError(f"scale must be a finite number or None, got {scale!r}")
        factor = width**-0.5 if scale is None else float(scale)
        sequence = sequence_of_rows(self.groups, q, self.options)
        inputs = LinearInputs(q, k, v, spread(decay, v), beta, factor)
        kernel, why = registry.choose(self.kernel, taken_form, inputs)
        kind = "matrix" if taken_form.delta else taken_form.decay
        states = States(batch, (heads, width, columns), kind, accumulation_dtype(v.dtype))
        local = LocalWork(taken_form, kernel, why, factor)
        more: Facts = {"form": taken_form.name, "kernel": kernel, "scale": factor}
        tensors["initial_state"] = initial
        return request_of(
            self.groups, sequence, tensors, states, local, self.options, more,
            self.return_final_state,
        )  # fmt: skip


class _Resolved(NamedTuple):
    """algorithm, why it was chosen (empty if it was given), and its tables."""

    algorithm: str
    why: str
    blocks: StateBlocks
    tables: Directions


def _resolved(request: ChainRequest, groups: Groups) -> _Resolved | None:
    """What runs for a request; None where no states travel, or along a tree."""
    states, name, rates = request.states, request.options.algorithm, request.options.rates
    if states is None or request.sequence.tree is not None:
        return None
    choice, why = choice_of(groups, request.sequence, states.bytes, name, rates), ""
    if isinstance(choice, int):
        number = choice
    else:
        name, number = choice.algorithm, choice.blocks
        why = f"auto: {choice.describe()}; at {'nominal' if rates is None else 'given'} rates"
    blocks = cut(number, *states.sizes, states.form == "matrix")
    return _Resolved(name, why, blocks, directions(groups, request.sequence, name, blocks))


def _job(request: ChainRequest, groups: Groups, both: Directions) -> ScanJob:
    states, device = request.states, request.device
    assert states is not None
    forward, backward = (
        DirectedScan(groups, one, states, device, name)
        for one, name in zip(both.programs, ("forward", "backward"), strict=True)
    )
    chains = chains_of(groups, request.sequence)
    last = np.flatnonzero(chains.ends)
    holder = dict(zip(chains.document[last].tolist(), chains.rank[last].tolist(), strict=True))
    holders = tuple(holder.get(document) for document in range(chains.documents))
    return ScanJob(groups, forward, backward, Finals(groups, holders, states, device))
