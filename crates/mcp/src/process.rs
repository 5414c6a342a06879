//! Tool servers that are programs: JSON-RPC in lines over their standard streams.
//!
//! Three threads serve a program. One writes its input, one reads its output, and one keeps the last line of its
//! standard error, which mostly explains an exit.

use std::{
    collections::HashMap,
    ffi::OsString,
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::connection::{Inbox, MOST_BYTES, McpError, message, shortened};

/// Maximum number of messages that wait to be written.
const QUEUE: usize = 64;

/// Time for a program to exit after its standard input was closed. Then it is killed.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Maximum characters of a program's last line.
const MOST_WORDS: usize = 300;

/// A running program.
#[derive(Debug)]
pub struct Process {
    child: Option<Child>,
    input: Option<Arc<SyncSender<String>>>,
    shared: Arc<Shared>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    /// Requests that wait for answers; `None` after the program's exit.
    waiting: Mutex<Option<HashMap<u64, Sender<Value>>>>,
    /// Last line of standard error, or the problem with its output.
    last_words: Mutex<String>,
    /// True at the end of standard error.
    said_all: AtomicBool,
    inbox: Arc<Inbox>,
}

impl Process {
    /// Starts a program with exactly this environment.
    ///
    /// # Errors
    /// [`McpError::Start`].
    pub fn start(
        program: &str,
        arguments: &[String],
        environment: &[(OsString, OsString)],
        inbox: Arc<Inbox>,
    ) -> Result<Self, McpError> {
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(environment.iter().cloned());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = |error: io::Error| McpError::Start(format!("`{program}`: {error}"));
        let mut child = command.spawn().map_err(start)?;
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(McpError::Failed("the program has no standard streams".into()));
        };
        let (sender, messages) = sync_channel(QUEUE);
        let input = Arc::new(sender);
        let (waiting, last_words) = (Mutex::new(Some(HashMap::new())), Mutex::default());
        let shared = Arc::new(Shared { waiting, last_words, said_all: AtomicBool::new(false), inbox });
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(format!("mcp-{name}")).spawn(work).map(drop)
        };
        let (reader, words, back) = (shared.clone(), shared.clone(), Arc::downgrade(&input));
        let started = spawn("write", Box::new(move || write(stdin, &messages)))
            .and_then(|()| spawn("words", Box::new(move || words.keep_words(BufReader::new(stderr)))))
            .and_then(|()| spawn("read", Box::new(move || reader.read(BufReader::new(stdout), &back))));
        let process = Self { child: Some(child), input: Some(input), shared, next: AtomicU64::new(1) };
        started.map_err(start)?;
        Ok(process)
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn request(&self, method: &str, params: Value, limit: Duration) -> Result<Value, McpError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = channel();
        match &mut *self.shared.waiting() {
            Some(waiting) => drop(waiting.insert(id, sender)),
            None => return Err(self.ended()),
        }
        let sent = self.send(&message(Some(id), method, params));
        let answer = sent.and_then(|()| match answer.recv_timeout(limit) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
            Err(RecvTimeoutError::Timeout) => {
                let params = json!({"requestId": id, "reason": "it took too long"});
                // The timeout is reported, not this error.
                let _ = self.notify("notifications/cancelled", params);
                Err(McpError::Timeout(limit))
            }
        });
        if let Some(waiting) = &mut *self.shared.waiting() {
            waiting.remove(&id);
        }
        answer
    }

    /// Sends a notification.
    ///
    /// # Errors
    /// [`McpError`].
    pub fn notify(&self, method: &str, params: Value) -> Result<(), McpError> {
        self.send(&message(None, method, params))
    }

    /// Returns true if the program has exited.
    pub fn is_closed(&self) -> bool {
        self.shared.waiting().is_none()
    }

    fn send(&self, message: &Value) -> Result<(), McpError> {
        let Some(input) = &self.input else { return Err(self.ended()) };
        match input.try_send(message.to_string()) {
            Ok(()) => Ok(()),
            Err(std::sync::mpsc::TrySendError::Full(_)) => Err(McpError::Stuck),
            Err(std::sync::mpsc::TrySendError::Disconnected(_)) => Err(self.ended()),
        }
    }

    fn ended(&self) -> McpError {
        // Standard error may end slightly later than standard output; a child of the program may keep it open.
        for _ in 0..20 {
            if self.shared.said_all.load(Ordering::Acquire) {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        McpError::Ended(self.shared.last_words().clone())
    }
}

impl Drop for Process {
    /// Closes the program's input and kills it if it does not exit in time.
    fn drop(&mut self) {
        self.input = None;
        let Some(mut child) = self.child.take() else { return };
        let end = move || {
            let begin = Instant::now();
            while begin.elapsed() < END_PATIENCE {
                if !matches!(child.try_wait(), Ok(None)) {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
            // It may already have exited.
            let _ = child.kill();
            let _ = child.wait();
        };
        // If no thread can be started, the program's input is closed when this process exits.
        let _ = thread::Builder::new().name("mcp-end".into()).spawn(end);
    }
}

/// Writes messages until the channel is closed, or the program does not read.
fn write(mut stdin: ChildStdin, messages: &Receiver<String>) {
    for message in messages {
        if stdin.write_all((message + "\n").as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

impl Shared {
    /// Reads messages until the program exits.
    fn read(&self, mut stdout: impl BufRead, input: &Weak<SyncSender<String>>) {
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = stdout.by_ref().take(MOST_BYTES as u64).read_until(b'\n', &mut line);
            if !matches!(read, Ok(1..)) {
                break;
            }
            if !line.ends_with(b"\n") && line.len() >= MOST_BYTES {
                *self.last_words() = format!("a line of its output is longer than {MOST_BYTES} bytes");
                break;
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            match serde_json::from_slice(&line) {
                Ok(message) => self.deliver(message, input),
                // Many programs print a greeting to standard output, against the protocol.
                Err(_) => {
                    let line = shortened(String::from_utf8_lossy(&line).trim(), MOST_WORDS);
                    tracing::debug!(line, "a line of a tool server is not JSON");
                    *self.last_words() = line;
                }
            }
        }
        *self.waiting() = None;
    }

    fn deliver(&self, message: Value, input: &Weak<SyncSender<String>>) {
        if message.get("method").is_some() {
            let answer = self.inbox.receive(&message);
            if let (Some(answer), Some(input)) = (answer, input.upgrade()) {
                // A program that does not read gets no reply.
                let _ = input.try_send(answer.to_string());
            }
            return;
        }
        let Some(id) = message["id"].as_u64() else { return };
        let waits = self.waiting().as_mut().and_then(|waiting| waiting.remove(&id));
        if let Some(sender) = waits {
            // The request may have timed out.
            let _ = sender.send(message);
        }
    }

    /// Keeps the last line of standard error.
    fn keep_words(&self, mut stderr: impl BufRead) {
        let mut line = Vec::new();
        loop {
            line.clear();
            // A program blocks when its pipe is full, so the pipe is always read.
            if !matches!(stderr.by_ref().take(1 << 16).read_until(b'\n', &mut line), Ok(1..)) {
                self.said_all.store(true, Ordering::Release);
                return;
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim();
            tracing::debug!(text, "a tool server says");
            if !text.is_empty() {
                *self.last_words() = shortened(text, MOST_WORDS);
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Option<HashMap<u64, Sender<Value>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn last_words(&self) -> MutexGuard<'_, String> {
        self.last_words.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
