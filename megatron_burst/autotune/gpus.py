# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: what their vendor publishes, and what kernels of others are published to reach.

Memory is what torch reports as total capacity of the device (less than the name says); rates are
dense peaks, and of links one way: a datasheet's NVLink rate counts both. Host links are the rates
that pinned copies reach, not those of the bus. Left out are GPUs that have a link of their own to
each other GPU of the node instead of a switch: one rate does not say what a ring gets there.

Fractions of the peak: `attention` is of long calls, head width 128, bf16: up to 230 of 312 TFLOP/s
on A100 (FlashAttention-2, 0.73), 648 of 989 on H100 (FlashAttention-3, 0.66), 693 to 702 on H200
(cuDNN 9, NVIDIA's figures, 0.7), up to 1613 of 2250 on B200 (FlashAttention-4, abstract, 0.71);
not more than that is taken. `linear` is nine tenths of what a search over shapes found for
matrix products (Bekman, Machine Learning Engineering, "maximum achievable matmul FLOPS": A100 0.87,
H100 0.80, B200 0.78). A backward of attention runs at 0.86 of the forward's rate (FlashAttention-2
on A100: up to 0.63 against 0.73 of the peak; FlashAttention-3: 561 against 648 TFLOP/s).

KERNELS has the same fraction by kernel. Forward on H100: FlashAttention-2 370 TFLOP/s, cuDNN 595,
FlashAttention-3 648; cuDNN on H200 as above. On B200 FlashAttention-4 is up to 1.3 times as fast as
cuDNN 9.13 (FlashAttention-4, abstract). DOCUMENTS has what kernels reach, both ways, over causal
documents packed to 32K tokens, on H100: the first two measured (docs/performance.md),
FlashAttention 3 by MagiAttention's blog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GB, GIB = 10**9, 2**30
SLOWER = 0.86  # rate of an attention backward over that of a forward


def is_finite(value: object) -> bool:
    """Whether a value is a number from 0 that is neither infinite nor NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < math.inf


@dataclass(frozen=True)
class Gpu:
    """One GPU, by its datasheet or measured.

    name: for messages; memory: bytes; peak: dense bf16 operations per second; host_link: bytes per
    second between one GPU and host memory, one way; source: of the figures. nvlink: bytes per
    second to the other GPUs of the node, one way; memory_rate: of its own memory. attention,
    linear: fractions of the peak that long attention calls (forward) and large matrix products
    reach. nic: bytes per second of a NIC of the vendor's node, one way, which has one for every
    GPU. small: a product of sizes m x k x n takes longer by small / m + small / k + small / n of
    its time. kernel: whose rate `attention` is, as `--burst-kernel` calls it; None: the fastest's.

    Raises ValueError for numbers that no GPU has.
    """

    name: str
    memory: int
    peak: float
    host_link: float
    source: str
    nvlink: float = 300 * GB
    memory_rate: float = 2.0e12
    attention: float = 0.6
    linear: float = 0.7
    nic: float = 50 * GB
    small: float = 64.0
    kernel: str | None = None

    def __post_init__(self) -> None:
        wrong = []
        for name in ("memory", "peak", "host_link", "nvlink", "memory_rate", "nic"):
            value = getattr(self, name)
            if name in ("memory_rate", "nvlink", "nic") and value == math.inf:
                continue  # links that are not there, passes over memory that take no time
            if not is_finite(value) or value <= 0:
                wrong.append(f"{name} must be a finite number above 0: {value!r}")
        for name in ("attention", "linear"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 < value <= 1:
                wrong.append(f"{name} is a fraction of the peak, above 0 and at most 1: {value!r}")
        if not is_finite(self.small):
            wrong.append(f"small must be a finite number of rows from 0: {self.small!r}")
        if wrong:
            raise ValueError(f"gpu {self.name}: {'; '.join(wrong)}")


_A100 = "A100 datasheet, SXM; PCIe 4.0 x16; DGX A100, HDR 200 Gb/s"
_H100 = "H100 datasheet, SXM; PCIe 5.0 x16; DGX H100, NDR 400 Gb/s"
_A, _H, _B = (0.70, 0.78, 25 * GB), (0.65, 0.72, 50 * GB), (0.65, 0.70, 50 * GB)

# Name, memory, peak, host link, source, NVLink one way, memory rate; attention, linear, NIC.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 25 * GB, _A100, 300 * GB, 1555 * GB, *_A),
        Gpu("a100", int(79.1 * GIB), 312e12, 25 * GB, _A100, 300 * GB, 2039 * GB, *_A),
        Gpu("a800", int(79.1 * GIB), 312e12, 25 * GB, f"{_A100}; NVLink 400 GB/s both ways",
            200 * GB, 2039 * GB, *_A),
        Gpu("h100", int(79.1 * GIB), 989e12, 50 * GB, _H100, 450 * GB, 3350 * GB, *_H),
        Gpu("h800", int(79.1 * GIB), 989e12, 50 * GB, f"{_H100}; NVLink 400 GB/s both ways",
            200 * GB, 3350 * GB, *_H),
        Gpu("h200", int(139.8 * GIB), 989e12, 50 * GB, "H200 datasheet, SXM; PCIe 5.0 x16; NDR",
            450 * GB, 4800 * GB, 0.68, *_H[1:]),
        Gpu("b200", int(178.3 * GIB), 2250e12, 50 * GB, "DGX B200 datasheet; PCIe 5.0 x16; NDR",
            900 * GB, 8000 * GB, *_B),
        # Two GPUs share 450 GB/s one way to their CPU; four fifths of it are assumed to be reached.
        Gpu("gb200", int(184.3 * GIB), 2500e12, 360 * GB, "GB200 NVL72 datasheet; NVLink-C2C; NDR",
            900 * GB, 8000 * GB, *_B),
    )
}  # fmt: skip


_AMPERE, _BLACKWELL = {"aten": 0.70}, {"aten_cudnn": 0.65 / 1.3, "flash4": 0.65}
_HOPPER = {"aten": 370 / 989, "aten_cudnn": 595 / 989, "flash3": 0.65}
# GPU -> kernel -> fraction of the peak; the fastest is `Gpu.attention`.
KERNELS: dict[str, dict[str, float]] = {
    "a100-40g": _AMPERE, "a100": _AMPERE, "a800": _AMPERE,
    "h100": _HOPPER, "h800": _HOPPER, "h200": {**_HOPPER, "aten_cudnn": 0.68},
    "b200": _BLACKWELL, "gb200": _BLACKWELL,
}  # fmt: skip

DOCUMENTS = {"aten": (284e12, 246e12), "aten_cudnn": (424e12, 350e12), "flash3": (585e12, 425e12)}


def table_entry(gpu: Gpu) -> Gpu | None:
    """Return the GPU of the table with this name, else one that differs only in its memory."""
    if gpu.name in GPUS:
        return GPUS[gpu.name]
    changed = {name: getattr(gpu, name) for name in ("name", "memory", "attention", "kernel")}
    return next((each for each in GPUS.values() if replace(each, **changed) == gpu), None)


def is_hopper(gpu: Gpu) -> bool:
    """Return whether the rates of `DOCUMENTS` apply to this GPU."""
    return KERNELS.get(gpu.name, {}).keys() >= DOCUMENTS.keys() or gpu.peak == GPUS["h100"].peak


def assumed_kernel(gpu: Gpu, documents: bool = False) -> str | None:
    """Return the kernel whose published rate `Gpu.attention` is.

    Args:
        gpu: The GPU of the forecast.
        documents: Whether attention is to packed documents, for which rates on Hopper are others.

    Returns:
        A name as in `--burst-kernel`, or words of a cluster file; None if the rate was stated
        without a kernel.
    """
    if gpu.kernel is not None:
        return gpu.kernel
    known = table_entry(gpu)
    if known is None or gpu.attention != known.attention:
        return None
    if documents and is_hopper(known):
        return max(DOCUMENTS, key=lambda name: DOCUMENTS[name])
    rates = KERNELS[known.name]
    return max(rates, key=lambda name: rates[name])


def other_kernels(gpu: Gpu, documents: bool = False) -> list[str]:
    """Return the other kernels with a published rate on this GPU, the fastest first.

    Empty if the rate of the assumed kernel was stated by the user.
    """
    known, kernel = table_entry(gpu), assumed_kernel(gpu, documents)
    if known is None or kernel is None:
        return []
    rates = KERNELS[known.name]
    if gpu.kernel is not None and rates.get(kernel) != gpu.attention:
        return []
    return sorted(rates.keys() - {kernel}, key=lambda name: -rates[name])


def with_kernel(gpu: Gpu, kernel: str | None) -> Gpu:
    """The GPU at the published rate of one kernel, None: as it is. ValueError with those that there
    are.
    """
    if kernel is None:
        return gpu
    entry = table_entry(gpu)
    known = {} if entry is None else KERNELS[entry.name]
    if kernel not in known:
        there = f"take one of {', '.join(known)}" if known else "leave it out"
        raise ValueError(f"--kernel {kernel}: no rate of it was published for {gpu.name}: {there}")
    return replace(gpu, attention=known[kernel], kernel=kernel)


def gpu(name: str) -> Gpu:
    """A GPU by its name. ValueError with the names that there are for any other."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(
            f"--gpu {name}: unknown; one of {', '.join(GPUS)}, with another --gpu-memory if need be"
        )
    return found


def of_device(title: str) -> Gpu | None:
    """The GPU of the table that CUDA calls so, such as "NVIDIA H100 80GB HBM3"; None for others,
    and for the cards of the same names, which have other peaks and no NVLink switch.
    """
    words = title.upper().replace("-", " ").split()
    if "PCIE" in words or "NVL" in words:
        return None
    if "A100" in words and "40GB" in words:
        return GPUS["a100-40g"]
    return next((gpu for name, gpu in GPUS.items() if name.upper() in words), None)
