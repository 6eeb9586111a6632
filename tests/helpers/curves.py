"""Train several plans, once per rank: `python -m tests.helpers.curves [--exact] FOLDER …`. Logs have all losses.

The folders hold plans of as many ranks each, in any layout. One start serves all of them. With --exact frozen layers
compute in FP32, whatever the precision.
"""

import sys
from pathlib import Path

from bench.contract import mllog, plan_kinds
from bench.contract.plan import Plan
from jobs.engines.megatron.groups import end_ranks, split, start_ranks
from jobs.ranks.identity import from_environment
from jobs.tasks.train import Loop, train


def main() -> None:
    is_exact, folders = sys.argv[1] == "--exact", [Path(argument) for argument in sys.argv[1:] if argument != "--exact"]
    by_folder = {folder: plan_kinds.load(folder / "plan.json") for folder in folders}
    who = from_environment()
    start_ranks(next(iter(by_folder.values())), who)
    from megatron.core import parallel_state

    for folder, plan in by_folder.items():
        parallel_state.destroy_model_parallel()
        split(plan)
        learn(plan, folder / plan.trials[0].log if who.rank == 0 else None, is_exact=is_exact)
    end_ranks()


def learn(plan: Plan, log: Path | None, *, is_exact: bool) -> None:
    """Train from the plan's base; the log gets the losses."""
    from jobs.engines.megatron.engine import MegatronEngine
    from tests.helpers.exact import exact_ops

    engine = MegatronEngine(plan, plan.trials[0].seed, ops=exact_ops(plan) if is_exact else None)
    engine.load(Path(str(plan.base_dir)), adapters=False)
    train(Loop(plan, engine, plan.trials[0], mllog.Writer(log)))


if __name__ == "__main__":
    main()
