"""What a Ray cluster that answers says of a run, and what the plan of one does; jobs that several runs share."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.kubernetes import checks as kubernetes_checks
from bench.backends.ray import backend, client, request
from bench.backends.ray.backend import RayBackend
from bench.contract import plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, RAY_JOB, SUBMISSION
from bench.contract.schema import Runtime
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from bench.rules.check import Checked, Tier, run
from bench.rules.finding import Finding, broken

ADDRESS = "http://head:8265"
BACKEND = RayBackend()
IMAGE = "cluster.kubernetes.image=registry.example/runstop@sha256:" + "0" * 64


def node(state: str = "ALIVE", **resources: float) -> dict[str, Any]:
    return {"state": state, "resources_total": resources}


@dataclass
class Dashboard:
    """The pages of a cluster, and the jobs that it is given; those that `refuses` names are not taken."""

    version: str = "2.60.0"
    nodes: list[dict[str, Any]] = field(default_factory=lambda: [node(CPU=2.0), node(CPU=4.0)])
    is_down: bool = False
    asked: list[str] = field(default_factory=list)
    taken: list[dict[str, Any]] = field(default_factory=list)
    tells: bool | Exception = True
    """What becomes of telling a job to end."""

    def get(self, address: str, page: str) -> Any:
        self.asked.append(f"{address}{page}")
        if self.is_down:
            raise client.unreachable(address, "refused")
        listed = {"data": {"result": {"result": self.nodes}}}
        return {"ray_version": self.version} if page.endswith("version") else listed

    def submit_job(self, **body: Any) -> None:
        self.taken.append(body)

    def stop_job(self, submission: str) -> bool:
        self.asked.append(f"stop {submission}")
        if isinstance(self.tells, Exception):
            raise self.tells
        return self.tells


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dashboard:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"{ADDRESS}/")
    made = Dashboard()
    monkeypatch.setattr(client, "get", made.get)
    monkeypatch.setattr(client, "connect", lambda address: made)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.60.1"))
    return made


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=ray_test", *overrides])


def looked(plan: Plan, tier: Tier) -> dict[str, Checked]:
    subject = BACKEND.subject(plan, tier)
    return {one.what: one for one in run(BACKEND.checks(plan)[tier], subject, tier=tier)}


def findings(found: dict[str, Checked]) -> dict[str, list[Finding]]:
    """Return what was found, by check; as `broken` gives it, without a tier."""
    return {
        name: [broken(f.rule, f.what, f.where, fix=f.fix, severity=f.severity) for f in one.findings]
        for name, one in found.items()
        if one.findings
    }


def test_a_cluster_that_fits_is_seen_to(dashboard: Dashboard) -> None:
    laptop, login = looked(planned("cluster.ray.environment=[LOGDIR]"), "laptop"), looked(planned(), "login")
    seen = {"address of the cluster": ADDRESS, "variables that are passed on": "LOGDIR"}
    assert {name: one.seen for name, one in laptop.items()} == seen | {"no container": "", "one job": ""}
    assert {name: one.seen for name, one in login.items()} == {
        "cluster": f"dashboard {ADDRESS}",
        "version": "Ray 2.60.0",
        "nodes": "2 nodes, 2 of them with CPU: 2",
    }
    assert findings(laptop | login) == {} and not any(one.unknown for one in (laptop | login).values())
    assert dashboard.asked == [f"{ADDRESS}/api/version", f"{ADDRESS}/api/v0/nodes?detail=1&limit=10000"]


def test_what_the_cluster_lacks_is_found(dashboard: Dashboard) -> None:
    dashboard.version = "2.9.0"
    dashboard.nodes = [node(CPU=2.0), node("DEAD", CPU=2.0), node(CPU=1.0)]
    found = looked(planned(), "login")
    assert found["nodes"].seen == "2 nodes, 1 of them with CPU: 2"
    fix = "lower cluster.num_nodes, ranks_per_node or ray.cpus_per_node, or add nodes; where an autoscaler adds them, "
    fix += "launch.force=true starts the run"
    ray = "pip install 'ray[default]==2.9.0', if jobs are refused"
    assert findings(found) == {
        "version": [
            broken("RAY-02", "the cluster has Ray 2.9.0, and here is 2.60.1", ADDRESS, fix=ray, severity="warning")
        ],
        "nodes": [broken("RAY-03", "1 of 2 nodes have CPU: 2, and the run takes 2", ADDRESS, fix=fix)],
    }
    dashboard.is_down = True
    found = looked(planned(), "login")
    what = f"no Ray cluster takes jobs at {ADDRESS}: refused"
    assert findings(found) == {"cluster": [broken("RAY-01", what, "cluster.ray.address")]}
    assert [one.unknown for one in found.values()] == ["", what, what]


def test_without_an_address_nobody_is_asked(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = planned("cluster.ray.address=null")
    assert [one.unknown for one in looked(nowhere, "login").values()] == ["no address to ask"] * 3
    (found,) = findings(looked(nowhere, "laptop"))["address of the cluster"]
    assert (found.rule, found.what, found.where) == ("RAY-01", "no address of a Ray cluster", "cluster.ray.address")
    assert found.fix.startswith("set cluster.ray.address=http://HEAD:8265, or export")
    (odd,) = findings(looked(planned("cluster.ray.address=head:8265"), "laptop"))["address of the cluster"]
    assert (odd.what, odd.fix) == ("'head:8265' is not the address of a dashboard", "write it as http://HEAD:8265")
    assert dashboard.asked == []


def test_what_a_ray_job_does_not_do_is_refused(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    plan = planned("launch.array=true", "cluster.ray.environment=[MY_PASSWORD,A,LOGDIR]")
    plan.config.container.runtime = Runtime.pyxis
    found = findings(looked(plan, "laptop"))
    assert found["no container"] == [
        broken(
            *("PYX-04", "actors of Ray start no container", "container=none"),
            fix="choose container=none; the nodes of a Ray cluster bring torch and the engine themselves",
        )
    ]
    secret, unset = found["variables that are passed on"]
    assert (secret.rule, secret.where) == ("CFG-07", "cluster.ray.environment")
    assert "MY_PASSWORD would stand on Ray's dashboard" in secret.what and "horse" not in str(secret)
    assert unset == broken("CFG-06", "A is not set", secret.where, fix="export A=…, or leave it out")
    assert found["one job"] == [
        broken(
            *("CFG-09", "a Ray job is no array of trials", "launch.array"),
            fix="leave it out: trials follow each other on the same nodes",
        )
    ]
    with pytest.raises(ConfigError, match="CFG-06: A is not set"):
        request.body(plan, Path("/a"), [Path("/a")], 1)


def test_a_cluster_that_kuberay_makes_has_a_manifest_and_nobody_to_ask(dashboard: Dashboard) -> None:
    plan = planned("cluster=kuberay", "cluster.device=cpu", IMAGE)
    subject = BACKEND.subject(plan, "login")
    assert subject.script == BACKEND.render(plan)
    assert looked(plan, "login") == {} and dashboard.asked == []
    found = looked(plan, "laptop")
    assert [name for name in found if name not in {one.what for one in kubernetes_checks.CONFIG_CHECKS}] == [
        *("variables that are passed on", "one job", "manifest")
    ]
    (by_hand,) = findings(found)["manifest"]
    assert (by_hand.rule, by_hand.where) == ("RAY-10", "cluster.ray.kuberay")
    assert by_hand.what == "bench.launch has no cluster to send this run to"
    assert [*BACKEND.differences(subject.script, plan_kinds.dumps(plan))] == []
    assert [*BACKEND.differences(subject.script, "{}")] == ["the manifest holds another plan"]
    assert not BACKEND.subject(plan, "laptop").answers
    assert BACKEND.subject(planned(), "laptop").script == ""


def test_runs_of_the_same_size_share_one_job(dashboard: Dashboard, tmp_path: Path) -> None:
    two, other = planned(), planned("cluster.ray.cpus_per_node=3")
    assert BACKEND.shares_nodes([two, two]) and not BACKEND.shares_nodes([two, other])
    study, runs = tmp_path / "study", [(two, tmp_path / name) for name in ("a", "b", "c")]
    for folder in (study, *(folder for _, folder in runs)):
        folder.mkdir()
    for plan, folder in runs[:2]:
        BACKEND.prepare_shared(plan, folder, forced=[broken("RAY-03", "few", "there")])
    prepared = {"backend": "ray", "jobs": [], "address": ADDRESS, "forced": ["RAY-03: few"]}
    assert json.loads((runs[0][1] / JOB).read_text()) == prepared
    job = BACKEND.submit_shared(runs, study, name="study")
    (body,) = dashboard.taken
    assert job == f"{body['submission_id']}@{ADDRESS}" and body["submission_id"].startswith("study-")
    assert body["entrypoint"].endswith(" ".join(str(folder) for _, folder in runs))
    shared = json.loads((study / JOB).read_text())
    assert shared["runs"] == ["a", "b", "c"] and [one["id"] for one in shared["jobs"]] == [job]
    assert shared["page"] == f"{ADDRESS}/#/jobs/{body['submission_id']}"
    entry = shared["jobs"][0] | {"shared": "study"}
    BACKEND.note_shared(study)  # once more, and no second time
    for _, folder in runs[:2]:
        assert json.loads((folder / JOB).read_text()) == prepared | {"jobs": [entry]}
    assert not (runs[2][1] / JOB).exists(), "nobody has prepared it"
    assert not (study / SUBMISSION).exists() and json.loads((study / RAY_JOB).read_text()) == body


def test_words_for_sbatch_are_refused(dashboard: Dashboard, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--qos=a -n1 is for sbatch, and a Ray job has no such options"):
        BACKEND.resume(tmp_path, trials_left=1, arguments=["--qos=a", "-n1"])
    assert list(BACKEND.submitted(tmp_path)) == [], "it has never had a job"
    assert backend.WALLTIME == "walltime" and not dashboard.taken


@pytest.mark.parametrize(
    ("tells", "message", "fix"),
    [
        (False, "Ray has nothing to stop: the job has ended", "python -m bench runs shows how"),
        (RuntimeError("\n no such job\nTraceback"), "no such job", "ray job stop a"),
    ],
)
def test_a_job_that_cannot_be_stopped_is_told(
    tells: bool | Exception, message: str, fix: str, dashboard: Dashboard
) -> None:
    BACKEND.cancel(f"a@{ADDRESS}")
    assert dashboard.asked == ["stop a"]
    dashboard.tells = tells
    with pytest.raises(SubmitError) as refused:
        BACKEND.cancel(f"a@{ADDRESS}")
    assert (refused.value.what, refused.value.where, refused.value.fix) == (message, f"job a@{ADDRESS}", fix)


def test_what_a_job_brings_with_it_is_this_program_unless_nodes_have_it(dashboard: Dashboard) -> None:
    made = [
        request.body(planned(*words), Path("/a"), [Path("/b")], 2) for words in ((), ("cluster.ray.code=installed",))
    ]
    brought, installed = (one["runtime_env"] for one in made)
    packages = Path(request.__file__).parents[3]
    settings = {"RAY_DEDUP_LOGS": "0", "RAY_JOB_STOP_WAIT_TIME_S": "180"}
    assert installed == {"env_vars": settings}
    names = [f"{packages}/bench", f"{packages}/jobs"]
    assert brought == {"env_vars": settings, "py_modules": names, "excludes": ["__pycache__"]}
    assert made[0]["submission_id"].endswith("-2") and made[0]["metadata"] == {request.FOLDER: "/a"}
    assert made[0]["entrypoint"].endswith(" /b")
    assert BACKEND.without(planned(), ["a", "b"]) == ("a Ray cluster without a, b: drain them with `ray drain-node`")


def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    def refused(place: object, timeout: float) -> None:
        asked.append((place, timeout))
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(client.socket, "create_connection", refused)
    for address in ("http://head:8265", "https://head", "http://head", "http://head:x"):
        with pytest.raises(client.UnreachableError, match=f"RAY-01: no Ray cluster takes jobs at {address}: "):
            client.require_listening(address)
    assert asked == [(("head", port), 10.0) for port in (8265, 443, 80)]
    monkeypatch.setattr(client.importlib.util, "find_spec", lambda name: None)
    assert not BACKEND.is_here()
    with pytest.raises(ConfigError, match="Ray is not installed here"):
        client.connect(ADDRESS)


def test_a_page_is_asked_by_rays_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"a": 1})
    own = SimpleNamespace(_do_request=lambda method, page: answer if (method, page) == ("GET", "/p") else None)
    monkeypatch.setattr(client, "connect", lambda address: own)
    assert client.get(ADDRESS, "/p") == {"a": 1}

    def fails() -> None:
        raise OSError("404 Not Found")

    answer.raise_for_status = fails
    with pytest.raises(client.UnreachableError, match="404 Not Found"):
        client.get(ADDRESS, "/p")
