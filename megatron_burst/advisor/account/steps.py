"""One training step of one rank on a tape: batch, layers forward, LM head, layers backward.

`walk` goes through a layer. With a pipeline the step is the backward of the oldest micro-batch,
beside what the others in flight have left.
"""

from __future__ import annotations

from ..settings import BYTES, Settings
from ..shapes.layer_kinds import FULL, WINDOW, Part
from ..shapes.models import Model
from .head import head_bytes
from .rings import RoomsOf
from .sizes import B, F
from .tape import Tape
from .walk import BETWEEN, INPUTS, Walk

STORE, HEAD, ROPE = "attention store", "LM head and loss", "rope tables"
BATCH, IN_FLIGHT, SAVED = "batch", "other micro-batches", "saved activations"
GATHERED = "gathered weights"


class Step:
    """What a stage of a run does in one step; `host` counts bytes that wait there."""

    def __init__(self, model: Model, run: Settings, stage: int, rooms_of: RoomsOf | None = None):
        self.model, self.run, self.stage = model, run, stage
        self.tape = Tape()
        self.walk = Walk(model, run, self.tape, rooms_of)
        self.parts = [model.parts[layer] for layer in layers_of(model, run, stage)]
        self.layers = len(self.parts)
        self.hidden = self.walk.hidden
        self.host = 0
        self._saved: dict[Part, float] = {}

    def run_all(self, every: bool = True) -> None:
        """The step; unless `every`, layers between the first and the last two only leave what they
        leave: they are like these, and the peak is never theirs alone."""
        tape, run = self.tape, self.run
        shown = set(range(self.layers)) if every else self._different()
        tape.begin("batch and embedding")
        tape.make("batch", BATCH, run.rows * (3 * 8 + 4))
        tape.make("rope", ROPE, self._rope_bytes())
        self._others()
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
        tape.begin("end")
        tape.drop("dy", "rope", "batch", "whole")

    def _different(self) -> set[int]:
        """The layers that a search must see: the first and last two, and the last of each kind."""
        last = {part: layer for layer, part in enumerate(self.parts)}
        return {0, 1, self.layers - 2, self.layers - 1, *last.values()}

    def _gathered(self) -> float:
        """With `fsdp`, parameters of some layers and the gradients of one, before they are shared
        out; of the largest layer."""
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
        """Bytes of attention results that a layer keeps."""
        return self.walk.store * (self.parts[layer].attention in (FULL, WINDOW))

    def _others(self) -> None:
        """Micro-batches in flight beside this one: 1F1B, interleaved if stages are several."""
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
        """Final norm, LM head, loss; its backward. What comes out is the last layer's gradient."""
        tape, found = self.tape, head_bytes(self.model, self.run)
        tape.begin("LM head and loss")
        tape.drop("whole")
        table = self.model.vocabulary * self.model.hidden / self.run.tp
        tape.make("whole", GATHERED, table * B * self.run.fsdp)
        cpu = 2 * self.hidden / B * F * (self.run.path == "cpu" and self.run.mlp_tiles == 1)
        tape.make("normed", HEAD, self.hidden + cpu)
        with tape.while_there({HEAD: found["while"]}):
            pass
        tape.make("kept", HEAD, found["kept"])
        tape.begin("backward of the LM head")
        with tape.while_there({HEAD: found.get("back", 0)}):
            pass
        tape.make("dy", BETWEEN, self.hidden)
        tape.drop("kept", "normed", hidden, "whole")
        tape.make("whole", GATHERED, self._gathered())

    # --- a layer, and what it leaves ---------------------------------------------------------

    def _forward(self, layer: int, shown: bool) -> None:
        tape, made, part = self.tape, f"input {layer + 1}", self.parts[layer]
        if self.run.recompute == "none":
            if shown:
                self.walk.forward_saving(part, f"{layer} ", made)
                return
            if part not in self._saved:
                self._saved[part] = self.walk.saved(part)
            tape.make(made, INPUTS, self.hidden)
            tape.make(f"saved {layer}", SAVED, self._saved[part] - self.hidden)
            return
        store = self._stored(layer)
        if shown:
            self.walk.attend(part, made)
        else:
            tape.make(made, INPUTS, self.hidden)
        if store:
            tape.make(f"store {layer}", STORE, store)
        if shown:
            self.walk.transform(part, made)
        self._move_out(layer)

    def _backward(self, layer: int) -> None:
        part = self.parts[layer]
        if self.run.recompute == "none":
            self.tape.begin(f"backward of layer {layer}")
            self.walk.backward_saved(part, f"{layer} ")
            self.tape.drop(f"input {layer}")
            return
        self.tape.begin(f"recompute of layer {layer}")
        for back in (layer, layer - 1):  # the next one is fetched meanwhile
            self._fetch(back)
        self.walk.backward(part, f"layer {layer}", (f"input {layer}", f"store {layer}"))

    def _move_out(self, layer: int) -> None:
        """What a layer left goes to the host: its input when it ends, its store beside the next."""
        offload, tape = self.run.offload, self.tape
        if offload:
            self.host += round(offload * (self.hidden + self._stored(layer)))
            tape.drop(f"input {layer}")
            tape.make(f"input {layer}", INPUTS, (1 - offload) * self.hidden)
            self._shrink_store(layer - 1)

    def _shrink_store(self, layer: int) -> None:
        if layer >= 0 and (store := self._stored(layer)):
            self.tape.drop(f"store {layer}")
            self.tape.make(f"store {layer}", STORE, (1 - self.run.offload) * store)

    def _fetch(self, layer: int) -> None:
        """A layer's input and store come back, whole."""
        if layer < 0:
            return
        sizes = (("input", INPUTS, self.hidden), ("store", STORE, self._stored(layer)))
        for name, item, size in sizes:
            if size:
                self.tape.drop(f"{name} {layer}")
                self.tape.make(f"{name} {layer}", item, size)


def layers_of(model: Model, run: Settings, stage: int) -> list[int]:
    """The layers of a stage: of each of its virtual stages, equally many in a row."""
    each = model.layers // (run.pp * run.vpp)
    starts = [(chunk * run.pp + stage) * each for chunk in range(run.vpp)]
    return [layer for start in starts for layer in range(start, start + each)]
