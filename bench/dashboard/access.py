"""Who may ask the dashboard: the browser of the person who has the token, from a page of the dashboard itself.

Any program on this machine can connect to a port of localhost, and so can any web page in the user's browser. So every
request needs the token, a Host header that names this machine (else a page of another site could reach the port under
its own name: DNS rebinding), and no Origin but the dashboard's. Only GET and HEAD are answered, and nothing is changed.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_METHODS = ("GET", "HEAD")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""For pages of the dashboard; the plotting library adds style elements."""
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_NO_WEBSOCKET = {"type": "websocket.close", "code": 1008}
TOKEN = "token"


class AccessCheck:
    """Answers requests that may not pass, and gives all others to the application."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        # Cookies of localhost are sent to every port: each dashboard has its own name.
        self._cookie = f"runstop_{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (self._app(scope, receive, send) if scope["type"] == "lifespan" else send(_NO_WEBSOCKET))
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("content-security-policy", POLICY)
            await send(message)

        answer = self._refusal(scope["method"], Headers(scope=scope)) or self._without_token(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        """Return why a request is refused, whatever its token is."""
        if method not in _METHODS:
            return _refused(405, "the dashboard only answers GET", {"allow": ", ".join(_METHODS)})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return _refused(421, "open the dashboard as localhost or 127.0.0.1")
        if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):
            return _refused(403, "the request is from a page of another site")
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site not in ("none", "same-origin") and mode != "navigate":
            return _refused(403, "the request is from a page of another site")
        return None

    def _without_token(self, scope: Scope) -> Response | None:
        """Return nothing for a request with the cookie; the cookie for one with the token; else a refusal."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        if given:
            if len(given) > 1 or not self._is_token(given[0]):
                return _refused(403, "the token is wrong: open the address that runstop dashboard has printed")
            rest = urlencode([pair for pair in query if pair[0] != TOKEN])
            path = f"/{quote(scope['path'].lstrip('/'))}"  # two slashes would be the name of another host
            answer = Response(status_code=303, headers={"location": f"{path}?{rest}" if rest else path})
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if self._is_token(_cookies(Headers(scope=scope).getlist("cookie")).get(self._cookie, "")):
            return None
        return _refused(403, "the token is missing: open the address that runstop dashboard has printed")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _cookies(headers: Iterable[str]) -> Mapping[str, str]:
    return {name: value for header in headers for name, value in cookie_parser(header).items()}


def _refused(status: int, what: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{what}\n", status_code=status, headers=headers)
