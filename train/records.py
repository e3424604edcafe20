"""A source of records to tokens: which tokens each has, and which of them are the assistant's.

Sources are opened by train/sources.py, shapes read by train/shapes.py, conversations rendered by train/chat.py and the
tokens kept by train/tokenised.py. A record that cannot be used is skipped and counted by reason; the first ones are
named with file and line.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from mtp import UserError
from mtp.turns import Unusable
from train.chat import Record, Renderer, Vocabulary
from train.config import Source
from train.shapes import SHAPES, to_records
from train.sources import open_source
from train.tokenised import NAMED, Tokenised, cache_key, count_skipped

__all__ = ["ReadReport", "Record", "read_records"]


@dataclass
class ReadReport:
    """What was read from one source, for the log and the provenance; ``epoch_records``: how many an epoch has."""

    path: str
    sha256: str = ""
    records: int = 0
    epoch_records: int | None = None
    cut: int = 0
    vocab_coverage: float = 1.0  # share of the tokens to learn that the draft vocabulary has
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, origin: str, reason: str) -> None:
        """Counts a record that cannot be used; the first ones, and the first of each reason, are named."""
        count_skipped(self.skipped, self.first_skipped, origin, reason)

    def named(self) -> list[str]:
        """Returns where the named ones of the skipped records stand, and why each was skipped."""
        return [f"{origin}: {reason}" for origin, reason in self.first_skipped]

    def named_by_reason(self) -> list[str]:
        """Returns each reason once, with the first record that it was and how many more."""
        firsts = {reason: origin for origin, reason in reversed(self.first_skipped)}
        more = {reason: f" (and {count - 1} more)" if count > 1 else "" for reason, count in self.skipped.items()}
        return [f"{firsts[reason]}: {reason}{more[reason]}" for reason in more if reason in firsts]

    def text(self) -> str:
        """Returns the report as one or more readable lines."""
        epoch = "" if self.epoch_records in (None, self.records) else f", {self.epoch_records} in an epoch"
        said = [f"{self.path}: {self.records} records, {self.cut} of them cut to the row length{epoch}"]
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
            said += [f"warning: {self.path}: {self.skipped.total()} records skipped ({reasons}); first ones:"]
            said += [f"  {each}" for each in self.named()]
        return "\n".join(said)


def read_records(
    source: Source | str, target: Vocabulary, *, cache: Path | None = None, write: bool = True
) -> tuple[list[Record], ReadReport]:
    """Reads a source, in order.

    Args:
        source: the source, or its path.
        cache: folder of tokenised sources; None: nothing is kept.
        write: whether to keep what was tokenised; of several processes one should.

    Raises:
        UserError: the source cannot be read, or has no usable record (the first reasons are named), or a record
            shows that no record can be used with this target.
    """
    source = Source(source=source) if isinstance(source, str) else source
    opened, renderer = open_source(source), Renderer(target)
    report = ReadReport(source.source, opened.digest())
    kept = cache and cache / f"{cache_key(report.sha256, source.shape, renderer)}.safetensors"
    tokenised = Tokenised.load(kept) if kept else None
    if tokenised is None:
        tokenised = Tokenised()
        for number, value in tqdm(opened.values(), desc=f"reading {source.source}", unit=" records", disable=None):
            try:
                for record in to_records(value, source.shape, renderer):
                    tokenised.add(number, record)
            except Unusable as unusable:
                tokenised.skip(number, str(unusable))
            except UserError as error:
                raise UserError(f"{source.source}:{number}: {error}") from None
        if kept and write and tokenised.ends:
            tokenised.save(kept)
    report.skipped = tokenised.skipped
    report.first_skipped = [(f"{source.source}:{number}", reason) for number, reason in tokenised.first_skipped]
    records = tokenised.records(source.source)
    report.records = len(records)
    if not records:
        named = "; ".join(report.named_by_reason()[:NAMED]) or "it is empty"
        shapes = ", ".join(" + ".join(fields) for fields, _ in SHAPES.values())
        raise UserError(f"{source.source}: no usable record ({named}); a record is an object with {shapes}")
    return records, report
