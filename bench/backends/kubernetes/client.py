"""Ask an API server: one request, and its answer as data; the client library belongs to this file.

Objects go out and come back as they stand in manifests. The library's own classes are left aside: they refuse objects
of API servers that are older or newer than they are.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.errors import ConfigError, SubmitError

TIMEOUT_S = 20.0
PATHS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "ResourceQuota": ("/api/v1", "resourcequotas"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Job": ("/apis/batch/v1", "jobs"),
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "PyTorchJob": ("/apis/kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
    "TrainingRuntime": ("/apis/trainer.kubeflow.org/v1alpha1", "trainingruntimes"),
}
"""Where objects of a kind stand in the API: the group and version, and their plural."""


class ApiError(SubmitError):
    """The API server refuses a request."""

    def __init__(self, status: int, reason: str, message: str, *, where: str) -> None:
        fix = _FIXES.get(reason, "`kubectl auth whoami` and `kubectl cluster-info` show whom and what this client asks")
        super().__init__(message or f"HTTP {status}", where=where, fix=fix, rule=_RULES.get(reason))
        self.status, self.reason, self.message = status, reason, message


class NoServerError(SubmitError):
    """No API server answers: what a request was to do may have been done."""


_RULES = {"Forbidden": "KUB-07", "Unauthorized": "KUB-07"}
_FIXES = {
    "Forbidden": "ask the cluster's administrator for the role in docs/kubernetes.md; `python -m bench doctor` lists "
    "what is missing",
    "Unauthorized": "log in again: the kubeconfig's credentials are not valid any more",
    "Invalid": "correct the field that the message names, under cluster.kubernetes",
    "NotFound": "see whether the namespace and the kind exist: `kubectl api-resources`",
}


def is_installed() -> bool:
    """Return whether the client library is."""
    return find_spec("kubernetes") is not None


def is_here() -> bool:
    """Return whether this machine has the client library and a kubeconfig, or is a pod with a service account."""
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    has_config = any(Path(name).expanduser().is_file() for name in files.split(os.pathsep) if name)
    return is_installed() and (has_config or "KUBERNETES_SERVICE_HOST" in os.environ)


def request(
    method: str,
    path: str,
    *,
    context: str | None = None,
    query: Mapping[str, str] | None = None,
    body: Any = None,
) -> Any:
    """Return what an API server answers: an object, or text where it answers with text.

    Raises:
        ApiError: it refuses.
        NoServerError: it does not answer.
    """
    from urllib3.exceptions import HTTPError

    client = _client(context)
    kind = {"PATCH": "application/merge-patch+json"}.get(method, "application/json")
    headers = {"Accept": "application/json, */*", "Content-Type": kind}
    words = {"header_params": headers, "body": body, "auth_settings": ["BearerToken"]}
    serialized = client.param_serialize(method, path, query_params=[*(query or {}).items()], **words)
    try:
        response = client.call_api(*serialized, _request_timeout=TIMEOUT_S)
        text = (response.read() or b"").decode(errors="replace")
    except (HTTPError, OSError, _library().client.exceptions.ApiException) as error:
        raise NoServerError(
            f"the API server does not answer: {_short(error)}",
            where=client.configuration.host,
            fix="try again; `kubectl cluster-info` shows whether it is up",
            rule="KUB-12",
        ) from error
    if response.status >= 400:
        said = _object(text)
        raise ApiError(response.status, str(said.get("reason", "")), _words(said, text), where=f"{method} {path}")
    return _object(text) or text


def path_of(kind: str, namespace: str, name: str | None = None) -> str:
    """Return where the objects of a kind, or one of them, stand in the API."""
    group, plural = PATHS[kind]
    return f"{group}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def create(made: Mapping[str, Any], *, context: str | None, dry_run: bool = False) -> Any:
    """Return an object as the API server has made it, or as it would."""
    path = path_of(made["kind"], made["metadata"]["namespace"])
    return request("POST", path, context=context, query={"dryRun": "All"} if dry_run else None, body=dict(made))


def listed(kind: str, namespace: str, *, context: str | None, selector: str) -> list[dict[str, Any]]:
    """Return the objects of a kind with a label: one request, however many they are."""
    answer = request("GET", path_of(kind, namespace), context=context, query={"labelSelector": selector})
    return list(answer.get("items") or [])


def delete(kind: str, namespace: str, name: str, *, context: str | None) -> None:
    """Delete an object, and what it owns; one that is gone already is no error."""
    try:
        request("DELETE", path_of(kind, namespace, name), context=context, query={"propagationPolicy": "Background"})
    except ApiError as error:
        if error.status != 404:
            raise


@cache
def _client(context: str | None) -> Any:
    """Return the library's client of a context of the kubeconfig, or of the pod that this process runs in."""
    kubernetes = _library()
    try:
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG"):
            configuration = kubernetes.client.Configuration()
            kubernetes.config.load_incluster_config(client_configuration=configuration)
            return kubernetes.client.ApiClient(configuration)
        file = os.environ.get("KUBECONFIG") or None  # now: the library remembers what it was when it was imported
        return kubernetes.config.new_client_from_config(config_file=file, context=context, persist_config=False)
    except kubernetes.config.ConfigException as error:
        raise ConfigError(
            f"no API server to ask: {_short(error)}",
            where="the kubeconfig",
            fix="set KUBECONFIG, or cluster.kubernetes.context to one that `kubectl config get-contexts` lists",
            rule="KUB-12",
        ) from error


def _library() -> Any:
    try:
        import kubernetes
    except ImportError as error:
        raise ConfigError(
            "the client of Kubernetes is not installed",
            where="cluster.backend=kubernetes",
            fix="pip install 'runstop[kubernetes]'",
            rule="KUB-12",
        ) from error
    return kubernetes


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _words(said: Mapping[str, Any], text: str) -> str:
    """Return what the API server says, on one line."""
    return " ".join(str(said.get("message") or text).split())[:500]


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())[:200]
