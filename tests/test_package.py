"""What is installed from a wheel is whole: it is built from the sdist, and its commands run outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "bullet", "profiles")
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """``build_sdist`` or ``build_wheel`` of a source tree, by this environment's setuptools: no network."""
    name = run(sys.executable, "-c", f"import sys; from setuptools import build_meta; print(build_meta.{kind}(sys.argv[1]))", out,
               cwd=source).splitlines()[-1]
    return out / name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "source").mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / "source")
    sdist = build("build_sdist", folder / "source", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return build("build_wheel", unpacked, folder)


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    profiles = {f"bullet/profiles/data/{path.relative_to(ROOT / 'profiles')}" for path in (ROOT / "profiles").rglob("*")
                if path.is_file()}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "bullet").rglob("*")
               if path.is_file() and "__pycache__" not in path.parts}
    assert "bullet/profiles/data/h100/llama-3.1-8b/fit.json" in profiles
    assert {"bullet/py.typed", "bullet/workload/data/arxiv.npz"} < package
    assert (profiles | package) - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_its_commands_run_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)
    # Its dependencies are this environment's: a folder that a .pth file names brings none of its own .pth files, so that the
    # repository, which is installed there for editing, stays out.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    assert Path(run(python, "-c", "import bullet; print(bullet.__file__)", cwd=tmp_path).strip()).is_relative_to(tmp_path)
    shown = run(python.with_name("bullet-profile"), "show", "--gpu", "h100", cwd=tmp_path)
    assert "fitted" in shown
    table = run(python.with_name("bullet-sim"), "compare", "--trace", "azure-code", "--rate", "5", "--num-requests", "60",
                "--policies", "bullet,vllm-1024", "--out", "demo", "--quiet", cwd=tmp_path)
    assert "simulated on A100-80GB (device model: fitted" in table
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {
        "bullet", "vllm-1024", "comparison.csv", "comparison.json", "comparison.txt", "plots", "report.html"}
    measured = run(python.with_name("bullet-sim"), "run", "--gpu", "rtx4090", "--device-model", "table", "--policy", "vllm-1024",
                   "--num-requests", "20", "--out", "table", "--quiet", "--no-report", cwd=tmp_path)
    assert "simulated on RTX4090 (device model: table: " in measured
