"""Facts of a node: reading, writing and parsing."""

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import host_memory, node_facts, schema
from bench.contract.node_facts import GpuFacts, Health, RankFacts
from bench.preflight import nodes
from helpers.nodes import health_report
from jobs.node_checks import facts, hardware, health

SIMPLE = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type of the contract; Hypothesis' own have numbers that are not finite."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is types.UnionType:
        return st.one_of(*map(values, args))
    if origin is dict:
        return st.dictionaries(*map(values, args), max_size=2)
    if origin is tuple and args[-1] is ...:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})


@pytest.mark.long
@given(values(RankFacts), values(Health))
def test_facts_are_read_back_as_written(tmp_path_factory: pytest.TempPathFactory, rank: RankFacts, health: Health):
    folder = tmp_path_factory.mktemp("run")
    facts.write(rank, folder / "facts")
    facts.save(dataclasses.replace(health, attempt=rank.attempt), folder / "health.json")
    actual = nodes.load(folder)
    assert actual.ranks == (rank,)
    assert actual.health == dataclasses.replace(health, attempt=rank.attempt)


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_never_written(seconds: float):
    with pytest.raises(ValueError, match="not JSON compliant"):
        node_facts.dumps(health_report(seconds=seconds))


def test_every_number_of_a_gpu_is_read_as_one():
    """nvidia-smi prints text; the types say which cells are numbers, so an unknown one must not slip through."""
    cells = {field.name: "7" for field in dataclasses.fields(GpuFacts)}
    (row,) = hardware._table(", ".join(cells.values()), list(cells))
    assert {name for name, value in row.items() if value == 7} == {
        *("index", "memory_mib", "temperature_c", "sm_clock_mhz", "max_sm_clock_mhz", "ecc_uncorrected")
    }


def test_the_attempt_identifies_requeues_and_steps() -> None:
    """Slurm sets SLURM_RESTART_COUNT after the first requeue."""
    first = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}
    assert facts.attempt({"SLURM_STEP_ID": "3"}) is None
    assert facts.attempt(first) == "7.0.3"
    assert facts.attempt(first | {"SLURM_RESTART_COUNT": "2"}) == "7.2.3"


@pytest.mark.parametrize(
    ("limits", "gib"),
    [
        ({"job_7/step_0": "max", "job_7": "1000000000", ".": "3000000000"}, 0.9),
        ({"job_7/step_0": "2000000000", "job_7": "3000000000"}, 1.9),
        ({"job_7/step_0": "max"}, None),
        ({"job_7/step_0": str(2**62)}, None),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_limit_is_the_smallest_of_all_cgroups(
    monkeypatch: pytest.MonkeyPatch, version: int, limits: dict[str, str], gib: float | None
) -> None:
    """1e9 bytes are 0.931 GiB. Version 1 has a tree for each controller, and a large number without a limit."""
    root, name = {1: ("memory", "memory.limit_in_bytes"), 2: ("", "memory.max")}[version]
    files = {Path("/sys/fs/cgroup", root, group, name): limit for group, limit in limits.items()}
    files[Path("/proc/self/cgroup")] = f"{9 - version}:{root}:/job_7/step_0\n"
    monkeypatch.setattr(host_memory, "_text", lambda path: files.get(path, ""))
    assert hardware.memory_limit_gib() == gib


def test_message_sizes_double_from_the_smallest_to_the_largest() -> None:
    """NVIDIA's run.sub: all_reduce_perf -b 62M -e 2G -f 2."""
    assert health.sizes_mib(schema.Health(source="", min_mib=62, max_mib=2048)) == [62, 124, 248, 496, 992, 1984]
    assert health.sizes_mib(schema.Health(source="", min_mib=4, max_mib=4)) == [4]


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remapped rows and throttle reasons are separate queries; an old driver has an older name for the second.

    The first GPU reports no temperature, and the second no remapped rows.
    """
    output = {
        "--query-gpu=index,": "0, GPU-a, NVIDIA H200, 580.1, 143771, [N/A], 345, 1980, 0\n"
        "1, GPU-b, NVIDIA H200, 580.1, 143771, 41, 345, 1980, 2\n",
        "--query-remapped-rows=": "GPU-a, Yes, No\n",
        "throttle_reasons": "GPU-a, 0x0000000000000000\nGPU-b, 0x0000000000000004\n",
        "topo": "GPU0 GPU1\n",
    }
    cases = "\n".join(f"  *{question}*) cat <<'END'\n{answer}END\n  ;;" for question, answer in output.items())
    stub = tmp_path / "nvidia-smi"
    stub.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n  *) echo "no such field"; exit 2 ;;\nesac\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    actual, refused, links = hardware.gpus()
    one = GpuFacts(0, "GPU-a", "NVIDIA H200", "580.1", 143771, None, 345, 1980, 0, "Yes", "No", "0x0000000000000000")
    other = GpuFacts(1, "GPU-b", "NVIDIA H200", "580.1", 143771, 41, 345, 1980, 2, throttle="0x0000000000000004")
    assert (actual, refused, links) == ((one, other), None, "GPU0 GPU1\n")
    stub.write_text("#!/bin/sh\necho the driver has failed\nexit 9\n")
    assert hardware.gpus() == (None, "the driver has failed", None)
