"""What commands accept, and print about runs, logs and rules: golden_commands.txt, so that a change shows its effects.

After a change on purpose, run it once with WRITE_COMMANDS=1, and read the difference.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.contract import mllog, node_facts, plan_kinds, run_files
from bench.contract.plan import Plan
from bench.contract.plan_kinds import GenerationPlan, KernelsPlan
from bench.planning.compose import compose
from bench.runs import ledger, tags
from bench.runs import status as statuses
from bench.runs.command_line import with_overrides
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from helpers import (
    answers_log,
    command_line,
    golden,
    kernels_log,
    model_folders,
    planned_log,
    planted_runs,
    serving,
    serving_log,
    user_tables,
)
from helpers.clock import Clock, in_zone
from helpers.facts import SOUND
from helpers.nodes import health_report
from jobs.node_checks.floors import judged

GOLDEN = Path(__file__).with_name("golden_commands.txt")
COMMANDS = Path(__file__).with_name("commands.txt")
"""One command in each line, after the environment variables that it has."""
NOW_S = 1_800_600_000
DAY_S = 86_400
TOKENIZER: dict[str, Any] = {
    "tokenizer.json": {"model": {"vocab": {"a": 0, "</s>": 1}}, "added_tokens": []},
    "tokenizer_config.json": {"eos_token": "</s>"},
}
H200 = {"num_ranks": 8, "accelerator": "NVIDIA H200", "config_filename": "task/lora_8b.yaml"}
COMMITS = ("0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98-dirty")


def furnish(folder: Path, clock: Clock) -> None:
    """Write runs of several tasks, which ended in several ways, and other files."""
    runs = folder / "runs"
    for number, speed in enumerate((100.0, 100.3, 99.8, 100.1, 95.0)):
        changes: dict[str, Any] = H200 | {"commit": COMMITS[number == 4], "operating_system": f"Linux {number // 3}"}
        planted_runs.plant(runs / f"a{number}", clock, speed, speed + 0.5 * (number + 1), **changes)
        clock.now_s += DAY_S
    tags.change(runs / "a1", add=["baseline", "v2"], remove=[], note="before the driver")
    tags.change(runs / "a4", add=["v3"], remove=[], note=None)
    words = ["task=lora_tiny", "cluster=local", "cluster.device=cpu"]
    plan = compose(words)
    for number, speed in enumerate((50.0, 51.0)):
        own = [*words, f"seed_base={number}"]
        planted_runs.plant(runs / f"b{number}", clock, speed, plan=plan, lora_rank=16 * (number + 1))
        (runs / f"b{number}/config.yaml").write_text(with_overrides("trials: 1\n", own))
    statuses.write(runs / "b0", Status(outcome=Ending.valid, exit_code=0))
    _end(
        runs / "failed",
        plan,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB.\n" * 3,
        rule="RUN-01",
    )
    _end(runs / "unknown", plan, "".join(f"line {number} of the output\n" for number in range(20)))
    (runs / "unknown" / run_files.RANK_LOGS).mkdir()
    (runs / "unknown" / run_files.RANK_LOGS / "rank_0.out").write_text("first\nsecond\nthird \x1b[2J\nnot ended")
    (runs / "empty").mkdir()
    (runs / "empty/plan.json").write_text(plan_kinds.dumps(plan))
    for days, slow in ((3, ""), (2, "dgx-1"), (0.5, "dgx-2")):
        _checked(runs / f"nodes{days}", days, slow)
    generation, kernels = compose(["task=generate_7b", "cluster=dgx1"]), compose(["task=memcpy", "cluster=dgx1"])
    assert isinstance(generation, GenerationPlan) and isinstance(kernels, KernelsPlan)
    for name in ("logs/answers", "logs/kernels", "logs/served"):
        (folder / name).mkdir(parents=True)
    answers_log.write(generation, folder / "logs/answers/result_0.txt", answers_log.rows(generation), run_s=77.5)
    times = {point.name: 50.0 + 7 * number for number, point in enumerate(kernels.points)}
    kernels_log.write(kernels, folder / "logs/kernels/result_0.txt", time_us=lambda point: times[point.name])
    served = serving.planned("cluster.device=cpu", "task.serving.arrivals=[burst]", "task.serving.rates=[]")
    latencies = {served.loads[0].name: [4.0, None, 16.0, 8.0]}
    serving_log.write(served, folder / "logs/served/result_0.txt", latencies)
    trained = planned_log.planned("llama31_8b")
    for number in range(3):
        path, losses = folder / f"logs/result_{number}.txt", [6.0 - 0.2 * each for each in range(14 - number)]
        planned_log.write(trained, path, losses, trial=0)
    for name in ("llama31_8b", "qwen3_8b"):
        model = compose(["task=lora_7b", f"model={name}", "model.weights=random"]).config.model
        written = model_folders.write(folder / f"models/{name}", model)
        for file, content in TOKENIZER.items():
            (written / file).write_text(json.dumps(content))
    (folder / "logs/notes.txt").write_text("nothing\n")
    (folder / "logs/empty.txt").write_text("")
    (folder / "logs/image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "logs/binary.dat").write_bytes(bytes(range(32)) * 8)
    (folder / "logs/object.json").write_text('{"a": 1}')
    (folder / "logs/packed.gz").write_bytes(b"\x1f\x8bno gzip")
    for path in folder.rglob("*"):
        os.utime(path, (NOW_S - 3 * DAY_S, NOW_S - 3 * DAY_S))


def _end(folder: Path, plan: Plan, output: str, *, rule: str | None = None) -> None:
    """Write a run that failed with an output."""
    folder.mkdir()
    (folder / "slurm-7.out").write_text(output)
    planted_runs.abort(folder, plan)
    statuses.write(folder, Status(outcome=Ending.failed, exit_code=1, rule=rule, what="trial 0 failed"))


def _checked(folder: Path, days_ago: float, slow: str) -> None:
    """Write a run of Slurm whose node check found one node slow."""
    plan, time_ms = (
        compose(["task=lora_tiny", "cluster=slurm_test", "cluster.num_nodes=2"]),
        int((NOW_S - days_ago * DAY_S) * 1000),
    )
    (folder / "facts").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(folder, plan)
    for one in SOUND:
        (folder / "facts" / f"rank_{one.rank}.json").write_text(node_facts.dumps(replace(one, time_ms=time_ms)))
    report = health_report(time_ms=time_ms)
    ranks = tuple(replace(rank, gemm_tflops=300.0) if rank.node == slow else rank for rank in report.ranks)
    (folder / "health.json").write_text(node_facts.dumps(judged(replace(report, ranks=ranks))))
    ledger.end(folder, 0, Outcome.aborted)
    statuses.write(folder, Status(outcome=Ending.failed, exit_code=1, what="trial 0 failed"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with runs, files and other inputs of the commands."""
    planned_log.without_this_machine(monkeypatch)
    user_tables.leave_out(monkeypatch)
    folder, clock = tmp_path / "here", Clock()
    (folder / "home").mkdir(parents=True)
    monkeypatch.setattr(mllog, "clocks_ms", clock.read_ms)
    monkeypatch.setattr(time, "time", lambda: float(NOW_S))
    monkeypatch.setattr(time, "time_ns", lambda: NOW_S * 10**9)
    with in_zone("UTC"):
        furnish(folder, clock)
        yield folder


VARYING = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ by runstop \S+", "TIME by runstop VERSION"),
    (r"\d{8}-\d{6}-lora_tiny-local-\w{4}", "RUN"),
    (r"[\d,]+ bytes, sha256 \w+…?", "CHECKSUM"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (result_\d.txt  stopped)", r"TIME  \1"),
)
"""What differs from day to day or from version to version, and what replaces it."""


def shown(command: str, folder: Path) -> list[str]:
    """Return what a command prints, and its exit code."""
    variables, own = re.fullmatch(r"((?:[A-Z]+=\S+ )*)(.*)", command).groups()  # type: ignore[union-attr]
    answer = command_line.answer(own, folder, dict(one.split("=", 1) for one in variables.split()))
    text = answer.text.replace(str(folder), "{here}")
    for pattern, replacement in VARYING:
        text = re.sub(pattern, replacement, text)
    text = re.sub(r"\d+\.\d{8,}", lambda match: f"{float(match[0]):.7g}", text)
    return [f"$ {variables}runstop {own}", *text.splitlines(), f"exit code {answer.code}", ""]


def arguments_of(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield what each argument of a verb accepts, and its help."""
    yield f"{name}: {parser.description}"
    yield from (f"  {line}" for line in (parser.epilog or "").splitlines())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each, own in action.choices.items():
                yield from arguments_of(f"{name} {each}".strip(), own)
        elif action.dest != "help":
            of_type = getattr(action.type, "__name__", "text")
            takes = f"{type(action).__name__} of {of_type}, {action.nargs}, {action.metavar}, {action.choices}"
            known = f"const {action.const}, default {action.default}, {'required' if action.required else 'optional'}"
            yield f"  {' '.join(action.option_strings) or action.dest} ({action.dest}): {takes}; {known}; {action.help}"
    for group in parser._mutually_exclusive_groups:
        yield f"  one of: {', '.join(each.dest for each in group._group_actions)}"
    yield ""


@pytest.mark.long
def test_commands_print_the_golden_texts(here: Path) -> None:
    commands = COMMANDS.read_text().splitlines()
    lines = [*arguments_of("", cli._parser()), *(line for command in commands for line in shown(command, here))]
    golden.require("\n".join(lines), GOLDEN, variable="WRITE_COMMANDS")
