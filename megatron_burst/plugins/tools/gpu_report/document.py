# SPDX-License-Identifier: Apache-2.0
"""The file that is sent back: Markdown to read, and the same facts as JSON at its end.

It contains versions, kinds of devices, figures, and sentences from which paths, addresses, host
names and user names are removed, as far as their form shows them.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import json
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ....units import duration, grid_of
from .accuracy import BOUND, PARTS, ratio

DRY = "A dry run on a CPU. Nothing in this file was run on a GPU, and no time in it means anything."
# An absolute path, of which the last part stays; a URL or "and/or" is none. In quotes it may have
# blanks.
PATH = re.compile(
    r"(?:\bfile:/+|(?<![\w/.:])(?:~|[A-Za-z]:)?[/\\]|(?<=:)[/\\](?![/\\]))"
    r"(?:[^\s'\",;()<>]*[/\\])([^\s'\",;()<>]*)"
)
QUOTED = re.compile(r"(['\"])(?:file:|~|[A-Za-z]:)?[/\\][^'\"\n]*[/\\]([^'\"\n/\\]*)\1")
# A machine and its port, as torch and NCCL write them: [name]:1, (name, 29500), name<1>, a.b:1,
# name:29500. A file of source code and its line is none.
PORT = re.compile(
    r"\[[^\]\s]+\]:\d+|(?<=\()(?!\d+,)[\w.:-]+, \d{4,5}(?=\))|[\w.-]+<(?:[\w.:]+:)?\d{4,5}>|"
    r"(?<![\w.-])(?![\w.-]+\.(?:py|pyx|c|cc|cpp|cu|cuh|h|hpp|so):)"
    r"(?:[\w-]+(?:\.[\w-]+)+:\d|[\w-]+:\d{4})\d*\b"
)
# What may be an address of IPv4 or IPv6, with its network interface.
ADDRESS = re.compile(
    r"(?<![\w:.])(?:\d+(?:\.\d+){3}|[\da-fA-F]*:[\da-fA-F:.]*[\da-fA-F:])(?:%\w+)?(?!\w)"
)
UNFINISHED = "The examination did not end: what comes last is missing."
Facts = dict[str, Any]


def text(facts: Facts) -> str:
    """The whole file, without private names, paths and addresses."""
    facts = impersonal(facts, names())
    parts = [
        "# What megatron-burst does on this machine",
        DRY if facts["device"] == "cpu" else f"On {facts['gpus'][0]}.",
        *([] if facts["finished"] else [UNFINISHED]),
        "## Versions\n\n" + _table(["", "version"], facts["versions"].items()),
        "## Kernels against float64\n\n"
        "bf16; the largest error over that of torch's own attention, of which at most "
        f"{BOUND:g} is right.\n\n" + _accuracy(facts["accuracy"]),
        "## Times\n\nOne causal pair: median [quartiles], and TFLOP/s on what attends.\n\n"
        + _times(facts["times"]),
        "## Overlap\n\n" + _overlap(facts["overlap"]),
        "## Findings\n\n"
        + _table(["", "topic", "what", "what to do"], (one.values() for one in facts["findings"])),
        "## The same for programs\n\n```json\n" + json.dumps(facts, indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def names() -> set[str]:
    """Names of this machine, of the machine where ranks meet, and of the user. A single letter, a
    number (the beginning of an address) and root identify nobody and are left out.
    """
    hosts = [socket.gethostname(), os.environ.get("MASTER_ADDR", "")]
    named = {*hosts, *(host.partition(".")[0] for host in hosts), Path.home().name}
    with contextlib.suppress(KeyError, OSError):  # a container without an entry for its user
        named.add(getpass.getuser())
    plain = ("root", "localhost")
    return {name for name in named if len(name) > 1 and name not in plain and not name.isdigit()}


def impersonal(value: Any, private: Iterable[str]) -> Any:
    """The same, in every text file names instead of paths, and no private name."""
    if isinstance(value, dict):
        return {key: impersonal(each, private) for key, each in value.items()}
    if isinstance(value, list):
        return [impersonal(each, private) for each in value]
    if not isinstance(value, str):
        return value
    value = PATH.sub(r"\1", QUOTED.sub(r"\1\2\1", value))
    value = ADDRESS.sub(_without_address, PORT.sub("...", value))
    for name in sorted(private, key=len, reverse=True):  # a whole name before its first part
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", value)
    return value


def _without_address(match: re.Match[str]) -> str:
    try:
        ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    return "..."


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|-" * len(head) + "|"]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _accuracy(records: Sequence[Facts]) -> str:
    rows, refused = [], {}
    for record in records:
        where = [record["kernel"], record["mask"], record["side"]]
        if "refused" in record:
            refused[record["kernel"], record["refused"]] = None
            continue
        if "failed" in record:
            rows.append([*where, *"-" * len(PARTS), f"FAILED: {record['failed']}"])
            continue
        pairs = [(record["errors"][part], record["torch"][part]) for part in PARTS]
        errors = [f"{'not finite' if a is None else f'{a:.2e}'} ({b:.2e})" for a, b in pairs]
        worst = ratio(record)
        rows.append([*where, *errors, f"{worst:.2f}{'' if worst <= BOUND else ', WRONG'}"])
    head = ["kernel", "mask", "side", *(f"{part} (torch)" for part in PARTS), "of torch's"]
    lines = "\n".join(f"- {name}: {reason}" for name, reason in refused)
    return _table(head, rows) + (f"\n\nNot run:\n\n{lines}" if lines else "")


def _times(records: Sequence[Facts]) -> str:
    rows = []
    for record in records:
        took = {name: duration(value) for name, value in record["seconds"].items()}
        rows.append([
            record["kernel"], record["pass"], record["rows"], ":".join(map(str, record["heads"])),
            f"{took['median']} [{took['low']}, {took['high']}]", f"{record['tflops']:.3g}",
        ])  # fmt: skip
    return _table(["kernel", "pass", "rows", "heads", "time", "TFLOP/s"], rows)


def _overlap(record: Facts) -> str:
    if "failed" in record:
        return f"Failed: {record['failed']}"
    if not record.get("pairs"):
        return "One GPU: not measured." if "pairs" in record else "Not measured yet."
    rows = [
        [name, *(duration(pair[key]) for key in ("first", "second", "both")),
         f"{pair['hidden']:.2f}"]
        for name, pair in record["pairs"].items()
    ]  # fmt: skip
    nodes, per_node = record["grid"]
    limit = f", CUDA_DEVICE_MAX_CONNECTIONS {record['CUDA_DEVICE_MAX_CONNECTIONS'] or 'unset'}"
    return (
        f"{record['ranks']} ranks, {grid_of(per_node, nodes)}{limit}. Each alone and both at once; "
        "hidden is 1 where the shorter costs nothing and 0 where one waits for the other. Two "
        "rings of one node share its links.\n\n"
        + _table(["", "first", "second", "both", "hidden"], rows)
    )
