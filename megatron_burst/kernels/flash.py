# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 and 4 as operators of `AtenKernel`: `flash3` and `flash4`.

This module converts tensors to arguments of these packages. It defines which widths and devices the
packages support, and how many multiprocessors their kernels leave free for NCCL. `flash_packages`
has the parameters of each release.

No kernel of these packages was run for this project, because there was no GPU. Tests compare our
arguments with the function signatures of the releases (`tests/kernels/flash_signatures.json`).
Kernels of version 4.0.0b36 were also compiled for sm_90 and sm_100
(`tests/kernels/flash4_compiles.py`). The following facts come from the sources of the packages.
Tensors are [b, s, h, d]; d must be contiguous, and the other dimensions may have any strides. lse
is [b, h, s], float32, natural logarithm. Gradients are written into the given dq, dk, dv. Version 3
needs the output or its stand-in in backward. Version 4 subtracts dlse from rowsum(dout * out): with
out = 0 and dlse = -delta it uses delta, so no stand-in is needed. Windows are aligned to the last
row and column, as in `operators`.

Both versions accept many concatenated sequences in one call: tensors [s, h, d], lse [h, s], and the
bounds of the sequences. For rows without columns, version 3 writes out 0 and lse -inf. Version 4
does the same on sm_100. On sm_90, rows without columns attend to keys of a neighbouring sequence,
so their result is not used. Both versions write gradients 0 for columns without rows and rows
without columns. FlashAttention 2 is part of torch and is the kernel `aten`.
"""

from __future__ import annotations

from typing import Any

import torch

from .aten import AtenKernel
from .flash_packages import LENGTHS, MARGIN, PACKAGES, WINDOW, FlashFunctions, FlashPackage, load
from .operators import ONE_WIDTH, TileVisibility, Widths
from .operators_cuda import heads_first, rows_first, stats_of

# The forward of FlashAttention 3 launches one thread block per multiprocessor, each with a fixed
# share of the work. If NCCL occupies a multiprocessor, one block starts only after other blocks
# have ended, so the time doubles. Leaving multiprocessors free costs only their share of the speed.
# This behaviour is from the sources and was not measured.
RING_MULTIPROCESSORS = 16
MLA = (192, 128)  # widths of keys and values


class Flash:
    """Operator for CUDA: attention of an installed FlashAttention package."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)

    def __init__(
        self, name: str, package: FlashPackage, loaded: FlashFunctions, beside_rings: bool = False
    ):
        self.name, self.package, self.loaded = name, package, loaded
        takes_margin = beside_rings and MARGIN in package.forward.constants
        self.margin = {MARGIN: RING_MULTIPROCESSORS} if takes_margin else {}
        self.takes_delta = package.takes_delta
        self.windows, self.joins = loaded.windows, loaded.joins
        self.deterministic = loaded.deterministic
        self._zeros: torch.Tensor | None = None

    def unfit(self, device: torch.device, widths: Widths) -> str | None:
        major, _ = torch.cuda.get_device_capability(device)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return unfit(self.name, major, widths, deterministic, self.loaded.windows)

    def forward(self, q, k, v, visibility, scale):
        self._zeros = None  # cached during a backward pass only
        result = self.loaded.forward(self._arguments(q, k, v, visibility, scale), **self.margin)
        out, lse = result[:2]
        return heads_first(out), lse if lse.dim() == 3 else lse.unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        arguments = self._arguments(q, k, v, visibility, scale)
        for name in ("q", "k", "v"):
            x = arguments[name]
            arguments[f"d{name}"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dout, lengths = rows_first(dout, visibility.lengths), visibility.lengths
        arguments |= {"dout": dout, "lse": stats_of(lse, lengths)}
        arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if self.takes_delta:  # `out` is delta
            arguments |= {"out": self._zeros_like(dout), "dlse": -stats_of(out, lengths)}
        else:
            arguments["out"] = rows_first(out, lengths)
        self.loaded.backward(arguments, **self.margin)
        dq, dk, dv = (heads_first(arguments[name]) for name in ("dq", "dk", "dv"))
        return dq, dk, dv

    def _arguments(self, q, k, v, visibility: TileVisibility, scale: float) -> dict[str, Any]:
        """Return the common arguments of forward and backward by name; tensors are views."""
        q, k, v = (rows_first(x, visibility.lengths) for x in (q, k, v))
        arguments = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": visibility.causal}
        unlimited = self.package.unlimited
        arguments |= dict(zip(WINDOW, visibility.window or (unlimited, unlimited), strict=True))
        if visibility.lengths is None:
            return arguments | dict.fromkeys(LENGTHS)
        rows, columns, _ = visibility.lengths.on(q.device)
        return arguments | dict(
            zip(LENGTHS, (rows, columns, *visibility.lengths.longest), strict=True)
        )

    def _zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return dense zeros like x; calls with equal shapes share the same tensor."""
        zeros = self._zeros
        if zeros is None or (zeros.shape, zeros.dtype, zeros.device) != (
            x.shape,
            x.dtype,
            x.device,
        ):
            self._zeros = zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return zeros


def kernel(name: str, beside_rings: bool = False) -> AtenKernel:
    """Return an `AtenKernel` that calls an installed FlashAttention package.

    Args:
        name: "flash3" or "flash4".
        beside_rings: True if tensors are sent while the kernel runs.

    Raises:
        ValueError: The package is missing, or its functions have unknown parameters; see
            `flash_packages.load`.
    """
    return AtenKernel(name, Flash(name, PACKAGES[name], load(name), beside_rings))


def unfit(
    name: str, major: int, widths: Widths, deterministic: bool, newer: bool = True
) -> str | None:
    """Return why a FlashAttention package does not support these widths; None if it does.

    The rules are copied from the checks in the sources of the packages.

    Args:
        name: "flash3" or "flash4".
        major: Major compute capability of the device.
        widths: Widths of keys and of values.
        deterministic: True if gradients must be deterministic.
        newer: False for releases of FlashAttention 3 before December 2025. In these, backward
            requires equal widths of keys and values.
    """
    first, last = {"flash3": (8, 9), "flash4": (9, 12)}[name]
    if not first <= major <= last:
        return f"runs on devices of compute capability {first} to {last}, got {major}"
    if deterministic and name == "flash4" and major == 12:
        return "has no deterministic gradients on compute capability 12"
    if widths[0] != widths[1] and not _two_widths(name, major, widths, newer):
        return ONE_WIDTH
    widest, condition = 256, ""
    if name == "flash4" and major in (10, 11):
        if widths == MLA:
            return None
        widest, condition = 128, f" on compute capability {major}"
    elif name == "flash3" and deterministic:
        widest, condition = 192, " if gradients must be deterministic"
    width = max(widths)
    return f"supports widths up to {widest}{condition}, got {width}" if width > widest else None


def _two_widths(name: str, major: int, widths: Widths, newer: bool) -> bool:
    """Return True if a package supports these widths of keys and values, which differ."""
    keys, values = widths
    if name == "flash3":
        return newer and major == 9 and 128 < keys <= 192 and 96 < values <= 128
    # On sm_90, backward supports two widths only without shared key heads. sm_120 is untested.
    return name == "flash4" and major in (10, 11)
