//! The chat on a terminal.
#![cfg(unix)]

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use crate::common::paguro;

/// Timeout, also for a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The binary on a pseudo-terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    screen: Receiver<String>,
    seen: String,
}

impl Terminal {
    fn new(args: &[&str], home: &std::path::Path) -> Self {
        Self::with_columns(args, home, None)
    }

    fn with_columns(args: &[&str], home: &std::path::Path, columns: Option<u16>) -> Self {
        let size = columns.map(|ws_col| nix::pty::Winsize { ws_row: 24, ws_col, ws_xpixel: 0, ws_ypixel: 0 });
        let pty = nix::pty::openpty(size.as_ref(), None).unwrap();
        let slave = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = paguro(args);
        command
            .current_dir(home)
            .stdin(slave())
            .stdout(slave())
            .stderr(slave())
            .env("XDG_STATE_HOME", home)
            .env("TERM", "xterm");
        let child = command.spawn().unwrap();
        // Only the child has its side now: when it ends, the screen does.
        drop((command, pty.slave));
        let mut master = File::from(pty.master);
        let keyboard = master.try_clone().unwrap();
        let (send, screen) = channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = master.read(&mut bytes) {
                let _ = send.send(String::from_utf8_lossy(&bytes[..read]).into_owned());
            }
        });
        Self { child, keyboard, screen, seen: String::new() }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for `text` in the new output, and returns the output up to its end.
    fn wait_for(&mut self, text: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            match self.screen.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(more) => self.seen += &more,
                Err(error) => panic!("{error} while waiting for {text:?}, after {:?}", self.seen),
            }
        }
    }

    /// Waits for the prompt and types a line.
    fn say(&mut self, line: &str) {
        self.wait_for("> ");
        self.type_keys(line);
        self.type_keys("\r");
    }

    fn exit_code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

/// Writes the model with a template that reads the first message, and refuses some.
fn write_strict_model(path: &std::path::Path) {
    let mut file =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf")).unwrap();
    let begin = file.windows(6).position(|bytes| bytes == b"{{ bos").expect("the model has a template");
    let end = file.windows(11).position(|bytes| bytes == b"{% endif %}").expect("its end") + 11;
    let template = "{% if messages[0]['content'][:3] == 'boo' %}{{ raise_exception('no boo') }}{% endif %}\
                    {% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n";
    let padded = format!("{template:width$}", width = end - begin);
    assert_eq!(padded.len(), end - begin, "the template has the length of the one before");
    file[begin..end].copy_from_slice(padded.as_bytes());
    std::fs::write(path, file).unwrap();
}

#[test]
fn a_chat_remembers_and_forgets() {
    let home = tempfile::tempdir().unwrap();
    write_strict_model(&home.path().join("strict.gguf"));
    let mut chat = Terminal::new(&["run", "-v", "--temperature", "0"], home.path());
    chat.wait_for("/help for help");
    chat.say("My name is Tom.");
    chat.wait_for("Tom!");
    chat.wait_for("answer ");
    chat.say("What is my name?");
    // The line itself comes back from the terminal first.
    chat.wait_for("my name?");
    let answer = chat.wait_for("answer ");
    assert!(answer.contains("Tom"), "{answer}");

    // The last answer is removed, generated again, saved, and loaded into an empty conversation.
    chat.say("/retry");
    chat.wait_for("Tom");
    chat.wait_for("answer ");
    chat.say("/undo");
    chat.wait_for("taken back");
    chat.say("/save chat.json");
    chat.wait_for("2 messages saved");
    chat.say("/cl");
    chat.wait_for("is cleared");
    chat.say("/show");
    chat.wait_for("0 messages");
    chat.say("/re");
    chat.wait_for("could be /reset, /regenerate, /retry");
    chat.say("/lo\t chat.j\t");
    chat.wait_for("goes on after 2 messages");
    chat.say("/model Tales");
    chat.wait_for("goes on with tales");
    // A command that fails prints its error; model and conversation stay.
    for (command, error) in [
        ("/load none.json", "cannot read `none.json`"),
        ("/load strict.gguf", "error:"),
        ("/save nowhere/chat.json", "cannot write `nowhere/chat.json`"),
        ("/model nothing-here", "there is no model `nothing-here`"),
        ("/model chat.json", "error:"),
    ] {
        chat.say(command);
        chat.wait_for(error);
    }
    chat.say("/show");
    chat.wait_for("tales (");
    chat.wait_for("2 messages, ");
    chat.say("/mod\t./strict.gguf");
    chat.wait_for("goes on with ");
    chat.wait_for("strict");
    chat.say("/clear");
    chat.wait_for("is cleared");
    chat.say("/show");
    chat.wait_for("0 messages, of ");
    chat.say("boo");
    chat.wait_for("no boo");
    chat.say("/show");
    chat.wait_for("0 messages, of ");
    chat.say("/retry");
    chat.wait_for("no message to answer again");
    chat.say("/model Tales");
    chat.wait_for("goes on with tales");
    chat.say("/system");
    chat.wait_for("The system message is removed");
    chat.say("/system Your name is Pip.");
    chat.wait_for("starts over");
    chat.say("Who are you?");
    chat.wait_for("Pip");
    chat.wait_for("answer ");
    chat.say("/set top-k 7");
    chat.wait_for("top-k is 7.");
    chat.say("/set temp");
    chat.wait_for("temperature is 0.");
    chat.say("/set num_predict 30");
    chat.wait_for("max-tokens is 30.");
    chat.say("/set top 1");
    chat.wait_for("could be top-k, top-p");
    chat.say("/set warmth 1");
    chat.wait_for("no sampling value `warmth`");
    chat.say("/set top-p 7");
    chat.wait_for("invalid value '7'");
    chat.say("/frob");
    chat.wait_for("is not a command");
    chat.say("/help");
    chat.wait_for("/exit");
    chat.say("\"\"\"Hello");
    chat.wait_for(". ");
    chat.type_keys("there\"\"\"\r");
    chat.wait_for("answer ");
    // Alt-Enter is a new line of the same message.
    chat.say("/set verbose off");
    chat.wait_for("not shown");
    chat.wait_for("> ");
    chat.type_keys("What is\x1b\rmy name?\r");
    chat.wait_for("stopped by --max-tokens");
    chat.say("/exit");
    assert_eq!(chat.exit_code(), Some(0));

    let history = std::fs::read_to_string(home.path().join("paguro/history")).unwrap();
    assert!(history.contains("What is my name?"), "{history}");
}

/// A missing short name is offered for download; a refusal prints the command.
#[test]
fn a_download_is_offered_on_a_terminal() {
    let home = tempfile::tempdir().unwrap();
    let mut terminal = Terminal::new(&["run", "qwen3:0.6b", "Hello there"], home.path());
    terminal.wait_for("Qwen3 0.6B is not here; download 639.0 MB? [Y/n] ");
    terminal.type_keys("n\r");
    terminal.wait_for("there is no model `qwen3:0.6b`");
    terminal.wait_for("`paguro pull qwen3:0.6b` downloads Qwen3 0.6B (639.0 MB)");
    assert_eq!(terminal.exit_code(), Some(2));
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let home = tempfile::tempdir().unwrap();
    let mut chat = Terminal::new(&["run", "--temperature", "0", "--ignore-eos"], home.path());
    chat.say("Tell me a story about a star.");
    chat.wait_for("star.");
    // Some of the answer is there.
    chat.wait_for(" the ");
    let interrupt = Command::new("kill").args(["-INT", &chat.child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    chat.wait_for("stopped");
    // At the prompt, Ctrl-C clears the line, any number of times; on an empty line it prints how to leave, and any key
    // resets that.
    chat.wait_for("> ");
    for text in ["half a", "line"] {
        chat.type_keys(text);
        chat.wait_for(text);
        chat.type_keys("\x03");
        chat.wait_for("> ");
    }
    chat.type_keys("\x03");
    chat.wait_for("Ctrl-C again");
    chat.wait_for("> ");
    chat.type_keys("x");
    chat.wait_for("x");
    chat.type_keys("\x7f\x03");
    chat.wait_for("Ctrl-C again");
    chat.wait_for("> ");
    chat.type_keys("\x04");
    assert_eq!(chat.exit_code(), Some(0));
}

#[test]
fn a_full_context_forgets_the_oldest_turns() {
    let home = tempfile::tempdir().unwrap();
    let args = ["run", "-v", "--temperature", "0", "--ctx", "96", "--max-tokens", "20"];
    let mut chat = Terminal::with_columns(&args, home.path(), Some(40));
    chat.say("/help");
    let help = chat.wait_for("search, what was typed");
    let is_narrow =
        |line: &str| line.replace("\x1b[2m", "").replace("\x1b[0m", "").trim_end().chars().count() <= 40;
    let rows = help.split_once("/clear").expect("the first row").1;
    assert!(rows.lines().count() > 20 && rows.lines().all(is_narrow), "{rows}");
    for question in ["My name is Tom.", "Tell me a joke.", "What comes after Tuesday?"] {
        chat.say(question);
        chat.wait_for("answer ");
    }
    let last = "Tell me a story about a shy fox who lost a key.";
    chat.say(last);
    chat.wait_for("no longer fits into 96");
    chat.wait_for("dropped");
    chat.wait_for("answer ");
    // A message that cannot fit drops nothing.
    chat.say("/show");
    let shown = chat.wait_for(" messages");
    let count = shown[shown.len() - 10..].trim_start_matches(|c: char| !c.is_ascii_digit()).to_owned();
    chat.say(&format!("\"\"\"{}\"\"\"", "long ".repeat(100)));
    // Lines are broken between words.
    chat.wait_for("answer together can\r\n       have 96");
    chat.say("/show");
    chat.wait_for(&count);
    chat.wait_for("> ");
    chat.type_keys("\x04");
    assert_eq!(chat.exit_code(), Some(0));
}

#[test]
fn colors_are_for_terminals_that_want_them() {
    let home = tempfile::tempdir().unwrap();
    let screen = |args: &[&str]| {
        let mut terminal = Terminal::new(args, home.path());
        let text = terminal.wait_for("answer ");
        terminal.type_keys("\x04");
        text
    };
    // On a terminal with a prompt, there is no chat.
    assert!(screen(&["run", "--max-tokens", "3", "Hello there"]).contains("\x1b[2mtales · prompt"));
    assert!(!screen(&["run", "--max-tokens", "3", "--color", "never", "Hello there"]).contains('\x1b'));
}
