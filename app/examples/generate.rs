//! The engine as a library: loads a model, and streams the answer to a prompt.
//!
//! ```sh
//! cargo run --release --example generate                                  # the small model of this repository
//! cargo run --release --example generate -- MODEL.gguf "What is a hermit crab?"
//! ```
//!
//! A program of its own needs three crates: `paguro-model` reads the file, `paguro-backend-cpu` computes, and `paguro-engine`
//! schedules. The engine does not know the device, so another backend replaces one line.

use std::{
    env,
    error::Error,
    io::{Write, stdout},
    path::PathBuf,
    sync::Arc,
};

use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, Event, Request};
use paguro_model::{LoadOptions, ModelFile, chat::ChatInput, tokenizer::SpecialTokens};

fn main() -> Result<(), Box<dyn Error>> {
    let tales = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tales/tales-Q8_0.gguf");
    let mut arguments = env::args().skip(1);
    let path = PathBuf::from(arguments.next().unwrap_or_else(|| tales.to_owned()));
    let question = arguments.next().unwrap_or_else(|| "Tell me a story about a shy fox".to_owned());

    // Memory of the KV cache is planned for this context. Without a bound it is the context of the model's training.
    let model = Arc::new(ModelFile::open(&path)?.load(&LoadOptions { max_context: Some(4096) })?);
    let engine = Engine::start(&Cpu::new(CpuOptions::default()), &model, EngineOptions::default())?;

    let prompt = match &model.chat_template {
        Some(template) => {
            let chat = ChatInput::from_turns([("user", question.as_str())]);
            model.tokenizer.encode_chat(&template.prompt(&chat, &model.tokenizer)?)
        }
        None => model.tokenizer.encode_prompt(&question, SpecialTokens::AsText),
    };
    // Handles are cheap to clone. Requests of any number of threads are computed together.
    let mut answer = engine.handle().generate(Request {
        max_tokens: Some(200),
        sampling: model.defaults.sampling(),
        ..Request::new(prompt)
    })?;
    while let Some(event) = answer.next_blocking() {
        match event {
            Event::Token { text, .. } | Event::Finished { text, .. } => {
                write!(stdout(), "{text}")?;
                stdout().flush()?;
            }
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    writeln!(stdout())?;
    Ok(())
}
