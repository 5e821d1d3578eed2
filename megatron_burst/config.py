"""The choices of a run, as a user states them.

Owns which names are valid. Validates and never rewrites: "auto" stays "auto" here and is
resolved, from the tensors of a call, when a plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import LAYOUTS, check_fraction
from .schedule.tables import ALGORITHMS, SIDES
from .schedule.topology import PLACEMENTS

NAMES = (*ALGORITHMS, "ulysses", "hybrid", "auto")
WIRE_DTYPES = ("fp32", "bf16")
LM_HEAD_LOSSES = ("off", "single_pass", "recompute")
KERNELS = ("auto", "aten", "aten_cudnn", "flash2", "flash3", "flash4", "triton", "reference")


@dataclass(frozen=True)
class BurstConfig:
    """Choices for `mb.megatron.configure`; the flag of each is `--burst-<name>`.

    algorithm: `--context-parallel-algo`; "megatron" leaves Megatron's own attention alone, "auto"
    takes the ring, side and head chunks that are predicted to be fastest on the groups there are
    (which are made before shapes are known: whether ranks share heads is for `ulysses_size`).
    layout: which positions each rank holds.
    side: which tensors travel in backward; "auto" takes the one with fewer bytes.
    kernel: the local attention; "auto" takes torch's own flash operator of the device, "flash2",
    "flash3" and "flash4" are the installed FlashAttention packages.
    intra_size: ranks per node, where neither hierarchical sizes nor host names say it.
    ulysses_size: how many ranks share the heads of the same rows by all-to-all ("hybrid" needs it;
    "ulysses" takes all ranks).
    placement: "head_first" puts the ranks that share heads next to each other, "context_first"
    those of a ring.
    kv_cache: fraction of visiting keys and values that forward keeps for backward.
    wire_dtype: of travelling gradients, "fp32" or "bf16"; None for the accumulation dtype.
    store: fraction of attention results that `--recompute-granularity` keeps instead of computing
    them again (`--burst-attention-store`); None keeps none.
    lm_head_loss: the LM head and its loss as one operation: "single_pass", "recompute" or "off".
    """

    algorithm: str = "burst"
    layout: str = "zigzag"
    side: str = "auto"
    kernel: str = "auto"
    intra_size: int | None = None
    ulysses_size: int | None = None
    placement: str = "head_first"
    kv_cache: float = 0.0
    wire_dtype: str | None = None
    store: float | None = None
    lm_head_loss: str = "off"

    def __post_init__(self):
        _one_of(
            "algorithm (--context-parallel-algo)",
            self.algorithm,
            (*NAMES, "megatron"),
        )
        _one_of("layout (--burst-layout)", self.layout, tuple(sorted(LAYOUTS)))
        _one_of("side (--burst-side)", self.side, ("auto", *SIDES))
        _one_of("kernel (--burst-kernel)", self.kernel, KERNELS)
        _one_of("placement (--burst-placement)", self.placement, PLACEMENTS)
        _one_of("wire_dtype (--burst-wire-dtype)", self.wire_dtype, (None, *WIRE_DTYPES))
        _one_of("lm_head_loss (--burst-lm-head-loss)", self.lm_head_loss, LM_HEAD_LOSSES)
        if self.store is not None:
            check_fraction("store (--burst-attention-store)", self.store)
        check_fraction("kv_cache (--burst-kv-cache)", self.kv_cache)
        if self.kv_cache and self.side == "query":
            raise ValueError(
                f"--burst-kv-cache {self.kv_cache} keeps keys, which --burst-side query does not "
                "send; use --burst-side kv or auto"
            )
        if self.store and self.kv_cache:
            raise ValueError(
                f"--burst-kv-cache {self.kv_cache} keeps keys of a forward that "
                f"--burst-attention-store {self.store} does not run again; use one of them"
            )
        for name in ("intra_size", "ulysses_size"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                flag = f"--burst-{name.replace('_', '-')}"
                raise ValueError(f"{name} ({flag}) must be an integer from 1 on, got {size!r}")


def _one_of(name: str, value: object, names: tuple[str | None, ...]) -> None:
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(str, names))}, got {value!r}")
