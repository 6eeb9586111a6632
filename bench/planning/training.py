"""Plan a training task: its layout, schedule, batch sizes and submission."""

import dataclasses
import math

from bench.contract.plan import (
    NOT_A_SUBMISSION,
    Batch,
    Evaluation,
    Submission,
    World,
)
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Config, DataSource
from bench.contract.task import Division
from bench.errors import ConfigError
from bench.mlperf import closed_division
from bench.mlperf.benchmarks import BENCHMARKS, LLAMA2_70B_LORA
from bench.planning import checks, deepspeed, layouts, local_sgd, nemo, program
from bench.planning.checks import memory
from bench.planning.checks import training as training_checks
from bench.planning.commands import environment, fields_of_all
from bench.planning.data_folder import base_dir, data_dir
from bench.planning.estimates import cuda_graph, documents, flops
from bench.planning.parallelism import num_microbatches


def make(config: Config, base: Config | None) -> TrainingPlan:
    """Return the plan of a training run; `base` is the config of the task that trains its base checkpoint."""
    if config.program is not None:
        return _make_program(config, base)
    of_group = local_sgd.of_one_group(nemo.restricted(config))
    chosen = layouts.choose(of_group)
    steps = max_steps(config)
    training_checks.check_steps(config, steps)
    training_checks.check_profiled_steps(config, steps)
    base_plan = None if base is None else _make_base(base)
    evaluation = _checked_evaluations(config)
    local_sgd.check_evaluations(config, evaluation.at_steps, steps)
    is_captured = cuda_graph.is_chosen(of_group, chosen)
    chosen = _as_launched(of_group, chosen, is_captured=is_captured)
    memory.check(config, chosen.memory)
    share = documents.attention_share(config)
    batch = _whole(batches(layouts.with_micro_batch(of_group, chosen.micro_batch_size), chosen.world), config)
    return TrainingPlan(
        **fields_of_all(config) | {"environment": environment(config, tp=chosen.world.tp)},
        world=local_sgd.whole(chosen.world, config),
        batch=batch,
        evaluation=evaluation,
        max_steps=steps,
        submission=submission(config),
        recompute=chosen.recompute,
        memory=chosen.memory,
        cost=chosen.cost,
        local_sgd=local_sgd.predict(config, chosen, evaluation, steps),
        deepspeed=deepspeed.settings(config, batch),
        cuda_graph=is_captured,
        tflop_per_sample=flops.tflop_per_sample(
            config.model, config.training.lora, seq_length=config.training_data.seq_length, attention_share=share or 1.0
        ),
        attention_share=share,
        peak_tflops=flops.peak_tflops(config),
        data_dir=data_dir(config),
        base_dir=base_dir(config, base_plan),
        base=base_plan,
    )


def _make_program(config: Config, base: Config | None) -> TrainingPlan:
    """Return the plan of engine=command."""
    is_own, steps = config.training_data.source is DataSource.program, max_steps(config)
    training_checks.check_steps(config, steps)
    return program.make(
        config,
        max_steps=steps,
        evaluation=evaluations(config) if is_own else _checked_evaluations(config),
        submission=submission(config),
        base=None if base is None else _make_base(base),
    )


def _as_launched(config: Config, layout: layouts.Layout, *, is_captured: bool) -> layouts.Layout:
    """Return the layout with the memory and times of its launch method: a CUDA graph or single kernels."""
    if not is_captured:  # nemo has no cost: the rates were measured with our kernels
        return dataclasses.replace(layout, cost=layout.cost if config.nemo is None else None)
    cost = cuda_graph.cost_of(config, layout)
    return dataclasses.replace(layout, memory=cuda_graph.memory_of(config, layout), cost=cost)


def _checked_evaluations(config: Config) -> Evaluation:
    """Return the evaluation schedule; raises ConfigError for an impossible one."""
    schedule = evaluations(config)
    every, first = schedule.every_steps, schedule.first_step
    training_checks.check_evaluation(config, every_steps=every, first_step=first, max_steps=max_steps(config))
    return schedule


def _make_base(base: Config) -> TrainingPlan:
    """Return the plan of the base task. Errors name the task, because it is not on the command line."""
    try:
        checks.check(base)
        training_checks.check(base)
        return make(base, None)
    except ConfigError as error:
        name, size, tokens = base.task.name, base.training_recipe.global_batch_size, base.training_data.seq_length
        raise ConfigError(
            f"{error.what} (this error is in task={name}, which trains the base checkpoint of this task)",
            where=f"task={name}: {error.where}",
            fix=f"change the number of ranks or the model: each step of task={name} must be able to train {size} rows "
            f"of {tokens} tokens",
            rule=error.rule,
        ) from error


def max_steps(config: Config) -> int:
    """Return the maximum number of optimizer steps; an epoch drops its incomplete last batch."""
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    assert training.epochs is not None
    return training.epochs * (config.training_data.num_train_rows // config.training_recipe.global_batch_size)


def batches(config: Config, world: World) -> Batch:
    """Return the batch sizes: global batch size = dp * micro-batch size * gradient accumulation steps."""
    r = config.training_recipe
    return Batch(
        global_batch_size=r.global_batch_size,
        micro_batch_size=r.micro_batch(world.dp),
        gradient_accumulation_steps=num_microbatches(config, world),
        tokens_per_step=r.global_batch_size * config.training_data.seq_length,
    )


def _whole(batch: Batch, config: Config) -> Batch:
    """Return the batch of all local SGD groups, given that of one; unchanged without groups."""
    size = config.training_recipe.global_batch_size
    return dataclasses.replace(batch, global_batch_size=size, tokens_per_step=size * config.training_data.seq_length)


def evaluations(config: Config) -> Evaluation:
    """Return the evaluation schedule: every CEIL(samples / GBS) steps, the first ones skipped.

    Without a target the model is also evaluated after its last step.

    Source: MLPerf training rules. llama2_70b_lora: every 384 samples, skip FLOOR(0.125 * GBS + 2); llama31_8b: every
    12,288 samples, skip none.
    """
    r = config.training_recipe
    every = math.ceil(r.eval_every_samples / r.global_batch_size)
    known = BENCHMARKS.get(config.task.benchmark or "")
    rules = (known and known.schedule) or LLAMA2_70B_LORA.schedule
    assert rules is not None
    skip = r.eval_skip if r.eval_skip is not None else rules.skipped(r.global_batch_size)
    first = every * (skip + 1)
    last = max_steps(config)
    at_steps = list(range(first, last + 1, every))
    if not config.training.has_target and at_steps[-1:] != [last]:
        at_steps.append(last)
    return Evaluation(every_steps=every, first_step=at_steps[0] if at_steps else first, at_steps=at_steps)


def submission(config: Config) -> Submission:
    """Return the submission fields of the log; org and platform mark a run that may not be submitted."""
    task, cluster = config.task, config.cluster
    has_target = config.training.has_target
    deviations = closed_division.deviations(config)
    is_submittable = task.submittable and closed_division.has_benchmark_model(config)
    mark = "" if is_submittable else f" ({task.name}: {NOT_A_SUBMISSION})"
    return Submission(
        benchmark=task.benchmark if has_target else None,
        shape_of=task.benchmark if not has_target and closed_division.has_benchmark_shape(config) else None,
        division="open" if deviations or task.division is Division.open else "closed",
        org=cluster.org + mark,
        platform=cluster.platform + mark,
        status=cluster.status,
        deviations=deviations,
    )
