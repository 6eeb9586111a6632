"""Servers of the OpenAI API: start one, give it exact prompts, load it by MLPerf's loadgen, and time each request."""
