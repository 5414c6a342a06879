//! Properties of a model that llama.cpp (0.3.36 of llama-cpp-python) has no key for, or computes in another way.

use crate::{
    arch::{Config, Recurrent},
    rope::RopeConfig,
};

/// Architectures whose experts llama.cpp weighs by the keys of the file, and those whose weights it leaves as they are. It divides the
/// weights of all others by their sum.
const BY_KEYS: [&str; 5] = ["glm4moe", "deepseek2", "mistral4", "nemotron_h_moe", "nemotron_h"];
const NOT_NORMALIZED: [&str; 4] = ["qwen2moe", "olmoe", "deepseek", "gpt-oss"];
/// Architectures of which llama.cpp reads the factor of the experts' weights besides these.
const FACTOR_BY_KEY: [&str; 1] = ["deepseek"];
/// Architectures of which llama.cpp reads a sliding window.
const WINDOWS: [&str; 9] = [
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma-embedding",
    "gpt-oss",
    "olmo2",
    "cohere2",
    "exaone4",
    "modern-bert",
];

/// Returns the properties with which llama.cpp refuses the file or computes other results, each as a phrase.
pub(crate) fn differences(config: &Config) -> Vec<String> {
    let architecture = config.definition.gguf;
    let mut all = Vec::new();
    if let Some(experts) = config.experts.filter(|experts| !experts.beside) {
        let by_keys = BY_KEYS.contains(&architecture);
        if !by_keys && experts.factor != 1.0 && !FACTOR_BY_KEY.contains(&architecture) {
            all.push(format!("it ignores the factor of the experts' weights ({})", experts.factor));
        }
        let normalizes = !NOT_NORMALIZED.contains(&architecture);
        // The softmax of the chosen scores is normalized in itself.
        if !by_keys && architecture != "gpt-oss" && experts.renormalize != normalizes {
            all.push(match normalizes {
                true => "it divides the weights of a token's experts by their sum".to_owned(),
                false => "it does not divide the weights of a token's experts by their sum".to_owned(),
            });
        }
    }
    let windows: Vec<u32> = config.layers.iter().filter_map(|layer| layer.window).collect();
    // Of EXAONE 4 only the model with 64 layers has windows.
    let has_windows =
        WINDOWS.contains(&architecture) && (architecture != "exaone4" || config.layers.len() == 64);
    if let Some(&window) = windows.first().filter(|&&window| (window as usize) < config.context_length)
        && !has_windows
    {
        all.push(format!("it ignores the sliding window of {window} tokens"));
    }
    let is_exact = |rope: &RopeConfig| rope.yarn.is_some_and(|yarn| !yarn.truncate);
    if config.ropes.iter().any(is_exact) {
        all.push("it rounds the ends of YaRN's ramp to whole pairs".to_owned());
    }
    if architecture == "gptneox" {
        all.push("it computes the tanh form of GELU".to_owned());
    }
    if let Some(Recurrent::Delta { shape, .. }) = config.recurrent
        && shape.key_dim != shape.value_dim
    {
        let (key, value) = (shape.key_dim, shape.value_dim);
        all.push(format!("it refuses heads of {key} elements for keys and {value} for values"));
    }
    // llama.cpp recognizes DeepSeek V2 Lite and its relatives by the number of layers.
    if architecture == "deepseek2"
        && config.latent.is_some_and(|(_, rank)| rank.is_none())
        && ![26, 27, 48].contains(&config.layers.len())
    {
        all.push("it refuses queries without a latent vector in models of this depth".to_owned());
    }
    all
}
