"""Files become documents, and files that cannot be read say where and why."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lightning_seq1f1b.cli.reading import Document, Fields, find_files, read_documents

FIELDS = Fields()


def read(path: Path, fields: Fields = FIELDS) -> list[Document]:
    return list(read_documents(path, fields))


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def f():\n    return '☃'\n", encoding="utf-8")
    assert read(path) == [Document("def f():\n    return '☃'\n")]


def test_a_jsonl_row_is_a_text_or_a_prompt_with_an_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\u2028line"}\n\n{"prompt": "2+2=", "answer": "4"}\n', encoding="utf-8")
    assert read(path) == [Document("one\u2028line"), Document("4", prompt="2+2=")]


def test_a_jsonl_string_may_hold_unescaped_line_separators(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one\u2028line"}, ensure_ascii=False), encoding="utf-8")
    assert read(path) == [Document("one\u2028line")]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\n')
    assert read(path) == [Document("x")]


def test_fields_can_be_renamed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "reply": "r"}\n{"body": "b"}\n')
    assert read(path, Fields("body", "question", "reply")) == [Document("r", prompt="q"), Document("b")]


def test_parquet_rows_are_read_like_jsonl_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p", "q"], "answer": ["a", "b"], "other": [1, 2]}), path)
    assert read(path) == [Document("a", prompt="p"), Document("b", prompt="q")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl:2: not valid JSON: .* at column"),
        ("[1]", r"a\.jsonl:2: expected a JSON object, got list"),
        ('{"txt": "a"}', r"a\.jsonl:2: expected the field 'text', or 'prompt' and 'answer'; found \['txt'\]"),
        ('{"prompt": "a"}', r"a\.jsonl:2: expected the field 'text', or 'prompt' and 'answer'; found \['prompt'\]"),
        ('{"text": 3}', r"a\.jsonl:2: the field 'text' must be a string, got int"),
        ('{"prompt": null, "answer": "a"}', r"a\.jsonl:2: the field 'prompt' must be a string, got NoneType"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read(path)


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: .* at byte 3"):
        read(path)


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable parquet file"):
        read(path)


def test_a_parquet_row_without_fields_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: row 2: the field 'text' must be a string, got NoneType"):
        read(path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    real_import = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-seq1f1b\[parquet\]'"):
        read(path)


def test_globs_go_into_folders_are_sorted_and_name_a_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files([f"{tmp_path}/d.md", f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["d.md", "a.txt", "b.txt", "deep/er/c.txt"]


def test_patterns_without_a_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no files were given"):
        find_files([])
    with pytest.raises(ValueError, match=r"'.*/\*\.txt' matches no file"):
        find_files([f"{tmp_path}/*.txt"])
    with pytest.raises(ValueError, match=r"names a directory: write '.*/\*\*/\*'"):
        find_files([str(tmp_path)])


def test_bad_rows_can_be_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "a"}', b'{"text": "cut off', b'{"text": "\xff"}', b"[1]", b'{"txt": 1}', b'{"text": "b"}']
    path.write_bytes(b"\n".join(lines))
    bad: list[ValueError] = []
    assert list(read_documents(path, FIELDS, bad.append)) == [Document("a"), Document("b")]
    assert [str(error).removeprefix(str(path))[:3] for error in bad] == [":2:", ":3:", ":4:", ":5:"]
    assert "not UTF-8 text: invalid start byte at byte 10 of the line" in str(bad[1])


def test_a_text_file_that_is_no_text_can_be_left_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    bad: list[ValueError] = []
    assert list(read_documents(path, FIELDS, bad.append)) == []
    assert len(bad) == 1


def test_the_readable_part_of_a_damaged_parquet_file_can_be_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(number) * 50 for number in range(30)]})
    pyarrow.parquet.write_table(table, path, row_group_size=10, use_dictionary=False)
    with pyarrow.parquet.ParquetFile(path) as file:
        start = file.metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    bad: list[ValueError] = []
    assert len(list(read_documents(path, FIELDS, bad.append))) == 20
    (error,) = bad
    assert "the rows from 11 on, row group 1, are not readable" in str(error)
    with pytest.raises(ValueError, match="row group 1, are not readable"):
        read(path)


def test_a_truncated_parquet_file_can_be_left_out(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-20])
    bad: list[ValueError] = []
    assert list(read_documents(path, FIELDS, bad.append)) == []
    assert len(bad) == 1
