"""One training step of one rank on a tape: batch, layers forward, LM head, layers backward.

Three ways through a layer: nothing recomputed (all that modules save stays), every layer
recomputed from its input, and that with chunks and tiles of rows. With a pipeline the step is the
backward of the oldest micro-batch, beside what the others in flight have left.
"""

from __future__ import annotations

from dataclasses import replace

from .head import head_bytes
from .layer import ATTENTION, B, F, Half, Sizes, attention_half, mlp_half
from .models import Model
from .rings import core_of
from .settings import Settings
from .tape import Tape

INPUTS, STORE, BETWEEN = "layer inputs", "attention store", "between layers"
HEAD, ROPE, BATCH, IN_FLIGHT = "LM head and loss", "rope tables", "batch", "other micro-batches"
SUMS = "weight gradients of a layer"


class Step:
    """What a stage of a run does in one step; `host` counts bytes that wait there."""

    def __init__(self, model: Model, run: Settings, stage: int):
        self.model, self.run, self.stage = model, run, stage
        self.tape, self.sizes = Tape(), Sizes.of(model, run)
        again = core_of(self.sizes, run)  # of a recompute, which finds what the store kept
        self.cores = {"first": replace(again, store=0.0), "again": again}
        self.layers = model.layers // run.pp
        rows = run.rows
        self.hidden = rows / run.tp * model.hidden * B
        self.out = rows * (self.sizes.query * B + self.sizes.heads * F)
        self.store = run.store * self.out
        self.host = 0

    # --- the step ----------------------------------------------------------------------------

    def run_all(self, every: bool = True) -> None:
        """The step; unless `every`, layers between the first and the last two only leave what they
        leave: they are like these, and the peak is never theirs alone."""
        tape, run, model = self.tape, self.run, self.model
        shown = set(range(self.layers)) if every else {0, 1, self.layers - 2, self.layers - 1}
        tape.begin("batch and embedding")
        tape.make("batch", BATCH, run.rows * (3 * 8 + 4))
        table = (run.rows if run.rope_local else run.seq) * model.head_dim * F
        tape.make("rope", ROPE, table)
        self._others()
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
            if layer in shown or run.recompute == "none":
                self._backward(layer)
            else:
                tape.drop(f"input {layer}", f"store {layer}")
        tape.begin("end")
        tape.drop("dy", "rope", "batch")

    def _others(self) -> None:
        """Micro-batches in flight beside this one: 1F1B, interleaved if stages are several."""
        run = self.run
        first = (run.vpp - 1) * run.pp + 2 * (run.pp - 1 - self.stage) + 1
        chunks = first if run.vpp > 1 else run.pp - self.stage
        layers = min(chunks, run.micro_batches * run.vpp) * self.layers / run.vpp - self.layers
        if run.recompute == "full":
            left = (self.hidden + self.store) * (1 - run.offload)
            self.host += round(max(0.0, layers) * (self.hidden + self.store) * run.offload)
        else:
            left = self._saved()
        if layers > 0:
            self.tape.make("others", IN_FLIGHT, layers * left)

    def _head(self, hidden: str) -> None:
        """Final norm, LM head, loss; its backward. What comes out is the last layer's gradient."""
        tape, found = self.tape, head_bytes(self.model, self.run)
        tape.begin("LM head and loss")
        cpu = 2 * self.hidden / B * F * (self.sizes.cpu and self.run.mlp_tiles == 1)
        tape.make("normed", HEAD, self.hidden + cpu)
        with tape.while_there({HEAD: found["while"]}):
            pass
        tape.make("kept", HEAD, found["kept"])
        tape.begin("backward of the LM head")
        with tape.while_there({HEAD: found.get("back", 0)}):
            pass
        tape.make("dy", BETWEEN, self.hidden)
        tape.drop("kept", "normed", hidden)

    # --- a layer forward ---------------------------------------------------------------------

    def _forward(self, layer: int, shown: bool) -> None:
        tape, run = self.tape, self.run
        if not shown and run.recompute == "full":
            tape.make(f"input {layer + 1}", INPUTS, self.hidden)
            if self.store:
                tape.make(f"store {layer}", STORE, self.store)
            self._move_out(layer)
            return
        if run.recompute == "none":
            attention, mlp = self._halves("first", f"{layer} ")
            attention.forward(tape, grad=True)
            mlp.forward(tape, grad=True)
            tape.move(mlp.named("y"), f"input {layer + 1}", INPUTS)
            return
        if run.sequence_chunks > 1:
            self._chunks_forward("y1", "first")
        else:
            attention, _ = self._halves("first")
            attention.forward(tape, grad=False)
            tape.move(attention.named("y"), "y1", ATTENTION)
        if self.store:
            tape.make(f"store {layer}", STORE, self.store)
        if run.mlp_tiles > 1:
            self._tiles_forward(f"input {layer + 1}", INPUTS)
        else:
            mlp = self._halves("first")[1]
            mlp.forward(tape, grad=False)
            tape.move(mlp.named("y"), f"input {layer + 1}", INPUTS)
        tape.drop("y1")
        self._move_out(layer)

    def _move_out(self, layer: int) -> None:
        """What a layer left goes to the host: its input when it ends, its store beside the next."""
        offload, tape = self.run.offload, self.tape
        if offload:
            self.host += round(offload * (self.hidden + self.store))
            tape.drop(f"input {layer}")
            tape.make(f"input {layer}", INPUTS, (1 - offload) * self.hidden)
            self._shrink_store(layer - 1)

    def _shrink_store(self, layer: int) -> None:
        if self.store and layer >= 0:
            self.tape.drop(f"store {layer}")
            self.tape.make(f"store {layer}", STORE, (1 - self.run.offload) * self.store)

    # --- a layer backward --------------------------------------------------------------------

    def _backward(self, layer: int) -> None:
        tape, run = self.tape, self.run
        if run.recompute == "none":
            tape.begin(f"backward of layer {layer}")
            self._backward_through(*self._halves("first", f"{layer} "))
            tape.drop(f"input {layer}")
            return
        tape.begin(f"recompute of layer {layer}")
        for back in (layer, layer - 1):  # the next one is fetched meanwhile
            self._fetch(back)
        attention, mlp = self._halves("again")
        if run.sequence_chunks > 1:
            self._chunks_forward("y1", "again")
            tape.make("results", ATTENTION, self.out * (run.store < 1))
        else:
            attention.forward(tape, grad=True)
            tape.move(attention.named("y"), "y1", ATTENTION)
        if run.mlp_tiles > 1:
            self._tiles_forward("y", BETWEEN)
        else:
            mlp.forward(tape, grad=True)
            tape.move(mlp.named("y"), "y", BETWEEN)
        if self.sizes.cpu and run.mlp_tiles == 1:
            tape.drop("y1")  # the norm has saved it in fp32
        tape.begin(f"backward of layer {layer}: MLP half")
        if run.mlp_tiles > 1:
            self._tiles_backward()
        else:
            mlp.backward(tape)
            tape.move(mlp.gradient("x"), "dy1", BETWEEN)
        tape.drop("y1")
        tape.begin(f"backward of layer {layer}: attention half")
        if run.sequence_chunks > 1:
            self._chunks_backward()
        else:
            attention.backward(tape)
            tape.move(attention.gradient("x"), "dx", BETWEEN)
        tape.drop("results", "dy1", "dy", "y", f"input {layer}", f"store {layer}")
        tape.move("dx", "dy", BETWEEN)

    def _backward_through(self, attention: Half, mlp: Half) -> None:
        """Without recompute: both halves, and the gradient of the layer's input."""
        tape = self.tape
        mlp.backward(tape)
        tape.drop(attention.named("y"))
        tape.move(mlp.gradient("x"), "dy1", BETWEEN)
        tape.drop("dy")
        attention.backward(tape)
        tape.drop("dy1")
        tape.move(attention.gradient("x"), "dy", BETWEEN)

    def _fetch(self, layer: int) -> None:
        """A layer's input and store come back, whole."""
        for name, item, size in (("input", INPUTS, self.hidden), ("store", STORE, self.store)):
            if layer >= 0 and size:
                self.tape.drop(f"{name} {layer}")
                self.tape.make(f"{name} {layer}", item, size)

    # --- in chunks and tiles -----------------------------------------------------------------

    def _chunks_forward(self, made: str, time: str) -> None:
        """Keys and values of all rows first, then chunk by chunk; results of all chunks stay."""
        tape, run, x = self.tape, self.run, self.sizes
        tape.make("keys", ATTENTION, run.rows * x.kv * B)
        tape.make("chunk results", ATTENTION, self.out * (self.cores[time].store < 1))
        tape.make(made, ATTENTION, self.hidden)
        half = self._chunk(time)
        with tape.while_there({ATTENTION: self.hidden / run.sequence_chunks}):
            half.forward(tape, grad=False)
        tape.drop(half.named("y"), "keys", "chunk results")

    def _chunks_backward(self) -> None:
        """Each chunk again for its queries, then again for its keys and values."""
        tape, run, x = self.tape, self.run, self.sizes
        tape.make("dx", BETWEEN, self.hidden)
        tape.make("keys", ATTENTION, run.rows * x.kv * B)
        tape.make("dkv", ATTENTION, run.rows * x.kv * F)
        tape.make("sums", SUMS, self._summed(self.model.attention_parameters))
        half, part = self._chunk("again"), self.hidden / run.sequence_chunks
        with tape.while_there({ATTENTION: 2 * part}):  # rows of the input and of the gradient
            half.forward(tape, grad=True)
            half.backward(tape)
        tape.drop(half.named("y"), half.gradient("x"), "keys", "dkv", "sums")

    def _tiles_forward(self, made: str, item: str) -> None:
        tape = self.tape
        tape.make(made, item, self.hidden)
        half = self._tile()
        half.forward(tape, grad=False)
        tape.drop(half.named("y"))

    def _tiles_backward(self) -> None:
        tape, model = self.tape, self.model
        tape.make("dy1", BETWEEN, self.hidden)
        weights = model.dense_parameters + model.expert_parameters / max(1, self.run.ep)
        tape.make("sums", SUMS, self._summed(weights))
        half = self._tile()
        half.forward(tape, grad=True)
        half.backward(tape)
        tape.drop(half.named("y"), half.gradient("x"), "sums")

    def _summed(self, parameters: float) -> float:
        """fp32 sums of a half's weight gradients over its pieces, and one piece's; Transformer
        Engine adds to Megatron's own gradients in place."""
        return parameters / self.run.tp * (F + B) if self.sizes.cpu else 0.0

    # --- halves ------------------------------------------------------------------------------

    def _halves(self, time: str, prefix: str = "") -> tuple[Half, Half]:
        rows, experts = self.run.rows, self.model.top_k
        return (
            attention_half(self.sizes, rows, self.cores[time], prefix),
            mlp_half(self.sizes, rows, prefix, experts),
        )

    def _chunk(self, time: str) -> Half:
        rows = self.run.rows // self.run.sequence_chunks
        return attention_half(self.sizes, rows, self.cores[time], "chunk ")

    def _tile(self) -> Half:
        rows = -(-self.run.rows // self.run.mlp_tiles)
        return mlp_half(self.sizes, rows, "tile ", self.model.top_k)

    def _saved(self) -> float:
        """Bytes that a layer leaves for backward if nothing is recomputed."""
        tape, halves = Tape(), self._halves("first")
        for half in halves:
            half.forward(tape, grad=True)
        return sum(tape.moments[-1].items.values())
