# SPDX-License-Identifier: Apache-2.0
"""The plan book: plans and process groups that the layers of a model share.

Making a plan is a collective of the context-parallel group, because ranks compare what they are
about to do. Either all ranks take part or none does, by this rule:

- Layers are grouped by their kind (`LayerKind`, or `LinearKind` of linear attention), which is
  known when they are built and the same on all ranks. In each group the lowest layer of this rank,
  the leader, makes the plan.
- The leader takes part in every forward, so that all ranks raise the same error if some were called
  differently. Where this rank has the plan already it only states what the plan was made of, in the
  same exchange as ranks that make theirs. Other layers look the plan up, and so does every layer
  that backward runs again: the forward of that micro-batch has compared it.
- With a mask of the user's (`--burst-mask`) every layer is a kind of its own: its mask is known
  only when it is called with a batch.
- Every plan assumes that q, k and v need gradients. One plan then serves forward and recompute,
  in which layers run in another order, also with several micro-batches in flight. This costs
  little: q, k and v mostly come from one projection and need gradients together.
- Packed batches have one plan per pack. The last `PLANS_KEPT` plans are kept, in the order of use,
  which is the same on all ranks.
- While a CUDA graph captures a layer nothing is compared, and replays run no Python: the plan was
  made and compared by a forward before, and is the same for every micro-batch.
- A micro-batch may have a context-parallel group of its own (hybrid context parallelism). Every set
  of ranks has a book of its own, with groups and plans that its members make, and nobody else.
- What algorithm "auto" chooses for the first plan of a kind of layer and its shapes holds for all
  later ones, whatever documents they have: the process groups, and whether ranks share heads, were
  decided before any shape was known.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.distributed import distributed_c10d

from ...autotune import cluster_file
from ...autotune.rates import Rates
from ...comm.consensus import agree
from ...comm.groups import Groups
from ...comm.process_groups import backends
from ...comm.recent import RecentCache
from ...config import BurstConfig
from ...kernels.online_softmax import accumulation_dtype
from ...masks import Causal, Full, Mask, Window
from ...options import AttentionKeywords
from ...planning.plan import Plan
from ...planning.prepare import prepare
from ...recompute.checkpoint import in_backward
from .. import patching, step_metrics
from ..data.cut import BatchCut
from ..data.packed import Pack, Packs, packs
from ..users_mask import MaskBatch, MaskLayer, users_mask
from .relayout import Around, Moves, exchange_line

PLANS_KEPT = 256  # more than packed micro-batches in flight x kinds of layers
Tensors = Mapping[str, Any]  # of a call by name; only shapes, dtypes and device count


class RowChunking(NamedTuple):
    """How rows are cut into chunks: how many chunks, and of how many equal blocks of rows, one per
    rank of sequence parallelism, each has equally many.
    """

    chunks: int = 1
    blocks: int = 1


WHOLE = RowChunking()


class Kind(Protocol):
    """What is known about a layer when it is built; hashable, and the same on all ranks."""

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask | None:
        """The mask of a batch, where only a function of the user's knows it; ValueError from it."""
        ...

    def prepare(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunking, own: Any
    ) -> Any:
        """A new plan; a collective. own: what `own_mask` has returned."""
        ...


@dataclass(frozen=True)
class LayerKind:
    """The `Kind` of a layer of softmax attention."""

    burst: BurstConfig
    causal: bool
    window: tuple[int | None, int | None] | None  # left and right, None for no limit
    softmax_scale: float | None
    head_sizes: tuple[int | None, ...]  # query heads, key/value heads, key width, value width
    max_logits: bool = False  # record the largest logit of each head
    selects: bool = False  # selects keys: its operations choose for themselves, and it says so
    number: int = 0  # of the layer, from 1 on; 0 where its mask does not depend on it
    # Of packed batches; None for that of a layout which needs only a name.
    cut: BatchCut | None = None
    # Of the tokens outside attention, where they have another layout.
    stream: BatchCut | None = None

    @property
    def attention(self) -> BatchCut:
        """How attention cuts a sequence."""
        return self.cut or BatchCut(self.burst.layout)

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask | None:
        """That of `--burst-mask`, for one sequence of `seq_len` tokens over all ranks or for the
        documents of a pack. Raises `ValueError` for one that is none.
        """
        documents, spans = (None, None) if pack is None else (pack.documents, pack.spans)
        if self.burst.mask is None:
            if spans is not None:
                raise ValueError(
                    "packed_seq_params: with_spans told where images lie, and no mask reads it: "
                    "add --burst-mask megatron_burst.plugins.vision.images:gemma3 (or gemma4, or "
                    "one of your own), or leave with_spans out where attention is causal"
                )
            return None
        layer = MaskLayer(self.number, self.causal, self.window)
        batch = MaskBatch(seq_len, documents, spans)
        return users_mask(self.burst.mask, layer, batch)

    def prepare(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunking, own: Any
    ) -> Plan:
        """The plan for q [s, b, h, d], k [s, b, g, d] and v [s, b, g, w]."""
        q, k, v = tensors.values()
        known = self, *(t.shape for t in (q, k, v))
        keywords = self.burst.keywords() | ({} if self.selects else book.chosen.get(known, {}))
        mask = own
        if mask is None:
            mask = Causal() if self.causal else Full()
            if self.window is not None:
                mask = mask & Window(*self.window)
        if pack is not None:
            mask = mask & pack.mask
            keywords["layout"] = pack.layout(self.attention, book.groups.size)
        keywords["mask"], keywords["softmax_scale"] = mask, self.softmax_scale
        keywords["sequence_chunks"], keywords["row_blocks"] = rows
        rates = book.rates(self.burst) if keywords.get("algorithm") == "auto" else None
        prepared = prepare(
            q,
            k,
            v,
            groups=book.groups,
            needs_grad=(True, True, True),
            max_logits=nothing_seen(q) if self.max_logits else None,
            rates=rates,
            **keywords,
        )
        plan = cast(Plan, prepared)  # of real groups, so this rank's own
        if self.selects:
            return plan
        if plan.choice is not None:
            book.chosen[known] = plan.choice.call
        automatic = self.burst.algorithm == "auto"
        which = (self.window if own is None else repr(own)), plan.algorithm
        if book.startup is None:
            more = "" if rates is None else f"; rates of {self.burst.cluster}"
            if self.burst.mask is not None:
                more += f"; masks of {self.burst.mask}, called for every layer"
            if self.stream is not None:
                more += exchange_line(book.groups, self.stream, self.attention, pack, (q, k, v))
            if automatic:
                more += f"; for {self.layers()}"
            more += priority_line(rings_of_normal_priority(book.groups))
            book.startup = plan.describe() + more
            book.log(book.startup, which if automatic else ("attention", self.head_sizes))
        elif plan.choice is not None and which not in book.logged:
            book.log(f"{plan.describe()}; for {self.layers()}", which)
        elif book.groups.communicators != book.communicators:
            book.log(book.groups.communicators)
        book.communicators = book.groups.communicators
        if plan.choice is not None:
            book.logged.add(which)
        return plan

    def layers(self) -> str:
        """Name the layers of this kind, for the log. With `--burst-mask` each layer is a kind, and
        only the first layer of several with the same mask and algorithm is logged.
        """
        if self.number:
            return f"layer {self.number} and layers with the same mask"
        if self.window is None:
            return "layers without a window"
        limits = ", ".join("all" if limit is None else str(limit) for limit in self.window)
        return f"layers with the window ({limits})"


@dataclass
class PlanBook:
    """The grid of one context-parallel group and the plans made over it.

    startup: the line of the first plan of softmax attention; communicators, logged: those of the
    rings, and further kinds of layers, that have been logged.
    chosen: what "auto" has become, by kind and shapes. others: the books of groups that hold single
    micro-batches of the same layers, by their ranks. metrics: of the run, if it writes them.
    """

    groups: Groups
    metrics: step_metrics.StepMetrics | None = None
    startup: str | None = None
    communicators: str = ""
    logged: set[Hashable] = field(default_factory=set)
    chosen: dict[tuple, AttentionKeywords] = field(default_factory=dict)
    others: dict[tuple[int, ...], PlanBook] = field(default_factory=dict)
    _lowest: dict[Hashable, int] = field(default_factory=dict)
    _plans: RecentCache = field(default_factory=lambda: RecentCache(PLANS_KEPT))
    _packs: Packs = field(default_factory=packs)
    _moves: Moves | None = None
    _rates: Rates | None = None  # of the run's cluster file, once it was read

    def __post_init__(self) -> None:
        if self.metrics is not None:
            self.metrics.watch(self.groups)

    def join(self, kind: Kind, layer_number: int) -> bool:
        """Register a layer; True if it is the leader of its kind.

        A rebuilt layer with the leader's number leads too. Thus leadership depends only on the
        order of construction, never on when old models are garbage-collected.
        """
        lowest = min(layer_number, self._lowest.get(kind, layer_number))
        self._lowest[kind] = lowest
        return layer_number == lowest

    def over(self, ranks: tuple[int, ...], make_groups: Callable[[], Groups]) -> PlanBook:
        """The book of a group that holds a micro-batch; a collective of that group, if made now."""
        if ranks not in self.others:
            self.others[ranks] = PlanBook(make_groups(), metrics=self.metrics)
        return self.others[ranks]

    @contextmanager
    def refusing(self, leads: bool) -> Iterator[None]:
        """Inside, a layer's call is checked; if a leader's is refused, ranks whose call was right
        raise the same ValueError.
        """
        try:
            yield
        except ValueError as error:
            if leads:
                agree(error, self.groups.gather)
            raise

    def plan(
        self,
        kind: Kind,
        leads: bool,
        tensors: Tensors,
        pack: Pack | None = None,
        rows: RowChunking = WHOLE,
    ) -> Any:
        """The plan for these tensors; a collective if `leads`, but for layers that run again in
        backward, a look-up otherwise.
        """
        again = in_backward()
        with self.refusing(leads and not again):
            own = kind.own_mask(pack, len(tensors["q"]) * self.groups.size)
        shapes = tuple((t.shape, t.dtype, t.device.type) for t in tensors.values())
        # Ranks compare masks by their repr, and functions may return another for every batch.
        key = kind, pack, rows, None if own is None else repr(own), shapes
        captured = capturing(tensors)
        if leads and not (again or captured) and key in self._plans:
            self.groups.compare(self._plans[key].facts)

        def make() -> Any:
            if captured:
                raise ValueError(
                    "a CUDA graph captures attention whose plan was never made: run such a forward "
                    "and backward before (--cuda-graph-warmup-steps)"
                )
            if leads:
                with nullcontext() if self.metrics is None else self.metrics.planning():
                    return kind.prepare(self, tensors, pack, rows, own)
            shown = {name: (*t.shape, t.dtype) for name, t in tensors.items()}
            raise ValueError(
                f"this layer got tensors that the lowest layer of its kind on this rank never saw, "
                f"or not in its last {PLANS_KEPT} calls: {shown}, documents "
                f"{pack and pack.documents}; sequence length, micro-batch size and documents must "
                "be the same for all layers of a forward"
            )

        plan = self._plans.of(key, make)
        if self.metrics is not None and not again and isinstance(plan, Plan):
            self.metrics.count_forward(plan)
        return plan

    def around(self, kind: LayerKind, q, k, v, pack: Pack | None = None) -> Around | None:
        """The exchanges of rows around attention over q, k, v of the stream; None if it has the
        stream's layout. A collective, the first time.
        """
        if kind.stream is None or self.groups.size == 1:
            return None
        if self._moves is None:
            self._moves = Moves(self.groups)
        return self._moves.around(kind.stream, kind.attention, pack, (q, k, v))

    def pack(self, total: int, params: Any) -> Pack:
        """The documents of a `PackedSeqParams`; each of its tensors is read from the device once.

        Raises `ValueError` for parameters that do not describe self-attention over one pack.
        """
        lengths, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
        if lengths is None:
            raise ValueError("packed_seq_params: cu_seqlens_q is None; it says where documents end")
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            keys, queries = getattr(params, name), getattr(params, name.replace("_kv", "_q"))
            if keys is None or keys is queries:
                continue
            if queries is None or self._packs.of(total, keys) != self._packs.of(total, queries):
                raise ValueError(
                    f"packed_seq_params: {name} differs from that of the queries; cross-attention "
                    "is not split, only self-attention is"
                )
        return self._packs.of(total, lengths, padded)

    def rates(self, burst: BurstConfig) -> Rates | None:
        """Those of `--burst-cluster`, whose file is read once; None without it."""
        if burst.cluster is not None and self._rates is None:
            per_node = self.groups.topology.per_node
            self._rates = cluster_file.read(burst.cluster).run_rates(per_node)
        return self._rates

    def log(self, line: str, what: Hashable = None) -> None:
        """Log a line about plans, once in a run: on rank 0, or on the first stage of its pipeline
        that says something of `what` (default: this line), as a stage may have no such layer.
        Stages run one after another at first, and the first of them to ask the store logs.
        """
        # Late: what a plan says of itself is read where there may be no Megatron-Core.
        from megatron.core.parallel_state import get_pipeline_model_parallel_group

        pipeline: Any = get_pipeline_model_parallel_group(check_initialized=False)
        told = torch.distributed.get_rank() != 0
        if pipeline is not None and pipeline.size() > 1:
            told = 0 not in torch.distributed.get_process_group_ranks(pipeline)
            if not told:
                key = f"megatron_burst {pipeline.group_name} {self.groups.size} {what or line}"
                told = distributed_c10d._get_default_store().add(key, 1) > 1
        if not told:
            logging.getLogger("megatron_burst").info(line)


def rings_of_normal_priority(groups: Groups) -> list[str]:
    """Those on groups of NCCL, Megatron's, whose streams do not have high priority."""
    found = []
    for (channel, device), group in groups.carriers.items():
        if backends(group).get(device) == "nccl":
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            if getattr(options, "is_high_priority_stream", None) is False:
                found.append(channel.ring)
    return found


def priority_line(rings: Sequence[str]) -> str:
    """What the start-up line says of rings on Megatron's groups whose streams have normal priority;
    nothing where one queue keeps the order of launches.
    """
    if not rings or patching.launches_in_order():
        return ""
    names = " ".join(dict.fromkeys("cp" if r in ("flat", "ulysses") else "hcp" for r in rings))
    return (
        f"; messages of rings on Megatron's groups ({', '.join(rings)}) have normal priority and "
        "may wait for attention's kernels to drain: add --high-priority-stream-groups "
        f"{names}, or on GPUs before Blackwell export CUDA_DEVICE_MAX_CONNECTIONS=1"
    )


def capturing(tensors: Tensors) -> bool:
    """Are these tensors of a call that a CUDA graph captures?"""
    return any(t.is_cuda for t in tensors.values()) and torch.cuda.is_current_stream_capturing()


def nothing_seen(query: torch.Tensor) -> torch.Tensor:
    """Largest logits [h] of `query` [s, b, h, d] before any was computed."""
    dtype = accumulation_dtype(query.dtype)
    return torch.full(query.shape[2:3], float("-inf"), dtype=dtype, device=query.device)


def startup_line() -> str | None:
    """The start-up line of this process's first plan: algorithm, topology, side, layout, kernel,
    bytes per layer. None before the first forward, or when no model uses BurstAttention.
    """
    for first in _books().values():
        for book in (first, *first.others.values()):
            if book.startup:
                return book.startup
    return None


def splits_attention(group: Any) -> bool:
    """Whether a model of this process splits its attention over this context-parallel group."""
    return any(reference() is group for reference, _ in _books())


def plan_book(group: Any, key: tuple, make_groups: Callable[[], Groups]) -> PlanBook:
    """The book of a context-parallel group and a topology; made, and kept until `uninstall`."""
    # A weak reference: `destroy_process_group()` joins a group's threads only if nothing else keeps
    # the group. A dead reference equals no other, so a later group cannot get this book.
    books, where = _books(), (weakref.ref(group), key)
    if where not in books:
        books[where] = PlanBook(make_groups(), metrics=step_metrics.metrics())
    return books[where]


def _books() -> dict[tuple, PlanBook]:
    return patching.notes().setdefault("plan_books", {})
