"""Test that messages of drivers, file systems, networks and Python give the right rule, line and fix."""

import json
import os
from pathlib import Path

import pytest

from bench import diagnosis, preflight
from bench.backends import local as backends_local
from bench.backends.nodes import lead
from bench.contract import plan_kinds
from bench.errors import BenchError
from bench.planning import compose
from helpers.types import MakeLog
from jobs.ranks import guard

MESSAGES = [
    # log lines, rule, part of the evidence, part of the fix
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). "
        "Please update your GPU driver",
        "HW-03", "found version 11040", "driver must support",
    ),
    ("Failed to initialize NVML: Driver/library version mismatch", "HW-04", "version mismatch", "reboot"),
    ("NVRM: API mismatch: the client has the version 570.124.06, but", "HW-04", "570.124.06", "/proc/driver"),
    (
        "AssertionError: Device compute capability 8.9 or higher required for FP8 execution.",
        "HW-05", "8.9 or higher", "precision=bf16",
    ),
    (
        "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
        "HW-05", "_scaled_mm", "precision=bf16",
    ),
    ("OSError: [Errno 116] Stale file handle: '/lustre/data/train.npy'", "RUN-14", "train.npy", "storage"),
    ("OSError: [Errno 5] Input/output error", "RUN-14", "Errno 5", "dmesg -T"),
    ("cp: error reading '/lustre/data/rows.bin': Input/output error", "RUN-14", "rows.bin", "dmesg -T"),
    (
        "[ 4730.850361] I/O error, dev nvme0n1, sector 4217392 op 0x1:(WRITE) flags 0x9800 phys_seg 7 prio class 2",
        "RUN-14", "nvme0n1", "storage",
    ),
    ("OSError: [Errno 24] Too many open files: '/lustre/data/shard_9'", "RUN-15", "shard_9", "ulimit -n"),
    ("RuntimeError: received 0 items of ancdata", "RUN-15", "ancdata", "ulimit -n"),
    ("RuntimeError: can't start new thread", "RUN-15", "thread", "ulimit -u"),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RUN-16", "cublasCreate", "micro_batch_size",
    ),
    (
        "RuntimeError: Error(s) in loading state_dict for GPTModel:\n\tsize mismatch for lm_head.weight: "
        "copying a param with shape torch.Size([32000, 64]) from checkpoint, "
        "the shape in current model is torch.Size([32064, 64]).",
        "CFG-10", "[32000, 64]", "convert it again",
    ),
    (
        "megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded ((4096, 68)) "
        "and expected ((4096, 72)) tensor for key module.x.weight",
        "CFG-10", "(4096, 72)", "convert it again",
    ),
    (
        "node7:12:34 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        "NCC-03", "port error", "a link went down",
    ),
    (
        "node7:12:34 [0] transport/net_ib.cc:154 NCCL WARN NET/IB : mlx5_1:1 async fatal event on QP (0x7309): local",
        "NCC-03", "async fatal event", "ibqueryerrors",
    ),
    (
        "node7:12:34 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.2.0.2<54862> with status=12 "
        "opcode=0 len=0 vendor err 129 (Recv)",
        "NCC-03", "status=12", "remote port does not answer",
    ),
    (
        "torch._inductor.exc.InvalidCxxCompiler: "
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None,)",
        "RUN-08", "No working C++ compiler", "gcc",
    ),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'gcc'", "RUN-08", "'gcc'", "C compiler"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", "RUN-08", "nvcc", "image"),
    (
        "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        "RUN-11", "Bus error", "--shm-size",
    ),
    (
        "node7:12:34 [3] misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-KWfVyt (size 5967872)",
        "RUN-11", "nccl-KWfVyt", "--shm-size",
    ),
    (
        "node7:12:34 [6] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes",
        "RUN-11", "nccl-fjwOOB", "--shm-size",
    ),
    (
        "RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
        "pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:12721$0",
        "NCC-08", "127.0.1.1", "GLOO_SOCKET_IFNAME",
    ),
    (
        "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: "
        "SO_ERROR: Connection refused, remote=[127.0.0.1]:12721$0",
        "NCC-06", "127.0.0.1", "NCC-08",
    ),
    ("srun: error: dgx-1: task 3: Exited with exit code 143", "RUN-02", "exit code 143", "what killed the rank"),
    ("srun: error: dgx-1: task 3: Terminated", "RUN-02", "Terminated", "what killed the rank"),
    ("    traceback : Signal 15 (SIGTERM) received by PID 3170", "RUN-02", "SIGTERM", "what killed the rank"),
]  # fmt: skip
TRACEBACK = """\
3: Traceback (most recent call last):
3:   File "/home/me/train.py", line 88, in <module>
3:     main()
0: step 12
3:   File "/home/me/rows.py", line 42, in load
3:     return json.loads(line)[name]
0:   File "/home/me/of_another_rank.py", line 7, in other
3:   File "/usr/lib/python3.12/json/__init__.py", line 346, in loads
3:     return _default_decoder.decode(s)
3: {}
srun: error: dgx-0: task 3: Exited with exit code 1
0: ConnectionResetError: [Errno 104] Connection reset by peer
"""


@pytest.mark.parametrize(("text", "rule", "evidence", "fix"), MESSAGES, ids=[message[1] for message in MESSAGES])
def test_message_gives_its_rule(tmp_path: Path, text: str, rule: str, evidence: str, fix: str) -> None:
    (tmp_path / "log").write_text(f"step 1 | loss 1.25\n{text}\nstep 2 | loss 1.24\n")
    explanation = diagnosis.explain([tmp_path / "log"])
    assert explanation.rule == rule
    assert evidence in str(explanation.evidence) and fix in str(explanation.fix)


@pytest.mark.parametrize(
    "exception",
    [
        "KeyError: 'spam'",
        "ValueError: not enough values to unpack (expected 2, got 1)",
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/me/notes.toml'",
        "mycode.errors.UnluckyError",
    ],
)
def test_exception_shows_the_frame_of_user_code(tmp_path: Path, exception: str) -> None:
    (tmp_path / "log").write_text(TRACEBACK.format(exception))
    explanation = diagnosis.explain([tmp_path / "log"])
    assert (explanation.rule, explanation.line) == ("RUN-13", 10)
    assert explanation.evidence == f"3: {exception} (at /home/me/rows.py:42 in load)"
    assert "file and line" in str(explanation.fix)


def test_traceback_across_two_chunks_keeps_its_frame(tmp_path: Path) -> None:
    """Logs are read in chunks of 256 KiB; this traceback crosses the end of the first one."""
    head, tail = TRACEBACK.format("KeyError: 'spam'").split("3: KeyError")
    padding = "x" * ((1 << 18) - len(head) - 1) + "\n"
    (tmp_path / "log").write_text(f"{padding}{head}3: KeyError{tail}")
    assert str(diagnosis.explain([tmp_path / "log"]).evidence).endswith("(at /home/me/rows.py:42 in load)")


def test_exception_explains_a_log_without_run_stop(tmp_path: Path) -> None:
    record = {"namespace": "", "time_ms": 1_700_000_000_000, "event_type": "INTERVAL_START", "key": "run_start"}
    start = json.dumps(record | {"value": None, "metadata": {}})
    (tmp_path / "log").write_text(f":::MLLOG {start}\n{TRACEBACK.format('ValueError: no')}")
    assert diagnosis.explain([tmp_path / "log"]).rule == "RUN-13"


def test_time_limit_explains_later_exceptions(tmp_path: Path) -> None:
    limit = "slurmstepd: error: *** JOB 513 ON dgx-1 CANCELLED AT 2026-11-20T11:00:00 DUE TO TIME LIMIT ***\n"
    (tmp_path / "log").write_text(limit + TRACEBACK.format("KeyError: 'spam'"))
    assert diagnosis.explain([tmp_path / "log"]).rule == "SLU-07"


def test_ranks_that_srun_ends_after_a_failure_are_not_the_cause(tmp_path: Path) -> None:
    failed, ended = "srun: error: dgx-0: task 0: Exited with exit code 1\n", "srun: error: dgx-1: task 1: Terminated\n"
    log = tmp_path / "log"
    log.write_text("0: ncclRemoteError: a peer is gone\n" + ended + failed)
    assert diagnosis.explain([log]).rule == "RUN-02"
    log.write_text("0: ConnectionResetError: gone\n" + failed + ended)
    assert diagnosis.explain([log]).rule == "unknown"


def test_empty_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n")
    explanation = diagnosis.explain([tmp_path / "log"])
    assert (
        explanation.rule == "unknown" and "is empty" in explanation.title and "standard error" in str(explanation.fix)
    )


@pytest.fixture
def local_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(compose.compose(["task=lora_tiny", "cluster=local"])))
    return folder


def error_of_rank(folder: Path, rank: int, at: float, what: str) -> None:
    content = {"time": at, "exit_code": 1, "what": what, "where": "there", "fix": "do this"}
    (folder / "rank_logs" / f"trial_0_rank_{rank}.error").write_text(json.dumps(content))


def test_earlier_of_two_equal_errors_wins(local_run: Path) -> None:
    error_of_rank(local_run, 0, 20.0, "the rows end early")
    error_of_rank(local_run, 1, 10.0, "the rows do not match")
    assert diagnosis.explain([local_run]).evidence == "the rows do not match"
    error_of_rank(local_run, 1, 30.0, "the rows do not match")
    assert diagnosis.explain([local_run]).evidence == "the rows end early"


def test_fix_of_a_local_run_without_engine_is_pip_install(local_run: Path) -> None:
    error_of_rank(local_run, 0, 1.0, "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'")
    explanation = diagnosis.explain([local_run])
    assert explanation.rule == "RUN-25" and "pip install 'runstop[engine]'" in str(explanation.fix)


def test_local_run_without_engine_is_refused_before_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    local, on_slurm = (
        compose.compose(["task=lora_tiny", "cluster=local"]),
        compose.compose(["task=lora70b", "cluster=dgx2"]),
    )
    assert "RUN-08" not in [finding.rule for finding in preflight.inspect(local)]
    monkeypatch.setattr(backends_local, "ENGINE", ("numpy", "missing_module", "missing_package.core"))
    (problem,) = [finding for finding in preflight.inspect(local) if finding.rule == "RUN-08"]
    assert problem.severity == "error" and problem.fix == "pip install 'runstop[engine]'"
    assert problem.what == "cannot import missing_module, missing_package.core"
    assert "RUN-08" not in [finding.rule for finding in preflight.inspect(on_slurm)]


def test_fix_of_a_stopped_local_run_does_not_use_slurm(local_run: Path) -> None:
    (local_run / "status.json").write_text(json.dumps({"outcome": "interrupted", "exit_code": 130}))
    explanation = diagnosis.explain([local_run])
    assert (explanation.rule, explanation.evidence) == ("RUN-24", "the launcher got SIGINT")
    assert "runstop resume" in str(explanation.fix) and "sacct" not in str(explanation.fix)
    (local_run / "job.json").write_text("{}")
    assert "sacct" in str(diagnosis.explain([local_run]).fix)


def test_log_line_is_cited_instead_of_status(local_run: Path) -> None:
    line = "srun: error: Node failure on dgx-3"
    status = {"outcome": "failed", "exit_code": 1, "while": "trial 0 failed", "what": "SLU-09: a node failed"}
    (local_run / "status.json").write_text(
        json.dumps(status | {"rule": "SLU-09", "evidence": line, "fix": "exclude it"})
    )
    explanation = diagnosis.explain([local_run])
    assert (explanation.rule, explanation.evidence, explanation.fix) == ("SLU-09", line, "exclude it")
    (local_run / "trial_0.out").write_text(f"\n{line}\n")
    explanation = diagnosis.explain([local_run])
    assert (explanation.rule, explanation.evidence, explanation.line) == ("SLU-09", line, 2) and str(
        explanation.file
    ).endswith("trial_0.out")


@pytest.mark.long
def test_rule_of_an_error_reaches_why_as_a_field(local_run: Path) -> None:
    """The text matches another rule on purpose: only the field counts."""
    report = local_run / "rank_logs" / "trial_0_rank_0.error"
    error = BenchError("CUDA out of memory, or so it seems", where="here", fix="do this", rule="CFG-06")
    rank = os.fork()
    if rank == 0:
        with guard.guarded(report):
            raise error
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 1
    assert json.loads(report.read_text())["rule"] == "CFG-06"
    explanation = diagnosis.explain([local_run])
    assert (explanation.rule, explanation.evidence, explanation.fix) == (
        "CFG-06",
        str(error).splitlines()[0],
        "do this",
    )
    plan = plan_kinds.load(local_run / "plan.json")
    first = lead.first_error(local_run, plan.commands[-1])
    assert first is not None and (first.rule, first.what, str(first)) == ("CFG-06", error.what, str(error))
    report.unlink()
    status = {"outcome": "failed", "exit_code": 1, "rule": first.rule, "what": first.what, "fix": first.fix}
    (local_run / "status.json").write_text(json.dumps(status))
    assert diagnosis.explain([local_run]).rule == "CFG-06"


@pytest.mark.parametrize(("rule", "explains"), [("RUN-02", "CFG-08"), ("SLU-07", "CFG-08"), ("CFG-06", "CFG-06")])
def test_cause_in_a_log_wins_over_the_exit_of_a_rank(local_run: Path, rule: str, explains: str) -> None:
    status = {"outcome": "failed", "exit_code": 1, "rule": rule, "what": "it ended", "fix": "look"}
    (local_run / "status.json").write_text(json.dumps(status))
    (local_run / "trial_0.out").write_text("OSError: [Errno 28] No space left on device\n")
    assert diagnosis.explain([local_run]).rule == explains


def test_rule_of_the_batch_script_wins(local_run: Path) -> None:
    status = {"outcome": "failed", "exit_code": 143, "rule": "SLU-07", "what": "the time limit is near", "fix": "more"}
    (local_run / "status.json").write_text(json.dumps(status))
    (local_run / "job.json").write_text("{}")
    (local_run / "trial_0.out").write_text("srun: error: dgx-1: task 3: Terminated\n")
    assert diagnosis.explain([local_run]).rule == "SLU-07"


def test_hung_run_does_not_get_a_shorter_time_limit(local_run: Path) -> None:
    config = compose.compose(["task=lora_tiny", "cluster=local", "walltime=90"])
    (local_run / "plan.json").write_text(plan_kinds.dumps(config))
    limit = "slurmstepd: error: *** JOB 7 ON dgx-1 CANCELLED AT 2026-11-20T11:00:00 DUE TO TIME LIMIT ***\n"
    records = [
        (0, "INTERVAL_START", "init_start", None, {}),
        (0, "POINT_IN_TIME", "submission_benchmark", "llama2_70b_lora", {}),
        (0, "POINT_IN_TIME", "global_batch_size", 8, {}),
        (0, "POINT_IN_TIME", "opt_learning_rate_training_steps", 800, {}),
        (2, "INTERVAL_START", "run_start", None, {}),
        (22, "POINT_IN_TIME", "eval_accuracy", 0.94, {"samples_count": 1600}),
    ]
    lines = [
        {"namespace": "", "time_ms": 60_000 * at, "event_type": kind, "key": key, "value": value, "metadata": more}
        for at, kind, key, value, more in records
    ]
    (local_run / "result_0.txt").write_text("".join(f":::MLLOG {json.dumps(line)}\n" for line in lines) + limit)
    fix = str(diagnosis.explain([local_run]).fix)  # 2 min, 6,400 samples at 80 a minute, and 5 min to stop
    assert (
        fix.startswith("at its pace the run needs 87 min, and its time limit was 90 min, so it hung")
        and "py-spy" in fix
    )


@pytest.mark.parametrize(("last", "rule"), [("success", "LOG-03"), ("aborted", "NCC-06")])
def test_appended_log_is_the_cause_only_after_success(written_log: MakeLog, last: str, rule: str) -> None:
    """If the last trial in a log failed, its cause is reported, not that two trials share the log."""
    log = written_log()
    trial = log.read_text()
    log.write_text(trial + trial.replace('"success"', f'"{last}"') + "[rank0]: ncclRemoteError: a peer is gone\n")
    explanation = diagnosis.explain([log])
    assert explanation.rule == rule


def test_fix_never_suggests_runstop_why(local_run: Path) -> None:
    status = {"outcome": "failed", "exit_code": 1, "while": "trial 1 failed", "what": "trial 1 failed"}
    (local_run / "status.json").write_text(json.dumps(status | {"fix": "runstop why /run"}))
    (local_run / "trial_1.out").write_text("the last words\n")
    explanation = diagnosis.explain([local_run])
    assert (
        explanation.rule == "unknown"
        and "runstop why" not in str(explanation.fix)
        and explanation.lines == ("the last words",)
    )


@pytest.mark.parametrize("text", ["Fatal Python error: Bus error", "rank 3 got SIGBUS during trial 0"])
def test_a_bus_error_points_to_the_mapped_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(f"{text}\n")
    fix = str(diagnosis.explain([tmp_path / "log"]).fix)
    assert "rows or weights became shorter during the run" in fix and "driver" not in fix


def test_a_traceback_that_a_rank_ends_with_a_fix_is_still_an_exception(tmp_path: Path) -> None:
    lines = ("Traceback (most recent call last):", '  File "x.py", line 8, in fail', "KeyError: 'no such expert'")
    ended = (*lines, "  where: trial_0_rank_1", "  fix:   read the last lines of the traceback")
    (tmp_path / "log").write_text("".join(f"1: {line}\n" for line in ended))
    explanation = diagnosis.explain([tmp_path / "log"])
    assert (explanation.rule, explanation.line) == ("RUN-13", 3)
    assert "x.py:8 in fail" in (explanation.evidence or "")
