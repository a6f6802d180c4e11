"""Train a DFlash drafter for a causal LM on the target's own answers.

    python examples/train_drafter.py data/conversations.npz drafter/ --seconds 900

Any causal LM can be the target (`--target`): widths come from its config. `conversations.npz` is what
`training_data.py` writes. A run that ends early (`--max-steps`, `--max-seconds`, or stopped after a checkpoint) goes
on where it was when the command is given again.

The recipe is DFlash's (arXiv 2602.06036): at random anchors inside answers a block of mask tokens is filled in one
pass, from the target's hidden states before the anchor; cross-entropy in which earlier positions weigh more.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ddtree import DFlashConfig, DFlashDraftModel
from smollm2 import prepare_target


@dataclasses.dataclass
class Recipe:
    """How a drafter is built and trained.

    `steps` is the length of the run. If `seconds` is given, the length is measured instead, so that the run ends, with
    its learning rate at 0, in that time.
    """

    layers: int = 4
    block_size: int = 16
    mask_token_id: int = 16  # a token that the target never emits
    steps: int = 10_000
    seconds: float | None = None
    warmup: int = 200
    rows: int = 32  # of packed conversations in a step
    row_length: int = 512
    anchors: int = 64  # blocks in a row
    decay: float = 4.0  # position k of a block weighs exp(-(k - 1) / decay)
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0


# Data.


class Batch(NamedTuple):
    """Packed conversations, each field `(rows, row_length)`."""

    ids: torch.Tensor
    document: torch.Tensor  # number of the conversation in its row, -1 for padding
    position: torch.Tensor  # in the conversation
    answer_end: torch.Tensor  # for a token of an answer the column at which the answer ends, else 0


def pack(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """Conversations to rows: the longest first, each into the fullest row with room. Too long ones are left out."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if length > row_length:
            continue
        room = next((room for room in range(length, row_length) if by_room[room]), None)
        if room is None:
            rows.append([])
            row, room = len(rows) - 1, row_length
        else:
            row = by_room[room].pop()
        rows[row].append(number)
        by_room[room - length].append(row)
    return rows


def load_conversations(path: Path, row_length: int, device: torch.device) -> Batch:
    """All conversations of a file, packed, on the device."""
    file = np.load(path)
    lengths, ids, answers = file["lengths"], file["ids"], file["answer"]
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    rows = pack(lengths, row_length)
    shape = (len(rows), row_length)
    packed = Batch(*(np.zeros(shape, dtype=np.int32) for _ in Batch._fields))
    packed.document[:] = -1
    for row, members in enumerate(rows):
        column = 0
        for number, member in enumerate(members):
            source = slice(starts[member], starts[member] + lengths[member])
            place = slice(column, column + lengths[member])
            packed.ids[row, place] = ids[source]
            packed.document[row, place] = number
            packed.position[row, place] = np.arange(lengths[member])
            answer = answers[source].astype(np.int32)
            packed.answer_end[row, place] = np.where(answer > 0, answer + column, 0)
            column += lengths[member]
    return Batch(*(torch.from_numpy(field).to(device) for field in packed))


def draw_batch(data: Batch, recipe: Recipe, step: int) -> tuple[Batch, torch.Tensor]:
    """Rows and anchors of a step: a function of the seed and the step, so that a resumed run sees the same.

    Returns:
        The rows and `(rows, anchors)` columns, -1 where a row has fewer places for an anchor. An anchor is a token of
        an answer, as the bonus token of a round is, with at least one token of the answer after it.
    """
    total, device = len(data.ids), data.ids.device
    steps_an_epoch = max(1, total // recipe.rows)
    epoch, place = divmod(step, steps_an_epoch)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(recipe.seed * 1_000 + epoch))
    chosen = order[place * recipe.rows :][: recipe.rows].to(device)
    batch = Batch(*(field[chosen] for field in data))
    generator = torch.Generator(device).manual_seed(recipe.seed * 1_000_000 + step)
    chance = torch.rand(batch.ids.shape, device=device, generator=generator)
    columns = torch.arange(batch.ids.shape[1], device=device)
    chance = chance.masked_fill(columns + 1 >= batch.answer_end, -1.0)
    chance, anchors = chance.topk(min(recipe.anchors, chance.shape[1]), dim=1)
    return batch, torch.where(chance >= 0, anchors, -1)


# Models.


def default_taps(layers: int, count: int = 5) -> list[int]:
    """Tap layers as DFlash spreads them: evenly from layer 1 to the third last."""
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


class TapFeatures(nn.Module):
    """Outputs of a frozen target's tap layers, concatenated: the drafter's context."""

    def __init__(self, target: PreTrainedModel, taps: list[int]) -> None:
        super().__init__()
        self.decoder = target.get_decoder()
        # What comes after the last tap is not needed.
        self.decoder.layers = self.decoder.layers[: max(taps) + 1]
        self.outputs: list[torch.Tensor] = []
        for tap in taps:
            self.decoder.layers[tap].register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:  # (B, C, taps * H)
        length = batch.ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
        same = batch.document[:, :, None] == batch.document[:, None, :]
        dtype = self.decoder.dtype
        mask = additive(same & causal, dtype)[:, None]
        self.decoder(input_ids=batch.ids, position_ids=batch.position, attention_mask=mask, use_cache=False)
        features = torch.cat(self.outputs, dim=-1)
        self.outputs.clear()
        return features


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as one that is added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


class BlockLoss(nn.Module):
    """The drafter's loss at given anchors; embedding and head are the target's and stay as they are."""

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, decay: float) -> None:
        super().__init__()
        self.drafter, self.decay = drafter, decay
        self.register_buffer("embedding", target.get_input_embeddings().weight.detach(), persistent=False)
        self.register_buffer("head", target.get_output_embeddings().weight.detach(), persistent=False)

    def forward(self, features: torch.Tensor, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        size = self.drafter.config.block_size
        rows, length = batch.ids.shape
        used, anchors = anchors >= 0, anchors.clamp(min=0)  # (B, A)
        offsets = torch.arange(size, device=anchors.device)
        columns = anchors[:, :, None] + offsets  # (B, A, size)

        tokens = torch.full_like(columns, self.drafter.config.mask_token_id)
        tokens[:, :, 0] = batch.ids.gather(1, anchors)
        noise = F.embedding(tokens.flatten(1), self.embedding)
        block_position = batch.position.gather(1, anchors)[:, :, None] + offsets
        hidden = self.drafter(
            noise_embeds=noise,
            context_hidden_states=features,
            position_ids=torch.cat([batch.position, block_position.flatten(1)], dim=1),
            attention_mask=additive(visible_rows(batch, anchors, size), features.dtype)[:, None],
        ).last_hidden_state

        # Row k of a block predicts the token k places after its anchor.
        hidden = hidden.view(rows, -1, size, hidden.shape[-1])[:, :, 1:]
        columns = columns[:, :, 1:]
        labels = batch.ids.gather(1, columns.clamp(max=length - 1).flatten(1)).flatten()
        end = batch.answer_end.gather(1, anchors)[:, :, None]
        weights = torch.exp((1 - offsets[1:]) / self.decay) * ((columns < end) & used[:, :, None])
        logits = F.linear(hidden.flatten(0, 2).to(self.head.dtype), self.head)
        losses = F.cross_entropy(logits.float(), labels.long(), reduction="none")
        return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1.0)


def visible_rows(batch: Batch, anchors: torch.Tensor, size: int) -> torch.Tensor:
    """What each row of each block sees: its conversation before the anchor, and its block. `(B, A*s, C + A*s)`."""
    rows, count = anchors.shape
    column = torch.arange(batch.ids.shape[1], device=anchors.device)
    document = batch.document.gather(1, anchors)
    context = (column < anchors[:, :, None]) & (batch.document[:, None] == document[:, :, None])  # (B, A, C)
    context = context.repeat_interleave(size, dim=1)
    block = torch.arange(count * size, device=anchors.device) // size
    block = (block[:, None] == block).expand(rows, -1, -1)
    return torch.cat([context, block], dim=2)


# Training.


class Progress:
    """Where a run is; part of its checkpoints."""

    def __init__(self) -> None:
        self.step, self.seconds, self.total = 0, 0.0, math.inf

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def rate(self, recipe: Recipe) -> float:
        """The share of the learning rate: linear warm-up, then a cosine to 0."""
        done = min(1.0, self.step / self.total)
        return min(1.0, (self.step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(drafter: DFlashDraftModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms; Muon's updates are scaled to the size of AdamW's."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def train(
    target: PreTrainedModel,
    conversations: Path,
    out: Path,
    recipe: Recipe,
    max_steps: int | None = None,
    max_seconds: float = math.inf,
    checkpoint_seconds: float = 300,
    compile_step: bool = False,
) -> list[float]:
    """Train a drafter for `target` and save it to `out`; go on from the checkpoint in `out`, if there is one.

    Args:
        target: the frozen target. Layers after the last tap are cut off.
        max_steps: stop after so many steps of this call, with a checkpoint.
        max_seconds: stop after so many seconds of this call, with a checkpoint.
        checkpoint_seconds: seconds between checkpoints.
        compile_step: compile the target's layers and the loss.

    Returns:
        The losses of this call's steps.
    """
    start = time.monotonic()
    accelerator = Accelerator(mixed_precision="bf16" if target.dtype == torch.bfloat16 else "no")
    torch.manual_seed(recipe.seed)
    taps = default_taps(target.config.get_text_config().num_hidden_layers)
    config = DFlashConfig.from_target(
        target.config,
        target_layer_ids=taps,
        mask_token_id=recipe.mask_token_id,
        block_size=recipe.block_size,
        num_hidden_layers=recipe.layers,
    )
    drafter = DFlashDraftModel(config)  # fp32 master weights
    target = target.to(accelerator.device).eval().requires_grad_(False)
    loss_module = BlockLoss(drafter, target, recipe.decay)
    features = TapFeatures(target, taps)
    if compile_step:
        for layer in features.decoder.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True)
        loss_module.forward = torch.compile(loss_module.forward, fullgraph=True)
    progress = Progress()
    loss_module, *optimizers = accelerator.prepare(loss_module, *make_optimizers(drafter, recipe))
    accelerator.register_for_checkpointing(progress)
    checkpoint = out / "checkpoint"
    if checkpoint.is_dir():
        accelerator.load_state(str(checkpoint))
    if recipe.seconds is None:
        progress.total = recipe.steps
    data = load_conversations(conversations, recipe.row_length, accelerator.device)

    losses: list[torch.Tensor] = []
    before = progress.seconds
    saved, measured = start, (time.monotonic(), progress.step)
    bar = tqdm(total=recipe.steps, initial=progress.step, mininterval=10, disable=not accelerator.is_main_process)
    loss_module.train()
    while progress.step < progress.total:
        batch, anchors = draw_batch(data, recipe, progress.step)
        context = features(batch)
        loss = loss_module(context, batch, anchors)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(drafter.parameters(), recipe.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * progress.rate(recipe)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        progress.step += 1
        bar.update()
        if progress.step % 50 == 0:
            bar.set_postfix(
                loss=f"{torch.stack(losses[-50:]).mean().item():.3f}", refresh=False
            )  # waits for the device
        now = time.monotonic()
        progress.seconds = before + now - start
        if recipe.seconds is not None and progress.step % 50 == 0:
            pace = (now - measured[0]) / (progress.step - measured[1])
            progress.total = progress.step + max(0, round((recipe.seconds - progress.seconds) / pace))
            bar.total, measured = progress.total, (now, progress.step)
        ended = (max_steps is not None and len(losses) >= max_steps) or now - start > max_seconds
        if ended or now - saved > checkpoint_seconds:
            accelerator.save_state(str(checkpoint), safe_serialization=False)
            saved = now
        if ended:
            break
    bar.close()
    save_drafter(drafter, out)
    return torch.stack(losses).tolist() if losses else []


def save_drafter(drafter: DFlashDraftModel, out: Path) -> None:
    """Write the weights in bfloat16 and the config to `out`."""
    copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(out, max_shard_size="12MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conversations", type=Path, help="what training_data.py wrote")
    parser.add_argument("out", type=Path, help="directory for the drafter and the run's checkpoint")
    parser.add_argument("--target", help="directory or hub id of a causal LM; default: SmolLM2-135M-Instruct")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps; the next call goes on")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="stop after so long; the next call goes on"
    )
    for field in dataclasses.fields(Recipe):
        kind = float if field.name in ("seconds", "decay", "learning_rate", "weight_decay", "clip") else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    recipe = Recipe(**{field.name: arguments.pop(field.name) for field in dataclasses.fields(Recipe)})
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if cuda else torch.float32
    target = AutoModelForCausalLM.from_pretrained(arguments["target"] or prepare_target(), dtype=dtype)
    train(
        target,
        arguments["conversations"],
        arguments["out"],
        recipe,
        max_steps=arguments["max_steps"],
        max_seconds=arguments["max_seconds"],
        compile_step=cuda,
    )


if __name__ == "__main__":
    main()
