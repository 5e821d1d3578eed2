"""`no_sync` itself: it refuses operations for which the host waits, and no others."""

import numpy as np
import pytest
import torch
from no_sync import HostSync, Launches, NoSync, pinning
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="fake CUDA tensors need a torch built with CUDA"
)
HOST = np.arange(6)
WAITS = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x[0, 0]),
    "if": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "cpu, asynchronously": lambda x: x.to("cpu", non_blocking=True),
    "numpy": lambda x: x.cpu().numpy(),
    "equal": lambda x: torch.equal(x, x + 1),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.index_put_((x > 0,), torch.ones((), device="cuda")),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x[0].repeat_interleave(x[0].long()),
    "index of the host": lambda x: x[torch.from_numpy(HOST)[:2]],
    "torch.tensor": lambda x: torch.tensor([1, 2], device="cuda"),
    "pageable": lambda x: torch.from_numpy(HOST).to("cuda", non_blocking=True),
    "pinned, waited for": lambda x: torch.from_numpy(HOST).pin_memory().to("cuda"),
    "into": lambda x: x[0].copy_(torch.ones(5), non_blocking=True),
}
GOES_ON = {
    "arithmetic": (lambda x: x * 2 + 1, 2),
    "views": (lambda x: x[1:].transpose(0, 1).unsqueeze(0), 0),
    "number of the host": (lambda x: x.mul_(torch.tensor(2.0)), 1),
    "index of the device": (lambda x: x[torch.arange(2, device="cuda")], 2),
    "pinned": (lambda x: torch.from_numpy(HOST).pin_memory().to("cuda", non_blocking=True), 1),
    "allocation": (lambda x: (torch.empty_like(x), x.new_empty(3)), 0),
    "another dtype": (lambda x: x.to(torch.bfloat16), 1),
    "work on the host": (lambda x: torch.from_numpy(HOST)[torch.from_numpy(HOST)] + 1, 0),
}


def fake():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("what", WAITS)
def test_what_the_host_waits_for_is_refused(what):
    with fake(), pinning():
        x = torch.ones(4, 5, device="cuda")
        with pytest.raises(HostSync), NoSync():
            WAITS[what](x)


@pytest.mark.parametrize("what", GOES_ON)
def test_the_rest_goes_on_and_is_counted(what):
    does, launches = GOES_ON[what]
    with fake(), pinning():
        x = torch.ones(4, 5, device="cuda")
        with Launches() as found, NoSync() as mode:
            does(x)
    assert found.total == launches, found.of
    assert mode.uploads == (what == "pinned")
