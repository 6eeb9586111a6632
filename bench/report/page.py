"""What the page of a report says: figures drawn, and text and tables for its template."""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from bench import rules
from bench.errors import LogError
from bench.mlperf import forecast, published
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.result import NO_TARGET, UNVERIFIED
from bench.preflight.nodes import load
from bench.report import figures, throughput
from bench.report.compare import Claim, Entry, TrialSet, best_of_each, claim, peers, ranked, standings
from bench.report.differences import differences
from bench.report.figures import Bar

Row = dict[str, Any]

BLANK = {
    "seed": "the log names no seed",
    "minutes": "the log does not hold one run_start and, after it, one run_stop",
    "samples_to_target": "no evaluation that says its samples reached a known target",
    "eval_final": "nothing was evaluated",
    "step_time_ms": "the log has no two progress lines in one training block",
    "throughput_samples_s": "the log does not say how many samples were trained on, and when",
    "tokens_s_gpu": "not measured on GPUs, or the log lacks their number (or leaves it in doubt), "
    "the sequence length or the throughput",
}
"""Why a column of the table of trials has no number."""
HEADINGS = {
    "seed": "seed",
    "minutes": "minutes",
    "samples_to_target": "samples to target",
    "eval_final": "final evaluation",
    "step_time_ms": "median step time",
    "throughput_samples_s": "samples/s",
    "tokens_s_gpu": "tokens/s/GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A figure as the page holds it."""

    file: str
    caption: str
    uri: str


def context(sets: Sequence[TrialSet], rows: Sequence[Sequence[Row]], out: Path, *, title: str | None) -> dict[str, Any]:
    """Return what the template needs; draws the figures into the folder on the way."""
    sections = [
        _section(trials, rows[number], out, mark=f"_{number + 1}" if len(sets) > 1 else "")
        for number, trials in enumerate(sets)
    ]
    return {
        "title": title or _title(sets),
        "unverified": UNVERIFIED,
        "ratio_text": throughput.RATIO,
        "sections": sections,
        "compared": _compared(sets, out) if len(sets) > 1 else None,
        "versions": {name: version(name) for name in ("runstop", "mlperf-logging")},
    }


def _title(sets: Sequence[TrialSet]) -> str:
    benchmarks = dict.fromkeys(trials.measured for trials in sets)
    if len(sets) > 1:
        return f"{', '.join(benchmarks)}: {len(sets)} sets compared"
    return f"{next(iter(benchmarks))} on {sets[0].platform or sets[0].hardware or sets[0].name}"


def _section(trials: TrialSet, rows: Sequence[Row], out: Path, *, mark: str) -> dict[str, Any]:
    said, (systems, no_peers) = claim(trials), peers(trials)
    among = ranked(trials, said, systems)
    speed = throughput.compared(trials) if not trials.has_target else None
    if speed is not None:
        drawn = _draw_throughput(trials, speed.lines, out, mark=mark)
    else:
        drawn = _draw(trials, said, among, out, mark=mark)
    return {
        "speed": speed,
        "trials": trials,
        "score": trials.score,
        "claim": said,
        "cards": throughput.cards(speed) if speed is not None else _cards(trials, said, rows),
        "rows": rows,
        "blanks": _blanks(rows),
        "figures": {key: _shown(path, text) for key, path, text in drawn},
        "ranked": among,
        "best": best_of_each(systems),
        "standings": standings(trials, said, systems),
        "no_peers": no_peers,
        "findings": _findings(trials),
        "system": list(_system_rows(trials)),
        "settings": _settings(trials),
        "folder": str(Path(trials.results[0].file).parent),
        "files": list(_files(trials)),
        "commands": list(dict.fromkeys(shlex.join(command.argv) for command in trials.plan.commands))
        if trials.plan
        else [],
    }


def _cards(trials: TrialSet, said: Claim, rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the few numbers that stand at the top of a set."""
    names = {"score": "score", "runs": "minutes, not a score", "none": "score"}
    cards = [
        {
            "name": names[said.kind],
            "value": "none" if said.minutes is None else figures.minutes_text(said.minutes),
            "unit": "" if said.minutes is None else "min",
            "note": f"90 % interval {said.interval[0]:.2f} to {said.interval[1]:.2f}" if said.interval else said.what,
        },
        {"name": "valid runs", "value": str(said.num_valid), "unit": f"of {len(rows)}", "note": _required(trials)},
    ]
    for key, unit in (("samples_to_target", ""), ("step_time_ms", "ms"), ("tokens_s_gpu", "")):
        values = sorted(row[key] for row in rows if row[key] is not None)
        if values:
            low, high = figures.number_text(values[0]), figures.number_text(values[-1])
            spread = f"median of trials; {low} to {high}" if low != high else "the same in all trials"
            note = spread if len(values) > 1 else "one trial"
            cards.append(
                {"name": HEADINGS[key], "value": figures.number_text(median(values)), "unit": unit, "note": note}
            )
    return cards


def _required(trials: TrialSet) -> str:
    required = trials.score.num_runs_required
    return f"a score takes {required}" if required else "no official rules apply"


def _blanks(rows: Sequence[Row]) -> list[str]:
    """Return why numbers are missing in the table of trials."""
    missing = {key: [row["trial"] for row in rows if row[key] is None] for key in BLANK}
    if not all(row["has_target"] for row in rows):
        untold = [HEADINGS[key] for key in _OF_TRAINING if missing.pop(key)]
        return [f"No {', '.join(untold)}: {NO_TARGET}.", *_missing(missing, len(rows))]
    return _missing(missing, len(rows))


_OF_TRAINING = ("minutes", "samples_to_target", "eval_final")
"""What random weights have no number of."""


def _missing(missing: Mapping[str, Sequence[str]], num_rows: int) -> list[str]:
    return [
        f"No {HEADINGS[key]}{'' if len(names) == num_rows else ' for trial ' + ', '.join(names)}: {BLANK[key]}."
        for key, names in missing.items()
        if names
    ]


def _draw(
    trials: TrialSet, said: Claim, among: Sequence[Entry], out: Path, *, mark: str
) -> Iterator[tuple[str, Path, str]]:
    """Draw what there is data for; yield each figure's key, file and caption."""
    s, note = trials.score, figures.footer(trials.hardware, len(trials.results))
    benchmark, gbs = None if trials.pretends else s.benchmark, s.global_batch_size
    heading = f"{trials.measured}, {trials.name}"

    path = out / f"convergence{mark}.png"
    band = [(p.samples, p.low, p.high) for p in forecast.band(benchmark, gbs)]
    figures.convergence_figure(trials.results, path, heading=heading, note=note, band=band)
    shade = " Shaded: where published runs of this benchmark and batch size lie." if band else ""
    bad = "" if all(r.valid for r in trials.results) else " Red and dotted: not a valid trial."
    yield "convergence", path, f"Every evaluation of every trial; the large dot is its last.{bad}{shade}"

    yield from _draw_step_times(trials, out, mark=mark)

    known = published.samples_to_target(benchmark, gbs) if benchmark and gbs else None
    if known and s.samples_distribution:
        path = out / f"samples{mark}.png"
        figures.samples_figure(s.samples_distribution, known, path, heading=heading, note=note)
        source = f"Published: {known.kind}, {known.source}."
        yield "samples", path, f"Trials by the samples they took to the target. {source}"

    if among:
        path = out / f"published{mark}.png"
        yield "published", path, _draw_published(trials, said, among, path, note=note)


def _draw_step_times(trials: TrialSet, out: Path, *, mark: str) -> Iterator[tuple[str, Path, str]]:
    if not any(r.step_times_ms for r in trials.results):
        return
    path, note = out / f"step_time{mark}.png", figures.footer(trials.hardware, len(trials.results))
    heading = f"{trials.measured}, {trials.name}"
    figures.step_time_figure(trials.results, path, heading=heading, note=note, names=trials.trial_names)
    measured = (
        "Each measurement is one step, where the log lists them, else the mean over the steps between two log lines."
    )
    yield "step_time", path, measured


def _draw_throughput(
    trials: TrialSet, lines: Sequence[throughput.Speed], out: Path, *, mark: str
) -> Iterator[tuple[str, Path, str]]:
    """Draw what there is of random weights: no losses, no minutes."""
    yield from _draw_step_times(trials, out, mark=mark)
    if lines:
        path = out / f"published{mark}.png"
        bars = [Bar(name=line.name, value=line.samples_s, ours=line.ours) for line in lines]
        heading, note = (
            f"{trials.measured}: beside published systems",
            figures.footer(trials.hardware, len(trials.results)),
        )
        figures.bars_figure(bars, path, heading=heading, note=note, what="samples/s while training")
        yield "published", path, "Samples per second while training; dark, this set's."


def _draw_published(trials: TrialSet, said: Claim, among: Sequence[Entry], path: Path, *, note: str) -> str:
    """Draw published systems and, if it has a time, this set; return the caption."""
    with_ours, dark = (" and this set", "; dark, this set's") if said.minutes is not None else ("", "")
    heading = f"{trials.measured}, {trials.num_gpus} GPUs: published systems{with_ours}"
    bars = [_bar(trials, said) if entry.ours else Bar(name=entry.name, value=entry.minutes) for entry in among]
    longest = _MAX_BAR_RATIO * (said.minutes or bars[0].value)
    drawn = [bar for bar in bars if bar.value <= longest] or bars
    figures.bars_figure(drawn, path, heading=heading, note=note)
    beyond = f" Not drawn: {len(bars) - len(drawn)} above {longest:.0f} min." if len(drawn) < len(bars) else ""
    return f"Official minutes of published systems{dark}.{beyond}"


_MAX_BAR_RATIO = 2.5
"""A published time far beyond this set's would press all other bars together; the table has it."""


def _shown(path: Path, caption: str) -> Shown:
    data = base64.b64encode(path.read_bytes()).decode()
    return Shown(file=path.name, caption=caption, uri=f"data:image/png;base64,{data}")


def _findings(trials: TrialSet) -> list[Row]:
    """Return what was found, errors first; what several trials share stands once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for f in () if not trials.has_target else trials.score.findings:  # there, all say that it is no score
        if trials.pretends and f.rule == "SCO-06":  # not a fault of the runs, and said where the score would stand
            continue
        found.setdefault((f.severity, f.rule, f.what), []).append("the set")
    for name, result, official in zip(trials.trial_names, trials.results, trials.score.compliance, strict=True):
        for f in result.findings:
            where = name if f.line is None else f"{name} (line {f.line})"
            found.setdefault((f.severity, f.rule, f.what), []).append(where)
        for message in official.messages if official.passed is False else ():
            found.setdefault(("error", f"official {official.ruleset}", message), []).append(name)
    return [
        {"severity": severity, "rule": rule, "message": message, "where": _where(trials, where), "fix": _fix(rule)}
        for (severity, rule, message), where in sorted(found.items(), key=lambda item: item[0][0])
    ]


def _where(trials: TrialSet, names: Sequence[str]) -> str:
    return f"all, as {names[0]}" if len(names) == len(trials.results) > 1 else ", ".join(names)


def _fix(rule: str) -> str:
    return rules.RULES[rule].fix if rule in rules.RULES else ""


def _system_rows(trials: TrialSet) -> Iterator[tuple[str, str]]:
    """Yield what the logs, the ranks and the plan say of the machine and its software; empty entries are left out."""
    for key, value in trials.system.items():
        for name, entry in value.items() if isinstance(value, dict) else ((key, value),):
            if isinstance(entry, str | int | float) and not _SAYS_NOTHING.fullmatch(str(entry)):
                yield str(name).replace("_", " "), str(entry)[:200]
    logged = {key: value for r in reversed(trials.results) for key, value in r.hyperparameters.items()}
    yield from ((key.replace("_", " "), str(logged[key])[:200]) for key in _OF_THE_MACHINE if key in logged)
    yield from next((r.software.items() for r in trials.results if r.software), ())
    yield from _found_by_ranks(Path(trials.results[0].file).parent)
    if trials.plan is not None:
        c, w = trials.plan.config, trials.plan.world
        yield "cluster", c.cluster.summary
        yield "container image", c.container.image or "none"
        yield "precision", c.precision.name
        yield "ranks", f"{w.num_ranks} = dp {w.dp} × tp {w.tp} × pp {w.pp} × cp {w.cp} on {w.num_nodes} node(s)"


_SAYS_NOTHING = re.compile(rf"\s*|.*(UNKNOWN|PLACEHOLDER|{NO_DEVICES}).*")
_OF_THE_MACHINE = ("accelerator", "num_ranks", "host_processor_model_name", "operating_system", "commit", "image")
"""Keys of a log that describe the machine and what ran on it, not the recipe."""


def _found_by_ranks(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what rank 0 of a run on a cluster found on its node, if its facts lie beside the log."""
    with suppress(LogError):
        for rank in load(folder).ranks[:1]:
            said = {"operating system": rank.software.system, "python": rank.software.python}
            gpus = (rank.machine.gpus if rank.machine else None) or ()
            said |= rank.software.packages | {"GPU driver": gpus[0].driver if gpus else None}
            yield from ((name, text) for name, text in said.items() if text)


def _settings(trials: TrialSet) -> list[tuple[str, str]]:
    """Return the settings in the logs; one that differs between trials says so."""
    names = dict.fromkeys(key for r in trials.results for key in r.hyperparameters if key not in _OF_THE_MACHINE)
    said = {key: [str(r.hyperparameters.get(key, "not logged")) for r in trials.results] for key in names}
    return [(key, " | ".join(dict.fromkeys(values))[:120]) for key, values in sorted(said.items())]


def _files(trials: TrialSet) -> Iterator[tuple[str, str, str]]:
    """Yield each trial's name, file name and SHA-256."""
    for name, result in zip(trials.trial_names, trials.results, strict=True):
        with open(result.file, "rb") as file:
            yield name, Path(result.file).name, hashlib.file_digest(file, "sha256").hexdigest()


def _compared(sets: Sequence[TrialSet], out: Path) -> dict[str, Any]:
    """Return the table and the figure that set the sets beside each other; the first one is the baseline.

    Only sets of one benchmark have times to compare, and a stand-in for a benchmark is none.
    """
    said = [claim(trials) for trials in sets]
    alike = [trials.measured == sets[0].measured for trials in sets]
    rows = [
        {
            "trials": trials,
            "claim": one,
            "speed": throughput.measure(trials) if not trials.has_target else None,
            "samples_to_target": _median(r.samples_to_target for r in trials.results if r.samples_to_target),
            "step_time_ms": _median(r.step_time_ms.median for r in trials.results if r.step_time_ms),
            "tokens_s_gpu": _median(r.tokens_s_gpu for r in trials.results if r.tokens_s_gpu and trials.num_gpus),
            "ratio": _ratio(one, said[0]) if same else None,
            "speed_ratio": _speed_ratio(trials, sets[0]) if same else None,
        }
        for trials, one, same in zip(sets, said, alike, strict=True)
    ]
    drawn = [(t, c) for t, c, same in zip(sets, said, alike, strict=True) if same and c.minutes is not None]
    return {"rows": rows, "all_alike": all(alike), "figure": _draw_compared(drawn, out) if drawn else None} | {
        "differences": differences(sets)
    }


def _draw_compared(drawn: Sequence[tuple[TrialSet, Claim]], out: Path) -> Shown:
    sets = [trials for trials, _ in drawn]
    where = "; ".join(dict.fromkeys(trials.hardware or "hardware not logged" for trials in sets))
    note = figures.footer(where, sum(len(trials.results) for trials in sets))
    bars = [_bar(trials, one) for trials, one in drawn]
    figures.bars_figure(bars, out / "sets.png", heading=f"{sets[0].measured}: sets compared", note=note)
    return _shown(
        out / "sets.png",
        "Minutes from zero; in brackets, and as a whisker where it can be seen, the 90 % interval of a score.",
    )


def _ratio(one: Claim, base: Claim) -> float | None:
    """Return minutes over those of the baseline; a score has a convergence factor, and less than a score has none."""
    return one.minutes / base.minutes if one.kind == base.kind and one.minutes is not None and base.minutes else None


def _speed_ratio(one: TrialSet, base: TrialSet) -> float | None:
    """Return samples/s while training over those of the baseline: medians of valid trials."""
    ours, first = (_median(r.throughput_samples_s for r in t.results if r.valid) for t in (one, base))
    return ours / first if ours and first else None


def _bar(trials: TrialSet, said: Claim) -> Bar:
    minutes = said.minutes or 0.0
    return Bar(name=trials.name, value=minutes, interval=said.interval, ours=True, remark=said.remark)


def _median(numbers: Iterable[float | None]) -> float | None:
    found = [number for number in numbers if number is not None]
    return median(found) if found else None
