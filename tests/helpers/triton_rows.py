"""A script: the Triton kernels through Triton's interpreter, against the torch operators.

Prints one JSON line: case -> largest differences of (statistics, gradient), the larger one of the
loss's and of the entropy's. To be run with
TRITON_INTERPRET=1, which Triton reads when it is imported; needs no GPU.
"""

import json

import torch

from megatron_burst.linear_cross_entropy import rows, triton_rows
from megatron_burst.linear_cross_entropy.formula import Formula
from megatron_burst.linear_cross_entropy.rows import Columns

N, V = 7, 300
FORMULAS = {
    "plain": Formula(1000),
    "all": Formula(1000, scale=0.7, softcap=3.0, z_loss=0.1, smoothing=0.2),
}
COLUMNS = {"whole": Columns(100, V), "padded": Columns(100, 130), "padding": Columns(100, 0)}


def compare(formula, columns, dtype, block):
    """(largest difference of the statistics, of the gradient) from the torch operators."""
    make = torch.Generator().manual_seed(0)
    whole = (5 * torch.randn(N, V + 4, generator=make, dtype=torch.float64)).to(dtype)
    z = whole[:, :V]  # rows that are further apart than they are long
    labels = torch.tensor([100, 99, 400, 399, 229, 230, -100])
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    triton_rows.BLOCK = block
    index = labels - columns.first
    given = formula.scale, formula.softcap, sums
    found = triton_rows.row_stats(z, index, *columns, *given)
    own = triton_rows.row_stats(z, index, *columns, *given, entropy=True)[2]
    truth = rows._row_stats(z, index, columns, formula, sums, True)
    entropy = rows._row_stats(z, index, columns, Formula(1000, *given[:2]), sums, False,
                              entropy=True)[2]  # fmt: skip
    found, truth = torch.stack([*found, own]), torch.stack([*truth, entropy])
    wanted = [0, 1, 2, 3, 5, 4] if formula.smoothing else [0, 1, 3, 5, 4]
    wanted = wanted if columns.real else wanted[:-1]  # nobody wins over no columns
    stats = (found[wanted].nan_to_num() - truth[wanted].nan_to_num()).abs().max().item()
    lse = truth[0] if columns.real else torch.ones(N, dtype=sums)
    weights = torch.linspace(0, 2, N, dtype=sums)
    of_row = weights.flip(0) - 1
    # A row without a gradient may hold NaN.
    whole[0], lse[0], truth[5][0], of_row[0] = torch.nan, torch.nan, torch.nan, 0
    results = []
    for has_triton in (True, False):
        rows._has_triton = lambda z, has_triton=has_triton: has_triton
        mine = whole.clone()
        rows.softmax_gradient_(mine[:, :V], labels, lse, weights, columns, formula)
        of_entropy = whole.clone()
        given = lse, truth[5], weights, of_row
        rows.entropy_gradient_(of_entropy[:, :V], *given, columns, formula)
        results.append(torch.stack([mine, of_entropy]).double())
        assert not results[-1][:, 0, :V].any()  # true of NaN
    difference = results[0] - results[1]
    return stats, difference[:, :, :V].abs().max().item()


def main():
    print(
        json.dumps(
            {
                f"{name} {where} {str(dtype)[6:]} {block}": compare(formula, columns, dtype, block)
                for name, formula in FORMULAS.items()
                for where, columns in COLUMNS.items()
                for dtype in (torch.float64, torch.float32, torch.bfloat16)
                for block in (64, 4096)
            }
        )
    )


if __name__ == "__main__":
    main()
