"""Train a DFlash drafter for a causal LM on the target's own answers.

    python examples/train_drafter.py data/conversations.npz drafter/ --seconds 900

`conversations.npz` is what `training_data.py` writes. A run that ends early (`--max-steps`, `--max-seconds`, or
stopped after a checkpoint) goes on where it was when the command is given again.

Any causal LM that `ddtree=True` takes can be the target (`--target`): widths, taps and mask token come from its config
and tokenizer, its embedding and head are asked as drafting asks them, and before the first step a fresh drafter drafts
for it, so that a target that cannot be used is named at once. Memory goes by rows * anchors * block size * vocabulary:
lower `--rows` or `--anchors` where the vocabulary is large.

The recipe is DFlash's (arXiv 2602.06036): at random anchors inside answers a block of mask tokens is filled in one
pass, from the target's hidden states before the anchor; cross-entropy in which earlier positions weigh more.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ddtree import DFlashConfig, DFlashDraftModel, release_buffers
from hf_ddtree.anatomy import find_decoder, layer_kinds
from hf_ddtree.drafter_families import draft_logits, embed_tokens
from hf_ddtree.verifier import FeatureTaps
from smollm2 import prepare_target

SMOLLM2_MASK = 16  # `<empty_output>`, which the model was not trained with


@dataclasses.dataclass
class Recipe:
    """How a drafter is built and trained.

    `steps` is the length of the run. If `seconds` is given, the length is measured instead, so that the run ends, with
    its learning rate at 0, in that time.
    """

    layers: int = 4
    block_size: int = 16
    mask_token_id: int = SMOLLM2_MASK  # a token that the target never emits
    taps: list[int] | None = None  # tap layers; by default `default_taps`
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
    """Tap layers as DFlash spreads them: evenly from layer 1 to the third last; fewer in a shallow target."""
    first = min(1, layers - 1)
    last = max(first, layers - 3)
    return sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)})


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """A token that the target never emits.

    The first of these that there is: the tokenizer's mask token; a row of the embedding behind the tokenizer's last
    token; a special token that its name says is reserved or unused.

    Args:
        rows: of the target's embedding that stand for tokens (`vocab_size`).

    Raises:
        ValueError: there is none.
    """
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < rows:
        return int(tokenizer.mask_token_id)
    vocabulary = tokenizer.get_vocab()
    if (behind := max(vocabulary.values()) + 1) < rows:
        return behind
    named = sorted(
        id for token, id in vocabulary.items() if re.fullmatch(r"[<\[].*(reserved|unused).*[>\]]", token, re.I)
    )
    if not named:
        raise ValueError(
            "The target's tokenizer has no mask token, no unused id and no reserved token: name a token that the "
            "target never emits with `--mask-token-id`."
        )
    return named[0]


def fresh_drafter(target: PreTrainedModel, recipe: Recipe) -> DFlashDraftModel:
    """A drafter with new weights, in float32, that has drafted a few tokens for the target.

    Raises:
        ValueError: the target cannot be used, or the recipe does not fit it.
    """
    config = target.config.get_text_config(decoder=True)
    overrides = {}
    if getattr(config, "intermediate_size", None) is None:
        overrides["intermediate_size"] = 4 * config.hidden_size
    drafter_config = DFlashConfig.from_target(
        target.config,
        target_layer_ids=recipe.taps or default_taps(config.num_hidden_layers),
        mask_token_id=recipe.mask_token_id,
        block_size=recipe.block_size,
        num_hidden_layers=recipe.layers,
        **overrides,
    )
    drafter = DFlashDraftModel(drafter_config)
    ids = torch.ones(1, 4, dtype=torch.long, device=target.device)
    drafting = copy.deepcopy(drafter).to(target.device, target.dtype)
    target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafting,
        ddtree={"budget": 3, "execution": "plain"},
        generation_config=GenerationConfig(max_new_tokens=4, do_sample=False),
    )
    release_buffers(target)
    return drafter


class TapFeatures(nn.Module):
    """Outputs of a frozen target's tap layers, concatenated: the drafter's context."""

    def __init__(self, target: PreTrainedModel, taps: Sequence[int]) -> None:
        super().__init__()
        self.decoder, self.layers = find_decoder(target)
        self.taps = FeatureTaps(target, taps)
        self.kinds = dict(layer_kinds(target.config.get_text_config(decoder=True)))

    @torch.no_grad()
    def forward(self, batch: Batch) -> torch.Tensor:  # (B, C, taps * H)
        dtype = self.decoder.dtype
        masks = {kind: additive(packed_mask(batch, kind, size), dtype)[:, None] for kind, size in self.kinds.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        with self.taps.recording() as chunks:
            self.decoder(input_ids=batch.ids, position_ids=batch.position, attention_mask=mask, use_cache=False)
        return torch.cat([chunk for (chunk,) in chunks.values()], dim=-1)


def packed_mask(batch: Batch, kind: str, size: int | None) -> torch.Tensor:
    """What a token sees in a layer: itself and what is before it in its conversation and window. `(B, C, C)`."""
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    visible = (batch.document[:, :, None] == batch.document[:, None, :]) & causal
    if size is not None and kind == "chunked_attention":
        chunk = batch.position // size
        visible &= chunk[:, :, None] == chunk[:, None, :]
    elif size is not None:
        visible &= causal.triu(1 - size)
    return visible


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as one that is added to scores."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, torch.finfo(dtype).min)


class BlockLoss(nn.Module):
    """The drafter's loss at given anchors; embedding and head are the target's and stay as they are.

    They are asked as drafting asks them: with the scale of an embedding, the soft cap of a head, and so on.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, decay: float) -> None:
        super().__init__()
        self.drafter, self.decay = drafter, decay
        self.target = (target,)  # no module of this one: it is neither trained nor part of checkpoints

    def forward(self, features: torch.Tensor, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        size = self.drafter.config.block_size
        rows, length = batch.ids.shape
        used, anchors = anchors >= 0, anchors.clamp(min=0)  # (B, A)
        offsets = torch.arange(size, device=anchors.device)
        columns = anchors[:, :, None] + offsets  # (B, A, size)

        tokens = torch.full_like(columns, self.drafter.config.mask_token_id)
        tokens[:, :, 0] = batch.ids.gather(1, anchors)
        (target,) = self.target
        noise = embed_tokens(target, tokens.flatten(1), self.drafter)
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
        logits = draft_logits(target, hidden.flatten(0, 2), self.drafter)
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
        target: the frozen target.
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
    target = target.to(accelerator.device).eval().requires_grad_(False)
    drafter = fresh_drafter(target, recipe)  # fp32 master weights
    assert drafter.config.target_layer_ids is not None
    loss_module = BlockLoss(drafter, target, recipe.decay)
    features = TapFeatures(target, drafter.config.target_layer_ids)
    if compile_step:
        for layer in features.layers:
            layer.forward = torch.compile(layer.forward)
        loss_module.forward = torch.compile(loss_module.forward)
    progress = Progress()
    loss_module, *optimizers = accelerator.prepare(loss_module, *make_optimizers(drafter, recipe))
    accelerator.register_for_checkpointing(progress)
    checkpoint = out / "checkpoint"
    if checkpoint.is_dir():
        accelerator.load_state(str(checkpoint))
    if recipe.seconds is None:
        progress.total = recipe.steps
    data = load_conversations(conversations, recipe.row_length, accelerator.device)
    if not len(data.ids):
        raise ValueError(
            f"{conversations} has no conversation of at most {recipe.row_length} tokens (`--row-length`)."
        )

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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("conversations", type=Path, help="what training_data.py wrote")
    parser.add_argument("out", type=Path, help="directory for the drafter and the run's checkpoint")
    parser.add_argument("--target", help="directory or hub id of a causal LM; default: SmolLM2-135M-Instruct")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps; the next call goes on")
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="stop after so long; the next call goes on"
    )
    parser.add_argument(
        "--mask-token-id", type=int, help="a token that the target never emits; default: see `choose_mask_token`"
    )
    parser.add_argument("--taps", type=int, nargs="+", help="tap layers, from 0; default: see `default_taps`")
    fields = [field for field in dataclasses.fields(Recipe) if field.name not in ("mask_token_id", "taps")]
    for field in fields:
        kind = float if field.name in ("seconds", "decay", "learning_rate", "weight_decay", "clip") else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if cuda else torch.float32
    target = AutoModelForCausalLM.from_pretrained(arguments.target or prepare_target(), dtype=dtype)
    mask = arguments.mask_token_id
    if mask is None and arguments.target is None:
        mask = SMOLLM2_MASK
    elif mask is None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        mask = choose_mask_token(tokenizer, target.config.get_text_config(decoder=True).vocab_size)
        print(f"The mask token is {mask}, {tokenizer.convert_ids_to_tokens(mask)!r}.")
    train(
        target,
        arguments.conversations,
        arguments.out,
        Recipe(
            mask_token_id=mask, taps=arguments.taps, **{field.name: vars(arguments)[field.name] for field in fields}
        ),
        max_steps=arguments.max_steps,
        max_seconds=arguments.max_seconds,
        compile_step=cuda,
    )


if __name__ == "__main__":
    main()
