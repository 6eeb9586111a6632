"""Studies: a named set of runs, what of it runs next, and the tables that its logs prove."""
