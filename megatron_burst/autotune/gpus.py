# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: values that vendors publish, and published rates of kernels.

Memory is the total capacity that torch reports. It is less than the number in the name. Rates are
dense peaks. Rates of links are for one direction; a datasheet's NVLink rate is for both. Host links
have the rate of pinned copies, not of the bus. The table excludes GPUs whose node has a direct link
between every two GPUs instead of a switch, because one rate does not describe a ring on these GPUs.

`attention` and `linear` are fractions of the peak. `attention` is for long calls with head width
128 in bf16. Published values are up to 230 of 312 TFLOP/s on A100 (FlashAttention-2, 0.73), 648 of
989 on H100 (FlashAttention-3, 0.66), 693 to 702 on H200 (cuDNN 9, NVIDIA's values, 0.7) and up to
1613 of 2250 on B200 (FlashAttention-4, abstract, 0.71). No value of `attention` in the table
exceeds the published fraction of its GPU. `linear` is 90 % of the rate that a search over shapes
reached for matrix products (Bekman, Machine Learning Engineering, "maximum achievable matmul
FLOPS": A100 0.87, H100 0.80, B200 0.78). Backward of attention runs at 0.86 of the rate of forward
(FlashAttention-2 on A100: up to 0.63 against 0.73 of the peak; FlashAttention-3: 561 against 648
TFLOP/s).

KERNELS has the fraction `attention` of each kernel. In forward on H100, FlashAttention-2 reaches
370 TFLOP/s, cuDNN 595 TFLOP/s and FlashAttention-3 648 TFLOP/s. On B200 FlashAttention-4 is up to
1.3 times as fast as cuDNN 9.13 (FlashAttention-4, abstract). DOCUMENTS has the rates of kernels on
H100, forward and backward, over causal documents packed to 32K tokens. The rates of "aten" and
"aten_cudnn" are measured (docs/performance.md). The rate of "flash3" is from MagiAttention's blog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GB, GIB = 10**9, 2**30
SLOWER = 0.86  # rate of an attention backward over the rate of a forward


def is_finite(value: object) -> bool:
    """Return True if a value is a finite number >= 0 and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < math.inf


@dataclass(frozen=True)
class Gpu:
    """A GPU model with its rates, from a datasheet or measured.

    Attributes:
        name: Name in `GPUS` or in messages.
        memory: Bytes of memory.
        peak: Dense bf16 operations per second.
        host_link: Bytes per second between one GPU and host memory, in one direction.
        source: Text for messages that names the origin of the values.
        nvlink: Bytes per second to the other GPUs of the node, in one direction.
        memory_rate: Bytes per second of the GPU's memory.
        attention: Fraction of the peak that long attention calls reach in forward.
        linear: Fraction of the peak that large matrix products reach.
        nic: Bytes per second of a NIC of the vendor's node, in one direction; that node has one NIC
            per GPU.
        small: A matrix product of sizes m x k x n is slower than large products by the fraction
            small / m + small / k + small / n.
        kernel: Kernel with the rate `attention`, as in `--burst-kernel`; None for the fastest
            kernel.

    Raises:
        ValueError: A value is impossible for a GPU. The message names all such values.
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

    @property
    def one_queue(self) -> bool:
        """True if Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 on this GPU, except with FSDP.

        True for GPUs that are not in `GPUS`.
        """
        return self.name not in ("b200", "gb200")

    def __post_init__(self) -> None:
        wrong = []
        for name in ("memory", "peak", "host_link", "nvlink", "memory_rate", "nic"):
            value = getattr(self, name)
            if name in ("memory_rate", "nvlink", "nic") and value == math.inf:
                continue  # inf: a link that does not exist, or memory passes that need no time
            if not is_finite(value) or value <= 0:
                wrong.append(f"{name} must be a finite number above 0: {value!r}")
        for name in ("attention", "linear"):
            value = getattr(self, name)
            if not is_finite(value) or not 0 < value <= 1:
                wrong.append(f"{name} must be a fraction of the peak (> 0, <= 1): {value!r}")
        if not is_finite(self.small):
            wrong.append(f"small must be a finite number of rows >= 0: {self.small!r}")
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
        # Two GPUs share 450 GB/s in one direction to their CPU. Assumption: 80 % of it is reached.
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
    """Return the entry of `GPUS` for this GPU; None if there is none.

    The entry has the same name, or differs only in name, memory, attention rate and kernel.
    """
    if gpu.name in GPUS:
        return GPUS[gpu.name]
    changed = {name: getattr(gpu, name) for name in ("name", "memory", "attention", "kernel")}
    return next((entry for entry in GPUS.values() if replace(entry, **changed) == gpu), None)


def is_hopper(gpu: Gpu) -> bool:
    """Return True for GPUs to which the rates of `DOCUMENTS` apply."""
    return KERNELS.get(gpu.name, {}).keys() >= DOCUMENTS.keys() or gpu.peak == GPUS["h100"].peak


def assumed_kernel(gpu: Gpu, documents: bool = False) -> str | None:
    """Return the kernel whose rate a forecast for this GPU uses.

    Args:
        gpu: The GPU of the forecast.
        documents: True for attention over packed documents, for which Hopper has other rates.

    Returns:
        A name as in `--burst-kernel`, or the kernel that a cluster file names. None if the user
        stated a rate without naming a kernel.
    """
    if gpu.kernel is not None:
        return gpu.kernel
    entry = table_entry(gpu)
    if entry is None or gpu.attention != entry.attention:
        return None
    if documents and is_hopper(entry):
        return max(DOCUMENTS, key=lambda name: DOCUMENTS[name])
    rates = KERNELS[entry.name]
    return max(rates, key=lambda name: rates[name])


def other_kernels(gpu: Gpu, documents: bool = False) -> list[str]:
    """Return the kernels with a published rate on this GPU except `assumed_kernel`, fastest first.

    The list is empty if the user stated the rate of the kernel.
    """
    entry, kernel = table_entry(gpu), assumed_kernel(gpu, documents)
    if entry is None or kernel is None:
        return []
    rates = KERNELS[entry.name]
    if gpu.kernel is not None and rates.get(kernel) != gpu.attention:
        return []
    return sorted(rates.keys() - {kernel}, key=lambda name: -rates[name])


def with_kernel(gpu: Gpu, kernel: str | None) -> Gpu:
    """Return the GPU with the published attention rate of `kernel`; unchanged if that is None.

    Raises:
        ValueError: This kernel has no published rate on the GPU. The message names the kernels with
            a published rate.
    """
    if kernel is None:
        return gpu
    entry = table_entry(gpu)
    fractions = {} if entry is None else KERNELS[entry.name]
    if kernel not in fractions:
        remedy = f"use one of {', '.join(fractions)}" if fractions else "omit it"
        raise ValueError(f"--kernel {kernel}: it has no published rate on {gpu.name}; {remedy}")
    return replace(gpu, attention=fractions[kernel], kernel=kernel)


def gpu(name: str) -> Gpu:
    """Return the GPU with this name in `GPUS`; raise ValueError that lists the names otherwise."""
    entry = GPUS.get(name.lower())
    if entry is None:
        raise ValueError(
            f"--gpu {name}: unknown; use one of {', '.join(GPUS)}, and --gpu-memory if its memory "
            "differs"
        )
    return entry


def of_device(title: str) -> Gpu | None:
    """Return the GPU of the table for a CUDA device name such as "NVIDIA H100 80GB HBM3".

    The result is None for other devices. It is also None for PCIe and NVL cards, which have other
    peaks and no NVLink switch.
    """
    words = title.upper().replace("-", " ").split()
    if "PCIE" in words or "NVL" in words:
        return None
    if "A100" in words and "40GB" in words:
        return GPUS["a100-40g"]
    return next((gpu for name, gpu in GPUS.items() if name.upper() in words), None)
