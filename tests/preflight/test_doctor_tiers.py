"""The doctor's tiers, and its jobs that check nodes, with a fake API server that runs them at once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import answers as printed
from bench.backends.kubernetes import checks, client, names
from bench.contract import node_facts
from bench.contract.node_facts import HealthFinding, RankFacts
from bench.contract.plan import Plan
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from bench.preflight import Checked, doctor
from bench.preflight.doctor import ON_NODES
from bench.rules.finding import Finding, Tier, broken
from helpers import answers
from helpers.api_server import ApiServer, refusal
from helpers.facts import SOUND
from helpers.nodes import health_report

JOBS, PODS = "GET /apis/batch/v1/namespaces/default/jobs", "GET /api/v1/namespaces/default/pods"
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
KINDS = {"GET /api/v1": ["ConfigMap"], "GET /apis/batch/v1": ["Job"]}
FINE = [{"metadata": {"name": name}, "status": {}} for name in ("a", "b")]


@dataclass
class Cluster(ApiServer):
    """A fake cluster. A job ends immediately with `condition`, and its ranks have written facts into the run folder."""

    condition: str | None = "Complete"
    facts: Sequence[RankFacts] = ()
    health: node_facts.Health | None = None
    folders: list[Path] = field(default_factory=list)
    """The folders of submitted runs."""

    def request(self, method: str, path: str, *, query: Any = None, body: Any = None, **words: Any) -> Any:
        answer = super().request(method, path, query=query, body=body, **words)
        if method == "POST" and not query and answer.get("kind") == "Job":
            folder = Path(answer["metadata"]["annotations"][names.FOLDER])
            self.folders += [] if folder in self.folders else [folder]
            ended = [] if self.condition is None else [{"type": self.condition, "status": "True"}]
            self.answers.setdefault(JOBS, {"items": []})["items"].append({**answer, "status": {"conditions": ended}})
            self._write(folder)
        return answer

    def _write(self, folder: Path) -> None:
        (folder / "facts").mkdir(exist_ok=True)
        for one in self.facts:
            (folder / "facts" / f"rank_{one.rank}.json").write_text(node_facts.dumps(one))
        if self.health is not None:
            (folder / "health.json").write_text(node_facts.dumps(self.health))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(checks, "os", SimpleNamespace(geteuid=lambda: 1000))  # the submitter is the pods' user
    monkeypatch.setattr(client, "is_available", lambda: True)
    fake = Cluster({place: {"resources": [{"kind": kind} for kind in kinds]} for place, kinds in KINDS.items()})
    fake.answers |= {"GET /version": {"gitVersion": "v1.20.2"}, "GET /api/v1/nodes": {"items": FINE}}
    fake.answers |= {
        place: {"items": []} for place in (PODS, PODS.replace("pods", "events"), PODS.replace("pods", "resourcequotas"))
    }
    monkeypatch.setattr(client, "request", fake.request)
    return fake


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=kubernetes_test", *overrides])


def rank(number: int, *, world_size: int, **changes: Any) -> RankFacts:
    sound = replace(SOUND[0], rank=number, local_rank=0, world_size=world_size, node=f"dgx-{number}")
    return replace(sound, **changes)


def test_the_doctor_runs_the_requested_tier_if_it_can(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here, local = planned(), compose.compose(["task=lora_tiny", "cluster=local"])
    assert [doctor.tier_for(here, tier) for tier in (None, *doctor.TIERS)] == ["login", *doctor.TIERS]
    assert [doctor.tier_for(local, tier) for tier in (None, "laptop")] == ["laptop", "laptop"]
    with pytest.raises(ConfigError) as refused:
        doctor.tier_for(local, "login")
    assert refused.value.what == "--tier login needs a cluster with a queue, but cluster=local has no queue"
    assert refused.value.fix == "choose a cluster with a queue, or use --tier laptop"
    monkeypatch.setattr(client, "is_available", lambda: False)
    assert [doctor.tier_for(here, tier) for tier in (None, "laptop")] == ["laptop", "laptop"]
    with pytest.raises(ConfigError) as elsewhere:
        doctor.tier_for(here, "canary")
    assert elsewhere.value.what == "--tier canary queries kubernetes, but this machine cannot query kubernetes"
    assert (elsewhere.value.where, elsewhere.value.fix) == (
        "--tier canary",
        "run `runstop doctor` on the login node, or use --tier laptop",
    )


@pytest.mark.long
def test_each_tier_up_to_the_requested_one_is_checked(cluster: Cluster) -> None:
    lines = list[str]()
    cluster.facts = [rank(0, world_size=1)]
    (laptop,) = doctor.examine(planned(), "laptop", say=lines.append)
    assert {one.tier for one in laptop} == {"laptop"} and not cluster.requests and not lines
    tiers = list(doctor.examine(planned(), "canary", say=lines.append))
    assert [{one.tier for one in checked} for checked in tiers] == [{"laptop"}, {"login"}, {"canary"}]
    assert lines == [
        "canary: submitting a job without trials that checks one node, inside the container; it may wait in the queue"
    ]
    (canary,) = tiers[2]
    assert (canary.what, canary.unknown, canary.findings) == (ON_NODES["canary"], "", ())
    (folder,) = cluster.folders
    assert canary.seen.startswith("world, image, versions, environment, paths, results, gpus, gpu faults, drivers,")
    assert canary.seen.endswith(f"memlock, clocks, health; {folder}")
    assert len(cluster.answers[JOBS]["items"]) == 1, "one node, one pod"
    assert doctor.errors([one for checked in tiers for one in checked]) == []


@pytest.mark.long
def test_no_job_is_started_after_an_error(cluster: Cluster) -> None:
    cluster.answers["GET /version"] = {"gitVersion": "v1.19"}
    cluster.facts = [rank(0, world_size=1)]
    *_, login, canary = doctor.examine(planned(), "canary")
    assert [one.rule for one in doctor.errors(login)] == ["KUB-16"]
    assert canary == [
        Checked(
            ON_NODES["canary"],
            (),
            "canary",
            unknown="not run, because the job of this check would fail with the errors above",
        )
    ]
    assert not cluster.folders
    *_, forced = doctor.examine(planned("launch.force=true"), "canary")
    assert [one.unknown for one in forced] == [""] and len(cluster.folders) == 1


@pytest.mark.long
def test_all_nodes_are_measured_and_the_option_to_exclude_slow_ones_is_printed(cluster: Cluster) -> None:
    cluster.facts = [rank(0, world_size=2), rank(1, world_size=2)]
    cluster.health = health_report(
        findings=(HealthFinding("NCC-04", "slow", "dgx-1", "look"),), slow_nodes=("dgx-1",), nodes=()
    )
    checked = doctor.on_nodes(planned(), "nodes")
    assert checked.findings == (replace(broken("NCC-04", "slow", "dgx-1", fix="look"), tier="nodes"),)
    assert checked.seen.endswith("; to exclude the slow nodes: cluster.kubernetes.exclude_nodes=[dgx-1]")
    assert len(cluster.answers[JOBS]["items"]) == 2
    plan = json.loads((cluster.folders[0] / "plan.json").read_text())
    assert (plan["name"], plan["trials"], plan["world"]["num_nodes"]) == ("probe-kubernetes_test", [], 2)


def test_a_job_that_can_never_start_is_cancelled_at_once(cluster: Cluster) -> None:
    cluster.condition = None

    def pods(method: str, path: str, **words: Any) -> Any:
        answer = original(method, path, **words)
        if path == PODS.removeprefix("GET ") and cluster.folders:
            labels = {names.RUN: names.of_folder(cluster.folders[0], 1)}
            status = {"phase": "Pending", "containerStatuses": [{"state": PULLING}]}
            return {"items": [{"metadata": {"name": "x", "labels": labels}, "status": status}]}
        return answer

    original, client.request = client.request, pods
    checked = doctor.on_nodes(planned(), "canary")
    what = "the job cannot start: ImagePullBackOff: no such image"
    assert checked.findings == (replace(broken("KUB-01", what, str(cluster.folders[0])), tier="canary"),)
    assert [one.partition("?")[0].rpartition("/")[2] for one in cluster.requests if one.startswith("DELETE")] == [
        f"{names.of_folder(cluster.folders[0], 1)}-0"
    ]


def only_code(cluster: Cluster, tier: Tier = "canary") -> list[Finding]:
    problems = list(doctor.on_nodes(planned(), tier).findings)
    assert {(one.tier, one.where) for one in problems} <= {(tier, str(cluster.folders[0])), (tier, "dgx-0")}
    return problems


@pytest.mark.long
def test_a_failed_job_without_errors_in_its_facts_is_diagnosed(cluster: Cluster) -> None:
    cluster.condition, cluster.facts = "Failed", [rank(0, world_size=1)]
    (failed,) = only_code(cluster)
    assert (failed.rule, failed.severity) == ("RUN-10", "error") and failed.what.startswith("the job failed: ")
    cluster.answers |= {PODS: {"items": [{"metadata": {"name": "x"}}]}, f"{PODS}/x/log": "a.err: CUDA out of memory.\n"}
    cluster.answers[JOBS], cluster.folders = {"items": []}, []
    (full,) = only_code(cluster)
    assert full.rule == "RUN-01" and "CUDA out of memory" in full.what, "the pods' logs show the cause"
    cluster.facts = [rank(0, world_size=4)]
    cluster.answers[JOBS], cluster.folders = {"items": []}, []
    assert [one.rule for one in doctor.on_nodes(planned(), "canary").findings] == ["NCC-05"], "the facts show the cause"


def test_a_successful_job_without_facts_is_an_error(cluster: Cluster) -> None:
    (silent,) = only_code(cluster)
    assert silent.rule == "RUN-10"


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_job_is_cancelled_if_waiting_for_it_fails(
    cancelled: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(folder: Path) -> Any:
        cluster.answers |= {} if cancelled else {JOBS: refusal(500, "", "broken")}
        raise SubmitError("the backend no longer knows the job of this run", where=str(folder), fix="why")

    monkeypatch.setattr(doctor.runs, "wait", lost)
    with pytest.raises(SubmitError, match="the backend no longer knows the job of this run"):
        doctor.on_nodes(planned(), "canary")
    assert any(one.startswith("DELETE") for one in cluster.requests) is cancelled


def test_json_output_is_one_object(cluster: Cluster) -> None:
    plan = planned()
    warning = broken("KUB-08", "it is Pending", "there", severity="warning")
    error = broken("KUB-02", "no room", "there")
    checks = Checked("a", ("KUB-08",), "laptop", (warning,), "seen"), Checked("b", (), "login", unknown="not queried")
    report = answers.one(printed.line(printed.doctor(plan, [checks[:1], checks[1:]])))
    assert (report["plan"], report["tier"], report["passed"]) == (plan.name, "login", True)
    assert [(one["rule"], one["severity"]) for one in report["findings"]] == [("KUB-08", "warning")]
    rest = {"rules": ["KUB-08"], "tier": "laptop", "seen": "seen", "unknown": ""}
    assert report["checks"][0] == {"what": "a", "num_findings": 1, **rest}
    assert (report["checks"][1]["num_findings"], report["checks"][1]["unknown"]) == (0, "not queried")
    broken_one = Checked("c", (), "login", (warning, error))
    report = answers.one(printed.line(printed.doctor(plan, [checks, [broken_one]])))
    assert not report["passed"] and [one["rule"] for one in report["findings"]] == ["KUB-02", "KUB-08"]
    assert doctor.errors([*checks, broken_one]) == [error]
