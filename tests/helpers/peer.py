"""Train several plans of engine=huggingface: `python -m tests.helpers.peer FOLDER …`, once for all of their ranks.

The libraries are imported once, and this process forks the ranks. Each folder gets its log, with all losses, and from
every rank held_R.json: what it holds of the model while no layer is at work.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

from bench.backends.local import free_port
from bench.contract import mllog
from bench.contract import plan as plans
from bench.contract.plan import Plan


def main() -> None:
    folders = [Path(word) for word in sys.argv[1:]]
    num_ranks = plans.load(folders[0] / "plan.json").world.num_ranks
    os.environ |= {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(free_port())}
    with warnings.catch_warnings(action="ignore"):
        import deepspeed  # noqa: F401 - the ranks find these loaded

        import jobs.engines.huggingface.engine  # noqa: F401
    pids = [os.fork() or be_rank(folders, {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))


def be_rank(folders: list[Path], environment: Mapping[str, str]) -> int:
    """Train everything as one rank, and end; returns never."""
    os.environ |= environment
    code = 1
    try:
        train_all(folders)
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train_all(folders: list[Path]) -> None:
    from jobs.engines.huggingface import end_ranks, start_ranks
    from jobs.ranks.identity import from_environment

    by_folder = {folder: plans.load(folder / "plan.json") for folder in folders}
    who = from_environment()
    for number, (folder, plan) in enumerate(by_folder.items()):
        if number == 0:
            start_ranks(plan, who)
        learn(plan, folder, who.rank)
    end_ranks()


def learn(plan: Plan, folder: Path, rank: int) -> None:
    """Train from the plan's base, and save adapters if there are any; the log gets the losses."""
    import torch

    from jobs.engines.huggingface.engine import HuggingFaceEngine
    from jobs.tasks.train import train

    engine = HuggingFaceEngine(plan, plan.trials[0].seed)
    if plan.base_dir is not None:
        engine.load(Path(plan.base_dir), adapters=False)
    engine.warm_up(plan.config.recipe.warmup_iterations, plan.trials[0].seed, profile=None)
    log = mllog.Writer(folder / plan.trials[0].log if rank == 0 else None)
    log.start(mllog.RUN_START)
    for key, value, metadata in engine.facts():
        log.event(key, value, **metadata)
    train(plan, engine, plan.trials[0], log)
    held = {"updated": {shard.name: shard.size for shard in engine.placement.shards()}, "kinds": {}}
    for name, parameter in engine.placement.model.named_parameters():
        own = getattr(parameter, "ds_tensor", parameter)
        own = own.to_local() if hasattr(own, "to_local") else own
        held["kinds"][name] = [type(parameter.data).__name__, own.numel(), parameter.numel()]
    (folder / f"held_{rank}.json").write_text(json.dumps(held))
    if plan.config.training.lora is not None:
        engine.save(folder / "adapters", adapters=True)
    if hasattr(engine.placement.module, "destroy"):
        engine.placement.module.destroy()
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
