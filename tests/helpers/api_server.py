"""A stub of the Kubernetes API server that replaces `kubernetes.client.request` and returns prepared answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.backends.kubernetes.client import ApiError

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass
class ApiServer:
    """What it has no answer to it takes (POST), deletes, or does not find (GET)."""

    answers: dict[str, Any] = field(default_factory=dict)
    """By method and path, as `GET /version`; errors are raised."""
    refused_rights: set[str] = field(default_factory=set)
    """As `create batch jobs`: verb, group and plural."""
    requests: list[str] = field(default_factory=list)
    """Method, path and query of every request."""
    sent: list[Any] = field(default_factory=list)
    contexts: set[str | None] = field(default_factory=set)

    def request(
        self, method: str, path: str, *, context: str | None, query: Mapping[str, str] | None = None, body: Any = None
    ) -> Any:
        self.contexts.add(context)
        words = "&".join(f"{name}={value}" for name, value in (query or {}).items())
        self.requests.append(f"{method} {path}" + (f"?{words}" if words else ""))
        if path == REVIEWS:
            return self._reviewed(body)
        if body is not None:
            self.sent.append(body)
        name = body["metadata"]["name"] if method == "POST" else ""
        answer = self.answers.get(f"{method} {path} {name}".strip(), self.answers.get(f"{method} {path}"))
        if isinstance(answer, Exception):
            raise answer
        if answer is None and method == "GET":
            raise refusal(404, "NotFound", f"{path.rpartition('/')[2]} not found")
        return json.loads(json.dumps(body or {} if answer is None else answer))

    def _reviewed(self, body: Any) -> Any:
        review = body["spec"]["resourceAttributes"]
        right = f"{review['verb']} {review['group']} {review['resource']}"
        self.requests.append(f"{right} in {review['namespace']}")
        assert (body["kind"], body["apiVersion"]) == ("SelfSubjectAccessReview", "authorization.k8s.io/v1")
        return {"status": {"allowed": right not in self.refused_rights}}


def refusal(status: int, reason: str, message: str) -> ApiError:
    return ApiError(status, reason, message, where="there")
