"""Read documents from text, JSONL and parquet files, with errors that name the file and the line."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
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


def read_documents(path: Path, fields: Fields) -> Iterator[Document]:
    """The documents of one file: a row each in .jsonl and .parquet files, the whole file otherwise. Empty ones too.

    Raises:
        ValueError: The file is not UTF-8 text, a line is not a JSON object, or a row lacks its fields.
        ModuleNotFoundError: A parquet file was given and pyarrow is not installed.
    """
    if path.suffix == ".jsonl":
        for place, row in _jsonl_rows(path):
            yield _document(row, fields, place)
    elif path.suffix == ".parquet":
        for place, row in _parquet_rows(path, fields):
            yield _document(row, fields, place)
    else:
        yield Document(_read_text(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Not splitlines(): JSON strings may hold U+2028 and other characters that end a line for it.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected a JSON object, got {type(row).__name__}")
        yield place, row


def _parquet_rows(path: Path, fields: Fields) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs pyarrow: pip install 'lightning-seq1f1b[parquet]'", name="pyarrow"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = [name for name in (fields.text, fields.prompt, fields.answer) if name in file.schema_arrow.names]
            rows = (row for batch in file.iter_batches(columns=wanted) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from error


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
