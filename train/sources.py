"""Where records come from: JSONL and JSON lists (both also gzipped), Parquet, and what the ``datasets`` library reads.

What a file is, its first bytes say, not its name. A value keeps its number: the line of a JSONL file, and the
record, counted from 1, of anything else.
"""

import contextlib
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mtp import UserError
from mtp.errors import one_line
from train.config import Source

# Every field that a shape reads; the columns of a table that are read at all.
FIELDS = (
    *("prompt_ids", "response_ids"),
    *("input_ids", "loss_mask", "labels", "assistant_masks", "completion_mask", "attention_mask"),
    *("messages", "conversations", "system", "tools"),
    *("prompt", "completion", "text"),
)
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".gz", ".parquet")
BOM = b"\xef\xbb\xbf"
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"


class FileSource:
    """One file of records."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def digest(self) -> str:
        """Returns the SHA-256 of the file; raises :class:`UserError` if it cannot be read."""
        digest = hashlib.sha256()
        with _reading(self.path):
            _digest_file(self.path, digest)
        return digest.hexdigest()

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yields number and value of each record; a line of JSONL comes as its bytes, not yet parsed.

        Raises:
            UserError: the file cannot be read, or is damaged as a whole.
        """
        with _reading(self.path):
            with self.path.open("rb") as file:
                start = file.read(4)
            if start == PARQUET:
                yield from _parquet(self.path)
            elif start.startswith(GZIP):
                with gzip.open(self.path) as file:
                    yield from _json_values(self.path, file)
            else:
                with self.path.open("rb") as file:
                    yield from _json_values(self.path, file)


class DatasetSource:
    """A data set of the ``datasets`` library: a name on the hub, or a folder."""

    def __init__(self, source: Source) -> None:
        """Loads the data set.

        Raises:
            UserError: there is none of that name, it has no such split, or none of the known fields.
        """
        self.source = source
        try:
            self._data = _load_dataset(source)
        except UserError:
            raise
        except Exception as error:  # whatever a library makes of a folder, a name, or a network
            raise UserError(
                f"data source {source.source}: the datasets library could not load it ({one_line(error)}); check the "
                "name, subset and split, or give the path of a JSONL, JSON or Parquet file"
            ) from None
        self._data = self._data.select_columns(_known_columns(source.source, self._data.column_names))

    def digest(self) -> str:
        """Returns the SHA-256 of the data set's files and of what was done to them."""
        digest = hashlib.sha256(str(self._data._fingerprint).encode())
        for file in self._data.cache_files:
            _digest_file(Path(file["filename"]), digest)
        return digest.hexdigest()

    def values(self) -> Iterator[tuple[int, Any]]:
        """Yields number and value of each record."""
        for number, value in enumerate(self._data, start=1):
            yield number, _without_nulls(value)


def open_source(source: Source) -> FileSource | DatasetSource:
    """Returns the reader of a source.

    Raises:
        UserError: there is no such file, folder or data set.
    """
    path = Path(source.source)
    if path.is_dir():
        return DatasetSource(source)
    if not path.exists() and not path.is_absolute() and not path.name.lower().endswith(DATA_SUFFIXES):
        return DatasetSource(source)
    if source.subset is not None or source.split != "train":
        raise UserError(f"data source {path}: a file has no split or subset; leave them out")
    return FileSource(path)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is read into one sentence."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"data file {path}: damaged gzip ({one_line(error)}); fetch it again") from None
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"data file {path}: {reason}; check data.train and data.heldout") from None


def _digest_file(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)


def _json_values(path: Path, file: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    """Yields the lines that are not blank; or, of a file that is one JSON list, its elements."""
    whole = ((number, line.removeprefix(BOM) if number == 1 else line) for number, line in enumerate(file, start=1))
    lines = ((number, line) for number, line in whole if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if not first[1].lstrip().startswith(b"["):
        yield first
        yield from lines
        return
    rest = list(lines)
    try:
        values = json.loads(first[1] + b"".join(line for _, line in rest))
    except (ValueError, RecursionError) as error:
        if not rest or not _is_json(first[1]):
            raise UserError(f"data file {path}: begins as a JSON list, but is not one ({one_line(error)})") from None
        yield from [first, *rest]  # lines, the first of which happens to be a list
    else:
        yield from enumerate(values, start=1)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns, number = _known_columns(str(path), file.schema_arrow.names), 0
            for batch in file.iter_batches(columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    yield number, _without_nulls(value)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data file {path}: damaged Parquet ({one_line(error)}); fetch it again") from None


def _load_dataset(source: Source) -> Any:
    import datasets

    datasets.disable_progress_bars()
    folder = Path(source.source)
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return datasets.load_dataset(source.source, source.subset, split=source.split)
    saved = datasets.load_from_disk(source.source)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if source.split not in saved:
        raise UserError(f"data source {folder}: no split {source.split!r}; it has {', '.join(map(str, saved))}")
    return saved[source.split]


def _known_columns(where: str, names: list[str]) -> list[str]:
    if known := [name for name in names if name in FIELDS]:
        return known
    raise UserError(f"data source {where}: none of its columns ({', '.join(names)}) is one of {', '.join(FIELDS)}")


def _without_nulls(value: Any) -> Any:
    """Returns a table's value without the nulls by which tables mark that a key is absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
