"""Plans of serving tasks for tests: the tiny task, or the stub that injects faults in place of a server."""

from pathlib import Path

from bench.contract.plan_kinds import ServingPlan
from bench.planning import compose
from helpers import model_folders
from helpers.paths import ROOT

STUB = "{python},-m,helpers.stub_server,{port}"
WORDS = 128


def planned(*words: str) -> ServingPlan:
    plan = compose.compose(["task=serve_tiny", *words])
    assert isinstance(plan, ServingPlan)
    return plan


def with_stub(folder: Path, fault: str, *words: str) -> ServingPlan:
    """Return the plan of a burst of 24 requests to the stub; its argv has {model}, as every argv does."""
    model = tokenizer(folder / "model")
    argv = f"[{','.join(repr(word) for word in [*STUB.split(','), fault, '{model}'])}]"
    return planned(
        *("cluster.ranks_per_node=1", "model.weights=checkpoint", f"cluster.paths.model={model}"),
        *(f"task.serving.server.argv={argv}", "task.serving.server.removes_eos=false"),
        "task.serving.server.batches_tokens=false",
        *("task.serving.arrivals=[burst]", "task.serving.rates=[]", "task.serving.requests=24"),
        *("task.serving.tokens_in=16", "task.serving.tokens_out=8", "task.serving.warm_up=8"),
        *("task.serving.server.startup_timeout_s=60", f"+task.serving.server.environment.PYTHONPATH={ROOT}/tests"),
        *("task.serving.max_client_delay=1", *words),
    )


def elsewhere(url: str, tokenizer_folder: Path) -> tuple[str, ...]:
    """Return the words of a server that somebody else has started."""
    named = {"url": url, "model": "tiny", "tokenizer": str(tokenizer_folder)}
    return tuple(f"task.serving.server.{key}={value}" for key, value in named.items())


def tokenizer(folder: Path) -> Path:
    """Write a model folder whose weights have only headers; token n is the word wn."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model_folders.write(folder, compose.compose(["task=serve_tiny"]).config.model)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
