"""The drafter as a stock candidate generator, and under transformers' own DFlash loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from all_targets import classes, config_classes, tiny_config, tiny_model
from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashDraftModel, logits_scaling
from hf_ddtree.drafter_families import best_candidates, draft_logits, embed_tokens
from hf_ddtree.shadow import shadow
from scripted import SIZES, VOCAB, prompt_ids, tiny_drafter, tiny_target


def a_pair_that_agrees(block_size: int = 8, **overrides: Any) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A target whose next token depends on little, and a drafter fitted to it: acceptance well above one token."""
    model = tiny_target("llama", vocab_size=8, initializer_range=0.1, **overrides)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
    drafter = tiny_drafter(model, block_size=block_size)
    fit(drafter, model)
    return model, drafter


def fit(drafter: PreTrainedModel, model: PreTrainedModel, steps: int = 150) -> None:
    """Train on the target's greedy text for a moment."""
    torch.manual_seed(0)
    with torch.no_grad():
        text = torch.cat(
            [model.generate(prompt_ids(6, seed=s, vocab=8), max_new_tokens=60, do_sample=False) for s in range(8)]
        )
        states = model(text, output_hidden_states=True).hidden_states
    assert drafter.config.target_layer_ids is not None
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    block, optimizer = drafter.config.block_size, torch.optim.AdamW(drafter.parameters(), 3e-3)
    drafter.train()
    for step in range(steps):
        anchor = 8 + (step * 7) % (text.shape[1] - block - 8)
        ids = torch.full((len(text), block), drafter.config.mask_token_id)
        ids[:, 0] = text[:, anchor]
        positions = torch.arange(anchor + block).expand(len(text), -1)
        rows = {"noise_embeds": embed_tokens(model, ids), "context_hidden_states": features[:, :anchor]}
        hidden = drafter(**rows, position_ids=positions).last_hidden_state[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            draft_logits(model, hidden).flatten(0, 1), text[:, anchor + 1 : anchor + block].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, DFlashDraftModel]:
    return a_pair_that_agrees()


class Rounds:
    """Counts, from outside, how many tokens each forward of the target's stock loop committed."""

    def __init__(self) -> None:
        self.puts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.numel())

    def end(self) -> None:
        pass


def drive_stock(model: PreTrainedModel, drafter: DFlashDraftModel, ids: torch.Tensor, **options: Any) -> Any:
    """Stock `_assisted_decoding` with our candidate generator in place of transformers' own."""

    def generator(self: Any, *args: Any, **kwargs: Any) -> DDTreeCandidateGenerator:
        max_length = kwargs["generation_config"].max_length
        return DDTreeCandidateGenerator(model, drafter, DDTreeConfig(), max_length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_get_candidate_generator", generator, raising=False)
        return model.generate(ids, assistant_model=drafter, speculation_type="dflash", **options)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": False, "repetition_penalty": 1.2}])
def test_stock_assisted_decoding_driven_by_our_generator_is_exact(
    pair: tuple[PreTrainedModel, DFlashDraftModel], options: dict[str, Any]
) -> None:
    model, drafter = pair
    for length in (1, 6, 30):
        ids = prompt_ids(length, vocab=8)
        expected = model.generate(ids, max_new_tokens=50, **options)
        rounds = Rounds()
        out = drive_stock(model, drafter, ids, max_new_tokens=50, streamer=rounds, **options)
        assert out.tolist() == expected.tolist()
        assert max(rounds.puts[1:]) > 1, "nothing was accepted"


def test_stock_assisted_sampling_driven_by_our_generator_keeps_the_distribution(
    pair: tuple[PreTrainedModel, DFlashDraftModel],
) -> None:
    """Its draws differ from plain sampling's, so that not the text but the frequencies have to agree."""
    model, drafter = pair
    ids = prompt_ids(6, vocab=8)
    torch.manual_seed(0)
    samples = 400
    counts = torch.zeros(8)
    for _ in range(samples):
        out = drive_stock(model, drafter, ids, max_new_tokens=2, do_sample=True, top_k=0)
        counts[out[0, 7]] += 1
    with torch.no_grad():
        first = torch.softmax(model(ids).logits[0, -1], -1)
        second = [torch.softmax(model(torch.cat([ids, torch.tensor([[a]])], 1)).logits[0, -1], -1) for a in range(8)]
    expected = samples * (first[:, None] * torch.stack(second)).sum(0)
    kept = expected > 5
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < 29, "chi-square with 7 degrees of freedom exceeds its 1e-4 quantile"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="native DFlash taps other layers before 5.23"
)
def test_native_dflash_accepts_as_much_as_our_chain(pair: tuple[PreTrainedModel, DFlashDraftModel]) -> None:
    model, drafter = pair
    lengths: set[int] = set()
    for length, new in ((2, 40), (6, 60), (30, 50)):
        ids = prompt_ids(length, vocab=8, seed=length)
        rounds = Rounds()
        native = model.generate(
            ids,
            max_new_tokens=new,
            do_sample=False,
            assistant_model=drafter,
            speculation_type="dflash",
            streamer=rounds,
        )
        ours = model.generate(
            ids, max_new_tokens=new, do_sample=False, assistant_model=drafter, ddtree={"tree": "chain", "budget": 7},
            return_dict_in_generate=True,
        )  # fmt: skip
        assert ours.sequences.tolist() == native.tolist()
        # The prompt's forward commits one token in both loops.
        assert rounds.puts[2:] == ours.ddtree_stats.acceptance_lengths
        lengths.update(ours.ddtree_stats.acceptance_lengths)
    assert {1, 2, 8} <= lengths, "rejected, partly accepted and whole blocks"


def test_embedding_leaves_out_an_optional_norm() -> None:
    class Normed(torch.nn.Embedding):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.embed_norm = torch.nn.LayerNorm(self.embedding_dim)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed_norm(super().forward(ids))

    model = tiny_target("llama")
    model.set_input_embeddings(Normed(211, 48))
    ids = prompt_ids(4)
    assert torch.equal(embed_tokens(model, ids), model.get_input_embeddings().weight[ids])


@pytest.mark.parametrize(
    ("field", "value"),
    [("logit_scale", 0.3), ("output_multiplier", 0.3), ("logits_scaling", 4.0), ("final_logit_softcapping", 2.0)],
)
def test_draft_logits_are_the_targets(field: str, value: float) -> None:
    model = tiny_target("llama")
    hidden = torch.randn(1, 3, 48)
    plain = draft_logits(model, hidden)
    setattr(model.config, field, value)
    expected = {
        "logit_scale": plain * value,
        "output_multiplier": plain * value,
        "logits_scaling": plain / value,
        "final_logit_softcapping": torch.tanh(plain / value) * value,
    }[field]
    torch.testing.assert_close(draft_logits(model, hidden), expected)


class Multiplies(LlamaForCausalLM):
    """Scales its logits; nothing but its forward says how."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.config.logits_scaling
        return outputs


class Divides(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits / self.config.logits_scaling
        return outputs


@pytest.mark.parametrize("kind", [Multiplies, Divides])
@pytest.mark.parametrize("scaling", [0.2, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_target_does_with_its_scaling_is_seen_not_known(
    kind: type[LlamaForCausalLM], scaling: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits_scaling, "_multiplying", {})
    model = kind(LlamaConfig(**SIZES, logits_scaling=scaling)).eval().to(dtype)
    with torch.no_grad():
        out = model(prompt_ids(5), output_hidden_states=True)
        DDTreeCandidateGenerator(model, tiny_drafter(model), DDTreeConfig(), max_length=100)
        # A capture cannot begin with a forward that the host looks at.
        monkeypatch.setattr(kind, "forward", None)
        torch.testing.assert_close(draft_logits(model, out.hidden_states[-1]), out.logits)
        torch.testing.assert_close(draft_logits(shadow(model), out.hidden_states[-1]), out.logits)
    assert not model.lm_head._forward_hooks


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("gemma3_text", {"final_logit_softcapping": 3.0}),
        ("nanochat", {"final_logit_softcapping": 3.0}),
        ("granite", {"logits_scaling": 7.0}),
        ("granitemoe", {"logits_scaling": 7.0}),
        ("hyperclovax", {"logits_scaling": 0.2}),
        ("cohere", {"logit_scale": 0.3}),
        ("cohere2", {"logit_scale": 0.3}),
        ("llama", {}),
    ],
)
def test_a_drafter_that_knows_the_targets_final_state_drafts_its_distribution(
    family: str, fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family not in classes():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_model(tiny_config(config_classes()[family], **fields))
    outputs = model(prompt_ids(9), output_hidden_states=True)
    source = DDTreeCandidateGenerator(model, tiny_drafter(model), DDTreeConfig(), max_length=100)
    monkeypatch.setattr(source, "_draft", lambda root, position: outputs.hidden_states[-1])
    token_ids, log_probs, _ = source.propose(torch.tensor([[7]]), torch.tensor([[9]]), depth=7, candidates=VOCAB)
    expected = outputs.logits[:, 1:8].log_softmax(-1).gather(-1, token_ids)
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=1e-4)
    assert expected.min() < -1, "every token is as probable as the others"


def test_a_long_prompt_becomes_context_in_parts() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    features, positions = torch.randn(1, 5000, 96), torch.arange(5000)[None]
    root, position = torch.tensor([[7]]), torch.tensor([[5000]])
    source = DDTreeCandidateGenerator(model, drafter, DDTreeConfig(), max_length=6000)
    passes: list[int] = []
    handle = drafter.fc.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1]))
    source.append(features[:, :4990], positions[:, :4990])
    source.append(features[:, 4990:], positions[:, 4990:])
    proposed = source.propose(root, position, depth=7, candidates=9)
    handle.remove()
    assert sum(passes) == 5000 and max(passes) < 2500
    assert source.cache.length == 5000 and source.pending == 0
    noise = torch.cat([root, torch.full((1, 7), 3)], dim=1)
    hidden = drafter(
        embed_tokens(model, noise), features, torch.cat([positions, position + torch.arange(8)], dim=1)
    ).last_hidden_state
    token_ids, log_probs = best_candidates(draft_logits(model, hidden[:, 1:]), 9)
    assert torch.equal(proposed[0], token_ids)
    torch.testing.assert_close(proposed[1], log_probs, atol=1e-4, rtol=1e-4)


def test_proposals_are_sorted_normalised_and_of_the_targets_vocabulary() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    source = DDTreeCandidateGenerator(model, drafter, DDTreeConfig(budget=300), max_length=100)
    source.append(torch.randn(1, 5, 96), torch.arange(5)[None])
    token_ids, log_probs, _ = source.propose(torch.tensor([[7]]), torch.tensor([[5]]), depth=7, candidates=300)
    assert token_ids.shape == log_probs.shape == (1, 7, 211)
    assert (log_probs.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(log_probs.logsumexp(-1), torch.zeros(1, 7), atol=1e-5, rtol=0)
    assert (token_ids.sort(-1).values == torch.arange(211)).all()
