//! Damaged and hostile files: the result is always a model or an error, never a panic, and memory is bounded by a small
//! multiple of the file. Deterministic, and fast enough for every run; the fuzz targets beside this crate search
//! further.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use crate::{
    adapters,
    tiny::{Random, gguf::Writer, models, safetensors},
};
use paguro_model::{
    AdapterFile, LoadOptions, Model, ModelFile,
    gguf::{Array, Gguf, Value},
};

/// Counts the bytes that are allocated, and the most there have been since the last [`Counting::watch`].
struct Counting {
    now: AtomicUsize,
    most: AtomicUsize,
}

#[global_allocator]
static MEMORY: Counting = Counting { now: AtomicUsize::new(0), most: AtomicUsize::new(0) };

impl Counting {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.most.fetch_max(now, Relaxed);
    }

    /// Returns the peak of the memory that `run` allocated.
    fn watch<T>(&self, run: impl FnOnce() -> T) -> (T, usize) {
        let before = self.now.load(Relaxed);
        self.most.store(before, Relaxed);
        let result = run();
        (result, self.most.load(Relaxed) - before)
    }
}

// SAFETY: everything is passed on to the system's allocator as it came; counting touches no memory of its own but two
// atomic numbers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.add(size);
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// The count is of the whole process: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Maximum memory of a mutated file of `bytes` bytes: the parsed header (strings, vectors, a tokenizer), and some for
/// errors.
fn allowance(bytes: usize) -> usize {
    (1 << 20) + 64 * bytes
}

/// Opens the bytes as a model; returns true on success.
#[track_caller]
fn survives(bytes: &[u8], what: &dyn Fn() -> String) -> bool {
    let owner = Arc::new(bytes.to_vec());
    let open = AssertUnwindSafe(|| {
        ModelFile::from_bytes("mutation", owner).and_then(|file| file.load(&LoadOptions::default())).is_ok()
    });
    let (result, most) = MEMORY.watch(|| catch_unwind(open));
    let limit = allowance(bytes.len());
    assert!(most < limit, "{}: {most} bytes were allocated, of {} in the file", what(), bytes.len());
    result.unwrap_or_else(|_| panic!("{}: panicked", what()))
}

/// A valid model whose header is nearly all of it, so that mutations hit.
fn small_gguf() -> Vec<u8> {
    let mut writer: Writer = models::smallest().gguf();
    // A few pieces instead of the whole vocabulary: most bytes should be structure.
    let short = |value: &mut Value| match value {
        Value::Array(Array::Strings(v)) => v.truncate(12),
        Value::Array(Array::F32(v)) => v.truncate(12),
        Value::Array(Array::I32(v)) => v.truncate(12),
        _ => {}
    };
    writer.metadata.iter_mut().for_each(|(_, value)| short(value));
    writer.write()
}

/// Where the header ends and the weights begin.
fn header_len(bytes: &[u8]) -> usize {
    let file = Gguf::from_bytes(Arc::new(bytes.to_vec())).unwrap();
    file.tensors.iter().map(|tensor| tensor.offset).min().unwrap() as usize
}

const HOSTILE: [u64; 12] = [
    0,
    1,
    u64::MAX,
    u64::MAX / 2,
    1 << 63,
    (1 << 32) - 1,
    1 << 32,
    4_000_000_000,
    1_000_000,
    1 << 40,
    u64::MAX - 31,
    0x0101_0101_0101_0101,
];

#[test]
fn gguf_truncated_anywhere() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let whole = small_gguf();
    assert!(survives(&whole, &|| "whole".to_owned()), "the file to mutate is not valid");
    let header = header_len(&whole);
    let lengths = (0..header + 64).chain((header..whole.len()).step_by(997)).chain([whole.len() - 1]);
    for len in lengths {
        assert!(
            !survives(&whole[..len], &|| format!("cut to {len}")),
            "a file cut to {len} bytes is no model"
        );
    }
}

#[test]
fn gguf_with_every_field_hostile() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let whole = small_gguf();
    for at in 0..header_len(&whole) {
        for bit in [0, 7] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            survives(&bytes, &|| format!("bit {bit} of byte {at} flipped"));
        }
    }
    // Lengths, counts, sizes and offsets lie anywhere; every place gets every lie.
    for at in 0..header_len(&whole) - 8 {
        let lie = HOSTILE[at % HOSTILE.len()];
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
        survives(&bytes, &|| format!("{lie:#x} at byte {at}"));
    }
}

/// Numbers that say how large a state is or how layers differ, in files of the architectures that have such numbers.
#[test]
fn hybrids_with_hostile_numbers() {
    const KEYS: [&str; 20] = [
        "ssm.conv_kernel",
        "ssm.state_size",
        "ssm.group_count",
        "ssm.time_step_rank",
        "ssm.inner_size",
        "shortconv.l_cache",
        "attention.head_count",
        "attention.key_length",
        "block_count",
        "attention.key_length_swa",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        "expert_group_count",
        "expert_group_used_count",
        "moe_latent_size",
        "expert_shared_feed_forward_length",
    ];
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../app/tests/architectures/cases");
    for (name, architecture, weight) in [
        ("qwen35", "qwen35", 0.0_f32),
        ("qwen3next", "qwen3next", 0.0),
        ("lfm2moe", "lfm2moe", 0.0),
        ("mamba2", "mamba2", 0.0),
        ("nemotron_h_moe-latent", "nemotron_h_moe", 0.0),
        ("granitehybrid-moe", "granitehybrid", 0.0),
        ("falcon-h1", "falcon-h1", 0.0),
        // RoPE's factors divide.
        ("gemma4-e2b", "gemma4", 1.0),
        ("gemma4-moe", "gemma4", 1.0),
        ("deepseek2-v3", "deepseek2", 0.0),
    ] {
        let mut whole = fs::read(cases.join(format!("{name}.header"))).unwrap();
        let header = whole.len();
        whole.extend(weight.to_le_bytes().iter().cycle().take(4 << 20));
        assert!(survives(&whole, &|| name.to_owned()), "{name} is not valid");
        let mut tried = 0;
        for key in KEYS {
            let key = format!("{architecture}.{key}");
            let found = whole[..header].windows(key.len()).position(|bytes| bytes == key.as_bytes());
            let Some(at) = found.map(|at| at + key.len()) else { continue };
            // A type, which is an unsigned integer of 32 bits, and the number.
            assert_eq!(whole[at..at + 4], 4_u32.to_le_bytes(), "{key}");
            for lie in [0, 1, 2, 3, 5, 64, 65, 1 << 14, 1 << 20, 1 << 30, 1 << 31, u32::MAX] {
                let mut bytes = whole.clone();
                bytes[at + 4..at + 8].copy_from_slice(&u32::to_le_bytes(lie));
                survives(&bytes, &|| format!("{key} = {lie}"));
                tried += 1;
            }
        }
        assert!(tried >= 36, "{name}: {tried}");
    }
}

#[test]
fn gguf_with_random_damage() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let whole = small_gguf();
    let header = header_len(&whole);
    let mut random = Random(2024);
    for round in 0..3000 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(4) {
            damage(&mut bytes, header, &mut random);
        }
        survives(&bytes, &|| format!("round {round}"));
    }
}

/// One random change in the first `header` bytes.
fn damage(bytes: &mut Vec<u8>, header: usize, random: &mut Random) {
    let end = header.min(bytes.len());
    let at = random.below(end - 8);
    match random.below(6) {
        0 => bytes[at] = random.next() as u8,
        1 => bytes[at..at + 8].copy_from_slice(&HOSTILE[random.below(HOSTILE.len())].to_le_bytes()),
        2 => bytes[at..at + 4].copy_from_slice(&(random.next() as u32).to_le_bytes()),
        3 => drop(bytes.drain(at..at + 1 + random.below(7))),
        4 => bytes.insert(at, random.next() as u8),
        _ => {
            let from = random.below(end - 8);
            let copied: [u8; 8] = bytes[from..from + 8].try_into().unwrap();
            bytes[at..at + 8].copy_from_slice(&copied);
        }
    }
}

/// Hyperparameters that no file can back, in an otherwise valid file.
#[test]
fn gguf_with_absurd_hyperparameters() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for model in models::all() {
        let whole = model.gguf();
        for i in 0..whole.metadata.len() {
            let (key, value) = &whole.metadata[i];
            if key.starts_with("general.") {
                continue;
            }
            let lies: Vec<Value> = match value {
                Value::U32(_) => {
                    [0, 1, 2, 3, 7, 255, 1 << 16, i32::MAX as u32, u32::MAX].map(Value::U32).to_vec()
                }
                Value::F32(_) => {
                    let floats = [0.0, -1.0, 1.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::MAX];
                    floats.map(Value::F32).to_vec()
                }
                _ => vec![Value::Bool(true), Value::U64(u64::MAX), Value::String(String::new())],
            };
            for lie in lies {
                let mut file = whole.clone();
                let what = format!("{}: {key} = {lie}", model.name);
                file.metadata[i].1 = lie;
                survives(&file.write(), &|| what.clone());
            }
        }
    }
}

/// Opens a folder; returns true on success. All its files count as its size.
fn folder_survives(folder: &Path, what: &dyn Fn() -> String) -> bool {
    let size: u64 = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    let open = AssertUnwindSafe(|| Model::open(folder, &LoadOptions::default()).is_ok());
    let (result, most) = MEMORY.watch(|| catch_unwind(open));
    let limit = allowance(size as usize);
    assert!(most < limit, "{}: {most} bytes were allocated, of {size} in the folder", what());
    result.unwrap_or_else(|_| panic!("{}: panicked", what()))
}

/// Layers of PyTorch beside the weights, whose files are mostly directory and pickle.
#[test]
fn files_of_pytorch_with_damage() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().unwrap();
    models::smallest().write_hf(folder.path());
    let path = folder.path().join("colbert_linear.pt");
    let whole = include_bytes!("torch/linear-f16.pt");
    fs::write(&path, whole).unwrap();
    let error = Model::open(folder.path(), &LoadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("a layer for tokens reads 4 elements of"), "{error}");
    let mut random = Random(11);
    for round in 0..400 {
        let mut bytes = whole.to_vec();
        for _ in 0..1 + random.below(3) {
            damage(&mut bytes, whole.len(), &mut random);
        }
        fs::write(&path, &bytes).unwrap();
        folder_survives(folder.path(), &|| format!("round {round}"));
    }
}

#[test]
fn safetensors_with_damage() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().unwrap();
    let model = models::smallest();
    model.write_hf(folder.path());
    assert!(folder_survives(folder.path(), &|| "whole".to_owned()), "the folder to mutate is not valid");
    let path = folder.path().join("model.safetensors");
    let whole = safetensors::write(&model.tensors);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for len in (0..64).chain((64..header + 16).step_by(13)).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..len]).unwrap();
        assert!(!folder_survives(folder.path(), &|| format!("cut to {len}")), "{len} bytes are no model");
    }
    let mut random = Random(7);
    for round in 0..600 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(3) {
            match random.below(3) {
                // Digits of shapes and offsets, which stay JSON.
                0 => {
                    let digits: Vec<usize> = (8..header).filter(|&at| bytes[at].is_ascii_digit()).collect();
                    bytes[digits[random.below(digits.len())]] = b'0' + random.below(10) as u8;
                }
                _ => damage(&mut bytes, header, &mut random),
            }
        }
        fs::write(&path, &bytes).unwrap();
        folder_survives(folder.path(), &|| format!("round {round}"));
    }
}

#[test]
fn configurations_with_damage() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().unwrap();
    for model in models::all() {
        model.write_hf(folder.path());
        let path = folder.path().join("config.json");
        let whole = fs::read(&path).unwrap();
        for key in model.config.as_object().unwrap().keys() {
            for lie in [
                "0",
                "1",
                "-1",
                "2147483647",
                "4294967295",
                "1e308",
                "null",
                "[]",
                "{}",
                "\"x\"",
                "true",
                "[1e400]",
            ] {
                let mut config = model.config.clone();
                config[key] = serde_json::Value::String("@".to_owned());
                fs::write(&path, config.to_string().replace("\"@\"", lie)).unwrap();
                folder_survives(folder.path(), &|| format!("{}: {key} = {lie}", model.name));
            }
        }
        let mut random = Random(11);
        for round in 0..60 {
            let mut bytes = whole.clone();
            let len = bytes.len();
            damage(&mut bytes, len, &mut random);
            fs::write(&path, &bytes).unwrap();
            folder_survives(folder.path(), &|| format!("{}, round {round}", model.name));
        }
    }
}

#[test]
fn tokenizers_with_damage() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = tempfile::tempdir().unwrap();
    models::smallest().write_hf(folder.path());
    let path = folder.path().join("tokenizer.json");
    let whole = fs::read(&path).unwrap();
    let mut random = Random(13);
    for round in 0..300 {
        let mut bytes = whole.clone();
        let len = bytes.len();
        damage(&mut bytes, len, &mut random);
        fs::write(&path, &bytes).unwrap();
        folder_survives(folder.path(), &|| format!("round {round}"));
    }
}

/// A huge file that is nearly all hole, so that its size justifies any count: memory is bounded all the same.
#[test]
fn counts_that_only_a_huge_file_could_have() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    const SIZE: u64 = 64 << 30;
    const MOST: usize = 16 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sparse.gguf");
    let check = |path: &Path, bytes: &[u8], what: &str| {
        fs::write(path, bytes).unwrap();
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(SIZE).unwrap();
        let open = AssertUnwindSafe(|| ModelFile::open(path).is_ok());
        let (result, most) = MEMORY.watch(|| catch_unwind(open));
        assert_eq!(result.ok(), Some(false), "{what}");
        assert!(most < MOST, "{what}: {most} bytes were allocated");
    };
    let head = |tensors: u64, pairs: u64| {
        [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &pairs.to_le_bytes()].concat()
    };
    let array = |kind: u32, count: u64| {
        let key = [&1u64.to_le_bytes()[..], b"k", &9u32.to_le_bytes()].concat();
        [&head(0, 1)[..], &key, &kind.to_le_bytes(), &count.to_le_bytes()].concat()
    };
    for count in [1 << 20, 1 << 24, 1 << 30, SIZE / 24 - 100] {
        check(&path, &head(count, 0), &format!("{count} tensors"));
        check(&path, &head(0, count), &format!("{count} pairs"));
        // A string of blanks is what it says, up to the end of the largest header.
        check(
            &path,
            &[&head(0, 1)[..], &(count << 8).to_le_bytes()].concat(),
            &format!("a key of {count} << 8"),
        );
    }
    for kind in [0, 4, 8, 10] {
        check(&path, &array(kind, SIZE / 16), &format!("an array of type {kind}"));
    }
    models::smallest().write_hf(folder.path());
    let weights = folder.path().join("model.safetensors");
    for len in [100_000_001, 1 << 32, SIZE - 8, u64::MAX] {
        check(&weights, &len.to_le_bytes(), &format!("a safetensors header of {len}"));
    }
    models::smallest().write_hf(folder.path());
    let index = folder.path().join("model.safetensors.index.json");
    let files: Vec<_> = (0..2000).map(|i| format!("\"t{i}\": \"{i}.safetensors\"")).collect();
    fs::write(&index, format!("{{\"weight_map\": {{{}}}}}", files.join(", "))).unwrap();
    (0..2000).for_each(|i| fs::write(folder.path().join(format!("{i}.safetensors")), "").unwrap());
    let error = ModelFile::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("it names 2000 files, but a model has at most 512"), "{error}");
}

/// Whatever lies in place of a file is refused at once.
#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    use std::os::unix::fs::symlink;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let pipe =
        |path: &Path| assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    let error = |path: &Path| ModelFile::open(path).map(|_| ()).unwrap_err().to_string();
    let names = |path: &Path, problem: &str| {
        let found = error(path);
        assert!(found.contains(problem), "{}: {found}", path.display());
    };
    pipe(&path("pipe.gguf"));
    names(&path("pipe.gguf"), "it is a named pipe, not a regular file");
    names(Path::new("/dev/zero"), "it is a device, not a regular file");
    symlink("nowhere", path("dangling.gguf")).unwrap();
    names(&path("dangling.gguf"), "it is a link to `nowhere`, which does not exist");
    symlink("loop.gguf", path("loop.gguf")).unwrap();
    names(&path("loop.gguf"), "cannot read");
    if cfg!(target_os = "linux") {
        names(Path::new("/proc/self/status"), "the file is empty");
    }
    for name in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modules.json"]
    {
        models::smallest().write_hf(folder.path());
        let file = path(name);
        let _ = fs::remove_file(&file);
        pipe(&file);
        let opened = Model::open(folder.path(), &LoadOptions::default());
        let error = opened.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("it is a named pipe"), "{name}: {error}");
        fs::remove_file(&file).unwrap();
    }
}

/// Adapters of a damaged file or configuration: a result or an error, within bounds of memory.
#[test]
fn damaged_adapters_are_refused() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (tiny, folder) = (models::smallest(), tempfile::tempdir().unwrap());
    let (base, peft) = (folder.path().join("base.gguf"), folder.path());
    fs::write(&base, tiny.gguf().write()).unwrap();
    let model = Model::open(&base, &LoadOptions::default()).unwrap();
    let changes = adapters::changes(&tiny);
    adapters::write_peft(peft, &adapters::peft_config(), &changes);
    fs::write(peft.join("adapter.gguf"), adapters::gguf(&tiny, &changes).write()).unwrap();
    let tokens = r#"{"added_tokens_decoder": {"0": {"content": "<unk>"}}, "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}"#;
    fs::write(peft.join("tokenizer_config.json"), tokens).unwrap();
    for (file, header) in [
        ("adapter_model.safetensors", 600),
        ("adapter_config.json", 200),
        ("tokenizer_config.json", 200),
        ("adapter.gguf", 500),
    ] {
        let path = peft.join(file);
        let whole = fs::read(&path).unwrap();
        let opened = if file == "adapter.gguf" { path.as_path() } else { peft };
        let survives = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            let used = || {
                let file = AdapterFile::open(opened)?;
                file.fit(&model)?;
                file.dialect(&model, None)
            };
            let open = AssertUnwindSafe(|| used().is_ok());
            let (result, most) = MEMORY.watch(|| catch_unwind(open));
            assert!(most < allowance(bytes.len()), "{file}: {most} bytes were allocated");
            result.unwrap_or_else(|_| panic!("{file}: panicked"))
        };
        assert!(survives(&whole), "{file}");
        let mut random = Random(3);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            let at = random.below(header.min(bytes.len()));
            match random.below(4) {
                0 => bytes.truncate(at),
                1 => bytes[at] = random.next() as u8,
                2 => bytes[at] ^= 1 << random.below(8),
                _ => {
                    let hostile = HOSTILE[random.below(HOSTILE.len())].to_le_bytes();
                    let end = bytes.len().min(at + 8);
                    bytes[at..end].copy_from_slice(&hostile[..end - at]);
                }
            }
            survives(&bytes);
        }
        fs::write(&path, &whole).unwrap();
    }
}
