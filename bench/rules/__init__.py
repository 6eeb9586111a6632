"""The numbered rules: what can be wrong with a run, and how to fix it. One registry, by ID.

`bench.preflight` checks the rules before a run. `bench.mlperf.compliance` checks them in a log. `bench.diagnosis` finds
the rule that explains a failed run, by patterns in its logs. An ID never changes its meaning: logs, tickets and ledgers
contain it.
"""

from bench.rules.registry import RULES, Rule

__all__ = ("RULES", "Rule")
