"""Settings of engine=command: the user's own program, and the placeholders in its words."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class Per(Enum):
    """How often the program is started: once per rank; once per node, as for torchrun; or once per job, on node 0."""

    rank = "rank"
    node = "node"
    job = "job"


class Adapter(Enum):
    """What reads the program's output: a file of jobs/command/adapters/.

    mllog: its own `:::MLLOG` lines. hf_trainer: what the Trainer of transformers, and TRL, print. plain: regular
    expressions of engine.command.patterns. megatron: Megatron-LM and Megatron-Bridge. The others are named after what
    prints the lines.
    """

    mllog = "mllog"
    hf_trainer = "hf_trainer"
    plain = "plain"
    megatron = "megatron"
    nemo = "nemo"
    torchtitan = "torchtitan"
    deepspeed = "deepspeed"
    llama_factory = "llama_factory"
    maxtext = "maxtext"


GROUPS = ("step", "loss", "eval_loss", "tokens", "step_time_s", "eval_time_s", "total_time_s", "resumed")
"""Names of the groups that patterns of the adapter `plain` may have: the fields of `jobs.command.adapters.Reported`."""

PLACEHOLDERS = {
    "num_ranks": "number of ranks of the run",
    "num_nodes": "number of nodes",
    "ranks_per_node": "number of ranks (GPUs) of each node",
    "rank": "number of this rank; with per=node: number of the first rank of the node",
    "local_rank": "number of this rank on its node",
    "node": "number of this node, from 0",
    "master_addr": "address of the node of rank 0",
    "master_port": "a free port on that node",
    "tp": "tensor parallel size (parallel.tp)",
    "pp": "pipeline parallel size (parallel.pp)",
    "cp": "context parallel size (parallel.cp)",
    "global_batch_size": "rows per optimizer step",
    "micro_batch_size": "rows per forward pass of one model replica",
    "gradient_accumulation_steps": "micro-batches per optimizer step of one model replica",
    "seq_length": "tokens per row",
    "max_steps": "optimizer steps to train",
    "eval_every_steps": "optimizer steps between two evaluations",
    "target": "evaluation loss to reach (task.training.target_eval_loss)",
    "lr": "learning rate (recipe.lr)",
    "seed": "seed of the trial",
    "trial": "number of the trial",
    "data": "folder of the training data",
    "model": "folder of the initial weights",
    "examples": "folder of runstop's example programs, on the machine of the ranks",
    "run": "the run folder",
    "output": "an empty folder for output files, inside the run folder",
    "checkpoints": "a folder for checkpoints; resume keeps this folder",
}
"""The placeholders, and what replaces them."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([a-z_]+)\}")
"""`{{` and `}}` are literal braces; other text in braces, such as JSON, is left alone."""


@dataclass(slots=True, kw_only=True)
class Program:
    """The user's own program. Its words, environment, folder and file may contain placeholders, such as {seed}."""

    argv: list[str]
    """The program and its arguments. `python` is the interpreter of the ranks."""
    per: Per = Per.job
    adapter: Adapter = Adapter.mllog
    patterns: list[str] = field(default_factory=list)
    """For adapter=plain: regular expressions whose groups are named after `GROUPS`."""
    every_steps: int = 1
    """For adapter=hf_trainer, and llama_factory without a file, whose lines do not count steps: optimizer steps between
    two lines (logging_steps)."""
    file: str | None = None
    """A file that the adapter reads instead of standard output; hf_trainer: the trainer_state.json that it reads at the
    end."""
    folder: str | None = None
    """The working folder; None: the run folder."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables, after those of cluster.environment."""
    resumes: bool = False
    """Whether the program continues from {checkpoints} if an earlier attempt left something there."""
    ruleset: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """The MLPerf ruleset of the program's round, such as 5.0.0, which then judges its logs. None: the newest ones."""
    note: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """What the plan shows about the program, such as where it is from, and that it was not run."""
    stop_s: float = 5.0
    """Seconds that the program gets after SIGTERM before it is killed; launchers kill a rank after 10 s."""

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the texts that may contain placeholders, each with its config key."""
        yield from ((f"engine.command.argv[{place}]", text) for place, text in enumerate(self.argv))
        yield from ((f"engine.command.environment.{name}", text) for name, text in self.environment.items())
        yield from ((f"engine.command.{name}", text) for name in ("file", "folder") if (text := getattr(self, name)))

    def uses(self, name: str) -> bool:
        """Return whether a text contains this placeholder."""
        return any(name in placeholders(text) for _, text in self.texts())


def placeholders(text: str) -> list[str]:
    """Return the names of the placeholders in a text, known or not."""
    return [name for name in _PLACEHOLDER.findall(text) if name]


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced; a KeyError for one without a value."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] else match[0][0], text)
