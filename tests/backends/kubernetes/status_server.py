"""A fake of the status server in Kubeflow Trainer's controller, to which pods post their progress.

It follows upstream's documentation (kubeflow/trainer 2.3, pkg/statusserver and the plugin trainjobstatus). It accepts
`POST …/trainjobs/NAME/status` by TLS with a service account token that was issued for this TrainJob, and writes the
content into the object's status, which the API server validates by the CRD.
"""

import json
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Object = dict[str, Any]
GROUP = "trainer.kubeflow.org"
HOST = "10.244.1.1"
"""This machine's address for pods of both nodes; it exists while node-1 has a pod."""
FOLDER, VOLUME = "/var/run/secrets/kubeflow/trainer", "kubeflow-trainer-token"
MAX_BYTES = 2**16


class StatusServer:
    """Listens until `end` is called, and records its status codes."""

    def __init__(self, kubectl: Callable[..., str]) -> None:
        self._kubectl, self.answered = kubectl, list[int]()
        self._folder = tempfile.TemporaryDirectory(prefix="runstop-status-")
        self._crt, key = Path(self._folder.name, "ca.crt"), Path(self._folder.name, "key")
        words = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=status"]
        argv = ["openssl", "req", "-x509", *words, "-addext", f"subjectAltName=IP:{HOST}", "-keyout", key]
        subprocess.run([*argv, "-out", self._crt], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._crt, key)
        self._http = ThreadingHTTPServer((HOST, 0), _handler(self), bind_and_activate=False)
        self._http.socket.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND: the address does not exist yet
        self._http.server_bind()
        self._http.server_activate()
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def end(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._folder.cleanup()

    def certificate(self, job: Object) -> Object:
        """Return the metadata and data of the ConfigMap that has this server's certificate for a TrainJob's pods."""
        metadata = {"name": f"{job['metadata']['name']}-tls-config", "namespace": job["metadata"]["namespace"]}
        return {"metadata": metadata, "data": {"ca.crt": self._crt.read_text()}}

    def configure(self, pod: Object, job: Object) -> None:
        """Set the server's address and token in a TrainJob's pod. Real clusters set the service account themselves."""
        place = path(job["metadata"]["namespace"], job["metadata"]["name"])
        token = {"audience": audience(place), "expirationSeconds": 3600, "path": "token"}
        config = {"name": f"{job['metadata']['name']}-tls-config", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        volume = {"name": VOLUME, "projected": {"sources": [{"serviceAccountToken": token}, {"configMap": config}]}}
        pod["spec"] |= {"serviceAccountName": "default", "volumes": [*pod["spec"].get("volumes", []), volume]}
        known = {"URL": f"https://{HOST}:{self._http.server_port}{place}"}
        known |= {"CA_CERT": f"{FOLDER}/ca.crt", "TOKEN": f"{FOLDER}/token"}
        for container in pod["spec"]["containers"]:
            container["env"] += [{"name": f"KUBEFLOW_TRAINER_SERVER_{k}", "value": v} for k, v in known.items()]
            container["volumeMounts"] += [{"name": VOLUME, "mountPath": FOLDER, "readOnly": True}]

    def answer(self, place: str, authorization: str, body: bytes) -> int:
        """Return the status code of the answer to a request."""
        *_, namespace, _, name, _ = ("", "", "", *place.split("/"))
        if place != path(namespace, name):
            return 404
        if not self._is_authorized(authorization, place):
            return 403
        try:
            status = json.loads(body)["trainerStatus"]
        except (ValueError, KeyError, TypeError):
            return 422
        patch = json.dumps({"status": {"trainerStatus": status}})
        words = ("--subresource=status", "--type=merge", "--patch", patch, "--namespace", namespace)
        output = self._kubectl("patch", f"trainjobs.{GROUP}", name, *words, check=False)
        return 200 if output and "lastUpdatedTime" in status else 422

    def _is_authorized(self, authorization: str, place: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer" or not token:
            return False
        spec = {"token": token, "audiences": [audience(place)]}
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        output = self._kubectl("create", "--filename", "-", "--output", "json", stdin=json.dumps(review))
        return bool(json.loads(output)["status"].get("authenticated"))


def path(namespace: str, name: str) -> str:
    return f"/apis/{GROUP}/v1alpha1/namespaces/{namespace}/trainjobs/{name}/status"


def audience(place: str) -> str:
    return place.removeprefix("/apis/")


def _handler(server: StatusServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(min(size, MAX_BYTES))
            code = 413 if size > MAX_BYTES else server.answer(self.path, self.headers.get("Authorization", ""), body)
            server.answered.append(code)
            self.send_response(code)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
