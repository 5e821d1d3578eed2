"""Diffusion models of Megatron-Bridge over ranks have the losses and gradients of one rank."""

import pytest

PAIRS = [
    ("llada zigzag", "llada whole"),
    ("llada striped", "llada whole"),
    ("llada contiguous", "llada whole"),
    ("llada packed zigzag", "llada packed whole"),
    ("llada packed balanced", "llada packed whole"),
    ("nemotron zigzag", "nemotron whole"),
    ("nemotron striped", "nemotron whole"),
    ("nemotron recomputed", "nemotron whole"),
    ("wan one rank", "wan whole"),
    ("wan zigzag", "wan whole"),
    ("wan balanced", "wan whole"),
    ("wan striped", "wan whole"),
    ("wan contiguous", "wan whole"),
    ("wan recomputed", "wan whole"),
    ("wan tensor", "wan tensor whole"),
    ("flux zigzag", "flux whole"),
    ("flux contiguous", "flux whole"),
    ("flux tensor striped", "flux tensor whole"),
]


@pytest.mark.parametrize(("run", "reference"), PAIRS)
def test_over_ranks_equals_one_rank(result, run, reference):
    (loss, norms), (whole, expected) = result(run), result(reference)
    assert loss == pytest.approx(whole, rel=1e-6)
    assert norms == pytest.approx(expected, rel=2e-6)
    assert min(expected.values()) > 0


FAMILIES = {
    "llada": "LLaDA15ModelProvider",
    "nemotron": "NemotronLabsDiffusionModelProvider",
    "wan": "WanModelProvider",
    "flux": "FluxProvider",
}


@pytest.mark.parametrize(("family", "provider"), FAMILIES.items())
def test_options_that_change_the_mask_or_the_rows_are_refused(result, family, provider):
    found = result("checks")
    assert f"attention_layout zigzag was not tested with {provider}" in found[f"{family} options"]
    assert f"with {provider}, which has its own mask; remove mask" in found[f"{family} mask"]


@pytest.mark.parametrize("family", ["nemotron", "wan", "flux"])
def test_steps_that_compute_their_loss_use_no_fused_head(result, family):
    found, provider = result("checks"), FAMILIES[family]
    words = f"lm_head_loss single_pass does not work with {provider}, whose training step"
    assert words in found[f"{family} head"]


@pytest.mark.parametrize("family", ["nemotron", "wan", "flux"])
def test_pipeline_stages_are_refused(result, family):
    found, provider = result("checks")[f"{family} stages"], FAMILIES[family]
    assert f"model.pipeline_model_parallel_size 2 with {provider}: " in found
    assert "add model.pipeline_model_parallel_size=1" in found


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("nemotron", "sequence_chunks"),
        *(
            (family, option)
            for family in ("wan", "flux")
            for option in ("sequence_chunks", "mlp_tiles", "offload")
        ),
        ("flux", "store"),
    ],
)
def test_options_of_layers_that_differ_are_refused(result, family, option):
    found = result("checks")[f"{family} {option}"]
    value = 0.5 if option in ("offload", "store") else 2
    assert f"{option} {value} does not work with {FAMILIES[family]}, whose" in found
    assert f"remove {option}" in found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wan noise", "clips of Wan: context-parallel ranks have different values"),
        ("flux noise", "img, timesteps of Flux: context-parallel ranks have different values"),
        ("nemotron noise", "masked, probability of Nemotron Labs Diffusion: context-parallel"),
        ("packed", "rank 1: packed_seq_params: NemotronLabsDiffusionAttention does not support"),
        ("rows", "rank 1: cu_seqlens: zigzag within documents needs multiples of 4 positions"),
        ("boundaries", "rank 1: packed_seq_params is None: cross-attention requires"),
        ("texts", "rank 1: key has 4 rows, and the texts have 5: every rank must hold all texts"),
    ],
)
def test_wrong_inputs_of_one_rank_raise_on_all_ranks(result, name, words):
    first, second = result("errors")[name]
    assert words in first
    assert second == first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nemotron options", "layout contiguous with NemotronLabsDiffusionModelProvider: each"),
        ("nemotron balanced", "layout balanced with NemotronLabsDiffusionModelProvider: each"),
        ("nemotron mean", "calculate_per_token_loss=False with NemotronLabsDiffusion"),
        ("wan mean", "calculate_per_token_loss=False with WanModelProvider: ranks have different"),
        ("wan cpu", "--cpu with WanModelProvider: layers of diffusion models require Transformer"),
        ("wan layers", "model.transformer_layer_spec of WanModelProvider has no cross_attention"),
        ("flux balanced", "requires packed documents, which FluxProvider"),
        ("wan format", "qkv_format=sbhd with WanModelProvider: set model.qkv_format=thd"),
        ("llada causal", "has no LLaDA15TEDotProductAttention, so the model would be causal"),
        ("llada step", "Bridge has no forward step for LLaDA15ModelProvider"),
        ("llada inference", "LLaDA 1.5 does not generate text over context-parallel ranks"),
        ("nemotron inference", "Nemotron Labs Diffusion does not generate text over context"),
        ("control", "controlnet_single_block_samples is not supported over context-parallel"),
        ("unknown", "OwnProvider is a diffusion model that apply_burst does not support"),
        ("version", "thd_split_inputs_cp has no parameter cp_group, cu_seqlens_q_padded"),
        ("missing", "has no WanFlowMatchingPipeline.step. Use Megatron-Bridge 0.6.2"),
        ("name", "NAME wan_9b_pretrain_config is unknown"),
    ],
)
def test_what_is_refused(result, name, words):
    assert words in result("checks")[name]


def test_the_launcher_knows_recipes_and_forward_steps(result):
    found = result("checks")
    assert found["recipe"] == ["WanModelProvider", 8, "WanForwardStep", "logit_normal", "uniform"]
    assert found["step"] == "DGPTStep"


def test_balanced_clips_are_not_padded(result):
    """Rows of the clip, its length, and its length with padding."""
    found = result("checks")
    assert found["padded clip"] == [16, 15, 16]
    assert found["clip"] == [15, 15, 15]


def test_the_example_of_the_documentation_runs(result):
    assert result("checks")["page"] == ["balanced", True, "WanForwardStep"]
