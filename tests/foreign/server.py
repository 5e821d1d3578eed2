"""Runs files of Megatron-LM's unit tests on forked ranks, in one mode; `run.py` starts it.

    python server.py MODE WORLD REPORT LIMIT [pytest's arguments] < names of files

Ranks go through the tests in step: after each test a rank waits for the others. If ranks still run
a test long after another has ended it, they wait for it in vain; all are ended, and new ranks go on
with the next test. New ranks also go on after ROUND tests: the tests leave process groups behind,
whose threads would soon take both processors. One JSON line per test goes into the file REPORT: its
name, the verdict of all ranks, and the error of the first that failed. A line without a verdict
ends a file.
"""

import contextlib
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import room
import torch.distributed as dist
from watch import PATIENCE, Watch

FOREVER = timedelta(hours=3)
ROUND = 16  # tests that one set of ranks runs
MORE = 100  # exit status of ranks that leave tests to the next ones


class Record:
    """A pytest plugin: notes the verdict of each test, and keeps ranks in step."""

    def __init__(self, rank, world, store, folder, done, round_):
        self.rank, self.world, self.store, self.round = rank, world, store, round_
        self.file = (folder / f"{round_}-{rank}.jsonl").open("w")
        self.done, self.count = done, 0
        self.verdict, self.error = None, ""
        self.more = False  # are tests left for the next round?

    def pytest_collection_modifyitems(self, items):
        left = [item for item in items if item.nodeid not in self.done]
        items[:], self.more = left[:ROUND], len(left) > ROUND

    def pytest_collectreport(self, report):
        if report.failed:
            self.write("collect", report.nodeid, "failed", str(report.longrepr)[-2000:])

    def write(self, event, name, verdict="", error=""):
        line = {"event": event, "name": name, "verdict": verdict, "error": error}
        self.file.write(json.dumps(line | {"time": time.time()}) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid):
        self.verdict, self.error = "passed", ""
        self.write("start", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.skipped and self.verdict == "passed":
            self.verdict = "skipped"
        elif report.failed:
            self.verdict = "failed"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.error = self.error or (crash.message if crash else str(report.longrepr))[:2000]

    def pytest_runtest_logfinish(self, nodeid):
        self.write("end", nodeid, self.verdict, self.error)
        names = [f"{self.round} {self.count} {rank}" for rank in range(self.world)]
        self.count += 1
        self.store.set(names[self.rank], self.verdict)
        self.store.wait(names, FOREVER)
        verdicts = {self.store.get(name) for name in names}
        if b"failed" in verdicts and len(verdicts) > 1:
            self.separate()

    def separate(self):
        """After a test that failed on some ranks only: messages of it may be under way."""
        from megatron.core import parallel_state
        from tests.unit_tests.test_utilities import Utils

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        Utils.inited = False


def run_rank(rank, world, port, folder, done, round_, argv):
    import pytest

    room.environment(rank, world, port)
    log = os.open(folder / f"{round_}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=FOREVER)
    room.no_download()
    from tests.unit_tests.test_utilities import Utils

    Utils.rank, Utils.local_rank, Utils.world_size = rank, rank, world
    room.start_again(Utils, store, f"group {round_}")
    record = Record(rank, world, dist.PrefixStore("steps", store), folder, done, round_)
    with room.importable_te():
        code = pytest.main(["-p", "no:cacheprovider", "--tb=short", *argv], plugins=[record])
    return MORE if record.more else int(code)


def fork(rank, *args):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = run_rank(rank, *args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class File:
    """The tests of one file, in as many rounds of ranks as it takes."""

    def __init__(self, world, report, limit, argv):
        self.world, self.report, self.limit, self.argv = world, report, limit, argv
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=report.parent))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.done = set()

    def run(self):
        for round_ in itertools.count(1):
            watch, stuck, more = self.round(round_)
            name = watch.in_progress()
            if stuck:
                self.write(stuck)
            elif name is not None:
                self.write({"name": name, "verdict": "failed", "error": "a rank ended"})
            elif not more:
                self.write({"name": None, "log": str(self.folder / f"{round_}-0.log")})
                return

    def round(self, round_):
        """Fork ranks for some of the tests that are left.

        Returns their `Watch`, the test in which they hang or None, and whether they left tests.
        """
        args = self.world, self.store.port, self.folder, frozenset(self.done), round_, self.argv
        children = {fork(rank, *args): None for rank in range(self.world)}
        watch, stuck, gone = Watch(self.folder, self.world, round_), None, None
        while None in children.values():
            time.sleep(0.2)
            reap(children)
            self.read(watch)
            if gone is None and any(code is not None for code in children.values()):
                gone = time.time()
            stuck = watch.stuck(self.limit)
            if stuck or (gone is not None and time.time() - gone > PATIENCE):
                end(children)
        self.read(watch)
        return watch, stuck, MORE in children.values()

    def read(self, watch):
        watch.read()
        for line in watch.complete():
            self.write(line)

    def write(self, line):
        self.done.add(line["name"])
        with self.report.open("a") as out:
            out.write(json.dumps(line) + "\n")


def reap(children):
    for child in [child for child, code in children.items() if code is None]:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            children[child] = os.waitstatus_to_exitcode(status)


def end(children):
    for child in [child for child, code in children.items() if code is None]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        children[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    mode, world, report, limit, *options = sys.argv[1:]
    room.prepare(mode)
    gc.freeze()
    for line in sys.stdin:
        File(int(world), Path(report), int(limit), [line.strip(), *options]).run()


if __name__ == "__main__":
    main()
