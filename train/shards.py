"""The target's hidden states on disk: written once by ``python -m train.hidden``, read instead of running the target.

<folder>/shard-00000.safetensors   packed rows: final [R, n, H], log_normaliser [R, n], hidden if it is not final
<folder>/shards.json               what they were made from, and each shard's sha256

One hidden state a token, in the target's dtype: 2 * H bytes in bfloat16. A shard counts once its line is in
``shards.json``, so a command that was stopped goes on where it was.

Shapes: R packed rows of a shard, n tokens of a row, H hidden size.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from mtp import Target, UserError
from mtp.contract import read_json_object
from mtp.files import sync, write_atomic
from train.data import FILL, Rows
from train.teacher import Teacher, teach

MANIFEST = "shards.json"


def shards_key(rows: Rows, target: Target, target_hidden: str) -> dict[str, Any]:
    """Returns what shards depend on: the packed rows, the target, its dtype and the contract's point."""
    return {
        "rows": len(rows),
        "row_length": rows.tokens.shape[1],
        "rows_sha256": rows.sha256(),
        "target_fingerprint": target.fingerprint(),
        "dtype": str(target.dtype),
        "target_hidden": target_hidden,
    }


def write_shards(
    folder: Path, rows: Rows, target: Target, *, target_hidden: str, chunk_rows: int, micro_rows: int, shard_rows: int
) -> Iterator[int]:
    """Runs the target over the packed rows and yields how many rows are done, a shard at a time.

    Args:
        chunk_rows: rows of logits that exist at a time.
        micro_rows: packed rows of one forward.
        shard_rows: packed rows of one file.

    Raises:
        UserError: the folder holds shards of something else, or cannot be written; complete shards are kept.
    """
    key = {**shards_key(rows, target, target_hidden), "shard_rows": shard_rows}
    path = folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        manifest: dict[str, Any] = {"key": key, "sha256": []} if not path.exists() else read_json_object(path)
        if manifest.get("key") != key:
            raise UserError(f"{folder}: {_difference(manifest.get('key'), key)}; choose another folder, or remove it")
        done: list[str] = manifest["sha256"]
        while (first := len(done) * shard_rows) < len(rows):
            indices = list(range(first, min(first + shard_rows, len(rows))))
            shard = folder / _shard_name(len(done))
            partial = shard.with_suffix(".partial")
            safetensors.torch.save_file(
                _tensors(indices, rows, target, target_hidden, chunk_rows, micro_rows), partial, {"format": "pt"}
            )
            sync(partial)
            digest = _sha256(partial)
            partial.replace(shard)
            done.append(digest)
            write_atomic(path, json.dumps({"key": key, "sha256": done}, indent=1) + "\n")
            yield indices[-1] + 1
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot be written ({error}); complete shards are kept, run again to go on"
        ) from None


def _tensors(
    indices: list[int], rows: Rows, target: Target, target_hidden: str, chunk_rows: int, micro_rows: int
) -> dict[str, Tensor]:
    parts: list[Teacher] = []
    for first in range(0, len(indices), micro_rows):
        batch = rows.take(indices[first : first + micro_rows], target.device)
        part = teach(target, batch, target_hidden=target_hidden, chunk_rows=chunk_rows)
        parts.append(Teacher(*(tensor.cpu() for tensor in part)))
    whole = Teacher(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    tensors = {"final": whole.final, "log_normaliser": whole.log_normaliser}
    return tensors if target_hidden == "post_norm" else tensors | {"hidden": whole.hidden}


class Shards:
    """Reads rows of shards as the trainer asks for them; each file is checked against its sha256 once."""

    def __init__(self, folder: Path, rows: Rows, target: Target, *, target_hidden: str) -> None:
        """Opens the folder.

        Raises:
            UserError: the shards are missing, incomplete, or of other rows or another target.
        """
        self.folder, path = folder, folder / MANIFEST
        if not path.is_file():
            raise UserError(f"data.hidden_states: {folder} has no {MANIFEST}; write it with python -m train.hidden")
        manifest = read_json_object(path)
        stored, key = manifest.get("key"), shards_key(rows, target, target_hidden)
        if not isinstance(stored, dict) or {name: stored.get(name) for name in key} != key:
            raise UserError(f"data.hidden_states: {folder}: {_difference(stored, key)}; write it again for this run")
        self.shard_rows, self._sha256 = stored["shard_rows"], manifest["sha256"]
        if len(self._sha256) * self.shard_rows < len(rows):
            raise UserError(
                f"data.hidden_states: {folder} holds {len(self._sha256) * self.shard_rows} of {len(rows)} rows; "
                "run python -m train.hidden again to finish it"
            )
        self._open: dict[int, Any] = {}

    def __call__(self, indices: list[int], rows: Rows) -> Teacher:
        """Returns the target's side of these rows; ``indices`` say which of the data set they are."""
        read = [self._row(index) for index in indices if index != FILL]
        blank = Teacher(*(torch.zeros_like(tensor) for tensor in (read or [self._row(0)])[0]))
        found = iter(read)
        parts = [blank if index == FILL else next(found) for index in indices]
        device = rows.tokens.device
        return Teacher(*(torch.stack(tensors).to(device) for tensors in zip(*parts, strict=True)))

    def _row(self, index: int) -> Teacher:
        shard, place = divmod(index, self.shard_rows)
        if shard not in self._open:
            self._open[shard] = self._checked(shard)
        file = self._open[shard]
        final = file.get_slice("final")[place]
        hidden = file.get_slice("hidden")[place] if "hidden" in file.keys() else final  # noqa: SIM118 - not a dict
        return Teacher(hidden, final, file.get_slice("log_normaliser")[place])

    def _checked(self, shard: int) -> Any:
        path = self.folder / _shard_name(shard)
        try:
            if _sha256(path) != self._sha256[shard]:
                raise UserError(f"{path}: its content is not what was written; remove the folder and write it again")
            return safetensors.safe_open(path, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error}); write the shards again") from None


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _difference(stored: Any, key: dict[str, Any]) -> str:
    if not isinstance(stored, dict):
        return f"{MANIFEST} is damaged"
    names = [name for name in key if stored.get(name) != key[name]]
    return f"written for another {', '.join(names)}"
