//! Adapters: in all formats, over bases in both, they equal a base whose weights have their changes; and refusals.

use std::{fs, path::Path};

use crate::tiny::{
    Random, Tensor,
    gguf::Writer,
    models::{self, Tiny},
    run, safetensors,
};
use paguro_model::{AdapterFile, LoadOptions, Model, ModelFile, gguf::Value};
use serde_json::{Value as Json, json};

/// Change of a tensor, by Hugging Face's name without `.weight`.
#[derive(Clone)]
pub struct Change {
    name: String,
    a: Tensor,
    b: Tensor,
}

const RANK: usize = 3;
const ALPHA: f32 = 6.0;
const TOKENS: [u32; 12] = [1, 5, 100, 260, 31, 31, 270, 42, 7, 280, 99, 3];

fn change(name: &str, [out, inputs]: [usize; 2], random: &mut Random) -> Change {
    let spread = 0.3 / (inputs as f32).sqrt();
    let a = Tensor::new("a", &[RANK, inputs], || spread * random.float());
    let b = Tensor::new("b", &[out, RANK], || random.float());
    Change { name: name.to_owned(), a, b }
}

/// Returns changes of all matrices but embeddings.
pub fn changes(tiny: &Tiny) -> Vec<Change> {
    let mut random = Random(5);
    let matrices = tiny.tensors.iter().filter(|tensor| tensor.shape.len() == 2);
    let matrices = matrices.filter(|tensor| !tensor.name.contains("embed"));
    let of = |tensor: &Tensor| {
        let name = tensor.name.strip_suffix(".weight").unwrap();
        change(name, [tensor.shape[0], tensor.shape[1]], &mut random)
    };
    matrices.map(of).collect()
}

/// Adds changes to rows `first..` of a tensor.
fn add(tensor: &mut Tensor, change: &Change, first: usize) {
    let (scale, inputs) = (ALPHA / RANK as f32, change.a.shape[1]);
    for (row, b) in change.b.values.chunks_exact(RANK).enumerate() {
        for (rank, b) in b.iter().enumerate() {
            let to = &mut tensor.values[(first + row) * inputs..][..inputs];
            let a = &change.a.values[rank * inputs..][..inputs];
            to.iter_mut().zip(a).for_each(|(to, a)| *to += scale * b * a);
        }
    }
}

fn merged(tiny: &Tiny, changes: &[Change]) -> Tiny {
    let mut merged = tiny.clone();
    for change in changes {
        let name = format!("{}.weight", change.name);
        add(merged.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap(), change, 0);
    }
    merged
}

pub fn peft_config() -> Json {
    json!({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": false,
        "modules_to_save": null, "base_model_name_or_path": "someone/base", "alpha_pattern": {}})
}

pub fn write_peft(folder: &Path, config: &Json, changes: &[Change]) {
    let named = changes.iter().flat_map(|change| {
        let name = |side: &str| format!("base_model.model.{}.lora_{side}.weight", change.name);
        [Tensor { name: name("A"), ..change.a.clone() }, Tensor { name: name("B"), ..change.b.clone() }]
    });
    let mut tensors: Vec<_> = named.collect();
    tensors.push(Tensor::new("base_model.model.lm_head.base_layer.weight", &[4, 4], || 9.0));
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), safetensors::write(&tensors)).unwrap();
}

fn write_mlx(folder: &Path, changes: &[Change]) {
    let transposed = |tensor: &Tensor, name: String| {
        let [rows, cols] = [tensor.shape[0], tensor.shape[1]];
        let value = |at: usize| tensor.values[at % rows * cols + at / rows];
        Tensor { name, shape: vec![cols, rows], values: (0..rows * cols).map(value).collect() }
    };
    let named = changes.iter().flat_map(|change| {
        let name = |side: &str| format!("{}.lora_{side}", change.name);
        [transposed(&change.a, name("a")), transposed(&change.b, name("b"))]
    });
    let tensors: Vec<_> = named.collect();
    let config = json!({"fine_tune_type": "lora", "model": "someone/base", "num_layers": 2,
        "lora_parameters": {"rank": RANK, "scale": ALPHA / RANK as f32, "dropout": 0.0}});
    fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    fs::write(folder.join("adapters.safetensors"), safetensors::write(&tensors)).unwrap();
}

/// Writes a GGUF adapter as convert_lora_to_gguf.py does: B has the base's order of rows.
pub fn gguf(tiny: &Tiny, changes: &[Change]) -> Writer {
    let text = |text: &str| Value::String(text.to_owned());
    let metadata = [
        ("general.type", text("adapter")),
        ("general.architecture", text(tiny.architecture)),
        ("adapter.type", text("lora")),
        ("adapter.lora.alpha", Value::F32(ALPHA)),
    ];
    let named = changes.iter().flat_map(|change| {
        let b = tiny.to_gguf(&Tensor { name: format!("{}.weight", change.name), ..change.b.clone() });
        let a = Tensor { name: format!("{}.lora_a", b.name), ..change.a.clone() };
        [a, Tensor { name: format!("{}.lora_b", b.name), ..b }]
    });
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).to_vec();
    Writer::new(metadata, &named.collect::<Vec<_>>())
}

/// Opens a model in both formats.
fn bases(tiny: &Tiny, folder: &Path) -> [Model; 2] {
    let (hf, file) = (folder.join("hf"), folder.join("base.gguf"));
    fs::create_dir_all(&hf).unwrap();
    tiny.write_hf(&hf);
    fs::write(&file, tiny.gguf().write()).unwrap();
    [hf, file].map(|path| Model::open(&path, &LoadOptions::default()).unwrap())
}

fn near(what: &str, ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    let rms = |rows: &[Vec<f32>]| {
        let values = || rows.iter().flatten();
        (values().map(|x| x * x).sum::<f32>() / values().count() as f32).sqrt()
    };
    let differences = ours.iter().flatten().zip(theirs.iter().flatten()).map(|(a, b)| (a - b).abs());
    let worst = differences.fold(0.0, f32::max) / rms(theirs);
    // K and V are rounded to f16.
    assert!(worst < 2e-2, "{what}: {worst}");
}

#[test]
fn adapters_equal_merged_weights() {
    for tiny in models::all() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let changes = changes(&tiny);
        let expected = bases(&merged(&tiny, &changes), folder);
        let expected = run::logits(&expected[0], &TOKENS);
        let (peft, mlx, file) = (folder.join("peft"), folder.join("mlx"), folder.join("adapter.gguf"));
        for path in [&peft, &mlx] {
            fs::create_dir(path).unwrap();
        }
        write_peft(&peft, &peft_config(), &changes);
        write_mlx(&mlx, &changes);
        fs::write(&file, gguf(&tiny, &changes).write()).unwrap();
        for base in bases(&tiny, folder) {
            let plain = run::logits(&base, &TOKENS);
            let moved =
                plain.iter().flatten().zip(expected.iter().flatten()).any(|(a, b)| (a - b).abs() > 0.5);
            assert!(moved, "{}: the adapter has no effect", tiny.name);
            for path in [&peft, &mlx, &file] {
                let adapter = AdapterFile::open(path).unwrap();
                assert_eq!((adapter.rank(), adapter.targets().count()), (RANK, changes.len()));
                let pairs = adapter.fit(&base).unwrap();
                let what = format!("{} over {}, {}", adapter.format(), tiny.name, base.architecture);
                near(&what, &run::logits_with(&base, &TOKENS, &pairs), &expected);
            }
        }
    }
}

/// Merged into a file, an adapter gives the same model.
#[test]
fn adapters_are_merged_into_files() {
    for tiny in models::all() {
        let folder = tempfile::tempdir().unwrap();
        let changes = changes(&tiny);
        let expected = bases(&merged(&tiny, &changes), folder.path());
        let expected = run::logits(&expected[0], &TOKENS);
        write_peft(folder.path(), &peft_config(), &changes);
        let adapter = AdapterFile::open(folder.path()).unwrap();
        bases(&tiny, folder.path());
        let mut contents = ModelFile::open(&folder.path().join("base.gguf")).unwrap().contents().unwrap();
        adapter.merge(&mut contents, 1.0).unwrap();
        let mut bytes = Vec::new();
        contents.write(&mut bytes).unwrap();
        let file = ModelFile::from_bytes("merged", std::sync::Arc::new(bytes)).unwrap();
        let model = file.load(&LoadOptions::default()).unwrap();
        near(tiny.name, &run::logits(&model, &TOKENS), &expected);
    }
}

/// A tied head that an adapter changes becomes a matrix of its own; embeddings stay.
#[test]
fn tied_heads_part_when_they_are_merged() {
    let tiny = crate::hf::model("llama3");
    let folder = tempfile::tempdir().unwrap();
    let [base, _] = bases(&tiny, folder.path());
    let head = [change("lm_head", [models::VOCAB, 64], &mut Random(4))];
    write_peft(folder.path(), &peft_config(), &head);
    let adapter = AdapterFile::open(folder.path()).unwrap();
    let expected = run::logits_with(&base, &TOKENS, &adapter.fit(&base).unwrap());
    let mut contents = ModelFile::open(&folder.path().join("base.gguf")).unwrap().contents().unwrap();
    adapter.merge(&mut contents, 1.0).unwrap();
    let mut bytes = Vec::new();
    contents.write(&mut bytes).unwrap();
    let file = ModelFile::from_bytes("merged", std::sync::Arc::new(bytes)).unwrap();
    near("a tied head", &run::logits(&file.load(&LoadOptions::default()).unwrap(), &TOKENS), &expected);
}

/// A merge that is not finite is refused with the tensor's name.
#[test]
fn merged_weights_are_finite() {
    let tiny = crate::hf::model("llama3");
    let folder = tempfile::tempdir().unwrap();
    bases(&tiny, folder.path());
    for (value, part) in [(f32::NAN, "is not finite"), (1e30, "with the adapter exceeds the range of F32")] {
        let mut head = change("lm_head", [models::VOCAB, 64], &mut Random(4));
        head.a.values.fill(value);
        head.b.values.fill(value);
        write_peft(folder.path(), &peft_config(), &[head]);
        let adapter = AdapterFile::open(folder.path()).unwrap();
        let mut contents = ModelFile::open(&folder.path().join("base.gguf")).unwrap().contents().unwrap();
        let refused = match adapter.merge(&mut contents, 1.0) {
            Ok(()) => contents.write(&mut Vec::new()).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert!(refused.contains(part), "{refused}");
    }
}

/// An adapter may have tensors apart that the base has in one, and the other way around.
#[test]
fn fused_tensors_are_found_in_parts() {
    let mut random = Random(9);
    let (q, ffn, hidden) = (64, 96, 64);
    for (name, parts) in [
        ("phi3", &[("self_attn.q_proj", q), ("self_attn.k_proj", 64), ("self_attn.v_proj", 64)][..]),
        ("phi3", &[("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)]),
        ("llama", &[("self_attn.qkv_proj", q + 2 * 32)]),
        ("llama", &[("mlp.gate_up_proj", 2 * ffn)]),
    ] {
        let tiny = crate::hf::model(name);
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let parts = parts
            .iter()
            .map(|(part, out)| change(&format!("model.layers.1.{part}"), [*out, hidden], &mut random));
        let parts: Vec<_> = parts.collect();
        let mut changed = tiny.clone();
        let is_part = |tensor: &&mut Tensor| {
            let attends = parts[0].name.contains("self_attn");
            let inputs = ["q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj"];
            let is_input = inputs.iter().any(|part| tensor.name.contains(part));
            tensor.shape.len() == 2
                && tensor.name.starts_with("model.layers.1")
                && is_input
                && tensor.name.contains("self_attn") == attends
        };
        // Both sides, one after the other.
        let mut rows = parts.iter().flat_map(|part| {
            let rows = part.b.values.chunks_exact(RANK).map(<[f32]>::to_vec);
            rows.map(|row| (part.a.clone(), row)).collect::<Vec<_>>()
        });
        for tensor in changed.tensors.iter_mut().filter(is_part) {
            for row in 0..tensor.shape[0] {
                let (a, b) = rows.next().unwrap();
                let b = Tensor { name: "b".into(), shape: vec![1, RANK], values: b };
                add(tensor, &Change { name: String::new(), a, b }, row);
            }
        }
        assert!(rows.next().is_none());
        let expected = run::logits(&bases(&changed, folder)[0], &TOKENS);
        write_peft(folder, &peft_config(), &parts);
        let adapter = AdapterFile::open(folder).unwrap();
        for base in bases(&tiny, folder) {
            let pairs = adapter.fit(&base).unwrap();
            near(name, &run::logits_with(&base, &TOKENS, &pairs), &expected);
        }
    }
}

#[test]
fn scales_follow_the_configuration() {
    let tiny = models::llama();
    let folder = tempfile::tempdir().unwrap();
    let [base, _] = bases(&tiny, folder.path());
    let scales = |config: Json| {
        let mut all = peft_config();
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let of = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head"];
        let changes: Vec<_> =
            changes(&tiny).into_iter().filter(|change| of.contains(&change.name.as_str())).collect();
        write_peft(folder.path(), &all, &changes);
        let pairs = AdapterFile::open(folder.path()).unwrap().fit(&base).unwrap();
        let mut scales: Vec<_> = pairs.iter().map(|pair| pair.scale).collect();
        scales.sort_by(f32::total_cmp);
        scales
    };
    assert_eq!(scales(json!({})), [2.0; 3]);
    assert_eq!(scales(json!({"lora_alpha": null})), [8.0 / 3.0; 3]);
    assert_eq!(scales(json!({"use_rslora": true})), [(6.0 / 3.0_f64.sqrt()) as f32; 3]);
    assert_eq!(scales(json!({"alpha_pattern": {"q_proj": 3.0}})), [1.0, 1.0, 2.0]);
    assert_eq!(scales(json!({"alpha_pattern": {"layers.1.self_attn.q_proj": 3.0}})), [1.0, 2.0, 2.0]);
    assert_eq!(scales(json!({"alpha_pattern": {".*layers\\.0.*": 3.0, "proj": 30.0}})), [1.0, 2.0, 2.0]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let tiny = models::llama();
    let folder = tempfile::tempdir().unwrap();
    let [base, _] = bases(&tiny, folder.path());
    let check = |config: Json, edit: &dyn Fn(&mut Vec<Change>), expected: &[&str]| {
        let mut all = peft_config();
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        let mut changes = changes(&tiny);
        edit(&mut changes);
        write_peft(folder.path(), &all, &changes);
        let result = AdapterFile::open(folder.path()).and_then(|adapter| adapter.fit(&base));
        let error = result.map(|_| ()).unwrap_err().to_string();
        for part in expected {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    };
    let none = |_: &mut Vec<Change>| ();
    check(json!({"peft_type": "IA3"}), &none, &["`peft_type` is `IA3`"]);
    check(json!({"use_dora": true}), &none, &["`use_dora`", "DoRA"]);
    check(json!({"modules_to_save": ["lm_head"]}), &none, &["`modules_to_save`"]);
    check(json!({"bias": "all"}), &none, &["`bias` is `all`"]);
    check(json!({"lora_bias": true}), &none, &["`lora_bias`"]);
    check(json!({"target_parameters": ["experts"]}), &none, &["`target_parameters`"]);
    check(json!({"init_lora_weights": "pissa_niter_4"}), &none, &["`pissa_niter_4`"]);
    check(json!({"lora_alpha": "a lot"}), &none, &["`lora_alpha` is \"a lot\""]);
    check(json!({"lora_alpha": 1e300}), &none, &["the scale of"]);
    check(json!({"alpha_pattern": {"(": 1}}), &none, &["`(` in `alpha_pattern`"]);
    let rename = |name: &'static str| move |changes: &mut Vec<Change>| changes[0].name = name.to_owned();
    check(json!({}), &rename("model.embed_tokens"), &["`model.embed_tokens`", "embeddings"]);
    check(json!({}), &rename("model.layers.9.self_attn.q_proj"), &["no layer 9", "it has 2"]);
    check(json!({}), &rename("model.layers.0.mlp.experts.3.up_proj"), &["experts are not supported"]);
    check(json!({}), &rename("model.layers.0.input_layernorm"), &["no linear"]);
    check(json!({}), &rename("vision_tower.q_proj"), &["no such tensor"]);
    check(
        json!({}),
        &|changes| changes[0] = change(&changes[0].name, [60, 64], &mut Random(1)),
        &["q_proj.lora_A.weight` [3, 64]", "q_proj.lora_B.weight` [60, 3]", "[64, 64]", "someone/base"],
    );
    let foreign = |name: &str, expected: &str| {
        let tensor = |name: &str| Tensor::new(name, &[4, 4], || 1.0);
        fs::write(folder.path().join("adapter_config.json"), peft_config().to_string()).unwrap();
        let file = folder.path().join("adapter_model.safetensors");
        fs::write(file, safetensors::write(&[tensor(name)])).unwrap();
        let error = AdapterFile::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    };
    foreign("base_model.model.lm_head.lora_magnitude_vector", "DoRA");
    foreign("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings");
    foreign("base_model.model.lm_head.modules_to_save.weight", "modules_to_save");
    foreign("base_model.model.model.layers.0.self_attn.q_proj.bias", "a bias");
    foreign("base_model.model.lm_head.lora_A.weight", "no counterpart");
    foreign("something", "neither A nor B");

    let file = folder.path().join("adapter.gguf");
    let with = |key: &str, value: Value| {
        let mut writer = gguf(&tiny, &changes(&tiny));
        writer.metadata.retain(|(own, _)| own != key);
        writer.metadata.push((key.to_owned(), value));
        fs::write(&file, writer.write()).unwrap();
        AdapterFile::open(&file).unwrap_err().to_string()
    };
    assert!(with("adapter.type", Value::String("ia3".into())).contains("type `ia3`"));
    assert!(with("adapter.lora.alpha", Value::F32(f32::INFINITY)).contains("`adapter.lora.alpha` is inf"));
    assert!(with("adapter.alora.invocation_tokens", Value::U32(1)).contains("aLoRA"));
    assert!(with("general.type", Value::String("model".into())).contains("no adapter"));
}

/// Writes a small Qwen 3.5 in which three value heads share a key head, with these changes merged.
fn write_qwen35(folder: &Path, merged: &[Change]) -> Vec<Tensor> {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../app/tests/architectures/hf/cases.json");
    let all: Json = serde_json::from_slice(&fs::read(cases).unwrap()).unwrap();
    let mut case =
        all["cases"].as_array().unwrap().iter().find(|it| it["name"] == "qwen3_5").unwrap().clone();
    case["config"]["linear_num_value_heads"] = json!(6);
    let mut random = Random(11);
    let tensor = |tensor: &Json| {
        let name = tensor[0].as_str().unwrap();
        let (center, spread) = (tensor[1].as_f64().unwrap() as f32, tensor[2].as_f64().unwrap() as f32);
        let dims = tensor[3].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize);
        // The case has four value heads of 24 values.
        let of_six = |dim: usize| match dim {
            160 => 208,
            96 => 144,
            4 => 6,
            other => other,
        };
        let is_kernel = name.ends_with("conv1d.weight");
        let dims = dims.enumerate().map(|(at, dim)| match name.contains("linear_attn") {
            true if !(is_kernel && at == 2) => of_six(dim),
            _ => dim,
        });
        Tensor::new(name, &dims.collect::<Vec<_>>(), || center + spread * random.float())
    };
    let mut tensors: Vec<Tensor> = case["tensors"].as_array().unwrap().iter().map(tensor).collect();
    for change in merged {
        let name = format!("{}.weight", change.name);
        add(tensors.iter_mut().find(|tensor| tensor.name == name).unwrap(), change, 0);
    }
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), case["config"].to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), all["tokenizer"].to_string()).unwrap();
    fs::write(folder.join("model.safetensors"), safetensors::write(&tensors)).unwrap();
    tensors
}

/// Files of Qwen 3.5 have the value heads in another order than folders.
#[test]
fn value_heads_are_found_in_both_orders() {
    let folder = tempfile::tempdir().unwrap();
    let (base, peft) = (folder.path().join("base"), folder.path().join("peft"));
    let tensors = write_qwen35(&base, &[]);
    let mut random = Random(12);
    let matrices = tensors.iter().filter(|it| it.shape.len() == 2 && !it.name.contains("embed"));
    let changes: Vec<Change> = matrices
        .map(|tensor| {
            let name = tensor.name.strip_suffix(".weight").unwrap();
            change(name, [tensor.shape[0], tensor.shape[1]], &mut random)
        })
        .collect();
    let merged = folder.path().join("merged");
    write_qwen35(&merged, &changes);
    fs::create_dir(&peft).unwrap();
    write_peft(&peft, &peft_config(), &changes);
    let adapter = AdapterFile::open(&peft).unwrap();
    let in_gguf = || {
        let mut bytes = Vec::new();
        ModelFile::open(&base).unwrap().contents().unwrap().write(&mut bytes).unwrap();
        let file = ModelFile::from_bytes("base", std::sync::Arc::new(bytes)).unwrap();
        file.load(&LoadOptions::default()).unwrap()
    };
    let expected = Model::open(&merged, &LoadOptions::default()).unwrap();
    let expected = run::logits(&expected, &TOKENS);
    for model in [Model::open(&base, &LoadOptions::default()).unwrap(), in_gguf()] {
        let pairs = adapter.fit(&model).unwrap();
        near(&model.architecture, &run::logits_with(&model, &TOKENS, &pairs), &expected);
    }
}

/// Tokens and the chat template of an adapter's folder apply; tokens without a row are refused.
#[test]
fn folders_may_have_tokens_and_templates() {
    let tiny = models::llama();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for base in bases(&tiny, folder) {
        let peft = tempfile::tempdir_in(folder).unwrap();
        let peft = peft.path();
        write_peft(peft, &peft_config(), &changes(&tiny));
        let adapter = AdapterFile::open(peft).unwrap();
        assert!(adapter.dialect(&base, None).unwrap().is_none());
        let end = base.tokenizer.token_name(7).into_owned();
        let write = |config: Json| fs::write(peft.join("tokenizer_config.json"), config.to_string()).unwrap();

        write(json!({"eos_token": end, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}));
        let dialect = adapter.dialect(&base, None).unwrap().unwrap();
        assert!(dialect.stop_tokens.contains(&7) && !base.stop_tokens.contains(&7));
        let source = |model: &Model| model.chat_template.as_ref().map(|it| it.source().to_owned());
        assert_eq!(source(&dialect).unwrap(), "{{ messages[0].content }}{{ eos_token }}");
        fs::write(peft.join("chat_template.jinja"), "newer").unwrap();
        assert_eq!(source(&adapter.dialect(&base, None).unwrap().unwrap()).unwrap(), "newer");
        let other = adapter.dialect(&base, Some("given")).unwrap().unwrap();
        assert_eq!(source(&other).unwrap(), "given");
        fs::write(peft.join("chat_template.jinja"), "{% if %}").unwrap();
        let broken = adapter.dialect(&base, None).unwrap().unwrap();
        assert!(broken.chat_template.is_none() && broken.template_problem.is_some());
        fs::remove_file(peft.join("chat_template.jinja")).unwrap();

        let own =
            |id: usize, name: &str| json!({"added_tokens_decoder": {id.to_string(): {"content": name}}});
        write(own(7, &end));
        assert!(adapter.dialect(&base, None).unwrap().is_none());
        write(own(7, "<|mine|>"));
        let error = adapter.dialect(&base, None).unwrap_err().to_string();
        assert!(error.contains("no tokenizer.json"), "{error}");
        write(own(models::VOCAB, "<|far|>"));
        let error = adapter.fit(&base).unwrap_err().to_string();
        assert!(error.contains("`<|far|>`") && error.contains(&models::VOCAB.to_string()), "{error}");
        fs::remove_file(peft.join("tokenizer_config.json")).unwrap();
        fs::write(peft.join("added_tokens.json"), r#"{"<|far|>": 1000000}"#).unwrap();
        assert!(adapter.fit(&base).is_err());
    }
}
