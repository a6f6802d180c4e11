"""Two walks, one contract; sampling from the target's own distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_ddtree import DDTreeConfig, decoding, logits_process
from hf_ddtree.draft_tree import DraftTree, ancestor_matrix, best_first_tree
from hf_ddtree.logits_process import Noise, device_walk, is_row_wise, lazy_walk
from hf_ddtree.outputs import GenerationRecord
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

V = 12
WARPERS: list[list[Any]] = [
    [],
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)],
    [MinPLogitsWarper(0.05), TypicalLogitsWarper(0.9), LogitNormalization()],
    [EtaLogitsWarper(0.02), EpsilonLogitsWarper(0.01)],
]


def random_tree(seed: int, depth: int = 5, budget: int = 30) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    table = torch.log_softmax(torch.randn(1, depth, V, generator=generator), dim=-1)
    log_probs, token_ids = table.sort(dim=-1, descending=True)
    return best_first_tree(token_ids, log_probs, budget)


def new_record(new: int, eos: int | None) -> GenerationRecord:
    criteria = [MaxLengthCriteria(3 + new)] + ([EosTokenCriteria(eos)] if eos is not None else [])
    return GenerationRecord(
        torch.tensor([[1, 2, 3]]), GenerationConfig(max_length=3 + new), StoppingCriteriaList(criteria), None
    )


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("warpers", WARPERS, ids=range(len(WARPERS)))
def test_both_walks_commit_the_same(do_sample: bool, warpers: list[Any]) -> None:
    """Token for token, generator state included, also where an eos or the length ends the text inside a path."""
    lengths = set()
    for seed in range(60):
        tree = random_tree(seed).pad(32)
        ancestors = ancestor_matrix(tree.parents, tree.depths)
        # Logits that favour some path of the tree, so that walks go deep.
        logits = 1.5 * torch.randn(1, 33, V, generator=torch.Generator().manual_seed(1000 + seed))
        for row in range(33):
            children = (tree.parents[0] + 1 == row) & (tree.depths[0] > 0)
            logits[0, row, tree.token_ids[0, children]] += 2.0
        outcomes = []
        for device in (False, True):
            record = new_record(new=1 + seed % 8, eos=seed % V if seed % 3 == 0 else None)
            torch.manual_seed(seed)
            processors = LogitsProcessorList(warpers)
            if device:
                walked = device_walk(logits, tree, ancestors, record, processors, do_sample)
            else:
                walked = lazy_walk(logits, tree, record, processors, do_sample)
            outcomes.append((walked.rows, walked.stop, record.input_ids.tolist(), torch.get_rng_state().tolist()))
            lengths.add(len(walked.rows))
        assert outcomes[0] == outcomes[1]
    assert {1, 2, 3, 4} <= lengths


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_device_walk_generates_what_plain_decoding_does(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def walk(logits: Any, tree: Any, ancestors: Any, record: Any, processors: Any, sample: bool) -> Any:
        calls.append(1)
        return device_walk(logits, tree, ancestors, record, processors, sample)

    monkeypatch.setattr(decoding, "walk", walk)
    model = tiny_target("qwen3")
    ids = prompt_ids(9)
    options: dict[str, Any] = {"max_new_tokens": 45, "do_sample": do_sample}
    options |= {"temperature": 0.8, "top_p": 0.9} if do_sample else {}
    drafter = tiny_drafter(model)
    torch.manual_seed(3)
    expected = model.generate(ids, **options)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with scripted(expected, 0.8):
        out = model.generate(ids, assistant_model=drafter, ddtree=DDTreeConfig(budget=31), **options)
    assert calls
    assert out.tolist() == expected.tolist()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_best_token_is_that_of_float32(dtype: torch.dtype) -> None:
    """The first of those that are equal there, as plain decoding has it."""
    torch.manual_seed(0)
    logits = torch.randn(1, 50, 300, dtype=torch.float64).mul(4).round()
    logits += 1e-11 * torch.arange(300)
    logits[0, 0, 7], logits[0, 1] = torch.nan, -torch.inf
    logits = logits.to(dtype)
    depths = torch.zeros(1, 50, dtype=torch.long)
    choices = logits_process.choose(logits, depths, depths, LogitsProcessorList(), None, 1)
    assert torch.equal(choices, logits.float().argmax(-1))


def test_noise_is_multinomials() -> None:
    """argmax(p / q) is `torch.multinomial(p, 1)`, and unused rows go back to the generator."""
    for seed in range(50):
        probs = torch.softmax(2 * torch.randn(4, 300, generator=torch.Generator().manual_seed(seed)), dim=-1)
        torch.manual_seed(seed)
        expected = [int(torch.multinomial(probs[i : i + 1], 1)) for i in range(3)]
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        noise = Noise(torch.device("cpu"))
        drawn = (probs / noise.draw(4, 300)).argmax(-1).tolist()
        noise.give_back(3)
        assert drawn[:3] == expected
        assert torch.equal(torch.get_rng_state(), state)


def test_only_stock_warpers_are_row_wise() -> None:
    class Mine(TemperatureLogitsWarper):
        pass

    assert all(is_row_wise(LogitsProcessorList(warpers)) for warpers in WARPERS)
    assert not is_row_wise(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]))
    assert not is_row_wise(LogitsProcessorList([TemperatureLogitsWarper(0.5), Mine(0.5)]))


def test_padding_nodes_are_never_accepted() -> None:
    """A padding node has token 0 and the root as parent: choosing token 0 must not accept it."""
    tree = random_tree(0, depth=2, budget=3)
    keep = tree.token_ids[0] != 0
    tree = DraftTree(*(field[:, keep] for field in tree)).first(1).pad(8)
    logits = torch.zeros(1, 9, V)
    logits[:, :, 0] = 5.0
    for walk in (
        lambda record: lazy_walk(logits, tree, record, LogitsProcessorList(), False),
        lambda record: device_walk(
            logits, tree, ancestor_matrix(tree.parents, tree.depths), record, LogitsProcessorList(), False
        ),
    ):
        assert walk(new_record(8, None)).rows == [0]


# -- the distribution ------------------------------------------------------------------------------------------------


TEMPERATURE = 1.5
SAMPLES = 3000


def _pair_counts(walk: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the next two tokens over many rounds, and their exact probabilities under a known target."""
    generator = torch.Generator().manual_seed(0)
    first = 2 * torch.randn(V, generator=generator)  # logits behind the root
    second = 2 * torch.randn(V, V, generator=generator)  # logits behind each first token
    tree = random_tree(4, depth=2, budget=9)
    ancestors = ancestor_matrix(tree.parents, tree.depths)
    logits = torch.zeros(1, 10, V)
    logits[0, 0] = first
    at_depth_1 = tree.depths[0] == 1
    logits[0, 1:][at_depth_1] = second[tree.token_ids[0][at_depth_1]]
    processors = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    counts = torch.zeros(V, V)
    torch.manual_seed(0)
    for _ in range(SAMPLES):
        record = new_record(2, None)
        if not walk(logits, tree, ancestors, record, processors, True).stop:
            # The round ended on its first token: the next one begins there.
            record_logits = second[int(record.last_token)]
            lazy_walk(record_logits[None, None], tree.first(0), record, processors, True)
        a, b = record.input_ids[0, 3:].tolist()
        counts[a, b] += 1
    exact = torch.softmax(first / TEMPERATURE, -1)[:, None] * torch.softmax(second / TEMPERATURE, -1)
    return counts, exact


def _chi_square_p(counts: torch.Tensor, exact: torch.Tensor) -> float:
    expected = exact.flatten() * counts.sum()
    kept = expected > 5
    statistic = float(((counts.flatten()[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def _accept_ratio_walk(logits: Any, tree: Any, ancestors: Any, record: Any, processors: Any, sample: bool) -> Any:
    """A planted fault: accept a child with min(1, p / q), as for a chain of drafts, else sample anew from p."""
    rows = [0]
    while True:
        row = logits[:, rows[-1]].float()
        probs = torch.softmax(processors(record.input_ids, row), -1)[0]
        for node in range(tree.token_ids.shape[1]):
            if int(tree.parents[0, node]) + 1 == rows[-1] and int(tree.depths[0, node]) > 0:
                token = int(tree.token_ids[0, node])
                before = tree.log_probs[0, rows[-1] - 1] if rows[-1] else 0.0
                q = float((tree.log_probs[0, node] - before).exp())
                if float(torch.rand(())) < min(1.0, float(probs[token]) / q):
                    if record.commit(torch.tensor([token]), None, None):
                        return logits_process.Walk(rows, torch.tensor([rows]), True)
                    rows.append(node + 1)
                    break
        else:
            stop = record.commit(torch.multinomial(probs[None], 1)[0], None, None)
            return logits_process.Walk(rows, torch.tensor([rows]), stop)


def _cold_walk(logits: Any, tree: Any, ancestors: Any, record: Any, processors: Any, sample: bool) -> Any:
    """A planted fault: temperature is ignored inside rounds."""
    return lazy_walk(logits, tree, record, LogitsProcessorList(), sample)


def _lazy(logits: Any, tree: Any, ancestors: Any, record: Any, processors: Any, sample: bool) -> Any:
    return lazy_walk(logits, tree, record, processors, sample)


@pytest.mark.parametrize("walk", [_lazy, device_walk])
def test_samples_follow_the_targets_distribution(walk: Any) -> None:
    assert _chi_square_p(*_pair_counts(walk)) > 1e-3


@pytest.mark.parametrize("walk", [_cold_walk, _accept_ratio_walk])
def test_the_distribution_test_rejects_planted_faults(walk: Any) -> None:
    assert _chi_square_p(*_pair_counts(walk)) < 1e-6
