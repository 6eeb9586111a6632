"""What a program gets: its words, its environment, and the description of its trial."""

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import checksums, mllog, plan_kinds, run_files
from bench.contract.node_facts import GpuFacts
from bench.contract.plan import Trial
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import PLACEHOLDERS, Per, Program
from bench.contract.schema import Device, GpuVendor
from bench.errors import ConfigError
from bench.planning import compose
from helpers import ranks, written_records
from helpers.paths import ROOT
from jobs.command import describe, words
from jobs.command.child import MAX_LINE_BYTES, TAIL_BYTES, Kept, Lines
from jobs.node_checks import facts, hardware
from jobs.ranks import telemetry
from jobs.ranks.guard import Guard
from jobs.ranks.identity import Rank
from jobs.ranks.program import Begun
from jobs.tasks import describe as of_tasks
from jobs.tasks.prepare import prepare_rows_of

WHO = Rank(13, 5, 16, "dgx-0", 29500)
TRIAL = Trial(index=1, seed=8, log="result_1.txt")


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """The plan of a program on two nodes that trains to a target, with the task's rows and weights."""
    overrides = (
        *("task=lora70b", "cluster=dgxh200", "engine=command", "parallel={tp: 4, pp: 2, cp: 1}", "cluster.num_nodes=2"),
        *(
            "cluster.paths.data=/data",
            "cluster.paths.model=/model",
            "cluster.paths.logs=/logs",
            "cluster.master_port=null",
        ),
        *(
            "engine.command.argv=[train,'{lr}','{pp}','{micro_batch_size}','{data}','{model}']",
            "cluster.price_per_gpu_hour=2.5",
        ),
    )
    return plan_kinds.required(compose.compose(overrides), TrainingPlan)


def test_every_placeholder_has_its_value(plan: TrainingPlan, tmp_path: Path) -> None:
    known = words.values(plan, TRIAL, WHO, tmp_path)
    assert known == {
        "num_ranks": "16",
        "num_nodes": "2",
        "ranks_per_node": "8",
        "rank": "13",
        "local_rank": "5",
        "node": "1",
        "master_addr": "dgx-0",
        "master_port": "29500",
        "tp": "4",
        "pp": "2",
        "cp": "1",
        "global_batch_size": "8",
        "micro_batch_size": "1",
        "gradient_accumulation_steps": "4",
        "seq_length": "8192",
        "max_steps": "1024",
        "eval_every_steps": "48",
        "target": "0.925",
        "lr": "0.0004",
        "seed": "8",
        "trial": "1",
        "data": "/data",
        "model": "/model",
        "examples": str(ROOT / "jobs/command/examples"),
        "run": str(tmp_path),
        "output": f"{tmp_path}/rank_logs/trial_1.output",
        "checkpoints": f"{tmp_path}/program_checkpoints/trial_1",
    }
    assert known.keys() == PLACEHOLDERS.keys()


def test_placeholders_without_a_value_are_left_out(tmp_path: Path) -> None:
    overrides = ("task=my_program", "cluster=local", "engine.command.argv=[train]")
    plan = plan_kinds.required(compose.compose(overrides), TrainingPlan)
    known = words.values(plan, TRIAL, Rank(0, 0, 1, "here", 1), tmp_path)
    assert PLACEHOLDERS.keys() - known.keys() == {"seq_length", "target", "data", "model"}


def test_the_words_of_a_program_are_filled() -> None:
    texts = {"argv": ["{x}", "python", "{{x}}"], "file": "{x}.out", "folder": "/{x}", "environment": {"A": "{x}"}}
    filled = {"argv": ["7", "python", "{x}"], "file": "7.out", "folder": "/7", "environment": {"A": "7"}}
    assert words.with_values(Program(**texts), {"x": "7"}) == Program(**filled)
    bare = words.with_values(Program(argv=["python", "{x}"]), {"x": "7"})
    assert bare == Program(argv=[sys.executable, "7"])


@pytest.mark.parametrize("path", ["", os.pathsep.join(["/lib", words.ROOT, "", "/other"]), words.ROOT])
def test_the_environment_of_a_program(plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The variables of runstop's own ranks are removed, and those of the program win."""
    monkeypatch.setattr(
        os, "environ", dict.fromkeys([*words.OURS, *words.OF_RANK, "HOME", "A"], "old") | {"PYTHONPATH": path}
    )
    known = {
        "HOME": "old",
        "MASTER_ADDR": "mine",
        "MASTER_PORT": "29500",
        **plan.config.cluster.environment,
        "A": "new",
    }
    known |= {"PYTHONPATH": os.pathsep.join(["/lib", "/other"])} if "lib" in path else {}
    of_rank = {"RANK": "13", "LOCAL_RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    of_rank |= {"NODE_RANK": "1", "GROUP_RANK": "1"}
    program = Program(argv=["x"], environment={"MASTER_ADDR": "mine", "A": "new"})
    assert words.environment(program, plan, WHO) == known
    program.per = Per.rank
    assert words.environment(program, plan, WHO) == known | of_rank


@pytest.mark.parametrize(
    ("rank", "local_rank", "starts"),
    [(0, 0, {Per.rank, Per.node, Per.job}), (8, 0, {Per.rank, Per.node}), (1, 1, {Per.rank})],
)
def test_the_ranks_that_start_a_program(rank: int, local_rank: int, starts: set[Per]) -> None:
    who = Rank(rank, local_rank, 16, "here", 1)
    assert {per for per in Per if words.starts_here(Program(argv=["x"], per=per), who)} == starts


GPU = GpuFacts(0, "GPU-1", "NVIDIA H200", *[None] * 6)


@pytest.mark.parametrize(("listed", "accelerator"), [((GPU, replace(GPU, name="other")), "NVIDIA H200"), (None, None)])
def test_the_description_of_a_trial_has_the_settings_that_its_program_gets(
    plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch, listed: Any, accelerator: str | None
) -> None:
    for name, value in (("cpu_model", "EPYC"), ("operating_system", "Debian"), ("gpus", (listed, None, None))):
        monkeypatch.setattr(hardware, name, lambda value=value: value)
    monkeypatch.setattr(of_tasks, "commit", lambda *places: {(of_tasks.ROOT, facts.IMAGE): "0123"}[places])
    known = {
        "initial_weights": "checkpoint",
        "data_source": "prepared",
        "submission_benchmark": "llama2_70b_lora",
        "submission_division": "closed",
        "submission_org": "unset: cluster.org",
        "submission_status": "onprem",
        "submission_platform": "1x NVIDIA DGX H200",
        "target_accuracy": 0.925,
        "seed": 8,
        "global_batch_size": 8,
        "train_samples": 3901,
        "eval_samples": 173,
        "max_sequence_length": 8192,
        "config_filename": "task/lora70b.yaml",
        "model_tflop_per_sample": plan.tflop_per_sample,
        "accelerator_peak_tflops": 1978.9,
        "micro_batch_size": 1,
        "opt_base_learning_rate": 0.0004,
        "pipeline_parallelism": 2,
        "num_ranks": 16,
        "host_processor_model_name": "EPYC",
        "operating_system": "Debian",
        "commit": "0123",
        "price_per_gpu_hour": 2.5,
        "currency": "USD",
    }
    known |= {} if accelerator is None else {"accelerator": accelerator}
    assert describe.trial(plan, TRIAL) == known


def test_gpus_that_the_driver_does_not_name_are_not_measured(
    plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only rank 0 measures, and only GPUs."""
    listed = [replace(GPU, uuid=None)]
    monkeypatch.setattr(hardware, "gpus", lambda: (listed, None, None))
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    amd = copy.deepcopy(plan)
    amd.config.cluster.gpu.vendor = GpuVendor.amd
    off, cpu = copy.deepcopy(plan), copy.deepcopy(plan)
    off.config.launch.telemetry, cpu.config.cluster.device = False, Device.cpu
    why = '. gpu_telemetry {"not_measured": "the driver does not name the GPUs of this node"} {"node": "node1"}'
    for number, (one, rank, shown) in enumerate(
        [(plan, 0, [why]), (amd, 0, [why]), (off, 0, []), (cpu, 0, []), (plan, 1, [])]
    ):
        with mllog.Writer(tmp_path / str(number)) as log:
            begun = Begun(one, TRIAL, Rank(rank, 0, 16, "here", 1), log, tmp_path, Guard(tmp_path / "error"))
            describe.Telemetry(begun).log(log)
        assert written_records.of_log(tmp_path / str(number)) == shown
        listed[:] = [GPU] if one is plan else listed  # AMD's GPUs have no such names


def test_the_samples_of_the_first_gpus_are_logged_and_attached(
    plan: TrainingPlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = [replace(GPU, uuid=None if number == 3 else f"GPU-{number}") for number in range(10)]
    monkeypatch.setattr(hardware, "gpus", lambda: (gpus, None, None))
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    waited: list[str] = []

    class Sampler:
        def __init__(self, file: Path, uuids: list[str]) -> None:
            self.file, self.uuids = file, uuids

        def wait_for_first(self) -> None:
            waited.append("first sample")
            self.file.parent.mkdir(exist_ok=True)
            self.file.write_text("x")

        def summary(self, log: mllog.Writer) -> dict[str, Any]:
            return {"uuids": self.uuids}

    monkeypatch.setattr(telemetry, "Sampler", Sampler)
    with mllog.Writer(tmp_path / "log") as log:
        begun = Begun(plan, TRIAL, Rank(0, 0, 16, "here", 1), log, tmp_path, Guard(tmp_path / "error"))
        sampled = describe.Telemetry(begun)
        assert waited == ["first sample"]
        sampled.log(log)
    summary, attached = written_records.of_log(tmp_path / "log")
    assert summary == '. gpu_telemetry {"uuids": ["0", "1", "2", "4", "5", "6", "7"]} {"node": "node1"}'
    assert attached.startswith(f'. attached_file "{run_files.telemetry(1, "node1")}" {{"bytes": 1,')


def test_the_rows_and_weights_that_a_program_gets_are_checked(tmp_path: Path) -> None:
    """The program reads them itself; without folders of the plan there is nothing to check."""
    words_of = ("engine=command", "cluster.ranks_per_node=1", "engine.command.argv=[train,'{data}','{model}']")
    plan = plan_kinds.required(ranks.compose(tmp_path, *words_of), TrainingPlan)
    plan.config.training_data.train_rows, plan.config.training_data.eval_rows = 20, 8
    prepare_rows_of(plan)
    rows, base = Path(str(plan.data_dir)), Path(str(plan.base_dir))
    base.mkdir(parents=True)
    (base / "metadata.json").write_text("weights")
    checksums.write(base, checksums.weight_files(base))
    for number, one in enumerate((plan, replace(plan, data_dir=None, base_dir=None))):
        with mllog.Writer(tmp_path / str(number)) as log:
            describe.inputs(one, log)
    logs = [written_records.of_log(tmp_path / str(number)) for number in range(2)]
    assert [one.split(" {")[-1].split(",")[0] for one in logs[0]] == [
        '"input": "checkpoint"',
        '"input": "train rows"',
        '"input": "eval rows"',
    ]
    assert logs[1] == []
    changed = rows / "train_tokens.npy"
    changed.write_bytes(changed.read_bytes() + b"x")
    with (
        mllog.Writer(None) as log,
        pytest.raises(ConfigError, match=r"the rows were changed: train_tokens.npy") as raised,
    ):
        describe.inputs(plan, log)
    assert raised.value.where == str(rows)


@pytest.mark.parametrize(
    ("chunks", "read", "num_lines"),
    [
        ([b"a\n\nb\r\nc", b"d\re"], ["a", "b", "cd", "e"], 4),
        ([b"\xff\n", b""], ["\ufffd"], 1),
        ([b"", b"\n"], [], 0),
        ([b"x" * MAX_LINE_BYTES, b"\n"], ["x" * MAX_LINE_BYTES], 1),
        ([b"x" * MAX_LINE_BYTES + b"y", b"z\nnext\n"], ["x" * MAX_LINE_BYTES, "next"], 2),
        ([b"x" * MAX_LINE_BYTES + b"y", b"z", b"z\n\nend"], ["x" * MAX_LINE_BYTES, "end"], 2),
        ([b"x" * MAX_LINE_BYTES + b"y", b"z"], ["x" * MAX_LINE_BYTES], 1),
    ],
)
def test_lines_are_split_at_each_break_and_long_ones_are_cut(
    chunks: list[bytes], read: list[str], num_lines: int
) -> None:
    """Of a line that arrives without its end, only the first part is kept."""
    split = Lines()
    assert [line for chunk in chunks for line in split.feed(chunk)] + list(split.finish()) == read
    assert list(split.finish()) == [] and split.num_lines == num_lines


@pytest.mark.parametrize(
    ("sizes", "num_dropped", "kept"),
    [
        ([4, 6], 0, "aaaabbbbbb"),
        ([4, 7, TAIL_BYTES], 1, "aaaabbbbbb\n… 1 bytes of output are not kept …\n" + "c" * TAIL_BYTES),
        ([4, 7, TAIL_BYTES - 1], 0, "aaaabbbbbbb" + "c" * (TAIL_BYTES - 1)),
        (
            [12, 1000, 1000, TAIL_BYTES],
            2002,
            "aaaaaaaaaa\n… 2,002 bytes of output are not kept …\n" + "d" * TAIL_BYTES,
        ),
        (
            [12, 1000, TAIL_BYTES - 1],
            2,
            "aaaaaaaaaa\n… 2 bytes of output are not kept …\n" + "b" * 1000 + "c" * (TAIL_BYTES - 1),
        ),
    ],
)
def test_the_first_and_the_last_bytes_of_a_flood_are_kept(
    sizes: list[int], num_dropped: int, kept: str, tmp_path: Path
) -> None:
    with (tmp_path / "kept").open("wb") as file:
        output = Kept(file.fileno(), most=10)
        for letter, size in zip("abcd", sizes, strict=False):
            output.write(letter.encode() * size)
        output.finish()
        output.finish() if not num_dropped else None
    assert (tmp_path / "kept").read_text() == kept
    assert (output.num_bytes, output.num_dropped) == (sum(sizes), num_dropped)
