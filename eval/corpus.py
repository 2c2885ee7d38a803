"""Plain English texts from Debian packages, for suites that need real documents.

    python -m mmkv.eval.corpus FOLDER [--from DEBS]

writes FOLDER/novels, FOLDER/handbook and FOLDER/faq, one `.txt` file a chapter or section with a
paragraph or heading a line, and FOLDER/SOURCES.txt with versions and licences. The texts differ a
little between releases of Debian.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer

from mmkv.terminal import check_place, show_errors

SHORTEST = 12_000  # characters; shorter texts are not written
SOURCES = "SOURCES.txt"
# Pairs of a text's name and its paragraphs, read from the folder of an extracted package.
Texts = Iterator[tuple[str, list[str]]]


def novels(package: Path) -> Texts:
    """Yield the chapters of Jane Austen's novels."""
    (database,) = package.rglob("data/Rdata.rdb")
    for lines in _r_texts(database.read_bytes()):
        title, number = _plain(lines[0]).lower().replace(" ", "-"), 0
        chapter: list[str] = []
        # Each volume begins again with chapter 1, so chapters are counted here.
        for paragraph in "\n".join(lines).split("\n\n"):
            text = _plain(paragraph).replace("_", "")
            if re.fullmatch(r"chapter \w+\.?", text, re.IGNORECASE):
                if number:
                    yield f"{title}-{number:02}", chapter
                number, chapter = number + 1, []
            elif len(text.split()) > 2 and not re.match(r"[\[*]|volume ", text, re.IGNORECASE):
                chapter.append(text)
        yield f"{title}-{number:02}", chapter


def _r_texts(data: bytes) -> Iterator[list[str]]:
    """Yield the character vectors of an R lazy-load database ("R Internals", section 1.8).

    Each is four bytes of length and a zlib stream: a header, a vector's type and length, and for
    each string its flags, length (-1: missing) and bytes, all big-endian.
    """
    while data:
        stream = zlib.decompressobj()
        payload, data = stream.decompress(data[4:]), stream.unused_data
        offset = 18 + struct.unpack_from(">I", payload, 14)[0]
        kind, count = struct.unpack_from(">II", payload, offset)
        if not payload.startswith(b"X\n\0\0\0\3") or kind & 255 != 16:
            raise ValueError("the novels are not stored as R's texts of version 3")
        offset, lines = offset + 8, list[str]()
        for _ in range(count):
            size = max(0, struct.unpack_from(">i", payload, offset + 4)[0])
            offset += 8 + size
            lines.append(payload[offset - size : offset].decode())
        yield lines


def handbook(package: Path) -> Texts:
    """Yield sections of the Debian Administrator's Handbook; a short one is joined to the next."""
    (folder,) = package.rglob("html/en-US")
    first = page = "index.html"
    chapter, name, text = "", "", list[str]()
    while page:
        parsed = _Page(folder / page)
        parent = parsed.links.get("up", first)
        if chapter != (chapter := page if parent == first else parent):
            name, text = "", []
        name, text = name or page.removesuffix(".html").removeprefix("sect."), text + parsed.blocks
        if sum(map(len, text)) >= SHORTEST:
            yield name, text
            name, text = "", []
        page = parsed.links.get("next", "")


def faq(package: Path) -> Texts:
    """Yield the sections of An Anarchist FAQ."""
    for page in sorted(package.rglob("anarchism/html/sec*.html")):
        yield page.stem.removeprefix("sec"), _Page(page).blocks


# By output folder: the package's name, a description of its texts, and their reader.
ALL: dict[str, tuple[str, str, Callable[[Path], Texts]]] = {
    "novels": ("r-cran-janeaustenr", "Jane Austen's novels, in the public domain", novels),
    "handbook": ("debian-handbook", "The Debian Administrator's Handbook", handbook),
    "faq": ("anarchism", "An Anarchist FAQ", faq),
}


class _Page(HTMLParser):
    """Parser of an HTML page: `blocks` are its paragraphs and headings, `links` are by relation."""

    # Left out: listings, tables, tables of contents, and the frame that Publican adds to a page.
    _SKIPPED = frozenset(("head", "pre", "table", "sup", "script", "style"))
    _NOISE = frozenset(("docnav", "toc", "banner", "footnotes", "title"))
    _HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5"))
    _BLOCKS = _HEADINGS | {"div", "p", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "br"}

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.links: dict[str, str] = {}
        self._text, self._skipped, self._depth = "", "", 0
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        self._end()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "link":
            self.links.setdefault(attributes.get("rel", ""), attributes.get("href", ""))
        if self._skipped:
            self._depth += tag == self._skipped
            return
        names = set(f"{attributes.get('class', '')} {attributes.get('id', '')}".split())
        if tag in self._SKIPPED or (tag not in self._HEADINGS and names & self._NOISE):
            self._end()
            self._skipped, self._depth = tag, 1
        elif tag in self._BLOCKS:
            self._end()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read an element without content, of which only a link matters."""
        if tag == "link":
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            self._depth -= tag == self._skipped
            self._skipped = self._skipped if self._depth else ""
        elif tag in self._BLOCKS:
            self._end()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._text += data

    def _end(self) -> None:
        text, self._text = _plain(self._text), ""
        if len(text.split()) > 3:  # shorter blocks are remains of headings, or code
            self.blocks.append(text)


def _plain(text: str) -> str:
    return " ".join(text.split())


def write(folder: Path, debs: Path | None = None) -> dict[str, int]:
    """Write all texts into a folder, from packages in `debs`, or else downloaded ones; return the
    number of texts by package. Raises ValueError if a tool or package is missing."""
    if shutil.which("dpkg-deb") is None or (debs is None and shutil.which("apt-get") is None):
        names = ", ".join(package for package, *_ in ALL.values())
        raise ValueError(
            f"dpkg-deb and apt-get are needed: run this on Debian or Ubuntu, or get {names} from "
            "packages.debian.org, install dpkg-deb, and give --from FOLDER"
        )
    counts, lines = dict[str, int](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for kind, (name, content, read_texts) in ALL.items():
            if debs is None:
                _call("apt-get", "download", name, cwd=Path(temporary))
            deb_files = sorted((debs or Path(temporary)).glob(f"{name}_*.deb"))
            if not deb_files:
                raise ValueError(f"{debs}: no {name}_*.deb there; without --from it is downloaded")
            package, out = Path(temporary) / name, folder / kind
            _call("dpkg-deb", "-x", str(deb_files[-1]), str(package))
            out.mkdir(parents=True, exist_ok=True)
            counts[kind] = 0
            for title, paragraphs in read_texts(package):
                text = "\n".join(paragraphs) + "\n"
                if len(text) >= SHORTEST:
                    (out / f"{title}.txt").write_text(text, encoding="utf-8")
                    counts[kind] += 1
            version = _call("dpkg-deb", "-f", str(deb_files[-1]), "Version").strip()
            terms = (package / "usr/share/doc" / name / "copyright").read_text()
            licence = re.search(r"^Files: \*\n(?:.+\n)*?License: *(.+)", terms, re.MULTILINE)
            lines.append(
                f"{kind}: {counts[kind]} texts of {content}; Debian package {name} {version}, "
                f"licence of the package {licence[1] if licence else 'see the package'}\n"
            )
    (folder / SOURCES).write_text("".join(lines), encoding="utf-8")
    return counts


def _call(*command: str, cwd: Path | None = None) -> str:
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if process.returncode:
        last_line = (process.stderr.strip() or "no reason given").splitlines()[-1]
        raise ValueError(f"{' '.join(command)}: {last_line} (apt-get update may help)")
    return process.stdout


@show_errors
def command(
    folder: Annotated[Path, typer.Argument(help="Where the texts are written.")],
    debs: Annotated[
        Path | None,
        typer.Option("--from", help="A folder with the .deb files. [default: download them]"),
    ] = None,
) -> None:
    """Write plain English texts, for `mmkv eval documents --data FOLDER`."""
    check_place(folder)
    for name, number in write(folder, debs).items():
        typer.echo(f"{folder / name}: {number} texts")


if __name__ == "__main__":
    typer.run(command)
