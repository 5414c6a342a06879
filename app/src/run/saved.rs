//! Saved conversations: JSON with messages in the format of OpenAI's API.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    images::Attachment,
    prompt::{Conversation, Role},
};
use crate::failure::{Failure, Outcome};
use crate::tokenize::without_mark;

/// Maximum bytes of a file.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct Saved {
    #[serde(default)]
    model: String,
    messages: Vec<Message>,
}

#[derive(Serialize, Deserialize)]
struct Message {
    role: String,
    content: String,
    /// Files of its images.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    images: Vec<String>,
}

/// Writes a conversation, and returns the number of its messages. A file that is not a conversation is not overwritten.
///
/// # Errors
/// The file cannot be written, or has other content.
pub fn save(path: &Path, model: &str, conversation: &Conversation) -> Outcome<usize> {
    let shown = path.display();
    if path.exists() && load(path).is_err() {
        return Err(Failure::usage(format!(
            "`{shown}` exists and is not a conversation; choose another name"
        )));
    }
    let text = to_text(model, conversation);
    fs::write(path, text).map_err(|error| Failure::new(format!("cannot write `{shown}`: {error}")))?;
    Ok(conversation.len() + usize::from(conversation.system().is_some()))
}

/// Returns a conversation as the text of a file.
pub fn to_text(model: &str, conversation: &Conversation) -> String {
    let message = |role: &str, content: &str, images: &[Attachment]| Message {
        role: role.to_owned(),
        content: content.to_owned(),
        images: images.iter().map(|image| image.path.clone()).collect(),
    };
    let system = conversation.system().map(|text| message("system", text, &[]));
    let turns = conversation.turns().map(|turn| message(turn.role.name(), &turn.text, &turn.images));
    let messages: Vec<_> = system.into_iter().chain(turns).collect();
    let saved = Saved { model: model.to_owned(), messages };
    serde_json::to_string_pretty(&saved).expect("texts are JSON") + "\n"
}

/// Reads a conversation.
///
/// # Errors
/// The file cannot be read, or has other content.
pub fn load(path: &Path) -> Outcome<Conversation> {
    load_with_model(path).map(|(_, conversation)| conversation)
}

/// Reads a conversation and the name of its model, which may be empty.
///
/// # Errors
/// See [`load`].
pub fn load_with_model(path: &Path) -> Outcome<(String, Conversation)> {
    let shown = path.display();
    let unreadable = |error: std::io::Error| Failure::new(format!("cannot read `{shown}`: {error}"));
    let bytes = fs::metadata(path).map_err(unreadable)?.len();
    if bytes > MAX_BYTES {
        return Err(Failure::usage(format!(
            "`{shown}` has {bytes} bytes; a conversation has {MAX_BYTES} at most"
        )));
    }
    let text = without_mark(fs::read_to_string(path).map_err(unreadable)?);
    let strange = |problem: String| {
        Failure::usage(format!("`{shown}` is not a conversation: {problem}")).hint(
            "/save writes such files: {\"messages\": [{\"role\": \"user\", \"content\": \"...\"}, ...]}",
        )
    };
    let saved: Saved = serde_json::from_str(&text).map_err(|error| strange(error.to_string()))?;
    let mut conversation = Conversation::default();
    for (index, Message { role, content, images }) in saved.messages.into_iter().enumerate() {
        match (role.as_str(), index) {
            ("system", 0) => conversation = Conversation::new(Some(content)),
            ("user", _) => {
                for image in images {
                    conversation.attach(Attachment::read(&image)?);
                }
                conversation.ask(content);
            }
            ("assistant", _) => conversation.push(Role::Assistant, content),
            _ => return Err(strange(format!("message {index} has the role `{role}`"))),
        }
    }
    Ok((saved.model, conversation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let mut conversation = Conversation::new(Some("Be brief.".into()));
        conversation.ask("Hi\n\"there\"".into());
        conversation.answer("Hello".into());
        assert_eq!(save(&path, "tales", &conversation).unwrap(), 3);
        assert_eq!(load(&path).unwrap(), conversation);
        // A second save replaces the conversation, but not another file.
        save(&path, "tales", &conversation).unwrap();
        let other = folder.path().join("notes.txt");
        for text in ["notes", "{}", "{\"messages\": [{\"role\": \"tool\", \"content\": \"x\"}]}"] {
            fs::write(&other, text).unwrap();
            assert!(load(&other).is_err(), "{text}");
            assert!(save(&other, "tales", &conversation).is_err());
        }
        assert!(load(&folder.path().join("none")).is_err());
    }
}
