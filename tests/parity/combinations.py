"""What `make parity` runs: flags of Megatron-LM as it stands, and ours for the same training.

Data only. Stock runs on one rank; on two where they are stages of a pipeline or hold different
experts, whose weights come from seeds of their own. Equal stock flags share a run.
"""

from typing import NamedTuple


class Combination(NamedTuple):
    """Ours on `world` ranks with `model` and `split` flags, stock with those of the model alone.

    rounding: flags of bf16 or fp16. Both runs are then compared with the run without these flags,
    and our error may be twice that of stock; norms of parameters are left out.
    """

    name: str
    model: str
    world: int
    split: str
    stock_world: int = 1
    rounding: str = ""

    @property
    def stock(self) -> str:
        return f"{self.rounding} {self.model}".strip()

    @property
    def ours(self) -> str:
        return f"{self.stock} {self.split}".strip()


CP2 = "--context-parallel-algo burst --context-parallel-size 2"
CP4 = "--context-parallel-algo burst --context-parallel-size 4"
GRID = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
NODES = f"--context-parallel-algo burst {GRID}"
TP = f"{CP2} --tensor-model-parallel-size 2"
STRIPED = "--burst-layout striped"
SINGLE, AGAIN = "--burst-lm-head-loss single_pass", "--burst-lm-head-loss recompute"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"

GQA = "--group-query-attention --num-query-groups 2 --qk-layernorm"
MQA = "--group-query-attention --num-query-groups 1"
UNTIED = "--untie-embeddings-and-output-weights"
WINDOW = "--window-size 12,0"
SINK = "--softmax-type learnable"
MTP, MTP2 = "--mtp-num-layers 1", "--mtp-num-layers 2"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type aux_loss --moe-token-dispatcher-type alltoall"
)
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 48"
PP = "--num-layers 4 --pipeline-model-parallel-size 2"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
MIXER = "--mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2"
DELTA_NETS = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --linear-conv-kernel-dim 4 --hybrid-layer-pattern GG*-"
)
MIXERS = f"{MIXER} --hybrid-layer-pattern M*M-"
MIXERS_AND_EXPERTS = f"{MOE} {MIXER} --hybrid-layer-pattern M*E"
MIXERS_STAGED = f"{MIXER} --pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|*|M-|*"
APART = "--burst-layout contiguous --burst-attention-layout zigzag"

COMBINATIONS = (
    # --- algorithms, layouts, topologies
    Combination("cp2", "", 2, CP2),
    Combination("cp4", "", 4, CP4),
    Combination("cp4 2x2", "", 4, NODES),
    Combination("cp4, intra size", "", 4, f"{CP4} --burst-intra-size 2"),
    Combination("cp2 striped", "", 2, f"{CP2} {STRIPED}"),
    Combination("cp4 2x2 striped", "", 4, f"{NODES} {STRIPED}"),
    Combination("cp2 contiguous", "", 2, f"{CP2} --burst-layout contiguous"),
    Combination("ring", "", 4, "--context-parallel-algo ring --context-parallel-size 4"),
    Combination("double ring striped", "", 4,
                f"--context-parallel-algo double_ring {GRID} {STRIPED}"),
    Combination("all-gather", "", 4, f"--context-parallel-algo all_gather {GRID}"),
    Combination("ulysses", "", 4, "--context-parallel-algo ulysses --context-parallel-size 4"),
    Combination("hybrid", "", 4, f"--context-parallel-algo hybrid {GRID} --burst-ulysses-size 2"),
    Combination("hybrid, context first", "", 4,
                f"--context-parallel-algo hybrid {GRID} --burst-ulysses-size 2 "
                f"--burst-placement context_first {STRIPED}"),
    Combination("auto", "", 4, f"--context-parallel-algo auto {GRID}"),
    Combination("side query", "", 4, f"{NODES} --burst-side query"),
    Combination("side kv", "", 4, f"{NODES} --burst-side kv"),
    Combination("kernel reference", "", 2, f"{CP2} --burst-kernel reference"),
    # --- data, tensor and optimizer sharding
    Combination("dp2 x cp2", "", 4, CP2),
    Combination("distributed optimizer", "", 4,
                f"{CP2} --use-distributed-optimizer --overlap-grad-reduce"),
    # Megatron takes the norm of parameters before all of them are gathered: so does this stock.
    Combination("parameters gathered meanwhile", SHARDED, 4, CP2, 4),
    Combination("micro-batch 2", "", 2, f"{CP2} --micro-batch-size 2"),
    Combination("tp2", "", 4, TP),
    Combination("tp2 sp striped", "", 4, f"{TP} --sequence-parallel {STRIPED}"),
    Combination("tp2 ulysses", "", 4, f"{TP} --sequence-parallel --context-parallel-algo ulysses"),
    # --- the LM head
    Combination("lm head single pass", "", 2, f"{CP2} {SINGLE}"),
    Combination("lm head recompute", "", 2, f"{CP2} {AGAIN}"),
    Combination("lm head untied tp2", UNTIED, 4, f"{TP} --sequence-parallel {SINGLE}"),
    # --- recompute, and what is kept of it
    Combination("recompute uniform", "", 2, f"{CP2} {UNIFORM}"),
    Combination("recompute block striped", "", 2, f"{CP2} {BLOCK} {STRIPED}"),
    Combination("recompute selective", "", 2, f"{CP2} {SELECTIVE}"),
    Combination("store half", "", 4, f"{NODES} {UNIFORM} --burst-attention-store 0.5"),
    Combination("store all, block", "", 2, f"{CP2} {BLOCK} --burst-attention-store 1.0"),
    Combination("store selective zigzag", "", 2,
                f"{CP2} {SELECTIVE} --burst-attention-store 0.25 --burst-layout zigzag"),
    # --- kinds of attention
    Combination("gqa", GQA, 2, CP2),
    Combination("gqa 2x2 striped", GQA, 4, f"{NODES} {STRIPED}"),
    Combination("gqa tp2 sp", GQA, 4, f"{TP} --sequence-parallel"),
    Combination("mqa", MQA, 4, CP4),
    Combination("window", WINDOW, 4, NODES),
    Combination("window, every second layer, striped", f"{WINDOW} --window-attn-skip-freq 2", 2,
                f"{CP2} {STRIPED}"),
    Combination("window, lm head, store", WINDOW, 2,
                f"{CP2} {SINGLE} {UNIFORM} --burst-attention-store 0.5"),
    Combination("sink learnable", SINK, 4, NODES),
    Combination("sink off by one striped", "--softmax-type off-by-one", 2, f"{CP2} {STRIPED}"),
    Combination("sink in a window, striped", f"{SINK} {WINDOW}", 2, f"{CP2} {STRIPED}"),
    Combination("learned positions", "--position-embedding-type learned_absolute", 2, CP2),
    Combination("half rotary striped", "--rotary-percent 0.5", 2, f"{CP2} {STRIPED}"),
    # --- experts
    Combination("experts", MOE, 2, CP2),
    Combination("experts ep2 striped", f"{MOE} --expert-model-parallel-size 2", 2,
                f"{CP2} {STRIPED}", 2),
    Combination("shared experts, lm head", SHARED, 4, f"{NODES} {SINGLE}"),
    # --- multi-token prediction
    Combination("mtp", MTP, 2, CP2),
    Combination("two mtp heads 2x2", MTP2, 4, NODES),
    Combination("mtp, lm head", MTP2, 2, f"{CP2} {SINGLE}"),
    Combination("mtp tp2 sp", MTP, 4, f"{TP} --sequence-parallel"),
    Combination("two mtp heads 2x2 striped", MTP2, 4, f"{NODES} {STRIPED}"),
    Combination("mtp contiguous, lm head", MTP, 2, f"{CP2} {SINGLE} --burst-layout contiguous"),
    Combination("mtp, store", MTP, 2, f"{CP2} {UNIFORM} --burst-attention-store 1.0"),
    # --- pipelines
    Combination("pp2", PP, 4, CP2, 2),
    Combination("pp2 store", PP, 4, f"{CP2} {UNIFORM} --burst-attention-store 0.75", 2),
    Combination("pp2 lm head striped", PP, 4, f"{CP2} {SINGLE} {STRIPED}", 2),
    Combination("pp2 mtp", f"{PP} {MTP}", 4, CP2, 2),
    Combination("vpp2", VPP, 4, CP2, 2),
    Combination("vpp2 store", VPP, 4, f"{CP2} {UNIFORM} --burst-attention-store 0.5", 2),
    # --- packed documents
    Combination("packed", "--packed", 2, CP2),
    Combination("packed 2x2 striped", "--packed", 4, f"{NODES} {STRIPED}"),
    Combination("packed contiguous gqa", f"--packed {GQA}", 2, f"{CP2} --burst-layout contiguous"),
    Combination("packed mtp", f"--packed {MTP}", 2, CP2),
    Combination("packed two mtp heads 2x2 striped, lm head", f"--packed {MTP2}", 4,
                f"{NODES} {STRIPED} {SINGLE}"),
    Combination("packed vpp2", f"--packed {VPP}", 4, CP2, 2),
    Combination("packed vpp2 mtp striped", f"--packed {VPP} {MTP}", 4, f"{CP2} {STRIPED}", 2),
    # --- formats
    Combination("bf16", "", 2, CP2, rounding="--bf16"),
    Combination("bf16 on the wire", "", 4, f"{NODES} --burst-wire-dtype bf16", rounding="--bf16"),
    Combination("fp16", "", 2, CP2, rounding="--fp16 --initial-loss-scale 1024"),
    # --- hybrid models
    # Some of its gradients are nearly 0, and Adam divides their rounding by its smallest divisor.
    Combination("hybrid delta nets", f"{DELTA_NETS} --adam-eps 1e-6", 2, CP2),
    Combination("hybrid mixers 2x2, two layouts, store", MIXERS, 4,
                f"{NODES} {APART} {UNIFORM} --burst-attention-store 0.5"),
    Combination("hybrid experts, lm head", MIXERS_AND_EXPERTS, 2, f"{CP2} {SINGLE}"),
    Combination("hybrid two mtp heads", f"{MIXERS}/M*/M*", 2, CP2),
    # As with "parameters gathered meanwhile".
    Combination("hybrid vpp2, sharded optimizer", f"{MIXERS_STAGED} {SHARDED}", 4, CP2, 4),
    Combination("hybrid offload", MIXERS, 2, f"{CP2} --burst-offload 1.0"),
)  # fmt: skip

# One of each kind that broke once, or could: what CI runs, besides those of tests/megatron_lm.
SAMPLE = ("hybrid", "tp2 sp striped", "two mtp heads 2x2", "window, lm head, store",
          "packed vpp2 mtp striped")  # fmt: skip
