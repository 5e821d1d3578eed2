"""Installation, configuration and removal of the patches, in this process and without ranks."""

import copy
import dataclasses
import inspect
import sys
import types

import pytest
from megatron.core import utils
from megatron.core.models.common.embeddings import (
    rope_utils,
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import (
    Attention,
    SelfAttention,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst import registry
from megatron_burst.kernels.flash_packages import PACKAGES
from megatron_burst.megatron import patching
from megatron_burst.megatron.data import other_cuts, rope
from megatron_burst.megatron.model_shape import layer_window, provider_window
from megatron_burst.megatron.patching import require_parameters
from megatron_burst.seam import SeamPlace, seam

PATCHED = [
    (Attention, "__init__"),
    (MultiLatentAttention, "__init__"),
    (utils, "get_batch_on_this_cp_rank"),
    (rope_utils, "_apply_rotary_pos_emb_thd"),
    (rope_utils, "get_pos_emb_on_this_cp_rank"),
    (rotary_pos_embedding, "get_pos_emb_on_this_cp_rank"),
    (yarn_rotary_pos_embedding, "get_pos_emb_on_this_cp_rank"),
]


@pytest.fixture(autouse=True)
def clean():
    burst.uninstall()
    yield
    burst.uninstall()


def state():
    return [inspect.getattr_static(owner, name) for owner, name in PATCHED]


def fail(*args):
    raise RuntimeError("broken")


def config(**changes):
    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    settings |= {"context_parallel_size": 4, "attention_dropout": 0.0}
    return TransformerConfig(**settings | changes)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_uninstall_restores_what_install_replaced(layout):
    before = state()
    burst.install(layout)
    installed = state()
    assert all(new != old for new, old in zip(installed[:4], before[:4], strict=True))
    assert (installed[4:] == before[4:]) == (layout == "zigzag")
    burst.install(layout)
    assert state() == installed
    assert burst.installed_layout() == layout
    assert burst.uninstall()
    assert state() == before
    assert not burst.uninstall()
    assert burst.installed_layout() is None


def test_a_run_has_one_layout():
    burst.install("striped")
    with pytest.raises(ValueError, match="one"):
        burst.install("zigzag")
    with pytest.raises(ValueError, match="--burst-layout zigzag"):
        burst.configure(config(), mb.BurstConfig(layout="zigzag"))


def test_an_unknown_layout_is_refused_before_anything_is_replaced():
    before = state()
    with pytest.raises(ValueError, match="--burst-layout"):
        burst.install("zagzig")
    assert state() == before


def test_configure_needs_install():
    with pytest.raises(ValueError, match="install"):
        burst.configure(config(), mb.BurstConfig())


def test_the_choice_survives_copies_of_the_config():
    burst.install()
    chosen = mb.BurstConfig(algorithm="ring")
    assert copy.deepcopy(burst.configure(config(), chosen)).burst == chosen


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0"),
        ({"window_size": (8, 2)}, "includes 2 tokens after the query"),
        ({"window_size": (-2, 0)}, "--window-size"),
        ({"softmax_type": "sharp"}, "--softmax-type"),
        ({"apply_query_key_layer_scaling": True}, "--apply-query-key-layer-scaling"),
        ({"hierarchical_context_parallel_sizes": [2, 3]}, "has the product 6"),
        ({"hierarchical_context_parallel_sizes": [2, 2, 1]}, "two"),
    ],
)
def test_configure_refuses_what_is_not_supported(changes, flag):
    burst.install()
    with pytest.raises(ValueError, match=flag):
        burst.configure(config(**changes), mb.BurstConfig())


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"algorithm": "hybrid"}, "requires --burst-ulysses-size"),
        ({"algorithm": "hybrid", "ulysses_size": 3}, "--burst-ulysses-size 3 must divide"),
        (
            {"algorithm": "ulysses", "ulysses_size": 2},
            "--burst-ulysses-size 2: --context-parallel-algo ulysses",
        ),
        ({"ulysses_size": 0}, "--burst-ulysses-size"),
        ({"placement": "sideways"}, "--burst-placement"),
        ({"store": 1.5}, "--burst-attention-store"),
        ({"wire_dtype": "fp8"}, "--burst-wire-dtype"),
    ],
)
def test_choices_that_cannot_be_are_refused(choice, message):
    burst.install()
    with pytest.raises(ValueError, match=message):
        burst.configure(config(), mb.BurstConfig(**choice))


def test_a_kernel_of_cuda_is_refused_without_it():
    burst.install("zigzag")
    with pytest.raises(ValueError, match=r"^--burst-kernel aten_cudnn .*add --burst-kernel auto"):
        burst.configure(config(), mb.BurstConfig(kernel="aten_cudnn"))


@pytest.mark.skipif(PACKAGES["flash3"].version is not None, reason="it is installed")
def test_a_kernel_of_a_package_is_refused_without_it():
    burst.install("zigzag")
    words = r"^kernel flash3: FlashAttention 3 is not installed .*--burst-kernel auto"
    with pytest.raises(ValueError, match=words):
        burst.configure(config(), mb.BurstConfig(kernel="flash3"))


class OtherAttention(DotProductAttention):
    """A core attention that computes something else than Megatron's."""

    def forward(self, *args, **named):
        return -super().forward(*args, **named)


@pytest.mark.parametrize("core", [OtherAttention, ModuleSpec(module=OtherAttention), IdentityOp])
def test_a_core_attention_that_is_not_megatrons_is_refused(core):
    """Otherwise our flags would be ignored without a message."""
    burst.install("zigzag")
    chosen = burst.configure(config(), mb.BurstConfig())
    parts = dataclasses.replace(
        get_gpt_layer_local_spec().submodules.self_attention.submodules, core_attention=core
    )
    name = getattr(core, "module", core).__name__
    reason = "does not derive" if core is IdentityOp else "OtherAttention overrides forward"
    words = rf"has the core attention \S*\.{name}\b.*{reason}.*--context-parallel-algo megatron"
    with pytest.raises(ValueError, match=words):
        SelfAttention(chosen, parts, layer_number=1)
    off = burst.configure(config(), mb.BurstConfig(algorithm="megatron"))
    with pytest.raises(Exception, match=r"^(?!.*BurstAttention)"):  # there are no groups here
        SelfAttention(off, parts, layer_number=1)


def test_a_cut_of_documents_by_transformer_engine_is_refused_in_another_layout(monkeypatch):
    """It would give ranks other tokens than attention expects, without an error."""
    engine = types.ModuleType("transformer_engine_torch")
    engine.thd_get_partitioned_indices = theirs = lambda *given: given
    monkeypatch.setitem(sys.modules, engine.__name__, engine)
    burst.install("zigzag")
    assert engine.thd_get_partitioned_indices is theirs
    burst.uninstall()
    burst.install("contiguous")
    with pytest.raises(ValueError, match=r"^--burst-layout contiguous: .*the 64 tokens"):
        engine.thd_get_partitioned_indices(None, 64, 2, 0)
    assert engine.thd_get_partitioned_indices(None, 64, 1, 0) == (None, 64, 1, 0)
    burst.uninstall()
    assert engine.thd_get_partitioned_indices is theirs


def test_ulysses_needs_a_head_for_each_rank():
    burst.install()
    few = config(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="a tensor-parallel rank has 2 query heads"):
        burst.configure(few, mb.BurstConfig(algorithm="ulysses"))


def test_which_layers_have_a_window():
    windowed = config(window_size=(12, 0), window_attn_skip_freq=2)
    assert [layer_window(windowed, n) for n in (1, 2, 3)] == [(12, 0), None, (12, 0)]
    assert layer_window(config(window_size=(-1, 0)), 1) == (None, 0)
    assert layer_window(config(), 1) is None
    # In the words of Megatron-Bridge's providers.
    gemma = types.SimpleNamespace(window_size=9, interleaved_attn_pattern=(2, 1))
    assert [layer_window(gemma, n) for n in (1, 2, 3, 4)] == [(8, 0), (8, 0), None, (8, 0)]
    mimo = types.SimpleNamespace(window_size=9, hybrid_attention_pattern=[0, 1])
    assert [layer_window(mimo, n) for n in (1, 2, 3)] == [None, (8, 0), None]
    for pattern in (["sliding_attention", "full_attention"], (4, 2), ()):  # whose meaning differs
        gemma.interleaved_attn_pattern = pattern
        assert provider_window(gemma) is None


def test_mixed_hidden_states_need_the_layout_of_megatron():
    burst.install("striped")
    mixed = config()
    mixed.mtp_num_layers, mixed.mtp_hsm = 2, True
    with pytest.raises(ValueError, match="--mtp-hsm does not work with --burst-layout striped"):
        burst.configure(mixed, mb.BurstConfig(layout="striped"))
    mixed.mtp_hsm = False
    burst.configure(mixed, mb.BurstConfig(layout="striped"))


def test_a_sequence_that_does_not_divide_is_refused():
    burst.install()
    with pytest.raises(ValueError, match="--seq-length 68"):
        burst.configure(config(), mb.BurstConfig(), seq_length=68)


def test_an_unknown_signature_names_version_and_symbol():
    with pytest.raises(RuntimeError, match=r"Megatron-Core \d+\.\d+.*some_function.*cp_group"):
        require_parameters(lambda batch: None, ["batch", "cp_group"], "some_function")


@pytest.mark.parametrize("failing", ["guard_other_cuts", "rope_patches"])
@pytest.mark.parametrize(
    "enter",
    [
        lambda layout, model: burst.install(layout),
        lambda layout, model: burst.configure(model, mb.BurstConfig(layout=layout)),
    ],
    ids=["install", "configure"],
)
def test_an_error_of_a_layouts_patches_changes_nothing(monkeypatch, enter, failing):
    burst.install()
    before, model = state(), config()
    home = {"guard_other_cuts": other_cuts, "rope_patches": rope}[failing]
    with monkeypatch.context() as broken:
        broken.setattr(home, failing, fail)
        with pytest.raises(RuntimeError, match="broken"):
            enter("striped", model)
    assert state() == before
    assert burst.installed_layout() is None
    burst.configure(model, mb.BurstConfig(layout="contiguous"))  # a run has one layout
    assert burst.installed_layout() == "contiguous"


def test_an_error_of_a_plugin_leaves_run_and_configuration_as_they_were(monkeypatch):
    """Also what other plugins changed before: one of them failed, so none has configured."""

    def changes(patches, model, _):
        patches.run.plugins["changes"] = model.cp_comm_type = "changed"

    def with_hooks(name):
        return [("changes", changes), ("fails", fail)] if name == "configured" else hooked(name)

    hooked = registry.hooked
    burst.install()
    before, model = state(), config(calculate_per_token_loss=True)
    settings, run = copy.copy(vars(model)), patching.run_state()
    values = copy.deepcopy(vars(run))
    with monkeypatch.context() as broken:
        broken.setattr(registry, "hooked", with_hooks)
        with pytest.raises(RuntimeError, match="broken"):
            burst.configure(model, mb.BurstConfig(layout="balanced", pack="documents"))
    assert vars(model) == settings
    assert patching.run_state() is run
    assert vars(run) == values
    assert state() == before


def test_an_error_between_opened_seams_closes_them(monkeypatch):
    home = types.ModuleType("home")
    vars(home)["f"] = decorated = seam(lambda: "bare")
    place = SeamPlace("slicing", "home", "f")
    monkeypatch.setitem(sys.modules, "home", home)
    monkeypatch.setattr(patching, "PLACES", (place,))
    patches = patching.PatchSet("seams")

    def break_halfway():
        with patching.opened(patches):
            patches.wrap(home, "f", [], lambda original: "replaced")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_halfway()
    assert home.f is decorated
    assert home.f() == "bare"


def test_a_set_of_patches_is_applied_whole_or_not_at_all():
    class Owner:
        value = 1

    def break_halfway():
        with patching.patch_set("broken") as patches:
            patches.replace(Owner, "value", 2)
            patches.replace(Owner, "missing", 2)

    with pytest.raises(AttributeError):
        break_halfway()
    assert Owner.value == 1
    assert patching.installed("broken") is None
