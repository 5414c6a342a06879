//! A Hugging Face folder as the contents of a GGUF file.
//!
//! Pooling and the layers after it are written here. `app/tests/architectures/hf.rs` converts a folder of each
//! architecture and compares logits with those of transformers.

use serde_json::{Map, Value as Json};

use crate::{
    SamplingOverrides,
    arch::{self, Names, Tensors},
    error::ModelError,
    gguf::{Contents, Metadata, Value},
    hf::{HfFolder, quantized},
    load::GenerationDefaults,
    pooling,
    text_head::TextHead,
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// The parts of a folder that end in other keys than tensors do.
pub(crate) struct Parts<'a> {
    pub(crate) name: &'a str,
    pub(crate) defaults: GenerationDefaults,
    /// Chat templates with their names.
    pub(crate) templates: Vec<(String, String)>,
    /// The format that most bytes have.
    pub(crate) majority: String,
}

/// Converts a folder; its weights are read when the contents are written.
pub(crate) fn contents(folder: &HfFolder, parts: &Parts<'_>) -> Result<Contents, ModelError> {
    let tensors = quantized::resolve(&folder.config, &folder.tensors)?;
    let longest = folder.longest_text()?;
    let config = |context| {
        let mut config = arch::config_from_hf(&folder.config, tensors.len(), context)?;
        config.limit_texts(longest);
        Ok::<_, ModelError>(config)
    };
    let (long, short) = (config(Some(arch::LONGEST))?, config(Some(1))?);
    let places = Tensors::new(long.definition.gguf, &[], &tensors);
    let names = Names::hf(long.definition, |name| places.has(name));
    let mut contents = arch::export(&long, &short, &original(&folder.config), &names, &tensors)?;
    let metadata = &mut contents.metadata;
    metadata.set("general.name", Value::String(parts.name.to_owned()));
    if let Some(number) = crate::gguf::file_type_number(&parts.majority) {
        metadata.set("general.file_type", Value::U32(number));
    }
    metadata.set("general.quantization_version", Value::U32(2));
    sampling(&parts.defaults.recommended, metadata);
    retrieval(folder, long.definition.is_encoder(), &mut contents)?;
    let metadata = &mut contents.metadata;

    let rows = contents.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    let size = rows.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0);
    let json = folder.tokenizer()?;
    let config = folder.tokenizer_config()?;
    let tokenizer = Tokenizer::from_hf(&json, config.as_deref())?;
    let config = config.as_deref().map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
    tokenizer.write_gguf(&json, &config, size, metadata)?;
    if long.definition.is_encoder() {
        return Ok(contents);
    }
    // The end of an answer may be another token than that of a text.
    let end = [&folder.generation, &folder.config].into_iter().find_map(|file| file.get("eos_token_id"));
    let ends: Vec<u32> = match end {
        Some(Json::Array(ids)) => ids.iter().filter_map(|id| id.as_u64()?.try_into().ok()).collect(),
        Some(id) => id.as_u64().and_then(|id| id.try_into().ok()).into_iter().collect(),
        None => Vec::new(),
    };
    ends_of_answers(&tokenizer, &ends, metadata)?;
    for (name, template) in &parts.templates {
        let key = match name.as_str() {
            "default" => "tokenizer.chat_template".to_owned(),
            name => format!("tokenizer.chat_template.{name}"),
        };
        metadata.set(&key, Value::String(template.clone()));
    }
    Ok(contents)
}

/// Writes the tokens that end an answer, of which a file names three. Others are known by their names.
fn ends_of_answers(tokenizer: &Tokenizer, ends: &[u32], metadata: &mut Metadata) -> Result<(), ModelError> {
    const EOS: &str = "tokenizer.ggml.eos_token_id";
    if let Some(&first) = ends.first().filter(|_| metadata.u32(EOS).is_none()) {
        metadata.set(EOS, Value::U32(first));
    }
    let eos = metadata.u32(EOS);
    let mut others: Vec<u32> = Vec::new();
    for id in tokenizer.eos().into_iter().chain(ends.iter().copied()) {
        if Some(id) != eos && !others.contains(&id) {
            others.push(id);
        }
    }
    for (key, id) in ["eot", "eom"].into_iter().zip(&others) {
        metadata.set(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(*id));
    }
    let read = Tokenizer::from_gguf(metadata)?;
    let is_lost = |id: &&u32| !read.stop_tokens().contains(id) && (**id as usize) < read.vocab_size();
    match others.iter().chain(tokenizer.stop_tokens()).find(is_lost) {
        None => Ok(()),
        Some(&id) => Err(ModelError::unsupported(format!(
            "converting a model with {} tokens that end an answer to GGUF, which has no key for `{}`,",
            others.len() + 1,
            tokenizer.token_name(id)
        ))),
    }
}

/// Pooling, and the layers after it.
fn retrieval(folder: &HfFolder, is_encoder: bool, contents: &mut Contents) -> Result<(), ModelError> {
    let (modules, config) = folder.pooling()?;
    let class = folder.config.get("architectures").and_then(|classes| classes.get(0)?.as_str());
    let class = class.unwrap_or_default();
    if !is_encoder && modules.is_null() {
        return Ok(());
    }
    let head = TextHead::from_hf(folder, class, &modules)?;
    let lost = |what: &str| ModelError::unsupported(format!("converting a model with {what} to GGUF"));
    let pooling = pooling::from_hf(&modules, &config, class, &folder.config);
    let pooling = pooling.map_err(|error| lost(&error.what))?;
    let Some(Value::String(name)) = contents.metadata.get("general.architecture").cloned() else {
        return Ok(());
    };
    let number = if head.classifier.is_some() { pooling::RANK } else { pooling.number() };
    contents.metadata.set(&format!("{name}.pooling_type"), Value::U32(number));
    head.write_gguf(&name, contents);
    let read = TextHead::from_gguf(&contents.metadata, &name, &contents.tensors)?;
    if !head.computes_the_same(&read) {
        return Err(lost("these layers after its pooling"));
    }
    if pooling::from_gguf(&contents.metadata, &name) != Ok(pooling) {
        return Err(lost("a classifier of the mean"));
    }
    Ok(())
}

/// Numbers that only a GGUF file needs.
fn original(config: &Map<String, Json>) -> arch::Original {
    let text = config.get("text_config").and_then(Json::as_object).unwrap_or(config);
    let scaling = ["rope_parameters", "rope_scaling"].iter().find_map(|key| text.get(*key)?.as_object());
    let of = |object: &Map<String, Json>| object.get("original_max_position_embeddings")?.as_u64();
    let context = scaling.and_then(of).or_else(|| of(text)).and_then(|length| length.try_into().ok());
    let sections = scaling.and_then(|scaling| scaling.get("mrope_section")?.as_array());
    let sections = sections.and_then(|listed| {
        let number = |number: &Json| i32::try_from(number.as_i64()?).ok();
        listed.iter().take(4).map(number).collect()
    });
    // Without a list, `Qwen3VLVisionConfig` of transformers has three layers.
    let vision = config.get("vision_config").and_then(Json::as_object);
    let listed = |vision: &Map<String, Json>| Some(vision.get("deepstack_visual_indexes")?.as_array()?.len());
    let deepstack = vision.map_or(0, |vision| listed(vision).unwrap_or(3));
    arch::Original { context, sections, deepstack }
}

fn sampling(recommended: &SamplingOverrides, metadata: &mut Metadata) {
    let numbers = [
        ("temp", recommended.temperature),
        ("top_p", recommended.top_p),
        ("min_p", recommended.min_p),
        ("penalty_repeat", recommended.repetition_penalty),
    ];
    for (key, number) in numbers {
        if let Some(number) = number {
            metadata.set(&format!("general.sampling.{key}"), Value::F32(number));
        }
    }
    if let Some(top_k) = recommended.top_k {
        metadata.set("general.sampling.top_k", Value::I32(top_k as i32));
    }
}
