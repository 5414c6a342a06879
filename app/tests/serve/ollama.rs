//! Ollama's API.

use expect_test::{Expect, expect};
use serde_json::{Value, json};

use super::{
    http::{Answer, Server},
    retrieval::write_folder,
};

/// A question to the embedded model, with a small answer.
fn ask(more: Value) -> Value {
    let mut body = json!({
        "model": "tales:latest",
        "messages": [{"role": "user", "content": "Tell me a story about a shy fox who lost a key"}],
        "options": {"num_predict": 24, "temperature": 0},
        "stream": false,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// The lines of a stream.
fn lines(answer: &Answer) -> Vec<Value> {
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("application/x-ndjson")),
        "{answer:?}"
    );
    answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_chat_is_answered_whole_or_in_lines() {
    let server = Server::start(&[]);
    let whole = server.post("/api/chat", &ask(json!({}))).ok();
    assert_eq!(
        (&whole["model"], &whole["done"], &whole["done_reason"]),
        (&json!("tales:latest"), &json!(true), &json!("length"))
    );
    assert_eq!((&whole["eval_count"], &whole["message"]["role"]), (&json!(24), &json!("assistant")));
    for name in ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"] {
        assert!(whole[name].as_u64().unwrap() > 0, "{name}: {whole}");
    }
    let lines = lines(&server.post("/api/chat", &ask(json!({"stream": true}))));
    let text: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(whole["message"]["content"], text.as_str());
    let (last, others) = lines.split_last().unwrap();
    assert!(
        others.len() > 4
            && others.iter().all(|line| line["done"] == false && line.get("eval_count").is_none())
    );
    assert_eq!((&last["done"], &last["eval_count"]), (&json!(true), &json!(24)));
    let chat =
        json!({"model": "tales", "messages": ask(json!({}))["messages"], "max_tokens": 24, "temperature": 0});
    let chat = server.post("/v1/chat/completions", &chat).ok();
    assert_eq!(chat["choices"][0]["message"]["content"], text.as_str(), "one model, one answer");
    assert_eq!(chat["usage"]["prompt_tokens"], whole["prompt_eval_count"]);
}

#[test]
fn a_model_without_a_template_continues_the_prompt() {
    let home = tempfile::tempdir().unwrap();
    let bases = ["gpt2", "bert"].map(|case| write_folder(home.path(), case, case, |_, _| ()));
    let server = Server::start(&bases.each_ref().map(|folder| folder.to_str().unwrap()));
    let generate = |more: Value| {
        let mut body = json!({
            "model": "gpt2", "prompt": "a fox", "stream": false, "options": {"temperature": 0, "num_predict": 4},
        });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/api/generate", &body)
    };
    let raw = generate(json!({"raw": true})).ok();
    let plain = generate(json!({})).ok();
    assert_eq!((&plain["response"], plain["eval_count"].as_u64()), (&raw["response"], Some(4)));
    // There is no place for a system prompt.
    let system = generate(json!({"system": "Be brief"}));
    assert_eq!(system.header("x-paguro-ignored"), Some("system"), "{system:?}");
    assert_eq!(system.ok()["response"], plain["response"]);
    let chat = server.post("/api/chat", &ask(json!({"model": "gpt2"})));
    assert!(chat.status == 400 && chat.body.contains("no chat template"), "{chat:?}");
    // Lists state what a model is for.
    let models = server.get("/v1/models").ok();
    let capabilities = |name: &str| {
        let model = models["data"].as_array().unwrap().iter().find(|model| model["id"] == name).unwrap();
        model["capabilities"].clone()
    };
    assert_eq!((capabilities("gpt2"), capabilities("bert")), (json!(["completion"]), json!(["embedding"])));
}

#[test]
fn a_prompt_is_answered_with_the_template_or_raw() {
    let server = Server::start(&[]);
    let generate = |more: Value| {
        let mut body = ask(json!({"prompt": "Tell me a story"}));
        body.as_object_mut().unwrap().remove("messages");
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/api/generate", &body)
    };
    let plain = generate(json!({})).ok()["response"].clone();
    let raw = json!({"raw": true, "prompt": "<|user|>\nTell me a story<|end|>\n<|assistant|>\n"});
    assert_eq!(generate(raw).ok()["response"], plain);
    assert_ne!(generate(json!({"raw": true})).ok()["response"], plain);
    assert_ne!(generate(json!({"system": "Only of robots"})).ok()["response"], plain);
    let text: String = lines(&generate(json!({"stream": true})))
        .iter()
        .map(|line| line["response"].as_str().unwrap())
        .collect();
    assert_eq!(plain, text);
    let with = generate(json!({"logprobs": true, "top_logprobs": 2})).ok();
    assert_eq!(with["logprobs"].as_array().unwrap().len(), 24);
    assert_eq!(with["logprobs"][3]["top_logprobs"][0]["token"], with["logprobs"][3]["token"]);
    let word = text.split_whitespace().nth(4).unwrap();
    let stopped = generate(json!({"options": {"temperature": 0, "stop": word}})).ok();
    assert_eq!(
        (&stopped["done_reason"], &stopped["response"]),
        (&json!("stop"), &json!(text[..text.find(word).unwrap()]))
    );
    // The context of the request is smaller than the model's.
    let prompt_tokens = stopped["prompt_eval_count"].as_u64().unwrap();
    let bounded = generate(json!({"options": {"temperature": 0, "num_ctx": prompt_tokens + 5}})).ok();
    assert_eq!((&bounded["done_reason"], &bounded["eval_count"]), (&json!("length"), &json!(5)));
}

#[test]
fn models_are_listed_shown_loaded_and_let_go() {
    let server = Server::start(&[]);
    let tags = server.get("/api/tags").ok();
    let tag = &tags["models"][0];
    assert_eq!((&tag["name"], &tag["model"]), (&json!("tales:latest"), &json!("tales:latest")));
    assert_eq!(tag["digest"].as_str().unwrap().len(), 64);
    expect![[r#"{"parent_model":"","format":"gguf","family":"llama","families":["llama"],"parameter_size":"20.98M","quantization_level":"Q8_0"}"#]].assert_eq(&tag["details"].to_string());
    let show = server.post("/api/show", &json!({"model": "tales"})).ok();
    assert_eq!(
        (&show["capabilities"], &show["details"]),
        (&json!(["completion", "tools", "embedding"]), &tag["details"])
    );
    assert_eq!(show["model_info"]["general.architecture"], "llama");
    assert!(show["model_info"]["llama.context_length"].is_u64(), "{show}");
    assert!(show["template"].as_str().unwrap().contains("<|assistant|>"));

    let names = || {
        let ps = server.get("/api/ps").ok();
        ps["models"].as_array().unwrap().iter().map(|model| model["name"].clone()).collect::<Vec<_>>()
    };
    let of = |keep_alive: Value| json!({"model": "tales", "keep_alive": keep_alive});
    assert_eq!(names(), Vec::<Value>::new());
    assert_eq!(server.post("/api/generate", &of(json!("10m"))).ok()["done_reason"], "load");
    assert_eq!(names(), ["tales:latest"]);
    let ps = server.get("/api/ps").ok();
    assert!(ps["models"][0]["expires_at"].as_str().unwrap() > tag["modified_at"].as_str().unwrap());
    assert_eq!(server.post("/api/chat", &of(json!(0))).ok()["done_reason"], "unload");
    for _ in 0..100 {
        if names().is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!(names(), Vec::<Value>::new());

    assert!(server.get("/api/version").ok()["version"].is_string());
    assert_eq!(
        (server.get("/").body.as_str(), server.request("HEAD", "/", &[], "").status),
        ("Paguro is running", 200)
    );
}

#[test]
fn what_cannot_be_honoured_is_refused_in_ollamas_shape() {
    let server = Server::start(&["--ctx", "256", "--strict"]);
    let refused = |path: &str, body: Value, expected: Expect| {
        let answer = server.post(path, &body);
        expected.assert_eq(&format!("{} {}", answer.status, answer.json()["error"].as_str().unwrap()));
    };
    let chat = |more: Value, expected: Expect| refused("/api/chat", ask(more), expected);
    let option = |name: &str, value: Value, expected: Expect| {
        refused("/api/chat", ask(json!({"options": {name: value}})), expected);
    };
    let generate = |more: Value, expected: Expect| {
        let mut body = json!({"model": "tales", "prompt": "Hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        refused("/api/generate", body, expected);
    };
    chat(json!({"model": "llama3"}), expect!["404 model 'llama3' not found"]);
    chat(
        json!({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}),
        expect![[
            r#"400 `messages[0].images[0]` is an image, but the model `tales` reads text only: it has no vision tower, and no projector (mmproj) was loaded with it. Use a model that sees, or add the projector of this one: put its mmproj file beside the model's file, or start the server with --mmproj FILE"#
        ]],
    );
    chat(
        json!({"messages": [{"role": "user", "content": "Hi", "tool_calls": [{"function": {"name": "f"}}]}]}),
        expect!["400 only a message of the role `assistant` has `messages[0].tool_calls`"],
    );
    chat(
        json!({"messages": [{"role": "user", "content": "word ".repeat(400)}]}),
        expect![
            "400 the prompt has 410 tokens, but prompt and answer together can have 256; shorten it, or start the server with a larger --ctx"
        ],
    );
    chat(json!({"format": "yaml"}), expect!["400 `format` is `json` or a JSON schema, not `yaml`"]);
    chat(
        json!({"think": true}),
        expect![[r#"400 `think`: the model does not reason: its chat template knows no reasoning"#]],
    );
    chat(
        json!({"think": "deeply"}),
        expect!["400 `think` is true, false, low, medium or high, not `deeply`"],
    );
    chat(
        json!({"keep_alive": "soon"}),
        expect![[r#"400 `keep_alive`: `soon` is no duration; "5m", "1h30m" or "-1s" would be"#]],
    );
    chat(json!({"top_logprobs": 3}), expect!["400 `top_logprobs` needs `logprobs`: true"]);
    option(
        "num_gpu",
        json!(1),
        expect!["400 `options.num_gpu` is not supported: `paguro serve --device` selects the device"],
    );
    option(
        "num_thread",
        json!(1),
        expect!["400 `options.num_thread` is not supported: `paguro serve --threads` sets the number"],
    );
    option(
        "mirostat",
        json!(2),
        expect![[
            r#"400 `options.mirostat` is not supported: the samplers are `top_k`, `top_p` and `min_p`; omit it, or set it to 0"#
        ]],
    );
    option(
        "typical_p",
        json!(0.5),
        expect![[
            r#"400 `options.typical_p` is not supported: the samplers are `top_k`, `top_p` and `min_p`; omit it, or set it to 1"#
        ]],
    );
    option(
        "use_mlock",
        json!(true),
        expect![[
            r#"400 `options.use_mlock` is not supported: models are loaded with the server's settings"#
        ]],
    );
    option("temperature", json!(-1), expect!["400 temperature must be finite, 0 or more, not -1"]);
    generate(
        json!({"suffix": "the end"}),
        expect![
            "400 `suffix`: the model does not support fill-in-the-middle: its tokenizer has no tokens for it"
        ],
    );
    generate(
        json!({"template": "{{ .Prompt }}"}),
        expect!["400 `template` is not supported: models have their own template; `raw` disables it"],
    );
    generate(
        json!({"context": [1, 2]}),
        expect!["400 `context` is not supported: use /api/chat for a conversation"],
    );
    generate(
        json!({"images": ["aGk="]}),
        expect![
            "400 `images[0]` is an image, but the model `tales` reads text only: it has no vision tower, and no projector (mmproj) was loaded with it. Use a model that sees, or add the projector of this one: put its mmproj file beside the model's file, or start the server with --mmproj FILE"
        ],
    );
    generate(
        json!({"raw": true, "system": "Be brief"}),
        expect!["400 `system` is not supported: a `raw` prompt is used without a template"],
    );
    refused(
        "/api/show",
        json!({"model": "tales", "verbose": true}),
        expect!["400 `verbose` is not supported: lists of tokens are not shown"],
    );
    refused("/api/show", json!({"model": "llama3:8b"}), expect!["404 model 'llama3:8b' not found"]);
    refused(
        "/api/nothing",
        json!({}),
        expect!["404 there is nothing at /api/nothing; /openapi.json lists what there is"],
    );
    // Fields without effect, or with the default value.
    let options = json!({
        "num_predict": 2, "num_keep": 4, "mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "use_mmap": true, "numa": false,
        "repeat_last_n": -1, "penalize_newline": true, "num_ctx": 128,
    });
    server
        .post("/api/chat", &ask(json!({"options": options, "think": false, "format": "", "shift": false})))
        .ok();
}

#[test]
fn models_are_made_of_what_is_served() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("stories.gguf");
    std::fs::copy(
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf"),
        &file,
    )
    .unwrap();
    let server = Server::start_in(home, &[file.to_str().unwrap()]);
    let answer = |model: &str| {
        let body = json!({"model": model, "prompt": "A fox", "raw": true, "stream": false, "options": {"num_predict": 9, "temperature": 0}});
        server.post("/api/generate", &body).ok()["response"].as_str().unwrap().to_owned()
    };
    let expected = answer("tales");
    for from in ["tales", "tales:latest", "stories"] {
        let body = json!({"model": "mine", "from": from, "parameters": {"num_predict": 3}, "stream": false});
        server.post("/api/create", &body).ok();
        let body = json!({"model": "mine", "prompt": "A fox", "raw": true, "stream": false});
        assert_eq!(server.post("/api/generate", &body).ok()["eval_count"], 3, "{from}");
        let copied = server.post("/api/copy", &json!({"source": from, "destination": "other"}));
        assert_eq!((copied.status, answer("other")), (200, expected.clone()), "{from}");
    }
    // A model that nobody would reach, and ones that are not the library's to delete.
    let create = server.post("/api/create", &json!({"model": "tales", "from": "mine"}));
    let delete =
        |model: &str| server.request("DELETE", "/api/delete", &[], &json!({"model": model}).to_string());
    let error = |answer: Answer| format!("{} {}", answer.status, answer.json()["error"].as_str().unwrap());
    expect!["400 `tales` is the model in the program, which stays as it is"].assert_eq(&error(create));
    expect!["400 `tales` is the model in the program, which stays as it is"]
        .assert_eq(&error(delete("tales")));
    expect!["400 `stories` is a file that this server was started with, and not in the library"]
        .assert_eq(&error(delete("stories")));
    assert_eq!(delete("mine").status, 200);
}

/// The fields of a model that `/api/create` makes: those that work, and those that are refused when it is made.
#[test]
fn a_created_model_has_its_fields_and_none_breaks_its_requests() {
    let server = Server::start(&["--ctx", "512"]);
    let create = |more: Value| {
        let mut body = json!({"model": "kid", "from": "tales", "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/api/create", &body)
    };
    let ask = |model: &str, options: Value| {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let body = json!({"model": model, "messages": messages, "options": options, "stream": false});
        server.post("/api/chat", &body)
    };
    let chat = |model: &str| ask(model, json!({"num_predict": 1}));
    let fast = json!({"num_predict": 3, "temperature": 0});
    for fine in [
        json!({"license": "MIT"}),
        json!({"license": ["MIT", "Apache-2.0"]}),
        json!({"system": "Short answers.", "license": []}),
        json!({"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}),
        json!({"parameters": {"temperature": 0, "num_predict": 3, "stop": ["x"], "num_ctx": 256}}),
        json!({"template": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"}),
        json!({"modelfile": "FROM tales\nSYSTEM \"\"\"Be\nbrief\"\"\"\nPARAMETER num_predict 2"}),
        json!({"adapters": {}, "quantize": "", "template": ""}),
    ] {
        assert_eq!(create(fine.clone()).status, 200, "{fine}");
        let answer = chat("kid");
        assert_eq!(answer.status, 200, "{fine}: {}", answer.body);
    }
    for (wrong, problem) in [
        (json!({"adapters": {"a": "sha256:0"}}), "digest"),
        (json!({"quantize": "q4_K_M"}), "quantize"),
        (json!({"template": "{% if %}"}), "template"),
        (json!({"template": "{{ .System }} {{ .Prompt }}"}), "template"),
        (json!({"license": 3}), "license"),
        (json!({"parameters": {"temperature": -1}}), "temperature"),
        (json!({"parameters": {"top_p": 7}}), "top_p"),
        (json!({"parameters": {"mirostat": 2}}), "mirostat"),
        (json!({"messages": [{"role": "nobody", "content": "A"}]}), "messages"),
        (json!({"system": 3}), "system"),
        (json!({"modelfile": "FROM tales\nADAPTER x\nADAPTER y"}), "line 3"),
    ] {
        let answer = create(wrong.clone());
        assert!(answer.status == 400 && answer.body.contains(problem), "{wrong}: {answer:?}");
        assert_eq!(chat("kid").status, 200, "{wrong}");
    }

    // Shown, made again from what was shown, and inherited.
    let stop = "a \"\"\"\n b\\";
    let fields = json!({
        "model": "first",
        "system": "Line one.\n\"\"\"\nLine two.",
        "template": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\nOnce",
        "messages": [{"role": "user", "content": "One \"word\""}, {"role": "assistant", "content": ""}],
        "parameters": {"num_predict": 5, "temperature": 0, "stop": [stop, "User:"]},
        "license": ["MIT\nlicense", "Other"],
    });
    create(fields.clone()).ok();
    let show = |model: &str| server.post("/api/show", &json!({"model": model})).ok();
    let shown = show("first");
    for field in ["system", "messages", "template"] {
        assert_eq!(shown[field], fields[field], "{shown}");
    }
    assert_eq!(shown["license"], "MIT\nlicense\n\nOther");
    assert_eq!(shown["details"]["parent_model"], "tales");
    assert!(shown["parameters"].as_str().unwrap().contains("num_predict                    5"), "{shown}");
    let modelfile = shown["modelfile"].as_str().unwrap();
    assert!(modelfile.contains("# FROM first:latest") && modelfile.contains("\nFROM tales\n"), "{modelfile}");
    let again = json!({"model": "second", "modelfile": modelfile, "stream": false});
    server.post("/api/create", &again).ok();
    create(json!({"model": "third", "from": "second", "parameters": {"num_predict": 2}})).ok();
    let answer = |model: &str| ask(model, json!({})).ok();
    let (first, second, third) = (answer("first"), answer("second"), answer("third"));
    for field in ["message", "eval_count", "prompt_eval_count"] {
        assert_eq!(first[field], second[field], "{field}");
    }
    assert_eq!((&third["prompt_eval_count"], &third["eval_count"]), (&first["prompt_eval_count"], &json!(2)));
    assert_ne!(ask("tales", fast).ok()["prompt_eval_count"], first["prompt_eval_count"]);
    for field in ["system", "messages", "template", "parameters", "license"] {
        assert_eq!(show("second")[field], shown[field], "{field}");
    }
    assert_eq!(show("third")["system"], shown["system"]);
}

#[test]
fn durations_of_work_are_never_zero() {
    let server = Server::start(&[]);
    for tokens in [1, 2] {
        for _ in 0..2 {
            let body = json!({"model": "tales", "prompt": "A fox", "stream": false, "options": {"num_predict": tokens}});
            let answer = server.post("/api/generate", &body).ok();
            assert_eq!(answer["eval_count"], tokens);
            for name in ["total_duration", "prompt_eval_duration", "eval_duration"] {
                assert!(answer[name].as_u64() > Some(0), "{name}: {answer}");
            }
            let total = answer["total_duration"].as_u64().unwrap();
            let parts = ["prompt_eval_duration", "eval_duration"].map(|name| answer[name].as_u64().unwrap());
            assert!(parts.iter().sum::<u64>() <= total, "{answer}");
        }
    }
}

#[test]
fn the_oldest_turns_of_a_long_chat_are_dropped() {
    let server = Server::start(&["--ctx", "256"]);
    let mut messages = vec![json!({"role": "system", "content": "You tell stories."})];
    for number in 0..20 {
        messages.push(
            json!({"role": "user", "content": format!("Question {number} of a long chat about a fox")}),
        );
        messages.push(json!({"role": "assistant", "content": "The fox ran."}));
    }
    messages.push(json!({"role": "user", "content": "And then?"}));
    let body = |more: Value| {
        let mut body =
            json!({"model": "tales", "messages": messages, "stream": false, "options": {"num_predict": 1}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let answer = server.post("/api/chat", &body(json!({})));
    assert_eq!(answer.header("x-paguro-ignored"), Some("messages"), "{answer:?}");
    let count = answer.ok()["prompt_eval_count"].as_u64().unwrap();
    assert!((150..256).contains(&count), "{count}");
    assert_eq!(server.post("/api/chat", &body(json!({"truncate": true}))).ok()["prompt_eval_count"], count);
    assert_eq!(server.post("/api/chat", &body(json!({"truncate": false}))).status, 400);
    let short = server.post("/api/chat", &body(json!({"options": {"num_predict": 1, "num_ctx": 96}}))).ok();
    assert!(short["prompt_eval_count"].as_u64().unwrap() < 96, "{short}");
    // The last turn stays, so it must fit.
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(400)}]});
    assert_eq!(server.post("/api/chat", &body(long)).status, 400);
    let auto = json!({"model": "tales", "input": messages, "truncation": "auto", "max_output_tokens": 1});
    let auto = server.post("/v1/responses", &auto).ok();
    assert_eq!((&auto["usage"]["input_tokens"], &auto["truncation"]), (&json!(count), &json!("auto")));
}

#[test]
fn empty_fields_of_messages_are_absent() {
    let server = Server::start(&[]);
    for message in [
        json!({"role": "user", "content": "Hi", "thinking": ""}),
        json!({"role": "user", "content": "Hi", "thinking": null, "tool_calls": [], "images": [], "tool_name": "", "name": ""}),
        json!({"role": "assistant", "content": "", "thinking": "", "tool_calls": null}),
    ] {
        let body = ask(
            json!({"messages": [{"role": "user", "content": "Hi"}, message], "options": {"num_predict": 1}}),
        );
        let answer = server.post("/api/chat", &body);
        assert_eq!(
            (answer.status, answer.header("x-paguro-ignored")),
            (200, None),
            "{message}: {}",
            answer.body
        );
    }
}
