//! Parsing of lines in the chat.

/// One entry of the chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A message for the model.
    Message(String),
    /// `/clear`: forget the conversation.
    Clear,
    /// `/regenerate`: answer the last message again.
    Regenerate,
    /// `/undo`: take back the last message and its answer.
    Undo,
    /// `/save FILE`
    Save(String),
    /// `/load FILE`
    Load(String),
    /// `/set think`, `/set think off`
    Think(bool),
    /// `/image FILE`
    Image(String),
    /// `/model NAME`, or no name to show the model.
    Model(Option<String>),
    /// `/system TEXT`, or no text to remove it.
    System(Option<String>),
    /// `/set verbose`: show speeds, or not.
    Verbose(bool),
    /// `/set NAME VALUE`: a sampling value.
    Set {
        /// Name of the flag without dashes, or a prefix of it.
        name: String,
        /// Value as on the command line; `None` shows the current one.
        value: Option<String>,
    },
    /// `/set`: show all values.
    Values,
    /// `/show`
    Show,
    /// `/help`
    Help,
    /// `/exit`
    Exit,
    /// An invalid command, with a hint.
    Wrong(String),
    /// An empty line.
    Empty,
}

/// A command, for help and completion.
#[derive(Debug)]
pub struct Command {
    /// Its names without the slash, the main name first.
    names: &'static [&'static str],
    /// Its arguments in the help.
    arguments: &'static str,
    /// Its description.
    help: &'static str,
}

/// All commands.
const COMMANDS: [Command; 12] = [
    Command { names: &["clear", "reset", "new"], arguments: "", help: "forget the conversation" },
    Command { names: &["regenerate", "retry"], arguments: "", help: "answer the last message again" },
    Command { names: &["undo"], arguments: "", help: "remove the last message and its answer" },
    Command { names: &["save"], arguments: "FILE", help: "write the conversation into a JSON file" },
    Command { names: &["load"], arguments: "FILE", help: "load a conversation from such a file" },
    Command { names: &["image"], arguments: "FILE", help: "add an image to the next message" },
    Command {
        names: &["model"],
        arguments: "[NAME]",
        help: "switch to another model; without NAME, show the model",
    },
    Command {
        names: &["system"],
        arguments: "[TEXT]",
        help: "set the system message (without TEXT, remove it) and start over; also /set system TEXT",
    },
    Command {
        names: &["set"],
        arguments: "[NAME [VALUE]]",
        help: "change a sampling value, named as its flag: /set temperature 0.5; without VALUE, show it; /set verbose \
               shows speeds after each answer, /set think lets the model think first; with `off`, they do not",
    },
    Command {
        names: &["show", "info"],
        arguments: "",
        help: "show the model, the values and how full the context is",
    },
    Command { names: &["help", "?"], arguments: "", help: "this text" },
    Command { names: &["exit", "quit", "bye"], arguments: "", help: "leave, as Ctrl-D does" },
];

/// Keys and other input, for the help.
const KEYS: [(&str, &str); 5] = [
    ("\"\"\"", "begins and ends a text of several lines, or one that begins with a slash"),
    ("Alt-Enter", "starts a new line; so does a \\ at the end of a line"),
    ("Ctrl-C", "stops the answer, or clears the line"),
    ("Tab", "completes commands, names and files"),
    ("Up, Ctrl-R", "go back to, and search, what was typed before"),
];

/// Returns the rows of `/help`: input and effect.
pub fn help() -> Vec<(String, String)> {
    let command = |command: &Command| {
        let names: Vec<_> = command.names.iter().map(|name| format!("/{name}")).collect();
        (format!("{} {}", names.join(", "), command.arguments).trim_end().to_owned(), command.help.to_owned())
    };
    let keys = KEYS.iter().map(|(key, help)| ((*key).to_owned(), (*help).to_owned()));
    COMMANDS.iter().map(command).chain(keys).collect()
}

/// Returns the names of all commands with slashes, for completion. A name that takes arguments ends with a blank.
pub fn names() -> impl Iterator<Item = String> {
    let of = |command: &'static Command| {
        let blank = if command.arguments.is_empty() { "" } else { " " };
        command.names.iter().map(move |name| format!("/{name}{blank}"))
    };
    COMMANDS.iter().flat_map(of)
}

/// Finds the one of `names` that equals `given` or is the only one with this prefix.
///
/// # Errors
/// All names with the prefix: none, or more than one.
pub fn prefix<'a>(
    given: &str,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<&'a str, Vec<&'a str>> {
    if let Some(name) = names.clone().find(|name| *name == given) {
        return Ok(name);
    }
    let found: Vec<_> = names.filter(|name| !given.is_empty() && name.starts_with(given)).collect();
    match found[..] {
        [one] => Ok(one),
        _ => Err(found),
    }
}

/// Returns a file's name without quotation marks, which terminals add to names that are dropped into them.
fn unquoted(file: &str) -> &str {
    let inner = |mark: char| file.strip_prefix(mark)?.strip_suffix(mark);
    inner('\'').or_else(|| inner('"')).unwrap_or(file)
}

/// Returns the main name of the command `given`.
fn command(given: &str) -> Result<&'static str, String> {
    let all = COMMANDS.iter().flat_map(|command| command.names).copied();
    let first = |name: &str| {
        let command = COMMANDS.iter().find(|command| command.names.contains(&name));
        command.map_or("", |command| command.names[0])
    };
    match prefix(&given.to_lowercase(), all) {
        Ok(name) => Ok(first(name)),
        Err(several) => {
            let mut commands: Vec<_> = several.iter().map(|name| first(name)).collect();
            commands.dedup();
            match commands[..] {
                [one] => Ok(one),
                [] => Err(format!(
                    "`/{given}` is not a command; /help lists them. A message that begins with a slash goes between \"\"\" and \"\"\""
                )),
                _ => {
                    let names: Vec<_> = several.iter().map(|name| format!("/{name}")).collect();
                    Err(format!("`/{given}` could be {}", names.join(", ")))
                }
            }
        }
    }
}

/// Names that Ollama's `/set` knows and that are no sampling values here, with a hint.
const NOT_VALUES: [(&[&str], &str); 4] = [
    (&["num-ctx", "ctx"], "The context is set at the start: paguro run MODEL -c TOKENS"),
    (
        &["format", "noformat"],
        "The format of answers is set at the start: paguro run MODEL --format json, or --json-schema FILE",
    ),
    (&["history", "nohistory"], "The conversation is kept until /clear; --session NAME keeps it on disk."),
    (&["wordwrap", "nowordwrap"], "Answers are printed as they are; the terminal breaks their lines."),
];

impl Entry {
    /// Parses a complete entry.
    pub fn parse(typed: &Typed) -> Self {
        let trimmed = typed.text.trim();
        let given = match trimmed.strip_prefix('/') {
            Some(given) if !typed.quoted => given,
            _ if trimmed.is_empty() => return Self::Empty,
            _ => return Self::Message(trimmed.to_owned()),
        };
        let (name, rest) = given.split_once(char::is_whitespace).unwrap_or((given, ""));
        let rest = rest.trim();
        let text = (!rest.is_empty()).then(|| rest.to_owned());
        let command = match command(name) {
            Ok(command) => command,
            Err(problem) => return Self::Wrong(problem),
        };
        match (command, text) {
            ("clear", None) => Self::Clear,
            ("regenerate", None) => Self::Regenerate,
            ("undo", None) => Self::Undo,
            ("save", Some(file)) => Self::Save(file),
            ("load", Some(file)) => Self::Load(file),
            ("save" | "load", None) => {
                Self::Wrong(format!("`/{command}` needs a file: /{command} chat.json"))
            }
            ("image", Some(file)) => Self::Image(unquoted(&file).to_owned()),
            ("image", None) => Self::Wrong("`/image` needs a file: /image photo.jpg".to_owned()),
            ("model", name) => Self::Model(name),
            ("system", text) => Self::System(text),
            ("set", None) => Self::Values,
            ("set", Some(rest)) => Self::set(&rest),
            ("show", None) => Self::Show,
            // Ollama shows single properties by name.
            ("show", Some(_)) => Self::Show,
            ("help", _) => Self::Help,
            ("exit", None) => Self::Exit,
            (command, _) => Self::Wrong(format!("`/{command}` takes no argument")),
        }
    }

    /// Parses `/set ...`.
    fn set(rest: &str) -> Self {
        // Ollama's form is `/set parameter temperature 0.5`.
        let rest = rest.strip_prefix("parameter ").unwrap_or(rest).trim();
        let (name, value) = rest.split_once([' ', '=', '\t', '\n']).unwrap_or((rest, ""));
        let value = Some(value.trim()).filter(|value| !value.is_empty());
        let name = name.trim_start_matches('-').replace('_', "-").to_lowercase();
        match (name.as_str(), value) {
            ("system", text) => Self::System(text.map(|text| text.trim_matches('"').to_owned())),
            ("verbose", None | Some("on" | "true" | "1")) => Self::Verbose(true),
            ("verbose", Some("off" | "false" | "0")) | ("quiet", None) => Self::Verbose(false),
            ("think", None | Some("on" | "true" | "1")) => Self::Think(true),
            ("think", Some("off" | "false" | "0")) | ("nothink", None) => Self::Think(false),
            ("think", Some(_)) => Self::Wrong("`/set think` is on or off".into()),
            ("verbose", Some(_)) => Self::Wrong("`/set verbose` is on or off".into()),
            _ => match NOT_VALUES.iter().find(|(names, _)| names.contains(&&*name)) {
                Some((_, hint)) => Self::Wrong((*hint).to_owned()),
                None => Self::Set { name, value: value.map(str::to_owned) },
            },
        }
    }
}

/// A complete entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Typed {
    /// Its text.
    pub text: String,
    /// True if it was quoted: a quoted entry is always a message.
    pub quoted: bool,
}

/// Joins lines to entries.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    quoted: bool,
}

/// Quotes around a text of several lines.
const QUOTES: &str = "\"\"\"";

impl Lines {
    /// Adds a line. Returns the entry if it is complete.
    pub fn push(&mut self, line: &str) -> Option<Typed> {
        if self.quoted {
            return match line.trim_end().strip_suffix(QUOTES) {
                Some(last) => {
                    self.text += last;
                    self.take()
                }
                None => self.more(line),
            };
        }
        if self.text.is_empty()
            && let Some(first) = line.trim_start().strip_prefix(QUOTES)
        {
            // Quotes that open and close on the same line.
            if let Some(only) = first.trim_end().strip_suffix(QUOTES) {
                return Some(Typed { text: only.to_owned(), quoted: true });
            }
            self.quoted = true;
            return if first.is_empty() { None } else { self.more(first) };
        }
        match line.strip_suffix('\\') {
            Some(continued) => self.more(continued),
            None => {
                self.text += line;
                self.take()
            }
        }
    }

    /// Returns true within an entry.
    pub fn open(&self) -> bool {
        self.quoted || !self.text.is_empty()
    }

    fn more(&mut self, line: &str) -> Option<Typed> {
        self.text += line;
        self.text.push('\n');
        None
    }

    fn take(&mut self) -> Option<Typed> {
        let Self { text, quoted } = std::mem::take(self);
        Some(Typed { text, quoted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(lines: &[&str]) -> Option<Entry> {
        let mut all = Lines::default();
        let mut last = None;
        for line in lines {
            assert_eq!(last, None, "complete before {line:?}");
            last = all.push(line);
        }
        assert_eq!(last.is_none(), all.open());
        last.map(|text| Entry::parse(&text))
    }

    fn set(name: &str, value: Option<&str>) -> Entry {
        Entry::Set { name: name.into(), value: value.map(str::to_owned) }
    }

    #[test]
    fn lines_become_messages() {
        let message = |text: &str| Some(Entry::Message(text.into()));
        assert_eq!(entry(&["Hello"]), message("Hello"));
        assert_eq!(entry(&["  "]), Some(Entry::Empty));
        assert_eq!(entry(&["one \\", "two"]), message("one \ntwo"));
        assert_eq!(entry(&["one\ntwo"]), message("one\ntwo"));
        assert_eq!(entry(&["\"\"\"one", "", "/exit", "two\"\"\""]), message("one\n\n/exit\ntwo"));
        assert_eq!(entry(&["\"\"\"", "one", "\"\"\""]), message("one"));
        assert_eq!(entry(&["\"\"\"/etc/hosts\"\"\""]), message("/etc/hosts"));
        assert_eq!(entry(&["\"\"\"one"]), None);
        assert_eq!(entry(&["one\\"]), None);
    }

    #[test]
    fn commands_have_names_and_prefixes() {
        let table = [
            ("/reset ", Entry::Clear),
            ("/clear", Entry::Clear),
            ("/C", Entry::Clear),
            ("/retry", Entry::Regenerate),
            ("/reg", Entry::Regenerate),
            ("/undo", Entry::Undo),
            ("/save a b.json", Entry::Save("a b.json".into())),
            ("/load x", Entry::Load("x".into())),
            ("/set parameter num_ctx 4096", Entry::Wrong(NOT_VALUES[0].1.into())),
            ("/set think", Entry::Think(true)),
            ("/set nothink", Entry::Think(false)),
            ("/set think off", Entry::Think(false)),
            ("/set nohistory", Entry::Wrong(NOT_VALUES[2].1.into())),
            ("/model", Entry::Model(None)),
            ("/m qwen3:4b", Entry::Model(Some("qwen3:4b".into()))),
            ("/system Be brief. ", Entry::System(Some("Be brief.".into()))),
            ("/system", Entry::System(None)),
            ("/set system Be brief.", Entry::System(Some("Be brief.".into()))),
            ("/set system \"Be brief.\"", Entry::System(Some("Be brief.".into()))),
            ("/set", Entry::Values),
            ("/set top-k 5", set("top-k", Some("5"))),
            ("/set top_k=5", set("top-k", Some("5"))),
            ("/set parameter temperature 1", set("temperature", Some("1"))),
            ("/set temp", set("temp", None)),
            ("/set verbose", Entry::Verbose(true)),
            ("/set verbose off", Entry::Verbose(false)),
            ("/set quiet", Entry::Verbose(false)),
            ("/show", Entry::Show),
            ("/?", Entry::Help),
            ("/bye", Entry::Exit),
        ];
        for (line, expected) in table {
            assert_eq!(entry(&[line]), Some(expected), "{line}");
        }
        let table = [
            ("/re", "could be /reset, /regenerate, /retry"),
            ("/etc", "is not a command"),
            ("/", "is not a command"),
            ("/exit now", "takes no argument"),
            ("/save", "needs a file"),
            ("/set verbose maybe", "on or off"),
        ];
        for (line, expected) in table {
            let Some(Entry::Wrong(problem)) = entry(&[line]) else { panic!("{line}") };
            assert!(problem.contains(expected), "{problem}");
        }
        assert!(
            help().len() > 12
                && names().any(|name| name == "/retry")
                && names().any(|name| name == "/model ")
        );
    }
}
