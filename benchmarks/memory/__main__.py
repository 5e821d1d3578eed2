"""Longest sequences by the memory account: `python -m benchmarks.memory`.

With `--measure`, the account and live tensors of real Megatron-Core layers on four CPU ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.report import markdown
from megatron_burst.plugins.tools.advise.account.memory import Account, account
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model

from . import longest

PIECES = {"sequence_chunks": 8, "mlp_tiles": 8}
FINE = {"sequence_chunks": 32, "mlp_tiles": 32}
LOSS = {"lm_head_loss": "single_pass"}
CELLS: dict[str, dict[str, Any]] = {
    "today": {"choices": LOSS},
    "8 chunks, 8 tiles": {"choices": LOSS | PIECES},
    "32 chunks, 32 tiles": {"choices": LOSS | FINE},
    "8 chunks, 8 tiles, offload 1": {"choices": LOSS | PIECES | {"offload": 1.0}},
    "the same, 16 layers": {"choices": LOSS | PIECES | {"offload": 1.0}, "layers": 16},
}


def account_of(cell: Any) -> Account:
    """Return the account of a cell."""
    model = Model(
        "cell", cell.layers, cell.hidden, cell.heads, cell.kv_heads, cell.ffn, cell.vocabulary
    )
    choices: dict[str, Any] = {"lm_head_loss": "off"} | cell.choices
    choices["ulysses"] = choices.pop("ulysses_size", 1)
    run = Settings(
        seq=cell.tokens, tp=cell.tp, cp=cell.cp, path="cpu", distributed_optimizer=False,
        optimizer_bytes=0, **choices,
    )  # fmt: skip
    return account(model, run)


def measured(name: str, tokens: int) -> dict[str, Any]:
    """Return bytes without states by the counter and by the account, the maximum over ranks."""
    from .ranks import Cell, measure

    cell = Cell(tokens=tokens, **CELLS[name])
    peak_rank = max(measure(cell), key=lambda rank: rank.peak)
    ours = account_of(cell)
    return {
        "name": name, "tokens": tokens, "layers": cell.layers, "peak": peak_rank.peak,
        "account": ours.activations, "states": peak_rank.states,
        "states by account": sum(ours.states.values()), "host": peak_rank.host,
        "host by account": ours.host_bytes, "left": peak_rank.left, "phases": peak_rank.peaks,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the cells on four CPU ranks")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args(words)
    if args.measure:
        print(_table([measured(name, args.tokens) for name in args.cells]))
        return 0
    print(longest.text(longest.table_rows()))
    return 0


def _table(cells: list[dict[str, Any]]) -> str:
    rows = [
        [c["name"], str(c["tokens"]), str(c["layers"]), f"{c['peak'] / 2**20:.2f}",
         f"{c['account'] / 2**20:.2f}", f"{c['account'] / c['peak'] - 1:+.1%}",
         f"{c['host'] / 2**20:.2f}", f"{c['host by account'] / 2**20:.2f}"]
        for c in cells
    ]  # fmt: skip
    heads = ["settings", "tokens", "layers", "peak, MiB", "account, MiB", "off by",
             "host, MiB", "account, MiB "]  # fmt: skip
    return (
        "Four CPU ranks, context parallel, hidden 256, 8 heads of 32 on 2 key/value heads, MLP "
        "896 (Llama 3 8B's ratios), bf16, full recompute, fused LM head; the most of all ranks, "
        "without parameters and gradients. Live tensors counted by `benchmarks/memory/live.py`; "
        "the account of the CPU path.\n\n" + markdown(heads, rows)
    )


if __name__ == "__main__":
    raise SystemExit(main())
