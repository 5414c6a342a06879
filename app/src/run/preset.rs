//! Presets and defaults of models of the library: values of `run` that no flag sets.

use serde_json::{Map, Value};

use crate::{
    cli::{Limit, RunArgs, SamplingArgs},
    failure::{Failure, Outcome},
    library,
    models::Source,
    presets::Preset,
    settings::LibrarySettings,
};

/// Tokens that penalties of a preset consider, as in servers.
const PENALTY_WINDOW: u32 = 64;

/// Values that are recorded with a model.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Context.
    ctx: Option<usize>,
    /// System message of chats that have none.
    pub system: Option<String>,
    /// Options with the names of Ollama's API.
    options: Map<String, Value>,
    /// Names of values that only servers use.
    pub unused: Vec<String>,
}

impl Recorded {
    /// Returns the values of a model; none for models outside of the library.
    ///
    /// # Errors
    /// The library or the preset cannot be read.
    pub fn of(source: &Source, settings: &LibrarySettings) -> Outcome<Self> {
        let Source::Library { name, .. } = source else { return Ok(Self::default()) };
        let Some(library) = settings.open_existing()? else { return Ok(Self::default()) };
        let record = library.find(name).map_err(library::failure)?;
        let preset = Preset::of(&record).map_err(Failure::new)?;
        let values = preset.defaults(record.defaults.clone());
        let mut unused: Vec<_> =
            ["messages", "template"].into_iter().filter(|name| values.contains_key(*name)).collect();
        unused.extend(preset.chat_template.is_some().then_some("chat-template"));
        unused.extend(preset.kv_dtype.is_some().then_some("kv-dtype"));
        Ok(Self {
            ctx: preset.ctx,
            system: values.get("system").and_then(Value::as_str).map(str::to_owned),
            options: values.get("options").and_then(Value::as_object).cloned().unwrap_or_default(),
            unused: unused.into_iter().map(str::to_owned).collect(),
        })
    }

    /// Sets the values that no flag sets, except for the system message. Options that only servers have are added to
    /// `unused`.
    pub fn complete(&mut self, args: &mut RunArgs) {
        args.ctx = args.ctx.or(self.ctx);
        let flags = &mut args.sampling;
        let given = [flags.repeat_penalty, flags.frequency_penalty, flags.presence_penalty];
        for (name, value) in &self.options {
            if name == "num_ctx" {
                args.ctx = args.ctx.or(value.as_u64().and_then(|tokens| usize::try_from(tokens).ok()));
            } else if !set(flags, name, value) {
                self.unused.push(name.clone());
            }
        }
        let now = [flags.repeat_penalty, flags.frequency_penalty, flags.presence_penalty];
        if given != now && flags.penalty_window.is_none() {
            flags.penalty_window = Some(Limit(Some(PENALTY_WINDOW)));
        }
    }
}

/// Sets an option unless its flag is given. Returns false for options without a flag, and for values of another type.
fn set(flags: &mut SamplingArgs, name: &str, value: &Value) -> bool {
    let number = || value.as_f64().map(|number| number as f32);
    // Negative numbers stand for no limit.
    let limit = || value.as_i64().map(|number| u64::try_from(number).ok());
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let decimal = match name {
        "temperature" => Some(&mut flags.temperature),
        "top_p" => Some(&mut flags.top_p),
        "min_p" => Some(&mut flags.min_p),
        "repeat_penalty" => Some(&mut flags.repeat_penalty),
        "frequency_penalty" => Some(&mut flags.frequency_penalty),
        "presence_penalty" => Some(&mut flags.presence_penalty),
        _ => None,
    };
    if let Some(flag) = decimal {
        *flag = flag.or_else(number);
        return value.is_number();
    }
    match name {
        "top_k" => flags.top_k = flags.top_k.or_else(|| Some(narrow(limit()?.unwrap_or(0)))),
        "seed" => flags.seed = flags.seed.or_else(|| Some(Limit(limit()?))),
        "repeat_last_n" => {
            flags.penalty_window = flags.penalty_window.or_else(|| Some(Limit(limit()?.map(narrow))));
        }
        "num_predict" => {
            let tokens = || Some(Limit(limit()?.and_then(|tokens| usize::try_from(tokens).ok())));
            flags.max_tokens = flags.max_tokens.or_else(tokens);
        }
        "stop" => {
            let texts = match value {
                Value::Array(texts) => texts.iter().filter_map(Value::as_str).collect(),
                Value::String(text) => vec![text.as_str()],
                _ => return false,
            };
            if flags.stop.is_empty() {
                flags.stop = texts.into_iter().filter(|text| !text.is_empty()).map(str::to_owned).collect();
            }
            return true;
        }
        _ => return false,
    }
    value.is_i64() || value.is_u64()
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::cli::{Cli, Command};

    fn args(words: &[&str]) -> RunArgs {
        match Cli::parse_from([&["paguro", "run"], words].concat()).command {
            Command::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flags_are_stronger_than_the_preset() {
        let options = json!({
            "temperature": 0.25, "top_k": -1, "num_predict": 7, "stop": ["</s>", ""], "seed": -1, "num_ctx": 512,
            "repeat_penalty": 1.5, "mirostat_tau": 5, "top_p": "much"
        });
        let recorded =
            || Recorded { ctx: None, options: options.as_object().unwrap().clone(), ..Recorded::default() };
        let (mut own, mut values) = (args(&["hi there"]), recorded());
        values.complete(&mut own);
        let sampling = &own.sampling;
        assert_eq!((own.ctx, sampling.temperature, sampling.top_k), (Some(512), Some(0.25), Some(0)));
        assert_eq!(
            (sampling.max_tokens(), sampling.seed(), &sampling.stop[..]),
            (Some(7), None, &["</s>".to_owned()][..])
        );
        assert_eq!((sampling.repeat_penalty, sampling.penalty_window), (Some(1.5), Some(Limit(Some(64)))));
        assert_eq!(
            (sampling.top_p, &values.unused[..]),
            (None, &["mirostat_tau".to_owned(), "top_p".to_owned()][..])
        );
        let mut own = args(&[
            "-c",
            "99",
            "--temperature",
            "1",
            "-n",
            "3",
            "--stop",
            "x",
            "--repeat-penalty",
            "2",
            "hi",
        ]);
        recorded().complete(&mut own);
        let sampling = &own.sampling;
        assert_eq!((own.ctx, sampling.temperature, sampling.max_tokens()), (Some(99), Some(1.0), Some(3)));
        assert_eq!(
            (&sampling.stop[..], sampling.repeat_penalty, sampling.penalty_window),
            (&["x".to_owned()][..], Some(2.0), None)
        );
    }
}
