"""Parquet files as JSONL: each row a line of a temporary file, of the columns that a record is made from.

What a table must fill in and a row did not have is left out again: a null in a map is no key. Everything else becomes
what it is in JSON, or the file is refused: no dates, bytes or decimals.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline.errors import UsageError
from producers.rows import ALIASES, RowKeys

BATCH = 1024
"Rows that are decoded at a time."


def as_lines(path: Path, file: BufferedReader, keys: RowKeys) -> tuple[int, str]:
    """A descriptor of the rows' file, which has no name, and the sha256 of the Parquet file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UsageError(f"--prompt-data {path}: Parquet: pip install 'millpond[parquet]'") from error
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    file.seek(0)
    with tempfile.TemporaryFile() as lines:
        try:
            table = ParquetFile(file)
            columns = [name for name in table.schema_arrow.names if name in _wanted(keys)]
            batches = table.iter_batches(BATCH, columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
            lines.writelines(_line(path, number, row) for number, row in enumerate(rows, 1))
        except (ArrowException, KeyError) as error:
            raise UsageError(f"--prompt-data {path}: not to be read as Parquet: {error}") from error
        lines.flush()
        return os.dup(lines.fileno()), digest


def _wanted(keys: RowKeys) -> set[str]:
    """Names of columns that may be needed."""
    named = [(key,) if key else ALIASES[part] for part, key in keys._asdict().items()]
    paths = [path for aliases in named for path in aliases]
    return {"id", "data_source", *paths, *(path.partition(".")[0] for path in paths)}


def _line(path: Path, number: int, row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(_without_nulls(row)).encode() + b"\n"
    except TypeError as error:
        raise UsageError(f"--prompt-data {path}:{number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
