"""Tiny random models that see images, and prompts with images as their processors would make them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from scripted import SIZES, VOCAB, prompt_ids, show_all

TEXT_VOCAB = VOCAB - 4
IMAGE, VIDEO, START, END = range(TEXT_VOCAB, VOCAB)
WINDOW = 12
SIDE = 8  # pixels of a square image; its patches are 2 by 2

TEXT: dict[str, Any] = SIZES | {"head_dim": 16}
SIGHT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 2,
    "initializer_range": 0.3,
}
QWEN_SIGHT: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "initializer_range": 0.3,
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "paligemma")


def parts(family: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a family's config needs: of the text, of the images, and besides."""
    text, sight, others = TEXT, SIGHT, QWEN_IDS
    if family == "qwen2_vl":
        text = SIZES | {"hidden_size": 64, "rope_parameters": MROPE}
        sight = QWEN_SIGHT | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        text = SIZES | {"hidden_size": 64, "rope_parameters": MROPE}
        sight = QWEN_SIGHT | {"intermediate_size": 48, "out_hidden_size": 64}
        sight |= {"fullatt_block_indexes": [1], "window_size": 4}
    elif family == "qwen3_vl":
        text = TEXT | {"rope_parameters": MROPE}
        sight = QWEN_SIGHT | {"intermediate_size": 48, "out_hidden_size": 48}
        sight |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    elif family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        text = TEXT | {"sliding_window": WINDOW, "layer_types": kinds, "query_pre_attn_scalar": 16}
        others = {"image_token_id": IMAGE, "mm_tokens_per_image": 4, "boi_token_index": START, "eoi_token_index": END}
    elif family == "llava":
        text = SIZES | {"model_type": "llama"}
        sight = SIGHT | {"model_type": "clip_vision_model", "projection_dim": 32}
        others = {"image_token_index": IMAGE, "image_seq_length": 16, "vision_feature_layer": -1}
    elif family == "paligemma":
        text = TEXT | {"model_type": "gemma"}
        sight = SIGHT | {"model_type": "siglip_vision_model", "projection_dim": 48, "vision_use_head": False}
        others = {"image_token_id": IMAGE, "projection_dim": 48}
    elif family == "mllama":
        text = SIZES | {"cross_attention_layers": [1]}
        sight = SIGHT | {"num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 1, "vision_output_dim": 64}
        sight |= {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]}
        sight.pop("num_attention_heads")
        others = {"image_token_index": IMAGE}
    else:
        raise ValueError(family)
    return text, sight, others


def tiny_seeing_target(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of a family."""
    text, sight, others = parts(family)
    others = others | {"text_config": text | overrides, "vision_config": sight, "tie_word_embeddings": False}
    config = CONFIG_MAPPING[family](**others)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    show_all(model)
    return model


def seeing_prompt(family: str, images: int = 1, text: int = 6, padding: int = 0, seed: int = 0) -> dict[str, Any]:
    """Text, then each image with text behind it; with all that a processor gives."""
    generator = torch.Generator().manual_seed(seed)
    qwen = family.startswith("qwen")
    tokens = 4 if qwen or family == "gemma3" else 16
    pieces = [torch.zeros(1, padding, dtype=torch.long), prompt_ids(text, seed, TEXT_VOCAB)]
    for i in range(images):
        image = torch.tensor([[START, *[IMAGE] * (tokens + 2 * i * qwen), END]])
        pieces += [image, prompt_ids(text + 1, seed + 1 + i, TEXT_VOCAB)]
    ids = torch.cat(pieces, dim=1)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    types = (ids == IMAGE).long()
    if qwen:
        inputs["mm_token_type_ids"] = types
        if images:
            grids = torch.tensor([[1, 4, 4 + 2 * i] for i in range(images)])  # 2 by 2 patches become a token
            inputs["image_grid_thw"] = grids
            inputs["pixel_values"] = torch.randn(int(grids.prod(dim=1).sum()), 3 * 2 * 2, generator=generator)
        return inputs
    if family == "mllama" and images:
        inputs["pixel_values"] = torch.randn(1, images, 1, 3, SIDE, SIDE, generator=generator)
        inputs["aspect_ratio_ids"] = torch.ones(1, images, dtype=torch.long)
        inputs["aspect_ratio_mask"] = torch.ones(1, images, 1, dtype=torch.long)
        inputs["cross_attention_mask"] = torch.ones(*ids.shape, images, 1, dtype=torch.long)
        return inputs
    if family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)  # a prompt sees all of itself
    if family == "gemma3":
        inputs["token_type_ids"] = types
    if images:
        inputs["pixel_values"] = torch.randn(images, 3, SIDE, SIDE, generator=generator)
    return inputs
