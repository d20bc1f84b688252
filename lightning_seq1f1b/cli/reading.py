"""Read documents from text, JSONL and parquet files, with errors that name the file and the line."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Document:
    """One text to learn from. With a prompt, only `text` is supervised: it is the answer.

    Attributes:
        text: the document, or the answer.
        prompt: what precedes the answer; None for a plain document.
    """

    text: str
    prompt: str | None = None


@dataclass(frozen=True)
class Fields:
    """Names of the fields in JSONL and parquet files. A row has `text`, or else both `prompt` and `answer`."""

    text: str = "text"
    prompt: str = "prompt"
    answer: str = "answer"


def find_files(patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files that the paths and globs name, each once: in the order given, those of one glob sorted.

    Raises:
        ValueError: There is no pattern, one matches no file, or one names a directory only.
    """
    if not patterns:
        raise ValueError("no files were given: name paths or globs, such as 'data/**/*.txt'")
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
        files = [path for path in matches if path.is_file()]
        if not files:
            reason = f"names a directory: write '{pattern.rstrip('/')}/**/*'" if matches else "matches no file"
            raise ValueError(f"'{pattern}' {reason} (working directory {Path.cwd()})")
        found.update(dict.fromkeys(files))
    return tuple(found)


def refuse(error: ValueError) -> None:
    """What to do with a bad row: end."""
    raise error


def read_documents(path: Path, fields: Fields, bad: Callable[[ValueError], None] = refuse) -> Iterator[Document]:
    """The documents of one file: a row each in .jsonl and .parquet files, the whole file otherwise. Empty ones too.

    Args:
        path: the file.
        fields: names of the fields.
        bad: is called with what is wrong about a row that cannot be read, or about the rest of a file. When it returns,
            reading goes on behind.

    Raises:
        ValueError: by `refuse`: the file is not UTF-8 text or no parquet file, a line is not a JSON object, or a row
            lacks its fields.
        ModuleNotFoundError: A parquet file was given and pyarrow is not installed.
    """
    if path.suffix == ".jsonl":
        rows = _jsonl_rows(path, bad)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path, fields, bad)
    else:
        try:
            yield Document(path.read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            bad(_chained(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", error))
        return
    for place, row in rows:
        try:
            document = _document(row, fields, place)
        except ValueError as error:
            bad(error)
        else:
            yield document


def _chained(message: str, cause: Exception) -> ValueError:
    error = ValueError(message)
    error.__cause__ = cause
    return error


def _jsonl_rows(path: Path, bad: Callable[[ValueError], None]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # By bytes, so that one bad character spoils one line, and by no other end of line than this: JSON strings may hold
    # U+2028 and others that end a line for str.splitlines.
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            bad(_chained(f"{place}: not UTF-8 text: {error.reason} at byte {error.start} of the line", error))
        except json.JSONDecodeError as error:
            bad(_chained(f"{place}: not valid JSON: {error.msg} at column {error.colno}", error))
        else:
            if isinstance(row, dict):
                yield place, row
            else:
                bad(ValueError(f"{place}: expected a JSON object, got {type(row).__name__}"))


def _parquet_rows(
    path: Path, fields: Fields, bad: Callable[[ValueError], None]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs pyarrow: pip install 'lightning-seq1f1b[parquet]'", name="pyarrow"
        ) from error
    unreadable = (pyarrow.ArrowException, OSError)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except unreadable as error:
        bad(_chained(f"{path} is not a readable parquet file: {error}", error))
        return
    with file:
        wanted = [name for name in (fields.text, fields.prompt, fields.answer) if name in file.schema_arrow.names]
        first = 1
        for group in range(file.num_row_groups):
            try:
                rows = file.read_row_group(group, columns=wanted).to_pylist()
            except unreadable as error:
                bad(_chained(f"{path}: the rows from {first} on, row group {group}, are not readable: {error}", error))
                rows = []
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, start=first))
            first += file.metadata.row_group(group).num_rows


def _document(row: Mapping[str, Any], fields: Fields, place: str) -> Document:
    if fields.text in row:
        return Document(_string(row, fields.text, place))
    missing = [name for name in (fields.prompt, fields.answer) if name not in row]
    if missing:
        raise ValueError(
            f"{place}: expected the field '{fields.text}', or '{fields.prompt}' and '{fields.answer}'; found "
            f"{sorted(row)}. Name the fields with text_field, prompt_field and answer_field"
        )
    return Document(_string(row, fields.answer, place), prompt=_string(row, fields.prompt, place))


def _string(row: Mapping[str, Any], name: str, place: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{place}: the field '{name}' must be a string, got {type(value).__name__}")
    return value
