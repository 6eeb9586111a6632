"""From a command line to a judged run."""
