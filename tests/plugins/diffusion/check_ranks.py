"""What recipes of diffusion models choose and refuse, in one process with Bridge's classes."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import documented
import flux_ranks
import llada_ranks
import nemotron_ranks
import torch
import wan_ranks

FAMILIES = {
    "llada": llada_ranks, "nemotron": nemotron_ranks, "wan": wan_ranks, "flux": flux_ranks,
}  # fmt: skip


def refused(function, *args, **named):
    """Return the message of the `ValueError` that the call raises."""
    try:
        function(*args, **named)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def checked(family, changes=(), **choices):
    """Check a recipe of the tiny model at context-parallel size 2, as Bridge does."""
    from megatron_burst.recipes import apply_burst, validate

    model = FAMILIES[family].provider(2, **dict(changes))
    validate.check(apply_burst(SimpleNamespace(model=model, dist=None), **choices))


def clip():
    """Return the lengths of a clip of 15 tokens in Bridge's data set, at two ranks."""
    from megatron.bridge.diffusion.data.wan import wan_taskencoder
    from megatron.core import parallel_state
    from megatron.energon.task_encoder import base

    sample = {
        "pth": torch.randn(4, 1, 10, 6), "pickle": torch.randn(7, 16), "json": {},
        "__key__": "a", "__restore_key__": (), "__subflavors__": {},
    }  # fmt: skip
    encoder = wan_taskencoder.WanTaskEncoder(
        patch_spatial=2, patch_temporal=1, seq_length=64, packing_buffer_size=1
    )
    two = mock.Mock(return_value=2)
    worker = mock.patch.object(base.WorkerConfig, "active_worker_config", create=True)
    with (
        worker as config,
        mock.patch.object(parallel_state, "get_context_parallel_world_size", two),
    ):
        config.worker_seed.return_value = 3
        encoded = encoder.encode_sample(sample)
    return [len(encoded.video), int(encoded.seq_len_q), int(encoded.seq_len_q_padded)]


def example():
    """Run the example of the documentation, and return the arguments of Bridge's `pretrain`."""
    calls = []
    pretrain = SimpleNamespace(pretrain=lambda *arguments: calls.append(arguments))
    (block,) = documented.blocks("docs/diffusion.md")
    with mock.patch.dict("sys.modules", {"megatron.bridge.training.pretrain": pretrain}):
        exec(compile(block.text, block.name, "exec"), {})
    ((recipe, step),) = calls
    layout = recipe.model.transformer_layer_spec.keywords["layout"]
    return [layout, recipe.model.calculate_per_token_loss, type(step).__name__]


def run(work):
    """Write texts and values by name."""
    from megatron.bridge.diffusion.models.flux import flux_model
    from megatron.bridge.diffusion.models.wan import wan_provider
    from megatron.bridge.diffusion.models.wan.flow_matching import flow_matching_pipeline_wan
    from megatron.bridge.models.gpt_provider import local_layer_spec

    from megatron_burst import megatron as burst
    from megatron_burst.cli.recipe import _forward_step
    from megatron_burst.config import BurstConfig
    from megatron_burst.plugins.diffusion import flux, llada, nemotron, wan
    from megatron_burst.plugins.testing import recipes
    from megatron_burst.recipes import apply_burst, ready_made, validate

    found = {}
    for family in FAMILIES:
        checked(family)  # raises nothing
        found[f"{family} options"] = refused(
            checked, family, layout="contiguous", attention_layout="zigzag"
        )
        found[f"{family} mask"] = refused(
            checked, family, mask="megatron_burst.plugins.vision.images:gemma3"
        )
    for family in ("nemotron", "wan", "flux"):
        found[f"{family} head"] = refused(checked, family, lm_head_loss="single_pass")
        found[f"{family} stages"] = refused(
            checked, family, {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
        )
        found[f"{family} sequence_chunks"] = refused(checked, family, sequence_chunks=2)
    for family in ("wan", "flux"):
        for option, value in {"mlp_tiles": 2, "offload": 0.5}.items():
            found[f"{family} {option}"] = refused(checked, family, **{option: value})
    found["flux store"] = refused(checked, "flux", store=0.5)
    for family in ("nemotron", "flux"):
        balanced = refused(checked, family, {}, layout="balanced")
        found[f"{family} balanced"] = balanced
    for family in ("nemotron", "wan"):
        found[f"{family} mean"] = refused(checked, family, {"calculate_per_token_loss": False})
    found["wan cpu"] = refused(recipes.adapt, SimpleNamespace(model=wan_ranks.provider(2)))
    found["wan format"] = refused(checked, "wan", {"qkv_format": "sbhd"})
    causal = llada_ranks.provider(2, transformer_layer_spec=local_layer_spec)
    found["llada causal"] = refused(llada.with_attention, causal, local_layer_spec(causal))
    found["llada step"] = refused(llada.forward_step, SimpleNamespace(model=causal))
    clips = wan_ranks.provider(2)
    clips.burst = BurstConfig()
    found["wan layers"] = refused(wan.with_attention, clips, local_layer_spec(causal))

    own = type("OwnProvider", (), {"__module__": "megatron.bridge.diffusion.models.own"})()
    found["unknown"] = refused(apply_burst, SimpleNamespace(model=own))
    with mock.patch.object(flow_matching_pipeline_wan, "thd_split_inputs_cp", lambda x: x):
        found["version"] = refused(apply_burst, SimpleNamespace(model=wan_ranks.provider(2)))
    with mock.patch.object(flow_matching_pipeline_wan.WanFlowMatchingPipeline, "step", None):
        found["missing"] = refused(apply_burst, SimpleNamespace(model=wan_ranks.provider(2)))

    recipe = ready_made.find("wan_1_3b_pretrain_config")()
    recipe.model.calculate_per_token_loss = True
    validate.check(recipe)
    step, recipe.checkpoint.pretrained_checkpoint = _forward_step(recipe), "a folder"
    found["recipe"] = [
        type(recipe.model).__name__, recipe.model.context_parallel_size, type(step).__name__,
        step.timestep_sampling, _forward_step(recipe).timestep_sampling,
    ]  # fmt: skip
    model = SimpleNamespace(
        model=nemotron_ranks.provider(2), cfg=None, __class__=wan_provider.WanModelProvider
    )
    found["step"] = type(_forward_step(model)).__name__
    found["name"] = refused(ready_made.find, "wan_9b_pretrain_config")

    found["page"] = example()
    prompts = torch.ones(1, 4, dtype=torch.bool)
    found["llada inference"] = refused(
        llada.BidirectionalCoreAttention.set_padding_mask, None, prompts
    )
    found["nemotron inference"] = refused(
        nemotron.BlockDiffusionCoreAttention.set_inference_mode, None, True
    )
    with mock.patch.object(flux.bridge, "uses_burst_attention", return_value=True):
        found["control"] = refused(
            flux._cut, flux_model.Flux.forward, SimpleNamespace(config=None), prompts,
            controlnet_single_block_samples=[prompts],
        )  # fmt: skip
    wan.patch_bridge()
    nemotron.patch_bridge()
    found["padded clip"] = clip()
    burst.install(layout="balanced")
    found["clip"] = clip()
    Path(work["output"]).write_text(json.dumps(found))
