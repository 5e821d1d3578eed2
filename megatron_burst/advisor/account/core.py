"""The core attention of a layer as operators, between rope and projection.

Over a ring of ranks, and around it the all-to-alls of ranks that share heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import B, F, Sizes
from .tape import Op

ATTENTION, RING = "attention half", "ring buffers"


@dataclass(frozen=True)
class Core:
    """What the core attention of a layer needs besides its tensors: bytes of ring buffers in
    forward and backward, without the sums of its own gradients; `sums`, of which these are.
    keys: rows of keys that a kernel sees at a time; store: fraction of out that is there already.
    heads_shared: by how many ranks; parts: head chunks, whose results are joined; wire: bytes of a
    number of gradients that travel; room: bytes that a message has room for at least (on a CPU).
    """

    forward: float = 0
    backward: float = 0
    sums: float = 0
    keys: int = 0
    store: float = 0.0
    heads_shared: int = 1
    parts: int = 1
    wire: int = F
    room: float = 0.0


def core_ops(x: Sizes, rows: int, core: Core) -> list[Op]:
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


def _with_all_to_all(x: Sizes, rows: int, core: Core) -> list[Op]:
    """The same where ranks share heads (`execution.ulysses`): q, k and v go to where their heads
    are computed, as copies, and out comes back; backward brings its gradient there, and those of q,
    k and v back. What backward needs is what the ring saw: q, k, v, out and lse of this rank's
    heads and all rows of the ranks that share them. Keys have copies where heads are fewer.

    An exchange holds what is sent and what arrives, and on a CPU both once more as messages; what
    was on the ring stays until backward ends.
    """
    q, kv, out, lse = rows * x.query, rows * x.kv, rows * x.out, rows * x.heads * F
    copies = max(1, core.heads_shared / x.kv_heads)
    there, seen = kv * copies, core.keys * x.kv * copies  # keys and values as the ring has them
    kernel = (q / 2 + seen) * B if x.cpu else (q + seen) * (B + F)
    rest = 1 - core.store
    others = core.heads_shared - 1

    def messages(size: float) -> float:
        """To and from the others."""
        each = size / core.heads_shared
        return others * (each + max(each, core.room)) if x.cpu else 0.0

    came = (q + there) * B
    kept = {"q there": q * B, "kv there": there * B, "out there": out * B * bool(rest),
            "lse": lse * bool(rest)}  # fmt: skip
    # Gradients on the ring, as they travel, and joined at home; those of copied keys in fp32.
    grads = (q + there) * core.wire
    home = q * core.wire + kv * (F if copies > 1 else core.wire)
    cast = grads if core.wire < F else 0
    travel = cast + grads + max(messages(grads), home)
    arrived = messages(came) if x.cpu else came
    return [Op(
        "core", ("q2", "k2", "v2"), {"out": out * B}, (), kept,
        before={ATTENTION: came + max(arrived, out * F * rest), RING: core.forward * bool(rest)},
        during={ATTENTION: out * B + messages(out * B), RING: core.forward * bool(rest)},
        back_before={ATTENTION: out * B + core.sums + max(kernel, travel) + lse,
                     RING: core.backward},
        back={ATTENTION: home},
    )]  # fmt: skip
