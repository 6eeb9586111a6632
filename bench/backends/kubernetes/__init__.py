"""The Kubernetes backend: each node of a run is one pod, in which `bench.driver` starts the ranks."""
