"""How much of the package `prepare` runs in a plain call, and what the call does not import.

Counted in fresh processes for a default call on a CPU: functions and files that `prepare` runs, and
those of them that have a `side`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_burst as mb

FUNCTIONS, PREPARE_FILES = 274, 38

COUNTED = """
import json, sys
import torch
import torch.distributed as dist
import megatron_burst as mb

root = mb.__file__.rpartition("/")[0]
ran = {}


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and code.co_name[0] != "<":
        names = {*code.co_varnames, *code.co_freevars, *code.co_names}
        ran[code.co_filename, code.co_firstlineno] = code.co_name, "side" in names


rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
grids = [mb.Groups.from_topology(dist.group.WORLD, intra=2) for _ in range(2)]
q = torch.randn(8, 1, 2, 4, requires_grad=True)
mb.prepare(q, q, q, groups=grids[0])  # imports
sys.setprofile(note)
plan = mb.prepare(q, q, q, groups=grids[1])
sys.setprofile(None)
mb.attention(q, q, q, plan=plan).sum().backward()
modules = [m for name, m in sys.modules.items() if name.startswith("megatron_burst")]
sides = [file for (file, _), (_, side) in ran.items() if side]
print(json.dumps({
    "modules": sorted(module.__name__ for module in modules),
    "prepare": [len(ran), len({file for file, _ in ran})],
    "side": [len(sides), len(set(sides))],
    "files": [*dict.fromkeys(file.removeprefix(root + "/") for file, _ in ran)],
    "ran": sorted(name for name, _ in ran.values()),
}))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What rank 0 of two nodes of two ranks counted."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    ranks = [
        subprocess.Popen([sys.executable, "-c", COUNTED, str(rank), str(store)],
                         stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    return json.loads(printed[0])


def test_what_only_auto_needs_is_not_imported(counted):
    """The simulator, measuring, and the kernels, masks and algorithms that nothing asked for."""
    imported = {name.partition(".")[2] for name in counted["modules"]}
    rooms = {"masks", "kernels", "schedule.algorithms", "recompute"}
    assert rooms <= imported
    others = {
        "autotune.simulator", "autotune.measure", "autotune.select", "planning.automatic",
        "kernels.triton_kernel", "kernels.flash", "kernels.reference", "plugins",
        "schedule.algorithms.tile", "schedule.algorithms.multicast",
    }  # fmt: skip
    assert not imported & others


def test_prepare_runs_few_functions_in_few_files(counted):
    functions, files = counted["prepare"]
    assert {"prepare", "demands", "schedules", "programs", "make_pass"} <= set(counted["ran"])
    assert functions <= FUNCTIONS
    assert files <= PREPARE_FILES


def test_contributing_lists_the_files_that_make_a_plan_from_the_top(counted):
    page = (Path(mb.__file__).parents[1] / "CONTRIBUTING.md").read_text()
    section = page.split("### Where the plan is made\n")[1].split("\n##")[0]
    listed = re.findall(r"`(\w+/[\w/]+\.py)`", section)
    ran = counted["files"]
    assert {file for file in ran if file.startswith("planning/")} <= {*listed}
    assert [file for file in listed if file in ran] == [file for file in ran if file in listed]
    declarations = {"kernels/base.py", "execution/rank_plan.py"}  # without functions that run
    assert {*listed} - {*ran} == {"planning/automatic.py", *declarations}


def test_side_passes_few_functions(counted):
    functions, files = counted["side"]
    assert 5 <= functions <= 25
    assert 3 <= files <= 8
