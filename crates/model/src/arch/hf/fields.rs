//! Typed access to `config.json`.

use paguro_backend::ExpertGroups;
use serde_json::{Map, Value};

use crate::{arch::ExpertsConfig, error::ModelError};

/// Typed access to a JSON object. `null` counts as absent, as in Python, except in [`Fields::has`].
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.0.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let mut found = value.to_string();
                if found.len() > 60 {
                    found = "something else".to_owned();
                }
                let wrong =
                    || ModelError::Config(format!("config.json: `{key}` is {found}, expected {expected}"));
                convert(value).ok_or_else(wrong).map(Some)
            }
        }
    }

    pub(crate) fn integer(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.read(key, "an unsigned 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ModelError> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Returns two numbers, by default without bounds. Infinity is a number, a string, or the string in an object.
    pub(crate) fn limits(&self, key: &str) -> Result<(f32, f32), ModelError> {
        let number = |value: &Value| match value.get("__float__").unwrap_or(value) {
            Value::String(text) if text == "Infinity" => Some(f32::INFINITY),
            value => value.as_f64().map(|number| number as f32),
        };
        let limits = match self.list(key)? {
            None => Some((0.0, f32::INFINITY)),
            Some([least, most]) => number(least).zip(number(most)),
            Some(_) => None,
        };
        let limits = limits.filter(|&(least, most)| 0.0 <= least && least <= most);
        limits.ok_or_else(|| ModelError::Config(format!("config.json: `{key}` is not a range from 0 on")))
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        self.read(key, "an object", |value| value.as_object().map(Fields))
    }

    /// Returns an integer; an error if it is missing and has no default.
    pub(crate) fn size(&self, key: &str, default: Option<usize>) -> Result<usize, ModelError> {
        let size = self.integer(key)?.map(|size| size as usize).or(default);
        size.ok_or_else(|| ModelError::Config(format!("config.json has no `{key}`")))
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.integer(key)?.map(|size| size as usize))
    }

    /// Returns the type of each layer, if the file lists them; all must be `known`.
    pub(crate) fn layer_types(
        &self,
        layers: usize,
        known: &[&'static str],
    ) -> Result<Option<Vec<&'static str>>, ModelError> {
        let Some(types) = self.list("layer_types")? else { return Ok(None) };
        if types.len() < layers {
            let problem = format!("`layer_types` has {} entries for {layers} layers", types.len());
            return Err(ModelError::Config(problem));
        }
        let find = |kind: &Value| {
            let found = known.iter().find(|known| kind.as_str() == Some(known));
            let unknown = || ModelError::unsupported_but(format!("layer type {kind}"), &known.join(", "));
            found.copied().ok_or_else(unknown)
        };
        types[..layers].iter().map(find).collect::<Result<_, _>>().map(Some)
    }

    /// Returns the first of these integers that exists.
    pub(crate) fn size_of(&self, keys: &[&str], default: Option<usize>) -> Result<usize, ModelError> {
        for key in keys {
            if let Some(size) = self.optional_size(key)? {
                return Ok(size);
            }
        }
        self.size(keys[0], default)
    }

    /// Returns the mixture of experts of an architecture that may have one like `defaults`.
    pub(super) fn experts(
        &self,
        defaults: ExpertsConfig,
        latent: bool,
    ) -> Result<Option<ExpertsConfig>, ModelError> {
        const COUNTS: [&str; 4] = ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];
        const USED: [&str; 4] = ["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"];
        if COUNTS.iter().all(|key| self.0.get(*key).is_none_or(Value::is_null)) {
            return Ok(None);
        }
        let groups = self.optional_size("n_group")?.unwrap_or(1);
        if groups > 1 && !latent {
            return Err(ModelError::unsupported(format!("a router with {groups} groups of experts")));
        }
        let used_groups = self.size("topk_group", Some(1))?;
        let groups = (groups > 1).then_some(ExpertGroups { count: groups, used: used_groups, best: 1 });
        let width = self.size_of(&["moe_intermediate_size", "intermediate_size"], None)?;
        let shared_counts = ["n_shared_experts", "moe_num_shared_experts", "num_shared_expert"];
        let shared = match self.optional_size("shared_expert_intermediate_size")? {
            Some(shared) => shared,
            None => self.size_of(&shared_counts, Some(0))?.saturating_mul(width),
        };
        let factor = self.number("routed_scaling_factor")?.unwrap_or(1.0);
        Ok(Some(ExpertsConfig {
            count: self.size_of(&COUNTS, None)?,
            groups,
            used: self.size_of(&USED, None)?,
            width,
            renormalize: self.flag("norm_topk_prob")?.unwrap_or(defaults.renormalize),
            factor: factor as f32,
            shared,
            dense_layers: self.size("first_k_dense_replace", Some(0))?,
            ..defaults
        }))
    }

    pub(crate) fn require(&self, key: &str) -> Result<f64, ModelError> {
        self.number(key)?
            .ok_or_else(|| ModelError::Config(format!("config.json: RoPE scaling has no `{key}`")))
    }

    pub(super) fn floats(&self, key: &str) -> Result<Vec<f32>, ModelError> {
        let list = self.list(key)?.unwrap_or_default();
        let floats = list.iter().map(|value| value.as_f64().map(|value| value as f32));
        let floats: Option<Vec<_>> = floats.collect();
        floats.ok_or_else(|| ModelError::Config(format!("config.json: `{key}` is not a list of numbers")))
    }
}
