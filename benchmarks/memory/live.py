"""Counter of the bytes of all live tensors, by storage, in forward and backward.

A dispatch mode sees every tensor that an operator reads or makes. A weak reference to its storage
reports when its last holder (a variable, autograd's saved tensors, a buffer) is gone. So it counts
what a device would hold, not the size of the process, which keeps freed pages.

    with LiveTensors(states=parameters, host=memory.owns) as live:
        with live.phase("forward"):
            loss = model(x)
        live.begin("backward")
        loss.backward()
    print(live.report())

Views share a storage and count once. A storage counts with its allocated size, from the first
operator that reads or makes it: tensors made outside (`torch.frombuffer`, another thread) count
from their first use. It does not count scratch memory within an operator. It notices
`untyped_storage().resize_` only at the next operator on that storage.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["device", "host", "state"]


class Block(NamedTuple):
    """A live storage: its bytes, kind and origin.

    The origin is the operator that made it ("outside" if it was first seen as an input), the first
    tensor's shape and dtype, and the phase.
    """

    bytes: int
    kind: Kind
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    phase: str


class Peak(NamedTuple):
    """The largest number of bytes, and the storages that were alive then."""

    bytes: int
    blocks: tuple[Block, ...]


class LiveTensors(TorchDispatchMode):
    """Context that counts live tensors; entering it again continues the count.

    Args:
        states: Tensors that count as "state": parameters, gradients, optimizer states.
        host: Function of a tensor, true if its storage is host memory (`HostMemory.owns`), which
            counts as "host". All other storages count as "device".

    Attributes:
        bytes: Present bytes of each kind.
        peaks: Largest device bytes of each phase.
        peak: Largest device bytes of all.
    """

    def __init__(
        self,
        states: Iterable[torch.Tensor] = (),
        host: Callable[[torch.Tensor], bool] = lambda _: False,
    ):
        super().__init__()
        self.bytes: Counter[Kind] = Counter()
        self.host_peak = 0
        self.peaks: dict[str, Peak] = {}
        self._host, self._phase = host, "start"
        self._live: dict[int, tuple[Block, weakref.ref[torch.UntypedStorage]]] = {}
        for tensor in states:
            self._meet(tensor, "outside", "state")

    # --- queries -----------------------------------------------------------------------------

    @property
    def peak(self) -> Peak:
        """Return the peak of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes, default=Peak(0, ()))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the storages that are alive."""
        return tuple(block for block, _ in self._live.values())

    def begin(self, phase: str) -> None:
        """Begin a phase, which lasts until the next one begins; names may repeat."""
        self._phase = phase
        self._note()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase within another phase, which continues afterwards."""
        before = self._phase
        self.begin(name)
        try:
            yield
        finally:
            self.begin(before)

    def forget(self) -> None:
        """Reset all peaks, for example after a first step; keep live storages."""
        self.peaks.clear()
        self.host_peak = self.bytes["host"]
        self._note()

    def report(self, rows: int = 12) -> str:
        """Return the peak of every phase, and the parts of the highest peak, largest first."""
        lines = [f"{peak.bytes:>14,}  {phase}" for phase, peak in self.peaks.items()]
        total: Counter[tuple[Any, ...]] = Counter()
        count: Counter[tuple[Any, ...]] = Counter()
        for block in self.peak.blocks:
            if block.kind == "device":
                total[block[2:]] += block.bytes
                count[block[2:]] += 1
        lines.append(f"at the peak of {self.peak.bytes:,} bytes:")
        for what, size in total.most_common(rows):
            operator, shape, dtype, phase = what
            lines.append(f"{size:>14,}  {count[what]} x {operator} {shape} {dtype}, in {phase}")
        return "\n".join(lines)

    # --- what is counted ---------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._meet(leaf, "outside")
        outputs = func(*args, **kwargs)
        for leaf in tree_leaves(outputs):
            self._meet(leaf, str(func))
        return outputs

    def _meet(self, leaf: Any, operator: str, kind: Kind | None = None) -> None:
        """Count the storage of a tensor, again if its size has changed."""
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return
        storage = leaf.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        entry = self._live.get(key)
        if entry is not None:
            if entry[0].bytes != size:
                self._live[key] = entry[0]._replace(bytes=size), entry[1]
                self._add(entry[0].kind, size - entry[0].bytes)
            return
        kind = kind or ("host" if self._host(leaf) else "device")
        block = Block(size, kind, operator, tuple(leaf.shape), leaf.dtype, self._phase)
        self._live[key] = block, weakref.ref(storage, partial(self._gone, key))
        self._add(kind, size)

    def _gone(self, key: int, _: Any) -> None:
        block, _ = self._live.pop(key)
        self.bytes[block.kind] -= block.bytes

    def _add(self, kind: Kind, size: int) -> None:
        self.bytes[kind] += size
        if kind == "host":
            self.host_peak = max(self.host_peak, self.bytes["host"])
        elif kind == "device":
            self._note()

    def _note(self) -> None:
        """Store the present bytes if they are the phase's maximum."""
        now = self.bytes["device"]
        if self._phase not in self.peaks or now > self.peaks[self._phase].bytes:
            self.peaks[self._phase] = Peak(now, self.blocks)
