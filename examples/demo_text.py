"""The demo's text: the longest sources of the running Python's standard library, and its topic documentation."""

from __future__ import annotations

import sysconfig
from pathlib import Path

NUM_SOURCES = 12


def write_text(folder: Path) -> list[Path]:
    """Copy the documents into `folder` / text, unless they are there; returns their paths."""
    from pydoc_data.topics import topics

    target = folder / "text"
    if not target.is_dir():
        partial = folder / "text.partial"
        partial.mkdir(parents=True, exist_ok=True)
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))[:NUM_SOURCES]
        for source in sources:
            (partial / f"{source.stem}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        (partial / "topics.txt").write_text("\n\n".join(topics.values()), encoding="utf-8")
        partial.rename(target)
    return sorted(target.glob("*.txt"))
