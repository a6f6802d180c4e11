"""The rows of an evaluation on disk: written one by one, found again after a kill, merged when all are there.

Each process appends to a file of its own, `rows-<rank>.jsonl`. Whoever starts in the same directory reads all of them,
with whatever number of processes they were written; what is there is not done again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

Row = dict[str, Any]
Key = tuple[str, int, str, float]


def key_of(row: Row) -> Key:
    """What a row is of; there is one of each."""
    return row["set"], row["prompt"], row["method"], float(row["temperature"])


class WriteError(Exception):
    """The output directory cannot be written."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error


class RowFiles:
    """
    The rows of one evaluation.

    Args:
        directory: Made where it is missing; processes on several hosts need one that they share.
        rank: Of this process.
        settings: What the rows depend on.

    Raises:
        ValueError: The directory holds rows of other settings, or another process of this rank writes there.
        WriteError: It cannot be written.
    """

    def __init__(self, directory: Path, rank: int, settings: dict[str, Any]) -> None:
        self.directory = directory
        self.path = directory / f"rows-{rank}.jsonl"
        self._own = FileLock(directory / f".rows-{rank}.lock", timeout=0)
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            try:
                self._own.acquire()
            except Timeout:
                raise ValueError(f"another process writes to {self.path} already.") from None
        with self.lock():
            self._check(settings)
            rows = read_rows(self.directory)
            with writing(self.path):
                cut_torn_line(self.path)
                self._file = self.path.open("ab", buffering=0)
        self.done = {key_of(row) for row in rows}

    def lock(self) -> FileLock:
        """Held by one process at a time."""
        return FileLock(self.directory / ".lock")

    def close(self) -> None:
        """Let others write here."""
        self._file.close()
        self._own.release()

    def append(self, row: Row) -> None:
        """Write a row, to the disk itself."""
        line = memoryview(json.dumps(row).encode() + b"\n")
        with writing(self.path):
            while line:  # a disk that fills takes a part, and the next one not
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        self.done.add(key_of(row))

    def merge(self, keys: Sequence[Key]) -> list[Row] | None:
        """All rows in the order of `keys`, in `rows.jsonl` too; `None` while some are missing."""
        self.close()
        with self.lock():
            rows = {key_of(row): row for row in read_rows(self.directory)}
            merged = [rows[key] for key in keys if key in rows]
            if len(merged) < len(rows) or any(key not in rows for key in keys):
                return None
            write_text(self.directory / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in merged))
            for part in self.directory.glob("rows-*.jsonl"):
                part.unlink()
            return merged

    def _check(self, settings: dict[str, Any]) -> None:
        path = self.directory / "settings.json"
        settings = json.loads(json.dumps(settings))
        if not path.exists():
            write_text(path, json.dumps(settings, indent=1) + "\n")
            return
        earlier = read_settings(self.directory)
        names = [name for name in earlier | settings if earlier.get(name) != settings.get(name)]
        if names:
            differences = "; ".join(f"{name} was {earlier.get(name)!r}, now {settings.get(name)!r}" for name in names)
            raise ValueError(
                f"{self.directory} holds rows of other settings ({differences}). Give the same ones to go on there, "
                "or another --output."
            )


def read_settings(directory: Path) -> dict[str, Any]:
    """What the rows of an evaluation depend on; `FileNotFoundError` where none was begun."""
    path = directory / "settings.json"
    settings: dict[str, Any] = json_of(path, path.read_bytes())
    return settings


def read_rows(directory: Path) -> list[Row]:
    """All rows of an evaluation, finished or not, each once; a line that a kill has torn is left out."""
    rows: dict[Key, Row] = {}
    for path in sorted(directory.glob("rows*.jsonl")):
        content = path.read_bytes()
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            row = json_of(path, line)
            rows.setdefault(key_of(row), row)
    return list(rows.values())


def json_of(path: Path, text: bytes) -> Any:
    """Parse what was written to `path`.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): mend it, or give another --output.") from None


def cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line's end."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def write_text(path: Path, text: str) -> None:
    """Write a file at once or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
