"""The choices of a run, as a user states them.

Owns which names are valid. Validates and never rewrites: "auto" stays "auto" here and is
resolved, from the tensors of a call, when a plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from .hops import ALGORITHMS, SIDES
from .layout import LAYOUTS

NAMES = (*ALGORITHMS, "ulysses", "hybrid")
KERNELS = ("auto", "aten", "aten_cudnn", "reference")


@dataclass(frozen=True)
class BurstConfig:
    """Choices for `mb.megatron.configure`; the flag of each is `--burst-<name>`.

    algorithm: `--context-parallel-algo`; "megatron" leaves Megatron's own attention alone.
    layout: which positions each rank holds.
    side: which tensors travel in backward; "auto" takes the one with fewer bytes.
    kernel: the local attention; "auto" takes torch's own flash operator of the device.
    intra_size: ranks per node, where neither hierarchical sizes nor host names say it.
    """

    algorithm: str = "burst"
    layout: str = "zigzag"
    side: str = "auto"
    kernel: str = "auto"
    intra_size: int | None = None

    def __post_init__(self):
        _one_of(
            "algorithm (--context-parallel-algo)",
            self.algorithm,
            (*ALGORITHMS, "ulysses", "hybrid", "megatron"),
        )
        _one_of("layout (--burst-layout)", self.layout, tuple(sorted(LAYOUTS)))
        _one_of("side (--burst-side)", self.side, ("auto", *SIDES))
        _one_of("kernel (--burst-kernel)", self.kernel, KERNELS)
        if self.intra_size is not None and self.intra_size < 1:
            raise ValueError(
                f"intra_size (--burst-intra-size) must be at least 1, got {self.intra_size}"
            )


def _one_of(name: str, value: object, names: tuple[str, ...]) -> None:
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")
