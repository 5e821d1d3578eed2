"""One figure of `lm_head.py`, in its own process: an LM head and loss, measured.

    python benchmarks/lm_head_case.py '{"name": "single_pass", "device": "cpu", ...}'

It makes the inputs, warms up with a small call, then measures one call of forward and backward:
wall time, processor time, and the additional peak of memory, minus the gradients of hidden and
weight and a float32 gradient of the weight (equal for float32).
"""

from __future__ import annotations

import json
import sys
import time


def eager(hidden, weight, labels, case):
    import torch.nn.functional as F

    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none").sum()


def megatron(hidden, weight, labels, case):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    one_rank(parallel_state)
    logits = (hidden @ weight.T)[:, None]
    return vocab_parallel_cross_entropy(logits, labels[:, None]).sum()


def megatron_native(hidden, weight, labels, case):
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    one_rank(parallel_state)
    logits, group = (hidden @ weight.T)[:, None], parallel_state.get_tensor_model_parallel_group()
    return fused_vocab_parallel_cross_entropy(logits, labels[:, None], group).sum()


def one_rank(parallel_state):
    import torch

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()


def torch_chunked(hidden, weight, labels, case):
    import torch
    import torch.nn.functional as F

    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=case.get("chunk"))
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def torch_chunked_1024(hidden, weight, labels, case):
    """Return torch's loss in pieces of 1024 rows, like our default tiles."""
    return torch_chunked(hidden, weight, labels, case | {"chunk": 1024})


def cut_cross_entropy(hidden, weight, labels, case):
    from cut_cross_entropy import linear_cross_entropy

    how = "cce_exact" if hidden.is_cuda else "torch_compile"
    return linear_cross_entropy(hidden, weight, labels, reduction="sum", impl=how)


def liger(hidden, weight, labels, case):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
    )[0]


def single_pass(hidden, weight, labels, case, mode="single_pass"):
    import megatron_burst as mb

    return mb.linear_cross_entropy(hidden, weight, labels, tile=case["tile"], mode=mode).sum()


def recompute(hidden, weight, labels, case):
    return single_pass(hidden, weight, labels, case, "recompute")


# --- log-probabilities and entropies, both with gradients ------------------------------------


def objective(logprobs, entropy):
    """Return a replacement for a policy loss: a weight for each token, and a bonus for entropy."""
    import torch

    weights = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device)
    return (weights * logprobs.flatten()).sum() + 0.01 * entropy.sum()


def linear_logprobs(hidden, weight, labels, case):
    import megatron_burst as mb

    output = mb.linear_logprobs(hidden, weight, labels, tile=case["tile"])
    return objective(output.logprobs, output.entropy)


def of_logits(hidden, weight, labels):
    """Return log-probabilities and entropies of all logits, by torch's operators."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def logprobs_eager(hidden, weight, labels, case):
    return objective(*of_logits(hidden, weight, labels))


def logprobs_checkpointed(hidden, weight, labels, case):
    """Return `of_logits` in checkpointed pieces of 1024 rows, like our default tiles."""
    import torch
    from torch.utils.checkpoint import checkpoint

    pieces = zip(hidden.split(1024), labels.split(1024), strict=True)
    piece_results = [checkpoint(of_logits, h, weight, y, use_reentrant=False) for h, y in pieces]
    return objective(*map(torch.cat, zip(*piece_results, strict=True)))


def verl_file(name):
    """Import one file of verl; the whole package would need all its training dependencies."""
    import importlib.util
    from pathlib import Path

    package = importlib.util.find_spec("verl")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("verl")
    path = Path(package.origin).with_name("utils") / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verl_torch(hidden, weight, labels, case):
    """Return verl's `impl_backend: torch`: pieces of 512 rows."""
    head = verl_file("experimental/torch_functional.py").FusedLinearForPPO()
    return objective(*head(hidden, weight, labels))


def liger_scaled(hidden, weight, labels, case):
    """Return Liger's head for verl's `impl_backend: liger`; a Hopper kernel if there is one."""
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
        hidden, weight, labels, 1.0, -100, 1, True
    )
    return objective(-nll, entropy)


def three_products(hidden, weight, labels, case):
    """Compute only the three matrix products, on our tiles: a lower bound for the time."""
    import torch

    rows = max(1, len(hidden) * len(weight) * hidden.element_size() // 2**30)
    rows = -(-len(hidden) // rows)
    z = hidden.new_empty(rows, len(weight))
    dh, dw = torch.empty_like(hidden), torch.zeros_like(weight)
    for h, grad in zip(hidden.detach().split(rows), dh.split(rows), strict=True):
        part = z[: len(h)]
        torch.mm(h, weight.detach().T, out=part)
        torch.mm(part, weight.detach(), out=grad)
        dw.addmm_(part.T, h)
    return None


def four_products(hidden, weight, labels, case):
    """Compute only the four matrix products of a step whose backward recomputes the logits."""
    import torch

    rows = max(1, 2**27 // (len(weight) * hidden.element_size()))
    z = hidden.new_empty(rows, len(weight))
    for h in hidden.detach().split(rows):
        torch.mm(h, weight.detach().T, out=z[: len(h)])
    del z
    three_products(hidden, weight, labels, case)


IMPLEMENTATIONS = {
    f.__name__: f
    for f in (
        single_pass, recompute, eager, megatron, megatron_native, torch_chunked,
        torch_chunked_1024, cut_cross_entropy, liger, three_products, linear_logprobs,
        logprobs_eager, logprobs_checkpointed, verl_torch, liger_scaled, four_products,
    )
}  # fmt: skip


def child(case: dict) -> dict:
    import torch

    torch.set_num_threads(case["threads"])
    run, dtype = IMPLEMENTATIONS[case["name"]], getattr(torch, case["dtype"])
    call(run, *inputs(64, 32, 128, dtype, case["device"]), case)
    leaves = inputs(case["tokens"], case["width"], case["vocabulary"], dtype, case["device"])
    before = peak_reset(case["device"])
    wall, cpu = time.perf_counter(), time.process_time()
    call(run, *leaves, case)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    hidden, weight, _ = leaves
    expected = (hidden.numel() + weight.numel()) * dtype.itemsize
    expected += 0 if dtype == torch.float32 else 4 * weight.numel()
    extra = peak(case["device"]) - before - expected
    return {"wall": wall, "cpu": cpu, "extra": extra, "itemsize": dtype.itemsize}


def inputs(n, d, v, dtype, device):
    import torch

    make = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, d, generator=make, device=device, dtype=dtype)
    weight = torch.empty(v, d, device=device, dtype=dtype).normal_(0, 0.02, generator=make)
    labels = torch.randint(0, v, (n,), generator=make, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def call(run, hidden, weight, labels, case):
    loss = run(hidden, weight, labels, case)
    if loss is not None:
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
    if hidden.is_cuda:
        import torch

        torch.cuda.synchronize()


def peak_reset(device: str) -> int:
    """Reset the peak and return bytes in use."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def peak(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]))))
