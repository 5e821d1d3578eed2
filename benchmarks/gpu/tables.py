"""Records as Markdown: medians with quartiles, rates on visible pairs, missing items.

This module runs nothing and does not judge figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.report import human, quartiles, spread
from benchmarks.report import markdown as table

Record = dict[str, Any]


def markdown(results: Record) -> str:
    """Return all tables."""
    records = list(results["jobs"].values())
    commands = "\n".join(f"    {command}" for command in results["commands"])
    parts = [
        f"Measured on {results['machine']}, {results['versions']}, by\n\n{commands}",
        *_tests(_of(records, "test")),
        *_attention(_of(records, "attention")),
        *_compiled(_of(records, "compiled rivals")),
        *_packs(_of(records, "packs")),
        *_rings(_of(records, "ring")),
        *_lm_heads(_of(records, "lm head")),
        *_stores(_of(records, "store")),
        *_blocks(_of(records, "blocks")),
        *_missing(results),
    ]
    return "\n\n".join(parts)


def rate(run: Record) -> list[float]:
    """Return TFLOP/s of every round."""
    return [run["flops"] / seconds / 1e12 for seconds in run["seconds"]]


def of_matmul(run: Record, record: Record) -> float:
    """Return the median over rounds of (rate of the run / rate of the matrix product)."""
    pairs = zip(rate(run), rate(record["matmul"]), strict=True)
    return quartiles([run_rate / product for run_rate, product in pairs])[1]


def rounded(value: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bracketed(values: Sequence[float]) -> str:
    """Format as "median [lower quartile, upper quartile]"."""
    low, middle, high = (rounded(value) for value in quartiles(values))
    return f"{middle} [{low}, {high}]"


def _of(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _tests(records: Sequence[Record]) -> Iterator[str]:
    """Return the number of each outcome, and the reasons of skipped tests."""
    if not records:
        return
    count = Counter(record["outcome"] for record in records)
    words = [
        f"{count[outcome]} {outcome}"
        for outcome in ("passed", "failed", "skipped")
        if count[outcome]
    ]
    yield f"Tests on the same device: {', '.join(words)}."
    why = Counter(record["why"] for record in records if record["outcome"] == "skipped")
    if why:
        yield "\n".join(["Skipped:", "", *(f"- {n}: {reason}" for reason, n in why.items())])


def _attention(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield (
        "### One pair of shards\n\nTFLOP/s on the pairs that attend: median over rounds "
        "[quartiles], and in parentheses the ratio to a bf16 product of square matrices in the "
        "same round. Kernels of this package add to float32 sums, as a ring wants it; rivals "
        "(torch's own) write 16 bits. Side query: backward without the output, as where queries "
        "travel. The host's launches run "
        "ahead of the device, as they do while a model trains."
    )
    yield from _by_pass(records)
    yield from _reasons("Not computed", records, "refused")
    memory = max((run["extra"] or 0 for r in records for run in r["runs"]), default=0)
    if memory:
        yield _memory(records)


def _by_pass(records: Sequence[Record]) -> Iterator[str]:
    for name in dict.fromkeys(run["pass"] for record in records for run in record["runs"]):
        yield f"**{name.capitalize()}**\n\n{_passes(records, name)}"


def _compiled(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield (
        "### Beside rivals that compile for each mask\n\nThe same, in runs of their own: rivals "
        "that are compared took turns in one run."
    )
    yield from _by_pass(records)
    yield from _reasons("Not computed there", records, "refused")


def _packs(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    rows = []
    for record in records:
        for run in record["runs"]:
            first, *others = run["seconds"]
            programs = "-" if run["programs"] is None else str(run["programs"])
            later = bracketed([1e3 * seconds for seconds in others]) if others else "-"
            rows.append([record["masks"], run["who"], str(len(run["seconds"])), programs,
                         f"{first:.1f}", later])  # fmt: skip
    h, k = records[0]["heads"]
    heads = ["", "kernel", "number", "compiled programs", "first, s", "each other, ms"]
    yield (
        f"### A new mask in every step\n\nPlan, forward and backward of one pair of shards, "
        f"{human(records[0]['tokens'])} rows, {h}:{k} heads, with other documents or another tree "
        "each time, by the wall clock. A kernel that compiles for new documents takes seconds; "
        "kernels stop after a share of the time.\n\n" + table(heads, rows)
    )
    yield from _reasons("Not run there", records, "refused")


def _passes(records: Sequence[Record], name: str) -> str:
    """Return a table with a row per cell and a column per kernel or rival of this pass."""
    chosen = [(r, {run["who"]: run for run in r["runs"] if run["pass"] == name}) for r in records]
    who = list(dict.fromkeys(rival for _, runs in chosen for rival in runs))
    rows = []
    for record, runs in chosen:
        h, k = record["heads"]
        cells = [
            f"{bracketed(rate(runs[rival]))} ({of_matmul(runs[rival], record):.2f})"
            if rival in runs
            else "-"
            for rival in who
        ]
        product = rounded(quartiles(rate(record["matmul"]))[1])
        rows.append([record["case"], f"{h}:{k}", human(record["tokens"]), product, *cells])
    return table(["mask", "heads", "rows", "product", *who], rows)


def _memory(records: Sequence[Record]) -> str:
    """Return the largest memory of each kernel or rival over the cells of the largest shards."""
    largest = max(record["tokens"] for record in records)
    most: dict[tuple[str, str], int] = {}
    for record in records:
        for run in record["runs"] if record["tokens"] == largest else ():
            key = run["who"], run["pass"]
            most[key] = max(most.get(key, 0), run["extra"] or 0)
    who = list(dict.fromkeys(name for name, _ in most))
    passes = list(dict.fromkeys(name for _, name in most))
    rows = [[rival, *(_mib(most.get((rival, name))) for name in passes)] for rival in who]
    heads = ["", *(f"{name}, MiB" for name in passes)]
    return (
        f"Memory of one call beyond inputs and sums, {human(largest)} rows, the most of all masks "
        f"and heads:\n\n{table(heads, rows)}"
    )


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.0f}"


def _rings(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    rows = []
    for record in records:
        ranks = f"{record['nodes']} x {record['per_node']}"
        for run in record["runs"]:
            for name in ("forward", "backward"):
                pass_record = run[name]
                times = bracketed([1e3 * seconds for seconds in pass_record["seconds"]])
                shares = [_outside(pass_record, inner) for inner in ("calls", "operators")]
                rows.append([ranks, human(record["tokens"]), run["kernel"], run["side"], name,
                             times, *shares, _mib(run["peak"])])  # fmt: skip
    heads = ["ranks", "rows each", "kernel", "side", "pass", "ms",
             "outside kernel calls", "outside operators", "peak, MiB"]  # fmt: skip
    yield (
        "### All ranks of a ring on one device\n\nCausal, zigzag, all ranks' steps in order. The "
        "share of the time that is not spent in kernel calls, and, for kernels made of stock "
        "operators, not in these: merging, stand-ins, sums. Messages are copies on the device and "
        "count as outside. Peak: of all ranks together, inputs included.\n\n" + table(heads, rows)
    )
    for record in records:
        if record["runs"] and record["tokens"] < record["wanted"]:
            ranks = record["nodes"] * record["per_node"]
            why = "time" if record["tokens"] == record["planned"] else "memory"
            yield (
                f"{ranks} ranks: {human(record['tokens'])} rows each instead of "
                f"{human(record['wanted'])}, for want of {why}."
            )
    yield from _reasons("Rings not run", records, "refused")


def _outside(pass_record: Record, inner: str) -> str:
    """Return the median share of a pass outside its `inner` calls; "-" without such calls."""
    if not pass_record[inner]:
        return "-"
    shares = [1 - a / b for a, b in zip(pass_record[inner], pass_record["seconds"], strict=True)]
    return f"{100 * quartiles(shares)[1]:.1f} %"


def _lm_heads(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        times = {run["who"]: run["seconds"] for run in record["runs"]}
        bound = times.get("three products")
        rows = []
        for run in record["runs"]:
            over = "-"
            if bound:
                over = spread([a / b for a, b in zip(run["seconds"], bound, strict=True)], ".3f")
            milliseconds = bracketed([1e3 * seconds for seconds in run["seconds"]])
            tflops = bracketed(rate(run | {"flops": record["flops"]}))
            rows.append([run["who"], milliseconds, over, tflops, _mib(run["extra"])])
        sizes = " x ".join(human(record[name]) for name in ("tokens", "width", "vocabulary"))
        heads = ["", "ms", "over three products", "TFLOP/s of three products", "peak, MiB"]
        yield (
            f"### LM head and loss, {sizes}\n\nbf16, forward and backward; peak beyond inputs, the "
            f"gradients included.\n\n{table(heads, rows)}"
        )
        yield from _reasons("Not run", [record], "refused")


def _stores(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        full = next((run for run in record["runs"] if run["who"] == "full"), None)
        rows = []
        for run in record["runs"]:
            over = "-"
            if full:
                pairs = zip(run["seconds"], full["seconds"], strict=True)
                over = spread([a / b for a, b in pairs], ".3f")
            rows.append([
                run["who"], bracketed([1e3 * seconds for seconds in run["seconds"]]), over,
                _mib(run["extra"]), _mib(run["stored"]),
            ])  # fmt: skip
        h, k = record["heads"]
        heads = ["kept", "step, ms", "over full", "peak, MiB", "store by formula, MiB"]
        yield (
            f"### Attention store\n\n{record['layers']} layers, {human(record['tokens'])} tokens "
            f"on one rank, {h}:{k} heads of width {record['width']}, causal, bf16; none: every "
            f"activation is saved, full: all is recomputed.\n\n{table(heads, rows)}"
        )
        yield from _reasons("Not run", [record], "refused")


def _reasons(title: str, records: Sequence[Record], field: str) -> Iterator[str]:
    """Return refused kernels and rivals by reason, with their cells."""
    places_of: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for who, reason in record[field].items():
            where = record.get("case", "")
            places = places_of.setdefault((who, reason), [])
            if where and where not in places:
                places.append(where)
    every = {record.get("case") for record in records}
    lines = [
        f"- {who}{_where(places, len(every))}: {reason}"
        for (who, reason), places in places_of.items()
    ]
    if lines:
        yield "\n".join([f"{title}:", "", *lines])


def _where(places: Sequence[str], every: int) -> str:
    return f" ({'; '.join(places)})" if len(places) < every and places else ""


def _blocks(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    rows = [
        [record["direction"], str(record["width"]), run["who"], bracketed(rate(run)),
         f"{of_matmul(run, record):.2f}"]
        for record in records
        for run in record["runs"]
    ]  # fmt: skip
    heads = ["", "width", "blocks", "TFLOP/s", "over a product"]
    entries = "\n".join(f"    {record['entry']}" for record in records if record["entry"])
    case, rows_each = records[0]["case"], human(records[0]["tokens"])
    yield (
        f"### Blocks of the Triton kernels, {case}, {rows_each} rows\n\n{table(heads, rows)}\n\n"
        f"The fastest, as entries of `megatron_burst/kernels/blocks.py`:\n\n{entries}"
    )
    yield from _reasons("Blocks that cannot be", records, "refused")


def failures(results: Record) -> list[str]:
    """Return errors, for the end of the output and the exit status."""
    return [
        f"{name}: {who}: {text}"
        for name, record in results["jobs"].items()
        for who, text in record["failed"].items()
    ]


def _missing(results: Record) -> Iterator[str]:
    failed = failures(results)
    if failed:
        lines = (f"- {text}" for text in failed)
        yield "\n".join(["**Failed**, so without a figure:", "", *lines])
    if results["left out"]:
        names = "\n".join(f"- {name}" for name in results["left out"])
        yield f"Left out when the time was spent (the same call again does them):\n\n{names}"
