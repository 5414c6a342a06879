//! The bits of each instruction set's kernels, as a hash.

use paguro_backend::{KvDtype, QkNormKind, WeightFormat};
use paguro_backend_conformance::{Biases, DriveOptions, Driver, ExpertsShape, ModelShape, Rng};
use paguro_backend_cpu::{Cpu, CpuOptions, Isa, NUMERICS};

/// Version of the bits, and their hash by instruction set, on Linux: other systems round functions such as `sin` in another way,
/// and none of their machines have been recorded.
const GOLDEN: (u32, [(&str, u64); 3]) = (
    1,
    [
        ("scalar", 0x6896_ffa4_c0e7_230f),
        ("avx2", 0x6896_ffa4_c0e7_230f),
        ("avx512vnni", 0x6896_ffa4_c0e7_230f),
    ],
);

/// Models that together use the kernels of all operations, and of each kind of weights and pages.
fn models() -> Vec<(ModelShape, KvDtype)> {
    let of = |format| ModelShape {
        windows: vec![Some(21), None],
        biases: Biases::Qkv,
        qk_norm: Some(QkNormKind::Head),
        post_norms: true,
        ..ModelShape::of_format(format)
    };
    let formats = WeightFormat::ALL.into_iter().map(|format| (of(format), KvDtype::F16));
    let pages = [KvDtype::Q8, KvDtype::Q4].map(|kv_dtype| (of(WeightFormat::F32), kv_dtype));
    let experts = ModelShape { experts: Some(ExpertsShape::default()), ..of(WeightFormat::Q8_0) };
    let mixers = ["dds", "lcl", "hca"]
        .map(|mixers| (ModelShape { mixers, windows: vec![None; 3], ..ModelShape::default() }, KvDtype::F16));
    formats.chain(pages).chain([(experts, KvDtype::F16)]).chain(mixers).collect()
}

/// Hash of the logits of a prompt and a few more tokens (FNV-1a).
fn hash(isa: Isa) -> u64 {
    let backend = Cpu::new(CpuOptions { isa: Some(isa), threads: Some(2), ..CpuOptions::default() });
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for (shape, kv_dtype) in models() {
        let options = DriveOptions { kv_dtype, ..DriveOptions::default() };
        let mut driver = Driver::new(&backend, &shape.build(1), &options).expect("a model that loads");
        let sequence = driver.start(&Rng::new(1).tokens(40, shape.vocab));
        [37, 1, 2].into_iter().try_for_each(|rows| driver.step(&[(sequence, rows)])).expect("valid steps");
        let logits = driver.logits(sequence).1.iter().flatten();
        for byte in logits.flat_map(|logit| logit.to_bits().to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

/// Pages on disk are read again by later versions with equal [`NUMERICS`], so kernels with other bits need another one.
#[test]
fn other_bits_have_another_version() {
    let (version, hashes) = GOLDEN;
    assert_eq!(version, NUMERICS, "record the hashes of this version in GOLDEN");
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        println!("no hashes are recorded for this system");
        return;
    }
    let other: Vec<_> = Isa::supported()
        .into_iter()
        .map(|isa| (isa.name(), hash(isa)))
        .filter(|found| !hashes.contains(found))
        .map(|(name, found)| format!("(\"{name}\", {found:#x})"))
        .collect();
    assert!(
        other.is_empty(),
        "kernels compute other bits: if that is wanted, increase `NUMERICS`, and record in GOLDEN: {}",
        other.join(", ")
    );
}
