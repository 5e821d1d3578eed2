"""How far it is from `mb.attention` to the kernel, on real ranks: functions, files, frames.

A call with a ready plan is traced on two gloo ranks. What counts is a function of the package that
runs, whatever it is called for; comprehensions and generator expressions belong to the function
they stand in. CONTRIBUTING lists the files of this path, in the order in which they first run.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_burst as mb

ROOT = Path(mb.__file__).parent
FUNCTIONS, FILES, FRAMES = 60, 14, 8
WITHIN = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


class Trace:
    """What ran: functions in the order of their first call, and the frames above the kernel."""

    def __init__(self):
        self.functions, self.to_kernel = {}, []

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not _ours(code) or code.co_name in WITHIN:
            return
        name = str(Path(code.co_filename).relative_to(ROOT))
        self.functions.setdefault((name, code.co_qualname), None)
        in_kernel = name.startswith("kernels/") and code.co_name in ("forward", "backward")
        if in_kernel and not self.to_kernel:
            while frame is not None:
                if _ours(frame.f_code) and frame.f_code.co_name not in WITHIN:
                    self.to_kernel.append(frame.f_code.co_qualname)
                frame = frame.f_back

    @property
    def found(self):
        files = list(dict.fromkeys(name for name, _ in self.functions))
        return list(self.functions), files, self.to_kernel[::-1]


def _ours(code):
    return code.co_filename.startswith(str(ROOT))


def traced(function, *args, **keywords):
    """(functions, files, frames to the kernel) of a call."""
    path = Trace()
    sys.setprofile(path)
    try:
        result = function(*args, **keywords)
    finally:
        sys.setprofile(None)
    return result, path.found


def called():
    """On a rank: (forward, backward) of a call with a ready plan that is not its first."""
    groups = mb.Groups.flat(dist.group.WORLD)
    q, k, v = (torch.randn(16, 1, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plan = mb.prepare(q, k, v, groups=groups)
    mb.attention(q, k, v, plan=plan).sum().backward()
    out, forward = traced(mb.attention, q, k, v, plan=plan)
    _, backward = traced(out.sum().backward)
    return forward, backward


@pytest.fixture(scope="module")
def paths(ranks):
    """Of each rank: direction -> functions, files, frames."""
    each = ranks(2).run(called)
    return [dict(zip(("forward", "backward"), ways, strict=True)) for ways in each]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_corridor_is_short(paths, name, rank):
    functions, files, frames = paths[rank][name]
    words = "\n".join(f"{file}: {function}" for file, function in sorted(functions))
    assert ("kernels/aten.py", f"AtenKernel.{name}") in functions
    assert len(functions) <= FUNCTIONS, f"{len(functions)} functions in {len(files)} files\n{words}"
    assert len(files) <= FILES, f"{len(files)} files\n{words}"
    assert len(frames) <= FRAMES, frames
    assert frames[-1] == f"AtenKernel.{name}"


def test_the_way_to_read_is_the_way_that_runs(paths):
    """CONTRIBUTING lists every file that a call runs through, in the order of their first call."""
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    section = page.split("### What a call runs through\n")[1].split("\n##")[0]
    listed = re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)
    files = dict.fromkeys(file for name in ("forward", "backward") for file in paths[0][name][1])
    assert listed == list(files)
