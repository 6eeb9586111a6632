"""Train several plans of engine=huggingface in one start: `python -m tests.helpers.huggingface_ranks FOLDER …`.

The libraries are imported once, and this process forks the ranks. Each folder gets its log, with all losses, and from
every rank held_R.json: what it holds of the model while no layer is at work. A folder may have adapters to begin with,
in `given`; their evaluation loss is written first.
"""

import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.backends.local import free_port
from bench.contract import mllog
from bench.contract.plan import Plan

if TYPE_CHECKING:
    from jobs.engines.huggingface.engine import HuggingFaceEngine
from bench.contract import plan_kinds


def main() -> None:
    folders = [Path(argument) for argument in sys.argv[1:]]
    num_ranks = plan_kinds.load(folders[0] / "plan.json").world.num_ranks
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

    by_folder = {folder: plan_kinds.load(folder / "plan.json") for folder in folders}
    who = from_environment()
    for number, (folder, plan) in enumerate(by_folder.items()):
        if number == 0:
            start_ranks(plan, who)
        learn(plan, folder, who.rank)
    end_ranks()


def learn(plan: Plan, folder: Path, rank: int) -> None:
    """Train from the plan's base, or resume from a checkpoint, and save adapters if there are any."""
    import torch

    from jobs.data import rows as rows_of
    from jobs.engines.huggingface.engine import HuggingFaceEngine
    from jobs.tasks.checkpoints import Checkpoints
    from jobs.tasks.train import Loop, train

    trial, saving = plan.trials[0], None
    engine = HuggingFaceEngine(plan, trial.seed)
    if plan.base_dir is not None:
        engine.load(Path(plan.base_dir), adapters=False)
    if (folder / "given").is_dir():
        engine.load(folder / "given", adapters=True)
    engine.warm_up(plan.config.recipe.warmup_iterations, trial.seed, profile=None)
    if (folder / "given").is_dir():
        (folder / f"given_{rank}.txt").write_text(str(engine.evaluate(rows_of.load(plan, "eval"))))
    log = mllog.Writer(folder / trial.log if rank == 0 else None)
    if plan.config.training.checkpoint_every_steps is not None:
        saving = Checkpoints(plan, trial, engine, folder, log, rank=rank)
        saving.resume()
    log.start(mllog.RUN_START)
    for key, value, metadata in engine.facts():
        log.event(key, value, **metadata)
    with torch.compiler.set_stance("fail_on_recompile"):  # what is compiled, the warm-up has compiled
        train(Loop(plan, engine, trial, log, saving=saving))
    if saving is not None:
        saving.finish()
    (folder / f"held_{rank}.json").write_text(json.dumps(held(engine)))
    if plan.config.training.lora is not None:
        engine.save(folder / "adapters", adapters=True)
    if hasattr(engine.placement.module, "destroy"):
        engine.placement.module.destroy()
    torch.distributed.barrier()


def held(engine: "HuggingFaceEngine") -> dict[str, Any]:
    """Return the numbers of each weight that this rank holds and updates, and whether it is a shard of torch's."""
    from torch.distributed.tensor import DTensor

    from jobs.engines.huggingface import training_state

    model = engine.placement.model
    num_bytes = training_state.weight_bytes(model)  # ends what an evaluation has gathered
    held, is_dtensor = {}, {}
    for name, parameter in model.named_parameters():
        own = getattr(parameter, "ds_tensor", parameter)
        is_dtensor[name] = isinstance(own, DTensor)
        held[name] = (own.to_local() if isinstance(own, DTensor) else own).numel()
    updated = {shard.name: shard.size for shard in engine.placement.shards()}
    return {"bytes": num_bytes, "held": held, "is_dtensor": is_dtensor, "updated": updated}


if __name__ == "__main__":
    main()
