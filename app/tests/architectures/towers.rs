//! Tiny random models that see, from folders of Hugging Face's classes: rows of their towers, and log-probabilities of prompts with a
//! picture, as transformers computes them (`make_towers.py`).

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_backend::{
    AttentionMode, Backend, GivenRows, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, Step,
    StepOutput, StepSequence,
};
use paguro_engine::{Engine, EngineOptions, Event, Picture, Request};
use paguro_model::{LoadOptions, Model, ModelFile, Tower, gguf::Contents};
use paguro_vision::{Part, Pixels};
use serde_json::{Value, json};

use super::{HALF_PAGES, ROUNDING, distance, hf, weights};

const IMAGE: u32 = 290;
/// K and V in half precision, in the tower and in the text model behind it.
const TWICE_HALF: f32 = 2.0 * HALF_PAGES;

/// A picture of a case, with what transformers computes for it.
struct Expected {
    prompt: Vec<u32>,
    pixels: Arc<Pixels>,
    /// `[rows, width]`
    rows: Vec<f32>,
    /// Log-probabilities of all tokens after the prompt.
    next: Vec<f32>,
    /// Log-probabilities of the tokens of the prompt after the picture.
    text: Vec<f32>,
}

/// All cases, with the tokenizer that they have in common.
struct Cases {
    folder: PathBuf,
    all: Value,
    tokenizer: Value,
}

impl Cases {
    fn read() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf");
        let read =
            |name: &str| -> Value { serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap() };
        let (all, tokenizer) = (read("towers.json"), read("cases.json")["tokenizer"].clone());
        Self { folder, all, tokenizer }
    }

    fn all(&self) -> &[Value] {
        self.all["cases"].as_array().unwrap()
    }

    /// Writes a case as a folder of `suffix`, and opens it.
    fn open(&self, case: &Value, suffix: &str) -> Result<(PathBuf, Model, Vec<Expected>), String> {
        let name = case["name"].as_str().unwrap();
        let vocab = self.all["vocab"].as_u64().unwrap() as usize;
        // GGUF files name the image token in the vocabulary only.
        let named = self.tokenizer.to_string().replace("<|extra_290|>", image_token(name));
        let path = hf::write(&format!("{name}-{suffix}"), case, &serde_json::from_str(&named).unwrap());
        let processor = json!({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]});
        fs::write(path.join("preprocessor_config.json"), processor.to_string()).unwrap();
        let model = Model::open(&path, &LoadOptions { max_context: Some(256) });
        let model = model.map_err(|error| format!("{name}: {error}"))?;
        let no_tower = || format!("{name}: no tower: {:?}", model.vision_problem);
        let vision = model.vision.as_ref().ok_or_else(no_tower)?;
        let bytes = fs::read(self.folder.join(format!("{name}.rows"))).unwrap();
        let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let pictures = expected(case, vocab, vision.processor.patch * vision.processor.merge, &numbers);
        Ok((path, model, pictures))
    }
}

/// Compares some cases with transformers on a GPU.
#[cfg(any(feature = "gpu", target_os = "macos"))]
pub fn compare_on(gpu: &dyn Backend, draw: paguro_backend_conformance::Draw) {
    let cases = Cases::read();
    let names = |case: &Value| case["name"].as_str().unwrap().to_owned();
    for case in draw.some("towers", cases.all(), 2) {
        let (name, (_, model, pictures)) = (names(&case), cases.open(&case, "tower-gpu").unwrap());
        let tower = &model.vision.as_ref().unwrap().tower;
        assert!(gpu.runs_tower(&tower.program), "{name} is refused");
        let picture = &pictures[0];
        let error = distance(&rows(gpu, tower, &picture.pixels), &picture.rows);
        assert!(error <= TWICE_HALF, "{name}: rows {error:.1e}");
        let [next, text] = scores(gpu, &model, picture);
        for (own, expected) in [(next, &picture.next), (text, &picture.text)] {
            let error = distance(&own, expected);
            assert!(error <= TWICE_HALF, "{name}: text {error:.1e}");
        }
    }
}

/// Compares all cases with transformers. `encodes` computes rows of a tower; `runs` computes text as well.
pub fn compare(encodes: &[(&dyn Backend, f32)], runs: &dyn Backend) {
    let mut failures = Vec::new();
    let cases = Cases::read();
    for case in cases.all() {
        let name = case["name"].as_str().unwrap();
        let (path, model, pictures) = match cases.open(case, "tower") {
            Ok(opened) => opened,
            Err(problem) => {
                failures.push(problem);
                continue;
            }
        };
        let vision = model.vision.as_ref().unwrap();
        for (number, picture) in pictures.iter().enumerate() {
            for &(backend, tolerance) in encodes {
                let own = rows(backend, &vision.tower, &picture.pixels);
                let error = distance(&own, &picture.rows);
                println!(
                    "{name:16} {:10} rows {number}: error {error:.1e} of {tolerance:.1e}",
                    backend.name()
                );
                if error.is_nan() || error > tolerance {
                    failures
                        .push(format!("{name}, picture {number} on {}: rows {error:.1e}", backend.name()));
                }
            }
            let converted = rows(runs, &in_gguf(&path, name).vision.unwrap().tower, &picture.pixels);
            let error = distance(&converted, &rows(runs, &vision.tower, &picture.pixels));
            if error.is_nan() || error > ROUNDING {
                failures.push(format!("{name}, picture {number}: {error:.1e} after a conversion"));
            }
            let [next, text] = scores(runs, &model, picture);
            for (what, own, expected) in [("next", next, &picture.next), ("text", text, &picture.text)] {
                let error = distance(&own, expected);
                println!("{name:16} {what} {number}: error {error:.1e} of {TWICE_HALF:.1e}");
                if error.is_nan() || error > TWICE_HALF {
                    failures.push(format!("{name}, picture {number}: {what} {error:.1e}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

fn image_token(name: &str) -> &'static str {
    match name {
        "gemma3" => "<image_soft_token>",
        "pixtral" | "mistral3" => "[IMG]",
        "idefics3" | "smolvlm" | "lfm2_vl" => "<image>",
        "internvl" | "internvl-norms" => "<IMG_CONTEXT>",
        "paddleocr_vl" => "<|IMAGE_PLACEHOLDER|>",
        "kimi_k25" => "<|media_pad|>",
        name if name.starts_with("gemma4") || name.starts_with("glm") => "<|image|>",
        _ => "<|image_pad|>",
    }
}

/// Writes a folder as two GGUF files, and opens them.
fn in_gguf(folder: &Path, name: &str) -> Model {
    let file = ModelFile::open(folder).unwrap();
    let projector = file.projector_contents().unwrap_or_else(|error| panic!("{name}: {error}")).unwrap();
    let write = |end: &str, contents: Contents| {
        let path = folder.with_extension(end);
        fs::write(&path, contents.write(Vec::new()).unwrap()).unwrap();
        path
    };
    let text = file.contents().unwrap_or_else(|error| panic!("{name}: {error}"));
    // llama.cpp refuses a projector with more parts than the text model adds.
    let parts =
        |contents: &Contents, key: &str| contents.metadata.u32s(key).map_or(0, |flags| flags.iter().sum());
    let deepstack: u32 = parts(&projector, "clip.vision.is_deepstack_layers");
    let key = format!("{}.n_deepstack_layers", text.metadata.str("general.architecture").unwrap_or_default());
    assert_eq!(text.metadata.u32(&key).unwrap_or(0), deepstack, "{name}");
    let text = write("gguf", text);
    let projector = write("mmproj.gguf", projector);
    let file = ModelFile::open(&text).and_then(|file| file.with_projector(&projector)).unwrap();
    file.load(&LoadOptions { max_context: Some(256) }).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn expected(case: &Value, vocab: usize, side: u32, mut numbers: &[f32]) -> Vec<Expected> {
    let name = case["name"].as_str().unwrap();
    let read = |(number, picture): (usize, &Value)| {
        let size = |key: &str| picture[key].as_u64().unwrap() as usize;
        let prompt: Vec<u32> =
            picture["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let shape = picture["rows"].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize);
        let after = prompt.len() - prompt.iter().rposition(|&token| token >= IMAGE).unwrap() - 1;
        let mut take = |count: usize| numbers.split_off(..count).unwrap().to_vec();
        let (rows, next, text) = (take(shape.product()), take(vocab), take(after));
        let (height, width) = (size("height"), size("width"));
        let part = Part {
            width: width as u32,
            height: height as u32,
            rows: height as u32 / side,
            columns: width as u32 / side,
        };
        let rgb = colours(&format!("{name}.picture{number}"), height, width);
        Expected { prompt, pixels: Arc::new(Pixels { parts: vec![part], rgb }), rows, next, text }
    };
    let all = case["pictures"].as_array().unwrap().iter().enumerate().map(read).collect();
    assert!(numbers.is_empty(), "{name}: {} numbers are left", numbers.len());
    all
}

/// The picture of `make_towers.py` with this name.
fn colours(name: &str, height: usize, width: usize) -> Vec<u8> {
    let noise = weights::below(name, height * width * 3, 16);
    let places = (0..height * width).flat_map(|pixel| (0..3).map(move |channel| (pixel, channel)));
    places
        .zip(noise)
        .map(|((pixel, channel), noise)| {
            let (x, y) = (pixel % width, pixel / width);
            let wave = (x * (3 + channel) + y * (5 - channel)) % 240;
            let inside = x > width / 3 && y > height / 4;
            (if inside { 239 - wave } else { wave }) as u8 + noise as u8
        })
        .collect()
}

/// Computes the rows of a picture in their order, `[rows, width]`.
pub fn rows(backend: &dyn Backend, tower: &Tower, pixels: &Pixels) -> Vec<f32> {
    let part = &pixels.parts[0];
    let input = tower.input(part, &pixels.rgb).unwrap();
    let (count, square) = (input.order.len(), tower.patches_of_row());
    let patches = tower.step_rows(count);
    let groups = tower.program.kv.groups.len();
    let blocks = patches.div_ceil(32);
    let limits = Limits {
        block_size: 32,
        pages: groups * blocks + 1,
        max_rows: patches,
        max_sequences: 1,
        max_outputs: count,
        max_context: patches,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = backend.load(&tower.program, tower.weights.clone(), limits).unwrap();
    let pages: Vec<PageId> = (1..=(groups * blocks) as u32).map(PageId).collect();
    let output = |row| Output { row: row * square, kind: OutputKind::Residual };
    let outputs: Vec<_> = (0..count).map(output).collect();
    let step = Step {
        tokens: &vec![0; patches],
        given: &[GivenRows { rows: 0..patches, values: &input.given }],
        coordinates: &input.coordinates,
        spans: &input.spans,
        sequences: &[StepSequence { rows: 0..patches, start: 0, tables: 0..pages.len(), state: None }],
        pages: &pages,
        outputs: &outputs,
        ..Step::default()
    };
    let ticket = runner.submit(&step).unwrap();
    let mut answer = StepOutput::default();
    runner.collect(ticket, &mut answer).unwrap();
    let width = tower.row_width();
    let mut rows = vec![0.0; outputs.len() * width];
    for (outcome, &to) in answer.outcomes.drain(..).zip(&input.order) {
        let OutputValue::Residual(row) = outcome else { panic!("{outcome:?}") };
        rows[to * width..][..width].copy_from_slice(&row);
    }
    rows
}

/// Log-probabilities of all tokens after a prompt, and of its text after the picture.
fn scores(backend: &dyn Backend, model: &Model, picture: &Expected) -> [Vec<f32>; 2] {
    let Expected { prompt, pixels, .. } = picture;
    let mut places: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, _) in prompt.iter().enumerate().filter(|(_, token)| **token == IMAGE) {
        match places.last_mut().filter(|place| place.end == at) {
            Some(place) => place.end += 1,
            None => places.push(at..at + 1),
        }
    }
    let after = prompt.iter().rposition(|&token| token >= IMAGE).unwrap();
    let picture = Picture {
        key: [1; 32],
        rows: places,
        grid: [pixels.parts[0].rows, pixels.parts[0].columns],
        pixels: Arc::new(Arc::clone(pixels)),
    };
    let vocab = model.program.vocab;
    let request = Request {
        pictures: vec![picture],
        max_tokens: Some(1),
        ignore_stop_tokens: true,
        logprobs: Some(vocab),
        score_prompt_from: Some(after),
        ..Request::new(prompt.clone())
    };
    let engine = Engine::start(backend, model, EngineOptions::default()).unwrap();
    let mut generation = engine.handle().generate(request).unwrap();
    let (mut next, mut text) = (vec![0.0; vocab], Vec::new());
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::PromptScores { scores, .. } => text.extend(scores.iter().map(|score| score.logprob)),
            Event::Token { top, .. } => top.iter().for_each(|&(token, score)| next[token as usize] = score),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    [next, text]
}
