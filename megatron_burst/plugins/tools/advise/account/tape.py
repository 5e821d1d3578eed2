# SPDX-License-Identifier: Apache-2.0
"""Memory over time: tensors come and go in the order in which the code makes and drops them.

`Tape` adds up what is there and remembers, for every phase, the most. `Half` is a small symbolic
autograd: a list of operators that says what each makes, saves for backward and needs meanwhile;
the lifetimes of its tensors in forward and backward follow. Bytes only, no numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Moment(NamedTuple):
    """A state of the memory: its phase, and the bytes of every item."""

    phase: str
    items: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.items.values())


def peaks(moments: Iterable[Moment]) -> list[Moment]:
    """The moment with most bytes of every phase, in order."""
    most: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in most or moment.bytes > most[moment.phase].bytes:
            most[moment.phase] = moment
    return list(most.values())


class Tape:
    """What is in memory, by item, and every change of it; unless `every`, of each phase only those
    at which there was more than before.
    """

    def __init__(self, every: bool = True) -> None:
        self.moments: list[Moment] = []
        self.every = every
        self._most = -1  # bytes of the phase's largest moment
        self._here = 0  # bytes of all items
        self._tensors: dict[str, tuple[str, int]] = {}  # name -> item, bytes
        self._items: dict[str, int] = defaultdict(int)
        self._phase = "start"

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._phase, self._most = phase, -1
        self._note()

    def make(self, name: str, item: str, size: float) -> None:
        """A tensor comes into being. A name is free once the tensor has gone."""
        assert name not in self._tensors, name
        bytes_ = round(size)
        self._tensors[name] = item, bytes_
        self._items[item] += bytes_
        self._here += bytes_
        self._note()

    def move(self, old: str, new: str, item: str) -> None:
        """A tensor gets another name, and counts as another item."""
        before, size = self._tensors.pop(old)
        self._items[before] -= size
        self._tensors[new] = item, size
        self._items[item] += size

    def drop(self, *names: str) -> None:
        """Tensors go; those that never came are none."""
        for name in names:
            if (found := self._tensors.pop(name, None)) is not None:
                item, size = found
                self._items[item] -= size
                self._here -= size
        self._note()

    def holds(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._tensors

    def enter(self, sizes: Mapping[str, float]) -> None:
        """What `leave` takes away comes: item -> bytes."""
        if sizes:
            for item, size in sizes.items():
                self._items[item] += round(size)
                self._here += round(size)
            self._note()

    def leave(self, sizes: Mapping[str, float]) -> None:
        """What came with `enter` goes, which is no moment of its own."""
        for item, size in sizes.items():
            self._items[item] -= round(size)
            self._here -= round(size)

    def pass_by(self, sizes: Mapping[str, float]) -> None:
        """What comes and goes at once: item -> bytes."""
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
    """An operator: what it reads, makes and keeps.

    reads: tensors it takes a gradient for; makes: name -> bytes. saves: names that backward needs,
    of what it reads or makes; keeps: name -> bytes of what else it saves. before: item -> bytes of
    what is there only until its results are made, during: while they are; back_before, back: the
    same of its backward, whose results are the gradients of what it reads. adds: it is a sum, so
    the gradient that arrives is that of what it reads, and none is made. elsewhere: results that
    others hold, made with 0 bytes here, and the bytes of their gradients.
    """

    name: str
    reads: Sequence[str]
    makes: Mapping[str, float]
    saves: Sequence[str] = ()
    keeps: Mapping[str, float] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    during: Mapping[str, float] = field(default_factory=dict)
    back_before: Mapping[str, float] = field(default_factory=dict)
    back: Mapping[str, float] = field(default_factory=dict)
    adds: bool = False
    elsewhere: Mapping[str, float] = field(default_factory=dict)


class Half:
    """Operators one behind the other, from given tensors to a result.

    given: name -> bytes of what comes from outside, which others hold. held: name -> the operator
    to whose end a Python variable holds it, beyond its last reader. item: what all of it counts as.
    """

    def __init__(
        self,
        item: str,
        ops: Sequence[Op],
        given: Mapping[str, float],
        held: Mapping[str, str] | None = None,
        prefix: str = "",
    ):
        self.item, self.ops, self.given, self.held = item, ops, given, held or {}
        self.prefix = prefix
        self.sizes: dict[str, float] = dict(given)
        for op in ops:
            self.sizes |= {**op.makes, **op.keeps}
        self._gradients = {name: size for op in ops for name, size in op.elsewhere.items()}
        self.result = next(iter(ops[-1].makes))
        self._saved = Counter(name for op in ops for name in (*op.saves, *op.keeps))
        last = {name: i for i, op in enumerate(ops) for name in (*op.makes, *op.reads)}
        places = {op.name: i for i, op in enumerate(ops)}
        last |= {name: max(last[name], places[op]) for name, op in self.held.items()}
        # Of each operator, what goes after it in forward.
        self._gone: list[list[str]] = [[] for _ in ops]
        for name, at in last.items():
            if name != self.result:
                self._gone[at].append(name)

    def forward(self, tape: Tape, grad: bool) -> None:
        """Run it; what is saved stays if `grad`, and the result in either case."""
        for op, gone in zip(self.ops, self._gone, strict=True):
            tape.pass_by(op.before)
            tape.enter(op.during)
            self._make(tape, op.makes)
            self._make(tape, op.keeps)
            if not grad:
                self._drop(tape, op.keeps)
            tape.leave(op.during)
            self._drop(tape, (n for n in gone if not (grad and self._saved[n])))

    def backward(self, tape: Tape) -> None:
        """Run it backwards: the gradient of the result, made elsewhere, is there; those of what was
        given stay, as "d name", and what was saved goes.
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
            for name in (*op.saves, *op.keeps):
                left[name] -= 1
                if not left[name]:
                    self._drop(tape, [name])
            self._drop(tape, (f"d {n}" for n in op.makes if n != self.result))

    def named(self, name: str) -> str:
        """The name of a tensor on the tape."""
        return f"{self.prefix}{self.item}: {name}"

    def _gradient(self, tape: Tape, name: str, more: bool) -> None:
        """A gradient is made; if `more`, it is then added to what has arrived before."""
        size = self._gradients.get(name, self.sizes[name])
        if not tape.holds(self.named(f"d {name}")):
            tape.make(self.named(f"d {name}"), self.item, size)
        if more:
            tape.pass_by({self.item: size})

    def _make(self, tape: Tape, sizes: Mapping[str, float]) -> None:
        for name, size in sizes.items():
            tape.make(self.named(name), self.item, size)

    def _drop(self, tape: Tape, names: Iterable[str]) -> None:
        tape.drop(*(self.named(name) for name in names if name not in self.given))
