"""Recorded answers of other sites' Slurm, replayed by stubs on PATH: other versions, no accounting, no answer."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import preflight
from bench.backends.protocol import Job, JobState
from bench.backends.slurm import client
from bench.errors import SubmitError
from bench.planning import compose
from bench.preflight import Checked, Finding, tier

Stub = Callable[..., None]

SINFO = (
    "batch*|up|2-00:00:00|16|gpu:h100:8(S:0-1)|224|2063000|mix|1-infinite\n"
    "debug|up|30:00|2|(null)|64|257000+|idle|1-2\n"
)
TAKEN = "sbatch: Job 4711 to start at 2026-11-21T15:15:45 using 448 processors on nodes dgx[01-02] in partition batch"
HELP = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Return a function that puts a stub command with one answer on PATH; calls.txt records every call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cat").symlink_to("/bin/cat")
    (folder / "sleep").symlink_to("/bin/sleep")
    monkeypatch.setenv("PATH", str(folder))

    def install(name: str, out: str = "", *, err: str = "", exit_code: int = 0, also: str = "") -> None:
        (tmp_path / f"{name}.out").write_text(out)
        (tmp_path / f"{name}.err").write_text(err)
        lines = (
            f'echo "{name} ${{#@}} $*" >>{tmp_path}/calls.txt\ncat {tmp_path}/{name}.out\ncat {tmp_path}/{name}.err >&2'
        )
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n{also}\nexit {exit_code}\n")
        (folder / name).chmod(stat.S_IRWXU)

    return install


def calls(tmp_path: Path, name: str) -> int:
    return sum(line.startswith(f"{name} ") for line in (tmp_path / "calls.txt").read_text().splitlines())


QUEUE = """12_3|PENDING|JobArrayTaskLimit||0|0:00|1:00:00|N/A|
13|FAILED|NonZeroExitCode|dgx-0|768|1-02:03:04|UNLIMITED|2026-11-21T15:15:45|
14|CANCELLED|None|dgx-[0-1]|0:15|4:05|5:00|2026-11-21T15:15:45|
"""
ACCOUNTED = """12_0|COMPLETED|None|dgx-0|0:0|40|60|2026-11-21T15:15:45
12_[1-2,5-9:2%2]|CANCELLED by 1000|None|None assigned|0:0|0|60|None
12_3|RUNNING|None|dgx-0|0:0|4|60|2026-11-21T15:15:45
15|NODE_FAIL|None|dgx-1|1:0|100|Partition_Limit|2026-11-21T15:15:45
15.batch|garbled
"""


def test_states_are_read_from_the_queue_first_and_then_from_accounting(stub: Stub, tmp_path: Path) -> None:
    stub("squeue", QUEUE)
    stub("sacct", ACCOUNTED)
    known = client.states(["12", "13", "14", "15", "99"])
    assert sorted(known) == ["12_0", "12_1", "12_2", "12_3", "12_5", "12_7", "12_9", "13", "14", "15"]
    assert known["12_3"].state is JobState.queued, "accounting lags"
    assert known["12_3"].start == "" and known["12_3"].limit_s == 3600
    assert known["13"] == Job(
        id="13",
        state=JobState.failed,
        native_state="FAILED",
        reason="NonZeroExitCode",
        nodes="dgx-0",
        exit_code="3:0",
        elapsed_s=93784,
        limit_s=None,
        start="2026-11-21T15:15:45",
    )
    assert known["14"].exit_code == "0:15" and known["14"].elapsed_s == 245
    assert (known["12_5"].state, known["12_5"].native_state, known["12_5"].nodes) == (
        JobState.cancelled,
        "CANCELLED",
        "",
    )
    assert known["15"].native_state == "NODE_FAIL" and known["15"].limit_s is None
    assert (calls(tmp_path, "squeue"), calls(tmp_path, "sacct")) == (1, 1)


@pytest.mark.long
def test_thousands_of_ids_need_few_queries(stub: Stub, tmp_path: Path) -> None:
    stub("squeue", "".join(f"{k}|RUNNING|None|dgx-0|0|0:01|5:00|N/A|\n" for k in range(5000)))
    assert len(client.states([str(k) for k in range(5000)])) == 5000
    assert calls(tmp_path, "squeue") == 3, "and no sacct, which is not installed"


def test_without_accounting_states_come_from_the_queue(stub: Stub) -> None:
    stub("squeue", QUEUE, err="")
    assert sorted(client.states(["13", "99"])) == ["13"]
    stub("sacct", err="Slurm accounting storage is disabled\n", exit_code=1)
    assert sorted(client.states(["13", "99"])) == ["13"]


def test_unknown_jobs_are_left_out(stub: Stub) -> None:
    stub("squeue", err="slurm_load_jobs error: Invalid job id specified\n", exit_code=1)
    stub("sacct")
    assert client.states(["99"]) == {}


def test_an_unreachable_controller_is_an_error(stub: Stub) -> None:
    stub("squeue", err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", exit_code=1)
    with pytest.raises(SubmitError, match="Unable to contact slurm controller"):
        client.states(["1"])


def test_a_command_that_is_missing_or_slow_is_an_error(stub: Stub) -> None:
    with pytest.raises(SubmitError, match="the program sinfo cannot be started: No such file"):
        client.run(["sinfo"])
    stub("sinfo", also="exec sleep 30")
    with pytest.raises(SubmitError, match=r"sinfo did not answer within 0\.2 s"):
        client.run(["sinfo"], timeout_s=0.2)


def test_options_from_environment_variables_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    added = ("SBATCH_PARTITION", "SQUEUE_FORMAT", "SINFO_FORMAT", "SRUN_CPUS_PER_TASK", "SACCT_FORMAT")
    for name in (*added, "SLURM_CONF", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "x")
    assert not set(added) & set(client.environment("sbatch")) and "SLURM_CONF" in client.environment("sbatch")
    for command in ("srun", "sbatch"):  # inside an allocation they would use its sizes
        assert "SLURM_JOB_ID" not in client.environment(command) and "SLURM_CONF" in client.environment(command)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("1-0", 1440),
        ("1-1:30", 1530),
        ("1-1:30:30", 1530.5),
        ("soon", None),
    ],
)
def test_time_limits_are_read_as_sbatch_does(text: str, minutes: float | None) -> None:
    assert client.minutes(text) == minutes


@pytest.fixture
def site(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Checked]]:
    """Return a function that runs the login tier on a healthy site, except for stubs installed later."""
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("CONT", "nvcr.io#nvidia/pytorch:25.01-py3")
    monkeypatch.setenv("ENROOT_CONFIG_PATH", str(tmp_path))
    (tmp_path / ".credentials").touch(mode=0o600)
    (tmp_path / ".credentials").write_text(
        "machine nvcr.io login $oauthtoken password x\nmachine authn.nvidia.com login y"
    )
    stub("sinfo", SINFO)
    stub("sbatch", err=TAKEN)
    stub("sacctmgr", "root|normal,high\nml|normal\n")
    stub("srun", HELP)
    stub("sacct")

    def look(*overrides: str) -> list[Checked]:
        plan = compose.compose(["task=lora_tiny", "cluster=dgx1", "container=pyxis", "walltime=10", *overrides])
        checked = [*tier(plan, "laptop"), *tier(plan, "login")]
        return [one for one in checked if one.tier == "login" and one.what != "shared folders"]

    return look


def findings(checked: list[Checked]) -> list[Finding]:
    return preflight.findings(checked)


def unknown(checked: list[Checked]) -> list[str]:
    return [one.what for one in checked if one.unknown]


@pytest.mark.long
def test_each_command_runs_once_on_a_healthy_site(site: Callable[..., list[Checked]], tmp_path: Path) -> None:
    checked = site()
    assert findings(checked) == [] and unknown(checked) == []
    assert {name: calls(tmp_path, name) for name in ("sinfo", "sbatch", "sacctmgr", "srun", "sacct")} == {
        "sinfo": 1,
        "sbatch": 1,
        "sacctmgr": 1,
        "srun": 2,
        "sacct": 1,
    }


REFUSED = "allocation failure: Requested node configuration is not available\n"
GPUS = {
    "untyped": (
        "gpu:8",
        "cluster.slurm.gpu_request=gres_typed",
        "cluster.slurm.gpu_type=h100",
        "gpu_request=gres",
        "error",
    ),
    "another type": (
        "gpu:a100:8",
        "cluster.slurm.gpu_request=gres_typed",
        "cluster.slurm.gpu_type=h100",
        "gpu_type to a100",
        "error",
    ),
    "undeclared": ("(null)", "cluster.slurm.gpu_request=gpus_per_node", "walltime=10", "gpu_request=none", "error"),
    "not requested": (
        "gpu:h100:8",
        "cluster.slurm.gpu_request=none",
        "walltime=10",
        "gpu_request=gpus_per_node",
        "warning",
    ),
    "too few": ("gpu:h100:4(S:0),nvme:1", "cluster.slurm.gpu_request=gres", "walltime=10", "ranks_per_node=4", "error"),
    "mixed": ("gpu:a100:8,gpu:h100:8", "cluster.slurm.gpu_request=gres", "walltime=10", "gpu_type=a100", "warning"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", GPUS)
def test_gpu_requests_are_compared_with_the_sites_gpus(
    case: str, site: Callable[..., list[Checked]], stub: Stub
) -> None:
    gres, *overrides, fix, severity = GPUS[case]
    stub("sinfo", f"batch*|up|infinite|16|{gres}|224|2063000|idle|1-infinite\n")
    stub("sbatch", err=REFUSED if severity == "error" else TAKEN, exit_code=int(severity == "error"))
    (finding,) = findings(site(*overrides))
    assert fix in finding.fix and finding.severity == severity, finding
    assert finding.rule == ("SLU-02" if case == "too few" else "SLU-01")


REFUSALS = {
    "a plugin of the site": (
        "sbatch: error: Please charge a project\nsbatch: error: Batch job submission failed: Unspecified error\n",
        "SLU-02",
        "Please charge a project",
    ),
    "GPUs of select/linear": (
        "sbatch: error: Batch job submission failed: "
        "Requested GRES option unsupported by configured SelectType plugin\n",
        "SLU-01",
        "gpu_request",
    ),
    "busy": ("allocation failure: Requested nodes are busy\n", "SLU-09", "wait in the queue"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSALS)
def test_findings_contain_slurms_message(case: str, site: Callable[..., list[Checked]], stub: Stub) -> None:
    err, rule, text = REFUSALS[case]
    stub("sbatch", err=err, exit_code=1)
    (finding,) = findings(site())
    assert finding.rule == rule and text in " ".join((finding.what, finding.where, finding.fix))
    assert finding.severity == ("warning" if case == "busy" else "error")


@pytest.mark.long
def test_an_unknown_account_that_slurm_accepts_is_a_warning(site: Callable[..., list[Checked]], stub: Stub) -> None:
    (finding,) = findings(site("cluster.slurm.account=nlp"))
    assert finding.severity == "warning" and "set cluster.slurm.account to one of ml, root" in finding.fix
    stub("sbatch", err="allocation failure: Invalid account or account/partition combination specified\n", exit_code=1)
    (finding,) = findings(site("cluster.slurm.account=nlp"))
    assert finding.severity == "error" and "set cluster.slurm.account to one of ml, root" in finding.fix


@pytest.mark.long
def test_if_srun_aborts_on_flags_without_value_the_fix_is_the_environment(
    site: Callable[..., list[Checked]], stub: Stub
) -> None:
    died = "srun: error: plugstack.c:1145: _do_option_cb(): Assertion (arg) failed."
    stub("srun", HELP, also=f'[[ $* != *--no-container-mount-home* ]] || {{ echo "{died}" >&2; kill -ABRT $$; }}')
    (finding,) = findings(site())
    assert finding.rule == "PYX-01" and "set container.flags=environment" in finding.fix
    assert findings(site("container.flags=environment")) == []


@pytest.mark.long
def test_without_pyxis_its_flags_are_not_checked(site: Callable[..., list[Checked]], stub: Stub) -> None:
    stub("srun", err="srun: unrecognized option '--no-container-mount-home'\n", exit_code=1)
    checked = site()
    assert [finding.rule for finding in findings(checked)] == ["PYX-02"]
    assert unknown(checked) == ["container flags"]


@pytest.mark.long
def test_without_a_configuration_of_slurm_one_answer_says_so(site: Callable[..., list[Checked]], stub: Stub) -> None:
    """Slurm's commands are installed, but this is no machine of a cluster: Pyxis is then not missing."""
    for name in ("sinfo", "sacctmgr", "sbatch", "srun", "sacct"):
        stub(name, err=f"{name}: fatal: Could not establish a configuration source\n", exit_code=1)
    checked = site()
    assert [finding.rule for finding in findings(checked)] == ["SLU-11"]
    assert {"Pyxis", "container flags", "sbatch --test-only", "accounting"} <= {*unknown(checked)}
    stub("srun", err="srun: error: slurm_msg_sendto: bad host\n", exit_code=1)
    assert "Pyxis" in unknown(site())


@pytest.mark.long
def test_checks_without_their_command_are_unknown(
    site: Callable[..., list[Checked]], stub: Stub, tmp_path: Path
) -> None:
    for name in ("sinfo", "sacctmgr", "sacct"):
        (tmp_path / "bin" / name).unlink()
    checked = site()
    assert unknown(checked) == ["partition", "GPUs", "CPUs", "account and QOS"]
    assert [(finding.rule, finding.severity) for finding in findings(checked)] == [("SLU-04", "warning")]


@pytest.mark.long
def test_checks_are_unknown_if_slurm_cannot_be_reached(site: Callable[..., list[Checked]], stub: Stub) -> None:
    for name in ("sinfo", "sacctmgr", "sbatch", "sacct", "srun"):
        stub(name, err=f"{name}: error: Unable to contact slurm controller (connect failure)\n", exit_code=1)
    checked = site()
    assert findings(checked) == [] and {"partition", "sbatch --test-only", "Pyxis", "accounting"} <= set(
        unknown(checked)
    )
