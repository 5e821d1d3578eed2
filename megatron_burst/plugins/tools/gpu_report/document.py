# SPDX-License-Identifier: Apache-2.0
"""Text of the GPU report: Markdown, and the same facts as JSON at the end.

The report contains versions, device types, figures and messages. Paths, addresses, host names and
user names are removed if they match a pattern of this module.
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

DRY = "A dry run on a CPU. Nothing in this file was run on a GPU; ignore all times in it."
# An absolute path; the last component is kept. URLs and "and/or" do not match. A quoted path may
# contain spaces.
PATH = re.compile(
    r"(?:\bfile:/+|(?<![\w/.:])(?:~|[A-Za-z]:)?[/\\]|(?<=:)[/\\](?![/\\]))"
    r"(?:[^\s'\",;()<>]*[/\\])([^\s'\",;()<>]*)"
)
QUOTED = re.compile(r"(['\"])(?:file:|~|[A-Za-z]:)?[/\\][^'\"\n]*[/\\]([^'\"\n/\\]*)\1")
# A host and a port, as torch and NCCL print them: [name]:1, (name, 29500), name<1>, a.b:1,
# name:29500. A source file with a line number does not match.
PORT = re.compile(
    r"\[[^\]\s]+\]:\d+|(?<=\()(?!\d+,)[\w.:-]+, \d{4,5}(?=\))|[\w.-]+<(?:[\w.:]+:)?\d{4,5}>|"
    r"(?<![\w.-])(?![\w.-]+\.(?:py|pyx|c|cc|cpp|cu|cuh|h|hpp|so):)"
    r"(?:[\w-]+(?:\.[\w-]+)+:\d|[\w-]+:\d{4})\d*\b"
)
# A possible IPv4 or IPv6 address, with an optional network interface.
ADDRESS = re.compile(
    r"(?<![\w:.])(?:\d+(?:\.\d+){3}|[\da-fA-F]*:[\da-fA-F:.]*[\da-fA-F:])(?:%\w+)?(?!\w)"
)
UNFINISHED = "The report is incomplete: the process ended early, and the last sections are missing."
Facts = dict[str, Any]


def text(facts: Facts) -> str:
    """Return the text of the report, from which private names, paths and addresses are removed."""
    facts = impersonal(facts, names())
    parts = [
        "# GPU report of megatron-burst",
        DRY if facts["device"] == "cpu" else f"On {facts['gpus'][0]}.",
        *([] if facts["finished"] else [UNFINISHED]),
        "## Versions\n\n" + _table(["", "version"], facts["versions"].items()),
        "## Kernels against float64\n\n"
        "bf16; the largest error divided by the error of torch's own attention. A kernel is "
        f"correct up to a ratio of {BOUND:g}.\n\n" + _accuracy(facts["accuracy"]),
        "## Times\n\nOne causal pair: median [quartiles], and TFLOP/s on visible pairs.\n\n"
        + _times(facts["times"]),
        "## Overlap\n\n" + _overlap(facts["overlap"]),
        "## Findings\n\n"
        + _table(
            ["", "topic", "what", "what to do"],
            (finding.values() for finding in facts["findings"]),
        ),
        "## Data\n\n```json\n" + json.dumps(facts, indent=1) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def names() -> set[str]:
    """Return the private names to remove: of this machine, of rank 0's machine, and of the user.

    Single letters, numbers (such as the beginning of an address), "root" and "localhost" are not
    private, so they are omitted.
    """
    hosts = [socket.gethostname(), os.environ.get("MASTER_ADDR", "")]
    named = {*hosts, *(host.partition(".")[0] for host in hosts), Path.home().name}
    with contextlib.suppress(KeyError, OSError):  # a container may have no entry for the user
        named.add(getpass.getuser())
    plain = ("root", "localhost")
    return {name for name in named if len(name) > 1 and name not in plain and not name.isdigit()}


def impersonal(value: Any, private: Iterable[str]) -> Any:
    """Return a copy of a value without private names, addresses, and folders of paths.

    Args:
        value: String, or nested lists and dictionaries of strings and other values.
        private: Private names. Names and addresses are replaced by "...".
    """
    if isinstance(value, dict):
        return {key: impersonal(entry, private) for key, entry in value.items()}
    if isinstance(value, list):
        return [impersonal(entry, private) for entry in value]
    if not isinstance(value, str):
        return value
    value = PATH.sub(r"\1", QUOTED.sub(r"\1\2\1", value))
    value = ADDRESS.sub(_without_address, PORT.sub("...", value))
    for name in sorted(
        private, key=len, reverse=True
    ):  # a full host name before its first component
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
        case = [record["kernel"], record["mask"], record["side"]]
        if "refused" in record:
            refused[record["kernel"], record["refused"]] = None
            continue
        if "failed" in record:
            rows.append([*case, *"-" * len(PARTS), f"FAILED: {record['failed']}"])
            continue
        pairs = [(record["errors"][part], record["torch"][part]) for part in PARTS]
        errors = [f"{'not finite' if a is None else f'{a:.2e}'} ({b:.2e})" for a, b in pairs]
        worst = ratio(record)
        rows.append([*case, *errors, f"{worst:.2f}{'' if worst <= BOUND else ', WRONG'}"])
    head = ["kernel", "mask", "side", *(f"{part} (torch)" for part in PARTS), "ratio"]
    lines = "\n".join(f"- {name}: {reason}" for name, reason in refused)
    return _table(head, rows) + (f"\n\nNot run:\n\n{lines}" if lines else "")


def _times(records: Sequence[Facts]) -> str:
    rows = []
    for record in records:
        times = {name: duration(value) for name, value in record["seconds"].items()}
        rows.append([
            record["kernel"], record["pass"], record["rows"], ":".join(map(str, record["heads"])),
            f"{times['median']} [{times['low']}, {times['high']}]", f"{record['tflops']:.3g}",
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
        f"{record['ranks']} ranks, {grid_of(per_node, nodes)}{limit}. Times of two operations, "
        "alone and at once. `hidden` is 1 if the shorter operation adds no time, and 0 if one "
        "operation waits for the other. Two rings of one node share its links.\n\n"
        + _table(["", "first", "second", "both", "hidden"], rows)
    )
