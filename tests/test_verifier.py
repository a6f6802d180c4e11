"""Every node's logits and features are those of a plain forward over its own path, and only our calls are tapped."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GenerationConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedModel,
)

from hf_ddtree.anatomy import decoder_layers, find_decoder, layer_kinds
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.draft_tree import TreeRows, ancestor_matrix, node_depths
from hf_ddtree.prefill import prefill as prefill_of
from hf_ddtree.target_state import Buffers
from hf_ddtree.verifier import FeatureTaps, Verifier, tree_mask
from hf_ddtree.visibility import Visibility
from scripted import SIZES, VOCAB, chain_rows, keep_path, prompt_ids, tiny_drafter, tiny_target

FAMILIES = ["llama", "qwen2", "qwen2_mixed", "qwen3", "mistral", "phi3"]
TAPS = [0, 2, 3]  # 3 is the last layer
PROMPT, NODES, ROUNDS = 30, 11, 4  # longer than the windows of 24, and shorter than Phi-3's switch at 64


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    random.seed(0)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Tree(NamedTuple):
    token_ids: torch.Tensor  # (1, N), root excluded
    parents: torch.Tensor
    depths: torch.Tensor

    def path(self, node: int) -> list[int]:
        """Rows from the root (0) down to a node's row (node + 1)."""
        rows = []
        while node >= 0:
            rows.insert(0, node + 1)
            node = int(self.parents[0, node])
        return [0, *rows]


def random_tree(nodes: int, padding: int = 0) -> Tree:
    """Parents come before children, as in every draft tree; half the nodes continue the latest one."""
    parents: list[int] = []
    depths: list[int] = []
    for node in range(nodes):
        parent = node - 1 if random.random() < 0.5 else random.randrange(-1, node)
        if parent >= 0 and depths[parent] == 6:
            parent = -1
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    token_ids = [random.randrange(4, VOCAB) for _ in range(nodes)]
    extra = [0] * padding
    columns = token_ids + extra, parents + [-1] * padding, depths + extra
    return Tree(*(torch.tensor([column]) for column in columns))


# The mask


def naive_allowed(
    ancestors: list[list[bool]],
    length: int,
    view: int,
    prompt_mask: list[bool] | None,
    window: int | None,
    chunked: bool,
) -> list[list[bool]]:
    depths = [sum(row) - 1 for row in ancestors]
    padding = 0 if prompt_mask is None else [*prompt_mask, True].index(True)
    allowed = [[False] * view for _ in ancestors]
    for q in range(len(ancestors)):
        for k in range(view):
            if k < length:
                visible = prompt_mask is None or k >= len(prompt_mask) or prompt_mask[k]
                key_slot = k
            elif (node := k - length) < len(ancestors):
                visible = ancestors[q][node]
                key_slot = length + depths[node]
            else:
                continue
            query_slot = length + depths[q]
            if window is not None and chunked:
                visible = visible and (query_slot - padding) // window == (key_slot - padding) // window
            elif window is not None:
                visible = visible and query_slot - key_slot < window
            allowed[q][k] = visible
    return allowed


def mask_of(
    ancestors: torch.Tensor,
    length: int,
    view: int,
    prompt: torch.Tensor | None,
    window: int | None,
    dtype: torch.dtype,
    chunked: bool = False,
) -> torch.Tensor:
    kind, batch = "chunked_attention" if chunked else "sliding_attention", ancestors.shape[0]
    committed = torch.ones(batch, view, dtype=torch.bool)
    if prompt is not None:
        committed[:, : prompt.shape[1]] = prompt
    seen = Visibility.of(kind, window, torch.full((batch,), length), committed, ancestors, node_depths(ancestors))
    return tree_mask(seen, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_tree_mask_is_the_naive_one(chunked: bool, padded: bool, window: int | None, dtype: torch.dtype) -> None:
    for batch, length, nodes, spare in ((1, 0, 5, 0), (1, 12, 1, 3), (2, 12, 9, 7), (3, 5, 6, 64)):
        trees = [random_tree(nodes - nodes // 4, padding=nodes // 4) for _ in range(batch)]
        ancestors = torch.cat([ancestor_matrix(tree.parents, tree.depths) for tree in trees])
        view = length + nodes + 1 + spare
        prompt = torch.rand(batch, max(length - 3, 0)) < 0.6 if padded else None
        mask = mask_of(ancestors, length, view, prompt, window, dtype, chunked)
        assert mask.shape == (batch, 1, nodes + 1, view) and mask.dtype == dtype
        expected = [
            naive_allowed(
                ancestors[b].tolist(),
                length,
                view,
                None if prompt is None else prompt[b].tolist(),
                window,
                chunked,
            )
            for b in range(batch)
        ]
        assert (mask[:, 0] == 0).tolist() == expected
        assert (mask[:, 0] == torch.finfo(dtype).min).tolist() == [
            [[not seen for seen in row] for row in matrix] for matrix in expected
        ]


def test_a_node_always_sees_itself_and_a_node_cut_off_is_seen_by_no_other() -> None:
    parents, depths = torch.tensor([[-1, 0, 9, -1]]), torch.tensor([[1, 2, 3, 0]])
    ancestors = ancestor_matrix(parents, depths)
    for window in (None, 1):
        mask = mask_of(ancestors, 6, 16, None, window, torch.float32)
        tree_part = mask[0, 0, :, 6:11] == 0
        assert tree_part.diagonal().all()
        assert tree_part[:, 3].tolist() == [False, False, False, True, False]
        assert tree_part[:, 4].tolist() == [False, False, False, False, True]


FULL, SLIDING = ("full_attention", None), ("sliding_attention", 24)
KINDS = {family: [FULL] * 4 for family in FAMILIES} | {"qwen2_mixed": [FULL, FULL, SLIDING, SLIDING]}
KINDS["mistral"] = [SLIDING] * 4  # its config names no kinds, only a window


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kinds_and_windows_of_a_targets_layers_are_those_of_its_config(family: str) -> None:
    assert layer_kinds(tiny_target(family).config) == KINDS[family]


def test_chunked_layers_have_their_chunk_for_a_window() -> None:
    config = Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=24)
    assert layer_kinds(config) == [("chunked_attention", 24)] * 3 + [("full_attention", None)]


# The target call


def target_of(family: str, attention: str = "eager") -> PreTrainedModel:
    model = tiny_target(family)
    model.set_attn_implementation(attention)
    return model


def verifier_of(model: PreTrainedModel, layer_ids: list[int] = TAPS, **output_kwargs: Any) -> Verifier:
    cache = Buffers(model, kept=True).cache
    cache.reserve(PROMPT + ROUNDS * (NODES + 1))
    return Verifier(model, layer_ids, cache, output_kwargs)


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """As `generate` counts them."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def prefill(
    verifier: Verifier, input_ids: torch.Tensor, attention_mask: torch.Tensor, chunk: int | None = None
) -> tuple[Any, torch.Tensor]:
    model_kwargs = {
        "attention_mask": attention_mask,
        "position_ids": positions_of(attention_mask),
        "use_cache": True,
        "logits_to_keep": 1,
    }
    return prefill_of(verifier, input_ids, GenerationConfig(prefill_chunk_size=chunk), model_kwargs)


def plain(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """A forward without a cache, with all hidden states."""
    return model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions_of(attention_mask),
        use_cache=False,
        output_hidden_states=True,
    )


def plain_features(outputs: Any, layer_ids: list[int] = TAPS) -> torch.Tensor:
    return torch.cat([outputs.hidden_states[i + 1] for i in layer_ids], dim=-1)


def plain_paths(
    model: PreTrainedModel, committed: torch.Tensor, attention_mask: torch.Tensor, root: int, tree: Tree, nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features at the end of every path: committed tokens, root, nodes. One forward, a path a row."""
    tokens = [root, *tree.token_ids[0].tolist()]
    paths = [[0], *(tree.path(node) for node in range(nodes))]
    longest = max(map(len, paths))
    ids = torch.tensor([[tokens[row] for row in path] + [0] * (longest - len(path)) for path in paths])
    ids = torch.cat([committed.expand(len(paths), -1), ids], dim=1)
    mask = torch.nn.functional.pad(attention_mask, (0, longest), value=1).expand(len(paths), -1)
    outputs = plain(model, ids, mask)  # what stands behind a path is not seen from it
    last = torch.tensor([committed.shape[1] + len(path) - 1 for path in paths])
    rows = torch.arange(len(paths))
    return outputs.logits[rows, last][None], plain_features(outputs)[rows, last][None]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def padded_prompt(left_pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = prompt_ids(PROMPT)
    mask = torch.ones_like(ids)
    ids[:, :left_pad], mask[:, :left_pad] = 0, 0
    return ids, mask


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("left_pad", [0, 7])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_gets_the_logits_and_features_of_its_own_path(
    family: str, attention: str, left_pad: int, padding: int
) -> None:
    model = target_of(family, attention)
    verifier = verifier_of(model)
    committed, mask = padded_prompt(left_pad)
    real = mask[0].bool()

    outputs, features = prefill(verifier, committed, mask)
    expected = plain(model, committed, mask)
    close(outputs.logits[:, -1], expected.logits[:, -1])
    features = torch.cat(list(features), dim=1)
    close(features[:, real], plain_features(expected)[:, real])

    root = int(outputs.logits[0, -1].argmax())
    for _ in range(ROUNDS):
        tree = random_tree(NODES - padding, padding)
        ancestors = TreeRows.of(tree)
        ids = torch.cat([torch.tensor([[root]]), tree.token_ids], dim=1)
        position = positions_of(mask)[:, -1:] + 1
        verified = verifier.verify(ids, position, ancestors)
        assert verified.logits.shape == (1, NODES + 1, VOCAB)
        logits, path_features = plain_paths(model, committed, mask, root, tree, NODES - padding)
        real_rows = NODES - padding + 1
        close(verified.logits[:, :real_rows], logits)
        close(verified.features[:, :real_rows], path_features)

        path = tree.path(random.randrange(NODES - padding))[:4]
        keep_path(verifier.cache, path)
        committed = torch.cat([committed, ids[:, path]], dim=1)
        mask = torch.nn.functional.pad(mask, (0, len(path)), value=1)
        assert verifier.cache.length == committed.shape[1]
        root = random.randrange(4, VOCAB)
    assert committed.shape[1] > PROMPT + ROUNDS  # some paths went beyond their root
    verifier.close()


@pytest.mark.parametrize("chunk", [1, 7, PROMPT, 100])
@pytest.mark.parametrize("family", ["llama", "qwen2_mixed"])
def test_a_prompt_in_chunks_gives_the_features_of_all_its_rows(family: str, chunk: int) -> None:
    model = target_of(family)
    verifier = verifier_of(model)
    ids, mask = padded_prompt(0)
    outputs, features = prefill(verifier, ids, mask, chunk)
    expected = plain(model, ids, mask)
    close(outputs.logits[:, -1], expected.logits[:, -1])
    features = torch.cat(list(features), dim=1)
    close(features, plain_features(expected))


def test_a_tree_left_open_can_be_verified_again_and_a_closed_one_leaves_no_trace() -> None:
    model = target_of("qwen2_mixed")
    verifier = verifier_of(model)
    committed, mask = padded_prompt(0)
    prefill(verifier, committed, mask)
    position = torch.tensor([[PROMPT]])
    first, second = random_tree(NODES), random_tree(NODES)
    root = torch.tensor([[9]])
    for tree in (first, second, first):
        ids = torch.cat([root, tree.token_ids], dim=1)
        verified = verifier.verify(ids, position, TreeRows.of(tree))
        close(verified.logits, plain_paths(model, committed, mask, 9, tree, NODES)[0])
        verifier.cache.close()


def test_the_root_alone_is_a_plain_step() -> None:
    model = target_of("mistral")
    verifier = verifier_of(model)
    committed, mask = padded_prompt(0)
    prefill(verifier, committed, mask)
    for token in (5, 6, 7):
        verified = verifier.verify(torch.tensor([[token]]), torch.tensor([[committed.shape[1]]]), chain_rows(1))
        keep_path(verifier.cache, [0])
        committed = torch.cat([committed, torch.tensor([[token]])], dim=1)
        expected = plain(model, committed, torch.ones_like(committed))
        close(verified.logits[:, -1], expected.logits[:, -1])
        close(verified.features[:, -1], plain_features(expected)[:, -1])


@pytest.mark.parametrize("layer_ids", [[3], [1], [2, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_tap_layers_states_in_the_order_of_the_taps(family: str, layer_ids: list[int]) -> None:
    model = target_of(family)
    verifier = verifier_of(model, layer_ids)
    ids, mask = padded_prompt(0)
    _, features = prefill(verifier, ids, mask)
    expected = plain(model, ids, mask)
    features = torch.cat(list(features), dim=1)
    close(features, plain_features(expected, layer_ids))
    if layer_ids == [3]:  # the last layer is tapped after the norm, as the head sees it
        close(features, expected.hidden_states[-1])
        close(model.get_output_embeddings()(features), expected.logits)


def test_trees_of_a_batch_are_verified_as_each_alone() -> None:
    model = target_of("qwen2_mixed")
    verifier = verifier_of(model)
    committed = torch.cat([prompt_ids(PROMPT, seed) for seed in (1, 2)])
    mask = torch.ones_like(committed)
    mask[1, :5] = 0
    prefill(verifier, committed, mask)
    trees = [random_tree(NODES), random_tree(NODES)]
    ids = torch.cat([torch.tensor([[9], [10]]), torch.cat([tree.token_ids for tree in trees])], dim=1)
    ancestors = TreeRows(*map(torch.cat, zip(*map(TreeRows.of, trees), strict=True)))
    verified = verifier.verify(ids, positions_of(mask)[:, -1:] + 1, ancestors)
    for b, tree in enumerate(trees):
        alone = slice(b, b + 1)
        logits, features = plain_paths(model, committed[alone], mask[alone], 9 + b, tree, NODES)
        close(verified.logits[alone], logits)
        close(verified.features[alone], features)


def test_outputs_that_the_caller_asked_for_come_back() -> None:
    model = target_of("llama")
    verifier = verifier_of(model, output_hidden_states=True, output_attentions=True)
    prefill(verifier, *padded_prompt(0))
    tree = random_tree(NODES)
    ids = torch.cat([torch.tensor([[9]]), tree.token_ids], dim=1)
    outputs = verifier.verify(ids, torch.tensor([[PROMPT]]), TreeRows.of(tree)).outputs
    assert [tuple(state.shape[:2]) for state in outputs.hidden_states] == [(1, NODES + 1)] * 5
    assert len(outputs.attentions) == 4 and outputs.attentions[0].shape[2] == NODES + 1


# Taps


def hook_counts(model: PreTrainedModel) -> dict[str, int]:
    return {name: len(module._forward_hooks) for name, module in model.named_modules() if module._forward_hooks}


def forward(model: PreTrainedModel, length: int = 5) -> Any:
    return model(prompt_ids(length, seed=length), output_hidden_states=True)


def shapes(chunks: dict[int, list[torch.Tensor]]) -> dict[int, list[int]]:
    return {layer: [state.shape[1] for state in states] for layer, states in chunks.items()}


@pytest.fixture
def model() -> PreTrainedModel:
    return target_of("llama")


def test_taps_record_every_forward_inside_recording_and_none_outside(model: PreTrainedModel) -> None:
    taps = FeatureTaps(model, [0, 3])
    forward(model)
    with taps.recording() as chunks:
        assert chunks == {0: [], 3: []}
        outputs = forward(model, 5)
        forward(model, 2)
    forward(model, 9)
    assert shapes(chunks) == {0: [5, 2], 3: [5, 2]}
    assert torch.equal(chunks[0][0], outputs.hidden_states[1])
    assert torch.equal(chunks[3][0], outputs.hidden_states[4])
    with taps.recording() as again:
        pass
    assert shapes(again) == {0: [], 3: []}
    taps.remove()


def test_a_recording_inside_another_takes_only_its_own_forwards(model: PreTrainedModel) -> None:
    taps, others = FeatureTaps(model, [1]), FeatureTaps(model, [1, 2])
    with taps.recording() as outer:
        forward(model, 3)
        with others.recording() as inner:
            forward(model, 4)
            with taps.recording() as innermost:
                forward(model, 5)
        forward(model, 6)
    assert shapes(outer) == {1: [3, 6]}
    assert shapes(inner) == {1: [4], 2: [4]}
    assert shapes(innermost) == {1: [5]}


def test_the_outer_recording_goes_on_after_an_exception_inside_an_inner_one(model: PreTrainedModel) -> None:
    taps = FeatureTaps(model, [1])

    def fail() -> None:
        with taps.recording():
            forward(model, 4)
            raise KeyError("inside")

    with taps.recording() as outer:
        with pytest.raises(KeyError, match="inside"):
            fail()
        forward(model, 6)
    assert shapes(outer) == {1: [6]}
    forward(model, 7)
    assert shapes(outer) == {1: [6]}


def test_forwards_of_other_threads_write_nothing(model: PreTrainedModel) -> None:
    taps = FeatureTaps(model, [0, 3])
    failures: list[BaseException] = []

    def run_elsewhere() -> None:
        try:
            with torch.no_grad():
                forward(model, 8)
        except BaseException as failure:  # reported below, in the thread of the test
            failures.append(failure)

    with taps.recording() as chunks:
        forward(model, 2)
        threads = [threading.Thread(target=run_elsewhere) for _ in range(3)]
        for thread in threads:
            thread.start()
        forward(model, 3)
        for thread in threads:
            thread.join()
    assert failures == []
    assert shapes(chunks) == {0: [2, 3], 3: [2, 3]}


def test_two_threads_that_record_get_their_own(model: PreTrainedModel) -> None:
    results: dict[int, dict[int, list[int]]] = {}
    barrier = threading.Barrier(2)

    def record(length: int) -> None:
        taps = FeatureTaps(model, [1])
        with torch.no_grad(), taps.recording() as chunks:
            for _ in range(5):
                barrier.wait(timeout=30)
                forward(model, length)
            barrier.wait(timeout=30)
        results[length] = shapes(chunks)

    threads = [threading.Thread(target=record, args=(length,)) for length in (3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {3: {1: [3] * 5}, 7: {1: [7] * 5}}


def test_hooks_are_gone_after_removal_and_only_ours(model: PreTrainedModel) -> None:
    layers = decoder_layers(model)
    users = layers[2].register_forward_hook(lambda *args: None)
    forward(model)  # transformers leaves hooks of its own when it is asked for hidden states
    before = hook_counts(model)
    first, second = FeatureTaps(model, TAPS), FeatureTaps(model, [2])
    assert sum(hook_counts(model).values()) == sum(before.values()) + 4
    first.remove()
    with second.recording() as chunks:
        forward(model, 4)
    assert shapes(chunks) == {2: [4]}
    second.remove()
    assert hook_counts(model) == before
    with first.recording() as nothing:
        forward(model)
    assert shapes(nothing) == {layer: [] for layer in TAPS}
    users.remove()


def test_a_closed_verifier_leaves_no_hook(model: PreTrainedModel) -> None:
    before = hook_counts(model)
    verifier = verifier_of(model)
    assert hook_counts(model) != before
    verifier.close()
    assert hook_counts(model) == before


def test_the_decoder_layers_are_found_or_the_error_says_what_is_missing(model: PreTrainedModel) -> None:
    assert decoder_layers(model) is model.model.layers
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of 5 decoder layers"):
        decoder_layers(model)


def test_the_decoder_layers_are_found_where_get_decoder_does_not_lead_to_them() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    bert = BertLMHeadModel(BertConfig(**sizes, is_decoder=True))
    assert find_decoder(bert) == (bert.bert, bert.bert.encoder.layer)
    modern = ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**sizes))  # its head has the name `decoder`
    assert find_decoder(modern) == (modern.model, modern.model.layers)
    longcat = LongcatFlashForCausalLM(
        LongcatFlashConfig(vocab_size=VOCAB, hidden_size=48, num_layers=3, n_routed_experts=2, zero_expert_num=1)
    )
    assert longcat.config.num_hidden_layers == 6  # two layers of the cache for one of the model
    assert decoder_layers(longcat) is longcat.model.layers


def test_of_a_layer_that_is_run_twice_in_a_forward_the_last_output_is_the_feature(model: PreTrainedModel) -> None:
    layers = decoder_layers(model)
    layers[2] = layers[1]
    outputs: list[torch.Tensor] = []
    layers[1].register_forward_hook(lambda module, args, output: outputs.append(output))
    taps = FeatureTaps(model, [1])
    with taps.recording() as chunks:
        model(prompt_ids(5), use_cache=False)
        model(prompt_ids(3), use_cache=False)
    assert shapes(chunks) == {1: [5, 3]}
    assert chunks[1][0] is outputs[1] and chunks[1][1] is outputs[3]


@pytest.mark.parametrize("axis", [0, 2])
def test_the_feature_of_a_layer_with_several_streams_is_their_mean(model: PreTrainedModel, axis: int) -> None:
    layers = decoder_layers(model)
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])

    def into_streams(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.stack([output * weight for weight in weights], dim=axis)

    def out_of_streams(module: Any, args: Any) -> tuple[torch.Tensor]:
        return (args[0].select(axis, 1),)

    handles = [layers[1].register_forward_hook(into_streams), layers[2].register_forward_pre_hook(out_of_streams)]
    taps = FeatureTaps(model, [1])
    ids = prompt_ids(4)
    with taps.recording() as chunks:
        model(ids)
    for handle in handles:
        handle.remove()
    close(chunks[1][0], model(ids, output_hidden_states=True).hidden_states[2] * 2)


def verify_anything(verifier: Verifier) -> torch.Tensor:
    tree = random_tree(NODES)
    ids = torch.cat([torch.tensor([[9]]), tree.token_ids], dim=1)
    position = torch.tensor([[verifier.cache.length]])
    try:
        return verifier.verify(ids, position, TreeRows.of(tree)).features
    finally:
        verifier.cache.close()


def test_features_that_nothing_recorded_are_an_error(model: PreTrainedModel) -> None:
    verifier = verifier_of(model)
    prefill(verifier, *padded_prompt(0))
    verifier.taps._handles[1].remove()
    with pytest.raises(
        RuntimeError, match=f"Layer 2 of the target gave nothing instead of features for {NODES + 1} rows"
    ):
        verify_anything(verifier)
    verifier.close()
    fresh = verifier_of(model)
    fresh.close()
    with pytest.raises(RuntimeError, match=f"Layer 0 .* nothing instead of features for {PROMPT} rows"):
        prefill(fresh, *padded_prompt(0))


def test_features_of_too_many_or_too_few_rows_are_an_error(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = verifier_of(model)
    prefill(verifier, *padded_prompt(0))
    call = model.forward

    def twice(**kwargs: Any) -> Any:
        call(**kwargs)
        return call(**kwargs)

    def half(**kwargs: Any) -> Any:
        rows = (NODES + 1) // 2
        short = {"input_ids": kwargs["input_ids"][:, :rows], "position_ids": kwargs["position_ids"][:, :rows]}
        return call(**short, use_cache=False)

    for replacement, rows in ((twice, 2 * (NODES + 1)), (half, (NODES + 1) // 2)):
        monkeypatch.setattr(model, "forward", replacement)
        with pytest.raises(RuntimeError, match=f"gave {rows} rows instead of features for {NODES + 1} rows"):
            verify_anything(verifier)
        monkeypatch.undo()
    assert verify_anything(verifier).shape[1] == NODES + 1


def test_forwards_between_our_calls_leave_features_as_they_were(model: PreTrainedModel) -> None:
    """As of a logits processor that runs the target itself."""
    verifier = verifier_of(model)
    ids, mask = padded_prompt(0)
    _, features = prefill(verifier, ids, mask)
    (features,) = features
    before = features.clone()
    forward(model, PROMPT)
    model.generate(prompt_ids(4), do_sample=False, max_new_tokens=2)
    assert torch.equal(features, before)
    assert verify_anything(verifier).shape[1] == NODES + 1


# Compiled in place


class CountingBackend:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiled() -> Iterator[tuple[PreTrainedModel, CountingBackend]]:
    model, backend = target_of("llama"), CountingBackend()
    model.compile(backend=backend)
    yield model, backend
    torch._dynamo.reset()


def test_a_model_compiled_in_place_still_gives_features(compiled: tuple[PreTrainedModel, CountingBackend]) -> None:
    model, backend = compiled
    call = model._compiled_call_impl
    assert call is not None
    verifier = verifier_of(model)
    ids, mask = padded_prompt(0)
    outputs, features = prefill(verifier, ids, mask)
    tree = random_tree(NODES)
    nodes = torch.cat([torch.tensor([[9]]), tree.token_ids], dim=1)
    verified = verifier.verify(nodes, torch.tensor([[PROMPT]]), TreeRows.of(tree))
    verifier.close()
    assert model._compiled_call_impl is call
    assert backend.graphs == 0

    reference = target_of("llama")
    expected = plain(reference, ids, mask)
    close(outputs.logits[:, -1], expected.logits[:, -1])
    features = torch.cat(list(features), dim=1)
    close(features, plain_features(expected))
    logits, path_features = plain_paths(reference, ids, mask, 9, tree, NODES)
    close(verified.logits, logits)
    close(verified.features, path_features)


def test_a_model_stays_compiled_after_an_exception_in_its_forward(
    compiled: tuple[PreTrainedModel, CountingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = compiled
    call = model._compiled_call_impl

    def fail(*args: Any, **kwargs: Any) -> Any:
        assert model._compiled_call_impl is None
        raise KeyError("inside")

    for run in (lambda verifier: prefill(verifier, *padded_prompt(0)), verify_anything):
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", fail)
            with closing(verifier_of(model)) as verifier, pytest.raises(KeyError, match="inside"):
                run(verifier)
        assert model._compiled_call_impl is call
    assert FeatureTaps._current.get() is None


def test_a_model_compiled_in_place_decodes_trees_to_the_plain_text(
    compiled: tuple[PreTrainedModel, CountingBackend],
) -> None:
    model, backend = compiled
    ids = prompt_ids(PROMPT)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20}
    expected = target_of("llama").generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=tiny_drafter(model), ddtree=True, **options), expected)
    assert backend.graphs == 0


def test_the_cache_is_handed_over_under_this_versions_name(model: PreTrainedModel) -> None:
    verifier = verifier_of(model)
    outputs, _ = prefill(verifier, *padded_prompt(0))
    assert outputs[CACHE_KEY] is verifier.cache
    assert not isinstance(outputs[CACHE_KEY], DynamicCache)
    assert verifier.cache.length == PROMPT
