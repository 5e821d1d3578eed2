"""Interfaces of Megatron-LM after commit d98e8a64 and of Transformer Engine 2.20.2, as fakes.

`newer_megatron` names the source of each. Positions are written by hand; no ranks.
"""

import dataclasses
import sys
import types

import newer_megatron
import pytest
import torch
from megatron.core import utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as mtp
from newer_megatron import CPLoadBalancingStrategy, NewerParams
from rotary import Group, config

import megatron_burst as mb
import megatron_burst.megatron as burst
from megatron_burst.megatron import homes
from megatron_burst.megatron.attention import hooks
from megatron_burst.megatron.data import slicing
from megatron_burst.megatron.data.cut import BatchCut, group_of
from megatron_burst.megatron.data.other_cuts import check_cut
from megatron_burst.megatron.data.packed import packs
from megatron_burst.megatron.lm_head import fused_loss
from megatron_burst.megatron.lm_head.mtp import head_masks
from megatron_burst.megatron.patching import HYBRID_SINCE, core_version
from megatron_burst.recipes import ready_made

FIRST = Group(0, 2)
# Rows of the first of two ranks, of 16 tokens in documents of 8 and 8.
ROWS = {
    "zigzag": [0, 1, 6, 7, 8, 9, 14, 15],
    "contiguous": [0, 1, 2, 3, 4, 5, 6, 7],
    "striped": [0, 2, 4, 6, 8, 10, 12, 14],
}


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def pack(*bounds):
    return {"tokens": torch.arange(bounds[-1])[None], "cu_seqlens": ends(*bounds)[None]}


def check(layout, params, cuts=True, size=2):
    """Run the check of attention, for the rank that holds half of the pack of `params`."""
    known = packs().of(16, params.cu_seqlens_q, params.cu_seqlens_q_padded)
    check_cut(params, known, BatchCut(layout), size, cuts)


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(hooks, "core_version", lambda: (0, 20))
    yield newer_megatron.put_in(monkeypatch)
    burst.uninstall()


def installed(layout):
    burst.install(layout)
    return burst.configure(config(), mb.BurstConfig(layout=layout))


# --- who cut a pack (pull request 6912) -----------------------------------------------------


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("each_document", [False, True])
def test_the_newer_path_cuts_packs_in_the_layout_of_the_run(newer, layout, each_document):
    installed(layout)
    found = newer.utils.get_batches_on_this_cp_rank(
        pack(0, 8, 16), "zigzag", False, FIRST, use_per_sequence_balancing=each_document
    )
    assert found.get_batch()["tokens"].tolist() == [ROWS[layout]]
    check(layout, found.get_packed_seq_params())


def test_a_second_layout_is_refused_and_the_runs_own_is_not(newer):
    installed("contiguous")
    both = {"additional_layouts": ("zigzag",)}
    with pytest.raises(ValueError, match=r"for layouts contiguous and zigzag, .*--burst-attention"):
        newer.utils.get_batches_on_this_cp_rank(pack(0, 8, 16), "contiguous", False, FIRST, **both)
    found = newer.utils.get_batches_on_this_cp_rank(pack(0, 8, 16), "contiguous", False, FIRST)
    assert found.get_batch()["tokens"].tolist() == [ROWS["contiguous"]]
    assert found.get_packed_seq_params().cp_partition_mode == "contiguous"


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_contiguous_batch_in_a_run_of_another_layout_is_refused(newer, layout):
    installed(layout)
    with pytest.raises(ValueError, match=f"^--burst-layout {layout}: .*layouts contiguous"):
        newer.utils.get_batches_on_this_cp_rank(pack(0, 8, 16), "contiguous", False, FIRST)
    with pytest.raises(ValueError, match=f"^--burst-layout {layout}: get_batch_on_this_cp_rank"):
        utils.get_batch_on_this_cp_rank(
            {"tokens": torch.arange(16)[None]}, False, FIRST, use_contiguous_cp=True
        )


def test_sequences_that_are_not_packed_take_the_layout_of_the_run_too(newer):
    installed("contiguous")
    batch = {"tokens": torch.arange(16)[None]}
    found = newer.utils.get_batches_on_this_cp_rank(batch, "zigzag", False, FIRST)
    assert found.get_batch()["tokens"].tolist() == [ROWS["contiguous"]]


@pytest.mark.parametrize("layout", ["striped", "contiguous", "balanced"])
def test_a_pack_that_nothing_here_has_cut_is_refused(layout):
    installed(layout)
    try:
        params = PackedSeqParams("thd", ends(0, 8, 16), ends(0, 8, 16))
        with pytest.raises(
            ValueError, match=rf"^layout {layout}: another function .* cut the 16 tokens"
        ):
            check(layout, params)
        check(layout, params, cuts=False)  # this rank gets what another one has cut
        check(layout, params, size=1)
        slicing.take(pack(0, 8, 16), (ends(0, 8, 16), None), slicing.cut_of_run(layout), 2, 0)
        check(layout, params)
    finally:
        burst.uninstall()


def test_zigzag_is_what_others_cut_if_documents_divide():
    installed("zigzag")
    try:
        check("zigzag", PackedSeqParams("thd", ends(0, 8, 16), ends(0, 8, 16)))
        with pytest.raises(ValueError, match=r"multiple of 2 x --context-parallel-size \(4\)"):
            check("zigzag", PackedSeqParams("thd", ends(0, 6, 16), ends(0, 6, 16)))
    finally:
        burst.uninstall()


# --- PackedSeqParams.cp_partition_mode ------------------------------------------------------


def test_the_mode_of_a_pack_is_compared_with_the_layout_of_the_run():
    installed("contiguous")
    try:
        params = NewerParams("thd", ends(0, 8, 16), ends(0, 8, 16), cp_partition_mode="contiguous")
        check("contiguous", params)  # whoever cut it
        clipped = dataclasses.replace(params, cu_seqlens_q=ends(0, 8))  # to the rows of a rank
        with pytest.raises(ValueError, match=r"another function .* cut the 16 tokens"):
            check("contiguous", clipped)
        for layout in ("zigzag", "striped"):
            message = rf"'contiguous', and the run has --burst-layout {layout}, .*use --burst-lay"
            with pytest.raises(ValueError, match=message):
                check(layout, params, cuts=False)
        with pytest.raises(ValueError, match="cp_partition_mode is 'other'"):
            check("contiguous", dataclasses.replace(params, cp_partition_mode="other"))
    finally:
        burst.uninstall()


def test_the_default_mode_does_not_contradict_a_cut_of_ours(newer):
    installed("striped")
    batch = utils.get_batch_on_this_cp_rank(pack(0, 8, 16), False, FIRST)
    assert batch["tokens"].tolist() == [ROWS["striped"]]
    check("striped", NewerParams("thd", ends(0, 8, 16), ends(0, 8, 16)))


def test_local_sizes_come_with_a_group_also_of_one_rank(newer):
    """Later `PackedSeqParams` require `cp_group` if `local_cp_size` is set (pull request 7144)."""
    installed("zigzag")
    alone = Group(0, 1)
    batch = pack(0, 8, 16) | {"local_cp_size": torch.tensor([1])}
    found = newer.utils.get_batches_on_this_cp_rank(
        batch, "zigzag", True, FIRST, hybrid_cp_group_func=lambda group_size: alone
    )
    params = found.get_packed_seq_params()
    assert params.cp_group is alone
    assert group_of(params, FIRST).size() == 1
    with pytest.raises(ValueError, match="local_cp_size is 1, and cp_group has 2 ranks"):
        group_of(dataclasses.replace(params, cp_group=FIRST), FIRST)


def test_attention_gets_the_rows_of_the_run_without_an_exchange(newer):
    """`Attention.forward` would exchange contiguous rows for zigzag rows."""
    chosen = installed("contiguous")
    params = NewerParams("thd", ends(0, 16), ends(0, 16), cp_partition_mode="contiguous")
    asked = {"hidden_states": "rows", "packed_seq_params": params, "sequence_parallel": False,
             "cp_group": FIRST}  # fmt: skip
    convert = newer.conversion.convert_module_input_tensors_cp_partition_mode
    assert convert(**asked, target_partition_mode="zigzag", config=chosen) == ("rows", None)
    assert params.cp_partition_mode == "contiguous"
    rows, _ = convert(**asked, target_partition_mode="zigzag", config=config())  # not ours
    assert rows == "rows of another layout"


def test_an_exchange_around_attention_of_another_layout_is_refused(newer):
    chosen = installed("zigzag")
    params = NewerParams("thd", ends(0, 16), ends(0, 16), cp_partition_mode="contiguous")
    with pytest.raises(ValueError, match=r"^--burst-layout zigzag: cp_partition_mode"):
        newer.conversion.convert_module_input_tensors_cp_partition_mode(
            hidden_states="rows", packed_seq_params=params, sequence_parallel=False,
            target_partition_mode="zigzag", config=chosen, cp_group=FIRST,
        )  # fmt: skip


# --- other functions that cut, in Megatron and in Transformer Engine 2.20.2 -----------------


def calls(newer, layout):
    """Return functions that select the first rank's rows of 16 tokens in `layout`."""
    strategy = {
        "zigzag": CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
        "contiguous": CPLoadBalancingStrategy.NO_LOAD_BALANCE,
    }[layout]
    given = ends(0, 8, 16), 16, 2, 0
    return [
        lambda: newer.partition.get_cp_partition_indices(*given, layout),
        lambda: newer.engine.get_thd_partitioned_indices(*given, load_balancing_strategy=strategy),
    ]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("number", [0, 1])
def test_other_cuts_run_if_their_layout_is_that_of_the_run(newer, layout, number):
    installed(layout)
    rows = calls(newer, layout)[number]()
    assert torch.arange(16)[rows].tolist() == ROWS[layout]
    check(layout, PackedSeqParams("thd", ends(0, 8, 16), ends(0, 8, 16)))


@pytest.mark.parametrize(
    ("layout", "other"),
    [("zigzag", "contiguous"), ("contiguous", "zigzag"), ("striped", "zigzag"),
     ("striped", "contiguous")],
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 1])
def test_other_cuts_are_refused_in_another_layout(newer, layout, other, number):
    installed(layout)
    message = rf"^--burst-layout {layout}: .* the 16 tokens of this pack in {other} order"
    with pytest.raises(ValueError, match=message):
        calls(newer, other)[number]()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_batches_that_transformer_engine_cuts_need_its_layout(newer, layout, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    installed(layout)
    for strategy, name in zip(CPLoadBalancingStrategy, ("zigzag", "contiguous"), strict=True):
        asked = {"cp_group": FIRST, "load_balancing_strategy": strategy}
        given = ends(0, 8, 16), None, None, None
        if layout == name:
            cut = newer.engine.get_batch_on_this_cp_rank(*given, **asked)
            assert cut == "rows of this rank"
            continue
        with pytest.raises(ValueError, match=rf"^--burst-layout {layout}: .* in {name} order"):
            newer.engine.get_batch_on_this_cp_rank(*given, **asked)


# --- multi-token prediction -----------------------------------------------------------------


def test_shifts_of_contiguous_rows_need_a_contiguous_run(newer):
    tensor, asked = torch.zeros(1, 8), {"cp_group": FIRST}
    installed("contiguous")
    assert newer.sequence_roll.roll_contiguous(tensor, -1, **asked).startswith("shifted")
    burst.uninstall()
    installed("striped")
    for shift in (
        lambda: newer.sequence_roll.roll_contiguous(tensor, -1, **asked),
        lambda: newer.sequence_roll.roll_contiguous_fields([tensor], **asked),
    ):
        with pytest.raises(ValueError, match=r"^--burst-layout striped with --mtp-num-layers"):
            shift()
    assert newer.sequence_roll.roll_contiguous(tensor, -1, Group(0, 1)).startswith("shifted")


def test_shifts_of_the_branch_dev_follow_the_layout_of_the_run(newer):
    zigzag = NewerParams("thd", ends(0, 16), ends(0, 16))
    contiguous = dataclasses.replace(zigzag, cp_partition_mode="contiguous")
    prepare = "prepare_mtp_sequence_roll_context"
    for layout, params, expected in (
        ("zigzag", zigzag, "a context"),
        ("contiguous", contiguous, "a context"),
        ("striped", zigzag, None),  # roll_tensor then follows the run
        ("contiguous", zigzag, None),
    ):
        installed(layout)
        assert getattr(newer.mtp_sequence_roll, prepare)(None, FIRST, params) == expected
        burst.uninstall()
    installed("zigzag")
    with pytest.raises(ValueError, match="'contiguous', and the run has --burst-layout zigzag"):
        getattr(newer.mtp_sequence_roll, prepare)(None, FIRST, contiguous)


def newer_roll(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None, return_sum=True,
               cp_layout="zigzag", fill_value=0):  # fmt: skip
    """Fake `roll_tensor` of Megatron-LM main (`multi_token_prediction.py`, September 2026)."""
    moved = torch.cat([tensor[..., 1:], torch.full_like(tensor[..., :1], fill_value)], dim=-1)
    return moved, moved.sum()


def test_roll_tensor_honours_its_newer_arguments(monkeypatch):
    monkeypatch.setattr(mtp, "roll_tensor", newer_roll)
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda parts, own, group: [x.copy_(own) for x in parts]
    )
    burst.install("contiguous")
    try:
        last, row = Group(1, 2), torch.arange(4)[None]
        moved, _ = mtp.roll_tensor(row, cp_group=last, cp_layout="contiguous", fill_value=9)
        assert moved.tolist() == [[1, 2, 3, 9]]
        assert mtp.roll_tensor(row, cp_group=last)[0].tolist() == [[1, 2, 3, 0]]
    finally:
        burst.uninstall()
    burst.install("zigzag")
    try:
        with pytest.raises(ValueError, match=r"^--burst-layout zigzag: roll_tensor"):
            mtp.roll_tensor(row, cp_group=last, cp_layout="contiguous")
    finally:
        burst.uninstall()


def roll_of_lists(tensors, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None,
                  fill_values=None):  # fmt: skip
    """Fake `roll_tensor` of Megatron's branch dev (August 2026)."""
    return [tensor + 100 for tensor in tensors]


def test_roll_tensor_of_the_branch_dev_shifts_several_tensors(monkeypatch):
    monkeypatch.setattr(mtp, "roll_tensor", roll_of_lists)
    monkeypatch.setattr(
        torch.distributed, "all_gather", lambda parts, own, group: [x.copy_(own) for x in parts]
    )
    row = torch.arange(4)[None]
    burst.install("contiguous")
    try:
        rolled = mtp.roll_tensor([row, row + 4], cp_group=Group(1, 2), fill_values=[9, 8])
        assert [x.tolist() for x in rolled] == [[[1, 2, 3, 9]], [[5, 6, 7, 8]]]
        assert mtp.roll_tensor([row], cp_group=Group(1, 2))[0].tolist() == [[1, 2, 3, 0]]
        assert mtp.roll_tensor([row], cp_group=Group(0, 1))[0].tolist() == [[100, 101, 102, 103]]
        assert mtp.roll_tensor([]) == []
        with pytest.raises(ValueError, match=r"^--mtp-hsm: "):
            mtp.roll_tensor([row, torch.ones(1, 4, requires_grad=True)], cp_group=Group(1, 2))
        (mask,) = head_masks(torch.tensor([[1.0, 1, 0, 1]]), 1, Group(1, 2), None)
        assert mask.tolist() == [[1, 0, 1, 0]]
    finally:
        burst.uninstall()


@pytest.mark.skipif(
    core_version() < HYBRID_SINCE, reason="Megatron-Core 0.16 has no layers with states"
)
def test_delta_nets_of_the_branch_dev_are_refused(monkeypatch):
    delta_nets = homes.module("gated_delta_net")
    family = next(cls for cls in delta_nets.GatedDeltaNet.__mro__ if "__init__" in vars(cls))
    for cls in delta_nets.GatedDeltaNet.__mro__:
        if "_gated_norm_and_a2a" in vars(cls):
            monkeypatch.delattr(cls, "_gated_norm_and_a2a")
    monkeypatch.setattr(family, "__init__", lambda self, config, layer_number, pg_collection: None)
    ours = types.SimpleNamespace(burst=types.SimpleNamespace(algorithm="burst", linear="auto"))
    groups = types.SimpleNamespace(cp=Group(0, 2))
    burst.install("zigzag")
    try:
        with pytest.raises(ValueError, match=r"^GatedDeltaNet .* no .*_gated_norm_and_a2a.*: use"):
            delta_nets.GatedDeltaNet(ours, 1, groups)
        ours.burst.linear = "megatron"
        delta_nets.GatedDeltaNet(ours, 1, groups)
    finally:
        burst.uninstall()


def test_heads_leave_out_tokens_behind_an_invalid_input(monkeypatch):
    """The second head reads the next two tokens.

    `mtp_input_mask` of process_mtp_loss (`multi_token_prediction.py`, September 2026).
    """
    monkeypatch.setattr(mtp, "roll_tensor", newer_roll)
    mask = torch.tensor([[1.0, 1, 0, 1, 1, 1, 1, 1]])
    inputs = torch.tensor([[1.0, 1, 1, 1, 0, 1, 1, 1]])
    found = [x[0].tolist() for x in head_masks(mask, 2, None, None, inputs)]
    # Loss masks of the heads: 1 0 1 1 1 1 1 0 and 0 1 1 1 1 1 0 0.
    assert found == [[1, 0, 1, 0, 1, 1, 1, 0], [0, 1, 0, 0, 1, 1, 0, 0]]
    plain = [x[0].tolist() for x in head_masks(mask, 2, None, None)]
    assert plain == [[1, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]]


def test_the_fused_loss_gets_the_masks_of_the_heads_that_run(monkeypatch):
    """The arguments are `compute_mtp_loss` and `mtp_input_mask` of HybridModel.forward."""
    monkeypatch.setattr(mtp, "roll_tensor", newer_roll)
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(mtp_num_layers=1),
        pg_collection=types.SimpleNamespace(cp=None),
    )
    labels, valid = torch.zeros(1, 4), torch.tensor([[True, True, False, True]])
    given = {"labels": labels, "loss_mask": torch.ones(1, 4), "mtp_input_mask": valid}
    (further, first), (last, second) = fused_loss._masks(model, given)
    assert (further, first.tolist()) == (True, [[1, 0, 1, 0]])
    assert (last, second.tolist()) == (False, [[1, 1, 1, 1]])
    ((last, only),) = fused_loss._masks(model, given | {"compute_mtp_loss": False})
    assert (last, only.tolist()) == (False, [[1, 1, 1, 1]])


# --- HybridModel.forward --------------------------------------------------------------------


def test_newer_arguments_of_a_hybrid_model_pass_through_or_are_refused_by_name(newer):
    chosen = installed("zigzag")
    model = newer.hybrid_model.HybridModel(chosen)
    batch = newer_megatron.Batches("zigzag", {"zigzag": {}}, {"zigzag": None})
    told = {"mtp_input_mask": "a mask", "cp_batch": batch, "compute_mtp_loss": False}
    assert model.forward(None, None, None, **told) == told
    with pytest.raises(ValueError, match=r"^shared_prefix_layout is set: .*mb.rl.logprobs"):
        model.forward(None, None, None, shared_prefix_layout=object())
    both = newer_megatron.Batches("contiguous", {"contiguous": {}, "zigzag": {}}, {})
    with pytest.raises(ValueError, match=r"^cp_batch has the layouts contiguous and zigzag"):
        model.forward(None, None, None, cp_batch=both)
    off = burst.configure(config(), mb.BurstConfig(algorithm="megatron"))
    plain = newer.hybrid_model.HybridModel(off)
    assert plain.forward(None, None, None, shared_prefix_layout=object())["cp_batch"] is None


# --- where modules are ----------------------------------------------------------------------


@pytest.mark.parametrize("name", homes.MOVED)
def test_modules_are_found_in_core_ops_first(monkeypatch, name):
    """After pull requests 7239 and 7380 the older path may remain, and only forwards names."""
    newer, older = types.ModuleType("newer"), types.ModuleType("older")
    monkeypatch.setitem(sys.modules, f"megatron.core.ssm.{name}", older)
    monkeypatch.setitem(sys.modules, homes.MOVED[name], newer)
    assert homes.find(name) is newer
    monkeypatch.setitem(sys.modules, homes.MOVED[name], None)  # not there
    assert homes.find(name) is older


def test_bridge_is_found_inside_megatron_lm(monkeypatch, tmp_path):
    """`megatron/bridge` of Megatron-LM, without a distribution named megatron-bridge.

    Megatron-Bridge issue 6172 (September 2026).
    """
    folder = tmp_path / "megatron" / "bridge" / "recipes"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text("def tiny_config():\n    return 'a recipe'\n")
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        monkeypatch.delitem(sys.modules, name)
    import megatron

    monkeypatch.setattr(megatron, "__path__", [str(tmp_path / "megatron"), *megatron.__path__])
    monkeypatch.setattr(ready_made, "apply_burst", lambda recipe: recipe)
    try:
        assert ready_made.find("tiny_config")() == "a recipe"
    finally:
        for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
            del sys.modules[name]
