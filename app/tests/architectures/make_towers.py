#!/usr/bin/env python3
"""Writes the folders that app/tests/architectures/towers.rs reads: tiny random models that see, of the classes of Hugging Face's
transformers, the rows of their towers, and the scores of a prompt with a picture, all in float32.

usage: make_towers.py [CASE...]

Needs `pip install torch torchvision transformers safetensors tokenizers numpy`. Weights are a function of the tensors' names, as in
make_hf.py, and so are pictures, which have a size that no rule changes. Kept are `config.json`, the list of tensors, and in
`NAME.rows` for each picture the rows of the tower, the log-probabilities of all tokens after the prompt, and those of the prompt's text
after the picture.
"""
import json, pathlib, sys, tempfile

import numpy as np
import torch, transformers
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from make import HERE, VOCAB, bits, uniform
from make_hf import GEMMA4, LATENT, SMALL, TOWER3, WINDOW, tokenizer, values

IMAGE, BREAK, END = 290, 291, 292
# Tokens of text before a picture.
BEFORE = 20
TEXT = {key: value for key, value in SMALL.items() if key not in ("attn_implementation", "pad_token_id")} | dict(pad_token_id=0)
SECTIONS = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5])
PLAIN = dict(rope_type="default", rope_theta=10000.0)
SIGLIP = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3)
PIXTRAL = dict(model_type="pixtral", hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
               image_size=140, patch_size=14, rope_parameters=PLAIN)
QWEN_IDS = dict(image_token_id=IMAGE, video_token_id=293, vision_start_token_id=294, vision_end_token_id=295)
GEMMA4_TOWER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
                    global_head_dim=32, patch_size=16, pooling_kernel_size=3, position_embedding_size=64)
GEMMA4_IDS = dict(image_token_id=IMAGE, boi_token_id=294, eoi_token_id=295, audio_config=None)
GLM_TOWER = dict(depth=2, hidden_size=32, num_heads=2, image_size=56, patch_size=14, intermediate_size=48, out_hidden_size=64)
PUBLISHED = [("language_model.model.blocks.", "language_model.model.layers."), ("model.mm_projector.", "mm_projector."),
             ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")]
LAYERS = {"l": "sliding_attention", "f": "full_attention"}


def qwen(patch, merge=2):
    return transformers.Qwen2VLImageProcessor(do_resize=False, patch_size=patch, merge_size=merge, temporal_patch_size=2,
                                              image_mean=[0.5] * 3, image_std=[0.5] * 3)


def processor(name):
    return getattr(transformers, name + "ImageProcessor")(do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def siglip(side):
    return transformers.SiglipImageProcessor(do_resize=False, size=dict(height=side, width=side), image_mean=[0.5] * 3, image_std=[0.5] * 3)


def gemma4_text(**more):
    return dict(TEXT, **GEMMA4, vocab_size_per_layer_input=VOCAB, **more)


# Name, class, options of the configuration, sizes of pictures (height, width), and the image processor.
CASES = [
    ("qwen3_vl", "Qwen3VL", dict(text_config=dict(TEXT, head_dim=32, rope_parameters=dict(SECTIONS, mrope_interleaved=True), num_hidden_layers=3),
     vision_config=dict(TOWER3, depth=3, num_heads=2, deepstack_visual_indexes=[0, 1]), **QWEN_IDS), [(64, 64), (96, 160)], qwen(16)),
    ("qwen3_5", "Qwen3_5", dict(text_config=dict(TEXT, head_dim=32, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
     linear_key_head_dim=16, linear_value_head_dim=24, layer_types=["linear_attention"] * 3 + ["full_attention"],
     rope_parameters=dict(PLAIN, mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)),
     vision_config=dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, num_position_embeddings=16), **QWEN_IDS),
     [(96, 64)], qwen(16)),
    ("qwen2_5_vl", "Qwen2_5_VL", dict(text_config=dict(TEXT, rope_parameters=dict(PLAIN, mrope_section=[2, 3, 3])),
     vision_config=dict(depth=3, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=64, patch_size=14, window_size=56,
     fullatt_block_indexes=[1]), **QWEN_IDS), [(56, 56), (140, 196)], qwen(14)),
    ("gemma3", "Gemma3", dict(text_config=dict(TEXT, head_dim=32, query_pre_attn_scalar=32, num_hidden_layers=7, **WINDOW),
     vision_config=dict(SIGLIP, image_size=112, patch_size=14, vision_use_head=False), mm_tokens_per_image=16, image_token_index=IMAGE,
     boi_token_index=294, eoi_token_index=295), [(112, 112)], siglip(112)),
    ("gemma4", "Gemma4", dict(text_config=gemma4_text(hidden_size_per_layer_input=0, num_hidden_layers=6, attention_k_eq_v=True,
     num_global_key_value_heads=1, layer_types=[LAYERS[kind] for kind in "llflfl"], use_bidirectional_attention="vision"),
     vision_config=dict(GEMMA4_TOWER, standardize=True), **GEMMA4_IDS), [(96, 144)], None),
    ("gemma4-clipped", "Gemma4", dict(text_config=gemma4_text(hidden_size_per_layer_input=16, num_hidden_layers=6, num_kv_shared_layers=2,
     use_double_wide_mlp=True, layer_types=[LAYERS[kind] for kind in "lflflf"]),
     vision_config=dict(GEMMA4_TOWER, use_clipped_linears=True), **GEMMA4_IDS), [(144, 96)], None),
    ("gemma4-unified", "Gemma4Unified", dict(text_config=gemma4_text(hidden_size_per_layer_input=0, num_hidden_layers=6, attention_k_eq_v=True,
     num_global_key_value_heads=1, layer_types=[LAYERS[kind] for kind in "llflfl"], use_bidirectional_attention="vision"),
     vision_config=dict(patch_size=16, pooling_kernel_size=3, model_patch_size=48, mm_embed_dim=64, mm_posemb_size=64, output_proj_dims=64), **GEMMA4_IDS), [(96, 144)], None),
    ("pixtral", "Llava", dict(text_config=dict(TEXT, model_type="mistral", head_dim=32), vision_config=dict(PIXTRAL, patch_size=16, image_size=160),
     image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full", image_seq_length=1), [(48, 80)], None),
    ("mistral3", "Mistral3", dict(text_config=dict(TEXT, model_type="mistral", head_dim=32), vision_config=PIXTRAL, image_token_index=IMAGE,
     spatial_merge_size=2), [(56, 84)], None),
    ("idefics3", "Idefics3", dict(text_config=dict(TEXT, model_type="llama"), vision_config=dict(SIGLIP, image_size=64, patch_size=16), scale_factor=2,
     image_token_id=IMAGE), [(64, 64)], siglip(64)),
    ("smolvlm", "SmolVLM", dict(text_config=dict(TEXT, model_type="llama"), vision_config=dict(SIGLIP, image_size=96, patch_size=16), scale_factor=3,
     image_token_id=IMAGE), [(96, 96)], siglip(96)),
    ("internvl", "InternVL", dict(text_config=dict(TEXT, model_type="qwen2"), vision_config=dict(SIGLIP, image_size=[56, 56], patch_size=[14, 14],
     attention_bias=True), image_token_id=IMAGE), [(56, 56)], None),
    ("internvl-norms", "InternVL", dict(text_config=dict(TEXT, model_type="qwen3", head_dim=32), vision_config=dict(SIGLIP, image_size=[84, 84],
     patch_size=[14, 14], use_qk_norm=True, norm_type="rms_norm"), image_token_id=IMAGE), [(84, 84)], None),
    ("lfm2_vl", "Lfm2Vl", dict(text_config=dict(TEXT, model_type="lfm2", layer_types=["conv", "full_attention"], block_multiple_of=32),
     vision_config=dict(SIGLIP, model_type="siglip2_vision_model", num_patches=16, patch_size=16, vision_use_head=False), projector_hidden_size=72,
     image_token_id=IMAGE), [(64, 96), (32, 160)], None),
    ("glm4v", "Glm4v", dict(text_config=dict(TEXT, rope_parameters=dict(PLAIN, mrope_section=[2, 1, 1], partial_rotary_factor=0.5)), vision_config=GLM_TOWER,
     **QWEN_IDS), [(56, 84), (112, 56)], processor("Glm4v")),
    ("glm4v_moe", "Glm4vMoe", dict(text_config=dict(TEXT, head_dim=32, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=1,
     first_k_dense_replace=1, num_hidden_layers=3, rope_parameters=dict(PLAIN, mrope_section=[4, 2, 2], partial_rotary_factor=0.5)), vision_config=GLM_TOWER,
     **QWEN_IDS), [(84, 56)], processor("Glm4v")),
    ("glm_ocr", "GlmOcr", dict(text_config=dict(TEXT, head_dim=32, rope_parameters=dict(PLAIN, mrope_section=[4, 2, 2], partial_rotary_factor=0.5)),
     vision_config=GLM_TOWER, **QWEN_IDS), [(56, 84)], processor("Glm4v")),
    ("paddleocr_vl", "PaddleOCRVL", dict(text_config=dict(TEXT, head_dim=32, rope_parameters=dict(PLAIN, mrope_section=[4, 6, 6])),
     vision_config=dict(SIGLIP, image_size=56, patch_size=14), **QWEN_IDS), [(84, 140), (28, 56)], processor("PaddleOCRVL")),
    ("kimi_k25", "Kimi_K25", dict(text_config=dict(TEXT, model_type="deepseek_v3", **LATENT, first_k_dense_replace=1, num_experts_per_tok=2, n_group=4, topk_group=2),
     vision_config=dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, pos_emb_height=4, pos_emb_width=4),
     projection_hidden_size=48, image_token_id=IMAGE), [(56, 140), (28, 56)], processor("Kimi_K25")),
]


def picture(name, number, height, width):
    """Smooth colours with an edge and noise, `[height, width, 3]`."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.array([int(bit) % 16 for bit in bits(f"{name}.picture{number}", height * width * 3)]).reshape(height, width, 3)
    waves = np.stack([x * (3 + channel) + y * (5 - channel) for channel in range(3)], -1) % 240
    return np.uint8(np.where((x > width // 3)[..., None] & (y > height // 4)[..., None], 239 - waves, waves) + noise)


def inputs(name, rgb, processor):
    """The arguments of the model for a picture, without tokens."""
    image = Image.fromarray(rgb)
    height, width, _ = rgb.shape
    if processor is not None:
        out = dict(processor(images=image, return_tensors="pt"))
        if name in ("idefics3", "smolvlm"):
            out = dict(pixel_values=out["pixel_values"][None], pixel_attention_mask=torch.ones(1, 1, height, width, dtype=torch.long))
        return out
    if name.startswith("gemma4"):
        class_ = "Gemma4UnifiedImageProcessor" if "unified" in name else "Gemma4ImageProcessor"
        out = getattr(transformers, class_)(max_soft_tokens=70)
        out.do_resize = False
        return {key: value for key, value in dict(out(images=image, return_tensors="pt")).items() if torch.is_tensor(value)}
    if name == "lfm2_vl":
        out = transformers.Lfm2VlImageProcessor(do_image_splitting=False, min_image_tokens=1, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        return dict(out(images=image, return_tensors="pt"))
    pixels = (torch.from_numpy(np.float32(rgb)).permute(2, 0, 1)[None] / 255 - 0.5) / 0.5
    return dict(pixel_values=pixels) if name.startswith("internvl") else dict(pixel_values=pixels, image_sizes=torch.tensor([[height, width]]))


def fill(class_, key, shape):
    """Weights of a sensible size, as the name says. Bounds of clipped matrices cut a part of the values."""
    leaf = key.rsplit(".", 1)[-1]
    if leaf in ("input_min", "input_max", "output_min", "output_max"):
        center = {"input_min": -1.1, "input_max": 1.3, "output_min": -1.4, "output_max": 1.2}[leaf]
        spread = 0.4
    elif "position_embedding" in key or "pos_embed" in key:
        center, spread = 0.0, 1.0
    elif leaf in ("lambda_1", "lambda_2"):
        center, spread = 0.6, 0.5
    elif leaf == "std_scale":
        center, spread = 1.0, 0.5
    else:
        return values(key, shape, class_)
    return center, spread, (uniform(key, int(np.prod(shape))) * np.float32(spread) + np.float32(center)).reshape(shape)


def run(name, class_, options, sizes, processor):
    model_class = getattr(transformers, class_ + "ForConditionalGeneration")
    config = model_class.config_class(**options, tie_word_embeddings=False)
    model = model_class(config).float()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model.save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}
        # transformers 5.17 writes some names of Kimi K2.5 otherwise than its published files have them, and reads these.
        for own, published in PUBLISHED:
            shapes = {key.replace(own, published): shape for key, shape in shapes.items()}
        tensors = {key: fill(class_, key, shape) for key, shape in sorted(shapes.items())}
        save_file({key: np.array(value, order="C") for key, (_, _, value) in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        model, info = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
        model = model.eval()
        if class_ == "PaddleOCRVL":
            # transformers 5.17 places corners; the model's own code and 5.24 do not.
            model.model.visual.vision_model.embeddings.interpolation_align_corners = False
        written = json.loads((folder / "config.json").read_text())
    words = [int(bit) % 256 for bit in bits("tokens", 60)]
    rows, all_scores, pictures = [], [], []
    for number, (height, width) in enumerate(sizes):
        given = inputs(name, picture(name, number, height, width), processor)
        accepted = {key: value for key, value in given.items() if key != "num_soft_tokens_per_image"}
        with torch.no_grad():
            features = model.model.get_image_features(**accepted, return_dict=True)
            found = features.pooler_output
            flat = lambda one: torch.cat([flat(part) for part in one]) if isinstance(one, (list, tuple)) else one.reshape(-1, one.shape[-1])
            found = flat(found)
            deep = [flat(one) for one in getattr(features, "deepstack_features", None) or []]
            rows.append(torch.cat([found, *deep], -1).float().numpy())
            count = len(found)
            image = [IMAGE] * count
            if name in ("pixtral", "mistral3"):
                side = 16 if name == "pixtral" else 28
                line = [IMAGE] * (width // side)
                image = [token for _ in range(height // side) for token in line + [BREAK]][:-1] + [END]
            tokens = words[:BEFORE] + image + words[BEFORE:]
            is_image = torch.tensor([[int(token == IMAGE) for token in tokens]])
            extra = {}
            if class_ == "Gemma3":
                extra["token_type_ids"] = is_image
            elif class_.startswith(("Qwen", "Gemma4", "Glm4v", "GlmOcr", "PaddleOCR")):
                extra["mm_token_type_ids"] = is_image
            if class_ == "Gemma4Unified":
                # `forward` alone lets rows of a picture see each other in all layers, `generate` in those with a window, as documented.
                extra["attention_mask"] = model_class.create_masks_for_generate(
                    model.config, torch.zeros(1, len(tokens), 64), None, None, torch.arange(len(tokens))[None], mm_token_type_ids=is_image)
            out = model(input_ids=torch.tensor([tokens]), **accepted, **extra)
        scores = torch.log_softmax(out.logits[0].float(), -1)
        of_text = torch.stack([scores[at, tokens[at + 1]] for at in range(BEFORE + len(image) - 1, len(tokens) - 1)])
        all_scores.append(torch.cat([scores[-1], of_text]).numpy())
        assert np.isfinite(rows[-1]).all() and np.isfinite(all_scores[-1]).all(), name
        pictures.append(dict(height=height, width=width, prompt=tokens, rows=list(rows[-1].shape)))
    print(f"{name:16} rows {[one.shape for one in rows]} spread {rows[0].std():.3f}, logits {all_scores[0][:VOCAB].std():.3f}, {len(tensors)} tensors", flush=True)
    (HERE / "hf" / f"{name}.rows").write_bytes(b"".join(one.astype("<f4").tobytes() for pair in zip(rows, all_scores) for one in pair))
    written.pop("transformers_version", None)
    return {"name": name, "config": written, "pictures": pictures,
            "tensors": [[key, center, spread, list(value.shape)] for key, (center, spread, value) in tensors.items()]}


def main():
    chosen = sys.argv[1:]
    path = HERE / "hf" / "towers.json"
    old = {entry["name"]: entry for entry in json.loads(path.read_text())["cases"]} if path.exists() else {}
    entries = []
    for case in CASES:
        if not chosen or case[0] in chosen:
            try:
                entries.append(run(*case))
            except Exception as error:
                print(f"{case[0]:16} FAILED: {error!r}"[:600], flush=True)
                if chosen:
                    raise
        elif case[0] in old:
            entries.append(old[case[0]])
    lines = [json.dumps(entry, separators=(",", ":")) for entry in entries]
    path.write_text(json.dumps({"vocab": VOCAB}, separators=(",", ":"))[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
