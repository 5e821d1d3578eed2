# SPDX-License-Identifier: Apache-2.0
"""Plans of operations on chains: linear attention, state scan and short convolution.

A chain is all pieces of a document in order; a piece is a run of consecutive positions on one rank.
To make a plan, the ranks compare their arguments in one all-gather. This module resolves algorithm
"auto". `request` checks the arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
    check_reverse_gates,
    check_tensor,
    check_together,
    default,
    described,
    is_finite,
    request_of,
    sequence_of_rows,
    spread,
)
from .scan import DirectedScan, FinalStates, ScanCall, ScanJob

INPUTS = ("q", "k", "v", "decay", "beta", "reverse_decay", "reverse_beta")


@dataclass(frozen=True)
class LinearPlan:
    """Precomputed data for `linear_attention`, `state_scan` and `short_convolution` on one rank.

    `prepare_linear` makes a plan.

    Attributes:
        groups: Groups of the rank.
        sequence: Layout, length, documents and direction.
        device: Device of the tensors.
        signature: Shape and dtype of each tensor, by name.
        states: Shape and dtype of the states that are sent; None if only rows of a convolution are
            sent.
        local: Form, kernel and scale of linear attention; None if another operation made the plan.
        algorithm: Algorithm that runs.
        why: Reason for the choice of the algorithm if it was "auto", otherwise empty.
        job: Work of this rank in the scan. None for a tree, or if no states are sent.
        facts: Values that are the same on all ranks.
        identity: Digest of `facts`.
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
        """Layout of the positions over the ranks."""
        return self.sequence.layout

    @property
    def chains(self) -> Chains:
        """Pieces of all documents, on all ranks."""
        return chains_of(self.groups, self.sequence)

    @property
    def blocks(self) -> int:
        """Number of blocks into which a state is split for sending."""
        return 1 if self.job is None else self.job.forward.program.blocks.number

    def traffic(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the bytes of states that this rank sends per call, in forward and in backward.

        Both results are pairs (bytes to ranks of the same node, bytes to other nodes). Final states
        and rows of a convolution are not included.
        """
        if self.states is not None and self.sequence.tree is not None:
            near, far = (n * self.states.bytes.map for n in self.walk().sent)
            return (near, far), (near, far)
        if self.job is None or self.states is None:
            return (0, 0), (0, 0)
        blocks = self.job.forward.program.blocks
        hops_of = directions(self.groups, self.sequence, self.algorithm, blocks).hops
        sizes, topology = self.states.bytes, self.groups.topology
        sent = [sizes.sent(hops, blocks.number, topology)[self.groups.rank] for hops in hops_of]
        (a, b), (c, d) = (pair.tolist() for pair in sent)
        return (a, b), (c, d)

    @property
    def longest_message(self) -> int:
        """Bytes of the longest message of states that any rank sends, with envelope and alignment.

        The value is 0 if the plan has no scan.
        """
        if self.job is None or self.states is None:
            return 0
        blocks, finals = self.job.forward.program.blocks, self.job.finals
        tables = directions(self.groups, self.sequence, self.algorithm, blocks)
        messages = [longest_message(hops, blocks, self.states) for hops in tables.hops]
        messages.append((finals.message, len(finals.holders)))
        return max(size + count * packing.ALIGNMENT for size, count in messages) + packing.ENVELOPE

    def describe(self) -> str:
        """Return one line with the settings of the plan and the bytes that this rank sends."""
        topology = self.groups.topology
        sent = [f"{byte_size(a)} intra + {byte_size(b)} inter" for a, b in self.traffic()]
        why = f" ({self.why})" if self.why else ""
        line = [
            f"burst linear attention: algorithm {self.algorithm}{why}",
            grid_of(topology.per_node, topology.size // topology.per_node),
            f"layout {self.layout.describe()}",
        ]
        if self.sequence.reverse:
            line.append(f"reverse {self.sequence.reverse}")
        if self.local is not None:
            why = f" ({self.local.why})" if self.local.why else ""
            line += [f"form {self.local.form.name}", f"kernel {self.local.kernel}{why}"]
        if self.states is not None:
            heads, rows, columns = self.states.sizes
            line += [f"states {heads} x {rows} x {columns} in {self.blocks} blocks"]
            rank = self.groups.rank
            line += [f"bytes per layer of rank {rank}: forward {sent[0]}, backward {sent[1]}"]
        return " | ".join(line)

    def check(self, tensors: dict[str, Any]) -> None:
        """Raise ValueError unless the plan was made for tensors of these shapes and dtypes.

        Args:
            tensors: Tensor arguments of the operation by name; None for an argument that is not
                passed.
        """
        for name, expected in self.signature:
            tensor = tensors[name]
            dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if tensor is not None and not dense:
                raise ValueError(f"{name} must be a tensor, and not sparse, got {tensor!r:.100}")
            if described(tensor) != expected or (
                tensor is not None and tensor.device != self.device
            ):
                raise ValueError(
                    f"plan: made for {name} {expected} on {self.device}, got {described(tensor)}"
                    + (f" on {tensor.device}" if tensor is not None else "")
                    + "; call mb.prepare_linear for these tensors"
                )

    def cut(self, final: bool) -> RankPieces:
        """Return the lengths of this rank's pieces, and which of them need maps.

        Args:
            final: True if final states are needed.
        """
        chains = self.chains
        own = chains.of(self.groups.rank)
        mapped = (True if final else not ends for ends in chains.ends[own].tolist())
        return RankPieces(tuple(chains.table[own, 2].tolist()), tuple(mapped))

    def window(self, width: int) -> ConvolutionWindow:
        """Return the exchange of rows for a convolution of this width."""
        return window(self.groups, self.sequence, width, self.device)

    def walk(self) -> TreeWalk:
        """Return the exchange of maps along the tree of the sequence."""
        return walk(self.groups, self.sequence, self.device)

    def begin(self, label: object, initial: bool, final: bool) -> ScanCall:
        """Start a call with a scan, and return its data for `StateScan`.

        Args:
            label: Label of the call.
            initial: True if there are initial states.
            final: True if final states are needed.
        """
        assert self.job is not None
        return ScanCall(self.job, self.call(label, initial, final), final)

    def call(self, label: object, *choices: bool) -> CallTag:
        """Start a call and return the tag of its messages.

        Args:
            label: Label of the call.
            *choices: Arguments that the plan does not contain and that must be the same on all
                ranks.
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
    reverse: bool | Literal["both"] | None = None,
    reverse_decay: Any = None,
    reverse_beta: Any = None,
    rates: Any = None,
) -> LinearPlan:
    """Make a plan: check the arguments of `linear_attention` on all ranks, and resolve "auto".

    The plan is valid for `mb.linear_attention` with tensors of the same shapes. For the same rows,
    documents and layout it is also valid for `mb.short_convolution` and, if states have the same
    shapes, for `mb.state_scan`. Make one plan per micro-batch and use it in every layer with these
    shapes.

    The call is a collective: every rank of `groups` must call it. The call performs one all-gather
    of 1.3 KB per rank on the host. The first call creates a process group of all ranks.

    Args:
        q: Same as in `linear_attention`; of all tensors only shape, dtype, device and
            `requires_grad` are read.
        k: Same as in `linear_attention`.
        v: Same as in `linear_attention`.
        decay: Same as in `linear_attention`.
        beta: Same as in `linear_attention`.
        form: Same as in `linear_attention`.
        cu_seqlens: Same as in `linear_attention`.
        scale: Same as in `linear_attention`.
        algorithm: Same as in `linear_attention`.
        kernel: Same as in `linear_attention`.
        groups: Groups of the ranks.
        layout: Same as in `linear_attention`.
        tree: Same as in `linear_attention`.
        reverse: Same as in `linear_attention`. With True or "both", the plan is valid only for
            `mb.linear_attention`.
        reverse_decay: Same as in `linear_attention`.
        reverse_beta: Same as in `linear_attention`.
        rates: Same as in `linear_attention`.

    Returns:
        The plan.

    Raises:
        ValueError: An argument is invalid or differs between ranks; every rank raises the same
            error.
    """
    check_groups(groups)
    assert groups is not None
    options = Options.of(layout, cu_seqlens, algorithm, rates, tree, reverse)
    operation = LinearAttentionOperation(
        groups=groups, options=options,
        tensors={
            "q": q, "k": k, "v": v, "decay": decay, "beta": beta, "reverse_decay": reverse_decay,
            "reverse_beta": reverse_beta,
        },
        form=default(form, "auto"), kernel=default(kernel, "auto"), scale=scale,
    )  # fmt: skip
    return prepared(operation)


@dataclass(frozen=True, kw_only=True)
class ChainOperation(Operation[ChainRequest, LinearPlan]):
    """Call of an operation on chains (the pieces of each document in order), on one rank.

    Attributes:
        groups: Groups of the rank.
        options: Keywords of the call.
        label: Label of the call for which the plan is made.
    """

    groups: Groups
    options: Options
    label: object = None

    @abstractmethod
    def request(self) -> ChainRequest:
        """Check the arguments of this rank, and return them."""

    def check(self) -> ChainRequest:
        self.groups.check()
        check_label(self.label)
        return self.request()

    def agree(self, facts: Facts | ValueError) -> None:
        self.groups.agree(facts)

    def build(self, request: ChainRequest) -> LinearPlan:
        chosen, facts = _choose_algorithm(request, self.groups), request.facts
        algorithm, why, job = request.options.algorithm, "", None
        if chosen is not None:
            algorithm, why = chosen.algorithm, chosen.why
            job = _job(request, self.groups, chosen.tables)
            facts = facts | {
                "algorithm and blocks": (algorithm, chosen.blocks.number),
                "digest of tables": chosen.tables.digest,
            }
        elif request.sequence.tree is not None and algorithm == "auto":
            algorithm, why = "all_gather", "auto: the only algorithm for trees"
        return LinearPlan(
            groups=self.groups, sequence=request.sequence, device=request.device,
            signature=request.signature, states=request.states, local=request.local,
            algorithm=algorithm, why=why, job=job, facts=facts, identity=identity(facts),
        )  # fmt: skip

    def connect(self, plan: LinearPlan) -> None:
        if plan.device.type == "cpu":  # otherwise buffers have exactly the size of a message
            self.groups.expect(plan.longest_message)
        self.groups.connect([GRID], plan.device)


@dataclass(frozen=True, kw_only=True)
class LinearAttentionOperation(ChainOperation):
    """Call of `linear_attention` on one rank, with its arguments; `tensors` has them by name."""

    tensors: dict[str, Any]
    form: str
    kernel: str
    scale: float | None
    return_final_state: bool = False

    def request(self) -> ChainRequest:
        initial = self.tensors.get("initial_state")
        tensors: dict[str, Any] = {name: self.tensors.get(name) for name in INPUTS}
        q, k, v, decay, beta = (tensors[name] for name in INPUTS[:5])
        check_tensor("q", q, {"s, b, g, d": (None,) * 4})
        check_tensor("k", k, {"s, b, g, d": tuple(q.shape)})
        rows, batch, key_heads, width = q.shape
        check_tensor("v", v, {"s, b, h, w": (rows, batch, None, None)})
        heads, columns = v.shape[2:]
        if heads % key_heads:
            raise ValueError(
                f"v: the {key_heads} heads of q and k must divide the heads of v, got {heads}"
            )
        chosen_form = forms.select_form(decay, beta, self.form)
        per_head = (rows, batch, heads)
        if decay is not None:
            shapes = {"s, b, h": per_head, "s, b, h, d": (*per_head, width), "h": (heads,)}
            check_tensor("decay", decay, shapes)
        if beta is not None:
            check_tensor("beta", beta, {"s, b, h": per_head})
        check_reverse_gates(self.options.reverse, tensors)
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
        kernel, why = registry.choose(self.kernel, chosen_form, inputs)
        kind = "matrix" if chosen_form.delta else chosen_form.decay
        states = States(batch, (heads, width, columns), kind, accumulation_dtype(v.dtype))
        local = LocalWork(chosen_form, kernel, why, factor)
        extra: Facts = {"form": chosen_form.name, "kernel": kernel, "scale": factor}
        tensors["initial_state"] = initial
        return request_of(
            self.groups, sequence, tensors, states, local, self.options, extra,
            self.return_final_state,
        )  # fmt: skip


class _AlgorithmChoice(NamedTuple):
    """Algorithm of a scan, why "auto" selected it (or empty), blocks of a state, and tables."""

    algorithm: str
    why: str
    blocks: StateBlocks
    tables: Directions


def _choose_algorithm(request: ChainRequest, groups: Groups) -> _AlgorithmChoice | None:
    """Return the algorithm of a request; None for a tree, or if no states are sent."""
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
    return _AlgorithmChoice(name, why, blocks, directions(groups, request.sequence, name, blocks))


def _job(request: ChainRequest, groups: Groups, tables: Directions) -> ScanJob:
    states, device = request.states, request.device
    assert states is not None
    forward, backward = (
        DirectedScan(groups, program, states, device, name)
        for program, name in zip(tables.programs, ("forward", "backward"), strict=True)
    )
    chains = chains_of(groups, request.sequence)
    last = np.flatnonzero(chains.ends)
    holder = dict(zip(chains.document[last].tolist(), chains.rank[last].tolist(), strict=True))
    holders = tuple(holder.get(document) for document in range(chains.documents))
    return ScanJob(groups, forward, backward, FinalStates(groups, holders, states, device))
