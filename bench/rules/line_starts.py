"""Regular expressions of line prefixes; the patterns of signs begin with them."""

LINE = rb"^(?: {0,6}\d{1,6}: ?|\[\S{1,80}\]:? ?){0,3}"
"""The start of a line, with the prefixes of srun -l and torch."""
TASKS = rb"^.{0,20}srun: error: .{1,80}: tasks? [\d,-]{1,200}: "
