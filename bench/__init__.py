"""Take an LLM training benchmark from a config to a checked, MLPerf-style score."""
