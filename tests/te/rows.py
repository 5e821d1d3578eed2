"""The rows of docs/compatibility.md for Transformer Engine's layers: their names, and the tests
that stand for them. `tests/compatibility.py` writes the table."""

LAYERS = "tests/te/test_te_layers.py::"
LOOP = "tests/te/test_te_training.py::"
KIMI = "tests/te/test_te_kimi.py::"
HYBRID = "tests/te/test_te_hybrid.py::"
Row = tuple[str, tuple[str, ...]]


def _built(name: str, *models: str) -> Row:
    test = f"{LAYERS}test_layers_have_our_attention_and_their_own_checkpoint"
    return (f"TE: {name}", tuple(f"{test}[{model}]" for model in models))


def _exchanged(name: str, *kinds: str) -> Row:
    test, ways = f"{LAYERS}test_checkpoints_go_over", ("ours-theirs", "theirs-ours")
    forms = [f"{kind}-{way}-{form}" for kind in kinds for way in ways
             for form in ("sharded", "plain")]  # fmt: skip
    return (f"TE: {name}", tuple(f"{test}[{form}]" for form in forms))


def _trained(name: str, *models: str) -> Row:
    test = f"{LOOP}test_two_ranks_train_like_one"
    return (f"TE trains: {name}", tuple(f"{test}[{model}]" for model in models))


def _hybrid(name: str, *cases: str) -> Row:
    test = f"{HYBRID}test_split_like_one_rank"
    return (f"TE trains: HybridModel: {name}", tuple(f"{test}[{case}]" for case in cases))


# Rows for models of Transformer Engine's layers; the tests need an environment that has it.
ROWS = (
    _built("GQA, MLA, MTP", "gqa", "mla", "mla, compressed queries", "mtp"),
    _built("HybridModel: Mamba-2, gated delta nets, MoE, MTP",
           "hybrid, mamba", "hybrid, delta nets", "hybrid, further heads"),
    _built("windows, sinks", "windows", "sinks", "off-by-one"),
    _built("MoE", "moe", "moe, grouped"),
    _built("fused rope, selective recompute", "fused rope", "recompute"),
    _built("fp8 recipes, configured",
           *(f"fp8, {recipe}" for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"))),
    _exchanged("checkpoints to and from its attention", "gqa", "sinks", "mla, mtp",
               "hybrid"),
    _trained("GQA, qk-norm", "mha", "gqa", "gqa-qknorm"),
    _trained("MLA", "mla", "mla-qknorm"),
    _trained("TP x SP", "tp-sp"),
    _trained("sliding windows, sinks", "window", "window-skip-striped", "sink-learnable",
             "sink-off-by-one"),
    _trained("MTP", "mtp"),
    _trained("MoE", "moe", "moe-grouped"),
    _trained("packed", "packed"),
    _trained("recompute, attention store", "recompute", "recompute-selective"),
    _trained("`--spec`", "spec"),
    _hybrid("gated delta nets, zigzag and contiguous", "delta-nets", "delta-nets-contiguous"),
    _hybrid("Mamba-2, zigzag and contiguous", "mamba", "mamba-four-ranks"),
    _hybrid("TP x SP", "tensor-parallel"),
    _hybrid("PP, VPP with recompute and attention store", "pipeline", "interleaved"),
    _hybrid("MLA", "latent"),
    _hybrid("MoE", "experts"),
    _hybrid("MTP, fused LM head", "further-heads"),
    _hybrid("distributed optimizer", "sharded-optimizer"),
    _hybrid("offload", "offload"),
    ("TE trains: Kimi K3 of Megatron-Bridge (main), packed too",
     (*(f"{KIMI}test_over_ranks_equals_one_rank[{case}]" for case in
        ("zigzag", "contiguous", "four-ranks", "two-layouts", "tensor-parallel", "fused-loss",
         "store")),
      f"{KIMI}test_packed_documents_like_each_alone")),
    ("TE trains: HybridModel: packed",
     tuple(f"{HYBRID}test_packed_documents_like_each_alone[{m}]" for m in ("mamba", "delta-nets"))),
    ("TE trains: HybridModel: checkpoint of one rank at CP 4",
     (f"{HYBRID}test_megatrons_own_checkpoint_goes_on",)),
)  # fmt: skip
