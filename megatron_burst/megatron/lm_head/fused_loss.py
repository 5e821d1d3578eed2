# SPDX-License-Identifier: Apache-2.0
"""Megatron's LM head and loss as one operation: `--burst-lm-head-loss`.

With this option, the output layer of a model (GPTModel or HybridModel) returns `LazyLogits` instead
of logits if the forward has labels. `compute_language_model_loss` computes the loss from
`LazyLogits` without materializing the full logits; any other use computes the logits.

This module decides when logits are lazy and which loss mask belongs to which head. The module also
handles the gradient of a weight with `main_grad` as Megatron requires. `linear_cross_entropy`
computes the loss.

Shape letters: s tokens of this context-parallel rank, b batch, v vocabulary rows of this
tensor-parallel rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp

from ...linear_cross_entropy import describe, linear_cross_entropy
from .. import patching
from ..checks.features import LM_HEAD
from ..patching import HYBRID_SINCE, core_version, given_to
from ..selection import burst_of
from .mtp import head_masks

HeadMask = tuple[bool, torch.Tensor | None]  # (whether it is an MTP head, its loss mask)


def patch(patches: patching.PatchSet) -> None:
    """Wrap Megatron's output layer, loss and model forward, so that they can use the fused loss."""
    patches.wrap(LanguageModule, "setup_embeddings_and_output_layer", ["self"], _with_lazy_head)
    names = ["labels", "logits"]
    patches.wrap(LanguageModule, "compute_language_model_loss", names, _fusing)
    for model in _models():
        patches.wrap(model, "forward", ["labels", "loss_mask", "packed_seq_params"], _binding)
    # Newer versions count correct predictions of MTP heads from logits. `_counting` reads the
    # argmax that the fused loss has computed.
    name = "_compute_mtp_acceptance_counts"
    if hasattr(mtp, name):
        patches.wrap(mtp, name, ["mtp_logits", "mtp_labels", "loss_mask"], _counting)


def _models() -> tuple[type, ...]:
    """Return the model classes that support the fused loss; HybridModel needs 0.19 or newer."""
    home = "megatron.core.models.hybrid"
    if core_version() < HYBRID_SINCE or importlib.util.find_spec(home) is None:
        return (GPTModel,)
    return GPTModel, importlib.import_module(f"{home}.hybrid_model").HybridModel


def _with_lazy_head(original: Callable, self: Any) -> None:
    original(self)
    burst = burst_of(self.config)
    if burst is not None and burst.lm_head_loss != "off" and self.post_process:
        _check_model(self, burst.lm_head_loss)
        self.output_layer.forward = LazyHead(self.output_layer, burst.lm_head_loss)


def _check_model(model: Any, mode: str) -> None:
    layer = model.output_layer
    if not isinstance(model, _models()):
        names = " and ".join(supported.__name__ for supported in _models())
        raise patching.user_error(f"{LM_HEAD} {mode} supports {names}, not {type(model).__name__}")
    check_output(layer, f"{LM_HEAD} {mode}")
    if layer.gather_output:
        raise patching.user_error(
            f"{LM_HEAD} {mode} never gathers logits: build the model with parallel_output=True"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise patching.user_error(
            f"{LM_HEAD} {mode} requires whole rows of the weight on every rank: remove "
            "--tensor-parallel-num-weight-shards"
        )


def check_output(layer: Any, user: str) -> None:
    """Raise an error unless the layer's output is exactly the product of its input and weight.

    This is also checked in forward, because models of Bridge change the class of their output layer
    after construction.

    Args:
        layer: the output layer.
        user: the flag with its value, which begins the message.

    Raises:
        ValueError: The layer has another class or a bias.
    """
    kinds = type(layer).__mro__
    if kinds[0] is not ColumnParallelLinear or getattr(layer, "bias", None) is not None:
        until = kinds.index(ColumnParallelLinear) if ColumnParallelLinear in kinds else 1
        names = dict.fromkeys(cls.__name__ for cls in kinds[: max(until, 1)])
        raise patching.user_error(
            f"{user} requires an output layer that is a ColumnParallelLinear without bias, got "
            f"{' of '.join(names)}"
        )


def _binding(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model's forward. If there are labels, its output layer returns lazy logits."""
    head = getattr(getattr(self, "output_layer", None), "forward", None)
    arguments = given_to(original, (self, *args), kwargs)
    if not isinstance(head, LazyHead) or arguments.get("labels") is None:
        return original(self, *args, **kwargs)
    with head.bound(_masks(self, arguments)):
        return original(self, *args, **kwargs)


def _masks(model: Any, arguments: dict[str, Any]) -> Iterator[HeadMask]:
    """Yield (whether the head is an MTP head, loss mask [b, s]) for each head, MTP heads first.

    The i-th head of multi-token prediction predicts the i-th token after the next one, so its mask
    is shifted i times. This is a generator because a shift communicates: the shift for a head runs
    when Megatron computes the loss of that head.
    """
    mask = arguments.get("loss_mask")
    full_mask = torch.ones_like(arguments["labels"]) if mask is None else mask
    count, packed = model.config.mtp_num_layers or 0, arguments.get("packed_seq_params")
    if arguments.get("compute_mtp_loss") is False:  # after 0.20: the MTP heads do not run
        count = 0
    inputs = arguments.get("mtp_input_mask")
    inputs = None if inputs is None else inputs.to(full_mask.dtype)
    for shifted in head_masks(full_mask, count, model.pg_collection.cp, packed, inputs):
        yield True, shifted
    yield False, mask


class LazyHead:
    """Replacement for the `forward` of an output layer.

    Within the context `bound` it returns `LazyLogits`. Outside, or if the caller requests gathered
    logits, it calls the original forward.
    """

    def __init__(self, layer: Any, mode: str) -> None:
        self.layer, self.mode = layer, mode
        self._masks: Iterator[HeadMask] | None = None

    @contextmanager
    def bound(self, masks: Iterator[HeadMask]) -> Iterator[None]:
        """Make logits lazy inside the context. The loss of each head reads the next mask."""
        self._masks = masks
        try:
            yield
        finally:
            self._masks = None

    def __call__(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Any, None]:
        """Return (logits, None for the bias); the logits are lazy only inside `bound`."""
        if self._masks is None or runtime_gather_output or patching.installed("burst") is None:
            return type(self.layer).forward(self.layer, input_, weight, runtime_gather_output)
        check_output(self.layer, f"{LM_HEAD} {self.mode}")
        weight = self.layer.weight if weight is None else weight
        assert weight is not None
        if hasattr(weight, "__fsdp_param__"):
            raise patching.user_error(
                f"{LM_HEAD} {self.mode} requires whole weights: remove --use-megatron-fsdp"
            )
        return LazyLogits(self._forward, self._loss, input_, weight), None

    def _forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return type(self.layer).forward(self.layer, hidden, weight, False)[0]

    def _loss(self, logits: LazyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss [b, s] in float32 for labels [b, s]; not multiplied by the loss mask."""
        is_mtp, mask = (False, None) if self._masks is None else next(self._masks)
        layer, weight = self.layer, logits.weight
        choices = {
            "tp_group": layer.tp_group if layer.tp_group.size() > 1 else None,
            "sequence_parallel": layer.sequence_parallel,
            "mode": self.mode,
        }
        self._announce(describe(logits.hidden, weight, **choices))
        fused = layer.gradient_accumulation_fusion
        results = linear_cross_entropy(
            logits.hidden,
            weight,
            labels.transpose(0, 1).contiguous(),
            loss_mask=None if mask is None else mask.transpose(0, 1).contiguous(),
            logit_scale=logits.scale,
            return_argmax=is_mtp,  # to count the correct predictions of the MTP head
            sink=MainGrad(weight, fused) if hasattr(weight, "main_grad") else None,
            **choices,
        )
        loss, logits.argmax = results if isinstance(results, tuple) else (results, None)
        return loss.transpose(0, 1).contiguous()

    def _announce(self, line: str) -> None:
        patches = patching.installed("burst")
        if patches is not None and patches.run.lm_head_startup is None:
            patches.run.lm_head_startup = line
            if torch.distributed.get_rank() == 0:
                logging.getLogger("megatron_burst").info(line)


def _fusing(original: Callable, self: Any, labels: torch.Tensor, logits: Any) -> torch.Tensor:
    if isinstance(logits, LazyLogits):
        return logits.loss(logits, labels)
    return original(self, labels, logits)


def _counting(
    original: Callable,
    mtp_logits: Any,
    mtp_labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *args: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (correct predictions, unmasked tokens) without materializing the logits."""
    if not isinstance(mtp_logits, LazyLogits) or mtp_logits.argmax is None:
        return original(mtp_logits, mtp_labels, loss_mask, *args, **named)
    counted = loss_mask.bool()
    right = (mtp_logits.argmax.transpose(0, 1) == mtp_labels) & counted
    return right.sum().float(), counted.sum().float()


class LazyLogits:
    """Logits scale * hidden weight^T [s, b, v], computed only on use.

    Args:
        forward: function of (hidden, weight) that returns the logits.
        loss: function of (these `LazyLogits`, labels [b, s]) that returns the loss without
            materializing the logits.
        hidden: [s, b, h].
        weight: [v, h].
        scale: the factor of the logits.

    Attributes:
        argmax: The most likely vocabulary row of each token [s, b]; None until the loss of an MTP
            head was computed.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        loss: Callable[[LazyLogits, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        self.forward, self.loss = forward, loss
        self.hidden, self.weight, self.scale = hidden, weight, scale
        self.argmax: torch.Tensor | None = None

    def __mul__(self, factor: float) -> Any:
        if isinstance(factor, (int, float)):
            scale = self.scale * factor
            return LazyLogits(self.forward, self.loss, self.hidden, self.weight, scale)
        return self.materialise() * factor

    def materialise(self) -> torch.Tensor:
        """Compute and return the logits with the output layer's own forward."""
        logits = self.forward(self.hidden, self.weight)
        return logits if self.scale == 1.0 else logits * self.scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        def real(x: Any) -> Any:
            return x.materialise() if isinstance(x, LazyLogits) else x

        named = {name: real(x) for name, x in (kwargs or {}).items()}
        return function(*map(real, args), **named)


class MainGrad:
    """A weight whose gradient Megatron's data parallelism accumulates in `main_grad`.

    With gradient-accumulation fusion, `grad_added_to_main_grad` marks that `main_grad` already
    contains the gradient, as in Megatron's layers. Megatron then ignores autograd's gradient, or
    requires zeros if the weight has other uses (`zero_out_wgrad`). Without fusion Megatron adds
    autograd's gradient to `main_grad`, so autograd gets zeros.

    Args:
        weight: the parameter.
        fused: whether gradient-accumulation fusion is on.
    """

    def __init__(self, weight: Any, fused: bool) -> None:
        self.weight, self.fused = weight, fused and hasattr(weight, "grad_added_to_main_grad")

    def target(self) -> torch.Tensor:
        return self.weight.main_grad

    def done(self) -> torch.Tensor:
        """Return the gradient for autograd: never None, which overlapped reduction rejects."""
        weight = self.weight
        if not self.fused:
            return torch.zeros_like(weight)
        weight.grad_added_to_main_grad = True
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
