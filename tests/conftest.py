"""Fixtures all tests share, and the order in which files are tested."""

import fcntl
import functools
import gc
import inspect
import os
import re
from collections import Counter
from pathlib import Path

import csrc_library
import pytest
import torch
from ci_rooms import AGAIN, FIRST, HALVED, RARE, room
from hypothesis import Phase, settings
from workers import MEGATRON, Workers, start_server

from megatron_burst.kernels import native

# Reproducible and without a database on disk; a slow machine is not a failure.
settings.register_profile("repo", derandomize=True, database=None, deadline=None, max_examples=60)
# For tests/mutants.py, where any failing example will do, and nobody reads it.
some = (Phase.explicit, Phase.generate)
settings.register_profile("mutants", settings.get_profile("repo"), phases=some)
settings.load_profile("repo")

TESTS = Path(__file__).parent
LEAVES_ONCE = re.compile(r"not \([a-z ]*\bonce\b")  # in a selection of tests, such as `.ci/run` has


def pytest_addoption(parser):
    parser.addoption(
        "--megatron", default="", help="a checkout of Megatron-LM (tests/te, tests/plugins/lite)"
    )
    parser.addoption("--bridge", default="", help="a checkout of Megatron-Bridge (tests/te)")


def pytest_collection_finish():
    """Exclude modules and collected tests from later searches for garbage, which tests start."""
    gc.freeze()


def may_skip(item):
    """Return whether a test may skip itself, perhaps on one of the interpreters."""
    marked = any(mark.name == "skipif" for mark in item.own_markers)
    return marked or calls_skip(item.function)


@functools.cache
def calls_skip(function):
    return "pytest.skip(" in inspect.getsource(function)


def pytest_ignore_collect(collection_path, config):
    """Do not import files whose tests are all deselected: marked `once`, and none marked slow."""
    if not collection_path.match("test_*.py") or not LEAVES_ONCE.search(config.option.markexpr):
        return None
    again = collection_path.relative_to(TESTS).as_posix().startswith(AGAIN)
    return None if again or "slow" in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Long files first, so that processes that share the files out end at about the same time; and
    the marks that say what CI runs once, or not at all."""

    def turn(item):
        name = room(item.path.relative_to(TESTS))
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=turn)
    # Cases that are shared out: neither slow nor skipped for one version of something.
    shared = {
        item: item.nodeid.split("[")[0]
        for item in items
        if item.path.relative_to(TESTS).as_posix().startswith(HALVED)
        and not item.get_closest_marker("slow")
        and not may_skip(item)
    }
    numbers, cases = Counter(shared.values()), Counter()
    for item in items:
        file = item.path.relative_to(TESTS).as_posix()
        if not file.startswith(AGAIN):
            item.add_marker(pytest.mark.once)
        if numbers[shared.get(item)] > 1:
            # By the count of ones in the number, whose order no grid of two or four values repeats.
            mark = pytest.mark.odd if cases[shared[item]].bit_count() % 2 else pytest.mark.even
            item.add_marker(mark)
            cases[shared[item]] += 1
        if f"{file}::{item.name}".startswith(RARE) and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.rare)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks(request):
    """Import Megatron once, before ranks are forked, if a collected test needs it there."""
    rooms = {room(item.path.relative_to(TESTS)) for item in request.session.items}
    if "megatron" in rooms and not torch.cuda.is_available():
        start_server(MEGATRON)


@pytest.fixture(scope="session")
def room_pools():
    """{room: [Workers]} that tests of that room alone use."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def one_room(request, room_pools):
    """Ranks of another room end before the tests of this file: threads of their process groups
    would take most of two cores until the session ends."""
    here = room(request.path.relative_to(TESTS))
    for other in [name for name in room_pools if name != here]:
        for workers in room_pools.pop(other):
            workers.close()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: n gloo processes, shared by all tests that ask for the same n in a row.

    One pool at a time: every process group keeps a thread that wakes up a hundred times a
    second, so idle ranks are not free, and a new pool costs less than a second.
    """
    pools = []

    def get(world):
        if not (pools and pools[0].alive and pools[0].world == world):
            while pools:
                pools.pop().close()
            pools.append(Workers(world))
        return pools[0]

    yield get
    while pools:
        pools.pop().close()


@pytest.fixture(scope="session")
def csrc_file(tmp_path_factory):
    """The compiled operators, for the CPU; processes that share the tests out compile them once."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "csrc"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return csrc_library.library(folder, "--cpu")


@pytest.fixture
def built(csrc_file, monkeypatch):
    """With them in use."""
    monkeypatch.setattr(native, "FILE", csrc_file)
    assert native.serves("cpu")
