"""Reserving and releasing the nodes of a run, with a fake Ray that records requests."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bench.backends.ray import placement_group as ray_placement_group
from bench.backends.ray.placement_group import Group, LostError, Node, Place
from bench.contract.plan import Plan
from bench.planning import compose

PLACES = [Place("rig", "10.0.0.1", "aaaaaaaa"), Place("rig", "10.0.0.2", "bbbbbbbb")]


class RayError(Exception):
    """Like the class in ray.exceptions."""


class ActorDiedError(RayError):
    """Like the class in ray.exceptions."""


@dataclass
class Ray:
    """The placement group is ready after `ready_s`, actors after `looks` waits; each wait takes its full timeout."""

    ready_s: float = 0.0
    looks: int = 0
    error: RayError | None = None
    now_s: float = 500.0
    requests: list[Any] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.requests.append((bundles, strategy))
        return self

    def wait_for_placement(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return self.now_s - 500 > self.ready_s

    def remote(self, kind: type) -> Any:
        assert kind is Node

        def options(scheduling_strategy: Any, **words: Any) -> Any:
            placement, number = scheduling_strategy
            assert placement.wait == self.wait_for_placement
            self.options.append(words)
            where = SimpleNamespace(remote=lambda: PLACES[number])
            return SimpleNamespace(remote=lambda kept: SimpleNamespace(kept=kept, where=where))

        return SimpleNamespace(options=options)

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(calls)
        self.looks, self.now_s = self.looks - 1, self.now_s + timeout
        return ([], calls) if self.looks >= 0 else (calls, [])

    def get(self, calls: list[Any], timeout: float) -> list[Any]:
        assert timeout == ray_placement_group.READY_POLL_S
        if self.error:
            raise self.error
        return calls

    def nodes(self) -> list[dict[str, Any]]:
        sizes = {"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 2.0}
        return [{"Alive": number < 2, "Resources": size} for number, size in enumerate(sizes)]


Reserve = Callable[..., tuple[Any, Ray, list[str]]]


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> Reserve:
    """Reserve the nodes of a run; return the group or the error, the fake Ray, and the printed lines and checks."""

    def run(ray: Ray, plan: Plan, check: Callable[[], None] | None = None) -> Any:
        placement = SimpleNamespace(wait=ray.wait_for_placement)
        util = SimpleNamespace(remove_placement_group=lambda group: ray.requests.append(("removed", group)))
        module = {name: getattr(ray, name) for name in ("remote", "wait", "get", "nodes")}
        module |= {"util": util, "exceptions": SimpleNamespace(RayError=RayError)}
        module["kill"] = lambda actor: ray.requests.append(("killed", actor))
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**module))
        monkeypatch.setitem(sys.modules, "ray.util", util)
        submodule = SimpleNamespace(
            placement_group=lambda *words, **more: ray.placement_group(*words, **more) and placement
        )
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", submodule)
        strategy = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group,
                placement_group_bundle_index,
            )
        )
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategy)
        monkeypatch.setattr(ray_placement_group, "time", SimpleNamespace(monotonic=lambda: ray.now_s))
        lines = list[str]()
        try:
            return (
                ray_placement_group.reserve(plan, lines.append, check=check or (lambda: lines.append("checked"))),
                ray,
                lines,
            )
        except LostError as error:
            return error, ray, lines

    return run


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=ray_test", *overrides])


@pytest.mark.long
def test_each_actor_is_on_another_node_and_reserves_the_resources_of_its_ranks(reserve: Reserve) -> None:
    more = ("cluster=ray", "task=lora70b", "+cluster.ray.resources.rdma=1", "cluster.ray.environment=[A]")
    group, ray, lines = reserve(Ray(looks=2), planned(*more))
    required = {"CPU": 16.0, "GPU": 8.0, "rdma": 1.0}
    assert ray.requests == [([required, required], "STRICT_SPREAD")] and lines == ["checked", "checked"]
    options = {"num_cpus": 16.0, "num_gpus": 8.0, "resources": {"rdma": 1.0}, "max_concurrency": 4, "max_restarts": 0}
    assert ray.options == [options, options]
    assert group.places == PLACES and [actor.kept for actor in group.actors] == [["A"], ["A"]]
    assert group.names == ["rig-aaaaaa", "rig-bbbbbb"]
    other = Place("box", "10.0.0.3", "cccc")
    assert Group(None, [], [PLACES[0], other]).names == ["rig", "box"]
    ray_placement_group.release(group)
    assert ray.requests[1:] == [*(("killed", actor) for actor in group.actors), ("removed", group.placement)]


def test_a_job_that_waits_for_nodes_reports_it_once_and_fails_after_the_timeout(reserve: Reserve) -> None:
    words = "2 nodes with CPU: 2 each; the cluster has 2 nodes, 1 of them large enough"
    group, ray, lines = reserve(Ray(ready_s=59.0), planned())
    assert isinstance(group, Group) and lines == [*["checked"] * 11, f"waiting for {words}", *["checked"] * 48]
    assert ray.options[0] == {
        "num_cpus": 2.0,
        "num_gpus": 0,
        "resources": {},
        "max_concurrency": 4,
        "max_restarts": 0,
    }
    lost, ray, lines = reserve(Ray(ready_s=199.0), planned("cluster.ray.placement_timeout_min=2"))
    assert (lost.rule, str(lost)) == (
        "RAY-03",
        f"RAY-03: Ray did not reserve the nodes within 121 s; the run needs {words}",
    )
    assert lines.count("checked") == 121 and [kind for kind, _ in ray.requests[1:]] == ["removed"]


def test_an_interrupted_job_removes_its_placement_group(reserve: Reserve) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    for ray in (Ray(ready_s=9.0), Ray(looks=1)):
        with pytest.raises(KeyboardInterrupt):
            reserve(ray, planned(), end)
        assert [kind for kind, _ in ray.requests[1:]] == ["removed"]


def test_an_actor_that_does_not_start_is_given_up_after_ten_minutes(reserve: Reserve) -> None:
    lost, ray, lines = reserve(Ray(looks=10_000, error=RayError("not\n ready")), planned())
    assert str(lost) == "RAY-04: an actor does not start on its node: not ready"
    assert ray.now_s == 500 + 1 + 600 and lines == ["checked"] * 599 and ray.requests[-1][0] == "removed"


def test_a_node_is_large_enough_only_with_all_resources() -> None:
    nodes = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.5, "GPU": 1.0}]
    assert [
        ray_placement_group.num_large(nodes, required)
        for required in ({"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}, {"GPU": 2.0})
    ] == [*(2, 1, 0)]
    assert ray_placement_group.num_large(nodes, {"rdma": 0.0}) == 3
    assert ray_placement_group.shown({"CPU": 2.0, "GPU": 0.5}) == "CPU: 2, GPU: 0.5"


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (ActorDiedError("The actor died unexpectedly before finishing this task."), "RAY-06"),
        (ActorDiedError("The actor died unexpectedly.\nThe actor is dead because its node has died."), "RAY-04"),
        (ActorDiedError("1 worker(s) were killed due to the node running low on memory."), "RAY-05"),
        (ActorDiedError("Failed to set up runtime environment."), "RAY-07"),
        (RayError("something else"), "RAY-04"),
    ],
)
def test_rays_actor_errors_match_the_rule_of_their_first_cause(error: RayError, rule: str) -> None:
    lost = ray_placement_group.lost_error(error, "node 1 (rig) is lost")
    assert (lost.rule, str(lost)) == (rule, f"{rule}: node 1 (rig) is lost: {' '.join(str(error).split())}")


def test_rays_message_is_cut_after_six_hundred_characters() -> None:
    assert str(ray_placement_group.lost_error(RayError("x" * 601), "lost")) == f"RAY-04: lost: {'x' * 600}"
