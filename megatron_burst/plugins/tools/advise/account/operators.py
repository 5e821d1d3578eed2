# SPDX-License-Identifier: Apache-2.0
"""A transformer layer as two halves of operators: what its modules make, save and need meanwhile.

Two paths, each derived from what its modules hand to autograd: "gpu" has Transformer Engine's
fused norm and linear modules, fused rope and SwiGLU, weight gradients added in place; "cpu" has
Megatron's local modules (torch's RMSNorm in fp32, rope of several operators, SwiGLU as silu and
product, weight gradients made apart). Activations are bf16, statistics fp32.

Letters: R rows of a context-parallel rank (or of a row chunk), n of them with sequence parallelism
on a tensor-parallel rank, h hidden, a heads times width, c keys and values together, f of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .....units import LOGITS_TILE
from ..settings import Settings
from ..shapes.layer_kinds import Indexer, Mixer
from ..shapes.models import Model
from .tape import Half, Op

B, F = 2, 4  # bytes of an activation, of an fp32 number


@dataclass(frozen=True)
class LayerSizes:
    """Elements in a row of each tensor of a layer on one tensor-parallel rank.

    heads of queries, kv_heads of keys; width of a query or key head, value_width of a value head.
    ffn: of the MLP, or of all experts that see a row; experts: how many these are. gate: the
    attention's result is multiplied by one. latent: the narrow rows of multi-head latent attention,
    on every rank; up: what keys and values are expanded to; kv_rank, rope: the two parts of a
    latent. indexer: of sparse attention, whose core `absorbed` describes. mixer: this rank's part;
    batch: sequences of a micro-batch.
    """

    hidden: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    ffn: int
    experts: int
    gated: bool
    tp: int
    cpu: bool
    gate: bool = False
    latent: int = 0
    up: int = 0
    mixer: Mixer | None = None
    batch: int = 1
    indexer: Indexer | None = None
    kv_rank: int = 0
    rope: int = 0

    @property
    def absorbed(self) -> LayerSizes:
        """What the core of sparse attention has: latents, which all heads share, as keys, whose
        first columns are the values.
        """
        width = self.kv_rank + self.rope
        return replace(self, kv_heads=1, width=width, value_width=self.kv_rank)

    @property
    def scan(self) -> Mixer | None:
        """The mixer where what it computes is counted, else None."""
        return self.mixer if self.mixer is not None and self.mixer.form else None

    @property
    def query(self) -> int:
        return self.heads * self.width

    @property
    def keys(self) -> int:
        return self.kv_heads * self.width

    @property
    def values(self) -> int:
        """Elements of one token's values; 0 if they are columns of its keys."""
        latent = self.indexer is not None and self.kv_heads == 1
        return 0 if latent else self.kv_heads * self.value_width

    @property
    def kv(self) -> int:
        return self.keys + self.values

    @property
    def out(self) -> int:
        return self.heads * self.value_width

    @classmethod
    def of(cls, model: Model, run: Settings, sparse: bool | None = None) -> LayerSizes:
        """sparse: of a layer with experts; None: if the model has any."""
        heads = model.heads // run.tp
        sparse = bool(model.moe_layers) if sparse is None else sparse
        ffn = model.dense_ffn if model.experts and not sparse else model.ffn
        low, mixer, index = model.latent, model.mixer, model.indexer
        return cls(
            hidden=model.hidden,
            heads=heads,
            kv_heads=max(1, model.kv_heads // run.tp),  # with fewer heads than ranks: copies
            width=model.head_dim,
            value_width=model.value_dim,
            ffn=max(1, (model.top_k * ffn + model.shared if sparse else ffn) // run.tp),
            experts=model.top_k if sparse else 0,
            gated=model.gated,
            tp=run.tp,
            cpu=run.path == "cpu",
            gate=model.output_gate,
            latent=(low.q_rank + low.kv_rank + low.rope if low else 0)
            + (index.width + index.heads if index else 0),
            up=heads * (model.head_dim - low.rope + model.value_dim) if low else 0,
            mixer=mixer and mixer.on_rank(run.tp),
            batch=run.micro_batch,
            indexer=index,
            kv_rank=low.kv_rank if low else 0,
            rope=low.rope if low else 0,
        )


ATTENTION, RING = "attention half", "ring buffers"


@dataclass(frozen=True)
class Core:
    """What the core attention of a layer needs besides its tensors: bytes of ring buffers in
    forward and backward, without the sums of its own gradients; `sums`, of which these are.
    keys: rows of keys that a kernel sees at a time; store: fraction of out that is there already.
    heads_shared: by how many ranks; reordered: are the rows of these put in order; parts: head
    chunks, whose results are joined; wire: bytes of a number of gradients that travel; room: bytes
    that a message has room for at least (on a CPU).
    """

    forward: float = 0
    backward: float = 0
    sums: float = 0
    keys: int = 0
    store: float = 0.0
    heads_shared: int = 1
    reordered: bool = False
    parts: int = 1
    wire: int = F
    room: float = 0.0


def core_ops(x: LayerSizes, rows: int, core: Core) -> list[Op]:
    """Core attention over the ring. Forward sums out in fp32; backward dq, dk and dv.

    A stock kernel sums dq in fp32 besides, and on a GPU dk and dv too where heads share keys; on a
    CPU it sees a tile of half the rows.
    """
    if core.heads_shared > 1:
        return _with_all_to_all(x, rows, core)
    q, kv, lse, out = rows * x.query, core.keys * x.kv, rows * x.heads * F, rows * x.out
    kernel = (q / 2 + kv) * B if x.cpu else q * (B + F) + kv * (B + F)
    rest, joined = 1 - core.store, core.parts > 1
    new = {"out": out * B if rest else 0, "lse": lse if rest else 0}  # else they are the store's
    sums = {ATTENTION: out * F * rest + out * B * rest * joined, RING: core.forward * (rest > 0)}
    return [Op(
        "core", ("q2", "k2", "v2"), {"out": new["out"]}, ("q2", "k2", "v2", "out"),
        {"lse": new["lse"]},
        during=sums,
        back_before={ATTENTION: core.sums + kernel + lse, RING: core.backward},
        back={ATTENTION: core.sums * (1 + joined) + lse},
        elsewhere={} if rest else {"out": out * B},
    )]  # fmt: skip


def _with_all_to_all(x: LayerSizes, rows: int, core: Core) -> list[Op]:
    """The same where ranks share heads (`execution.ulysses`): q, k and v go to where their heads
    are computed, as copies, and out comes back; backward brings its gradient there, and those of q,
    k and v back. What backward needs is what the ring saw: q, k, v, out and lse of this rank's
    heads and all rows of the ranks that share them. Keys have copies where heads are fewer.

    An exchange holds what is sent and what arrives, and on a CPU both once more as messages; where
    rows are reordered, what returns is a copy. What was on the ring stays until backward ends.
    """
    q, kv, out, lse = rows * x.query, rows * x.kv, rows * x.out, rows * x.heads * F
    copies = max(1, core.heads_shared / x.kv_heads)
    ring_kv, seen = kv * copies, core.keys * x.kv * copies  # keys and values as on the ring
    kernel = (q / 2 + seen) * B if x.cpu else (q + seen) * (B + F)
    rest = 1 - core.store
    others = core.heads_shared - 1

    def messages(size: float) -> float:
        """To and from the others."""
        each = size / core.heads_shared
        return others * (each + max(each, core.room)) if x.cpu else 0.0

    came = (q + ring_kv) * B
    kept = {"q on the ring": q * B, "kv on the ring": ring_kv * B}
    kept |= {"out on the ring": out * B if rest else 0, "lse": lse if rest else 0}
    forward = core.forward if rest else 0
    # Gradients on the ring, as they travel, and joined at home; those of copied keys in fp32.
    grads = (q + ring_kv) * core.wire
    home = q * core.wire + kv * (F if copies > 1 else core.wire)
    cast = grads if core.wire < F else 0
    copy = 1 if core.reordered else 0
    travel = cast + grads * (1 + copy) + max(messages(grads), home)
    arrived = messages(came) if x.cpu else came
    return [Op(
        "core", ("q2", "k2", "v2"), {"out": out * B}, (), kept,
        before={ATTENTION: came + max(arrived, out * F * rest), RING: forward},
        during={ATTENTION: out * B * (1 + copy) + messages(out * B), RING: forward},
        back_before={ATTENTION: out * B + core.sums + max(kernel, travel) + lse,
                     RING: core.backward},
        back={ATTENTION: home},
    )]  # fmt: skip


MLP = "MLP half"


def attention_half(x: LayerSizes, rows: int, core: Core, prefix: str = "") -> Half:
    """Norm, projections, rope, core attention and residual, of `rows` rows."""
    n = rows / x.tp
    given = {"x": n * x.hidden * B}
    if x.latent:
        ops = _latent(x, rows)
    else:
        ops = norm_linear(x, rows, "x", "mixed", x.query * (1 + x.gate) + x.kv, "qkv")
    out = "out"
    if x.indexer is None:
        ops += [*_rope(x, rows), *core_ops(x, rows, core)]
    else:
        ops += _selected(x, x.indexer, rows, core)
        out = "values"
    if x.gate:
        gated = {"gated": rows * x.query * B}
        ops += [Op("gate", ("out", "mixed"), gated, ("out", "mixed"))]
        out = "gated"
    ops += [projection(x, rows, out, x.out, "projected", "proj")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    # A view of the mixed projection is the value of Megatron's forward until it returns.
    return Half(ATTENTION, ops, given, {"mixed": "proj", "x": "add"}, prefix)


def _latent(x: LayerSizes, rows: int) -> list[Op]:
    """Multi-head latent attention: down to a few numbers per row, whole on every tensor-parallel
    rank's share of rows, a norm of these, and up to heads.
    """
    n = rows / x.tp
    ops = norm_linear(x, rows, "x", "mixed", x.query + x.up, "qkv")
    norm, linear = ops
    down = Op("down", ("normed",), {"low": n * x.latent * B}, ("normed",))
    both = {"low normed": n * x.latent * B}
    if x.indexer is not None:  # keys and values stay as narrow as they are
        linear = replace(linear, makes={"mixed": rows * x.query * B})
    again = Op("norm of low", ("low",), both, ("low",), {"rstd of low": 2 * n * F})
    gathered = {ATTENTION: rows * x.latent * B if x.tp > 1 else 0.0}
    up = Op("up", ("low normed",), linear.makes, ("low normed",), during=gathered, back=gathered)
    return [norm, down, again, up]


def _selected(x: LayerSizes, index: Indexer, rows: int, core: Core) -> list[Op]:
    """The selection, which keeps int32 positions, and attention of absorbed queries to latents,
    from whose results values are made. Messages of index keys are fewer than those of latents.
    """
    y, chosen = x.absorbed, rows * index.top_k * 4
    index_q = {"index q": rows * index.heads * index.width * B}
    absorbed = {"q2": rows * y.query * B, "k2": rows * y.keys * B, "v2": 0.0}
    ids = Op(
        "select",
        ("index q", "low normed"),
        {},
        (),
        {"ids": chosen},
        during={ATTENTION: 2 * chosen + chosen, RING: core.forward * index.width / y.keys},
    )
    return [
        Op("index queries", ("low normed",), index_q),
        ids,
        Op("absorb", ("mixed", "low normed"), absorbed, ("mixed",)),
        *core_ops(y, rows, core),
        Op("values", ("out",), {"values": rows * x.out * B}),
    ]


def mlp_half(x: LayerSizes, rows: int, prefix: str = "") -> Half:
    """Norm, MLP and residual, of `rows` rows, which are copied to experts and back."""
    n, wide, experts = rows / x.tp, (2 if x.gated else 1) * x.ffn, x.experts
    ops = norm_linear(x, rows, "x", "wide", wide, "fc1")
    if experts:
        copied = {"permuted": rows * experts * x.hidden * B}
        ops[-1] = Op("fc1", ("permuted",), {"wide": rows * wide * B}, ("permuted",))
        ops.insert(-1, Op("dispatch", ("normed",), copied))
    ops += _activation(x, rows)
    if experts:
        ops += [Op("fc2", ("act",), {"back": rows * experts * x.hidden * B}, ("act", "back"))]
        ops += [Op("combine", ("back",), {"projected": n * x.hidden * B})]
    else:
        ops += [projection(x, rows, "act", x.ffn, "projected", "fc2")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    return Half(MLP, ops, {"x": n * x.hidden * B}, {"x": "add"}, prefix)


def norm_linear(x: LayerSizes, rows: int, given: str, made: str, wide: int, name: str) -> list[Op]:
    """A norm and a column-parallel linear layer; with sequence parallelism rows are gathered for
    the product, and again in backward for the weight's gradient.
    """
    n, h = rows / x.tp, x.hidden
    item = MLP if name == "fc1" else ATTENTION
    gathered = rows * h * B if x.tp > 1 else 0.0
    weight = h * wide * B if x.cpu else 0.0
    statistics = {f"rstd of {name}": n * F}
    if x.cpu:  # x and the normalised rows in fp32 are saved, and the product with the weight
        keeps = statistics | {f"fp32 of {name}": n * h * F, f"normed32 of {name}": n * h * F}
        during, back = {item: n * h * F}, {item: 3 * n * h * F}
    else:
        keeps, during, back = statistics, {}, {}
    return [
        Op(f"norm of {name}", (given,), {"normed": n * h * B}, () if x.cpu else (given,), keeps,
           during=during, back=back),
        Op(name, ("normed",), {made: rows * wide * B}, ("normed",), during={item: gathered},
           back={item: 2 * gathered + weight}),
    ]  # fmt: skip


def _rope(x: LayerSizes, rows: int) -> list[Op]:
    """Q is copied out of the mixed projection, q and k are turned, v is made contiguous."""
    q, k, v = (rows * each * B for each in (x.query, x.keys, x.values))
    cut = Op("cut", ("mixed",), {"q": q})
    if not x.cpu:
        return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": v})]
    tables = {f"{name} of {t}": rows * x.width * B for name in ("cos", "sin") for t in "qk"}
    return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": v}, (), tables,
                    before={ATTENTION: 3.5 * q}, back={ATTENTION: 2.5 * q})]  # fmt: skip


def _activation(x: LayerSizes, rows: int) -> list[Op]:
    act = rows * x.ffn * B
    if not x.cpu or not x.gated:
        return [Op("activation", ("wide",), {"act": act}, ("wide",))]
    # silu saves its input; the product silu's result and the other half, to which 0 was added.
    return [Op("activation", ("wide",), {"act": act}, ("wide",), {"silu": act, "linear": act},
               back_before={MLP: 2 * act})]  # fmt: skip


def projection(x: LayerSizes, rows: int, given: str, wide: int, made: str, name: str) -> Op:
    """A row-parallel linear layer; with sequence parallelism its sum over ranks is scattered, and
    the gradient gathered.
    """
    item = ATTENTION if name == "proj" else MLP
    whole = rows * x.hidden * B if x.tp > 1 else 0.0
    weight = x.hidden * wide * B if x.cpu else 0.0
    return Op(name, (given,), {made: rows / x.tp * x.hidden * B}, (given,),
              during={item: whole}, back={item: whole + weight})  # fmt: skip


CHUNK = 64  # rows of a chunk, of our kernel and of flash-linear-attention's
PIECES = 2  # of a rank, with zigzag


def mixer_half(x: LayerSizes, rows: int, prefix: str = "") -> Half:
    """Norm, projections, linear attention and residual of `rows` rows. A mixer whose form is not
    known has its projections counted only.
    """
    n, mixer = rows / x.tp, x.mixer
    assert mixer is not None
    ops = norm_linear(x, rows, "x", "mixed", mixer.into, "in")
    if x.scan is None:
        ops += [Op("scan", ("mixed",), {"out": rows * mixer.out * B}, ("mixed", "out"))]
        last = "out"
    else:
        ops += _linear_attention(x, x.scan, rows)
        last = "gated"
    ops += [projection(x, rows, last, mixer.out, "projected", "proj")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    return Half(ATTENTION, ops, {"x": n * x.hidden * B}, {"x": "add"}, prefix)


def _linear_attention(x: LayerSizes, scan: Mixer, rows: int) -> list[Op]:
    """From the mixed projection to what the last product reads."""
    values, keys = rows * scan.values * B, rows * scan.keys * B
    ops, given = [], "mixed"
    if scan.taps:
        ops.append(Op("convolution", ("mixed",), {"convolved": keys + values}, ("mixed",)))
        given = "convolved"
    reads = [given]
    if scan.delta:
        ops.append(Op("norm of keys", (given,), {"normed keys": keys}, (given,)))
        reads.append("normed keys")
    gates = {"decay": rows * scan.decays * F, "beta": rows * scan.heads * F * scan.delta}
    gates = {name: size for name, size in gates.items() if size}
    if gates:
        ops.append(Op("gates", ("mixed",), gates, ("mixed",)))
        reads += gates
    states, while_there = chunk_states(x, scan, rows), PIECES * x.batch * scan.state * F
    ops.append(
        Op("linear attention", reads, {"out": values}, reads, {"entering": while_there},
           during={ATTENTION: states + while_there},
           back_before={ATTENTION: 2 * states + while_there})
    )  # fmt: skip
    return [*ops, Op("gated norm", ("out", "mixed"), {"gated": values}, ("out", "mixed"))]


def chunk_states(x: LayerSizes, scan: Mixer, rows: int) -> float:
    """Bytes of the state before every chunk: of flash-linear-attention in the dtype of keys, of our
    own kernel in fp32.
    """
    return -(-rows // CHUNK) * scan.state * (F if x.cpu else B)


def head_bytes(model: Model, run: Settings) -> dict[str, float]:
    """Bytes of the LM head and its loss: while they run, and what then waits for backward."""
    rows, columns = run.rows, model.vocabulary / run.tp
    hidden = rows / run.tp * model.hidden * B
    if run.lm_head_loss == "off":
        each = run.logits_bytes
        return {"while": rows * columns * each, "kept": rows * columns * (each - F)}
    tile = min(LOGITS_TILE["cpu" if run.path == "cpu" else "cuda"], rows * columns * B)
    gathered = tile / (columns * B) * model.hidden * B
    gradients = hidden + columns * model.hidden * F
    if run.lm_head_loss == "single_pass":
        return {"while": tile + 2 * gathered + gradients, "kept": gradients}
    return {"while": tile + 2 * gathered, "kept": 0.0, "back": tile + 2 * gathered + gradients}
