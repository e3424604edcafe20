"""Cells by row: key/value tables in which slot t *is* row t, and the two contexts of a forward.

Correcting is overwriting slots; rolling back is forgetting a length. What lies beyond a sequence's
last row is never visible (``s <= t``), so it needs no clean-up.

Shapes: B sequences, R rows of the pass, S slots, heads first where transformers wants them.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mtp import alignment


class KeyValueStore(Protocol):
    """What a decoder layer of transformers asks of its ``cache`` argument."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]: ...


class CellTable:
    """Keys and values of one layer, [sequences, slots, heads, head_dim], grown on demand."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def _grown(self, table: Tensor | None, like: Tensor, slots: int) -> Tensor:
        if table is not None and table.shape[1] >= slots:
            return table
        old = 0 if table is None else table.shape[1]
        capacity = max(2 * old, -(-slots // 128) * 128)
        # Zeros, not empty: a masked slot still enters the softmax as 0 * value, and 0 * NaN is NaN.
        grown = like.new_zeros(self.sequences, capacity, like.shape[1], like.shape[3])
        if table is not None:
            grown[:, :old] = table
        return grown

    def write(self, keys: Tensor, values: Tensor, cells: "Cells") -> tuple[Tensor, Tensor]:
        """Overwrites the slots of ``cells.rows`` and returns all slots up to the longest sequence.

        Args:
            keys, values: [B, heads, R, head_dim] of the rows of this pass.

        Returns:
            Keys and values [B, heads, S, head_dim], views of the table.
        """
        self.keys = self._grown(self.keys, keys, cells.slots)
        self.values = self._grown(self.values, values, cells.slots)
        batch = torch.arange(keys.shape[0], device=keys.device)[:, None]
        stored_keys, stored_values = self.keys[cells.sequences], self.values[cells.sequences]
        stored_keys[batch, cells.rows] = keys.transpose(1, 2)
        stored_values[batch, cells.rows] = values.transpose(1, 2)
        return stored_keys[:, : cells.slots].transpose(1, 2), stored_values[:, : cells.slots].transpose(1, 2)

    def move(self, source: int, destination: int) -> None:
        """Copies one sequence's slots over another's."""
        if self.keys is not None and self.values is not None:
            self.keys[destination] = self.keys[source]
            self.values[destination] = self.values[source]


class Context(Protocol):
    """What differs between training and decoding, for the one forward of target and modules."""

    @property
    def rows(self) -> Tensor:
        """Row of each query inside its own document or sequence, [B, R]."""
        ...

    def visible(self, window: int | None) -> Tensor:
        """Returns bool [B, 1, R, S]: which keys each query sees."""
        ...

    def store(self, *, index: int | None) -> KeyValueStore | None:
        """Returns where layers put keys and values: of module ``index``, or of the target (None)."""
        ...


@dataclass(frozen=True)
class Packed:
    """Whole rows of packed documents, nothing cached: training, evaluation, and the reference of ``check``.

    Attributes:
        documents: int [B, n], ascending document ids, ``alignment.PADDING`` where there is none.
        recorder: sees the keys and values on their way, unchanged.
    """

    documents: Tensor
    recorder: "Recorder | None" = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> Tensor:
        return alignment.positions_in_documents(self.documents)

    def visible(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = alignment.visible_in_documents(self.documents, window)
        return self._masks[window]

    def store(self, *, index: int | None) -> KeyValueStore | None:
        return None if self.recorder is None else _RecordingStore(self.recorder, index)

    def first_rows(self, count: int) -> "Packed":
        """Returns the context of the first ``count`` rows."""
        if count == self.documents.shape[1]:
            return self
        masks = {window: mask[:, :, :count, :count] for window, mask in self._masks.items()}
        return Packed(self.documents[:, :count], self.recorder, masks)


@dataclass(frozen=True)
class PackedSteps:
    """Unrolls one module over packed documents, each step on the keys of the steps before it.

    The context of step ``index`` (0: before the first): a query of row t is the step started at row t of its document.
    """

    packed: Packed
    index: int = 0
    _kept: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    @property
    def rows(self) -> Tensor:
        return alignment.step_rows(self.packed.rows, index=self.index)

    def visible(self, window: int | None) -> Tensor:
        return alignment.visible_in_steps(self.packed.documents, window, index=self.index)

    def store(self, *, index: int | None) -> KeyValueStore:
        return _StepStore(self)

    def next_step(self, count: int) -> "PackedSteps":
        """Returns the context of the step after this one, for its first ``count`` rows."""
        kept = [(keys[:, :, :count], values[:, :, :count]) for keys, values in self._kept]
        return PackedSteps(self.packed.first_rows(count), self.index + 1, kept)


@dataclass(frozen=True)
class _StepStore:
    steps: PackedSteps

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.steps.packed.recorder is not None:
            self.steps.packed.recorder.cells[self.steps.index] = (keys.transpose(1, 2), values.transpose(1, 2))
        self.steps._kept[self.steps.index - 1 :] = [(keys, values)]  # once, also if backward runs the step again
        all_keys, all_values = zip(*self.steps._kept, strict=True)
        return torch.cat(all_keys, dim=2), torch.cat(all_values, dim=2)


class Recorder:
    """Keeps the keys and values that layers of the modules computed: ``cells[index] = (keys, values)``."""

    def __init__(self) -> None:
        self.cells: dict[int, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class _RecordingStore:
    recorder: Recorder
    index: int | None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.index is not None:
            self.recorder.cells[self.index] = (keys.transpose(1, 2), values.transpose(1, 2))
        return keys, values


@dataclass(frozen=True)
class Cells:
    """Some rows of some sequences, their keys and values kept by row: decoding and prefill.

    Attributes:
        tables: one table per target layer, or one per module.
        rows: int [B, R], the rows of this pass; a row may appear twice.
        sequences: which sequences of the tables these are.
        slots: S, slots to look at: at least the largest row + 1.
    """

    tables: list[CellTable]
    rows: Tensor
    sequences: slice
    slots: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = alignment.visible_slots(self.rows, self.slots, window)
        return self._masks[window]

    def store(self, *, index: int | None) -> KeyValueStore:
        return _CellStore(self, index)


@dataclass(frozen=True)
class _CellStore:
    """A module's block carries the target's last layer index, so the module index chooses its table."""

    cells: Cells
    index: int | None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        table = self.cells.tables[layer_idx if self.index is None else self.index - 1]
        return table.write(keys, values, self.cells)
