# SPDX-License-Identifier: Apache-2.0
"""Tensors that one rank allocates and frees in one training step.

The order is: batch, layers forward, LM head, layers backward. `LayerWalk` simulates one layer on a
`Tape` (a simulated memory). The attention half and the MLP half of a layer run whole, or in row
chunks and tiles. Saved tensors remain until backward, or backward recomputes them from the layer's
input. One micro-batch is simulated. With a pipeline, the activations of the other micro-batches
in flight are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..settings import BYTES, Settings, stage_layers
from ..shapes.layer_kinds import HYBRID, MIXER, SOFTMAX, LayerPart
from ..shapes.models import Model
from .hybrid import hybrid_half
from .operators import (
    ATTENTION,
    MLP,
    B,
    Core,
    F,
    LayerSizes,
    attention_half,
    head_bytes,
    mixer_half,
    mlp_half,
)
from .rings import CoreOf, core_of, on_ring, visiting_rows
from .tape import Half, Tape

INPUTS, BETWEEN, SUMS = "layer inputs", "between layers", "weight gradients of a layer"


class LayerWalk:
    """Simulation of the memory that layers allocate and free in forward and backward.

    `tape` is the simulated memory.

    Attributes:
        hidden: Bytes of a layer's input.
        store: Bytes of a layer's stored attention results.
        on_host: Bytes of one layer's row chunks in host memory (`Settings.chunks_on_host`).
    """

    def __init__(self, model: Model, run: Settings, tape: Tape, core_of: CoreOf = core_of):
        self.model, self.run, self.tape = model, run, tape
        self._halves: dict[tuple[Any, ...], Half] = {}
        self.sparse = LayerSizes.of(model, run)
        self.dense = LayerSizes.of(model, run, sparse=False)
        self._core_of, recompute_core = core_of, core_of(self.dense, run)
        self.cores = {"first": replace(recompute_core, store=0.0), "again": recompute_core}
        rows, x = run.rows, self.dense
        self.hidden = rows / run.tp * model.hidden * B
        self.out = rows * (x.out * B + x.heads * F)
        self.store = run.store * self.out
        # Elements of the keys and values that row chunks attend to.
        self.keys = rows * run.ulysses * on_ring(x, run).kv
        on_device = 2 / run.sequence_chunks if run.chunks_on_host else 1.0
        self.on_device = min(1.0, on_device)  # fraction of row chunks in GPU memory
        self.on_host = rows * (x.query + x.kv + 2 * x.out) * B * (1 - self.on_device)

    def forward(
        self,
        part: LayerPart,
        made: str,
        item: str,
        time: str,
        *,
        grad: bool,
        prefix: str = "",
        left: Iterable[tuple[str, str, float]] = (),
    ) -> None:
        """Allocate and free the tensors of a layer's forward.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            made: Name of the result on the tape (the simulated memory).
            item: Item of the memory account to which the result belongs.
            time: "first" for the first forward, or "again" for the recomputation.
            grad: Keep the tensors that backward needs.
            prefix: Prefix of tensor names on the tape.
            left: (name, item, bytes) of further tensors that stay allocated after the attention
                half.
        """
        kinds = halves_of(part)
        for kind in kinds:
            result = (made, item) if kind == kinds[-1] else (f"{prefix}y1", ATTENTION)
            if self._in_pieces(part, kind):
                self._pieces(part, kind, time, *result, grad=False)
            else:
                half = self._half(part, kind, time, prefix)
                half.forward(self.tape, grad)
                self.tape.move(half.named("y"), *result)
            if kind == ATTENTION:
                for tensor in left:
                    self.tape.make(*tensor)
        if not grad:
            self.tape.drop(f"{prefix}y1")

    def backward_saved(self, part: LayerPart, prefix: str) -> None:
        """Simulate backward of a layer from the tensors that `forward` saved.

        The tensor "dy" on the tape is the gradient of the layer's result before the call, and of
        the layer's input after the call.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            prefix: Prefix of tensor names on the tape, as passed to `forward`.
        """
        for kind in reversed(halves_of(part)):
            half = self._half(part, kind, "first", prefix)
            half.backward(self.tape)
            if kind == MLP:
                self.tape.drop(f"{prefix}y1")
            self.tape.drop("dy")
            self.tape.move(half.named("d x"), "dy", BETWEEN)

    def saved(self, part: LayerPart) -> float:
        """Return the bytes that a layer saves for backward if nothing is recomputed."""
        tape = Tape()
        for kind in halves_of(part):
            self._half(part, kind, "first").forward(tape, grad=True)
        return tape.moments[-1].bytes

    def backward(self, part: LayerPart, name: str, left: tuple[str, str]) -> None:
        """Simulate recomputation and backward of a layer.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            name: Name of the layer in the phases of the tape (the simulated memory).
            left: Names of the layer's input and of its stored attention results, which are freed at
                the end.
        """
        tape, run, results = self.tape, self.run, []
        if self._in_pieces(part, ATTENTION):
            results = [("results", ATTENTION, self.out * (run.store < 1) * self.on_device)]
        self.forward(part, "y", BETWEEN, "again", grad=True, left=results)
        if self.dense.cpu and run.mlp_tiles == 1:
            tape.drop("y1")  # the norm has saved it in fp32
        kinds = halves_of(part)
        for kind in reversed(kinds):
            made = "dx" if kind == kinds[0] else "dy1"
            tape.begin(f"backward of {name}: {kind}")
            if self._in_pieces(part, kind):
                self._pieces(part, kind, "again", made, BETWEEN, grad=True)
            else:
                half = self._half(part, kind, "again")
                half.backward(tape)
                tape.move(half.named("d x"), made, BETWEEN)
            if kind == MLP:
                tape.drop("y1")
        tape.drop("results", "dy1", "dy", "y", *left)
        tape.move("dx", "dy", BETWEEN)

    def _in_pieces(self, part: LayerPart, kind: str) -> bool:
        """Return whether a half of a layer runs in several row chunks or MLP tiles.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            kind: The half: ATTENTION or MLP.
        """
        if kind == MLP:
            return self.run.mlp_tiles > 1
        return self.run.sequence_chunks > 1 and part.attention not in (None, MIXER)

    def _pieces(
        self, part: LayerPart, kind: str, time: str, made: str, item: str, *, grad: bool
    ) -> None:
        """Simulate a half of a layer that runs in row chunks (attention) or in tiles (MLP).

        All chunks or tiles have equal sizes, so one of them is simulated. Tensors that exist during
        all chunks or tiles are allocated first. For attention these are the keys and values of all
        rows, and in forward the results of all chunks. In backward these are also sums of
        gradients.

        Args:
            part: Kinds of the attention half and the MLP half of the layer.
            kind: The half: ATTENTION or MLP.
            time: "first" for the first forward, or "again" for the recomputation.
            made: Name of the result; with `grad`, name of the gradient of the input.
            item: Item of the memory account to which `made` belongs.
            grad: Simulate forward and backward instead of forward only.
        """
        tape, run, chunks = self.tape, self.run, kind == ATTENTION
        beside = [("keys", ATTENTION, self.keys * B * self.on_device)] if chunks else []
        if not grad and chunks:
            results = self.out * (self.cores[time].store < 1) * self.on_device
            beside.append(("chunk results", ATTENTION, results))
        elif grad:
            beside += [("dkv", ATTENTION, self.keys * F * self.on_device)] if chunks else []
            model = self.model
            weights = model.attention_parameters if chunks else model.mlp_parameters(part, run.ep)
            # fp32 sums of weight gradients over all chunks or tiles, and the gradients of one.
            # Transformer Engine adds to Megatron's own gradients in place.
            beside.append(("sums", SUMS, weights / run.tp * (F + B) if self.dense.cpu else 0.0))
        result = (made, item, self.hidden)
        for tensor in (result, *beside) if grad else (*beside, result):
            tape.make(*tensor)
        if chunks:
            half = self._half(part, kind, time, "chunk ", run.rows // run.sequence_chunks)
            # The rows of the chunk are copied from the input and from the gradient.
            copied = {ATTENTION: (1 + grad) * self.hidden / run.sequence_chunks}
        else:
            half = self._half(part, kind, time, "tile ", -(-run.rows // run.mlp_tiles))
            copied = {}
        tape.enter(copied)
        half.forward(tape, grad=grad)
        if grad:
            half.backward(tape)
        tape.leave(copied)
        tape.drop(half.named("y"), half.named("d x"), *(name for name, *_ in beside))

    def _half(
        self, part: LayerPart, kind: str, time: str, prefix: str = "", rows: int | None = None
    ) -> Half:
        """Return the operators of a half of a layer (ATTENTION or MLP), from a cache.

        `rows` is the number of rows; None means all rows of the rank.
        """
        key = part, kind, time, prefix, rows
        if key not in self._halves:
            self._halves[key] = self._made(part, kind, time, prefix, rows or self.run.rows)
        return self._halves[key]

    def _made(self, part: LayerPart, kind: str, time: str, prefix: str, rows: int) -> Half:
        if kind == MLP:
            return mlp_half(self.sparse if part.sparse else self.dense, rows, prefix)
        if part.attention == MIXER:
            return mixer_half(self.dense, rows, prefix)
        if part.attention in HYBRID:
            return hybrid_half(self.dense, part.attention, rows, self._core(part, time), prefix)
        return attention_half(self.dense, rows, self._core(part, time), prefix)

    def _core(self, part: LayerPart, time: str) -> Core:
        """Return the memory of core attention in the first forward or in the recomputation.

        `time` is "first" or "again". A layer that uses `Settings.algorithm` counts as full
        attention, which needs the most memory.
        """
        core = self.cores[time]
        if part.attention in HYBRID:
            own = self._core_of(self.dense, self.run, kind=part.attention)
            return replace(own, store=core.store)
        if part.algorithm is None:
            return core
        window = self.model.window_of(part.attention, self.run.seq)
        own = replace(self.run, algorithm=part.algorithm)
        return replace(self._core_of(self.dense, own, window=window), store=core.store)


def visiting_bytes(model: Model, run: Settings, part: LayerPart) -> float:
    """Return the bytes of other ranks' keys and values that one layer keeps in host memory.

    The forward of the layer on one rank keeps them from one row chunk to the next.
    """
    own = replace(run, algorithm=part.algorithm) if part.algorithm else run
    if part.attention not in SOFTMAX or not own.keys_on_host:
        return 0.0
    window = model.window_of(part.attention, run.seq)
    return visiting_rows(own, window) * on_ring(LayerSizes.of(model, run), run).kv * B


def halves_of(part: LayerPart) -> list[str]:
    """Return the halves of a layer in the order of forward: ATTENTION, MLP or both."""
    return [ATTENTION] * (part.attention is not None) + [MLP] * part.mlp


STORE, HEAD, ROPE = "attention store", "LM head and loss", "rope tables"
BATCH, IN_FLIGHT, SAVED = "batch", "other micro-batches", "saved activations"
GATHERED = "gathered weights"


class TrainingStep:
    """Simulation of one training step of one pipeline stage.

    Args:
        model: Shape of the model.
        run: Settings of the run.
        stage: Index of the pipeline stage.
        core_of: Function that returns the memory of core attention, such as `rings.core_of`.
        every: Simulate all layers and keep all moments. False keeps only moments that exceed all
            earlier ones of their phase, and skips layers that cannot set a new peak.

    Attributes:
        host: Bytes of activations in host memory.
        keys_on_host: Bytes of other ranks' keys and values in host memory. Only one layer at a time
            keeps them.
    """

    def __init__(
        self, model: Model, run: Settings, stage: int, core_of: CoreOf = core_of, every: bool = True
    ):
        self.model, self.run, self.stage, self.every = model, run, stage, every
        self.tape = Tape(every)
        self.walk = LayerWalk(model, run, self.tape, core_of)
        self.parts = parts_of(model, run, stage)
        self.layers = len(self.parts)
        self.hidden = self.walk.hidden
        self.host = self.keys_on_host = 0
        self._saved: dict[LayerPart, float] = {}

    def run_all(self) -> None:
        """Simulate the step: allocate and free all tensors in order."""
        tape, run = self.tape, self.run
        shown = set(range(self.layers)) if self.every else self._different()
        tape.begin("batch and embedding")
        tape.make("batch", BATCH, run.rows * (3 * 8 + 4))
        tape.make("rope", ROPE, self._rope_bytes())
        self._in_flight()
        tape.make("whole", GATHERED, self._gathered())
        tape.make("input 0", INPUTS, self.hidden)
        for layer in range(self.layers):
            tape.begin(f"forward of layer {layer}")
            self._forward(layer, layer in shown)
        last = f"input {self.layers}"
        if self.stage == run.pp - 1:
            self._head(last)
        else:
            tape.drop(last)
            tape.make("dy", BETWEEN, self.hidden)
        for layer in reversed(range(self.layers)):
            if layer in shown:
                self._backward(layer)
            else:
                tape.drop(f"input {layer}", f"store {layer}", f"saved {layer}")
        if run.chunks_on_host:
            self.host += round(self.walk.on_host)
        self.keys_on_host = round(
            max(visiting_bytes(self.model, run, part) for part in set(self.parts))
        )
        tape.begin("end")
        tape.drop("dy", "rope", "batch", "whole")

    def _different(self) -> set[int]:
        """Return the indices of the layers that must be simulated to find the peak memory.

        These are the first two layers, the last two layers, and one occurrence of each combination
        of a layer's kind and the next layer's kind (the index of the later layer). Combinations
        matter because the attention outputs that two adjacent layers store may be in GPU memory at
        the same time.
        """
        last = {neighbours: layer for layer, neighbours in enumerate(pairwise(self.parts), 1)}
        return {0, 1, self.layers - 2, self.layers - 1, *last.values()}

    def _gathered(self) -> float:
        """Return the bytes of gathered parameters and of gradients with `fsdp`; otherwise 0.

        These are the parameters of `run.gathered` layers and the gradients of one layer. Each layer
        counts as the largest layer of the stage.
        """
        run, of = self.run, self.model.by_layer
        if not run.fsdp:
            return 0
        sizes = (of[layer] for layer in layers_of(self.model, run, self.stage))
        largest = max((shared + experts / run.ep) / run.tp for shared, _, experts in sizes)
        return largest * (run.gathered * B + BYTES[run.gradients])

    def _rope_bytes(self) -> int:
        low = self.model.latent
        rows = self.run.rows if self.run.rope_local else self.run.seq
        return rows * (low.rope if low else self.model.head_dim) * F

    def _stored(self, layer: int) -> float:
        """Return the bytes of a layer's stored attention results; 0 without softmax attention."""
        return self.walk.store * (self.parts[layer].attention in SOFTMAX)

    def _in_flight(self) -> None:
        """Add the activations that the pipeline schedule keeps for other micro-batches.

        The schedule is 1F1B, or interleaved with virtual stages. Nothing is added without pipeline
        parallelism.
        """
        run = self.run
        first = (run.vpp - 1) * run.pp + 2 * (run.pp - 1 - self.stage) + 1
        chunks = first if run.vpp > 1 else run.pp - self.stage
        layers = min(chunks, run.micro_batches * run.vpp) * self.layers / run.vpp - self.layers
        if layers <= 0:
            return
        if run.recompute == "full":
            store = sum(map(self._stored, range(self.layers))) / self.layers
            left = (self.hidden + store) * (1 - run.offload)
            self.host += round(layers * (self.hidden + store) * run.offload)
        else:
            left = sum(map(self.walk.saved, self.parts)) / self.layers
        self.tape.make("others", IN_FLIGHT, layers * left)

    def _head(self, hidden: str) -> None:
        """Simulate forward and backward of final norm, LM head and loss.

        `hidden` is the name of the tensor that the norm reads.
        """
        tape, sizes = self.tape, head_bytes(self.model, self.run)
        tape.begin("LM head and loss")
        tape.drop("whole")
        table = self.model.vocabulary * self.model.hidden / self.run.tp
        tape.make("whole", GATHERED, table * B * self.run.fsdp)
        cpu = 2 * self.hidden / B * F * (self.run.path == "cpu" and self.run.mlp_tiles == 1)
        tape.make("normed", HEAD, self.hidden + cpu)
        tape.pass_by({HEAD: sizes["while"]})
        tape.make("kept", HEAD, sizes["kept"])
        tape.begin("backward of the LM head")
        tape.pass_by({HEAD: sizes.get("back", 0)})
        tape.make("dy", BETWEEN, self.hidden)
        tape.drop("kept", "normed", hidden, "whole")
        tape.make("whole", GATHERED, self._gathered())

    # --- a layer, and its memory afterwards --------------------------------------------------

    def _forward(self, layer: int, shown: bool) -> None:
        tape, made, part = self.tape, f"input {layer + 1}", self.parts[layer]
        if self.run.recompute == "none":
            if shown:
                self.walk.forward(part, made, INPUTS, "first", grad=True, prefix=f"{layer} ")
                return
            if part not in self._saved:
                self._saved[part] = self.walk.saved(part)
            tape.make(made, INPUTS, self.hidden)
            tape.make(f"saved {layer}", SAVED, self._saved[part] - self.hidden)
            return
        store = self._stored(layer)
        left = [(f"store {layer}", STORE, store)] if store else []
        if shown:
            self.walk.forward(part, made, INPUTS, "first", grad=False, left=left)
        else:
            for tensor in ((made, INPUTS, self.hidden), *left):
                tape.make(*tensor)
        self._move_out(layer)

    def _backward(self, layer: int) -> None:
        part = self.parts[layer]
        if self.run.recompute == "none":
            self.tape.begin(f"backward of layer {layer}")
            self.walk.backward_saved(part, f"{layer} ")
            self.tape.drop(f"input {layer}")
            return
        self.tape.begin(f"recompute of layer {layer}")
        for fetched in (layer, layer - 1):  # the layer before it is fetched at the same time
            self._resize("input", fetched, 1)
            self._resize("store", fetched, 1)
        self.walk.backward(part, f"layer {layer}", (f"input {layer}", f"store {layer}"))

    def _move_out(self, layer: int) -> None:
        """Move a layer's input, and the attention store of the layer before it, to host memory.

        Only the fraction `Settings.offload` of each tensor is moved.
        """
        if offload := self.run.offload:
            self.host += round(offload * (self.hidden + self._stored(layer)))
            self._resize("input", layer, 1 - offload)
            self._resize("store", layer - 1, 1 - offload)

    def _resize(self, name: str, layer: int, share: float) -> None:
        """Set the fraction of a layer's "input" or "store" that is in GPU memory to `share`."""
        sizes = {"input": (INPUTS, self.hidden), "store": (STORE, self._stored(layer))}
        item, size = sizes[name]
        if layer >= 0 and size:
            self.tape.drop(f"{name} {layer}")
            self.tape.make(f"{name} {layer}", item, share * size)


def layers_of(model: Model, run: Settings, stage: int) -> list[int]:
    """Return the layer indices of a pipeline stage, over all its virtual stages."""
    if run.uneven:
        sizes = stage_layers(model, run)
        return list(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))
    per_chunk = model.layers // (run.pp * run.vpp)
    starts = [(chunk * run.pp + stage) * per_chunk for chunk in range(run.vpp)]
    return [layer for start in starts for layer in range(start, start + per_chunk)]


def parts_of(model: Model, run: Settings, stage: int) -> list[LayerPart]:
    """Return the `LayerPart` of each layer of a stage, with the layer's own algorithm, if any."""
    parts = [model.parts[layer] for layer in layers_of(model, run, stage)]
    own = run.by_kind
    return [part._replace(algorithm=own.get(part.attention or "")) for part in parts]
