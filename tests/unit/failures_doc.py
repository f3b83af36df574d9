"""The two tables of docs/failures.md, as the tests read them: the page is the source."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/failures.md"


def table(heading: str) -> dict[str, dict[str, str]]:
    """First cell of each row, without backticks → column → cell."""
    body = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip().strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in lines[0]]
    rows = [[cell.strip() for cell in line] for line in lines[2:]]
    assert rows and all(len(row) == len(columns) for row in rows), f"{PAGE}: the table of {heading!r} is torn"
    return {row[0].strip("`"): dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


PLACES = table("From the place to the kind")
KINDS = table("From the kind to what is done")
