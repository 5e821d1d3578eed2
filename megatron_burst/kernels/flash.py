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

Version 4 also accepts a mask function and lists of visible blocks (`block_lists`). For row blocks
without visible blocks, and rows that a mask function hides, it writes out 0 and lse -inf. In
backward it treats lse -inf as 0. So rows that see nothing need no further operators.

Both versions accept many concatenated sequences in one call: tensors [s, h, d], lse [h, s], and the
bounds of the sequences. For rows without columns, version 3 writes out 0 and lse -inf. Version 4
does the same on sm_100. On sm_90, rows without columns attend to keys of a neighbouring sequence,
so their result is not used. Both versions write gradients 0 for columns without rows and rows
without columns. FlashAttention 2 is part of torch and is the kernel `aten`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..layout import Span
from ..layout.layouts import ShardPairs
from ..masks import Documents, Full, Mask, Prefix, Window
from ..masks.base import parts
from ..masks.tiles import Tile
from .aten import AtenKernel, TileWork, TileWorks
from .block_lists import BlockPairs, BlockSize, PairBlocks
from .flash_packages import (
    BLOCKS,
    LENGTHS,
    LIST_FIELDS,
    MARGIN,
    PACKAGES,
    PACKED_HEADS,
    WINDOW,
    FlashFunctions,
    FlashPackage,
    load,
)
from .masked_pairs import any_visible
from .operators import ONE_WIDTH, TileVisibility, Widths
from .operators_cuda import heads_first, rows_first, stats_of

# The forward of FlashAttention 3 launches one thread block per multiprocessor, each with a fixed
# share of the work. If NCCL occupies a multiprocessor, one block starts only after other blocks
# have ended, so the time doubles. Leaving multiprocessors free costs only their share of the speed.
# This behaviour is from the sources and was not measured.
RING_MULTIPROCESSORS = 16
MLA = (192, 128)  # widths of keys and values
CALLS = 4  # maximum calls of tiles per pair of shards; otherwise one call with lists of blocks


class Flash:
    """Operator for CUDA: attention of an installed FlashAttention package."""

    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    multiple = 8
    limits: tuple[int | None, int | None] = (None, None)
    rounds = False

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

    def blocks_refused(self, device: torch.device) -> str | None:
        """Return why calls with lists of blocks are not possible; None if they are."""
        if self.package.blocks is None:
            return "has no lists of blocks"
        if self.loaded.blocks is None:
            release = f"{self.package.distribution} {self.package.blocks[1]}"
            return f"requires {release} or newer for lists of blocks"
        major, _ = torch.cuda.get_device_capability(device)
        return unfit_blocks(major, torch.are_deterministic_algorithms_enabled())

    def forward(self, q, k, v, visibility, scale):
        self._zeros = None  # cached during a backward pass only
        arguments = self._arguments(q, k, v, visibility, scale)
        options = dict(self.margin)
        if visibility.blocks is not None:
            arguments |= self._lists(visibility.blocks, "rows", q, v)
            options[PACKED_HEADS] = False
        result = self.loaded.forward(arguments, **options)
        out, lse = result[:2]
        return heads_first(out), lse if lse.dim() == 3 else lse.unsqueeze(0)

    def backward(self, dout, q, k, v, out, lse, visibility, scale):
        arguments = self._arguments(q, k, v, visibility, scale)
        if visibility.blocks is not None:
            arguments |= self._lists(visibility.blocks, "columns", q, v)
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
        """Return the arguments that forward and backward share, by name; tensors are views."""
        q, k, v = (rows_first(x, visibility.lengths) for x in (q, k, v))
        arguments = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": visibility.causal}
        unlimited = self.package.unlimited
        arguments |= dict(zip(WINDOW, visibility.window or (unlimited, unlimited), strict=True))
        arguments |= dict.fromkeys(BLOCKS)
        if visibility.lengths is None:
            return arguments | dict.fromkeys(LENGTHS)
        rows, columns, _ = visibility.lengths.on(q.device)
        return arguments | dict(
            zip(LENGTHS, (rows, columns, *visibility.lengths.longest), strict=True)
        )

    def _lists(self, blocks: PairBlocks, by: str, q, v) -> dict[str, Any]:
        """Return the arguments that pass lists of blocks: by="rows" in forward, else "columns"."""
        functions = self.loaded.blocks
        assert functions is not None
        major, _ = torch.cuda.get_device_capability(q.device)
        width = min(q.shape[-1], v.shape[-1])  # narrow values do not fit blocks for wide keys
        call = blocks.arguments(block_size(major, by, width), by, q.device)
        # Only forward on sm_100 reads 32 pairs at once.
        packed = "_packed" if by == "rows" and major != 9 else ""
        lists = dict(zip(LIST_FIELDS, (*call.lists, tuple(call.size)), strict=True))
        values = getattr(functions.masks, call.form + packed), call.mask_tensors
        return dict(zip(BLOCKS, (*values, functions.lists(**lists)), strict=True))

    def _zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        """Return dense zeros like x. Consecutive calls for equal shapes return the same tensor."""
        zeros = self._zeros
        if zeros is None or (zeros.shape, zeros.dtype, zeros.device) != (
            x.shape,
            x.dtype,
            x.device,
        ):
            self._zeros = zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return zeros


class FlashKernel(AtenKernel):
    """Kernel that calls a FlashAttention package, for any mask if the package has lists of blocks.

    If a few operator calls, one per tile, can compute a mask, the kernel does not use lists of
    blocks, because tiles need no mask function.

    Args:
        name: Name of the kernel in `registry.KERNELS`.
        operator: The operator.
        device: Device of the tensors.
    """

    operator: Flash

    def __init__(self, name: str, operator: Flash, device: torch.device):
        super().__init__(name, operator)
        self.device = device
        self._pairs: BlockPairs | None = None  # pairs of the latest mask

    def works_for(self, mask: Mask, pairs: ShardPairs) -> list[TileWorks | None]:
        if of_few_tiles(mask):
            return super().works_for(mask, pairs)
        return [self._work(mask, *pair) for pair in pairs]

    def _work(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> TileWorks | None:
        """Return the plan of a pair of shards under a mask that may need many tiles."""
        refused = self.operator.blocks_refused(self.device)
        if refused is None and not _of_bands(mask):
            return self._listed(mask, q_spans, k_spans)
        try:
            (work,) = super().works_for(mask, [(q_spans, k_spans)])
        except ValueError as error:
            if refused is None:
                return self._listed(mask, q_spans, k_spans)
            raise ValueError(f"{error}; kernel {self.name} {refused}") from error
        if refused is None and work is not None and len(work) > CALLS:
            return self._listed(mask, q_spans, k_spans)
        return work

    def _listed(
        self, mask: Mask, q_spans: Sequence[Span], k_spans: Sequence[Span]
    ) -> tuple[TileWork] | None:
        """Return the plan of one call with lists of blocks; None if no query sees a key."""
        if not any_visible(mask, q_spans, k_spans):
            return None
        if self._pairs is None or self._pairs.mask is not mask:
            self._pairs = BlockPairs(mask)
        blocks = PairBlocks(self._pairs, self._pairs.add(q_spans, k_spans))
        rows, columns = (slice(0, length, 1) for length in blocks.shape)
        return (TileWork.of(Tile(rows, columns), blocks=blocks),)


def of_few_tiles(mask: Mask) -> bool:
    """Return True if a few tiles per pair of shards, or one call of many sequences, are enough.

    Args:
        mask: The mask that the calls must compute.
    """
    few = Full, Prefix, Documents, Window
    return mask.flash_compatible and all(isinstance(part, few) for part in parts(mask))


def _of_bands(mask: Mask) -> bool:
    """Return True if the visible pairs between two breaks of the mask may form a band.

    A break is a position at which the definition of the mask changes.
    """
    return all(isinstance(part, Window) or part.flash_compatible for part in parts(mask))


def unfit_blocks(major: int, deterministic: bool) -> str | None:
    """Return why a device does not support lists of blocks in both passes; None if it does.

    Args:
        major: Major compute capability of the device.
        deterministic: True if gradients must be deterministic.
    """
    if major == 12:
        return "has no gradients for lists of blocks on compute capability 12"
    return "has no deterministic gradients for lists of blocks" if deterministic else None


def block_size(major: int, by: str, width: int) -> BlockSize:
    """Return the size of the blocks in lists of FlashAttention 4.

    FlashAttention 4 requires multiples of the tile sizes of its kernels. Forward on sm_100 computes
    256 rows at once. Backward on sm_100 computes 256 columns on two multiprocessors for keys of
    width 128 and more. On sm_90, forward and backward have the same tile size.

    Args:
        major: Major compute capability of the device.
        by: "rows" in forward, "columns" in backward.
        width: The smaller of the widths of keys and values.
    """
    if major == 9:
        return BlockSize(128, 128 if width <= 128 else 96 if width <= 192 else 64)
    return BlockSize(256, 256 if by == "columns" and width >= 128 else 128)


def kernel(name: str, beside_rings: bool = False, device: torch.device | None = None) -> AtenKernel:
    """Return an `AtenKernel` that calls an installed FlashAttention package.

    Args:
        name: "flash3" or "flash4".
        beside_rings: True if tensors are sent while the kernel runs.
        device: Device of the tensors. Default: the current GPU.

    Raises:
        ValueError: The package is missing, or its functions have unknown parameters; see
            `flash_packages.load`.
    """
    operator = Flash(name, PACKAGES[name], load(name), beside_rings)
    return FlashKernel(name, operator, device or torch.device("cuda"))


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
    """Return True if a package supports these two unequal widths of keys and values."""
    keys, values = widths
    if name == "flash3":
        return newer and major == 9 and 128 < keys <= 192 and 96 < values <= 128
    # On sm_90, backward supports two widths only without shared key heads. sm_120 is untested.
    return name == "flash4" and major in (10, 11)
