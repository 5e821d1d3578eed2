"""A transformer layer as two halves of operators: what its modules make, save and need meanwhile.

Two paths, each derived from what its modules hand to autograd: "gpu" has Transformer Engine's
fused norm and linear modules, fused rope and SwiGLU, weight gradients added in place; "cpu" has
Megatron's local modules (torch's RMSNorm in fp32, rope of several operators, SwiGLU as silu and
product, weight gradients made apart). Activations are bf16, statistics fp32.

Letters: R rows of a context-parallel rank (or of a chunk), n of them with sequence parallelism on
a tensor-parallel rank, h hidden, a heads times width, c keys and values together, f of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from .models import Model
from .settings import Settings
from .tape import Half, Op

B, F = 2, 4  # bytes of an activation, of an fp32 number
ATTENTION, MLP, RING = "attention half", "MLP half", "ring buffers"


@dataclass(frozen=True)
class Sizes:
    """Elements in a row of each tensor of a layer on one tensor-parallel rank."""

    hidden: int
    query: int
    kv: int
    heads: int
    width: int
    ffn: int
    gated: bool
    tp: int
    cpu: bool

    @classmethod
    def of(cls, model: Model, run: Settings) -> Sizes:
        kv_heads = max(1, model.kv_heads // run.tp)  # with fewer heads than ranks they are copied
        ffn = model.top_k * model.ffn + model.shared if model.experts else model.ffn
        return cls(
            hidden=model.hidden,
            query=model.heads // run.tp * model.head_dim,
            kv=2 * kv_heads * model.head_dim,
            heads=model.heads // run.tp,
            width=model.head_dim,
            ffn=max(1, ffn // run.tp),
            gated=model.gated,
            tp=run.tp,
            cpu=run.path == "cpu",
        )


@dataclass(frozen=True)
class Core:
    """What the core attention of a layer needs besides its tensors: bytes of ring buffers in
    forward and backward, without the sums of its own gradients; `sums`, of which these are.
    keys: rows of keys that a kernel sees at a time; store: fraction of out that is there already.
    """

    forward: float = 0
    backward: float = 0
    sums: float = 0
    keys: int = 0
    store: float = 0.0


def attention_half(x: Sizes, rows: int, core: Core, prefix: str = "") -> Half:
    """Norm, projections, rope, core attention and residual, of `rows` rows."""
    n = rows / x.tp
    given = {"x": n * x.hidden * B}
    ops = [*_norm_linear(x, rows, "x", "mixed", x.query + x.kv, "qkv"), *_rope(x, rows)]
    ops += [_core(x, rows, core), _projection(x, rows, "out", x.query, "projected", "proj")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    # A view of the mixed projection is the value of Megatron's forward until it returns.
    return Half(ATTENTION, ops, given, {"mixed": "proj", "x": "add"}, prefix)


def mlp_half(x: Sizes, rows: int, prefix: str = "", experts: float = 0) -> Half:
    """Norm, MLP and residual, of `rows` rows. experts: how many of them see a row; then rows are
    copied to them and back."""
    n, wide = rows / x.tp, (2 if x.gated else 1) * x.ffn
    ops = _norm_linear(x, rows, "x", "wide", wide, "fc1")
    if experts:
        copied = {"permuted": rows * experts * x.hidden * B}
        ops[-1] = Op("fc1", ("permuted",), {"wide": rows * wide * B}, ("permuted",))
        ops.insert(-1, Op("dispatch", ("normed",), copied))
    ops += _activation(x, rows)
    if experts:
        ops += [Op("fc2", ("act",), {"back": rows * experts * x.hidden * B}, ("act", "back"))]
        ops += [Op("combine", ("back",), {"projected": n * x.hidden * B})]
    else:
        ops += [_projection(x, rows, "act", x.ffn, "projected", "fc2")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    return Half(MLP, ops, {"x": n * x.hidden * B}, {"x": "add"}, prefix)


def _norm_linear(x: Sizes, rows: int, given: str, made: str, wide: int, name: str) -> list[Op]:
    """A norm and a column-parallel linear layer; with sequence parallelism rows are gathered for
    the product, and again in backward for the weight's gradient."""
    n, h = rows / x.tp, x.hidden
    item = ATTENTION if name == "qkv" else MLP
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


def _rope(x: Sizes, rows: int) -> list[Op]:
    """q is copied out of the mixed projection, q and k are turned, v is made contiguous."""
    q, k = rows * x.query * B, rows * x.kv / 2 * B
    cut = Op("cut", ("mixed",), {"q": q})
    if not x.cpu:
        return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": k})]
    tables = {f"{name} of {t}": rows * x.width * B for name in ("cos", "sin") for t in "qk"}
    return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": k}, (), tables,
                    before={ATTENTION: 3.5 * q}, back={ATTENTION: 2.5 * q})]  # fmt: skip


def _core(x: Sizes, rows: int, core: Core) -> Op:
    """Core attention over the ring. Forward sums out in fp32; backward dq, dk and dv.

    A stock kernel sums dq in fp32 besides, and on a GPU dk and dv too where heads share keys; on a
    CPU it sees a tile of half the rows.
    """
    q, kv, lse = rows * x.query, core.keys * x.kv, rows * x.heads * F
    kernel = (q / 2 + kv) * B if x.cpu else q * (B + F) + kv * (B + F)
    rest = 1 - core.store
    new = {"out": q * B if rest else 0, "lse": lse if rest else 0}  # else they are the store's
    sums = {ATTENTION: q * F * rest, RING: core.forward * (rest > 0)}
    return Op(
        "core", ("q2", "k2", "v2"), {"out": new["out"]}, ("q2", "k2", "v2", "out"),
        {"lse": new["lse"]},
        during=sums,
        back_before={ATTENTION: core.sums + kernel + lse, RING: core.backward},
        back={ATTENTION: core.sums + lse},
        elsewhere={} if rest else {"out": q * B},
    )  # fmt: skip


def _activation(x: Sizes, rows: int) -> list[Op]:
    act = rows * x.ffn * B
    if not x.cpu or not x.gated:
        return [Op("activation", ("wide",), {"act": act}, ("wide",))]
    # silu saves its input; the product silu's result and the other half, to which 0 was added.
    return [Op("activation", ("wide",), {"act": act}, ("wide",), {"silu": act, "linear": act},
               back_before={MLP: 2 * act})]  # fmt: skip


def _projection(x: Sizes, rows: int, given: str, wide: int, made: str, name: str) -> Op:
    """A row-parallel linear layer; with sequence parallelism its sum over ranks is scattered, and
    the gradient gathered."""
    item = ATTENTION if name == "proj" else MLP
    whole = rows * x.hidden * B if x.tp > 1 else 0.0
    weight = x.hidden * wide * B if x.cpu else 0.0
    return Op(name, (given,), {made: rows / x.tp * x.hidden * B}, (given,),
              during={item: whole}, back={item: whole + weight})  # fmt: skip
