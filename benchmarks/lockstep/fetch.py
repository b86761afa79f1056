"""Published sources by pip, unpacked: sdists without running anything of theirs, wheels where there is no sdist.

pip asks an sdist for its metadata before it keeps it, which would run the project's own build, compilers and all. A stand-in for
``setuptools`` answers instead, from the PKG-INFO that the sdist carries.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from bullet.errors import BulletError

BACKEND = '''
import os
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    lines = open("PKG-INFO").read().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line.startswith(("Name: ", "Version: ")))
    folder = f"{fields['Name']}-{fields['Version']}.dist-info"
    os.makedirs(os.path.join(directory, folder))
    with open(os.path.join(directory, folder, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\n" + "".join(f"{k}: {v}\\n" for k, v in fields.items()))
    return folder
'''


class FetchError(BulletError):
    """pip could not get it; one line."""


def fetch(name: str, version: str, folder: Path, *, wheel: bool = False) -> Path:
    """The folder that holds the package ``name`` of a release; downloaded once."""
    target = folder / f"{name}-{version}"
    if (target / name).is_dir():
        return target
    stand_in = folder / "backend" / "setuptools"
    stand_in.mkdir(parents=True, exist_ok=True)
    (stand_in / "__init__.py").write_text("")
    (stand_in / "build_meta.py").write_text(BACKEND)
    how = ["--only-binary", ":all:"] if wheel else ["--no-binary", ":all:", "--no-build-isolation"]
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", *how,
                           "--dest", str(folder), f"{name}=={version}"], capture_output=True, text=True, check=False,
                          env={**os.environ, **({} if wheel else {"PYTHONPATH": str(stand_in.parent.absolute())})})
    found = sorted(folder.glob(f"{name}-{version}*.whl" if wheel else f"{name}-{version}.tar.gz"))
    if done.returncode or not found:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["nothing was downloaded"]
        raise FetchError(f"pip download {name}=={version}: {said[-1][:200]}")
    if wheel:
        with zipfile.ZipFile(found[0]) as archive:
            archive.extractall(target, [member for member in archive.namelist() if member.startswith(f"{name}/")])
    else:
        with tarfile.open(found[0]) as archive:
            wanted = [m for m in archive.getmembers() if m.name.startswith(f"{name}-{version}/{name}/") and m.isfile()]
            archive.extractall(folder, wanted, filter="data")
    return target
