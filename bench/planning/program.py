"""engine=command: refuse settings that cannot start the user's program, and plan its ranks without any estimate.

runstop knows neither the memory nor the step time of a program, so it estimates neither.
"""

import dataclasses
import re
from collections.abc import Iterator

from bench.contract.data import DataSource
from bench.contract.plan import Batch, Evaluation, Recomputed, Submission, World
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import GROUPS, PLACEHOLDERS, Adapter, Per, Program, placeholders
from bench.contract.schema import Config, EngineName, ProfileKind
from bench.contract.task import Kind
from bench.contract.training import StartsFrom
from bench.errors import ConfigError
from bench.mlperf.official import KNOWN
from bench.planning import engine_block
from bench.planning.commands import fields_of_all
from bench.planning.data_folder import base_dir, data_dir
from bench.planning.estimates import documents, flops
from bench.planning.parallelism import split

BLOCK = "engine.command"
MAX_STOP_S = 8.0
"""Launchers kill a rank 10 s after SIGTERM; the runner needs the rest to close its log."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Refusal = tuple[bool, str, str, str]
"""Whether it is refused, the problem, the config key, the fix."""


def check(config: Config) -> None:
    """Refuse settings of a program that are missing or contradictory, and unknown data or models of other engines.

    Raises:
        ConfigError: for the first problem.
    """
    engine_block.check(config, EngineName.command)
    block = config.engine.command
    for is_refused, what, where, fix in _unknown(config) if block is None else _program(config, block):
        if is_refused:
            raise ConfigError(what, where=where, fix=fix)


def _unknown(config: Config) -> Iterator[Refusal]:
    """Yield what only a program can bring itself, in the config of another engine."""
    what = f"engine={config.engine.name.name} needs"
    fix = "choose a model, such as model=tiny, or engine=command"
    yield not config.model.is_known, f"{what} a model, but its sizes are 0", "model", fix
    if config.data is not None:
        is_own = config.data.source is DataSource.program
        yield is_own, f"{what} rows, but data.source is program", "data", "choose other data (data=), or engine=command"
    if config.task.training is not None:
        is_own = config.task.training.starts_from is StartsFrom.program
        where, fix = "task.training.starts_from", "set it to random, checkpoint or task, or choose engine=command"
        yield is_own, f"{what} its initial weights, but starts_from is program", where, fix


def _program(config: Config, block: Program) -> Iterator[Refusal]:
    is_training = config.task.kind is Kind.train
    what = f"engine=command runs programs that train, but task {config.task.name} is of kind {config.task.kind.name}"
    yield not is_training, what, "engine, task", "choose a task that trains, such as task=my_program"
    fix = f"set {BLOCK}.argv to the program and its arguments, such as {BLOCK}.argv=[python,train.py]"
    yield not block.argv or not block.argv[0], "the program is not set", f"{BLOCK}.argv", fix
    for key, text in block.texts():
        unknown = next((name for name in placeholders(text) if name not in PLACEHOLDERS), None)
        fix = f"use one of {', '.join(sorted(PLACEHOLDERS))}; or write {{{{{unknown}}}}} to pass the text "
        fix += f"{{{unknown}}} itself"
        yield unknown is not None, f"{{{unknown}}} is not a placeholder", key, fix
    for name in block.environment:
        fix = "use letters, digits and _"
        yield not _NAME.fullmatch(name), f"{name!r} is not a name of a variable", f"{BLOCK}.environment", fix
    what = f"trials={config.trials}, but the program does not get {{seed}}: its trials would repeat the same work"
    yield config.trials > 1 and not block.uses("seed"), what, f"{BLOCK}.argv, trials", "pass {seed}, or set trials=1"
    yield from _values(config, block)
    yield from _reading(block)
    yield from _last_rank(config, block)
    what = f"stop_s is {block.stop_s:g} s, but must be from 0 to {MAX_STOP_S:g} s"
    yield not 0 <= block.stop_s <= MAX_STOP_S, what, f"{BLOCK}.stop_s", "set a time in this range"
    what, fix = f"there is no MLPerf ruleset {block.ruleset}", f"choose {', '.join(sorted(KNOWN))}, or null"
    yield block.ruleset is not None and block.ruleset not in KNOWN, what, f"{BLOCK}.ruleset", fix
    yield from _not_for_programs(config)


def _values(config: Config, block: Program) -> Iterator[Refusal]:
    """Yield placeholders that this config has no value for."""
    paths, recipe, training = config.cluster.paths, config.training_recipe, config.training
    missing = {
        "data": (paths.data is None, "cluster.paths.data", "export DATADIR, or set cluster.paths.data"),
        "model": (paths.model is None, "cluster.paths.model", "export MODEL, or set cluster.paths.model"),
        "target": (not training.has_target, "task.training.target_eval_loss", "set it, or remove the placeholder"),
        "seq_length": (config.training_data.seq_length == 0, "data.seq_length", "set it to the tokens of a row"),
    }
    missing["model"] = (
        missing["model"][0] or training.starts_from is StartsFrom.random,
        missing["model"][1] if paths.model is None else "task.training.starts_from",
        missing["model"][2] if paths.model is None else "the task starts from random weights: remove the placeholder",
    )
    if config.training_data.source is DataSource.random:
        missing["data"] = (True, "data.source", "random rows are in no folder: choose other data")
    for name, (is_missing, where, fix) in missing.items():
        what = f"the program uses {{{name}}}, but this run has no such value"
        yield is_missing and block.uses(name), what, where, fix
    ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    p = config.parallel
    size = (p.tp or 1) * (p.pp or 1) * (p.cp or 1)
    what = f"{ranks} ranks cannot be split into replicas of tp x pp x cp = {size} ranks"
    yield ranks % size > 0, what, "parallel.tp, parallel.pp, parallel.cp", f"make tp x pp x cp a divisor of {ranks}"
    dp = max(1, ranks // size)
    micro = recipe.micro_batch(dp)
    uses = [name for name in ("micro_batch_size", "gradient_accumulation_steps") if block.uses(name)]
    what = f"dp {dp} x micro-batch {micro} does not divide the global batch of {recipe.global_batch_size}"
    where = "recipe.global_batch_size, recipe.micro_batch_size"
    fix = f"make the global batch a multiple of this product, or remove {', '.join(f'{{{name}}}' for name in uses)}"
    yield bool(uses) and recipe.global_batch_size % (dp * micro) > 0, what, where, fix


def _reading(block: Program) -> Iterator[Refusal]:
    """Yield settings of the adapter that contradict each other."""
    is_plain, key = block.adapter is Adapter.plain, f"{BLOCK}.patterns"
    fix = f"set {key}, such as ['step (?P<step>\\d+) loss (?P<loss>\\S+)'], or another {BLOCK}.adapter"
    yield is_plain and not block.patterns, "adapter plain has no pattern to read lines with", key, fix
    what, fix = f"patterns are given, but the adapter is {block.adapter.name}", f"set {BLOCK}.adapter=plain"
    yield not is_plain and bool(block.patterns), what, f"{key}, {BLOCK}.adapter", fix
    names: set[str] = set()
    for place, pattern in enumerate(block.patterns):
        where, groups, why = f"{key}[{place}]", set[str](), ""
        try:
            groups = set(re.compile(pattern).groupindex)
        except re.error as error:
            why = str(error)
        yield bool(why), f"{pattern!r} is not a regular expression: {why}", where, "correct it (Python's module re)"
        unknown = sorted(groups - set(GROUPS))
        what = f"the pattern has the unknown group{'s' * (len(unknown) > 1)} {', '.join(unknown)}"
        fix = f"use only groups with the names {', '.join(GROUPS)}, such as (?P<step>\\d+)"
        yield bool(unknown), what, where, fix
        names |= groups
    what = "no pattern has a group with the name step, so runstop cannot count the steps"
    yield is_plain and "step" not in names, what, key, "add (?P<step>\\d+) to the pattern of the training lines"
    what = f"every_steps is {block.every_steps}, but must be 1 or more"
    yield block.every_steps < 1, what, f"{BLOCK}.every_steps", "set it to the Trainer's logging_steps"


def _last_rank(config: Config, block: Program) -> Iterator[Refusal]:
    """Yield an adapter whose lines the last rank prints, if this output is not read."""
    cluster, is_megatron = config.cluster, block.adapter is Adapter.megatron and block.file is None
    is_elsewhere = cluster.num_nodes > 1 or (block.per is Per.rank and cluster.ranks_per_node > 1)
    what = "Megatron's last rank prints the lines of the training, but only the output of rank 0 is read"
    fix = (
        "also write the output of the last rank to a file, for example with tee, and set engine.command.file to "
        "this file"
    )
    yield is_megatron and is_elsewhere, what, f"{BLOCK}.adapter, {BLOCK}.file", fix


def _not_for_programs(config: Config) -> Iterator[Refusal]:
    """Yield settings that act inside of an engine, where runstop cannot act on a program."""
    profiled = config.launch.profile is not ProfileKind.none
    what = f"launch.profile is {config.launch.profile.name}, but runstop cannot profile a program of engine=command"
    yield profiled, what, "launch.profile", "set launch.profile=none"
    every = config.training.checkpoint_every_steps
    where, fix = (
        "task.training.checkpoint_every_steps",
        f"set this key to null, and {BLOCK}.resumes=true if the program resumes by itself",
    )
    what = f"checkpoint_every_steps is {every}, but with engine=command the program saves its own checkpoints"
    yield every is not None, what, where, fix
    is_local_sgd = config.training_recipe.averaging is not None or config.parallel.groups is not None
    yield is_local_sgd, "local SGD needs engine=megatron", "parallel.groups, recipe.local_sgd", "choose engine=megatron"


def layout(config: Config) -> tuple[World, Batch]:
    """Return how the config splits ranks and batch for the program, which may do something else."""
    p, size = config.parallel, config.training_recipe.global_batch_size
    world = split(config, tp=p.tp or 1, pp=p.pp or 1, cp=p.cp or 1, sp=bool(p.sp))
    micro = config.training_recipe.micro_batch(world.dp)
    batch = Batch(
        global_batch_size=size,
        micro_batch_size=micro,
        gradient_accumulation_steps=max(1, size // (world.dp * micro)),
        tokens_per_step=size * config.training_data.seq_length,
    )
    return world, batch


def make(
    config: Config, *, max_steps: int, evaluation: Evaluation, submission: Submission, base: TrainingPlan | None
) -> TrainingPlan:
    """Return the plan of a program, without estimates. Which steps it evaluates is its own choice.

    Rows and initial weights are inputs of the run only if a placeholder passes their folder to the program.
    """
    world, batch = layout(config)
    data, share = config.training_data, documents.attention_share(config)
    is_known = config.model.is_known and data.seq_length > 0
    return TrainingPlan(
        **fields_of_all(config),
        world=world,
        batch=batch,
        evaluation=dataclasses.replace(evaluation, at_steps=[]),
        max_steps=max_steps,
        submission=submission,
        recompute=Recomputed(full=False, qkv_layers=0, fc1_layers=0),
        memory=None,
        cost=None,
        tflop_per_sample=flops.tflop_per_sample(
            config.model, config.training.lora, seq_length=data.seq_length, attention_share=share or 1.0
        )
        if is_known
        else None,
        attention_share=share,
        peak_tflops=flops.peak_tflops(config),
        data_dir=data_dir(config) if config.program and config.program.uses("data") else None,
        base_dir=base_dir(config, base) if config.program and config.program.uses("model") else None,
        base=base,
    )
