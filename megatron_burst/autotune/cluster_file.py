# SPDX-License-Identifier: Apache-2.0
"""Cluster files: TOML files with the measured values of a cluster.

`megatron-burst calibrate` writes a file, and `read` makes a `Cluster` from it. This module defines
the names, units and order of the values. Comments in the file state how a value was measured and
how much repeats vary; `read` ignores them.
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


class FileKey(NamedTuple):
    """One key of a cluster file.

    Attributes:
        key: Name of the key.
        of: Class that stores the value, such as `Cluster` or `Gpu`.
        field: Name of the class's field with the value.
        kind: Type of the value.
        unit: Unit or meaning of the value, for the comment.
    """

    key: str
    of: type
    field: str
    kind: type
    unit: str


# In the order of the file.
SECTIONS: Mapping[str, tuple[FileKey, ...]] = {
    "cluster": (
        FileKey("source", Cluster, "source", str, "origin of the values"),
        FileKey("gpus", Cluster, "gpus", int, "GPUs of all nodes"),
        FileKey("per_node", Cluster, "per_node", int, "GPUs of a node"),
        FileKey("spread", Cluster, "spread", float, "largest spread of the rates below"),
    ),
    "gpu": (
        FileKey("name", Gpu, "name", str, ""),
        FileKey("memory", Gpu, "memory", int, "bytes that torch reports"),
        FileKey("reserve", Cluster, "reserve", int, "bytes that tensors cannot use"),
        FileKey("memory_rate", Gpu, "memory_rate", float, "bytes/s, read and written together"),
        FileKey("peak", Gpu, "peak", float, "dense bf16 FLOP/s"),
        FileKey("linear", Gpu, "linear", float, "fraction of the peak, matrix products"),
        FileKey("small", Gpu, "small", float, "rows at which a product has half its rate"),
        FileKey("attention", Gpu, "attention", float, "fraction of the peak, long forward calls"),
        FileKey("kernel", Gpu, "kernel", str, "kernel of the rate `attention`"),
        FileKey("compute", Rates, "compute", float, "FLOP/s of long attention calls, forward"),
        FileKey("launch", Rates, "launch", float, "seconds of an attention call with few rows"),
        FileKey("half_rows", Rates, "half_rows", float, "rows that reach half of `compute`"),
        FileKey("adding", Rates, "adding", float, "bytes/s of adding attention results"),
        FileKey(
            "backward",
            Rates,
            "backward",
            float,
            "time of a backward divided by the time of a forward",
        ),
        FileKey("source", Gpu, "source", str, "origin of the values that are not measured"),
    ),
    "links": (
        FileKey("nvlink", Gpu, "nvlink", float, "bytes/s within a node, one way, published"),
        FileKey("nics", Cluster, "nics", int, "NICs of a node, shared evenly by its GPUs"),
        FileKey("nic_of", Cluster, "nic_of", str, "GPUs that share a NIC: neighbours or stride"),
        FileKey("nic_rate", Cluster, "nic_rate", float, "bytes/s of one NIC, one way"),
        FileKey("nic", Gpu, "nic", float, "bytes/s of a NIC of the vendor's node, one way"),
        FileKey("intra", Rates, "intra", float, "bytes/s of a rank within its node, one way"),
        FileKey("inter", Rates, "inter", float, "bytes/s of a rank alone on its NIC, one way"),
        FileKey("nic_shared", Rates, "nic", float, "bytes/s of one NIC, several ranks at once"),
        FileKey("latency", Rates, "latency", float, "seconds per message, without its bytes"),
        FileKey("posting", Rates, "posting", float, "seconds to start an exchange"),
        FileKey("exchange", Rates, "exchange", float, "fraction of a link's rate, all-to-all"),
        FileKey("exchange_start", Rates, "exchange_start", float, "seconds per all-to-all"),
        FileKey("copying", Rates, "copying", float, "bytes/s of splitting and joining tensors"),
        FileKey("handling", Rates, "handling", float, "seconds per byte sent, without computing"),
        FileKey("start", Rates, "start", float, "seconds before a pass of a ring begins"),
        FileKey("overlap", Cluster, "overlap", float, "fraction of gradient reduction in overlap"),
        FileKey("slowdown", Rates, "slowdown", float, "fraction by which busy links slow compute"),
    ),
    "host": (
        FileKey("memory", Cluster, "host_memory", int, "bytes of a node that may be used"),
        FileKey("rate", Cluster, "host_rate", float, "bytes/s of one GPU, one way, while all copy"),
        FileKey("update", Cluster, "host_update", float, "bytes/s of an optimizer on the host"),
        FileKey("link", Gpu, "host_link", float, "bytes/s of one GPU alone, one way"),
        FileKey("call", HostTime, "call", float, "seconds to launch an attention call"),
        FileKey("exchange", HostTime, "exchange", float, "seconds to start an exchange"),
        FileKey("start", HostTime, "start", float, "other host seconds of a pass"),
        FileKey("layer", HostTime, "layer", float, "host seconds of the rest of a layer"),
        FileKey("plan", HostTime, "plan", float, "seconds to plan for a new pack of documents"),
    ),
}
_WORDS = {str: "a string", int: "an integer", float: "a number"}


def read(path: str | Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        ValueError: The file cannot be read, or it has errors. The message lists all errors by
            section and key.
    """
    try:
        sections = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    errors = [*_unknown(sections), *_unfit(sections)]
    if not errors:
        try:
            return made(sections)
        except ValueError as error:
            errors = [str(error)]
    raise ValueError(f"{path}: {'; '.join(errors)}")


def write(cluster: Cluster, path: str | Path, notes: Mapping[str, str] | None = None) -> None:
    """Write a file from which `read` returns the same cluster.

    Args:
        cluster: The cluster.
        path: Path of the file.
        notes: Comments on how values were measured, by "section.key".
    """
    Path(path).write_text(text(cluster, notes or {}), encoding="utf-8")


def text(cluster: Cluster, notes: Mapping[str, str]) -> str:
    """Return the contents of the file that `write` makes."""
    lines = ["# A cluster, for `megatron-burst advise --cluster`. Figures may be edited."]
    for section, keys in SECTIONS.items():
        lines += ["", f"[{section}]"]
        for key in keys:
            value = _value(cluster, key)
            if value is None:
                continue
            note = " ".join(notes.get(f"{section}.{key.key}", "").split())
            note = "".join(letter for letter in note if letter.isprintable())
            comment = "; ".join(filter(None, [key.unit, note]))
            end = f"  # {comment}" if comment else ""
            lines.append(f"{key.key} = {_toml(value)}{end}")
    return "\n".join(lines) + "\n"


def made(sections: Mapping[str, Mapping[str, Any]]) -> Cluster:
    """Return the cluster with these values.

    Args:
        sections: Values by section and key. Keys and types were already checked.
    """
    arguments: dict[type, dict[str, Any]] = {Cluster: {}, Gpu: {}, Rates: {}, HostTime: {}}
    for section, key in _figures():
        value = _at(sections, section, key.key)
        if value is not None:
            arguments[key.of][key.field] = key.kind(value)
    entry = GPUS.get(arguments[Gpu]["name"].lower())
    gpu = (
        Gpu(**arguments[Gpu])
        if entry is None
        else replace(entry, **arguments[Gpu] | {"name": entry.name})
    )
    rates = Rates(**arguments[Rates]) if arguments[Rates] else None
    return Cluster(
        gpu, **arguments[Cluster], rates=rates, host_time=HostTime(**arguments[HostTime])
    )


def _value(cluster: Cluster, key: FileKey) -> Any:
    holder = {Cluster: cluster, Gpu: cluster.gpu, Rates: cluster.rates,
              HostTime: cluster.host_time}[key.of]  # fmt: skip
    return None if holder is None else getattr(holder, key.field)


def _toml(value: str | float) -> str:
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str)
        else repr(value)
    )


def _unknown(sections: Mapping[str, Any]) -> Iterator[str]:
    for section, values in sections.items():
        if section not in SECTIONS or not isinstance(values, dict):
            yield f"[{section}] is unknown; sections: {', '.join(SECTIONS)}"
            continue
        keys = [key.key for key in SECTIONS[section]]
        for name in values:
            if name not in keys:
                yield f"{section}.{name} is unknown; keys of [{section}]: {', '.join(keys)}"


def _unfit(sections: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each missing key and each value of a wrong type."""
    named = str(_at(sections, "gpu", "name")).lower() in GPUS
    measured = any(
        _at(sections, section, key.key) is not None
        for section, key in _figures()
        if key.of is Rates
    )
    for section, key in _figures():
        value, name = _at(sections, section, key.key), f"{section}.{key.key}"
        if value is None:
            if _needed(key, named, measured):
                of_gpu = key.of is Gpu and key.key != "name"
                reason = "; a GPU without published figures requires it" if of_gpu else ""
                yield f"{name} is missing{reason}"
        elif not _is(value, key.kind):
            yield f"{name} must be {_WORDS[key.kind]}, got {value!r}"


def _needed(key: FileKey, named: bool, measured: bool) -> bool:
    """Return True if a cluster file must have this key.

    A key with a default is optional. The keys of a GPU in `GPUS` are optional, except its name.
    If the file states one rate, all rates are required.
    """
    field = next(field for field in fields(key.of) if field.name == key.field)
    if field.default is not MISSING:
        return False
    if key.of is Gpu:
        return not named or key.field == "name"
    return measured or key.of is Cluster


def _figures() -> Iterator[tuple[str, FileKey]]:
    return ((section, key) for section, keys in SECTIONS.items() for key in keys)


def _at(sections: Mapping[str, Any], section: str, key: str) -> Any:
    values = sections.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _is(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is kind
