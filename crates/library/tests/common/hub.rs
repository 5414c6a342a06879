//! A hub on loopback: the two requests of the real one that a pull needs, and everything that can go wrong with them.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use paguro_library::{
    Digest,
    hub::{Hub, HubOptions},
};
use serde_json::json;
use sha1::Digest as _;

/// A running hub; its threads end with the test's process.
pub struct TestHub {
    pub port: u16,
    /// Port of the large files: another origin, as in the real hub's content network.
    cdn_port: u16,
    state: Arc<Mutex<State>>,
}

/// Content and behaviour of the hub.
#[derive(Default)]
pub struct State {
    /// By repository.
    repos: HashMap<String, Vec<RepoFile>>,
    /// Requests without this token are answered with 401.
    pub token: Option<String>,
    /// Faults that are still to happen, in order, one for each request of a file's content.
    pub faults: Vec<Fault>,
    /// Statuses to answer the next requests for lists with, each with a `Retry-After` if there is one.
    pub list_statuses: Vec<(u16, Option<u32>)>,
    /// Milliseconds between pieces of content.
    pub delay: u64,
    /// Ranges are ignored.
    pub no_ranges: bool,
    /// Redirects go round and round.
    pub redirect_loop: bool,
    /// All requests: method, target, and the headers of interest.
    pub log: Vec<String>,
    /// Bytes of content that were sent.
    pub sent: u64,
}

#[derive(Clone)]
struct RepoFile {
    path: String,
    bytes: Arc<Vec<u8>>,
    lfs: bool,
    /// A size or digest that the list announces instead of the true one.
    announced: Option<String>,
}

/// A fault of a request for content.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Nothing goes wrong with this one.
    None,
    /// The connection closes after so many bytes of content.
    Drop(usize),
    /// This status, with `Retry-After` if there is one.
    Status(u16, Option<u32>),
    /// The byte at this place is another one.
    Flip(usize),
    /// More bytes than announced.
    Longer,
    /// Silence, without an end.
    Hang,
}

impl TestHub {
    pub fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let cdn = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = TcpListener::bind("127.0.0.1:0").unwrap();
        let (cdn_port, port) = (cdn.local_addr().unwrap().port(), hub.local_addr().unwrap().port());
        serve(cdn, cdn_port, state.clone());
        serve(hub, cdn_port, state.clone());
        Self { port, cdn_port, state }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn add(&self, repo: &str, files: &[(&str, &[u8])]) {
        let file = |(path, bytes): &(&str, &[u8])| RepoFile {
            path: (*path).to_owned(),
            bytes: Arc::new(bytes.to_vec()),
            lfs: path.ends_with(".gguf") || path.ends_with(".safetensors"),
            announced: None,
        };
        self.state().repos.insert(repo.to_owned(), files.iter().map(file).collect());
    }

    /// Lists large files with another checksum than they have.
    pub fn lie(&self, repo: &str, checksum: &str) {
        for file in self.state().repos.get_mut(repo).unwrap().iter_mut().filter(|file| file.lfs) {
            file.announced = Some(checksum.to_owned());
        }
    }

    /// Patient enough for the test's faults, and never long.
    pub fn options(&self) -> HubOptions {
        HubOptions {
            endpoint: self.endpoint(),
            retries: 3,
            pause: Duration::from_millis(5),
            read_timeout: Duration::from_secs(2),
            ..HubOptions::default()
        }
    }

    pub fn client(&self) -> Hub {
        Hub::new(self.options()).unwrap()
    }

    /// The log with this run's ports by name.
    pub fn log(&self) -> String {
        let log = self.state().log.join("\n");
        log.replace(&self.port.to_string(), "HUB").replace(&self.cdn_port.to_string(), "CDN")
    }
}

fn serve(listener: TcpListener, cdn_port: u16, state: Arc<Mutex<State>>) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            let state = state.clone();
            // A client that goes away is its own business.
            thread::spawn(move || stream.and_then(|stream| answer(stream, cdn_port, &state)));
        }
    });
}

struct Request {
    target: String,
    headers: HashMap<String, String>,
}

fn read_request(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => return Ok(Some(Request { target, headers })),
        };
    }
}

/// One connection, with as many requests as the client wants.
fn answer(mut stream: TcpStream, cdn_port: u16, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let on_cdn = stream.local_addr()?.port() == cdn_port;
    while let Some(request) = read_request(&mut reader)? {
        let header = |name: &str| request.headers.get(name).map_or("-", String::as_str);
        let host = header("host");
        let line =
            format!("{host} {} auth:{} range:{}", request.target, header("authorization"), header("range"));
        state.lock().unwrap().log.push(line);
        let path = request.target.split('?').next().unwrap_or_default();
        if on_cdn {
            content(&mut stream, path, &request, state)?;
        } else {
            listing_or_redirect(&mut stream, path, &request, cdn_port, state)?;
        }
    }
    Ok(())
}

fn simple(stream: &mut TcpStream, status: u16, headers: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n{headers}\r\n{body}")
}

fn listing_or_redirect(
    stream: &mut TcpStream,
    path: &str,
    request: &Request,
    cdn_port: u16,
    state: &Mutex<State>,
) -> std::io::Result<()> {
    let (wanted, looping) = {
        let state = state.lock().unwrap();
        (state.token.clone(), state.redirect_loop)
    };
    let given = request.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
    if wanted.is_some() && wanted.as_deref() != given {
        return simple(stream, 401, "x-error-message: Invalid username or password.\r\n", "");
    }
    if path == "/api/models" {
        let query = request.target.split_once("search=").map_or("", |(_, rest)| rest);
        let text = query.split('&').next().unwrap_or_default().replace("%20", " ").to_lowercase();
        let found = |repo: &&String| text.split(' ').any(|word| repo.to_lowercase().contains(word));
        let mut repos: Vec<_> = state.lock().unwrap().repos.keys().filter(found).cloned().collect();
        repos.sort();
        let entries: Vec<_> =
            repos.iter().map(|repo| json!({"id": repo, "downloads": 1234, "gated": false})).collect();
        return simple(stream, 200, "", &json!(entries).to_string());
    }
    if let Some(rest) = path.strip_prefix("/api/models/") {
        let failing = {
            let mut state = state.lock().unwrap();
            (!state.list_statuses.is_empty()).then(|| state.list_statuses.remove(0))
        };
        if let Some((status, after)) = failing {
            let after = after.map(|after| format!("retry-after: {after}\r\n")).unwrap_or_default();
            return simple(stream, status, &after, "");
        }
        let (repo, _revision) = rest.split_once("/revision/").unwrap_or((rest, ""));
        let files = state.lock().unwrap().repos.get(repo).cloned();
        return match files {
            None => simple(stream, 404, "", ""),
            Some(files) => simple(stream, 200, "", &listing(repo, &files)),
        };
    }
    if looping {
        return simple(stream, 302, &format!("location: {path}\r\n"), "");
    }
    // First to a renamed repository on the same host, as the real hub does, then to the content network.
    let location = match path.strip_prefix("/moved") {
        None => format!("/moved{path}"),
        Some(path) => format!("http://127.0.0.1:{cdn_port}{path}?signature=s3cret"),
    };
    simple(stream, 302, &format!("location: {location}\r\n"), "")
}

fn listing(repo: &str, files: &[RepoFile]) -> String {
    let sibling = |file: &RepoFile| {
        let header = format!("blob {}\0", file.bytes.len());
        let id = sha1::Sha1::new_with_prefix(header).chain_update(&*file.bytes).finalize();
        let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let size = file.bytes.len();
        let mut entry =
            json!({"rfilename": file.path, "size": size, "blobId": file.announced.as_ref().unwrap_or(&id)});
        if file.lfs {
            let sha256 = file.announced.clone().unwrap_or_else(|| Digest::of(&file.bytes).hex());
            entry["lfs"] = json!({"sha256": sha256, "size": size, "pointerSize": 133});
        }
        entry
    };
    let siblings: Vec<_> = files.iter().map(sibling).collect();
    json!({"id": repo, "sha": "0123456789abcdef0123456789abcdef01234567", "siblings": siblings}).to_string()
}

fn content(
    stream: &mut TcpStream,
    path: &str,
    request: &Request,
    state: &Mutex<State>,
) -> std::io::Result<()> {
    let found = path.splitn(6, '/').collect::<Vec<_>>();
    let [_, owner, repo, _resolve, _commit, file] = found[..] else { return simple(stream, 404, "", "") };
    let (bytes, fault, delay, no_ranges) = {
        let mut state = state.lock().unwrap();
        let files = state.repos.get(&format!("{owner}/{repo}"));
        let file = file.replace("%20", " ");
        let bytes = files.and_then(|files| files.iter().find(|f| f.path == file)).map(|f| f.bytes.clone());
        let fault = if state.faults.is_empty() { Fault::None } else { state.faults.remove(0) };
        (bytes, fault, state.delay, state.no_ranges)
    };
    let Some(bytes) = bytes else { return simple(stream, 404, "", "") };
    let mut bytes = bytes.to_vec();
    match fault {
        Fault::Status(status, after) => {
            let after = after.map(|after| format!("retry-after: {after}\r\n")).unwrap_or_default();
            return simple(stream, status, &after, "");
        }
        Fault::Hang => loop {
            thread::sleep(Duration::from_secs(60));
        },
        Fault::Flip(at) => bytes[at] ^= 1,
        Fault::Longer => bytes.extend_from_slice(b"and more"),
        Fault::Drop(_) | Fault::None => {}
    }
    let range = request.headers.get("range").and_then(|value| value.strip_prefix("bytes="));
    let from =
        range.and_then(|value| value.trim_end_matches('-').parse::<usize>().ok()).filter(|_| !no_ranges);
    let total = bytes.len();
    let rest = &bytes[from.unwrap_or(0)..];
    let (status, extra) = match from {
        Some(from) => (206, format!("content-range: bytes {from}-{}/{total}\r\n", total - 1)),
        None => (200, String::new()),
    };
    write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{extra}\r\n", rest.len())?;
    let end = match fault {
        Fault::Drop(after) => after.min(rest.len()),
        _ => rest.len(),
    };
    for piece in rest[..end].chunks(16 << 10) {
        stream.write_all(piece)?;
        state.lock().unwrap().sent += piece.len() as u64;
        if delay > 0 {
            thread::sleep(Duration::from_millis(delay));
        }
    }
    if end < rest.len() {
        stream.shutdown(std::net::Shutdown::Both)?;
    }
    Ok(())
}
