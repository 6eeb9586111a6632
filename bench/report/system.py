"""The machine, the software and the settings of a set, as its logs, its ranks and its plan say."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bench.errors import LogError
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.telemetry import joined
from bench.preflight.nodes import load
from bench.report.rows import telemetry_rows
from bench.report.sets import TrialSet


def system_rows(trials: TrialSet) -> Iterator[tuple[str, str]]:
    """Yield what the logs, the ranks and the plan say of the machine and its software; empty entries are left out."""
    for key, value in trials.system.items():
        for name, entry in value.items() if isinstance(value, dict) else ((key, value),):
            if isinstance(entry, str | int | float) and not _SAYS_NOTHING.fullmatch(str(entry)):
                yield str(name).replace("_", " "), str(entry)[:200]
    logged = {key: value for r in reversed(trials.results) for key, value in r.hyperparameters.items()}
    yield from ((key.replace("_", " "), str(logged[key])[:200]) for key in _OF_THE_MACHINE if key in logged)
    yield from next((r.software.items() for r in trials.results if r.software), ())
    # Without a target these rows stand among what was measured.
    meanwhile = joined([r.telemetry for r in trials.results if r.telemetry and trials.has_target])
    yield from ((name, f"{value} ({remark})" if value else remark) for name, value, remark in telemetry_rows(meanwhile))
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
            software = {"operating system": rank.software.system, "python": rank.software.python}
            gpus = (rank.machine.gpus if rank.machine else None) or ()
            software |= rank.software.packages | {"GPU driver": gpus[0].driver if gpus else None}
            yield from ((name, text) for name, text in software.items() if text)


def settings(trials: TrialSet) -> list[tuple[str, str]]:
    """Return the settings in the logs; one that differs between trials says so."""
    names = dict.fromkeys(key for r in trials.results for key in r.hyperparameters if key not in _OF_THE_MACHINE)
    logged = {key: [str(r.hyperparameters.get(key, "not logged")) for r in trials.results] for key in names}
    return [(key, " | ".join(dict.fromkeys(values))[:120]) for key, values in sorted(logged.items())]
