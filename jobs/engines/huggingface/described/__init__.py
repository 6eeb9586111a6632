"""Models that transformers has and runstop does not: described for the planner, built, read and written."""
