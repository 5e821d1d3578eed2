"""A checkpoint goes on under another context-parallel size, layout and optimizer sharding."""

import pytest
import session

TOLERANCE = 1e-5
RESUMED = {
    "one rank per sequence": "",
    "cp2 striped": "--context-parallel-size 2 --burst-layout striped",
    "ring": "--context-parallel-size 4 --context-parallel-algo ring",
    "tp2 cp2": "--tensor-model-parallel-size 2 --context-parallel-size 2",
}
FIRST = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"


@pytest.fixture(scope="module", params=["", "--use-distributed-optimizer"])
def saved(request, four, common, tmp_path_factory):
    """(flags of the optimizer, folder, steps of the whole run); saved after two steps."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    flags = f"{FIRST} {request.param} --save-interval 2 --save {folder}".split()
    return request.param, folder, four(session.train, [*common, *flags])[0]


@pytest.mark.parametrize("other", RESUMED)
def test_a_resumed_run_repeats_the_rest(four, common, saved, other):
    optimizer, folder, whole = saved
    flags = f"{RESUMED[other]} {optimizer} --load {folder} --ckpt-step 2".split()
    resumed = four(session.train, [*common, *flags])[0]
    assert resumed == [pytest.approx(step, rel=TOLERANCE) for step in whole[2:]]
