"""Child process that measures the cells of one stage, each an item of the journal.

It exits, to be replaced by a new child, if the device does not answer after a fault.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from .clock import forget
from .jobs import Job, Record, Stage
from .journal import Journal
from .supervise import RESTART, Budget


def work(stage: Stage, journal: Journal, budget: Budget) -> int:
    """Run all items that have not ended and return the exit status."""
    parent, ended = os.getppid(), journal.ended()
    for job in stage.jobs:
        if job.name in ended:
            continue
        if budget.left <= 0 or os.getppid() != parent:
            break
        journal.begin(job.name)
        begun = time.monotonic()
        record = _outcome(job, journal.results(), budget)
        journal.end(job.name, record | {"took": time.monotonic() - begun})
        if record["failed"] and not _answers():
            return RESTART
    return 0


def _outcome(job: Job, results: Record, budget: Budget) -> Record:
    try:
        return job.run(results, budget)
    except Exception as error:  # the other jobs still run
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return {"kind": "broken", "failed": {"all": text[:300]}}


def _answers() -> bool:
    """Return true if the device still answers.

    After some faults (such as an illegal access) this process cannot use the device any more.
    """
    if torch.cuda.is_available():
        try:
            forget(torch.device("cuda"))
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def main(args: argparse.Namespace, every: list[Stage], journal: Journal) -> int:
    stage = next(stage for stage in every if stage.name == args.stage)
    return work(stage, journal, Budget(args.left))
