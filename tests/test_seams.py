"""What others may bring: a policy that adds children from the text, and drafters whose scores go by the parent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from hf_ddtree import (
    DDTreeConfig,
    DFlashConfig,
    DFlashDraftModel,
    DrafterFamily,
    DraftSource,
    DraftTree,
    Prefixes,
    Proposal,
    TreePolicy,
    add_children,
    configuration_ddtree,
    draft_tree,
    drafter_families,
    register_family,
    register_policy,
    tree_policy,
)
from hf_ddtree.state import Path
from hf_ddtree.tree_policy import TreeBuilder
from scripted import VOCAB, prompt_ids, scripted, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
PENALTY: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.1}
OPTIONS = pytest.mark.parametrize("options", [GREEDY, SAMPLING, PENALTY], ids=["greedy", "sampled", "penalty"])


@pytest.fixture(params=["launched", "graph"])
def executor(request: pytest.FixtureRequest) -> str:
    if request.param == "graph":
        request.getfixturevalue("stepped")
    return str(request.param)


def run(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


# -- a policy ---------------------------------------------------------------------------------------------------------


class WithFollowers:
    """Another source's rows, and behind each prefix the token that followed its last one in the text."""

    def __init__(self, source: DraftSource, followers: torch.Tensor) -> None:
        self.source, self.followers = source, followers
        self.depth, self.candidates = source.depth, source.candidates

    def rows(self, depth: int, prefixes: Prefixes) -> tuple[torch.Tensor, torch.Tensor]:
        follower = self.followers[prefixes.token_ids[..., -1:]]
        likely = torch.full(follower.shape, -0.1, device=follower.device)
        return add_children(*self.source.rows(depth, prefixes), follower, likely)


class FromText(TreePolicy):
    """Adds to each node the token that followed it last in the text."""

    observes = True

    def __init__(self, config: Any, device: torch.device) -> None:
        self.followers = torch.full((config.vocab_size + 1,), -1, device=device)  # the last is for what does not count
        self.last = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.rounds, self.right = torch.zeros(1, device=device), torch.zeros(1, device=device)
        self.memory = (self.followers, self.last, self.rounds, self.right)

    def begin(self, input_ids: torch.Tensor) -> None:
        self.followers.fill_(-1)
        self.followers[input_ids[0, :-1]] = input_ids[0, 1:]
        self.last.copy_(input_ids[:, -1:])
        self.rounds.zero_()
        self.right.zero_()

    def build(self, source: DraftSource, text: torch.Tensor, nodes: int, build_tree: TreeBuilder) -> DraftTree:
        return build_tree("best_first", WithFollowers(source, self.followers), text, nodes)

    def observe(self, committed: Path, best: torch.Tensor) -> None:
        tokens = committed.token_ids
        counts = torch.arange(tokens.shape[1], device=tokens.device) < committed.length[:, None]
        before = torch.cat([self.last, tokens[:, :-1]], dim=1).where(counts, len(self.followers) - 1)
        self.followers.scatter_(0, before[0], tokens[0])
        self.last.copy_(tokens.gather(1, committed.length[:, None] - 1))
        self.rounds += 1
        self.right += ((best.gather(1, committed.rows.clamp(min=0)) == tokens) | ~counts).all()


@pytest.fixture
def from_text() -> Iterator[None]:
    register_policy("from_text", FromText)
    yield
    configuration_ddtree.TREES.remove("from_text")
    del tree_policy._POLICIES["from_text"]


@OPTIONS
@pytest.mark.usefixtures("from_text")
def test_a_policy_adds_children_from_the_text(
    options: dict[str, Any], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[FromText] = []
    original = FromText.begin
    monkeypatch.setattr(FromText, "begin", lambda self, ids: (policies.append(self), original(self, ids))[1])
    model = tiny_target("qwen3")
    for layer in model.model.layers:  # so that its text goes in circles
        layer.self_attn.o_proj.weight.data.zero_()
    drafter = tiny_drafter(model)
    ids = prompt_ids(20)
    for budget in (15, [15, 0, 0, 15, 4] * 12):
        expected, state = run(model, ids, 60, **options)
        call = options | {"assistant_model": drafter}
        with scripted(expected.sequences, 0.1):
            without, _ = run(model, ids, 60, ddtree=DDTreeConfig(budget=budget), **call)
        config = DDTreeConfig(budget=budget, tree="from_text", record_trees=True)
        with scripted(expected.sequences, 0.1):
            out, after = run(model, ids, 60, ddtree=config, **call)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        stats = out.ddtree_stats
        assert (stats.launch.value == "operations") == (executor == "launched")
        if options is GREEDY:  # a text that repeats itself
            assert stats.mean_acceptance_length > without.ddtree_stats.mean_acceptance_length + 0.5
        for entry in stats.trees:
            real = entry.tree.depths[0] > 0
            pairs = list(
                zip(entry.tree.parents[0][real].tolist(), entry.tree.token_ids[0][real].tolist(), strict=True)
            )
            assert len(set(pairs)) == len(pairs)  # no child twice
        assert policies[-1].rounds == stats.rounds
        if options is GREEDY:
            assert policies[-1].right == stats.rounds
    assert len(set(map(id, policies))) == 1  # its tensors are those that graphs know


# -- scores by the parent ---------------------------------------------------------------------------------------------


class MarkovConfig(DFlashConfig):
    model_type = "markov_draft"


class MarkovDraftModel(DFlashDraftModel):
    """A DFlash drafter and a bias for each pair of tokens."""

    config_class = MarkovConfig

    def __init__(self, config: MarkovConfig) -> None:
        super().__init__(config)
        self.pairs = nn.Embedding(VOCAB, VOCAB)


class ByTheToken:
    """Each prefix's own row over all tokens, of which the best 12 count."""

    candidates = 12

    def __init__(self, logits: torch.Tensor, pairs: Any) -> None:
        self.logits, self.pairs = logits, pairs
        self.depth = logits.shape[1]

    def rows(self, depth: int, prefixes: Prefixes) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.logits[:, depth, None] + self.pairs(prefixes.token_ids[..., -1])
        best, token_ids = rows.float().log_softmax(-1).topk(12, dim=-1)
        return token_ids, best


class Markov(DrafterFamily):
    model_class = MarkovDraftModel
    table = True

    def knows(self, config: PreTrainedConfig | dict[str, Any]) -> bool:
        return isinstance(config, MarkovConfig)

    def propose(
        self, target: Any, drafter: Any, hidden: torch.Tensor, text: torch.Tensor, depth: int, candidates: int
    ) -> DraftSource:
        logits = drafter_families.draft_logits(target, hidden[:, 1 : depth + 1], drafter)
        if not self.table:
            return ByTheToken(logits, drafter.pairs)
        first = (logits[:, :1] + drafter.pairs(text[:, -1:])).float().log_softmax(-1)
        rest = logits.float().log_softmax(-1)
        log_probs, token_ids = torch.cat([first, rest[:, 1:]], dim=1).topk(12, dim=-1)
        parents = torch.cat([token_ids[:, :1], token_ids[:, :-1]], dim=1)  # the first is not read
        own = (logits[:, :, None] + drafter.pairs(parents)).float().log_softmax(-1)
        by_parent = own.gather(-1, token_ids[:, :, None].expand(-1, -1, 12, -1))
        return Proposal(token_ids, log_probs, by_parent)


@pytest.fixture(params=[True, False], ids=["table", "rows"])
def markov(request: pytest.FixtureRequest) -> Iterator[None]:
    family = Markov()
    family.table = request.param
    register_family(family)
    yield
    drafter_families._FAMILIES.remove(family)


def markov_drafter(target: Any, text: torch.Tensor) -> MarkovDraftModel:
    """It knows which token follows which in a text, and nothing else."""
    plain = tiny_drafter(target)
    drafter = MarkovDraftModel(MarkovConfig(**plain.config.to_dict())).eval()
    drafter.load_state_dict(plain.state_dict(), strict=False)
    drafter.pairs.weight.data.zero_()
    for token, follower in zip(text[0, :-1].tolist(), text[0, 1:].tolist(), strict=True):
        drafter.pairs.weight.data[token, follower] += 12.0
    return drafter


@OPTIONS
@pytest.mark.parametrize("tree", ["best_first", "chain", "static"])
@pytest.mark.usefixtures("markov")
def test_a_family_whose_scores_go_by_the_parent(tree: str, options: dict[str, Any], executor: str) -> None:
    model = tiny_target("llama")
    ids = prompt_ids(20)
    expected, state = run(model, ids, 60, **options)
    drafter = markov_drafter(model, expected.sequences)
    call = options | {"assistant_model": drafter}
    for _ in range(2):
        out, after = run(model, ids, 60, ddtree=DDTreeConfig(budget=15, tree=tree), **call)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        assert (out.ddtree_stats.launch.value == "operations") == (executor == "launched")
        assert out.ddtree_stats.mean_acceptance_length > 1.5


@pytest.mark.usefixtures("markov")
def test_the_chain_of_such_a_family_serves_transformers_own_loop() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(20)
    expected, _ = run(model, ids, 40, **GREEDY)
    drafter = markov_drafter(model, expected.sequences)
    out, _ = run(model, ids, 40, assistant_model=drafter, speculation_type="dflash", **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.usefixtures("markov")
@pytest.mark.parametrize("options", [GREEDY, PENALTY], ids=["greedy", "penalty"])
def test_graphs_draft_the_trees_that_launched_rounds_draft(
    options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(20), 40, **options)
    drafter = markov_drafter(model, expected.sequences)
    call = options | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=9, record_trees=True)}
    launched, _ = run(model, prompt_ids(20), 40, **call)
    request.getfixturevalue("stepped")
    recorded, _ = run(model, prompt_ids(20), 40, **call)
    assert recorded.ddtree_stats.launch.value == "graph"
    for mine, theirs in zip(recorded.ddtree_stats.trees[:-3], launched.ddtree_stats.trees[:-3], strict=True):
        assert mine.tree.token_ids.tolist() == theirs.tree.token_ids.tolist()
        assert mine.tree.parents.tolist() == theirs.tree.parents.tolist()
        assert mine.path == theirs.path


def test_whoever_watches_a_round_sees_no_tables_go_to_its_device() -> None:
    """A recorded round may copy nothing from the host, and a source of one's own is seen there first."""
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(1)
        draft_tree._make_plan(5, 7, 37, torch.device("meta"), search=True, by_rows=True)
    assert len(seen) == 1


# -- names ------------------------------------------------------------------------------------------------------------


def test_the_librarys_own_names_are_taken_and_unknown_ones_refused() -> None:
    with pytest.raises(ValueError, match="comes with the library"):
        register_policy("chain", FromText)
    with pytest.raises(ValueError, match="`tree` must be one of best_first, chain, static, got 'from_text'"):
        DDTreeConfig(tree="from_text")
