"""The loop: a batch of packed rows, the frozen target's side of it, the objective, one optimizer step."""

import math
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp import Target, UserError
from train.config import Config
from train.data import Order, cache_folder, micro_batches, read_rows
from train.engine import Engine, Ranks, versions
from train.evaluate import Evaluation, Replay
from train.initialise import new_stack
from train.objective import CELLS, DIVERGENCE, LOSS, Objective, StepLoss, objective_inputs
from train.records import ReadReport, read_records
from train.runs import RunFolder
from train.shards import Shards
from train.teacher import TeacherMemory
from train.tracking import Tracker


def learning_rate(config: Config, progress: float) -> float:
    """Returns the rate at a progress in 0..1: linear warm-up, then as scheduled to the smallest."""
    options = config.optimizer
    if progress < options.warmup_fraction:
        return options.learning_rate * max(progress / options.warmup_fraction, 0.01)
    rest = min((progress - options.warmup_fraction) / max(1 - options.warmup_fraction, 1e-9), 1.0)
    height = {"cosine": 0.5 * (1 + math.cos(math.pi * rest)), "linear": 1 - rest, "constant": 1.0}[options.schedule]
    return options.learning_rate * (options.min_lr_fraction + (1 - options.min_lr_fraction) * height)


class StopSignal:
    """Remembers SIGINT and SIGTERM, so that the loop ends after the step at hand and saves."""

    def __init__(self) -> None:
        self.received = False
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: Any) -> None:
        self.received = True

    def restore(self) -> None:
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Trainer:
    """One run, from its settings to its final checkpoint."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        """Reads target and data and makes modules, engine and folder.

        Raises:
            UserError: anything the user can fix, named.
        """
        self.config, self.ranks = config, ranks
        config.modules.contract(None)  # refuse a wrong recurrence before minutes of loading
        self.folder = RunFolder(config, ranks)
        self.step, self.elapsed, self.trained_tokens, self.wandb_id = 0, 0.0, 0, None
        self.complete = self.folder.complete()
        ranks.barrier()
        if self.complete:
            return
        torch.manual_seed(config.seed)
        self.target = Target.load(config.target, dtype=config.dtype, device=ranks.device)
        self._read_data()
        stack = new_stack(self.contract, self.target, config.init)
        stack.activation_checkpointing = config.activation_checkpointing
        self.engine = Engine(config, Objective(stack, config.loss.chunk_rows), ranks)
        self._resume()

    def _read_data(self) -> None:
        data, modules = self.config.data, self.config.modules
        main = self.ranks.rank == 0
        if not main:
            self.ranks.barrier()  # rank 0 tokenises and writes the cache, the others read it
        self.reports: list[ReadReport]
        self.rows, self.contract, self.reports = read_rows(self.config, self.target, write_cache=main)
        self.supervised = self.rows.supervised(modules.depths).tolist()
        if not self.supervised[0]:
            raise UserError("data.train: no record is long enough to train module 1; records need 3 tokens or more")
        self.order = Order(len(self.rows), self.config.steps.rows_per_step, self.config.seed)
        point, chunk = self.contract.target_hidden, self.config.loss.chunk_rows
        self.soft = self.config.loss.kind != "cross_entropy"
        self.teacher: TeacherMemory | Shards = TeacherMemory(
            self.target, target_hidden=point, chunk_rows=chunk, keep=data.keep_hidden, soft=self.soft
        )
        if data.hidden_states:
            self.teacher = Shards(Path(data.hidden_states), self.rows, self.target, target_hidden=point)
        self.replay: Replay | None = None
        if data.heldout:
            heldout, report = read_records(data.heldout, self.target, cache=cache_folder(self.config), write=main)
            self.replay = Replay(
                heldout, report, self.target, target_hidden=point, chunk_rows=chunk, keep=data.keep_hidden
            )
            self.reports.append(report)
        if main:
            self.ranks.barrier()

    @property
    def total_steps(self) -> int | None:
        """Returns the number of steps that epochs and max_steps allow; None if only time limits the run."""
        steps = self.config.steps
        limits = [steps.max_steps, steps.epochs and steps.epochs * self.order.steps_per_epoch]
        return min((limit for limit in limits if limit), default=None)

    def _resume(self) -> None:
        self.ranks.barrier()
        newest = self.folder.newest_state()
        if newest is None:
            return
        facts = self.folder.read_state(newest)
        self.engine.load_state(newest)
        self.step, self.elapsed = facts["step"], facts["elapsed"]
        self.trained_tokens, self.wandb_id = facts["tokens"], facts["wandb_id"]

    def run(self) -> None:
        """Trains to the end, or until a signal or a limit, and saves.

        Raises:
            UserError: the loss is not finite; the last checkpoint is kept.
        """
        stop = StopSignal()
        tracker = None
        if self.ranks.rank == 0:
            tracker = Tracker(self.config, resume_step=self.step, total_steps=self.total_steps, wandb_id=self.wandb_id)
            self.wandb_id = tracker.wandb_id
            self._introduce(tracker)
        try:
            self._loop(stop, tracker)
        finally:
            stop.restore()
            if tracker:
                tracker.close()

    def _introduce(self, tracker: Tracker) -> None:
        for report in self.reports:
            tracker.say(report.text())
        cells = ", ".join(f"module {index}: {count}" for index, count in enumerate(self.supervised, start=1))
        epoch = f"{len(self.rows)} packed rows, {self.order.steps_per_epoch} steps an epoch"
        tracker.say(f"{epoch}; supervised cells: {cells}")
        if self.contract.draft_vocab is not None:
            kept = f"{len(self.contract.draft_vocab)} of {self.target.vocab_size} tokens"
            tracker.say(
                f"draft vocabulary: {kept}, {self.reports[0].vocab_coverage:.2%} of the training text's tokens to learn"
            )
        if 0 in self.supervised:
            tracker.say("warning: a module without supervised cells is not trained; the records are too short for it")
        if self.step:
            tracker.say(f"resumed from step {self.step}")

    def _progress(self) -> float:
        """Returns how much of the run is done, 0..1, by steps or by time, whichever is further."""
        by_steps = self.step / self.total_steps if self.total_steps else 0.0
        minutes = self.config.steps.max_minutes
        return max(by_steps, self.elapsed / 60 / minutes if minutes else 0.0)

    def _agree(self, stop: StopSignal) -> tuple[float, bool]:
        """Returns progress as rank 0 sees it and whether any rank was told to stop."""
        mine = self._progress() if self.ranks.rank == 0 else 0.0
        progress, stopped = self.ranks.max([mine, float(stop.received)])
        return progress, bool(stopped)

    def _loop(self, stop: StopSignal, tracker: Tracker | None) -> None:
        config = self.config
        before, resumed = self.elapsed, time.monotonic()
        tokens, since, evaluated, interrupted = 0, resumed, -1, False
        while True:
            progress, interrupted = self._agree(stop)
            if progress >= 1 or interrupted:
                break
            figures, batch_tokens = self._step(progress)
            tokens += batch_tokens
            now = time.monotonic()
            self.elapsed = before + now - resumed
            if tracker:
                tracker.advance()
                if self.step % config.log_every == 0 or self.step == 1:
                    figures["train/tokens_per_second"] = tokens / max(now - since, 1e-9)
                    tracker.record(self.step, figures)
                    tokens, since = 0, now
            if config.evaluate_every and self.step % config.evaluate_every == 0:
                self._evaluate(tracker)
                evaluated = self.step
            if config.checkpoint_every and self.step % config.checkpoint_every == 0:
                self._save(f"step-{self.step}")
            self.elapsed = before + time.monotonic() - resumed
        if interrupted and progress < 1:
            self._save(f"step-{self.step}")
            if tracker:
                tracker.say(f"stopped by a signal after step {self.step}, saved; run the same command to go on")
            return
        if evaluated != self.step:
            self._evaluate(tracker)
        self._save("final")
        if tracker:
            final = self.folder.path / "final"
            tracker.say(f"done: {self.step} steps, {self.elapsed / 60:.1f} minutes, modules in {final}")

    def _step(self, progress: float) -> tuple[dict[str, float], int]:
        """Runs one optimizer step and returns its figures and the tokens of the global batch."""
        rate, step_loss = learning_rate(self.config, progress), StepLoss.at(self.config.loss, progress)
        ranks, depths = self.ranks, self.config.modules.depths
        indices = self.order.step(self.step)
        whole = self.rows.take(indices, "cpu")
        # Every rank knows the whole step's rows, so the global counts need no communication.
        cells = whole.supervised(depths).to(ranks.device)
        weights = torch.tensor(step_loss.weights(self.config.loss.beta, depths), device=ranks.device)
        scales = weights * self.engine.accumulation * ranks.world_size / cells.clamp(min=1)
        self.engine.set_learning_rate(rate)
        statistics: Tensor | None = None
        share = micro_batches(indices, self.config.steps.micro_rows, rank=ranks.rank, world_size=ranks.world_size)
        for batch in share:
            rows = self.rows.take(batch, ranks.device)
            inputs = objective_inputs(rows, self.teacher(batch, rows))
            part = self.engine.micro_step(inputs, scales, step_loss)
            statistics = part if statistics is None else statistics + part
        assert statistics is not None
        totals = ranks.sum(statistics)
        self.step += 1
        losses, divergences = (totals[which] / totals[CELLS].clamp(min=1) for which in (LOSS, DIVERGENCE))
        loss = float((losses * weights).sum())
        if not math.isfinite(loss):
            raise UserError(
                f"step {self.step}: the loss is {loss}; stopped, the last checkpoint in {self.folder.path} is from "
                "before it; lower optimizer.learning_rate or check the target's dtype"
            )
        self.trained_tokens += int(cells[0])
        figures = {"train/loss": loss, "train/lr": rate, "train/grad_norm": self.engine.gradient_norm}
        for depth in range(depths):
            figures[f"train/loss_{depth + 1}"] = float(losses[depth])
            if self.soft:
                figures[f"train/kl_{depth + 1}"] = float(divergences[depth])
        return figures, int((whole.documents >= 0).sum())

    def _evaluate(self, tracker: Tracker | None) -> None:
        if self.replay is None:
            return
        ranks = self.ranks
        mine = self.replay.run(self.engine.stack, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device)
        merged = Evaluation.from_tensor(ranks.sum(mine.tensor().to(ranks.device)).cpu())
        if tracker:
            tracker.record(self.step, merged.record())

    def _save(self, name: str) -> None:
        facts = {
            "step": self.step,
            "elapsed": self.elapsed,
            "tokens": self.trained_tokens,
            "world_size": self.ranks.world_size,
            "wandb_id": self.wandb_id,
        }
        training = {
            "step": self.step,
            "trained_tokens": self.trained_tokens,
            "elapsed_seconds": round(self.elapsed, 1),
            "processes": self.ranks.world_size,
            "zero_stage": self.engine.stage,
            "config": self.config.model_dump(mode="json"),
            "draft_vocab_coverage": round(self.reports[0].vocab_coverage, 6),
            "data": [{"file": each.path, "sha256": each.sha256, "records": each.records} for each in self.reports],
            "versions": versions(),
        }
        self.folder.save(name, self.engine, self.contract, self.target, facts, training)
