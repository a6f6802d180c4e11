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

from hf_ddtree import DDTreeConfig, launched, logits_process
from hf_ddtree.draft_tree import DraftTree, TreeRows, best_first_tree
from hf_ddtree.logits_process import Noise, commit_path, device_walk, is_row_wise, lazy_walk
from hf_ddtree.outputs import GenerationRecord
from hf_ddtree.state import DecodingState, Path
from hf_ddtree.tree_cache import TreeCache
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


def walk_on_device(
    logits: torch.Tensor, tree: DraftTree, record: GenerationRecord, processors: Any, noise: Noise | None
) -> Path:
    if noise is not None:
        noise.begin()
    room, ends = torch.tensor([record.room]), torch.tensor(record.end_token_ids, dtype=torch.int64)
    most = min(record.room, logits.shape[1])
    return device_walk(logits, tree, TreeRows.of(tree), room, ends, processors, noise, most)[0]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("warpers", WARPERS, ids=range(len(WARPERS)))
def test_both_walks_commit_the_same(do_sample: bool, warpers: list[Any]) -> None:
    """Token for token, generator state included, also where an eos or the length ends the text inside a path."""
    lengths = set()
    for seed in range(60):
        tree = random_tree(seed).pad(32)
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
            noise = Noise(logits.device) if do_sample and device else None
            if device:
                path = walk_on_device(logits, tree, record, processors, noise)
            else:
                path = lazy_walk(logits, tree, record, processors, do_sample)
            rows, stop = commit_path(path, DecodingState(), TreeCache([]), record, noise)
            outcomes.append((list(rows), stop, record.input_ids.tolist(), torch.get_rng_state().tolist()))
            lengths.add(len(rows))
        assert outcomes[0] == outcomes[1]
    assert {1, 2, 3, 4} <= lengths


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_device_walk_generates_what_plain_decoding_does(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def walk(*args: Any) -> Any:
        calls.append(1)
        return device_walk(*args)

    monkeypatch.setattr(launched, "walks_on_device", lambda *_: True)
    monkeypatch.setattr(launched, "device_walk", walk)
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
        lambda record: walk_on_device(logits, tree, record, LogitsProcessorList(), None),
    ):
        record = new_record(8, None)
        assert list(commit_path(walk(record), DecodingState(), TreeCache([]), record, None)[0]) == [0]


# -- the distribution ------------------------------------------------------------------------------------------------


TEMPERATURE = 1.5
SAMPLES = 3000


def _pair_counts(walk: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the next two tokens over many rounds, and their exact probabilities under a known target."""
    generator = torch.Generator().manual_seed(0)
    first = 2 * torch.randn(V, generator=generator)  # logits behind the root
    second = 2 * torch.randn(V, V, generator=generator)  # logits behind each first token
    tree = random_tree(4, depth=2, budget=9)
    logits = torch.zeros(1, 10, V)
    logits[0, 0] = first
    at_depth_1 = tree.depths[0] == 1
    logits[0, 1:][at_depth_1] = second[tree.token_ids[0][at_depth_1]]
    processors = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)])
    counts = torch.zeros(V, V)
    torch.manual_seed(0)
    for _ in range(SAMPLES):
        record = new_record(2, None)
        if not walk(logits, tree, record, processors):
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


def _accept_ratio_walk(logits: Any, tree: Any, record: Any, processors: Any) -> bool:
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
                        return True
                    rows.append(node + 1)
                    break
        else:
            return bool(record.commit(torch.multinomial(probs[None], 1)[0], None, None))


def _cold_walk(logits: Any, tree: Any, record: Any, processors: Any) -> bool:
    """A planted fault: temperature is ignored inside rounds."""
    return lazy_walk(logits, tree, record, LogitsProcessorList(), True).stop


def _lazy(logits: Any, tree: Any, record: Any, processors: Any) -> bool:
    return lazy_walk(logits, tree, record, processors, True).stop


def _on_device(logits: Any, tree: Any, record: Any, processors: Any) -> bool:
    noise = Noise(logits.device)
    path = walk_on_device(logits, tree, record, processors, noise)
    return commit_path(path, DecodingState(), TreeCache([]), record, noise)[1]


@pytest.mark.parametrize("walk", [_lazy, _on_device])
def test_samples_follow_the_targets_distribution(walk: Any) -> None:
    assert _chi_square_p(*_pair_counts(walk)) > 1e-3


@pytest.mark.parametrize("walk", [_cold_walk, _accept_ratio_walk])
def test_the_distribution_test_rejects_planted_faults(walk: Any) -> None:
    assert _chi_square_p(*_pair_counts(walk)) < 1e-6
