"""Ranks that fall out of step, raise or die, on real processes: `python -m tests.fuzz faults`.

One rank of two runs another script than the other. Both must end within seconds: the ranks that
the fault reaches with an error, and nobody with a wrong number.

A script is words: F0a runs call 0 forward with plan a, L0a labels it besides, U0a runs it from a
line of its own, as a script without a loop does, S0a with a sink, E0a does and its kernel fails,
C0a does in a checkpoint (its backward runs it again), B0 runs call 0 backward, P makes a plan, X
raises, K kills its own process. `PLANS` says what a, m, ... are; all of them are agreed on by both
ranks before.
"""

import os
import signal
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import cases
import oracle
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from workers import WorkerError, Workers

import megatron_burst as mb

from .tally import Tally

TIMEOUT = 2.0  # seconds, of the process groups under test
LIMIT = 30.0  # seconds until both ranks must have ended, on a busy machine too
LENGTH = 16
PLANS = {
    "a": {},
    "m": {"mask": mb.masks.Full()},
    "l": {"layout": "striped"},
    "s": {"softmax_scale": 1.0},
    "q": {"side": "query"},
    "d": {"layout": "contiguous", "mask": mb.masks.Documents([0, 8, 16])},  # nothing travels
    "w": {"width": 16},
    "f": {"dtype": torch.float32},
}


class Fault(NamedTuple):
    name: str
    good: str  # the script of rank 0
    odd: str  # of rank 1
    algorithms: tuple[str, ...] = ("burst", "ulysses")
    told: tuple[int, ...] = (0, 1)  # ranks that must end with an error
    late: bool = False  # numbers may be wrong before the error
    words: str = ""  # in the error of one of them at least


OUT_OF_STEP = [
    Fault("the plan of another mask", "F0a B0", "F0m B0", words="another plan"),
    Fault("the plan of another layout", "F0a B0", "F0l B0"),
    Fault("the plan of another scale", "F0a B0", "F0s B0", words="another plan"),
    Fault("the plan of another side", "F0a B0", "F0q B0", ("burst",)),
    Fault("the plan of wider tensors", "F0a", "F0w"),
    Fault("the plan of another dtype", "F0a", "F0f"),
    Fault("plans in another order", "F0a F1m", "F1m F0a", words="another plan"),
    Fault("backwards in another order", "F0a F1a B1 B0", "F0a F1a B0 B1",
          words="received a message of call"),
    Fault("a backward is skipped", "F0a F1a B1 B0", "F0a F1a B0"),
    Fault("a call is skipped", "F0a F1a F2a B2 B1 B0", "F0a F2a B2 B0", late=True),
    Fault("a call with a label is skipped", "L0a L1a L2a B2 B1 B0", "L0a L2a B2 B0"),
    Fault("one of three lines is skipped", "U0a U1a U2a", "U0a U2a"),
    Fault("one of three lines is skipped, in a step", "U0a U1a U2a B2 B1 B0", "U0a U2a B2 B0"),
    Fault("each skips another line", "U0a U1a B1 B0", "U0a U2a B2 B0",
          words="was made by another line of the program"),
    Fault("each skips another call", "L0a L1a B1 B0", "L0a L2a B2 B0",
          words="another label or sink"),
    Fault("a call is skipped, in a step", "F0a F1a B1 B0", "F0a B0", words="message of"),
    Fault("a call is skipped where nothing travels", "F0d F1d P", "F0d P", ("burst",)),
    Fault("a call is skipped, then comes a plan", "F0a F1a P", "F0a P"),
    Fault("a forward while others are in backward", "F0a B0 F1a B1", "F0a F1a B0 B1",
          words="message of"),
    Fault("the same where queries travel back", "F0q B0 F1q B1", "F0q F1q B0 B1", ("burst",),
          words="message of"),
    Fault("a sink on one rank", "F0a", "S0a", words="another label or sink"),
    Fault("one rank alone recomputes", "F0a B0", "C0a B0"),
]  # fmt: skip
# Somebody waits for what never comes, until the timeout.
ALONE = [
    Fault("one call more at the end", "F0a B0", "F0a B0 F1a", told=(1,)),
    Fault("one backward less at the end", "F0a F1a B1 B0", "F0a F1a B1", told=(0,)),
    Fault("it raises before a call", "F0a B0", "X"),
    Fault("it raises within a call", "F0a B0", "E0a B0"),
    Fault("it raises between forward and backward", "F0a B0", "F0a X"),
    Fault("it raises before a plan", "F0a P F1a", "F0a X"),
    Fault("it dies before a call", "F0a B0", "K", told=(0,)),
    Fault("it dies between forward and backward", "F0a B0", "F0a K", told=(0,)),
    Fault("it dies before a plan", "F0a P", "F0a K", told=(0,)),
]
ALL = {
    f"{fault.name}, {name}": (fault, name)
    for fault in (*OUT_OF_STEP, *ALONE)
    for name in fault.algorithms
}
# Those that take no time, and the others by turns with one algorithm.
SHORT = [name for name, (fault, _) in ALL.items() if fault in OUT_OF_STEP]
SHORT += [f"{fault.name}, {fault.algorithms[i % 2]}" for i, fault in enumerate(ALONE)]


# Calls that have no label, each from a line of its own.
LINES = {
    "0": lambda q, k, v, plan: mb.attention(q, k, v, plan=plan),
    "1": lambda q, k, v, plan: mb.attention(q, k, v, plan=plan),
    "2": lambda q, k, v, plan: mb.attention(q, k, v, plan=plan),
}


def _tensors(call: int, key: str):
    """q, k, v, dout of the whole sequence."""
    plan = PLANS[key]
    width, dtype = plan.get("width", 8), plan.get("dtype", torch.float64)
    generator = torch.Generator().manual_seed(call)
    return [
        torch.randn(LENGTH, 1, heads, width, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, 2, 2, 4)
    ]


def _rows(key: str, rank: int) -> list[int]:
    return oracle.permutation(PLANS[key].get("layout", "zigzag"), 2, LENGTH)[rank]


def _truth(call: int, key: str):
    choices = PLANS[key]
    seen = oracle.visible("causal", LENGTH)
    if key == "m":
        seen = oracle.visible("full", LENGTH)
    elif key == "d":
        place = torch.arange(LENGTH) // 8
        seen = place[:, None] == place[None, :]
    inputs = _tensors(call, key)
    out, _, *grads = oracle.attention(*inputs, seen, choices.get("softmax_scale"))
    return out, *grads


class _Actor:
    """One rank and what its script has made so far."""

    def __init__(self, good: str, odd: str, algorithm: str):
        dist.barrier()  # a new process may still have been importing
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        dist.barrier()
        ulysses = 2 if algorithm == "ulysses" else 1
        self.groups = mb.Groups.from_topology(group, intra=2, ulysses=ulysses)
        self.rank, self.algorithm = self.groups.rank, algorithm
        used = {word[2] for word in (good + " " + odd).split() if len(word) == 3}
        self.plans = {key: self.plan(key) for key in PLANS if key in used}
        self.good = {word[1]: word[2] for word in good.split() if word[0] in "FU"}
        self.flying, self.wrong = {}, []

    def plan(self, key: str) -> mb.Plan:
        rows, choices = _rows(key, self.rank), {"algorithm": self.algorithm, **PLANS[key]}
        choices = {k: v for k, v in choices.items() if k not in ("width", "dtype")}
        q, k, v, _ = (x[rows].requires_grad_() for x in _tensors(0, key))
        return mb.prepare(q, k, v, groups=self.groups, kernel="reference", **choices)

    def act(self, word: str):
        what, call, key = word[0], word[1:2], word[2:3]
        if what == "X":
            raise ArithmeticError("this rank's own")
        if what == "K":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "P":
            self.plan("a")
        elif what == "B":
            out, leaves, dout, key = self.flying.pop(call)
            grads = torch.autograd.grad(out, leaves, dout)
            self._judge(call, key, ("dq", "dk", "dv"), grads, _truth(int(call), key)[1:])
        else:
            self._forward(what, call, key)

    def _forward(self, what: str, call: str, key: str):
        plan, meant = self.plans[key], self.good.get(call, key)
        tensors = meant if key not in "wf" else key
        q, k, v, dout = (x[_rows(tensors, self.rank)] for x in _tensors(int(call), tensors))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if what == "E":
            plan = plan.with_kernel(cases.Failing(plan.kernel, "forward", 0))
        if what == "C":
            out = checkpoint(lambda *x: mb.attention(*x, plan=plan), *leaves, use_reentrant=False)
        elif what == "U":
            out = LINES[call](*leaves, plan)
        else:
            sink = torch.zeros(4) if what == "S" else None
            out = mb.attention(*leaves, plan=plan, label=call if what == "L" else None, sink=sink)
        self.flying[call] = out, leaves, dout, meant
        self._judge(call, meant, ("out",), [out], _truth(int(call), meant)[:1])

    def _judge(self, call, key, names, got, wanted):
        for name, x, whole in zip(names, got, wanted, strict=True):
            right = whole[_rows(key, self.rank)]
            error = oracle.worst(x, right) if x.shape == right.shape else float("inf")
            if not error <= cases.TOLERANCE:
                self.wrong.append(f"{name} of call {call} is off by {error:.2g}")


def on_rank(good: str, odd: str, algorithm: str) -> tuple[str, list[str]]:
    """(the error this rank ended with, or "", the wrong numbers it was given)."""
    actor = _Actor(good, odd, algorithm)
    dist.barrier()
    error = ""
    try:
        for word in (odd if actor.rank == 1 else good).split():
            actor.act(word)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, actor.wrong


def faults(name: str, pools: Callable[[int], Workers]) -> list[str]:
    """What is wrong with how the ranks end."""
    fault, algorithm = ALL[name]
    may_die = (1,) if "K" in fault.odd else ()
    arguments = fault.good, fault.odd, algorithm
    try:
        answers = pools(2).run(on_rank, *arguments, timeout=LIMIT, may_die=may_die)
    except WorkerError as error:
        return [str(error)]
    found = []
    for rank, answer in enumerate(answers):
        if answer is None:
            continue
        error, wrong = answer
        found += [f"rank {rank}: {what}" for what in wrong if not fault.late]
        if rank in fault.told and not error:
            found.append(f"rank {rank} was told nothing")
    if not any(fault.words in answer[0] for answer in answers if answer is not None):
        found.append(f"nobody was told {fault.words!r}: {answers}")
    return found


def search(names: Iterable[str], pools: Callable[[int], Workers]) -> Tally:
    """Try these faults."""
    tally = Tally("faults")
    for name in names:
        tally.add([name.split(", ")[-1]], faults(name, pools), ALL[name], f"'{name}'")
    return tally
