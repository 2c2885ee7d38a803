"""Readers of published data files; every error names the file, the entry and the field."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from mmkv.eval.samples import DataError, Request, read_image
from mmkv.loading import untrusted

# Limits against wrong or hostile files; published ones are far below them.
MAX_JSON_BYTES = 256 * 2**20
MAX_LINE_BYTES = 32 * 2**20
# Values of `data` in place of a path: pictures drawn by mmkv, and the package's novels.
DRAWINGS, NOVELS = "drawings", "novels"
_NOVELS = Path(__file__).parents[1] / "novels.txt.xz"


def stands_for(data: Path, word: str) -> bool:
    """Return whether data is this word (such as `NOVELS`) and not an existing path."""
    return str(data) == word and not data.exists()


def read_text(path: Path) -> str:
    """Return the content of a text file. Raises DataError."""
    _require_file(path)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(f"{path}: has more than {MAX_JSON_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a text file in UTF-8: {error}") from error


def text_files(data: Path, *suffixes: str) -> dict[str, Path]:
    """Return the paths of a folder's texts by name, or of the one file."""
    if not data.is_dir():
        return {data.name: data}
    paths = sorted(path for path in data.rglob("*") if path.suffix in suffixes)
    return {path.relative_to(data).as_posix(): path for path in paths}


def texts(data: Path, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Yield the name and content of each novel's chapter, or of each text of a folder or file."""
    if stands_for(data, NOVELS):
        yield from novels().items()
        return
    for name, path in text_files(data, *suffixes).items():
        yield name, read_text(path)


def novels() -> dict[str, str]:
    """Return chapters of Jane Austen's six novels by name, such as "emma-01".

    They are in the public domain; the texts are those of Project Gutenberg in the R package
    janeaustenr 1.0.0. Chapters of fewer than 12,000 characters are left out. The file has the
    chapters between form feeds, each after a line with its name.
    """
    chapters = lzma.decompress(_NOVELS.read_bytes()).decode().split("\f")
    return {name: text for name, _, text in (x.partition("\n") for x in chapters)}


def documentation() -> dict[str, str]:
    """Return the topics of Python's documentation (PSF licence). Raises DataError if this Python
    has none."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python comes without its documentation: give your own data") from None
    return topics


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object of a data file, and its place there, such as "line 3"."""

    path: Path
    place: str
    fields: dict[str, Any]

    def error(self, field: str, problem: str) -> DataError:
        """Return the error for a field of this entry."""
        return DataError(f"{self.path}: {self.place}: field {field!r}: {problem}")

    def name(self, *fields: str) -> str:
        """Return the first of these fields that has a value, else the entry's number."""
        values = [self.fields[x] for x in fields if self.fields.get(x) is not None]
        return str(values[0]) if values else self.place.split()[-1]

    def text(self, field: str, *, empty: bool = False) -> str:
        """Return a text field, which may be blank only with `empty`."""
        value = self.checked(field, self._get(field))
        if not value.strip() and not empty:
            raise self.error(field, "is empty")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """Return a field that is a list of at least one text."""
        value = self._get(field)
        if not isinstance(value, list) or not value:
            raise self.error(field, f"expected a list of texts, got {_shown(value)}")
        return tuple(self.checked(field, item, f"item {i}: ") for i, item in enumerate(value))

    def _get(self, field: str) -> Any:
        if field not in self.fields:
            raise self.error(field, f"is missing; the entry has {sorted(self.fields)}")
        return self.fields[field]

    def checked(self, field: str, value: Any, item: str = "") -> str:
        """Return a value of a field that is to be a text. Raises DataError."""
        if not isinstance(value, str):
            raise self.error(field, f"{item}expected text, got {_shown(value)}")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
            raise self.error(field, f"{item}has invalid characters: {error}") from error
        return value

    def image(self, field: str, folder: Path) -> Path:
        """Return the path of a field's picture: relative, without "..", and no link out of
        `folder`. Check its header too."""
        name = self.text(field)
        windows = PureWindowsPath(name)
        if "\0" in name or windows.anchor:  # also set if the path starts with a slash
            raise self.error(field, f"expected a path inside the image folder, got {name!r}")
        if ".." in windows.parts:
            raise self.error(field, f"must not contain '..', got {name!r}")
        try:
            path = (folder / name).resolve()
            if not path.is_relative_to(folder.resolve()):
                raise self.error(field, f"{name!r} leads out of the image folder {folder}")
            if not path.is_file():
                raise self.error(field, f"no picture {name!r} in {folder}")
        except (OSError, RuntimeError) as error:  # the name is too long, or links form a loop
            raise self.error(field, f"{name[:200]!r} cannot be looked up: {error}") from error
        try:
            read_image(path, decode=False)
        except DataError as error:
            raise self.error(field, str(error)) from error
        return path


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file. Raises DataError."""
    _require_file(path)
    try:
        return untrusted.read_json(path, limit)
    except ValueError as error:
        raise DataError(f"{path}: not a JSON file in UTF-8 that can be read: {error}") from error


def read_lines(path: Path) -> Iterator[Entry]:
    """Yield the objects of a JSONL file; blank lines are left out."""
    _require_file(path)
    n_entries = n_lines = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES + 1):
            n_lines += 1
            place = f"line {n_lines}"
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(f"{path}: {place}: has more than {MAX_LINE_BYTES} bytes")
            if not raw.strip():
                continue
            try:
                value = json.loads(raw.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: {place}: not a JSON object in UTF-8: {error}") from error
            n_entries += 1
            yield as_entry(path, place, value)
    if not n_entries:
        raise DataError(f"{path}: has no entries")


def as_entry(path: Path, place: str, value: Any) -> Entry:
    """Return `value` as an entry. Raises DataError if it is no object."""
    if not isinstance(value, dict):
        raise DataError(f"{path}: {place}: expected an object, got {_shown(value)}")
    return Entry(path=path, place=place, fields=value)


def find_file(data: Path, suffix: str, *names: str) -> Path:
    """Return `data`; if it is a folder, the first of `names` in it, else its only such file."""
    if not data.is_dir():
        _require_file(data)
        return data
    named = [data / name for name in names if (data / name).is_file()]
    matches = named[:1] or list(data.glob(f"*{suffix}"))
    if len(matches) != 1:
        raise DataError(f"{data}: expected one {suffix} file in this folder, found {len(matches)}")
    return matches[0]


def read_entries(request: Request, *names: str) -> Iterator[tuple[str, Entry, Path]]:
    """Yield the name and entry of each object in a JSON list or in an object by id, and the folder
    of their pictures; `names` are possible file names in a folder of several."""
    path = find_file(request.data, ".json", *names)
    content = read_json(path)
    if not isinstance(content, dict | list) or not content:
        raise DataError(f"{path}: expected a list of entries, or an object of entries by id")
    images = path.parent / "images"
    folder = request.image_folder or (images if images.is_dir() else path.parent)
    if not folder.is_dir():
        raise DataError(f"{folder}: the image folder does not exist")
    listed = isinstance(content, list)
    keyed: list[tuple[Any, Any]] = list(enumerate(content) if listed else content.items())
    for key, value in keyed:
        entry = as_entry(path, f"entry {key!r}", value)
        yield entry.name("id", "question_id") if listed else key, entry, folder


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path}: no such file")


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]
