"""Target-generated conversations as JSONL: the text that modules should be trained on.

Each line holds the exact token ids, so that no later tokenisation can differ from what the target
wrote. A line is written when its answer is complete; a rerun continues where the last one stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from infer.engine import Engine
from infer.prompts import Prompt, conversation
from infer.requests import Completion, Request
from mtp import Target, UserError
from mtp.files import append_line, open_lines, write_atomic

SETTINGS_SUFFIX = ".settings.json"


def prompt_id(prompt: Prompt) -> str:
    """Returns a short name of the prompt's tokens, the key of resuming."""
    return hashlib.sha256(" ".join(map(str, prompt.token_ids)).encode()).hexdigest()[:16]


def written_ids(output: Path, settings: dict[str, Any]) -> set[str]:
    """Returns the ids of complete lines in an earlier output; a half-written last line is cut off.

    Raises:
        UserError: the output was made with other settings, or is not ours.
    """
    if not output.name or output.is_dir():
        raise UserError(f"--output {str(output)!r} is not the path of a file; give one, answers.jsonl say")
    settings_path = output.with_name(output.name + SETTINGS_SUFFIX)
    if not output.exists():
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(settings_path, json.dumps(settings, indent=1) + "\n")
            output.touch()
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None
        return set()
    try:
        earlier = json.loads(settings_path.read_text(encoding="utf-8"))
        earlier["target"] = settings["target"]  # its name may change; the fingerprint is what counts
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"{output} exists, but {settings_path.name} beside it does not; choose another --output"
        ) from None
    if differing := sorted(key for key in settings.keys() | earlier.keys() if settings.get(key) != earlier.get(key)):
        raise UserError(f"{output} was written with another {', '.join(differing)}; choose another --output")
    content = output.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        with output.open("r+b") as file:
            file.truncate(len(complete))
    ids = set()
    for number, line in enumerate(complete.splitlines(), start=1):  # of bytes: U+2028 ends no line
        try:
            ids.add(json.loads(line)["distill_id"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{output}:{number}: not a line of distill; mend or remove it, then run again") from None
    return ids


class Distillation:
    """Continues every prompt greedily and appends one line each to ``output``."""

    def __init__(self, target: Target, prompts: list[Prompt], output: Path, *, max_new_tokens: int) -> None:
        """Finds what an earlier run has left to do.

        Raises:
            UserError: the output was made with other settings.
        """
        settings = {
            "target": target.name,
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype),
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
        }
        self.target, self.output = target, output
        by_id = {prompt_id(prompt): prompt for prompt in prompts}
        requests = {key: Request(prompt.token_ids, max_new_tokens, n) for n, (key, prompt) in enumerate(by_id.items())}
        done = written_ids(output, settings)
        self._keys, self._prompts = list(by_id), list(by_id.values())
        self.todo = [request for key, request in requests.items() if key not in done]
        self.already_done = len(requests) - len(self.todo)

    def run(
        self, decode: Callable[[list[int]], str], *, batch_size: int, max_minutes: float | None = None
    ) -> Iterator[Completion]:
        """Yields every completion once its line is written.

        Args:
            decode: token ids to text, for the readable ``messages`` of a line.
            max_minutes: stop after this long; what is written stays, and a rerun goes on.

        Raises:
            UserError: the output cannot be written.
        """
        started = time.monotonic()
        with open_lines(self.output) as file:
            for completion in Engine(self.target, batch_size=batch_size).generate(self.todo):
                place = completion.request.key
                answer = decode(completion.token_ids)
                record = _record(self._keys[place], self._prompts[place], completion, answer)
                try:
                    append_line(file, json.dumps(record, ensure_ascii=False))
                except OSError as error:
                    raise UserError(
                        f"{self.output}: {error.strerror}; complete lines are kept, run again to go on"
                    ) from None
                yield completion
                if max_minutes is not None and time.monotonic() - started > 60 * max_minutes:
                    return


def _record(key: str, prompt: Prompt, completion: Completion, answer: str) -> dict[str, Any]:
    left_out = ("prompt", "prompt_ids", "conversations", "system")
    record = {name: value for name, value in prompt.source.items() if name not in left_out}
    if "prompt_ids" not in prompt.source:
        record["messages"] = [*conversation(prompt.source), {"role": "assistant", "content": answer}]
    return record | {
        "distill_id": key,  # ours alone: a prompt may have an id of its own
        "prompt_ids": list(prompt.token_ids),
        "response_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
