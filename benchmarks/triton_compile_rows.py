"""Compile the Triton kernels of the LM head for devices that are not here; print registers, spills.

Like `triton_compile`, for `megatron_burst.linear_cross_entropy.triton_rows`: it needs Triton and no
GPU. Arguments are the arguments of a launch over a vocabulary whose size is a multiple of 16. The
exit status is 1 if a kernel does not compile or spills.

    python -m benchmarks.triton_compile_rows --devices 90 --warps 4 8
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from typing import NamedTuple

from .triton_compile import DEVICES, Made, compiled, parser_of, report_all

KERNELS = {
    "statistics": "_stats", "with entropy": "_stats", "gradient": "_gradient",
    "of entropy": "_entropy_gradient",
}  # fmt: skip
POINTERS = {"index": "*i64"} | dict.fromkeys(
    ("out", "lse", "of_softmax", "of_label", "of_all", "entropy", "of_entropy"), "*fp32"
)


class Launch(NamedTuple):
    device: int
    kernel: str
    dtype: str
    softcap: float | None
    columns: int
    warps: int


def main() -> int:
    args = _arguments()
    launches = [Launch(*fields) for fields in product(args.devices, KERNELS, args.dtypes,
                                                      args.softcaps, args.columns,
                                                      args.warps)]  # fmt: skip
    heads = "device", "kernel", "dtype", "softcap", "columns", "warps", "registers", "spilled"

    def compile_launch(launch: Launch) -> list[tuple[list[str], bool]]:
        made = build(launch)
        return [(made.words[:2], made.spills > 0)]

    return report_all(
        launches, heads, lambda x: [f"sm_{x.device}", *map(str, x[1:])], compile_launch
    )


def _arguments() -> argparse.Namespace:
    from megatron_burst.linear_cross_entropy import triton_rows

    parser = parser_of(__doc__, DEVICES)
    parser.add_argument("--softcaps", type=float, nargs="+", default=[None])
    parser.add_argument("--columns", type=int, nargs="+", default=[triton_rows.BLOCK])
    parser.add_argument("--warps", type=int, nargs="+", default=[triton_rows.WARPS])
    return parser.parse_args()


def build(launch: Launch) -> Made:
    """Compile one launch; return the report of the assembler."""
    import triton.language as tl
    from triton.compiler import ASTSource

    from megatron_burst.linear_cross_entropy import triton_rows

    code = getattr(triton_rows, KERNELS[launch.kernel])
    constants = {"scale": 1.0, "cap": launch.softcap, "ACC": tl.float32, "BLOCK": launch.columns}
    if "ENTROPY" in code.arg_names:
        constants["ENTROPY"] = launch.kernel == "with entropy"
    kinds = POINTERS | {"z": f"*{launch.dtype}"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32")
        for name in code.arg_names
    }
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(code.arg_names)
        if name in kinds or name in ("stride", "width")
    }
    source = ASTSource(code, signature, constants, multiples)
    return compiled(source, launch.device, {"num_warps": launch.warps})


if __name__ == "__main__":
    sys.exit(main())
