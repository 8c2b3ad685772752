"""How archives become text: files out of .whl, .tgz and .deb, and mark-up out of the files.

Readers take (name, content) of the files of one source and yield documents: what people read,
without tags, navigation, tables of contents and control codes. Everything keeps the order of the
archive, so that pinned archives give the same text on every machine.
This file does not know which archives there are (distil_sources.py).
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import json
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

Members = Iterator[tuple[str, bytes]]

# ---- archives ----


def members(path: Path, patterns: Sequence[str]) -> Members:
    """Yield (name, content) of the archive's files that match, in its order.

    path: a .whl, .tgz or .deb.

    Raises ValueError: the archive is broken, or none of its files match.
    """
    missing = set(patterns)
    try:
        for name, read in _open(path):
            matched = {pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)}
            if matched:
                missing -= matched
                yield name, read()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if missing:
        raise ValueError(f"{path} has no member {', '.join(sorted(missing))}")


def _open(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, partial(archive.read, name)
        return
    file = io.BytesIO(_data_of_deb(path)) if path.suffix == ".deb" else open(path, "rb")
    with file, tarfile.open(fileobj=file) as archive:
        for entry in archive:
            if entry.isfile():
                yield entry.name.removeprefix("./"), archive.extractfile(entry).read


def _data_of_deb(path: Path) -> bytes:
    """Return data.tar.* of a .deb, an `ar` archive: headers of 60 bytes, even places."""
    content = path.read_bytes()
    at = len(b"!<arch>\n")
    while at + 60 <= len(content):
        name, size = content[at : at + 16].decode(), int(content[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return content[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError(f"{path} is no Debian package: it has no data.tar")


# ---- from a member to text ----


def plain(found: Members) -> Iterator[str]:
    """Files that are text already."""
    for _, content in found:
        yield content.decode("utf-8", "replace").replace("\r\n", "\n")


def code(found: Members) -> Iterator[str]:
    """Source files, without tests and without generated tables."""
    for name, content in found:
        text = content.decode("utf-8", "replace").replace("\r\n", "\n")
        if len(text) > 500 and not re.search(
            r"(^|/)(tests?|testing|benchmarks?|locale)/|_test\.cc$", name
        ):
            if max(map(len, text.split("\n"))) < 400:
                yield text


def plays(found: Members) -> Iterator[str]:
    """Markdown with emphasis for names and stage directions."""
    for text in plain(found):
        yield re.sub(r" *\n", "\n", re.sub(r"\*\*|^#+ |\b_|_\b", "", text, flags=re.MULTILINE))


def bible(found: Members) -> Iterator[str]:
    """A Python file whose longest string is the text; brackets mark words added in translation."""
    for text in plain(found):
        yield re.sub(r"[\[\]]", "", max(text.split('"""'), key=len))


def rdata(title: str, found: Members) -> Iterator[str]:
    """R's lazy-load database: zlib streams after their length; a book is a vector of lines."""
    for _, content in found:
        while content:
            stream = zlib.decompressobj()
            lines = _character_vector(stream.decompress(content[4:]))
            content = stream.unused_data
            if lines[:1] == [title]:
                yield "\n".join(lines)


def _character_vector(serialized: bytes) -> list[str]:
    """Strings of R's serialisation of a character vector (type 16): each has flags and a length."""
    start = serialized.find(struct.pack(">i", 16))
    if start < 0:
        return []
    (count,) = struct.unpack_from(">i", serialized, start + 4)
    at, lines = start + 8, []
    for _ in range(count):
        (size,) = struct.unpack_from(">i", serialized, at + 4)
        at += 8
        lines.append(serialized[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return lines


def sword(found: Members) -> Iterator[str]:
    """SWORD's compressed commentaries: an index (.czs) of zlib blocks in a file (.czz)."""
    parts = {name[-3:]: content for name, content in found if "/ot." in name}
    for offset, size, _ in struct.iter_unpack("<III", parts["czs"]):
        block = zlib.decompress(parts["czz"][offset : offset + size])
        yield strip_tags(block.decode("utf-8", "replace").replace("\0", "\n"))


def web_pages(found: Members) -> Iterator[str]:
    """The article of a MediaWiki page."""
    for text in plain(found):
        text = strip_tags(text.partition('id="mw-content-text"')[2].partition(">")[2])
        text = text.partition("Retrieved from")[0]
        if len(text) > 500:
            yield text


def glossary(found: Members) -> Iterator[str]:
    """DocBook: entries, without their revision history."""
    for _, content in found:
        text = content.decode("latin-1")
        text = re.sub(r"<revhistory>.*?</revhistory>|<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"</glossterm>\s*(?=<abbrev>|<glossdef>)", "</glossterm><br/>", text)
        yield strip_tags(text[text.index("<glossentry") :])


def info_manual(found: Members) -> Iterator[str]:
    """GNU Info: no node lines, no paragraph numbers, no tables of contents."""
    for _, content in found:
        text = gzip.decompress(content).decode("utf-8", "replace")
        text = re.sub(r"\x1f\n.*\n|^\d+(\.\w+)?(/\d)?$\n", "", text, flags=re.MULTILINE)
        yield re.sub(r"^\* (Menu:|.*::.*)\n", "", text, flags=re.MULTILINE)


def service_docs(found: Members) -> Iterator[str]:
    """botocore's descriptions of a service: name and documentation of operations and shapes."""
    for _, content in found:
        service, seen = json.loads(gzip.decompress(content)), set()
        for name, documentation in _documentation("", service):
            text = re.sub(r"\s+", " ", strip_tags(documentation)).strip()
            if len(text) >= 80 and text not in seen:
                seen.add(text)
                yield f"{name}\n{text}"


def _documentation(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "documentation" and isinstance(inner, str):
                yield name, inner
            else:
                plain_name = name if key in ("members", "member", "operations", "shapes") else key
                yield from _documentation(plain_name, inner)


def country_profiles(found: Members) -> Iterator[str]:
    """The Factbook's nested JSON as headings and sentences."""
    for _, content in found:
        yield "\n".join(_profile(json.loads(content)))


def _profile(value: Any) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict) and set(inner) == {"text"}:
            if inner["text"]:
                yield f"{key}: {strip_tags(inner['text'])}"
        elif isinstance(inner, dict):
            yield f"\n{key}"
            yield from _profile(inner)
        elif isinstance(inner, str):
            yield f"{key}: {strip_tags(inner)}"


class _Text(HTMLParser):
    """Collects what a reader sees: no navigation, and line ends only where the mark-up has them."""

    HIDDEN = {"script", "style", "head"}
    AS_IT_IS = {"pre", "programlisting", "screen", "literallayout"}
    BLOCKS = set("p div br tr li ul ol dl dt dd table h1 h2 h3 h4 h5 h6".split())  # HTML
    BLOCKS |= set("para glossentry glossdef listitem title row note l lg".split())  # XML

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hiding = ""  # the tag that began what is hidden
        self.depth = 0  # of that tag in itself
        self.as_it_is = 0

    def handle_starttag(self, tag, attrs):
        if not self.hiding and (tag in self.HIDDEN or ("class", "t-navbar") in attrs):
            self.hiding = tag
        self.depth += tag == self.hiding
        self.as_it_is += tag in self.AS_IT_IS
        self._end_line(tag, in_line=" " if tag in ("td", "entry") else "")

    def handle_endtag(self, tag):
        self.depth -= tag == self.hiding
        if not self.depth:
            self.hiding = ""
        self.as_it_is -= tag in self.AS_IT_IS
        self._end_line(tag, in_line="")

    def _end_line(self, tag, in_line):
        ends = tag in self.BLOCKS or tag in self.AS_IT_IS
        if ends or in_line:
            self.parts.append("\n" if ends else in_line)

    def handle_data(self, data):
        if self.hiding:
            return
        if not self.as_it_is:
            data = re.sub(r"\s+", " ", data)
            if "".join(self.parts[-1:]).endswith(("\n", " ")):
                data = data.lstrip(" ")
        self.parts.append(data)


def strip_tags(text: str) -> str:
    """Text of HTML or XML: entities resolved, blanks and empty lines squeezed."""
    parser = _Text()
    parser.feed(text)
    parser.close()
    text = re.sub(r"[ \xa0]+\n", "\n", "".join(parser.parts).replace("\xa0", " "))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def readable(text: str) -> str:
    """Without control codes, blanks at line ends and long rows of one character."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufeff\ufffd]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", re.sub(r"\n{4,}", "\n\n\n", text))
    return re.sub(r"([^\w\s])\1{15,}", r"\1\1\1\1", text).strip()
