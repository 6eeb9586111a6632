"""Fill the placeholders of a program's words for one rank, and make the environment in which it starts."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bench.contract import run_files
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.contract.program import Per, Program, filled
from jobs.ranks.identity import Rank

ROOT = str(Path(__file__).parents[2])
EXAMPLES = Path(__file__).with_name("examples")
OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
"""Set for a program that is started on every rank; torchrun and accelerate set them for their own workers."""
OURS = (run_files.ATTEMPT_VARIABLE, run_files.RESTART_VARIABLE, "PYTHONSAFEPATH")
"""Set for ranks of runstop, and not meant for a program."""


def output_folder(folder: Path, trial: Trial) -> Path:
    """Return the folder for the files of this attempt; it is moved away with the attempt."""
    return folder / run_files.RANK_LOGS / f"trial_{trial.index}.output"


def checkpoint_folder(folder: Path, trial: Trial) -> Path:
    """Return the folder for the program's checkpoints, which the next attempt finds again."""
    return folder / run_files.program_checkpoints(trial.index)


def values(plan: TrainingPlan, trial: Trial, who: Rank, folder: Path) -> dict[str, str]:
    """Return what replaces each placeholder on this rank; those without a value are left out."""
    world, batch, recipe = plan.world, plan.batch, plan.recipe
    known: dict[str, object] = {
        "num_ranks": world.num_ranks,
        "num_nodes": world.num_nodes,
        "ranks_per_node": world.ranks_per_node,
        "rank": who.rank,
        "local_rank": who.local_rank,
        "node": who.rank // world.ranks_per_node,
        "master_addr": who.master_addr,
        "master_port": who.master_port,
        "tp": world.tp,
        "pp": world.pp,
        "cp": world.cp,
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "seq_length": plan.data.seq_length or None,
        "max_steps": plan.max_steps,
        "eval_every_steps": plan.evaluation.every_steps,
        "target": plan.config.training.target_eval_loss,
        "lr": recipe.lr,
        "seed": trial.seed,
        "trial": trial.index,
        "data": expanded(plan.data_dir),
        "model": expanded(plan.base_dir),
        "examples": EXAMPLES,
        "run": folder,
        "output": output_folder(folder, trial),
        "checkpoints": checkpoint_folder(folder, trial),
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def with_values(program: Program, known: Mapping[str, str]) -> Program:
    """Return the program with its placeholders filled."""
    argv = [filled(text, known) for text in program.argv]
    return replace(
        program,
        argv=[sys.executable if argv[0] == "python" else argv[0], *argv[1:]],
        environment={name: filled(text, known) for name, text in program.environment.items()},
        file=None if program.file is None else filled(program.file, known),
        folder=None if program.folder is None else filled(program.folder, known),
    )


def environment(program: Program, plan: TrainingPlan, who: Rank) -> dict[str, str]:
    """Return the program's environment: this rank's, without what is runstop's own, then the program's settings."""
    own = {name: value for name, value in os.environ.items() if name not in (*OURS, *OF_RANK)}
    paths = [path for path in own.pop("PYTHONPATH", "").split(os.pathsep) if path and path != ROOT]
    own |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    own |= {"MASTER_ADDR": who.master_addr, "MASTER_PORT": str(who.master_port)}
    if program.per is Per.rank:
        per_node, node = plan.world.ranks_per_node, str(who.rank // plan.world.ranks_per_node)
        of_rank = (who.rank, who.local_rank, who.world_size, per_node, node, node)
        own |= {name: str(value) for name, value in zip(OF_RANK, of_rank, strict=True)}
    return own | plan.config.cluster.environment | program.environment


def starts_here(program: Program, who: Rank) -> bool:
    """Return whether this rank starts the program, or another rank starts it for this one."""
    return {Per.rank: True, Per.node: who.local_rank == 0, Per.job: who.rank == 0}[program.per]
