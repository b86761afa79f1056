"""docs/fidelity/: ``python docs/make_fidelity.py``: all figures (bullet-sim figures), their page, pictures and data; ten minutes
on two cores, less from the cache."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "fidelity"


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "figures"
        words = ["figures", "--dpi", "110", "--out", str(made), *sys.argv[1:]]
        done = subprocess.run([sys.executable, "-c", "from bullet.cli.sim import main; main()", *words], check=False)
        if done.returncode:
            return done.returncode
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        for path in sorted(made.iterdir()):
            if path.suffix in (".png", ".csv"):
                shutil.copyfile(path, FOLDER / path.name)
        text = (made / "fidelity.md").read_text(encoding="utf-8")
        text = re.sub(r", \[\w+\.pdf\]\(\w+\.pdf\)", "", text)  # print quality is for who makes them
        (FOLDER / "README.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
