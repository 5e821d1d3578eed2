# SPDX-License-Identifier: Apache-2.0
"""The attention half and the MLP half of a transformer layer as lists of operators (`tape.Op`).

The attention half is norm, projections, attention and residual; the MLP half is norm, MLP and
residual. Each operator lists the tensors that the modules of Megatron allocate and save for
autograd. `Settings.path` selects the modules. "gpu" means Transformer Engine's fused norm and
linear modules, fused rope and SwiGLU, and weight gradients that are accumulated in place. "cpu"
means Megatron's local modules: torch's RMSNorm in fp32, rope and SwiGLU of several operators, and
separate weight gradients. Activations are bf16, statistics fp32.

`rows` is the number of rows of a context-parallel rank, or of a row chunk. n = rows / TP is the
number of rows of a tensor-parallel rank with sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .....units import LOGITS_TILE
from ..settings import Settings
from ..shapes.layer_kinds import Hybrid, Indexer, Mixer
from ..shapes.models import Model
from .tape import Half, Op

B, F = 2, 4  # bytes of a bf16 activation, bytes of an fp32 number


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer's tensors on one tensor-parallel rank, in elements per row.

    Attributes:
        hidden: Width of hidden states.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        width: Width of a query or key head.
        value_width: Width of a value head.
        ffn: Width of the MLP, or total width of the experts that process a row.
        experts: Number of experts that process a row.
        gated: Whether the MLP has a gate.
        tp: Number of tensor-parallel ranks.
        cpu: Whether the modules are Megatron's local modules (`Settings.path` is "cpu").
        gate: Whether attention's result is multiplied by a gate.
        latent: Total width of the latents of multi-head latent attention, which are not split over
            ranks; 0 for other attention.
        up: Width of the keys and values that are projected from latents.
        mixer: Sizes of linear attention on this rank; None if the model has none.
        batch: Sequences of a micro-batch.
        indexer: Indexer of sparse attention, whose core attention has the sizes `absorbed`; None
            for dense attention.
        kv_rank: Width of the latent from which keys and values are projected.
        rope: Width of the rotary part of a key.
        hybrid: Sizes of hybrid attention, which uses the keys as values; None for other attention.
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
    hybrid: Hybrid | None = None

    @property
    def absorbed(self) -> LayerSizes:
        """Sizes of core attention on latents, for sparse attention.

        All query heads share one key head, which consists of a latent and the rotary part. The
        latent is also the value.
        """
        width = self.kv_rank + self.rope
        return replace(self, kv_heads=1, width=width, value_width=self.kv_rank)

    @property
    def scan(self) -> Mixer | None:
        """`mixer` if its form of linear attention is known, otherwise None.

        With None, no scan is counted.
        """
        return self.mixer if self.mixer is not None and self.mixer.form else None

    @property
    def query(self) -> int:
        """Number of elements of one token's queries on this rank."""
        return self.heads * self.width

    @property
    def keys(self) -> int:
        """Number of elements of one token's keys on this rank."""
        return self.kv_heads * self.width

    @property
    def values(self) -> int:
        """Number of elements of one token's values on this rank.

        0 if values are part of the keys or equal to the keys.
        """
        latent = self.indexer is not None and self.kv_heads == 1
        return 0 if latent or self.hybrid is not None else self.kv_heads * self.value_width

    @property
    def kv(self) -> int:
        """Number of elements of one token's keys and values on this rank."""
        return self.keys + self.values

    @property
    def out(self) -> int:
        """Number of elements of one token's attention result on this rank."""
        return self.heads * self.value_width

    @classmethod
    def of(cls, model: Model, run: Settings, sparse: bool | None = None) -> LayerSizes:
        """Return the sizes of a model's layer on one tensor-parallel rank.

        Args:
            model: Shape of the model.
            run: Settings of the run.
            sparse: Whether the layer has experts; None to use `model.moe_layers > 0`.
        """
        heads = model.heads // run.tp
        sparse = bool(model.moe_layers) if sparse is None else sparse
        ffn = model.dense_ffn if model.experts and not sparse else model.ffn
        low, mixer, index = model.latent, model.mixer, model.indexer
        return cls(
            hidden=model.hidden,
            heads=heads,
            kv_heads=max(1, model.kv_heads // run.tp),  # copies if there are fewer heads than ranks
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
            hybrid=model.hybrid,
        )


ATTENTION, RING = "attention half", "ring buffers"


@dataclass(frozen=True)
class Core:
    """Memory of core attention in addition to q, k, v and out.

    Attributes:
        forward: Bytes of ring buffers in forward.
        backward: Bytes of ring buffers in backward, without `sums`.
        sums: Bytes of the buffers that accumulate the gradients of the rank's own q, k and v.
        keys: Number of key rows that one kernel call reads.
        store: Fraction of rows whose attention results are stored for the recomputation.
        heads_shared: Number of ranks that share heads.
        reordered: Whether rows are reordered after the all-to-all of ranks that share heads.
        parts: Number of head chunks (groups of heads with their own rings), whose outputs are
            concatenated.
        wire: Bytes per element of gradients that ranks send.
        room: Minimum size of a message buffer in bytes; 0 on a GPU.
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
    """Return the operators of core attention on a ring of ranks.

    Forward accumulates out in fp32; backward accumulates dq, dk and dv in fp32. The kernel also
    allocates temporary tensors: fp32 gradients on a GPU, and tiles of half the queries on a CPU.

    Args:
        x: Sizes of the layer.
        rows: Number of query rows.
        core: Memory of core attention, in addition to q, k, v and out.
    """
    if core.heads_shared > 1:
        return _with_all_to_all(x, rows, core)
    q, kv, lse, out = rows * x.query, core.keys * x.kv, rows * x.heads * F, rows * x.out
    kernel = (q / 2 + kv) * B if x.cpu else q * (B + F) + kv * (B + F)
    recomputed, joined = 1 - core.store, core.parts > 1
    # If nothing is recomputed, the store contains out and lse.
    new = {"out": out * B if recomputed else 0, "lse": lse if recomputed else 0}
    summed = out * F * recomputed + out * B * recomputed * joined
    sums = {ATTENTION: summed, RING: core.forward * (recomputed > 0)}
    return [Op(
        "core", ("q2", "k2", "v2"), {"out": new["out"]}, ("q2", "k2", "v2", "out"),
        {"lse": new["lse"]},
        during=sums,
        back_before={ATTENTION: core.sums + kernel + lse, RING: core.backward},
        back={ATTENTION: core.sums * (1 + joined) + lse},
        elsewhere={} if recomputed else {"out": out * B},
    )]  # fmt: skip


def _with_all_to_all(x: LayerSizes, rows: int, core: Core) -> list[Op]:
    """Return the operators of core attention if ranks share heads (`execution.ulysses`).

    Forward: an all-to-all sends copies of q, k and v to the ranks that compute their heads, and a
    second one returns out. Backward sends the gradient of out and returns the gradients of q, k and
    v. Saved for backward are q, k, v, out and lse after the first all-to-all: this rank's heads of
    the rows of all ranks that share heads. Keys are copied if there are fewer heads than ranks.

    An all-to-all allocates its input and its output, and on a CPU also packed messages for both. If
    rows are reordered, its output is copied. Tensors of the ring exist until backward ends.
    """
    q, kv, out, lse = rows * x.query, rows * x.kv, rows * x.out, rows * x.heads * F
    copies = max(1, core.heads_shared / x.kv_heads)
    ring_kv, seen = kv * copies, core.keys * x.kv * copies  # keys and values on the ring
    kernel = (q / 2 + seen) * B if x.cpu else (q + seen) * (B + F)
    recomputed = 1 - core.store
    peers = core.heads_shared - 1

    def messages(size: float) -> float:
        """Return the bytes of packed messages for a tensor of `size` bytes; 0 on a GPU."""
        per_peer = size / core.heads_shared
        return peers * (per_peer + max(per_peer, core.room)) if x.cpu else 0.0

    arrived_bytes = (q + ring_kv) * B
    saved = {"q on the ring": q * B, "kv on the ring": ring_kv * B}
    saved |= {
        "out on the ring": out * B if recomputed else 0,
        "lse": lse if recomputed else 0,
    }
    forward = core.forward if recomputed else 0
    # Bytes of gradients on the ring, as sent, and after concatenation; gradients of copied keys are
    # in fp32.
    grads = (q + ring_kv) * core.wire
    home = q * core.wire + kv * (F if copies > 1 else core.wire)
    cast = grads if core.wire < F else 0
    copy = 1 if core.reordered else 0
    travel = cast + grads * (1 + copy) + max(messages(grads), home)
    arrived = messages(arrived_bytes) if x.cpu else arrived_bytes
    return [Op(
        "core", ("q2", "k2", "v2"), {"out": out * B}, (), saved,
        before={ATTENTION: arrived_bytes + max(arrived, out * F * recomputed), RING: forward},
        during={ATTENTION: out * B * (1 + copy) + messages(out * B), RING: forward},
        back_before={ATTENTION: out * B + core.sums + max(kernel, travel) + lse,
                     RING: core.backward},
        back={ATTENTION: home},
    )]  # fmt: skip


MLP = "MLP half"


def attention_half(x: LayerSizes, rows: int, core: Core, prefix: str = "") -> Half:
    """Return the attention half of a layer: norm, projections, rope, core attention and residual.

    Args:
        x: Sizes of the layer.
        rows: Number of rows.
        core: Memory of core attention, in addition to q, k, v and out.
        prefix: Prefix of the tensor names on the tape (the simulated memory).
    """
    n = rows / x.tp
    inputs = {"x": n * x.hidden * B}
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
    # Megatron's forward holds a view of the mixed projection until it returns.
    return Half(ATTENTION, ops, inputs, {"mixed": "proj", "x": "add"}, prefix)


def _latent(x: LayerSizes, rows: int) -> list[Op]:
    """Return the operators that compute q, k and v in multi-head latent attention.

    Each tensor-parallel rank projects its share of rows down to latents. The latents are normalized
    and projected up to heads.
    """
    n = rows / x.tp
    ops = norm_linear(x, rows, "x", "mixed", x.query + x.up, "qkv")
    norm, linear = ops
    down = Op("down", ("normed",), {"low": n * x.latent * B}, ("normed",))
    normed = {"low normed": n * x.latent * B}
    if x.indexer is not None:  # keys and values remain latents
        linear = replace(linear, makes={"mixed": rows * x.query * B})
    low_norm = Op("norm of low", ("low",), normed, ("low",), {"rstd of low": 2 * n * F})
    gathered = {ATTENTION: rows * x.latent * B if x.tp > 1 else 0.0}
    up = Op("up", ("low normed",), linear.makes, ("low normed",), during=gathered, back=gathered)
    return [norm, down, low_norm, up]


def _selected(x: LayerSizes, index: Indexer, rows: int, core: Core) -> list[Op]:
    """Return the operators of sparse attention: key selection, core attention, up-projection.

    The selection saves int32 positions of the selected keys. Core attention attends to latents, and
    its outputs are projected up to the width of values. Ring buffers of index keys are assumed to
    need fewer bytes than ring buffers of latents, in proportion to the width.
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
    """Return the MLP half of a layer: norm, MLP and residual.

    If the MLP has experts, rows are copied to the experts, and their results are copied back.

    Args:
        x: Sizes of the layer.
        rows: Number of rows.
        prefix: Prefix of the tensor names on the tape (the simulated memory).
    """
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


def norm_linear(x: LayerSizes, rows: int, source: str, made: str, wide: int, name: str) -> list[Op]:
    """Return the operators of a norm and a column-parallel linear layer.

    With sequence parallelism, rows are gathered for the matrix product of forward. Backward gathers
    them again for the gradient of the weight.

    Args:
        x: Sizes of the layer.
        rows: Number of rows.
        source: Name of the input tensor.
        made: Name of the output tensor.
        wide: Width of the output tensor.
        name: Name of the linear layer.
    """
    n, h = rows / x.tp, x.hidden
    item = MLP if name == "fc1" else ATTENTION
    gathered = rows * h * B if x.tp > 1 else 0.0
    weight = h * wide * B if x.cpu else 0.0
    statistics = {f"rstd of {name}": n * F}
    if x.cpu:  # saved in fp32: x, the normalized rows, and their product with the weight
        extra = statistics | {f"fp32 of {name}": n * h * F, f"normed32 of {name}": n * h * F}
        during, back = {item: n * h * F}, {item: 3 * n * h * F}
    else:
        extra, during, back = statistics, {}, {}
    return [
        Op(f"norm of {name}", (source,), {"normed": n * h * B}, () if x.cpu else (source,), extra,
           during=during, back=back),
        Op(name, ("normed",), {made: rows * wide * B}, ("normed",), during={item: gathered},
           back={item: 2 * gathered + weight}),
    ]  # fmt: skip


def _rope(x: LayerSizes, rows: int) -> list[Op]:
    """Return the operators that copy q, rotate q and k, and make v contiguous."""
    q, k, v = (rows * width * B for width in (x.query, x.keys, x.values))
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
    # silu saves its input; the product saves the result of silu and the other half of the columns.
    return [Op("activation", ("wide",), {"act": act}, ("wide",), {"silu": act, "linear": act},
               back_before={MLP: 2 * act})]  # fmt: skip


def projection(x: LayerSizes, rows: int, source: str, wide: int, made: str, name: str) -> Op:
    """Return the operator of a row-parallel linear layer.

    With sequence parallelism, the result is reduce-scattered and the gradient is gathered.

    Args:
        x: Sizes of the layer.
        rows: Number of rows.
        source: Name of the input tensor.
        wide: Width of the input tensor.
        made: Name of the output tensor.
        name: Name of the linear layer.
    """
    item = ATTENTION if name == "proj" else MLP
    gathered = rows * x.hidden * B if x.tp > 1 else 0.0
    weight = x.hidden * wide * B if x.cpu else 0.0
    return Op(name, (source,), {made: rows / x.tp * x.hidden * B}, (source,),
              during={item: gathered}, back={item: gathered + weight})  # fmt: skip


CHUNK = 64  # rows of a chunk in our kernel and in flash-linear-attention
PIECES = 2  # runs of consecutive positions (pieces) per rank, with layout zigzag


def mixer_half(x: LayerSizes, rows: int, prefix: str = "") -> Half:
    """Return the attention half of a layer with a mixer (linear attention or a state-space model).

    The operators are norm, projections, mixer and residual. If `Mixer.form` is empty, the mixer
    itself is not counted.

    Args:
        x: Sizes of the layer.
        rows: Number of rows.
        prefix: Prefix of the tensor names on the tape (the simulated memory).
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
    """Return the operators between the input projection and the output projection of a mixer."""
    values, keys = rows * scan.values * B, rows * scan.keys * B
    ops, source = [], "mixed"
    if scan.taps:
        ops.append(Op("convolution", ("mixed",), {"convolved": keys + values}, ("mixed",)))
        source = "convolved"
    reads = [source]
    if scan.delta:
        ops.append(Op("norm of keys", (source,), {"normed keys": keys}, (source,)))
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
    """Return the bytes of the linear-attention states that one layer stores, one per chunk of rows.

    flash-linear-attention (on a GPU) stores them in the dtype of the keys. Our kernel (on a CPU)
    stores them in fp32.
    """
    return -(-rows // CHUNK) * scan.state * (F if x.cpu else B)


def head_bytes(model: Model, run: Settings) -> dict[str, float]:
    """Return the bytes that the LM head and the loss allocate on one rank.

    Returns:
        Lifetime -> bytes. "while" is allocated during forward, "kept" from forward to backward, and
        "back" during backward. "back" is absent if it would be 0.
    """
    rows, columns = run.rows, model.vocabulary / run.tp
    hidden = rows / run.tp * model.hidden * B
    if run.lm_head_loss == "off":
        bytes_each = run.logits_bytes
        return {"while": rows * columns * bytes_each, "kept": rows * columns * (bytes_each - F)}
    tile = min(LOGITS_TILE["cpu" if run.path == "cpu" else "cuda"], rows * columns * B)
    gathered = tile / (columns * B) * model.hidden * B
    gradients = hidden + columns * model.hidden * F
    if run.lm_head_loss == "single_pass":
        return {"while": tile + 2 * gathered + gradients, "kept": gradients}
    return {"while": tile + 2 * gathered, "kept": 0.0, "back": tile + 2 * gathered + gradients}
