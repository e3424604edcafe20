"""The run's folder: config, module checkpoints, states to resume from; each complete or not there.

<output>/config.json          the settings of the run
<output>/log.jsonl            one record a line
<output>/step-N/, final/      modules only: what mtp-infer and any other reader load
<output>/best/                the modules with the greatest acceptance length so far, by replay of held-out text
<output>/state/step-N/        deepspeed's state and state.json, with a checksum of every file: what a rerun resumes from
"""

import contextlib
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

from mtp import Contract, Target, UserError
from mtp.checkpoint import PROVENANCE, read_provenance, save_checkpoint
from mtp.errors import one_line
from mtp.files import sync, write_atomic
from train.config import Config
from train.engine import Engine, Ranks

STATE_FILE = "state.json"
# What may differ between a run and its continuation.
FREE: Any = {
    "device": True,
    "activation_checkpointing": True,
    "log_every": True,
    "evaluate_every": True,
    "checkpoint_every": True,
    "keep_checkpoints": True,
    "wandb": True,
    "output": True,
    "data": {"keep_hidden", "hidden_states", "cache"},
    "steps": {"epochs", "max_steps", "max_minutes", "micro_rows"},
}
LIMITS = ("epochs", "max_steps", "max_minutes")


class RunFolder:
    """One run's folder, for all ranks: rank 0 writes, the others wait."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Opens or makes the folder.

        Raises:
            UserError: it cannot be written, or holds a run with other settings.
        """
        self.config, self.ranks, self.path = config, ranks, Path(config.output)
        self.states = self.path / "state"
        if ranks.rank == 0:
            try:
                self.states.mkdir(parents=True, exist_ok=True)
                self._check_same_run()
                self._tidy()
                write_atomic(self.path / "config.json", config.model_dump_json(indent=1) + "\n")
            except OSError as error:
                raise UserError(f"output {self.path}: cannot be written ({error.strerror}); choose another") from None

    def _check_same_run(self) -> None:
        path = self.path / "config.json"
        if not path.exists() or not (self._newest_first(self.states, STATE_FILE) or self.complete()):
            return
        try:
            earlier = Config.model_validate_json(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(f"{path}: damaged, or of another version; choose another output") from None
        before, now = (_flat(c.model_dump(mode="json", exclude=FREE)) for c in (earlier, self.config))
        if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            raise UserError(
                f"output {self.path} holds a run with {changed[0]} = {before.get(changed[0])!r}, now it is "
                f"{now.get(changed[0])!r}; choose another output, or remove that folder"
            )

    def complete(self) -> bool:
        """Returns whether ``final`` exists and was trained to these limits."""
        if not (self.path / "final" / PROVENANCE).is_file():
            return False
        try:
            trained = read_provenance(self.path / "final")["training"]["config"]["steps"]
            return all(trained[limit] == getattr(self.config.steps, limit) for limit in LIMITS)
        except (KeyError, TypeError):
            return False  # of another version: trained again from its newest state

    def checkpoints(self) -> list[Path]:
        """Returns the numbered module checkpoints, newest first."""
        return self._newest_first(self.path, PROVENANCE)

    def newest_state(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Returns the newest undamaged state, its facts, and a warning for each damaged one after it.

        Damaged ones are moved aside; every rank must call it. None if there is no state at all.

        Raises:
            UserError: written by another number of processes, or every state is damaged.
        """
        self.ranks.barrier()
        damaged: list[tuple[Path, str]] = []
        for folder in self._newest_first(self.states, STATE_FILE):
            facts = _read_facts(folder)
            reason = f"{STATE_FILE} is damaged" if facts is None else self._damage(folder, facts)
            if facts is not None and reason is None:
                warnings = [self._move_aside(each, why, folder) for each, why in damaged]
                return folder, facts, warnings
            damaged.append((folder, str(reason)))
        if damaged:
            named = "; ".join(f"{folder}: {reason}" for folder, reason in damaged)
            raise UserError(f"no state can be resumed from ({named}); remove {self.states} to start from step 0")
        return None

    def _damage(self, folder: Path, facts: dict[str, Any]) -> str | None:
        """Returns what is wrong with a state's files, the same on every rank; each rank reads its share of them."""
        if facts["world_size"] != self.ranks.world_size:
            raise UserError(
                f"{folder}: written by {facts['world_size']} processes, this run has {self.ranks.world_size}; "
                "start as many"
            )
        ranks, names = self.ranks, sorted(facts["files"])
        wrong = []
        for name in names[ranks.rank :: ranks.world_size]:
            with contextlib.suppress(OSError):
                if _checksum(folder / name) == facts["files"][name]:
                    continue
            wrong.append(name)
        found = sorted(ranks.gather(wrong))
        return f"{found[0]} is missing or damaged ({len(found)} of {len(names)} files)" if found else None

    def _move_aside(self, folder: Path, reason: str, used: Path) -> str:
        aside = folder.with_name(folder.name + ".damaged")
        if self.ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder, aside)
        self.ranks.barrier()
        return f"warning: {folder}: {reason}; moved to {aside.name}, going on from {used.name}"

    def _tidy(self) -> None:
        """Removes what a killed run left half written, and finishes the replacement of a folder it was killed in."""
        for folder in (self.path, self.states):
            for partial in folder.glob("*.partial"):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        for old in self.path.glob("*.old"):
            whole = old.with_suffix("")
            shutil.rmtree(old) if whole.exists() else os.replace(old, whole)

    def save(
        self,
        name: str,
        engine: Engine,
        contract: Contract,
        target: Target,
        facts: dict[str, Any],
        training: dict[str, Any],
    ) -> None:
        """Writes the state, then the modules under ``name``, and removes old ones; every rank must call it.

        Raises:
            UserError: the disk refused; earlier checkpoints are intact.
        """
        self._save_state(self.states / f"step-{facts['step']}", engine, facts)
        self.save_modules(name, engine, contract, target, training)
        if self.ranks.rank == 0:
            keep = self.config.keep_checkpoints
            for old in [*self._newest_first(self.states, STATE_FILE)[keep:], *self.checkpoints()[keep:]]:
                shutil.rmtree(old, ignore_errors=True)

    def save_modules(
        self, name: str, engine: Engine, contract: Contract, target: Target, training: dict[str, Any]
    ) -> None:
        """Writes the modules alone under ``name``; every rank must call it.

        Raises:
            UserError: the disk refused; earlier checkpoints are intact.
        """
        weights = engine.weights()
        if weights is not None:
            save_checkpoint(self.path / name, contract, weights, target, training)
        self.ranks.barrier()

    def _save_state(self, folder: Path, engine: Engine, facts: dict[str, Any]) -> None:
        if (folder / STATE_FILE).is_file():
            return  # the last step of the run was a checkpoint already
        ranks, partial = self.ranks, folder.with_name(folder.name + ".partial")
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        ranks.barrier()
        try:
            engine.save_state(partial)
            ranks.barrier()
            names = sorted(path.relative_to(partial).as_posix() for path in partial.rglob("*") if path.is_file())
            files = dict(
                ranks.gather([(name, _checksum(partial / name)) for name in names[ranks.rank :: ranks.world_size]])
            )
            if ranks.rank == 0:
                (partial / STATE_FILE).write_text(json.dumps(facts | {"files": files}) + "\n", encoding="utf-8")
                sync(partial)
                shutil.rmtree(folder, ignore_errors=True)  # one without a state file counts for nothing
                os.replace(partial, folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{folder}: the state could not be written ({one_line(error)}); earlier checkpoints are intact, make "
                "room on the disk and run the same command to go on from the last one"
            ) from error
        ranks.barrier()

    @staticmethod
    def _newest_first(folder: Path, marker: str) -> list[Path]:
        found = [path for path in folder.glob("step-*") if (path / marker).is_file()]
        found = [path for path in found if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """Returns a state's small facts; None if the file is damaged."""
    try:
        facts = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        return {
            "step": int(facts["step"]),
            "tokens": int(facts["tokens"]),
            "elapsed": float(facts["elapsed"]),
            "world_size": int(facts["world_size"]),
            "evaluated": int(facts["evaluated"]),
            "best": float(facts["best"]),
            "rows_sha256": str(facts["rows_sha256"]),
            "target_fingerprint": list(facts["target_fingerprint"]),
            "wandb_id": facts["wandb_id"],
            "files": dict(facts["files"]),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(path: Path) -> int:
    """Returns the CRC-32 of a file: for damage by accident, at the speed of the disk."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
