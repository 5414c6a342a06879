//! The server from a client's view: a process, and bytes on a socket.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

/// A running `paguro serve` with folders of its own; ends with this value.
pub struct Server {
    child: Child,
    pub address: String,
    home: tempfile::TempDir,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

/// The binary, without the environment of the test.
pub fn paguro(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_paguro"));
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("PAGURO_") || name.starts_with("XDG_") {
            command.env_remove(name);
        }
    }
    command.env("HOME", home).args(args).stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

impl Server {
    /// Starts one on a free port.
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), args)
    }

    /// The same with this home.
    pub fn start_in(home: tempfile::TempDir, args: &[&str]) -> Self {
        let mut command = paguro(home.path(), &["serve", "--port", "0", "--log", "warn"]);
        command.args(args);
        Self::of(command, home)
    }

    /// The server that a command starts.
    pub fn of(mut command: Command, home: tempfile::TempDir) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening at http://").expect("it says where it listens");
        Self { address: address.to_owned(), child, home }
    }

    pub fn home(&self) -> &Path {
        self.home.path()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    /// Sends bytes and reads all that comes until the server closes.
    pub fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        stream.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        // The server may close before everything is read.
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut stream = self.connect();
        stream.write_all(&self.head(method, path, headers, body)).unwrap();
        let mut reader = BufReader::new(stream);
        // The answer to HEAD has the length of the body, but no body.
        if method == "HEAD" { Answer::read_head(&mut reader) } else { Answer::read(&mut reader) }
    }

    /// The status of an answer whose body is not read.
    pub fn status(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> u16 {
        let mut stream = self.connect();
        stream.write_all(&self.head(method, path, headers, body)).unwrap();
        Answer::read_head(&mut BufReader::new(stream)).status
    }

    /// Sends a request whose answer is read elsewhere.
    pub fn send(&self, path: &str, body: &Value) -> BufReader<TcpStream> {
        let mut stream = self.connect();
        stream.write_all(&self.head("POST", path, &[], &body.to_string())).unwrap();
        BufReader::new(stream)
    }

    fn head(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
        let mut text =
            format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            text += &format!("Host: {}\r\n", self.address);
        }
        for (name, value) in headers {
            text += &format!("{name}: {value}\r\n");
        }
        (text + "\r\n" + body).into_bytes()
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[], "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, &[], &body.to_string())
    }

    /// A metric's value, summed over its labels; `None` before it exists.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let text = self.get("/metrics").body;
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value =
                if rest.starts_with('{') { rest.rsplit_once("} ")?.1 } else { rest.strip_prefix(' ')? };
            value.parse::<f64>().ok()
        });
        values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// Waits until a metric has a value; fails after a minute.
    pub fn wait_for(&self, name: &str, value: f64) {
        let begin = Instant::now();
        // Often: a fast machine is soon done with what a test wants to see.
        while begin.elapsed() < Duration::from_secs(60) {
            if self.metric(name) == Some(value) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{name} is {:?} and does not become {value}", self.metric(name));
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Answer {
    pub fn read(reader: &mut impl BufRead) -> Self {
        let mut answer = Self::read_head(reader);
        if answer.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = read_chunk(reader) {
                answer.body += &chunk;
            }
        } else {
            let length = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            answer.body = String::from_utf8(body).unwrap();
        }
        answer
    }

    fn read_head(reader: &mut impl BufRead) -> Self {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status =
            line.split(' ').nth(1).unwrap_or_else(|| panic!("no status line: {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        Self { status, headers, body: String::new() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The JSON of an answer that must be a good one.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// The `data:` lines of a stream of events; the last one must be `[DONE]`, and is left out.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert_eq!((self.status, self.header("content-type")), (200, Some("text/event-stream")), "{self:?}");
        let mut data: Vec<_> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }

    /// `400 invalid_request_error/unknown_parameter param: message`
    pub fn error(&self) -> String {
        let json = self.json();
        let error = &json["error"];
        let text = |name: &str| error[name].as_str().unwrap_or("-");
        format!("{} {}/{} {}: {}", self.status, text("type"), text("code"), text("param"), text("message"))
    }
}

/// One chunk of a chunked body; `None` is its end.
pub fn read_chunk(reader: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let length =
        usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("no chunk length: {line:?}"));
    let mut chunk = vec![0; length + 2];
    reader.read_exact(&mut chunk).unwrap();
    chunk.truncate(length);
    (length > 0).then(|| String::from_utf8(chunk).unwrap())
}
