"""The requests that the dashboard answers."""

import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import bench
from bench.dashboard import pages
from bench.dashboard.access import AccessCheck
from bench.dashboard.listing import Listed, Listing
from bench.dashboard.live import Live
from bench.dashboard.pages import Reports
from bench.errors import BenchError
from bench.masking import masked_all
from bench.report import template

_FOLDER = Path(__file__).parent
_REPORT = Path(template.__file__).parent
_LIBRARY = "plotly.js"
_ASSETS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "page.css": ("text/css", lambda: (_REPORT / "page.css").read_text(encoding="utf-8")),
    "dashboard.css": ("text/css", lambda: (_FOLDER / "dashboard.css").read_text(encoding="utf-8")),
    "page.js": ("text/javascript", lambda: (_REPORT / "page.js").read_text(encoding="utf-8")),
    "dashboard.js": ("text/javascript", lambda: (_FOLDER / "dashboard.js").read_text(encoding="utf-8")),
    _LIBRARY: ("text/javascript", template.library),
}


def app(root: Path, token: str) -> ASGIApp:
    """Return the application for the runs of a folder; only requests with the token are answered."""
    return AccessCheck(_Dashboard(Listing(root)).app(), token)


class _Dashboard:
    """The routes; each one runs in a thread, since it reads files."""

    def __init__(self, listing: Listing) -> None:
        self._listing, self._live, self._reports = listing, Live(), Reports()

    def app(self) -> Starlette:
        routes = {
            "/": self._runs,
            "/states": self._states,
            "/run/{id}": self._run,
            "/live/{id}": self._live_state,
            "/compare": self._compare,
            "/report": self._report,
            "/history": self._history,
            "/assets/{name}": self._asset,
        }
        handlers = {HTTPException: self._http_error, BenchError: self._error}
        listed = [Route(path, answer, methods=["GET"]) for path, answer in routes.items()]
        return Starlette(routes=listed, exception_handlers=handlers)

    def _runs(self, request: Request) -> Response:
        return self._page("runs.html.j2", pages.runs(self._listing))

    def _states(self, request: Request) -> Response:
        return _json({one.id: [one.run.state_name, pages.style(one)] for one in self._listing.runs()})

    def _run(self, request: Request) -> Response:
        return self._page("run.html.j2", pages.run(self._find(request.path_params["id"]), self._live))

    def _live_state(self, request: Request) -> Response:
        return _json(pages.live_state(self._find(request.path_params["id"]), self._live))

    def _compare(self, request: Request) -> Response:
        return self._page("compare.html.j2", pages.comparison(self._chosen(request), self._live))

    def _report(self, request: Request) -> Response:
        """Answer with a page of `runstop report`, whose own policy allows only its own scripts."""
        chosen = self._chosen(request)
        if not chosen:
            raise HTTPException(404, "no run is chosen")
        policy = f"{template.context()['policy']}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        return HTMLResponse(self._reports.page(chosen), headers={"content-security-policy": policy})

    def _history(self, request: Request) -> Response:
        return self._page("history.html.j2", pages.history(self._listing, request.query_params.get("task") or None))

    def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (asset := _ASSETS.get(name)) is None:
            raise HTTPException(404, "there is no such file")
        kind, read = asset
        # Its address has its version, and it is large: a browser at the other end of a tunnel keeps it.
        headers = {"cache-control": "private, max-age=604800"} if name == _LIBRARY else {}
        return Response(read(), media_type=f"{kind}; charset=utf-8", headers=headers)

    def _chosen(self, request: Request) -> list[Listed]:
        return [self._find(id) for id in dict.fromkeys(request.query_params.getlist("run"))]

    def _find(self, id: str) -> Listed:
        """Return a run that is listed: an id is never used as a path."""
        if (one := self._listing.find(id)) is None:
            raise HTTPException(404, "there is no such run (any more)")
        return one

    def _page(self, name: str, context: pages.Context, *, status: int = 200) -> Response:
        more = {"root": str(self._listing.root), "version": bench.__version__, "library_version": version("plotly")}
        return HTMLResponse(template.page(name, context | more, folder=_FOLDER), status_code=status)

    def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return PlainTextResponse(f"{error.detail}\n", status_code=error.status_code, headers=error.headers)

    def _error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BenchError)
        context = {"title": "This cannot be shown", "what": error.what, "where": error.where, "charts": {}}
        return self._page("message.html.j2", context, status=409)


def _json(content: Any) -> Response:
    text = json.dumps(masked_all(content), allow_nan=False)
    return Response(text, media_type="application/json")
