"""How lines begin on which signs stand; parts of their patterns."""

LINE = rb"^(?: {0,6}\d{1,6}: ?|\[\S{1,80}\]:? ?){0,3}"
"""The start of a line, with what srun -l and torch put before it."""
TASKS = rb"^.{0,20}srun: error: .{1,80}: tasks? [\d,-]{1,200}: "
