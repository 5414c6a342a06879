//! The GGUF reader: its results, and its errors for invalid files.

use std::{fs, path::Path, sync::Arc};

use crate::tiny::{
    gguf::{RawTensor, Writer},
    models,
};
use expect_test::{Expect, expect};
use paguro_model::{
    LoadOptions, Model, ModelFile,
    chat::ChatInput,
    gguf::{Array, Gguf, Value},
};

fn read(bytes: Vec<u8>) -> Result<Gguf, String> {
    Gguf::from_bytes(Arc::new(bytes)).map_err(|error| error.to_string())
}

fn tensor(name: &str, dims: &[u64], kind: u32, bytes: usize) -> RawTensor {
    RawTensor { name: name.to_owned(), dims: dims.to_vec(), kind, bytes: vec![7; bytes] }
}

fn small() -> Writer {
    let metadata = vec![
        ("general.architecture".to_owned(), Value::String("llama".to_owned())),
        ("llama.block_count".to_owned(), Value::U32(1)),
    ];
    let mut writer = Writer::new(metadata, &[]);
    writer.tensors = vec![tensor("a", &[32, 2], 0, 256), tensor("b", &[32], 8, 34)];
    writer
}

#[test]
fn all_types_of_values_are_read() {
    let values = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60000),
        Value::I16(-30000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F32(0.1),
        Value::F64(0.1),
        Value::Bool(true),
        Value::String("tartaruga ▁".to_owned()),
        Value::Bytes(vec![0xff, 0x41]),
        Value::Array(Array::U8(vec![1, 2])),
        Value::Array(Array::I8(vec![-1])),
        Value::Array(Array::U16(vec![])),
        Value::Array(Array::I16(vec![-2])),
        Value::Array(Array::U32(vec![3])),
        Value::Array(Array::I32(vec![-3])),
        Value::Array(Array::U64(vec![4])),
        Value::Array(Array::I64(vec![-4])),
        Value::Array(Array::F32(vec![0.5])),
        Value::Array(Array::F64(vec![0.25])),
        Value::Array(Array::Bool(vec![true, false])),
        Value::Array(Array::Strings(vec!["a".to_owned(), String::new()])),
        Value::Array(Array::ByteStrings(vec![vec![0xc3], b"b".to_vec()])),
    ];
    let metadata: Vec<_> = values.iter().enumerate().map(|(i, v)| (format!("key.{i}"), v.clone())).collect();
    for version in [2, 3] {
        let file = read(Writer { version, ..Writer::new(metadata.clone(), &[]) }.write()).unwrap();
        assert_eq!(file.version, version);
        for (key, value) in &metadata {
            assert_eq!(file.metadata.get(key), Some(value));
        }
    }
}

#[test]
fn numbers_convert_only_where_nothing_is_lost() {
    let metadata = [
        ("u64", Value::U64(7)),
        ("big", Value::U64(1 << 40)),
        ("negative", Value::I32(-1)),
        ("f", Value::F64(0.5)),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).to_vec();
    let file = read(Writer::new(metadata, &[]).write()).unwrap();
    let of = |key| (file.metadata.u32(key), file.metadata.f32(key));
    assert_eq!(
        [of("u64"), of("big"), of("negative"), of("f"), of("none")],
        [(Some(7), Some(7.0)), (None, None), (None, None), (None, Some(0.5)), (None, None),]
    );
    let error = file.metadata.require_u32("f").unwrap_err().to_string();
    assert_eq!(error, "metadata `f` is f64 0.5, expected an unsigned 32-bit integer");
    assert_eq!(file.metadata.require_str("none").unwrap_err().to_string(), "the metadata has no `none`");
}

#[test]
fn tensors_lie_where_the_file_says() {
    let file = read(small().write()).unwrap();
    let [a, b] = file.tensors.as_slice() else { panic!("{:?}", file.tensors) };
    assert_eq!((a.shape.as_slice(), a.dtype.to_string().as_str()), ([2, 32].as_slice(), "F32"));
    assert_eq!((b.shape.as_slice(), b.dtype.to_string().as_str()), ([32].as_slice(), "Q8_0"));
    assert_eq!((&b.bytes.read().unwrap()[..], b.offset - a.offset), ([7; 34].as_slice(), 256));
}

#[test]
fn types_that_cannot_be_computed_with_are_listed() {
    let mut writer = small();
    writer.tensors = vec![tensor("a", &[256], 16, 66), tensor("b", &[4], 99, 10), tensor("c", &[32], 33, 10)];
    let file = read(writer.write()).unwrap();
    let list: Vec<_> =
        file.tensors.iter().map(|t| format!("{} {} {}", t.name, t.dtype, t.bytes.len())).collect();
    assert_eq!(list, ["a IQ2_XXS 66", "b 99 (unknown) 0", "c Q4_0_8_8 (withdrawn) 0"]);
}

#[test]
fn an_empty_tensor_has_no_elements_however_large_its_other_dimensions_are() {
    let mut writer = small();
    writer.tensors = vec![tensor("a", &[0, 1 << 40, 1 << 40], 0, 0)];
    assert_eq!(read(writer.write()).unwrap().tensors[0].elements(), 0);
}

/// Checks the result of reading a small file after a change.
#[track_caller]
fn check(change: impl FnOnce(&mut Writer), expected: Expect) {
    let mut writer = small();
    change(&mut writer);
    let error = read(writer.write()).map(|_| ()).unwrap_err();
    expected.assert_eq(&error);
}

/// Checks the result of reading a small file after a change of its bytes.
#[track_caller]
fn check_bytes(change: impl FnOnce(&mut Vec<u8>), expected: Expect) {
    let mut bytes = small().write();
    change(&mut bytes);
    let error = read(bytes).map(|_| ()).unwrap_err();
    expected.assert_eq(&error);
}

#[test]
fn other_files_are_named() {
    check_bytes(
        |bytes| *bytes = b"PK\x03\x04something".to_vec(),
        expect![[
            r#"not a GGUF file: it begins with "PK\x03\x04some" (a zip archive, perhaps a PyTorch checkpoint; use safetensors or GGUF)"#
        ]],
    );
    check_bytes(
        |bytes| *bytes = b"version https://git-lfs.github.com/spec/v1".to_vec(),
        expect![[
            r#"not a GGUF file: it begins with "version " (a Git LFS pointer; run `git lfs pull` to get the file itself)"#
        ]],
    );
    check_bytes(
        |bytes| *bytes = b"<!doctype html>".to_vec(),
        expect![[r#"not a GGUF file: it begins with "<!doctyp" (a web page; the download went wrong)"#]],
    );
    check_bytes(
        |bytes| *bytes = b"tjgg\x03\0\0\0".to_vec(),
        expect![[
            r#"not a GGUF file: it begins with "tjgg\x03\x00\x00\x00" (a GGML file from before GGUF; convert the model again)"#
        ]],
    );
    check_bytes(
        |bytes| *bytes = 100u64.to_le_bytes().to_vec(),
        expect![[
            r#"not a GGUF file: it begins with "d\x00\x00\x00\x00\x00\x00\x00" (perhaps safetensors; open the folder that it lies in)"#
        ]],
    );
    check_bytes(|bytes| *bytes = b"GG".to_vec(), expect![[r#"not a GGUF file: it begins with "GG""#]]);
    check_bytes(Vec::clear, expect!["not a GGUF file: it begins with nothing (the file is empty)"]);
    check(
        |writer| writer.version = 1,
        expect![
            "GGUF version 1 is not supported (supported: 2 and 3); convert the model again with a current tool"
        ],
    );
    check(
        |writer| writer.version = 4,
        expect![
            "GGUF version 4 is not supported (supported: 2 and 3); convert the model again with a current tool"
        ],
    );
    check(
        |writer| writer.version = 3u32.swap_bytes(),
        expect!["big-endian GGUF files are not supported; convert the model again without `--bigendian`"],
    );
}

#[test]
fn truncated_files_say_how_much_is_missing() {
    check_bytes(
        |bytes| bytes.truncate(10),
        expect![
            "truncated or corrupt GGUF file: the list of tensors at byte 8 needs 8 bytes, but only 2 are left; is the download complete?"
        ],
    );
    check_bytes(
        |bytes| bytes.truncate(60),
        expect![
            "truncated or corrupt GGUF file: the list of tensors at byte 16 needs 48 bytes, but only 44 are left; is the download complete?"
        ],
    );
    check_bytes(
        |bytes| bytes.truncate(140),
        expect![
            "truncated or corrupt GGUF file: the list of tensors at byte 102 needs 48 bytes, but only 38 are left; is the download complete?"
        ],
    );
    check_bytes(
        |bytes| bytes.truncate(bytes.len() - 1),
        expect![
            "truncated GGUF file: it has 481 bytes, but tensor `b` ends at byte 482; is the download complete?"
        ],
    );
}

#[test]
fn lengths_that_lie_are_refused() {
    let huge =
        |at: usize| move |bytes: &mut Vec<u8>| bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    check_bytes(
        huge(8),
        expect![
            "truncated or corrupt GGUF file: the list of tensors at byte 16 needs 18446744073709551615 bytes, but only 466 are left; is the download complete?"
        ],
    ); // tensors
    check_bytes(
        huge(16),
        expect![
            "truncated or corrupt GGUF file: the list of metadata at byte 24 needs 18446744073709551615 bytes, but only 458 are left; is the download complete?"
        ],
    ); // key/values
    check_bytes(
        huge(24),
        expect![
            "truncated or corrupt GGUF file: a metadata key at byte 32 needs 18446744073709551615 bytes, but only 450 are left; is the download complete?"
        ],
    ); // the first key
    let million = |bytes: &mut Vec<u8>| bytes[16..24].copy_from_slice(&1_000_000u64.to_le_bytes());
    check_bytes(
        million,
        expect![
            "truncated or corrupt GGUF file: the list of metadata at byte 24 needs 13000000 bytes, but only 458 are left; is the download complete?"
        ],
    );
    // An array of four thousand million strings, and one of numbers.
    let array = |kind: u32| {
        move |bytes: &mut Vec<u8>| {
            let mut lie =
                Writer::new(vec![("k".to_owned(), Value::Array(Array::U8(vec![0; 64])))], &[]).write();
            lie[37..41].copy_from_slice(&kind.to_le_bytes());
            lie[41..49].copy_from_slice(&4_000_000_000u64.to_le_bytes());
            *bytes = lie;
        }
    };
    check_bytes(
        array(8),
        expect![
            "truncated or corrupt GGUF file: a metadata array at byte 49 needs 32000000000 bytes, but only 64 are left; is the download complete?"
        ],
    );
    check_bytes(
        array(6),
        expect![
            "truncated or corrupt GGUF file: a metadata array at byte 49 needs 16000000000 bytes, but only 64 are left; is the download complete?"
        ],
    );
    check_bytes(array(9), expect!["metadata `k` has value type 9, which is not supported"]); // an array of arrays
    check_bytes(array(77), expect!["metadata `k` has value type 77, which is not supported"]);
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    check(
        |writer| writer.tensors[0].dims = vec![1 << 40, 1 << 40],
        expect!["tensor `a` is corrupt: its dimensions overflow"],
    );
    check(
        |writer| writer.tensors[0].dims = vec![1; 5],
        expect!["tensor `a` is corrupt: it has 5 dimensions, at most 4 are possible"],
    );
    check(
        |writer| writer.tensors[0].dims = vec![u64::MAX],
        expect!["tensor `a` is corrupt: its dimensions overflow"],
    );
    check(
        |writer| writer.tensors[1].dims = vec![33],
        expect!["tensor `b` is corrupt: rows of 33 elements are no whole blocks of Q8_0 (32)"],
    );
    check(|writer| writer.tensors[1].name = "a".to_owned(), expect!["tensor `a` occurs twice"]);
    check(
        |writer| writer.tensors[1].dims = vec![3200],
        expect![
            "truncated GGUF file: it has 482 bytes, but tensor `b` ends at byte 3848; is the download complete?"
        ],
    );
    // The offset of the second tensor, which is 256.
    let offset = |offset: u64| {
        move |bytes: &mut Vec<u8>| {
            let at = bytes.windows(8).rposition(|window| window == 256u64.to_le_bytes()).unwrap();
            bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        }
    };
    check_bytes(offset(0), expect!["tensor `a` is corrupt: it overlaps tensor `b`"]);
    check_bytes(
        offset(1),
        expect!["tensor `b` is corrupt: its offset 1 is not a multiple of the alignment 32"],
    );
    check_bytes(
        offset(u64::MAX - 31),
        expect!["tensor `b` is corrupt: its offset 18446744073709551584 overflows"],
    );
    check_bytes(
        offset(1 << 40),
        expect![
            "truncated GGUF file: it has 482 bytes, but tensor `b` ends at byte 1099511628002; is the download complete?"
        ],
    );
}

#[test]
fn metadata_that_contradicts_itself_is_refused() {
    check(
        |writer| writer.metadata.push(writer.metadata[0].clone()),
        expect!["metadata `general.architecture` occurs twice"],
    );
    let alignment =
        |value: Value| |writer: &mut Writer| writer.metadata.push(("general.alignment".to_owned(), value));
    check(alignment(Value::U32(0)), expect!["`general.alignment` is 0, but has to be a power of two"]);
    check(alignment(Value::U32(48)), expect!["`general.alignment` is 48, but has to be a power of two"]);
    check(
        alignment(Value::String("32".to_owned())),
        expect!["metadata `general.alignment` is string 32, expected an unsigned 32-bit integer"],
    );
    check(
        alignment(Value::U32(1 << 31)),
        expect!["tensor `b` is corrupt: its offset 256 is not a multiple of the alignment 2147483648"],
    );
    check_bytes(|bytes| bytes[32] = 0xff, expect!["a metadata key at byte 24 is not UTF-8"]); // inside the first key
}

#[test]
fn the_alignment_is_the_file_s_own() {
    let mut writer = small();
    writer.metadata.push(("general.alignment".to_owned(), Value::U32(256)));
    writer.alignment = 256;
    writer.tensors.swap(0, 1);
    let file = read(writer.write()).unwrap();
    assert_eq!(file.tensors[1].offset - file.tensors[0].offset, 256);
    assert!(file.tensors.iter().all(|tensor| tensor.bytes.read().unwrap().iter().all(|&byte| byte == 7)));
}

/// Writes a tiny model in three files.
fn write_split(folder: &Path) {
    let whole = models::llama().gguf();
    let mut at = 0;
    for (i, count) in [1, 0, whole.tensors.len() - 1].into_iter().enumerate() {
        let mut part =
            Writer { tensors: whole.tensors[at..at + count].to_vec(), metadata: vec![], ..whole.clone() };
        at += count;
        if i == 0 {
            part.metadata = whole.metadata.clone();
        }
        part.metadata.push(("split.no".to_owned(), Value::U16(i as u16)));
        part.metadata.push(("split.count".to_owned(), Value::U16(3)));
        part.metadata.push(("split.tensors.count".to_owned(), Value::I32(whole.tensors.len() as i32)));
        fs::write(folder.join(split_name(i)), part.write()).unwrap();
    }
}

fn split_name(i: usize) -> String {
    format!("tiny-{:05}-of-00003.gguf", i + 1)
}

#[test]
fn a_split_model_opens_from_any_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    write_split(folder.path());
    for i in 0..3 {
        let file = ModelFile::open(&folder.path().join(split_name(i))).unwrap();
        assert_eq!(file.files(), (0..3).map(|i| folder.path().join(split_name(i))).collect::<Vec<_>>());
        assert_eq!(file.tensors().len(), models::llama().tensors.len());
        let parts: Vec<usize> = file.tensors().iter().map(|tensor| tensor.file).collect();
        assert_eq!(parts, [vec![0], vec![2; parts.len() - 1]].concat());
        let model = file.load(&LoadOptions::default()).unwrap();
        let whole = models::llama().gguf().write();
        let whole =
            ModelFile::from_bytes("whole", Arc::new(whole)).unwrap().load(&LoadOptions::default()).unwrap();
        for (a, b) in model.weights.matrices.iter().zip(&whole.weights.matrices) {
            assert_eq!((&a.name, a.bytes.read().unwrap()), (&b.name, b.bytes.read().unwrap()));
        }
    }
}

#[test]
fn split_models_that_are_not_whole_are_refused() {
    let message = |change: &dyn Fn(&Path), open: usize| {
        let folder = tempfile::tempdir().unwrap();
        write_split(folder.path());
        change(folder.path());
        let error = Model::open(&folder.path().join(split_name(open)), &LoadOptions::default()).unwrap_err();
        error.to_string().replace(&folder.path().display().to_string(), "")
    };
    let remove = |folder: &Path| fs::remove_file(folder.join(split_name(1))).unwrap();
    expect!["the model is split into 3 files, and `/tiny-00002-of-00003.gguf` is missing"]
        .assert_eq(&message(&remove, 2));
    let copy = |folder: &Path| {
        fs::copy(folder.join(split_name(2)), folder.join(split_name(1))).unwrap();
    };
    expect!["`/tiny-00002-of-00003.gguf`: the files of a split model do not belong together: it says that it is number 3 of 3"].assert_eq(&message(&copy, 0));
    expect!["`/tiny-00002-of-00003.gguf` is one of 3 files of a split model, so its name has to end in `-00001-of-00003.gguf` (with its own number)"].assert_eq(&message(&copy, 1));
    let truncate = |folder: &Path| {
        let path = folder.join(split_name(2));
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    expect!["`/tiny-00003-of-00003.gguf`: truncated GGUF file: it has 161152 bytes, but tensor `output.weight` ends at byte 322304; is the download complete?"].assert_eq(&message(&truncate, 0));

    let folder = tempfile::tempdir().unwrap();
    write_split(folder.path());
    let renamed = folder.path().join("other.gguf");
    fs::rename(folder.path().join(split_name(0)), &renamed).unwrap();
    let error = Model::open(&renamed, &LoadOptions::default()).unwrap_err().to_string();
    expect!["`/other.gguf` is one of 3 files of a split model, so its name has to end in `-00001-of-00003.gguf` (with its own number)"].assert_eq(&error.replace(&folder.path().display().to_string(), ""));
    let bytes = fs::read(&renamed).unwrap();
    expect!["this is one of 3 files of a split model; open it by path, beside the others"]
        .assert_eq(&read(bytes).map(|_| ()).unwrap_err());
}

#[test]
fn chat_templates_and_their_tokens_are_found() {
    let mut file = models::llama().gguf();
    let key = |name: &str| format!("tokenizer.chat_template{name}");
    file.metadata
        .push((key(""), Value::String("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}".to_owned())));
    file.metadata.push((key(".tool_use"), Value::String("tools".to_owned())));
    file.metadata.push(("general.sampling.temp".to_owned(), Value::F32(0.5)));
    file.metadata.push(("general.sampling.top_k".to_owned(), Value::I32(40)));
    let file = ModelFile::from_bytes("tiny", Arc::new(file.write())).unwrap();
    let model = file.load(&LoadOptions::default()).unwrap();
    let text = model.chat_template.unwrap().render(&ChatInput::from_turns([("user", "ciao")])).unwrap();
    assert_eq!(text, "<s>ciao</s>");
    assert_eq!(model.tool_template.unwrap().source(), "tools");
    let recommended = &model.defaults.recommended;
    assert_eq!((recommended.temperature, recommended.top_k), (Some(0.5), Some(40)));
}
