//! Places of pictures in a chat.
//!
//! Messages contain pictures as parts of the type `image`. A template that supports such parts writes a marker for each
//! picture. For other templates, a part becomes one character in the text, which is found again in the rendered prompt. The
//! caller replaces each place by the tokens of the picture.

use std::ops::Range;

use paguro_vision::{Family, Piece, Plan};
use serde_json::{Map, Value, json};

use super::{ChatInput, ChatPrompt};
use crate::tokenizer::Tokenizer;

/// The place of a picture in a text. This noncharacter does not occur in interchanged text, and is removed from other
/// texts of a chat with pictures.
pub const PICTURE: char = '\u{fdd0}';

impl ChatInput {
    /// Returns the chat without [`PICTURE`] in its texts.
    pub fn without_picture_marks(&self) -> Self {
        let extra = self.extra.iter().map(|(key, value)| (key.clone(), map_texts(value, &without_mark)));
        Self {
            messages: map_texts(&self.messages, &without_mark),
            tools: self.tools.as_ref().map(|tools| map_texts(tools, &without_mark)),
            extra: extra.collect(),
            ..*self
        }
    }

    /// Returns the chat with texts in place of lists of parts, in which [`PICTURE`] stands for a picture.
    pub fn with_pictures_in_text(&self) -> Self {
        let mut input = self.clone();
        for message in input.messages.as_array_mut().into_iter().flatten() {
            let Some(parts) = message.get("content").and_then(Value::as_array) else { continue };
            let text: String = parts
                .iter()
                .map(|part| match part["type"].as_str() {
                    Some("image") => PICTURE.to_string(),
                    _ => part["text"].as_str().unwrap_or_default().to_owned(),
                })
                .collect();
            message["content"] = text.into();
        }
        input
    }
}

/// Returns the content of a message for templates: its text, in which [`PICTURE`] stands for a picture, as parts.
pub fn content_parts(text: &str) -> Value {
    let mut parts = Vec::new();
    for (at, text) in text.split(PICTURE).enumerate() {
        if at > 0 {
            parts.push(json!({"type": "image"}));
        }
        if !text.is_empty() {
            parts.push(json!({"type": "text", "text": text}));
        }
    }
    parts.into()
}

impl ChatPrompt {
    /// Returns the places of pictures: markers that the template wrote, and [`PICTURE`].
    pub fn picture_places(&self, marker: &str) -> Vec<Range<usize>> {
        let mut places: Vec<_> =
            self.text.match_indices(PICTURE).map(|(start, mark)| start..start + mark.len()).collect();
        if !marker.is_empty() {
            let written = self.text.match_indices(marker).map(|(start, name)| start..start + name.len());
            places.extend(written.filter(|place| !self.is_literal(place.clone())));
        }
        places.sort_unstable_by_key(|place| place.start);
        places
    }

    /// Returns the prompt with the text of each picture in its place. Names of control tokens in these texts have their
    /// meaning.
    pub fn with_pictures(&self, places: &[Range<usize>], texts: &[String]) -> Self {
        let mut prompt = Self::default();
        let mut literal = self.literal.iter().peekable();
        let mut from = 0;
        for (place, text) in places.iter().zip(texts) {
            let shift = prompt.text.len();
            while let Some(&offset) = literal.next_if(|&&offset| offset < place.end) {
                prompt.literal.extend((offset < place.start).then(|| offset - from + shift));
            }
            prompt.text.push_str(&self.text[from..place.start]);
            prompt.text.push_str(text);
            from = place.end;
        }
        let shift = prompt.text.len();
        prompt.literal.extend(literal.map(|offset| offset - from + shift));
        prompt.text.push_str(&self.text[from..]);
        prompt
    }
}

/// The pictures of one prompt with their texts.
#[derive(Clone, Debug)]
pub struct PictureLayout {
    /// Text that templates of the family write for a picture.
    marker: String,
    /// Text for a picture where the template has no place for one, with the marker in it.
    placeholder: String,
    image_token: u32,
    /// Text and number of image tokens of each picture.
    pictures: Vec<(String, usize)>,
}

/// Number of image tokens in a prompt that differs from that of its pictures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prompt has {found} image tokens, and its pictures need {wanted}")]
pub struct ImageTokenCount {
    /// Image tokens of the prompt.
    pub found: usize,
    /// Image tokens of the pictures.
    pub wanted: usize,
}

impl PictureLayout {
    /// Creates the texts of pictures with these plans, in the order of the prompt.
    pub fn new<'p>(
        family: Family,
        marker: &str,
        image_token: u32,
        plans: impl Iterator<Item = &'p Plan>,
        tokenizer: &Tokenizer,
    ) -> Self {
        let name = tokenizer.token_name(image_token);
        let text = |plan: &Plan| {
            let mut text = String::new();
            for piece in family.expansion(plan) {
                match piece {
                    Piece::Text(piece) => text.push_str(&piece),
                    Piece::Image(count) => text.extend(std::iter::repeat_n(&*name, count)),
                }
            }
            (text, plan.tokens())
        };
        Self {
            marker: marker.to_owned(),
            placeholder: family.placeholder(marker),
            image_token,
            pictures: plans.map(text).collect(),
        }
    }

    /// Renders a chat in the first form in which the template has a place for each picture. Returns the form and its prompt;
    /// or the number of places, if no form has all.
    ///
    /// # Errors
    /// Those of `render`.
    pub fn render<E>(
        &self,
        input: &ChatInput,
        render: impl Fn(&ChatInput) -> Result<ChatPrompt, E>,
    ) -> Result<Result<(ChatInput, ChatPrompt), usize>, E> {
        let input = input.without_picture_marks();
        if let Ok(prompt) = render(&input)
            && prompt.picture_places(&self.marker).len() == self.pictures.len()
        {
            return Ok(Ok((input, prompt)));
        }
        let input = input.with_pictures_in_text();
        let prompt = render(&input)?;
        let places = prompt.picture_places(&self.marker).len();
        Ok(if places == self.pictures.len() { Ok((input, prompt)) } else { Err(places) })
    }

    /// Returns the prompt with the text of each picture in its place.
    pub fn expand(&self, prompt: &ChatPrompt) -> ChatPrompt {
        let places = prompt.picture_places(&self.marker);
        let texts = places.iter().zip(&self.pictures).map(|(place, (text, _))| {
            match prompt.text[place.clone()].starts_with(PICTURE) {
                true => self.placeholder.replacen(&self.marker, text, 1),
                false => text.clone(),
            }
        });
        let texts: Vec<_> = texts.collect();
        prompt.with_pictures(&places, &texts)
    }

    /// Returns a text without a template with the text of each picture at its [`PICTURE`].
    pub fn expand_text(&self, text: &str) -> String {
        let mut pieces = text.split(PICTURE);
        let mut expanded = pieces.next().unwrap_or_default().to_owned();
        for (piece, (picture, _)) in pieces.zip(&self.pictures) {
            expanded.push_str(&self.placeholder.replacen(&self.marker, picture, 1));
            expanded.push_str(piece);
        }
        expanded
    }

    /// Finds the image tokens of each picture: ranges of a prompt's tokens, ascending.
    ///
    /// # Errors
    /// The prompt has more or fewer image tokens.
    pub fn find(&self, tokens: &[u32]) -> Result<Vec<Vec<Range<usize>>>, ImageTokenCount> {
        let is_image = |&(_, &token): &(usize, &u32)| token == self.image_token;
        let mut places = tokens.iter().enumerate().filter(is_image).map(|(at, _)| at);
        let mut ranges = Vec::with_capacity(self.pictures.len());
        for &(_, count) in &self.pictures {
            let mut rows: Vec<Range<usize>> = Vec::new();
            for at in places.by_ref().take(count) {
                match rows.last_mut() {
                    Some(last) if last.end == at => last.end += 1,
                    _ => rows.push(at..at + 1),
                }
            }
            ranges.push(rows);
        }
        let found: usize =
            ranges.iter().flatten().map(ExactSizeIterator::len).sum::<usize>() + places.count();
        let wanted = self.pictures.iter().map(|&(_, count)| count).sum();
        if found == wanted { Ok(ranges) } else { Err(ImageTokenCount { found, wanted }) }
    }
}

fn without_mark(text: &str) -> String {
    text.replace(PICTURE, "")
}

/// Applies a function to all texts and keys of a JSON value.
fn map_texts(json: &Value, change: &dyn Fn(&str) -> String) -> Value {
    match json {
        Value::String(text) => change(text).into(),
        Value::Array(items) => items.iter().map(|item| map_texts(item, change)).collect(),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| (change(key), map_texts(value, change)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(marked: &str) -> ChatPrompt {
        ChatPrompt::from_marked(&marked.replace('^', "\u{10ffff}").replace('#', "\u{fdd0}"))
    }

    #[test]
    fn pictures_replace_only_markers_of_the_template() {
        let prompt = prompt("<s>^<img> a<img>b#c ^<img>^<s>");
        let places = prompt.picture_places("<img>");
        assert_eq!(
            places.iter().map(|place| &prompt.text[place.clone()]).collect::<Vec<_>>(),
            ["<img>", "\u{fdd0}"]
        );
        let full = prompt.with_pictures(&places, &["<i><i>".into(), "<i>".into()]);
        assert_eq!(full.text, "<s><img> a<i><i>b<i>c <img><s>");
        let literal = |text: &str, nth: usize| {
            let (start, name) = full.text.match_indices(text).nth(nth).unwrap();
            full.is_literal(start..start + name.len())
        };
        assert!(!literal("<s>", 0) && literal("<s>", 1) && literal("<img>", 0) && literal("<img>", 1));
        assert!((0..3).all(|nth| !literal("<i>", nth)));
    }

    #[test]
    fn texts_become_parts_and_parts_texts() {
        let parts = content_parts("\u{fdd0}a\u{fdd0}\u{fdd0}b");
        let image = || json!({"type": "image"});
        let text = |text: &str| json!({"type": "text", "text": text});
        assert_eq!(parts, json!([image(), text("a"), image(), image(), text("b")]));
        let input = ChatInput::new(
            json!([{"role": "user", "content": parts}, {"role": "user", "content": "x\u{fdd0}"}]),
        );
        let clean = input.without_picture_marks();
        assert_eq!(clean.messages[1]["content"], "x");
        assert_eq!(clean.with_pictures_in_text().messages[0]["content"], "\u{fdd0}a\u{fdd0}\u{fdd0}b");
    }
}
