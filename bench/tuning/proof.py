"""Write what `runstop tune` measured, and the best settings as a file of overrides for `runstop launch @FILE`."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from bench import masked_json
from bench.contract import atomic_files, codec
from bench.planning import compose
from bench.report.tuning import markdown
from bench.results.tuning import Tuning

OVERRIDES, TUNING, PAGE = "best.overrides", "tuning.json", "tuning.md"


def write(tuning: Tuning, overrides: Sequence[str]) -> Tuning:
    """Write best.overrides, tuning.json and tuning.md into the folder of the runs; return it with the first's path."""
    folder = Path(tuning.folder)
    tuning = dataclasses.replace(tuning, overrides_file=str(folder / OVERRIDES))
    atomic_files.write_text(folder / OVERRIDES, _text(tuning, overrides))
    masked_json.write(folder / TUNING, codec.plain(tuning))
    atomic_files.write_text(folder / PAGE, markdown(tuning))
    return tuning


def _text(tuning: Tuning, overrides: Sequence[str]) -> str:
    """Return the user's overrides and the best settings, one a line."""
    best = tuning.settings(tuning.best)
    assert best is not None and best.median_ms is not None
    own = [compose.override_key(one) for one in best.candidate.overrides]
    kept = [one for one in overrides if compose.override_key(one) not in own]
    verdict = "fastest" if tuning.is_decided else "fastest so far, not separated from all others"
    return "\n".join(
        [
            f"# {tuning.best}: {verdict}; median step {best.median_ms:.4g} ms, n = {len(best.values_ms)} runs",
            f"# Measured by: {tuning.command}",
            f"# Proof: {PAGE} and {TUNING} in this folder.",
            *kept,
            *best.candidate.overrides,
            "",
        ]
    )


def command(arguments: Sequence[str]) -> str:
    """Return the command that repeats or continues a request."""
    return shlex.join(["runstop", "tune", *arguments])
