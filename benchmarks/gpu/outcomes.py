"""Plugin of pytest: each test is an item of the journal, and ended items are not run again.

`python -m pytest -p benchmarks.gpu.outcomes --journal FILE --stage NAME ...`. It records the
outcome of a test, and the first line of a failure.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from .journal import Journal, Record


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True)
    parser.addoption("--stage", required=True)


def pytest_configure(config: pytest.Config) -> None:
    journal = Journal(config.getoption("--journal"))
    config.pluginmanager.register(Outcomes(journal, config.getoption("--stage")))


class Outcomes:
    """Outcomes of the tests of one stage."""

    def __init__(self, journal: Journal, stage: str):
        self.journal, self.stage, self.parent = journal, stage, os.getppid()
        self.record: Record = {}
        self.begun = 0.0

    @pytest.hookimpl(trylast=True)  # after the selection by -m
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.journal.write(stage=self.stage, items=[item.nodeid for item in items])
        ended = self.journal.ended()
        items[:] = [item for item in items if item.nodeid not in ended]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if os.getppid() != self.parent:
            pytest.exit("nobody watches these tests any more")
        self.record, self.begun = {"kind": "test", "outcome": "passed", "failed": {}}, time.time()
        self.journal.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.record |= {"outcome": "failed", "failed": {report.when: _first_line(report)}}
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            self.record |= {"outcome": "skipped", "why": reason[:300]}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.journal.end(nodeid, self.record | {"took": time.time() - self.begun})


def _first_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return (text.strip().splitlines() or ["no message"])[0][:300]
