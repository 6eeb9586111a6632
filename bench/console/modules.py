"""Show where the time of a profiled step went."""

from bench.console.sheet import Sheet
from bench.contract.modules import ModuleTimes
from bench.mlperf.result import Result
from bench.results import module_table


def sheet(result: Result, times: ModuleTimes) -> Sheet:
    """Return one line per part, of the profile in a trial's log."""
    title = f"where the time of a step goes: {result.file}"
    caption = "\n".join(module_table.notes(result, times))
    return Sheet(title, module_table.lines(times), columns=module_table.COLUMNS, caption=caption, num_optional=2)
