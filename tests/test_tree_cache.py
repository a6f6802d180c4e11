"""The rows of the tree cache against plain lists, and what a target keeps of it between calls."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Cache, DeepseekV32Config, DynamicCache, PreTrainedModel, Qwen2Config, StaticCache
from transformers.cache_utils import DFlashCache

from hf_ddtree import DFlashDraftModel, release_buffers
from hf_ddtree.state import Path
from hf_ddtree.target_state import Buffers, claim
from hf_ddtree.tree_cache import DraftCache, TreeCache, capacity_for
from scripted import chain_rows, keep_path, prompt_ids, tiny_drafter, tiny_target

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 3
STATE = "_hf_ddtree_state"
Rows = tuple[torch.Tensor, torch.Tensor]  # keys and values, (B, heads, N, dim) each


def random_rows(count: int, batch: int = 1, dims: tuple[int, int] = (KEY_DIM, VALUE_DIM), **kwargs: Any) -> Rows:
    keys, values = (torch.randn(batch, HEADS, count, dim, **kwargs) for dim in dims)
    return keys, values


class ListCache:
    """What a cache should hold: per layer, a list of committed rows."""

    def __init__(self, layers: int) -> None:
        self.layers: list[list[Rows]] = [[] for _ in range(layers)]

    def append(self, layer: int, rows: Rows, path: list[int] | None = None) -> None:
        keys, values = rows
        for i in range(keys.shape[2]) if path is None else path:
            self.layers[layer].append((keys[:, :, i], values[:, :, i]))

    def crop(self, count: int) -> None:
        for layer in self.layers:
            del layer[len(layer) - count :]

    def __len__(self) -> int:
        return len(self.layers[0])

    def rows(self, layer: int) -> Rows:
        keys, values = zip(*self.layers[layer], strict=True)
        return torch.stack(keys, dim=2), torch.stack(values, dim=2)


def prefill(cache: TreeCache, naive: ListCache, count: int, batch: int = 1) -> None:
    for layer in range(len(cache.layers)):
        rows = random_rows(count, batch)
        seen = cache.update(*rows, layer)
        naive.append(layer, rows)
        for got, expected in zip(seen, naive.rows(layer), strict=True):
            assert torch.equal(got, expected)


def grow_tree(cache: TreeCache, naive: ListCache, nodes: int, path: list[int], batch: int = 1) -> None:
    """A round: the rows of a tree are written, and those of a path stay."""
    before = cache.length
    cache.open(chain_rows(nodes))
    assert cache.slots == range(before, before + nodes)
    for layer in range(len(cache.layers)):
        rows = random_rows(nodes, batch)
        seen = cache.update(*rows, layer)
        for got, written, committed in zip(seen, rows, naive.rows(layer), strict=True):
            assert got.shape[2] == cache.view
            assert torch.equal(got[:, :, : before + nodes], torch.cat([committed, written], dim=2))
        naive.append(layer, rows, path)
        assert cache.length == before  # an open tree is not committed
    keep_path(cache, path)
    assert cache.slots is None


def assert_holds(cache: TreeCache, naive: ListCache) -> None:
    assert cache.length == cache.get_seq_length() == len(naive)
    for i, layer in enumerate(cache.layers):
        assert layer.get_seq_length() == len(naive)
        for buffer, expected in zip((layer.keys, layer.values), naive.rows(i), strict=True):
            assert torch.equal(buffer[:, :, : len(naive)], expected)


def random_path(nodes: int, prefix: bool) -> list[int]:
    """Rows of a path: the root, and then ever later ones (parents come before children)."""
    length = random.randint(1, min(nodes, 6))
    if prefix:
        return list(range(length))
    return [0, *sorted(random.sample(range(1, nodes), length - 1))]


# Rows


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_keep_exactly_the_rows_of_their_paths(seed: int, batch: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    cache, naive = TreeCache([False, True, False]), ListCache(3)
    prefill(cache, naive, 5, batch)
    kinds = set()
    for _ in range(40):
        nodes = random.randint(1, 20)
        cache.reserve(cache.length + nodes)
        path = random_path(nodes, prefix=random.random() < 0.4)
        kinds.add(path == list(range(len(path))))
        grow_tree(cache, naive, nodes, path, batch)
        assert_holds(cache, naive)
    assert kinds == {True, False}


@pytest.mark.parametrize("known", [False, True])
def test_a_path_that_was_kept_can_be_kept_again_with_fewer_rows(known: bool) -> None:
    """Whether the host knows the path, or only the device does, in slots behind its end that hold -1."""
    random.seed(1)
    cache, naive = TreeCache([False, True]), ListCache(2)
    prefill(cache, naive, 5)
    for _ in range(30):
        nodes = random.randint(2, 12)
        rows = random_path(nodes, prefix=False)
        cache.reserve(cache.length + nodes)
        cache.open(chain_rows(nodes))
        written = [random_rows(nodes) for _ in range(2)]
        for layer in range(2):
            cache.update(*written[layer], layer)
        path = torch.tensor([rows + ([] if known else [-1, -1])])
        kept = Path(path, path, torch.tensor([len(rows)]), rows if known else None)
        cache.keep(kept)
        for count in range(len(rows), 0, -1):
            cache.keep(kept.first(count))
        cache.count.set(cache.count.host + count)
        for layer in range(2):
            naive.append(layer, written[layer], rows[:count])
        assert_holds(cache, naive)


def test_a_whole_tree_a_root_alone_and_far_nodes_can_be_kept() -> None:
    cache, naive = TreeCache([False]), ListCache(1)
    prefill(cache, naive, 3)
    for nodes, path in ((1, [0]), (6, [0]), (6, list(range(6))), (6, [0, 5]), (9, [0, 4, 5, 8]), (5, [0, 2, 3, 4])):
        grow_tree(cache, naive, nodes, path)
        assert_holds(cache, naive)


def test_a_closed_tree_leaves_nothing_and_its_slots_are_written_again() -> None:
    cache, naive = TreeCache([False, False]), ListCache(2)
    prefill(cache, naive, 7)
    cache.open(chain_rows(9))
    for layer in range(2):
        cache.update(*random_rows(9), layer)
    cache.close()
    assert_holds(cache, naive)
    prefill(cache, naive, 2)
    grow_tree(cache, naive, 4, [0, 3])
    assert_holds(cache, naive)


def test_a_prompt_may_come_in_chunks() -> None:
    cache, naive = TreeCache([False, True]), ListCache(2)
    for count in (4, 1, 11):
        prefill(cache, naive, count)
        assert_holds(cache, naive)


def test_attention_reads_the_committed_rows_rounded_up_and_no_more() -> None:
    cache = TreeCache([False], capacity=256)
    cache.update(*random_rows(60), 0)
    for nodes, view in ((1, 64), (4, 64), (5, 128), (68, 128), (69, 192), (196, 256)):
        cache.open(chain_rows(nodes))
        assert cache.view == view
        keys, values = cache.update(*random_rows(nodes), 0)
        assert keys.shape[2] == values.shape[2] == view
        assert keys.data_ptr() == cache.layers[0].keys.data_ptr()  # a view, not a copy
        cache.close()


def test_rows_that_were_never_written_are_finite() -> None:
    cache = TreeCache([False])
    cache.update(*random_rows(3), 0)
    assert not cache.layers[0].keys[:, :, 3:].any()
    assert not cache.layers[0].values[:, :, 3:].any()


def test_a_layer_that_no_forward_writes_to_is_left_alone() -> None:
    """As with models whose last layers share the keys of earlier ones."""
    cache, naive = TreeCache([False, False]), ListCache(1)
    rows = random_rows(4)
    cache.update(*rows, 0)
    naive.append(0, rows)
    cache.open(chain_rows(5))
    rows = random_rows(5)
    cache.update(*rows, 0)
    naive.append(0, rows, [0, 3])
    keep_path(cache, [0, 3])
    cache.reserve(600)
    assert cache.length == 6
    assert torch.equal(cache.layers[0].keys[:, :, :6], naive.rows(0)[0])
    assert not cache.layers[1].is_initialized
    # By this Mllama knows, in older transformers, that its layers which look across have nothing to look at.
    assert [cache.get_seq_length(i) for i in range(2)] == [6, 0]


def test_crop_forgets_the_last_rows() -> None:
    cache, naive = TreeCache([False, True]), ListCache(2)
    prefill(cache, naive, 12)
    for count in (0, 1, 4):
        cache.crop(-count)
        naive.crop(count)
        assert_holds(cache, naive)
    prefill(cache, naive, 3)
    grow_tree(cache, naive, 6, [0, 2, 5])
    assert_holds(cache, naive)


def test_reset_forgets_the_rows_and_an_open_tree_and_keeps_the_buffers() -> None:
    cache, naive = TreeCache([False, True]), ListCache(2)
    prefill(cache, naive, 12)
    cache.open(chain_rows(3))
    before = pointers(cache)
    cache.reset()
    assert cache.length == 0 and cache.slots is None
    naive = ListCache(2)
    prefill(cache, naive, 5)
    assert_holds(cache, naive)
    assert pointers(cache) == before


# Capacity


def test_capacity_goes_in_powers_of_two_from_256() -> None:
    expected = {1: 256, 255: 256, 256: 256, 257: 512, 512: 512, 513: 1024, 1024: 1024, 5000: 8192}
    assert {rows: capacity_for(rows) for rows in expected} == expected


def test_growth_keeps_the_rows_and_happens_only_when_needed() -> None:
    cache, naive = TreeCache([False, True]), ListCache(2)
    prefill(cache, naive, 250)
    before = pointers(cache)
    cache.reserve(256)
    assert (cache.capacity, pointers(cache)) == (256, before)
    for rows, capacity in ((257, 512), (300, 512), (10, 512), (1025, 2048)):
        cache.reserve(rows)
        assert cache.capacity == capacity
        assert_holds(cache, naive)
        assert all(layer.keys.shape[2] == layer.values.shape[2] == capacity for layer in cache.layers)
        grow_tree(cache, naive, 7, [0, 3, 6])
        assert_holds(cache, naive)


def test_room_reserved_before_the_first_row_is_there_at_the_first_row() -> None:
    cache, naive = TreeCache([False]), ListCache(1)
    cache.reserve(400)
    prefill(cache, naive, 400)
    assert cache.layers[0].keys.shape == (1, HEADS, 512, KEY_DIM)
    assert cache.layers[0].values.shape == (1, HEADS, 512, VALUE_DIM)


@pytest.mark.parametrize("committed", [0, 200, 255, 256])
def test_a_tree_beyond_capacity_is_refused_and_one_up_to_it_is_not(committed: int) -> None:
    cache, naive = TreeCache([False], capacity=256), ListCache(1)
    if committed:
        prefill(cache, naive, committed)
    with pytest.raises(RuntimeError, match=rf"{257 - committed} rows at {committed} does not fit 256"):
        cache.open(chain_rows(257 - committed))
    assert cache.slots is None
    if 0 < committed < 256:
        grow_tree(cache, naive, 256 - committed, [0])
        assert_holds(cache, naive)


@pytest.mark.parametrize("already", [0, 200, 255, 256])
@pytest.mark.parametrize("excess", [1, 2, 50])
def test_a_prompt_beyond_capacity_is_refused(already: int, excess: int) -> None:
    cache, naive = TreeCache([False], capacity=256), ListCache(1)
    if already:
        prefill(cache, naive, already)
    with pytest.raises(RuntimeError):
        cache.update(*random_rows(256 - already + excess), 0)
    assert cache.length == already


# Other caches

CONFIG = Qwen2Config(
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=HEADS,
    use_sliding_window=True,
    sliding_window=8,
    max_window_layers=1,
)
DIMS = (KEY_DIM, KEY_DIM)


def dynamic_cache() -> Cache:
    return DynamicCache(config=CONFIG)


def static_cache() -> Cache:
    return StaticCache(config=CONFIG, max_cache_len=48)


def fill(cache: Cache, naive: ListCache, count: int, one_by_one: bool = False) -> None:
    for layer in range(3):
        rows = random_rows(count, dims=DIMS)
        naive.append(layer, rows)
        for i in range(count) if one_by_one else [slice(None)]:
            part = [states[:, :, i : i + 1] if one_by_one else states for states in rows]
            cache.update(*part, layer)


def held_rows(cache: Cache, layer: int, length: int) -> int:
    """The last rows that a layer of another cache still has."""
    theirs = cache.layers[layer]
    if not theirs.is_sliding:
        return length
    return min(length, CONFIG.sliding_window - isinstance(cache, DynamicCache))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 20, 48])
@pytest.mark.parametrize("make", [dynamic_cache, static_cache])
def test_another_caches_rows_are_taken_over_as_far_as_it_has_them(
    make: Callable[[], Cache], length: int, one_by_one: bool
) -> None:
    theirs, naive = make(), ListCache(3)
    fill(theirs, naive, length, one_by_one)
    mine = TreeCache([layer.is_sliding for layer in theirs.layers])
    assert [layer.is_sliding for layer in mine.layers] == [False, True, True]
    mine.load(theirs)
    assert mine.length == length
    for i, layer in enumerate(mine.layers):
        first = length - held_rows(theirs, i, length)
        for buffer, expected in zip((layer.keys, layer.values), naive.rows(i), strict=True):
            assert torch.equal(buffer[:, :, first:length], expected[:, :, first:])
            assert buffer.shape[2] == mine.capacity


@pytest.mark.parametrize("added", [1, 3, 8, 12])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("make", [dynamic_cache, static_cache])
def test_exported_rows_leave_the_other_cache_as_if_it_had_got_them_itself(
    make: Callable[[], Cache], length: int, added: int
) -> None:
    theirs, reference, naive = make(), make(), ListCache(3)
    if length:
        fill(theirs, naive, length)
        for layer in range(3):
            reference.update(*(rows.clone() for rows in naive.rows(layer)), layer)
    mine = TreeCache([layer.is_sliding for layer in theirs.layers])
    mine.load(theirs)
    new = [random_rows(added, dims=DIMS) for _ in range(3)]
    for layer in range(3):
        mine.update(*new[layer], layer)
        reference.update(*new[layer], layer)
    mine.export(theirs)
    assert int(theirs.get_seq_length()) == int(reference.get_seq_length()) == length + added
    for got, expected in zip(theirs.layers, reference.layers, strict=True):
        assert torch.equal(got.keys, expected.keys)
        assert torch.equal(got.values, expected.values)

    before = [layer.keys.clone() for layer in theirs.layers]
    mine.export(theirs)  # nothing new
    assert int(theirs.get_seq_length()) == length + added
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(theirs.layers, before, strict=True))
    mine.layers[0].keys.zero_()
    assert torch.equal(theirs.layers[0].keys, before[0])  # a copy


def test_loading_replaces_what_was_there_and_grows() -> None:
    mine, naive = TreeCache([False, True, True]), ListCache(3)
    for layer in range(3):
        mine.update(*random_rows(30, dims=DIMS), layer)
    theirs = DynamicCache()
    fill(theirs, naive, 300)
    mine.load(theirs)
    assert mine.capacity == 512
    assert_holds(mine, naive)
    mine.load(DynamicCache())
    assert mine.length == 0


# An indexer's keys


def indexed_cache() -> DynamicCache:
    return DynamicCache(config=DeepseekV32Config(num_hidden_layers=2))


def test_an_indexers_keys_go_with_the_rows_of_their_layer() -> None:
    random.seed(0)
    mine, theirs, known = TreeCache([False, False]), indexed_cache(), torch.empty(1, 0, 6)
    for round in range(30):
        tree = round % 5 > 0  # else a turn of the user's
        nodes = random.randint(2, 20) if tree else random.randint(30, 60)
        path = random_path(nodes, prefix=random.random() < 0.4) if tree else list(range(nodes))
        mine.reserve(mine.length + nodes)
        length = mine.length
        if tree:
            mine.open(chain_rows(nodes))
        rows, indexer_keys = random_rows(nodes), torch.randn(1, nodes, 6)
        for layer in range(2):
            mine.update(*rows, layer)
        seen = mine.update_indexer(indexer_keys, 1)  # the first layer has none
        assert torch.equal(seen[:, : length + nodes], torch.cat([known, indexer_keys], dim=1))
        assert seen.shape[1] == (mine.view if tree else length + nodes)
        if tree:
            keep_path(mine, path)
        known = torch.cat([known, indexer_keys[:, path]], dim=1)
        if round % 7 == 0:  # as when a call ends and another continues it
            mine.export(theirs)
            assert torch.equal(theirs.layers[1].indexer_keys, known)
            mine = TreeCache([False, False])
            mine.load(theirs)
    assert mine.capacity > 256
    mine.reset()
    assert torch.equal(mine.layers[1].indexer.keys, torch.zeros_like(mine.layers[1].indexer.keys))
    assert mine.layers[1].indexer.get_seq_length() == 0


def test_layers_that_a_model_adds_share_the_tree_and_reach_the_users_cache() -> None:
    config = Qwen2Config(num_hidden_layers=2, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    mine, theirs = TreeCache.for_config(config), DynamicCache(config=config)
    mine.layers += [copy.deepcopy(layer) for layer in mine.layers]
    naive = ListCache(4)
    prefill(mine, naive, 9)
    grow_tree(mine, naive, 5, [0, 2, 4])
    assert_holds(mine, naive)
    mine.export(theirs)
    assert [layer.is_sliding for layer in theirs.layers] == [False, True] * 2
    again = TreeCache.for_config(config)
    again.load(theirs)
    assert [layer.is_sliding for layer in again.layers] == [False, True] * 2
    for got, kept in zip(again.layers, naive.layers, strict=True):
        assert got.get_seq_length() == 12
        assert torch.equal(got.keys[:, :, 11], kept[11][0])


# A drafter's context


@pytest.mark.parametrize("rounds", [[(5, 4), (1, 4), (3, 4)], [(1, 2)] * 5])
def test_the_offsets_of_a_drafters_cache_are_those_of_transformers_own(rounds: list[tuple[int, int]]) -> None:
    mine, theirs, length = DraftCache([False, False]), DFlashCache(), 0
    for context, block in rounds:
        for cache in (mine, theirs):
            cache.set_previous_accepted_tokens(context)
        for layer in range(2):
            if length:  # transformers' layers do not exist before
                assert mine.get_query_offset(layer) == theirs.get_query_offset(layer)
                assert mine.get_mask_sizes(block, layer) == theirs.get_mask_sizes(block, layer)
            assert mine.get_query_offset(layer) == length + context
            assert mine.get_mask_sizes(block, layer) == (length + context + block, 0)
        for layer in range(2):
            rows = random_rows(context + block)
            for ours, other in zip(mine.update(*rows, layer), theirs.update(*rows, layer), strict=True):
                assert torch.equal(ours, other)
        for cache in (mine, theirs):
            cache.crop(-block)
        length += context
        assert mine.length == mine.get_seq_length() == theirs.get_seq_length() == length


def test_a_sliding_layer_of_a_drafters_cache_keeps_all_rows() -> None:
    cache = DraftCache([True])
    rows = random_rows(40)
    cache.update(*rows, 0)
    cache.set_previous_accepted_tokens(2)
    assert cache.get_mask_sizes(4, 0) == (46, 0)
    assert cache.is_sliding == [True]
    assert torch.equal(cache.layers[0].keys[:, :, :40], rows[0])


# What stays on the target between calls


def pointers(cache: TreeCache) -> list[tuple[int, int]]:
    return [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_target("qwen2_mixed")


@pytest.fixture
def drafter(target: PreTrainedModel) -> DFlashDraftModel:
    return tiny_drafter(target)


def generate(target: PreTrainedModel, new: int = 6, **kwargs: Any) -> list[int]:
    return target.generate(prompt_ids(30), do_sample=False, max_new_tokens=new, **kwargs)[0].tolist()


def kept(target: PreTrainedModel) -> TreeCache:
    buffers = target.__dict__[STATE].buffers
    assert isinstance(buffers, Buffers)
    return buffers.cache


def test_a_later_call_of_the_same_target_finds_its_buffers(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    first = generate(target, assistant_model=drafter, ddtree=True)
    cache, before = kept(target), pointers(kept(target))
    assert cache.length == 0
    assert len(before) == target.config.num_hidden_layers
    for new in (6, 1, 40):
        text = generate(target, new, assistant_model=drafter, ddtree=True)
        assert len(text) == 30 + new and text[: len(first)] == first[: len(text)]
        assert kept(target) is cache and pointers(cache) == before
    generate(target, 250, assistant_model=drafter, ddtree=True)
    assert kept(target) is cache and cache.capacity == 512
    grown = pointers(cache)
    assert generate(target, assistant_model=drafter, ddtree=True) == first
    assert pointers(cache) == grown


def test_a_target_cast_since_gets_buffers_of_its_dtype(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    generate(target, assistant_model=drafter, ddtree=True)
    before = pointers(kept(target))
    target.to(torch.float64)
    expected = generate(target)
    assert generate(target, assistant_model=drafter, ddtree=True) == expected
    assert all(layer.keys.dtype == layer.values.dtype == torch.float64 for layer in kept(target).layers)
    assert not set(pointers(kept(target))) & set(before)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float64},
        {"device": "meta"},
        {"batch": 2},
        {"dims": (KEY_DIM, VALUE_DIM + 1)},
        {"dims": (KEY_DIM + 1, VALUE_DIM)},
    ],
)
def test_rows_of_another_dtype_device_or_shape_get_new_buffers(other: dict[str, Any]) -> None:
    cache = TreeCache([False])
    cache.update(*random_rows(3), 0)
    cache.reset()
    before = cache.layers[0].keys
    keys, values = random_rows(5, **other)
    seen = cache.update(keys, values, 0)
    assert cache.layers[0].keys is not before
    for got, rows in zip(seen, (keys, values), strict=True):
        assert (got.shape, got.dtype, got.device) == (rows.shape, rows.dtype, rows.device)
        assert rows.is_meta or torch.equal(got, rows)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_call_of_nothing_but_nan_leaves_later_calls_as_they_were(
    target: PreTrainedModel, drafter: DFlashDraftModel, attention: str
) -> None:
    """Rows behind the committed ones are masked, but read: 0 * NaN is NaN."""
    target.set_attn_implementation(attention)
    expected = generate(target)
    poison = torch.full((1, 60, target.config.hidden_size), float("nan"))
    ones = torch.ones(1, 60, dtype=torch.long)
    options: dict[str, Any] = {"do_sample": False, "assistant_model": drafter, "ddtree": True}
    target.generate(inputs_embeds=poison, attention_mask=ones, max_new_tokens=4, **options)
    assert generate(target) == expected
    assert generate(target, assistant_model=drafter, ddtree=True) == expected


def test_released_buffers_are_freed_at_once_and_the_next_call_makes_new_ones(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    first = generate(target, assistant_model=drafter, ddtree=True)
    gc.collect()
    buffers = [weakref.ref(buffer) for layer in kept(target).layers for buffer in (layer.keys, layer.values)]
    assert all(buffer() is not None for buffer in buffers)
    gc.disable()  # memory that is asked for now should not wait for the collector
    try:
        release_buffers(target)
        assert sum(buffer() is not None for buffer in buffers) == 0
    finally:
        gc.enable()
    assert target.__dict__[STATE].buffers is None
    release_buffers(target)  # nothing there: nothing happens
    assert generate(target, assistant_model=drafter, ddtree=True) == first


def test_a_target_never_used_has_nothing_to_release(target: PreTrainedModel) -> None:
    release_buffers(target)
    assert STATE not in target.__dict__


def test_a_used_target_is_freed_with_its_buffers(target: PreTrainedModel) -> None:
    own = copy.deepcopy(target)
    generate(own, assistant_model=tiny_drafter(own), ddtree=True)
    references = [weakref.ref(own), weakref.ref(kept(own).layers[0].keys)]
    del own
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def copied(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model)


def pickled(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copied, pickled])
def test_a_copy_of_a_used_target_has_a_state_of_its_own(
    target: PreTrainedModel, drafter: DFlashDraftModel, duplicate: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    size = len(pickle.dumps(target))
    first = generate(target, assistant_model=drafter, ddtree=True)
    assert len(pickle.dumps(target)) < size + 1000  # no buffers travel
    before = pointers(kept(target))
    other = duplicate(target)
    if (state := other.__dict__[STATE]) is not None:  # pickles have none
        assert state.buffers is None
        assert state.lock is not target.__dict__[STATE].lock
    assert generate(other, assistant_model=drafter, ddtree=True) == first
    assert not set(pointers(kept(other))) & set(before)
    assert pointers(kept(target)) == before
    assert generate(target, assistant_model=drafter, ddtree=True) == first


def test_use_leaves_weights_modules_and_hooks_of_a_target_as_they_were(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    def inventory() -> Any:
        hooks = {name: len(module._forward_hooks) for name, module in target.named_modules()}
        return list(target.state_dict()), [name for name, _ in target.named_buffers()], hooks

    before = inventory()
    generate(target, assistant_model=drafter, ddtree=True)
    assert inventory() == before


def test_a_call_from_inside_another_gets_buffers_of_its_own(target: PreTrainedModel) -> None:
    with claim(target) as outer:
        with claim(target) as inner:
            assert inner is not outer
            inner.cache.update(*random_rows(3), 0)
        assert outer.cache.length == 0
        with claim(target) as another:
            assert another is not outer
        assert target.__dict__[STATE].busy
    with claim(target) as again:
        assert again is outer


def test_after_an_exception_the_cache_is_empty_and_free_again(target: PreTrainedModel) -> None:
    def fail() -> None:
        with claim(target) as buffers:
            buffers.cache.update(*random_rows(3), 0)
            buffers.cache.open(chain_rows(4))
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    failed = kept(target)
    assert failed.length == 0 and failed.slots is None
    with claim(target) as buffers:
        assert buffers.cache is failed
    assert target.__dict__[STATE].lock.acquire(blocking=False)
    target.__dict__[STATE].lock.release()


def test_another_thread_does_not_wait_and_gets_buffers_of_its_own(target: PreTrainedModel) -> None:
    others: list[Buffers] = []

    def other() -> None:
        with claim(target) as buffers:
            others.append(buffers)

    thread = threading.Thread(target=other)
    with claim(target) as buffers:
        buffers.cache.update(*random_rows(3), 0)
        thread.start()
        thread.join(timeout=30)
        assert len(others) == 1 and others[0] is not buffers
        assert buffers.cache.length == 3
    with claim(target) as again:
        assert again is buffers


def test_earlier_rows_of_a_narrower_type_are_promoted() -> None:
    cache = TreeCache([False], capacity=256)
    keys, values = random_rows(3)
    cache.update(keys.bfloat16(), values.bfloat16(), 0)
    more = random_rows(2)
    got, _ = cache.update(*more, 0)
    assert torch.equal(got, torch.cat([keys.bfloat16(), more[0]], dim=2))


@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "mistral"])
def test_a_targets_cache_has_its_layers(family: str) -> None:
    model = tiny_target(family)
    expected = [layer.is_sliding for layer in DynamicCache(config=model.config).layers]
    cache = Buffers(model, kept=True).cache
    assert len(cache.layers) == 4
    assert [layer.is_sliding for layer in cache.layers] == cache.is_sliding == expected
    assert not cache.is_compileable


def test_buffers_released_while_a_call_begins_or_ends_serve_it_to_its_end(
    target: PreTrainedModel, drafter: DFlashDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread."""
    text = generate(target, assistant_model=drafter, ddtree=True)
    enter, reset = Buffers.enter, Buffers.reset
    for name, original in (("enter", enter), ("reset", reset)):
        with monkeypatch.context() as patch:

            def released(self: Buffers, *args: Any, original: Callable[..., Any] = original) -> None:
                release_buffers(target)
                original(self, *args)

            patch.setattr(Buffers, name, released)
            assert generate(target, assistant_model=drafter, ddtree=True) == text
    assert generate(target, assistant_model=drafter, ddtree=True) == text
