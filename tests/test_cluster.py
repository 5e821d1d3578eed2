"""The emulated cluster: it carries what it was shaped to, and nothing of it outlives its process.

Skipped, with the reason, where the machine refuses network namespaces.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster.network import Rates

ROOT = Path(__file__).parents[1]
RUN = [sys.executable, "-m", "benchmarks.cluster"]


def run(*words, **more):
    return subprocess.run(
        [*RUN, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, **more
    )


@pytest.fixture(scope="module")
def cluster():
    """The output of the smallest cluster's trial; skips where there can be none."""
    done = run("check")
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


def inhabitants(namespace):
    """Processes whose network namespace is this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") == namespace:
                found.append(process.name)
        except OSError:
            continue
    return found


def test_links_carry_what_they_were_shaped_to(cluster):
    """Payload is at least half (a busy machine) and less than 98 % (headers) of the rate, and the
    kernel's counters are within 3 % of it."""
    lines = re.findall(r"(\w+): ([\d.]+) of (\d+) Mbit/s, (\d+) bytes .* for (\d+)", cluster)
    assert [line[0] for line in lines] == ["inter", "intra"]
    for _, reached, rate, counted, payload in lines:
        assert 0.5 * int(rate) < float(reached) < 0.98 * int(rate)
        assert 1.0 < int(counted) / int(payload) < 1.03
    assert not inhabitants(re.search(r"namespace (\S+)", cluster)[1])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_process_that_was_started(cluster, how):
    process = subprocess.Popen([*RUN, "check"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    namespace = re.search(r"namespace (\S+)", process.stdout.readline())[1]
    assert inhabitants(namespace)
    process.send_signal(how)
    code = process.wait(timeout=20)
    assert code == (-how if how == signal.SIGKILL else 130)
    process.stdout.close()
    deadline = time.monotonic() + 10
    while inhabitants(namespace) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not inhabitants(namespace)


def test_without_tools_it_says_what_is_missing(cluster):
    done = run("check", env={**os.environ, "PATH": ""})
    assert done.returncode == 2
    assert "no emulated cluster here: needs the program ip: install iproute2" in done.stderr


@pytest.mark.parametrize("text", ["200M", "fast/slow", "200M/", "1T/2T"])
def test_rates_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="rates must look like 200M/800M"):
        Rates.parse(text)


def test_rates_are_read_and_written_alike():
    assert Rates.parse("1G/4G") == Rates(10**9, 4 * 10**9)
    assert str(Rates.parse("200M/1500M")) == "200M/1500M"
