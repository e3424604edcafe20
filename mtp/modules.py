"""One MTP module, and the stack of k: one forward for training, prefill and decoding.

Submodule names are those of transformers' ``MtpLayer`` (enorm, hnorm, eh_proj, mtp_block,
post_norm), so weights interchange. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; what
families do differently is in the contract, never in a branch on a model's name.

Shapes: B sequences, R rows, H hidden size.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtp import alignment
from mtp.cache import Context, Packed, PackedSteps
from mtp.contract import Contract
from mtp.errors import UserError
from mtp.target import Target


class ModuleOutput(NamedTuple):
    """``hidden`` [B, R, H] for the next module, ``final`` [B, R, H] for the head (always after ``post_norm``)."""

    hidden: Tensor
    final: Tensor


class MTPModule(nn.Module):
    """The weights of one module; :class:`MTPStack` gives them their inputs."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        size = target.hidden_size
        self.enorm = target.new_norm()
        self.hnorm = target.new_norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device=target.device, dtype=target.dtype)
        self.mtp_block = target.new_block()
        self.post_norm = target.new_post_norm()


class MTPStack(nn.Module):
    """k modules on a frozen target. The target is not a submodule: its weights are in no state dict here."""

    def __init__(self, contract: Contract, target: Target) -> None:
        """Makes new modules, blocks copied from the target's last layer.

        Raises:
            UserError: the draft vocabulary does not fit the target.
        """
        super().__init__()
        self.contract = contract
        self._target = (target,)  # in a tuple, hidden from nn.Module
        self.layers = nn.ModuleList([MTPModule(target) for _ in range(contract.num_modules)])
        self.head = target.head.restricted(contract.draft_vocab)
        self.activation_checkpointing = False  # if true, training keeps the modules' inputs and runs them twice

    @property
    def target(self) -> Target:
        return self._target[0]

    def forward(self, hidden: Tensor, tokens: Tensor, context: Context, *, index: int) -> ModuleOutput:
        """Runs module ``index`` (from 1) over the cells at the context's rows; the steps of ``recursive`` share one.

        Args:
            hidden: [B, R, H], ``h^{i-1}`` of those rows (module 1, or every module of ``target_fed``: ``H``).
            tokens: int [B, R], ``x_{t+i}`` of those rows (``recursive``: the token after the row they stand at).
            context: packed documents, or cells by row.

        Raises:
            UserError: there is no module ``index``.
        """
        module_index = 1 if self.contract.recursive else index
        if not 1 <= module_index <= len(self.layers):
            raise UserError(f"module {index} does not exist: the checkpoint has modules 1..{len(self.layers)}")
        module, target, contract = cast(MTPModule, self.layers[module_index - 1]), self.target, self.contract
        dtype = module.eh_proj.weight.dtype
        embedded = target.embed(tokens).to(dtype)
        if contract.mask_first_embedding:
            embedded = embedded.masked_fill((context.rows == 0)[..., None], 0)
        parts = [module.enorm(embedded), module.hnorm(hidden.to(dtype))]
        if contract.concat == "hidden_first":
            parts.reverse()
        projected = module.eh_proj(torch.cat(parts, dim=-1))
        positions = alignment.rope_positions(context.rows, contract.positions, index=module_index)
        before_norm = target.run_block(module.mtp_block, projected, context, positions, index=module_index)
        final = module.post_norm(before_norm)
        return ModuleOutput(final if contract.chain_hidden == "post_norm" else before_norm, final)

    def next_input(self, hidden: Tensor, output: ModuleOutput) -> Tensor:
        """Returns what module i+1 reads, given what module i read and gave."""
        return hidden if self.contract.recurrence == "target_fed" else output.hidden

    def unroll(self, hidden: Tensor, tokens: Tensor, context: Packed) -> Iterator[tuple[int, ModuleOutput]]:
        """Yields ``(index, output)`` of every module over whole packed rows: *the* training forward.

        Args:
            hidden: [B, n, H], the target's hidden states at the contract's point.
            tokens: int [B, n].

        Module i gives rows 0..n-1-i; modules with no row left (n <= i) are not run. For ``recursive`` row t of
        step i is the step started at row t.
        """
        steps = PackedSteps(context)
        for index in range(1, min(self.contract.draft_steps, tokens.shape[1] - 1) + 1):
            hidden = alignment.module_rows(hidden, tokens, index=index)
            read = alignment.cell_tokens(tokens, index=index)
            if self.contract.recursive:
                steps = steps.next_step(read.shape[1])
            here = steps if self.contract.recursive else context.first_rows(read.shape[1])
            run = functools.partial(self, context=here, index=index)
            recompute = self.activation_checkpointing and torch.is_grad_enabled()
            output = checkpoint(run, hidden, read, use_reentrant=False) if recompute else run(hidden, read)
            yield index, output
            hidden = self.next_input(hidden, output)
