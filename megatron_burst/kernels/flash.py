# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 and 4 as operators of `AtenKernel`: `flash3` and `flash4`.

Decides how our tensors become arguments of these packages, which widths and devices they serve,
and what they leave to the kernels of NCCL; `flash_packages` knows which parameters a release has.

No kernel of these packages was run for this project: there was no GPU. That the arguments fit is
tested against the signatures of their releases (`tests/kernels/flash_signatures.json`); 4 also
compiled for them (`tests/kernels/flash4_compiles.py`, 4.0.0b36, sm_90 and sm_100). What becomes of
them was read in the sources: tensors are [b, s, h, d], of any strides but that of d; lse is
[b, h, s], float32, natural logarithm; gradients are written into the dq, dk, dv that are given.
3 takes the output in backward, or its stand-in. 4 subtracts dlse from rowsum(dout * out): with
out = 0 and dlse = -delta what it uses is delta, and nothing has to stand in. Windows are aligned to
the last row and column, as `operators` has them.

3 and 4 take many sequences end to end, [s, h, d] with lse [h, s], by the bounds of each. For rows
without columns 3 writes out 0 and lse -inf; 4 does on sm_100, and on sm_90 attends to keys of a
neighbour, so what it returns there is not used. Both write 0 as the gradients of columns without
rows and of rows without columns. FlashAttention 2 is the kernel that torch contains: use `aten`.
"""

from __future__ import annotations

from typing import Any

import torch

from .aten import AtenKernel
from .flash_packages import LENGTHS, MARGIN, PACKAGES, WINDOW, FlashFunctions, FlashPackage, load
from .operators import ONE_WIDTH, Shown, Widths
from .operators_cuda import heads_first, rows_first, stats_of

# Forward of FlashAttention 3 launches one block of threads per multiprocessor, each with its fixed
# share of a rectangle: those that find theirs occupied by NCCL's kernels start when others have
# ended, and take as long again. To leave some free costs no more than these. Read, not measured.
RING_MULTIPROCESSORS = 16
MLA = (192, 128)  # widths of keys and values


class Flash:
    """A package as an `operators.Operator`."""

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

    def forward(self, q, k, v, shown, scale):
        self._zeros = None  # a backward pass keeps them for its pairs
        result = self.loaded.forward(self._given(q, k, v, shown, scale), **self.margin)
        out, lse = result[:2]
        return heads_first(out), lse if lse.dim() == 3 else lse.unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, shown, scale):
        given = self._given(q, k, v, shown, scale)
        for name in ("q", "k", "v"):
            x = given[name]
            given[f"d{name}"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dout, lengths = rows_first(dout, shown.lengths), shown.lengths
        given |= {"dout": dout, "lse": stats_of(lse, lengths)}
        given["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if self.takes_delta:  # `out` is delta
            given |= {"out": self._zeros_like(dout), "dlse": -stats_of(out, lengths)}
        else:
            given["out"] = rows_first(out, lengths)
        self.loaded.backward(given, **self.margin)
        dq, dk, dv = (heads_first(given[name]) for name in ("dq", "dk", "dv"))
        return dq, dk, dv

    def _given(self, q, k, v, shown: Shown, scale: float) -> dict[str, Any]:
        """What both functions are given, under our names; tensors are views."""
        q, k, v = (rows_first(x, shown.lengths) for x in (q, k, v))
        given = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": shown.causal}
        unlimited = self.package.unlimited
        given |= dict(zip(WINDOW, shown.window or (unlimited, unlimited), strict=True))
        if shown.lengths is None:
            return given | dict.fromkeys(LENGTHS)
        rows, columns, _ = shown.lengths.on(q.device)
        return given | dict(zip(LENGTHS, (rows, columns, *shown.lengths.longest), strict=True))

    def _zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros shaped as x, dense. Filled once for the pairs of a pass, which have equal shapes:
        nobody writes into them.
        """
        found = self._zeros
        if found is None or (found.shape, found.dtype, found.device) != (
            x.shape,
            x.dtype,
            x.device,
        ):
            self._zeros = found = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return found


def kernel(name: str, beside_rings: bool = False) -> AtenKernel:
    """The tiles of `AtenKernel`, computed by an installed package; `beside_rings`: while tensors
    travel. Raises ValueError as `load`.
    """
    return AtenKernel(name, Flash(name, PACKAGES[name], load(name), beside_rings))


def unfit(
    name: str, major: int, widths: Widths, deterministic: bool, newer: bool = True
) -> str | None:
    """Why a package cannot serve these widths on devices of compute capability `major`, or None.

    From the checks in their sources. newer: FlashAttention 3 since it takes windows by two names
    (December 2025), which is since its backward takes values of another width than keys.
    """
    first, last = {"flash3": (8, 9), "flash4": (9, 12)}[name]
    if not first <= major <= last:
        return f"runs on devices of compute capability {first} to {last}, got {major}"
    if deterministic and name == "flash4" and major == 12:
        return "has no deterministic gradients on compute capability 12"
    if widths[0] != widths[1] and not _two_widths(name, major, widths, newer):
        return ONE_WIDTH
    widest, where = 256, ""
    if name == "flash4" and major in (10, 11):
        if widths == MLA:
            return None
        widest, where = 128, f" on compute capability {major}"
    elif name == "flash3" and deterministic:
        widest, where = 192, " where gradients must be deterministic"
    width = max(widths)
    return f"takes widths up to {widest}{where}, got {width}" if width > widest else None


def _two_widths(name: str, major: int, widths: Widths, newer: bool) -> bool:
    """Does a package take these widths, which differ?"""
    keys, values = widths
    if name == "flash3":
        return newer and major == 9 and 128 < keys <= 192 and 96 < values <= 128
    # On sm_90 backward takes two only where no query heads share keys; of sm_120 nothing is known.
    return name == "flash4" and major in (10, 11)
