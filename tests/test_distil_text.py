"""The text for distilling: fetched whole or not at all, from pinned archives, into one file.

Guards: half a download taken for a whole one; another archive than the pinned one; a broken
download that starts from nothing, or goes on where it must not; an error that names neither package
nor remedy; a registry that the user did not choose; mark-up in the text; tokens that the text does
not have; a file of another tokenizer.
The registries are an HTTP server on 127.0.0.1 and a folder for pip; npm and apt-get are scripts.
"""

import gzip
import hashlib
import io
import json
import os
import re
import struct
import tarfile
import threading
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from minihisparse.tokenizer import Tokenizer
from minihisparse.weights_scripts import distil_readers as readers
from minihisparse.weights_scripts import distil_sources as sources
from minihisparse.weights_scripts import distil_text, download
from minihisparse.weights_scripts.distil_sources import PACKAGES, SOURCES, Package, Source
from minihisparse.weights_scripts.distil_text import default_cache, fetch, prepare, read_text


class Registry(BaseHTTPRequestHandler):
    """Serves `server.files`; `server.cut`: after how many bytes it hangs up, once."""

    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append((self.path, wanted))
        body = server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = 0
        if wanted and server.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if server.cut:
            self.wfile.write(body[start : start + server.cut.pop(0)])
        else:
            self.wfile.write(body[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        server.files, server.asked, server.cut, server.ranges = {}, [], [], True
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def tar_of(files: dict[str, bytes], mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def deb_of(files: dict[str, bytes]) -> bytes:
    content = b"!<arch>\n"
    data = tar_of({f"./{name}": body for name, body in files.items()}, "w:xz")
    for name, part in {"debian-binary": b"2.0\n1", "data.tar.xz": data}.items():
        header = f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n"
        content += header.encode() + part + b"\n" * (len(part) % 2)
    return content


def wheel_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = "words-1.0.dist-info"
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def package(registry: str, version: str, file: str, content: bytes) -> Package:
    return Package(registry, version, file, len(content), sha256(content))


def fake_pip(wheel: bytes, package, version, folder, progress, advice) -> Path:
    (folder / "a.whl").write_bytes(wheel)
    return folder / "a.whl"


@pytest.fixture
def world(registry, monkeypatch, tmp_path, tiny_folder):
    """A package of each registry, their sources, and `prepare` with all of that."""
    wheel = wheel_of({"words/a.txt": b"The quick brown fox\n" * 40})
    tgz = tar_of({"package/b.txt": b"jumps over", "package/c.txt": b"the lazy dog"}, "w:gz")
    deb = deb_of({"usr/share/d.txt": b"sphinx of black quartz\n"})
    links = tmp_path / "links"
    links.mkdir()
    (links / "words-1.0-py3-none-any.whl").write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    registry.files = {"/@x/tar/-/tar-2.0.tgz": tgz, "/debian/pool/main/d/deb.deb": deb}
    registry.packages = {
        "words": package("pypi", "1.0", "words-1.0-py3-none-any.whl", wheel),
        "@x/tar": package("npm", "2.0", "x-tar-2.0.tgz", tgz),
        "deb": package("debian", "1:3-1", "d/deb.deb", deb),
    }
    registry.sources = [
        Source("fox", "words", ("words/*.txt",), readers.plain, "MIT", 700, 4),
        Source("dog", "@x/tar", ("*/b.txt", "*/c.txt"), readers.plain, "MIT", 20),
        Source("sphinx", "deb", ("usr/*",), readers.plain, "CC0", 22, heldout=True),
    ]
    # pip itself takes seconds; it is asked in test_pip. npm and apt-get are there only as scripts.
    monkeypatch.setitem(distil_text.CLIENTS, "pypi", (partial(fake_pip, wheel), ""))
    registry.bin = tmp_path / "bin"
    registry.bin.mkdir()
    monkeypatch.setenv("PATH", str(registry.bin))
    registry.cache, registry.out = tmp_path / "cache", tmp_path / "out" / "text.safetensors"
    registry.prepare = partial(
        prepare,
        registry.out,
        tiny_folder,
        cache=registry.cache,
        npm_registry=registry.url + "/",
        debian_mirror=f"{registry.url}/debian",
        progress=False,
        packages=registry.packages,
        sources=registry.sources,
    )
    return registry


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- the file ----


def test_the_file_holds_the_tokens_of_the_texts(world, tiny_folder):
    header = world.prepare()
    text, tokenizer = read_text(world.out, tiny_folder), Tokenizer.from_folder(tiny_folder)
    fox = ("The quick brown fox\n" * 40)[4:704]
    assert tokenizer.decode(text.train.tolist()) == fox + "jumps over\n\nthe lazy"
    assert tokenizer.decode(text.heldout["sphinx"].tolist()) == "sphinx of black quartz"
    assert text.train.dtype == np.uint16 and list(text.heldout) == ["sphinx"]
    assert text.header == header and names(world.out.parent) == {world.out.name}
    fox_entry, dog, sphinx = header["sources"]
    assert fox_entry["package"] == "pypi:words" and fox_entry["text_sha256"] == sha256(fox.encode())
    assert fox_entry["characters"] == 700 and dog["licence"] == "MIT"
    assert dog["tokens"] + fox_entry["tokens"] == len(text.train)
    assert [entry["use"] for entry in (fox_entry, sphinx)] == ["train", "heldout"]
    assert header["tokenizer"] == sha256((tiny_folder / "tokenizer.json").read_bytes())


def test_a_second_run_fetches_nothing_and_gives_the_same(world, monkeypatch):
    world.prepare()
    before = read_text(world.out)
    world.asked.clear()
    monkeypatch.setattr(distil_text, "client_fetch", lambda *_: pytest.fail("fetched again"))
    assert world.prepare() == before.header and world.asked == []
    np.testing.assert_array_equal(read_text(world.out).train, before.train)


def test_parts_do_not_change_the_text(world, monkeypatch):
    world.prepare()
    before = read_text(world.out).train
    monkeypatch.setattr(distil_text, "PART_CHARS", 30)
    world.prepare()
    np.testing.assert_array_equal(read_text(world.out).train, before)  # one byte, one token


def test_an_error_leaves_the_older_file(world):
    world.prepare()
    before = world.out.read_bytes()
    world.sources[2] = Source("none", "deb", ("usr/none",), readers.plain, "CC0", 22, heldout=True)
    with pytest.raises(ValueError, match=r"deb\.deb has no member usr/none"):
        world.prepare()
    world.sources[2] = Source("long", "deb", ("usr/*",), readers.plain, "CC0", 23)
    with pytest.raises(ValueError, match="long: got 22 characters after 0, expected 23"):
        world.prepare()
    assert world.out.read_bytes() == before and names(world.out.parent) == {world.out.name}


def test_another_tokenizer_or_file_is_refused(world, tmp_path):
    world.prepare()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not those of"):
        read_text(world.out, tmp_path)
    other = tmp_path / "other.safetensors"
    other.write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ValueError, match=r"got format None.*distil prepare"):
        read_text(other)
    other.write_bytes(world.out.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cannot be read"):
        read_text(other)


def test_a_missing_tokenizer_is_said_before_anything_is_fetched(world, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        prepare(world.out, tmp_path, cache=world.cache)
    assert not world.cache.exists()


# ---- fetching from an address ----


def fetch_tar(world) -> Path:
    world.cache.mkdir(exist_ok=True)
    return fetch("@x/tar", world.packages["@x/tar"], world.cache, world.url, progress=False)


def test_a_broken_download_goes_on_where_it_stopped(world):
    content = world.files["/@x/tar/-/tar-2.0.tgz"]
    world.cut = [100]
    assert fetch_tar(world).read_bytes() == content
    assert [wanted for _, wanted in world.asked] == [None, "bytes=100-"]


def test_what_an_interrupted_run_left_is_continued(world):
    content = world.files["/@x/tar/-/tar-2.0.tgz"]
    world.cut = [50, 10, 0]
    with pytest.raises(RuntimeError, match=r"npm:@x/tar 2\.0(.|\n)*60 of(.|\n)*sha256") as error:
        fetch_tar(world)
    assert f"{world.url}/@x/tar/-/tar-2.0.tgz" in str(error.value)
    assert names(world.cache) == {"x-tar-2.0.tgz.part"}
    world.asked.clear()
    assert fetch_tar(world).read_bytes() == content
    assert [wanted for _, wanted in world.asked] == ["bytes=60-"]
    assert names(world.cache) == {"x-tar-2.0.tgz"}


def test_a_server_that_cannot_go_on_sends_all(world):
    world.cache.mkdir()
    (world.cache / "x-tar-2.0.tgz.part").write_bytes(b"rubbish")
    world.ranges = False
    assert fetch_tar(world).read_bytes() == world.files["/@x/tar/-/tar-2.0.tgz"]


def test_another_file_is_refused_and_thrown_away(world):
    right = world.files["/@x/tar/-/tar-2.0.tgz"]
    for wrong, message in [
        (right[:-1] + b"!", f"got sha256 [0-9a-f]+, expected {sha256(right)}"),
        (right + b"!", f"got {len(right) + 1} bytes, expected {len(right)}"),
    ]:
        world.files["/@x/tar/-/tar-2.0.tgz"] = wrong
        with pytest.raises(ValueError, match=rf"{message}.*npm:@x/tar 2\.0.*deleted"):
            fetch_tar(world)
        assert names(world.cache) == set()


def test_a_part_longer_than_the_served_file_is_dropped(world):
    right = world.files["/@x/tar/-/tar-2.0.tgz"]
    world.files["/@x/tar/-/tar-2.0.tgz"] = right[:20]
    world.cache.mkdir()
    (world.cache / "x-tar-2.0.tgz.part").write_bytes(right[:30])
    with pytest.raises(RuntimeError, match="HTTP 416"):
        fetch_tar(world)
    assert [wanted for _, wanted in world.asked] == ["bytes=30-", None, "bytes=20-"]
    world.files["/@x/tar/-/tar-2.0.tgz"] = right
    assert fetch_tar(world).read_bytes() == right


def test_a_wrong_file_in_the_cache_is_named(world):
    world.cache.mkdir()
    (world.cache / "x-tar-2.0.tgz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"x-tar-2\.0\.tgz: got 1 bytes.*@x/tar 2\.0; delete it"):
        fetch_tar(world)


def test_debian_from_a_mirror(world):
    content = world.files.pop("/debian/pool/main/d/deb.deb")
    with pytest.raises(RuntimeError) as error:
        world.prepare()
    for word in ("debian:deb 1:3-1", f"{world.url}/debian/pool/main/d/deb.deb", "HTTP 404"):
        assert word in str(error.value)
    assert [path for path, _ in world.asked].count("/debian/pool/main/d/deb.deb") == 1
    world.files["/debian/pool/main/d/deb.deb"] = content
    world.prepare()
    assert (world.cache / "deb.deb").read_bytes() == content


def test_no_network(world, monkeypatch):
    monkeypatch.setattr(world, "url", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"could not download npm:@x/tar(.|\n)*refused"):
        fetch_tar(world)
    assert names(world.cache) == set()
    monkeypatch.setattr(world, "url", "mirror")
    with pytest.raises(RuntimeError, match=r"could not download npm:@x/tar(.|\n)*'mirror/@x/tar/"):
        fetch_tar(world)


# ---- fetching by a client ----


@pytest.fixture(params=["npm", "apt-get"])
def client(world, request):
    """`world` without addresses, and a script in the place of a client: `client.does(lines)`."""
    if os.name != "posix":
        pytest.skip("the clients are shell scripts")
    client, world.cache = request.param, world.cache / "a b"
    world.cache.mkdir(parents=True)
    world.client, world.name = client, {"npm": "@x/tar", "apt-get": "deb"}[client]
    world.package = world.packages[world.name]
    world.file = Path(world.package.file).name
    served = world.files[
        "/@x/tar/-/tar-2.0.tgz" if client == "npm" else "/debian/pool/main/d/deb.deb"
    ]
    (world.bin / "served").write_bytes(served)

    def does(*lines: str, served: str = f"{world.bin}/served", first: str = "#!/bin/sh") -> None:
        text = "\n".join([first, *lines]).replace("SERVED", served)
        (world.bin / client).write_text(text + "\n")
        (world.bin / client).chmod(0o755)

    world.does = does
    world.fetch = partial(fetch, world.name, world.package, world.cache, progress=False)
    return world


GIVES = {"npm": "/bin/cp 'SERVED' x-2.tgz", "apt-get": "/bin/cp 'SERVED' deb_1%3a3-1_all.deb"}


def test_a_client_is_asked_by_name_and_version(client, monkeypatch, capfd):
    log = client.bin / "log"
    client.does(
        f'echo "$*" > {log}; pwd >> {log}; echo "$npm_config_registry" >> {log}',
        GIVES[client.client],
        "echo done",
    )
    monkeypatch.setenv("npm_config_registry", "chosen")
    path = client.fetch()
    asked, folder, chosen = log.read_text().splitlines()
    assert asked in (
        "pack --ignore-scripts --loglevel=error @x/tar@2.0",
        "download -qq deb=1:3-1",
    )
    assert Path(folder).parent == client.cache and chosen == "chosen"
    assert path == client.cache / client.file and sha256(path.read_bytes()) == client.package.sha256
    assert names(client.cache) == {client.file} and client.asked == []  # nothing over HTTP
    assert capfd.readouterr() == ("", "")
    path.unlink()
    fetch(client.name, client.package, client.cache)
    assert capfd.readouterr() == ("", "done\n")  # stdout is for results


def test_with_an_address_no_client_is_needed(client):
    assert names(client.bin) == {"served"}
    client.prepare(cache=client.cache)
    assert len(client.asked) == 2 and len(names(client.cache)) == 3


def refused(client, kind, *words: str) -> None:
    with pytest.raises(kind) as error:
        client.fetch()
    install = {"npm": "Install npm", "apt-get": "Install apt-get"}[client.client]
    option = {"npm": "--npm-registry URL", "apt-get": "--debian-mirror URL"}[client.client]
    pin = client.package
    words += (client.name, pin.version, client.file, str(pin.size), pin.sha256, install, option)
    for word in (*words, f"into {client.cache} by other means"):
        assert word in str(error.value)
    assert names(client.cache) == set() and client.asked == []


def test_a_missing_client_is_named(client):
    refused(client, RuntimeError, f"{client.client} is not installed")
    client.does(first="#!/no/such/shell")
    refused(client, RuntimeError, "No such file")


def test_a_failing_client_is_quoted(client):
    client.does(GIVES[client.client], "printf 'no such version \\377' >&2", "exit 7")
    refused(client, RuntimeError, "(exit code 7):\nno such version", f"{client.client} could not")


def test_a_wrong_file_from_a_client_is_refused(client):
    wrong = client.bin / "wrong"
    right = (client.bin / "served").read_bytes()
    wrong.write_bytes(right[:-1] + b"!")
    client.does(GIVES[client.client], served=str(wrong))
    refused(client, ValueError, f"got sha256 {sha256(wrong.read_bytes())}")
    wrong.write_bytes(right[:-1])
    refused(client, ValueError, f"got {len(right) - 1} bytes")
    client.does("echo odd >&2")
    refused(client, RuntimeError, "it left 0 files", "odd")


def test_an_interrupted_client_leaves_nothing(client, monkeypatch):
    client.does(GIVES[client.client])

    def interrupted(command, cwd, **_):
        (cwd / "x.tgz").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.fetch()
    assert names(client.cache) == set()
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(client.bin))
    assert client.fetch().name == client.file


def test_no_registry_is_named():
    for module in (distil_text, download, sources, readers):
        assert "://" not in Path(module.__file__).read_text(), module.__name__


def test_pip(world, monkeypatch, tmp_path):
    advice = "Check pip's settings"
    monkeypatch.setitem(distil_text.CLIENTS, "pypi", (download.pip_download, advice))
    words = world.packages["words"]
    world.cache.mkdir()
    path = fetch("words", words, world.cache, progress=False)
    assert sha256(path.read_bytes()) == words.sha256 and names(world.cache) == {words.file}
    path.unlink()
    with pytest.raises(ValueError, match=r"got sha256 .*, expected 000; it should be words"):
        fetch("words", replace(words, sha256="000"), world.cache, progress=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(world.cache))
    message = rf"pip could not download words==1\.0(.|\n)*{advice}, or put {words.file}.*by other"
    with pytest.raises(RuntimeError, match=message):
        fetch("words", words, world.cache, progress=False)
    assert names(world.cache) == set()


def test_default_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "minihisparse/distil-archives"


# ---- from archives to text ----


def read(reader, *contents: bytes, name="a") -> list[str]:
    return list(reader(iter([(name, content) for content in contents])))


def test_a_broken_archive_is_named(tmp_path):
    for name in ("a.tgz", "a.whl", "a.deb"):
        (tmp_path / name).write_bytes(b"!<arch>\nnothing")
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))):
            list(readers.members(tmp_path / name, ["*"]))


def test_html_becomes_what_a_reader_sees():
    page = (
        """<html><head><title>x</title></head><body><div id="mw-content-text" class="y">
    <div class="t-navbar"><div>menu</div> more menu</div><h3>Sort&nbsp;it</h3><script>no</script>
    <p>Some  <b>bold</b>
    text &lt;int&gt;.</p><pre>int  main() {
      return 0;
    }</pre></div>"""
        + "<p>end</p>" * 100
    )
    (text,) = read(readers.web_pages, page.encode())
    assert text.startswith("Sort it\n\nSome bold text <int>.\n\nint  main() {\n      return 0;\n")
    assert "menu" not in text and "no" not in text.split()


def test_sword_blocks():
    blocks = [zlib.compress(text) for text in (b"<p>one</p>", b"<hi>two</hi>")]
    index = struct.pack("<6I", 0, len(blocks[0]), 10, len(blocks[0]), len(blocks[1]), 12)
    found = [("x/ot.czs", index), ("x/ot.czz", b"".join(blocks))]
    assert list(readers.sword(iter(found))) == ["one", "two"]


def test_r_character_vectors():
    def book(*lines: str) -> bytes:
        body = b"X\n" + struct.pack(">3i", 3, 1, 2) + struct.pack(">2i", 16, len(lines))
        body += b"".join(struct.pack(">2i", 0x40009, len(s)) + s.encode() for s in lines)
        return struct.pack(">i", len(body)) + zlib.compress(body)

    database = book("ONE", "", "a line") + book("TWO", "b")
    assert read(partial(readers.rdata, "TWO"), database) == ["TWO\nb"]
    assert read(partial(readers.rdata, "ONE"), database) == ["ONE\n\na line"]
    assert read(partial(readers.rdata, "THREE"), database) == []


def test_other_readers():
    service = {"operations": {"Put": {"documentation": "<p>Puts <b>it</b>.</p>" + "word " * 20}}}
    (text,) = read(readers.service_docs, gzip.compress(json.dumps(service).encode()))
    assert text.startswith("Put\nPuts it. word word")
    profile = {"Land": {"Area": {"text": "1 <b>km</b>"}, "Borders": {"text": None}}}
    assert read(readers.country_profiles, json.dumps(profile).encode()) == ["\nLand\nArea: 1 km"]
    assert read(readers.plays, b"# ACT\n**BOB**  \nHello _aside_ some_name  \n") == [
        "ACT\nBOB\nHello aside some_name\n"
    ]
    assert read(readers.bible, b'x = """In the [great] beginning"""') == ["In the great beginning"]
    info = (
        b"head\n\x1f\nFile: a, Node: b\n\n1.2 Title\n---\n\n12.a/2\n     Text\n* Menu:\n* a:: b\n"
    )
    assert read(readers.info_manual, gzip.compress(info)) == [
        "head\n\n1.2 Title\n---\n\n     Text\n"
    ]
    xml = b"<x><glossentry><glossterm>foo</glossterm>\n<abbrev>n.</abbrev><!-- no --><revhistory>no"
    xml += b"</revhistory><glossdef><para>A\n <glossterm>bar</glossterm>.</para></glossdef>"
    assert read(readers.glossary, xml) == ["foo\n\nn.\n\nA bar."]
    body = b"x = 1\n" * 100
    assert len(read(readers.code, body)) == 1
    assert read(readers.code, body, name="a/tests/b.py") == []
    assert read(readers.code, body + b"y" * 400) == []


def test_control_codes_and_rulers_go():
    assert readers.readable("a\x1b[0mb\ufffd  \n\n\n\n\n" + "-" * 70) == "a[0mb\n\n\n----"


def test_the_list_is_sound():
    assert {source.package for source in SOURCES} == set(PACKAGES)
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    assert all(re.fullmatch("[0-9a-f]{64}", package.sha256) for package in PACKAGES.values())
    assert len({Path(package.file).name for package in PACKAGES.values()}) == len(PACKAGES)
    debs = [package.file for package in PACKAGES.values() if package.registry == "debian"]
    assert all(file.endswith("_all.deb") for file in debs)  # the same file on every machine
    assert sum(source.num_chars for source in SOURCES if not source.heldout) > 40e6
    assert sum(source.heldout for source in SOURCES) == 9
    works = [(s.package, str(s.read)) for s in SOURCES if s.heldout]  # a novel is a reader's title
    assert not set(works) & {(s.package, str(s.read)) for s in SOURCES if not s.heldout}


@pytest.mark.slow
@pytest.mark.skipif("MINIHISPARSE_DISTIL_CACHE" not in os.environ, reason="needs the archives")
def test_the_real_archives_give_the_texts():
    for source in SOURCES:
        path = Path(
            os.environ["MINIHISPARSE_DISTIL_CACHE"], Path(PACKAGES[source.package].file).name
        )
        assert len(sources.text_of(source, path)) == source.num_chars
