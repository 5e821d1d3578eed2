# SPDX-License-Identifier: Apache-2.0
"""Memory over time: a record of allocations and frees, in the order in which training does them.

`Tape` sums the bytes and records moments (snapshots) of each phase. `Half` is a small symbolic
autograd over a list of operators. Each operator lists the tensors that it returns, saves for
backward and allocates temporarily. `Half` derives the lifetimes of tensors in forward and backward.
No tensor is computed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Moment(NamedTuple):
    """Snapshot of the memory: name of the phase, and item -> bytes."""

    phase: str
    items: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Total bytes of all items."""
        return sum(self.items.values())


def peaks(moments: Iterable[Moment]) -> list[Moment]:
    """Return for each phase, in order, the moment with the most bytes."""
    most: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in most or moment.bytes > most[moment.phase].bytes:
            most[moment.phase] = moment
    return list(most.values())


class Tape:
    """Simulated memory: allocated bytes by item, and recorded moments (snapshots).

    Args:
        every: Keep all moments. False keeps only moments that exceed all earlier moments of their
            phase.
    """

    def __init__(self, every: bool = True) -> None:
        self.moments: list[Moment] = []
        self.every = every
        self._most = -1  # bytes of the phase's largest moment
        self._here = 0  # allocated bytes of all items
        self._tensors: dict[str, tuple[str, int]] = {}  # name -> item, bytes
        self._items: dict[str, int] = defaultdict(int)
        self._phase = "start"

    def begin(self, phase: str) -> None:
        """Begin a phase. Moments (snapshots) that are recorded from now on have its name."""
        self._phase, self._most = phase, -1
        self._note()

    def make(self, name: str, item: str, size: float) -> None:
        """Allocate a tensor of `size` bytes under an unused name, and count it as `item`."""
        assert name not in self._tensors, name
        bytes_ = round(size)
        self._tensors[name] = item, bytes_
        self._items[item] += bytes_
        self._here += bytes_
        self._note()

    def move(self, old: str, new: str, item: str) -> None:
        """Rename a tensor from `old` to `new` and count it as `item`."""
        before, size = self._tensors.pop(old)
        self._items[before] -= size
        self._tensors[new] = item, size
        self._items[item] += size

    def drop(self, *names: str) -> None:
        """Free tensors. Names without a tensor are ignored."""
        for name in names:
            if (entry := self._tensors.pop(name, None)) is not None:
                item, size = entry
                self._items[item] -= size
                self._here -= size
        self._note()

    def holds(self, name: str) -> bool:
        """Return whether a tensor exists."""
        return name in self._tensors

    def enter(self, sizes: Mapping[str, float]) -> None:
        """Add temporary bytes (item -> bytes), which `leave` removes again; record a moment."""
        if sizes:
            for item, size in sizes.items():
                self._items[item] += round(size)
                self._here += round(size)
            self._note()

    def leave(self, sizes: Mapping[str, float]) -> None:
        """Remove the temporary bytes that `enter` added, without recording a moment."""
        for item, size in sizes.items():
            self._items[item] -= round(size)
            self._here -= round(size)

    def pass_by(self, sizes: Mapping[str, float]) -> None:
        """Record a moment (snapshot) with temporary bytes (item -> bytes); then remove them."""
        self.enter(sizes)
        self.leave(sizes)

    def _note(self) -> None:
        if not self.every:
            if self._here <= self._most:
                return
            self._most = self._here
        now = {item: size for item, size in self._items.items() if size}
        self.moments.append(Moment(self._phase, now))


@dataclass(frozen=True)
class Op:
    """Operator of the symbolic autograd, with the tensors that it reads, returns and saves.

    Attributes:
        name: Name of the operator.
        reads: Names of the inputs to which backward of the operator returns a gradient.
        makes: Result name -> bytes.
        saves: Names of inputs or results that are saved for backward.
        extra_saves: Name -> bytes of other tensors that are saved for backward.
        before: Item -> temporary bytes that are freed before the results are allocated.
        during: Item -> temporary bytes that are freed after the results are allocated.
        back_before: Same as `before`, for backward, whose results are the gradients of `reads`.
        back: Same as `during`, for backward.
        adds: Whether the operator is a sum. Backward of a sum allocates no gradients.
        elsewhere: Result name -> bytes of its gradient, for results that are counted elsewhere and
            have 0 bytes in `makes`.
    """

    name: str
    reads: Sequence[str]
    makes: Mapping[str, float]
    saves: Sequence[str] = ()
    extra_saves: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    during: Mapping[str, float] = field(default_factory=dict)
    back_before: Mapping[str, float] = field(default_factory=dict)
    back: Mapping[str, float] = field(default_factory=dict)
    adds: bool = False
    elsewhere: Mapping[str, float] = field(default_factory=dict)


class Half:
    """Attention half or MLP half of a layer: its operators, with the lifetimes of their tensors.

    Args:
        item: Item of the memory account to which the tensors belong.
        ops: Operators in forward order.
        inputs: Input name -> bytes. The caller allocates and frees the inputs.
        held_until: Name of a tensor -> name of the operator after which the tensor is freed, if a
            Python variable references the tensor after its last use.
        prefix: Prefix of the tensor names on the tape.
    """

    def __init__(
        self,
        item: str,
        ops: Sequence[Op],
        inputs: Mapping[str, float],
        held_until: Mapping[str, str] | None = None,
        prefix: str = "",
    ):
        self.item, self.ops, self.inputs, self.held_until = item, ops, inputs, held_until or {}
        self.prefix = prefix
        self.sizes: dict[str, float] = dict(inputs)
        for op in ops:
            self.sizes |= {**op.makes, **op.extra_saves}
        self._gradients = {name: size for op in ops for name, size in op.elsewhere.items()}
        self.result = next(iter(ops[-1].makes))
        self._saved = Counter(name for op in ops for name in (*op.saves, *op.extra_saves))
        last = {name: i for i, op in enumerate(ops) for name in (*op.makes, *op.reads)}
        places = {op.name: i for i, op in enumerate(ops)}
        last |= {name: max(last[name], places[op]) for name, op in self.held_until.items()}
        # For each operator, the tensors that are freed after it in forward.
        self._gone: list[list[str]] = [[] for _ in ops]
        for name, at in last.items():
            if name != self.result:
                self._gone[at].append(name)

    def forward(self, tape: Tape, grad: bool) -> None:
        """Simulate forward. The result stays allocated; with `grad` also the saved tensors."""
        for op, gone in zip(self.ops, self._gone, strict=True):
            tape.pass_by(op.before)
            tape.enter(op.during)
            self._make(tape, op.makes)
            self._make(tape, op.extra_saves)
            if not grad:
                self._drop(tape, op.extra_saves)
            tape.leave(op.during)
            self._drop(tape, (n for n in gone if not (grad and self._saved[n])))

    def backward(self, tape: Tape) -> None:
        """Simulate backward.

        The caller must have allocated the gradient of the result. Gradients of the inputs stay
        allocated under the names "d " + input name. Saved tensors are freed.
        """
        left = Counter(self._saved)
        arrived: set[str] = set()
        for op in reversed(self.ops):
            tape.pass_by(op.back_before)
            tape.enter(op.back)
            for name in op.reads:
                if not op.adds:
                    self._gradient(tape, name, name in arrived)
            arrived |= set(op.reads)
            tape.leave(op.back)
            for name in (*op.saves, *op.extra_saves):
                left[name] -= 1
                if not left[name]:
                    self._drop(tape, [name])
            self._drop(tape, (f"d {n}" for n in op.makes if n != self.result))

    def named(self, name: str) -> str:
        """Return the name that a tensor of this object has on the tape."""
        return f"{self.prefix}{self.item}: {name}"

    def _gradient(self, tape: Tape, name: str, accumulate: bool) -> None:
        """Allocate the gradient of a tensor, if absent.

        With `accumulate`, also record a moment with a temporary gradient that is added to it.
        """
        size = self._gradients.get(name, self.sizes[name])
        if not tape.holds(self.named(f"d {name}")):
            tape.make(self.named(f"d {name}"), self.item, size)
        if accumulate:
            tape.pass_by({self.item: size})

    def _make(self, tape: Tape, sizes: Mapping[str, float]) -> None:
        for name, size in sizes.items():
            tape.make(self.named(name), self.item, size)

    def _drop(self, tape: Tape, names: Iterable[str]) -> None:
        tape.drop(*(self.named(name) for name in names if name not in self.inputs))
