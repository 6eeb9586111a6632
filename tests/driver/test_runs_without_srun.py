"""Runs without srun: two driver processes on this machine, each with a separate run folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.contract import mllog, plan_kinds
from bench.diagnosis import explain
from bench.launch import resume
from bench.mlperf import reader
from bench.planning import compose
from bench.runs import status as statuses
from bench.runs.status import Ending
from bench.runs.verification import verify
from helpers import ranks
from helpers.ranks import free_port

pytestmark = pytest.mark.starts
TOKEN = "of this run"
SHORT_RUN = (
    *("model.weights=random", "task.training.max_steps=12", "task.training.target_eval_loss=null"),
    *("task.benchmark=null", "recipe.eval_every_samples=96", "recipe.eval_skip=0", "recipe.log_every_steps=1"),
    *("data.eval_rows=16", "launch.health=false"),
)
LONG_RUN = (*SHORT_RUN, "task.training.max_steps=4000")
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Two:
    """The two nodes of a run; the lead's folder has its plan."""

    def __init__(self, tmp: Path, cache: Path, *overrides: str, has_base: bool = False) -> None:
        where = ("cluster=hosts", "cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=1")
        words = ("task=lora_tiny", *where, "cluster.org=runstop", *overrides)
        self.lead, self.own = tmp / "lead", tmp / "member"
        self.lead.mkdir(mode=0o755)
        self.port = free_port()
        paths = [f"cluster.paths.{name}={cache}" for name in ("data", "model", "logs")]
        plan = ranks.compose(cache, *words) if has_base else compose.compose([*words, *paths])
        (self.lead / "plan.json").write_text(plan_kinds.dumps(plan))
        self.processes: list[Process] = []

    def start(self, node: int, *words: str, token: str = TOKEN) -> Process:
        folder = self.own if node else self.lead
        joining = ["--node", f"{node}", "--lead", f"127.0.0.1:{self.port}"]
        argv = [sys.executable, "-m", "bench.driver", str(folder), *joining]
        environment = os.environ | {"RUNSTOP_TOKEN": token, "RUNSTOP_NODE": f"rig{node}"}
        process = subprocess.Popen(
            [*argv, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.processes.append(process)
        return process

    def both(self, *words: str) -> tuple[Process, Process]:
        return self.start(0, *words), self.start(1)

    def trains(self) -> None:
        """Wait until the first step is logged."""
        while "train_loss" not in text(self.lead / "result_0.txt"):
            for process in self.processes:
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)

    def ranks(self) -> list[psutil.Process]:
        return [child for process in self.processes for child in psutil.Process(process.pid).children(recursive=True)]

    @property
    def ledger(self) -> list[dict[str, object]]:
        return list(json.loads(text(self.lead / "ledger.json")))


Nodes = Callable[..., Two]


@pytest.fixture
def nodes(tmp_path: Path, cache: Path) -> Iterator[Nodes]:
    created: list[Two] = []

    def make(*overrides: str, base: Path | None = None) -> Two:
        created.append(Two(tmp_path, base or cache, *overrides, has_base=base is not None))
        return created[-1]

    yield make
    for process in (process for two in created for process in two.processes):
        with process:
            process.kill()


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def outputs(*processes: Process) -> list[str]:
    return [process.communicate(timeout=300)[0] for process in processes]


@pytest.mark.trains
def test_two_nodes_train_and_the_lead_node_gathers_all_files(nodes: Nodes) -> None:
    two = nodes(*SHORT_RUN)
    lead, member = two.both()
    printed = outputs(lead, member)
    assert (lead.returncode, member.returncode) == (0, 0), printed
    assert two.ledger[0]["outcome"] == "valid" and verify(two.lead).passed
    assert not (two.own / "ledger.json").exists() and not (two.own / "result_0.txt").exists()
    facts = [json.loads(path.read_text()) for path in sorted((two.lead / "facts").iterdir())]
    assert [(fact["rank"], fact["node"]) for fact in facts] == [(0, "rig0"), (1, "rig1")]
    first = two.ledger[0]["attempts"]
    assert isinstance(first, list) and first[0]["nodes"] == "rig0,rig1"
    assert {f"trial_0_rank_{rank}.out" for rank in (0, 1)} <= {path.name for path in two.lead.glob("rank_logs/*")}


def test_a_node_with_another_token_is_refused_and_the_run_waits_for_the_right_one(nodes: Nodes) -> None:
    two = nodes(*SHORT_RUN)
    lead, intruder = two.start(0), two.start(1, token="of another run")
    (refused,) = outputs(intruder)
    known = "HST-03: the lead node refuses node 1: its token differs from the token of this run"
    assert intruder.returncode == 2 and known in refused
    lead.send_signal(signal.SIGTERM)
    (printed,) = outputs(lead)
    assert lead.returncode == 143 and "refused 'rig1': this process does not know the token" in printed
    status = statuses.read(two.lead)
    assert status is not None and (status.outcome, status.rule) == (Ending.interrupted, "SLU-08")


def test_a_node_that_never_joins_ends_the_run(nodes: Nodes) -> None:
    two = nodes(*SHORT_RUN)
    lead = two.start(0, "--join-s", "0.2")
    (printed,) = outputs(lead)
    assert lead.returncode == 1 and "HST-02: node 1 has not joined within 0 s" in printed
    status = statuses.read(two.lead)
    assert status is not None and (status.outcome, status.rule) == (Ending.failed, "HST-02")


@pytest.mark.trains
@pytest.mark.faults
@pytest.mark.parametrize("restarts", [True, False])
def test_a_lost_node_ends_all_ranks_and_the_next_attempt_continues(nodes: Nodes, restarts: bool) -> None:
    two = nodes(*LONG_RUN, "task.training.max_steps=400")
    lead, member = two.both(*(["--restarts"] if restarts else []))
    two.trains()
    ranks = two.ranks()
    assert len(ranks) >= 2 and not any("RUNSTOP_TOKEN" in rank.environ() for rank in ranks)
    member.kill()
    since_s = time.monotonic()
    (printed,) = outputs(lead)
    assert "HST-01: node 1 (rig1) was lost: the connection was closed" in printed, printed
    assert time.monotonic() - since_s < 60
    _, left = psutil.wait_procs(ranks, timeout=30)
    assert not left, "no rank outlives its node or its lead"
    if restarts:
        assert (lead.returncode, statuses.read(two.lead)) == (75, None)
        assert two.ledger[0]["outcome"] == "running"
    else:
        cause = explain([two.lead])
        assert lead.returncode == 1 and cause.rule == "HST-01" and two.ledger[0]["outcome"] == "aborted"
    resumed_lead, resumed_member = two.both()
    outputs(resumed_lead, resumed_member)
    assert resumed_lead.returncode == 0
    first = two.ledger[0]["attempts"]
    assert isinstance(first, list) and [attempt["outcome"] for attempt in first][1] == "valid"
    assert "HST-01" in str(first[0]) or not restarts


@pytest.mark.trains
@pytest.mark.faults
def test_a_cancelled_run_reports_it_and_keeps_its_log(nodes: Nodes) -> None:
    two = nodes(*LONG_RUN)
    lead, member = two.both("--restarts")
    two.trains()
    ranks = two.ranks()
    lead.send_signal(signal.SIGTERM)
    printed = outputs(lead, member)
    assert (lead.returncode, member.returncode) == (143, 143), printed
    _, left = psutil.wait_procs(ranks, timeout=30)
    status = statuses.read(two.lead)
    assert not left and status is not None
    assert (status.outcome, status.rule, status.exit_code) == (Ending.interrupted, "SLU-08", 143)
    last = reader.read(two.lead / "result_0.txt")[0][-2]
    assert (last.key, last.metadata["status"]) == (mllog.RUN_STOP, "aborted")
    assert resume.runs.find(two.lead).state_name == "interrupted"


@pytest.mark.trains
@pytest.mark.slow
def test_adapters_of_nodes_with_separate_folders_are_gathered(nodes: Nodes, prepared: Path) -> None:
    """Each pipeline rank has its layers' adapters; torch's own reader finds all of them in the lead's folder."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load

    split = ("parallel={tp: 1, pp: 2, cp: 1, sp: false}", "task.training.max_steps=8", "recipe.eval_every_samples=64")
    two = nodes(
        *(override for override in SHORT_RUN if not override.startswith("model.weights")), *split, base=prepared
    )
    lead, member = two.both()
    printed = outputs(lead, member)
    assert lead.returncode == 0, printed
    folder = two.lead / "adapters_0"
    assert {path.name[:4] for path in folder.glob("*.distcp")} == {"__0_", "__1_"}
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(about.size) for name, about in metadata.items() if hasattr(about, "size")}
    with pytest.warns(UserWarning, match="single process"):
        load(tensors, checkpoint_id=folder)
    (lora_b,) = (tensor for name, tensor in tensors.items() if name.endswith("linear_proj.lora_b"))
    assert lora_b.shape[0] == 4 and all(layer.abs().sum() > 0 for layer in lora_b), "every layer was trained"
    assert verify(two.lead).passed


@pytest.mark.trains
@pytest.mark.faults
def test_a_killed_rank_ends_the_ranks_of_all_nodes(nodes: Nodes) -> None:
    two = nodes(*LONG_RUN)
    lead, member = two.both("--restarts")
    two.trains()
    ranks = two.ranks()
    next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
    printed = outputs(lead, member)
    assert (lead.returncode, member.returncode) == (1, 1), printed
    _, left = psutil.wait_procs(ranks, timeout=30)
    status = statuses.read(two.lead)
    assert not left and status is not None and status.outcome is Ending.failed
    assert explain([two.lead]).rule == "RUN-02" and two.ledger[0]["outcome"] == "aborted"


@pytest.mark.trains
@pytest.mark.faults
def test_a_start_that_reaches_its_time_limit_without_progress_is_not_repeated(nodes: Nodes) -> None:
    two = nodes(*LONG_RUN)
    lead, member = two.both("--restarts", "--limit-min", "0.7")
    printed = outputs(lead, member)
    status = statuses.read(two.lead)
    assert (lead.returncode, member.returncode) == (1, 1), printed
    assert status is not None and (status.outcome, status.rule) == (Ending.failed, "SLU-07")
    assert "has finished nothing" in str(status.during)


@pytest.mark.trains
@pytest.mark.parametrize("spares", ["rig2", ""])
def test_the_node_of_a_killed_rank_is_left_out_if_there_is_a_spare(nodes: Nodes, spares: str) -> None:
    """The exit code asks the backend for the next attempt, which does not use the node."""
    two = nodes(*LONG_RUN)
    (two.lead / ".spares").write_text(f"{spares}\n")
    lead, member = two.both("--restarts", "--job", "7")
    two.trains()
    (rank,) = (child for child in psutil.Process(member.pid).children() if "jobs.tasks.train" in child.cmdline())
    rank.kill()
    printed = outputs(lead, member)
    assert (lead.returncode, member.returncode) == ((75, 75) if spares else (1, 1)), printed
    if spares:
        why = "RUN-02: a rank was killed on rig1"
        assert f"{why}; the next attempt uses a spare node" in printed[0]
        left_out = json.loads(text(two.lead / "left_out.json"))
        assert {name: (entry["why"], entry["job"]) for name, entry in left_out.items()} == {"rig1": (why, "7")}
    else:
        assert not (two.lead / "left_out.json").exists()
