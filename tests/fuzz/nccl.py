"""The calls of `gloo`, on ranks that share a GPU and talk by NCCL: `python -m tests.fuzz nccl`.

Every kernel is the one that takes anything, since shapes are drawn that flash attention refuses:
what is tried here is the order of messages, streams and buffers. tests/gpu has real kernels.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from workers import Workers

from . import gloo
from .draw import Case
from .tally import Tally


def drawn(number: int, size: int) -> Case:
    """Calls that share their choices still do."""
    case, changed = gloo.drawn(number, size), {}
    for call in case.calls:
        if call.refused not in ("kernel", "softcap"):  # which are of their own kernels
            changed.setdefault(id(call.choices), call.choices | {"kernel": "reference"})
    calls = [
        replace(call, choices=changed.get(id(call.choices), call.choices)) for call in case.calls
    ]
    return replace(case, calls=calls)


def search(cases: Iterable[int], pools: Callable[[int], Workers]) -> Tally:
    return gloo.search(cases, pools, drawn, "cuda", "nccl")
