"""Compile the Triton attention kernels for devices that are not here; print registers and spills.

It needs Triton, whose package contains the assembler, and no GPU. For every entry of
`megatron_burst.kernels.blocks.BLOCKS` (or one device, one width) it records the launches of
`TritonKernel` for a causal pair, with and without masks. Triton's JIT compiles them for a GPU of
this kind, with hints about pointers and strides that are multiples of 16, and ptxas reports the
result. The exit status is 1 if a kernel does not compile, needs more shared memory than the device
has, loads more of a mask than its bits, or keeps a factor of products in registers during a loop
(`held`).

    python -m benchmarks.triton_compile --devices 90 --widths 128
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_burst.kernels import triton_kernel
from megatron_burst.kernels.base import Rows, Scoring
from megatron_burst.kernels.blocks import BlockSizes, blocks
from megatron_burst.layout import Span
from megatron_burst.masks import Causal

# maximum shared memory of a thread block in bytes, by device
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
DEVICES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = "forward", "forward_maximum", "backward_keys", "backward_queries"
HEADS = 32, 8  # query heads, key heads
# Largest bytes that a thread loads of a tile's mask: its share of the bits (twice, if the share is
# small), and the index of the table. One word per row and column would need 64 to 256.
MASK_LOADS = 24
WAITING = 100  # maximum lines of a loop that only waits
T = TypeVar("T")


class Launch(NamedTuple):
    device: int
    kernel: str
    width: int
    dtype: str
    size: BlockSizes


class Made(NamedTuple):
    """Assembler's report of one launch.

    Attributes:
        spills: Bytes per thread.
        loads: Bytes that a thread loads or copies from addresses for every tile, without tensor
            descriptors.
        held: Count of `held`.
    """

    registers: int
    spills: int
    shared: int
    loads: int
    held: int

    @property
    def words(self) -> list[str]:
        """Return registers, spills and shared memory in KB."""
        return [str(self.registers), str(self.spills), f"{self.shared / 1024:.0f}"]


def main() -> int:
    args = _arguments()
    heads = ("device", "kernel", "dtype", "width", "masks", "blocks", "registers", "spilled",
             "shared KB", "mask B")  # fmt: skip

    def compile_launch(launch: Launch) -> Iterator[tuple[list[str], bool]]:
        size, made = launch.size, build(launch)
        for masked, report in made.items():
            mask = report.loads - made[False].loads
            bad = mask > most(size) or report.held > 0
            words = ["yes" if masked else "no", shape(*size), *report.words, str(mask)]
            yield words, bad or report.shared > SHARED[launch.device]

    return report_all(
        _launches(args),
        heads,
        lambda x: [f"sm_{x.device}", x.kernel, x.dtype, str(x.width)],
        compile_launch,
    )


def report_all(
    launches: Iterable[T],
    heads: Sequence[str],
    named: Callable[[T], list[str]],
    compile_launch: Callable[[T], Iterable[tuple[list[str], bool]]],
) -> int:
    """Compile all launches, print a table, and return 1 if one is bad or does not compile.

    Args:
        named: Function of a launch that returns its first cells.
        compile_launch: Function of a launch that returns the other cells of each of its rows, and
            true if the row is bad.
    """
    failed, table = 0, Table(*heads)
    for launch in track(list(launches), description="compiling", console=Console(stderr=True)):
        try:
            rows = list(compile_launch(launch))
        except Exception as error:  # the compiler has its own error classes
            rows = [([f"{type(error).__name__}: {error}"[:60]], True)]
        for words, bad in rows:
            failed += bad
            table.add_row(*named(launch), *words)
    Console(width=120).print(table)
    return 1 if failed else 0


def shape(rows: int, columns: int, warps: int, stages: int) -> str:
    """Return the blocks of a launch as text."""
    return f"{rows} x {columns}, {warps} warps, {stages} stages"


def most(size: BlockSizes) -> int:
    """Return `MASK_LOADS` if loads run ahead of their use.

    Otherwise the compiler may load each word at its use, once for every pair.
    """
    return MASK_LOADS if size.stages > 1 else 4 + size.rows * size.columns // (8 * size.warps)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, DEVICES, ("ROWS", "COLUMNS", "WARPS", "STAGES"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    return parser.parse_args()


def parser_of(
    description: str | None, devices: Sequence[int], blocks: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    """Return a parser of devices, dtypes and, if `blocks` names their sizes, blocks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = " ".join(map(str, devices))
    parser.add_argument("--devices", type=int, nargs="+", default=list(devices),
                        choices=list(SHARED), help=f"default: {default}")  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    if blocks:
        parser.add_argument("--blocks", type=int, nargs=len(blocks), metavar=blocks,
                            help="instead of the table's, to look for better ones")  # fmt: skip
    return parser


def _launches(args: argparse.Namespace) -> Iterator[Launch]:
    for device, kernel, dtype, width in product(args.devices, KERNELS, args.dtypes, args.widths):
        size = blocks(device, kernel.split("_")[0], width, DTYPES[dtype].itemsize)
        yield Launch(device, kernel, width, dtype, BlockSizes(*args.blocks or size))


def build(launch: Launch) -> dict[bool, Made]:
    """Compile a kernel as launched for fully visible tiles, and as launched for masked tiles."""
    from triton.runtime import driver

    driver.set_active(Device(launch.device))  # nothing is launched from this process
    made = {}
    for code, arguments, named in _recorded(launch):
        program = code.warmup(*arguments, grid=(1,), **named)
        made[named["MASKED"]] = assembled(program, launch.device)
    return made


class Device:
    """Replacement of the driver that Triton's JIT calls before a launch, for an absent device."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # code that is compiled for one device fits no other

    def get_current_stream(self, device: int) -> int:
        return 0


def _recorded(launch: Launch) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """Return kernel, arguments, constants and options of each launch of a pair on itself."""
    size, launches = launch.size, []
    rows = 2 * size.rows * size.columns  # several blocks of both sides; a multiple of 16

    def recording(code: Any, q: torch.Tensor, programs: int, heads: int, size: BlockSizes) -> Any:
        options = {"num_warps": size.warps, "num_stages": size.stages}
        return lambda *arguments, **constants: launches.append(
            (code, arguments, constants | options)
        )

    def tensor(heads: int, *width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, 1, heads, *width, dtype=dtype)  # memory that no kernel touches

    (h, k), d, dtype = HEADS, launch.width, DTYPES[launch.dtype]
    q, dout, keys, values = (tensor(n, d, dtype=dtype) for n in (h, h, k, k))
    kernel, spans, scoring = triton_kernel.TritonKernel(size), [Span(0, 1, rows)], Scoring(1.0)
    work = kernel.works_for(Causal(), [(spans, spans)])[0]
    assert work is not None
    with mock.patch.object(triton_kernel, "_launch", recording):
        if launch.kernel.startswith("forward"):
            largest = torch.empty(h) if launch.kernel == "forward_maximum" else None
            kernel.forward(q, keys, values, work, scoring, tensor(h, d), tensor(h), largest)
        else:
            by_queries = launch.kernel == "backward_queries"  # alone, for dq only
            sums = None if by_queries else tensor(k, d)
            inputs = Rows(q, dout, tensor(h), tensor(h)), keys, values, work, scoring
            kernel.backward(*inputs, tensor(h, d), sums, sums)
    return launches


def compiled(source: Any, device: int, options: dict[str, Any]) -> Made:
    """Compile a Triton source for a device such as 90; return the report of the assembler."""
    import triton
    from triton.backends.compiler import GPUTarget

    program = triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)
    return assembled(program, device)


def assembled(kernel: Any, device: int) -> Made:
    """Return the assembler's report of a compiled kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    assembler = get_ptxas(device).path  # older and newer devices have different assemblers
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [assembler, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/kernel"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers, stores = (re.search(p, said) for p in (r"Used (\d+) reg", r"(\d+) bytes spill st"))
    assert registers is not None, said
    spills = int(stores[1]) if stores else 0
    return Made(int(registers[1]), spills, kernel.metadata.shared, loads(ptx), held(ptx))


def held(ptx: str) -> int:
    """Count warp-group products in loops whose first factor is in registers from before the loop.

    ptxas 12.8 to 13.0 also uses such registers for other values. Results are then wrong from the
    second round of the loop on (observed on an H100 with Triton 3.6).
    """
    count = 0
    for loop in loops(ptx):
        made: set[str] = set()
        for line in loop:
            if target := re.match(r"\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)", line):
                made |= {*re.findall(r"%\w+", target[1])}
        factors = re.findall(r"wgmma\.mma_async\S* \{[^}]*\}, \{([^}]*)\}", "\n".join(loop))
        count += sum(made.isdisjoint(re.findall(r"%\w+", factor)) for factor in factors)
    return count


def loops(ptx: str) -> Iterator[list[str]]:
    """Return the lines of each loop, inner loops first."""
    lines, labels = ptx.splitlines(), {}
    for number, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = number
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if jump and jump[1] in labels:
            yield lines[labels[jump[1]] : number]


def loads(ptx: str) -> int:
    """Return bytes that a thread loads or copies in one round of the innermost loop.

    Loops of a few lines that wait for a copy do not count.
    """
    total = 0
    for line in next((loop for loop in loops(ptx) if len(loop) > WAITING), []):
        if copied := re.search(r"cp\.async\.c\w\.shared\.global \[.*?\], \[.*?\], (\w+)", line):
            total += int(copied[1], 0)
        if loaded := re.search(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\s", line):
            total += int(loaded[1] or 1) * int(loaded[2]) // 8
    return total


if __name__ == "__main__":
    sys.exit(main())
