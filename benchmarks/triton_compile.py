"""Compile the Triton attention kernels for devices that are not here; print registers and spills.

Needs Triton, whose package brings the assembler, and no GPU. For every entry of
`megatron_burst.kernels.blocks.BLOCKS` (or one device, one width) it compiles the launch with and
without masks and asks ptxas what became of it. A kernel that does not compile, or that wants more
shared memory than the device has, ends the run with status 1.

    python -m benchmarks.triton_compile --devices 90 --widths 128
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_burst.kernels.blocks import BlockSizes, blocks

# bytes a block of threads may have
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
DEVICES = (80, 90, 100)
DTYPES = {"bf16": 2, "fp32": 4}  # Triton's name -> bytes
RECORDING = "forward_maximum"  # the forward, recording the largest scores


class Launch(NamedTuple):
    device: int
    kernel: str
    width: int
    masked: bool
    dtype: str
    size: BlockSizes


class Made(NamedTuple):
    """What the assembler says of one launch; spills in bytes per thread."""

    registers: int
    spills: int
    shared: int


def main() -> int:
    args = _arguments()
    launches = list(_launches(args))
    failed, table = 0, Table("device", "kernel", "dtype", "width", "masks", "blocks", "registers",
                             "spilled", "shared KB")  # fmt: skip
    for launch in track(launches, description="compiling", console=Console(stderr=True)):
        try:
            made = build(launch)
            words = [str(made.registers), str(made.spills), f"{made.shared / 1024:.0f}"]
            failed += made.shared > SHARED[launch.device]
        except Exception as error:  # the compiler's own kinds
            words, failed = [f"{type(error).__name__}: {error}"[:60], "", ""], failed + 1
        size = launch.size
        shape = f"{size.rows} x {size.columns}, {size.warps} warps, {size.stages} stages"
        masks = "yes" if launch.masked else "no"
        table.add_row(f"sm_{launch.device}", launch.kernel, launch.dtype, str(launch.width), masks,
                      shape, *words)  # fmt: skip
    Console(width=120).print(table)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES),
                        choices=list(SHARED), help="default: 80 90 100")  # fmt: skip
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument(
        "--blocks", type=int, nargs=4, metavar=("ROWS", "COLUMNS", "WARPS", "STAGES"),
        help="instead of the table's, to look for better ones",
    )  # fmt: skip
    return parser.parse_args()


def _launches(args: argparse.Namespace) -> Iterator[Launch]:
    kernels = "forward", RECORDING, "backward_keys", "backward_queries"
    for device, kernel, dtype, width in product(args.devices, kernels, args.dtypes, args.widths):
        size = blocks(device, kernel.split("_")[0], width, DTYPES[dtype])
        for masked in (False, True):
            chosen = BlockSizes(*args.blocks) if args.blocks else size
            yield Launch(device, kernel, width, masked, dtype, chosen)


def build(launch: Launch) -> Made:
    """Compile one launch and ask the assembler."""
    from triton.compiler import ASTSource

    from megatron_burst.kernels import triton_code

    code = getattr(triton_code, "forward" if launch.kernel == RECORDING else launch.kernel)
    constants = _constants(launch)
    signature = {name: _type(name, launch, constants) for name in code.arg_names}
    source = ASTSource(code, signature, constants)
    options = {"num_warps": launch.size.warps, "num_stages": launch.size.stages}
    return compiled(source, launch.device, options)


def compiled(source: Any, device: int, options: dict[str, Any]) -> Made:
    """Compile a source of Triton for a device such as 90 and ask the assembler."""
    import triton
    from triton.backends.compiler import GPUTarget

    found = triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)
    return assembled(found.asm["ptx"], device, found.metadata.shared)


def _constants(launch: Launch) -> dict[str, Any]:
    size = launch.size
    constants: dict[str, Any] = {
        "CAP": 0.0, "MASKED": launch.masked,
        "PRECISION": "ieee" if launch.dtype == "fp32" else "tf32",
        "M": size.rows, "N": size.columns, "D": launch.width, "W": launch.width,
    }  # fmt: skip
    if launch.kernel == "forward":
        constants["max_logits"] = None
    if launch.kernel == "backward_keys":
        constants |= {"DQ": True, "DK": True, "DV": True}
    return constants


def _type(name: str, launch: Launch, constants: dict[str, Any]) -> str:
    """Of an argument, as Triton writes types."""
    size, atomic = launch.size, launch.kernel == "backward_keys"
    rows = dict.fromkeys(("q", "dout", "out", "dq"), size.rows)
    rows |= dict.fromkeys(("k", "v", "dk", "dv"), size.columns)
    if name in constants:
        return "constexpr"
    if name in rows and not (name == "dq" and atomic):
        kind = launch.dtype if name in ("q", "k", "v", "dout") else "fp32"
        return f"tensordesc<{kind}[{rows[name]},1,1,{launch.width}]>"
    if name in ("lse", "delta", "dq", "max_logits"):
        return "*fp32"
    if name in ("programs", "others", "tables", "bits"):
        return "*i32"
    return "fp32" if name == "scale" else "i32"


def assembled(ptx: str, device: int, shared: int) -> Made:
    """What the assembler says of a kernel in PTX that takes `shared` bytes."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = get_ptxas(device).path  # there is one for older devices and one for newer
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
    return Made(int(registers[1]), int(stores[1]) if stores else 0, shared)


if __name__ == "__main__":
    sys.exit(main())
