"""Traces: recorded events, their sums, pictures, and the command."""

import itertools
import json
import subprocess
import sys
from collections import Counter

import cases
import pytest
import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg

import megatron_burst as mb
from megatron_burst.cli.main import main
from megatron_burst.plugins.testing import in_process
from megatron_burst.plugins.tools.trace import local, picture, record
from megatron_burst.plugins.tools.trace.record import Trace, TraceEvent
from megatron_burst.schedule.algorithms import ALGORITHMS
from megatron_burst.schedule.program import hops_of

EVENTS = (
    TraceEvent(0, "transfer", "b", 12.0, 13.0),
    TraceEvent(0, "transfer", "a", 12.5, 14.0),
    TraceEvent(0, "transfer", "z", 10.0, 11.0),
    TraceEvent(0, "compute", "forward", 10.0, 12.0),
    TraceEvent(1, "wait", "a", 11.0, 11.5),
)
TRACE = Trace("two ranks", EVENTS, (("forward", 10.0, 14.0),))


def test_busy_counts_what_overlaps_once():
    assert (TRACE.begin, TRACE.end, TRACE.ranks) == (10.0, 14.0, [0, 1])
    assert TRACE.busy(0, "transfer") == 3.0  # 10 to 11, and 12 to 14
    assert TRACE.busy(0, "compute") == 2.0
    assert TRACE.busy(1, "transfer") == 0.0


def test_events_survive_the_disk(tmp_path):
    """Times in the file begin at the first event."""
    path = tmp_path / "new" / "events.json"
    record.save(TRACE, path)
    moved = tuple(e._replace(begin=e.begin - 10, end=e.end - 10) for e in EVENTS)
    assert record.load([path]) == Trace("two ranks", moved, (("forward", 0.0, 4.0),))


def test_chrome_gets_a_process_per_rank_and_microseconds(tmp_path):
    record.save(TRACE, tmp_path / "chrome.json")
    entries = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in entries if e["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (0, "compute"), (1, "wait")} <= names
    (forward,) = [e for e in entries if e["name"] == "forward" and e["cat"] == "compute"]
    assert (forward["pid"], forward["tid"], forward["ts"], forward["dur"]) == (0, 0, 0.0, 2e6)


def entry(category, name, begin, seconds):
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 3, "ts": begin * 1e6,
            "dur": seconds * 1e6}  # fmt: skip


def test_on_a_gpu_the_device_is_what_counts():
    """The host's ranges are only launches; a gap between two pairs of a pass is a wait."""
    pair = "attention forward: queries of rank 1, keys of rank {}"
    other = "attention backward, side query: queries of rank 1, keys of rank 1"
    entries = [
        entry("user_annotation", pair.format(1), 0.0, 0.25),
        entry("user_annotation", "attention forward: wait, boundary 1", 0.25, 0.25),
        entry("gpu_user_annotation", pair.format(1), 1.0, 1.0),
        entry("gpu_user_annotation", pair.format(0), 2.5, 1.0),
        entry("gpu_user_annotation", other, 5.0, 1.0),
        entry("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1.0, 1.5),
        entry("kernel", "flash_fwd_kernel", 1.0, 1.0),
        entry("user_annotation", "trace: forward", 0.0, 3.5),
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
    ]
    profile = {"distributedInfo": {"rank": 1}, "traceEvents": entries}
    events = sorted((e.stream, e.begin, e.end) for e in record.events_of(profile))
    assert events == [
        ("compute", 1.0, 2.0), ("compute", 2.5, 3.5), ("compute", 5.0, 6.0),
        ("pass", 0.0, 3.5), ("transfer", 1.0, 2.5), ("wait", 2.0, 2.5),
    ]  # fmt: skip
    assert {e.rank for e in record.events_of(profile)} == {1}


def test_passes_last_from_the_first_rank_to_the_last():
    passes = [
        TraceEvent(0, "pass", "forward", 1.0, 2.0),
        TraceEvent(1, "pass", "forward", 1.5, 3.0),
    ]
    assert Trace.of_ranks("", passes) == Trace("", (), (("forward", 1.0, 3.0),))


def test_the_command_draws_events_that_were_kept(tmp_path, capsys):
    record.save(TRACE, tmp_path / "events.json")
    words = ["trace", "--events", str(tmp_path / "events.json"), "--out", str(tmp_path / "t.png")]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_passes_do_not_overlap():
    """Names of short passes use further rows; three short ones need a third row."""
    marks = [("forward", 10.0, 10.1), ("backward", 10.1, 10.2), ("forward", 10.2, 14.0)]
    figure = picture._figure(Trace("two ranks", EVENTS, tuple(marks)))
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [t for t in figure.axes[0].texts if t.get_text().endswith((" ms", " s"))]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert [text.get_text() for text in texts] == [
        "forward, 100 ms", "backward, 100 ms", "forward, 3.8 s",
    ]  # fmt: skip
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.y1 < figure.bbox.y1 for box in boxes)


def test_profilers_see_pairs_and_waits_by_name():
    groups = in_process.groups(intra=2)
    shards = [[torch.randn(8, 1, 2, 4, requires_grad=True) for _ in range(2)] for _ in range(3)]
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=threads) as profile:
        outs = in_process.attention(*shards, groups=groups, side="query")
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    names = {event.name for event in profile.events()}
    assert {
        f"attention {way}: queries of rank {query}, keys of rank {key}"
        for way in ("forward", "backward, side query")
        for query in range(2)
        for key in range(2)
    } <= names
    assert "attention forward: wait, boundary 1" in names


def test_the_command_runs_ranks_and_notes_every_stream(tmp_path):
    """Two nodes of one rank.

    Each rank computes two pairs forward and two backward, and takes part in three exchanges (keys;
    keys and their gradients), each with one message sent and one received.
    """
    path = tmp_path / "events.json"
    words = "trace --nodes 2 --per-node 1 --tokens 32 --heads 2 --kv-heads 2 --width 8"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_burst", *words.split(), "--side", "kv",
         "--chrome", str(path)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trace = record.load([path])
    assert [name for name, _, _ in trace.marks] == ["forward", "backward"]
    for rank in (0, 1):
        streams = [event.stream for event in trace.events if event.rank == rank]
        assert Counter(streams) == {"compute": 4, "transfer": 6, "wait": 3}
    assert all(event.begin <= event.end for event in trace.events)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no output file; set --out FILE or --chrome FILE"),
        ("--out x.png --device cuda --nodes 8", "16 ranks require 16 GPUs"),
        ("--out x.png --nodes 0", "--nodes must be at least 1, got 0"),
        ("--out x.png --nodes 5 --per-node 4", "at most 16 processes, got 20"),
        (
            "--out x.png --events pyproject.toml",
            "pyproject.toml contains no trace of megatron-burst",
        ),
        ("--out x.png --events nowhere.json", "No such file"),
    ],
)
def test_what_the_command_refuses(words, said, capsys):
    assert main(["trace", *words.split()]) == 2
    assert said in capsys.readouterr().err


def noted(algorithm, folder):
    """Return on every rank the number of events of each stream, and the number in its tables."""
    groups, rank = cases.groups_on_rank(2, 2), dist.get_rank()
    leaves = [torch.randn(8, 1, 2, 8, requires_grad=True) for _ in "qkv"]
    plan = mb.prepare(*leaves, groups=groups, algorithm=algorithm)
    path = folder / f"{rank}.json"
    with local.profiled(path):
        mb.attention(*leaves, plan=plan).sum().backward()
    events = record.load([path]).events
    told = Counter()
    for schedule in plan.schedules:
        pairs = schedule.tables.pairs
        own = pairs.rank == rank
        calls = {*zip(pairs.step[own].tolist(), pairs.query[own].tolist(), strict=True)}
        told["compute"] += len(calls) if schedule.joined else int(own.sum())
        hops = hops_of(schedule.tables, schedule.grid, rank)
        told["transfer"] += len(hops)
        told["wait"] += len({(h.post, h.ring, h.chunk.accumulated, h.land) for h in hops})
    return Counter(event.stream for event in events), told, {event.rank for event in events}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_events_are_those_of_the_tables(algorithm, ranks, tmp_path):
    """Several pairs at a step, one kernel call in `prefetch`, parts of chunks."""
    for rank, (seen, told, own) in enumerate(ranks(4).run(noted, algorithm, tmp_path)):
        assert seen == told
        assert own == {rank}


def test_a_profile_without_attention_is_no_trace(tmp_path):
    with torch.profiler.profile() as profile:
        torch.ones(2) + 1
    profile.export_chrome_trace(str(tmp_path / "profile.json"))
    with pytest.raises(ValueError, match="it has no events of attention"):
        record.load([tmp_path / "profile.json"])
