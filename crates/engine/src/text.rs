//! The consumer's side of an answer: tokens become text, and stop strings end it. Off the engine thread.

use std::sync::Arc;

use paguro_model::tokenizer::DecodeStream;

/// Text of one branch.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Decoder; `None` without a tokenizer.
    stream: Option<DecodeStream>,
    stops: StopMatcher,
}

impl Writer {
    /// Goes on from where `stream` is.
    pub fn new(stream: Option<DecodeStream>, stops: StopMatcher) -> Self {
        Self { stream, stops }
    }

    /// Returns the text that is certain after this token, and the stop string that it completes, if it may stop.
    pub fn push(&mut self, token: u32, may_stop: bool) -> (String, Option<usize>) {
        match &mut self.stream {
            Some(stream) if may_stop => self.stops.push(&stream.push(token)),
            Some(stream) => (stream.push(token), None),
            None => (String::new(), None),
        }
    }

    /// Returns the text that was held back: the beginning of a stop string. A character that stays incomplete is
    /// dropped: a limit has cut it, and its bytes are no text.
    pub fn finish(mut self) -> String {
        self.stops.take_held()
    }
}

/// Matcher of stop strings in a streamed text. The result does not depend on the boundaries of pieces: the first
/// complete stop string is found; of several that end at the same character, the longest.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    include: bool,
    /// The end of the text so far, as long as it may be the beginning of a stop string.
    held: String,
}

impl StopMatcher {
    /// Creates a matcher. `stops` must not contain an empty text. With `include`, the stop string is part of the text.
    pub fn new(stops: Arc<[String]>, include: bool) -> Self {
        debug_assert!(!stops.iter().any(String::is_empty));
        Self { stops, include, held: String::new() }
    }

    /// Adds text. Returns the certain text, and the stop string that was found, after which no text follows.
    pub fn push(&mut self, text: &str) -> (String, Option<usize>) {
        self.held += text;
        let ends = self.stops.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((end, start, index)) = ends.min() {
            self.held.truncate(if self.include { end } else { start });
            return (std::mem::take(&mut self.held), Some(index));
        }
        let certain = self.held.len() - self.longest_beginning();
        let rest = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Returns the text that was held back: the beginning of an incomplete stop string.
    pub fn take_held(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Returns the number of bytes at the end of the held text that are the beginning of a stop string.
    fn longest_beginning(&self) -> usize {
        let beginnings =
            self.stops.iter().flat_map(|stop| stop.char_indices().map(move |(at, _)| &stop[..at]));
        beginnings.filter(|beginning| self.held.ends_with(beginning)).map(str::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect(), include)
    }

    /// Returns all text of the pieces, each piece's own, and which stop string ended it.
    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut writer = Writer::new(None, matcher(stops, include));
        let mut texts = Vec::new();
        for piece in pieces {
            let (text, stop) = writer.stops.push(piece);
            texts.push(text);
            if stop.is_some() {
                return (texts, stop);
            }
        }
        texts.push(writer.finish());
        (texts, None)
    }

    #[test]
    fn what_may_become_a_stop_string_is_held_back() {
        /// Stop strings, pieces, results (and the rest at the end), index of the stop string found.
        type Case =
            (&'static [&'static str], &'static [&'static str], &'static [&'static str], Option<usize>);
        let cases: &[Case] = &[
            (&["END"], &["one ", "E", "N", "D more"], &["one ", "", "", ""], Some(0)),
            (&["END"], &["E", "NE", "ND"], &["", "EN", ""], Some(0)),
            (&["END"], &["the E", "N"], &["the ", "", "EN"], None),
            (&["aab"], &["aa", "ab!"], &["", "a"], Some(0)),
            (&["\n\nUser:", "\n\nBot:"], &["hi\n", "\nBo", "t: x"], &["hi", "", ""], Some(1)),
            (&["é!", "日本"], &["caf", "é", "? 日", "本"], &["caf", "", "é? ", ""], Some(1)),
            (&[], &["a", "b"], &["a", "b", ""], None),
        ];
        for (stops, pieces, texts, stop) in cases {
            assert_eq!(
                run(stops, false, pieces),
                (texts.iter().map(|t| t.to_string()).collect(), *stop),
                "{stops:?}"
            );
        }
    }

    #[test]
    fn the_first_complete_stop_string_counts_and_of_equal_ends_the_longest() {
        let text = |stops, include| {
            let (texts, stop) = run(stops, include, &["x a b c d"]);
            (texts.concat(), stop)
        };
        assert_eq!(text(&["a b c d", "b"], false), ("x a ".into(), Some(1)));
        assert_eq!(text(&["b", "a b"], false), ("x ".into(), Some(1)));
        assert_eq!(text(&["b", "a b"], true), ("x a b".into(), Some(1)));
    }

    /// Straight from the definition: character by character.
    fn by_definition(stops: &[String], text: &str) -> (String, Option<usize>) {
        for (at, char) in text.char_indices() {
            let so_far = &text[..at + char.len_utf8()];
            let ended = stops.iter().enumerate().filter(|(_, stop)| so_far.ends_with(stop.as_str()));
            if let Some((index, stop)) = ended.max_by_key(|(index, stop)| (stop.len(), usize::MAX - index)) {
                return (so_far[..so_far.len() - stop.len()].to_string(), Some(index));
            }
        }
        (text.to_string(), None)
    }

    proptest! {
        #[test]
        fn the_cuts_between_pieces_change_nothing(
            text in "[abé日]{0,24}",
            stops in prop::collection::vec("[abé日]{1,4}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut borders: Vec<_> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
            borders.extend([0, text.len()]);
            borders.sort();
            let pieces: Vec<_> = borders.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let names: Vec<_> = stops.iter().map(String::as_str).collect();
            let (texts, stop) = run(&names, false, &pieces);
            prop_assert_eq!((texts.concat(), stop), by_definition(&stops, &text));
        }
    }
}
