"""A call of attention whose chunks of queries the caller makes one after another.

For code that has no whole q: a layer that projects, attends and projects back chunk by chunk.
Autograd is the caller's.

Shape letters: s local rows, r rows of a chunk, b batch, h query heads, k key/value heads, d width,
w value width; p ranks that share heads.
"""

from __future__ import annotations

import torch

from ..comm.groups import Groups
from .executor import Tensors
from .function import running
from .job import Job
from .row_chunks import Chunks
from .visiting import Host

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class ChunkedCall:
    """One call of `plan.chunked` on one rank: its keys, and what its chunks have added up so far.

    Every method is a collective of the ranks of the plan, which must call the same ones in the same
    order; chunks may come in any. Nothing here is differentiated: hand in detached tensors. Keys
    and values are held until the object goes; out and lse are the caller's to keep. A forward and
    its backward may belong to two objects, made of the same keys and values.
    """

    def __init__(
        self,
        job: Job,
        groups: Groups,
        identity: int,
        keys: Tensors,
        sink: torch.Tensor | None = None,
        label: object = None,
        max_logits: torch.Tensor | None = None,
        host: Host | None = None,
    ):
        self._groups, self._device, self._job = groups, keys[0].device, job
        self._shape, self._dtype = keys[0].shape, keys[0].dtype
        self._tag = groups.calls.forward(identity, label, sink is not None)
        self._backward_begun = False
        with running(groups, self._device):
            self._chunks = Chunks(job, self._tag, keys, sink, max_logits, host=host)

    @torch.no_grad()
    def forward(
        self, c: int, q_c: torch.Tensor, stored: Tensors | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [r, b, h, w] in the dtype of q, lse) of chunk c: of q_c = q[plan.row_chunks[c]].

        Raises ValueError for a chunk that is none, or queries of another shape.

        lse, in the accumulation dtype, is as the ring has it: [r, b, h], and where p ranks share
        heads [p r, b, h / p]. stored: what `kept` returned for this chunk, if it runs again.
        """
        self._check(c, q_c)
        with running(self._groups, self._device):
            return self._chunks.forward(c, q_c.contiguous(), stored)

    @torch.no_grad()
    def kept(self, c: int, out_c: torch.Tensor, lse_c: torch.Tensor) -> Tensors:
        """Of the results of chunk c those that the plan's `store` keeps, for `forward(stored=)`."""
        return self._chunks.kept(c, out_c, lse_c)

    @torch.no_grad()
    def backward(
        self,
        c: int,
        q_c: torch.Tensor,
        out_c: torch.Tensor,
        lse_c: torch.Tensor,
        dout_c: torch.Tensor,
    ) -> torch.Tensor | None:
        """dq_c [r, b, h, d] of chunk c; dk, dv and dsink are added up here.

        q_c, out_c, lse_c: of `forward`; dout_c [r, b, h, w]. In the accumulation dtype, or in
        `grad_wire_dtype` where ranks share heads; None where q needs no gradient. ValueError as of
        `forward`.
        """
        self._check(c, q_c)
        if not self._backward_begun:
            self._groups.calls.backward(self._tag)
            self._backward_begun = True
        with running(self._groups, self._device):
            return self._chunks.backward(c, q_c.contiguous(), out_c.contiguous(), lse_c, dout_c)

    @torch.no_grad()
    def gradients(self) -> Gradients:
        """(dk [s, b, k, d], dv [s, b, k, w], dsink [h]) after the last chunk, once; each None where
        it is not needed. dtypes as of `backward`."""
        self._groups.check()
        with running(self._groups, self._device):
            return self._chunks.gradients()

    def _check(self, c: int, q_c: torch.Tensor) -> None:
        """Raise ValueError unless q_c are the queries of chunk c."""
        self._groups.check()
        job, shape = self._job, self._shape
        if not (isinstance(c, int) and 0 <= c < len(job.chunks)):
            raise ValueError(
                f"c must be a chunk of the plan, 0 to {len(job.chunks) - 1}, got {c!r}"
            )
        rows = job.chunks[c].rows
        wanted = shape[0] if rows is None else len(rows), shape[1], job.heads, shape[3]
        if not isinstance(q_c, torch.Tensor) or (q_c.shape, q_c.dtype) != (wanted, self._dtype):
            got = f"{tuple(q_c.shape)} {q_c.dtype}" if isinstance(q_c, torch.Tensor) else repr(q_c)
            raise ValueError(
                f"q_c: chunk {c} has queries {wanted} {self._dtype}, got {got}; take "
                f"q[plan.row_chunks[{c}]]"
            )
