"""Code that the ranks of `test_grpo` run: the example's code, shortened."""

import argparse
import gc

import session
import torch


def arguments(words):
    import grpo_task

    parser = argparse.ArgumentParser()
    grpo_task.add_flags(parser)
    return parser.parse_args(words.split())


def learn(words):
    """Run one step of samples.

    Return the results of `compare` and of the sampler, and the growth of the objective when weights
    are updated: the mean over written tokens of advantage times change of log-probability.
    """
    import grpo_task
    import grpo_train
    from megatron.core import parallel_state

    import megatron_burst as mb

    args = arguments(words)
    session._meet_again()
    try:
        policy = grpo_train.Policy(args)
        questions = torch.Generator().manual_seed(1)
        grpo_train.warm_up(policy, args, questions)
        reference = policy.copy()
        draw = torch.Generator().manual_seed(2 + torch.distributed.get_rank())
        requested = [grpo_train._digits(args, questions) for _ in range(args.prompts)]
        row, samples, loss = grpo_train.step(policy, args, requested, draw, reference)
        after = grpo_train.by_trajectory(
            mb.rl.logprobs(policy.stages, [each.tokens for each in samples])
        )
        gain = sum(
            float(loss.advantages[i] @ (after[i] - loss.before[i])[samples[i].written])
            for i in after
        )
        apart = max(float((loss.before[i] - loss.reference[i]).abs().max()) for i in after)
        gain = grpo_train.over_ranks(gain, group=parallel_state.get_data_parallel_group())
        turns = grpo_task.turns(args.digits)
        return {**grpo_train.compare(policy, loss, 1), **row}, gain, apart, samples, turns
    finally:
        mb.megatron.uninstall()
        parallel_state.destroy_model_parallel()
        gc.collect()
