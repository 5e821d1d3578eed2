# SPDX-License-Identifier: Apache-2.0
"""The plan book: plans and process groups that the layers of a model share.

Making a plan is a collective of the context-parallel group, because ranks compare their plans.
These rules ensure that either all ranks take part or none does:

- Each layer has a kind (`LayerKind`, or `LinearKind` of linear attention), which is the same on all
ranks. The leader of a kind makes the plan. A layer is a leader if no earlier layer of its kind on
this rank has a lower number. If a later layer has a lower number, both lead, on every rank.
- The leader communicates in every forward, so that all ranks raise the same error if their calls
differ. It compares the facts of the call (names and values that must be equal on all ranks). A rank
that has no plan for the call makes it in the same exchange. Other layers only look the plan up.
Layers that are recomputed in backward also only look it up, because the forward of their
micro-batch has compared the plan.
- With a mask of the user (`--burst-mask`) every layer is a separate kind, because its mask is known
only when the layer is called with a batch.
- Every plan of softmax attention assumes that q, k and v need gradients. One plan then serves both
forward and recomputation, although recomputation runs layers in another order. This also holds with
several micro-batches in flight. The assumption costs little: one projection usually computes q, k
and v, so either all of them need gradients or none.
- Packed batches have one plan per pack. The `PLANS_KEPT` most recently used plans are kept; the
order of use is the same on all ranks. A thread makes the plans of the next micro-batch while the
device computes (`plans_ahead`). Ranks compare them in the forward, like any other plan.
- While a CUDA graph captures a layer, ranks compare nothing, and replays run no Python: an earlier
forward made and compared the plan, which is the same for every micro-batch.
- A micro-batch may have its own context-parallel group (hybrid context parallelism). Every set of
ranks has its own book, with groups and plans that only its members make.
- "auto" selects an algorithm for the first plan with a kind and with shapes of q, k and v. Later
plans with the same kind and shapes use this algorithm too, whatever their documents.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import distributed_c10d

from ...autotune import cluster_file
from ...autotune.rates import Rates
from ...comm.consensus import agree, as_value_error
from ...comm.groups import Groups
from ...comm.operation import Operation, prepared
from ...comm.process_groups import backends
from ...comm.recent import RecentCache
from ...comm.relays import one_queue
from ...config import BurstConfig
from ...kernels.online_softmax import accumulation_dtype
from ...linear_attention.plan import LinearAttentionOperation
from ...masks import Causal, Full, Mask, Window
from ...options import AttentionKeywords, AttentionOptions
from ...planning.plan import Plan
from ...planning.prepare import AttentionOperation
from ...recompute.checkpoint import in_backward
from .. import patching, step_metrics
from ..data.cut import BatchCut
from ..data.packed import Pack, Packs, packs
from ..users_mask import MaskBatch, MaskLayer, users_mask
from .plans_ahead import PlansAhead
from .relayout import RowExchange, RowExchanges, exchange_line

PLANS_KEPT = 256  # exceeds packed micro-batches in flight x kinds of layers
Tensors = Mapping[str, Any]  # tensors of a call by name; only shapes, dtypes and device are read


class RowChunkSizes(NamedTuple):
    """The partition of a rank's rows into row chunks.

    Attributes:
        chunks: Number of row chunks.
        blocks: Number of equal blocks of rows, one per rank of sequence parallelism. Each row chunk
            contains the same number of rows from each block.
    """

    chunks: int = 1
    blocks: int = 1


ALL_ROWS = RowChunkSizes()


class Kind(Protocol):
    """The properties of a layer that are known when the layer is built.

    Layers with equal kinds share plans. A kind is hashable and is the same on all ranks.
    """

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask | None:
        """Return the mask of a batch from the user's function; None without such a function.

        Args:
            pack: the documents of a packed batch, or None.
            seq_len: tokens of the sequence over all ranks.

        Raises:
            ValueError: The function raised, or returned no mask.
        """
        ...

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: Any
    ) -> Operation[Any, Any]:
        """Return the operation (`comm.operation`) that checks the call and makes its plan.

        This method does not communicate. A thread may call it before the forward of the micro-batch
        (`plans_ahead`).

        Args:
            book: the plan book of the layer's group.
            tensors: the tensors of the call, by name.
            pack: the documents of a packed batch, or None.
            rows: the row chunks.
            own: the result of `own_mask`.
        """
        ...

    def log(self, book: PlanBook, plan: Any, tensors: Tensors, pack: Pack | None, own: Any) -> None:
        """Log a description of a new plan, unless the same line was logged before.

        Args:
            book: the plan book of the layer's group.
            plan: the plan.
            tensors: the tensors of the call, by name.
            pack: the documents of a packed batch, or None.
            own: the result of `own_mask`.
        """
        ...


@dataclass(frozen=True)
class LayerKind:
    """The `Kind` of a layer of softmax attention.

    Attributes:
        burst: The options of the run.
        causal: Whether a token sees only earlier tokens.
        window: (left, right) tokens that a token sees; None if the layer has no window.
        softmax_scale: The factor of the logits, or None.
        head_sizes: Number of query heads, number of key/value heads, key width, value width.
        attention_cut: Rule by which attention cuts a sequence over ranks.
        max_logits: Whether to record the largest logit of each head.
        selects: Whether the layer has sparse attention over selected keys. The plugin `sparse` then
            chooses the algorithm and logs the choice.
        number: The number of the layer, from 1; 0 if the mask does not depend on the number.
        run_cut: How the run cuts batches if attention has another layout, otherwise None.
    """

    burst: BurstConfig
    causal: bool
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    head_sizes: tuple[int | None, ...]
    attention_cut: BatchCut
    max_logits: bool = False
    selects: bool = False
    number: int = 0
    run_cut: BatchCut | None = None

    def own_mask(self, pack: Pack | None, seq_len: int) -> Mask | None:
        """Return the mask that the function of `--burst-mask` makes; see `Kind.own_mask`."""
        documents, spans = (None, None) if pack is None else (pack.documents, pack.spans)
        if self.burst.mask is None:
            if spans is not None:
                raise ValueError(
                    "packed_seq_params: with_spans set spans of images, and no mask reads them: "
                    "add --burst-mask megatron_burst.plugins.vision.images:gemma3 (or gemma4, or "
                    "your own function), or do not call with_spans if attention is causal"
                )
            return None
        layer = MaskLayer(self.number, self.causal, self.window)
        batch = MaskBatch(seq_len, documents, spans)
        return users_mask(self.burst.mask, layer, batch)

    def operation(
        self, book: PlanBook, tensors: Tensors, pack: Pack | None, rows: RowChunkSizes, own: Any
    ) -> AttentionOperation:
        """Return the operation for q [s, b, h, d], k [s, b, g, d], v [s, b, g, w]; see `Kind`."""
        keywords = self.burst.keywords()
        if not self.selects:
            keywords |= book.chosen.get(LayerCall.of(self, rows, tensors), {})
        mask = own
        if mask is None:
            mask = Causal() if self.causal else Full()
            if self.window is not None:
                mask = mask & Window(*self.window)
        if pack is not None:
            mask = mask & pack.mask
            keywords["layout"] = pack.layout(self.attention_cut, book.groups.size)
        keywords["mask"], keywords["softmax_scale"] = mask, self.softmax_scale
        keywords["sequence_chunks"], keywords["row_blocks"] = rows
        return AttentionOperation(
            groups=book.groups,
            tensors=tuple(tensors.values()),
            shapes=None,
            options=AttentionOptions(**keywords),
            needs_grad=(True, True, True),
            sink=None,
            max_logits=nothing_seen(tensors["q"]) if self.max_logits else None,
            rates=book.rates(self.burst) if keywords.get("algorithm") == "auto" else None,
        )

    def log(
        self, book: PlanBook, plan: Plan, tensors: Tensors, pack: Pack | None, own: Any
    ) -> None:
        """Log the first plan of the run and each algorithm that "auto" selects; see `Kind.log`."""
        if self.selects:
            return
        automatic = self.burst.algorithm == "auto"
        subject = (self.window if own is None else own.complete_text), plan.algorithm
        if book.startup is None:
            rates = book.rates(self.burst) if automatic else None
            details = "" if rates is None else f"; rates of {self.burst.cluster}"
            if self.burst.mask is not None:
                details += f"; masks of {self.burst.mask}, called for every layer"
            if self.run_cut is not None:
                qkv = tuple(tensors.values())
                details += exchange_line(book.groups, self.run_cut, self.attention_cut, pack, qkv)
            if automatic:
                details += f"; for {self.layers()}"
            details += priority_line(rings_of_normal_priority(book.groups))
            book.startup = plan.describe() + details
            book.log(book.startup, subject if automatic else ("attention", self.head_sizes))
        elif plan.choice is not None and subject not in book.logged:
            book.log(f"{plan.describe()}; for {self.layers()}", subject)
        elif book.groups.communicators != book.communicators:
            book.log(book.groups.communicators)
        book.communicators = book.groups.communicators
        if plan.choice is not None:
            book.logged.add(subject)

    def layers(self) -> str:
        """Return a description of the layers of this kind, for the log.

        With `--burst-mask` each layer is its own kind. If several layers have the same mask and
        algorithm, only the first of them is logged.
        """
        if self.number:
            return f"layer {self.number} and layers with the same mask"
        if self.window is None:
            return "layers without a window"
        limits = ", ".join("all" if limit is None else str(limit) for limit in self.window)
        return f"layers with the window ({limits})"


class TensorKind(NamedTuple):
    """Shape, dtype and device of a tensor of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stand_in(self, requires_grad: bool) -> torch.Tensor:
        """Return a tensor of this shape, dtype and device with the memory of one element."""
        tensor = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return tensor.requires_grad_(requires_grad)


class LayerCall(NamedTuple):
    """A description of an attention call: the kind of layer and the shapes of the tensors.

    It contains neither the values of tensors nor the documents of a packed batch.

    Attributes:
        kind: The kind of the layers.
        rows: The row chunks.
        tensors: (name, shape, dtype and device) of each tensor.
    """

    kind: Kind
    rows: RowChunkSizes
    tensors: tuple[tuple[str, TensorKind], ...]

    @classmethod
    def of(cls, kind: Kind, rows: RowChunkSizes, tensors: Tensors) -> LayerCall:
        """Return the description of a call with these tensors."""
        kinds = (
            (name, TensorKind(tuple(t.shape), t.dtype, t.device)) for name, t in tensors.items()
        )
        return cls(kind, rows, tuple(kinds))

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.tensors[0][1].device

    def length(self, book: PlanBook) -> int:
        """Return the number of tokens of the sequence over all ranks of the book."""
        return self.tensors[0][1].shape[0] * book.groups.size

    def operation(
        self, book: PlanBook, pack: Pack, needs_grad: Collection[str]
    ) -> Operation[Any, Any]:
        """Return the operation of this call for a pack, from stand-ins of the tensors.

        Args:
            book: the plan book of the layer's group.
            pack: the documents of the packed batch.
            needs_grad: names of the tensors that require a gradient.
        """
        tensors = {name: kind.stand_in(name in needs_grad) for name, kind in self.tensors}
        return self.kind.operation(book, tensors, pack, self.rows, None)


@dataclass
class PlanBook:
    """The grid (`Groups`) of one context-parallel group, and the plans that its layers share.

    Attributes:
        groups: The grid.
        metrics: The metrics of the run; None if the run writes no metrics.
        startup: The log line of the first plan of softmax attention; None before this plan.
        communicators: The description of the rings' communicators that was last logged.
        logged: Keys of lines that were logged: kinds of layers, or choices of "auto".
        chosen: The options that "auto" selected, by call.
        micro_batch_books: Books of groups that hold single micro-batches of the same layers, by the
            global ranks of the group.
        ahead: Plans of later micro-batches, which a thread makes.
    """

    groups: Groups
    metrics: step_metrics.StepMetrics | None = None
    startup: str | None = None
    communicators: str = ""
    logged: set[Hashable] = field(default_factory=set)
    chosen: dict[LayerCall, AttentionKeywords] = field(default_factory=dict)
    micro_batch_books: dict[tuple[int, ...], PlanBook] = field(default_factory=dict)
    ahead: PlansAhead = field(default_factory=PlansAhead)
    _lowest: dict[Hashable, int] = field(default_factory=dict)
    _plans: RecentCache = field(default_factory=lambda: RecentCache(PLANS_KEPT))
    _packs: Packs = field(default_factory=packs)
    _row_exchanges: RowExchanges | None = None
    _rates: Rates | None = None  # from the run's cluster file, after it was read

    def __post_init__(self) -> None:
        if self.metrics is not None:
            self.metrics.watch(self.groups)

    def join(self, kind: Kind, layer_number: int) -> bool:
        """Register a layer; return whether it is the leader, which makes the plans of its kind.

        A layer leads if no layer with a lower number was registered before. A rebuilt layer with
        the same number leads too, whether or not the old layer still exists.

        Args:
            kind: the kind of the layer.
            layer_number: layer number, from 1.
        """
        lowest = min(layer_number, self._lowest.get(kind, layer_number))
        self._lowest[kind] = lowest
        return layer_number == lowest

    def book_of_ranks(self, ranks: tuple[int, ...], make_groups: Callable[[], Groups]) -> PlanBook:
        """Return the plan book of a group of ranks that holds one micro-batch.

        The first call for a group is a collective of that group, because it calls `make_groups`.

        Args:
            ranks: the global ranks of the group.
            make_groups: function that returns the `Groups` of these ranks; a collective.
        """
        books = self.micro_batch_books
        if ranks not in books:
            books[ranks] = PlanBook(make_groups(), metrics=self.metrics)
        return books[ranks]

    @contextmanager
    def shared_errors(self, leads: bool) -> Iterator[None]:
        """Return a context that raises the error of one rank on all ranks, as a `ValueError`.

        This is a collective, so it applies only to leaders in forward. Other layers, and layers
        that are recomputed in backward, raise their error only on this rank.

        Args:
            leads: whether the layer is the leader of its kind.
        """
        try:
            yield
        except Exception as error:
            if leads and not in_backward():
                agree(as_value_error(error), self.groups.gather)
            raise

    def plan(
        self,
        kind: Kind,
        leads: bool,
        tensors: Tensors,
        pack: Pack | None = None,
        rows: RowChunkSizes = ALL_ROWS,
    ) -> Any:
        """Return the plan for these tensors.

        The leader of a kind of layers makes or compares the plan in forward, which is a collective.
        Other layers, and layers that are recomputed in backward, only look the plan up.

        Args:
            kind: the kind of the layer.
            leads: whether the layer is the leader of its kind.
            tensors: the tensors of the call, by name.
            pack: the documents of a packed batch, or None.
            rows: the row chunks.

        Raises:
            ValueError: The call is not supported, ranks disagree, or a layer that does not lead
                gets other shapes than its leader.
        """
        recomputing = in_backward()
        with self.shared_errors(leads):
            own = kind.own_mask(pack, len(tensors["q"]) * self.groups.size)
        call = LayerCall.of(kind, rows, tensors)
        # A function may return a different mask for every batch.
        key = call, pack, None if own is None else own.complete_text
        captured = capturing(tensors)
        if leads and not (recomputing or captured) and key in self._plans:
            self.groups.compare(self._plans[key].facts)

        def make() -> Any:
            if captured:
                raise ValueError(
                    "a CUDA graph captures attention without a plan: run a forward and backward "
                    "with the same shapes before (--cuda-graph-warmup-steps)"
                )
            if leads:
                return self._make(call, tensors, pack, own)
            shapes_text = {name: (*t.shape, t.dtype) for name, t in tensors.items()}
            raise ValueError(
                "the first layer of the same type on this rank did not get these shapes and "
                f"documents in its last {PLANS_KEPT} calls: {shapes_text}, documents "
                f"{pack and pack.documents}; sequence length, micro-batch size and documents must "
                "be the same for all layers of a forward"
            )

        plan = self._plans.of(key, make)
        if self.metrics is not None and not recomputing and isinstance(plan, Plan):
            self.metrics.count_forward(plan)
        return plan

    def _make(self, call: LayerCall, tensors: Tensors, pack: Pack | None, own: Any) -> Any:
        """Make and log a plan; a collective that the leader of a kind calls."""
        operation = call.kind.operation(self, tensors, pack, call.rows, own)
        build = operation.build
        planned_ahead = isinstance(operation, (AttentionOperation, LinearAttentionOperation))
        if pack is not None and own is None and planned_ahead:
            self.ahead.expect(call, [name for name, t in tensors.items() if t.requires_grad])
            build = self.ahead.builder(call, pack, operation)
        if self.metrics is not None:
            build = self.metrics.timed(build)
        plan = prepared(operation, build)
        if isinstance(plan, Plan) and plan.choice is not None:
            self.chosen[call] = plan.choice.keywords  # for later batches
        call.kind.log(self, plan, tensors, pack, own)
        return plan

    def plan_ahead(self, pack: Pack) -> None:
        """Start to make the plans of the next micro-batch in a thread; no communication.

        Plans are made for the calls that needed a plan in earlier micro-batches. The forward of the
        next micro-batch compares these plans between ranks.

        Args:
            pack: the documents of the next micro-batch.
        """
        self.ahead.start(self, pack, [key[:2] for key in self._plans])

    def plan_received(self, receive: Callable[[], Pack | None]) -> None:
        """Start to make the plans of a micro-batch whose documents are still on their way.

        Args:
            receive: function that a thread calls. It waits for the documents and returns them, or
                returns None if the next micro-batch is unknown.
        """
        self.ahead.start_received(self, receive, [key[:2] for key in self._plans])

    def row_exchange(
        self, kind: LayerKind, q, k, v, pack: Pack | None = None
    ) -> RowExchange | None:
        """Return the exchange of rows around attention; the first call is a collective.

        Args:
            kind: the kind of the layer.
            q: [s, b, h, d] in the layout of the tokens, like k and v.
            k: [s, b, g, d].
            v: [s, b, g, w].
            pack: the documents of a packed batch, or None.

        Returns:
            The exchange; None if attention has the layout of the tokens.
        """
        if kind.run_cut is None or self.groups.size == 1:
            return None
        if self._row_exchanges is None:
            self._row_exchanges = RowExchanges(self.groups)
        return self._row_exchanges.exchange(kind.run_cut, kind.attention_cut, pack, (q, k, v))

    def pack(self, total: int, params: Any) -> Pack:
        """Return the documents of a `PackedSeqParams`; its tensors are read from the device once.

        Args:
            total: tokens of the pack over all ranks.
            params: the `PackedSeqParams`.

        Raises:
            ValueError: The parameters do not describe self-attention over one pack.
        """
        lengths, padded = params.cu_seqlens_q, params.cu_seqlens_q_padded
        if lengths is None:
            raise ValueError(
                "packed_seq_params: cu_seqlens_q is None; set it to the boundaries of documents"
            )
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            keys, queries = getattr(params, name), getattr(params, name.replace("_kv", "_q"))
            if keys is None or keys is queries:
                continue
            if queries is None or self._packs.of(total, keys) != self._packs.of(total, queries):
                raise ValueError(
                    f"packed_seq_params: {name} differs from the tensor of the queries; only "
                    "self-attention is supported"
                )
        return self._packs.of(total, lengths, padded)

    def rates(self, burst: BurstConfig) -> Rates | None:
        """Return the rates in the file of `--burst-cluster`, read once; None without the flag."""
        if burst.cluster is not None and self._rates is None:
            per_node = self.groups.topology.per_node
            self._rates = cluster_file.read(burst.cluster).run_rates(per_node)
        return self._rates

    def log(self, line: str, subject: Hashable = None) -> None:
        """Log a line about plans, once in a run.

        Without pipeline parallelism rank 0 logs the line. Otherwise the stages of rank 0's pipeline
        share a counter in torch's store, because rank 0 may have no layer of the kind. The first
        stage that increments the counter logs the line.

        Args:
            line: the line.
            subject: the layers that the line describes; default: the line itself.
        """
        # Imported here: tools read plans without Megatron-Core.
        from megatron.core.parallel_state import get_pipeline_model_parallel_group

        pipeline: Any = get_pipeline_model_parallel_group(check_initialized=False)
        logs = torch.distributed.get_rank() == 0
        if pipeline is not None and pipeline.size() > 1:
            logs = 0 in torch.distributed.get_process_group_ranks(pipeline)
            if logs:
                key = f"megatron_burst {pipeline.group_name} {self.groups.size} {subject or line}"
                logs = distributed_c10d._get_default_store().add(key, 1) == 1
        if logs:
            logging.getLogger("megatron_burst").info(line)


def rings_of_normal_priority(groups: Groups) -> list[str]:
    """Return the names of rings on NCCL groups of Megatron that have normal stream priority."""
    rings = []
    for (channel, device), group in groups.carriers.items():
        if backends(group).get(device) == "nccl":
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            if getattr(options, "is_high_priority_stream", None) is False:
                rings.append(channel.ring)
    return rings


def priority_line(rings: Sequence[str]) -> str:
    """Return the part of the start-up line about rings whose streams have normal priority.

    The result is empty without such rings. It is also empty if CUDA has only one queue, because
    kernels and messages then start in the order of launches.

    Args:
        rings: names of the rings.
    """
    if not rings or one_queue():
        return ""
    names = " ".join(dict.fromkeys("cp" if r in ("flat", "ulysses") else "hcp" for r in rings))
    return (
        f"; messages of rings on Megatron's groups ({', '.join(rings)}) have normal priority and "
        "may wait for the kernels of attention: add --high-priority-stream-groups "
        f"{names}, or on GPUs before Blackwell export CUDA_DEVICE_MAX_CONNECTIONS=1"
    )


def capturing(tensors: Tensors) -> bool:
    """Return whether a CUDA graph captures the calls with `tensors`; False on the CPU."""
    return any(t.is_cuda for t in tensors.values()) and torch.cuda.is_current_stream_capturing()


def nothing_seen(query: torch.Tensor) -> torch.Tensor:
    """Return initial values [h] for the largest logits of `query` [s, b, h, d]: all -inf."""
    dtype = accumulation_dtype(query.dtype)
    return torch.full(query.shape[2:3], float("-inf"), dtype=dtype, device=query.device)


def startup_line() -> str | None:
    """Return the start-up line of this process's first plan.

    The line contains the algorithm, topology, side (the tensors that are sent in backward), layout,
    kernel, and bytes per layer.

    Returns:
        The line; None before the first forward, or if no model uses BurstAttention.
    """
    for first in _books().values():
        for book in (first, *first.micro_batch_books.values()):
            if book.startup:
                return book.startup
    return None


def splits_attention(group: Any) -> bool:
    """Return whether BurstAttention splits attention of this process over this group."""
    return any(reference() is group for reference, _ in _books())


def plan_book(group: Any, key: tuple, make_groups: Callable[[], Groups]) -> PlanBook:
    """Return the plan book of a context-parallel group and a topology.

    The first call creates the book, which is kept until `uninstall`.

    Args:
        group: the context-parallel group.
        key: the settings that determine the grid, from `groups.topology_key`.
        make_groups: function that returns the `Groups` of the context-parallel group; a collective.
    """
    # A weak reference: `destroy_process_group()` joins a group's threads only if nothing else keeps
    # the group. A dead reference equals no other, so a later group cannot get this book.
    books, book_key = _books(), (weakref.ref(group), key)
    if book_key not in books:
        books[book_key] = PlanBook(make_groups(), metrics=step_metrics.metrics())
    return books[book_key]


def _books() -> dict[tuple, PlanBook]:
    return patching.run_state().plan_books
