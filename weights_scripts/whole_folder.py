"""A folder that is whole or absent, however the run that makes it ends.

The work is done in a hidden folder beside it, which only this run knows; a rename puts the result
in place. A marker file inside says what it is, so a repeated run has nothing to do, and a folder
without it belongs to somebody else and is refused.

Source: rename(2), which is atomic within a file system and never replaces a folder with content.
This file does not know what is in the folder. It has no lock: of two runs at once both do the
work, and the second to finish uses the folder of the first.
"""

import glob
import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

MARKER = "minihisparse_source.json"
STALE_SECONDS = 24 * 3600.0  # no run takes a day


def is_whole(out: Path, wanted: dict[str, str]) -> bool:
    """True: `out` is what is wanted. False: it is absent or empty. ValueError: it is in the way."""
    if not out.exists():
        return False
    marker = out / MARKER
    if not marker.exists():
        if any(out.iterdir()):
            raise ValueError(
                f"{out} is not empty and has no {MARKER}, so it is not ours to fill; "
                "nothing was changed. Name another folder with --out"
            )
        return False
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError:  # somebody edited it
        found = {}
    if not wanted.items() <= found.items():
        raise ValueError(
            f"{out} holds {found}, but {wanted} is wanted; nothing was changed. "
            "Name another folder with --out, or delete this one"
        )
    return True


def workspace(out: Path) -> TemporaryDirectory:
    """Return an empty folder beside `out` (a rename cannot cross file systems), for a `with`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.minihisparse-"
    for left in out.parent.glob(glob.escape(prefix) + "*"):  # by a killed run, or one at work
        with suppress(FileNotFoundError):  # that one has just ended
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    return TemporaryDirectory(prefix=prefix, dir=out.parent, ignore_cleanup_errors=True)


def put_in_place(folder: Path, out: Path, source: dict[str, str]) -> None:
    """Mark a finished `folder` and make it `out`, unless another run was faster."""
    text = json.dumps(source, indent=2) + "\n"
    (folder / MARKER).write_text(text, encoding="utf-8")
    try:
        folder.rename(out)
    except OSError:
        if not is_whole(out, source):
            raise
