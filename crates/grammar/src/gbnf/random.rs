//! Random grammars over three letters are compared with a naive recognizer, including recursive, ambiguous and empty
//! ones.

use std::fmt;

use super::tests::Follower;

/// Grammars that are tried.
const GRAMMARS: u64 = 80;

/// Longest text, in letters.
const LONGEST: u32 = 4;

/// A part of a rule.
enum Part {
    Text(String),
    Class(&'static str, &'static str),
    Rule(usize),
    Sequence(Vec<Part>),
    Choice(Vec<Part>),
    Repeat(Box<Part>, u32, Option<u32>),
}

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn part(&mut self, rules: u64, depth: u32) -> Part {
        let parts = |random: &mut Self, least, end| {
            let count = least + random.below(end);
            (0..count).map(|_| random.part(rules, depth - 1)).collect()
        };
        match self.below(if depth == 0 { 4 } else { 10 }) {
            0 => {
                let length = 1 + self.below(3);
                Part::Text((0..length).map(|_| char::from(b'a' + self.below(3) as u8)).collect())
            }
            1 => {
                let classes = [("[a-b]", "ab"), ("[^a]", "bc"), (".", "abc"), ("[c]", "c")];
                let (class, letters) = classes[self.below(4) as usize];
                Part::Class(class, letters)
            }
            2 | 3 => Part::Rule(self.below(rules) as usize),
            4 | 5 => Part::Sequence(parts(self, 0, 4)),
            6 | 7 => Part::Choice(parts(self, 1, 3)),
            _ => {
                let counts = [(0, None), (1, None), (0, Some(1)), (2, Some(2)), (1, Some(3)), (2, None)];
                let (min, max) = counts[self.below(6) as usize];
                Part::Repeat(Box::new(self.part(rules, depth - 1)), min, max)
            }
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join =
            |parts: &[Self], between| parts.iter().map(Self::to_string).collect::<Vec<_>>().join(between);
        match self {
            Self::Text(text) => write!(f, "\"{text}\""),
            Self::Class(class, _) => f.write_str(class),
            Self::Rule(0) => f.write_str("root"),
            Self::Rule(rule) => write!(f, "r{rule}"),
            Self::Sequence(parts) => write!(f, "({})", join(parts, " ")),
            Self::Choice(parts) => write!(f, "({})", join(parts, " | ")),
            Self::Repeat(part, 0, None) => write!(f, "{part}*"),
            Self::Repeat(part, 1, None) => write!(f, "{part}+"),
            Self::Repeat(part, 0, Some(1)) => write!(f, "{part}?"),
            Self::Repeat(part, min, None) => write!(f, "{part}{{{min},}}"),
            Self::Repeat(part, min, Some(max)) => write!(f, "{part}{{{min},{max}}}"),
        }
    }
}

/// A text with the places where each rule may end that begins at each place, as bits.
struct Recognizer<'t> {
    text: &'t str,
    ends: Vec<Vec<u32>>,
}

impl Recognizer<'_> {
    fn derives(rules: &[Part], text: &str) -> bool {
        let mut recognizer = Recognizer { text, ends: vec![vec![0; text.len() + 1]; rules.len()] };
        loop {
            let mut grew = false;
            for (rule, part) in rules.iter().enumerate() {
                for at in 0..=text.len() {
                    let ends = recognizer.after(part, 1 << at) | recognizer.ends[rule][at];
                    grew |= ends != recognizer.ends[rule][at];
                    recognizer.ends[rule][at] = ends;
                }
            }
            if !grew {
                return recognizer.ends[0][0] >> text.len() & 1 == 1;
            }
        }
    }

    /// Returns the places where a part may end that begins at one of `places`.
    fn after(&self, part: &Part, places: u32) -> u32 {
        let from = |ends: &dyn Fn(usize) -> u32| {
            let places = (0..=self.text.len()).filter(|place| places >> place & 1 == 1);
            places.fold(0, |all, place| all | ends(place))
        };
        match part {
            Part::Text(text) => {
                from(&|at| u32::from(self.text[at..].starts_with(&**text)) << (at + text.len()))
            }
            Part::Class(_, letters) => from(&|at| {
                let letter = self.text[at..].chars().next();
                u32::from(letter.is_some_and(|letter| letters.contains(letter))) << (at + 1)
            }),
            Part::Rule(rule) => from(&|at| self.ends[*rule][at]),
            Part::Sequence(parts) => parts.iter().fold(places, |places, part| self.after(part, places)),
            Part::Choice(parts) => parts.iter().fold(0, |all, part| all | self.after(part, places)),
            Part::Repeat(part, min, max) => {
                let mut last = (0..*min).fold(places, |places, _| self.after(part, places));
                let mut all = last;
                for _ in 0..max.map_or(self.text.len() as u32 + 1, |max| max - min) {
                    last = self.after(part, last);
                    all |= last;
                }
                all
            }
        }
    }
}

#[test]
fn random_grammars_derive_what_a_naive_recognizer_says() {
    let mut texts = vec![String::new()];
    let mut longest = texts.clone();
    for _ in 0..LONGEST {
        longest =
            longest.iter().flat_map(|text| ["a", "b", "c"].map(|letter| format!("{text}{letter}"))).collect();
        texts.extend(longest.iter().cloned());
    }
    let follower = Follower::default();
    for seed in 0..GRAMMARS {
        let mut random = Random(seed * 7919 + 12345);
        // The first numbers of small seeds are alike.
        for _ in 0..5 {
            random.below(2);
        }
        let count = 1 + random.below(4);
        let rules: Vec<_> = (0..count).map(|_| random.part(count, 3)).collect();
        let lines = rules.iter().enumerate().map(|(rule, part)| format!("{} ::= {part}\n", Part::Rule(rule)));
        let grammar: String = lines.collect();
        let start = follower.start(&grammar).unwrap_or_else(|problem| panic!("{grammar}{problem}"));
        for text in texts.iter().filter(|_| random.below(2) == 0) {
            let expected = Recognizer::derives(&rules, text);
            assert_eq!(follower.follow(&start, text), Ok(expected), "{text:?} of\n{grammar}");
        }
    }
}
