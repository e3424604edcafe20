"""The run's folder: config, module checkpoints, states to resume from; each complete or not there.

<output>/config.json          the settings of the run
<output>/log.jsonl            one record a line
<output>/step-N/, final/      modules only: what mtp-infer and any other reader load
<output>/state/step-N/        deepspeed's state and state.json: what a rerun resumes from
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from mtp import Contract, Target, UserError
from mtp.checkpoint import PROVENANCE, read_provenance, save_checkpoint
from mtp.files import sync, write_atomic
from train.config import Config
from train.engine import Engine, Ranks

KEEP = 2
STATE_FILE = "state.json"
# What may differ between a run and its continuation.
FREE: Any = {
    "device": True,
    "activation_checkpointing": True,
    "log_every": True,
    "evaluate_every": True,
    "checkpoint_every": True,
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
                write_atomic(self.path / "config.json", config.model_dump_json(indent=1) + "\n")
            except OSError as error:
                raise UserError(f"output {self.path}: cannot be written ({error.strerror}); choose another") from None

    def _check_same_run(self) -> None:
        path = self.path / "config.json"
        if not path.exists() or not (self.newest_state() or self.complete()):
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

    def newest_state(self) -> Path | None:
        """Returns the newest complete state."""
        return next(iter(self._newest_first(self.states, STATE_FILE)), None)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Returns a state's small facts.

        Raises:
            UserError: damaged, or written by another number of processes.
        """
        try:
            facts = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            facts = {
                "step": int(facts["step"]),
                "tokens": int(facts["tokens"]),
                "elapsed": float(facts["elapsed"]),
                "world_size": int(facts["world_size"]),
                "wandb_id": facts.get("wandb_id"),
            }
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{folder / STATE_FILE}: damaged; remove {folder} to resume from an earlier state"
            ) from None
        if facts["world_size"] != self.ranks.world_size:
            raise UserError(
                f"{folder}: written by {facts['world_size']} processes, this run has {self.ranks.world_size}; "
                "start as many"
            )
        return facts

    def save(
        self,
        name: str,
        engine: Engine,
        contract: Contract,
        target: Target,
        facts: dict[str, Any],
        training: dict[str, Any],
    ) -> None:
        """Writes the state, then the modules under ``name``; every rank must call it.

        Raises:
            UserError: the disk refused; earlier checkpoints are intact.
        """
        self._save_state(self.states / f"step-{facts['step']}", engine, facts)
        weights = engine.weights()
        if weights is not None:
            save_checkpoint(self.path / name, contract, weights, target, training)
            for old in [
                *self._newest_first(self.states, STATE_FILE)[KEEP:],
                *self._newest_first(self.path, PROVENANCE)[KEEP:],
            ]:
                shutil.rmtree(old, ignore_errors=True)
        self.ranks.barrier()

    def _save_state(self, folder: Path, engine: Engine, facts: dict[str, Any]) -> None:
        if folder.exists():
            return  # the last step of the run was a checkpoint already
        partial = folder.with_name(folder.name + ".partial")
        if self.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self.ranks.barrier()
        try:
            engine.save_state(partial)
            self.ranks.barrier()
            if self.ranks.rank == 0:
                (partial / STATE_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
                sync(partial)
                os.replace(partial, folder)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{folder}: state could not be written ({error}); earlier states are intact") from error
        self.ranks.barrier()

    @staticmethod
    def _newest_first(folder: Path, marker: str) -> list[Path]:
        found = [path for path in folder.glob("step-*") if (path / marker).is_file()]
        found = [path for path in found if path.name.removeprefix("step-").isdigit()]
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step-")))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
