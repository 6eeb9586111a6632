"""Kubernetes as a backend: each node of a run is one pod, which starts its ranks by `bench.driver`."""
