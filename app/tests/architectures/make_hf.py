#!/usr/bin/env python3
"""Writes the folders that app/tests/architectures/mod.rs reads: tiny random models of the classes of Hugging Face's
transformers, and the logits that these classes compute for them in float32.

usage: make_hf.py [CASE...]

Needs `pip install torch transformers safetensors tokenizers numpy`. As in make.py, weights are a function of the tensors'
names, so only `config.json`, the list of tensors and the logits are kept.
"""
import json, pathlib, sys, tempfile

import numpy as np
import torch, transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from make import HERE, NEAR, VOCAB, bits, uniform

POSITIONS = [0, 15, 31, 33, 64, 96]
SMALL = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, pad_token_id=None, bos_token_id=1, eos_token_id=2,
             attn_implementation="eager")
WINDOW = dict(sliding_window=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)


def case(name, class_, **more):
    return name, class_, SMALL | more


SECTIONS = dict(rope_type="default", rope_theta=10000.0)
TOWER2 = dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, intermediate_size=32)
TOWER3 = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16,
              deepstack_visual_indexes=[0])


def seeing(name, class_, tower, kind=None, **more):
    """A model that sees images, of which the text part is run."""
    text = SMALL | more | (dict(model_type=kind) if kind else {})
    text.pop("attn_implementation")
    return name, class_, dict(text_config=text, vision_config=tower, attn_implementation="eager", tie_word_embeddings=False)


CASES = [
    case("llama", "Llama", head_dim=32, rope_parameters=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
         high_freq_factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)),
    case("mistral", "Mistral", head_dim=16, **WINDOW),
    case("mixtral", "Mixtral", num_local_experts=8, num_experts_per_tok=2),
    case("ministral3", "Ministral3", head_dim=32, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0,
         llama_4_scaling_beta=0.3)),
    case("qwen2", "Qwen2", tie_word_embeddings=True),
    case("qwen2_moe", "Qwen2Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40,
         shared_expert_intermediate_size=72),
    case("qwen3", "Qwen3", head_dim=32),
    case("qwen3_moe", "Qwen3Moe", head_dim=32, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=48,
         norm_topk_prob=True),
    case("qwen3_moe-plain", "Qwen3Moe", head_dim=16, num_experts=7, num_experts_per_tok=1, moe_intermediate_size=40,
         norm_topk_prob=False, tie_word_embeddings=True),
    case("gemma2", "Gemma2", head_dim=32, attn_logit_softcapping=3.0, final_logit_softcapping=2.0,
         query_pre_attn_scalar=32, **WINDOW),
    case("gpt_oss", "GptOss", head_dim=32, num_local_experts=6, num_experts_per_tok=2, rope_parameters=dict(YARN,
         truncate=False), num_hidden_layers=4, **WINDOW),
    case("phi", "Phi", partial_rotary_factor=0.5),
    case("phi3", "Phi3"),
    case("smollm3", "SmolLM3", num_hidden_layers=5),
    case("granite", "Granite", logits_scaling=4.0, residual_multiplier=0.4, embedding_multiplier=3.0,
         attention_multiplier=0.11),
    case("granitemoe", "GraniteMoe", num_local_experts=5, num_experts_per_tok=2, logits_scaling=4.0,
         residual_multiplier=0.4, embedding_multiplier=3.0, attention_multiplier=0.11),
    case("olmo2", "Olmo2"),
    case("olmo3", "Olmo3", num_hidden_layers=5, **WINDOW),
    case("olmoe", "Olmoe", num_experts=8, num_experts_per_tok=3, num_key_value_heads=4),
    case("seed_oss", "SeedOss", head_dim=32),
    case("exaone4", "Exaone4", num_hidden_layers=4, **WINDOW),
    case("hunyuan", "HunYuanDenseV1", head_dim=32),
    case("hunyuan_moe", "HunYuanMoEV1", head_dim=32, num_experts=8, moe_topk=3),
    case("ernie4_5", "Ernie4_5", head_dim=32),
    case("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=6, moe_k=2, moe_intermediate_size=40, moe_num_shared_experts=2,
         moe_layer_start_index=1, num_hidden_layers=3),
    case("glm4", "Glm4", head_dim=32),
    case("glm4_moe", "Glm4Moe", head_dim=32, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
         n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.5, num_hidden_layers=3, use_qk_norm=True),
    case("minimax_m2", "MiniMaxM2", head_dim=32, num_local_experts=8, num_experts_per_tok=2),
    case("cohere2", "Cohere2", logit_scale=0.25, num_hidden_layers=5, **WINDOW),
    case("nemotron", "Nemotron", head_dim=16),
    case("starcoder2", "Starcoder2", tie_word_embeddings=True),
    case("stablelm", "StableLm"),
    case("gpt2", "GPT2LMHead", num_key_value_heads=4, intermediate_size=256, n_positions=512, n_embd=64, n_layer=2, n_head=4),
    case("gpt_neox", "GPTNeoX", num_key_value_heads=4),
    case("gemma3", "Gemma3", head_dim=32, query_pre_attn_scalar=32, num_hidden_layers=7, **WINDOW),
    case("granitemoeshared", "GraniteMoeShared", num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=40,
         logits_scaling=4.0, residual_multiplier=0.4, embedding_multiplier=3.0, attention_multiplier=0.11),
    seeing("qwen2_vl", "Qwen2VL", TOWER2, rope_parameters=dict(SECTIONS, mrope_section=[2, 3, 3])),
    seeing("qwen2_5_vl", "Qwen2_5_VL", TOWER2 | dict(out_hidden_size=64), rope_parameters=dict(SECTIONS, mrope_section=[2, 3, 3])),
    seeing("qwen3_vl", "Qwen3VL", TOWER3, head_dim=32, rope_parameters=dict(SECTIONS, mrope_section=[6, 5, 5])),
    seeing("qwen3_vl_moe", "Qwen3VLMoe", TOWER3, head_dim=32, rope_parameters=dict(SECTIONS, mrope_section=[6, 5, 5]),
           num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40),
    seeing("mistral3", "Mistral3", dict(model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
           num_attention_heads=2, head_dim=16, image_size=28, patch_size=14), kind="mistral", head_dim=32),
]

# Layers with a state, and classes whose norms' weights are differences from one.
DELTA = dict(head_dim=32, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=24)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=40)
OFFSET_NORMS = ("Gemma2", "Gemma3", "Nemotron", "Qwen3_5", "Qwen3Next")
CASES += [
    case("lfm2", "Lfm2", num_hidden_layers=4, conv_L_cache=3, layer_types=["conv", "full_attention", "conv", "conv"],
         block_multiple_of=32, block_ffn_dim_multiplier=1.2),
    case("lfm2_moe", "Lfm2Moe", num_hidden_layers=4, conv_L_cache=4, num_dense_layers=1, num_experts=8,
         layer_types=["conv", "conv", "full_attention", "conv"],
         num_experts_per_tok=3, moe_intermediate_size=48, routed_scaling_factor=1.5),
    case("qwen3_5", "Qwen3_5", **DELTA),
    case("qwen3_5_moe", "Qwen3_5Moe", **DELTA, **EXPERTS),
    case("qwen3_next", "Qwen3Next", **DELTA, **EXPERTS, norm_topk_prob=True),
]

# Latent attention.
LATENT = dict(q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, num_key_value_heads=4,
              num_hidden_layers=3, n_routed_experts=8, moe_intermediate_size=48, n_shared_experts=1)
CASES += [
    case("deepseek_v3", "DeepseekV3", **LATENT, first_k_dense_replace=1, num_experts_per_tok=2, n_group=4, topk_group=2,
         rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0)),
    case("deepseek_v2", "DeepseekV2", **(LATENT | dict(q_lora_rank=None)), first_k_dense_replace=1, num_experts_per_tok=3,
         topk_method="group_limited_greedy", n_group=2, topk_group=1, routed_scaling_factor=1.5),
    case("mistral4", "Mistral4", **LATENT, num_experts_per_tok=2, n_group=2, topk_group=1, rope_parameters=dict(YARN, mscale=1.0,
         mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
    seeing("mistral4-images", "Mistral3", dict(model_type="pixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
           num_attention_heads=2, image_size=28, patch_size=14), kind="mistral4", **(LATENT | dict(num_hidden_layers=2)),
           num_experts_per_tok=3, rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)),
    case("glm4_moe_lite", "Glm4MoeLite", **LATENT, num_experts_per_tok=3, rms_norm_eps=1e-5),
]

# Scans of Mamba-2.
NEMOTRON = dict(head_dim=32, n_groups=2, mamba_num_heads=6, mamba_head_dim=16, ssm_state_size=24, conv_kernel=3,
                n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, moe_shared_expert_intermediate_size=40)
NEMOTRON_LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
GRANITE4 = dict(num_hidden_layers=4, mamba_n_heads=8, mamba_d_state=24, logits_scaling=4.0, residual_multiplier=0.4,
                embedding_multiplier=3.0, attention_multiplier=0.11, shared_intermediate_size=72,
                layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"])
FALCON = dict(head_dim=32, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_state=24)
CASES += [
    case("mamba2", "Mamba2", num_hidden_layers=3, num_heads=8, head_dim=16, n_groups=2, state_size=24),
    case("mamba2-bounds", "Mamba2", num_heads=4, head_dim=32, n_groups=1, state_size=32, conv_kernel=3, use_bias=True,
         use_conv_bias=False, time_step_limit=[0.3, 0.9]),
    case("nemotron_h", "NemotronH", **NEMOTRON, layers_block_type=[NEMOTRON_LAYERS[kind] for kind in "M-M*-M"]),
    case("nemotron_h-moe", "NemotronH", **NEMOTRON, layers_block_type=[NEMOTRON_LAYERS[kind] for kind in "ME*EME"],
         routed_scaling_factor=2.5),
    case("nemotron_h-latent", "NemotronH", **NEMOTRON, layers_block_type=[NEMOTRON_LAYERS[kind] for kind in "M*E"],
         moe_latent_size=48),
    case("granitemoehybrid", "GraniteMoeHybrid", **GRANITE4, num_local_experts=6, num_experts_per_tok=2, mamba_n_groups=2),
    case("granitemoehybrid-dense", "GraniteMoeHybrid", **GRANITE4, num_local_experts=0, tie_word_embeddings=True,
         position_embedding_type="rope"),
    case("falcon_h1", "FalconH1", **FALCON),
    case("falcon_h1-multipliers", "FalconH1", **FALCON, mamba_rms_norm=True, mamba_n_groups=2, mamba_norm_before_gate=True,
         projectors_bias=True, attention_bias=True, mamba_proj_bias=True,
         lm_head_multiplier=0.4, embedding_multiplier=3.0, mlp_multipliers=[0.7, 1.6], key_multiplier=0.6,
         attention_out_multiplier=0.8, attention_in_multiplier=1.3, ssm_multipliers=[0.6, 0.8, 1.2, 0.7, 1.5],
         ssm_in_multiplier=1.4, ssm_out_multiplier=0.9),
    case("falcon_h1-after", "FalconH1", **FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=3),
]

# Layers whose heads differ, K and V that layers share, embeddings for layers, dense networks beside experts.
GEMMA4 = dict(head_dim=32, global_head_dim=64, final_logit_softcapping=5.0, **WINDOW)
CASES += [
    case("gemma4", "Gemma4", **GEMMA4, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, num_hidden_layers=8,
         num_kv_shared_layers=3, use_double_wide_mlp=True,
         layer_types=[{"l": "sliding_attention", "f": "full_attention"}[kind] for kind in "llflfllf"]),
    case("gemma4-large", "Gemma4", **GEMMA4, hidden_size_per_layer_input=0, num_hidden_layers=7, attention_k_eq_v=True,
         num_global_key_value_heads=1),
    case("gemma4-moe", "Gemma4", **GEMMA4, hidden_size_per_layer_input=0, num_hidden_layers=6, attention_k_eq_v=True,
         num_global_key_value_heads=1, enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=40),
]

# Encoders: the rows of the last layer, or what a classifier makes of a pair of texts.
BERT = dict(num_key_value_heads=4, max_position_embeddings=256, type_vocab_size=2, pad_token_id=0)
CASES += [
    case("bert", "BertModel", **BERT),
    case("bert-classes", "BertForSequenceClassification", **BERT, num_labels=3),
    case("xlm_roberta", "XLMRobertaModel", **(BERT | dict(type_vocab_size=1, max_position_embeddings=258, pad_token_id=1))),
    case("xlm_roberta-rank", "XLMRobertaForSequenceClassification", **(BERT | dict(type_vocab_size=1, pad_token_id=1,
         max_position_embeddings=258)), num_labels=1),
    case("mpnet", "MPNetModel", **(BERT | dict(max_position_embeddings=258, pad_token_id=1))),
    case("nomic_bert", "NomicBertModel", **BERT, hidden_act="silu"),
    case("modernbert", "ModernBertModel", **BERT, num_hidden_layers=4, local_attention=32),
    case("modernbert-rank", "ModernBertForSequenceClassification", **BERT, num_hidden_layers=4, local_attention=32, num_labels=1,
         classifier_pooling="mean"),
    case("eurobert", "EuroBertModel", **BERT),
    case("embeddinggemma", "Gemma3TextModel", head_dim=32, query_pre_attn_scalar=32, num_hidden_layers=7,
         use_bidirectional_attention=True, **WINDOW),
]
# Where the second text of a pair begins.
SECOND = 40


def values(name, shape, class_):
    """Weights of a sensible size, as the name says."""
    count = int(np.prod(shape))
    leaf = name.rsplit(".", 1)[-1]
    is_norm = "norm" in name or "ln_" in name or "LayerNorm" in name
    is_router = name.endswith(("mlp.gate.weight", "router.weight", "router.layer.weight", "router.proj.weight", "block_sparse_moe.gate.weight",
                               "gate.wg.weight", "moe.gate.weight", "mixer.gate.weight", "feed_forward.gate.weight"))
    if leaf.endswith("bias") or leaf == "e_score_correction_bias" or "moe_statics" in name:
        center, spread = 0.0, 0.5
    elif leaf == "sinks":
        center, spread = 1.0, 4.0
    elif leaf == "layer_scalar":
        center, spread = 0.9, 0.2
    elif name.endswith("router.scale"):
        # The router divides by the root of the hidden size.
        center, spread = 8.0, 4.0
    elif leaf == "per_expert_scale":
        center, spread = 1.0, 0.5
    elif class_.startswith("Gemma4") and ("q_norm" in name or "k_norm" in name):
        # Scores are not divided by anything.
        center, spread = 0.5, 0.3
    elif leaf == "A_log":
        # Some heads forget within a few tokens, others remember more than a hundred.
        center, spread = -3.0, 3.0
    elif is_norm:
        # These store an offset from one, but for the output of a delta rule.
        center, spread = float(class_ == "NemotronH" or not class_.startswith(OFFSET_NORMS) or "linear_attn" in name), 0.5
    elif is_router:
        # A gap between experts that rounding does not close.
        center, spread = 0.0, 1.5
    elif "embed" in name or ".wte" in name or ".wpe" in name:
        center, spread = 0.0, 1.0
    elif len(shape) == 1:
        center, spread = 0.0, 0.5
    else:
        fan = shape[-1]
        center, spread = 0.0, float(np.float32(1.3 * 12**0.5 * fan**-0.5))
    return center, spread, (uniform(name, count) * np.float32(spread) + np.float32(center)).reshape(shape)


def run(name, class_, options):
    is_encoder = class_.endswith(("Model", "Classification"))
    suffix = "" if is_encoder else "ForConditionalGeneration" if "vision_config" in options else "Model" if class_.endswith("LMHead") else "ForCausalLM"
    model_class = getattr(transformers, class_ + suffix)
    config = model_class.config_class(**options)
    model = model_class(config).float()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model.save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}
        tensors = {key: values(key, shape, class_) for key, shape in sorted(shapes.items())}
        save_file({key: value for key, (_, _, value) in tensors.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})
        model, info = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                  output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], (name, info)
        tokens = [int(bit) % VOCAB for bit in bits("tokens", max(POSITIONS) + 1)]
        with torch.no_grad():
            types = [int(position >= SECOND) for position in range(len(tokens))] if class_ == "BertForSequenceClassification" else None
            options = dict(token_type_ids=torch.tensor([types])) if types else {}
            out = model.eval()(torch.tensor([tokens]), **options)
            if class_.endswith("Classification"):
                logits = out.logits[0].float().numpy()
            else:
                logits = (out.last_hidden_state if is_encoder else out.logits)[0, POSITIONS].float().numpy()
        assert np.isfinite(logits).all(), name
        written = json.loads((folder / "config.json").read_text())
    print(f"{name:16} spread {logits.std():.3f}, {len(tensors)} tensors", flush=True)
    (HERE / "hf" / f"{name}.logits").write_bytes(logits.astype("<f4").tobytes())
    written.pop("transformers_version", None)
    return {"name": name, "config": written,
            "tensors": [[key, center, spread, list(value.shape)] for key, (center, spread, value) in tensors.items()]}


def tokenizer():
    """A byte-level tokenizer with as many tokens as the models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    for index in range(len(vocab), VOCAB):
        vocab[f"<|extra_{index}|>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return json.loads(tokenizer.to_str())


def main():
    chosen = sys.argv[1:]
    folder = HERE / "hf"
    folder.mkdir(exist_ok=True)
    path = folder / "cases.json"
    old = {entry["name"]: entry for entry in json.loads(path.read_text())["cases"]} if path.exists() else {}
    entries = []
    for name, class_, options in CASES:
        if chosen and name not in chosen:
            if name in old:
                entries.append(old[name])
            continue
        try:
            entries.append(run(name, class_, options))
        except Exception as error:  # which classes there are depends on the version
            print(f"{name:16} FAILED: {error!r}"[:300], flush=True)
    lines = [json.dumps(entry, separators=(",", ":")) for entry in entries]
    shared = {"vocab": VOCAB, "positions": POSITIONS, "tokenizer": tokenizer()}
    path.write_text(json.dumps(shared, separators=(",", ":"))[:-1] + ',\n"cases": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
