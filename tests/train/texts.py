"""Targets with a tokenizer of one character a token, and what a record teaches, as text."""

import json

from tokenizers import processors
from transformers import AutoTokenizer

from tests.builders import make_target
from tests.infer.conftest import TEMPLATE, save_tokenizer
from train.records import read_records

END = 3  # <|end|>


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return str(path)


def chat_target(folder, template=TEMPLATE, *, bos=None, pad=None, added=(), eos=END):
    """Returns a target whose tokenizer has this template; ``bos``: printed before every text, as Llama's is."""
    save_tokenizer(folder, template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if bos:
        tokenizer.bos_token = bos
        post = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))])
        tokenizer.backend_tokenizer.post_processor = post
    if pad:
        tokenizer.pad_token = pad
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    target = make_target(vocab_size=120, eos_token_id=eos)
    target.name = str(folder)
    return target


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def texts(record, target):
    """Returns the whole record as text, and the runs of it that are to learn."""
    tokens = AutoTokenizer.from_pretrained(target.name).convert_ids_to_tokens(list(record.token_ids))
    runs, before = [], False
    for token, learn in zip(tokens, record.learn, strict=True):
        if learn and not before:
            runs.append("")
        if learn:
            runs[-1] += token
        before = learn
    return "".join(tokens), runs


def read(folder, target, *lines, **source):
    """Returns text and runs to learn of every record, and the reasons why others were skipped."""
    path = write(folder / "data.jsonl", *lines)
    records, report = read_records(source.pop("source", path), target, **source)
    return [texts(record, target) for record in records], dict(report.skipped)
