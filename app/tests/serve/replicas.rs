//! Several engines of one model in one server.

use std::thread;

use serde_json::{Value, json};

use super::{ask, http::Server};

#[test]
fn requests_go_to_the_engine_that_has_their_prefix_or_less_work() {
    let server = Server::start(&["--device", "cpu,cpu", "--replicas", "--threads", "2"]);
    let question = |text: &str| {
        let messages = json!([{"role": "user", "content": text.repeat(6)}]);
        ask(json!({"messages": messages, "max_tokens": 8, "ignore_eos": true}))
    };
    let (fox, owl) =
        (question("Tell me a story about a shy fox. "), question("Where does an old owl sleep? "));
    let engines = || server.get("/status").ok()["models"][0]["engines"].clone();
    let tokens = || -> Vec<u64> {
        engines().as_array().unwrap().iter().map(|engine| engine["tokens"].as_u64().unwrap()).collect()
    };
    // Another text goes to the engine whose cache is empty, and each text returns to its own.
    let mut answers = Vec::new();
    for (body, engine) in [(&fox, 0), (&owl, 1), (&owl, 1), (&fox, 0)] {
        let before = answers.last().map_or(vec![0, 0], |_| tokens());
        answers.push(server.post("/v1/chat/completions", body).ok());
        let grew: Vec<_> = tokens().iter().zip(before).map(|(now, before)| *now > before).collect();
        assert_eq!(grew, [engine == 0, engine == 1], "{answers:?}");
    }
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&answers[2]) > 0 && cached(&answers[3]) > 0, "{answers:?}");
    // Whichever engine answers, the answer is the same.
    thread::scope(|scope| {
        let (server, fox, owl) = (&server, &fox, &owl);
        let ask = move |body| server.post("/v1/chat/completions", body).ok()["choices"].clone();
        let all: Vec<_> = (0..6).map(|at| scope.spawn(move || ask([fox, owl][at % 2]))).collect();
        for (at, answer) in all.into_iter().enumerate() {
            assert_eq!(answer.join().unwrap(), answers[at % 2]["choices"]);
        }
    });
    let states = engines();
    for (number, engine) in states.as_array().unwrap().iter().enumerate() {
        let state = [&engine["number"], &engine["failing"], &engine["device"]];
        assert_eq!(state, [&json!(number), &json!(false), &json!("cpu")]);
        let metrics = server.get("/metrics").body;
        for name in ["paguro_steps_total", "vllm:num_requests_running", "paguro_kernel_launches_total"] {
            let label = format!("{name}{{model_name=\"tales\",engine=\"{number}\"");
            assert!(metrics.contains(&label), "{label}: {metrics}");
        }
    }
    let model = server.get("/status").ok()["models"][0].clone();
    assert_eq!(
        (&model["device"], model["tokens"].as_u64()),
        (&json!("cpu, cpu"), Some(tokens().iter().sum()))
    );
    let loads = server.get("/v1/loads").ok();
    let ranks: Vec<_> =
        loads["loads"].as_array().unwrap().iter().map(|load| load["dp_rank"].clone()).collect();
    assert_eq!((ranks, &loads["dp_rank_count"]), (vec![json!(0), json!(1)], &json!(2)));
    assert_eq!(server.get("/health").status, 200);
}
