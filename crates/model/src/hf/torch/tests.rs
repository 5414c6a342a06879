use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

/// Files that PyTorch wrote (`tests/it/torch/make.py`).
macro_rules! saved {
    ($name:literal) => {
        include_bytes!(concat!("../../../tests/it/torch/", $name, ".pt")).as_slice()
    };
}

fn open(bytes: &[u8]) -> Result<Vec<Tensor>, String> {
    let source: Arc<dyn ByteSource> = Arc::new(bytes.to_vec());
    read(&source, 0)
}

/// A tensor's name, type, shape and values.
fn show(tensor: &Tensor) -> String {
    let bytes = tensor.bytes.read().unwrap();
    let values = match tensor.dtype.weight_format() {
        Some(format) => {
            let mut values = vec![0.0; bytes.len() / format.block_bytes() * format.block_len()];
            format.dequantize(&bytes, &mut values);
            format!("{values:?}")
        }
        None => format!("{} bytes", bytes.len()),
    };
    format!("{} {} {:?} {values}\n", tensor.name, tensor.dtype, tensor.shape)
}

#[test]
fn tensors_are_those_that_pytorch_saved() {
    let check = |bytes: &[u8], expected: Expect| {
        let tensors = open(bytes).unwrap();
        expected.assert_eq(&tensors.iter().map(show).collect::<String>());
    };
    check(
        saved!("linear-f32"),
        expect![[r#"
        weight F32 [3, 4] [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
        bias F32 [3] [-0.5, 0.5, 1.5]
    "#]],
    );
    check(
        saved!("linear-f16"),
        expect![[r#"
        weight F16 [3, 4] [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
        bias F16 [3] [-0.5, 0.5, 1.5]
    "#]],
    );
    check(
        saved!("linear-bf16"),
        expect![[r#"
        weight BF16 [3, 4] [-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
        bias BF16 [3] [-0.5, 0.5, 1.5]
    "#]],
    );
    check(
        saved!("linear-f64"),
        expect![[r#"
        weight F64 [3, 4] 96 bytes
        bias F64 [3] 24 bytes
    "#]],
    );
    check(
        saved!("plain"),
        expect![[r#"
        first F32 [2, 3] [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        second F32 [1] [4.0]
        scalar F32 [] [7.0]
        none F32 [0, 5] []
        positions I64 [4] 32 bytes
    "#]],
    );
}

#[test]
fn everything_else_is_refused_by_name() {
    let check = |bytes: &[u8], expected: Expect| expected.assert_eq(&open(bytes).unwrap_err());
    check(
        saved!("transposed"),
        expect![
            "data.pkl, byte 166: a tensor of the shape [3, 2] has the strides [1, 3]; save it in one piece: tensor.contiguous()"
        ],
    );
    check(saved!("nested"), expect!["data.pkl: `state_dict` is not a tensor"]);
    check(saved!("number"), expect!["data.pkl: `epoch` is not a tensor"]);
    check(
        saved!("module"),
        expect![
            "data.pkl, byte 2: it uses `torch.nn.modules.linear.Linear`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(saved!("tensor"), expect!["data.pkl is not a dictionary of tensors"]);
    check(
        saved!("protocol4"),
        expect!["data.pkl, byte 0: version 4 of the format is not supported (supported: 2)"],
    );
    check(
        saved!("legacy"),
        expect![
            "this file has the format of PyTorch before 1.6; write it again with a current version: torch.save(torch.load(path), path)"
        ],
    );
    check(
        saved!("complex"),
        expect![
            "data.pkl, byte 69: it uses `torch.ComplexFloatStorage`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(
        saved!("parameter"),
        expect![
            "data.pkl, byte 46: it uses `torch._utils._rebuild_parameter`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(b"", expect!["a file of 0 bytes that is no zip archive of `torch.save`"]);
    check(
        b"version https://git-lfs.github.com/spec/v1\n",
        expect!["this is a Git LFS pointer; run `git lfs pull` to get the file itself"],
    );
    check(
        &saved!("plain")[..500],
        expect![
            "truncated or corrupt zip archive: it does not end with a directory; is the download complete?"
        ],
    );
    let whole = saved!("linear-f32");
    let changed = |from: &[u8], to: &[u8]| {
        let mut bytes = whole.to_vec();
        let places: Vec<_> =
            (0..bytes.len() - from.len()).filter(|&at| bytes[at..].starts_with(from)).collect();
        assert!(!places.is_empty(), "{:?} is not in the file", String::from_utf8_lossy(from));
        places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
        bytes
    };
    check(
        &changed(b"FloatStorage", b"QuintStorage"),
        expect![
            "data.pkl, byte 98: it uses `torch.QuintStorage`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(
        &changed(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"),
        expect![
            "data.pkl, byte 47: it uses `torch._utils._rebuild_tensor_v3`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(
        &changed(b"OrderedDict", b"defaultdict"),
        expect![
            "data.pkl, byte 2: it uses `collections.defaultdict`, which is not part of a dictionary of plain tensors"
        ],
    );
    check(
        &changed(b"little", b"big\0\0\0"),
        expect![[r#"its byte order is "big\0\0\0", which is not supported (supported: little)"#]],
    );
    check(
        &changed(b"PK\x01\x02", b"PK\x01\x03"),
        expect![
            "truncated or corrupt zip archive: its directory has something other than entries; is the download complete?"
        ],
    );
    check(
        &changed(b"PK\x03\x04", b"PK\x03\x05"),
        expect![
            "truncated or corrupt zip archive: entry `linear-f32/byteorder` is not where the directory says; is the download complete?"
        ],
    );
    check(
        &changed(b"data.pkl", b"data.pkx"),
        expect!["it has 0 entries `*/data.pkl`, but a file of `torch.save` has one"],
    );
    check(
        &changed(b"cpuq", b"cpuR"),
        expect!["data.pkl, byte 136: arguments are not those of a tensor or a dictionary"],
    );
}

/// The folder and the data of a file whose pickle is `pickle`, with no other entries.
fn archive(pickle: &[u8]) -> Vec<u8> {
    let name = b"a/data.pkl";
    let len = (pickle.len() as u32).to_le_bytes();
    let mut file =
        [b"PK\x03\x04".as_slice(), &[0; 14], &len, &len, &[name.len() as u8, 0, 0, 0], name, pickle].concat();
    let directory = file.len() as u32;
    file.extend(
        [b"PK\x01\x02".as_slice(), &[0; 16], &len, &len, &[name.len() as u8, 0], &[0; 12], &[0; 4], name]
            .concat(),
    );
    let len = (file.len() as u32 - directory).to_le_bytes();
    file.extend(
        [b"PK\x05\x06".as_slice(), &[0; 4], &[1, 0, 1, 0], &len, &directory.to_le_bytes(), &[0, 0]].concat(),
    );
    file
}

#[test]
fn hostile_pickles_end_quickly() {
    let check = |pickle: &[u8], expected: Expect| {
        expected.assert_eq(
            &open(&archive(pickle))
                .map(|tensors| format!("{} tensors", tensors.len()))
                .unwrap_or_else(|error| error),
        );
    };
    check(b"\x80\x02}.", expect!["0 tensors"]);
    check(b"\x80\x02}.}", expect!["data.pkl: 1 bytes follow its end"]);
    check(b"\x80\x02", expect!["data.pkl: it is truncated"]);
    check(
        b"cos\nsystem\nX\x02\0\0\0ls\x85R.",
        expect!["data.pkl, byte 0: it uses `os.system`, which is not part of a dictionary of plain tensors"],
    );
    check(b"N\x85\x85\x85.", expect!["data.pkl is not a dictionary of tensors"]);
    check(b"(N1.", expect!["data.pkl, byte 2: opcode 0x31 is not part of a dictionary of tensors"]);
    check(b"}(NN0u.", expect!["data.pkl, byte 4: opcode 0x30 is not part of a dictionary of tensors"]);
    check(b"}(Nu.", expect!["data.pkl, byte 3: a dictionary has a key without a value"]);
    check(b"}(s.", expect!["data.pkl, byte 2: its stack is empty"]);
    check(b"NX\xff\xff\xff\xff.", expect!["data.pkl, byte 1: it is truncated"]);
    check(b"h\x07.", expect!["data.pkl, byte 0: it refers to a value that it has not made"]);
    check(b"\x8a\xff.", expect!["data.pkl, byte 0: it is truncated"]);
    check(b"}NQ.", expect!["data.pkl, byte 2: arguments are not those of a tensor or a dictionary"]);
    check(b"}X\x01\0\0\0a}s.", expect!["data.pkl: `a` is not a tensor"]);
    // Half a million nested tuples, and a call with many arguments, which could be repeated.
    let mut nested = vec![b'N'; 1];
    nested.resize(1 << 19, 0x85);
    nested.push(b'.');
    check(&nested, expect!["data.pkl is not a dictionary of tensors"]);
    let mut wide = vec![b'('];
    wide.resize(1 << 18, b'N');
    wide.extend(b"tq\0ccollections\nOrderedDict\nh\0R.");
    check(&wide, expect!["data.pkl, byte 262174: arguments are not those of a tensor or a dictionary"]);
    check(
        &vec![b'N'; (1 << 20) + 1],
        expect!["entry `a/data.pkl` has 1048577 bytes, more than the maximum of 1048576"],
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damage to a file gives tensors inside of it, or an error.
    #[test]
    fn damaged_files_have_no_tensors_outside(
        which in 0..3_usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = [saved!("linear-f32"), saved!("linear-f16"), saved!("plain")][which].to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        for tensor in open(&bytes).unwrap_or_default() {
            prop_assert!(tensor.bytes.read().is_ok(), "{}", tensor.name);
            prop_assert!(tensor.offset + tensor.bytes.len() as u64 <= bytes.len() as u64);
        }
    }
}
