"""Rows of a table that say how groups of ranks trained apart."""

from collections.abc import Iterable, Mapping

from bench.mlperf.result import Result
from bench.report.rows import Row, measured_rows


def set_rows(results: Iterable[Result]) -> list[Row]:
    """Return those of several trials, one after the other."""
    return [row for result in results for row in apart_rows(result)]


def apart_rows(result: Result) -> list[Row]:
    """Return how groups trained apart, and what became of the merged model; no rows where all trained together."""
    apart, merged_loss = result.apart, None if result.has_random_rows else result.eval_final
    if apart is None:
        return []
    every = f"merged every {apart.every_steps} steps, {apart.merges} times"
    left = "".join(f"; group {group} LEFT after step {step}" for group, step in apart.left.items())
    left += "".join(f"; group {group} joined again after step {step}" for group, step in apart.joined.items())
    efficiency = apart.efficiency(result.steps_time_s)
    sent = "" if apart.rank_bytes is None else f"rank 0 sent {apart.rank_bytes / 1e6:,.4g} MB; "
    waited = "" if apart.waited_s is None else f"{apart.waited_s:,.3g} s more for groups that were behind; "
    stopped = f"training stood still for {apart.stopped_s:,.1f} s in all"
    inner = min(apart.inner_step_ms.values(), default=None)
    return [
        ("groups that trained apart", f"{apart.groups}", every + left),
        *measured_rows(
            ("inner step (ms)", inner, "{:,.1f}", f"of the fastest group; {_by_group(apart.inner_step_ms, ',.1f')}"),
            ("merge (s)", apart.exchange_s, "{:,.3g}", f"median; {waited}{sent}{stopped}"),
            ("efficiency (%)", efficiency and 100 * efficiency, "{:.1f}", "steps over steps and merges"),
            ("loss of the merged model", merged_loss, "{:.4f}", f"training: {_by_group(apart.losses, '.4f')}"),
        ),
    ]


def _by_group(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"group {group} {value:{form}}" for group, value in values.items())
