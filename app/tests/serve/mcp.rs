//! Tools of servers that the settings name: a program, which is this one run again, and an address.

use std::{
    collections::BTreeSet,
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use super::http::{Answer, Server, paguro};

/// Set for the program that serves tools.
const IS_PROGRAM: &str = "TOOL_PROGRAM";

/// Result of a message, or its error; `None` for what is not answered.
fn answer(message: &Value) -> Option<Value> {
    let id = message.get("id")?;
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}});
    let tool =
        |name: &str| json!({"name": name, "description": format!("Does {name}"), "inputSchema": schema});
    let text = |text: String| json!({"content": [{"type": "text", "text": text}]});
    let arguments = &message["params"]["arguments"];
    let result = match (message["method"].as_str()?, message["params"]["name"].as_str()) {
        ("initialize", _) => json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}}, "serverInfo": {"name": "test", "version": "1"},
        }),
        ("tools/list", _) if message["params"]["cursor"].is_null() => {
            json!({"tools": [tool("add"), tool("fail")], "nextCursor": "2"})
        }
        ("tools/list", _) => {
            let names = ["refuse", "slow", "crash", "environment", "forget"];
            json!({"tools": names.map(tool)})
        }
        ("tools/call", Some("add")) => {
            text((arguments["a"].as_i64().unwrap_or(0) + arguments["b"].as_i64().unwrap_or(0)).to_string())
        }
        ("tools/call", Some("fail")) => {
            let mut result = text("it is raining".into());
            result["isError"] = json!(true);
            result
        }
        ("tools/call", Some("environment")) => {
            let names: BTreeSet<_> = env::vars().map(|(name, _)| name).collect();
            text(names.into_iter().collect::<Vec<_>>().join(" "))
        }
        ("tools/call", Some("slow")) => {
            thread::sleep(Duration::from_secs(20));
            text("at last".into())
        }
        ("tools/call", Some("crash")) => {
            eprintln!("out of cheese");
            std::process::exit(3)
        }
        ("tools/call", Some("forget")) => text("what?".into()),
        _ => {
            let error = json!({"code": -32602, "message": "`a` must be a number"});
            return Some(json!({"jsonrpc": "2.0", "id": id, "error": error}));
        }
    };
    Some(json!({"jsonrpc": "2.0", "id": id, "result": result}))
}

/// Not a test: the program that serves tools over its standard streams.
#[test]
#[ignore = "run by the other tests"]
fn program() {
    if env::var_os(IS_PROGRAM).is_none() {
        return;
    }
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let write = |message: Value| println!("{message}");
    println!("a greeting that is no JSON");
    while let Some(line) = lines.next() {
        let message: Value = serde_json::from_str(&line).unwrap();
        if message["method"] == "tools/list" {
            write(json!({"jsonrpc": "2.0", "id": "ping", "method": "ping"}));
            let pong: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
            assert_eq!(pong, json!({"jsonrpc": "2.0", "id": "ping", "result": {}}));
        }
        // A call that takes long holds up no other.
        thread::spawn(move || answer(&message).map(write));
    }
    std::process::exit(0);
}

/// Settings of the program. The quotes of TOML's literal strings keep paths as they are.
fn program_settings(name: &str, more: &str) -> String {
    let exe = env::current_exe().unwrap();
    format!(
        "[[mcp]]\nname = '{name}'\ncommand = ['{}', 'mcp::program', '--exact', '--ignored', '--nocapture']\n\
         env = {{ {IS_PROGRAM} = '1' }}\n{more}\n",
        exe.display()
    )
}

fn start(settings: &str) -> Server {
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("serve.toml");
    fs::write(&config, settings).unwrap();
    Server::start_in(home, &["--config", config.to_str().unwrap()])
}

fn call(server: &Server, of: &str, tool: &str, arguments: Value) -> Answer {
    server.post("/ui/v1/tools/call", &json!({"server": of, "tool": tool, "arguments": arguments}))
}

fn told(answer: &Answer) -> (String, bool) {
    let result = answer.ok();
    (result["text"].as_str().unwrap().to_owned(), result["is_error"].as_bool().unwrap())
}

/// The list of tool servers, when none is starting any more.
fn listed(server: &Server) -> Vec<Value> {
    loop {
        let list = server.get("/ui/v1/tools").ok()["servers"].as_array().unwrap().clone();
        if list.iter().all(|server| server["state"] != "starting") {
            return list;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn tools_of_programs_are_listed_and_called() {
    let settings = [
        program_settings("one", "trusted = ['add']\ntimeout = '2s'"),
        program_settings("two", ""),
        "[[mcp]]\nname = 'none'\ncommand = '/no/such/program'\n".to_owned(),
    ];
    let server = start(&settings.concat());
    let list = listed(&server);
    let names: Vec<_> =
        list.iter().map(|it| (it["name"].as_str().unwrap(), it["state"].as_str().unwrap())).collect();
    assert_eq!(names, [("one", "ready"), ("two", "ready"), ("none", "failed")]);
    let problem = list[2]["problem"].as_str().unwrap();
    assert!(problem.starts_with("`none` cannot be started: `/no/such/program`"), "{problem}");
    let tools = list[0]["tools"].as_array().unwrap();
    assert_eq!(tools.len(), 7, "both pages");
    // Two servers have the tool, so its function has the server's name.
    assert_eq!((&tools[0]["name"], &tools[0]["function"]), (&json!("add"), &json!("one__add")));
    assert_eq!((&tools[0]["trusted"], &tools[1]["trusted"]), (&json!(true), &json!(false)));

    assert_eq!(told(&call(&server, "one", "add", json!({"a": 2, "b": 40}))), ("42".into(), false));
    assert_eq!(told(&call(&server, "one", "fail", json!({}))), ("it is raining".into(), true));
    assert_eq!(told(&call(&server, "one", "refuse", json!({}))), ("`a` must be a number".into(), true));
    // Programs get what they need, and not what this one knows.
    let (variables, _) = told(&call(&server, "one", "environment", json!({})));
    let variables: Vec<_> = variables.split(' ').collect();
    assert!(variables.contains(&"PATH") && variables.contains(&IS_PROGRAM), "{variables:?}");
    assert!(!variables.iter().any(|name| name.starts_with("CARGO")), "{variables:?}");

    for (body, status, problem) in [
        (json!({"server": "three", "tool": "add"}), 404, "there is no tool server `three`"),
        (json!({"server": "one", "tool": "sub"}), 404, "has no tool `sub`"),
        (json!({"server": "none", "tool": "add"}), 503, "`none` cannot be started"),
        (json!({"server": "one", "tool": "add", "arguments": [1]}), 400, "arguments"),
        (json!({"server": "one", "tool": "slow"}), 504, "did not answer within 2 s"),
        (json!({"server": "one", "tool": "crash"}), 503, "has ended: out of cheese"),
    ] {
        let answer = server.post("/ui/v1/tools/call", &body);
        assert_eq!(answer.status, status, "{body}: {}", answer.body);
        assert!(answer.body.contains(problem), "{body}: {}", answer.body);
    }
    // It is started again.
    assert_eq!(told(&call(&server, "one", "add", json!({"a": 1, "b": 1}))), ("2".into(), false));
}

#[test]
fn a_scope_decides_who_sees_and_calls_tools() {
    let settings = [program_settings("mine", ""), program_settings("ours", "scope = 'inference'")].concat();
    let server = start(&settings);
    let key = |scope: &str| {
        let made = paguro(server.home(), &["keys", "add", scope, "--scope", scope]).output().unwrap();
        let text = String::from_utf8(made.stdout).unwrap();
        let key = text.split_whitespace().find(|word| word.starts_with("pg-")).expect("a key is shown");
        vec![("Authorization".to_owned(), format!("Bearer {key}"))]
    };
    let (inference, admin) = (key("inference"), key("admin"));
    // Running servers look twice a second.
    thread::sleep(Duration::from_millis(1100));
    let ask = |key: &[(String, String)], method: &str, path: &str, body: Value| {
        let headers: Vec<_> = key.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        server.request(method, path, &headers, &body)
    };
    let add = |server: &str| json!({"server": server, "tool": "add", "arguments": {"a": 1, "b": 2}});
    assert_eq!(ask(&[], "GET", "/ui/v1/tools", Value::Null).status, 401);
    let list = ask(&inference, "GET", "/ui/v1/tools", Value::Null).ok();
    assert_eq!(list["servers"].as_array().unwrap().len(), 1);
    assert_eq!((&list["servers"][0]["name"], &list["servers"][0]["place"]), (&json!("ours"), &Value::Null));
    assert_eq!(ask(&inference, "POST", "/ui/v1/tools/call", add("mine")).status, 404);
    assert_eq!(told(&ask(&inference, "POST", "/ui/v1/tools/call", add("ours"))), ("3".into(), false));
    // Servers are added with the scope `admin` only, and no program is.
    let new = json!({"name": "new", "url": "http://127.0.0.1:9/mcp"});
    assert_eq!(ask(&inference, "POST", "/ui/v1/tools/servers", new.clone()).status, 403);
    assert_eq!(ask(&admin, "POST", "/ui/v1/tools/servers", new.clone()).status, 204);
    for (body, problem) in [
        (new, "there is a tool server `new` already"),
        (json!({"name": "a b", "url": "http://127.0.0.1:9"}), "1 to 40 letters"),
        (json!({"name": "a", "url": "file:///etc/passwd"}), "must begin with http://"),
        (json!({"name": "a", "url": "http://127.0.0.1:9", "command": "sh"}), "command"),
    ] {
        let answer = ask(&admin, "POST", "/ui/v1/tools/servers", body);
        assert_eq!(answer.status, 400, "{}", answer.body);
        assert!(answer.body.contains(problem), "{}", answer.body);
    }
    for (name, status) in [("new", 204), ("new", 404), ("ours", 400)] {
        let answer = ask(&admin, "DELETE", &format!("/ui/v1/tools/servers/{name}"), Value::Null);
        assert_eq!(answer.status, status, "{}", answer.body);
    }
}

/// A server of tools at an address. Every second answer is a stream of events.
fn serve_http(stream: &mut TcpStream, session: &AtomicUsize) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line).ok()? > 2 {
        head += &line.to_ascii_lowercase();
        line.clear();
    }
    let header = |name: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.map(str::to_owned)
    };
    let length = header("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let current = session.load(Ordering::SeqCst).to_string();
    let mut respond = |status: &str, headers: &str, body: &str| {
        let length = body.len();
        write!(
            stream,
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        )
        .ok()
    };
    if header("authorization").as_deref() != Some("bearer fox") {
        return respond("401 Unauthorized", "", "who are you?");
    }
    if message["method"] != "initialize" && header("mcp-session-id").as_deref() != Some(&current) {
        return respond("404 Not Found", "", "");
    }
    let Some(answer) = answer(&message) else { return respond("202 Accepted", "", "") };
    if message["method"] == "initialize" {
        let headers = format!("Content-Type: application/json\r\nMcp-Session-Id: {current}\r\n");
        return respond("200 OK", &headers, &answer.to_string());
    }
    assert_eq!(header("mcp-protocol-version").as_deref(), Some("2025-06-18"));
    if message["params"]["name"] == "forget" {
        session.fetch_add(1, Ordering::SeqCst);
    }
    let note = json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}});
    let events = format!("event: message\ndata: {note}\n\nid: 7\ndata: {answer}\n\n");
    respond("200 OK", "Content-Type: text/event-stream\r\n", &events)
}

#[test]
fn tools_at_an_address_are_called_and_lost_sessions_renewed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let session = Arc::new(AtomicUsize::new(1));
    let counted = session.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, session) = (stream.unwrap(), counted.clone());
            thread::spawn(move || serve_http(&mut stream, &session));
        }
    });
    let of =
        |name: &str, more: &str| format!("[[mcp]]\nname = '{name}'\nurl = 'http://{address}/mcp'\n{more}\n");
    let settings = [
        of("web", "headers = { Authorization = 'Bearer fox' }"),
        of("locked", ""),
        "[[mcp]]\nname = 'gone'\nurl = 'http://127.0.0.1:9/mcp'\n".to_owned(),
    ];
    let server = start(&settings.concat());
    let list = listed(&server);
    let states: Vec<_> = list.iter().map(|it| it["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["ready", "failed", "failed"]);
    assert!(!server.get("/ui/v1/tools").body.contains("fox"), "keys stay here");
    let problem = |index: usize| list[index]["problem"].as_str().unwrap().to_owned();
    assert!(problem(1).contains("status 401: it requires a key"), "{}", problem(1));
    assert!(problem(2).contains("cannot be reached"), "{}", problem(2));
    assert_eq!(list[0]["tools"][0]["function"], "add");
    assert_eq!(told(&call(&server, "web", "add", json!({"a": 20, "b": 3}))), ("23".into(), false));
    assert_eq!(told(&call(&server, "web", "forget", json!({}))), ("what?".into(), false));
    // The session is lost now; the call is made in another one.
    assert_eq!(told(&call(&server, "web", "add", json!({"a": 1, "b": 3}))), ("4".into(), false));
    assert_eq!(session.load(Ordering::SeqCst), 2);
}
