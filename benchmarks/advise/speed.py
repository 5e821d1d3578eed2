"""How long advice takes: the whole search, on one core, for 64 and for 1,024 GPUs."""

from __future__ import annotations

import time

import megatron_burst as mb

from .section import Figure, Section

CASES = (
    ("llama3-8b", 64, "1M", 5.0),
    ("llama3-70b", 64, "128K", 5.0),
    ("llama3-8b", 1024, "1M", 30.0),
    ("llama3-70b", 1024, "128K", 30.0),
)  # model, GPUs, tokens of a sequence, seconds that it may take


def run(fit: bool = False) -> Section:
    """The section of the page; nothing is fitted. Seconds are of this process, on a core that other
    programs may share."""
    rows, figures = [], []
    for gpus in (64, 1024):
        most = 0.0
        for model, _, seq, limit in (case for case in CASES if case[1] == gpus):
            begin = time.process_time()
            found = mb.advise(model, "h100", gpus=gpus, seq=seq)
            taken = time.process_time() - begin
            most = max(most, taken / limit)
            best = found.best.run
            taken_run = f"TP {best.tp}, CP {best.cp}, PP {best.pp}, DP {best.dp}, {best.algorithm}"
            rows.append([model, f"{gpus:,}", seq, f"{taken:.1f}", f"{found.tried} of {found.ways}",
                         taken_run, f"{found.best.time.mfu:.0%}"])  # fmt: skip
        figures.append(Figure(f"Advice for {gpus:,} GPUs", f"{most * limit:.1f} s at most",
                              f"{limit:.0f} s", most <= 1))  # fmt: skip
    columns = ("model", "GPUs", "tokens", "seconds", "ways tried", "taken", "MFU")
    return Section("speed", "How long advice takes", INTRO, columns, rows, figures)


INTRO = ["Processor seconds of the search, on H100 at published rates."]
