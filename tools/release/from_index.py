"""Install one distribution by name from a local index, alone, and run its README as printed.

    python tools/release/from_index.py DIST NAME README [OPTION OF PIP ...]

DIST holds the built files, NAME is the distribution. What the distribution needs is installed
first, from the usual index; the distribution itself comes from the local one only, with the
command that its README prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL = re.compile(r"^(?:python -m )?pip install (?P<rest>.+)$", re.MULTILINE)
STARTUP_S = 30.0


def printed_install(readme: str, name: str) -> list[str]:
    """Return the arguments of the first `pip install` in a README.

    Raises:
        SystemExit: there is none, or it does not install the distribution by name.
    """
    found = INSTALL.search(readme)
    arguments = shlex.split(found["rest"], comments=True) if found else []
    if name not in arguments:
        sys.exit(f"from_index: the README's first pip install is {arguments}, not that of {name}")
    return arguments


@contextlib.contextmanager
def index(dist: Path) -> Iterator[str]:
    """Serve a folder as a package index on this machine; yields its address.

    Raises:
        SystemExit: the server did not answer in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pypiserver", "run", "--port", str(port)]
    command += ["--interface", "127.0.0.1", "--disable-fallback", str(dist)]
    address = f"http://127.0.0.1:{port}/simple/"
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + STARTUP_S
        while True:
            try:
                with urllib.request.urlopen(address, timeout=5):
                    break
            except urllib.error.URLError:
                if time.monotonic() > end or server.poll() is not None:
                    sys.exit("from_index: the local index did not start")
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def requirements(wheel: Path, python: Path) -> list[str]:
    """Return what a wheel requires, without its extras."""
    code = (
        "import sys, zipfile, email.parser\n"
        "archive = zipfile.ZipFile(sys.argv[1])\n"
        "path, = (one for one in archive.namelist() if one.endswith('.dist-info/METADATA'))\n"
        "fields = email.parser.Parser().parsestr(archive.read(path).decode())\n"
        "print('\\n'.join(fields.get_all('Requires-Dist') or []))"
    )
    told = subprocess.run([python, "-c", code, wheel], capture_output=True, text=True, check=True)
    return [line for line in told.stdout.splitlines() if "extra ==" not in line]


def install_and_run(dist: Path, name: str, readme: Path, options: Sequence[str]) -> None:
    """Install a distribution and run the code of its README."""
    text = readme.read_text(encoding="utf-8")
    arguments = printed_install(text, name)
    (wheel,) = dist.rglob(f"{name.replace('-', '_')}-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        empty, page = Path(folder, "empty"), Path(folder, "page")
        venv.create(empty, with_pip=True)
        python = empty / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        needed = requirements(wheel, python)
        subprocess.run([*pip, *options, *needed], check=True)
        with index(dist) as address:
            kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
            local = {**kept, "PIP_INDEX_URL": address, "PIP_CONFIG_FILE": os.devnull}
            subprocess.run([*pip, *arguments], check=True, env=local)
        print(f"from_index: pip install {' '.join(arguments)}: installed from the local index")
        subprocess.run([*pip, "pytest>=8", "sybil"], check=True)
        page.mkdir()
        for source in (readme, ROOT / "conftest.py"):
            shutil.copy(source, page)
        run = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "README.md"]
        subprocess.run(run, check=True, cwd=page)
        print(f"from_index: the README of {name} runs as printed")


if __name__ == "__main__":
    install_and_run(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
