"""The measurements of a server's profile: GPU time by class of kernels, and along a decode step."""

from collections.abc import Iterator

from bench.contract.server_times import COMMUNICATION, COMPUTATION, KernelClass, ServerTimes, Timeline
from bench.results.measurement import Measurement

GROUPS: dict[str, tuple[KernelClass, ...]] = {
    "computation": COMPUTATION,
    **{one.name: (one,) for one in COMPUTATION},
    "communication": COMMUNICATION,
    **{one.name: (one,) for one in COMMUNICATION},
    "other": (KernelClass.other,),
}
"""Classes of kernels by the name of their measurements, in the order of tables."""
PARTS = ("before_layers", "layers", "attention_layers", "mlp_layers", "after_layers")
STEP = "server_step_time"
UNITS = {STEP: "ms"} | {
    f"server_{what}_{name}": unit for name in (*GROUPS, *PARTS) for what, unit in (("time", "ms"), ("share", ""))
}
"""The units of all measurements that a profile may have; times are those of one decode step."""
TITLES = {
    "computation": "computation",
    "element_wise": "element-wise",
    "rope": "RoPE",
    "triton": "other Triton kernels",
    "gemm": "GEMMs",
    "norm": "norms",
    "attention": "attention",
    "other_computation": "other computation",
    "communication": "communication",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "other_communication": "other communication",
    "other": "copies, and no kernel",
    "before_layers": "before the layers",
    "layers": "layers",
    "attention_layers": "attention of all layers",
    "mlp_layers": "MLP of all layers",
    "after_layers": "after the layers",
}
COLUMNS = ("part", "time (ms)", "share (%)", "launches")


def of_server(times: ServerTimes) -> Iterator[Measurement]:
    """Yield the shares of the profiled time, and the milliseconds of a decode step if the profile shows steps."""
    if times.num_steps is not None:
        yield Measurement(name=STEP, unit="ms", value=times.time_ms / times.num_steps, n=times.num_steps)
    for name, part_ms in _parts(times).items():
        n = times.num_steps or 1
        if times.num_steps is not None:
            yield Measurement(name=f"server_time_{name}", unit="ms", value=part_ms / times.num_steps, n=n)
        yield Measurement(name=f"server_share_{name}", unit="", value=part_ms / times.time_ms, n=n)


def lines(times: ServerTimes) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table; times and launches are those of a decode step, or of the profile without steps."""
    steps = times.num_steps or 1
    rows = []
    for name, part_ms in _parts(times).items():
        kernels = GROUPS.get(name, ())
        launches = sum(row.launches for row in times.rows if row.kernels in kernels)
        shown = f"{launches / steps:,.0f}" if launches else ""
        rows.append((TITLES[name], f"{part_ms / steps:,.3f}", f"{100 * part_ms / times.time_ms:.1f}", shown))
    return rows


def note(times: ServerTimes) -> str:
    """Return what was profiled."""
    of_steps = f"the mean of {times.num_steps} decode steps" if times.num_steps else "the whole profile"
    without = "" if times.num_steps else "; the kernels show no steps"
    return (
        f"The server's first GPU, {of_steps}, with {times.running:,} requests{without}. Overlapping kernels are "
        "counted once."
    )


def _parts(times: ServerTimes) -> dict[str, float]:
    """Return the milliseconds of each class that occurs, and of the parts of the steps."""
    spent = {row.kernels: row.time_ms for row in times.rows}
    parts = {
        name: sum(spent[one] for one in kernels if one in spent)
        for name, kernels in GROUPS.items()
        if any(one in spent for one in kernels)
    }
    return parts | (_of_timeline(times.timeline) if times.timeline is not None else {})


def _of_timeline(line: Timeline) -> dict[str, float]:
    values = (
        line.before_layers_ms,
        line.attention_ms + line.mlp_ms,
        line.attention_ms,
        line.mlp_ms,
        line.after_layers_ms,
    )
    return dict(zip(PARTS, values, strict=True))
