"""The numbered rules: what can be wrong with a run, and what to do about it. One registry, by ID.

`bench.preflight` checks them before a run, `bench.mlperf.compliance` in its log; `bench.diagnosis` recognises them by
their signs in the logs of a run that failed. An ID never changes its meaning: logs, tickets and ledgers contain it.
"""

from bench.rules.registry import RULES, Rule

__all__ = ("RULES", "Rule")
