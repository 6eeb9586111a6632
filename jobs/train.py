"""One trial, once per rank: `python -m jobs.train PLAN --trial K`. Reads the plan, writes the log."""

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from bench import mllog
from bench import plan as planning
from bench.errors import ConfigError
from bench.plan import Plan, Trial
from jobs import pace as pacing
from jobs import stop, world
from jobs.rank import Rank, from_environment

if TYPE_CHECKING:
    from jobs.megatron.model import Engine


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.train", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; the log is written beside it")
    parser.add_argument("--trial", type=int, required=True, help="which of the plan's trials")
    args = parser.parse_args()
    folder = args.plan.resolve().parent
    who = from_environment()
    with stop.guarded(folder / "rank_logs" / f"trial_{args.trial}_rank_{who.rank}.error") as guard:
        plan = planning.load(args.plan)
        trial = _trial(plan, args.trial)
        log = mllog.Writer(folder / trial.log if who.rank == 0 else None)
        guard.finish = lambda: log.finish("aborted")
        run(plan, trial, who, log, folder)


def run(plan: Plan, trial: Trial, who: Rank, log: mllog.Writer, folder: Path) -> None:
    """Initialise, warm up on made-up data, train from run_start to run_stop, then keep the adapters."""
    log_caches(folder / "rank_logs" / f"trial_{trial.index}.caches", log)
    log.start(mllog.INIT_START)
    start_ranks(plan, who)
    from jobs.megatron import checkpoint, loop, model

    describe(plan, trial, log)
    engine = model.build(plan, trial.seed)
    if plan.base_dir is not None:
        checkpoint.load(engine, Path(plan.base_dir), adapters=False)
    profile = folder / "rank_logs" / f"trial_{trial.index}.profile" if plan.config.launch.profile else None
    loop.warm_up(engine, plan.config.recipe.warmup_iterations, trial.seed, profile=profile)
    pacing.forget_memory()
    log.stop(mllog.INIT_STOP)
    log.start(mllog.RUN_START)
    train(engine, trial, log)
    pacing.log_memory(plan, log)
    if plan.config.task.lora is not None and not planning.is_random(plan.config):
        checkpoint.save(engine, folder / f"adapters_{trial.index}", adapters=True)
    end_ranks()


def log_caches(said: Path, log: mllog.Writer) -> None:
    """Log what each node did with its page cache, as the batch script wrote it down: `NODE cleared` or `NODE kept`."""
    if not said.exists():
        log.event(mllog.CACHE_CLEAR, False, reason="page caches are the cluster's to drop")
        return
    for line in said.read_text().splitlines():
        node, _, done = line.partition(" ")
        log.event(mllog.CACHE_CLEAR, done == "cleared", node=node)


def train(engine: "Engine", trial: Trial, log: mllog.Writer) -> None:
    """Train until the target or max_steps and write run_stop; data is first touched here.

    Raises:
        BenchError: the loss is no number.
    """
    from jobs.megatron import data, loop

    plan = engine.plan
    train_rows, eval_rows = data.load(plan, "train"), data.load(plan, "eval")
    order = data.train_order(plan, trial.seed)
    pace = pacing.Pace(plan, log)
    log.start(mllog.BLOCK_START, samples_count=0, step=0)
    for step in range(1, plan.config.recipe.max_steps + 1):
        share = loop.train_step(engine, train_rows, next(order), step)
        pace.stepped()
        if step % plan.config.recipe.log_every_steps == 0:
            pace.log(step, loop.mean_loss(share, plan.batch.global_batch_size))
        if step in plan.evaluation.at_steps:
            place = {"samples_count": planning.samples(plan, step), "step": step}
            log.stop(mllog.BLOCK_STOP, **place)
            log.start(mllog.EVAL_START, **place)
            eval_loss = pacing.finite(loop.evaluate(engine, eval_rows), "evaluation", step)
            epochs = place["samples_count"] / plan.config.data.train_rows  # what ruleset 5.1.0's open division asks for
            log.event(mllog.EVAL_ACCURACY, eval_loss, **place, epoch_num=epochs)
            log.stop(mllog.EVAL_STOP, **place)
            if plan.config.task.target_eval_loss is not None and eval_loss <= plan.config.task.target_eval_loss:
                log.finish("success", **place)
                return
            log.start(mllog.BLOCK_START, **place)
            pace.restart(step)
    place = {"samples_count": planning.samples(plan, step), "step": step}
    log.stop(mllog.BLOCK_STOP, **place)
    log.finish("success" if plan.config.task.target_eval_loss is None else "aborted", **place)


def describe(plan: Plan, trial: Trial, log: mllog.Writer) -> None:
    """Log what is measured and on what: the keys that rulesets 5.1.0 and 6.1.0 ask for, and the versions."""
    import megatron.core
    import torch

    s, r, w, task = plan.submission, plan.config.recipe, plan.world, plan.config.task
    linear, other = {"fp32": ("fp32", "fp32"), "bf16": ("bfloat16", "bfloat16"), "fp8": ("fp8", "bfloat16")}[
        plan.config.precision.name
    ]
    if planning.is_random(plan.config):
        log.event(mllog.INITIAL_WEIGHTS, mllog.RANDOM, shape_of=s.shape_of)
    facts = {
        "submission_benchmark": s.benchmark,
        "submission_division": s.division,
        "submission_org": s.org,
        "submission_platform": s.platform,
        "submission_status": s.status,
        "target_accuracy": task.target_eval_loss,
        "seed": trial.seed,
        "global_batch_size": r.global_batch_size,
        "micro_batch_size": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
        "train_samples": plan.config.data.train_rows,
        "eval_samples": plan.config.data.eval_rows,
        "max_sequence_length": plan.config.data.seq_length,
        "opt_name": "adamw",
        "opt_base_learning_rate": r.lr,
        "opt_learning_rate_training_steps": r.max_steps,
        "opt_learning_rate_warmup_factor": r.lr_warmup_steps / r.max_steps,
        "opt_learning_rate_decay_schedule": "cosine",
        "opt_adamw_weight_decay": r.weight_decay,
        "opt_adamw_beta_1": r.adam_beta1,
        "opt_adamw_beta_2": r.adam_beta2,
        "opt_adamw_epsilon": r.adam_eps,
        "opt_gradient_clip_norm": r.clip_grad,
        "lora_rank": task.lora and task.lora.rank,
        "lora_alpha": task.lora and task.lora.alpha,
        "lora_dropout": task.lora and task.lora.dropout,
        "tensor_parallelism": w.tp,
        "pipeline_parallelism": w.pp,
        "context_parallelism": w.cp,
        "expert_parallelism": 1,
        "lowest_numerical_precision_in_linear": linear,
        "lowest_numerical_precision_in_attn": other,
        "lowest_numerical_precision_in_comm": other,
        "config_filename": f"task/{task.name}.yaml",
        "trainable_parameters": plan.memory.trainable_parameters,
        mllog.MODEL_TFLOP_PER_SAMPLE: plan.tflop_per_sample,
        mllog.ACCELERATOR_PEAK_TFLOPS: plan.peak_tflops,
        "num_ranks": w.num_ranks,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "software": {"torch": torch.__version__, "megatron_core": megatron.core.__version__},
    }
    for key, value in facts.items():
        if value is not None:
            log.event(key, value)


def start_ranks(plan: Plan, who: Rank) -> None:
    """Join the process groups of the plan's layout.

    Raises:
        SubmitError: what `world.join` raises.
    """
    from jobs.megatron import cpu

    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")  # not needed: layer.py says what is used
    warnings.filterwarnings(
        "ignore", message=r"barrier\(\): using the device under current context"
    )  # it is the right one
    cpu.install()
    world.join(plan, who)
    split(plan)
    _connect()


def split(plan: Plan) -> None:
    """Make megatron-core's groups of the plan's layout; all ranks must have met."""
    from megatron.core import parallel_state

    w = plan.world
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=w.tp,
        pipeline_model_parallel_size=w.pp,
        virtual_pipeline_model_parallel_size=w.vpp if w.vpp > 1 else None,
        context_parallel_size=w.cp,
        create_gloo_process_groups=False,  # nothing here uses the second set of groups
    )


def _connect() -> None:
    """Use the groups that training uses once, so that NCCL takes its memory before the model takes all."""
    import torch
    from megatron.core import parallel_state

    split = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_model_parallel_group(),
    )
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for group in (None, replicas, *(group for group in split if group.size() > 1)):
        torch.distributed.all_reduce(torch.zeros(1, device=torch.cuda.current_device()), group=group)


def end_ranks() -> None:
    """Leave the process groups together."""
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _trial(plan: Plan, index: int) -> Trial:
    if not 0 <= index < len(plan.trials):
        raise ConfigError(f"no trial {index}", where="--trial", fix=f"the plan has trials 0 to {len(plan.trials) - 1}")
    return plan.trials[index]


if __name__ == "__main__":
    main()
