"""Our speeds at 8 to 64 GPUs on the packs of MagiAttention's benchmark, and their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import ours
from .documents import magi_packs
from .kernel import TOKENS, kernels
from .rivals import NODE, Constants

SHARES = (1, 2, 4, 8)
CHOSEN, CHOSEN_SHARED = "auto", "auto, GPUs may share heads"
STREAMS = ", relay stream"  # suffix of methods whose relays have their own stream


def simulated(
    ranks: int, causal: bool, fitted: Constants, packs: int
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Return speeds by method, and the mean parts of the passes.

    Speeds are TFLOP/s per GPU: mean, smallest and largest over packs. For each algorithm and pack,
    the better number of head chunks counts. Shared heads use `prefetch`.
    """
    speeds: dict[str, list[tuple[float, float]]] = {}
    parts = []
    for lengths in magi_packs(ranks * TOKENS)[:packs]:
        runs = dict(_of_pack(lengths, ranks, causal, fitted))
        for name, (pack, run) in runs.items():
            speeds.setdefault(name, []).append(run.speeds(pack))
        parts.append(_parts(lengths, *runs[CHOSEN]))
    rows = []
    for name, speeds_of_packs in speeds.items():
        forward, backward = np.array(speeds_of_packs).T
        rows.append({
            "causal": causal, "ranks": ranks, "name": name,
            "fwd": round(float(forward.mean()), 1), "bwd": round(float(backward.mean()), 1),
            "fwd_range": [round(float(forward.min())), round(float(forward.max()))],
            "bwd_range": [round(float(backward.min())), round(float(backward.max()))],
        })  # fmt: skip
    mean = {key: float(np.mean([part[key] for part in parts])) for key in parts[0]}
    return rows, [{"causal": causal, "ranks": ranks} | mean]


def _of_pack(
    lengths: np.ndarray, ranks: int, causal: bool, fitted: Constants
) -> Iterator[tuple[str, tuple[ours.Pack, ours.Run]]]:
    """Yield every method by its name."""
    pack = ours.documents(lengths, ranks, causal)
    alone = ours.runs(pack, fitted)
    for name in ours.TRIED:
        yield name, (pack, min((run for run in alone if run.algorithm == name), key=_seconds))
    over = {
        share: ours.documents(lengths, ranks // share, causal, min(ranks, NODE) // share)
        for share in SHARES[1:]
    }
    for streams in (False, True):
        suffix = STREAMS * streams
        tried = [(pack, run) for run in alone if run.algorithm in ours.AUTO]
        if streams:  # the other algorithms do not use the relay stream
            tried = [entry for entry in tried if entry[1].algorithm != "prefetch"]
            tried += [(pack, run) for run in ours.runs(pack, fitted, ("prefetch",), streams=True)]
        yield CHOSEN + suffix, min(tried, key=lambda entry: entry[1].expected)
        for share, shared_pack in over.items():
            (run,) = ours.runs(
                shared_pack, fitted, ("prefetch",), share=share, head_chunks=(1,), streams=streams
            )
            yield f"{share} GPUs share heads, prefetch{suffix}", (shared_pack, run)
            tried.append((shared_pack, run))
        yield CHOSEN_SHARED + suffix, min(tried, key=lambda entry: entry[1].expected)


def _seconds(run: ours.Run) -> float:
    return run.forward.seconds + run.backward.seconds


def _parts(lengths: np.ndarray, pack: ours.Pack, run: ours.Run) -> dict[str, float]:
    """Return milliseconds of the parts of `auto`'s run.

    Parts are the kernel on whole documents, and the extra time of smaller pieces, of adding partial
    results, of the busiest rank compared with the mean, and of all else.
    """
    bare_work, full_work = ours.work(pack, 0.0, run.calls), ours.work(pack, calls=run.calls)
    parts = {}
    for name, kernel, without, with_, total in zip(
        ("fwd", "bwd"), kernels("FA3"), bare_work.seconds, full_work.seconds,
        (run.forward, run.backward), strict=True,
    ):  # fmt: skip
        unsplit = float(kernel.own(lengths.astype(float), pack.causal).sum()) / pack.ranks
        mean, busiest = with_.sum() / pack.ranks, float(with_.sum(axis=1).max())
        seconds = {
            "kernel": unsplit,
            "pieces": without.sum() / pack.ranks - unsplit,
            "adding": mean - without.sum() / pack.ranks,
            "busiest": busiest - mean,
            "exposed": total.seconds - busiest,
        }
        parts |= {f"{name}_{key}": 1e3 * float(value) for key, value in seconds.items()}
    return parts
