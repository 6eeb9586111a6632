"""Benchmark OpenAI-compatible servers: start a server, load it with MLPerf's loadgen, and time each request."""
