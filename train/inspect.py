"""Look at the data: ``python -m train.inspect --config FILE [key=value ...] [--records N]``.

Shows what training would read, after every cut: some records with the tokens to learn marked, what was skipped and
why, and how long the records are. The target's weights are not loaded. What was tokenised is kept for the run.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import transformers

from mtp import UserError
from mtp.commands import run_command
from mtp.errors import one_line
from mtp.target import eos_token_ids
from train.chat import Record, Renderer
from train.config import Config, load_config
from train.data import read_training

PERCENTILES = (0, 10, 25, 50, 75, 90, 95, 99, 100)
BINS, BAR = 10, 40
COLOUR, PLAIN = ("\033[32m", "\033[0m"), ("[[", "]]")
# What could move the cursor or ring the bell is shown as an escape; line breaks stay.
CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


@dataclass(frozen=True)
class TargetVocabulary:
    """What of a target its text depends on, without its weights."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, name: str) -> "TargetVocabulary":
        """Reads a target's configs; raises :class:`UserError` if there are none."""
        try:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
        except Exception as error:  # whatever a library makes of a damaged folder
            raise UserError(f"target {name!r} cannot be read ({one_line(error)}); check target") from None
        try:
            generation = transformers.GenerationConfig.from_pretrained(name)
        except Exception:  # there is none, or one that transformers ignores as well
            generation = None
        return cls(name, config.vocab_size, eos_token_ids(config, generation))


def show(record: Record, renderer: Renderer, marks: tuple[str, str]) -> str:
    """Returns a record as text, with what is to learn between marks; as ids if there is no tokenizer."""
    runs: list[tuple[bool, list[int]]] = []
    for token, learn in zip(record.token_ids, record.learn, strict=True):
        if not runs or runs[-1][0] != bool(learn):
            runs.append((bool(learn), []))
        runs[-1][1].append(token)
    parts = []
    for learn, ids in runs:
        try:
            text = renderer.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except UserError:
            text = " ".join(map(str, ids)) + " "
        text = text.translate(CONTROL)
        parts.append(f"{marks[0]}{text}{marks[1]}" if learn else text)
    return "".join(parts)


def histogram(lengths: Sequence[int]) -> str:
    """Returns percentiles and a histogram of lengths as lines of text."""
    values = np.percentile(lengths, PERCENTILES, method="inverted_cdf").astype(int)
    percentiles = "  ".join(f"p{percent} {value}" for percent, value in zip(PERCENTILES, values, strict=True))
    edges = np.unique(np.linspace(min(lengths), max(lengths) + 1, BINS + 1).astype(int))
    counts, _ = np.histogram(lengths, edges)
    lines = [f"tokens a record: {percentiles}"]
    for low, high, count in zip(edges[:-1], edges[1:] - 1, counts, strict=True):
        lines.append(f"{low:>8}-{high:<8} {count:>9} {'#' * round(BAR * count / max(counts))}".rstrip())
    return "\n".join(lines)


def inspect(config: Config, records: int, colour: bool) -> str:
    """Returns the whole picture as text; raises :class:`UserError` for what the user can fix."""
    target = TargetVocabulary.load(config.target)
    epoch, reports = read_training(config, target)
    renderer, said = Renderer(target), []
    for place in np.linspace(0, len(epoch) - 1, min(records, len(epoch))).round().astype(int):
        record = epoch[place]
        said.append(f"--- {record.origin}: {len(record.token_ids)} tokens, {sum(record.learn)} to learn")
        said.append(show(record, renderer, COLOUR if colour else PLAIN))
    said.append("---" if said else "")
    said += [report.text() for report in reports]
    tokens, learn = sum(len(record.token_ids) for record in epoch), sum(sum(record.learn) for record in epoch)
    ended = sum(record.token_ids[-1] in target.eos_token_ids for record in epoch)
    said.append(f"an epoch: {len(epoch)} records, {tokens} tokens, {learn} to learn ({learn / tokens:.1%})")
    said.append(f"records that end with an end-of-sequence token: {ended} ({ended / len(epoch):.1%})")
    said.append(histogram([len(record.token_ids) for record in epoch]))
    return "\n".join(said).lstrip("\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m train.inspect", description="Shows what training would read.")
    parser.add_argument("--config", required=True, help="YAML file, here or among the shipped configs")
    parser.add_argument("--records", type=int, default=3, help="how many to show, spread over the data (default 3)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.records < 0:
        parser.error("argument --records: must not be negative")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return run_command(lambda: print(inspect(load_config(options.config, options.overrides), options.records, colour)))


if __name__ == "__main__":
    sys.exit(main())
