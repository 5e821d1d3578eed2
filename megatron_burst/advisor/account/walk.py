"""One layer forward and backward on a tape.

Three ways through it: nothing recomputed (all that modules save stays), recomputed from its input,
and that with chunks and tiles of rows.
"""

from __future__ import annotations

from dataclasses import replace

from ..settings import Settings
from ..shapes.layer_kinds import MIXER, Part
from ..shapes.models import Model
from .core import ATTENTION
from .layer import attention_half, mlp_half
from .mixer import mixer_half
from .rings import RoomsOf, core_of, on_ring
from .sizes import B, F, Sizes
from .tape import Half, Tape

INPUTS, BETWEEN, SUMS = "layer inputs", "between layers", "weight gradients of a layer"


class Walk:
    """Sizes of a run's layers, and ways through them. hidden, store: bytes of a layer's input and
    of its kept attention results; on_host: of a layer's chunks that wait on the host."""

    def __init__(self, model: Model, run: Settings, tape: Tape, rooms_of: RoomsOf | None = None):
        self.model, self.run, self.tape = model, run, tape
        self.sparse = Sizes.of(model, run)
        self.dense = Sizes.of(model, run, sparse=False)
        again = core_of(self.dense, run, rooms_of)  # of a recompute
        self.cores = {"first": replace(again, store=0.0), "again": again}
        rows, x = run.rows, self.dense
        self.hidden = rows / run.tp * model.hidden * B
        self.out = rows * (x.out * B + x.heads * F)
        self.store = run.store * self.out
        self.keys = rows * run.ulysses * on_ring(x, run).kv  # elements, where chunks attend
        held = 2 / run.sequence_chunks if run.chunks_on_host else 1.0
        self.held = min(1.0, held)  # the fraction of chunks that is on the device
        self.on_host = rows * (x.query + x.kv + 2 * x.out) * B * (1 - self.held)

    # --- from saved tensors ------------------------------------------------------------------

    def forward_saving(self, part: Part, prefix: str, made: str) -> None:
        """Forward; all that backward needs stays."""
        halves = self._halves(part, "first", prefix)
        for half in halves:
            half.forward(self.tape, grad=True)
        self.tape.move(halves[-1].named("y"), made, INPUTS)

    def backward_saved(self, part: Part, prefix: str) -> None:
        """Backward of the same: the gradient "dy" of its output becomes that of its input."""
        tape, halves = self.tape, self._halves(part, "first", prefix)
        for half, before in zip(reversed(halves), [*halves[-2::-1], None], strict=True):
            half.backward(tape)
            if before:
                tape.drop(before.named("y"))
            tape.drop("dy")
            tape.move(half.gradient("x"), "dy", BETWEEN)

    def saved(self, part: Part) -> float:
        """Bytes that a layer leaves for backward if nothing is recomputed."""
        tape = Tape()
        for half in self._halves(part, "first"):
            half.forward(tape, grad=True)
        return sum(tape.moments[-1].items.values())

    # --- forward that leaves its input -------------------------------------------------------

    def attend(self, part: Part, made: str) -> None:
        """Forward of the attention half: "y1", or `made` where no MLP half follows."""
        name, item = ("y1", ATTENTION) if part.mlp else (made, INPUTS)
        if part.attention is None:
            return
        if self._in_chunks(part):
            self._chunks_forward(name, item, "first")
        else:
            half = self._attention(part, "first")
            half.forward(self.tape, grad=False)
            self.tape.move(half.named("y"), name, item)

    def transform(self, part: Part, made: str) -> None:
        """Forward of the MLP half."""
        if part.mlp and self.run.mlp_tiles > 1:
            self._tiles_forward(part, made, INPUTS)
        elif part.mlp:
            mlp = self._mlp(part, self.run.rows)
            mlp.forward(self.tape, grad=False)
            self.tape.move(mlp.named("y"), made, INPUTS)
        self.tape.drop("y1")

    # --- recompute and backward --------------------------------------------------------------

    def backward(self, part: Part, name: str, left: tuple[str, str]) -> None:
        """Recompute and backward; what it had left, its input and store, goes at the end."""
        tape, run, mlp = self.tape, self.run, self._mlp(part, self.run.rows)
        attention = self._attention(part, "again")
        y = ("y1", ATTENTION) if part.mlp else ("y", BETWEEN)
        if self._in_chunks(part):
            self._chunks_forward(*y, "again")
            tape.make("results", ATTENTION, self.out * (run.store < 1) * self.held)
        elif part.attention:
            attention.forward(tape, grad=True)
            tape.move(attention.named("y"), *y)
        if part.mlp and run.mlp_tiles > 1:
            self._tiles_forward(part, "y", BETWEEN)
        elif part.mlp:
            mlp.forward(tape, grad=True)
            tape.move(mlp.named("y"), "y", BETWEEN)
        if self.dense.cpu and run.mlp_tiles == 1:
            tape.drop("y1")  # the norm has saved it in fp32
        if part.mlp:
            tape.begin(f"backward of {name}: MLP half")
            self._mlp_backward(part, mlp, "dy1" if part.attention else "dx")
        tape.drop("y1")
        if part.attention:
            tape.begin(f"backward of {name}: attention half")
            self._attention_backward(part, attention)
        tape.drop("results", "dy1", "dy", "y", *left)
        tape.move("dx", "dy", BETWEEN)

    def _mlp_backward(self, part: Part, mlp: Half, made: str) -> None:
        if self.run.mlp_tiles > 1:
            self._tiles_backward(part, made)
        else:
            mlp.backward(self.tape)
            self.tape.move(mlp.gradient("x"), made, BETWEEN)

    def _attention_backward(self, part: Part, attention: Half) -> None:
        if self._in_chunks(part):
            self._chunks_backward()
        else:
            attention.backward(self.tape)
            self.tape.move(attention.gradient("x"), "dx", BETWEEN)

    # --- in chunks and tiles -----------------------------------------------------------------

    def _in_chunks(self, part: Part) -> bool:
        return self.run.sequence_chunks > 1 and part.attention not in (None, MIXER)

    def _chunks_forward(self, made: str, item: str, time: str) -> None:
        """Keys and values of all rows first, then chunk by chunk; results of all chunks stay."""
        tape, run = self.tape, self.run
        tape.make("keys", ATTENTION, self.keys * B * self.held)
        results = self.out * (self.cores[time].store < 1) * self.held
        tape.make("chunk results", ATTENTION, results)
        tape.make(made, item, self.hidden)
        half = self._chunk(time)
        with tape.while_there({ATTENTION: self.hidden / run.sequence_chunks}):
            half.forward(tape, grad=False)
        tape.drop(half.named("y"), "keys", "chunk results")

    def _chunks_backward(self) -> None:
        """Each chunk again for its queries, then again for its keys and values."""
        tape, run = self.tape, self.run
        tape.make("dx", BETWEEN, self.hidden)
        tape.make("keys", ATTENTION, self.keys * B * self.held)
        tape.make("dkv", ATTENTION, self.keys * F * self.held)
        tape.make("sums", SUMS, self._summed(self.model.attention_parameters))
        half, part = self._chunk("again"), self.hidden / run.sequence_chunks
        with tape.while_there({ATTENTION: 2 * part}):  # rows of the input and of the gradient
            half.forward(tape, grad=True)
            half.backward(tape)
        tape.drop(half.named("y"), half.gradient("x"), "keys", "dkv", "sums")

    def _tiles_forward(self, part: Part, made: str, item: str) -> None:
        self.tape.make(made, item, self.hidden)
        half = self._tile(part)
        half.forward(self.tape, grad=False)
        self.tape.drop(half.named("y"))

    def _tiles_backward(self, part: Part, made: str) -> None:
        tape, model = self.tape, self.model
        tape.make(made, BETWEEN, self.hidden)
        tape.make("sums", SUMS, self._summed(model.mlp_parameters(part, self.run.ep)))
        half = self._tile(part)
        half.forward(tape, grad=True)
        half.backward(tape)
        tape.drop(half.named("y"), half.gradient("x"), "sums")

    def _summed(self, parameters: float) -> float:
        """fp32 sums of a half's weight gradients over its pieces, and one piece's; Transformer
        Engine adds to Megatron's own gradients in place."""
        return parameters / self.run.tp * (F + B) if self.dense.cpu else 0.0

    # --- halves ------------------------------------------------------------------------------

    def _halves(self, part: Part, time: str, prefix: str = "") -> list[Half]:
        halves = [self._attention(part, time, prefix)] * (part.attention is not None)
        return halves + [self._mlp(part, self.run.rows, prefix)] * part.mlp

    def _attention(self, part: Part, time: str, prefix: str = "") -> Half:
        if part.attention == MIXER:
            return mixer_half(self.dense, self.run.rows, prefix)
        return attention_half(self.dense, self.run.rows, self.cores[time], prefix)

    def _mlp(self, part: Part, rows: int, prefix: str = "") -> Half:
        return mlp_half(self.sparse if part.sparse else self.dense, rows, prefix)

    def _chunk(self, time: str) -> Half:
        rows = self.run.rows // self.run.sequence_chunks
        return attention_half(self.dense, rows, self.cores[time], "chunk ")

    def _tile(self, part: Part) -> Half:
        return self._mlp(part, -(-self.run.rows // self.run.mlp_tiles), "tile ")
