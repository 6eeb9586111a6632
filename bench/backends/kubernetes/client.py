"""Send requests to a Kubernetes API server; only this file uses the client library.

Objects are sent and returned as plain dictionaries, as in manifests. The library's model classes are not used: they
reject objects of API servers that are older or newer than the library.
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
"""The API path of each kind: its group and version, and its plural."""


class ApiError(SubmitError):
    """The API server refuses a request."""

    def __init__(self, status: int, reason: str, message: str, *, where: str) -> None:
        is_quota = rule_of(reason, message) == "KUB-11"
        fix = _FIXES.get(
            "quota" if is_quota else reason,
            "check the user and the cluster: `kubectl auth whoami`, `kubectl cluster-info`",
        )
        super().__init__(message or f"HTTP {status}", where=where, fix=fix, rule=rule_of(reason, message))
        self.status, self.reason, self.message = status, reason, message


class NoServerError(SubmitError):
    """The API server does not answer; it may have carried out the request."""


def rule_of(reason: str, message: str) -> str | None:
    """Return the rule that explains why the API server refuses a request; None if no rule does."""
    if "exceeded quota" in message:
        return "KUB-11"
    return "KUB-07" if reason in ("Forbidden", "Unauthorized") else None


_FIXES = {
    "quota": "delete objects of ended runs (`kubectl get jobs,configmaps,services -l app.kubernetes.io/managed-by="
    "runstop`), or ask the cluster's administrator for a larger quota",
    "Forbidden": "ask the cluster's administrator for the role in docs/kubernetes.md; `runstop doctor` lists "
    "the missing permissions",
    "Unauthorized": "log in again: the credentials in the kubeconfig have expired",
    "Invalid": "correct the field named in this message, under cluster.kubernetes",
    "NotFound": "check that the namespace and the kind exist: `kubectl get namespaces`, `kubectl api-resources`",
}


def is_installed() -> bool:
    return find_spec("kubernetes") is not None


def is_available() -> bool:
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
    """Send a request and return the answer: an object, or text if the answer is not JSON.

    Raises:
        ApiError: the API server refuses the request.
        NoServerError: the API server does not answer.
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
            f"the API server does not respond: {_short(error)}",
            where=client.configuration.host,
            fix="check the API server with `kubectl cluster-info`, then try again",
            rule="KUB-12",
        ) from error
    if response.status >= 400:
        status = _object(text)
        raise ApiError(response.status, str(status.get("reason", "")), _message(status, text), where=f"{method} {path}")
    return _object(text) or text


def path_of(kind: str, namespace: str, name: str | None = None) -> str:
    """Return the API path of the objects of a kind, or of one object."""
    group, plural = PATHS[kind]
    return f"{group}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def create(item: Mapping[str, Any], *, context: str | None, dry_run: bool = False) -> Any:
    """Create an object and return it as the API server stores it; with dry_run it is validated only."""
    path = path_of(item["kind"], item["metadata"]["namespace"])
    query = {"dryRun": "All", "fieldValidation": "Strict"} if dry_run else None  # else unknown fields are dropped
    return request("POST", path, context=context, query=query, body=dict(item))


def listed(kind: str, namespace: str, *, context: str | None, selector: str) -> list[dict[str, Any]]:
    """Return all objects of a kind that match a label selector, by one request."""
    answer = request("GET", path_of(kind, namespace), context=context, query={"labelSelector": selector})
    return list(answer.get("items") or [])


def delete(kind: str, namespace: str, name: str, *, context: str | None) -> None:
    """Delete an object and its dependents; no error if it does not exist."""
    try:
        request("DELETE", path_of(kind, namespace, name), context=context, query={"propagationPolicy": "Background"})
    except ApiError as error:
        if error.status != 404:
            raise


@cache
def _client(context: str | None) -> Any:
    """Return the library's client for a context of the kubeconfig, or for the service account of this pod."""
    kubernetes = _library()
    try:
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG"):
            configuration = kubernetes.client.Configuration()
            kubernetes.config.load_incluster_config(client_configuration=configuration)
            return kubernetes.client.ApiClient(configuration)
        file = os.environ.get("KUBECONFIG") or None  # the library's own default is the value at import time
        return kubernetes.config.new_client_from_config(config_file=file, context=context, persist_config=False)
    except kubernetes.config.ConfigException as error:
        raise ConfigError(
            f"the kubeconfig cannot be used: {_short(error)}",
            where="the kubeconfig",
            fix="set KUBECONFIG to the path of a kubeconfig, or set cluster.kubernetes.context to a context that "
            "`kubectl config get-contexts` lists",
            rule="KUB-12",
        ) from error


def _library() -> Any:
    try:
        import kubernetes
    except ImportError as error:
        raise ConfigError(
            "the Kubernetes client library is not installed",
            where="cluster.backend=kubernetes",
            fix="pip install 'runstop[kubernetes]'",
            rule="KUB-12",
        ) from error
    return kubernetes


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message(status: Mapping[str, Any], text: str) -> str:
    """Return the message of a Status object, else the answer's text, on one line."""
    return " ".join(str(status.get("message") or text).split())[:500]


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split())[:200]
