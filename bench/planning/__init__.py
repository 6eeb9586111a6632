"""From a config to a plan."""
