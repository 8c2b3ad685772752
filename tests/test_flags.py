"""What a flag's value may be, and what all commands have; what they do with it is elsewhere.

Guards: a list that is read in part; a bound that is off by one, or lets NaN through; a message that
does not show what a list looks like; a command without the flags that `main` reads; a field of
HiSparseConfig without a flag; a command line that loads Numba or matplotlib before it is parsed.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest

from minihisparse import cli
from minihisparse.bench_flags import batch_points
from minihisparse.config import HiSparseConfig
from minihisparse.flags import add_hisparse_flags, counts, layer_sizes, sizes
from minihisparse.trace_flags import buffer_sizes, number

# ---- types of values ----


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (counts, "100,511", [100, 511]),
        (counts, "1", [1]),
        (lambda text: counts(text, least=0), "0,7", [0, 7]),
        (sizes, "0.5,8", [0.5, 8.0]),
        (layer_sizes, "512", 512),
        (layer_sizes, "512,768", (512, 768)),
        (buffer_sizes, "512,0", [512, 0]),  # refused by the command, which knows the limits
        (batch_points, "1:0,128:1024", [(1, 0), (128, 1024)]),
        (number(int), "1", 1),
        (number(float, 0), "0", 0.0),
        (number(float), "1e-9", 1e-9),
    ],
)
def test_values(read, text, expected):
    found = read(text)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("read", "texts", "what"),
    [
        (counts, ["0", "1,0", "1,", "", "many", "1.5"], "numbers like 100,511, each at least 1"),
        (
            lambda text: counts(text, least=0),
            ["-1", "0,-1", "x"],
            "numbers like 100,511, each at least 0",
        ),
        (sizes, ["0", "1,0", "-1", "nan", "1,inf", "1,,2", "x"], "numbers like 0.5,8, above 0"),
        (buffer_sizes, ["512;1024", "", "1.5"], "numbers like 512,1024"),
        (
            batch_points,
            ["1:0,4", "0:1", "1:-1", "1:2:3", ":", "1:"],
            "BATCH:MISSES like 1:0,128:1024, batches at least 1",
        ),
    ],
    ids=["counts", "counts from 0", "sizes", "buffer_sizes", "batch_points"],
)
def test_lists_that_are_refused(read, texts, what):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            read(text)
        assert str(error.value) == f"{text!r} is not a list of {what}"


@pytest.mark.parametrize(
    ("read", "texts", "limit"),
    [
        (number(int), ["0", "-1", "1.5", "x"], "above 0"),
        (number(float), ["0", "nan", "inf", ""], "above 0"),
        (number(float, 0), ["-0.1", "nan", "inf"], "from 0 on"),
    ],
    ids=["int", "float", "float from 0"],
)
def test_numbers_that_are_refused(read, texts, limit):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            read(text)
        assert str(error.value) == f"{text!r} is not a number {limit}"


# ---- what commands have ----


def parsers(of: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, `bench decode` and the like among them."""
    inner = [a for a in of._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield of
    for parser in (parser for action in inner for parser in action.choices.values()):
        yield from parsers(parser)


def test_what_every_command_has():
    found = list(parsers(cli.build_parser()))
    assert len(found) == 11
    for parser in found:
        names = {name for action in parser._actions for name in action.option_strings}
        assert {"--disable-tqdm", "--output-json"} <= names, parser.prog
        assert callable(parser.get_default("run")), parser.prog
        assert parser.allow_abbrev is False, parser.prog


def test_every_field_of_the_config_has_a_flag():
    """As its help says: "the next eight in one"."""
    parser = argparse.ArgumentParser()
    add_hisparse_flags(parser)
    names = [action.dest for action in parser._actions]
    after = names[names.index("hisparse_config") + 1 :]
    assert set(after) == {field.name for field in fields(HiSparseConfig)} and len(after) == 8
    assert set(vars(parser.parse_args([]))[name] for name in after) == {None}  # not given


def test_nothing_heavy_is_loaded():
    """To parse flags; commands load what they need."""
    code = (
        "import sys; from minihisparse import cli; parser = cli.build_parser(); "
        "parser.parse_args(['bench', 'resolve']); parser.parse_args(['trace', 'size', 'x']); "
        "print(*{name.split('.')[0] for name in sys.modules} & {'numba', 'llvmlite', 'matplotlib'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
