"""What Slurm's checks conclude from a plan and from the answers of Slurm's commands: golden_slurm_checks.txt.

After a change on purpose, run it once with WRITE_CHECKS=1, and read the difference.
"""

import re
import shlex
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from bench.backends.slurm import checks
from bench.backends.slurm.backend import LAPTOP, LOGIN, SlurmBackend
from bench.contract.plan import Plan
from bench.errors import SubmitError
from bench.planning import compose
from bench.rules.check import Answer, Checked, Subject, run
from helpers import checked, golden, user_tables

GOLDEN = Path(__file__).with_name("golden_slurm_checks.txt")
SLURM, CONTAINER = "cluster.slurm.", "container."
IDLE = "batch*|up|1:00:00|2|gpu:h100:8(S:0-1)|64|1024000|idle|1-infinite\n"
SMALL = "debug|up|30:00|1|(null)|8|257000+|idle|1-2\n"
ACCOUNTS = "team|normal,high\nguests|\n"
WILL_START = "sbatch: Job 12 to start at 2026-11-21T15:15:45 using 448 processors on nodes dgx[0-1] in partition batch"
PARTITION = "sbatch: error: invalid partition specified: bach\nTry `sbatch --help` for more information"
OUT = Answer(1, "", "sinfo: error: Unable to contact slurm controller (connect failure)")
NO_SLURM = Answer(1, "", "sinfo: fatal: Could not establish a configuration source")
HELP = Answer(0, "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH", "")
USUAL: dict[str, Answer | SubmitError] = {
    "sinfo": Answer(0, IDLE + SMALL, ""),
    "sacctmgr": Answer(0, ACCOUNTS, ""),
    "sbatch": Answer(0, "", WILL_START),
    "srun": HELP,
    "sacct": Answer(0, "", ""),
    checks.NODES: Answer(0, "dgx-0|batch*\ndgx-1|batch*\ndgx-2|batch*\ndgx-3|debug\n", ""),
}
DOWN = SubmitError("sinfo did not answer within 15 s", where="sinfo", fix="try again")


def refused(message: str, code: int = 1) -> dict[str, Answer | SubmitError]:
    return {"sbatch": Answer(code, "", message)}


def listed(*lines: str) -> dict[str, Answer | SubmitError]:
    return {"sinfo": Answer(0, "\n".join(lines), "")}


TYPED = {f"{SLURM}gpu_request": "gres_typed"}
MIXED = ("batch*|up|1:00:00|1|gpu:h100:8|64|1024000|idle|1-4", "batch*|up|2:00:00|2|gpu:a100:4|32|512000|mix|1-4")
LOGIN_CASES: dict[str, tuple[dict[str, Any], dict[str, Answer | SubmitError]]] = {
    "no answer": ({}, {"sinfo": DOWN, "sbatch": DOWN, "sacct": DOWN, "srun": DOWN}),
    "no controller": ({}, {"sinfo": OUT}),
    "no configuration": ({}, {"sinfo": NO_SLURM, "sacct": NO_SLURM}),
    "a command that fails": ({}, {"sinfo": Answer(1, "", "sinfo: error: bad format")}),
    "an unknown partition": ({f"{SLURM}partition": "bach"}, refused(PARTITION)),
    "two partitions": ({f"{SLURM}partition": "debug,batch"}, listed(IDLE, SMALL)),
    "the small partition": ({f"{SLURM}partition": "debug"}, {}),
    "no default partition": ({}, listed(IDLE.replace("*", ""), SMALL)),
    "a partition that is down": ({}, listed(IDLE.replace("|up|", "|down|"))),
    "an inactive partition": ({}, listed(IDLE.replace("|up|", "|inact|"))),
    "a partition that is partly up": ({}, listed(IDLE.replace("|up|", "|drain|"), IDLE)),
    "no time limit": ({"walltime_min": 10000.0}, listed(IDLE, IDLE.replace("1:00:00", "infinite"))),
    "a time limit": ({"walltime_min": 90.0}, listed(*MIXED)),
    "too little time": ({"walltime_min": 121.0}, listed(*MIXED)),
    "an idle node that does not respond": ({}, listed(IDLE.replace("|2|", "|1|"), IDLE.replace("idle", "idle*"))),
    "drained nodes": ({}, listed(IDLE.replace("idle", "drained")) | refused("error: Requested node configuration")),
    "too few nodes": ({}, listed(IDLE.replace("|2|", "|1|"))),
    "a minimum of nodes": ({}, listed(IDLE.replace("1-infinite", "3-8"))),
    "an array": ({"config.launch.array": True, "walltime_min": 30.0}, {}),
    "nodes left out": ({"config.cluster.avoided": {"dgx-1": "avoid"}}, {}),
    "too many left out": ({"config.cluster.avoided": {"dgx-1": "slow", "dgx-2": "avoid"}}, {}),
    "unknown nodes left out": ({"config.cluster.avoided": {"dgx-9": "avoid", "dgx-1": "avoid", "dgx-8": "slow"}}, {}),
    "only unknown nodes left out": ({"config.cluster.avoided": {"dgx-9": "avoid"}}, {}),
    "no list of nodes": ({"config.cluster.avoided": {"dgx-1": "avoid"}}, {checks.NODES: Answer(0, "dgx-0\n", "")}),
    "no request for GPUs": ({f"{SLURM}gpu_request": "none"}, {}),
    "no request for several types": ({f"{SLURM}gpu_request": "none"}, listed(*MIXED)),
    "no request on a CPU": ({f"{SLURM}gpu_request": "none", "config.cluster.device": "cpu"}, {}),
    "no GPUs": ({}, listed(IDLE.replace("gpu:h100:8(S:0-1)", "(null)"))),
    "no GPUs and no request": ({f"{SLURM}gpu_request": "none"}, listed(IDLE.replace("gpu:h100:8(S:0-1)", "(null)"))),
    "GPUs without a type": (TYPED | {f"{SLURM}gpu_type": "h100"}, listed(IDLE.replace("h100:", ""))),
    "GPUs of another type": (TYPED | {f"{SLURM}gpu_type": "h200"}, listed(*MIXED)),
    "GPUs of this type": (TYPED | {f"{SLURM}gpu_type": "a100"}, listed(*MIXED)),
    "two types of GPUs": ({}, listed(*MIXED)),
    "too few GPUs": ({}, listed(IDLE.replace(":8(", ":7("))),
    "GPUs among others": ({}, listed(IDLE.replace("gpu:", "shard:8,gpu:"))),
    "too few CPUs": ({f"{SLURM}cpus_per_rank": 9}, {}),
    "as many CPUs as a node has": ({f"{SLURM}cpus_per_rank": 8}, {}),
    "fewer CPUs than ranks": ({}, listed(IDLE.replace("|64|", "|7|"))),
    "a foreign account": ({f"{SLURM}account": "other"}, {}),
    "a foreign account that is refused": (
        {f"{SLURM}account": "other", f"{SLURM}qos": "gold"},
        refused(
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
        ),
    ),
    "an own account": ({f"{SLURM}account": "guests", f"{SLURM}qos": "high"}, {}),
    "no accounts": ({f"{SLURM}account": "other"}, {"sacctmgr": Answer(0, "", "")}),
    "no accounting": ({}, {"sacctmgr": Answer(1, "", "sacctmgr: error: slurmdbd: down"), "sacct": Answer(1, "", "")}),
    "an answer without time": ({}, {"sbatch": Answer(0, "", "")}),
    "nodes that are busy": ({}, refused("allocation failure: Requested nodes are busy")),
    "a time limit of Slurm": (
        {},
        refused("sbatch: error: Requested time limit is invalid (missing or exceeds some limit)"),
    ),
    "a node count": ({}, refused("error: Node count invalid\n\nTry again\nerror: Node count invalid")),
    "GRES": ({}, refused("error: Invalid generic resource (gres) specification")),
    "a reservation": ({}, refused("error: The reservation is invalid")),
    "an option": ({}, refused("sbatch: unrecognized option '--segment=2'")),
    "a feature": ({}, refused("error: Invalid feature specification")),
    "a node configuration": ({}, refused("error: Requested node configuration is not available")),
    "an account that Slurm refuses": ({}, refused("error: Invalid qos specification")),
    "a refusal with several messages": ({}, refused("sbatch: error: first\nTry `sbatch --help`\nerror: second\n")),
    "a refusal of unknown reason": ({}, refused("", code=3)),
    "no Pyxis": ({}, {"srun": Answer(0, "--mpi", "")}),
    "Pyxis fails": ({}, {"srun": Answer(1, "", "srun: error: spank: required plugin pyxis.so failed")}),
    "srun fails": ({}, {"srun": Answer(1, "", "srun: error: bad")}),
    "an image in a registry": ({f"config.{CONTAINER}image": "nvcr.io#nvidia/pytorch:25.11-py3"}, {}),
    "an image that is misspelled": ({f"config.{CONTAINER}image": "docker://a b"}, {}),
    "no container": ({f"config.{CONTAINER}runtime": "none"}, {}),
    "Apptainer": ({f"config.{CONTAINER}runtime": "apptainer"}, {}),
    "flags in the environment": ({f"config.{CONTAINER}flags": "environment"}, {}),
}
FLAG_ANSWERS = {
    "srun aborts": Answer(-6, "", "srun: error: Assertion `0' failed"),
    "srun ends with 134": Answer(134, "", "x"),
    "srun prints an assertion": Answer(1, "", "srun: Assertion (argument) failed"),
    "srun does not know the flag": Answer(1, "", "srun: unrecognized option '--container-writable'"),
    "srun accepts the flag": Answer(0, "", "srun: Job 3 to start"),
}
LIMITED = {f"{SLURM}max_walltime_min": 30}
LAPTOP_CASES: dict[str, dict[str, Any]] = {
    "docker": {f"config.{CONTAINER}runtime": "docker", f"config.{CONTAINER}name": "docker"},
    "no image": {f"config.{CONTAINER}image": None},
    "an Apptainer image in a registry": {
        f"config.{CONTAINER}runtime": "apptainer",
        f"config.{CONTAINER}image": "docker://a",
    },
    "a misspelled image": {f"config.{CONTAINER}image": "nvcr.io/nvidia/pytorch:25.11-py3"},
    "a misspelled image in CONT": {"CONT": "docker://nvcr.io/nvidia/pytorch:25.11-py3"},
    "mounts": {
        f"config.{CONTAINER}mounts": [
            *("--container-writable x", "-v", "$NOT_SET:/a", "a,b", "a:b:c:d", "/a:", "a:/b", "/a:b", "tmpfs:/b"),
            *("./a:../b:ro", ".", "umount:/c"),
        ]
    },
    "mounts of Apptainer": {
        f"config.{CONTAINER}runtime": "apptainer",
        f"config.{CONTAINER}image": "/a.sif",
        f"config.{CONTAINER}mounts": [
            "$NOT_SET",
            "/a,b",
            '/a"',
            "/a:/b:ro",
            "/a:/b:rx",
            "/a::rw",
            "a:/b",
            "/a:/b:ro:x",
            "/a:b",
        ],
        "DATADIR": "/d:ata",
    },
    "paths with colons": {"DATADIR": "/d:ata", "MODEL": "/mo del", "LOGDIR": "/a,b"},
    "arguments": {
        f"{SLURM}arguments": [
            *("script.sh", "--hold", "x", "--nice", "5", "--comment", "text", "--time=20", "y"),
            *(
                "-J",
                "name",
                "-Jname",
                "other",
                "--comment a",
                "-N2",
                "-c",
                "4",
                "--ntasks-per-node=8",
                "--gr=gpu:8",
                "--wait",
            ),
            *("--export=NONE", "--export=ALL,A=1", "--open-mode=truncate", "--open-mode=append", "-D/a", "--array=1-2"),
            *(
                "--container-image=a",
                "--container-writable=1",
                "--container-writable",
                "--container=x",
                "-h",
                "-",
                "--",
            ),
        ]
    },
    "a folder with a quotation mark": {"config.launch.folder": '/a"b'},
    "a folder with a backslash": {"config.launch.folder": "/a\\b"},
    "as long as the cluster allows": LIMITED | {"walltime_min": 30.0},
    "longer than the cluster allows": LIMITED | {"walltime_min": 30.5},
    "an option that shortens the job": LIMITED | {"walltime_min": 31.0, f"{SLURM}arguments": ["--time", "29:59"]},
    "an option that prolongs the job": LIMITED | {f"{SLURM}arguments": ["-t1-1", "--time=0:31:0"]},
    "the last of two options": LIMITED | {f"{SLURM}arguments": ["--time=1-0", "-t", "30"]},
    "an option without a time": LIMITED | {f"{SLURM}arguments": ["--time"]},
    "no command that drops caches": {"config.cluster.drop_caches": None},
    "two commands that drop caches": {"config.cluster.drop_caches": "sync; echo 3"},
    "half a quotation": {"config.cluster.drop_caches": "echo 'a"},
    "an empty command": {"config.cluster.drop_caches": " "},
    "no type of GPU": TYPED,
    "a type of GPU": TYPED | {f"{SLURM}gpu_type": "h100"},
}


def done(answer: Answer | SubmitError) -> Future[Answer]:
    future: Future[Answer] = Future()
    if isinstance(answer, SubmitError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a plan for two nodes of eight GPUs, on a login node that has sacct and no Apptainer."""
    user_tables.leave_out(monkeypatch)
    for name, value in {"CONT": "/no/a.sqsh", "DATADIR": "/data", "MODEL": "/model", "LOGDIR": "/logs"}.items():
        monkeypatch.setenv(name, value)
    for name in ("ENROOT_CONFIG_PATH", "ENROOT_SYSCONF_PATH"):
        monkeypatch.setenv(name, "/no/such/folder")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sacct").touch(mode=0o755)
    return compose.compose(["task=lora70b", "cluster=dgx2", "walltime=20"])


def login(plan: Plan, answers: dict[str, Answer | SubmitError], of_flags: Answer) -> list[Checked]:
    script = SlurmBackend().render(plan)
    probe = " ".join(checks.probe(plan, script))
    all_answers = {name: done(answer) for name, answer in (USUAL | {probe: of_flags} | answers).items()}
    return run(LOGIN, Subject(plan, script, (), all_answers), tier="login")


@pytest.mark.long
def test_conclusions_from_slurms_answers(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = FLAG_ANSWERS["srun accepts the flag"]
    usual = {one.what: one for one in login(plan, {}, accepts)}
    lines = [f"usual: {shlex.join(checks.probe(plan, SlurmBackend().render(plan)))}", *checked.shown(usual.values())]
    for name, (settings, answers) in LOGIN_CASES.items():
        lines += ["", name, *checked.differing(login(checked.changed(plan, settings), answers, accepts), usual)]
    for name, answer in FLAG_ANSWERS.items():
        lines += ["", name, *checked.differing(login(plan, {}, answer), usual)]
    (tmp_path / "sacct").unlink()
    lines += ["", "no sacct", *checked.differing(login(plan, {}, accepts), usual)]
    inside = checked.changed(
        plan, {"config.container.runtime": "apptainer", "config.container.image": str(tmp_path / "a.sif")}
    )
    for name in ("a.sif", "apptainer"):
        (tmp_path / name).touch(mode=0o755)
    lines += ["", "Apptainer with its image", *checked.differing(login(inside, {}, accepts), usual)]
    requested = {f"{SLURM}{name}": f"{name}-1" for name in ("partition", "account", "qos", "reservation")}
    argv = checks.probe(
        checked.changed(plan, requested),
        "--container-writable --container-image=a --container-writable --no-container-entrypoint",
    )
    lines += ["", f"probe: {' '.join(argv)}"]
    text = "\n".join(line.replace(str(tmp_path), "FOLDER") for line in lines)

    def shown_laptop(settings: dict[str, Any]) -> list[Checked]:
        with monkeypatch.context() as variables:
            for name in [name for name in settings if name.isupper()]:
                variables.setenv(name, settings[name])
            other = checked.changed(plan, {name: value for name, value in settings.items() if not name.isupper()})
            return run(LAPTOP, Subject(other, ""), tier="laptop")

    usual = {one.what: one for one in shown_laptop({})}
    lines = ["", "", "before the login node", *checked.shown(usual.values())]
    for name, settings in LAPTOP_CASES.items():
        lines += ["", name, *checked.differing(shown_laptop(settings), usual)]
    golden.require(text + "\n".join(lines), GOLDEN, variable="WRITE_CHECKS")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90.0), ("90:30", 90.5), ("1:30:15", 90.25), ("2-0", 2880.0), ("1-2:03", 1563.0), ("1-2:03:06", 1563.1)]
    + [("", None), ("1:2:3:4", None), ("UNLIMITED", None), ("1-", None)],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, minutes: float | None) -> None:
    """The forms are those of sbatch(1)."""
    assert checks.client.minutes(text) == minutes


def test_each_line_of_a_plan_is_compared_with_the_script() -> None:
    def differing(script_plan: str, plan: str, names: str = "A B") -> list[str]:
        script = f"""site_names="{names}"\n  cat <<'PLAN'\n{script_plan}PLAN\n"""
        return list(SlurmBackend().differences(script, plan))

    assert differing('"a": "$A/x",\n"b": "$B:$A",\n', '"a": "/1/x",\n"b": "2:/1",\n') == []
    assert differing('"a": "$A",\n"b": "$A",\n', '"a": "1",\n"b": "2",\n') == [
        'line 2 of plan.json is \'"b": "2",\', but \'"b": "$A",\' in the script'
    ], "a variable has one value"
    assert differing('"a": "$A $A",\n', '"a": "1 2",\n') != [] == differing('"a": "$A $A",\n', '"a": "1 1",\n')
    assert differing("a.c $C\n", "a.c $C\n") == [] != differing("a.c\n", "abc\n")
    assert differing("a $A\nb\n", "a 1 and more\nc\n") == ["line 2 of plan.json is 'c', but 'b' in the script"]
    assert differing("a\n", "a\nb\n") == ["plan.json has 2 lines, but the plan in the script has 1"]
    assert differing("$A\n", "$A\n", names="") == [] and differing("$A\n", "1\n", names="") != []
    long = "x" * 90
    (line,) = differing(f"{long}\n", "  y\n")
    assert re.sub("x+", lambda run: str(len(run[0])), line) == "line 1 of plan.json is 'y', but '79 in the script"
    assert list(SlurmBackend().differences("echo", "{}")) == ["the script contains no plan"]
