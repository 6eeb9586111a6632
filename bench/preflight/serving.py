"""What a server needs before it is started: its model's folder, and on this machine its program."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.contract.plan import Plan, ServingPlan
from bench.contract.plan_paths import expanded
from bench.contract.schema import Runtime
from bench.rules.check import CannotTellError, Finding, Subject, broken


def reads_model(plan: Plan) -> bool:
    """Return whether a server loads the site's model, or the client reads the tokenizer of one that runs elsewhere."""
    serving = plan.config.task.serving
    return isinstance(plan, ServingPlan) and bool(plan.base_dir or (serving and serving.server.tokenizer))


def model(subject: Subject) -> Iterator[Finding | str]:
    """Yield what the model's folder lacks."""
    serving, base = subject.plan.config.task.serving, subject.plan.base_dir
    own = serving.server.tokenizer if serving else None
    full = expanded(base or own)
    if full is None:
        raise CannotTellError("MODEL is not set")
    wanted = [(full, "config.json")] if base else []
    for folder, name in (*wanted, (expanded(own) or full, "tokenizer.json")):
        if not (Path(folder) / name).is_file():
            fix = "name a folder of Hugging Face's format by MODEL or task.serving.server.model, "
            fix += "or set model.weights=random"
            yield broken("CFG-06", f"there is no {name}", folder, fix=fix)
    yield full


def is_started_here(plan: Plan) -> bool:
    """Return whether a server is started on this machine, in no container."""
    if not isinstance(plan, ServingPlan) or plan.config.cluster.backend.is_elsewhere:
        return False
    serving = plan.config.task.serving
    is_ours = serving is not None and serving.server.url is None and not serving.server.argv[0].startswith("{")
    return is_ours and plan.config.container.runtime is Runtime.none


def program(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether the program of the server is missing."""
    serving = subject.plan.config.task.serving
    assert serving is not None
    name = serving.server.argv[0]
    if (found := shutil.which(name)) is None:
        fix = f"install {serving.server.name.name}, name the path of {name}, or choose another server="
        yield broken("SRV-01", f"{name} is not on PATH", "task.serving.server.argv", fix=fix)
    else:
        yield found
