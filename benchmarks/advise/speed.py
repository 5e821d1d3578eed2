"""Duration of advice: the whole search, on one core, for 64 and for 1,024 GPUs."""

from __future__ import annotations

import time

import megatron_burst as mb

from .section import Figure, Section

LIMITS = {64: 5.0, 1024: 30.0}  # GPUs -> seconds that advice may take
# GPUs -> models, and tokens of a sequence.
CASES = {64: (("llama3-8b", "1M"), ("llama3-70b", "128K")), 1024: (("llama3-8b", "1M"),)}


def run(fit: bool = False) -> Section:
    """Return the section; nothing is fitted. Seconds are processor seconds of this process."""
    rows, figures = [], []
    for gpus, limit in LIMITS.items():
        most = 0.0
        for model, seq in CASES[gpus]:
            begin = time.process_time()
            advice = mb.advise(model, "h100", gpus=gpus, seq=seq)
            taken = time.process_time() - begin
            most = max(most, taken)
            best = advice.best.run
            taken_run = f"TP {best.tp}, CP {best.cp}, PP {best.pp}, DP {best.dp}, {best.algorithm}"
            rows.append([model, f"{gpus:,}", seq, f"{taken:.1f}",
                         f"{advice.tried} of {advice.ways}", taken_run,
                         f"{advice.best.time.mfu:.0%}"])  # fmt: skip
        figures.append(Figure(f"Advice for {gpus:,} GPUs", f"{most:.1f} s at most",
                              f"{limit:.0f} s", most <= limit))  # fmt: skip
    columns = ("model", "GPUs", "tokens", "seconds", "ways tried", "taken", "MFU")
    return Section("speed", "How long advice takes", INTRO, columns, rows, figures)


INTRO = ["Processor seconds of the search, on H100 at published rates."]
