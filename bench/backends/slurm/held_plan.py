"""Compare the plan in a script with the plan.json that its job wrote: the same, with the site's paths filled in."""

import re
from collections.abc import Iterator

_PLAN = re.compile(r"^  cat <<'PLAN'\n(.*?\n)PLAN\n", re.DOTALL | re.MULTILINE)
_SITE_NAMES = re.compile(r'^site_names="([\w ]*)"$', re.MULTILINE)


def differences(script: str, plan: str) -> Iterator[str]:
    """Yield where a plan.json is not the plan that a script holds, line by line of the JSON."""
    held, names = _PLAN.search(script), _SITE_NAMES.search(script)
    if held is None or names is None:
        yield "the script holds no plan"
        return
    wanted, found = held[1].splitlines(), plan.splitlines()
    if len(wanted) != len(found):
        yield f"{len(found)} lines, and {len(wanted)} in the script"
        return
    values: dict[str, str] = {}
    variable = re.compile("|".join(rf"\${name}" for name in names[1].split()) or r"(?!)")
    for number, (ours, theirs) in enumerate(zip(wanted, found, strict=True), 1):
        if not _fits(ours, theirs, variable, values):
            yield f"line {number} is {theirs.strip()!r:.80}, in the script {ours.strip()!r:.80}"


def _fits(held: str, line: str, variable: re.Pattern[str], values: dict[str, str]) -> bool:
    """Return whether a line is the script's with values in place of the variables; each has one value in all lines."""
    pattern, at, new = "", 0, []
    for found in variable.finditer(held):
        pattern += re.escape(held[at : found.start()])
        name = found[0][1:]
        if name in values:
            pattern += re.escape(values[name])
        elif name in new:
            pattern += f"(?P={name})"
        else:
            new.append(name)
            pattern += f"(?P<{name}>.*?)"
        at = found.end()
    match = re.fullmatch(pattern + re.escape(held[at:]), line)
    if match:
        values.update(match.groupdict())
    return match is not None
