"""Overrides that shrink a recipe of Megatron-Bridge until a CPU can train it."""

SMALL = """
    model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 model.num_attention_heads=4
    model.num_query_groups=2 model.kv_channels=16 model.vocab_size=512 tokenizer.vocab_size=512
    model.tensor_model_parallel_size=1 model.pipeline_model_parallel_size=1
    model.sequence_parallel=False model.seq_length=256
    train.train_iters=3 train.global_batch_size=4 train.eval_iters=0 train.eval_interval=100
    logger.log_interval=1 logger.tensorboard_dir=null scheduler.lr_warmup_iters=1
    checkpoint.save=null checkpoint.load=null
""".split()  # noqa: SIM905
PRETRAIN = [*SMALL, "dataset.sequence_length=256"]
