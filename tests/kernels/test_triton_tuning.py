"""The benchmark of block sizes: wrong or too large blocks have no time, the fastest an entry."""

import importlib.util

import interpreted
import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_blocks_are_timed_and_the_fastest_becomes_an_entry():
    found = interpreted.run("triton_tuning.py", timeout=300)
    small, wrong, large = (
        f"BlockSizes(rows={r}, columns={c}, warps=4, stages=1)"
        for r, c in ((32, 32), (32, 64), (64, 64))
    )
    for record, direction in zip(found["records"], ("forward", "backward"), strict=True):
        times = {run["who"]: sorted(run["seconds"]) for run in record["runs"]}
        assert small in times
        assert not {wrong, large} & set(times)
        assert "is off by" in record["failed"][wrong]
        assert record["refused"][large] == "shared memory"
        best = min(times, key=lambda who: times[who][len(times[who]) // 2])
        assert record["entry"] == f'(0, "{direction}", 16): {best},'
        assert {run["pass"] for run in record["runs"]} == {direction}
        assert f"    {record['entry']}" in found["text"]
