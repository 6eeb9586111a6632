"""The nodes of a run are taken all at once and given back, by a Ray that keeps a list of what it is asked."""

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
    """As ray.exceptions has it."""


class ActorDiedError(RayError):
    """As ray.exceptions has it."""


@dataclass
class Ray:
    """The placement group is ready after `ready_s`, the actors after so many looks; each wait takes its whole time."""

    ready_s: float = 0.0
    looks: int = 0
    error: RayError | None = None
    now_s: float = 500.0
    asked: list[Any] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.asked.append((bundles, strategy))
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


Take = Callable[..., tuple[Any, Ray, list[str]]]


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Take the nodes of a run; return the group or the error, the Ray, and what was said and checked meanwhile."""

    def run(ray: Ray, plan: Plan, check: Callable[[], None] | None = None) -> Any:
        placement = SimpleNamespace(wait=ray.wait_for_placement)
        util = SimpleNamespace(remove_placement_group=lambda made: ray.asked.append(("removed", made)))
        module = {name: getattr(ray, name) for name in ("remote", "wait", "get", "nodes")}
        module |= {"util": util, "exceptions": SimpleNamespace(RayError=RayError)}
        module["kill"] = lambda actor: ray.asked.append(("killed", actor))
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(**module))
        monkeypatch.setitem(sys.modules, "ray.util", util)
        made = SimpleNamespace(placement_group=lambda *words, **more: ray.placement_group(*words, **more) and placement)
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", made)
        strategy = SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda made, placement_group_bundle_index: (
                made,
                placement_group_bundle_index,
            )
        )
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategy)
        monkeypatch.setattr(ray_placement_group, "time", SimpleNamespace(monotonic=lambda: ray.now_s))
        said = list[str]()
        try:
            return (
                ray_placement_group.take(plan, said.append, check=check or (lambda: said.append("checked"))),
                ray,
                said,
            )
        except LostError as error:
            return error, ray, said

    return run


def planned(*overrides: str) -> Plan:
    return compose.compose(["task=lora_tiny", "cluster=ray_test", *overrides])


def test_each_node_is_another_one_with_an_actor_that_holds_what_its_ranks_take(take: Take) -> None:
    more = ("cluster=ray", "task=lora70b", "+cluster.ray.resources.rdma=1", "cluster.ray.environment=[A]")
    taken, ray, said = take(Ray(looks=2), planned(*more))
    wanted = {"CPU": 16.0, "GPU": 8.0, "rdma": 1.0}
    assert ray.asked == [([wanted, wanted], "STRICT_SPREAD")] and said == ["checked", "checked"]
    options = {"num_cpus": 16.0, "num_gpus": 8.0, "resources": {"rdma": 1.0}, "max_concurrency": 4, "max_restarts": 0}
    assert ray.options == [options, options]
    assert taken.places == PLACES and [actor.kept for actor in taken.actors] == [["A"], ["A"]]
    assert taken.names == ["rig-aaaaaa", "rig-bbbbbb"]
    other = Place("box", "10.0.0.3", "cccc")
    assert Group(None, [], [PLACES[0], other]).names == ["rig", "box"]
    ray_placement_group.release(taken)
    assert ray.asked[1:] == [*(("killed", actor) for actor in taken.actors), ("removed", taken.placement)]


def test_a_job_that_waits_for_nodes_says_so_once_and_gives_up_in_time(take: Take) -> None:
    words = "2 nodes with CPU: 2 each; 2 are there, 1 of them so large"
    taken, ray, said = take(Ray(ready_s=59.0), planned())
    assert isinstance(taken, Group) and said == [*["checked"] * 11, f"waits for {words}", *["checked"] * 48]
    assert ray.options[0] == {
        "num_cpus": 2.0,
        "num_gpus": 0,
        "resources": {},
        "max_concurrency": 4,
        "max_restarts": 0,
    }
    lost, ray, said = take(Ray(ready_s=199.0), planned("cluster.ray.placement_timeout_min=2"))
    assert (lost.rule, str(lost)) == ("RAY-03", f"RAY-03: waited 121 s for {words}")
    assert said.count("checked") == 121 and [word for word, _ in ray.asked[1:]] == ["removed"]


def test_a_job_that_is_told_to_end_leaves_no_placement_group(take: Take) -> None:
    def end() -> None:
        raise KeyboardInterrupt

    for ray in (Ray(ready_s=9.0), Ray(looks=1)):
        with pytest.raises(KeyboardInterrupt):
            take(ray, planned(), end)
        assert [word for word, _ in ray.asked[1:]] == ["removed"]


def test_an_actor_that_does_not_start_is_waited_for_ten_minutes(take: Take) -> None:
    lost, ray, said = take(Ray(looks=10_000, error=RayError("not\n ready")), planned())
    assert str(lost) == "RAY-04: a node's actor does not start: not ready"
    assert ray.now_s == 500 + 1 + 600 and said == ["checked"] * 599 and ray.asked[-1][0] == "removed"


def test_no_node_is_as_large_as_one_resource_of_it() -> None:
    nodes = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.5, "GPU": 1.0}]
    assert [
        ray_placement_group.num_large(nodes, wanted)
        for wanted in ({"CPU": 2.0}, {"CPU": 2.0, "GPU": 1.0}, {"GPU": 2.0})
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
def test_what_ray_says_of_an_actor_is_explained_by_what_came_first(error: RayError, rule: str) -> None:
    lost = ray_placement_group.explained(error, "node 1 (rig) is lost")
    assert (lost.rule, str(lost)) == (rule, f"{rule}: node 1 (rig) is lost: {' '.join(str(error).split())}")


def test_what_ray_says_is_cut_after_six_hundred_characters() -> None:
    assert str(ray_placement_group.explained(RayError("x" * 601), "lost")) == f"RAY-04: lost: {'x' * 600}"
