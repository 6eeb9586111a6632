"""A folder for PYTHONPATH, whose `sitecustomize` records a server that has no profiler of its own."""
