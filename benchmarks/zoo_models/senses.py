"""Models of transformers that see and hear: vision, detection, audio, several senses, time series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.zoo_models.row import Made, Row
from benchmarks.zoo_models.tiny import BATCH, images, labels, masked, tiny, tokens

Given = Callable[[], dict[str, Any]]


def _rows(kind: str, given: Given, models: Mapping[str, tuple[str, str, dict[str, Any]]]) -> list[Row]:
    """models: task, type, what is set by hand, by name."""
    make: Callable[..., Made] = lambda task, type, options: (tiny(task, type, **options), given())
    return [Row(name, kind, lambda one=one: make(*one)) for name, one in models.items()]


_SEES: Given = lambda: {"pixel_values": images(), "labels": labels()}
_STAGES: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [16, 32]}
_CLASSIFY = "ForImageClassification"
_IMAGES = _rows(
    "vision",
    _SEES,
    {
        "ViT": (_CLASSIFY, "vit", {}),
        "BEiT": (_CLASSIFY, "beit", {}),
        "DINOv2": (_CLASSIFY, "dinov2", {}),
        "Data2Vec": ("Data2VecVisionForImageClassification", "data2vec-vision", {}),
        "Swin": (
            _CLASSIFY,
            "swin",
            {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 2},
        ),
        "Swin v2": (
            _CLASSIFY,
            "swinv2",
            {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 2, "patch_size": 2},
        ),
        "ConvNeXt": (_CLASSIFY, "convnext", _STAGES | {"num_stages": 2, "patch_size": 2}),
        "ConvNeXt v2": (_CLASSIFY, "convnextv2", _STAGES | {"num_stages": 2, "patch_size": 2}),
        "ResNet": (_CLASSIFY, "resnet", _STAGES | {"embedding_size": 16, "layer_type": "basic"}),
        "RegNet": (_CLASSIFY, "regnet", _STAGES | {"embedding_size": 16, "groups_width": 8}),
        "PVT v2": (
            _CLASSIFY,
            "pvt_v2",
            {
                "depths": [1, 1],
                "hidden_sizes": [16, 32],
                "num_encoder_blocks": 2,
                "num_attention_heads": [2, 4],
                "sr_ratios": [2, 1],
                "mlp_ratios": [2, 2],
                "patch_sizes": [3, 3],
                "strides": [2, 2],
            },
        ),
        "SegFormer": (
            _CLASSIFY,
            "segformer",
            {
                "depths": [1, 1],
                "hidden_sizes": [16, 32],
                "num_encoder_blocks": 2,
                "num_attention_heads": [2, 4],
                "sr_ratios": [2, 1],
                "mlp_ratios": [2, 2],
                "patch_sizes": [3, 3],
                "strides": [2, 2],
                "decoder_hidden_size": 16,
            },
        ),
        "PoolFormer": (
            _CLASSIFY,
            "poolformer",
            {
                "depths": [1, 1],
                "hidden_sizes": [16, 32],
                "num_encoder_blocks": 2,
                "patch_sizes": [3, 3],
                "strides": [2, 2],
                "padding": [1, 1],
                "mlp_ratio": 2.0,
            },
        ),
        "FocalNet": (
            _CLASSIFY,
            "focalnet",
            {
                "depths": [1, 1],
                "hidden_sizes": [16, 32],
                "embed_dim": 16,
                "focal_levels": [1, 1],
                "focal_windows": [3, 3],
                "patch_size": 2,
            },
        ),
        "CvT": (
            _CLASSIFY,
            "cvt",
            {
                "depth": [1, 2, 3],
                "embed_dim": [16, 16, 32],
                "num_heads": [1, 2, 2],
                "drop_rate": [0.0] * 3,
                "attention_drop_rate": [0.0] * 3,
                "drop_path_rate": [0.0] * 3,
            },
        ),
        "MobileNet v2": (_CLASSIFY, "mobilenet_v2", {"depth_multiplier": 0.1, "image_size": 32}),
        "MobileViT": (
            _CLASSIFY,
            "mobilevit",
            {
                "hidden_sizes": [16, 16, 16],
                "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
                "image_size": 64,
                "num_hidden_layers": 1,
            },
        ),
        "Hiera": (
            _CLASSIFY,
            "hiera",
            {
                "depths": [1, 1],
                "num_heads": [1, 2],
                "embed_dim": 16,
                "image_size": [16, 16],
                "patch_size": [3, 3],
                "patch_stride": [2, 2],
                "patch_padding": [1, 1],
                "masked_unit_size": [4, 4],
                "query_stride": [2, 2],
                "embed_dim_multiplier": 2.0,
                "num_query_pool": 1,
            },
        ),
    },
)
_VISION = [
    *_IMAGES,
    Row("ViT-MAE", "vision", lambda: (tiny("ForPreTraining", "vit_mae", decoder_hidden_size=32, decoder_intermediate_size=64, decoder_num_hidden_layers=1,
                                          decoder_num_attention_heads=4), {"pixel_values": images()})),
    Row("BiT", "vision", lambda: (tiny(_CLASSIFY, "bit", depths=[1, 1], hidden_sizes=[32, 64], embedding_size=32, num_groups=4), _SEES())),
    Row("VideoMAE", "vision", lambda: (
        tiny("ForVideoClassification", "videomae", num_frames=4), {"pixel_values": images(2, 4, 3, 16, 16), "labels": labels(2)})),
    Row("TimeSformer", "vision", lambda: (
        tiny("ForVideoClassification", "timesformer", num_frames=4), {"pixel_values": images(2, 4, 3, 16, 16), "labels": labels(2)})),
    Row("ViViT", "vision", lambda: (
        tiny("ForVideoClassification", "vivit", num_frames=4, tubelet_size=[2, 4, 4]),
        {"pixel_values": images(2, 4, 3, 16, 16), "labels": labels(2)})),
    Row("Swin2SR", "vision", lambda: (
        tiny("ForImageSuperResolution", "swin2sr", depths=[1], num_heads=[4], embed_dim=32, window_size=4, patch_size=1),
        {"pixel_values": images(2, 3, 8, 8)})),
    Row("SAM vision", "vision", lambda: (
        tiny("SamVisionModel", "sam_vision_model", image_size=16, output_channels=8, global_attn_indexes=[0], mlp_dim=64),
        {"pixel_values": images()})),
]  # fmt: skip


def _targets(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return [
        {"class_labels": labels(count, most=3), "boxes": torch.rand(count, 4) * 0.5 + 0.2} for _ in range(2)
    ]


_SHOWN: Given = lambda: {"pixel_values": images(2, 3, 32, 32)}
_BACKBONE: dict[str, Any] = {
    "backbone_config": {"model_type": "resnet", "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16,
                        "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]},
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "num_queries": 6, "num_labels": 3,
}  # fmt: skip
_DETECT = "ForObjectDetection"
_DETECTION = [
    Row("YOLOS", "detection", lambda: (tiny(_DETECT, "yolos", image_size=[32, 32], num_detection_tokens=6), _SHOWN())),
    *_rows("detection", _SHOWN, {
        name: (_DETECT, kind, _BACKBONE | options)
        for name, kind, options in (
            ("DETR", "detr", {}), ("Conditional DETR", "conditional_detr", {}),
            ("Deformable DETR", "deformable_detr", {"num_feature_levels": 3, "num_hidden_layers": 2, "decoder_layers": 2}),
            ("RT-DETR", "rt_detr", {"encoder_in_channels": [16, 32, 32], "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32],
                                    "encoder_ffn_dim": 64, "num_denoising": 0}),
        )
    }),
    Row("MaskFormer", "detection", lambda: (
        tiny("ForInstanceSegmentation", "maskformer", **_MASKS), _SHOWN())),
    Row("Mask2Former", "detection", lambda: (
        tiny("ForUniversalSegmentation", "mask2former", **_MASKS, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64,
             dim_feedforward=64, encoder_layers=1, decoder_layers=2, num_queries=6, train_num_points=32), _SHOWN())),
    Row("OWL-ViT", "detection", lambda: (
        tiny("ForObjectDetection", "owlvit", vision_config={"image_size": 32}),
        {"input_ids": tokens(4, 8), "pixel_values": images(2, 3, 32, 32), "attention_mask": torch.ones(4, 8, dtype=torch.int64)})),
]  # fmt: skip
_MASKS: dict[str, Any] = {
    "backbone_config": {"model_type": "swin", "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "embed_dim": 8, "image_size": 32,
                        "window_size": 2, "patch_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
}  # fmt: skip

_HEARS: Given = lambda: {"input_values": torch.randn(2, 800)}
_WAVES: dict[str, Any] = {
    "conv_dim": [16, 16, 16], "conv_stride": [5, 4, 2], "conv_kernel": [10, 8, 3], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "num_codevectors_per_group": 8,
    "codevector_dim": 32, "proj_codevector_dim": 32, "classifier_proj_size": 16, "tdnn_dim": [16, 16],
}  # fmt: skip
_AUDIO = [
    *_rows("audio", _HEARS, {
        name: (task, kind, _WAVES | options)
        for name, kind, task, options in (
            ("wav2vec 2", "wav2vec2", "ForSequenceClassification", {}),
            ("WavLM", "wavlm", "Model", {}), ("SEW", "sew", "Model", {"squeeze_factor": 2}),
            ("wav2vec 2 Conformer", "wav2vec2-conformer", "Model", {}), ("Data2Vec audio", "data2vec-audio", "Model", {}),
        )
    }),
    Row("wav2vec 2, CTC", "audio", lambda: (tiny("ForCTC", "wav2vec2", **_WAVES), _HEARS() | {"labels": tokens(2, 4)})),
    Row("Whisper", "audio", lambda: (
        tiny("ForConditionalGeneration", "whisper", num_mel_bins=16, max_source_positions=16),
        {"input_features": torch.randn(2, 16, 32), "labels": tokens(2, 8), "use_cache": False})),
    Row("Speech2Text", "audio", lambda: (
        tiny("ForConditionalGeneration", "speech_to_text", input_feat_per_channel=16, conv_channels=32),
        {"input_features": torch.randn(2, 24, 16), "labels": tokens(2, 8), "use_cache": False})),
    Row("AST", "audio", lambda: (
        tiny("ForAudioClassification", "audio-spectrogram-transformer", num_mel_bins=16, max_length=24, time_stride=4, frequency_stride=4),
        {"input_values": torch.randn(2, 24, 16), "labels": labels(2)})),
    Row("EnCodec", "audio", lambda: (
        tiny("Model", "encodec", num_filters=4, upsampling_ratios=[4, 2], codebook_size=16, hidden_size=16, codebook_dim=16, num_lstm_layers=1),
        {"input_values": torch.randn(2, 1, 320)})),
    Row("SpeechT5", "audio", lambda: (
        tiny("ForTextToSpeech", "speecht5", num_mel_bins=16, speech_decoder_prenet_units=16, speech_decoder_postnet_units=16,
             speaker_embedding_dim=8, speech_decoder_prenet_dropout=0.0, reduction_factor=2),
        {"input_ids": tokens(2, 8), "decoder_input_values": torch.randn(2, 8, 16), "speaker_embeddings": torch.randn(2, 8), "use_cache": False})),
    Row("Moonshine", "audio", lambda: (
        tiny("ForConditionalGeneration", "moonshine", num_key_value_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4,
             encoder_num_attention_heads=4, decoder_num_attention_heads=4, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1),
        {"input_values": torch.randn(2, 2000), "labels": tokens(2, 8), "use_cache": False})),
    Row("VITS", "audio", lambda: (
        tiny("Model", "vits", spectrogram_bins=16, flow_size=16, num_speakers=1, upsample_initial_channel=16, upsample_rates=[4, 4],
             upsample_kernel_sizes=[8, 8], resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], depth_separable_num_layers=1,
             duration_predictor_num_flows=1, prior_encoder_num_flows=1, prior_encoder_num_wavenet_layers=1, wavenet_dilation_rate=1,
             posterior_encoder_num_wavenet_layers=1, use_stochastic_duration_prediction=False),
        {"input_ids": tokens(2, 8)})),
]  # fmt: skip


def _pairs(kind: str, options: dict[str, Any], task: str = "Model") -> Made:
    ids = tokens()
    return tiny(task, kind, **options), {
        "input_ids": ids,
        "attention_mask": masked(ids),
        "pixel_values": images(),
    }


def _looking(kind: str, options: dict[str, Any], places: int = 16, token: int = 95) -> Made:
    """A language model whose first `places` tokens are an image's."""
    model = tiny("ForConditionalGeneration", kind, image_token_id=token, **options)
    ids = tokens(2, places + 8, most=90)
    ids[:, :places] = token
    return model, {
        "input_ids": ids,
        # Without padding PaliGemma of transformers 5.23 sees what follows, but not where it is traced.
        "attention_mask": masked(ids),
        "labels": ids.clone(),
        "pixel_values": images(2, 3, 16, 16),
        "use_cache": False,
    }


_SIGHT: dict[str, Any] = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
_MULTIMODAL = [
    *(
        Row(name, "multimodal", lambda kind=kind, options=options, task=task: _pairs(kind, options, task))
        for name, kind, task, options in (
            ("CLIP", "clip", "Model", {}), ("SigLIP", "siglip", "Model", {}), ("AltCLIP", "altclip", "Model", {}),
            ("ViLT", "vilt", "Model", {}), ("FLAVA", "flava", "Model", {}), ("BLIP", "blip", "Model", {}),
            ("BridgeTower", "bridgetower", "Model", {"num_hidden_layers": 2, "vision_config": {"hidden_size": 64}}),
            ("GIT", "git", "ForCausalLM", {"use_cache": False}),
        )
    ),
    Row("LLaVA", "multimodal", lambda: _looking("llava", {
        "text_config": {}, "vision_config": {}, **_SIGHT}, 17)),
    Row("PaliGemma", "multimodal", lambda: _looking("paligemma", {})),
    Row("Idefics 3", "multimodal", lambda: (
        tiny("ForConditionalGeneration", "idefics3", scale_factor=2), {"input_ids": (ids := tokens()), "labels": ids.clone(), "use_cache": False})),
    Row("VisualBERT", "multimodal", lambda: (
        tiny("ForPreTraining", "visual_bert", visual_embedding_dim=16),
        {"input_ids": tokens(), "visual_embeds": torch.randn(BATCH, 4, 16)})),
    Row("LXMERT", "multimodal", lambda: (
        tiny("Model", "lxmert", l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16),
        {"input_ids": tokens(), "visual_feats": torch.randn(BATCH, 4, 16), "visual_pos": torch.rand(BATCH, 4, 4)})),
    Row("LayoutLM", "multimodal", lambda: (
        tiny("ForTokenClassification", "layoutlm", max_2d_position_embeddings=64),
        {"input_ids": tokens(), "bbox": torch.randint(0, 30, (BATCH, 12, 2)).repeat(1, 1, 2).cumsum(-1).clamp(max=63), "labels": labels(BATCH, 12)})),
    Row("TrOCR", "multimodal", lambda: (
        _vision_to_text(), {"pixel_values": images(), "labels": tokens(), "use_cache": False})),
    Row("CLIPSeg", "multimodal", lambda: (
        tiny("ForImageSegmentation", "clipseg", projection_dim=32, reduce_dim=16, extract_layers=[0], decoder_num_attention_heads=4,
             decoder_intermediate_size=32, conditional_layer=0, vision_config={"num_hidden_layers": 1}),
        {"input_ids": tokens(), "pixel_values": images()})),
]  # fmt: skip


def _vision_to_text() -> Any:
    from transformers import VisionEncoderDecoderModel

    model = VisionEncoderDecoderModel(encoder=tiny("Model", "vit"), decoder=tiny("ForCausalLM", "trocr"))
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


_PAST: Given = lambda: {"past_values": torch.randn(BATCH, 32, 4)}
_SERIES_SIZES: dict[str, Any] = {
    "num_input_channels": 4,
    "context_length": 32,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
}


def _probabilistic(kind: str, **options: Any) -> Made:
    model = tiny(
        "ForPrediction",
        kind,
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2],
        num_time_features=2,
        **options,
    )
    given = {
        "past_values": torch.randn(BATCH, 14), "past_time_features": torch.randn(BATCH, 14, 2), "past_observed_mask": torch.ones(BATCH, 14),
        "future_values": torch.randn(BATCH, 4), "future_time_features": torch.randn(BATCH, 4, 2),
    }  # fmt: skip
    return model, given


_SERIES = [
    *_rows("time series", lambda: _PAST() | {"future_values": torch.randn(BATCH, 8, 4)}, {
        "PatchTST": ("ForPrediction", "patchtst", _SERIES_SIZES), "PatchTSMixer": ("ForPrediction", "patchtsmixer", _SERIES_SIZES)}),
    *(Row(name, "time series", lambda kind=kind: _probabilistic(kind)) for name, kind in (
        ("TimeSeriesTransformer", "time_series_transformer"), ("Informer", "informer"))),
    Row("Autoformer", "time series", lambda: _probabilistic("autoformer"), torch.float32),
    Row("TimesFM", "time series", lambda: (
        tiny("ModelForPrediction", "timesfm", patch_length=8, context_length=32, horizon_length=8, quantiles=[0.1, 0.9]),
        {"past_values": [torch.randn(32) for _ in range(2)], "freq": [0, 0]})),
    Row("Decision Transformer", "time series", lambda: (
        tiny("Model", "decision_transformer", state_dim=8, act_dim=4, max_ep_len=16),
        {"states": torch.randn(2, 6, 8), "actions": torch.randn(2, 6, 4), "rewards": torch.randn(2, 6, 1),
         "returns_to_go": torch.randn(2, 6, 1), "timesteps": torch.arange(6).repeat(2, 1), "attention_mask": torch.ones(2, 6)})),
]  # fmt: skip
ROWS = [*_VISION, *_DETECTION, *_AUDIO, *_MULTIMODAL, *_SERIES]
