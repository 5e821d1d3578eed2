"""A transformer layer as two halves of operators: what its modules make, save and need meanwhile.

Two paths, each derived from what its modules hand to autograd: "gpu" has Transformer Engine's
fused norm and linear modules, fused rope and SwiGLU, weight gradients added in place; "cpu" has
Megatron's local modules (torch's RMSNorm in fp32, rope of several operators, SwiGLU as silu and
product, weight gradients made apart). Activations are bf16, statistics fp32.

Letters: R rows of a context-parallel rank (or of a chunk), n of them with sequence parallelism on
a tensor-parallel rank, h hidden, a heads times width, c keys and values together, f of the MLP.
"""

from __future__ import annotations

from .core import ATTENTION, Core, core_ops
from .sizes import B, F, Sizes
from .tape import Half, Op

MLP = "MLP half"


def attention_half(x: Sizes, rows: int, core: Core, prefix: str = "") -> Half:
    """Norm, projections, rope, core attention and residual, of `rows` rows."""
    n = rows / x.tp
    given = {"x": n * x.hidden * B}
    if x.latent:
        ops = _latent(x, rows)
    else:
        ops = norm_linear(x, rows, "x", "mixed", x.query * (1 + x.gate) + x.kv, "qkv")
    ops += [*_rope(x, rows), *core_ops(x, rows, core)]
    out = "out"
    if x.gate:
        gated = {"gated": rows * x.query * B}
        ops += [Op("gate", ("out", "mixed"), gated, ("out", "mixed"))]
        out = "gated"
    ops += [projection(x, rows, out, x.out, "projected", "proj")]
    ops += [Op("add", ("x", "projected"), {"y": n * x.hidden * B}, adds=True)]
    # A view of the mixed projection is the value of Megatron's forward until it returns.
    return Half(ATTENTION, ops, given, {"mixed": "proj", "x": "add"}, prefix)


def _latent(x: Sizes, rows: int) -> list[Op]:
    """Multi-head latent attention: down to a few numbers per row, whole on every tensor-parallel
    rank's share of rows, a norm of these, and up to heads."""
    n = rows / x.tp
    ops = norm_linear(x, rows, "x", "mixed", x.query + x.up, "qkv")
    norm, linear = ops
    down = Op("down", ("normed",), {"low": n * x.latent * B}, ("normed",))
    both = {"low normed": n * x.latent * B}
    again = Op("norm of low", ("low",), both, ("low",), {"rstd of low": 2 * n * F})
    gathered = {ATTENTION: rows * x.latent * B if x.tp > 1 else 0.0}
    up = Op("up", ("low normed",), linear.makes, ("low normed",), during=gathered, back=gathered)
    return [norm, down, again, up]


def mlp_half(x: Sizes, rows: int, prefix: str = "") -> Half:
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


def norm_linear(x: Sizes, rows: int, given: str, made: str, wide: int, name: str) -> list[Op]:
    """A norm and a column-parallel linear layer; with sequence parallelism rows are gathered for
    the product, and again in backward for the weight's gradient."""
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


def _rope(x: Sizes, rows: int) -> list[Op]:
    """q is copied out of the mixed projection, q and k are turned, v is made contiguous."""
    q, k, v = (rows * each * B for each in (x.query, x.keys, x.values))
    cut = Op("cut", ("mixed",), {"q": q})
    if not x.cpu:
        return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": v})]
    tables = {f"{name} of {t}": rows * x.width * B for name in ("cos", "sin") for t in "qk"}
    return [cut, Op("rope", ("q",), {"q2": q, "k2": k, "v2": v}, (), tables,
                    before={ATTENTION: 3.5 * q}, back={ATTENTION: 2.5 * q})]  # fmt: skip


def _activation(x: Sizes, rows: int) -> list[Op]:
    act = rows * x.ffn * B
    if not x.cpu or not x.gated:
        return [Op("activation", ("wide",), {"act": act}, ("wide",))]
    # silu saves its input; the product silu's result and the other half, to which 0 was added.
    return [Op("activation", ("wide",), {"act": act}, ("wide",), {"silu": act, "linear": act},
               back_before={MLP: 2 * act})]  # fmt: skip


def projection(x: Sizes, rows: int, given: str, wide: int, made: str, name: str) -> Op:
    """A row-parallel linear layer; with sequence parallelism its sum over ranks is scattered, and
    the gradient gathered."""
    item = ATTENTION if name == "proj" else MLP
    whole = rows * x.hidden * B if x.tp > 1 else 0.0
    weight = x.hidden * wide * B if x.cpu else 0.0
    return Op(name, (given,), {made: rows / x.tp * x.hidden * B}, (given,),
              during={item: whole}, back={item: whole + weight})  # fmt: skip
