"""What runs, decided and agreed on, for operations on chains; and which calls it was made for.

Made by `prepare`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.calls import check_label
from ..comm.groups import Groups, InProcessGroups
from ..comm.packing import CallTag
from ..layout.chains import Chains
from ..layout.layouts import Layout
from ..units import byte_size
from .function import Asked, ScanJob
from .inputs import Cut
from .program import States
from .request import Local, described
from .tables import Sequence, Window, chains_of, directions, window


@dataclass(frozen=True)
class LinearPlan:
    """Everything that calls of `linear_attention`, `state_scan` and `short_convolution` on one rank
    need besides their tensors, made by `prepare_linear`.

    groups: the rank's. sequence: layout, length and documents. device, signature: of the tensors it
    was made for, by name. states: what travels, None if only rows of a convolution do. local: form,
    kernel and scale of linear attention, None for a plan of another operation. algorithm: which
    runs, and why, if it was left open. job: what this rank executes. identity: digest of what all
    ranks agreed on, the same on each.
    """

    groups: Groups
    sequence: Sequence
    device: torch.device
    signature: tuple[tuple[str, Any], ...]
    states: States | None
    local: Local | None
    algorithm: str
    why: str
    job: ScanJob | None
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
        node, to others); final states and rows of a convolution come on top."""
        if self.job is None or self.states is None:
            return (0, 0), (0, 0)
        blocks = self.job.forward.program.blocks
        both = directions(self.groups, self.sequence, self.algorithm, blocks).hops
        sizes, topology = self.states.bytes, self.groups.topology
        sent = [sizes.sent(hops, blocks.number, topology)[self.groups.rank] for hops in both]
        (a, b), (c, d) = (each.tolist() for each in sent)
        return (a, b), (c, d)

    def describe(self) -> str:
        """What runs, on one line: choices, and the bytes of states per layer and rank."""
        topology = self.groups.topology
        there, back = (f"{byte_size(a)} intra + {byte_size(b)} inter" for a, b in self.traffic())
        line = [
            f"burst linear attention: algorithm {self.algorithm}"
            + f" ({self.why})" * bool(self.why),
            f"{topology.size // topology.per_node} nodes x {topology.per_node} ranks",
            f"layout {self.layout.describe()}",
        ]
        if self.local is not None:
            line += [f"form {self.local.form.name}", f"kernel {self.local.kernel}"]
        if self.states is not None:
            heads, rows, columns = self.states.sizes
            line += [f"states {heads} x {rows} x {columns} in {self.blocks} blocks"]
            line += [f"bytes per layer and rank: forward {there}, backward {back}"]
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

    def cut(self, final: bool) -> Cut:
        """The pieces of this rank. final: are final states wanted?"""
        chains = self.chains
        own = chains.of(self.groups.rank)
        mapped = (True if final else not ends for ends in chains.ends[own].tolist())
        return Cut(tuple(chains.table[own, 2].tolist()), tuple(mapped))

    def window(self, width: int) -> Window:
        """How rows come to a convolution of this width."""
        return window(self.groups, self.sequence, width, self.device)

    def begin(self, label: object, initial: bool, final: bool) -> Asked:
        """A scan begins: what it needs beside tensors. label: of the call; initial, final: are
        there initial states, are final ones wanted?"""
        assert self.job is not None
        return Asked(self.job, self.call(label, initial, final), final)

    def call(self, label: object, *choices: bool) -> CallTag:
        """A call begins: the tag of its messages. label: of the call; choices: what the plan leaves
        open, and ranks have to share."""
        check_label(label)
        calls = self.groups.calls
        return calls.forward(self.identity, (label, *map(int, choices)), False)


@dataclass(frozen=True)
class InProcessLinearPlan:
    """What `prepare_linear` makes with `Groups.in_process`: `ranks`, the plan of each.

    What all of them share is an attribute here too: `algorithm`, `describe()`, and so on.
    """

    groups: InProcessGroups
    ranks: Many[LinearPlan]

    def __getattr__(self, name: str) -> Any:
        if name == "ranks" or name.startswith("__"):  # asked for by copies that are not filled yet
            raise AttributeError(name)
        return getattr(self.ranks[0], name)
