"""Small models of Hugging Face's with random weights, as their users call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from tests.training.steps import Run, full, train

__all__ = ["EXAMPLES", "Example", "trained"]

Example = tuple[nn.Module, dict[str, Any]]

_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}
_LAYER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_ENCODER: dict[str, Any] = {**_LAYER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _options(**options: Any) -> dict[str, Any]:
    """Of configurations, whose signatures do not name all of them."""
    return options


def _text(length: int = 8, **more: torch.Tensor) -> dict[str, Any]:
    ids = torch.randint(2, 58, (4, length))
    return {"input_ids": ids, "labels": ids, **more}


def _with_images(**more: torch.Tensor) -> dict[str, Any]:
    """Four places for the patches of one image in each text."""
    ids = torch.randint(2, 58, (4, 12))
    ids[:, 1], ids[:, 2:6], ids[:, 6] = 61, 62, 60
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **more}


def detr() -> Example:
    """Clamps behind a test for infinity."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    stages = _options(out_features=["stage2"])
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", **stages
    )
    config = DetrConfig(
        **_options(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None),
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=8,
        dropout=0.0,
    )
    return DetrForObjectDetection(config).train(), {"pixel_values": torch.randn(4, 3, 32, 32)}


def llava() -> Example:
    """As many image features as places for them, which a check compares."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text, vision = LlamaConfig(**_TEXT, pad_token_id=0), CLIPVisionConfig(**_VISION)
    config = LlavaConfig(vision_config=vision, text_config=text, **_options(image_token_id=62))
    call = _with_images(pixel_values=torch.randn(4, 3, 16, 16))
    return LlavaForConditionalGeneration(config).train(), call


def paligemma() -> Example:
    from transformers import (
        GemmaConfig,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        SiglipVisionConfig,
    )

    vision = SiglipVisionConfig(**_VISION, vision_use_head=False).to_dict()
    text = GemmaConfig(**_TEXT, pad_token_id=0).to_dict()
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        **_options(image_token_id=62, projection_dim=16, hidden_size=16),
    )
    call = _with_images(pixel_values=torch.randn(4, 3, 16, 16))
    call["token_type_ids"] = (torch.arange(12) > 6).long().expand(4, -1).clone()
    return PaliGemmaForConditionalGeneration(config).train(), call


def qwen25vl() -> Example:
    """Windows and positions computed from the values of grid_thw, attention_mask and mm_token_type_ids."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {name: value for name, value in _TEXT.items() if name != "head_dim"}
    text |= {"bos_token_id": 0, "eos_token_id": 1}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 16,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=62,
        video_token_id=63,
        vision_start_token_id=61,
        vision_end_token_id=60,
    )
    call = _with_images(pixel_values=torch.randn(64, 96), image_grid_thw=torch.tensor([[1, 4, 4]] * 4))
    call["mm_token_type_ids"] = (call["input_ids"] == 62).int()
    call["attention_mask"][1, -2:] = 0
    return Qwen2_5_VLForConditionalGeneration(config).train(), call


def mixtral() -> Example:
    """A loop over the experts that any token is routed to."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_TEXT,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        **_options(experts_implementation="eager"),
    )
    return MixtralForCausalLM(config).train(), _text()


def qwen3next() -> Example:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    text: dict[str, Any] = {**_TEXT, "num_hidden_layers": 2}
    config = Qwen3NextConfig(
        **text,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3NextForCausalLM(config).train(), _text()


def longformer() -> Example:
    """Tokens with global attention, of which each text has another number."""
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(
        **_ENCODER, vocab_size=64, max_position_embeddings=64, attention_window=[4], pad_token_id=1
    )
    call = _text(16, attention_mask=torch.ones(4, 16).long(), global_attention_mask=torch.zeros(4, 16).long())
    call["attention_mask"][1, -3:] = 0
    call["global_attention_mask"][:, 0] = call["global_attention_mask"][2, 1] = 1
    return LongformerForMaskedLM(config).train(), call


def informer() -> Example:
    from transformers import InformerConfig, InformerForPrediction

    config = InformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2],
        num_time_features=2,
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        sampling_factor=2,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    past, future = (4, 10), (4, 4)
    return InformerForPrediction(config).train(), {
        "past_values": torch.randn(past),
        "past_time_features": torch.randn(*past, 2),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.randn(future),
        "future_time_features": torch.randn(*future, 2),
        "future_observed_mask": torch.ones(future),
    }


def encodec() -> Example:
    """Pads by numbers that are buffers."""
    from transformers import EncodecConfig, EncodecModel

    config = EncodecConfig(
        num_filters=2,
        hidden_size=16,
        codebook_dim=16,
        codebook_size=16,
        upsampling_ratios=[4],
        num_lstm_layers=1,
        target_bandwidths=[24.0],
        sampling_rate=8000,
    )
    return EncodecModel(config).train(), {"input_values": torch.randn(4, 1, 24)}


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    call = _text(attention_mask=torch.ones(4, 8).long())
    call["labels"] = torch.where(torch.rand(4, 8) < 0.3, call["input_ids"], -100)
    return BertForMaskedLM(BertConfig(**_ENCODER, vocab_size=64)).train(), call


def vitmae() -> Example:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        **_ENCODER,
        image_size=16,
        patch_size=4,
        decoder_hidden_size=16,
        decoder_intermediate_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
    )
    return ViTMAEForPreTraining(config).train(), {"pixel_values": torch.randn(4, 3, 16, 16)}


def mask2former() -> Example:
    """Its loss assigns queries to masks by scipy: `criterion` outside of forward."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    swin = _options(depths=[1] * 4, num_heads=[1] * 4, out_features=stages)
    backbone = SwinConfig(image_size=32, embed_dim=8, window_size=2, drop_path_rate=0.0, **swin)
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=8,
        train_num_points=32,
    )
    return Mask2FormerForUniversalSegmentation(config).train(), {"pixel_values": torch.randn(4, 3, 32, 32)}


def _speech() -> dict[str, Any]:
    return _options(
        **_LAYER,
        vocab_size=16,
        conv_dim=[8, 8],
        conv_stride=[4, 2],
        conv_kernel=[8, 4],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        mask_time_prob=0.0,
    )


def _spoken() -> dict[str, Any]:
    """One sound is shorter, and so is one text."""
    sound, text = torch.ones(4, 200).long(), torch.randint(1, 16, (4, 3))
    sound[2, 150:], text[1, 2] = 0, -100
    return {"input_values": torch.randn(4, 200), "attention_mask": sound, "labels": text}


def wav2vec2() -> Example:
    """CTC of targets that a mask chooses."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(Wav2Vec2Config(**_speech())).train(), _spoken()


def hubert() -> Example:
    from transformers import HubertConfig, HubertForCTC

    return HubertForCTC(HubertConfig(**_speech())).train(), _spoken()


_ALL: list[Callable[[], Example]] = [
    detr, llava, paligemma, qwen25vl, mixtral, qwen3next, longformer, informer, encodec, bert, vitmae, mask2former,
    wav2vec2, hubert,
]  # fmt: skip
EXAMPLES = {example.__name__: example for example in _ALL}


def trained(rank: int, name: str, options: Mapping[str, Any] | None = None) -> Run:
    """Three steps in float64, through autoshard on two ranks if there are options."""
    torch.manual_seed(0)
    model, call = EXAMPLES[name]()
    model = model.double()
    call = {key: value.double() if value.is_floating_point() else value for key, value in call.items()}
    data = [{key: value.roll(step, 0) for key, value in call.items()} for step in range(3)]
    if options is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        autoshard(model, mesh, ((), data[0]), **options)
    losses = train(model, lambda step: model(**data[step]).loss, 3)
    return Run(losses, full(model))
