"""Work out the plan of a config: parallelism, memory, step time, schedule and commands."""
