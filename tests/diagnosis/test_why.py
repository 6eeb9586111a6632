"""Test that `why` finds the cause of a failure among any other lines, and finds none in a successful run."""

import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import answers as printed
from bench import cli, diagnosis
from bench.contract import mllog, plan_kinds
from bench.diagnosis import log_scan
from bench.errors import ConfigError
from bench.planning import compose
from bench.rules import RULES
from bench.rules.signs import Weight
from bench.runs import ledger, status
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from helpers import answers, answers_log, serving, serving_log
from helpers.paths import CORPUS
from helpers.types import MakeLog

NOISE = """\
+ export NCCL_DEBUG=INFO
12: node7:4123:4123 [4] NCCL INFO Bootstrap : Using eth0:10.0.3.7<0>
12: node7:4123:4123 [4] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin symbol.
/opt/lib/python3.12/site-packages/torch/cuda/__init__.py:734: UserWarning: Can't initialize NVML
Import of quick_gelu failed with: Traceback (most recent call last):
  File "/opt/megatron/core/fusions.py", line 12, in <module>
0 errors, 0 warnings, error_if_nonfinite=False, limit_val_batches=1.0
[NeMo W 2026-11-20 10:01:07 nemo_logging:349] Could not copy Trainer's 'max_steps' to LR scheduler's 'max_steps'.
Max memory allocated: 71.2 GiB, reserved 74.0 GiB; killed 0 stale processes
Epoch 0:  12%|#2        | 61/512 [02:10<16:02,  2.13s/it, loss=1.31]
"""
CONSEQUENCES = """\
srun: error: dgx-3: task 13: Exited with exit code 1
srun: Terminating StepId=513.21
slurmstepd: error: *** STEP 513.21 ON dgx-1 CANCELLED AT 2026-11-20T10:22:31 ***
7: [rank7]:[E1120 10:32:31.442 ProcessGroupNCCL.cpp:629] [Rank 7] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, \
Timeout(ms)=600000) ran for 600081 milliseconds before timing out.
7: BrokenPipeError: [Errno 32] Broken pipe
srun: error: dgx-1: tasks 0-7: Killed
slurmstepd: error: *** STEP 513.21 ON dgx-1 CANCELLED AT 2026-11-20T11:00:00 DUE TO TIME LIMIT ***
"""
CAUSES = [
    ("PYX-01", "srun: fatal: spank.c:1040: _do_option_cb(): Assertion (arg) failed."),
    ("PYX-02", "srun: unrecognized option '--container-image=x.sqsh'"),
    ("PYX-02", "slurmstepd: error: spank: /usr/lib/slurm/spank_pyxis.so: Incompatible Slurm plugin version (23.02.4)"),
    ("PYX-03", "ModuleNotFoundError: No module named 'transformer_engine'"),
    (
        "PYX-04",
        "slurmstepd: error: pyxis: ignoring --container-mounts because neither --container-image nor --container-name "
        "is set",
    ),
    (
        "PYX-06",
        "slurmstepd: error: pyxis:     [ERROR] URL "
        "https://registry-1.docker.io/v2/nvcr.io/nvidia/pytorch/manifests/25.09-py3 returned error code: 401 "
        "Unauthorized",
    ),
    ("PYX-07", "slurmstepd: error: pyxis: --container-mounts: source path does not exist: /raid/data"),
    (
        "PYX-07",
        "slurmstepd: error: pyxis:     enroot-mount: failed to mount: /raid/data at /enroot/x/data: No such file or "
        "directory",
    ),
    (
        "PYX-08",
        'slurmstepd: error: pyxis: error: "create" flag was passed to --container-name but the container already '
        "exists",
    ),
    ("PYX-10", "/var/spool/slurmd/job7/slurm_script: line 12: srun: command not found"),
    ("PYX-11", "slurmstepd: error: pyxis: couldn't chdir to /workspace/ft-llm: No such file or directory"),
    ("PYX-12", "srun: error: pyxis: --container-mounts: invalid format: /a:/b:c:d"),
    ("ENR-01", "[ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized"),
    ("ENR-01", "curl: (22) The requested URL returned error: 401"),
    ("ENR-03", "slurmstepd: error: pyxis:     Write failed because No space left on device"),
    (
        "ENR-04",
        "slurmstepd: error: pyxis:     enroot-nsenter: failed to create user namespace: Operation not permitted",
    ),
    ("ENR-05", "OSError: [Errno 30] Read-only file system: '/root/.triton'"),
    ("ENR-06", "slurmstepd: error: pyxis:     [ERROR] /etc/enroot/hooks.d/98-nvidia.sh exited with return code 1"),
    ("ENR-07", "slurmstepd: error: pyxis:     [ERROR] No such file or directory: /raid/images/lora.sqsh"),
    ("ENR-08", "slurmstepd: error: pyxis:     [ERROR] Invalid image format: /raid/images/lora.sqsh"),
    ("ENR-08", "FATAL ERROR: Can't find a valid SQUASHFS superblock on lora.sqsh"),
    ("ENR-09", "slurmstepd: error: pyxis: slurmd: couldn't mkdir /run/pyxis: Permission denied"),
    ("ENR-10", "[ERROR] URL https://registry-1.docker.io/v2/acme/lora/manifests/7 returned error code: 404 Not Found"),
    ("MPI-01", "srun: error: Couldn't find the specified plugin name for mpi/pmix looking at all files"),
    ("MPI-01", "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types"),
    ("MPI-02", "[dgx-1:12255] OPAL ERROR: Unreachable in file ext3x_client.c at line 111"),
    ("MPI-02", "[dgx-1:12255] PMIX ERROR: NOT-FOUND in file server/pmix_server.c at line 229"),
    ("SLU-01", "srun: error: Unable to create step for job 9: Invalid generic resource (gres) specification"),
    (
        "SLU-02",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    ),
    (
        "SLU-03",
        "srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=16 != "
        "SLURM_TRES_PER_TASK=cpu:8",
    ),
    ("SLU-06", "slurmstepd: error: execve(): /home/me/run.sh: No such file or directory"),
    (
        "SLU-09",
        "slurmstepd: error: *** JOB 513 ON dgx-1 CANCELLED AT 2026-11-20T10:22:31 DUE TO NODE FAILURE, SEE SLURMCTLD "
        "LOG FOR DETAILS ***",
    ),
    ("SLU-09", "srun: error: Node failure on dgx-3"),
    ("SLU-11", "sbatch: fatal: Could not establish a configuration source"),
    ("SLU-10", "slurmstepd: error: *** STEP 513.0 ON dgx-1 CANCELLED AT 2026-11-20T10:22:31 DUE TO PREEMPTION ***"),
    ("NCC-01", "node7:4123:4123 [4] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found"),
    (
        "NCC-03",
        "node7:4123:4123 [4] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with error No such device",
    ),
    (
        "NCC-05",
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: "
        "false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    ("NCC-05", "3: Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/1"),
    ("HW-01", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("HW-01", "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
    ("HW-02", "node7:4123:4123 [4] transport/nvls.cc:254 NCCL WARN Cuda failure 1 'invalid argument'"),
    ("HW-02", "RuntimeError: CUDA error: system not yet initialized"),
    ("HW-03", "RuntimeError: No CUDA GPUs are available"),
    (
        "RUN-01",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 139.80 "
        "GiB",
    ),
    ("RUN-01", "RuntimeError: CUDA error: out of memory"),
    ("RUN-01", "torch.cuda.OutOfMemoryError: Allocation on device"),
    (
        "RUN-03",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=513.0 cgroup. Some of your processes may have been "
        "killed by the cgroup out-of-memory handler.",
    ),
    (
        "RUN-03",
        "slurmstepd: error: Detected 2 oom_kill events in StepId=513.0. Some of the step tasks have been OOM Killed.",
    ),
    ("RUN-03", "kernel: Out of memory: Killed process 4123 (python) total-vm:81234kB"),
    ("RUN-03", "srun: error: dgx-1: tasks 0-3,5: Out Of Memory"),
    ("RUN-05", "ValueError: The loss returned in `training_step` is nan."),
    (
        "RUN-05",
        "AssertionError: Rank 5: found NaN in local grad norm in backward pass before data-parallel communication "
        "collective.",
    ),
    ("RUN-05", "the training loss is nan at step 120"),
    (
        "RUN-17",
        "3: RUN-17: rank 1 on dgx-1 did not answer and wrote no stack; no progress for 1,130 s in training after "
        "step 57, where 0.35 s is usual",
    ),
    ("RUN-08", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"),
    ("RUN-08", "python: can't open file '/workspace/train.py': [Errno 2] No such file or directory"),
    ("RUN-08", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable."),
    ("RUN-09", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    (
        "RUN-11",
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of shared memory; insufficient shared memory (shm)",
    ),
    ("CFG-01", "RuntimeError: world_size (12) is not divisible by 8"),
    (
        "CFG-02",
        "ValueError: `val_check_interval` (3200) must be less than or equal to the number of the training batches "
        "(487).",
    ),
    ("CFG-05", "FileExistsError: [Errno 17] File exists: '/results/result_0.txt'"),
    ("CFG-06", "huggingface_hub.errors.GatedRepoError: 403 Client Error."),
    (
        "CFG-06",
        "OSError: meta-llama/Llama-2-70b-hf is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
    ),
    ("CFG-06", "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.npy'"),
    ("CFG-06", "OSError: Can't load tokenizer for '/ckpt/tokenizer'. If you were trying to load it from"),
    ("CFG-08", "OSError: [Errno 28] No space left on device: '/results/ckpt'"),
    ("CFG-08", "OSError: [Errno 122] Disk quota exceeded"),
    ("CFG-08", "tee: /results/251120_1.log: Permission denied"),
    (
        "CFG-06",
        "huggingface_hub.utils.HfHubHTTPError: 401 Client Error: Unauthorized for url: "
        "https://huggingface.co/api/models/x",
    ),
    (
        "NCC-01",
        "node7:4123:4123 [4] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.1<40001> failed : "
        "No route to host",
    ),
    ("HW-02", "systemd: nvidia-fabricmanager.service: Failed with result 'exit-code'. fabricmanager not running"),
    (
        "NCC-01",
        "node7:4123:4123 [4] misc/socket.cc:578 NCCL WARN socketPollConnect: connect to 172.17.0.1<40001> returned "
        "Connection refused, exceeded error retry count after 35 attempts",
    ),
    ("RUN-01", "transformer_engine/common/util/cuda_runtime.cpp:22 in function operator(): CUDA Error: out of memory"),
    (
        "SLU-09",
        "srun: error: Task launch for StepId=513.4 failed on node dgx-2: Communication connection failure",
    ),
    ("CFG-09", "hydra.errors.OverrideParseException: mismatched input"),
]
EVENTS = [
    ("SLU-07", "slurmstepd: error: *** JOB 513 ON dgx-1 CANCELLED AT 2026-11-20T11:00:00 DUE TO TIME LIMIT ***"),
    ("SLU-08", "slurmstepd: error: *** STEP 40.14 ON dgx-1 CANCELLED AT 2026-11-20T10:32:36 ***"),
    (
        "SLU-08",
        "slurmstepd: error: *** STEP 40.14 ON dgx-1 CANCELLED AT 2026-11-20T10:32:36 DUE to SIGNAL Terminated ***",
    ),
    ("SLU-08", "slurmstepd: error: *** JOB 40 ON dgx-1 CANCELLED AT 2026-11-20T10:32:36 DUE TO JOB REQUEUE ***"),
    (
        "NCC-03",
        "node7:4123:5103 [3] transport/net_ib.cc:2050 NCCL WARN NET/IB: Got completion from peer 10.2.0.2<50612> with "
        "status=12 opcode=0 len=0 vendor err 129",
    ),
    (
        "NCC-06",
        "node7:4123:5103 [3] transport/net_ib.cc:2050 NCCL WARN NET/IB: Got completion from peer 10.2.0.2<50612> with "
        "status=5 opcode=0 len=0 vendor err 249",
    ),
    (
        "NCC-06",
        "3: [rank3]:[F1120 ProcessGroupNCCL.cpp:1567] [PG ID 0 Rank 3] Terminating the process after attempting to "
        "dump debug info, due to ProcessGroupNCCL watchdog hang.",
    ),
    ("RUN-04", "srun: error: dgx-3: task 13: Aborted (core dumped)"),
    (
        "NCC-06",
        "[rank0]:[E1120 10:27:21.426 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1)",
    ),
    (
        "NCC-06",
        "[rank0]:[F1120 ProcessGroupNCCL.cpp:1169] [PG 0 Rank 25] ProcessGroupNCCL's watchdog got stuck for 600 "
        "seconds without making progress",
    ),
    (
        "NCC-05",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    ("RUN-02", "srun: error: dgx-3: task 13: Killed"),
    ("RUN-02", "    traceback : Signal 9 (SIGKILL) received by PID 3170"),
    ("RUN-04", "srun: error: dgx-3: task 13: Segmentation fault (core dumped)"),
    ("RUN-04", "    exitcode  : -11 (pid: 3170)"),
    ("RUN-04", "Fatal Python error: Bus error"),
    ("RUN-02", "srun: error: dgx-1: task 1: Interrupt"),
    ("RUN-02", "srun: error: dgx-1: task 1: Exited with exit code 130"),
    ("NCC-07", "RuntimeError: NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ("ENR-10", "slurmstepd: error: pyxis: failed to import docker image: acme/lora:7"),
    ("NCC-01", "node7:4123:4123 [4] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>"),
    ("RUN-05", "Epoch 0:  12%|1 | 61/512 [02:10<16:02, 2.13s/it, v_num=0, reduced_train_loss=nan]"),
    ("NCC-02", "node7:4123:4123 [4] NCCL INFO NET/IB : No device found."),
    ("NCC-02", "node7:4123:4123 [4] NCCL INFO Using network Socket"),
]  # fmt: skip


def ansi(text: str) -> str:
    return "".join(f"\x1b[31m{line}\x1b[0m\n" for line in text.splitlines())


ENCODINGS: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "ansi": lambda text: ansi(text).encode(),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "carriage returns": lambda text: text.replace("\n", "\r").encode(),
    "utf-16": lambda text: text.encode("utf-16"),
    "latin-1": lambda text: b"\xe9t\xe9\xff\n" + text.encode(),
}


@pytest.mark.parametrize(("rule", "line"), [*CAUSES, *EVENTS], ids=[rule for rule, _ in [*CAUSES, *EVENTS]])
def test_rule_is_recognised_in_any_encoding(tmp_path: Path, rule: str, line: str) -> None:
    log = tmp_path / "slurm-513.out"
    for name, encode in ENCODINGS.items():
        log.write_bytes(encode(NOISE + line + "\n" + NOISE))
        explanation = diagnosis.explain([log])
        assert (explanation.rule, name) == (rule, name)
        assert (
            explanation.evidence is not None
            and explanation.evidence.isprintable()
            and line[:100].strip() in explanation.evidence
        )
        assert explanation.file == str(log) and explanation.fix
        if name not in ("carriage returns", "latin-1"):
            assert explanation.line == NOISE.count("\n") + 1


@pytest.mark.parametrize(("rule", "line"), CAUSES, ids=[rule for rule, _ in CAUSES])
def test_consequences_never_hide_a_cause(tmp_path: Path, rule: str, line: str) -> None:
    labelled = line if line.startswith("3: ") else f"3: {line}"
    (tmp_path / "log").write_text(NOISE + labelled + "\n" + CONSEQUENCES)
    (tmp_path / "other").write_text(CONSEQUENCES)
    assert diagnosis.explain([tmp_path / "log"]).rule == rule
    assert diagnosis.explain([tmp_path / "other", tmp_path / "log"]).rule == rule


def test_first_of_two_causes_wins_and_the_other_is_listed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "3: RuntimeError: CUDA error: out of memory\n4: RuntimeError: No CUDA GPUs are available\n" + CONSEQUENCES
    )
    explanation = diagnosis.explain([log])
    assert explanation.rule == "RUN-01" and [clue.rule for clue in explanation.also][:2] == ["HW-03", "NCC-06"]


def test_end_of_a_run_explains_later_messages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    *_, killed, limit = CONSEQUENCES.splitlines()
    log.write_text(f"{limit}\n{killed}\n")
    assert diagnosis.explain([log]).rule == "SLU-07"
    log.write_text(f"{killed}\n{limit}\n")
    assert diagnosis.explain([log]).rule == "RUN-02"


def test_step_that_srun_ends_after_a_failed_task_was_not_cancelled(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "5: Traceback (most recent call last):\n5:   File \"x.py\", line 1\n5: KeyError: 'spam'\n"
        + "".join(CONSEQUENCES.splitlines(True)[:3])
    )
    explanation = diagnosis.explain([log])
    assert (explanation.rule, explanation.evidence) == ("RUN-13", "5: KeyError: 'spam' (at x.py:1)")


@pytest.mark.parametrize("text", ["", NOISE, "0 errors\n", "\n" * 1000])
def test_normal_output_is_neither_failure_nor_success(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    explanation = diagnosis.explain([tmp_path / "log"])
    assert explanation.rule == "unknown" and explanation.also == ()


def test_error_that_training_survives_is_not_the_cause(written_log: MakeLog) -> None:
    log = written_log(evals=tuple(0.99 - n / 100 for n in range(5)), status="aborted")
    log.write_text(CAUSES[-1][1] + "\n" + log.read_text())
    explanation = diagnosis.explain([log])
    assert explanation.rule == "LOG-05" and [clue.rule for clue in explanation.also] == [CAUSES[-1][0]]


@pytest.mark.long
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.sampled_from([line.encode() for _, line in CAUSES] + [b"\n", b"\r", b"\x1b[", b":::MLLOG {"]),
        ),
        max_size=30,
    )
)
def test_any_content_can_be_read(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    log = tmp_path_factory.mktemp("any") / "log"
    log.write_bytes(b"".join(parts))
    explanation = diagnosis.explain([log])
    assert explanation.rule in (*RULES, "unknown") and explanation.fix
    answers.one(printed.line(printed.diagnosis(explanation)))


@pytest.mark.long
def test_lines_of_any_length_are_read_in_chunks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"x" * 3_000_000 + b" RuntimeError: CUDA error: out of memory " + b"y" * 3_000_000)
        file.write(b"\n7: done\nsrun: error: Node failure on dgx-3\n")
    clues = {clue.rule: clue for clue in log_scan.scan(log).clues}
    assert (clues["RUN-01"].line, clues["SLU-09"].line) == (1, 3)
    assert "out of memory" in clues["RUN-01"].text and len(clues["RUN-01"].text) <= 400


def test_part_of_a_record_is_not_shown_as_the_end_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(':::MLLOG {"key": "' + "x" * 8000 + '"}\nthe last words\n')
    assert log_scan.scan(tmp_path / "log").lines == ("the last words",)


def test_successful_run_with_error_lines_has_no_failure(written_log: MakeLog, tmp_path: Path) -> None:
    log = written_log()
    (tmp_path / "slurm.out").write_text(NOISE + CONSEQUENCES + CAUSES[-1][1])
    assert diagnosis.explain([log, tmp_path / "slurm.out"]).rule is None


def test_log_with_missing_work_is_a_failure(tmp_path: Path) -> None:
    """run_stop has the status success in all of them."""
    plan = serving.planned("task.serving.arrivals=[burst]", "task.serving.rates=[]")
    log = tmp_path / "result_0.txt"
    serving_log.write(plan, log, {"burst": [0.1] * 4})
    assert diagnosis.explain([log]).rule is None
    explanation = diagnosis.explain([serving_log.write(plan, tmp_path / "failed", {"burst": [0.1, None, None]})])
    assert (explanation.rule, explanation.evidence) == ("SRV-04", "SRV-04: burst: 2 of 3 requests failed: timeout (2)")
    assert explanation.detail is None, "no training was cut short"
    explanation = diagnosis.explain([serving_log.write(plan, tmp_path / "missing", {}, without=["burst"])])
    assert (explanation.rule, explanation.evidence) == ("RUN-12", "burst was not measured")
    answers = compose.compose(["task=generate_tiny", "cluster=local"])
    assert isinstance(answers, plan_kinds.GenerationPlan)
    rows = answers_log.rows(answers)[1:]
    explanation = diagnosis.explain([answers_log.write(answers, tmp_path / "answers", rows, run_s=100.0)])
    assert (explanation.rule, explanation.evidence) == ("RUN-12", "answer 0 is missing")


def test_problems_in_the_records(written_log: MakeLog) -> None:
    explanation = diagnosis.explain([written_log(evals=(0.95, 0.94, 0.941, 0.943, 0.942, 0.945), status="aborted")])
    assert (explanation.rule, explanation.line is not None) == ("RUN-06", True)
    assert explanation.evidence == "the last evaluation is 0.945, but the target is ≤ 0.925" and "target 0.925" in str(
        explanation.detail
    )
    log = explanation.file or ""
    text = Path(log).read_text()
    Path(log).write_text(text.replace("aborted", "success").replace("0.945", "0.92") * 2)
    assert diagnosis.explain([Path(log)]).rule == "LOG-03"
    Path(log).write_text(text.replace('"value": 0.943', '"value": NaN'))
    assert diagnosis.explain([Path(log)]).rule == "RUN-05"


def test_log_without_run_stop_is_running_then_hung(written_log: MakeLog) -> None:
    log = written_log()
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "run_stop" not in line))
    explanation = diagnosis.explain([log])
    assert (
        explanation.rule is None
        and "still running" in explanation.title
        and "2,304 samples of at most 6,400" in str(explanation.detail)
    )
    an_hour_ago = time.time() - 3600
    os.utime(log, (an_hour_ago, an_hour_ago))
    assert diagnosis.explain([log]).rule == "RUN-07"


def test_flat_evaluations_are_reported_while_the_run_is_running(written_log: MakeLog) -> None:
    log = written_log(evals=(0.95, 0.94, 0.95, 0.95, 0.95, 0.95))
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "run_stop" not in line))
    assert diagnosis.explain([log]).rule == "RUN-06"


def test_fix_of_a_time_limit_is_a_sufficient_one(tmp_path: Path) -> None:
    log, now = tmp_path / "log", 1_700_000_000_000
    record = (
        ':::MLLOG {{"namespace": "", "time_ms": {}, "event_type": "{}", "key": "{}", "value": {}, "metadata": {}}}\n'
    )
    with log.open("w") as file:
        for at_min, kind, key, value, metadata in [
            (0, "INTERVAL_START", "init_start", "null", {}),
            (0, "POINT_IN_TIME", "submission_benchmark", '"llama2_70b_lora"', {}),
            (0, "POINT_IN_TIME", "global_batch_size", "8", {}),
            (0, "POINT_IN_TIME", "opt_learning_rate_training_steps", "800", {}),
            (2, "INTERVAL_START", "run_start", "null", {}),
            (22, "POINT_IN_TIME", "eval_accuracy", "0.94", {"samples_count": 1600}),
        ]:
            file.write(record.format(now + at_min * 60_000, kind, key, value, json.dumps(metadata)))
        file.write(CONSEQUENCES.splitlines()[-1])
    explanation = diagnosis.explain([log])
    assert explanation.rule == "SLU-07"
    assert explanation.detail == "1,600 samples of at most 6,400, 80.0 samples/min, last evaluation 0.94, target 0.925"
    assert str(explanation.fix).startswith("set walltime=87 (minutes per trial) to reach the last step")  # 2 + 80 + 5


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rank_logs").mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(compose.compose(["task=lora70b", "cluster=dgx2", "trials=1"])))
    (folder / "result_0.txt").write_text("")
    return folder


def test_the_log_of_the_preparation_has_no_trial(run_folder: Path, written_log: MakeLog) -> None:
    written_log().rename(run_folder / "result_0.txt")
    with mllog.Writer(run_folder / "prepare.txt") as log:
        log.start(mllog.INIT_START)
        log.stop(mllog.INIT_STOP)
    (run_folder / "status.json").write_text(json.dumps({"outcome": "valid", "exit_code": 0}))
    cause = diagnosis.explain([run_folder])
    assert (cause.rule, cause.also) == (None, ())


def account(folder: Path, rank: int, at: float, what: str, *, rule: str | None = None) -> None:
    report = {"time": at, "exit_code": 1, "rule": rule, "what": what, "where": "there", "fix": "do this"}
    (folder / "rank_logs" / f"trial_0_rank_{rank}.error").write_text(json.dumps(report))


@pytest.mark.parametrize("entry", ["1", '"text"', "null"])
def test_damaged_ledger_is_ignored(run_folder: Path, entry: str) -> None:
    (run_folder / "ledger.json").write_text(f"[{entry}]")
    assert diagnosis.explain([run_folder]).fix


def test_rank_that_failed_first_is_the_cause(run_folder: Path) -> None:
    account(
        run_folder,
        0,
        20.0,
        "Traceback (most recent call last):\nRuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    )
    account(run_folder, 3, 10.0, "the rows do not rhyme")
    explanation = diagnosis.explain([run_folder])
    assert (explanation.rule, explanation.evidence, explanation.fix) == ("RUN-10", "the rows do not rhyme", "do this")
    account(run_folder, 3, 10.0, "the evaluation loss is nan at step 192")
    assert diagnosis.explain([run_folder]).rule == "RUN-05"
    account(run_folder, 3, 10.0, "this trial has a log already \ud800", rule="CFG-05")
    assert diagnosis.explain([run_folder]).rule == "CFG-05"


def test_fix_of_a_run_with_checkpoints_is_to_resume(tmp_path: Path, written_log: MakeLog) -> None:
    """Its launcher was killed: there is no final status, and its ranks have closed the log."""
    plan = compose.compose(["task=pretrain_tiny", "cluster=local", "task.training.checkpoint_every_steps=2"])
    run = tmp_path / "run"
    (run / "rank_logs").mkdir(parents=True)
    ledger.create(run, plan)
    ledger.begin(run, plan.trials[0], attempts=1)
    written_log(evals=(), status="aborted").rename(run / "result_0.txt")
    hint = f"to resume from the last checkpoint: runstop resume {run}"
    assert hint not in str(diagnosis.explain([run]).fix)
    (run / "checkpoints/trial_0/step_4").mkdir(parents=True)
    explanation = diagnosis.explain([run])
    assert explanation.rule is not None and str(explanation.fix).endswith(f"; {hint}")
    ledger.end(run, 0, Outcome.invalid)
    assert hint not in str(diagnosis.explain([run]).fix), "its trial has a result"


@pytest.mark.parametrize(
    ("differing", "rule"),
    [
        ("SRV-06: burst: the delay of the client itself is 60 % of the latency", "SRV-06"),
        ("seed is 2 in the log, but 1 in the plan", "RUN-12"),
    ],
)
def test_difference_from_the_plan_gives_its_own_rule(
    tmp_path: Path, written_log: MakeLog, differing: str, rule: str
) -> None:
    plan, run = compose.compose(["task=pretrain_tiny", "cluster=local"]), tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(run, plan)
    ledger.begin(run, plan.trials[0], attempts=1)
    written_log().rename(run / "result_0.txt")
    ledger.end(run, 0, Outcome.invalid, not_as_planned=[differing])
    status.write(run, Status(outcome=Ending.invalid, exit_code=1))
    explanation = diagnosis.explain([run])
    assert explanation.rule == rule and differing in str(explanation.evidence)


def test_records_that_a_program_prints_are_not_the_log_that_is_judged(tmp_path: Path, written_log: MakeLog) -> None:
    """Only MLPerf's checker refuses the log; what the program printed lacks the keys that its runner logs."""
    plan, run = compose.compose(["task=pretrain_tiny", "cluster=local"]), tmp_path / "run"
    (run / "rank_logs").mkdir(parents=True)
    (run / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(run, plan)
    ledger.begin(run, plan.trials[0], attempts=1)
    text = written_log().rename(run / "result_0.txt").read_text()
    kept = [line for line in text.splitlines() if "init_start" not in line and "submission_" not in line]
    (run / "rank_logs/trial_0_rank_0.out").write_text("\n".join(kept))
    ledger.end(run, 0, Outcome.invalid, official={"5.1.0": True, "6.1.0": False})
    status.write(run, Status(outcome=Ending.invalid, exit_code=1))
    explanation = diagnosis.explain([run])
    assert (explanation.rule, explanation.evidence, explanation.file) == (
        "LOG-26",
        "LOG-26: trial 0: MLPerf checker 6.1.0 refused the log",
        str(run / "ledger.json"),
    )
    assert not explanation.also


@pytest.mark.long
def test_fix_of_out_of_memory_lists_splits_that_fit(run_folder: Path) -> None:
    account(
        run_folder,
        3,
        10.0,
        "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    )
    explanation = diagnosis.explain([run_folder])
    before = plan_kinds.load(run_folder / "plan.json")
    assert explanation.rule == "RUN-01" and f"this plan needs {before.memory.total_gib:.1f} GiB" in str(explanation.fix)
    for change in ("parallel.tp=4", "parallel.cp=2"):
        changed = compose.compose(["task=lora70b", "cluster=dgx2", "trials=1", change]).memory
        assert changed.fits and f"{change} ({changed.total_gib:.1f} GiB)" in str(explanation.fix)


def test_killed_rank_or_stopped_launcher_explains_errors_of_other_ranks(run_folder: Path) -> None:
    account(
        run_folder,
        0,
        20.0,
        "Traceback (most recent call last):\nRuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    )
    assert diagnosis.explain([run_folder]).rule == "NCC-06"
    failed = {"outcome": "failed", "exit_code": 1, "what": "rank 1 got SIGKILL during trial 0", "fix": "look"}
    (run_folder / "status.json").write_text(json.dumps(failed))
    assert diagnosis.explain([run_folder]).rule == "RUN-02"
    (run_folder / "status.json").write_text(json.dumps({"outcome": "interrupted", "exit_code": 143}))
    assert diagnosis.explain([run_folder]).rule == "RUN-24"


@pytest.mark.parametrize(
    ("status", "rule"),
    [
        ({"outcome": "valid", "exit_code": 0}, None),
        ({"outcome": "interrupted", "exit_code": 143}, "RUN-24"),
        (
            {"outcome": "failed", "exit_code": 1, "what": "trial 0 took longer than its walltime", "fix": "raise it"},
            "SLU-07",
        ),
        ({"outcome": "failed", "exit_code": 1, "what": "rank 1 got SIGKILL during trial 0", "fix": "look"}, "RUN-02"),
        ({"outcome": "failed", "exit_code": 2, "what": "the moon is full", "fix": "wait"}, "CFG-09"),
    ],
)  # fmt: skip
def test_status_of_the_launcher_is_read(run_folder: Path, status: dict[str, object], rule: str | None) -> None:
    (run_folder / "status.json").write_text(json.dumps(status))
    explanation = diagnosis.explain([run_folder])
    assert explanation.rule == rule and explanation.fix == status.get("fix", explanation.fix)


def test_failure_before_a_restart_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "slurm-7.out"
    preempted = "slurmstepd: error: *** STEP 7.3 ON dgx-1 CANCELLED AT 2026-11-20T10:32:36 DUE TO PREEMPTION ***\n"
    log.write_text(f"job 7, life 0, on dgx-[0-1]; …\n{preempted}job 7, life 1, on dgx-[0-1]; …\n{CAUSES[0][1]}\n")
    explanation = diagnosis.explain([log])
    assert explanation.rule == CAUSES[0][0] and not explanation.also


def test_rank_that_was_killed_first_is_the_cause(tmp_path: Path) -> None:
    """srun reports tasks as they end; later kills and errors of other ranks are consequences of the first."""
    log = tmp_path / "trial_0.out"
    echo = "0: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:49839\n"
    killed, failed = "srun: error: dgx-1: task 1: Killed\n", "srun: error: dgx-0: task 0: Exited with exit code 1\n"
    log.write_text(echo + killed + failed)
    assert diagnosis.explain([log]).rule == "RUN-02"
    log.write_text(echo + failed + killed)
    assert diagnosis.explain([log]).rule == "NCC-06"


def test_our_own_errors_are_read_from_any_log(tmp_path: Path) -> None:
    log = tmp_path / "slurm.out"
    log.write_text(NOISE + "0: the stars are wrong\n0:   where: the sky\n0:   fix:   wait\n" + CONSEQUENCES)
    explanation = diagnosis.explain([log])
    assert (explanation.rule, explanation.evidence, explanation.line, explanation.fix) == (
        "RUN-10",
        "0: the stars are wrong",
        NOISE.count("\n") + 1,
        "wait",
    )


def test_the_verb(written_log: MakeLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "slurm.out"
    bad.write_text("srun: error: Node failure on dgx-3\x1b[2J\n")
    for arguments, code in ((["why", str(written_log())], 0), (["why", "--json", str(bad)], 1), (["why", str(bad)], 1)):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == code
    fine, as_json, *plain = capsys.readouterr().out.split("\n", 4)[1:]
    assert fine == "rule: none  no failure: the run succeeded"
    assert answers.one(as_json)["rule"] == "SLU-09" and answers.one(as_json)["line"] == 1
    assert "exclude the node" in "".join(plain)
    with pytest.raises(ConfigError, match="no run or file has this name"):
        diagnosis.runs([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="the folder has no logs"):
        (tmp_path / "empty").mkdir()
        diagnosis.runs([tmp_path / "empty"])


def test_each_folder_is_a_run_and_all_files_are_one_run(run_folder: Path, written_log: MakeLog) -> None:
    log = written_log()
    assert diagnosis.runs([log, run_folder, log]) == [[run_folder], [log, log]]


@pytest.mark.long
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not available")
def test_published_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_scan, "scan", cache(log_scan.scan))  # `explain` calls it too
    ended = {"v5.0/Dell/9xXE9712x4GB200/llama2_70b_lora/result_9.txt": "SLU-07"}
    ended["v5.1/Dell/1xXE9780x8B200-SXM-180GB/llama2_70b_lora/result_0.txt"] = "SLU-08"
    for record in json.loads((CORPUS / "truth.json").read_text()):
        path, status = CORPUS / record["file"], record.get("status")
        clues = log_scan.scan(path).clues
        assert status != "success" or all(clue.weight is Weight.HINT for clue in clues), (path, clues)
        otherwise = {"success": None, "aborted": "RUN-06"}.get(status, "RUN-07")
        assert diagnosis.explain([path]).rule == ended.get(record["file"], otherwise), path
