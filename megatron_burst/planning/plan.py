"""What runs, decided and agreed on: a plan, and which calls it was made for.

Made by `prepare` and run by `attention`. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..execution.chunked import ChunkedCall
from ..execution.function import Kept
from ..execution.visiting import Host
from ..kernels.base import Kernel
from ..recompute.checkpoint import Frame
from .planned import Planned
from .tensors import (
    check_keys,
    check_max_logits,
    check_shapes,
    check_sink,
    signature,
)


@dataclass(frozen=True)
class Plan(Planned):
    """Everything a call of `attention` on one rank needs besides its tensors, made by `prepare`.

    groups: the rank's. options: as given, with every "auto" and default resolved. layout, mask:
    the objects that these name. signature: shapes, dtypes and device of q, k, v. sizes: this rank's
    share in its ring. passes: the schedules of forward and backward, of every chunk of rows.
    identity: digest of what all ranks agreed on, the same on each; digest: of the tables of the
    schedules. job: what this rank executes.
    again: of every chunk what is computed again, if calls keep something until then. choice:
    why, where the algorithm was left open.
    """

    def matches(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Do q, k, v have the shapes, dtypes and device that the plan was made for, and need no
        gradient that it did not foresee?"""
        unforeseen = [torch.is_grad_enabled() and not planned for planned in self.job.needs_grad]
        return signature(q, k, v) == self.signature and not any(
            t.requires_grad and new for t, new in zip((q, k, v), unforeseen, strict=True)
        )

    def check(
        self, q: Any, k: Any, v: Any, sink: torch.Tensor | None, max_logits: torch.Tensor | None
    ) -> None:
        """Raise ValueError unless the plan was made for a call with these tensors.

        q, k, v, sink, max_logits: as `attention` takes them.
        """
        if not all(isinstance(t, torch.Tensor) for t in (q, k, v)):
            check_shapes(q, k, v)
        if not self.matches(q, k, v):
            raise ValueError(
                f"plan: made for {self.signature} and gradients of (q, k, v) {self.needs_grad}; "
                f"got {signature(q, k, v)}; call mb.prepare for these tensors"
            )
        self._check_rest(q, k, v, sink, max_logits)
        if self.options.visiting == "host":
            raise ValueError(
                "plan: made with visiting='host', which is for plan.chunked; mb.attention takes "
                "plans with 'ring'"
            )

    def _check_rest(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        max_logits: torch.Tensor | None,
    ) -> None:
        if torch.are_deterministic_algorithms_enabled():  # perhaps not yet when it was planned
            kernel = self.kernel
            reason = kernel.refusal(q, k, v) if kernel.deterministic else "is not deterministic"
            if reason is not None:
                raise ValueError(
                    f"plan: kernel {kernel.name} {reason}, and torch.use_deterministic_algorithms("
                    "True) was called; call mb.prepare again"
                )
        check_sink(sink, q)
        check_max_logits(max_logits, q)
        if max_logits is not None and not self.kernel.maximum:
            raise ValueError(
                f"max_logits: kernel {self.kernel.name} of this plan cannot tell the largest "
                "scores; pass max_logits to mb.prepare too"
            )

    def keeps(self, frame: Frame | None) -> Kept | None:
        """Where a call leaves or finds results: in `frame`, that of the checkpoint around it.

        Raises ValueError if the checkpoint wants what was not planned.
        """
        planned = self.recompute.keep if self.recompute is not None else None
        if frame is None or (frame.keep is None and planned is None):
            return None
        if frame.keep not in (None, planned):
            raise ValueError(
                f"plan: made with store={planned}, and the checkpoint around this call keeps "
                f"{frame.keep}; make it with mb.prepare(..., store={frame.keep})"
            )
        return Kept(frame, self.call)

    def with_kernel(self, kernel: Kernel) -> Plan:
        """The same plan on another kernel that takes the work of this one's; for measuring."""
        return replace(self, job=replace(self.job, kernel=kernel))

    def chunked(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: Host | None = None,
    ) -> ChunkedCall:
        """One call whose queries come chunk by chunk, see `ChunkedCall`; a collective.

        k, v of this rank's whole shard, as the plan was made for; sink, label, max_logits as
        `mb.attention` takes them. host: `mb.HostMemory`, for a plan with visiting="host". Bytes are
        those of `traffic`; where ranks share heads and the backward is that of another call, that
        call sends k and v again. Raises ValueError for tensors of other shapes, for a plan with a
        kv_cache, and for a host that the plan does not ask for, or none where it does.
        """
        self.groups.check()
        check_keys(k, v, self.signature)
        q = k.new_empty(1).expand(self.signature[0][0])  # stands in for that of all chunks
        self._check_rest(q, k, v, sink, max_logits)
        if self.job.forward.kept:
            raise ValueError(
                f"plan: made with kv_cache={self.options.kv_cache}, and calls in chunks keep no "
                "keys; leave it 0"
            )
        if (self.options.visiting == "host") != (host is not None):
            raise ValueError(
                f"host: the plan was made with visiting={self.options.visiting!r}, got {host!r}; "
                "'host' needs mb.HostMemory(...), and 'ring' none"
            )
        keys = k.detach().contiguous(), v.detach().contiguous()
        sink = None if sink is None else sink.detach()
        return ChunkedCall(
            self.job, self.groups, self.identity, keys, sink, label, max_logits, host
        )
