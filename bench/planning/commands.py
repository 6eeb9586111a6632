"""The commands that every rank runs, in order, and the files that the run folder will contain."""

import dataclasses
import itertools
from typing import Any

from bench.contract import plan as plans
from bench.contract import run_files, transport
from bench.contract.plan import NODE_CHECK, NODE_FACTS, PLAN_VERSION, PREPARE, Command, Plan, Trial
from bench.contract.program import Per, Program
from bench.contract.schema import Config, DataSource, Device
from bench.contract.training import StartsFrom
from bench.planning import nemo

PROBE_MIN = 10
"""Time limit of a job that only checks its nodes."""


def make_commands(config: Config, trials: list[Trial]) -> list[Command]:
    """Return the commands of every rank, in order: node checks, preparation of rows and base checkpoint, trials."""
    prepare, limit = _command(PREPARE, "tasks.prepare", log=run_files.PREPARE_LOG), config.walltime
    module, python = ("command.run", "python") if config.program else nemo.trial_program(config)
    return [
        *node_commands(config, health=config.launch.health),
        *([prepare] if needs_preparing(config) else []),
        *(
            _command(f"trial {t.index}", module, "--trial", f"{t.index}", log=t.log, limit_min=limit, python=python)
            for t in trials
        ),
    ]


def node_commands(config: Config, *, health: bool) -> list[Command]:
    """Return the commands that collect node facts and, if cluster.health is set, measure the nodes.

    Empty for backend local, whose only node is this machine.
    """
    if not config.cluster.backend.is_elsewhere:
        return []
    check = [_command(NODE_CHECK, "node_checks.health")] if health and config.cluster.health else []
    return [_command(NODE_FACTS, "node_checks.facts"), *check]


def _command(
    name: str, module: str, *words: str, log: str | None = None, limit_min: int | None = None, python: str = "python"
) -> Command:
    argv = [python, "-m", f"jobs.{module}", run_files.PLAN, *words]
    return Command(name=name, argv=argv, log=log, limit_min=limit_min)


def probe(plan: Plan, *, num_nodes: int, health: bool) -> Plan:
    """Return the plan of a job that only checks its nodes and has no trials."""
    launch = dataclasses.replace(plan.config.launch, health=health, array=False, replace_slow=False)
    cluster = dataclasses.replace(plan.config.cluster, spare_nodes=0)
    config = dataclasses.replace(plan.config, launch=launch, cluster=cluster)
    checks = node_commands(config, health=health)
    name = f"probe-{plan.config.cluster.name}"
    return dataclasses.replace(
        plans.on_nodes(plan, num_nodes),
        name=name,
        config=config,
        trials=[],
        commands=checks,
        walltime_min=PROBE_MIN,
    )


def fields_of_all(config: Config) -> dict[str, Any]:
    """Return the fields that the plans of all kinds share, except `world`."""
    trials = [Trial(index=k, seed=config.seed_base + k, log=run_files.result(k)) for k in range(config.trials)]
    return {
        "version": PLAN_VERSION,
        "name": f"{config.task.name}-{config.cluster.name}",
        "config": config,
        "trials": trials,
        "walltime_min": walltime_min(config),
        "environment": environment(config),
        "commands": make_commands(config, trials),
        "files": files(config, trials),
    }


def needs_preparing(config: Config) -> bool:
    """Return whether rows or a base checkpoint must be prepared before the first trial."""
    if config.task.training is None:
        return False
    needs_rows = config.training_data.source.needs_preparation
    needs_base = config.training.starts_from is StartsFrom.task
    if (program := config.program) is not None:  # it reads only what a placeholder passes to it
        needs_rows, needs_base = needs_rows and program.uses("data"), needs_base and program.uses("model")
    return needs_rows or needs_base


def files(config: Config, trials: list[Trial]) -> list[str]:
    """Return the files that the run folder will contain."""
    outputs = _training_outputs(config) if config.task.training else []
    per_trial = [(t.log, *(name.format(t.index) for name in outputs)) for t in trials]
    measures = config.launch.health and config.cluster.health is not None
    node_files = [f"{run_files.FACTS}/", *([run_files.HEALTH] if measures else [])]
    return [
        run_files.CONFIG,
        run_files.PLAN,
        *run_files.OF_BACKEND[config.cluster.backend],
        *(node_files if config.cluster.backend.is_elsewhere else []),
        *([run_files.PREPARE_LOG] if needs_preparing(config) else []),
        *itertools.chain(*per_trial),
        f"{run_files.RANK_LOGS}/",
        run_files.LEDGER,
        run_files.STATUS,
    ]


def _training_outputs(config: Config) -> list[str]:
    """Return the files that a trial writes in addition to its log; {} is the trial's number."""
    outputs = [] if config.training_data.source is DataSource.random else [run_files.loss_figure("{}")]
    if config.program is not None:
        return outputs + ([f"{run_files.program_checkpoints('{}')}/"] if config.program.uses("checkpoints") else [])
    outputs += [f"{run_files.adapters('{}')}/"] if plans.keeps_adapters(config) else []
    return outputs + ([] if config.training.checkpoint_every_steps is None else [f"{run_files.checkpoints('{}')}/"])


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",
}
"""Set for every rank. Each rank has one OpenMP thread, because the ranks of a node share its cores. Ranks start in the
run folder; PYTHONSAFEPATH (Python 3.11 and later) prevents imports from it."""
CUDA_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Also set on GPUs: freed memory can then be reused for tensors of another size."""
CPU_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1"}
"""Also set on CPUs: it hides GPUs from libraries that would use them, every rank the first one. It hides AMD GPUs as
well; an empty value does not. Slurm sets the variable itself for jobs that request GPUs.

Source: CUDA's programming guide, "CUDA environment variables"; ROCm's clr, rocdevice.cpp, Device::init.
"""

ONLY_TENSOR_PARALLEL = "CUDA_DEVICE_MAX_CONNECTIONS"
"""One connection keeps kernels and collectives of tensor parallelism in order. FSDP's collectives need several, and so
do replicas: with one connection, a collective that waits for another one holds up the layers behind it.

Measured: docs/results/2026-11-26-several-gpus.md.
"""


def environment(config: Config, *, tp: int | None = None) -> dict[str, str]:
    """Return the variables of every rank; tp: the plan's, if it trains."""
    own, is_cuda = config.cluster.environment, config.cluster.device is Device.cuda
    of_device = CUDA_ENVIRONMENT if is_cuda else CPU_ENVIRONMENT
    of_transport = transport.LOGGING if is_cuda and transport.has_settings(own) else {}
    if config.program is not None:
        return _of_program(config.program, is_cuda=is_cuda) | of_transport | own
    is_left_out = config.huggingface is not None or (tp == 1 and config.nemo is None)
    of_all = {name: value for name, value in ENVIRONMENT.items() if not (is_left_out and name == ONLY_TENSOR_PARALLEL)}
    return of_all | of_device | of_transport | own


def _of_program(program: Program, *, is_cuda: bool) -> dict[str, str]:
    """Return what is set for a program: no setting of an engine, and one OpenMP thread only if there is one per rank.

    The runner removes PYTHONSAFEPATH again, so that a program can import the files next to it.
    """
    names = ["PYTHONUNBUFFERED", "PYTHONSAFEPATH", *(["OMP_NUM_THREADS"] if program.per is Per.rank else [])]
    return {name: ENVIRONMENT[name] for name in ENVIRONMENT if name in names} | ({} if is_cuda else CPU_ENVIRONMENT)


def walltime_min(config: Config) -> int | None:
    """Return the time limit of a job in minutes: 5, plus walltime + 5 for each of its trials; None without a limit.

    Source: WALLTIME in the config_*.sh of NVIDIA's MLPerf training submissions.
    """
    if config.walltime is None:
        return None
    return job_min(1 if config.launch.array else config.trials, config.walltime)


def job_min(trials: int, trial_min: int) -> int:
    """Return the time limit in minutes of a job with so many trials."""
    return 5 + trials * (trial_min + 5)
