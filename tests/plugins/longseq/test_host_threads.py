"""Host memory that several threads share: no thread discards data that another one waits for."""

import threading

import pytest
import torch

import megatron_burst as mb

ROUNDS, THREADS = 25, 4


@pytest.mark.parametrize("strict", [False, True])
def test_threads_that_share_a_host(strict):
    """Each thread runs three checkpoints; frames of several threads are interleaved."""
    host = mb.HostMemory(1 << 26, strict=strict, device="cpu", rate=2e8)
    wrong: list[object] = []

    def run(layer: torch.nn.Module, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(ROUNDS):
            x = torch.randn(1000 + seed, 8, generator=draw, dtype=torch.float64)
            found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
            y = z = None
            for _ in range(3):
                y = mb.checkpoint(layer, found if y is None else y, offload=1.0, host=host)
                z = layer(expected if z is None else z)
            y.sum().backward(), z.sum().backward()
            if not torch.equal(found.grad, expected.grad):
                wrong.append((seed, (found.grad - expected.grad).abs().max()))

    def guarded(seed: int) -> None:
        layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        try:
            run(layer.double(), seed)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert wrong == []
    assert not any(each.is_alive() for each in threads)
    assert (host.used, host.frames) == (0, 0)
