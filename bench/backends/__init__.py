"""Choose the backend that starts the ranks of a plan."""

from bench.backends.protocol import Backend
from bench.contract.plan import Plan
from bench.contract.schema import BackendName


def get(name: BackendName) -> Backend:
    match name:
        case BackendName.local:
            from bench.backends import local

            return local.LocalBackend()
        case BackendName.ssh:
            from bench.backends import ssh

            return ssh.SshBackend()
        case BackendName.slurm:
            from bench.backends.slurm.backend import SlurmBackend

            return SlurmBackend()
        case BackendName.ray:
            from bench.backends.ray.backend import RayBackend

            return RayBackend()
        case BackendName.kubernetes:
            from bench.backends.kubernetes.backend import KubernetesBackend

            return KubernetesBackend()


def for_plan(plan: Plan) -> Backend:
    return get(plan.config.cluster.backend)
