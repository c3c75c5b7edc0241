"""Models of transformers whose parts are unlike the others': chosen keys, latents, several senses."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.row import Made, Row
from benchmarks.zoo_models.tiny import images, labels, masked, tiny, tokens


def _causal(kind: str, **options: Any) -> Made:
    ids = tokens()
    return tiny("ForCausalLM", kind, **options), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def _pictured() -> Made:
    """Qwen3-VL: four tokens of each row are an image's, of 4 x 4 patches."""
    model = tiny(
        "ForConditionalGeneration", "qwen3_vl", image_token_id=95, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92,
        text_config={"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        vision_config={"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    ids = tokens(2, most=90)
    ids[:, 1], ids[:, 2:6] = 93, 95
    return model, {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone(), "pixel_values": torch.randn(32, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == 95).long(), "use_cache": False,
    }  # fmt: skip


def _asked() -> Made:
    """BLIP-2: a few queries look at an image, and a language model reads them."""
    model = tiny(
        "ForConditionalGeneration", "blip-2", num_query_tokens=4, image_token_index=95,
        text_config={"model_type": "opt", "word_embed_proj_dim": 32},
    )  # fmt: skip
    ids = torch.cat([torch.full((2, 4), 95), tokens(2, 8, most=90)], 1)
    return model, {"pixel_values": images(2, 3, 16, 16), "input_ids": ids, "labels": tokens(2)}


def _pointed() -> Made:
    """SAM: an image and points, to masks."""
    model = tiny(
        "Model", "sam",
        vision_config={"output_channels": 16, "image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [0],
                       "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8, "image_embedding_size": 4, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )  # fmt: skip
    return model, {"pixel_values": images(2, 3, 32, 32), "input_points": torch.rand(2, 1, 2, 2) * 32}


ROWS = [
    Row("DeepSeek-V3.2", "experts", lambda: _causal(
        "deepseek_v32", num_key_value_heads=4, index_topk=4, index_head_dim=8, index_n_heads=2)),
    Row("ZAYA", "experts", lambda: _causal("zaya", num_experts_per_tok=1, router_hidden_size=16, num_hidden_layers=2)),
    Row("Perceiver", "encoder", lambda: (
        tiny("ForSequenceClassification", "perceiver", num_latents=8, d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=1,
             num_self_attention_heads=2, num_cross_attention_heads=2),
        {"inputs": (ids := tokens()), "attention_mask": masked(ids), "labels": labels()})),
    Row("V-JEPA 2", "vision", lambda: (
        tiny("Model", "vjepa2", crop_size=16, frames_per_clip=4, num_pooler_layers=1, pred_hidden_size=32, pred_num_attention_heads=4,
             pred_num_hidden_layers=1, pred_num_mask_tokens=2), {"pixel_values_videos": images(2, 4, 3, 16, 16)})),
    Row("SAM", "detection", _pointed),
    Row("DAC", "audio", lambda: (
        tiny("Model", "dac", encoder_hidden_size=8, downsampling_ratios=[2, 2], decoder_hidden_size=16, upsampling_ratios=[2, 2], n_codebooks=2,
             codebook_size=16, codebook_dim=4, hidden_size=32, quantizer_dropout=0), {"input_values": torch.randn(2, 1, 64)})),
    Row("BLIP-2", "multimodal", _asked),
    Row("Qwen3-VL", "multimodal", _pictured),
]  # fmt: skip
