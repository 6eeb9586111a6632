"""Plans with other settings, and the outcomes of their checks as text, for golden files."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from bench.contract.plan import Plan
from bench.rules.check import Checked


def shown(outcomes: Iterable[Checked]) -> list[str]:
    """Return what each check measured or could not decide, and its findings with every part."""
    return [line for one in outcomes for line in _lines(one)]


def differing(outcomes: Iterable[Checked], usual: Mapping[str, Checked]) -> list[str]:
    """Return the outcomes that are not the usual ones, and the checks that are new or missing."""
    by_name = {one.what: one for one in outcomes}
    lines = shown(one for name, one in by_name.items() if one != usual.get(name))
    return lines + [f"  {name}: does not apply" for name in usual if name not in by_name]


def changed(plan: Plan, settings: dict[str, Any]) -> Plan:
    """Return a copy of a plan with other settings; enums are given by their names."""
    plan = deepcopy(plan)
    for path, value in settings.items():
        *parents, name = (f"config.{path}" if path.startswith("cluster") else path).split(".")
        owner: Any = plan
        for parent in parents:
            owner = getattr(owner, parent)
        old = getattr(owner, name)
        is_enum = isinstance(value, str) and hasattr(type(old), "__members__")
        object.__setattr__(owner, name, type(old)[value] if is_enum else value)
    return plan


def _lines(one: Checked) -> list[str]:
    unknown = f" unknown: {one.unknown}" if one.unknown else ""
    lines = [f"  {one.what} ({', '.join(one.rules)}; {one.tier}): {one.seen}{unknown}".rstrip()]
    for finding in one.findings:
        line = "" if finding.line is None else f" line {finding.line}"
        lines.append(f"    {finding.severity} {finding.rule}: {finding.what}")
        lines += [f"      where: {finding.where}{line}", f"      fix: {finding.fix}"]
    return lines
