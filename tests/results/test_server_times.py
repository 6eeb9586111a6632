"""The measurements and the table of a server's profile, with and without decode steps, by hand."""

from dataclasses import replace

import pytest

from bench.contract import server_times as stored
from bench.contract.server_times import KernelClass, KernelTime, ServerTimes, Timeline
from bench.results import server_times

STEPS = ServerTimes(
    device="cuda",
    running=1024,
    time_ms=80.0,
    rows=[
        KernelTime(kernels=KernelClass.gemm, time_ms=40.0, launches=4400),
        KernelTime(kernels=KernelClass.rope, time_ms=8.0, launches=400),
        KernelTime(kernels=KernelClass.all_reduce, time_ms=16.0, launches=200),
        KernelTime(kernels=KernelClass.other, time_ms=16.0, launches=0),
    ],
    num_steps=4,
    timeline=Timeline(before_layers_ms=2.0, attention_ms=30.0, mlp_ms=40.0, after_layers_ms=8.0),
)
WHOLE = replace(STEPS, num_steps=None, timeline=None)
ROWS = [
    ("computation", "12.000", "60.0", "1,200"),
    ("RoPE", "2.000", "10.0", "100"),
    ("GEMMs", "10.000", "50.0", "1,100"),
    ("communication", "4.000", "20.0", "50"),
    ("all-reduce", "4.000", "20.0", "50"),
    ("copies, and no kernel", "4.000", "20.0", ""),
    ("before the layers", "0.500", "2.5", ""),
    ("layers", "17.500", "87.5", ""),
    ("attention of all layers", "7.500", "37.5", ""),
    ("MLP of all layers", "10.000", "50.0", ""),
    ("after the layers", "2.000", "10.0", ""),
]


def test_times_and_launches_are_those_of_one_decode_step() -> None:
    assert server_times.lines(STEPS) == ROWS
    assert server_times.note(STEPS) == (
        "The server's first GPU, the mean of 4 decode steps, with 1,024 requests. Overlapping kernels are counted once."
    )
    measured = {one.name: one for one in server_times.of_server(STEPS)}
    parts = ("computation", "rope", "gemm", "communication", "all_reduce", "other")
    along = ("before_layers", "layers", "attention_layers", "mlp_layers", "after_layers")
    values = {name: one.value for name, one in measured.items()}
    assert values == {"server_step_time": 20.0} | {
        f"server_{what}_{name}": pytest.approx(value)
        for name, row in zip((*parts, *along), ROWS, strict=True)
        for what, value in (("time", float(row[1])), ("share", float(row[2]) / 100))
    }
    assert {one.n for one in measured.values()} == {4}
    assert {name: one.unit for name, one in measured.items()}.items() <= server_times.UNITS.items()


def test_a_profile_without_steps_has_only_shares_and_its_whole_times() -> None:
    assert server_times.lines(WHOLE) == [
        ("computation", "48.000", "60.0", "4,800"),
        ("RoPE", "8.000", "10.0", "400"),
        ("GEMMs", "40.000", "50.0", "4,400"),
        ("communication", "16.000", "20.0", "200"),
        ("all-reduce", "16.000", "20.0", "200"),
        ("copies, and no kernel", "16.000", "20.0", ""),
    ]
    assert server_times.note(WHOLE) == (
        "The server's first GPU, the whole profile, with 1,024 requests; the kernels show no steps. Overlapping "
        "kernels are counted once."
    )
    measured = [*server_times.of_server(WHOLE)]
    assert [(one.name, one.value, one.n) for one in measured] == [
        (f"server_share_{name}", pytest.approx(share), 1)
        for name, share in (
            *(("computation", 0.6), ("rope", 0.1), ("gemm", 0.5), ("communication", 0.2), ("all_reduce", 0.2)),
            ("other", 0.2),
        )
    ]


def test_every_class_of_kernels_has_a_title_and_is_in_one_group() -> None:
    """The groups computation and communication have the classes of the NCCL kernels and of all others."""
    names = [one.name for one in KernelClass]
    assert list(server_times.GROUPS) == ["computation", *names[:7], "communication", *names[7:10], "other"]
    assert [set(server_times.GROUPS[name]) for name in ("computation", "communication")] == [
        set(list(KernelClass)[:7]),
        set(list(KernelClass)[7:10]),
    ]
    assert server_times.TITLES.keys() == {*server_times.GROUPS, *server_times.PARTS}


def test_stored_times_are_rounded_to_nanoseconds_and_read_back() -> None:
    exact = replace(
        STEPS,
        time_ms=80.00000049,
        rows=[KernelTime(kernels=KernelClass.gemm, time_ms=1 / 3, launches=7)],
        timeline=Timeline(before_layers_ms=2 / 3, attention_ms=1.0, mlp_ms=1e-7, after_layers_ms=8.0),
    )
    raw = stored.plain(exact)
    assert raw["time_ms"] == 80.0
    assert raw["rows"] == [{"kernels": "gemm", "time_ms": 0.333333, "launches": 7}]
    assert raw["timeline"] == {
        "before_layers_ms": 0.666667,
        "attention_ms": 1.0,
        "mlp_ms": 0.0,
        "after_layers_ms": 8.0,
    }
    assert stored.parsed(stored.plain(STEPS)) == STEPS and stored.parsed(stored.plain(WHOLE)) == WHOLE
    assert stored.parsed(stored.plain(replace(STEPS, time_ms=0.5))) == replace(STEPS, time_ms=0.5)
    assert stored.parsed(stored.plain(replace(STEPS, num_steps=1))) == replace(STEPS, num_steps=1)


@pytest.mark.parametrize(
    "damage", [{"time_ms": 0.0}, {"time_ms": -1.0}, {"num_steps": 0}, {"rows": 3}, {"running": "many"}]
)
def test_damaged_times_are_none(damage: dict[str, object]) -> None:
    assert stored.parsed(stored.plain(STEPS) | damage) is None


@pytest.mark.parametrize("raw", [None, [], "text", {}])
def test_other_data_are_no_times(raw: object) -> None:
    assert stored.parsed(raw) is None
