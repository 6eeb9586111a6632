"""What travels in the wheel: code and conf/, used from a folder that is no checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contents of the wheel, as pip would lay them out."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return site


def run(installed: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, "-m", *argv], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_wheel_plans_with_a_sites_own_cluster(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "cluster").mkdir(parents=True)
    shipped = (installed / "bench" / "conf" / "cluster" / "dgx1.yaml").read_text()
    (tmp_path / "site" / "cluster" / "mine.yaml").write_text(shipped.replace("name: dgx1", "name: mine"))
    own = ("--config-dir", "site", "task=lora70b", "cluster=mine", "parallel={tp: 4, pp: 1, cp: 2}")
    for argv in (("bench.launch", *own, "launch.dry_run=true"), ("bench", "plan", *own)):
        done = run(installed, tmp_path, *argv)
        assert (done.returncode, done.stderr) == (2, ""), "the image is not set, so that a launch would be refused"
        assert "lora70b-mine" in done.stdout and "8 = dp 1 x tp 4 x pp 1 x cp 2" in done.stdout
    shown = run(installed, tmp_path, "bench.launch", *own, "--cfg", "job")
    assert shown.returncode == 0 and "name: mine" in shown.stdout
    assert run(installed, tmp_path, "jobs.tasks.train", "--help").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["site"], "nothing else was touched"
