"""Looks inside the engine, once per rank: `python -m tests.helpers.probe frozen|evaluate plan.json [ADAPTERS]`."""

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import mllog
from jobs.engines.megatron.groups import end_ranks, start_ranks
from jobs.ranks.identity import from_environment
from jobs.tasks.train import Loop, train

if TYPE_CHECKING:
    from jobs.engines.megatron.model import ModelAndOptimizer
from bench.contract import plan_kinds


def main() -> None:
    what, plan, folder = sys.argv[1], plan_kinds.load(Path(sys.argv[2])), Path(sys.argv[3])
    start_ranks(plan, from_environment())
    from jobs.data import rows as rows_of
    from jobs.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(plan, plan.trials[0].seed)
    engine.load(Path(str(plan.base_dir)), adapters=False)
    if what == "frozen":
        before = digests(engine.parts)
        train(Loop(plan, engine, plan.trials[0], mllog.Writer(None)))
        after = digests(engine.parts)
        assert before[False] == after[False], "a frozen weight has changed"
        assert before[True] != after[True], "no adapter has changed"
    else:
        engine.load(folder, adapters=True)
        print("eval loss", engine.evaluate(rows_of.load(plan, "eval")))
    end_ranks()


def digests(parts: "ModelAndOptimizer") -> dict[bool, str]:
    """Return a hash of the bits of all adapters (True) and of everything else (False) on this rank."""
    from jobs.engines.megatron.lora import is_adapter

    hashes = {True: hashlib.sha256(), False: hashlib.sha256()}
    for chunk in parts.unwrapped_chunks():
        for name, parameter in chunk.named_parameters():
            hashes[is_adapter(name)].update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return {kind: value.hexdigest() for kind, value in hashes.items()}


if __name__ == "__main__":
    main()
