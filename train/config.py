"""What a run is: nested settings with one precedence, defaults < YAML file < ``key=value`` flags.

Every key is known; a misspelt one is refused with the nearest valid name.
"""

import difflib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field

from mtp import Contract, UserError
from mtp.resources import resource
from train.parse import parse_json, parse_yaml

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every group of settings: immutable, and no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


class Modules(Section):
    """The modules and their recurrence; the fields are those of the contract.

    ``draft_steps`` is needed for ``recursive`` only: how many steps its one module is unrolled for.
    """

    num_modules: PositiveInt = 3
    draft_steps: PositiveInt | None = None
    recurrence: str = "chained"
    target_hidden: str = "post_norm"
    chain_hidden: str = "post_norm"
    concat: str = "embed_first"
    positions: str = "row"
    mask_first_embedding: bool = False
    draft_vocab_size: PositiveInt | None = None
    draft_vocab_coverage: Annotated[float, Field(gt=0, le=1)] | None = None

    @pydantic.model_validator(mode="after")
    def _one_draft_vocab(self) -> "Modules":
        if self.draft_vocab_size is not None and self.draft_vocab_coverage is not None:
            raise ValueError("set draft_vocab_size or draft_vocab_coverage, not both")
        return self

    def contract(self, draft_vocab: tuple[int, ...] | None) -> Contract:
        """Returns the contract of these modules; raises :class:`UserError` for an unsupported value."""
        if self.recurrence == "recursive" and (self.num_modules != 1 or self.draft_steps is None):
            raise UserError(
                "modules.recurrence: recursive trains one module for several steps; give modules.num_modules=1 and "
                "modules.draft_steps=3, say"
            )
        fields = self.model_dump(exclude={"draft_vocab_size", "draft_vocab_coverage", "draft_steps"})
        return Contract(**fields, draft_steps=self.depths, draft_vocab=draft_vocab)

    @property
    def depths(self) -> int:
        """Returns k, how many drafts a round are trained."""
        return self.draft_steps or self.num_modules


class Source(Section):
    """One source of records: a JSONL, JSON (a list) or Parquet file, either of the first two also gzipped; a folder or
    a hub name that the ``datasets`` library loads, with its ``subset`` and ``split``.

    ``shape`` names what a record is; without it each record says so by its fields (train/shapes.py).
    """

    source: str
    shape: Literal["messages", "conversations", "prompt_completion", "text", "input_ids", "prompt_ids"] | None = None
    subset: str | None = None
    split: str = "train"

    @pydantic.model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, (str, int)) else value


class WeightedSource(Source):
    """A source and how often an epoch reads it: weight 1 reads every record once, 2 twice, 0.5 half of the records.

    The half is drawn by the seed and is the same in every epoch. Weights do not depend on each other: two sources
    of weight 1 are simply read one after the other, and packed together.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0


class Data(Section):
    """Text to learn from. ``train`` is one source (a path is enough) or a list of weighted ones; ``heldout`` is one.

    ``supervise`` names the tokens that count as labels. ``packing``: whole documents fill a row of ``row_length``
    tokens, apart from each other in attention and labels, or each has a row of its own; the loss is the same.
    ``cache`` is the folder of tokenised sources, ``<output>/tokens`` if not given.

    ``keep_hidden`` keeps the target's hidden states in memory over epochs; ``hidden_states`` is a folder that
    ``python -m train.hidden`` wrote, read instead of running the target.
    """

    train: tuple[WeightedSource, ...]
    heldout: Source | None = None
    row_length: Annotated[int, Field(ge=4)] = 512
    packing: Literal["documents", "one_per_row"] = "documents"
    cache: str | None = None
    supervise: Literal["assistant", "all"] = "assistant"
    keep_hidden: bool = False
    hidden_states: str | None = None

    @pydantic.field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if value in ([], None):
            raise ValueError("name a file, a folder or a data set")
        return value if isinstance(value, (list, tuple)) else [value]

    @property
    def names(self) -> str:
        """Returns the training sources as they were given, for messages."""
        return ", ".join(source.source for source in self.train)


class Loss(Section):
    """Depth i weighs beta^(i-1), or ``step_weights[i-1]``; normalised to sum 1. ``chunk_rows`` bounds the memory of
    head and loss.

    The kinds are defined in train/objective.py; ``lk`` and ``tv`` learn by ``kl`` until ``kl_warmup_fraction`` is done.
    """

    kind: Literal["kl", "cross_entropy", "lk", "tv"] = "kl"
    kl_warmup_fraction: Fraction = 0.5
    beta: Annotated[float, Field(gt=0, le=1)] = 0.6
    step_weights: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    chunk_rows: PositiveInt = 256


class Init(Section):
    """What new modules start from: the target's last layer, random weights, or a checkpoint with at most as many.

    Modules that the checkpoint lacks are copied from its last one; ``freeze`` leaves the others as they are.
    """

    block: Literal["last_layer", "random"] = "last_layer"
    checkpoint: str | None = None
    freeze: bool = False

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "Init":
        if self.freeze and self.checkpoint is None:
            raise ValueError("freeze needs checkpoint, the modules to freeze")
        if self.checkpoint is not None and self.block == "random":
            raise ValueError("block: random and checkpoint exclude each other: new modules are copied from its last")
        return self


class Optimizer(Section):
    """AdamW; linear warm-up, then ``schedule`` down to ``min_lr_fraction`` of the learning rate (``constant``: not)."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_fraction: Fraction = 0.05
    min_lr_fraction: Fraction = 0.1
    gradient_clip: Annotated[float, Field(gt=0)] | None = 1.0


class Steps(Section):
    """Length of the run (whichever limit comes first) and the batch: ``rows_per_step`` over all ranks."""

    epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    rows_per_step: PositiveInt = 8
    micro_rows: PositiveInt = 4

    @pydantic.model_validator(mode="after")
    def _limited(self) -> "Steps":
        if self.epochs is None and self.max_steps is None and self.max_minutes is None:
            raise ValueError("set at least one of epochs, max_steps, max_minutes")
        return self


class Wandb(Section):
    """Where wandb logs go; without a key the run is logged offline."""

    project: str = "mtp"
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


class Config(Section):
    """One run of the trainer."""

    target: str
    output: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    modules: Modules = Modules()
    init: Init = Init()
    data: Data
    loss: Loss = Loss()
    activation_checkpointing: bool = False
    optimizer: Optimizer = Optimizer()
    steps: Steps
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt | None = None
    checkpoint_every: PositiveInt | None = None
    keep_checkpoints: PositiveInt = 2
    deepspeed: str | dict[str, Any] | None = None
    wandb: Wandb | None = None

    @pydantic.model_validator(mode="after")
    def _a_weight_for_each_draft(self) -> "Config":
        weights, drafts = self.loss.step_weights, self.modules.depths
        if weights is not None and len(weights) != drafts:
            raise ValueError(f"loss.step_weights: {len(weights)} weights for {drafts} drafts; give one for each")
        return self


def without_effect(config: Config) -> list[str]:
    """Returns a sentence for each setting that was given, but that this run never reads."""
    kind, modules, optimizer = config.loss.kind, config.modules, config.optimizer
    unread = (
        (
            config.loss,
            "loss.kl_warmup_fraction",
            kind in ("kl", "cross_entropy") and f"loss.kind {kind} has no warm-up",
        ),
        (config.loss, "loss.beta", config.loss.step_weights and "loss.step_weights are given"),
        (optimizer, "optimizer.min_lr_fraction", optimizer.schedule == "constant" and "the schedule is constant"),
        (modules, "modules.chain_hidden", modules.recurrence == "target_fed" and "target_fed has no chain"),
        (config, "evaluate_every", config.data.heldout is None and "data.heldout is not set"),
        (config, "keep_checkpoints", config.checkpoint_every is None and "checkpoint_every is not set"),
    )
    return [
        f"{name} = {value} has no effect: {why}"
        for section, name, why in unread
        if why and (field := name.split(".")[-1]) in section.model_fields_set
        if (value := getattr(section, field)) is not None
    ]


def find_file(name: str, what: str) -> Path:
    """Returns the path of a file given by the user, or of the shipped one of that name.

    Raises:
        UserError: neither exists.
    """
    if Path(name).is_file():
        return Path(name)
    if not Path(name).is_absolute() and (shipped := resource(name) or resource(name.removeprefix("configs/"))):
        return shipped
    raise UserError(f"{what} {name!r}: no such file here, nor among the shipped configs; check the path")


def load_config(name: str, overrides: list[str]) -> Config:
    """Returns the settings of a YAML file with ``dotted.key=value`` overrides on top.

    Raises:
        UserError: missing file, broken YAML, an unknown key or a wrong value, named in full.
    """
    path = find_file(name, "config")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({' '.join(str(error).split())})") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected settings as 'key: value' lines, found {type(values).__name__}")
    flags = [_set_override(values, override) for override in overrides]
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        raise UserError("; ".join(_explain(problem, path, flags) for problem in error.errors()[:5])) from None


def _set_override(values: dict[str, Any], override: str) -> str:
    """Puts one ``dotted.key=value`` into nested values and returns its dotted key."""
    key, separator, text = override.partition("=")
    key = key.strip().removeprefix("--")
    if not separator or not all(key.split(".")):
        raise UserError(f"argument {override!r}: expected dotted.key=value, for example steps.max_steps=100")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"flag {override!r}: the value is not YAML ({' '.join(str(error).split())})") from None
    *parents, last = key.split(".")
    inner = values
    for parent in parents:
        if inner.get(parent) is None:
            inner[parent] = {}
        inner = inner[parent]
        if not isinstance(inner, dict):
            raise UserError(f"flag {override!r}: {parent!r} is a single value and has no keys of its own")
    inner[last] = value
    return key


def _explain(problem: Any, path: Path, flags: list[str]) -> str:
    """Returns one validation problem as a sentence: where it stands, its dotted name, what to do."""
    names = [str(part) for part in problem["loc"]]
    dotted = ".".join(names)
    where = f"flag {dotted}=" if dotted in flags else str(path)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {dotted!r}; {_suggestion(names)}"
    if problem["type"] == "missing":
        return f"{where}: key {dotted!r} is required; add it to the file or give {dotted}=..."
    known = [name for name in names if name.isidentifier() or name.isdigit()]
    known = [name for name in known if name not in ("str", "dict", "int", "float")]
    key = f"{'.'.join(known)}: " if known else ""
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = "" if isinstance(given, dict) else f", not {given!r}"
    return f"{where}: {key}{message[:1].lower()}{message[1:]}{shown}"


def _suggestion(names: list[str]) -> str:
    model: type[BaseModel] = Config
    for name in names[:-1]:
        if not name.isdigit():  # the place in a list
            model = _section(model.model_fields[name].annotation)
    prefix = ".".join(names[:-1])
    here = {name: f"{prefix}.{name}".removeprefix(".") for name in model.model_fields}
    everywhere = {dotted.rsplit(".")[-1]: dotted for dotted in _all_keys(Config)}
    for candidates, cutoff in ((here, 0.5), (everywhere, 0.7)):
        if near := difflib.get_close_matches(names[-1], candidates, n=1, cutoff=cutoff):
            return f"did you mean {candidates[near[0]]!r}?"
    return f"valid keys are {', '.join(here.values())}"


def _section(annotation: Any) -> type[BaseModel]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        inside = isinstance(section, type) and issubclass(section, BaseModel)
        keys += _all_keys(section, f"{prefix}{name}.") if inside else [prefix + name]
    return keys


def available_device(config: Config) -> str:
    """Returns ``cpu`` or ``cuda``; raises :class:`UserError` if the run's device is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda is not available here; set device: cpu or auto")
    return ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device


def accumulation(config: Config, world_size: int) -> int:
    """Returns micro batches per optimizer step and rank.

    Raises:
        UserError: the global batch does not divide over the ranks.
    """
    steps = config.steps
    if steps.rows_per_step % (steps.micro_rows * world_size):
        raise UserError(
            f"steps.rows_per_step = {steps.rows_per_step} is not a multiple of steps.micro_rows = {steps.micro_rows} "
            f"times {world_size} processes; change one of the three"
        )
    return steps.rows_per_step // (steps.micro_rows * world_size)


def read_deepspeed(setting: str | dict[str, Any] | None) -> dict[str, Any]:
    """Returns the deepspeed settings of a run as a dict: inline, from a JSON file, or empty.

    Raises:
        UserError: the file is missing or is not a JSON object.
    """
    if not isinstance(setting, str):
        return dict(setting or {})
    path = find_file(setting, "deepspeed config")
    try:
        values = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object of deepspeed settings, found {type(values).__name__}")
    return values
