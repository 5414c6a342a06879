//! Hugging Face folders: results of reading them, and errors of invalid ones.

use std::{fs, path::Path};

use crate::tiny::{
    self,
    models::{self, Tiny},
    run, safetensors,
};
use expect_test::{Expect, expect};
use paguro_model::{LoadOptions, Model, ModelFile};
use serde_json::{Value, json};

pub fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

pub fn model(name: &str) -> Tiny {
    models::all().into_iter().find(|model| model.name == name).unwrap()
}

/// Checks the result of opening a folder after a change.
#[track_caller]
fn check_model(name: &str, change: impl FnOnce(&Path), expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    model(name).write_hf(folder.path());
    change(folder.path());
    let error = Model::open(folder.path(), &LoadOptions::default()).map(|_| ()).unwrap_err();
    let shown = folder.path().canonicalize().unwrap_or_else(|_| folder.path().to_owned());
    expected.assert_eq(&error.to_string().replace(&shown.display().to_string(), ""));
}

#[track_caller]
fn check(change: impl FnOnce(&Path), expected: Expect) {
    check_model("llama", change, expected);
}

/// Checks the result of opening a folder after a change of `config.json`.
#[track_caller]
fn check_config(change: impl FnOnce(&mut Value), expected: Expect) {
    check(|folder| edit(&folder.join("config.json"), change), expected);
}

#[test]
fn missing_files_are_named() {
    let remove = |name: &'static str| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    check(remove("config.json"), expect!["no model at ``: the folder has no config.json"]);
    check(
        remove("tokenizer.json"),
        expect![
            "no model at ``: the folder has no tokenizer.json (a tokenizer.model alone is not supported; save the tokenizer with a current version of transformers)"
        ],
    );
    check(
        remove("model.safetensors"),
        expect!["no model at ``: the folder has neither model.safetensors nor model.safetensors.index.json"],
    );
    let rename = |to: &'static str| {
        move |folder: &Path| fs::rename(folder.join("model.safetensors"), folder.join(to)).unwrap()
    };
    check(
        rename("tf_model.h5"),
        expect![
            "no model at ``: weights in `tf_model.h5` are not supported; convert them to model.safetensors or to GGUF"
        ],
    );
    check(
        rename("pytorch_model.bin"),
        expect!["`/pytorch_model.bin`: a file of 397107 bytes that is no zip archive of `torch.save`"],
    );
    let gguf = |folder: &Path| {
        fs::remove_file(folder.join("config.json")).unwrap();
        fs::write(folder.join("model-q4.gguf"), "").unwrap();
    };
    check(
        gguf,
        expect![
            "no model at ``: the folder has no config.json; to open the GGUF file in it, name the file (model-q4.gguf)"
        ],
    );
    check(
        |folder| fs::remove_dir_all(folder).unwrap(),
        expect!["no model at ``: there is no such file or folder"],
    );
}

#[test]
fn architectures_and_features_that_are_missing_are_named() {
    check_config(
        |config| config["architectures"] = json!(["MambaForCausalLM"]),
        expect![
            "architecture `MambaForCausalLM` is not supported (supported: LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Mistral3ForConditionalGeneration, Ministral3ForCausalLM, Mistral4ForCausalLM, Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration, Qwen3NextForCausalLM, Lfm2ForCausalLM, LFM2ForCausalLM, Lfm2MoeForCausalLM, Mamba2ForCausalLM, NemotronHForCausalLM, GraniteMoeHybridForCausalLM, FalconH1ForCausalLM, Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration, Gemma4AssistantForCausalLM, Gemma4UnifiedAssistantForCausalLM, GptOssForCausalLM, PhiForCausalLM, Phi3ForCausalLM, SmolLM3ForCausalLM, GraniteForCausalLM, GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM, Olmo2ForCausalLM, Olmo3ForCausalLM, OlmoeForCausalLM, SeedOssForCausalLM, Exaone4ForCausalLM, HunYuanDenseV1ForCausalLM, HunYuanMoEV1ForCausalLM, Ernie4_5ForCausalLM, Ernie4_5_MoeForCausalLM, PaddleOCRVLForConditionalGeneration, Glm4ForCausalLM, Glm4vForConditionalGeneration, GlmOcrForConditionalGeneration, Glm4MoeForCausalLM, Glm4vMoeForConditionalGeneration, MiniMaxM2ForCausalLM, DeepseekForCausalLM, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, KimiVLForConditionalGeneration, KimiK25ForConditionalGeneration, Kimi_K25ForConditionalGeneration, Cohere2ForCausalLM, NemotronForCausalLM, Starcoder2ForCausalLM, StableLmForCausalLM, GPT2LMHeadModel, GPTNeoXForCausalLM, BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification, XLMRobertaModel, XLMRobertaForMaskedLM, XLMRobertaForSequenceClassification, RobertaModel, RobertaForMaskedLM, RobertaForSequenceClassification, CamembertModel, CamembertForSequenceClassification, MPNetModel, MPNetForMaskedLM, MPNetForSequenceClassification, NomicBertModel, JinaBertModel, JinaBertForMaskedLM, ModernBertModel, ModernBertForMaskedLM, ModernBertForSequenceClassification, EuroBertModel, EuroBertForMaskedLM, Gemma3TextModel)"
        ],
    );
    check_config(
        |config| config["architectures"] = json!([]),
        expect!["the model's configuration is not usable: config.json does not name its `architectures`"],
    );
    check_config(
        |config| config["quantization_config"] = json!({"quant_method": "hqq"}),
        expect![
            "a quantized Hugging Face model (hqq) is not supported (supported: awq, gptq, fp8, bitsandbytes, compressed-tensors, modelopt with NVFP4 or FP8, mxfp4 of gpt-oss, and MLX's affine; quantized models as GGUF)"
        ],
    );
    check_config(
        |config| config["rope_scaling"] = json!({"type": "dynamic", "factor": 2.0}),
        expect![
            "RoPE scaling `dynamic` is not supported (supported: default, linear, llama3, yarn, longrope)"
        ],
    );
    check_config(
        |config| config["hidden_act"] = json!("relu"),
        expect!["activation `relu` is not supported (supported: silu)"],
    );
    check_model(
        "gemma2",
        |folder| {
            edit(&folder.join("config.json"), |config| {
                config["layer_types"] = json!(["chunked_attention", "", ""])
            })
        },
        expect![[
            r#"layer type "chunked_attention" is not supported (supported: full_attention, sliding_attention)"#
        ]],
    );
}

#[test]
fn configurations_that_cannot_be_are_refused() {
    let set = |key: &'static str, value: Value| move |config: &mut Value| config[key] = value;
    check_config(
        set("hidden_size", json!("64")),
        expect![[
            r#"the model's configuration is not usable: config.json: `hidden_size` is "64", expected an unsigned 32-bit integer"#
        ]],
    );
    check_config(
        set("hidden_size", Value::Null),
        expect!["the model's configuration is not usable: config.json has no `hidden_size`"],
    );
    check_config(
        set("hidden_size", json!(0)),
        expect!["the model's configuration is not usable: the hidden size is 0"],
    );
    check_config(
        set("hidden_size", json!(128)),
        expect!["tensor `model.embed_tokens.weight` has shape [289, 64], expected [289, 128]"],
    );
    check_config(
        set("num_hidden_layers", json!(3)),
        expect![
            "tensor `model.layers.2.self_attn.q_proj.weight` is missing (a llama model has it with shape [64, 64])"
        ],
    );
    check_config(
        set("num_hidden_layers", json!(1)),
        expect![
            "9 tensors do not belong to a llama model as Paguro knows it: `model.layers.1.input_layernorm.weight`, `model.layers.1.mlp.down_proj.weight`, `model.layers.1.mlp.gate_proj.weight`, `model.layers.1.mlp.up_proj.weight`, ..."
        ],
    );
    check_config(
        set("num_hidden_layers", json!(4_000_000_000u32)),
        expect!["the model's configuration is not usable: 4000000000 layers, but only 21 tensors"],
    );
    check_config(
        set("num_key_value_heads", json!(3)),
        expect!["the model's configuration is not usable: 4 heads cannot share 3 K/V heads evenly"],
    );
    check_config(
        set("head_dim", json!(15)),
        expect![
            "the model's configuration is not usable: RoPE rotates 15 of a head's 15 elements, which has to be an even number of them"
        ],
    );
    check_config(
        set("rope_theta", json!(-1.0)),
        expect![
            "the model's configuration is not usable: RoPE has base -1, scaling factor 2 and magnitude 1"
        ],
    );
    check_config(
        set("rms_norm_eps", json!(-2.0)),
        expect![
            "the model's configuration is not usable: a scale, a soft cap or the norm's epsilon is not a positive number"
        ],
    );
    check_config(
        set("tie_word_embeddings", json!("no")),
        expect![[
            r#"the model's configuration is not usable: config.json: `tie_word_embeddings` is "no", expected true or false"#
        ]],
    );
    check(
        |folder| fs::write(folder.join("config.json"), "[1, 2").unwrap(),
        expect![
            "`/config.json`: not a JSON object: invalid type: sequence, expected a map at line 1 column 0"
        ],
    );
    check(
        |folder| fs::write(folder.join("config.json"), vec![b' '; 5 << 20]).unwrap(),
        expect!["`/config.json`: it has more than 4 MiB, which no such file has"],
    );
}

#[test]
fn damaged_weights_are_refused() {
    let weights =
        |bytes: Vec<u8>| move |folder: &Path| fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let whole = safetensors::write(&model("llama").tensors);
    check(
        weights(whole[..whole.len() - 1].to_vec()),
        expect![
            "`/model.safetensors`: truncated or corrupt safetensors file of 397106 bytes (incomplete metadata, file not fully covered); is the download complete?"
        ],
    );
    check(
        weights(whole[..100].to_vec()),
        expect![
            "`/model.safetensors`: truncated or corrupt safetensors file of 100 bytes (invalid header length); is the download complete?"
        ],
    );
    check(
        weights(Vec::new()),
        expect![
            "`/model.safetensors`: truncated or corrupt safetensors file of 0 bytes (header too small); is the download complete?"
        ],
    );
    check(
        weights(u64::MAX.to_le_bytes().to_vec()),
        expect!["`/model.safetensors`: not a valid safetensors file: header too large"],
    );
    check(
        weights(b"version https://git-lfs.github.com/spec/v1".to_vec()),
        expect!["`/model.safetensors`: this is a Git LFS pointer; run `git lfs pull` to get the file itself"],
    );
    let header = |header: Value| weights(safetensors::with_header(&header, &[0; 8]));
    check(
        header(json!({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})),
        expect![
            "`/model.safetensors`: not a valid safetensors file: invalid shape, data type, or offset for tensor"
        ],
    );
    check(
        header(json!({"a": {"dtype": "F32", "shape": [u64::MAX, 2], "data_offsets": [0, 8]}})),
        expect![
            "`/model.safetensors`: not a valid safetensors file: overflow computing buffer size from shape and/or element type"
        ],
    );
    check(
        header(json!({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})),
        expect!["`/model.safetensors`: not a valid safetensors file: invalid offset for tensor `a`"],
    );
    check(
        header(json!({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 8]}})),
        expect![
            "`/model.safetensors`: not a valid safetensors file: invalid JSON in header: unknown variant `Q9`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 1 column 53"
        ],
    );
    check(
        header(json!({})),
        expect![
            "`/model.safetensors`: truncated or corrupt safetensors file of 18 bytes (incomplete metadata, file not fully covered); is the download complete?"
        ],
    );
}

#[test]
fn tensors_have_to_fit_the_architecture() {
    let rewrite = |change: fn(&mut Vec<tiny::Tensor>)| {
        move |folder: &Path| {
            let mut tensors = model("llama").tensors;
            change(&mut tensors);
            fs::write(folder.join("model.safetensors"), safetensors::write(&tensors)).unwrap();
        }
    };
    check(
        rewrite(|tensors| drop(tensors.remove(3))),
        expect![
            "tensor `model.layers.0.self_attn.q_proj.weight` is missing (a llama model has it with shape [64, 64])"
        ],
    );
    check(
        rewrite(|tensors| drop(tensors.remove(0))),
        expect![
            "the model's configuration is not usable: the embedding table, tensor `model.embed_tokens.weight`, is missing or empty"
        ],
    );
    check(
        rewrite(|tensors| tensors[4].shape.reverse()),
        expect!["tensor `model.layers.0.self_attn.k_proj.weight` has shape [64, 32], expected [32, 64]"],
    );
    let experts = |tensors: &mut Vec<tiny::Tensor>| {
        for i in 0..6 {
            let name = format!("model.layers.0.block_sparse_moe.experts.{i}.w1.weight");
            tensors.push(tiny::Tensor::new(name, &[1], || 0.0));
        }
    };
    check(
        rewrite(experts),
        expect![
            "6 tensors do not belong to a llama model as Paguro knows it: `model.layers.0.block_sparse_moe.experts.0.w1.weight`, `model.layers.0.block_sparse_moe.experts.1.w1.weight`, `model.layers.0.block_sparse_moe.experts.2.w1.weight`, `model.layers.0.block_sparse_moe.experts.3.w1.weight`, ..."
        ],
    );
    let integers = |folder: &Path| {
        let path = folder.join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap().replace("F32", "I32");
        fs::write(&path, [&bytes[..8], text.as_bytes(), &bytes[8 + header..]].concat()).unwrap();
    };
    check(
        integers,
        expect![
            "tensor `model.embed_tokens.weight` has type I32, which is not supported (supported: F32, F16, BF16)"
        ],
    );
}

/// Splits the weights of a folder into two files with an index.
fn shard(folder: &Path, tensors: &[tiny::Tensor]) {
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (i, part) in [first, second].into_iter().enumerate() {
        let name = format!("model-0000{}-of-00002.safetensors", i + 1);
        fs::write(folder.join(&name), safetensors::write(part)).unwrap();
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    fs::write(folder.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
}

#[test]
fn sharded_weights_are_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let model = model("llama");
    model.write_hf(folder.path());
    let tokens = [5, 6, 7];
    let whole = run::logits(&Model::open(folder.path(), &LoadOptions::default()).unwrap(), &tokens);
    shard(folder.path(), &model.tensors);
    // A file of the folder stands for it.
    let file = ModelFile::open(&folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_eq!(file.files().len(), 2);
    assert_eq!(run::logits(&file.load(&LoadOptions::default()).unwrap(), &tokens), whole);
}

#[test]
fn an_index_names_files_of_its_own_folder() {
    let sharded = |change: fn(&mut Value)| {
        move |folder: &Path| {
            shard(folder, &model("llama").tensors);
            edit(&folder.join("model.safetensors.index.json"), change);
        }
    };
    let name = |to: &'static str| move |index: &mut Value| index["weight_map"]["lm_head.weight"] = json!(to);
    for outside in
        ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "./model.safetensors", "a\\b"]
    {
        let folder = tempfile::tempdir().unwrap();
        model("llama").write_hf(folder.path());
        shard(folder.path(), &model("llama").tensors);
        edit(&folder.path().join("model.safetensors.index.json"), name(outside));
        let error = Model::open(folder.path(), &LoadOptions::default()).unwrap_err().to_string();
        assert!(error.ends_with(&format!("`{outside}` is not a file name of this folder")), "{error}");
    }
    check(
        sharded(|index| index["weight_map"]["x"] = json!("gone.safetensors")),
        expect!["`/model.safetensors.index.json`: it names `/gone.safetensors`, which is missing"],
    );
    check(
        sharded(|index| index["weight_map"] = json!({})),
        expect!["`/model.safetensors.index.json`: its `weight_map` is empty"],
    );
    check(
        sharded(|index| *index = json!({})),
        expect!["`/model.safetensors.index.json`: it has no `weight_map`"],
    );
    let twice = |folder: &Path| {
        shard(folder, &model("llama").tensors);
        fs::copy(
            folder.join("model-00001-of-00002.safetensors"),
            folder.join("model-00002-of-00002.safetensors"),
        )
        .unwrap();
    };
    check(twice, expect!["``: tensor `model.embed_tokens.weight` is in two files"]);
}
