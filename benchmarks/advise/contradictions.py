"""Entries of the published tables that contradict each other, found by computing.

Nothing is corrected by what is found here: a fit that leaves a row out says so itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from .published_tables import table
from .section import Section

A800 = 312e12  # FLOP/s, bf16, dense
# BurstEngine's 14B: 40 layers, hidden 5120, MLP 13824, vocabulary 120,000; the embedding apart.
LAYERS, HIDDEN = 40, 5120
PARAMETERS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 13824) + 120_000 * HIDDEN
APART = 0.006  # of ratios that should be equal: both numbers are printed to three digits
GIB = 2**30
Row = Mapping[str, str]


def run(fit: bool = False) -> Section:
    """The section of the page; nothing is fitted."""
    rows = [*_loongtrain(), *_burstengine()]
    return Section(
        "contradictions", "Contradictions in the published tables", INTRO, ("table", "what", "by"),
        rows,
    )  # fmt: skip


def _loongtrain() -> Iterator[list[str]]:
    name = "LoongTrain, table 2"
    rows = [row for row in table("loongtrain_table2_end_to_end") if row["tgs"] != "OOM"]
    for seq in sorted({int(row["seq"]) for row in rows}):
        some = [row for row in rows if int(row["seq"]) == seq]
        middle = median(_ratio(row) for row in some)
        for row in some:
            off = _ratio(row) / middle - 1
            if abs(off) > APART:
                text = f"{_where(row)}: MFU {row['mfu']} and {row['tgs']} tokens/s do not belong"
                yield [name, f"{text} together, those of other rows do", f"{off:+.1%}"]
    yield [name, f"MFU over token rate is that of {_parameters(rows) / 1e9:.1f}e9 parameters and "
                 "the causal half of attention, also with GQA; LLaMA2-7B has 6.6e9 without its "
                 "embedding, with GQA 5.8e9", f"{_parameters(rows) / 6.6e9 - 1:+.0%}"]  # fmt: skip
    by = {(row["system"], row["heads"], row["seq"]): row for row in rows}
    same = [
        key for key, row in by.items()
        if key[1] == "gqa8" and (key[0], "mha", key[2]) in by
        and row["tgs"] == by[key[0], "mha", key[2]]["tgs"]
    ]  # fmt: skip
    if same:
        systems = ", ".join(sorted({key[0] for key in same}))
        yield [name, f"{len(same)} GQA rows of {systems} are those of MHA, digit by digit, though "
                     "fewer key/value heads are fewer bytes and fewer FLOPs", "0.0%"]  # fmt: skip
    for (system, heads, seq), row in by.items():
        other = by.get((system, "mha", seq))
        if heads == "gqa8" and other and float(row["tgs"]) < float(other["tgs"]):
            by_how = float(row["tgs"]) / float(other["tgs"]) - 1
            yield [name, f"{_where(row)}: slower than MHA; at other lengths it is faster",
                   f"{by_how:+.1%}"]  # fmt: skip


def _ratio(row: Row) -> float:
    return float(row["mfu"]) / float(row["tgs"])


def _where(row: Row) -> str:
    return f"{row['system']}, {row['heads']}, {int(row['seq']) // 1024}K"


def _parameters(rows: Sequence[Row]) -> float:
    """Parameters by which MFU and token rates agree: 6 FLOPs each, and attention's causal half."""
    found = []
    for row in rows:
        attention = 6 * 32 * 4096 * int(row["seq"])
        found.append((_ratio(row) * A800 - attention) / 6)
    return median(found)


def _burstengine() -> Iterator[list[str]]:
    five, two = table("burstengine_table5_intra_node"), table("burstengine_table2_ablation")
    for name, rows in (("BurstEngine, table 5", five), ("BurstEngine, table 2", two)):
        counted = [_thousand(row) for row in rows]
        if median(counted) > 1 + APART:
            text = "token rates are smaller than MFU says, in every row by as much as K = 1000 is"
        else:
            text = "MFU and token rates agree with K = 1024 and 13.3e9 parameters"
        yield [name, text, f"{median(counted) - 1:+.1%}"]
    kept = {row["configuration"]: float(row["memory_gb"]) for row in two}
    fused = kept["+lm_head_loss_fusion"]
    store = LAYERS * (2**20 // 32) * HIDDEN * 2 / GIB
    whole, half = kept["selective_ckpt_pp_instead"] - fused, kept["+seq_selective_ckpt"] - fused
    yield ["BurstEngine, table 2", f"keeping attention's outputs takes {whole:.1f} GB more "
           f"(32K rows on 40 layers are {store:.1f} GiB), keeping half of them {half:.1f} GB",
           f"{half / (whole / 2) - 1:+.0%}"]  # fmt: skip
    three = {row["implementation"]: row for row in table("burstengine_table3_sparse")}
    base = float(three["attention_masking"]["tgs"])
    for name, row in three.items():
        found, printed = float(row["tgs"]) / base, float(row["speedup"])
        if abs(found - printed) > 0.005:
            yield ["BurstEngine, table 3", f"{name}: {row['tgs']} over {base} is {found:.3f}, "
                   f"printed as {printed}", f"{found / printed - 1:+.1%}"]  # fmt: skip
    causal = three["causal_zigzag"]["tgs"]
    if causal == five[-1]["tgs"]:
        text = f"the causal row of table 3 is table 5's row of 8 GPUs ({causal}), which counts "
        yield ["BurstEngine, tables 3 and 5", f"{text}K = 1000; ratios do not change", "0.0%"]
    best = float(two[-1]["mfu_percent"])
    yield ["BurstEngine, text and tables", f"the text says MFU 53.2 % on 32 GPUs at 1M, table 2 "
           f"{best} % at best; 51.7 % on 8 GPUs at 256K, table 5 {five[-1]['mfu_percent']} %",
           f"{best / 53.2 - 1:+.1%}"]  # fmt: skip


def _thousand(row: Row) -> float:
    """What the MFU says of tokens per second, over what is printed."""
    length = int(row["sequence"]) if "sequence" in row else 2**20
    per_token = 6 * PARAMETERS + 6 * LAYERS * HIDDEN * length
    return float(row["mfu_percent"]) / 100 * A800 / per_token / float(row["tgs"])


INTRO = [
    "Found by computing from the tables alone. Fits take the tables as they are, except where they "
    "say which of two numbers they use.",
]
