//! `paguro preset`.

use paguro_library::{Library, ModelName, ModelRecord};
use serde_json::{Value, json};

use super::{empty, failure, find};
use crate::{
    adapters::BaseCheck,
    cli::PresetArgs,
    failure::{Failure, Outcome},
    models::is_embedded,
    output::Output,
    presets::Preset,
    settings::{LibrarySettings, Terminal},
};

/// Changes or shows the preset of a model of the library.
///
/// # Errors
/// The model is unknown, a value is invalid, or an alias is taken.
pub fn preset(args: &PresetArgs, settings: &LibrarySettings, terminal: Terminal) -> Outcome<()> {
    let Some(library) = settings.open_existing()? else {
        return Err(empty(&args.name));
    };
    let mut record = find(&library, &args.name)?;
    if args.clear || args.changes() {
        // Without --clear, a preset that cannot be read is not replaced.
        let old = if args.clear { Preset::default() } else { Preset::of(&record).map_err(Failure::new)? };
        let mut new = changed(args, old)?;
        new.check()?;
        if args.base.is_some() {
            let base = BaseCheck::new(settings, args.base.as_deref());
            let path = library.path(&record).map_err(failure)?;
            new.base = base.find(&path, &record.details)?;
        }
        for alias in &args.aliases {
            check_alias(alias, &record, &library)?;
        }
        record = library.set_extra(&args.name, new.to_record()).map_err(failure)?;
    }
    let preset = Preset::of(&record).map_err(Failure::new)?;
    let mut out = Output::new();
    if args.json {
        return out.json(&json!({"name": record.name.to_string(), "preset": preset}));
    }
    let rows = preset.rows();
    if rows.is_empty() {
        terminal.status(&format!("{} has no preset", record.name.short()));
    }
    rows.iter().try_for_each(|(name, value)| out.line(format_args!("{name:<16}{value}")))
}

fn changed(args: &PresetArgs, old: Preset) -> Outcome<Preset> {
    let mut preset = old;
    preset.ctx = args.ctx.or(preset.ctx);
    preset.kv_dtype = args.kv_dtype.or(preset.kv_dtype);
    preset.system = args.system.clone().or(preset.system);
    if let Some(path) = &args.chat_template {
        preset.chat_template = Some(path.display().to_string());
        preset.read_template("".as_ref())?;
    }
    for option in &args.options {
        let (name, value) = option.split_once('=').ok_or_else(|| {
            let failure = Failure::usage(format!("`--set {option}` has no value"));
            failure.hint("an option and its value: --set temperature=0.2")
        })?;
        // A value that is not JSON is text.
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        preset.options.insert(name.to_owned(), value);
    }
    for alias in args.removed_aliases.iter().map(ModelName::short) {
        let before = preset.aliases.len();
        preset.aliases.retain(|other| !other.eq_ignore_ascii_case(&alias));
        if preset.aliases.len() == before {
            return Err(Failure::usage(format!("`{alias}` is no alias of this model"))
                .hint("`paguro preset NAME` lists its aliases"));
        }
    }
    for alias in args.aliases.iter().map(ModelName::short) {
        if !preset.aliases.contains(&alias) {
            preset.aliases.push(alias);
        }
    }
    Ok(preset)
}

/// Refuses an alias that hides a model or is hidden by one.
fn check_alias(alias: &ModelName, of: &ModelRecord, library: &Library) -> Outcome<()> {
    let alias = alias.short();
    if is_embedded(&alias) {
        return Err(Failure::usage(format!("`{alias}` is the model inside this binary")));
    }
    match library.find(&alias) {
        Ok(other) if other.name != of.name => {
            let failure = Failure::usage(format!("`{alias}` is the model {} already", other.name.short()));
            Err(failure.hint("choose another name"))
        }
        _ => Ok(()),
    }
}
