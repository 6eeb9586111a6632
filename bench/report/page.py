"""Build the template variables of a report page: text, tables and figures."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from bench import rules
from bench.contract import atomic_files, codec
from bench.contract.plan import World
from bench.errors import LogError
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.result import NO_TARGET, UNVERIFIED
from bench.mlperf.telemetry import joined
from bench.preflight.nodes import load
from bench.report import curves, described_logs, drawings, template, throughput
from bench.report.compare import Claim, best_of_each, claim, peers, ranked, rankings
from bench.report.costs import TITLES, amount
from bench.report.sets import TrialSet
from bench.report.tables import minutes_text, number_text, telemetry_rows
from bench.report.template import Card
from bench.results import modules
from bench.results.training import TrainingResult
from bench.runs import tags
from bench.texts import counted

_NOT_SETTINGS = ("launch.", "cluster.paths.", "cluster.org", "cluster.environment.", "seed_base")
"""Prefixes of keys that do not affect measurements."""
_TEXTS = ("summary", "source", "description")


def differences(sets: Sequence[TrialSet]) -> list[tuple[str, list[str]]]:
    """Return each setting that differs between sets, with its value in each set.

    Compares the plans if every set has one, else the settings in the logs.
    """
    by_plan = all(trials.plan is not None for trials in sets)
    settings = [_planned(trials) if by_plan else _logged(trials) for trials in sets]
    names = dict.fromkeys(name for of_set in settings for name in of_set)
    rows = [(name, [of_set.get(name, "") for of_set in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _planned(trials: TrialSet) -> dict[str, str]:
    """Return the config with the parallel sizes that the plan chose."""
    assert trials.plan is not None
    config = {name: _setting(value) for name, value in codec.flat(codec.plain(trials.plan.config))}
    world = trials.plan.world
    config |= {f"parallel.{name}": str(getattr(world, name)) for name in ("tp", "pp", "cp", "sp")}
    measured = {name: value for name, value in config.items() if not name.startswith(_NOT_SETTINGS)}
    return {name: value for name, value in measured.items() if name.rsplit(".", 1)[-1] not in _TEXTS}


def _setting(value: Any) -> str:
    return "not set" if value is None else str(value)


def _logged(trials: TrialSet) -> dict[str, str]:
    """Return the settings in the logs; one that differs between trials has all values."""
    names = dict.fromkeys(name for r in trials.results for name in r.hyperparameters)
    values = {name: dict.fromkeys(str(r.hyperparameters.get(name, "")) for r in trials.results) for name in names}
    return {name: " | ".join(distinct) for name, distinct in values.items()}


def system_rows(trials: TrialSet) -> Iterator[tuple[str, str]]:
    """Yield the run's tags, and its hardware and software from logs, ranks and plan, without empty entries."""
    yield from tags.read(Path(trials.results[0].file).parent).rows
    for key, value in trials.system.items():
        for name, entry in value.items() if isinstance(value, dict) else ((key, value),):
            if isinstance(entry, str | int | float) and not _PLACEHOLDER.fullmatch(str(entry)):
                yield str(name).replace("_", " "), str(entry)[:200]
    logged = {key: value for r in reversed(trials.results) for key, value in r.hyperparameters.items()}
    yield from described_logs.machine(logged)
    yield from next((r.software.items() for r in trials.results if r.software), ())
    # Without a target the telemetry is among the measurements instead.
    telemetry = joined([r.telemetry for r in trials.results if r.telemetry and trials.has_target])
    yield from ((name, f"{value} ({remark})" if value else remark) for name, value, remark in telemetry_rows(telemetry))
    yield from _recorded_by_ranks(Path(trials.results[0].file).parent)
    if trials.plan is not None:
        c, w = trials.plan.config, trials.plan.world
        yield "cluster", c.cluster.summary
        yield "container image", c.container.image or "none"
        yield "precision", c.precision.name
        yield (
            "ranks",
            f"{w.num_ranks} = dp {w.dp} × tp {w.tp} × pp {w.pp} × cp {w.cp}{_ep(w)} on {counted(w.num_nodes, 'node')}",
        )


def _ep(world: World) -> str:
    return f", ep {world.ep}" if world.ep > 1 else ""


_PLACEHOLDER = re.compile(rf"\s*|.*(UNKNOWN|PLACEHOLDER|{NO_DEVICES}).*")


def _recorded_by_ranks(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the software that rank 0 recorded on its node, if the run folder has its facts."""
    with suppress(LogError):
        for rank in load(folder).ranks[:1]:
            software = {"operating system": rank.software.system, "python": rank.software.python}
            gpus = (rank.machine.gpus if rank.machine else None) or ()
            software |= rank.software.packages | {"GPU driver": gpus[0].driver if gpus else None}
            yield from ((name, text) for name, text in software.items() if text)


Row = dict[str, Any]

BLANK = {
    "seed": "no seed in the log",
    "minutes": "the log does not have one run_start followed by one run_stop",
    "samples_to_target": "no evaluation with a sample count reached a known target",
    "eval_final": "no evaluation",
    "step_time_ms": "the log does not have two progress lines in one training block",
    "throughput_samples_s": "no sample counts with times in the log",
    "tokens_s_gpu": "not measured on GPUs, or the log has no (or contradictory) GPU counts, "
    "no sequence length or no throughput",
}
"""Why a column of the trials table has no number."""
HEADINGS = {
    "seed": "seed",
    "minutes": "minutes",
    "samples_to_target": "samples to target",
    "eval_final": "final evaluation",
    "step_time_ms": "median step time",
    "throughput_samples_s": "samples/s",
    "tokens_s_gpu": "tokens/s/GPU",
}


def context(sets: Sequence[TrialSet], rows: Sequence[Sequence[Row]], out: Path, *, title: str | None) -> dict[str, Any]:
    """Return the variables of the template; also draws the figures into the folder."""
    sections = [
        _section(trials, rows[number], out, mark=f"_{number + 1}" if len(sets) > 1 else "")
        for number, trials in enumerate(sets)
    ]
    compared = _compared(sets, out) if len(sets) > 1 else None
    figures = [*([compared["figure"]] if compared else []), *(f for s in sections for f in s["figures"].values())]
    charts = {name: chart for figure in figures if figure for name, chart in figure.charts.items()}
    return template.context() | {
        "title": title or _title(sets),
        "unverified": UNVERIFIED,
        "identity": described_logs.identity(
            [result for trials in sets for result in trials.results],
            [Path(result.file).resolve().parent.name for trials in sets for result in trials.results],
        ),
        "ratio_text": throughput.RATIO,
        "sections": sections,
        "compared": compared,
        "charts": charts | (compared["curves"] if compared else {}),
        "versions": {name: version(name) for name in ("runstop", "mlperf-logging")},
    }


def _title(sets: Sequence[TrialSet]) -> str:
    benchmarks = dict.fromkeys(trials.measured for trials in sets)
    if len(sets) > 1:
        return f"{', '.join(benchmarks)}: {len(sets)} sets compared"
    return f"{next(iter(benchmarks))} on {sets[0].platform or sets[0].hardware or sets[0].name}"


def _section(trials: TrialSet, rows: Sequence[Row], out: Path, *, mark: str) -> dict[str, Any]:
    claimed, (systems, no_peers) = claim(trials), peers(trials)
    entries = ranked(trials, claimed, systems)
    speed = throughput.compared(trials) if not trials.has_target else None
    if speed is not None:
        shown = drawings.draw_throughput(trials, speed.lines, out, mark=mark)
    else:
        shown = drawings.draw_training(trials, claimed, entries, out, mark=mark)
    return {
        "speed": speed,
        "trials": trials,
        "score": trials.score,
        "claim": claimed,
        "cards": [*(_speed_cards(speed) if speed is not None else _cards(trials, claimed, rows)), *_cost_cards(trials)],
        "rows": rows,
        "blanks": _blanks(rows),
        "figures": dict(shown),
        "module_tables": list(_module_tables(trials)),
        "ranked": entries,
        "best": best_of_each(systems),
        "rankings": rankings(trials, claimed, systems),
        "no_peers": no_peers,
        "findings": _findings(trials),
        "system": list(system_rows(trials)),
        "settings": described_logs.settings(trials.results),
        "folder": str(Path(trials.results[0].file).parent),
        "files": list(_files(trials)),
        "commands": list(dict.fromkeys(shlex.join(command.argv) for command in trials.plan.commands))
        if trials.plan
        else [],
    }


def _module_tables(trials: TrialSet) -> Iterator[dict[str, Any]]:
    """Yield the step time breakdown of each profiled trial."""
    for name, result in zip(trials.trial_names, trials.results, strict=True):
        if (times := result.module_times) is not None:
            lines = modules.lines(times)
            yield {
                "trial": name,
                "columns": modules.columns(times),
                "lines": lines,
                "notes": " ".join(modules.notes(result, times)),
            }


def _cards(trials: TrialSet, claimed: Claim, rows: Sequence[Row]) -> list[Card]:
    """Return the main numbers, shown at the top of a set."""
    names = {"score": "score", "runs": "minutes (not a score)", "none": "score"}
    cards = [
        Card(
            name=names[claimed.kind],
            value="none" if claimed.minutes is None else minutes_text(claimed.minutes),
            unit="" if claimed.minutes is None else "min",
            note=f"90 % interval {claimed.interval[0]:.2f} to {claimed.interval[1]:.2f}"
            if claimed.interval
            else claimed.what,
        ),
        Card(name="valid runs", value=str(claimed.num_valid), unit=f"of {len(rows)}", note=_required(trials)),
    ]
    for key, unit in (("samples_to_target", ""), ("step_time_ms", "ms"), ("tokens_s_gpu", "")):
        values = sorted(row[key] for row in rows if row[key] is not None)
        if values:
            low, high = number_text(values[0]), number_text(values[-1])
            spread = f"median of trials; {low} to {high}" if low != high else "the same in all trials"
            note = spread if len(values) > 1 else "one trial"
            cards.append(Card(name=HEADINGS[key], value=number_text(median(values)), unit=unit, note=note))
    if shares := [row["evaluation_share"] for row in rows if row["evaluation_share"] is not None]:
        note = "of run_start → run_stop; median of trials"
        cards.append(Card(name="evaluations", value=f"{100 * median(shares):.1f}", unit="% of the time", note=note))
    return cards


def _speed_cards(speed: throughput.Compared) -> list[Card]:
    """Return the main numbers of a set without a target, shown at its top; minutes are not among them."""
    m = speed.measured
    peak = None if m.peak_memory_gib is None else m.peak_memory_gib.allocated
    numbers = (
        ("median step time", m.step_time_ms.median if m.step_time_ms else None, "ms", "over all steps of all trials"),
        ("samples/s", m.samples_s, "", "samples / time spent training"),
        ("tokens/s/GPU", m.tokens_s_gpu, "", ""),
        ("TFLOP/s/GPU", m.tflops_gpu, "", "model FLOPs, without recomputation"),
        ("MFU", 100 * m.mfu if m.mfu else None, "%", "of the dense peak at the precision of the layers"),
        ("peak memory", peak, "GiB", "allocated, highest of all GPUs"),
        ("evaluation", m.eval_time_s.median if m.eval_time_s else None, "s", "median"),
    )
    shown = [
        Card(name=name, value=number_text(value), unit=unit, note=note)
        for name, value, unit, note in numbers
        if value is not None
    ]
    return [Card(name="score", value="none", note=NO_TARGET), *shown]


def _cost_cards(trials: TrialSet) -> Iterator[Card]:
    """Yield what the trials cost, as far as their logs have a price; medians over trials."""
    of_each = [one for result in trials.results for one in TrainingResult(result=result).measurements]
    for name, title in TITLES.items():
        costs = [one for one in of_each if one.name == name]
        if costs and len({one.unit for one in costs}) == 1:
            note = "one trial" if len(costs) == 1 else f"median of {len(costs)} trials"
            value = amount(median(one.value for one in costs))
            yield Card(name=title, value=value, unit=costs[0].unit, note=note)


def _required(trials: TrialSet) -> str:
    required = trials.score.num_runs_required
    return f"a score needs {required}" if required else "no MLPerf rules apply"


def _blanks(rows: Sequence[Row]) -> list[str]:
    """Return why numbers are missing in the trials table."""
    missing = {key: [row["trial"] for row in rows if row[key] is None] for key in BLANK}
    if not all(row["has_target"] for row in rows):
        absent = [HEADINGS[key] for key in _OF_TRAINING if missing.pop(key)]
        return [f"No {', '.join(absent)}: {NO_TARGET}.", *_missing(missing, len(rows))]
    return _missing(missing, len(rows))


_OF_TRAINING = ("minutes", "samples_to_target", "eval_final")
"""Columns that stay empty without a target."""


def _missing(missing: Mapping[str, Sequence[str]], num_rows: int) -> list[str]:
    return [
        f"No {HEADINGS[key]}{'' if len(names) == num_rows else ' for trial ' + ', '.join(names)}: {BLANK[key]}."
        for key, names in missing.items()
        if names
    ]


def _findings(trials: TrialSet) -> list[Row]:
    """Return the problems, errors first; a problem that several trials share is listed once."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for f in (
        () if not trials.has_target else trials.score.findings
    ):  # without a target, all of them mean that there is no score
        if trials.why_not_benchmark and f.rule == "SCO-06":  # not a fault of the runs, and shown instead of the score
            continue
        places.setdefault((f.severity, f.rule, f.what), []).append("the set")
    for name, result, official in zip(trials.trial_names, trials.results, trials.score.compliance, strict=True):
        for f in result.findings:
            where = name if f.line is None else f"{name} (line {f.line})"
            places.setdefault((f.severity, f.rule, f.what), []).append(where)
        for message in official.messages if official.passed is False else ():
            places.setdefault(("error", f"MLPerf checker {official.ruleset}", message), []).append(name)
    return [
        {"severity": severity, "rule": rule, "message": message, "where": _where(trials, where), "fix": _fix(rule)}
        for (severity, rule, message), where in sorted(places.items(), key=lambda item: item[0][0])
    ]


def _where(trials: TrialSet, names: Sequence[str]) -> str:
    return f"all, such as {names[0]}" if len(names) == len(trials.results) > 1 else ", ".join(names)


def _fix(rule: str) -> str:
    return rules.RULES[rule].fix if rule in rules.RULES else ""


def _files(trials: TrialSet) -> Iterator[tuple[str, str, str]]:
    """Yield each trial's name, file name and SHA-256."""
    for name, result in zip(trials.trial_names, trials.results, strict=True):
        yield name, Path(result.file).name, atomic_files.sha256(Path(result.file))


def _compared(sets: Sequence[TrialSet], out: Path) -> dict[str, Any]:
    """Return the table and the figure that compare the sets; the first set is the baseline.

    Only sets that measured the same as the first have ratios.
    """
    claims = [claim(trials) for trials in sets]
    alike = [trials.measured == sets[0].measured for trials in sets]
    rows = [
        {
            "trials": trials,
            "claim": claimed,
            "speed": throughput.measure(trials) if not trials.has_target else None,
            "samples_to_target": _median(r.samples_to_target for r in trials.results if r.samples_to_target),
            "step_time_ms": _median(r.step_time_ms.median for r in trials.results if r.step_time_ms),
            "tokens_s_gpu": _median(r.tokens_s_gpu for r in trials.results if r.tokens_s_gpu and trials.num_gpus),
            "ratio": _ratio(claimed, claims[0]) if same else None,
            "speed_ratio": _speed_ratio(trials, sets[0]) if same else None,
        }
        for trials, claimed, same in zip(sets, claims, alike, strict=True)
    ]
    with_minutes = [(t, c) for t, c, same in zip(sets, claims, alike, strict=True) if same and c.minutes is not None]
    return {
        "rows": rows,
        "all_alike": all(alike),
        "figure": drawings.draw_compared(with_minutes, out) if with_minutes else None,
        "curves": curves.overlaid([trials for trials, same in zip(sets, alike, strict=True) if same]),
        "curve_titles": curves.TITLES,
        "differences": differences(sets),
    }


def _ratio(claimed: Claim, base: Claim) -> float | None:
    """Return the minutes divided by the baseline's, or None if one is a score and the other is not."""
    return (
        claimed.minutes / base.minutes
        if claimed.kind == base.kind and claimed.minutes is not None and base.minutes
        else None
    )


def _speed_ratio(trials: TrialSet, base: TrialSet) -> float | None:
    """Return samples/s while training / those of the baseline, both medians over valid trials."""
    ours, first = (_median(r.throughput_samples_s for r in t.results if r.valid) for t in (trials, base))
    return ours / first if ours and first else None


def _median(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return median(known) if known else None
