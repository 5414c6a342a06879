//! `paguro tokenize`: tokens of a text.

use std::io::{Read, stdin};

use paguro_model::tokenizer::SpecialTokens;
use serde_json::json;

use crate::{
    cli::TokenizeArgs,
    failure::{Failure, Outcome},
    load,
    models::Source,
    output::Output,
    settings::LibrarySettings,
};

/// Runs the command.
///
/// # Errors
/// The model has no tokenizer, or the text is not UTF-8.
pub fn tokenize(args: &TokenizeArgs, library: &LibrarySettings) -> Outcome<()> {
    let (model, words) = model_and_text(args);
    let source = Source::find(model, library).map_err(|failure| {
        let given = args.model.is_some();
        if given {
            failure
        } else {
            failure.hint("the first of several words is the model; put a text into quotes")
        }
    })?;
    let tokenizer = load::tokenizer(&source)?;
    let text = match words {
        [] => read_text()?,
        [word] if word == "-" => read_text()?,
        words => words.join(" "),
    };
    let special = if args.special { SpecialTokens::Parse } else { SpecialTokens::AsText };
    let ids =
        if args.around { tokenizer.encode_prompt(&text, special) } else { tokenizer.encode(&text, special) };

    let mut out = Output::new();
    if args.json {
        let tokens: Vec<_> = ids
            .iter()
            .map(|&id| {
                let bytes = tokenizer.token_bytes(id);
                json!({
                    "id": id,
                    "name": tokenizer.token_name(id),
                    // A token may be a part of a character, which only its bytes show.
                    "text": std::str::from_utf8(bytes).ok(),
                    "bytes": bytes,
                    "special": tokenizer.is_special(id),
                })
            })
            .collect();
        return out.json(&json!({"model": source.name(), "count": ids.len(), "tokens": tokens}));
    }
    if args.ids {
        let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
        return out.line(ids.join(" "));
    }
    for id in ids {
        out.line(format_args!("{id:>7}  {}", readable(tokenizer.token_bytes(id))))?;
    }
    Ok(())
}

/// Returns the model, if named, and the words of the text. One word is the text; the first of several words is the
/// model, unless `-m` names it.
fn model_and_text(args: &TokenizeArgs) -> (Option<&str>, &[String]) {
    match (&args.model, &args.words[..]) {
        (None, [model, text @ ..]) if !text.is_empty() => (Some(model), text),
        (model, words) => (model.as_deref(), words),
    }
}

/// Reads standard input.
///
/// # Errors
/// The input is not UTF-8.
pub fn read_text() -> Outcome<String> {
    let mut bytes = Vec::new();
    stdin().lock().read_to_end(&mut bytes)?;
    String::from_utf8(bytes).map(without_mark).map_err(|error| {
        Failure::new(format!(
            "standard input is not UTF-8 text (at byte {})",
            error.utf8_error().valid_up_to()
        ))
        .hint("convert it first: iconv -t UTF-8")
    })
}

/// Returns a text without the byte order mark that editors and shells of Windows write at its beginning.
pub fn without_mark(mut text: String) -> String {
    const MARK: char = '\u{feff}';
    if text.starts_with(MARK) {
        text.drain(..MARK.len_utf8());
    }
    text
}

/// Formats bytes in Rust's syntax: `" the"`, `"\n"`, `"\xF0\x9F"` for parts of a character.
fn readable(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for chunk in bytes.utf8_chunks() {
        text.extend(chunk.valid().chars().flat_map(char::escape_debug));
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02X}")));
    }
    text + "\""
}

#[cfg(test)]
mod tests {
    use super::readable;

    #[test]
    fn bytes_are_readable() {
        for (bytes, text) in [
            (&b" the"[..], "\" the\""),
            (b"\n\t\"", "\"\\n\\t\\\"\""),
            (b"\xF0\x9F", "\"\\xF0\\x9F\""),
            ("é 🐚".as_bytes(), "\"é 🐚\""),
        ] {
            assert_eq!(readable(bytes), text);
        }
    }
}
