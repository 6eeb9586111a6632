"""The dashboard answers only who has its token, names runs by ids only, writes nothing, and follows a run under way."""

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from bench import dashboard
from bench.cli import main
from bench.contract import mllog
from bench.contract.mllog import Writer
from bench.dashboard.app import app
from bench.runs import tags
from helpers.clock import Clock, turned
from helpers.planted_runs import plant, under_way

TOKEN, HOST = "t0ken-of-this-test", "localhost:8790"
ESCAPES = (
    *(
        "/run/../../../etc/passwd",
        "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/run//etc/passwd",
        "/run/fast",
        "/live/../fast",
    ),
    *("/assets/..%2f__init__.py", "/assets/../app.py", "/assets/page.css%00", "/report?run=/etc/passwd"),
    *("/report?run=../fast", "/compare?run=..&run=.", "/report", "/fast/result_0.txt", "/static/", "//etc/passwd"),
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return turned(monkeypatch)


@pytest.fixture
def root(tmp_path: Path, clock: Clock) -> Path:
    """A folder with three finished runs of two trials, the first two with the same settings."""
    runs = (("before", 16, (199.0, 201.0)), ("fast", 16, (200.0, 202.0)), ("slow", 32, (100.0, 101.0)))
    for name, rank, speeds in runs:
        plant(tmp_path / "runs" / name, clock, *speeds, lora_rank=rank)
    return tmp_path / "runs"


def client(root: Path, **headers: str) -> TestClient:
    """Return a browser that has not opened the printed address yet."""
    return TestClient(app(root, TOKEN), base_url=f"http://{HOST}", headers=headers, follow_redirects=False)


@pytest.fixture
def browser(root: Path) -> TestClient:
    opened = client(root)
    assert opened.get(f"/?token={TOKEN}").status_code == 303
    return opened


def ids(browser: TestClient) -> dict[str, str]:
    """Return the id of each run by its name."""
    return {name: id for id, name in re.findall(r'<a href="/run/(\w+)">([^<]+)</a>', browser.get("/").text)}


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@pytest.mark.long
def test_the_token_is_needed_once_and_then_its_cookie(root: Path) -> None:
    unknown = client(root)
    for path in (
        "/",
        "/states",
        "/assets/page.js",
        "/nothing",
        "/?token=",
        f"/?token={TOKEN}x",
        f"/?token={TOKEN[:-1]}",
    ):
        assert unknown.get(path).status_code == 403, path
    assert unknown.get(f"/?token={TOKEN}&token=x").status_code == 403
    opened = client(root)
    first = opened.get(f"/history?task=a%26b&token={TOKEN}")
    assert (first.status_code, first.headers["location"]) == (303, "/history?task=a%26b"), (
        "the token leaves the address"
    )
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and TOKEN in first.headers["set-cookie"]
    assert opened.get("/").status_code == 200
    other = TestClient(app(root, "another"), base_url=f"http://{HOST}", cookies=dict(opened.cookies))
    assert other.get("/").status_code == 403, "the cookie of another dashboard"
    away = client(root).get(f"http://{HOST}//evil.example/?token={TOKEN}")
    assert away.headers["location"] == "/evil.example/", "no redirect to another host"


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"host": "127.0.0.1:1"}, 200),
        ("GET", {"host": "[::1]:8790"}, 200),
        ("HEAD", {}, 200),
        ("GET", {"host": "evil.example"}, 421),
        ("GET", {"host": "localhost.evil.example:8790"}, 421),
        ("GET", {"host": "127.0.0.1:8790@evil.example"}, 421),
        ("GET", {"host": ""}, 421),
        ("GET", {"origin": f"http://{HOST}"}, 200),
        ("GET", {"origin": "http://localhost:9999"}, 403),
        ("GET", {"origin": "null"}, 403),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ("GET", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("GET", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ("POST", {}, 405),
        ("PUT", {}, 405),
        ("DELETE", {}, 405),
        ("OPTIONS", {"origin": f"http://{HOST}"}, 405),
    ],
)
def test_only_pages_of_the_dashboard_may_ask(
    browser: TestClient, method: str, headers: dict[str, str], status: int
) -> None:
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    answer = browser.request(method, "/", headers=headers | {"cookie": cookie})
    assert answer.status_code == status
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["cache-control"]) == ("nosniff", "no-store")
    assert answer.headers["cross-origin-resource-policy"] == "same-origin" and "server" not in answer.headers


def test_a_second_host_or_origin_and_a_websocket_are_refused(browser: TestClient) -> None:
    cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    hosts = [("cookie", cookie), ("host", HOST), ("host", "evil.example")]
    origins = [("cookie", cookie), ("origin", f"http://{HOST}"), ("origin", "http://evil.example")]
    assert [browser.get("/", headers=headers).status_code for headers in (hosts, origins)] == [421, 403]
    with pytest.raises(WebSocketDisconnect) as closed, browser.websocket_connect("/"):
        raise AssertionError("the dashboard has no websockets")
    assert closed.value.code == 1008


@pytest.mark.parametrize("path", ESCAPES)
def test_no_address_leads_to_a_file(browser: TestClient, path: str) -> None:
    answer = browser.get(f"http://{HOST}{path}")
    assert answer.status_code in (404, 409) and "MLLOG" not in answer.text and "root:" not in answer.text


@pytest.mark.long
def test_pages_show_runs_and_write_nothing(browser: TestClient, root: Path) -> None:
    tags.change(root / "fast", add=["baseline"], note="after the new driver")
    before, of_run = contents(root), ids(browser)
    assert of_run.keys() == {"before", "fast", "slow"}
    page = browser.get(f"/run/{of_run['fast']}").text
    assert '<span class="tag">baseline</span>' in page and "after the new driver" in page
    assert "2 valid" in page and '"training_losses"' in page and "Full report" in page
    assert browser.get("/states").json()[of_run["slow"]][1] in ("", "good")
    history = browser.get("/history").text
    charts = json.loads(history.partition('id="charts">')[2].partition("</script>")[0])
    assert [chart["views"][0]["traces"][0]["customdata"] for chart in charts.values()] == [["before", "fast"]]
    for path in ("/assets/page.js", "/assets/dashboard.js", "/assets/page.css", "/assets/dashboard.css"):
        assert browser.get(path).status_code == 200
    assert contents(root) == before, "the history is kept in memory"


@pytest.mark.long
def test_runs_are_compared(browser: TestClient) -> None:
    of_run = ids(browser)
    page = browser.get(f"/compare?run={of_run['fast']}&run={of_run['slow']}").text
    text = re.sub(r"<[^>]+>|\s+", " ", page)
    assert re.search(r"Verdict +fast is [\d.]+–[\d.]+ % faster than slow", text), text
    assert "Throughput (samples/s), higher is better" in text
    assert re.search(r"What differs.*lora_rank +16 +32", text) and "Means over the valid trials of each run" in text
    assert '"name": "fast"' in page and '"name": "slow"' in page
    alone = browser.get(f"/compare?run={of_run['fast']}&run={of_run['fast']}")
    assert alone.status_code == 409 and "1 run is chosen, but 2 to 8 can be compared" in alone.text


@pytest.mark.long
def test_the_full_report_allows_only_its_own_scripts(browser: TestClient) -> None:
    from helpers.page import unpainted

    with unpainted():
        answer = browser.get(f"/report?run={ids(browser)['fast']}")
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "'self'" not in policy and "script-src 'sha256-" in policy
    assert 'content="runstop' in answer.text and "frame-ancestors 'none'" in policy


@pytest.fixture
def log(root: Path) -> Iterator[Writer]:
    """The log of a run that is training."""
    with under_way(root / "now") as log:
        yield log


@pytest.mark.long
def test_a_run_under_way_is_followed(browser: TestClient, root: Path, log: Writer, clock: Clock) -> None:
    def losses() -> list[float]:
        """Train for ten seconds, then ask as the page does."""
        clock.now_s += 10
        nonlocal samples
        samples += 80
        log.event(mllog.TRAIN_LOSS, 100 / samples, samples_count=samples)
        before = contents(root)
        state = browser.get(f"/live/{id}").json()
        assert contents(root) == before and not state["is_over"], state
        assert [trial["state"] for trial in state["trials"]] == ["training"]
        facts = dict(state["trials"][0]["facts"])
        assert facts["trained"].startswith(f"{samples} samples")
        assert not [value for value in facts.values() if "  " in value], "a page shows two spaces as one"
        (view,) = state["charts"]["training_losses"]["views"]
        assert view["traces"][0]["name"] == "trial 0", "a trial that has not ended is not invalid"
        return list(view["traces"][0]["y"])

    samples, id = 0, ids(browser)["now"]
    page = browser.get(f"/run/{id}").text
    assert f'data-live="/live/{id}"' in page and "No curves yet" in page
    assert losses() == [1.25]
    assert losses() == [1.25, 0.625]
    log.stop(mllog.BLOCK_STOP, samples_count=samples)
    log.finish("success", samples_count=samples)
    assert browser.get(f"/live/{id}").json()["is_over"]


def test_a_port_in_use_and_a_missing_folder_are_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["dashboard", *map(str, words)])
        assert stop.value.code == 2
        return capsys.readouterr().err

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"another program uses this port\n  where: --port {port}" in refused(root, "--port", port)
    assert "this folder does not exist" in refused(tmp_path / "none")
    for port in ("70000", "abc", "-1"):
        assert "is not a port: use 1 to 65535" in refused(root, f"--port={port}")


def test_without_its_packages_the_verb_says_how_to_get_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bench.dashboard.server", raising=False)
    monkeypatch.delattr(dashboard, "server", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["dashboard", str(root)])
    assert stop.value.code == 2 and "pip install 'runstop[dashboard]'" in capsys.readouterr().err
