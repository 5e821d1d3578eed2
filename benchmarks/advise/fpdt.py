"""FPDT's longest contexts (its table 1) and the account's. No constant is fitted.

Published: "Fully Pipelined Distributed Transformer", arXiv 2408.16978, table 1. In all cells, as
many ranks as divide the heads share them (Ulysses), and ZeRO-3 covers all ranks. Chunks have 64K
tokens (two on the device, the others on the host), MLP chunks have 32K, and layer inputs are on the
host.

    python -m benchmarks.advise.fpdt
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.advise.published_tables import table
from benchmarks.advise.section import Figure, Section
from megatron_burst.autotune.clusters import GIB, GPUS, Cluster
from megatron_burst.plugins.tools.advise.account.memory import account, fit
from megatron_burst.plugins.tools.advise.settings import Settings
from megatron_burst.plugins.tools.advise.shapes.models import Model
from megatron_burst.schedule.head_shares import shareable

K = 1024
CHUNK = 64 * K  # tokens, over all ranks (FPDT, section 5)
TRIED = (64 * K, 128 * K, 256 * K, 512 * K, 1024 * K, 2048 * K, 3072 * K, 4096 * K, 8192 * K)
LEAST = TRIED[0]  # a shorter length counts as "-"
OPEN = 4096 * K  # meets "8M+"
# Assumed for all cells: nodes of 4 A100 with 1 TB of usable host memory; 3 GiB of each GPU are not
# available for tensors (the states of 70B on 16 GPUs leave little more).
PER_NODE, HOST, RESERVE = 4, 10**12, 3 * GIB
# Bytes of each parameter: bf16 weight and gradient, fp32 weight and two moments, all sharded.
PER_PARAMETER = 2 + 2 + 12


def _gpt(name: str, layers: int, hidden: int, heads: int) -> Model:
    return Model(name, layers, hidden, heads, heads, 4 * hidden, 50304, gated=False, tied=True)


# 2.7B and 13B have GPT-3's shapes. 30B has OPT's shape with 64 heads, which 32 ranks can share.
MODELS = {
    model.name: model
    for model in (
        _gpt("2.7B", 32, 2560, 32),
        Model("8B", 32, 4096, 32, 8, 14336, 128256),
        _gpt("13B", 40, 5120, 40),
        _gpt("30B", 48, 7168, 64),
        Model("70B", 80, 8192, 64, 8, 28672, 128256),
    )
}


class Cell(NamedTuple):
    """One cell of the table.

    Attributes:
        published: Published length, such as "-", "512K" or "8M+".
        predicted: The longest of `TRIED` that fits; 0 if none fits.
        lacks: The memory that the next length lacks.
    """

    model: str
    gpus: str
    published: str
    predicted: int
    lacks: str

    @property
    def right(self) -> bool:
        """Return True if `predicted` is within factor 2; "8M+" is at least 4M, "-" below 64K."""
        if self.published == "-":
            return self.predicted < LEAST
        if self.published.endswith("+"):
            return self.predicted >= OPEN
        return tokens(self.published) / 2 <= self.predicted <= 2 * tokens(self.published)


def tokens(text: str) -> int:
    """Parse "512K" or "8M+"."""
    number, unit = text.rstrip("+")[:-1], text.rstrip("+")[-1]
    return int(number) * {"K": K, "M": K * K}[unit]


def words(count: int) -> str:
    """Format a length, "-" for 0."""
    if not count:
        return "-"
    return f"{count // K}K" if count < K * K else f"{count // K // K}M"


def run_of(model: Model, gpus: int, seq: int) -> Settings:
    """Return FPDT's run of a sequence on all GPUs."""
    shared = max(n for n in (1, 2, 4, 8, 16, 32)
                 if gpus % n == 0 and shareable(model.heads, model.kv_heads, n))  # fmt: skip
    chunks = max(1, seq // CHUNK)
    return Settings(
        seq=seq, cp=gpus, intra=min(gpus, PER_NODE), ulysses=shared, layout="contiguous",
        algorithm="ulysses" if shared == gpus else "hybrid", fsdp=True, gradients="bf16",
        sequence_chunks=chunks, mlp_tiles=2 * chunks, chunks_on_host=True, offload=1.0,
    )  # fmt: skip


def cell(model: Model, column: str, published: str, reserve: int = RESERVE) -> Cell:
    """Return the longest sequence of one cell.

    Args:
        column: Name in the table, such as "a100_40g_x8".
    """
    _, memory, count = column.split("_")
    gpus = int(count[1:])
    gpu = GPUS["a100-40g" if memory == "40g" else "a100"]
    cluster = Cluster(gpu, gpus, PER_NODE, host_memory=HOST, reserve=reserve)
    longest, lacks = 0, ""
    for seq in TRIED:
        left = fit(account(model, run_of(model, gpus, seq), every=False), cluster)
        if not left.fits:
            lacks = "GPU memory" if left.device < 0 else "host memory"
            break
        longest = seq
    return Cell(model.name, f"{gpus} x {memory}", published, longest, lacks)


def cells(reserve: int = RESERVE) -> list[Cell]:
    """Return all 40 cells."""
    return [
        cell(MODELS[row["model"]], column, text, reserve)
        for row in table("fpdt_table1_max_context")
        for column, text in row.items()
        if column != "model"
    ]


def counts(measured_cells: list[Cell]) -> dict[str, tuple[int, int]]:
    """Return (right, total) of the filled cells and of the cells marked "-"."""
    filled = [cell for cell in measured_cells if cell.published != "-"]
    none = [cell for cell in measured_cells if cell.published == "-"]
    return {"filled": (sum(c.right for c in filled), len(filled)),
            "-": (sum(c.right for c in none), len(none))}  # fmt: skip


def _intro() -> list[str]:
    shapes = "; ".join(
        f"{m.name}: {m.layers} layers, hidden {m.hidden}, {m.heads} heads, {m.kv_heads} of keys, "
        f"MLP {m.ffn}{' gated' if m.gated else ''}, vocabulary {m.vocabulary:,}"
        for m in MODELS.values()
    )
    return [
        "Published / predicted. Nothing is fitted. Everywhere the same: "
        f"{PER_PARAMETER} bytes per parameter (bf16 weight and gradient, fp32 weight and two "
        f"moments), sharded over all GPUs (ZeRO-3); nodes of {PER_NODE} GPUs with "
        f"{HOST / 1e12:.0f} TB of host memory (assumed); {RESERVE // GIB} GiB of a GPU are not "
        "for tensors; heads shared by all ranks, or by as many as divide them; chunks of 64K "
        "tokens, two on the device, the others on the host; layer inputs on the host. Lengths "
        "tried: 64K, 128K, 256K, 512K, 1M, 2M, 3M, 4M, 8M.",
        f"Shapes: {shapes}.",
    ]


def _notes(measured_cells: list[Cell]) -> list[str]:
    wrong = ", ".join(
        f"{c.model} on {c.gpus} ({words(c.predicted)} for {c.published})"
        for c in measured_cells
        if not c.right
    )
    other = counts(cells(4 * GIB))
    return [
        f"Not met: {wrong}. At {PER_PARAMETER} bytes per parameter the states of 2.7B take 42 GB, "
        "more than one GPU of 40 GB has; those of 8B on four take 32 GB of each, less than those "
        "of 2.7B on one, though the table has the one as too large and the other not.",
        "With 4 GiB of a GPU not for tensors, as elsewhere by default: "
        f"{other['filled'][0]} and {other['-'][0]}.",
    ]


def run(fit: bool = False) -> Section:
    """Return the table, published / predicted; nothing is fitted, so `fit` has no effect."""
    measured_cells = cells()
    right = counts(measured_cells)
    return Section(
        name="fpdt",
        title="FPDT's longest contexts (its table 1)",
        intro=_intro(),
        columns=["model", *dict.fromkeys(cell.gpus for cell in measured_cells)],
        rows=[[name, *(f"{c.published} / {words(c.predicted)}{'' if c.right else ' (!)'}"
                       for c in measured_cells if c.model == name)] for name in MODELS],
        figures=[
            Figure("Lengths predicted within a factor of 2", "{} of {}".format(*right["filled"]),
                   "21 of 23", right["filled"][0] >= 21),
            Figure('Cells without a length ("-") predicted', "{} of {}".format(*right["-"]),
                   "15 of 17", right["-"][0] >= 15),
        ],
        notes=_notes(measured_cells),
    )  # fmt: skip


if __name__ == "__main__":
    print(run().markdown())
