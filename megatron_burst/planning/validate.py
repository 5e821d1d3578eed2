"""The door: one rank's arguments, checked and put in order before any rank talks to another.

Decides what is refused, and says what would work. Reads shapes, dtypes and devices; it must
not communicate and must not run anything.

Shape letters: s local rows, b batch, h query heads, k key/value heads, d width, w value width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..autotune.rates import Rates, check_rates
from ..comm.consensus import Facts
from ..comm.groups import Groups
from ..config import NAMES, BurstConfig
from ..kernels import registry
from ..kernels.base import Kernel, Scoring
from ..kernels.online_softmax import accumulation_dtype
from ..layout import LAYOUTS, Layout, check_fraction, make
from ..masks import Mask
from ..schedule.cost import Sizes
from ..schedule.head_shares import Share, check_heads
from ..schedule.topology import alternatives, divisors

Shards = torch.Tensor | Sequence[torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NeedsGrad = tuple[bool, bool, bool]
Signature = tuple[tuple[tuple[int, ...], torch.dtype, str], ...]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def per_rank(groups: Groups, q: Shards, k: Shards, v: Shards) -> list[Tensors]:
    """(q, k, v) of each local rank."""
    lists = [list(x) if isinstance(x, (list, tuple)) else [x] for x in (q, k, v)]
    for name, shards in zip("qkv", lists, strict=True):
        if len(shards) != len(groups.local_ranks):
            raise ValueError(
                f"{name}: groups hold {len(groups.local_ranks)} ranks in this process, "
                f"got {len(shards)} tensors"
            )
    return list(zip(*lists, strict=True))


def signature(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Signature:
    """What of the tensors a plan depends on: shape, dtype and device of each."""
    return tuple((tuple(t.shape), t.dtype, str(t.device)) for t in (q, k, v))


@dataclass(frozen=True)
class Choices:
    """The keywords of `prepare`, as given."""

    layout: str | Layout
    mask: Mask
    algorithm: str
    side: str
    kernel: str
    softmax_scale: float | None
    softcap: float | None
    grad_wire_dtype: torch.dtype | None
    kv_cache: float
    store: float | None
    head_chunks: int | None
    needs_grad: NeedsGrad | None
    sink: torch.Tensor | None
    rates: Rates | None


@dataclass(frozen=True)
class Draft:
    """One rank's checked arguments, before the ranks have compared them."""

    tensors: Tensors
    config: BurstConfig
    layout: Layout
    mask: Mask
    kernel: Kernel
    scoring: Scoring
    wire_dtype: torch.dtype
    kv_cache: float
    store: float | None
    head_chunks: int | None
    needs_grad: NeedsGrad
    facts: Facts

    @property
    def sizes(self) -> Sizes:
        """This rank's share, before heads are shared."""
        q, k, v = self.tensors
        return Sizes(
            tokens=q.shape[0],
            batch=q.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            width=q.shape[3],
            value_width=v.shape[3],
            itemsize=q.element_size(),
            stat_itemsize=accumulation_dtype(q.dtype).itemsize,
            wire_itemsize=self.wire_dtype.itemsize,
            needs_grad=self.needs_grad,
        )


def check(tensors: Tensors, groups: Groups, choices: Choices) -> Draft:
    """One rank's (q, k, v) and choices, or the ValueError they deserve."""
    q, k, v = tensors
    _check_shapes(q, k, v)
    _check_device(groups, q)
    _check_algorithm(choices.algorithm, groups, q, k)
    if choices.head_chunks is not None:
        _check_head_chunks(choices.head_chunks, groups, k)
    _check_rates(choices)
    config = BurstConfig(choices.algorithm, side=choices.side, kernel=choices.kernel)
    layout = _layout(choices.layout, groups, q.shape[0])
    if not isinstance(choices.mask, Mask):
        raise ValueError(f"mask must be one of mb.masks, got {choices.mask!r}")
    choices.mask.check(q.shape[0] * groups.size)
    _check_numbers(choices)
    kernel = registry.make(config.kernel, q, k, v, choices.softcap, choices.mask)
    wire_dtype = choices.grad_wire_dtype or accumulation_dtype(q.dtype)
    if wire_dtype not in DTYPES:
        raise ValueError(f"grad_wire_dtype must be None or one of {DTYPES}, got {wire_dtype}")
    check_sink(choices.sink, q)
    scale = q.shape[-1] ** -0.5 if choices.softmax_scale is None else float(choices.softmax_scale)
    # With algorithm "auto" None is resolved later, like the algorithm.
    head_chunks = choices.head_chunks or (None if choices.algorithm == "auto" else 1)
    needs_grad = (q.requires_grad, k.requires_grad, v.requires_grad)
    if choices.needs_grad is not None:
        q_needs, k_needs, v_needs = choices.needs_grad
        needs_grad = (bool(q_needs), bool(k_needs), bool(v_needs))
    facts: Facts = {
        "groups": groups.topology,
        "q": (tuple(q.shape), q.dtype),
        "k": (tuple(k.shape), k.dtype),
        "v": (tuple(v.shape), v.dtype),
        "device": q.device.type,
        "needs_grad (q, k, v)": needs_grad,
        "algorithm": config.algorithm,
        "side": config.side,
        "kernel": kernel.name,
        "layout": layout,
        "mask": choices.mask,
        "softmax_scale": scale,
        "softcap": choices.softcap,
        "grad_wire_dtype": wire_dtype,
        "kv_cache": choices.kv_cache,
        "store": choices.store,
        "sink": None if choices.sink is None else (tuple(choices.sink.shape), choices.sink.dtype),
        "head_chunks": head_chunks,
        "rates": choices.rates,
    }
    return Draft(
        tensors=tensors,
        config=config,
        layout=layout,
        mask=choices.mask,
        kernel=kernel,
        scoring=Scoring(scale, choices.softcap),
        wire_dtype=wire_dtype,
        kv_cache=choices.kv_cache,
        store=choices.store or None,
        head_chunks=head_chunks,
        needs_grad=needs_grad,
        facts=facts,
    )


def check_sink(sink: torch.Tensor | None, q: torch.Tensor) -> None:
    """Raise ValueError unless `sink` is None or a logit for each head of q."""
    if sink is None:
        return
    tensor = isinstance(sink, torch.Tensor)
    wanted = (q.shape[2],), q.device
    if not tensor or not sink.is_floating_point() or (sink.shape, sink.device) != wanted:
        got = f"{sink.dtype} {tuple(sink.shape)} on {sink.device}" if tensor else repr(sink)
        raise ValueError(
            f"sink must be a floating tensor [{q.shape[2]}], one logit per query head, on "
            f"{q.device}, got {got}"
        )


def _check_algorithm(algorithm: str, groups: Groups, q: torch.Tensor, k: torch.Tensor) -> None:
    if algorithm not in NAMES:
        raise ValueError(f"algorithm must be one of {', '.join(NAMES)}, got {algorithm!r}")
    ulysses, size = groups.topology.ulysses, groups.size
    if algorithm == "ulysses" and ulysses != size:
        raise ValueError(
            f"algorithm ulysses shares the heads over all {size} ranks, groups over {ulysses}; "
            f"make mb.Groups with ulysses={size}"
        )
    if algorithm == "hybrid" and ulysses == 1 < size:
        raise ValueError(
            "algorithm hybrid needs groups that share heads; make mb.Groups with ulysses=2 or more"
        )
    check_heads(q.shape[2], k.shape[2], groups.topology, algorithm)


def _check_head_chunks(head_chunks: int, groups: Groups, k: torch.Tensor) -> None:
    mine = Share(k.shape[2], groups.topology.ulysses).each
    if type(head_chunks) is not int or head_chunks < 1 or mine % head_chunks:
        raise ValueError(
            f"head_chunks must divide the {mine} key/value heads of a rank's ring, "
            f"got {head_chunks!r}; use {alternatives(divisors(mine))}"
        )


def _check_rates(choices: Choices) -> None:
    if choices.rates is None:
        return
    check_rates(choices.rates)
    if choices.algorithm != "auto":
        raise ValueError(f"rates are for algorithm='auto', got {choices.algorithm!r} beside them")


def _check_numbers(choices: Choices) -> None:
    numbers = {"softmax_scale": choices.softmax_scale, "softcap": choices.softcap}
    for name, value in numbers.items():  # aten operators scale what they have hidden: -inf * 0
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive, finite number or None, got {value!r}")
    if not _is_number(choices.kv_cache) or not 0.0 <= choices.kv_cache <= 1.0:
        raise ValueError(f"kv_cache must be a fraction from 0 to 1, got {choices.kv_cache!r}")
    if choices.kv_cache and choices.side == "query":
        raise ValueError(
            f"kv_cache keeps keys for side kv, got side='query' with kv_cache={choices.kv_cache}"
        )
    if choices.store is not None:
        check_fraction("store", choices.store)
    if choices.store and choices.kv_cache:
        raise ValueError(
            f"kv_cache={choices.kv_cache} keeps keys of a forward that store={choices.store} does "
            "not run again; use one of them"
        )
    needs = choices.needs_grad
    if needs is not None and not (isinstance(needs, (tuple, list)) and len(needs) == 3):
        raise ValueError(f"needs_grad must be three booleans, for q, k and v, got {needs!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{name} must be a tensor, and not sparse, got {tensor!r:.100}")
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(f"{name} must be [s, b, heads, width], got {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: q, k, v must share a floating dtype of {DTYPES} and a device, got "
                f"{tensor.dtype} on {tensor.device} beside {q.dtype} on {q.device}"
            )
    if k.shape[:2] != q.shape[:2] or v.shape[:2] != q.shape[:2] or v.shape[2] != k.shape[2]:
        raise ValueError(
            "q, k, v must share s and b, and k, v their heads, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"k: width must be that of q, {q.shape[3]}, got {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: the number of key/value heads must divide the {q.shape[2]} query heads, "
            f"got {k.shape[2]}"
        )


def _check_device(groups: Groups, q: torch.Tensor) -> None:
    wanted = {"gloo": "cpu", "nccl": "cuda"}.get(groups.backend)
    if groups.size > 1 and wanted and q.device.type != wanted:
        raise ValueError(
            f"groups: backend {groups.backend} moves {wanted} tensors, got {q.device.type}; "
            f"make the process group with backend {'nccl' if wanted == 'cpu' else 'gloo'}"
        )


def _layout(layout: str | Layout, groups: Groups, rows: int) -> Layout:
    if not isinstance(layout, (str, Layout)):
        raise ValueError(f"layout must be a name or one of mb.layout, got {layout!r}")
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise ValueError(
                f"layout must be one of {', '.join(sorted(LAYOUTS))}, or made, as mb.layout.make("
                f"'block_striped', cp_size={groups.size}, block=...), got {layout!r}"
            )
        layout = make(layout, cp_size=groups.size)
    if layout.cp_size != groups.size:
        raise ValueError(f"layout is for {layout.cp_size} ranks, groups have {groups.size}")
    try:
        layout.check(rows * groups.size)
    except ValueError as error:
        raise ValueError(
            f"q, k, v: {rows} rows on each of {groups.size} ranks are {rows * groups.size} "
            f"positions; {error}"
        ) from error
    return layout
