//! Settings of Hugging Face folders that change the model.

use std::fs;

use paguro_model::{LoadOptions, Model, chat::ChatTemplate};
use serde_json::{Value, json};

use crate::{
    hf::{edit, model},
    tiny::{self, run},
};

/// Gemma 3's multimodal files: the text part stands in `text_config` and behind a prefix, beside what reads images.
#[test]
fn the_text_part_of_gemma_3_is_the_model() {
    let text = model("gemma3");
    let folder = tempfile::tempdir().unwrap();
    text.write_hf(folder.path());
    let tokens = [9, 8, 7, 6, 5, 4, 3, 4, 5];
    let expected = run::logits(&Model::open(folder.path(), &LoadOptions::default()).unwrap(), &tokens);
    for (model, head) in [("language_model.model.", "language_model."), ("model.language_model.", "")] {
        let mut whole = text.clone();
        whole.config = json!({
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text.config,
            "vision_config": {"hidden_size": 1152},
        });
        for tensor in &mut whole.tensors {
            let name = &tensor.name;
            tensor.name =
                name.strip_prefix("model.").map_or(format!("{head}{name}"), |rest| format!("{model}{rest}"));
        }
        whole.tensors.push(tiny::Tensor::new("vision_tower.vision_model.head.weight", &[3], || 1.0));
        whole.tensors.push(tiny::Tensor::new(
            "multi_modal_projector.mm_input_projection_weight",
            &[3],
            || 1.0,
        ));
        whole.write_hf(folder.path());
        assert_eq!(
            run::logits(&Model::open(folder.path(), &LoadOptions::default()).unwrap(), &tokens),
            expected
        );
    }
}

/// Since version 5, transformers writes all about RoPE into one object.
#[test]
fn both_ways_to_write_rope_mean_the_same() {
    for (name, parameters) in [
        ("llama", json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})),
        (
            "gemma3",
            json!({
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        model(name).write_hf(folder.path());
        let old = Model::open(folder.path(), &LoadOptions::default()).unwrap().program.ropes;
        edit(&folder.path().join("config.json"), |config| {
            let config = config.as_object_mut().unwrap();
            for key in ["rope_theta", "rope_scaling", "rope_local_base_freq"] {
                config.remove(key);
            }
            config.insert("rope_parameters".to_owned(), parameters);
        });
        let new = Model::open(folder.path(), &LoadOptions::default()).unwrap().program.ropes;
        assert_eq!(new, old, "{name}");
    }
}

#[test]
fn windows_are_where_the_configuration_puts_them() {
    let windows = |name: &str, change: &dyn Fn(&mut Value)| {
        let folder = tempfile::tempdir().unwrap();
        model(name).write_hf(folder.path());
        edit(&folder.path().join("config.json"), change);
        let program = Model::open(folder.path(), &LoadOptions::default()).unwrap().program;
        let windows = program.attentions().map(|attention| program.kv_group(attention).window);
        windows
            .map(|window| window.map_or("-".to_owned(), |window| window.to_string()))
            .collect::<Vec<_>>()
            .join(" ")
    };
    let set = |key: &'static str, value: Value| move |config: &mut Value| config[key] = value.clone();
    assert_eq!(windows("llama", &set("sliding_window", json!(7))), "- -");
    assert_eq!(windows("mistral", &|_| ()), "7 7");
    assert_eq!(windows("mistral", &set("sliding_window", Value::Null)), "- -");
    let by_default = |config: &mut Value| {
        config.as_object_mut().unwrap().remove("sliding_window");
        config["max_position_embeddings"] = json!(32768);
    };
    assert_eq!(windows("mistral", &by_default), "4096 4096");
    assert_eq!(windows("phi3", &set("sliding_window", json!(9))), "9 9");
    assert_eq!(windows("gemma2", &|_| ()), "6 - 6");
    assert_eq!(
        windows(
            "gemma2",
            &set("layer_types", json!(["full_attention", "sliding_attention", "full_attention"]))
        ),
        "- 6 -"
    );
    assert_eq!(windows("gemma3", &|_| ()), "5 5 5 5 5 - 5");
    assert_eq!(windows("gemma3", &set("sliding_window_pattern", json!(2))), "5 - 5 - 5 - 5");
    assert_eq!(windows("qwen2", &|_| ()), "- -");
    let on = |config: &mut Value| {
        config["use_sliding_window"] = json!(true);
        config["max_window_layers"] = json!(1);
    };
    assert_eq!(windows("qwen2", &on), "- 8");
}

#[test]
fn generation_settings_are_the_folder_s() {
    let folder = tempfile::tempdir().unwrap();
    model("llama").write_hf(folder.path());
    let settings = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 5, 99999]});
    fs::write(folder.path().join("generation_config.json"), settings.to_string()).unwrap();
    let model = Model::open(folder.path(), &LoadOptions::default()).unwrap();
    let recommended = &model.defaults.recommended;
    assert_eq!((recommended.temperature, recommended.top_k, recommended.min_p), (Some(0.6), Some(20), None));
    assert!(
        model.stop_tokens.starts_with(&[2, 5]) && !model.stop_tokens.contains(&99999),
        "{:?}",
        model.stop_tokens
    );
}

/// Where the templates of a folder come from, and that the tools' own is kept apart.
#[test]
fn chat_templates_are_found() {
    let folder = tempfile::tempdir().unwrap();
    model("llama").write_hf(folder.path());
    let source = |config: Value| {
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let model = Model::open(folder.path(), &LoadOptions::default()).unwrap();
        let source =
            |template: &Option<ChatTemplate>| template.as_ref().map(|template| template.source().to_owned());
        (source(&model.chat_template), source(&model.tool_template), model.template_problem.is_some())
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(source(json!({})), (None, None, false));
    assert_eq!(source(json!({"chat_template": "a"})), (some("a"), None, false));
    assert_eq!(source(json!({"chat_template": "{% if %}"})), (None, None, true));
    let named = json!([{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}]);
    assert_eq!(source(json!({"chat_template": named})), (some("b"), some("c"), false));
    fs::write(folder.path().join("chat_template.jinja"), "d").unwrap();
    assert_eq!(source(json!({"chat_template": named})), (some("d"), some("c"), false));
}

/// An encoder whose adapters are left out would embed texts in another way.
#[test]
fn encoders_with_adapters_by_task_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    model("llama").write_hf(folder.path());
    for (key, value, words) in [
        ("lora_adaptations", json!(["retrieval.query", "text-matching"]), "as jina-embeddings-v3 has them"),
        ("position_embedding_type", json!("rotary"), "positions of kind `rotary` is not supported"),
    ] {
        edit(&folder.path().join("config.json"), |config| {
            config["architectures"] = json!(["XLMRobertaModel"]);
            config["hidden_act"] = json!("gelu");
            config[key] = value;
        });
        let error = Model::open(folder.path(), &LoadOptions::default()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        edit(&folder.path().join("config.json"), |config| config[key] = Value::Null);
    }
}
