# SPDX-License-Identifier: Apache-2.0
"""Cluster files: what was measured of a cluster, as TOML that people can read and change.

`megatron-burst calibrate` writes one; `read` makes a `Cluster` of it. Decides the names, the units
and the order of the figures. Comments say how a figure was found and how far repeats differ; they
are for people, and a file without them means the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from .clusters import Cluster
from .gpus import GPUS, Gpu
from .host_time import HostTime
from .rates import Rates

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


class Figure(NamedTuple):
    """One key of the file. of: the class whose field it is; kind: its type; unit: with what it
    counts, for the comment.
    """

    key: str
    of: type
    field: str
    kind: type
    unit: str


# In the order of the file.
SECTIONS: Mapping[str, tuple[Figure, ...]] = {
    "cluster": (
        Figure("source", Cluster, "source", str, "where the figures come from"),
        Figure("gpus", Cluster, "gpus", int, "of all nodes"),
        Figure("per_node", Cluster, "per_node", int, "GPUs of a node"),
        Figure("spread", Cluster, "spread", float, "the largest of rates below"),
    ),
    "gpu": (
        Figure("name", Gpu, "name", str, ""),
        Figure("memory", Gpu, "memory", int, "bytes that torch reports"),
        Figure("reserve", Cluster, "reserve", int, "bytes that are not for tensors"),
        Figure("memory_rate", Gpu, "memory_rate", float, "bytes/s, read and written together"),
        Figure("peak", Gpu, "peak", float, "dense bf16 FLOP/s"),
        Figure("linear", Gpu, "linear", float, "of the peak, large matrix products"),
        Figure("small", Gpu, "small", float, "rows that double a product's time"),
        Figure("attention", Gpu, "attention", float, "of the peak, long attention calls, forward"),
        Figure("kernel", Gpu, "kernel", str, "whose rate `attention` is"),
        Figure("compute", Rates, "compute", float, "FLOP/s of long attention calls, forward"),
        Figure("launch", Rates, "launch", float, "seconds of an attention call without rows"),
        Figure("half_rows", Rates, "half_rows", float, "rows with half of `compute`"),
        Figure("adding", Rates, "adding", float, "bytes/s of adding results of attention calls"),
        Figure("backward", Rates, "backward", float, "time of a backward over that of a forward"),
        Figure("source", Gpu, "source", str, "of the figures that were not measured"),
    ),
    "links": (
        Figure("nvlink", Gpu, "nvlink", float, "bytes/s within a node, one way, published"),
        Figure("nics", Cluster, "nics", int, "of a node, shared evenly by its GPUs"),
        Figure("nic_of", Cluster, "nic_of", str, "who shares one: neighbours, or stride apart"),
        Figure("nic_rate", Cluster, "nic_rate", float, "bytes/s of one NIC, one way"),
        Figure("nic", Gpu, "nic", float, "bytes/s of a NIC of the vendor's node, one way"),
        Figure("intra", Rates, "intra", float, "bytes/s of a rank within its node, one way"),
        Figure("inter", Rates, "inter", float, "bytes/s of a rank alone on its NIC, one way"),
        Figure("nic_shared", Rates, "nic", float, "bytes/s of one NIC, several ranks at once"),
        Figure("latency", Rates, "latency", float, "seconds of a message besides its bytes"),
        Figure("posting", Rates, "posting", float, "seconds that starting an exchange takes"),
        Figure("exchange", Rates, "exchange", float, "of a link's rate, in an all-to-all"),
        Figure("exchange_start", Rates, "exchange_start", float, "seconds of it without bytes"),
        Figure("copying", Rates, "copying", float, "bytes/s of its tensors, cut up and joined"),
        Figure("handling", Rates, "handling", float, "seconds of a rank for each byte it sends"),
        Figure("start", Rates, "start", float, "seconds before a pass of a ring begins"),
        Figure("overlap", Cluster, "overlap", float, "of gradients' reduction, hidden at most"),
        Figure("slowdown", Rates, "slowdown", float, "of computing while links carry something"),
    ),
    "host": (
        Figure("memory", Cluster, "host_memory", int, "bytes of a node that may be taken"),
        Figure("rate", Cluster, "host_rate", float, "bytes/s of one GPU, one way, while all copy"),
        Figure("update", Cluster, "host_update", float, "bytes/s of an optimizer on the host"),
        Figure("link", Gpu, "host_link", float, "bytes/s of one GPU alone, one way"),
        Figure("call", HostTime, "call", float, "seconds of launching an attention call"),
        Figure("exchange", HostTime, "exchange", float, "seconds of starting an exchange"),
        Figure("start", HostTime, "start", float, "seconds of launching besides, of a pass"),
        Figure("layer", HostTime, "layer", float, "seconds of launching the rest of a layer"),
        Figure("plan", HostTime, "plan", float, "seconds of planning for a new pack of documents"),
    ),
}
_WORDS = {str: "a text", int: "a whole number", float: "a number"}


def read(path: str | Path) -> Cluster:
    """The cluster of a file. ValueError with all that is wrong in it, by section and key, or that
    it cannot be read.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    wrong = [*_unknown(found), *_unfit(found)]
    if not wrong:
        try:
            return made(found)
        except ValueError as error:
            wrong = [str(error)]
    raise ValueError(f"{path}: {'; '.join(wrong)}")


def write(cluster: Cluster, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
    """Write a cluster file, which `read` makes the same cluster of.

    notes: by "section.key", how the figure was found; goes into its comment.
    """
    Path(path).write_text(text(cluster, notes or {}), encoding="utf-8")


def text(cluster: Cluster, notes: Mapping[str, str]) -> str:
    """What `write` writes."""
    lines = ["# A cluster, for `megatron-burst advise --cluster`. Figures may be edited."]
    for section, figures in SECTIONS.items():
        lines += ["", f"[{section}]"]
        for figure in figures:
            value = _value(cluster, figure)
            if value is None:
                continue
            note = " ".join(notes.get(f"{section}.{figure.key}", "").split())
            note = "".join(letter for letter in note if letter.isprintable())
            comment = "; ".join(filter(None, [figure.unit, note]))
            end = f"  # {comment}" if comment else ""
            lines.append(f"{figure.key} = {_toml(value)}{end}")
    return "\n".join(lines) + "\n"


def made(found: Mapping[str, Mapping[str, Any]]) -> Cluster:
    """The cluster of these values, by section and key, in which no key is unknown and no type
    wrong.
    """
    given: dict[type, dict[str, Any]] = {Cluster: {}, Gpu: {}, Rates: {}, HostTime: {}}
    for section, figure in _figures():
        value = _at(found, section, figure.key)
        if value is not None:
            given[figure.of][figure.field] = figure.kind(value)
    known = GPUS.get(given[Gpu]["name"].lower())
    gpu = (
        Gpu(**given[Gpu]) if known is None else replace(known, **given[Gpu] | {"name": known.name})
    )
    rates = Rates(**given[Rates]) if given[Rates] else None
    return Cluster(gpu, **given[Cluster], rates=rates, host_time=HostTime(**given[HostTime]))


def _value(cluster: Cluster, figure: Figure) -> Any:
    holder = {Cluster: cluster, Gpu: cluster.gpu, Rates: cluster.rates,
              HostTime: cluster.host_time}[figure.of]  # fmt: skip
    return None if holder is None else getattr(holder, figure.field)


def _toml(value: str | float) -> str:
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str)
        else repr(value)
    )


def _unknown(found: Mapping[str, Any]) -> Iterator[str]:
    for section, values in found.items():
        if section not in SECTIONS or not isinstance(values, dict):
            yield f"[{section}] is unknown; sections: {', '.join(SECTIONS)}"
            continue
        keys = [figure.key for figure in SECTIONS[section]]
        for key in values:
            if key not in keys:
                yield f"{section}.{key} is unknown; keys of [{section}]: {', '.join(keys)}"


def _unfit(found: Mapping[str, Any]) -> Iterator[str]:
    """Values of a wrong type, and keys that are needed and missing."""
    named = str(_at(found, "gpu", "name")).lower() in GPUS
    measured = any(_at(found, s, f.key) is not None for s, f in _figures() if f.of is Rates)
    for section, figure in _figures():
        value, where = _at(found, section, figure.key), f"{section}.{figure.key}"
        if value is None:
            if _needed(figure, named, measured):
                of_gpu = figure.of is Gpu and figure.key != "name"
                reason = ", which an unknown GPU needs" if of_gpu else ""
                yield f"{where} is missing{reason}"
        elif not _is(value, figure.kind):
            yield f"{where} must be {_WORDS[figure.kind]}, got {value!r}"


def _needed(figure: Figure, named: bool, measured: bool) -> bool:
    """Whether a file cannot be without a figure: not where there is a default, or the GPU is one of
    the table, and rates only where any are stated.
    """
    field = next(field for field in fields(figure.of) if field.name == figure.field)
    if field.default is not MISSING:
        return False
    if figure.of is Gpu:
        return not named or figure.field == "name"
    return measured or figure.of is Cluster


def _figures() -> Iterator[tuple[str, Figure]]:
    return ((section, figure) for section, figures in SECTIONS.items() for figure in figures)


def _at(found: Mapping[str, Any], section: str, key: str) -> Any:
    values = found.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind
