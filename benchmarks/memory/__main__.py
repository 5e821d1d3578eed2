"""`python -m benchmarks.memory`: the account's longest sequences into docs/how-long.md, and with
`--measure` the account beside live tensors of real Megatron-Core layers on four CPU ranks.

What was measured is kept in runs/memory/memory.json; `--cells` names what is measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import DOCS, markdown, write_section
from megatron_burst.tools.advise.account.memory import Account, account
from megatron_burst.tools.advise.settings import Settings
from megatron_burst.tools.advise.shapes.models import Model

from . import clusters_page

KNOWN = DOCS.parent / "runs" / "memory" / "memory.json"
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
    """The account of what a cell runs."""
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
    """One cell: bytes without states of the counter and of the account, the most of all ranks."""
    from .ranks import Cell, measure

    cell = Cell(tokens=tokens, **CELLS[name])
    found = max(measure(cell), key=lambda rank: rank.peak)
    ours = account_of(cell)
    return {
        "name": name, "tokens": tokens, "layers": cell.layers, "peak": found.peak,
        "account": ours.activations, "states": found.states,
        "states by account": sum(ours.states.values()), "host": found.host,
        "host by account": ours.host_bytes, "left": found.left, "phases": found.peaks,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the cells on four CPU ranks")
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of page and picture")
    parser.add_argument("--known", type=Path, default=KNOWN, help="what was measured")
    args = parser.parse_args(words)
    store = args.known
    store.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(store.read_text()) if store.exists() else {"cells": []}
    if args.measure:
        for name in args.cells:
            row = measured(name, args.tokens)
            same = (name, args.tokens)
            known["cells"] = [c for c in known["cells"] if (c["name"], c["tokens"]) != same]
            known["cells"].append(row)
            store.write_text(json.dumps(known, indent=1) + "\n")
            print(_line(row), flush=True)
    known["longest"] = clusters_page.found()
    store.write_text(json.dumps(known, indent=1) + "\n")
    clusters_page.picture(args.out / "memory.png")
    page = args.out / "how-long.md"
    table = clusters_page.text(known["longest"])
    write_section(page, "longest", f"{table}\n\n{clusters_page.NOTES}")
    if known["cells"]:
        write_section(page, "measured", _table(known["cells"]))
    return 0


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']}: measured {row['peak']:,}, account {row['account']:,} bytes"


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
