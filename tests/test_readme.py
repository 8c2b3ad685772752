"""The README does what it says: its Python runs, its files exist, CI runs its test command.

Guards against documentation that has drifted from the code.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run(tiny_folder, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"FOLDER": str(tiny_folder)})
    text, event = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert re.fullmatch(r"1 0 \d+ \d+", event) and text is not None


@pytest.mark.parametrize("name", ["minihisparse", "kernels", "tutorials"])
def test_every_file_is_in_a_table(name):
    """Each source file is named in a table; a second one of a row by its bare name."""
    rows = [line for line in README.splitlines() if line.startswith("|")]
    named = {Path(n).name for row in rows for n in re.findall(r"`([\w./]+\.py)`", row)}
    files = {file.name for file in (ROOT / name).glob("*.py")} - {"__init__.py", "__main__.py"}
    assert files and files <= named, files - named


def test_files_in_the_tables_exist():
    for path in re.findall(r"`([\w]+/[\w./]+\.py)`", README):
        assert (ROOT / path).is_file(), path


def test_commands():
    """The test command that .ci/run looks for, and the demo, are there as it expects them."""
    assert re.search(r"^python -m pip install .* && python -m pytest$", README, flags=re.M)
    assert re.search(
        r"^python -m pip install .* && python -m minihisparse demo$", README, flags=re.M
    )
