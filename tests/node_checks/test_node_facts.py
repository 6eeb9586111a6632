"""Facts and health.json come back from their files as they were written, whatever stands in them."""

import dataclasses
import math
import types
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import node_facts, schema
from bench.contract.node_facts import GpuFacts, Health, RankFacts
from bench.preflight import nodes
from helpers.nodes import health_report
from jobs.node_checks import facts, health

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


@given(values(RankFacts), values(Health))
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, rank: RankFacts, health: Health):
    folder = tmp_path_factory.mktemp("run")
    facts.write(rank, folder / "facts")
    facts.save(dataclasses.replace(health, attempt=rank.attempt), folder / "health.json")
    found = nodes.load(folder)
    assert found.ranks == (rank,)
    assert found.health == dataclasses.replace(health, attempt=rank.attempt)


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_never_written(seconds: float):
    with pytest.raises(ValueError, match="not JSON compliant"):
        node_facts.dumps(health_report(seconds=seconds))


def test_every_number_of_a_gpu_is_read_as_one():
    """nvidia-smi prints text; the types say which cells are numbers, so an unknown one must not slip through."""
    from jobs.node_checks import hardware

    cells = {field.name: "7" for field in dataclasses.fields(GpuFacts)}
    (row,) = hardware._table(", ".join(cells.values()), list(cells))
    assert {name for name, value in row.items() if value == 7} == {
        *("index", "memory_mib", "temperature_c", "sm_clock_mhz", "max_sm_clock_mhz", "ecc_uncorrected")
    }


def test_message_sizes_double_from_the_smallest_to_the_largest() -> None:
    """NVIDIA's run.sub: all_reduce_perf -b 62M -e 2G -f 2."""
    assert health.sizes_mib(schema.Health(source="", min_mib=62, max_mib=2048)) == [62, 124, 248, 496, 992, 1984]
    assert health.sizes_mib(schema.Health(source="", min_mib=4, max_mib=4)) == [4]
