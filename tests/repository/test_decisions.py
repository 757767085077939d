"""The list of decision records names each of them, by its own title."""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"


def test_every_record_is_listed_by_its_title() -> None:
    listed = [line for line in (FOLDER / "README.md").read_text().splitlines() if line[:1].isdigit()]
    records = []
    for path in sorted(FOLDER.glob("[0-9]*.md")):
        number, title = path.read_text().splitlines()[0].removeprefix("# ").split(". ", 1)
        assert int(number) == int(path.name[:4])
        records.append(f"{number}. [{title}]({path.name})")
    assert listed == records
    assert len(records) >= 14
