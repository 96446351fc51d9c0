"""The LightningModule: one batch is one optimizer step, split into as many forward passes as memory asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from gatedlm import loss
from gatedlm.data.packing import END_OF_TEXT, document_ids
from gatedlm.model.feedforward import Routing
from gatedlm.model.lm import GatedLM, initialise
from gatedlm.recipe import OptimSpec, Recipe
from gatedlm.training.strategy import distribute


def learning_rate(step: int, optim: OptimSpec, steps: int) -> float:
    """The rate of optimizer step ``step`` (from 0): lr (step+1)/warmup, then cosine to floor x lr, which it keeps.

    A function of the step alone, so that it depends neither on ranks nor on micro-batches.
    """
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    done = min(1.0, (step - optim.warmup) / max(1, steps - optim.warmup))
    return optim.lr * (optim.floor + (1 - optim.floor) * (1 + math.cos(math.pi * done)) / 2)


def parameter_groups(net: GatedLM, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's two groups: matrices decay; norms and the score tables of input-independent gates do not."""
    matrices, others = [], []
    for name, parameter in net.named_parameters():
        (matrices if parameter.ndim > 1 and not name.endswith("score.table") else others).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class LitLM(L.LightningModule):
    """Trains a ``GatedLM`` by manual optimisation; batches are (B, T + 1) token ids, this rank's share.

    Losses are sums over tokens divided by the valid tokens of the global batch, so that neither the number of ranks nor
    that of micro-batches changes what is minimised. ``anew`` says that the checkpoint to load is another run's: its
    weights hold, its steps and rates do not, its optimizer's state if the recipe keeps that.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe, self.anew = recipe, False
        with torch.device("meta"):
            self.net = GatedLM(recipe.model)

    def configure_model(self) -> None:
        if not self.net.embed.weight.is_meta:
            return
        distribute(self.net, self.trainer.strategy, self.recipe.trainer)
        self.net.to_empty(device=self.trainer.strategy.root_device)
        initialise(self.net, self.recipe.seed)

    def configure_optimizers(self) -> dict[str, Any]:
        optim, steps = self.recipe.optim, self.recipe.trainer.steps
        groups = parameter_groups(self.net, optim.weight_decay)
        optimizer = AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        schedule = LambdaLR(optimizer, lambda step: learning_rate(step, optim, steps) / optim.lr)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """One process numbers the optimizer's parameters, its groups one after the other; shards go by names."""
        for state in checkpoint["optimizer_states"]:
            _rename(state, dict(enumerate(self._optimized())))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.anew:
            checkpoint |= {"loops": None, "lr_schedulers": [], "callbacks": {}}
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            for state in checkpoint["optimizer_states"]:
                _rename(state, {name: number for number, name in enumerate(self._optimized())})

    def _optimized(self) -> list[str]:
        """Names of the parameters in the optimizer's order."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        groups = parameter_groups(self.net, self.recipe.optim.weight_decay)
        return [names[parameter] for group in groups for parameter in group["params"]]

    def on_train_start(self) -> None:
        """What the recipe says of the optimizer holds from here on, whatever a checkpoint was trained with."""
        optimizer, schedule, optim = self.optimizers(), self.lr_schedulers(), self.recipe.optim
        assert isinstance(optimizer, LightningOptimizer) and isinstance(schedule, LambdaLR)
        if self.anew and optim.state == "fresh":
            optimizer.state.clear()
        schedule.base_lrs = [optim.lr] * len(schedule.base_lrs)
        for group, own in zip(optimizer.param_groups, parameter_groups(self.net, optim.weight_decay), strict=True):
            group |= {
                "weight_decay": own["weight_decay"],
                "betas": optim.betas,
                "eps": optim.eps,
                "initial_lr": optim.lr,
            }
            group["lr"] = optim.lr * schedule.lr_lambdas[0](schedule.last_epoch)

    def forward(self, rows: Tensor) -> tuple[Tensor, list[Routing], Tensor]:
        """Rows (B, T + 1) give the nats of their targets, the routers' decisions, and which targets count, (B, T)."""
        inputs, targets = loss.shift(rows)
        documents = document_ids(inputs) if self.recipe.data.documents else None
        x, routing = self.net.hidden(inputs, documents)
        valid = self._valid(rows)
        return loss.read_out(x, self.net.readout, targets, valid), routing, valid

    def training_step(self, rows: Tensor, batch_idx: int) -> dict[str, Tensor]:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer) and isinstance(schedule, LambdaLR)
        rate = optimizer.param_groups[0]["lr"]
        # Nothing here draws random numbers; a module that does meets the same ones after an interruption.
        _reseed(hash((self.recipe.seed, self.trainer.global_step, self.trainer.global_rank)))
        micro = rows.split(self.recipe.trainer.micro_batch or len(rows))
        sums = self._accumulate(micro)
        norm = full(clip_grad_norm_(self.parameters(), self.recipe.optim.clip or math.inf))
        finite = bool(torch.isfinite(norm + torch.stack(list(sums.values())).sum()))
        if not finite:
            optimizer.zero_grad(set_to_none=True)  # AdamW passes over parameters without a gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        figures = {"train/loss" if name == "next_token" else f"train/{name}": term for name, term in sums.items()}
        skipped = {} if finite else {"train/skipped": torch.tensor(1.0)}
        return {**figures, **skipped, "optim/lr": torch.tensor(rate), "optim/grad_norm": norm}

    def _accumulate(self, micro: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Gradients of the global batch's loss, and its terms summed over ranks."""
        tokens = self.over_ranks(torch.stack([self._valid(rows).sum() for rows in micro]).sum())
        counts = self._first_pass(micro)
        sums: dict[str, Tensor] = {}
        for rows in micro:
            nats, routing, valid = self(rows)
            counts = self._balance_counts(counts, routing, valid)
            terms = loss.terms(nats, routing, valid, counts, tokens, self.recipe.loss)
            # DDP and FSDP average gradients over ranks; these are shares of one sum.
            self.manual_backward(torch.stack(list(terms.values())).sum() * self.trainer.world_size)
            sums = {name: sums.get(name, 0) + term.detach() for name, term in terms.items()}
        reduced = self.over_ranks(torch.stack(list(sums.values())))
        return dict(zip(sums, reduced, strict=True))

    def validation_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        """Sums over these rows, (3,): nats, valid targets, and the bytes of text that those stand for."""
        nats, _, valid = self(rows)
        size = self.trainer.datamodule.token_bytes.to(rows.device)[loss.shift(rows)[1]]  # pyright: ignore
        return torch.stack([nats.double(), valid.sum(), (size * valid).sum()])

    def _valid(self, rows: Tensor) -> Tensor:
        """All targets, or with documents kept apart those that do not open the next one."""
        targets = loss.shift(rows)[1]
        return targets != END_OF_TEXT if self.recipe.data.documents else torch.ones_like(targets, dtype=torch.bool)

    def _first_pass(self, micro: tuple[Tensor, ...]) -> Tensor:
        """Expert counts known before the first backward: none, or for ``exact`` those of the whole global batch."""
        experts = self.recipe.model.experts.count
        counts = torch.zeros(self.recipe.model.layers, experts, dtype=torch.long, device=self.device)
        if experts and self.recipe.loss.balance_over == "exact":
            with torch.no_grad():
                for rows in micro:
                    _, routing, valid = self(rows)
                    counts += loss.expert_counts(routing, valid)
            counts = self.over_ranks(counts)
        return counts

    def _balance_counts(self, seen: Tensor, routing: list[Routing], valid: Tensor) -> Tensor:
        over = self.recipe.loss.balance_over
        if not routing or over == "exact":
            return seen
        counts = loss.expert_counts(routing, valid)
        if over == "micro":
            return counts
        counts = self.over_ranks(counts)
        return seen + counts if over == "buffer" else counts

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in place; a collective, so call it on all of them."""
        if self.trainer.world_size > 1:
            dist.all_reduce(x)
        return x


def _rename(state: dict[str, Any], names: Mapping[Any, Any]) -> None:
    """Other keys for the parameters in an optimizer's state, where they bear the old ones."""
    state["state"] = {names.get(key, key): value for key, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names.get(key, key) for key in group["params"]]


def _reseed(seed: int) -> None:
    """``torch.manual_seed``, which for each kind of device that is absent formats a stack trace, without that."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor; a collective, so call it on all ranks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
