"""FlashAttention 2, 3 and 4 as operators of `AtenKernel`: `flash2`, `flash3` and `flash4`.

Decides how our tensors become arguments of these packages, which widths and devices they serve,
and what they leave to the kernels of NCCL; `flash_packages` knows which parameters a release has.

No kernel of these packages was run for this project: there was no GPU. That the arguments fit is
tested against the signatures of their releases (`tests/kernels/flash_signatures.json`); 4 also
compiled for them (`tests/kernels/flash4_compiles.py`, 4.0.0b36, sm_90 and sm_100). What becomes of
them was read in the sources: tensors are [b, s, h, d], of any strides but that of d; lse is
[b, h, s], float32, natural logarithm; gradients are written into the dq, dk, dv that are given.
2 and 3 want the output in backward, or its stand-in. 4 subtracts dlse from rowsum(dout * out): with
out = 0 and dlse = -delta what it uses is delta, and nothing has to stand in. Windows are aligned to
the last row and column, as `operators` has them.
"""

from __future__ import annotations

from typing import Any

import torch

from .aten import AtenKernel
from .flash_packages import MARGIN, PACKAGES, WINDOW, FlashFunctions, FlashPackage, load
from .operators import Window

# Forward of FlashAttention 3 launches one block of threads per multiprocessor, each with its fixed
# share of a rectangle: those that find theirs occupied by NCCL's kernels start when others have
# ended, and take as long again. To leave some free costs no more than these. Read, not measured.
RING_MULTIPROCESSORS = 16

Sides = tuple[int | None, int | None]  # of a window, as a package wants them


class Flash:
    """A package as an `operators.Operator`."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    joins = False
    limits: tuple[int | None, int | None] = (None, None)

    def __init__(
        self, name: str, package: FlashPackage, loaded: FlashFunctions, beside_rings: bool = False
    ):
        self.name, self.package, self.loaded = name, package, loaded
        takes_margin = beside_rings and MARGIN in package.forward.constants
        self.margin = {MARGIN: RING_MULTIPROCESSORS} if takes_margin else {}
        self.takes_delta = package.takes_delta
        self.windows, self.deterministic = loaded.windows, loaded.deterministic

    def unfit(self, device: torch.device, width: int) -> str | None:
        major, _ = torch.cuda.get_device_capability(device)
        return unfit(self.name, major, width, torch.are_deterministic_algorithms_enabled())

    def forward(self, q, k, v, causal, bias, window, scale):
        given = forward_given(q, k, v, causal, self._sides(window), scale)
        result = self.loaded.forward(given, **self.margin)
        return result[0].transpose(1, 2), result[1]

    def backward(self, dout, q, k, v, out, lse, causal, bias, window, scale):
        given = backward_given(
            dout, q, k, v, out, lse, causal, self._sides(window), scale, self.takes_delta
        )
        self.loaded.backward(given, **self.margin)
        dq, dk, dv = (given[name].transpose(1, 2) for name in ("dq", "dk", "dv"))
        return dq, dk, dv

    def _sides(self, window: Window | None) -> Sides:
        unlimited = self.package.unlimited
        return (unlimited, unlimited) if window is None else window


def kernel(name: str, beside_rings: bool = False) -> AtenKernel:
    """The tiles of `AtenKernel`, computed by an installed package; `beside_rings`: while tensors
    travel. Raises ValueError as `load`."""
    return AtenKernel(name, Flash(name, PACKAGES[name], load(name), beside_rings))


def forward_given(q, k, v, causal: bool, sides: Sides, scale: float) -> dict[str, Any]:
    """What forward is given, under our names; [b, h, s, d] becomes [b, s, h, d], a view."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": causal}
    return given | dict(zip(WINDOW, sides, strict=True))


def backward_given(
    dout, q, k, v, out, lse, causal: bool, sides: Sides, scale: float, takes_delta: bool
) -> dict[str, Any]:
    """What backward is given, under our names. `out` is delta [b, h, s] if it takes that."""
    given = forward_given(q, k, v, causal, sides, scale)
    for name in ("q", "k", "v"):
        x = given[name]
        given[f"d{name}"] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    given |= {"dout": dout.transpose(1, 2), "lse": lse.contiguous()}
    given["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if takes_delta:
        zeros = torch.zeros(given["dout"].shape, dtype=dout.dtype, device=dout.device)
        return given | {"out": zeros, "dlse": -out.contiguous()}
    return given | {"out": out.transpose(1, 2)}


def unfit(name: str, major: int, width: int, deterministic: bool) -> str | None:
    """Why a package cannot serve this width on devices of compute capability `major`, or None.

    From the checks in their sources. Values are padded to the width of keys before, so that (192,
    128), which FlashAttention 4 knows on Blackwell, is refused there; at 256 it takes no dlse.
    """
    first, last = {"flash2": (8, None), "flash3": (8, 9), "flash4": (9, 12)}[name]
    if major < first or (last is not None and major > last):
        until = "on" if last is None else f"to {last}"
        return f"runs on devices of compute capability {first} {until}, got {major}"
    if deterministic and name == "flash4" and major == 12:
        return "has no deterministic gradients on compute capability 12"
    widest, where = 256, ""
    if name == "flash4" and major in (10, 11):
        widest, where = 128, f" on compute capability {major}"
    elif name == "flash3" and deterministic:
        widest, where = 192, " where gradients must be deterministic"
    return f"takes widths up to {widest}{where}, got {width}" if width > widest else None
