"""The programs that ranks run, one for each kind of work; none of them names an engine."""
